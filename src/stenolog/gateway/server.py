"""The uvicorn server, with time limits for slow clients and a limit for connections.

uvicorn waits without limit for the head of a request, for the rest of a body that the application
no longer reads, and for a client that does not read its response. This server has a time limit for
each of these waits. At its connection limit uvicorn rejects every request, even if other
connections are idle. This server closes an idle connection instead.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, cast

import h11
import uvicorn
from msgspec import Struct
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from stenolog.gateway.limits import MAX_HEAD_BYTES

_LOG_SECONDS: Final = 60.0
"""Minimum interval in seconds between log lines about too many connections."""
_TRUSTED_PROXIES: Final = ["127.0.0.1", "::1"]
"""Addresses of proxies whose `X-Forwarded` headers are trusted."""

_logger = logging.getLogger("stenolog")


class ClientLimits(Struct, frozen=True, kw_only=True):
    """Time limits in seconds and size limits in bytes for clients."""

    head_seconds: float = 10.0
    """Maximum seconds until the head of a request has arrived.

    They count from the start of the connection, and for later requests from the first byte.
    """
    rest_seconds: float = 2.0
    """Seconds to wait, after the response is sent, for a client that still sends its body.

    The connection is then closed. Closing it at once could lose the response.
    """
    unread_seconds: float = 30.0
    """Seconds after which a client that does not read its response is disconnected."""
    head_bytes: int = MAX_HEAD_BYTES
    rest_bytes: int = 1_048_576
    """Maximum bytes of a body that a client may still send after the response."""
    # Parsing many tiny chunks takes the server far longer than sending them takes the client.
    framing_bytes: int = 65_536
    """Maximum bytes of chunk framing in a body, in addition to a quarter of the content's size."""


class ConnectionLimit:
    """Limit for the number of connections. Counts the connections closed because of the limit."""

    def __init__(self, limit: int, now: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self.closed_count = 0
        self._now = now
        self._logged_at = -math.inf
        self._logged_count = 0

    def count_closed(self) -> None:
        """Count a closed connection. Log the number of closed connections at most once a minute."""
        self.closed_count += 1
        if self._now() - self._logged_at < _LOG_SECONDS:
            return
        text = "too many connections: the limit is %d, and %d connections were closed"
        _logger.warning(text, self.limit, self.closed_count - self._logged_count)
        self._logged_at, self._logged_count = self._now(), self.closed_count


def server_config(
    app: ASGIApp,
    *,
    limits: ClientLimits | None = None,
    max_connections: int = 1_024,
    idle_seconds: int = 15,
    stop_seconds: float = 10.0,
) -> uvicorn.Config:
    """Return the configuration for `Server(server_config(app)).serve(sockets=[socket])`.

    At the limit of `max_connections`, a new connection replaces an idle connection. If no
    connection is idle, the new connection is closed at once. A connection stays open for
    `idle_seconds` between two requests. At shutdown, responses have `stop_seconds` to end.
    """
    limits = limits or ClientLimits()
    connection_limit = ConnectionLimit(max_connections)
    make_connection = partial(_Connection, limits=limits, connection_limit=connection_limit)
    return uvicorn.Config(
        app,
        http=cast(type[asyncio.Protocol], make_connection),
        ws="none",
        interface="asgi3",
        # The daemon configures logging, not uvicorn. Levels below warning would log headers.
        log_config=None,
        log_level="warning",
        # URLs are not logged, because they may contain codes of login links.
        access_log=False,
        server_header=False,
        proxy_headers=True,
        # uvicorn would otherwise read the next two values from the environment.
        forwarded_allow_ips=_TRUSTED_PROXIES,
        workers=1,
        # At its limit, uvicorn would reject and log every request. _Connection has its own limit.
        limit_concurrency=None,
        h11_max_incomplete_event_size=limits.head_bytes,
        timeout_keep_alive=idle_seconds,
        timeout_graceful_shutdown=math.ceil(stop_seconds),
    )


class Server(uvicorn.Server):
    """A server that leaves signals to the daemon; `should_exit = True` stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals."""
        yield


class _Connection(H11Protocol):
    """A connection that is closed if its client exceeds a time or size limit."""

    def __init__(
        self, *args: Any, limits: ClientLimits, connection_limit: ConnectionLimit, **extra: Any
    ) -> None:
        super().__init__(*args, **extra)
        self._limits = limits
        self._connection_limit = connection_limit
        self._awaited_part: str | None = None
        """What the client has to send now: `head`, `next`, `rest` or None.

        `next` is the head of a further request on an idle connection. `rest` is the rest of a body
        after its response.
        """
        self._waiting_since = 0.0
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._rest_bytes_left = 0
        self._framing_bytes_left = 0
        self._chunked = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request. At the connection limit, close an idle connection first."""
        super().connection_made(transport)
        if len(self.connections) > self._connection_limit.limit:
            self._close_idle_connection()
        if not transport.is_closing():
            self._update_awaited_part()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._wait_for(None)
        self._stop_unread_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        # The bytes are parsed in pieces, because the limits are checked between two pieces.
        # h11 limits only the length of an incomplete head, and parsing many tiny chunks is slow.
        piece_size = self._limits.head_bytes
        for start in range(0, len(data), piece_size):
            self._parse_piece(data[start : start + piece_size])
            if self.transport.is_closing():
                break
        self._update_awaited_part()

    def _parse_piece(self, piece: bytes) -> None:
        if self._awaited_part == "rest":
            self._rest_bytes_left -= len(piece)
        cycle = self.cycle
        old_body_bytes = len(cycle.body) if cycle is not None else 0
        super().data_received(piece)
        if cycle is not self.cycle:
            self._framing_bytes_left = self._limits.framing_bytes
            self._chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        elif cycle is not None and self._chunked and self.conn.their_state is h11.SEND_BODY:
            # After the response uvicorn discards the content, so all bytes count as framing.
            content_bytes = len(cycle.body) - old_body_bytes
            self._framing_bytes_left -= len(piece) - content_bytes - content_bytes // 4
        if self._rest_bytes_left < 0 or self._framing_bytes_left < 0:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Wait for the next request, or briefly for the rest of the current request's body."""
        super().on_response_complete()
        self._update_awaited_part()

    def pause_writing(self) -> None:
        """Start the timer that disconnects a client that does not read its response."""
        super().pause_writing()
        if self._unread_timer is None:
            # guard: unread-time-limit
            self._unread_timer = self.loop.call_later(
                self._limits.unread_seconds, self.transport.abort
            )

    def resume_writing(self) -> None:
        """Stop the timer, because the client reads again."""
        self._stop_unread_timer()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Reject invalid HTTP; if a response has started, close the connection instead."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection once no response is in progress."""
        # An error of one connection must not prevent closing the others.
        try:
            super().shutdown()
        except h11.LocalProtocolError:
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a request for a websocket gets a normal response."""

    def _close_idle_connection(self) -> None:
        """Close the connection that waits longest for its client; if none waits, close this one."""
        others = (other for other in self.connections if isinstance(other, _Connection))
        candidates = [other for other in others if other._awaited_part is not None]
        # Connections on which a request was already answered are closed last.
        idle_connection = min(
            candidates,
            key=lambda other: (other._awaited_part != "head", other._waiting_since),
            default=self,
        )
        # Remove the connection now, because the callback for a closed connection comes later.
        self.connections.discard(idle_connection)
        idle_connection.transport.abort()
        self._connection_limit.count_closed()

    def _update_awaited_part(self) -> None:
        if self.transport.is_closing():
            self._wait_for(None)
        elif self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._wait_for("head")  # guard: head-time-limit
        elif self.conn.their_state is h11.IDLE:
            self._wait_for("next")
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self._wait_for("rest")
        else:
            self._wait_for(None)

    def _wait_for(self, part: str | None) -> None:
        if part == self._awaited_part:
            return
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
            self._deadline_timer = None
        self._awaited_part, self._waiting_since = part, self.loop.time()
        # `next` needs no timer here, because uvicorn has its own.
        if part in ("head", "rest"):
            seconds = self._limits.head_seconds if part == "head" else self._limits.rest_seconds
            self._rest_bytes_left = self._limits.rest_bytes
            self._deadline_timer = self.loop.call_later(seconds, self.transport.abort)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
