"""The uvicorn server: its settings, and no signal handlers.

uvicorn limits the connections and the size of a request head. It does not limit how long a client
may take: a gateway that other machines can reach needs a proxy in front of it.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from stenolog.gateway.limits import MAX_HEAD_BYTES

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
