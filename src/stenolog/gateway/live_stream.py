"""Live stream of a session, `GET /v1/sessions/{key}/events`, which clients can resume.

Each message is sent once, in the order of the log, regardless of the process that wrote it. The id
of an event has the uid of the session and the seq, so that a client that reconnects, to this
gateway or another one, misses nothing and gets nothing twice.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Final

from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.threads import cancel_and_wait
from stenolog.errors import NoSuchSession, SessionDeleted, UsageError
from stenolog.gateway.api_types import AgentQuery, MessageItem, encode_json, sse_data
from stenolog.gateway.limits import SlotResponse
from stenolog.gateway.openapi import Endpoint
from stenolog.gateway.requests import parse_query
from stenolog.gateway.shared_state import Gateway
from stenolog.records import Message
from stenolog.stores.base import Store
from stenolog.stores.following import CHECK_SECONDS, Kind, SessionChange, changes_between, find_info

# --- streaming ------------------------------------------------------------------------------------
# Responses with server-sent events: keep-alive comments, and a time limit for slow clients.


_PING: Final = 10.0
"""Seconds without an event after which a stream sends a comment."""
_UNREAD: Final = 30.0
"""Seconds after which a client that does not read is disconnected."""


class StreamEvent(ServerSentEvent):
    """Server-sent event with the same line ends as OpenAI's.

    The format allows others, but some clients only recognise these.
    """

    DEFAULT_SEPARATOR = "\n"


def event_stream(
    events: AsyncIterable[StreamEvent], *, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a response that sends each event as soon as it arrives."""
    return EventSourceResponse(
        events,
        headers=headers,
        ping=_PING,
        send_timeout=_UNREAD,
        ping_message_factory=lambda: StreamEvent(comment="keep-alive"),
    )


# --- events ---------------------------------------------------------------------------------------


_ID: Final = re.compile(r"(?:([A-Za-z0-9_-]+):)?([0-9]{1,15})")
_RECONNECT: Final = 500
"""Milliseconds after which a client should reconnect if the stream breaks."""


class EventsQuery(AgentQuery, frozen=True, kw_only=True):
    """Options of a stream."""

    changes: Annotated[
        bool, Meta(description="Also send `event: change` for summaries, undo, titles and so on.")
    ] = False
    after: (
        Annotated[
            str,
            Meta(
                max_length=200,
                pattern=f"^{_ID.pattern}$",
                description="Only messages after this seq. The header Last-Event-ID overrides it.",
            ),
        ]
        | UnsetType
    ) = UNSET


class ChangeEvent(Struct, frozen=True, kw_only=True):
    """A change of a session other than a new message."""

    kind: Kind
    floor: int
    visible: int
    last_seq: int
    undoable: int
    summary: str


class _Position(Struct, frozen=True):
    """The last message that a client has received; the uid is empty if the client sent none."""

    uid: str
    seq: int


async def events(request: Request) -> Response:
    """Stream a session."""
    call = parse_query(request, EventsQuery)
    gateway, query = call.gateway, call.query
    after = request.headers.get("last-event-id") or (query.after if query.after else "0")
    received = _parse_position(after)
    own = await gateway.loop.run(call.agent.resolve_key, call.key)
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    events = _stream(gateway, call.agent.store, own, received, changes=query.changes)
    return SlotResponse(event_stream(events), gateway.streams.admit())


def _parse_position(id: str) -> _Position:
    found = _ID.fullmatch(id.strip())
    if found is None:
        raise UsageError(f"invalid Last-Event-ID {id!r}; send the id of the last received event")
    return _Position(found[1] or "", int(found[2]))


async def _stream(
    gateway: Gateway, store: Store, key: str, received: _Position, *, changes: bool
) -> AsyncGenerator[StreamEvent, None]:
    yield StreamEvent(comment="stenolog", retry=_RECONNECT)
    while not gateway.closing.is_set():
        uid = await gateway.loop.run(_uid, store, key)
        if received.uid and received.uid != uid:
            # Deleted while the client was disconnected; a session with this key is another one now.
            yield _deleted(received.uid)
            received = _Position(uid, 0)
        try:
            following = _news(gateway, store, key, received.seq, uid or None, changes=changes)
            async with aclosing(following) as arrivals:
                async for news in arrivals:
                    if not uid:
                        break  # the session exists now; read its messages once its uid is known
                    if isinstance(news, SessionChange):
                        yield _changed(news)
                        continue
                    yield _event(uid, news)
                    received = _Position(uid, news.seq)
                else:
                    return
        except SessionDeleted:
            yield _deleted(uid)
            received = _Position("", 0)


async def _news(
    gateway: Gateway, store: Store, key: str, after: int, uid: str | None, *, changes: bool
) -> AsyncGenerator[Message | SessionChange, None]:
    """Yield messages and changes until the gateway closes. Raise SessionDeleted."""
    look = partial(gateway.loop.run, find_info, store, key)
    known = await look() if changes else None
    async with aclosing(gateway.following.messages(store, key, after=after, uid=uid)) as arrivals:
        coming = asyncio.create_task(_next(arrivals))
        closing = asyncio.create_task(gateway.closing.wait())
        try:
            while True:
                both: set[asyncio.Task[Any]] = {coming, closing}
                within = CHECK_SECONDS if changes else None
                done, _ = await asyncio.wait(
                    both, timeout=within, return_when=asyncio.FIRST_COMPLETED
                )
                if coming in done:
                    message = coming.result()
                    if message is None:
                        return
                    yield message
                    coming = asyncio.create_task(_next(arrivals))
                elif closing in done:
                    return
                else:
                    found = await look()
                    for change in changes_between(known, found):
                        yield change
                    known = found
        finally:
            # Before `aclosing` closes the stream of messages, which must not be in use then.
            if await cancel_and_wait([coming, closing]):
                raise asyncio.CancelledError


async def _next(arrivals: AsyncGenerator[Message, None]) -> Message | None:
    return await anext(arrivals, None)


def _uid(store: Store, key: str) -> str:
    """Return the uid of the session; empty if it does not exist yet."""
    try:
        return store.info(key).uid
    except NoSuchSession:
        return ""


def _event(uid: str, message: Message) -> StreamEvent:
    shown = MessageItem(
        seq=message.seq, at=message.at, hidden=message.hidden, message=Raw(message.to_json())
    )
    return StreamEvent(
        id=f"{uid}:{message.seq}", event="message", data=sse_data(encode_json(shown))
    )


def _changed(change: SessionChange) -> StreamEvent:
    """Create a change event.

    It has no id: a client that reconnects reads the current state of the session.
    """
    info = change.info
    told = ChangeEvent(
        kind=change.kind,
        floor=info.floor,
        visible=info.visible,
        last_seq=info.last_seq,
        undoable=info.undoable,
        summary=info.summary,
    )
    return StreamEvent(event="change", data=sse_data(encode_json(told)))


def _deleted(uid: str) -> StreamEvent:
    return StreamEvent(event="deleted", data=f'{{"uid":"{uid}"}}')


EVENTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="GET",
        path="/v1/sessions/{key}/events",
        name="events",
        summary="Stream new messages of a session as server-sent events.",
        raw=events,
        query=EventsQuery,
        media=("text/event-stream",),
    ),
)
"""Endpoint of the live stream."""
