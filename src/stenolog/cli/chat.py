"""`steno chat`: talk to an agent, in a terminal or through a pipe."""

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from stenolog.cli.config import Options, agent_options
from stenolog.cli.output import is_interactive, printable, sentence

if TYPE_CHECKING:
    from stenolog.cli.agents import Opened, Signals
    from stenolog.cli.chat_start import Start


@click.command("chat")
@click.argument("key", required=False)
@click.option(
    "-c", "--continue", "go_on", is_flag=True, help="Continue the last session of channel cli."
)
@click.option(
    "-r",
    "--resume",
    "text",
    is_flag=False,
    flag_value="",
    metavar="[TEXT]",
    help="Choose a session; TEXT searches titles, keys and messages.",
)
@agent_options
@click.pass_context
def chat_command(
    ctx: click.Context, key: str | None, go_on: bool, text: str | None, options: Options
) -> None:
    """Talk to an agent, in a new session or in the session KEY.

    In a terminal, /help lists commands and keys. Without a terminal, each line of stdin is one
    message, and only the answers go to stdout.

    If no model is configured, the first one found is used: an API key in the environment, an Ollama
    server on this machine, or local weights. --model scripted works without any of them.

    Example: steno chat -c --model ollama/llama3.2

    Exit codes: 0 done, 1 failed (without a terminal also if an answer failed), 2 wrong usage,
    3 a message could not be saved, 128 + N ended by signal N.
    """
    if sum((key is not None, go_on, text is not None)) > 1:
        raise click.UsageError("Select the session only once: with KEY, -c or -r.")
    ctx.exit(asyncio.run(_chat(options, key=key, go_on=go_on, text=text)))


async def _chat(options: Options, *, key: str | None, go_on: bool, text: str | None) -> int:
    # Imported late: slow, and not needed for --help.
    from stenolog.cli.agents import Signals, close_agent, open_agent, session_model
    from stenolog.cli.chat_start import find_start

    old = key is not None or go_on or text is not None
    opened = open_agent(options, model_of_session=old)
    signals = Signals()
    try:
        finding = find_start(opened, key=key, go_on=go_on, text=text)
        start = await signals.unless_asked(finding)
        if start is not None:
            session_model(opened, start.key)
    except BaseException:
        await close_agent(opened, signals, _say)
        raise
    if start is None:
        return await close_agent(opened, signals, _say)
    talk = _in_terminal if is_interactive() else _through_pipe
    return await talk(opened, signals, start)


async def _in_terminal(opened: "Opened", signals: "Signals", start: "Start") -> int:
    from stenolog.cli.agents import close_agent
    from stenolog.cli.chat_terminal import Conversation

    talk = Conversation(opened, start.key)
    talk.greet(start)
    try:
        await talk.run(signals)
    finally:
        code = await close_agent(opened, signals, _say)
        await talk.ended()
    return code or talk.code


async def _through_pipe(opened: "Opened", signals: "Signals", start: "Start") -> int:
    from stenolog.cli.agents import close_agent
    from stenolog.cli.chat_pipe import PipedTalk

    for problem in opened.agent.problems:
        _say(sentence(problem))
    if start.words and sys.stdin is not None and sys.stdin.isatty():
        _say(start.words)
    talk = PipedTalk(opened, start.key)
    try:
        await talk.run(signals)
    finally:
        code = await close_agent(opened, signals, _say)
        await talk.ended()
    return code or talk.code


def _say(words: str) -> None:
    click.echo(printable(words), err=True)
