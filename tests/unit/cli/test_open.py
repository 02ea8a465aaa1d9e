"""`steno open`: a link for the browser, and what is said where there is none."""

import json
import re
import socket
import stat
import sys
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from starlette.applications import Starlette

from stenolog.gateway.access import AccessMiddleware
from stenolog.gateway.access_token import Token, read_or_create_token
from stenolog.gateway.hosts import known_hosts
from stenolog.gateway.login import Cookies, LoginLinks, login_routes
from support.app_server import served
from support.cli import Steno


@pytest.fixture(autouse=True)
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Token:
    """The token that the settings name; no browser is ever opened."""
    monkeypatch.setenv("STENO_GATEWAY__TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail(url))
    monkeypatch.setenv("DISPLAY", ":0")
    return read_or_create_token(tmp_path / "token")


@contextmanager
def _gateway(token: Token) -> Iterator[int]:
    cookies = Cookies(token)
    own = token.host_name()
    names = known_hosts(bound_host="127.0.0.1", own_host=own)
    app = Starlette(routes=login_routes(token, LoginLinks(), cookies, names, own))
    with served(AccessMiddleware(app, token=token, known_hosts=names, cookies=cookies)) as port:
        yield port


@contextmanager
def _answering(answer: bytes | Callable[[bytes], bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """Something at a port that gives this answer to whoever asks, and keeps what was asked."""
    asked: list[bytes] = []

    def run() -> None:
        connection, _ = bound.accept()
        with connection:
            asked.append(connection.recv(65_536))
            connection.sendall(answer if isinstance(answer, bytes) else answer(asked[0]))

    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield bound.getsockname()[1], asked
        finally:
            thread.join()


def _page(url: str) -> tuple[int, str]:
    """What a browser gets at this address: the status, and the cookie."""
    found = re.fullmatch(r"http://(steno-[0-9a-f]{16}\.localhost):(\d+)(/.*)", url)
    assert found is not None
    connection = HTTPConnection("127.0.0.1", int(found[2]))
    try:
        connection.request("GET", found[3], headers={"Host": f"{found[1]}:{found[2]}"})
        with connection.getresponse() as response:
            return response.status, response.headers.get("Set-Cookie", "")
    finally:
        connection.close()


def test_browser_is_opened_with_a_login_link(
    steno: Steno, token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def browser(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(webbrowser, "open", browser)
    with _gateway(token) as port:
        result = steno("open", "--port", str(port))
        assert (result.exit_code, result.stdout) == (0, "")
        assert result.stderr.startswith("Opened in your browser")
        url = _leads_to(opened)
        status, cookie = _page(url)
        assert (status, cookie[:6]) == (303, "steno=")
        assert _page(url)[0] == 403
        # The next one takes the place of the last.
        assert steno("open", "--port", str(port)).exit_code == 0
        assert _leads_to(opened[1:]) != url


def _leads_to(opened: list[str]) -> str:
    """Where the one file that a browser was told to open leads; its name tells no code."""
    (told,) = opened
    assert told.startswith("file:///")
    assert "code" not in told
    file = Path(told.removeprefix("file://"))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert list(file.parent.iterdir()) == [file]
    found = re.search(r'content="0;url=([^"]*)"', file.read_text())
    assert found is not None
    return found[1]


@pytest.mark.parametrize("missing", ["file", "browser", "display"])
def test_link_is_printed_if_no_browser_can_be_opened(
    steno: Steno, token: Token, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    if missing == "file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    elif missing == "browser":
        monkeypatch.setattr(webbrowser, "open", lambda url: bool(url.count("never")))
    elif sys.platform != "darwin":  # there, a display is always assumed
        monkeypatch.delenv("DISPLAY")
        monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    else:
        return
    with _gateway(token) as port:
        told = steno("open", "--port", str(port))
    assert "/login?code=" in told.stdout
    assert "Open this link" in told.stderr


def test_no_open_prints_the_link(steno: Steno, token: Token) -> None:
    with _gateway(token) as port:
        result = steno("open", "--port", str(port), "--no-open")
        assert (result.exit_code, result.stderr) == (0, "")
        assert _page(result.stdout.strip())[0] == 303
    assert token.value.decode() not in result.output


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost"])
def test_link_has_the_host_name_of_the_gateway(steno: Steno, token: Token, host: str) -> None:
    with _gateway(token) as port:
        result = steno("open", "--host", host, "--port", str(port), "--no-open")
    assert result.stdout.startswith(f"http://{token.host_name()}:{port}/login?code=")


def test_open_without_gateway_says_how_to_start_it(steno: Steno) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    result = steno("open", "--port", str(port))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"There is no gateway at 127.0.0.1:{port}" in result.stderr
    assert f"Start it with: steno serve --port {port}\n" in result.stderr


def test_rejected_token_is_reported(steno: Steno, token: Token) -> None:
    with _gateway(Token(token.value[::-1])) as port:
        result = steno("open", "--port", str(port))
    assert result.exit_code == 1
    assert "rejected the token" in result.stderr
    assert token.value.decode() not in result.output


def test_error_without_a_token_names_the_command_that_creates_it(
    steno: Steno, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STENO_GATEWAY__TOKEN_FILE", str(tmp_path / "none"))
    result = steno("open")
    assert result.exit_code == 1
    assert "`steno serve` creates it" in result.stderr


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.0 200 OK\r\n\r\n" + body
        for body in (b'{"url": "/login?code=1"}', b'{"url": 1, "proof": 1}', b"[]", b"[" * 9_000)
    ]
    + [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n"],
)
def test_other_server_is_not_a_gateway(steno: Steno, answer: bytes) -> None:
    with _answering(answer) as (port, _):
        result = steno("open", "--port", str(port))
    assert (result.exit_code, result.stdout) == (1, "")
    told = "(There is no gateway at 127.0.0.1|The server at 127.0.0.1:.* is not your gateway)"
    assert re.search(told, result.stderr)


@pytest.mark.parametrize(
    ("path", "opened"),
    [
        ("/login?code=1", True),
        ("@evil.example/", False),
        ("//evil.example/login?code=1", False),
        ("/login?code=1 2", False),
        ("/login?code=1\n", False),
        ("/login?code=1<", False),
    ],
)
def test_server_cannot_choose_the_opened_page(
    steno: Steno, token: Token, path: str, opened: bool
) -> None:
    def answer(asked: bytes) -> bytes:
        # This server even knows the token.
        own_proof = asked.partition(b"Steno ")[2].split()[0].split(b".")[1].decode()
        body = {"url": path, "proof": token.proof("give", own_proof, path)}
        return b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(body).encode()

    with _answering(answer) as (port, _):
        result = steno("open", "--port", str(port), "--no-open")
    assert (result.exit_code == 0, bool(result.stdout)) == (opened, opened)


def test_impostor_gets_no_token_and_no_redirect(steno: Steno, token: Token) -> None:
    link = "/login?code=" + "x" * 43
    for proof in ("", "0" * 64, Token(b"y" * 43).proof("give", link), "\ud800"):
        body = json.dumps({"url": link, "expires_in": 60, "proof": proof}).encode()
        with _answering(b"HTTP/1.0 200 OK\r\n\r\n" + body) as (port, asked):
            result = steno("open", "--port", str(port))
        assert (result.exit_code, result.stdout) == (1, "")
        assert "is not your gateway" in result.stderr
        assert b"POST /v1/login-links" in asked[0]
        assert token.value not in asked[0]


def test_impostor_cannot_relay_the_request(steno: Steno, token: Token) -> None:
    with _gateway(token) as real, socket.create_server(("127.0.0.1", 0)) as bound:

        def hand_on() -> None:
            connection, _ = bound.accept()
            with connection, socket.create_connection(("127.0.0.1", real)) as onwards:
                onwards.sendall(connection.recv(65_536))
                answers.append(onwards.recv(65_536))
                connection.sendall(answers[0])

        answers: list[bytes] = []
        thread = threading.Thread(target=hand_on)
        thread.start()
        result = steno("open", "--port", str(bound.getsockname()[1]))
        thread.join()
    assert (result.exit_code, result.stdout) == (1, "")
    assert answers[0].startswith(b"HTTP/1.1 401")


def test_link_uses_localhost_if_configured(
    steno: Steno, token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For browsers that do not resolve names below localhost."""
    monkeypatch.setenv("STENO_GATEWAY__HOSTS", '["steno.example.org", "localhost"]')
    with _gateway(token) as port:
        result = steno("open", "--port", str(port), "--no-open")
    assert result.stdout.startswith(f"http://localhost:{port}/login?code=")


def test_token_command_prints_only_the_token(steno: Steno, token: Token) -> None:
    printed = steno("token")
    assert (printed.exit_code, printed.stderr) == (0, "")
    assert printed.stdout == f"{token.value.decode()}\n"


def test_token_command_creates_the_token_that_the_gateway_will_use(
    steno: Steno, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.unlink()
    printed = steno("token").stdout
    assert read_or_create_token(file).value == printed.strip().encode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_token_command_refuses_a_file_that_others_can_read(steno: Steno, tmp_path: Path) -> None:
    (tmp_path / "token").chmod(0o644)
    printed = steno("token")
    assert (printed.exit_code, printed.stdout) == (1, "")
    assert "chmod 600" in printed.stderr
