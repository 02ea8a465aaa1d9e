"""`steno ask`: one question for scripts. The answer is printed while it is written."""

import asyncio
import os
import re
import signal
import stat
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Any, Final

import click

from stenolog.agent.commands import new_key, parse_command
from stenolog.agent.turn_events import (
    RETRY_HINT,
    Answer,
    Event,
    Notice,
    SummaryCreated,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from stenolog.cli.agents import (
    CHANNEL,
    EXIT_NOT_SAVED,
    SENDER,
    Signals,
    close_agent,
    open_agent,
    session_model,
)
from stenolog.cli.chat_screen import (
    StatusLine,
    duration_text,
    first_line,
    is_interruption_notice,
    new_summary_text,
    outcome_text,
    tool_call_text,
)
from stenolog.cli.config import AgentOptions, agent_options
from stenolog.cli.output import (
    EXIT_CTRL_C,
    attributes_of,
    print_json,
    print_notice,
    printable,
    sentence,
    wants_json,
)
from stenolog.cli.workspace import json_option


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

    async def stream_answer() -> Answer:
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


# --- output ---------------------------------------------------------------------------------------


_CONTROL_SEQUENCE_START: Final = re.compile("[\x1b\x9b\x9d\x90\x98\x9e\x9f]")
_MAX_HELD_CHARACTERS: Final = 256
"""Maximum length of a possibly incomplete control sequence that is held back."""


class ControlSequenceFilter:
    """Filter for streamed text that removes terminal control sequences."""

    def __init__(self) -> None:
        self._held_text = ""

    def add(self, text: str) -> str:
        """Add streamed text and return the text that can be printed now.

        A control sequence that may be incomplete is held back until more text arrives.
        """
        text, self._held_text = self._held_text + text, ""
        # A control sequence ends in its line, so only the last line can have an incomplete one.
        match = _CONTROL_SEQUENCE_START.search(text, text.rfind("\n") + 1)
        if match is not None and len(text) - match.start() < _MAX_HELD_CHARACTERS:
            text, self._held_text = text[: match.start()], text[match.start() :]
        return printable(text)

    def end(self) -> str:
        """End the stream and return the text that was held back."""
        rest, self._held_text = printable(self._held_text), ""
        return rest


class TurnPrinter:
    """Printer of one turn. The answer is streamed to stdout; everything else goes to stderr.

    With `verbose`, tool calls and the status line are printed too.
    """

    def __init__(
        self,
        status: StatusLine,
        *,
        verbose: bool,
        quiet: bool = False,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a printer that also updates `status`.

        `quiet` suppresses the answer. `on_closed` is called when stdout no longer accepts data.
        """
        self._status = status
        self._on_closed = on_closed
        self._output_error: OSError | None = None
        self._verbose = verbose
        self._quiet = quiet
        self._interruption_reported = False
        self._output_filter = ControlSequenceFilter()
        self._call_arguments: dict[str, str] = {}
        self._last_output = ""
        self._needs_empty_line = False
        self.tools: list[dict[str, Any]] = []
        """Finished tool calls: name, arguments, seconds, and whether the call failed."""
        status.start_turn()

    def print_event(self, event: Event) -> None:
        """Print an event."""
        self._status.count_event(event)
        match event:
            case TextDelta():
                self._print_text(self._output_filter.add(event.text))
            case ToolStarted():
                self._needs_empty_line = bool(self._last_output)
                self._call_arguments[event.id] = event.arguments
            case ToolFinished():
                self._record_and_print_tool(event)
            case SummaryCreated():
                self._print_notice(new_summary_text(event.report))
            case Notice():
                self._interruption_reported |= is_interruption_notice(event)
                # The user cannot type a command, so none is suggested.
                self._print_notice(sentence(event.text.removesuffix(RETRY_HINT)))
            case _:
                pass

    def finish(self, answer: Answer) -> None:
        """End the answer and report the outcome, except success. Raises OSError if stdout fails."""
        self._print_text(self._output_filter.end())
        if not self._last_output and answer.outcome not in ("failed", "interrupted"):
            self._print_text(printable(answer.text))
        if self._last_output and not self._last_output.endswith("\n"):
            self._print_text("\n")
        if self._output_error is not None:
            raise self._output_error
        is_reported = self._interruption_reported
        self._print_notice(outcome_text(answer, is_reported=is_reported, is_last=True))
        if self._verbose and answer.outcome in ("answered", "interrupted"):
            self._print_notice(self._status.text())

    def _record_and_print_tool(self, event: ToolFinished) -> None:
        arguments = self._call_arguments.pop(event.id, "")
        self.tools.append(
            {
                "name": event.name,
                "arguments": arguments,
                "seconds": round(event.seconds, 3),
                "failed": event.failed,
            }
        )
        if self._verbose:
            outcome_mark = "✗" if event.failed else "✓"
            duration = duration_text(event.seconds)
            call = tool_call_text(event.name, arguments)
            self._print_notice(f"{outcome_mark} {call} · {duration} · {first_line(event.text)}")

    def _print_text(self, text: str) -> None:
        if self._quiet or not text or self._output_error is not None:
            return
        if self._needs_empty_line:
            self._needs_empty_line, text = False, f"\n\n{text}"
        self._last_output = text
        try:
            click.echo(text, nl=False)
            sys.stdout.flush()
        except OSError as error:
            # Do not raise in the middle of a turn: the answer is finished and stored first.
            self._output_error = error
            self._on_closed()

    def _print_notice(self, text: str) -> None:
        if not text:
            return
        if self._verbose and sys.stdout.isatty() and self._last_output[-1:] not in ("", "\n"):
            click.echo(err=True)
        print_notice(text)


def exit_code_of(answer: Answer) -> int:
    """Return the exit code for the outcome of an answer."""
    if answer.outcome == "interrupted":
        return EXIT_CTRL_C
    if answer.outcome == "failed" or (answer.outcome == "elsewhere" and answer.seq is None):
        return 1
    return 0 if answer.saved else EXIT_NOT_SAVED


def _answer_fields(answer: Answer, printer: TurnPrinter, status: StatusLine) -> dict[str, Any]:
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
