"""The server: it leaves signals alone, stops when it is told to, and waits for no client."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from starlette.types import Message, Receive, Scope, Send

from stenolog.gateway.daemon import Server, server_config

LONG = 60.0


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers at once; `/endless` never stops, and `/waits` never begins."""
    if scope["type"] == "lifespan":
        for event in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{event}.complete"})
        return
    if scope["path"] == "/waits":
        await asyncio.sleep(LONG)
    ok: Message = {"type": "http.response.start", "status": 200, "headers": []}
    if scope["path"] == "/endless":
        await send(ok)
        gone = asyncio.create_task(_gone(receive))
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            await asyncio.sleep(0)
        return
    await send({**ok, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


class Served:
    """A server that runs, and how to connect to it."""

    def __init__(self, server: Server, port: int) -> None:
        self.server = server
        self.port = port

    @contextlib.asynccontextmanager
    async def client(
        self, sent: bytes = b""
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection over which this was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(sent)
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def _served(*, connections: int = 100, idle: int = 60) -> AsyncIterator[Served]:
    bound = socket.create_server(("127.0.0.1", 0))
    server = Server(
        server_config(_app, max_connections=connections, idle_seconds=idle, stop_seconds=0.0)
    )
    # A client that is waited for all the same ends the test.
    async with asyncio.timeout(15):
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        await _until(lambda: server.started)
        try:
            yield Served(server, bound.getsockname()[1])
        finally:
            server.should_exit = True
            await serving


def _get(path: str = "/", *more: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *more, "", ""]).encode()


async def _ended(reader: asyncio.StreamReader) -> bytes:
    """All that came until the connection was closed."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65_536):
            found += part
    return found


async def test_server_uses_a_bound_socket_and_installs_no_signal_handler() -> None:
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    async with _served() as served, served.client(_get("/", "Connection: close")) as (read, _):
        assert {kind: signal.getsignal(kind) for kind in before} == before
        answer = await _ended(read)
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"\r\n\r\nok")
    assert b"server:" not in answer.lower()
    assert served.server.started


async def test_addresses_and_headers_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    sent = _get("/?code=hush", "Connection: close", "Authorization: Bearer hush")
    with caplog.at_level(1):
        async with _served() as served, served.client(sent) as (read, _):
            assert await _ended(read)
        assert logging.getLogger("uvicorn.error").getEffectiveLevel() == logging.WARNING
    assert "hush" not in caplog.text


async def test_an_idle_connection_is_closed() -> None:
    async with _served(idle=0) as served, served.client(_get()) as (read, _):
        assert (await _ended(read)).endswith(b"ok")


async def test_requests_above_the_connection_limit_get_503() -> None:
    async with _served(connections=2) as served, contextlib.AsyncExitStack() as opened:
        read, write = await opened.enter_async_context(served.client(_get()))
        assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        await opened.enter_async_context(served.client())
        await _until(lambda: len(served.server.server_state.connections) == 2)
        write.write(_get())
        assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        async with served.client(_get("/", "Connection: close")) as (rejected, _):
            assert (await _ended(rejected)).startswith(b"HTTP/1.1 503")
        await _until(lambda: len(served.server.server_state.connections) == 2)
        write.write(_get())
        assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("begun", [b"", b"GET / HT", _get("/waits"), b"nonsense\r\n\r\n"])
async def test_server_stops_with_any_open_connection(begun: bytes) -> None:
    async with _served() as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(begun)
        await writer.drain()
    await _until(lambda: not served.server.server_state.tasks)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
