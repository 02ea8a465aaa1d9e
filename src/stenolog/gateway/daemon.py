"""The gateway process: it listens, resumes interrupted turns, and shuts down.

The order of the shutdown prevents losses: first new requests are rejected, then answers in progress
end, then sending to chat apps stops, and last the stores close. Cancelled turns stay in the log,
and the next start resumes them.
"""

import asyncio
import contextlib
import errno
import logging
import math
import socket
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

import uvicorn
from starlette.routing import BaseRoute
from starlette.types import ASGIApp

from stenolog.agent.scheduler import CloseReport
from stenolog.agent.threads import cancel_and_wait, start_task
from stenolog.agent.turn_events import Answer
from stenolog.errors import StoreClosed, UsageError
from stenolog.gateway.access import MAX_HEAD_BYTES
from stenolog.gateway.access_token import Token
from stenolog.gateway.app import make_app
from stenolog.gateway.hosts import LOOPBACK_HOSTS
from stenolog.gateway.shared_state import Gateway
from stenolog.maintenance.retention_runs import apply_rules_everywhere
from stenolog.settings.conversion import rules_of

_BACKLOG: Final = 1_024
_MAX_PORT_ATTEMPTS: Final = 20
"""Maximum number of attempts to find a port that is free at both loopback addresses."""
_NO_ADDRESS_ERRORS: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, socket.EAI_NONAME)
"""Error numbers which show that this machine does not have the address."""
_SPARE_CONNECTIONS: Final = 512
"""Connections in addition to those of turns and streams, for responses that reject requests."""
_SEARCHES_PER_TAKEOVER: Final = 4
"""Number of searches for interrupted turns per `takeover` seconds (a setting)."""
_MAX_PARALLEL_SEARCHES: Final = 4
"""Maximum number of parallel searches for interrupted turns. A search also resumes found turns."""
_FIRST_RETENTION_SECONDS: Final = 60.0
"""Seconds from the start until the first run of the retention rules."""
_RETENTION_SECONDS: Final = 3_600.0
"""Interval in seconds between two runs of the retention rules."""
_SEND_SECONDS: Final = 3.0
"""Maximum seconds for sending the responses of cancelled turns."""

_logger = logging.getLogger("stenolog")


class ChannelService(Protocol):
    """Service that receives messages from chat apps and sends answers to chat apps."""

    @property
    def routes(self) -> Sequence[BaseRoute]:
        """Routes below /webhooks/."""

    async def start(self) -> None:
        """Start receiving messages."""

    async def deliver(self, answer: Answer) -> None:
        """Send an answer that no client waits for, at most once."""

    async def drain(self, *, wait_seconds: float) -> None:
        """Stop receiving; wait up to `wait_seconds` until received messages are answered."""

    async def stop_sending(self) -> None:
        """Stop sending answers. The stores, which record sent answers, must still be open."""

    async def close(self) -> None:
        """Release all resources. Call this after the stores are closed."""


class NoChannels:
    """Channel service without chat apps."""

    routes: Sequence[BaseRoute] = ()

    async def start(self) -> None:
        """Do nothing."""

    async def deliver(self, answer: Answer) -> None:
        """Do nothing."""

    async def drain(self, *, wait_seconds: float) -> None:
        """Do nothing."""

    async def stop_sending(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen on this address. Raises UsageError if listening is not possible.

    For a name such as `localhost` a browser may connect to 127.0.0.1 or to ::1. So the gateway
    listens at both addresses if possible. If it listened at only one address, a program of another
    user could listen at the other address and get the token.
    """
    if host not in LOOPBACK_HOSTS:
        return [_open_socket(host, port)]
    for _ in range(_MAX_PORT_ATTEMPTS if port == 0 else 1):
        first_socket = _open_socket("::1" if host == "::1" else "127.0.0.1", port)
        other_host = "127.0.0.1" if host == "::1" else "::1"
        chosen_port = first_socket.getsockname()[1]
        try:
            return [first_socket, _open_socket(other_host, chosen_port)]
        except _PortInUse as error:
            first_socket.close()
            if port != 0:
                raise UsageError(
                    f"another program uses port {port} at {other_host} and would get requests for "
                    "http://localhost; choose another port with --port"
                ) from error
        except UsageError as error:
            reason = error.__cause__
            if not isinstance(reason, OSError) or reason.errno not in _NO_ADDRESS_ERRORS:
                _logger.warning(
                    "The gateway listens only on %s: %s. Another program that listens on %s would "
                    "get requests for http://localhost.",
                    first_socket.getsockname()[0],
                    error,
                    other_host,
                )
            return [first_socket]
    raise UsageError("no port is free at both 127.0.0.1 and ::1")


class _PortInUse(UsageError):
    """Another program listens at this address."""


def _open_socket(host: str, port: int) -> socket.socket:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"{host} is not an address of this machine: {error.strerror}") from error
    family, kind, protocol, _, address = addresses[0]
    with contextlib.ExitStack() as on_error:
        try:
            new_socket = socket.socket(family, kind, protocol)
            on_error.callback(new_socket.close)
            new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            new_socket.bind(address)
            new_socket.listen(_BACKLOG)
            new_socket.setblocking(False)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _PortInUse(
                    f"port {port} at {host} is in use, perhaps by another gateway; choose another "
                    "port with --port"
                ) from error
            text = f"cannot listen on {host}, port {port}: {error.strerror}"
            raise UsageError(text) from error
        on_error.pop_all()
    return new_socket


# --- server ---------------------------------------------------------------------------------------
# uvicorn limits the connections and the size of a request head. It does not limit how long a client
# may take: a gateway that other machines can reach needs a proxy in front of it.


_TRUSTED_PROXIES: Final = ["127.0.0.1", "::1"]
"""Addresses of proxies whose `X-Forwarded` headers are trusted."""


def server_config(
    app: ASGIApp,
    *,
    max_connections: int = 1_024,
    idle_seconds: int = 15,
    stop_seconds: float = 10.0,
) -> uvicorn.Config:
    """Return the configuration for `Server(server_config(app)).serve(sockets=[socket])`.

    While more than `max_connections` connections are open, every request gets 503. A connection
    stays open for `idle_seconds` between two requests. At shutdown, responses have `stop_seconds`
    to end.
    """
    return uvicorn.Config(
        app,
        # h11 rejects malformed requests that other parsers accept.
        http="h11",
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
        # uvicorn rejects from this number of connections on, the new one included.
        limit_concurrency=max_connections + 1,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_keep_alive=idle_seconds,
        timeout_graceful_shutdown=math.ceil(stop_seconds),
    )


class Server(uvicorn.Server):
    """A server that leaves signals to the daemon; `should_exit = True` stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle no signals."""
        yield


# --- daemon ---------------------------------------------------------------------------------------


class Daemon:
    """A running gateway, from `start` until `stop`."""

    def __init__(
        self,
        gateway: Gateway,
        token: Token,
        sockets: Sequence[socket.socket],
        channels: ChannelService,
    ) -> None:
        self._gateway = gateway
        self._channels = channels
        self._sockets = list(sockets)
        app = make_app(gateway, token, webhook_routes=channels.routes)
        settings = gateway.settings.gateway
        max_connections = settings.max_turns + settings.max_streams + _SPARE_CONNECTIONS
        # uvicorn's time limit is longer, so that `stop` ends the turns before uvicorn cancels them.
        stop_seconds = settings.shutdown_timeout + 2 * _SEND_SECONDS
        self._server = Server(
            server_config(app, stop_seconds=stop_seconds, max_connections=max_connections)
        )
        self._serving: asyncio.Task[None] | None = None
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._searches: set[asyncio.Task[None]] = set()
        """Tasks that find interrupted turns and resume them."""

    @property
    def url(self) -> str:
        """URL of the gateway."""
        host, port = self._sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    @property
    def serving(self) -> asyncio.Task[None]:
        """Task that ends when the server has stopped."""
        if self._serving is None:
            raise StoreClosed("the gateway was not started")
        return self._serving

    async def start(self) -> None:
        """Start serving requests."""
        self._serving = asyncio.create_task(self._server.serve(sockets=self._sockets))
        if self._gateway.read_only:
            return
        await self._channels.start()
        start_task(self._resume_turns(), self._background_tasks)
        start_task(self._apply_retention(), self._background_tasks)

    async def stop(self, *, hurry: asyncio.Event) -> CloseReport:
        """Stop the gateway. Work in progress may take up to `shutdown_timeout` seconds.

        As soon as `hurry` is set, the work is cancelled.
        """
        timeout = self._gateway.settings.gateway.shutdown_timeout
        self._gateway.closing.set()
        self._server.should_exit = True
        # `wait_for_tasks` also waits for turns whose client has disconnected.
        work_tasks = [
            self.serving,
            asyncio.create_task(self._channels.drain(wait_seconds=timeout)),
            asyncio.create_task(self._gateway.wait_for_tasks()),
        ]
        hurry_task = asyncio.create_task(hurry.wait())
        work = asyncio.gather(*work_tasks, return_exceptions=True)
        futures: set[asyncio.Future[Any]] = {work, hurry_task}
        await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        was_cancelled = await cancel_and_wait([hurry_task, *work_tasks[1:]])
        # Stop deliveries to chat apps while the store, which records the deliveries, is open.
        await self._channels.stop_sending()
        # `close` cancels all turns that are still running. The next start resumes them.
        report = await self._gateway.loop.close(patience=0)
        was_cancelled |= await cancel_and_wait(self._background_tasks | self._searches)
        await asyncio.wait({self.serving}, timeout=_SEND_SECONDS)
        if not self.serving.done():
            self._server.force_exit = True
            await asyncio.wait({self.serving}, timeout=_SEND_SECONDS)
        await self._channels.close()
        for listening_socket in self._sockets:
            listening_socket.close()
        if was_cancelled:
            raise asyncio.CancelledError
        return report

    async def _resume_turns(self) -> None:
        """Resume interrupted turns at the start, and later the turns of gateways that were killed.

        Searches run as separate tasks, so that a long turn does not delay the next search.
        """
        takeover = self._gateway.settings.gateway.takeover
        idle_for = 0.0
        while not self._gateway.closing.is_set():
            if len(self._searches) < _MAX_PARALLEL_SEARCHES:
                start_task(self._resume_once(idle_for), self._searches)
            idle_for = takeover
            await asyncio.sleep(takeover / _SEARCHES_PER_TAKEOVER)

    async def _apply_retention(self) -> None:
        """Apply the retention rules once an hour, if the settings have retention rules."""
        rules = rules_of(self._gateway.settings)
        stores = list(dict.fromkeys(agent.spec.sessions for agent in self._gateway.loop.registry))
        wait_seconds = _FIRST_RETENTION_SECONDS
        while rules and not self._gateway.closing.is_set():
            await asyncio.sleep(wait_seconds)
            wait_seconds = _RETENTION_SECONDS
            try:
                closing = self._gateway.closing.is_set
                await asyncio.to_thread(apply_rules_everywhere, stores, rules, should_stop=closing)
            except Exception:
                _logger.exception("applying the retention rules failed")

    async def _resume_once(self, idle_for: float) -> None:
        try:
            await self._gateway.loop.resume(idle_for=idle_for, each=self._channels.deliver)
        except StoreClosed:
            return
        except Exception:
            if not self._gateway.closing.is_set():
                _logger.exception("resuming interrupted turns failed")
