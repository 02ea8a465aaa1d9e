"""Responses that are streams of events: how often they say that they live, and whom they drop."""

from collections.abc import AsyncIterable, Mapping
from typing import Final

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

_PING: Final = 10.0
"""Seconds of silence after which a stream says that it lives."""
_UNREAD: Final = 30.0
"""Seconds after which a client is dropped that reads nothing of what it is sent."""


class StreamEvent(ServerSentEvent):
    """An event with the line ends of OpenAI's own streams.

    Any are allowed, but clients that were written by hand look for an empty line of this kind.
    """

    DEFAULT_SEPARATOR = "\n"


def event_stream(
    events: AsyncIterable[StreamEvent], *, headers: Mapping[str, str] | None = None
) -> Response:
    """The response that sends these events as they come."""
    return EventSourceResponse(
        events,
        headers=headers,
        ping=_PING,
        send_timeout=_UNREAD,
        ping_message_factory=lambda: StreamEvent(comment="still here"),
    )
