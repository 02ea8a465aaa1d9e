"""`steno serve`: the gateway as a daemon, from the first line to the last."""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from stenolog.cli.agent_options import Options
from stenolog.cli.config import config_option, settings_of
from stenolog.cli.text import printable, sentence
from stenolog.cli.workspace import OF_SETTINGS, shown

if TYPE_CHECKING:
    from stenolog.agent.instance import AgentInstance
    from stenolog.cli.agents import Signals
    from stenolog.settings.values import Settings

_CHANNEL: Final = "gateway"
_NOT_SAVED: Final = 3
_USUAL_PORT: Final = "8787"
_MISSING: Final = "The gateway is an extra: pip install 'stenolog[gateway]'."


@click.command("serve")
@click.option("--host", metavar="ADDRESS", help="Where to listen; 127.0.0.1 unless set.")
@click.option("--port", type=int, metavar="N", help="The port; 8787 unless set, 0 for any.")
@click.option(
    "-m", "--model", metavar="NAME", help="Which model answers, in the place of the settings'."
)
@click.option(
    "-w",
    "--workspace",
    metavar="DIR",
    show_default=OF_SETTINGS,
    help="The workspace, sqlite:FILE, or postgresql://…",
)
@config_option
@click.pass_context
def serve_command(
    ctx: click.Context,
    config: Path | None,
    workspace: str | None,
    model: str | None,
    host: str | None,
    port: int | None,
) -> None:
    """Make the agents reachable: for clients of OpenAI's API, browsers, chat apps and webhooks.

    It listens at 127.0.0.1 and answers who has its token, which the first start puts into a file
    that only you can read. `steno open` opens a browser with it. Sessions are kept as everywhere:
    name one with the header X-Session-Key, or as metadata.session, and it is durable and
    remembered. Several gateways may serve one PostgreSQL; each takes any request.

    SIGTERM and Ctrl-C end it once the answers in flight are made, and a second one at once.

    Exit code: 0 ended, 1 it could not be started, 2 wrong usage, 3 ended and something that was
    said could not be saved.
    """
    settings = settings_of(config, {"gateway.host": host, "gateway.port": port})
    options = Options(config=config, workspace=workspace, model=model)
    ctx.exit(asyncio.run(_serve(settings, options)))


async def _serve(settings: "Settings", options: Options) -> int:
    # Slow to import, and an extra.
    try:
        from stenolog.gateway.daemon import Daemon, listen
        from stenolog.gateway.state import Gateway
        from stenolog.gateway.token import keep_token, token_path
    except ModuleNotFoundError as error:
        raise click.ClickException(_MISSING) from error
    from stenolog.agent.loop import AgentLoop
    from stenolog.agent.registry import AgentRegistry
    from stenolog.channels.running import Channels
    from stenolog.cli.agents import Signals, open_agents, words_of_left

    _log_to_stderr(settings)
    async with contextlib.AsyncExitStack() as undo:
        # Whatever is wrong, nothing stays open: each step is taken back by its failure.
        listening = listen(settings.gateway.host, settings.gateway.port)
        undo.callback(listening.close)
        file = token_path(settings.gateway.token_file)
        token = keep_token(file)
        agents = open_agents(options, settings, channel=_CHANNEL)
        undo.callback(_close_stores, agents)
        signals = Signals()
        signals.watch(signal.SIGINT)
        loop = AgentLoop(AgentRegistry(agents), ttl=settings.gateway.takeover)
        channels = Channels(loop, settings)
        undo.push_async_callback(channels.close)
        daemon = Daemon(Gateway(loop, settings), token, listening, channels)
        await daemon.start()
        undo.pop_all()
    _tell_of(settings, agents, daemon.url, file)
    asked = asyncio.create_task(signals.asked.wait())
    await asyncio.wait({asked, daemon.serving}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not daemon.serving.done():
        _say("Ending: what is being answered has some seconds; a second signal ends it at once.")
    hurry = asyncio.Event()
    another = asyncio.create_task(_hurry(signals, hurry))
    left = await daemon.stop(hurry=hurry)
    another.cancel()
    signals.ignore()
    if words := words_of_left(left):
        _say(words)
    failure = None if daemon.serving.cancelled() else daemon.serving.exception()
    if failure is not None:
        _say(f"The server has ended by itself: {failure!r}")
        return 1
    if left.hanging:
        sys.stderr.flush()
        # A tool that does not end has a thread that nothing can end.
        os._exit(_NOT_SAVED if left.not_saved else 0)
    return _NOT_SAVED if left.not_saved else 0


async def _hurry(signals: "Signals", hurry: asyncio.Event) -> None:
    await signals.another()
    hurry.set()


def _close_stores(agents: "list[AgentInstance]") -> None:
    for agent in agents:
        agent.close_stores()


def _log_to_stderr(settings: "Settings") -> None:
    """Have what goes wrong be told, with its time: nobody else reads what a daemon returns."""
    from stenolog.gateway.failures import WithoutSecrets

    writing = logging.StreamHandler()
    writing.addFilter(WithoutSecrets(settings))
    writing.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("stenolog", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.addHandler(writing)
        logger.propagate = False


def _tell_of(settings: "Settings", agents: "list[AgentInstance]", url: str, file: Path) -> None:
    names = ", ".join(f"{one.id or 'main'} ({one.model.name})" for one in agents)
    places = ", ".join(dict.fromkeys(shown(one.spec.sessions) for one in agents))
    _say(f"Serving {names}, with sessions in {places}.")
    for agent in agents:
        for problem in agent.problems:
            _say(f"Warning: {sentence(problem)}")
    from stenolog.gateway.hosts import is_loopback

    if not is_loopback(settings.gateway.host):
        words = "other machines can reach it, and what is sent is not encrypted; put TLS before it"
        _say(f"Warning: {sentence(words)}")
    port = url.rpartition(":")[2]
    _say(f"A browser:       steno open{'' if port == _USUAL_PORT else f' --port {port}'}")
    _say(f'OpenAI clients:  base_url="{url}/v1", api_key=$(cat {shlex.quote(str(file))})')
    # The one line for programs.
    click.echo(f"Listening at {url}")


def _say(words: str) -> None:
    click.echo(printable(words), err=True)
