"""Chat without a terminal: each line of stdin is a message, and only answers go to stdout.

Notices go to stderr.
"""

import asyncio
import codecs
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import click

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
from stenolog.cli.agents import EXIT_NOT_SAVED, OpenAgent, Signals
from stenolog.cli.chat_screen import (
    PROMPT,
    StatusLine,
    duration_text,
    first_line,
    is_interruption_notice,
    new_summary_text,
    outcome_text,
    tool_call_text,
)
from stenolog.cli.output import (
    EXIT_CTRL_C,
    error_sentence,
    print_notice,
    printable,
    sentence,
)
from stenolog.cli.picker import ChatStart
from stenolog.errors import StenologError

_CONTROL_SEQUENCE_START: Final = re.compile("[\x1b\x9b\x9d\x90\x98\x9e\x9f]")
_MAX_HELD_CHARACTERS: Final = 256
"""Maximum length of a possibly incomplete control sequence that is held back."""
_BACKQUOTED_TEXT: Final = re.compile(r"`([^`\n]+)`")


class ControlSequenceFilter:
    """Filter for streamed text that removes terminal control sequences."""

    def __init__(self) -> None:
        self._held_text = ""

    def add(self, text: str) -> str:
        """Add streamed text and return the text that can be printed now.

        A control sequence that may be incomplete is held back until more text arrives.
        """
        text, self._held_text = self._held_text + text, ""
        printable_lines: list[str] = []
        position = 0
        while (match := _CONTROL_SEQUENCE_START.search(text, position)) is not None:
            start = match.start()
            line_end = text.find("\n", start)
            if line_end < 0:
                if len(text) - start < _MAX_HELD_CHARACTERS:
                    text, self._held_text = text[:start], text[start:]
                break
            printable_lines.append(printable(text[position : line_end + 1]))
            position = line_end + 1
        return "".join([*printable_lines, printable(text[position:])])

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
        is_last: bool = False,
        on_closed: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a printer that also updates `status`.

        `quiet` suppresses the answer. `is_last` means that no further message can be sent.
        `on_closed` is called when stdout no longer accepts data.
        """
        self._status = status
        self._on_closed = on_closed
        self._output_error: OSError | None = None
        self._verbose = verbose
        self._quiet = quiet
        self._is_last = is_last
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
                # After the last message the user cannot type a command, so none is suggested.
                text = event.text.removesuffix(RETRY_HINT) if self._is_last else event.text
                self._print_notice(sentence(text))
            case _:
                pass

    def finish(self, answer: Answer) -> None:
        """End the answer and report the outcome, except success. Raises OSError if stdout fails."""
        self._print_text(self._output_filter.end())
        if not self._last_output and answer.outcome not in ("failed", "interrupted"):
            text = printable(answer.text)
            is_command = answer.outcome == "command"
            self._print_text(_BACKQUOTED_TEXT.sub(r"\1", text) if is_command else text)
        if self._last_output and not self._last_output.endswith("\n"):
            self._print_text("\n")
        if self._output_error is not None:
            raise self._output_error
        is_reported = self._interruption_reported
        self._print_notice(outcome_text(answer, is_reported=is_reported, is_last=self._is_last))
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


async def read_messages() -> AsyncIterator[str]:
    """Yield the messages on stdin, one per line.

    After a backslash at the end of a line, the message continues on the next line.
    """
    text = ""
    async for line in _read_lines():
        text += line
        if text.endswith("\\"):
            text = f"{text[:-1]}\n"
        else:
            yield text
            text = ""
    if text.strip():
        yield text


async def _read_lines() -> AsyncIterator[str]:
    if sys.stdin is None:
        return
    try:
        descriptor = sys.stdin.fileno()
    except OSError:
        # stdin was replaced by an object without a file descriptor, which never blocks.
        for line in sys.stdin:
            yield line.removesuffix("\n")
        return
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    text = ""
    while True:
        # Do not read in a thread: a thread that waits for input cannot be cancelled.
        await _wait_readable(descriptor)
        data = os.read(descriptor, 65_536)
        text += decoder.decode(data, final=not data)
        *complete_lines, text = text.split("\n")
        for line in complete_lines:
            yield line.removesuffix("\r")
        if not data:
            break
    if text:
        yield text


async def _wait_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    try:
        loop.add_reader(descriptor, is_readable.set)
    except PermissionError:
        return  # stdin is a file or /dev/null: reading never blocks
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(descriptor)


# --- pipe chat ------------------------------------------------------------------------------------


QUIT_COMMANDS: Final = ("/quit", "/exit")


class PipeChat:
    """Chat that answers the lines of stdin in order."""

    def __init__(self, opened_agent: OpenAgent, key: str) -> None:
        self.key = key
        self.exit_code = 0
        """Exit code of the first message that failed; EXIT_CTRL_C if Ctrl-C ended the chat."""
        self._opened_agent = opened_agent
        self._status = StatusLine(opened_agent.agent.model_of(key).name)
        self._answer_task: asyncio.Task[None] | None = None
        self._stop_task: asyncio.Task[bool] | None = None
        self._messages = read_messages()

    def greet(self, start: ChatStart) -> None:
        """Print the problems of the agent, and the session if stdin is a terminal."""
        print_notice(*map(sentence, self._opened_agent.agent.problems))
        if start.description and sys.stdin is not None and sys.stdin.isatty():
            print_notice(start.description)

    async def run(self, signals: Signals) -> None:
        """Run until the input ends or a signal arrives. Raises OSError if stdout fails."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt, signals)
        shows_prompt = sys.stdin is not None and sys.stdin.isatty()
        try:
            while not signals.received.is_set():
                if shows_prompt:
                    click.echo(PROMPT, nl=False, err=True)
                text = await signals.run_until_signal(self._next_message())
                if text is None and shows_prompt:
                    click.echo(err=True)  # Ctrl-D leaves the cursor after the prompt
                if text is None or text.strip() in QUIT_COMMANDS:
                    return
                if text.strip():
                    self._answer_task = asyncio.create_task(self._answer_message(text))
                    await signals.run_until_signal(self.wait_for_turns())
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    async def _next_message(self) -> str | None:
        return await anext(self._messages, None)

    async def wait_for_turns(self) -> None:
        """Wait for the last answer. Raises OSError if stdout fails."""
        if self._answer_task is not None:
            await asyncio.wait({self._answer_task})
            self._answer_task.result()

    async def _answer_message(self, text: str) -> None:
        printer = TurnPrinter(self._status, verbose=sys.stderr.isatty(), on_closed=self._stop)
        try:
            answer = await self._opened_agent.handle(self.key, text, printer.print_event)
        except StenologError as error:
            click.echo(error_sentence(error), err=True)
            self.exit_code = self.exit_code or 1
            return
        printer.finish(answer)
        self.key = answer.key
        self.exit_code = self.exit_code or exit_code_of(answer)

    def _interrupt(self, signals: Signals) -> None:
        if self._answer_task is not None and not self._answer_task.done():
            self._stop()
        else:
            self.exit_code = EXIT_CTRL_C
            signals.received.set()

    def _stop(self) -> None:
        self._stop_task = asyncio.create_task(self._opened_agent.stop(self.key))


def exit_code_of(answer: Answer) -> int:
    """Return the exit code for the outcome of an answer."""
    if answer.outcome == "interrupted":
        return EXIT_CTRL_C
    if answer.outcome == "failed" or (answer.outcome == "elsewhere" and answer.seq is None):
        return 1
    return 0 if answer.saved else EXIT_NOT_SAVED
