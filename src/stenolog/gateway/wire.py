"""uvicorn as we run it: no client holds a connection for longer than it has a reason to.

uvicorn waits for ever for the head of a request, for the rest of a body that nobody reads any more,
and for a client that does not read its answer. Here each of them has a time.
"""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any, Final, cast

import h11
import uvicorn
from msgspec import Struct
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_SPARE: Final = 64
"""Connections beyond the limit that are still told so; further ones are closed unheard."""
_PROXIES: Final = ["127.0.0.1", "::1"]
"""Who may say that a request came by https."""


class Patience(Struct, frozen=True, kw_only=True):
    """How long a client is waited for, in seconds, and how much of it is put up with, in bytes."""

    head: float = 10.0
    """From its first byte, or from connecting, until the head of a request is whole."""
    rest: float = 2.0
    """For the rest of a body after its answer, so that the client can come to read that."""
    unread: float = 30.0
    """While a client reads nothing of what it was sent."""
    head_bytes: int = 16_384
    rest_bytes: int = 1_048_576
    framing_bytes: int = 65_536
    """Of what stands around the chunks of a body, beside a quarter of what is in them: a chunk
    takes us far longer to read than its client to write."""


class _Config(uvicorn.Config):
    """uvicorn's settings, and ours."""

    patience: Patience = Patience()


def config(
    app: ASGIApp,
    *,
    patience: Patience | None = None,
    connections: int = 1_024,
    idle: int = 15,
    stopping: float = 10.0,
) -> uvicorn.Config:
    """How the application is served, by `Server(config(app)).serve(sockets=[socket])`.

    With as many `connections` open, further requests are answered 503. `idle`: seconds that a
    connection is kept between two requests. `stopping`: seconds that answers have to end.
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
        limit_concurrency=connections,
        h11_max_incomplete_event_size=patience.head_bytes,
        timeout_keep_alive=idle,
        timeout_graceful_shutdown=math.ceil(stopping),
    )
    made.patience = patience
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
        self._owed: str | None = None
        """What the client must send in time."""
        self._due: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._rest_bytes = 0
        self._framing_bytes = 0
        self._chunked = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        most = self.limit_concurrency
        if most is not None and len(self.connections) > most + _SPARE:
            transport.abort()
            return
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

    def _watch(self) -> None:
        if self.transport.is_closing():
            self._owe(None)
        elif self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            self._owe("head")
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
        self._owed = what
        if what is not None:
            seconds = self._patience.head if what == "head" else self._patience.rest
            self._rest_bytes = self._patience.rest_bytes
            self._due = self.loop.call_later(seconds, self.transport.abort)

    def _read_on(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
