"""Bodies that are too large or too slow, and places that are taken."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stenolog.gateway.requests import BodyLimit
from stenolog.gateway.shared_state import ConcurrencyLimit, Slot, SlotResponse

MOST = 100
FOR_EVER = 3_600.0


async def _length(request: Request) -> Response:
    return PlainTextResponse(str(len(await request.body())))


async def _ignoring(request: Request) -> Response:
    del request
    return PlainTextResponse("not read")


ECHO = Starlette(
    routes=[
        Route("/", _length, methods=["GET", "POST"]),
        Route("/ignoring", _ignoring, methods=["POST"]),
    ]
)


def _ask(
    body: bytes | Iterable[bytes] = b"", *, app: ASGIApp = ECHO, path: str = "/"
) -> httpx2.Response:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in body:
            yield piece if isinstance(piece, bytes) else b""

    async def main() -> httpx2.Response:
        transport = httpx2.ASGITransport(BodyLimit(app, max_bytes=MOST, max_seconds=FOR_EVER))
        async with httpx2.AsyncClient(transport=transport, base_url="http://steno") as client:
            return await client.post(path, content=body if isinstance(body, bytes) else pieces())

    return asyncio.run(main())


@given(st.lists(st.integers(0, 60), max_size=6))
def test_body_within_the_limit_is_accepted(sizes: list[int]) -> None:
    answer = _ask([b"x" * size for size in sizes])
    total = sum(sizes)
    assert answer.status_code == (200 if total <= MOST else 413)
    assert total > MOST or answer.text == str(total)


def test_body_with_a_too_large_content_length_is_not_read() -> None:
    asked = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive, send
        asked.append(1)

    refused = _ask(b"x" * (MOST + 1), app=app)
    assert (refused.status_code, asked) == (413, [])
    assert refused.json()["error"]["code"] == "body_too_large"


def test_reading_stops_at_the_body_limit() -> None:
    taken = []

    def long() -> Iterable[bytes]:
        for _ in range(1_000):
            taken.append(1)
            yield b"x" * 10

    assert _ask(long()).status_code == 413
    assert len(taken) == MOST // 10 + 1


def test_unread_body_is_not_counted() -> None:
    assert _ask([b"x" * 1_000], path="/ignoring").text == "not read"


def test_application_cannot_override_the_rejection() -> None:
    async def stubborn(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await PlainTextResponse("all is well")(scope, receive, send)
        raise RuntimeError("and then it fails")

    refused = _ask([b"x" * 60, b"x" * 60], app=stubborn)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "body_too_large")


async def _sent(limit: BodyLimit, receive: Receive) -> list[Message]:
    """What is answered to a request whose body comes like this."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
    await limit(scope, receive, send)
    return sent


async def test_disconnect_of_the_client_is_not_an_application_error() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    sent = await _sent(BodyLimit(ECHO, max_bytes=10, max_seconds=FOR_EVER), receive)
    # What is sent then goes nowhere.
    assert [message.get("status") for message in sent][:1] in ([], [500])


def test_application_errors_are_raised_unchanged() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive, send
        raise RuntimeError("its own")

    with pytest.raises(RuntimeError, match="its own"):
        _ask(b"x", app=failing)


def test_started_response_is_not_started_again() -> None:
    async def early(scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass
        await send({"type": "http.response.body", "body": b"half"})

    answer = _ask([b"x" * 60, b"x" * 60], app=early)
    assert (answer.status_code, answer.text) == (200, "half")


async def test_slow_body_is_rejected_after_the_timeout() -> None:
    async def receive() -> Message:
        # Each piece comes sooner than the time that all of them have together.
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    answer = await _sent(BodyLimit(ECHO, max_bytes=10_000, max_seconds=0.1), receive)
    assert answer[0]["status"] == 408
    assert b"body_too_slow" in answer[1]["body"]


async def test_timeout_counts_only_waiting_for_the_client() -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": b"x", "more_body": False}

    async def thinking(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.05)
        await ECHO(scope, receive, send)

    sent = await _sent(BodyLimit(thinking, max_bytes=10, max_seconds=0.01), receive)
    assert sent[0]["status"] == 200


async def test_no_timeout_applies_after_the_body() -> None:
    body: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if body:
            return body.pop()
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def listening(scope: Scope, receive: Receive, send: Send) -> None:
        del scope, send
        while (await receive())["type"] != "http.disconnect":
            pass

    assert await _sent(BodyLimit(listening, max_bytes=10, max_seconds=0.01), receive) == []


def test_announced_body_of_exactly_the_limit_is_accepted() -> None:
    assert _ask(b"x" * MOST).text == str(MOST)


async def test_non_http_scopes_are_passed_on() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        del receive, send
        seen.append(scope["type"])

    async def receive() -> Message:
        return {}

    async def send(message: Message) -> None:
        del message

    await BodyLimit(app, max_bytes=1, max_seconds=1)({"type": "lifespan"}, receive, send)
    assert seen == ["lifespan"]


turn_limit = partial(ConcurrencyLimit, status=429, noun="requests")
stream_limit = partial(ConcurrencyLimit, status=503, noun="streams")


@pytest.mark.parametrize(("make", "status"), [(turn_limit, 429), (stream_limit, 503)])
def test_request_above_the_concurrency_limit_is_rejected_immediately(
    make: Callable[[int], ConcurrencyLimit], status: int
) -> None:
    admission = make(2)
    first, second = admission.admit(), admission.admit()
    for _ in range(3):
        with pytest.raises(HTTPException) as refused:
            admission.admit()
        assert refused.value.status_code == status
        assert refused.value.headers == {"Retry-After": "1"}
    assert admission.in_use == 2
    first.close()
    with admission.admit():
        assert admission.in_use == 2
    second.close()
    assert admission.in_use == 0


def test_slot_is_released_once() -> None:
    admission = turn_limit(2)
    kept, given = admission.admit(), admission.admit()
    for _ in range(3):
        given.close()
    assert admission.in_use == 1
    with pytest.raises(RuntimeError), kept:
        raise RuntimeError
    assert admission.in_use == 0


@given(st.lists(st.booleans(), max_size=60))
def test_number_of_slots_in_use_never_exceeds_the_limit(comings: list[bool]) -> None:
    admission = turn_limit(3)
    inside: list[Slot] = []
    for comes in comings:
        if not comes and inside:
            inside.pop().close()
        elif comes and len(inside) < 3:
            inside.append(admission.admit())
        elif comes:
            with pytest.raises(HTTPException):
                admission.admit()
        assert admission.in_use == len(inside) <= 3


@pytest.mark.parametrize("fails", [False, True])
def test_stream_holds_its_slot_until_it_ends(fails: bool) -> None:
    admission = stream_limit(1)
    seen = []

    async def pieces() -> AsyncIterator[bytes]:
        seen.append(admission.in_use)
        yield b"x"
        if fails:
            raise RuntimeError("cut")

    async def stream(request: Request) -> Response:
        del request
        return SlotResponse(StreamingResponse(pieces()), admission.admit())

    app = Starlette(routes=[Route("/", stream, methods=["POST"])])
    if fails:
        with pytest.raises(RuntimeError, match="cut"):
            _ask(app=app)
    else:
        assert _ask(app=app).text == "x"
    assert (seen, admission.in_use) == ([1], 0)


async def test_stream_that_never_starts_releases_its_slot() -> None:
    admission = stream_limit(1)

    async def gone(message: Message) -> None:
        raise OSError(str(message))

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    held = SlotResponse(PlainTextResponse("x"), admission.admit())
    with pytest.raises(OSError, match="start"):
        await held({"type": "http"}, receive, gone)
    assert admission.in_use == 0
