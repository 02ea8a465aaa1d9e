"""Tests that certificates are verified for every spelling of a URL's scheme."""

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from telegram.error import NetworkError

from stenolog.channels.channel import NotSent, uses_tls
from stenolog.channels.telegram import _make_http_client
from stenolog.channels.webhook import Webhook
from stenolog.settings.values import WebhookSettings
from support import needs

SECRET = "a secret of both sides"
SCHEMES = ["https", "HTTPS", "Https", "hTTpS"]


class _Server:
    """A TLS server with an untrusted certificate, which records what clients sent."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate, key)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.received: list[bytes] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with suppress(OSError), self._context.wrap_socket(connection, server_side=True) as tls:
                tls.settimeout(10)
                received = tls.recv(10_000)
                if received == b"stop":
                    return
                self.received.append(received)
                tls.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    def close(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with (
            socket.create_connection(("127.0.0.1", self.port)) as plain,
            context.wrap_socket(plain) as tls,
        ):
            tls.sendall(b"stop")
        self._thread.join()
        self._socket.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_Server]:
    needs.tool("openssl")
    certificate, key = tmp_path / "certificate", tmp_path / "key"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=x -out {certificate}"
    arguments = [*command.split(), "-keyout", str(key), "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(arguments, check=True, capture_output=True)
    server = _Server(certificate, key)
    yield server
    server.close()


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_webhook_sends_nothing_to_an_unverified_server(server: _Server, scheme: str) -> None:
    settings = WebhookSettings(
        secret=SECRET, allow=("alice",), reply_url=f"{scheme}://127.0.0.1:{server.port}/"
    )

    webhook = Webhook("ci", settings, SECRET)
    try:
        with pytest.raises(NotSent, match=r"(?i)certificate"):
            await webhook.send({"channel": "webhook-ci", "sender": "alice"}, "a private answer")
    finally:
        await webhook.close()
    assert server.received == []


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_telegram_sends_no_token_to_an_unverified_server(
    server: _Server, scheme: str
) -> None:
    base = f"{scheme}://127.0.0.1:{server.port}/bot"

    request = _make_http_client(base, max_connections=1)
    await request.initialize()
    try:
        with pytest.raises(NetworkError, match=r"(?i)certificate"):
            await request.do_request(f"{base}1:token/getMe", "POST")
    finally:
        await request.shutdown()
    assert server.received == []


def test_only_plain_http_is_used_without_tls() -> None:
    assert not uses_tls("http://127.0.0.1:1/")
    assert not uses_tls("HTTP://127.0.0.1:1/")
    assert all(uses_tls(f"{scheme}://host/") for scheme in SCHEMES)
    assert uses_tls("host/")
