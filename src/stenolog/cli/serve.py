"""`steno serve` and `steno view` run the gateway; `steno open` opens it in a browser, signed in.

`steno view` shows the conversations on this machine, read-only.
"""

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
import shlex
import signal
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from stenolog.cli.config import AgentOptions, config_option, read_settings
from stenolog.cli.output import one_line, print_notice, sentence
from stenolog.cli.workspace import PROGRAM_NAMES, WORKSPACE_HELP, display_name
from stenolog.errors import StenologError, UsageError
from stenolog.gateway.access_token import (
    Token,
    new_token,
    read_or_create_token,
    read_token,
    token_path,
)
from stenolog.gateway.hosts import address_text, is_loopback, login_host
from stenolog.stores import disk

if TYPE_CHECKING:
    import socket

    from stenolog.agent.instance import AgentInstance
    from stenolog.cli.agents import Signals
    from stenolog.gateway.daemon import Daemon
    from stenolog.gateway.shared_state import Gateway
    from stenolog.settings.values import Settings
    from stenolog.transfer.viewed_places import ViewedPlace

_DEFAULT_PORT: Final = "8787"


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

    Exit codes: 0 stopped, 1 could not start, 2 wrong usage.
    """
    settings = read_settings(config, {"gateway.host": host, "gateway.port": port})
    options = AgentOptions(config=config, workspace=workspace, model=model)
    return asyncio.run(_serve(settings, options, read_only=read_only))


async def _serve(settings: "Settings", options: AgentOptions, *, read_only: bool = False) -> int:
    # These imports are slow.
    from stenolog.cli.agents import interruption_text, open_agents, open_viewers
    from stenolog.gateway.daemon import listen

    _log_to_stderr(settings)
    async with contextlib.AsyncExitStack() as cleanup:
        # If a step fails, the stack closes everything that was opened before.
        sockets = listen(settings.gateway.host, settings.gateway.port)
        for socket in sockets:
            cleanup.callback(socket.close)
        token_file = token_path(settings.gateway.token_file)
        token = read_or_create_token(token_file)
        if read_only:
            agents = open_viewers(options, settings, _cache_folder())
        else:
            agents = open_agents(options, settings, channel="gateway")
        gateway, daemon, signals = await _start_daemon(
            settings, agents, token, sockets, cleanup, read_only=read_only
        )
    _print_startup_notices(settings, agents, daemon.url, token_file)
    if sys.stderr.isatty():
        url = _local_login_link(gateway, daemon.url, token)
        print_notice(f"Open this link within a minute to sign in; it works once:  {url}")
    await signals.wait_for_task_or_signal(daemon.serving)
    if not daemon.serving.done():
        print_notice(
            "Stopping: answers in progress have a few seconds. A second signal stops at once."
        )
    stop_now = asyncio.Event()

    async def wait_for_second_signal() -> None:
        await signals.next_signal()
        stop_now.set()

    second_signal_task = asyncio.create_task(wait_for_second_signal())
    close_report = await daemon.stop(hurry=stop_now)
    second_signal_task.cancel()
    signals.restore_defaults()
    if text := interruption_text(close_report):
        print_notice(text)
    failure = None if daemon.serving.cancelled() else daemon.serving.exception()
    if failure is not None:
        print_notice(f"The server stopped unexpectedly: {failure!r}")
        return 1
    if close_report.hanging:
        sys.stderr.flush()
        # Exit at once: a tool that does not end occupies a thread that cannot be stopped.
        os._exit(0)
    return 0


async def _start_daemon(
    settings: "Settings",
    agents: "Sequence[AgentInstance]",
    token: Token,
    sockets: "Sequence[socket.socket]",
    cleanup: contextlib.AsyncExitStack,
    *,
    read_only: bool,
) -> "tuple[Gateway, Daemon, Signals]":
    """Start the gateway of these agents.

    After a successful start, `cleanup` is empty, and the daemon closes everything.
    """
    from stenolog.agent.instance import AgentRegistry
    from stenolog.agent.loop import AgentLoop
    from stenolog.cli.agents import Signals
    from stenolog.gateway.daemon import ChannelService, Daemon, NoChannels
    from stenolog.gateway.shared_state import Gateway

    for agent in agents:
        cleanup.callback(agent.close_stores)
    signals = Signals()
    signals.watch(signal.SIGINT)
    loop = AgentLoop(AgentRegistry(agents), ttl=settings.gateway.takeover)
    channels: ChannelService = NoChannels()
    if not read_only:
        from stenolog.channels.channel_group import Channels

        channels = Channels(loop, settings)
    cleanup.push_async_callback(channels.close)
    gateway = Gateway(loop, settings, read_only=read_only)
    daemon = Daemon(gateway, token, sockets, channels)
    await daemon.start()
    cleanup.pop_all()
    # Resume the garbage collection that `Steno` postponed; existing objects are not examined.
    gc.freeze()
    gc.set_threshold(5_000)
    return gateway, daemon, signals


def _log_to_stderr(settings: "Settings") -> None:
    """Log to stderr with times and without secrets, because a daemon reports errors only there."""
    from stenolog.gateway.responses import RedactingFilter

    handler = logging.StreamHandler()
    handler.addFilter(RedactingFilter(settings))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("stenolog", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("stenolog").setLevel(logging.INFO)


def _print_startup_notices(
    settings: "Settings", agents: "list[AgentInstance]", url: str, token_file: Path
) -> None:
    agents_text = ", ".join(f"{agent.id or 'main'} ({agent.model.name})" for agent in agents)
    places_text = ", ".join(dict.fromkeys(display_name(agent.spec.sessions) for agent in agents))
    print_notice(f"Agents: {agents_text}. Sessions: {places_text}.")
    for agent in agents:
        print_notice(*(f"Warning: {sentence(problem)}" for problem in agent.problems))
    if not is_loopback(settings.gateway.host):
        print_notice(
            "Warning: other machines can reach the gateway, and traffic is not encrypted. Put a "
            "TLS proxy in front of it."
        )
    port = url.rpartition(":")[2]
    print_notice(f"Browser:         steno open{'' if port == _DEFAULT_PORT else f' --port {port}'}")
    api_key = f"$(cat {shlex.quote(str(token_file))})"
    print_notice(f'OpenAI clients:  base_url="{url}/v1", api_key={api_key}')
    # Programs read this line. It is the only line on stdout.
    click.echo(f"Listening at {url}")


# --- view -----------------------------------------------------------------------------------------


_VIEW_PORT: Final = 8788
"""Port that is used if it is free and the user gives no port."""
_MIN_SESSIONS_FOR_HELPERS: Final = 200
"""Minimum number of sessions left to index for which helper processes are started."""
_MAX_HELPERS: Final = 3
_POLL_SECONDS: Final = 0.2
"""Seconds between two progress checks."""
_MAX_POLLS: Final = 50
"""Number of progress checks after which no helpers are started."""
_NOTHING_FOUND_TEXT: Final = """\
No conversations were found. Looked at:
  Claude Code   ~/.claude/projects, or $CLAUDE_CONFIG_DIR
  Codex         ~/.codex, or $CODEX_HOME
  Gemini CLI    ~/.gemini/tmp
  opencode      ~/.local/share/opencode
  llm           the folder that `llm logs path` prints
  stenolog      {workspace}
To see another place: steno view PLACE. A place can also be an export of ChatGPT, Claude.ai or
Open WebUI, or a stenolog workspace or database."""


_no_open_option: Final = click.option(
    "--no-open", is_flag=True, help="Print the link, open no browser."
)


@click.command("view")
@click.argument("places", nargs=-1, metavar="[PLACE]...")
@click.option("--port", type=int, metavar="N", help="Port; 0 for any.  [default: 8788 if free]")
@_no_open_option
@click.option("--index", "places_to_index", hidden=True, help="Only index these places (JSON).")
@config_option
def view_command(
    places: tuple[str, ...],
    port: int | None,
    no_open: bool,
    places_to_index: str | None,
    config: Path | None,
) -> int:
    """Show conversations in a browser, read-only.

    PLACE is a folder or file with transcripts of a known program (Claude Code, Codex, ChatGPT,
    Claude.ai, Gemini CLI, opencode, llm, Open WebUI), a stenolog workspace, sqlite:FILE or
    postgresql://…  Without PLACE, the command shows the usual places of the known programs on this
    machine, and the workspace of the config file.

    You need no model and no key. No file of another program is changed; the search index is in your
    cache folder. Press Ctrl-C to stop.

    Example: steno view ~/.claude/projects

    Exit codes: 0 stopped, 1 nothing to show or could not start, 2 wrong usage.
    """
    if places_to_index is not None:
        _index_places(places_to_index)
        return 0
    settings = read_settings(
        config, {"gateway.host": "127.0.0.1", "gateway.port": port or _VIEW_PORT}
    )
    # This import is slow, so it is not at the top.
    from stenolog.transfer.viewed_places import find_usual_places, recognize_place

    workspace = settings.agent.sessions
    viewed_places = list(dict.fromkeys(map(recognize_place, places)))
    viewed_places = viewed_places or find_usual_places(workspace)
    if not viewed_places:
        raise click.ClickException(_NOTHING_FOUND_TEXT.format(workspace=display_name(workspace)))
    return asyncio.run(_view(settings, viewed_places, port=port, no_open=no_open))


async def _view(
    settings: "Settings", places: "Sequence[ViewedPlace]", *, port: int | None, no_open: bool
) -> int:
    # These imports are slow.
    from stenolog.agent.spec import AgentSpec
    from stenolog.agent.threads import cancel_and_wait
    from stenolog.cli.agents import find_index_file, open_viewer
    from stenolog.transfer.viewed_places import open_places

    async with contextlib.AsyncExitStack() as cleanup:
        sockets = _listen_on_loopback(port)
        for sock in sockets:
            cleanup.callback(sock.close)
        try:
            token = read_or_create_token(token_path(settings.gateway.token_file))
        except StenologError:
            token = new_token()  # the token file cannot be used
        failed_places: list[ViewedPlace] = []

        def report_failed_place(place: "ViewedPlace", error: Exception) -> None:
            failed_places.append(place)
            place_name = display_name(place.where)
            print_notice(f"Warning: {place_name} is not shown: {sentence(str(error))}")

        index_file = find_index_file(places, _cache_folder())
        store = open_places(places, catalog=index_file, on_problem=report_failed_place)
        cleanup.callback(store.close)
        agent = open_viewer(AgentSpec(), store, heads=store.heads)
        gateway, daemon, signals = await _start_daemon(
            settings, [agent], token, sockets, cleanup, read_only=True
        )
    print_notice("Showing, read-only:")
    for place in places:
        if place not in failed_places:
            name = PROGRAM_NAMES.get(place.program, place.program)
            print_notice(f"  {name:12}  {display_name(place.where)}")
    link = _local_login_link(gateway, daemon.url, token)
    click.echo(f"Listening at {daemon.url}")
    click.echo(f"Open this link within a minute; it works once: {link}")
    if not no_open and sys.stdout.isatty() and _has_display():
        _open_browser(link)
    print_notice(f"New link: steno open --port {daemon.url.rpartition(':')[2]}. Ctrl-C to stop.")
    helpers_task = asyncio.create_task(_start_helpers(gateway, places))
    await signals.wait_for_task_or_signal(daemon.serving)
    await cancel_and_wait([helpers_task])
    stop_now = asyncio.Event()
    stop_now.set()
    await daemon.stop(hurry=stop_now)
    signals.restore_defaults()
    return 0


# Several processes index thousands of sessions faster than one.


async def _start_helpers(gateway: "Gateway", places: "Sequence[ViewedPlace]") -> None:
    """Start helper processes if many sessions are left to index.

    If this task is cancelled, the processes are ended.
    """
    for _ in range(_MAX_POLLS):
        await asyncio.sleep(_POLL_SECONDS)
        indexed_count, session_count = gateway.indexing or (0, 0)
        if session_count - indexed_count >= _MIN_SESSIONS_FOR_HELPERS:
            break
    else:
        return
    # Start no helpers for databases: their URLs may contain a password, and other users can see
    # command lines.
    if any("://" in place.where for place in places):
        return
    places_json = json.dumps([(place.program, place.where) for place in places])
    command = [sys.executable, "-m", "stenolog", "view", "--index", places_json]
    helpers: list[asyncio.subprocess.Process] = []
    try:
        devnull = asyncio.subprocess.DEVNULL
        for _ in range(min(_MAX_HELPERS, (os.cpu_count() or 1) - 1)):
            helper = await asyncio.create_subprocess_exec(
                *command, stdin=devnull, stdout=devnull, stderr=devnull
            )
            helpers.append(helper)
        for helper in helpers:
            await helper.wait()
    finally:
        for helper in helpers:
            with contextlib.suppress(ProcessLookupError):
                helper.terminate()


def _index_places(places_json: str) -> None:
    """Index the sessions of these places. Stop if the process of the viewer ends."""
    from stenolog.catalog import open_catalog
    from stenolog.transfer.viewed_places import ViewedPlace, open_places, prepare_index_file

    pairs = json.loads(places_json)
    places = [ViewedPlace(program=program, where=where) for program, where in pairs]
    # The process of the viewer has priority.
    os.nice(5)
    viewer_pid = os.getppid()

    def check_viewer(_done: int, _changed: int) -> None:
        if os.getppid() != viewer_pid:
            raise click.Abort

    store = open_places(places, catalog=prepare_index_file(places, _cache_folder()))
    with store, open_catalog(store) as catalog:
        catalog.refresh(check_viewer)


def _listen_on_loopback(port: int | None) -> "list[socket.socket]":
    from stenolog.gateway.daemon import listen

    if port is not None:
        return listen("127.0.0.1", port)
    try:
        return listen("127.0.0.1", _VIEW_PORT)
    except UsageError:
        return listen("127.0.0.1", 0)


def _cache_folder() -> Path:
    """Return the cache folder for search indexes of sessions that are shown read-only."""
    from platformdirs import user_cache_path

    return user_cache_path("stenolog", appauthor=False)


# --- open -----------------------------------------------------------------------------------------


_TIMEOUT_SECONDS: Final = 10
_LOOPBACK_ADDRESSES: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address to connect to, by the address that means "listen on all addresses"."""
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


@click.command("open")
@click.option("--host", metavar="HOST", help="Address of the gateway.  [default: gateway.host]")
@click.option(
    "--port", type=int, metavar="PORT", help="Port of the gateway.  [default: gateway.port]"
)
@_no_open_option
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
    reachable_host = _LOOPBACK_ADDRESSES.get(settings.host, settings.host)
    url = _login_link(reachable_host, settings.port, token, settings.hosts)
    if not no_open and _has_display() and _open_browser(url):
        print_notice("Opened in your browser. If nothing appears, run: steno open --no-open")
        return
    click.echo(url)
    if not no_open:
        print_notice("No browser was found. Open this link within a minute; it works once.")


@click.command("token")
@config_option
def token_command(config: Path | None) -> None:
    """Print the access token of the gateway, which OpenAI clients call the API key.

    If there is no token yet, it is created; the first start of `steno serve` does the same. Keep
    the token secret, and do not put it on a command line, which other users can read.

    Example: export OPENAI_API_KEY="$(steno token)"

    Exit codes: 0 done, 1 the token file cannot be used, 2 wrong usage.
    """
    settings = read_settings(config).gateway
    click.echo(read_or_create_token(token_path(settings.token_file)).value)


def _login_link(host: str, port: int, token: Token, hosts: Sequence[str]) -> str:
    """Return a login link, requested from the gateway at this address. Raises ClickException."""
    # http.client follows no redirects and uses no proxies, so no other server gets the request.
    connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)
    gateway_address = f"{one_line(host)}:{port}"
    try:
        connection.connect()
        host_address = str(connection.sock.getpeername()[0])
        now = str(time.time_ns() // 1_000_000)
        # Send a proof of the token, never the token itself.
        own_proof = token.proof("ask", address_text(host_address, port), now)
        headers = {"Authorization": f"Steno {now}.{own_proof}"}  # guard: token-not-sent
        connection.request("POST", "/v1/login-links", headers={**headers, "Content-Length": "0"})
        with connection.getresponse() as response:
            status, content = response.status, response.read(_MAX_RESPONSE_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise click.ClickException(
            f"There is no gateway at {gateway_address}. Start it with: steno serve --port {port}"
        ) from error
    finally:
        connection.close()
    if status == http.HTTPStatus.UNAUTHORIZED:
        raise click.ClickException(
            f"The gateway at {gateway_address} rejected the token. Check that the gateway and this "
            "command use the same gateway.token_file and port, and that both clocks are right."
        )
    path = _verified_link_path(content, own_proof, token) if status == http.HTTPStatus.OK else None
    if path is None:
        text = f"The server at {gateway_address} is not your gateway (status {status})."
        raise click.ClickException(text)
    if is_loopback(host_address):
        host = login_host(host_address, hosts, token.host_name())
    return f"{_base_url(host, port)}{path}"


def _verified_link_path(content: bytes, own_proof: str, token: Token) -> str | None:
    """Return the path of the login link, or None if the response has no valid proof."""
    try:
        response_fields = json.loads(content)
        path, proof = str(response_fields["url"]), str(response_fields["proof"]).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    # The server must not choose which page the browser opens.
    if not _LOGIN_PATH.fullmatch(path):
        return None
    expected_proof = token.proof("give", own_proof, path).encode()
    return path if hmac.compare_digest(proof, expected_proof) else None


# --- browser --------------------------------------------------------------------------------------


def _has_display() -> bool:
    """Return whether a browser can open a window."""
    # Without a display, a text browser would start in this terminal.
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return sys.platform == "darwin" or bool(display)


def _open_browser(url: str) -> bool:
    """Open the link in a browser, through a private file; return False if that failed.

    Command lines are visible to all users, so the link must not be an argument of the browser. The
    file is not deleted, because its link expires after a minute.
    """
    from platformdirs import user_state_path

    folder = user_state_path("stenolog", appauthor=False)
    page = _REDIRECT_PAGE.format(url=html.escape(url)).encode()
    try:
        disk.create_private_folder(folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            disk.replace_file(descriptor, "open.html", page)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return webbrowser.open((folder / "open.html").as_uri())


def _local_login_link(gateway: "Gateway", url: str, token: Token) -> str:
    """Return a link that signs a browser in once at the gateway of this process."""
    from stenolog.gateway.login import LOGIN_PATH

    host, port = url.removeprefix("http://").rsplit(":", 1)
    host = host.strip("[]")
    host = _LOOPBACK_ADDRESSES.get(host, host)
    if is_loopback(host):
        host = login_host(host, gateway.settings.gateway.hosts, token.host_name())
    return f"{_base_url(host, port)}{LOGIN_PATH}?code={gateway.login_links.make_code()}"


def _base_url(host: str, port: int | str) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
