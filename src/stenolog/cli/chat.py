"""`steno chat`, in a terminal or through a pipe, and `steno ask`, one question for scripts."""

import asyncio
import os
import signal
import stat
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import click

from stenolog.cli.config import Options, agent_options
from stenolog.cli.output import is_interactive, json_text, print_notice, sentence
from stenolog.sessions.keys import cli_sender

if TYPE_CHECKING:
    from stenolog.agent.turn_events import Answer, InboundMessage
    from stenolog.cli.agents import OpenAgent
    from stenolog.cli.chat_pipe import PipeChat, TurnPrinter
    from stenolog.cli.chat_screen import StatusLine
    from stenolog.cli.chat_terminal import TerminalChat
    from stenolog.cli.picker import ChatStart


@click.command("chat")
@click.argument("key", required=False)
@click.option(
    "-c",
    "--continue",
    "continue_last",
    is_flag=True,
    help="Continue the last session of channel cli.",
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
    ctx: click.Context, key: str | None, continue_last: bool, text: str | None, options: Options
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
    if sum((key is not None, continue_last, text is not None)) > 1:
        raise click.UsageError("Select the session only once: with KEY, -c or -r.")
    ctx.exit(asyncio.run(_chat(options, key=key, continue_last=continue_last, text=text)))


async def _chat(options: Options, *, key: str | None, continue_last: bool, text: str | None) -> int:
    # Imported late: slow, and not needed for --help.
    from stenolog.cli.agents import Signals, close_agent, open_agent, session_model
    from stenolog.cli.picker import find_start

    old = key is not None or continue_last or text is not None
    opened = open_agent(options, model_of_session=old)
    signals = Signals()
    try:
        finding = find_start(opened, key=key, continue_last=continue_last, text=text)
        start = await signals.run_until_signal(finding)
        if start is not None:
            session_model(opened, start.key)
    except BaseException:
        await close_agent(opened, signals, print_notice)
        raise
    if start is None:
        return await close_agent(opened, signals, print_notice)
    chat = (_terminal_chat if is_interactive() else _pipe_chat)(opened, start)
    try:
        await chat.run(signals)
    finally:
        code = await close_agent(opened, signals, print_notice)
        await chat.ended()
    return code or chat.code


def _terminal_chat(opened: "OpenAgent", start: "ChatStart") -> "TerminalChat":
    from stenolog.cli.chat_terminal import TerminalChat

    chat = TerminalChat(opened, start.key)
    chat.greet(start)
    return chat


def _pipe_chat(opened: "OpenAgent", start: "ChatStart") -> "PipeChat":
    from stenolog.cli.chat_pipe import PipeChat

    for problem in opened.agent.problems:
        print_notice(sentence(problem))
    if start.description and sys.stdin is not None and sys.stdin.isatty():
        print_notice(start.description)
    return PipeChat(opened, start.key)


# --- ask ------------------------------------------------------------------------------------------


@click.command("ask")
@click.argument("question", required=False)
@click.option(
    "--session", "key", metavar="KEY", help="Ask in this session.  [default: a new session]"
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
@agent_options
@click.pass_context
def ask_command(
    ctx: click.Context, question: str | None, key: str | None, as_json: bool, options: Options
) -> None:
    """Ask an agent one question and print the answer.

    Without QUESTION, or with -, the question is read from stdin. With QUESTION, piped text is
    appended to it. The answer goes to stdout while it is written, everything else to stderr. Both
    are stored, so `steno chat -c` continues the conversation.

    Example: steno ask 'What is wrong here?' < error.log

    With --json the answer is printed exactly, with key, seq, outcome, saved, model, usage and
    tools; otherwise control characters are removed. In a shell loop that reads lines itself, add
    `< /dev/null`.

    Exit codes: 0 answered, 1 not answered, 2 wrong usage, 3 answered but not saved, 130 stopped
    with Ctrl-C.
    """
    asked = _question_text(question)
    ctx.exit(asyncio.run(_ask(options, asked, key=key, as_json=as_json)))


def _question_text(given: str | None) -> str:
    if given is not None and given != "-":
        piped = _read_piped()
        text = f"{given}\n\n{piped}" if piped.strip() else given
    elif sys.stdin is None or (given is None and sys.stdin.isatty()):
        raise click.UsageError("The question is missing. Example: steno ask 'How tall is K2?'")
    else:
        text = _read_stdin()
    if not text.strip():
        raise click.UsageError("The question is empty.")
    return text.strip()


def _read_piped() -> str:
    """Return piped input that accompanies a question. Never waits for a terminal."""
    if sys.stdin is None:
        return ""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:
        return _read_stdin()  # stdin was replaced by an object without a file descriptor
    return _read_stdin() if stat.S_ISFIFO(mode) or stat.S_ISREG(mode) else ""


def _read_stdin() -> str:
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    return sys.stdin.read()


async def _ask(options: Options, question: str, *, key: str | None, as_json: bool) -> int:
    # Imported late: slow, and not needed for --help.
    from stenolog.agent.commands import new_key, parse_command
    from stenolog.agent.turn_events import InboundMessage
    from stenolog.cli.agents import (
        CHANNEL,
        NOT_SAVED,
        SENDER,
        Signals,
        close_agent,
        open_agent,
        session_model,
    )
    from stenolog.cli.chat_pipe import TurnPrinter, exit_code_of
    from stenolog.cli.chat_screen import StatusLine

    opened = open_agent(options, model_of_session=key is not None)
    signals = Signals()
    wanted = key or new_key(CHANNEL, SENDER)
    try:
        model = session_model(opened, wanted)
    except BaseException:
        await close_agent(opened, signals, print_notice)
        raise
    status = StatusLine(model.name)
    for problem in opened.agent.problems:
        print_notice(sentence(problem))
    # A question is never a command, whatever it starts with.
    content = question if parse_command(question) is None else f"/{question}"
    inbound = InboundMessage(key=wanted, content=content, sender=cli_sender(wanted))
    asking = _Question(opened, inbound)
    printer = TurnPrinter(
        status, verbose=sys.stderr.isatty(), quiet=as_json, once=True, on_closed=asking.stop
    )
    hearing = asyncio.create_task(asking.answered(printer))
    ending = asyncio.create_task(signals.received.wait())
    try:
        await asyncio.wait({hearing, ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        code = await close_agent(opened, signals, print_notice)
        ending.cancel()
    answer = await hearing
    if as_json:
        click.echo(json_text(_fields(answer, printer, status)))
    # The outcome of the question takes precedence over NOT_SAVED.
    return (exit_code_of(answer) or code) if code == NOT_SAVED else (code or exit_code_of(answer))


class _Question:
    """A question in progress. Ctrl-C or a closed stdout stops the answer."""

    def __init__(self, opened: "OpenAgent", inbound: "InboundMessage") -> None:
        self._opened = opened
        self._inbound = inbound
        self._stopping: asyncio.Task[bool] | None = None

    def stop(self) -> None:
        stopping = self._opened.loop.stop(self._inbound.key, agent=self._opened.agent.id)
        self._stopping = asyncio.create_task(stopping)

    async def answered(self, printer: "TurnPrinter") -> "Answer":
        """Stream the answer to stdout and return it. Raises UsageError, and OSError of stdout."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self.stop)
        try:
            answer = await self._opened.loop.handle(
                self._inbound, on_event=printer.tell, agent=self._opened.agent.id
            )
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        printer.finish(answer)
        return answer


def _fields(answer: "Answer", printer: "TurnPrinter", status: "StatusLine") -> dict[str, Any]:
    failed = answer.outcome == "failed"
    fields = {
        "key": answer.key,
        "answer": "" if failed else answer.text,
        "seq": answer.seq,
        "outcome": answer.outcome,
        "saved": answer.saved,
        "model": status.model,
        "usage": {
            "input_tokens": status.input_tokens,
            "output_tokens": status.output_tokens,
            "cached_tokens": status.cached_tokens,
        },
        "tools": printer.tools,
    }
    return {**fields, "error": answer.text} if failed else fields
