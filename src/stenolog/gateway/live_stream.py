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

from msgspec import UNSET, Meta, UnsetType
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from stenolog.agent.threads import cancel_and_wait
from stenolog.codec import encode_object
from stenolog.errors import SessionDeleted, UsageError
from stenolog.gateway.openapi import Endpoint
from stenolog.gateway.requests import AgentQuery, parse_query
from stenolog.gateway.responses import encode_json, message_item, sse_data
from stenolog.gateway.shared_state import Gateway, SlotResponse
from stenolog.records import Message, SessionInfo
from stenolog.stores import spans
from stenolog.stores.async_store import AsyncStore
from stenolog.stores.base import Store, find_info

# --- streaming ------------------------------------------------------------------------------------
# Responses with server-sent events have keep-alive comments and a time limit for slow clients.


_PING_SECONDS: Final = 10.0
"""Seconds without an event after which a stream sends a keep-alive comment."""
_UNREAD_SECONDS: Final = 30.0
"""Seconds after which a client that does not read is disconnected."""


class StreamEvent(ServerSentEvent):
    """Server-sent event with the same line ends as the events of OpenAI's servers.

    The format allows other line ends, but some clients do not recognise them.
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


_EVENT_ID_PATTERN: Final = re.compile(r"(?:([A-Za-z0-9_-]+):)?([0-9]{1,15})")
_CHANGE_FIELDS: Final = ("floor", "visible", "last_seq", "undoable", "summary")
"""Fields of SessionInfo that an event about a change contains."""
_RECONNECT_MILLISECONDS: Final = 500
"""Milliseconds after which a client should reconnect if the stream breaks."""


class EventsQuery(AgentQuery, frozen=True, kw_only=True):
    """Options of a stream."""

    changes: bool = False
    """Also send `event: change` for summaries, undo, titles and so on."""
    after: (
        Annotated[str, Meta(max_length=200, pattern=f"^{_EVENT_ID_PATTERN.pattern}$")] | UnsetType
    ) = UNSET
    """Only messages after this seq or event id. The header Last-Event-ID overrides it."""


async def events(request: Request) -> Response:
    """Stream the messages and changes of a session."""
    call = parse_query(request, EventsQuery)
    gateway, query = call.gateway, call.query
    position = _parse_event_id(request.headers.get("last-event-id") or query.after or "0")
    session_key = await gateway.loop.run(call.agent.resolve_key, call.key)
    if request.method == "HEAD":
        return Response(media_type="text/event-stream")
    stream = _stream_events(gateway, call.agent.store, session_key, position, changes=query.changes)
    return SlotResponse(event_stream(stream), gateway.streams.admit())


def _parse_event_id(event_id: str) -> tuple[str, int]:
    """Return uid and seq of the last message that a client received. The uid may be empty."""
    match = _EVENT_ID_PATTERN.fullmatch(event_id.strip())
    if match is None:
        raise UsageError(
            f"invalid Last-Event-ID {event_id!r}; send the id of the last received event"
        )
    return match[1] or "", int(match[2])


_CHECK_SECONDS: Final = 0.5
"""Seconds between two checks for changes other than new messages."""


async def _stream_events(
    gateway: Gateway, store: Store, key: str, position: tuple[str, int], *, changes: bool
) -> AsyncGenerator[StreamEvent, None]:
    last_uid, last_seq = position
    yield StreamEvent(comment="stenolog", retry=_RECONNECT_MILLISECONDS)
    while not gateway.closing.is_set():
        info = await gateway.loop.run(find_info, store, key)
        uid = "" if info is None else info.uid  # `uid` is empty if the session does not exist yet
        if last_uid and last_uid != uid:
            # The session was deleted while the client was disconnected.
            # If a session has the key now, it is another session.
            yield _deleted_event(last_uid)
            last_uid, last_seq = uid, 0
        try:
            items = _follow_messages_and_changes(
                gateway, store, key, last_seq, uid or None, changes=changes
            )
            async with aclosing(items) as received_items:
                async for item in received_items:
                    if not uid:
                        break  # The session exists now. Its uid must be read before its messages.
                    if isinstance(item, SessionInfo):
                        yield _change_event(item)
                        continue
                    yield _message_event(uid, item)
                    last_uid, last_seq = uid, item.seq
                else:
                    return
        except SessionDeleted:
            yield _deleted_event(uid)
            last_uid, last_seq = "", 0


async def _follow_messages_and_changes(
    gateway: Gateway, store: Store, key: str, after: int, uid: str | None, *, changes: bool
) -> AsyncGenerator[Message | SessionInfo, None]:
    """Yield messages, and the info after each other change, until the gateway closes.

    Raises SessionDeleted.
    """
    read_info = partial(gateway.loop.run, find_info, store, key)
    known_info = await read_info() if changes else None
    async with aclosing(AsyncStore(store).follow(key, after=after, uid=uid)) as arrivals:
        message_task = asyncio.ensure_future(anext(arrivals, None))
        closing_task = asyncio.create_task(gateway.closing.wait())
        try:
            while True:
                tasks: set[asyncio.Task[Any]] = {message_task, closing_task}
                timeout = _CHECK_SECONDS if changes else None
                done, _ = await asyncio.wait(
                    tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                if message_task in done:
                    message = message_task.result()
                    if message is None:
                        return
                    yield message
                    message_task = asyncio.ensure_future(anext(arrivals, None))
                elif closing_task in done:
                    return
                else:
                    info = await read_info()
                    if known_info is not None and info is not None and _differ(known_info, info):
                        yield info
                    known_info = info
        finally:
            # Cancel both tasks first: `aclosing` must not close a stream that is in use.
            if await cancel_and_wait([message_task, closing_task]):
                raise asyncio.CancelledError


def _differ(old_info: SessionInfo, new_info: SessionInfo) -> bool:
    """Return whether a session has changed, apart from new messages."""
    # Compare only the old messages: new messages are reported separately.
    new_visible = spans.clipped(new_info.visible_spans, 1, old_info.last_seq)
    return old_info.uid == new_info.uid and (
        new_visible != list(old_info.visible_spans)
        or new_info.floor != old_info.floor
        or new_info.summary != old_info.summary
        or new_info.meta != old_info.meta
    )


def _message_event(uid: str, message: Message) -> StreamEvent:
    data = sse_data(encode_json(message_item(message)))
    return StreamEvent(id=f"{uid}:{message.seq}", event="message", data=data)


def _change_event(info: SessionInfo) -> StreamEvent:
    """Create a change event.

    The event has no id, because a client that reconnects reads the current state of the session.
    """
    fields = {name: getattr(info, name) for name in _CHANGE_FIELDS}
    return StreamEvent(event="change", data=sse_data(encode_object(fields)))


def _deleted_event(uid: str) -> StreamEvent:
    return StreamEvent(event="deleted", data=f'{{"uid":"{uid}"}}')


EVENT_ENDPOINTS: Final[tuple[Endpoint, ...]] = (
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
