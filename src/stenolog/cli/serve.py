"""`steno serve` runs the gateway as a daemon; `steno open` opens it in a browser, signed in."""

import asyncio
import contextlib
import gc
import hmac
import html
import http.client
import json
import logging
import os
import re
import secrets
import shlex
import signal
import sys
import time
import webbrowser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from stenolog.cli.config import Options, config_option, read_settings
from stenolog.cli.output import one_line, print_notice, print_notices, sentence
from stenolog.cli.workspace import WORKSPACE_HELP, display_name
from stenolog.errors import install_command
from stenolog.gateway.access_token import Token, read_token, token_path
from stenolog.gateway.hosts import is_loopback, login_host, server_end
from stenolog.stores import disk

if TYPE_CHECKING:
    from stenolog.agent.instance import AgentInstance
    from stenolog.settings.values import Settings

_GATEWAY_CHANNEL: Final = "gateway"
_EXIT_NOT_SAVED: Final = 3
_DEFAULT_PORT: Final = "8787"
_TIMEOUT_SECONDS: Final = 10
_LOOPBACK_OF: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address to connect to if the gateway listens on all addresses."""
_LOGIN_PATH: Final = re.compile(r"/login\?code=[A-Za-z0-9_-]{1,200}")
_MAX_RESPONSE_BYTES: Final = 10_000
_REDIRECT_PAGE: Final = """\
<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0;url={url}">
<title>stenolog</title>
<a href="{url}">stenolog</a>
"""


def no_open_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--no-open` to a command that opens a browser; `--print` is a hidden alias."""
    alias = click.option("--print", "no_open", is_flag=True, hidden=True)
    option = click.option("--no-open", is_flag=True, help="Print the link, open no browser.")
    return option(alias(command))


@click.command("serve")
@click.option("--host", metavar="ADDRESS", help="Address to listen on.  [default: 127.0.0.1]")
@click.option("--port", type=int, metavar="N", help="Port; 0 for any free port.  [default: 8787]")
@click.option(
    "-m", "--model", metavar="NAME", help="Model for all agents.  [default: as in the config file]"
)
@click.option("-w", "--workspace", metavar="DIR", help=WORKSPACE_HELP)
@click.option("--read-only", is_flag=True, help="Only show sessions; change and resume nothing.")
@config_option
def serve_command(
    config: Path | None,
    workspace: str | None,
    model: str | None,
    host: str | None,
    port: int | None,
    read_only: bool,
) -> int:
    """Run the gateway: an HTTP server for OpenAI clients, browsers, chat apps and webhooks.

    Clients need the access token, which the first start stores in a file that only you can read.
    `steno open` opens the viewer in a browser, signed in. To store a conversation, a client sends a
    session key in the header X-Session-Key or as metadata.session. Several gateways may share one
    PostgreSQL database. --read-only needs no model and changes no session; the search index is then
    in your cache folder.

    On SIGTERM or Ctrl-C the gateway finishes running answers. A second signal stops it at once.

    Example: steno serve --model openai/gpt-5-mini

    Exit codes: 0 stopped, 1 could not start, 2 wrong usage, 3 stopped with unsaved messages.
    """
    settings = read_settings(config, {"gateway.host": host, "gateway.port": port})
    options = Options(config=config, workspace=workspace, model=model)
    return asyncio.run(_serve(settings, options, read_only=read_only))


def import_gateway() -> None:
    """Import the gateway. Raises ClickException if its extra is not installed."""
    try:
        import stenolog.gateway.daemon  # noqa: F401
    except ModuleNotFoundError as error:
        raise click.ClickException(
            f"The gateway is not installed. Run: {install_command('gateway')}"
        ) from error


def collect_garbage_again() -> None:
    """Resume the garbage collection that `Steno` postponed; existing objects are not examined."""
    gc.freeze()
    gc.set_threshold(5_000)


async def _serve(settings: "Settings", options: Options, *, read_only: bool = False) -> int:
    # These imports are slow, and the gateway is an optional extra.
    import_gateway()
    from stenolog.agent.instance import AgentRegistry
    from stenolog.agent.loop import AgentLoop
    from stenolog.channels.channel_group import Channels
    from stenolog.cli.agents import Signals, interruption_text, open_agents, open_viewers
    from stenolog.gateway.access_token import read_or_create_token
    from stenolog.gateway.daemon import ChannelService, Daemon, NoChannels, listen
    from stenolog.gateway.shared_state import Gateway

    _log_to_stderr(settings)
    async with contextlib.AsyncExitStack() as cleanup:
        # If a step fails, the stack closes everything that was opened before.
        sockets = listen(settings.gateway.host, settings.gateway.port)
        for socket in sockets:
            cleanup.callback(socket.close)
        file = token_path(settings.gateway.token_file)
        token = read_or_create_token(file)
        if read_only:
            agents = open_viewers(options, settings, cache_folder())
        else:
            agents = open_agents(options, settings, channel=_GATEWAY_CHANNEL)
        for agent in agents:
            cleanup.callback(agent.close_stores)
        signals = Signals()
        signals.watch(signal.SIGINT)
        loop = AgentLoop(AgentRegistry(agents), ttl=settings.gateway.takeover)
        channels: ChannelService = NoChannels() if read_only else Channels(loop, settings)
        cleanup.push_async_callback(channels.close)
        gateway = Gateway(loop, settings, read_only=read_only)
        daemon = Daemon(gateway, token, sockets, channels)
        await daemon.start()
        cleanup.pop_all()
    collect_garbage_again()
    _print_addresses(settings, agents, daemon.url, file)
    if sys.stderr.isatty():
        url = local_login_link(daemon.url, token, settings.gateway.hosts)
        print_notice(f"Open this link within a minute to sign in; it works once:  {url}")
    signal_wait = asyncio.create_task(signals.received.wait())
    await asyncio.wait({signal_wait, daemon.serving}, return_when=asyncio.FIRST_COMPLETED)
    signal_wait.cancel()
    if not daemon.serving.done():
        print_notice(
            "Stopping: answers in progress have a few seconds. A second signal stops at once."
        )
    stop_now = asyncio.Event()

    async def wait_for_second_signal() -> None:
        await signals.next_signal()
        stop_now.set()

    second_signal = asyncio.create_task(wait_for_second_signal())
    report = await daemon.stop(hurry=stop_now)
    second_signal.cancel()
    signals.restore_defaults()
    if text := interruption_text(report):
        print_notice(text)
    failure = None if daemon.serving.cancelled() else daemon.serving.exception()
    if failure is not None:
        print_notice(f"The server stopped unexpectedly: {failure!r}")
        return 1
    if report.hanging:
        sys.stderr.flush()
        # Exit at once: a tool that does not end occupies a thread that cannot be stopped.
        os._exit(_EXIT_NOT_SAVED if report.not_saved else 0)
    return _EXIT_NOT_SAVED if report.not_saved else 0


def cache_folder() -> Path:
    """Return the cache folder for search indexes of sessions in read-only places."""
    from platformdirs import user_cache_path

    return user_cache_path("stenolog", appauthor=False)


def local_login_link(url: str, token: Token, hosts: Sequence[str]) -> str:
    """Return a link that signs a browser in once at the gateway of this process."""
    from stenolog.gateway.login import LOGIN, LoginLinks

    host, port = url.removeprefix("http://").rsplit(":", 1)
    address = host.strip("[]")
    address = _LOOPBACK_OF.get(address, address)
    if is_loopback(address):
        address = login_host(address, hosts, token.host_name())
    return f"{_base_url(address, port)}{LOGIN}?code={LoginLinks(token).make_code()}"


def _base_url(host: str, port: int | str) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _log_to_stderr(settings: "Settings") -> None:
    """Log to stderr with times and without secrets, because a daemon reports errors only there."""
    from stenolog.gateway.error_responses import RedactingFilter

    handler = logging.StreamHandler()
    handler.addFilter(RedactingFilter(settings))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("stenolog", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("stenolog").setLevel(logging.INFO)


def _print_addresses(
    settings: "Settings", agents: "list[AgentInstance]", url: str, file: Path
) -> None:
    names = ", ".join(f"{agent.id or 'main'} ({agent.model.name})" for agent in agents)
    places = ", ".join(dict.fromkeys(display_name(agent.spec.sessions) for agent in agents))
    print_notice(f"Agents: {names}. Sessions: {places}.")
    for agent in agents:
        print_notices(f"Warning: {sentence(problem)}" for problem in agent.problems)
    if not is_loopback(settings.gateway.host):
        print_notice(
            "Warning: other machines can reach the gateway, and traffic is not encrypted. Put a "
            "TLS proxy in front of it."
        )
    port = url.rpartition(":")[2]
    print_notice(f"Browser:         steno open{'' if port == _DEFAULT_PORT else f' --port {port}'}")
    print_notice(f'OpenAI clients:  base_url="{url}/v1", api_key=$(cat {shlex.quote(str(file))})')
    # Programs read this line. It is the only line on stdout.
    click.echo(f"Listening at {url}")


@click.command("open")
@click.option("--host", metavar="HOST", help="Address of the gateway.  [default: gateway.host]")
@click.option(
    "--port", type=int, metavar="PORT", help="Port of the gateway.  [default: gateway.port]"
)
@no_open_option
@config_option
def open_command(host: str | None, port: int | None, no_open: bool, config: Path | None) -> None:
    """Open the gateway in a browser, signed in.

    `steno serve` must be running. The link works once, within 60 seconds; the browser stays signed
    in for 7 days. The link uses a separate host name that ends in `.localhost`, so that no other
    server on this machine receives the cookie. If your browser cannot find this name, add
    `localhost` to the setting `gateway.hosts`. If there is no browser, the link is printed.

    Exit codes: 0 done, 1 no gateway was found, or the gateway rejected the token, 2 wrong usage.
    """
    settings = read_settings(config, {"gateway.host": host, "gateway.port": port}).gateway
    if settings.port == 0:
        raise click.UsageError("The port of the gateway is unknown. Use --port.")
    token = read_token(token_path(settings.token_file))
    reachable_host = _LOOPBACK_OF.get(settings.host, settings.host)
    url = _login_link(reachable_host, settings.port, token, settings.hosts)
    if no_open or not has_display() or not open_browser(url):
        click.echo(url)
        if not no_open:
            print_notice("No browser was found. Open this link within a minute; it works once.")
        return
    print_notice("Opened in your browser. If nothing appears, run: steno open --no-open")


def has_display() -> bool:
    """Return whether a browser can open a window."""
    # Without a display, a text browser would start in this terminal.
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.platform == "darwin" or bool(display)


def open_browser(url: str) -> bool:
    """Open a private file that redirects the browser; return False if that failed.

    Command lines are visible to all users, so the link must not be an argument of the browser. The
    file is not deleted, because its link expires after a minute.
    """
    from platformdirs import user_state_path

    file = user_state_path("stenolog", appauthor=False) / "open.html"
    try:
        disk.create_private_folder(file.parent)
        folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            disk.replace_file(
                folder, file.name, _REDIRECT_PAGE.format(url=html.escape(url)).encode()
            )
        finally:
            os.close(folder)
    except OSError:
        return False
    return webbrowser.open(file.as_uri())


def _login_link(host: str, port: int, token: Token, hosts: Sequence[str]) -> str:
    """Request a login link from the gateway with the same token. Raises ClickException."""
    # Redirects and proxies must not be followed: another server would receive the request.
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
    nonce = secrets.token_urlsafe(16)
    place = f"{one_line(host)}:{port}"
    try:
        connection.connect()
        address = str(connection.sock.getpeername()[0])
        status, content = _request_link(connection, server_end(address, port), nonce, token)
    except (OSError, http.client.HTTPException) as error:
        raise click.ClickException(
            f"There is no gateway at {place}. Start it with: steno serve --port {port}"
        ) from error
    finally:
        connection.close()
    if status == http.HTTPStatus.UNAUTHORIZED:
        raise click.ClickException(
            f"The gateway at {place} rejected the token. Check that the gateway and this "
            "command use the same gateway.token_file and port, and that both clocks are right."
        )
    path = _verified_path(content, nonce, token) if status == http.HTTPStatus.OK else None
    if path is None:
        raise click.ClickException(f"The server at {place} is not your gateway (status {status}).")
    if is_loopback(address):
        host = login_host(address, hosts, token.host_name())
    return f"{_base_url(host, port)}{path}"


def _request_link(
    connection: http.client.HTTPConnection, server: str, nonce: str, token: Token
) -> tuple[int, bytes]:
    """Send a proof of the token, but not the token; return the response."""
    now = str(time.time_ns() // 1_000_000)
    proof = f"{now}.{nonce}.{token.proof('ask', server, now, nonce)}"
    headers = {"Authorization": f"Steno {proof}", "Content-Length": "0"}  # guard: token-not-sent
    connection.request("POST", "/v1/login-links", headers=headers)
    with connection.getresponse() as response:
        return response.status, response.read(_MAX_RESPONSE_BYTES)


def _verified_path(content: bytes, nonce: str, token: Token) -> str | None:
    """Return the path of the link, or None if the response has no valid proof of the token."""
    try:
        answer = json.loads(content)
        path, proof = str(answer["url"]), str(answer["proof"]).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # The server must not choose which page the browser opens.
    if not _LOGIN_PATH.fullmatch(path):
        return None
    expected = token.proof("give", nonce, path).encode()
    return path if hmac.compare_digest(proof, expected) else None
