"""`steno open`: a link for the browser, and what is said where there is none."""

import re
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
from click.testing import Result
from starlette.applications import Starlette

from app_server import served
from stenolog.cli.steno import COMMANDS
from stenolog.gateway.access import Access
from stenolog.gateway.hosts import known
from stenolog.gateway.login import Cookies, Links, login_routes
from stenolog.gateway.token import Token, keep_token

Steno = Callable[..., Result]


@pytest.fixture(autouse=True)
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Token:
    """The token that the settings name; no browser is ever opened."""
    monkeypatch.setitem(COMMANDS, "open", "stenolog.cli.open")
    monkeypatch.setenv("STENO_GATEWAY__TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail(url))
    monkeypatch.setenv("DISPLAY", ":0")
    return keep_token(tmp_path / "token")


@contextmanager
def _gateway(token: Token) -> Iterator[int]:
    cookies = Cookies(token)
    app = Starlette(routes=login_routes(Links(), cookies))
    with served(Access(app, token=token, known=known(bound="127.0.0.1"), cookies=cookies)) as port:
        yield port


@contextmanager
def _answering(answer: bytes) -> Iterator[int]:
    """Something at a port that gives this answer to whoever asks."""

    def run() -> None:
        connection, _ = bound.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as bound:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield bound.getsockname()[1]
        finally:
            thread.join()


def _page(url: str) -> tuple[int, str]:
    """What a browser gets at this address: the status, and the cookie."""
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/.*)", url)
    assert found is not None
    connection = HTTPConnection("127.0.0.1", int(found[1]))
    try:
        connection.request("GET", found[2])
        with connection.getresponse() as response:
            return response.status, response.headers.get("Set-Cookie", "")
    finally:
        connection.close()


def test_the_browser_gets_a_link_that_logs_it_in(
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
        assert result.stderr == "Opened in your browser.\n"
        (url,) = opened
        status, cookie = _page(url)
        assert (status, cookie[:6]) == (303, "steno=")
        assert _page(url)[0] == 403


def test_with_print_the_link_goes_to_stdout(steno: Steno, token: Token) -> None:
    with _gateway(token) as port:
        result = steno("open", "--port", str(port), "--print")
        assert (result.exit_code, result.stderr) == (0, "")
        assert _page(result.stdout.strip())[0] == 303
    assert token.value.decode() not in result.output


def test_where_no_browser_opens_the_link_goes_to_stdout(
    steno: Steno, token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(url.count("never")))
    with _gateway(token) as port:
        assert "/login?code=" in steno("open", "--port", str(port)).stdout


@pytest.mark.skipif("sys.platform == 'darwin'", reason="there is always a display")
def test_without_a_display_no_browser_is_tried(
    steno: Steno, token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DISPLAY")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    with _gateway(token) as port:
        assert "/login?code=" in steno("open", "--port", str(port)).stdout


def test_what_listens_at_all_addresses_is_asked_at_this_machine(steno: Steno, token: Token) -> None:
    with _gateway(token) as port:
        result = steno("open", "--host", "0.0.0.0", "--port", str(port), "--print")
    assert result.stdout.startswith(f"http://127.0.0.1:{port}/login?code=")


def test_where_nothing_listens_it_says_how_to_start_it(steno: Steno) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    result = steno("open", "--port", str(port))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"No gateway answers at 127.0.0.1:{port}" in result.stderr
    assert "start it with: steno serve" in result.stderr


def test_a_token_that_is_not_taken_is_told(steno: Steno, token: Token) -> None:
    with _gateway(Token(token.value[::-1])) as port:
        result = steno("open", "--port", str(port))
    assert result.exit_code == 1
    assert "does not take this token" in result.stderr
    assert token.value.decode() not in result.output


def test_without_a_token_it_says_what_makes_one(
    steno: Steno, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STENO_GATEWAY__TOKEN_FILE", str(tmp_path / "none"))
    result = steno("open")
    assert result.exit_code == 1
    assert "`steno serve` makes it" in result.stderr


def test_a_port_that_is_not_known_must_be_said(steno: Steno) -> None:
    result = steno("open", "--port", "0")
    assert (result.exit_code, "--port" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "body",
    [
        b'{"url": "@evil.example/"}',
        b'{"url": "//evil.example/login?code=1"}',
        b'{"url": "/login?code=1 2"}',
        b'{"url": "/login?code=1\\n"}',
        b'{"url": 1}',
        b"{}",
        b"[]",
        b"<html>",
        b"[" * 9_000,
    ],
)
def test_whatever_answers_does_not_choose_what_is_opened(steno: Steno, body: bytes) -> None:
    with _answering(b"HTTP/1.0 200 OK\r\n\r\n" + body) as port:
        result = steno("open", "--port", str(port))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "is no gateway of ours" in result.stderr


@pytest.mark.parametrize(
    "answer", [b"", b"SSH-2.0-x\r\n", b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n"]
)
def test_what_is_no_gateway_is_told(steno: Steno, answer: bytes) -> None:
    with _answering(answer) as port:
        result = steno("open", "--port", str(port))
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"127.0.0.1:{port}" in result.stderr
