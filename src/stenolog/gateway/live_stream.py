"""Live stream of a session, `GET /v1/sessions/{key}/events`, which clients can resume.

Each message is sent once, in the order of the log, whichever process wrote the message. The id of
an event contains the uid of the session and the seq of the message. So a client that reconnects, to
this gateway or another gateway, misses nothing and gets nothing twice.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Struct, UnsetType
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.threads import cancel_and_wait
from stenolog.errors import SessionDeleted, UsageError
from stenolog.gateway.api_types import AgentQuery, encode_json, message_item, sse_data
from stenolog.gateway.limits import SlotResponse
from stenolog.gateway.openapi import Endpoint
from stenolog.gateway.requests import parse_query
from stenolog.gateway.shared_state import Gateway
from stenolog.records import Message
from stenolog.stores.base import Store, find_info
from stenolog.stores.following import CHECK_SECONDS, ChangeKind, SessionChange, changes_between

# --- streaming ------------------------------------------------------------------------------------
# Responses with server-sent events have keep-alive comments and a time limit for slow clients.


_PING_SECONDS: Final = 10.0
"""Seconds without an event after which a stream sends a comment."""
_UNREAD_SECONDS: Final = 30.0
"""Seconds after which a client that does not read is disconnected."""


class StreamEvent(ServerSentEvent):
    """Server-sent event with the same line ends as the events of OpenAI's servers.

    The format allows other line ends, but some clients do not recognise other line ends.
    """

    DEFAULT_SEPARATOR = "\n"


def event_stream(
    events: AsyncIterable[StreamEvent], *, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response that sends each event as soon as it arrives."""
    return EventSourceResponse(
        events,
        headers=headers,
        ping=_PING_SECONDS,
        send_timeout=_UNREAD_SECONDS,
        ping_message_factory=lambda: StreamEvent(comment="keep-alive"),
    )


# --- events ---------------------------------------------------------------------------------------


_ID_FORM: Final = re.compile(r"(?:([A-Za-z0-9_-]+):)?([0-9]{1,15})")
_RECONNECT_MILLISECONDS: Final = 500
"""Milliseconds after which a client should reconnect if the stream breaks."""


class EventsQuery(AgentQuery, frozen=True, kw_only=True):
    """Options of a stream."""

    changes: bool = False
    """Also send `event: change` for summaries, undo, titles and so on."""
    after: Annotated[str, Meta(max_length=200, pattern=f"^{_ID_FORM.pattern}$")] | UnsetType = UNSET
    """Only messages after this seq. The header Last-Event-ID overrides this parameter."""


class ChangeEvent(Struct, frozen=True, kw_only=True):
    """A change of a session other than a new message."""

    kind: ChangeKind
    floor: int
    visible: int
    last_seq: int
    undoable: int
    summary: str


class _Position(Struct, frozen=True):
    """The last message that a client has received. `uid` is empty if the client sent no uid."""

    uid: str
    seq: int


async def events(request: Request) -> Response:
    """Stream the messages and changes of a session."""
    call = parse_query(request, EventsQuery)
    gateway, query = call.gateway, call.query
    after = request.headers.get("last-event-id") or (query.after if query.after else "0")
    position = _parse_position(after)
    session_key = await gateway.loop.run(call.agent.resolve_key, call.key)
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    events = _stream(gateway, call.agent.store, session_key, position, changes=query.changes)
    return SlotResponse(event_stream(events), gateway.streams.admit())


def _parse_position(id: str) -> _Position:
    match = _ID_FORM.fullmatch(id.strip())
    if match is None:
        raise UsageError(f"invalid Last-Event-ID {id!r}; send the id of the last received event")
    return _Position(match[1] or "", int(match[2]))


async def _stream(
    gateway: Gateway, store: Store, key: str, position: _Position, *, changes: bool
) -> AsyncGenerator[StreamEvent, None]:
    yield StreamEvent(comment="stenolog", retry=_RECONNECT_MILLISECONDS)
    while not gateway.closing.is_set():
        info = await gateway.loop.run(find_info, store, key)
        uid = "" if info is None else info.uid  # `uid` is empty if the session does not exist yet
        if position.uid and position.uid != uid:
            # The session was deleted while the client was disconnected.
            # If the key exists now, the key belongs to another session.
            yield _deleted_event(position.uid)
            position = _Position(uid, 0)
        try:
            stream = _messages_and_changes(
                gateway, store, key, position.seq, uid or None, changes=changes
            )
            async with aclosing(stream) as arrivals:
                async for news in arrivals:
                    if not uid:
                        break  # The session exists now. Its uid must be read before its messages.
                    if isinstance(news, SessionChange):
                        yield _change_event(news)
                        continue
                    yield _message_event(uid, news)
                    position = _Position(uid, news.seq)
                else:
                    return
        except SessionDeleted:
            yield _deleted_event(uid)
            position = _Position("", 0)


async def _messages_and_changes(
    gateway: Gateway, store: Store, key: str, after: int, uid: str | None, *, changes: bool
) -> AsyncGenerator[Message | SessionChange, None]:
    """Yield messages and changes until the gateway closes. Raise SessionDeleted."""
    read_info = partial(gateway.loop.run, find_info, store, key)
    known_info = await read_info() if changes else None
    async with aclosing(gateway.follower.messages(store, key, after=after, uid=uid)) as arrivals:
        message_task = asyncio.create_task(_next_message(arrivals))
        closing_task = asyncio.create_task(gateway.closing.wait())
        try:
            while True:
                tasks: set[asyncio.Task[Any]] = {message_task, closing_task}
                timeout = CHECK_SECONDS if changes else None
                done, _ = await asyncio.wait(
                    tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if message_task in done:
                    message = message_task.result()
                    if message is None:
                        return
                    yield message
                    message_task = asyncio.create_task(_next_message(arrivals))
                elif closing_task in done:
                    return
                else:
                    info = await read_info()
                    for change in changes_between(known_info, info):
                        yield change
                    known_info = info
        finally:
            # Cancel both tasks first: `aclosing` must not close a stream that is in use.
            if await cancel_and_wait([message_task, closing_task]):
                raise asyncio.CancelledError


async def _next_message(arrivals: AsyncGenerator[Message, None]) -> Message | None:
    return await anext(arrivals, None)


def _message_event(uid: str, message: Message) -> StreamEvent:
    data = sse_data(encode_json(message_item(message)))
    return StreamEvent(id=f"{uid}:{message.seq}", event="message", data=data)


def _change_event(change: SessionChange) -> StreamEvent:
    """Create a change event.

    The event has no id, because a client that reconnects reads the current state of the session.
    """
    field_names = ("floor", "visible", "last_seq", "undoable", "summary")
    fields = {name: getattr(change.info, name) for name in field_names}
    event = ChangeEvent(kind=change.kind, **fields)
    return StreamEvent(event="change", data=sse_data(encode_json(event)))


def _deleted_event(uid: str) -> StreamEvent:
    return StreamEvent(event="deleted", data=f'{{"uid":"{uid}"}}')


EVENTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="GET",
        path="/v1/sessions/{key}/events",
        name="events",
        summary="Stream new messages of a session as server-sent events.",
        handler=events,
        query=EventsQuery,
        media_types=("text/event-stream",),
    ),
)
