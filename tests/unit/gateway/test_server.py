"""The server: it leaves signals alone, stops when it is told to, and waits for no client."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine

import pytest
from starlette.types import Message, Receive, Scope, Send

from stenolog.gateway.server import ClientLimits, ConnectionLimit, Server, server_config

SHORT = 0.2
LONG = 60.0
PATIENT = ClientLimits(head_seconds=LONG, rest_seconds=LONG, unread_seconds=LONG)


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
async def _served(
    limits: ClientLimits = PATIENT, *, connections: int = 100, idle: int = 60
) -> AsyncIterator[Served]:
    bound = socket.create_server(("127.0.0.1", 0))
    server = Server(
        server_config(
            _app, limits=limits, max_connections=connections, idle_seconds=idle, stop_seconds=0.0
        )
    )
    serving = asyncio.create_task(server.serve(sockets=[bound]))
    await _until(lambda: server.started)
    try:
        yield Served(server, bound.getsockname()[1])
    finally:
        server.should_exit = True
        await serving


def _get(path: str = "/", *more: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *more, "", ""]).encode()


def _run(main: Coroutine[object, None, None]) -> None:
    """Run a test; a client that is waited for all the same ends it."""

    async def bounded() -> None:
        async with asyncio.timeout(15):
            await main

    asyncio.run(bounded())


async def _ended(reader: asyncio.StreamReader) -> bytes:
    """All that came until the connection was closed."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65_536):
            found += part
    return found


def test_server_uses_a_bound_socket_and_installs_no_signal_handler() -> None:
    async def main() -> None:
        before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
        async with _served() as served, served.client(_get("/", "Connection: close")) as (read, _):
            assert {kind: signal.getsignal(kind) for kind in before} == before
            answer = await _ended(read)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"\r\n\r\nok")
        assert b"server:" not in answer.lower()
        assert served.server.started

    _run(main())


def test_addresses_and_headers_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        sent = _get("/?code=hush", "Connection: close", "Authorization: Bearer hush")
        async with _served() as served, served.client(sent) as (read, _):
            assert await _ended(read)

    with caplog.at_level(1):
        _run(main())
        assert logging.getLogger("uvicorn.error").getEffectiveLevel() == logging.WARNING
    assert "hush" not in caplog.text


def test_incomplete_head_times_out() -> None:
    async def main() -> None:
        quick = ClientLimits(head_seconds=SHORT, rest_seconds=LONG, unread_seconds=LONG)
        async with _served(quick) as served:
            for begun in (b"", b"G", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "):
                async with served.client(begun) as (read, _):
                    assert await _ended(read) == b""

    _run(main())


def test_slow_head_does_not_extend_the_timeout() -> None:
    async def main() -> None:
        quick = ClientLimits(head_seconds=SHORT, rest_seconds=LONG, unread_seconds=LONG)
        async with _served(quick) as served, served.client(b"GET / HTTP/1.1\r\n") as (read, write):
            ending = asyncio.create_task(_ended(read))
            while not ending.done():
                with contextlib.suppress(ConnectionError):
                    write.write(b"X: y\r\n")
                    await write.drain()
                await asyncio.sleep(SHORT / 10)
            assert await ending == b""

    _run(main())


def test_head_timeout_applies_to_later_requests() -> None:
    async def main() -> None:
        quick = ClientLimits(head_seconds=SHORT, rest_seconds=LONG, unread_seconds=LONG)
        async with _served(quick) as served, served.client(_get()) as (read, write):
            assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            write.write(b"GET / HT")
            assert await _ended(read) == b""

    _run(main())


def test_no_timeout_applies_after_a_complete_head() -> None:
    async def main() -> None:
        quick = ClientLimits(head_seconds=SHORT, rest_seconds=SHORT, unread_seconds=SHORT)
        async with _served(quick) as served, served.client(_get("/waits")) as (read, _):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(read.read(1), SHORT * 4)

    _run(main())


def test_an_idle_connection_is_closed() -> None:
    async def main() -> None:
        async with _served(idle=0) as served, served.client(_get()) as (read, _):
            assert (await _ended(read)).endswith(b"ok")

    _run(main())


def test_pipelined_requests_are_all_answered() -> None:
    async def main() -> None:
        async with _served() as served, served.client(_get() * 3) as (read, _):
            for _ in range(3):
                assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    _run(main())


def test_rest_of_a_body_after_the_response_times_out() -> None:
    async def main() -> None:
        quick = ClientLimits(head_seconds=LONG, rest_seconds=SHORT, unread_seconds=LONG)
        async with _served(quick) as served:
            sent = _get("/", "Content-Length: 1000000")
            async with served.client(sent) as (read, _):
                assert (await _ended(read)).endswith(b"ok")

    _run(main())


def test_rest_of_a_body_after_the_response_is_limited_in_size() -> None:
    async def main() -> None:
        small = ClientLimits(
            head_seconds=LONG, rest_seconds=LONG, unread_seconds=LONG, rest_bytes=1_000
        )
        sent = _get("/", "Content-Length: 100000")
        async with _served(small) as served, served.client(sent) as (read, write):
            assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            write.write(b"x" * 2_000)
            assert await _ended(read) == b""

    _run(main())


def test_connection_continues_if_the_rest_of_the_body_arrives_in_time() -> None:
    async def main() -> None:
        sent = _get("/", "Content-Length: 10")
        async with _served() as served, served.client(sent) as (read, write):
            assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            write.write(b"x" * 10 + _get())
            assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    _run(main())


def test_body_of_mostly_chunk_framing_is_rejected() -> None:
    async def main() -> None:
        async with _served() as served:
            for chunk in (b"1\r\nx\r\n", b"1;" + b"y" * 1_000 + b"\r\nx\r\n"):
                sent = _get("/waits", "Transfer-Encoding: chunked") + chunk * 20_000
                async with served.client(sent) as (read, _):
                    assert await _ended(read) == b""

    _run(main())


def test_client_that_does_not_read_is_disconnected() -> None:
    async def main() -> None:
        quick = ClientLimits(head_seconds=LONG, rest_seconds=LONG, unread_seconds=SHORT)
        async with _served(quick) as served, served.client(_get("/endless")) as (read, _):
            await read.readuntil(b"\r\n\r\n")
            # The client's library reads on by itself up to its limit, and no further.
            await _until(lambda: not served.server.server_state.connections)

    _run(main())


async def _taken(served: Served, count: int) -> None:
    """Until so many connections are open."""
    await _until(lambda: len(served.server.server_state.connections) == count)


@pytest.mark.parametrize("begun", [b"", b"GET / HT"])
def test_idle_connections_do_not_block_new_ones(begun: bytes) -> None:
    async def main() -> None:
        async with _served(connections=3) as served, contextlib.AsyncExitStack() as idle:
            opened = [await idle.enter_async_context(served.client(begun)) for _ in range(3)]
            await _taken(served, 3)
            # Everyone that comes is answered, also those that go on to use what they have.
            for count in (1, 2, 3):
                read, write = await idle.enter_async_context(served.client(_get()))
                assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                write.write(_get())
                assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
                # The oldest goes first, and no more than are in the way.
                assert await _ended(opened[count - 1][0]) == b""
                assert len(served.server.server_state.connections) == 3

    _run(main())


def test_answered_idle_connections_do_not_block_new_ones() -> None:
    async def main() -> None:
        async with _served(connections=2) as served, contextlib.AsyncExitStack() as idle:
            answered = [await idle.enter_async_context(served.client(_get())) for _ in range(2)]
            for read, _ in answered:
                await read.readuntil(b"ok")
            for _ in range(5):
                async with served.client(_get()) as (read, _):
                    assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    _run(main())


def test_unanswered_idle_connections_are_closed_first() -> None:
    async def main() -> None:
        async with _served(connections=2) as served, served.client(_get()) as (read, write):
            await read.readuntil(b"ok")
            async with contextlib.AsyncExitStack() as idle:
                opened = [await idle.enter_async_context(served.client()) for _ in range(20)]
                await asyncio.gather(*(_ended(one) for one, _ in opened[:-1]))
                write.write(_get())
                assert (await read.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    _run(main())


def test_simultaneous_connections_are_limited() -> None:
    async def main() -> None:
        async with _served(connections=3) as served, contextlib.AsyncExitStack() as idle:
            # The server has no turn between them, and takes all of them at once.
            made = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(9)]
            opened = [await asyncio.open_connection(sock=one) for one in made]
            for _, writer in opened:
                idle.callback(writer.close)
            await asyncio.gather(*(_ended(read) for read, _ in opened[:6]))
            assert len(served.server.server_state.connections) == 3
            opened[-1][1].write(_get())
            assert (await opened[-1][0].readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    _run(main())


def test_connection_is_closed_if_all_others_are_busy() -> None:
    async def main() -> None:
        async with _served(connections=2) as served, contextlib.AsyncExitStack() as asking:
            for _ in range(2):
                await asking.enter_async_context(served.client(_get("/waits")))
            await _until(lambda: len(served.server.server_state.tasks) == 2)
            for _ in range(20):
                async with served.client(_get()) as (read, _):
                    assert await _ended(read) == b""
            assert len(served.server.server_state.tasks) == 2

    _run(main())


def test_flood_of_connections_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with _served(connections=2) as served, contextlib.AsyncExitStack() as idle:
            opened = [await idle.enter_async_context(served.client()) for _ in range(30)]
            await asyncio.gather(*(_ended(read) for read, _ in opened[:28]))
            assert [record.name for record in caplog.records] == ["stenolog"]

    _run(main())


def test_closed_connections_are_logged_once_per_minute_with_a_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    connection_limit = ConnectionLimit(5, lambda: now)
    for now in (0.0, 1.0, 59.0, 60.0, 61.0):  # noqa: B007
        connection_limit.count_closed()
    assert [record.getMessage() for record in caplog.records] == [
        f"too many connections: the limit is 5, and {count} connections were closed"
        for count in (1, 3)
    ]
    assert connection_limit.closed_count == 5


@pytest.mark.parametrize("begun", [b"", b"GET / HT", _get("/waits"), b"nonsense\r\n\r\n"])
def test_server_stops_with_any_open_connection(begun: bytes) -> None:
    async def main() -> None:
        async with _served() as served:
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(begun)
            await writer.drain()
        await _until(lambda: not served.server.server_state.tasks)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    _run(main())


def test_invalid_http_during_a_response_closes_the_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        head = _get("/endless", "Transfer-Encoding: chunked")
        async with _served() as served, served.client(head) as (read, write):
            await read.readuntil(b"\r\n\r\n")
            write.write(b"this is no chunk\r\n")
            await _ended(read)

    _run(main())
    assert "Fatal error" not in caplog.text
