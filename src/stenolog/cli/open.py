"""`steno open`: a browser that is logged in at the gateway."""

import hmac
import html
import http.client
import json
import os
import re
import secrets
import sys
import time
import webbrowser
from pathlib import Path
from typing import Final

import click

from stenolog.cli.config import config_option, settings_of
from stenolog.cli.text import one_line
from stenolog.gateway.hosts import end_of, is_loopback
from stenolog.gateway.token import Token, read_token, token_path
from stenolog.stores import disk

_SECONDS: Final = 10
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where to ask for what listens at all addresses."""
_LINK: Final = re.compile(r"/login\?code=[A-Za-z0-9_-]{1,200}")
_LONGEST: Final = 10_000
_PAGE: Final = """\
<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0;url={url}">
<title>stenolog</title>
<a href="{url}">stenolog</a>
"""


@click.command("open")
@click.option("--host", metavar="HOST", help="The gateway's address; otherwise gateway.host.")
@click.option("--port", type=int, metavar="PORT", help="Its port; otherwise gateway.port.")
@click.option("--print", "only_print", is_flag=True, help="Write the link to stdout instead.")
@config_option
def open_command(host: str | None, port: int | None, only_print: bool, config: Path | None) -> None:
    """Open the gateway in a browser, logged in.

    `steno serve` must be running. The browser gets a link that works once, within 60 seconds, and
    stays logged in for 30 days. Where no browser can be opened, the link is written to stdout.

    Exit code: 0 opened or written, 1 no gateway answers, or not to us, 2 wrong usage.
    """
    settings = settings_of(config, {"gateway.host": host, "gateway.port": port}).gateway
    if settings.port == 0:
        raise click.UsageError("Say with --port at which port the gateway listens.")
    token = read_token(token_path(settings.token_file))
    asked = _EVERYWHERE.get(settings.host, settings.host)
    url = _link(asked, settings.port, token)
    if only_print or not _has_display() or not _open(url):
        click.echo(url)
        if not only_print:
            click.echo("No browser was found here: open this link, once, in a minute.", err=True)
        return
    click.echo("Opened in your browser; if it shows nothing: steno open --print", err=True)


def _has_display() -> bool:
    # Without one, a browser in the terminal would start here.
    named = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.platform == "darwin" or bool(named)


def _open(url: str) -> bool:
    """Lead a browser there by a file that only this user can read; False where that failed.

    All users see the command lines of all programs, and so what a browser is told to open. The
    file stays until the next one takes its place: after a minute its link is worth nothing.
    """
    from platformdirs import user_state_path

    file = user_state_path("stenolog", appauthor=False) / "open.html"
    try:
        disk.make_private(file.parent)
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            disk.replace_file(folder, file.name, _PAGE.format(url=html.escape(url)).encode())
        finally:
            os.close(folder)
    except OSError:
        return False
    return webbrowser.open(file.as_uri())


def _link(host: str, port: int, token: Token) -> str:
    """A new link, of the gateway that has the same token. Raises ClickException."""
    # No library that follows redirects or asks a proxy: they would ask somebody else.
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    nonce = secrets.token_urlsafe(16)
    try:
        connection.connect()
        address = str(connection.sock.getpeername()[0])
        status, content = _asked(connection, end_of(address, port), nonce, token)
    except (OSError, http.client.HTTPException) as error:
        words = f"No gateway answers at {one_line(host)}:{port}; start it with: steno serve"
        raise click.ClickException(words) from error
    finally:
        connection.close()
    if status == http.HTTPStatus.UNAUTHORIZED:
        words = (
            f"The gateway at {one_line(host)}:{port} does not take this token; was it started "
            "with another gateway.token_file, at another port, or does its clock differ?"
        )
        raise click.ClickException(words)
    path = _proven_path(content, nonce, token) if status == http.HTTPStatus.OK else None
    if path is None:
        words = f"What answers at {one_line(host)}:{port} is no gateway of ours (status {status})."
        raise click.ClickException(words)
    # `localhost` may be two addresses, and another user's program may listen at the other one.
    named = address if is_loopback(address) else host
    return f"http://{f'[{named}]' if ':' in named else named}:{port}{path}"


def _asked(
    connection: http.client.HTTPConnection, end: str, nonce: str, token: Token
) -> tuple[int, bytes]:
    """What is answered to who proves to have the token, but does not say it."""
    now = str(time.time_ns() // 1_000_000)
    proof = f"{now}.{nonce}.{token.proof('ask', end, now, nonce)}"
    headers = {"Authorization": f"Steno {proof}", "Content-Length": "0"}
    connection.request("POST", "/v1/login-links", headers=headers)
    with connection.getresponse() as response:
        return response.status, response.read(_LONGEST)


def _proven_path(content: bytes, nonce: str, token: Token) -> str | None:
    """The path of the link in an answer; None where it is not of who has the token, too."""
    try:
        answer = json.loads(content)
        path, proof = str(answer["url"]), str(answer["proof"]).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # Whatever listens there must not choose what the browser opens.
    if not _LINK.fullmatch(path):
        return None
    wanted = token.proof("give", nonce, path).encode()
    return path if hmac.compare_digest(proof, wanted) else None
