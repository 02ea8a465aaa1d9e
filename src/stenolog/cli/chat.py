"""`steno chat` in a terminal, and `steno ask`, one question for scripts."""

import asyncio
import os
import signal
import stat
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

import click

from stenolog.cli.config import AgentOptions, agent_options
from stenolog.cli.output import (
    attributes_of,
    inline_output,
    is_interactive,
    print_json,
    print_notice,
    sentence,
    wants_json,
)
from stenolog.cli.workspace import json_option

if TYPE_CHECKING:
    from stenolog.agent.turn_events import Answer
    from stenolog.cli.answer_printer import TurnPrinter
    from stenolog.cli.chat_screen import StatusLine


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
    "search",
    is_flag=False,
    flag_value="",
    metavar="[TEXT]",
    help="Choose a session; TEXT searches titles, keys and messages.",
)
@agent_options
def chat_command(
    key: str | None, continue_last: bool, search: str | None, options: AgentOptions
) -> int:
    """Talk to an agent in a terminal, in a new session or in the session KEY.

    /help lists commands and keys. Scripts use `steno ask`.

    If no model is configured, the first model found is used: by an API key in the environment, in
    Ollama, or as local weights. --model scripted is a test model that needs no key.

    Example: steno chat -c --model ollama/llama3.2

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 a message could not be saved, 128 + N ended by
    signal N.
    """
    if sum((key is not None, continue_last, search is not None)) > 1:
        raise click.UsageError("Select the session only once: with KEY, -c or -r.")
    if not is_interactive():
        raise click.ClickException(
            "steno chat needs an interactive terminal. "
            "Elsewhere: steno ask --session KEY 'QUESTION'"
        )
    # This import is slow and not needed for --help.
    from prompt_toolkit.application import create_app_session

    with create_app_session(output=inline_output()):
        return asyncio.run(_chat(options, key=key, continue_last=continue_last, search=search))


async def _chat(
    options: AgentOptions, *, key: str | None, continue_last: bool, search: str | None
) -> int:
    # These imports are slow and not needed for --help.
    from stenolog.cli.agents import Signals, close_agent, open_agent, session_model
    from stenolog.cli.chat_start import find_start
    from stenolog.cli.chat_terminal import TerminalChat

    selects_session = key is not None or continue_last or search is not None
    opened_agent = open_agent(options, allow_missing_model=selects_session)
    signals = Signals()
    chat = None
    try:
        start = await signals.run_until_signal(
            find_start(opened_agent, key=key, continue_last=continue_last, search_text=search)
        )
        if start is not None:
            session_model(opened_agent, start.key)
            chat = TerminalChat(opened_agent, start.key)
            chat.greet(start)
            await chat.run(signals)
    finally:
        exit_code = await close_agent(opened_agent, signals, print_notice)
        if chat is not None:
            await chat.wait_for_turns()
    return exit_code or (0 if chat is None else chat.exit_code)


# --- ask ------------------------------------------------------------------------------------------


@click.command("ask")
@click.argument("question", required=False)
@click.option(
    "--session", "key", metavar="KEY", help="Ask in this session.  [default: a new session]"
)
@json_option()
@agent_options
def ask_command(question: str | None, key: str | None, options: AgentOptions) -> int:
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
    return asyncio.run(_ask(options, _read_question(question), key=key))


def _read_question(argument: str | None) -> str:
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
    """Return the text on stdin; empty if stdin is neither a pipe nor a file."""
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


async def _ask(options: AgentOptions, question: str, *, key: str | None) -> int:
    # These imports are slow and not needed for --help.
    from stenolog.agent.commands import new_key, parse_command
    from stenolog.cli.agents import (
        CHANNEL,
        SENDER,
        Signals,
        close_agent,
        open_agent,
        session_model,
    )
    from stenolog.cli.answer_printer import TurnPrinter, exit_code_of
    from stenolog.cli.chat_screen import StatusLine

    opened_agent = open_agent(options, allow_missing_model=key is not None)
    signals = Signals()
    key = key or new_key(CHANNEL, SENDER)
    # A second slash makes a question that looks like a command an ordinary message.
    content = question if parse_command(question) is None else f"/{question}"
    loop = asyncio.get_running_loop()
    stop_tasks: list[asyncio.Task[bool]] = []

    def stop() -> None:
        stop_tasks.append(asyncio.create_task(opened_agent.stop(key)))

    status = StatusLine()
    printer = TurnPrinter(status, verbose=sys.stderr.isatty(), quiet=wants_json(), on_closed=stop)

    async def stream_answer() -> "Answer":
        """Stream and return the answer. Raises UsageError, and OSError if stdout fails."""
        loop.add_signal_handler(signal.SIGINT, stop)
        try:
            answer = await opened_agent.handle(
                key, content, printer.print_event, all_sessions=False
            )
        finally:
            loop.remove_signal_handler(signal.SIGINT)
        printer.finish(answer)
        return answer

    try:
        status.model = session_model(opened_agent, key).name
        print_notice(*map(sentence, opened_agent.agent.problems))
        answer_task = asyncio.create_task(stream_answer())
        await signals.wait_for_task_or_signal(answer_task)
    finally:
        exit_code = await close_agent(opened_agent, signals, print_notice)
    answer = await answer_task
    print_json(_answer_fields(answer, printer, status))
    return exit_code or exit_code_of(answer)


def _answer_fields(
    answer: "Answer", printer: "TurnPrinter", status: "StatusLine"
) -> dict[str, Any]:
    has_failed = answer.outcome == "failed"
    fields = {
        "key": answer.key,
        "answer": "" if has_failed else answer.text,
        **attributes_of(answer, "seq", "outcome", "saved"),
        "model": status.model,
        "usage": attributes_of(status, "input_tokens", "output_tokens", "cached_tokens"),
        "tools": printer.tools,
    }
    return {**fields, "error": answer.text} if has_failed else fields
