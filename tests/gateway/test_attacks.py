"""Attacks on the gateway's outer half, over real connections: who may ask, and how much."""

import contextlib
import re
import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from stenolog.gateway.access import AccessMiddleware
from stenolog.gateway.access_token import Token
from stenolog.gateway.hosts import known_hosts
from stenolog.gateway.login import Cookies, LoginLinks, login_routes
from stenolog.gateway.requests import BodyLimit
from support.app_server import served

TOKEN = "a-token-that-must-never-be-seen-in-any-log-0"
BEARER = f"Authorization: Bearer {TOKEN}"
OWN = Token(TOKEN.encode()).host_name()
SECRET = "secret answer"
MOST = 1_048_576
MEGABYTE = b"x" * 1_048_576
GIGABYTE = 1_073_741_824
FLAT = 50 * 1_048_576
"""Bytes by which the process may grow, whatever is sent to it."""


async def _secret(request: Request) -> Response:
    return PlainTextResponse(f"{SECRET}: {len(await request.body())} bytes")


async def _open(request: Request) -> Response:
    del request
    return PlainTextResponse("open")


def _application(*, seconds: float) -> AccessMiddleware:
    token = Token(TOKEN.encode())
    cookies = Cookies(token)
    names = known_hosts(bound_host="127.0.0.1", origins=("https://chat.example.org",), own_host=OWN)
    routes = [
        *login_routes(token, LoginLinks(), cookies, names, OWN),
        Route("/healthz", _open),
        Route("/webhooks/{name}", _open, methods=["POST"]),
        Route("/", _secret),
        Route("/v1/x", _secret, methods=["GET", "POST"]),
        Route("/v1/{rest:path}", _secret, methods=["GET", "POST"]),
    ]
    return AccessMiddleware(
        BodyLimit(Starlette(routes=routes), max_bytes=MOST, max_seconds=seconds),
        token=token,
        known_hosts=names,
        cookies=cookies,
        open_paths=("/healthz",),
        open_prefixes=("/webhooks/",),
    )


@pytest.fixture(scope="module")
def roomy() -> Iterator[int]:
    """A server that takes its time."""
    with served(_application(seconds=30.0)) as port:
        yield port


@pytest.fixture(scope="module")
def hasty() -> Iterator[int]:
    """A server that waits for nobody."""
    with served(_application(seconds=0.2), idle=0) as port:
        yield port


@pytest.fixture(autouse=True)
def unharmed(roomy: int, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """After every attack the server goes on, and no log holds what opens it."""
    caplog.set_level(1)
    yield
    assert _status(_exchange(roomy, _get("/healthz", "Connection: close"))) == 200
    assert TOKEN not in caplog.text
    assert "code=" not in caplog.text
    assert "Traceback" not in caplog.text


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def _exchange(port: int, sent: bytes) -> bytes:
    """All that is answered to these bytes until the server closes the connection."""
    with _connected(port) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(sent)
        return _received(connection)


def _received(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65_536):
            found += part
    return found


def _head(method: str, target: str, *headers: str) -> bytes:
    return "\r\n".join([f"{method} {target} HTTP/1.1", *headers, "", ""]).encode("latin-1")


def _get(target: str, *headers: str) -> bytes:
    return _head("GET", target, "Host: localhost", *headers)


def _statuses(answer: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def _status(answer: bytes) -> int:
    (status,) = _statuses(answer)
    return status


def _ask(port: int, target: str, *headers: str, method: str = "GET") -> bytes:
    return _exchange(port, _head(method, target, *headers, "Connection: close"))


# --- for whom, and from which page -----------------------------------------------------------


def test_request_without_a_host_is_rejected(roomy: int) -> None:
    answer = _exchange(roomy, f"GET /v1/x HTTP/1.0\r\n{BEARER}\r\n\r\n".encode())
    assert _status(answer) == 421


@pytest.mark.parametrize(
    "target", ["http://evil.example/v1/x", "http://localhost/v1/x", "https://evil.example", "v1/x"]
)
def test_absolute_request_target_is_rejected(roomy: int, target: str) -> None:
    answer = _ask(roomy, target, "Host: localhost", BEARER)
    assert _status(answer) == 400


# --- paths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "//",
        "/v1/x",
        "//v1/x",
        "/V1/X",
        "/v1/x/",
        "/v1//x",
        "/v1/x?/healthz",
        "/v1/x#/healthz",
        "/v1/x;/healthz",
        "/healthz/../v1/x",
        "/healthz/..%2fv1/x",
        "/healthz%2f..%2fv1/x",
        "/healthz%252f..%252fv1/x",
        "/healthz/%2e%2e/v1/x",
        "/healthz\\..\\v1\\x",
        "/healthz%00/v1/x",
        "/healthz%0d%0a",
        "/healthz;/v1/x",
        "/healthz/",
        "/HEALTHZ",
        "/./healthz",
        "/%2e%2e/",
        "/%2e%2e/v1/x",
        "/../v1/x",
        "/login/../v1/x",
        "/login/",
        "/login%2f..%2fv1/x",
        "/webhooks/../v1/x",
        "/webhooks/..%2fv1%2fx",
        "/webhooks/%2e%2e%2fv1%2fx",
        "/webhooks/..",
        "/webhooks//v1/x",
        "/webhooks/a/../../v1/x",
        "/v1/../healthz",
        "/v1/%68ealthz",
        "/%68ealthz",
        "/webhooks%2fa",
        "/webhooks%2f..%2fv1/x",
        "/webhooks",
        "/webhooks/",
        "/webhooks/a%5cb",
        "/%77ebhooks/a",
    ],
)
def test_no_path_bypasses_the_token(roomy: int, target: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS"):
        answer = _ask(roomy, target, "Host: localhost", method=method)
        assert (method, _status(answer)) == (method, 401)
        assert SECRET.encode() not in answer


# --- how much, and how slowly ----------------------------------------------------------------


def _resident() -> int:
    """Bytes of memory that this process has now; where that is not told, had at most."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * resource.getpagesize()
    max_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_bytes if sys.platform == "darwin" else max_bytes * 1024


def _flooded(port: int, head: bytes, piece: bytes, *, pieces: int) -> tuple[bytes, int, int]:
    """What is answered to a head and very many pieces, how many were sent, and how it grew."""
    before, max_bytes, sent = _resident(), 0, 0
    with _connected(port) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(head)
            for _ in range(pieces):
                connection.sendall(piece)
                sent += 1
                max_bytes = max(max_bytes, _resident() - before)
        return _received(connection), sent, max_bytes


@pytest.mark.parametrize("who", [BEARER, "X: y"])
@pytest.mark.parametrize(
    ("length", "piece"),
    [
        (f"Content-Length: {GIGABYTE}", MEGABYTE),
        ("Transfer-Encoding: chunked", b"%x\r\n%s\r\n" % (len(MEGABYTE), MEGABYTE)),
    ],
    ids=["by length", "by chunks"],
)
def test_gigabyte_body_is_rejected_early(roomy: int, who: str, length: str, piece: bytes) -> None:
    head = _head("POST", "/v1/x", "Host: localhost", who, length)
    pieces = 100 * len(MEGABYTE) // len(piece)
    answer, sent, grown = _flooded(roomy, head, piece, pieces=pieces)
    assert sent < pieces
    assert grown < FLAT
    # The answer may be lost where the client does not stop to read it; never is it a good one.
    assert _statuses(answer) in ([], [413 if who == BEARER else 401])


def test_tiny_chunks_of_a_client_without_the_token_are_not_read(roomy: int) -> None:
    head = _head("POST", "/v1/x", "Host: localhost", "Transfer-Encoding: chunked")
    answer, sent, grown = _flooded(roomy, head, b"1\r\nx\r\n" * 100_000, pieces=100)
    assert sent < 100
    assert grown < FLAT
    assert _statuses(answer) in ([], [401])


def test_client_that_reads_gets_the_reason_of_the_rejection(roomy: int) -> None:
    for length in (f"Content-Length: {GIGABYTE}", "Content-Length: " + "9" * 15):
        answer = _exchange(roomy, _head("POST", "/v1/x", "Host: localhost", BEARER, length))
        assert _status(answer) == 413
    waiting = _head("POST", "/v1/x", "Host: localhost", BEARER, length, "Expect: 100-continue")
    assert _statuses(_exchange(roomy, waiting)) == [413]


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    "flood",
    [
        "".join(f"X-{number}: y\r\n" for number in range(10_000)),
        "X: y\r\n" * 10_000,
        f"X: {'y' * 1_048_576}\r\n",
        f"Cookie: {'steno=1; ' * 100_000}\r\n",
        f"{'y' * 1_048_576}",
        " folded\r\n" * 100_000,
    ],
    ids=["many", "same", "long", "cookie", "no line end", "folded"],
)
@pytest.mark.parametrize("who", [BEARER, "X: y"])
def test_flood_of_headers_is_rejected(roomy: int, flood: str, who: str) -> None:
    before = _resident()
    head = f"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n{who}\r\n{flood}\r\n".encode()
    answer = _exchange(roomy, head)
    assert _statuses(answer) in ([], [400], [431])
    assert SECRET.encode() not in answer
    assert _resident() - before < FLAT


def test_long_request_target_is_rejected(roomy: int) -> None:
    assert _statuses(_exchange(roomy, _get("/" + "x" * 1_048_576))) in ([], [400])


@pytest.mark.parametrize("length", ["Content-Length: 1000", "Transfer-Encoding: chunked"])
def test_incomplete_body_times_out(hasty: int, length: str) -> None:
    head = _head("POST", "/v1/x", "Host: localhost", BEARER, length)
    assert _statuses(_exchange(hasty, head)) == [408]
    assert _statuses(_exchange(hasty, head + b"5\r\nab")) == [408]


def test_rejected_client_is_answered_before_its_body_arrives(hasty: int) -> None:
    head = _head("POST", "/v1/x", "Host: localhost", "Content-Length: 1000")
    assert _statuses(_exchange(hasty, head)) == [401]


# --- one request that looks like two ---------------------------------------------------------

INNER = b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def _post(*headers: str) -> bytes:
    return _head("POST", "/v1/x", "Host: localhost", BEARER, *headers)


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    "sent",
    [
        _post("Content-Length: 4", "Transfer-Encoding: chunked") + b"0\r\n\r\n" + INNER,
        _post(f"Content-Length: {len(INNER)}", "Transfer-Encoding: chunked") + INNER,
        _post("Transfer-Encoding: chunked", "Content-Length: 0") + INNER,
        _post("Content-Length: 0", f"Content-Length: {len(INNER)}") + INNER,
        _post("Content-Length: 0", "Content-Length: 0") + INNER,
        _post(f"Content-Length: 0, {len(INNER)}") + INNER,
        _post("Content-Length: +0") + INNER,
        _post("Content-Length: -1") + INNER,
        _post("Content-Length: 0x0") + INNER,
        _post("Content-Length : 0") + INNER,
        _post("Transfer-Encoding: xchunked") + b"0\r\n\r\n" + INNER,
        _post("Transfer-Encoding: chunked, identity") + b"0\r\n\r\n" + INNER,
        _post("Transfer-Encoding: chunked", "Transfer-Encoding: x") + b"0\r\n\r\n" + INNER,
        _post("Transfer-Encoding:\x0bchunked") + b"0\r\n\r\n" + INNER,
        _post("Transfer-Encoding : chunked") + b"0\r\n\r\n" + INNER,
        _post("Transfer-Encoding: chunked") + b"0;\n\r\n" + INNER,
        _post("Transfer-Encoding: chunked") + b"0\n\n" + INNER,
        _post("Transfer-Encoding: chunked") + b"1\r\nxxx0\r\n\r\n" + INNER,
        _post("Transfer-Encoding: chunked") + b"-1\r\n\r\n" + INNER,
        _post("Content-Length: 0").replace(b"\r\n", b"\n") + INNER,
        _post("Content-Length: 0").replace(b"\r\n", b"\r") + INNER,
        _post("Content-Length: 0", "X: y\n\nGET /v1/x HTTP/1.1\nHost: localhost") + INNER,
        _post("Content-Length: 0", "X: y\x00z") + INNER,
        _post("Content-Length: 0") + b"\n" + INNER,
        _post("Content-Length: 0") + INNER,
    ],
)
def test_smuggled_request_is_not_served(roomy: int, sent: bytes) -> None:
    answer = _exchange(roomy, sent)
    assert _statuses(answer).count(200) <= 1
    assert answer.count(SECRET.encode()) <= 1


def test_body_is_never_parsed_as_a_request(roomy: int) -> None:
    inner = _get("/v1/x", BEARER)
    sent = _head("POST", "/v1/x", "Host: localhost", f"Content-Length: {len(inner)}") + inner
    assert _statuses(_exchange(roomy, sent)) == [401]
    sent = _head("POST", "/v1/x", "Host: localhost", BEARER, f"Content-Length: {GIGABYTE}") + inner
    assert _statuses(_exchange(roomy, sent)) == [413]


def test_websocket_upgrade_is_rejected(hasty: int) -> None:
    wanted = (
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )
    assert _statuses(_exchange(hasty, _get("/v1/x", *wanted))) == [401]
    assert 101 not in _statuses(_exchange(hasty, _get("/healthz", *wanted)))


@pytest.mark.parametrize(
    "nonsense",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x00" * 99],
    ids=["tls", "http/2", "zeros"],
)
def test_invalid_http_is_rejected(hasty: int, nonsense: bytes) -> None:
    assert set(_statuses(_exchange(hasty, nonsense))) <= {400, 421}
