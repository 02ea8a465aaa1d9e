"""The gateway process: it listens, resumes interrupted turns, and shuts down.

The order of the shutdown prevents losses: first new requests are rejected, then answers in progress
end, then chat apps stop, and last the stores close. Cancelled turns stay in the log, and the next
start resumes them.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Sequence
from typing import Any, Final, Protocol

from starlette.routing import BaseRoute

from stenolog.agent.scheduler import CloseReport
from stenolog.agent.threads import cancel_and_wait
from stenolog.agent.turn_events import Answer
from stenolog.errors import StoreClosed, UsageError
from stenolog.gateway.access_token import Token
from stenolog.gateway.app import make_app
from stenolog.gateway.hosts import LOOPBACK_HOSTS
from stenolog.gateway.server import Server, config
from stenolog.gateway.shared_state import Gateway
from stenolog.maintenance.retention_runs import apply_rules_everywhere
from stenolog.settings.conversion import rules_of

_BACKLOG: Final = 1_024
_ATTEMPTS: Final = 20
"""Maximum number of attempts to find a port that is free at both loopback addresses."""
_NO_ADDRESS: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, socket.EAI_NONAME)
"""Errors of a machine that does not have the address."""
_SPARE: Final = 512
"""Connections in addition to those of turns and streams, for responses that reject requests."""
_SEARCHES: Final = 4
"""Number of searches for interrupted turns per takeover interval."""
_MAX_SEARCHES: Final = 4
"""Maximum number of such searches, with the turns they resume, that run at the same time."""
_FIRST_RETENTION: Final = 60.0
_RETENTION_INTERVAL: Final = 3_600.0
"""Interval in seconds between two runs of the retention rules."""
_SEND_TIMEOUT: Final = 3.0
"""Time limit in seconds for sending responses after their turns were cancelled."""

_logger = logging.getLogger("stenolog")


class ChannelService(Protocol):
    """The chat apps: they receive messages and send answers without HTTP requests of users."""

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """Routes below /webhooks/."""
        ...

    async def start(self) -> None:
        """Start receiving messages."""
        ...

    async def deliver(self, answers: Sequence[Answer]) -> None:
        """Send answers that no client waits for, each at most once."""
        ...

    async def drain(self, *, wait_seconds: float) -> None:
        """Stop receiving; wait up to `wait_seconds` until received messages are answered."""
        ...

    async def stop_sending(self) -> None:
        """Stop sending, while the store can still record the progress."""
        ...

    async def close(self) -> None:
        """Release all resources, after the stores are closed."""
        ...


class NoChannels:
    """No chat apps."""

    routes: Sequence[BaseRoute] = ()

    async def start(self) -> None:
        """Do nothing."""

    async def deliver(self, answers: Sequence[Answer]) -> None:
        """Do nothing."""

    async def drain(self, *, wait_seconds: float) -> None:
        """Do nothing."""

    async def stop_sending(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at this address. Raise UsageError with what to do.

    For a name such as `localhost` a browser may connect to 127.0.0.1 or to ::1. So the gateway
    listens at both: otherwise a program of another user could listen at the other address and get
    the token.
    """
    if host not in LOOPBACK_HOSTS:
        return [_listen(host, port)]
    for _ in range(_ATTEMPTS if port == 0 else 1):
        first = _listen("::1" if host == "::1" else "127.0.0.1", port)
        other = "127.0.0.1" if host == "::1" else "::1"
        chosen = first.getsockname()[1]
        try:
            return [first, _listen(other, chosen)]
        except _PortInUse as error:
            first.close()
            if port != 0:
                words = (
                    f"another program uses port {port} at {other} and would get requests for "
                    "http://localhost; choose another port with --port"
                )
                raise UsageError(words) from error
        except UsageError as error:
            reason = error.__cause__
            if not isinstance(reason, OSError) or reason.errno not in _NO_ADDRESS:
                _logger.warning(
                    "The gateway listens only on %s: %s. Another program that listens on %s would "
                    "get requests for http://localhost.",
                    first.getsockname()[0],
                    error,
                    other,
                )
            return [first]
    raise UsageError("no port is free at both 127.0.0.1 and ::1")


class _PortInUse(UsageError):
    """Another program listens at this address."""


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"{host} is not an address of this machine: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    words = f"cannot listen on {host}, port {port}"
    try:
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"{words}: {error.strerror}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
        listening.setblocking(False)
    except OSError as error:
        listening.close()
        if error.errno == errno.EADDRINUSE:
            words = (
                f"port {port} at {host} is in use, perhaps by another gateway; choose another port "
                "with --port"
            )
            raise _PortInUse(words) from error
        raise UsageError(f"{words}: {error.strerror}") from error
    return listening


class Daemon:
    """A running gateway, from `start` until `stop`."""

    def __init__(
        self,
        gateway: Gateway,
        token: Token,
        listening: Sequence[socket.socket],
        channels: ChannelService,
    ) -> None:
        self._gateway = gateway
        self._channels = channels
        self._listening = list(listening)
        app = make_app(gateway, token, further=channels.routes)
        settings = gateway.settings.gateway
        connections = settings.max_turns + settings.max_streams + _SPARE
        # uvicorn's own limit is longer: `stop` cancels the turns before it, and more gently.
        stopping = settings.shutdown_timeout + 2 * _SEND_TIMEOUT
        self._server = Server(config(app, stopping=stopping, connections=connections))
        self._serving: asyncio.Task[None] | None = None
        self._resuming: asyncio.Task[None] | None = None
        self._searches: set[asyncio.Task[None]] = set()
        self._retention: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """URL of the gateway."""
        host, port = self._listening[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def serving(self) -> asyncio.Task[None]:
        """Task that ends when the server has stopped."""
        if self._serving is None:
            raise StoreClosed("the gateway was not started")
        return self._serving

    async def start(self) -> None:
        """Start serving requests."""
        self._serving = asyncio.create_task(self._server.serve(sockets=self._listening))
        if self._gateway.read_only:  # guard: read-only-starts-nothing
            return
        await self._channels.start()
        self._resuming = asyncio.create_task(self._resume())
        self._retention = asyncio.create_task(self._apply_retention())

    async def stop(self, *, hurry: asyncio.Event) -> CloseReport:
        """Stop the gateway. Work in progress gets `shutdown_timeout` seconds; less with `hurry`."""
        timeout = self._gateway.settings.gateway.shutdown_timeout
        self._gateway.closing.set()
        self._server.should_exit = True
        # Turns whose client disconnected are in progress too.
        in_progress = [
            self.serving,
            asyncio.create_task(self._channels.drain(wait_seconds=timeout)),
            asyncio.create_task(self._gateway.wait_for_tasks()),
        ]
        hurry_set = asyncio.create_task(hurry.wait())
        both: set[asyncio.Future[Any]] = {
            asyncio.gather(*in_progress, return_exceptions=True),
            hurry_set,
        }
        await asyncio.wait(both, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        cancelled = await cancel_and_wait([hurry_set, *in_progress[1:]])
        # Deliveries to chat apps record their progress while the store is still open.
        await self._channels.stop_sending()
        # Cancels the turns that are still running, including resumed ones; the next start resumes
        # them.
        left = await self._gateway.loop.close(patience=0)
        if self._resuming is not None:
            cancelled |= await cancel_and_wait([self._resuming, *self._searches])
        if self._retention is not None:
            cancelled |= await cancel_and_wait([self._retention])
        await asyncio.wait({self.serving}, timeout=_SEND_TIMEOUT)
        if not self.serving.done():
            self._server.force_exit = True
            await asyncio.wait({self.serving}, timeout=_SEND_TIMEOUT)
        await self._channels.close()
        for listening in self._listening:
            listening.close()
        if cancelled:
            raise asyncio.CancelledError
        return left

    async def _resume(self) -> None:
        """Resume interrupted turns at the start, and regularly those of killed gateways.

        Searches run as separate tasks, so that a long turn does not delay the next search.
        """
        takeover = self._gateway.settings.gateway.takeover
        idle_for = 0.0
        while not self._gateway.closing.is_set():
            if len(self._searches) < _MAX_SEARCHES:
                search = asyncio.create_task(self._resume_once(idle_for))
                self._searches.add(search)
                search.add_done_callback(self._searches.discard)
            idle_for = takeover
            await asyncio.sleep(takeover / _SEARCHES)

    async def _apply_retention(self) -> None:
        """Apply the retention rules once an hour, if there are any."""
        rules = rules_of(self._gateway.settings)
        places = list(dict.fromkeys(one.spec.sessions for one in self._gateway.loop.registry))
        wait = _FIRST_RETENTION
        while rules and not self._gateway.closing.is_set():
            await asyncio.sleep(wait)
            wait = _RETENTION_INTERVAL
            try:
                closing = self._gateway.closing.is_set
                await asyncio.to_thread(apply_rules_everywhere, places, rules, should_stop=closing)
            except Exception:
                _logger.exception("applying the retention rules failed")

    async def _resume_once(self, idle_for: float) -> None:
        try:
            await self._gateway.loop.resume(idle_for=idle_for, each=self._deliver)
        except StoreClosed:
            return
        except Exception:
            if not self._gateway.closing.is_set():
                _logger.exception("resuming interrupted turns failed")

    async def _deliver(self, answer: Answer) -> None:
        await self._channels.deliver([answer])
