"""Runs an ASGI application with the gateway's server in a thread of this process."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import ASGIApp

from stenolog.gateway.daemon import Server, server_config


@contextmanager
def served(app: ASGIApp, *, connections: int = 200, idle: int = 1) -> Iterator[int]:
    """Run the server and yield its port."""
    bound = socket.create_server(("127.0.0.1", 0))
    config = server_config(app, max_connections=connections, idle_seconds=idle, stop_seconds=1.0)
    server = Server(config)
    # Connections are accepted from here on: they wait until the server has started.
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
