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
from stenolog.cli.options import json_option
from stenolog.cli.output import is_interactive, json_text, print_notice, print_notices, sentence
from stenolog.sessions.keys import cli_sender

if TYPE_CHECKING:
    from stenolog.agent.turn_events import Answer
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
    help="Continue the last session of the command line.",
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
def chat_command(key: str | None, continue_last: bool, text: str | None, options: Options) -> int:
    """Talk to an agent, in a new session or in the session KEY.

    In a terminal, /help lists commands and keys. Without a terminal, each line of stdin is one
    message, and only the answers go to stdout.

    If no model is configured, the first model found is used: by an API key in the environment, in
    Ollama, or as local weights. --model scripted is a test model that needs no key.

    Example: steno chat -c --model ollama/llama3.2

    Exit codes: 0 done, 1 failed (without a terminal also if an answer failed), 2 wrong usage,
    3 a message could not be saved, 128 + N ended by signal N.
    """
    if sum((key is not None, continue_last, text is not None)) > 1:
        raise click.UsageError("Select the session only once: with KEY, -c or -r.")
    return asyncio.run(_chat(options, key=key, continue_last=continue_last, text=text))


async def _chat(options: Options, *, key: str | None, continue_last: bool, text: str | None) -> int:
    # These imports are slow and not needed for --help.
    from stenolog.cli.agents import Signals, close_agent, open_agent, session_model
    from stenolog.cli.picker import find_start

    is_existing = key is not None or continue_last or text is not None
    opened = open_agent(options, model_of_session=is_existing)
    signals = Signals()
    try:
        start = await signals.run_until_signal(
            find_start(opened, key=key, continue_last=continue_last, text=text)
        )
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
        exit_code = await close_agent(opened, signals, print_notice)
        await chat.wait_for_turns()
    return exit_code or chat.exit_code


def _terminal_chat(opened: "OpenAgent", start: "ChatStart") -> "TerminalChat":
    from stenolog.cli.chat_terminal import TerminalChat

    chat = TerminalChat(opened, start.key)
    chat.greet(start)
    return chat


def _pipe_chat(opened: "OpenAgent", start: "ChatStart") -> "PipeChat":
    from stenolog.cli.chat_pipe import PipeChat

    print_notices(map(sentence, opened.agent.problems))
    if start.description and sys.stdin is not None and sys.stdin.isatty():
        print_notice(start.description)
    return PipeChat(opened, start.key)


# --- ask ------------------------------------------------------------------------------------------


@click.command("ask")
@click.argument("question", required=False)
@click.option(
    "--session", "key", metavar="KEY", help="Ask in this session.  [default: a new session]"
)
@json_option()
@agent_options
def ask_command(question: str | None, key: str | None, as_json: bool, options: Options) -> int:
    """Ask an agent one question and print the answer.

    Without QUESTION, or with -, the question is read from stdin. With QUESTION, text from a pipe is
    appended to the question. The answer goes to stdout while it is written, everything else to
    stderr. Question and answer are stored: `steno chat -c` continues the conversation.

    Example: steno ask 'What is wrong here?' < error.log

    --json prints the unchanged answer with key, seq, outcome, saved, model, usage and tools.
    Without --json, control characters are removed. In a shell loop that reads lines from stdin, add
    `< /dev/null`, so that steno does not read them.

    Exit codes: 0 answered, 1 not answered, 2 wrong usage, 3 answered but not saved, 130 stopped
    with Ctrl-C.
    """
    text = _question_text(question)
    return asyncio.run(_ask(options, text, key=key, as_json=as_json))


def _question_text(argument: str | None) -> str:
    if argument is not None and argument != "-":
        piped_text = _read_piped_text()
        text = f"{argument}\n\n{piped_text}" if piped_text.strip() else argument
    elif sys.stdin is None or (argument is None and sys.stdin.isatty()):
        raise click.UsageError("The question is missing. Example: steno ask 'How tall is K2?'")
    else:
        text = _read_stdin()
    if not text.strip():
        raise click.UsageError("The question is empty.")
    return text.strip()


def _read_piped_text() -> str:
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
    # These imports are slow and not needed for --help.
    from stenolog.agent.commands import new_key, parse_command
    from stenolog.agent.turn_events import InboundMessage
    from stenolog.cli.agents import (
        CHANNEL,
        EXIT_NOT_SAVED,
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
    key = key or new_key(CHANNEL, SENDER)
    try:
        model = session_model(opened, key)
    except BaseException:
        await close_agent(opened, signals, print_notice)
        raise
    status = StatusLine(model.name)
    print_notices(map(sentence, opened.agent.problems))
    # A question is never a command, even if it starts with a slash.
    content = question if parse_command(question) is None else f"/{question}"
    inbound = InboundMessage(key=key, content=content, sender=cli_sender(key))
    loop = asyncio.get_running_loop()
    stop_tasks: list[asyncio.Task[bool]] = []

    def stop() -> None:
        stop_tasks.append(asyncio.create_task(opened.loop.stop(key, agent=opened.agent.id)))

    printer = TurnPrinter(
        status, verbose=sys.stderr.isatty(), quiet=as_json, is_last=True, on_closed=stop
    )

    def report(text: str) -> None:
        if not printer.has_reported_loss:
            print_notice(text)

    async def stream_answer() -> "Answer":
        """Stream the answer to stdout and return it. Raises UsageError, and OSError of stdout."""
        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            answer = await opened.loop.handle(
                inbound, on_event=printer.print_event, agent=opened.agent.id
            )
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        printer.finish(answer)
        return answer

    answering = asyncio.create_task(stream_answer())
    signal_wait = asyncio.create_task(signals.received.wait())
    try:
        await asyncio.wait({answering, signal_wait}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        exit_code = await close_agent(opened, signals, report)
        signal_wait.cancel()
    answer = await answering
    if as_json:
        click.echo(json_text(_answer_fields(answer, printer, status)))
    answer_code = exit_code_of(answer)
    # The exit code of the question takes precedence over EXIT_NOT_SAVED.
    return (answer_code or exit_code) if exit_code == EXIT_NOT_SAVED else (exit_code or answer_code)


def _answer_fields(
    answer: "Answer", printer: "TurnPrinter", status: "StatusLine"
) -> dict[str, Any]:
    has_failed = answer.outcome == "failed"
    fields = {
        "key": answer.key,
        "answer": "" if has_failed else answer.text,
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
    return {**fields, "error": answer.text} if has_failed else fields
