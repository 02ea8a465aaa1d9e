"""Print an answer while it is written: the answer to stdout, everything else to stderr."""

import re
import sys
from collections.abc import Callable
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
from stenolog.cli.agents import EXIT_NOT_SAVED
from stenolog.cli.chat_screen import (
    StatusLine,
    duration_text,
    first_line,
    is_interruption_notice,
    new_summary_text,
    outcome_text,
    tool_call_text,
)
from stenolog.cli.output import EXIT_CTRL_C, print_notice, printable, sentence

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
