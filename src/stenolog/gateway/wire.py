"""uvicorn as we run it: no client holds a connection for longer than it has a reason to.

uvicorn waits for ever for the head of a request, for the rest of a body that nobody reads any more,
and for a client that does not read its answer. Here each of them has a time. And where all places
are taken, uvicorn refuses whoever asks, also where those that have the places ask for nothing.
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

_TOLD: Final = 60.0
"""Seconds between two lines of the log that tell of too many connections."""
_PROXIES: Final = ["127.0.0.1", "::1"]
"""Who may say that a request came by https."""

_logger = logging.getLogger("stenolog")


class Patience(Struct, frozen=True, kw_only=True):
    """How long a client is waited for, in seconds, and how much of it is put up with, in bytes."""

    head: float = 10.0
    """From its first byte, or from connecting, until the head of a request is whole."""
    rest: float = 2.0
    """For the rest of a body after its answer, so that the client can come to read that."""
    unread: float = 30.0
    """While a client reads nothing of what it was sent."""
    head_bytes: int = HEAD_BYTES
    rest_bytes: int = 1_048_576
    framing_bytes: int = 65_536
    """Of what stands around the chunks of a body, beside a quarter of what is in them: a chunk
    takes us far longer to read than its client to write."""


class Room:
    """How many connections there is room for, and how many were closed for want of it."""

    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        self.most = most
        self.closed = 0
        """How many were closed so far."""
        self._now = now
        self._told_at = -math.inf
        self._told = 0

    def close_one(self) -> None:
        """Count one more, and tell of it, but not so often that nothing else is in the log."""
        self.closed += 1
        if self._now() - self._told_at < _TOLD:
            return
        words = "too many connections, there is room for %d; closed to have some: %d"
        _logger.warning(words, self.most, self.closed - self._told)
        self._told_at, self._told = self._now(), self.closed


class _Config(uvicorn.Config):
    """uvicorn's settings, and ours."""

    patience: Patience
    room: Room


def config(
    app: ASGIApp,
    *,
    patience: Patience | None = None,
    connections: int = 1_024,
    idle: int = 15,
    stopping: float = 10.0,
) -> uvicorn.Config:
    """How the application is served, by `Server(config(app)).serve(sockets=[socket])`.

    With as many `connections` open, a further one takes the place of one that asks for nothing, or
    is closed at once where all are being answered. `idle`: seconds that a connection is kept
    between two requests. `stopping`: seconds that answers have to end.
    """
    patience = patience or Patience()
    made = _Config(
        app,
        http=_Connection,
        ws="none",
        interface="asgi3",
        # The daemon says where logs go. Below this level they would hold headers.
        log_config=None,
        log_level="warning",
        # Addresses hold codes of links.
        access_log=False,
        server_header=False,
        proxy_headers=True,
        # Said here, or it and the number of processes are taken from the environment.
        forwarded_allow_ips=_PROXIES,
        workers=1,
        # It would refuse every request, and log each: see _Connection.
        limit_concurrency=None,
        h11_max_incomplete_event_size=patience.head_bytes,
        timeout_keep_alive=idle,
        timeout_graceful_shutdown=math.ceil(stopping),
    )
    made.patience = patience
    made.room = Room(connections)
    return made


class Server(uvicorn.Server):
    """A server that leaves the signals to the daemon; `should_exit = True` stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take no signal."""
        yield


class _Connection(H11Protocol):
    """A connection that is closed when its client keeps us waiting."""

    def __init__(self, config: uvicorn.Config, *args: Any, **extra: Any) -> None:
        super().__init__(config, *args, **extra)
        self._patience = cast(_Config, config).patience
        self._room = cast(_Config, config).room
        self._owed: str | None = None
        """What we wait for: a `head`, the `rest` of a body, or after an answer the `next` head."""
        self._since = 0.0
        self._due: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._rest_bytes = 0
        self._framing_bytes = 0
        self._chunked = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request, in the place of who asks for nothing where all are taken."""
        super().connection_made(transport)
        if len(self.connections) > self._room.most:
            self._make_room()
        if not transport.is_closing():
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the times."""
        self._owe(None)
        self._read_on()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came."""
        # In pieces: h11 looks how long a head is only while that is not whole, and one piece of
        # tiny chunks is work enough before we look at how it goes.
        step = self._patience.head_bytes
        for begin in range(0, len(data), step):
            self._take(data[begin : begin + step])
            if self.transport.is_closing():
                break
        self._watch()

    def _take(self, piece: bytes) -> None:
        if self._owed == "rest":
            self._rest_bytes -= len(piece)
        cycle = self.cycle
        before = len(cycle.body) if cycle is not None else 0
        super().data_received(piece)
        if cycle is not self.cycle:
            self._framing_bytes = self._patience.framing_bytes
            self._chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        elif cycle is not None and self._chunked and self.conn.their_state is h11.SEND_BODY:
            # After the answer the content is thrown away, and all of it counts.
            content = len(cycle.body) - before
            self._framing_bytes -= len(piece) - content - content // 4
        if self._rest_bytes < 0 or self._framing_bytes < 0:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Wait for the next request, and no longer for what is left of this one."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Wait until the client reads."""
        super().pause_writing()
        if self._reading is None:
            # guard: unread-time-limit
            self._reading = self.loop.call_later(self._patience.unread, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on, since the client reads."""
        self._read_on()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; where an answer has begun already, it ends in the middle."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """Close it as soon as there is no answer to be sent."""
        # One connection in a bad state must not keep the others from being closed.
        try:
            super().shutdown()
        except h11.LocalProtocolError:
            self.transport.abort()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: who asks for a websocket gets an answer without one."""

    def _make_room(self) -> None:
        """Close the connection that asks for nothing and does so for longest; else this one."""
        others = (one for one in self.connections if isinstance(one, _Connection))
        waiting = [one for one in others if one._owed is not None]
        # Who was answered once has shown that it means it: those are the last to go.
        given_up = min(waiting, key=lambda one: (one._owed != "head", one._since), default=self)
        # It counts until it is told that it is closed, which is later.
        self.connections.discard(given_up)
        given_up.transport.abort()
        self._room.close_one()

    def _watch(self) -> None:
        if self.transport.is_closing():
            self._owe(None)
        elif self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._owe("head")  # guard: head-time-limit
        elif self.conn.their_state is h11.IDLE:
            self._owe("next")
        elif self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.DONE:
            self._owe("rest")
        else:
            self._owe(None)

    def _owe(self, what: str | None) -> None:
        if what == self._owed:
            return
        if self._due is not None:
            self._due.cancel()
            self._due = None
        self._owed, self._since = what, self.loop.time()
        # For what comes next uvicorn has a time itself.
        if what in ("head", "rest"):
            seconds = self._patience.head if what == "head" else self._patience.rest
            self._rest_bytes = self._patience.rest_bytes
            self._due = self.loop.call_later(seconds, self.transport.abort)

    def _read_on(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
