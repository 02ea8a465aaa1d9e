"""`steno open`: a browser that is logged in at the gateway."""

import http.client
import json
import os
import re
import sys
import webbrowser
from pathlib import Path
from typing import Final

import click

from stenolog.cli.config import config_option, settings_of
from stenolog.cli.text import one_line
from stenolog.gateway.token import Token, read_token, token_path

_SECONDS: Final = 10
_EVERYWHERE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where to ask for what listens at all addresses."""
_LINK: Final = re.compile(r"/login\?code=[A-Za-z0-9_-]{1,200}")
_LONGEST: Final = 10_000


@click.command("open")
@click.option("--host", metavar="HOST", help="The gateway's address; otherwise gateway.host.")
@click.option("--port", type=int, metavar="PORT", help="Its port; otherwise gateway.port.")
@click.option("--print", "only_print", is_flag=True, help="Write the link to stdout instead.")
@config_option
def open_command(host: str | None, port: int | None, only_print: bool, config: Path | None) -> None:
    """Open the gateway in a browser, logged in.

    `steno serve` must be running. The browser gets a link that works once, within 60 seconds, and
    stays logged in for 30 days. Where no browser can be opened, the link is written to stdout.
    """
    settings = settings_of(config, {"gateway.host": host, "gateway.port": port}).gateway
    if settings.port == 0:
        raise click.UsageError("Say with --port at which port the gateway listens.")
    token = read_token(token_path(settings.token_file))
    asked = _EVERYWHERE.get(settings.host, settings.host)
    path = _link(asked, settings.port, token)
    url = f"http://{f'[{asked}]' if ':' in asked else asked}:{settings.port}{path}"
    if only_print or not _has_display() or not webbrowser.open(url):
        click.echo(url)
        return
    click.echo("Opened in your browser.", err=True)


def _has_display() -> bool:
    # Without one, a browser in the terminal would start here.
    named = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.platform == "darwin" or bool(named)


def _link(host: str, port: int, token: Token) -> str:
    """The path of a new link. Raises ClickException."""
    # No library that follows redirects or asks a proxy: they would take the token elsewhere.
    connection = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    try:
        connection.request(
            "POST",
            "/v1/login-links",
            headers={"Authorization": f"Bearer {token.value.decode()}", "Content-Length": "0"},
        )
        with connection.getresponse() as response:
            status, content = response.status, response.read(_LONGEST)
    except (OSError, http.client.HTTPException) as error:
        words = f"No gateway answers at {one_line(host)}:{port}; start it with: steno serve"
        raise click.ClickException(words) from error
    finally:
        connection.close()
    if status == http.HTTPStatus.UNAUTHORIZED:
        words = (
            f"The gateway at {one_line(host)}:{port} does not take this token; "
            "was it started with another gateway.token_file?"
        )
        raise click.ClickException(words)
    try:
        path = json.loads(content)["url"] if status == http.HTTPStatus.OK else ""
    except (ValueError, KeyError, TypeError, RecursionError):
        path = ""
    # Whatever listens there must not choose what the browser opens.
    if not isinstance(path, str) or not _LINK.fullmatch(path):
        words = f"What answers at {one_line(host)}:{port} is no gateway of ours (status {status})."
        raise click.ClickException(words)
    return path
