"""`steno view` shows the conversations on this machine in a browser, read-only."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from stenolog.cli.config import config_option, read_settings
from stenolog.cli.output import print_notice, sentence
from stenolog.cli.serve import (
    cache_folder,
    has_display,
    import_gateway,
    open_browser,
    own_login_link,
)
from stenolog.cli.workspace import display_name
from stenolog.errors import StenologError, UsageError

if TYPE_CHECKING:
    import socket

    from stenolog.gateway.access_token import Token
    from stenolog.gateway.shared_state import Gateway
    from stenolog.settings.values import Settings
    from stenolog.transfer.viewed_places import ViewedPlace

PORT: Final = 8788
"""Port if none is given and it is free."""
_MANY: Final = 200
"""Number of sessions that are worth more processes."""
_MAX_HELPERS: Final = 3
_POLL: Final = 0.2
_POLLS: Final = 50
"""Number of times that the progress is looked at before no helpers are needed."""
_USUAL: Final = """\
No conversations were found. Looked at:
  Claude Code   ~/.claude/projects, or $CLAUDE_CONFIG_DIR
  Codex         ~/.codex, or $CODEX_HOME
  Gemini CLI    ~/.gemini/tmp
  opencode      ~/.local/share/opencode
  llm           the folder that `llm logs path` prints
  stenolog      {workspace}
Name a place: steno view PLACE. An export of ChatGPT, Claude.ai or Open WebUI, a project folder of
Aider, and a stenolog workspace or database are places too."""
_NAMES: Final = {
    "aider": "Aider",
    "chatgpt": "ChatGPT",
    "claude-ai": "Claude.ai",
    "claude-code": "Claude Code",
    "codex": "Codex",
    "gemini-cli": "Gemini CLI",
    "open-webui": "Open WebUI",
}


@click.command("view")
@click.argument("places", nargs=-1, metavar="[PLACE]...")
@click.option("--port", type=int, metavar="N", help="Port; 0 for any.  [default: 8788 if free]")
@click.option("--no-open", is_flag=True, help="Print the link, but do not open a browser.")
@click.option("--index", "to_index", hidden=True, help="Places in JSON, to be indexed only.")
@config_option
@click.pass_context
def view_command(
    ctx: click.Context,
    places: tuple[str, ...],
    port: int | None,
    no_open: bool,
    to_index: str | None,
    config: Path | None,
) -> None:
    """Show conversations in a browser, read-only.

    PLACE is a folder or file with transcripts of a known program (Claude Code, Codex, ChatGPT,
    Claude.ai, Gemini CLI, opencode, llm, Aider, Open WebUI), a stenolog workspace, sqlite:FILE or
    postgresql://…  Without PLACE: the usual places of these programs on this machine, and the
    workspace of the config file.

    Needs no model and no key. Not a byte of the places changes; the search index is in the cache
    folder of the user. Ctrl-C ends it.

    Example: steno view ~/.claude/projects

    Exit codes: 0 stopped, 1 nothing to show or could not start, 2 wrong usage.
    """
    if to_index is not None:
        _index(to_index)
        return
    settings = read_settings(config, {"gateway.host": "127.0.0.1", "gateway.port": port or PORT})
    ctx.exit(asyncio.run(_view(settings, _find(places, settings), port=port, no_open=no_open)))


def _find(given: Sequence[str], settings: "Settings") -> "list[ViewedPlace]":
    # Imported late: slow.
    from stenolog.transfer.viewed_places import recognize_place, usual_places

    workspace = settings.agent.sessions
    if given:
        return list(dict.fromkeys(map(recognize_place, given)))
    found = usual_places(workspace)
    if not found:
        raise click.ClickException(_USUAL.format(workspace=display_name(workspace)))
    return found


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
    from stenolog.transfer.viewed_places import index_file, open_places

    async with contextlib.AsyncExitStack() as undo:
        listening = _listen(port)
        for one in listening:
            undo.callback(one.close)
        token = _token(settings)
        try:
            catalog: Path | None = index_file(places, cache_folder())
        except OSError as error:
            print_notice(f"Warning: the search index is kept in memory: {sentence(str(error))}")
            catalog = None
        failed: list[ViewedPlace] = []

        def report(place: "ViewedPlace", error: Exception) -> None:
            failed.append(place)
            shown = display_name(place.where)
            print_notice(f"Warning: {shown} is not shown: {sentence(str(error))}")

        store = open_places(places, catalog=catalog, on_problem=report)
        undo.callback(store.close)
        agent = open_viewer(AgentSpec(), store, heads=store.heads)
        undo.callback(agent.close_stores)
        signals = Signals()
        signals.watch(signal.SIGINT)
        loop = AgentLoop(AgentRegistry([agent]))
        gateway = Gateway(loop, settings, read_only=True)
        daemon = Daemon(gateway, token, listening, NoChannels())
        await daemon.start()
        undo.pop_all()
    _print_places([place for place in places if place not in failed])
    link = own_login_link(daemon.url, token, settings.gateway.hosts)
    click.echo(f"Listening at {daemon.url}")
    click.echo(f"Open within a minute, once: {link}")
    if not no_open and sys.stdout.isatty() and has_display():
        open_browser(link)
    print_notice(f"Another link: steno open --port {daemon.url.rpartition(':')[2]}. Ctrl-C ends.")
    asked = asyncio.create_task(signals.received.wait())
    helping = asyncio.create_task(_start_helpers(gateway, places))
    await asyncio.wait({asked, daemon.serving}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    await cancel_and_wait([helping])
    hurry = asyncio.Event()
    hurry.set()
    await daemon.stop(hurry=hurry)
    signals.ignore()
    return 0


# --- helpers -------------------------------------------------------------------------------------
# The first index of thousands of sessions takes the time of several processors.


async def _start_helpers(gateway: "Gateway", places: "Sequence[ViewedPlace]") -> None:
    """Start more processes if the first index takes long; end them when this task is cancelled."""
    for _ in range(_POLLS):
        await asyncio.sleep(_POLL)
        indexed, count = gateway.indexing or (0, 0)
        if count - indexed >= _MANY:
            break
    else:
        return
    # URLs of databases may contain a password, which other users could see.
    if any("://" in place.where for place in places):
        return
    given = json.dumps([(place.program, place.where) for place in places])
    command = [sys.executable, "-m", "stenolog", "view", "--index", given]
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


def _index(given: str) -> None:
    """Index the sessions of these places, until all are indexed or the viewer has ended."""
    from stenolog.catalog import open_catalog
    from stenolog.transfer.viewed_places import ViewedPlace, index_file, open_places

    places = [ViewedPlace(program=program, where=where) for program, where in json.loads(given)]
    # The viewer itself comes first.
    os.nice(5)
    viewer = os.getppid()

    def check_viewer(_done: int, _changed: int) -> None:
        if os.getppid() != viewer:
            raise click.Abort

    store = open_places(places, catalog=index_file(places, cache_folder()))
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


def _token(settings: "Settings") -> "Token":
    """Return the token of the gateway, or a new one if its file cannot be used."""
    from stenolog.gateway.access_token import new_token, read_or_create_token, token_path

    try:
        return read_or_create_token(token_path(settings.gateway.token_file))
    except StenologError:
        return new_token()


def _print_places(places: "Sequence[ViewedPlace]") -> None:
    print_notice("Showing, read-only:")
    for place in places:
        name = _NAMES.get(place.program, place.program)
        print_notice(f"  {name:12}  {display_name(place.where)}")
