"""`steno view` shows the conversations on this machine in a browser, read-only."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from stenolog.cli.config import config_option, read_settings
from stenolog.cli.output import print_notice, sentence
from stenolog.cli.serve import (
    cache_folder,
    collect_garbage_again,
    has_display,
    import_gateway,
    local_login_link,
    no_open_option,
    open_browser,
)
from stenolog.cli.workspace import PROGRAM_NAMES, display_name
from stenolog.errors import StenologError, UsageError, install_command

if TYPE_CHECKING:
    import socket

    from stenolog.gateway.access_token import Token
    from stenolog.gateway.shared_state import Gateway
    from stenolog.settings.values import Settings
    from stenolog.transfer.viewed_places import ViewedPlace

PORT: Final = 8788
"""Port that is used if it is free and the user gives no port."""
_MIN_SESSIONS_FOR_HELPERS: Final = 200
"""Minimum number of sessions left to index for which helper processes are started."""
_MAX_HELPERS: Final = 3
_POLL_SECONDS: Final = 0.2
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
Open WebUI, a project folder of Aider, or a stenolog workspace or database."""


@click.command("view")
@click.argument("places", nargs=-1, metavar="[PLACE]...")
@click.option("--port", type=int, metavar="N", help="Port; 0 for any.  [default: 8788 if free]")
@no_open_option
@click.option("--index", "to_index", hidden=True, help="Places in JSON, to be indexed only.")
@config_option
def view_command(
    places: tuple[str, ...],
    port: int | None,
    no_open: bool,
    to_index: str | None,
    config: Path | None,
) -> int:
    """Show conversations in a browser, read-only.

    PLACE is a folder or file with transcripts of a known program (Claude Code, Codex, ChatGPT,
    Claude.ai, Gemini CLI, opencode, llm, Aider, Open WebUI), a stenolog workspace, sqlite:FILE or
    postgresql://…  Without PLACE, the command shows the usual places of the known programs on this
    machine, and the workspace of the config file.

    You need no model and no key. No file of another program is changed; the search index is in your
    cache folder. Press Ctrl-C to stop.

    Example: steno view ~/.claude/projects

    Exit codes: 0 stopped, 1 nothing to show or could not start, 2 wrong usage.
    """
    if to_index is not None:
        _index_places(to_index)
        return 0
    settings = read_settings(config, {"gateway.host": "127.0.0.1", "gateway.port": port or PORT})
    viewed = _find_places(places, settings)
    return asyncio.run(_view(settings, viewed, port=port, no_open=no_open))


def _find_places(places: Sequence[str], settings: "Settings") -> "list[ViewedPlace]":
    # This import is slow, so it is not at the top.
    from stenolog.transfer.viewed_places import find_usual_places, recognize_place

    workspace = settings.agent.sessions
    if places:
        return list(dict.fromkeys(map(recognize_place, places)))
    usual = find_usual_places(workspace)
    if not usual:
        raise click.ClickException(_NOTHING_FOUND_TEXT.format(workspace=display_name(workspace)))
    return usual


async def _view(
    settings: "Settings", places: "Sequence[ViewedPlace]", *, port: int | None, no_open: bool
) -> int:
    import_gateway()
    from stenolog.agent.instance import AgentRegistry
    from stenolog.agent.loop import AgentLoop
    from stenolog.agent.spec import AgentSpec
    from stenolog.agent.threads import cancel_and_wait
    from stenolog.cli.agents import Signals, open_viewer
    from stenolog.gateway.daemon import Daemon, NoChannels
    from stenolog.gateway.shared_state import Gateway
    from stenolog.transfer.viewed_places import open_places, prepare_index_file

    async with contextlib.AsyncExitStack() as cleanup:
        sockets = _listen(port)
        for sock in sockets:
            cleanup.callback(sock.close)
        token = _access_token(settings)
        try:
            catalog: Path | None = prepare_index_file(places, cache_folder())
        except OSError as error:
            print_notice(f"Warning: the search index is kept in memory: {sentence(str(error))}")
            catalog = None
        failed_places: list[ViewedPlace] = []

        def report(place: "ViewedPlace", error: Exception) -> None:
            failed_places.append(place)
            place_name = display_name(place.where)
            print_notice(f"Warning: {place_name} is not shown: {sentence(str(error))}")

        store = open_places(places, catalog=catalog, on_problem=report)
        cleanup.callback(store.close)
        agent = open_viewer(AgentSpec(), store, heads=store.heads)
        cleanup.callback(agent.close_stores)
        signals = Signals()
        signals.watch(signal.SIGINT)
        loop = AgentLoop(AgentRegistry([agent]))
        gateway = Gateway(loop, settings, read_only=True)
        daemon = Daemon(gateway, token, sockets, NoChannels())
        await daemon.start()
        cleanup.pop_all()
    collect_garbage_again()
    _print_places([place for place in places if place not in failed_places])
    link = local_login_link(daemon.url, token, settings.gateway.hosts)
    click.echo(f"Listening at {daemon.url}")
    click.echo(f"Open this link within a minute; it works once: {link}")
    if not no_open and sys.stdout.isatty() and has_display():
        open_browser(link)
    print_notice(f"New link: steno open --port {daemon.url.rpartition(':')[2]}. Ctrl-C to stop.")
    if find_spec("genai_prices") is None:
        print_notice(f"To see the cost: {install_command('prices')}")
    signal_wait = asyncio.create_task(signals.received.wait())
    helpers_task = asyncio.create_task(_start_helpers(gateway, places))
    await asyncio.wait({signal_wait, daemon.serving}, return_when=asyncio.FIRST_COMPLETED)
    signal_wait.cancel()
    await cancel_and_wait([helpers_task])
    stop_now = asyncio.Event()
    stop_now.set()
    await daemon.stop(hurry=stop_now)
    signals.restore_defaults()
    return 0


# --- helpers -------------------------------------------------------------------------------------
# The first index of thousands of sessions is faster on several processors.


async def _start_helpers(gateway: "Gateway", places: "Sequence[ViewedPlace]") -> None:
    """Start more processes if the first index takes long; end them when this task is cancelled."""
    for _ in range(_MAX_POLLS):
        await asyncio.sleep(_POLL_SECONDS)
        indexed, count = gateway.indexing or (0, 0)
        if count - indexed >= _MIN_SESSIONS_FOR_HELPERS:
            break
    else:
        return
    # Other users can see command lines, and URLs of databases may contain a password.
    if any("://" in place.where for place in places):
        return
    place_list = json.dumps([(place.program, place.where) for place in places])
    command = [sys.executable, "-m", "stenolog", "view", "--index", place_list]
    helpers: list[asyncio.subprocess.Process] = []
    try:
        for _ in range(min(_MAX_HELPERS, (os.cpu_count() or 1) - 1)):
            null = asyncio.subprocess.DEVNULL
            helpers.append(
                await asyncio.create_subprocess_exec(*command, stdin=null, stdout=null, stderr=null)
            )
        for helper in helpers:
            await helper.wait()
    finally:
        for helper in helpers:
            with contextlib.suppress(ProcessLookupError):
                helper.terminate()


def _index_places(text: str) -> None:
    """Index the sessions of these places until all are indexed or the viewer ends."""
    from stenolog.catalog import open_catalog
    from stenolog.transfer.viewed_places import ViewedPlace, open_places, prepare_index_file

    places = [ViewedPlace(program=program, where=where) for program, where in json.loads(text)]
    # The process of the viewer has priority.
    os.nice(5)
    viewer = os.getppid()

    def check_viewer(_done: int, _changed: int) -> None:
        if os.getppid() != viewer:
            raise click.Abort

    store = open_places(places, catalog=prepare_index_file(places, cache_folder()))
    with store, open_catalog(store) as catalog:
        catalog.refresh(check_viewer)


# --- start ---------------------------------------------------------------------------------------


def _listen(port: int | None) -> "list[socket.socket]":
    from stenolog.gateway.daemon import listen

    if port is not None:
        return listen("127.0.0.1", port)
    try:
        return listen("127.0.0.1", PORT)
    except UsageError:
        return listen("127.0.0.1", 0)


def _access_token(settings: "Settings") -> "Token":
    """Return the token of the gateway, or a new token if the token file cannot be used."""
    from stenolog.gateway.access_token import new_token, read_or_create_token, token_path

    try:
        return read_or_create_token(token_path(settings.gateway.token_file))
    except StenologError:
        return new_token()


def _print_places(places: "Sequence[ViewedPlace]") -> None:
    print_notice("Showing, read-only:")
    for place in places:
        name = PROGRAM_NAMES.get(place.program, place.program)
        print_notice(f"  {name:12}  {display_name(place.where)}")
