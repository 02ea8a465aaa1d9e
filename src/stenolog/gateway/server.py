"""The uvicorn server, with time limits for slow clients and a limit for connections.

uvicorn waits without limit for the head of a request, for the rest of a body that is no longer
read, and for a client that does not read its response. Here each of them has a time limit. At its
connection limit uvicorn rejects every request, even if other connections are idle; this server
closes an idle connection instead.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import h11
import uvicorn
from msgspec import Struct
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from stenolog.gateway.limits import HEAD_BYTES

_LOG_INTERVAL: Final = 60.0
"""Minimum interval in seconds between log lines about too many connections."""
_PROXIES: Final = ["127.0.0.1", "::1"]
"""Addresses of proxies whose `X-Forwarded` headers are trusted."""

_logger = logging.getLogger("stenolog")


class ClientLimits(Struct, frozen=True, kw_only=True):
    """Time limits in seconds and size limits in bytes for clients."""

    head: float = 10.0
    """From the first byte, or from connecting, until the head of a request is complete."""
    rest: float = 2.0
    """For the rest of a body after its response, so that the client can read the response."""
    unread: float = 30.0
    """While a client reads none of its response."""
    head_bytes: int = HEAD_BYTES
    rest_bytes: int = 1_048_576
    framing_bytes: int = 65_536
    """Framing around the chunks of a body, in addition to a quarter of their content.

    Parsing a chunk takes far longer than sending one.
    """


class ConnectionLimit:
    """Limit for the number of connections, and a counter of those that were closed for it."""

    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.closed = 0
        """Number of closed connections so far."""
        self._now = now
        self._logged_at = -math.inf
        self._logged = 0

    def close_one(self) -> None:
        """Count a closed connection, and log it at most once per interval."""
        self.closed += 1
        if self._now() - self._logged_at < _LOG_INTERVAL:
            return
        words = "too many connections: the limit is %d, and %d connections were closed"
        _logger.warning(words, self.most, self.closed - self._logged)
        self._logged_at, self._logged = self._now(), self.closed


class _Config(uvicorn.Config):
    """uvicorn's configuration with the additional limits."""

    limits: ClientLimits
    connection_limit: ConnectionLimit


def config(
    app: ASGIApp,
    *,
    limits: ClientLimits | None = None,
    connections: int = 1_024,
    idle: int = 15,
    stopping: float = 10.0,
) -> uvicorn.Config:
    """Return the configuration for `Server(config(app)).serve(sockets=[socket])`.

    At the limit of `connections`, a new connection replaces an idle one; if there is none, it is
    closed at once. `idle`: seconds that a connection stays open between two requests. `stopping`:
    seconds that responses have to end at shutdown.
    """
    limits = limits or ClientLimits()
    made = _Config(
        app,
        http=_Connection,
        ws="none",
        interface="asgi3",
        # The daemon configures logging. Lower levels would log headers.
        log_config=None,
        log_level="warning",
        # URLs contain codes of login links.
        access_log=False,
        server_header=False,
        proxy_headers=True,
        # Set explicitly: otherwise uvicorn reads these two from the environment.
        forwarded_allow_ips=_PROXIES,
        workers=1,
        # It would reject every request and log each; see _Connection.
        limit_concurrency=None,
        h11_max_incomplete_event_size=limits.head_bytes,
        timeout_keep_alive=idle,
        timeout_graceful_shutdown=math.ceil(stopping),
    )
    made.limits = limits
    made.connection_limit = ConnectionLimit(connections)
    return made


class Server(uvicorn.Server):
    """A server that leaves signals to the daemon; `should_exit = True` stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals."""
        yield


class _Connection(H11Protocol):
    """A connection that is closed if its client exceeds a time limit."""

    def __init__(self, config: uvicorn.Config, *args: Any, **extra: Any) -> None:
        super().__init__(config, *args, **extra)
        self._limits = cast(_Config, config).limits
        self._connection_limit = cast(_Config, config).connection_limit
        self._awaited: str | None = None
        """What the client has to send: a `head`, the `rest` of a body, or the `next` head."""
        self._since = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._rest_bytes = 0
        self._framing_bytes = 0
        self._chunked = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request; at the limit, close an idle connection first."""
        super().connection_made(transport)
        if len(self.connections) > self._connection_limit.most:
            self._close_idle_connection()
        if not transport.is_closing():
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers."""
        self._await(None)
        self._stop_unread_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        # In pieces: h11 checks the length of a head only while it is incomplete, and one piece of
        # tiny chunks is enough work before the limits are checked.
        step = self._limits.head_bytes
        for begin in range(0, len(data), step):
            self._take(data[begin : begin + step])
            if self.transport.is_closing():
                break
        self._watch()

    def _take(self, piece: bytes) -> None:
        if self._awaited == "rest":
            self._rest_bytes -= len(piece)
        cycle = self.cycle
        before = len(cycle.body) if cycle is not None else 0
        super().data_received(piece)
        if cycle is not self.cycle:
            self._framing_bytes = self._limits.framing_bytes
            self._chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        elif cycle is not None and self._chunked and self.conn.their_state is h11.SEND_BODY:
            # After the response the content is discarded, so all bytes count.
            content = len(cycle.body) - before
            self._framing_bytes -= len(piece) - content - content // 4
        if self._rest_bytes < 0 or self._framing_bytes < 0:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Wait for the next request, and only briefly for the rest of this one."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Start the time limit for a client that does not read."""
        super().pause_writing()
        if self._unread_timer is None:
            # guard: unread-time-limit
            self._unread_timer = self.loop.call_later(self._limits.unread, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the time limit, because the client reads."""
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
        # A connection in a bad state must not prevent closing the others.
        try:
            super().shutdown()
        except h11.LocalProtocolError:
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: a request for a websocket gets a normal response."""

    def _close_idle_connection(self) -> None:
        """Close the connection that has waited longest for its client; this one if none waits."""
        others = (one for one in self.connections if isinstance(one, _Connection))
        waiting = [one for one in others if one._awaited is not None]
        # Connections that were answered before are closed last.
        given_up = min(waiting, key=lambda one: (one._awaited != "head", one._since), default=self)
        # Remove it now: the callback for the closed connection comes later.
        self.connections.discard(given_up)
        given_up.transport.abort()
        self._connection_limit.close_one()

    def _watch(self) -> None:
        if self.transport.is_closing():
            self._await(None)
        elif self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._await("head")  # guard: head-time-limit
        elif self.conn.their_state is h11.IDLE:
            self._await("next")
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self._await("rest")
        else:
            self._await(None)

    def _await(self, what: str | None) -> None:
        if what == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._awaited, self._since = what, self.loop.time()
        # uvicorn has its own time limit for `next`.
        if what in ("head", "rest"):
            seconds = self._limits.head if what == "head" else self._limits.rest
            self._rest_bytes = self._limits.rest_bytes
            self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
