"""Render a turn as terminal lines: finished lines, and lines that still change.

Finished lines are shown once and scroll away like any output; changing lines are rendered again at
each repaint. This module does not write to the terminal.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from stenolog.agent.turn_events import (
    TEXT_KEPT,
    Answer,
    Event,
    ModelCalled,
    Notice,
    SummaryCreated,
    TextDelta,
    ThinkingDelta,
    ToolFinished,
    ToolStarted,
    UsageReported,
)
from stenolog.catalog.message_metadata import model_label
from stenolog.cli.output import (
    error_sentence,
    one_line,
    printable,
    render_lines,
    sentence,
    shorten,
    styled_lines,
)
from stenolog.cli.terminal_markdown import Block, MarkdownStream, render_block
from stenolog.cli.workspace import session_command
from stenolog.context.summarize import UNDO_HINT, SummaryReport
from stenolog.errors import MaybeStored, NoSuchSession, UnsupportedFormat
from stenolog.transfer.export.code_blocks import ColourBudget

if TYPE_CHECKING:
    from rich.console import Console


# --- texts ----------------------------------------------------------------------------------------


PROMPT: Final = "> "
"""Text before the user's input."""
_MAX_VALUE_LENGTH: Final = 40
_MAX_CALL_LENGTH: Final = 100


def tool_call_text(name: str, arguments: str) -> str:
    """Return a tool call in one line: `recall(question="the bike")`."""
    try:
        argument_values = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        argument_values = None
    if isinstance(argument_values, dict):
        arguments_text = ", ".join(
            f"{key}={shorten(json.dumps(value, ensure_ascii=False), _MAX_VALUE_LENGTH)}"
            for key, value in argument_values.items()
        )
    else:
        arguments_text = shorten(one_line(printable(arguments)), _MAX_VALUE_LENGTH)
    return shorten(one_line(printable(f"{name}({arguments_text})")), _MAX_CALL_LENGTH)


def duration_text(seconds: float) -> str:
    """Return a duration: `0.3 s`, `12 s`, `3 min 5 s`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    return f"{minutes} min {seconds_left} s" if minutes else f"{seconds_left} s"


def first_line(text: str) -> str:
    """Return the first non-empty line, and the number of further lines: `3 notes (+2 lines)`."""
    lines = [line.strip() for line in printable(text).split("\n") if line.strip()]
    if not lines:
        return ""
    further_count_text = f" (+{len(lines) - 1} lines)" if len(lines) > 1 else ""
    return shorten(one_line(lines[0]), 160) + further_count_text


def new_summary_text(report: SummaryReport) -> str:
    """Describe a new summary, and how to undo the summary."""
    summary_text = str(report).removesuffix(UNDO_HINT)
    return f"{summary_text}. Use /undo to restore them."


def is_interruption_notice(event: Notice) -> bool:
    """Return whether the notice reports that the answer was interrupted."""
    return TEXT_KEPT in event.text


UNSUPPORTED_FORMAT_ADVICE: Final = (
    "Start a new session, or continue this one in the program that stored it."
)


def outcome_text(answer: Answer, *, is_reported: bool = False, is_last: bool = False) -> str:
    """Describe the end of a turn; empty after a success.

    `is_reported` means that the interruption was already reported. `is_last` means that no
    further input is possible, so commands are not suggested.
    """
    chat = f"`{session_command('chat', answer.key)}`"
    match answer.outcome:
        case "interrupted" if is_reported:
            return f"Continue with {chat}." if is_last and answer.saved else ""
        case "interrupted" if not answer.saved:
            return "Stopped." if is_last else "Stopped. /retry asks for another answer."
        case "interrupted" if is_last:
            return f"Stopped. The answer so far is saved; continue with {chat}."
        case "interrupted":
            return "Stopped. The answer so far is saved; /retry asks for another answer."
        case "failed" if isinstance(answer.error, NoSuchSession):
            return "This session was deleted by another process, and your message with it."
        case "failed" if isinstance(answer.error, UnsupportedFormat):
            return (
                f"{error_sentence(answer.text)} Your message is saved. {UNSUPPORTED_FORMAT_ADVICE}"
            )
        case "failed" if not answer.saved:
            state = "may not be saved" if isinstance(answer.error, MaybeStored) else "was not saved"
            subject = "question" if is_last else "message"
            return f"{error_sentence(answer.text)} Your {subject} {state}; send it again."
        case "failed" if is_last:
            return f"{error_sentence(answer.text)} Your question is saved; try again with {chat}."
        case "failed":
            return f"{error_sentence(answer.text)} Your message is saved; use /retry to try again."
        case "again":
            return "This message was already answered."
        case "elsewhere" if not answer.text:
            return "Another process is answering in this session; the answer appears there."
        case _:
            return ""


SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME_SECONDS: Final = 0.1
"""Seconds for which each character of the spinner is shown."""
_WARNING_STYLE: Final = "yellow"
_ERROR_STYLE: Final = "bold red"
_NEARLY_FULL_PERCENT: Final = 80
"""Percentage of the context budget from which the context counts as nearly full."""


class StatusLine:
    """Data of the status line: model, context usage, token counts."""

    def __init__(self, model: str = "") -> None:
        self.model = model
        self._used_tokens = 0
        self._budget = 0
        self.input_tokens = 0
        """Input tokens of this turn, over all its requests."""
        self.output_tokens = 0
        self.cached_tokens = 0
        self._recalled_count = 0

    def reset(self) -> None:
        """Reset everything but the model, for another session."""
        self._used_tokens = self._budget = 0
        self.start_turn()

    def start_turn(self) -> None:
        """Reset the counts for a new turn."""
        self.input_tokens = self.output_tokens = self.cached_tokens = self._recalled_count = 0

    def count_event(self, event: Event) -> None:
        """Update the counts with an event."""
        match event:
            case ModelCalled():
                self.model = event.model
                self._used_tokens, self._budget = event.tokens, event.budget
                self._recalled_count = max(self._recalled_count, event.recalled)
            case UsageReported():
                self.input_tokens += event.usage.prompt
                self.output_tokens += event.usage.answer
                self.cached_tokens += event.usage.cached
            case SummaryCreated():
                self._used_tokens = event.report.tokens_after
            case _:
                pass

    @property
    def percent(self) -> int:
        """Return the percentage of the context budget that the last request used."""
        return round(100 * self._used_tokens / self._budget) if self._budget else 0

    @property
    def is_nearly_full(self) -> bool:
        """Whether the context is nearly full, so that the session will soon be summarized."""
        return self.percent >= _NEARLY_FULL_PERCENT

    def text(self) -> str:
        """Return the status line."""
        parts = [printable(model_label(self.model))]
        if self._budget:
            parts.append(f"context {self.percent}% (≈{self._used_tokens:,} of {self._budget:,})")
        if self.input_tokens or self.output_tokens:
            parts.append(f"{self.input_tokens:,} tokens in, {self.output_tokens:,} out")
        if self._recalled_count:
            parts.append(f"{self._recalled_count} recalled")
        return " · ".join(part for part in parts if part)


class TurnScreen:
    """Lines on the screen that show one turn.

    `show` receives finished lines with the console's colour codes.
    """

    def __init__(
        self,
        console: "Console",
        status: StatusLine,
        *,
        show: Callable[[Sequence[str]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._status = status
        self._show = show
        self._clock = clock
        self._started_at = clock()
        self._stream = MarkdownStream()
        self._colour_budget = ColourBudget()
        self._is_thinking = False
        self._running_tools: dict[str, tuple[str, float]] = {}
        self._waiting_text = ""
        self._has_answer_text = False
        self._last_line_kind = ""
        self._is_finished = False
        self._has_summarized = False
        self._interruption_reported = False
        self._counts_this_turn = False

    def show_event(self, event: Event) -> None:
        """Show an event."""
        if not self._counts_this_turn and isinstance(event, ModelCalled):
            # Until a turn's first request, the status line shows the counts of the previous turn.
            self._counts_this_turn = True
            self._status.start_turn()
        self._status.count_event(event)
        self._waiting_text = ""
        match event:
            case TextDelta():
                self._is_thinking = False
                self._has_answer_text = True
                self._show_blocks(self._stream.add(event.text))
            case ThinkingDelta():
                self._is_thinking = True
            case ModelCalled():
                self._waiting_text = f"waiting for {printable(model_label(event.model))}"
            case ToolStarted():
                self._end_streamed_text()
                call = tool_call_text(event.name, event.arguments)
                self._running_tools[event.id] = call, self._clock()
            case ToolFinished():
                self._show_tool_result(event)
            case SummaryCreated():
                self._has_summarized = True
                self._show_notice(f"⊟ {new_summary_text(event.report)}", "cyan")
            case Notice():
                self._interruption_reported |= is_interruption_notice(event)
                self._show_notice(f"! {sentence(event.text)}", _WARNING_STYLE)
            case UsageReported():
                pass

    def show_note(self, text: str) -> None:
        """Show this text instead of an answer."""
        self._show_notice(text, "dim")
        self._show([""])

    def finish(self, answer: Answer) -> None:
        """Show the end of the turn."""
        self._end_streamed_text()
        self._running_tools.clear()
        self._waiting_text = ""
        is_command = answer.outcome == "command"
        is_answer_shown = self._has_summarized if is_command else self._has_answer_text
        if not is_answer_shown and answer.outcome != "failed":
            self._show_blocks([*self._stream.add(answer.text), *self._stream.end()])
        if text := outcome_text(answer, is_reported=self._interruption_reported):
            self._show_notice(text, _ERROR_STYLE if answer.outcome == "failed" else _WARNING_STYLE)
        if answer.outcome in ("answered", "interrupted"):
            turn_time = duration_text(self._clock() - self._started_at)
            text = f"{self._status.text()} · {turn_time}"
            self._show_lines("status", self._format_lines(text, "dim"))
        self._show([""])
        self._is_finished = True

    def live_lines(self, max_rows: int) -> list[str]:
        """Return the last lines of the text that still changes, at most `max_rows` lines."""
        lines: list[str] = []
        budget = self._colour_budget.copy()
        for block in self._stream.unfinished:
            lines += self._separator("text") * (not lines)
            lines += render_block(block, self._console, colour_budget=budget)
        spinner = SPINNER[int(self._clock() / _FRAME_SECONDS) % len(SPINNER)]
        if self._is_thinking:
            lines += self._format_line(f"{spinner} thinking", "dim")
        for call, started_at in self._running_tools.values():
            elapsed_text = duration_text(self._clock() - started_at)
            lines += self._format_line(f"{spinner} {call} · {elapsed_text}", "cyan")
        if self._waiting_text:
            elapsed_text = duration_text(self._clock() - self._started_at)
            lines += self._format_line(f"{spinner} {self._waiting_text} · {elapsed_text}", "dim")
        return lines[-max_rows:] if max_rows > 0 else []

    def _end_streamed_text(self) -> None:
        self._is_thinking = False
        self._show_blocks(self._stream.end())

    def _show_tool_result(self, event: ToolFinished) -> None:
        self._end_streamed_text()
        call, _ = self._running_tools.pop(event.id, (tool_call_text(event.name, ""), 0.0))
        outcome_mark, style = ("✗", "red") if event.failed else ("✓", "green")
        line = f"{outcome_mark} {call} · {duration_text(event.seconds)}"
        self._show_lines("tool", self._format_line(line, style))
        if output := first_line(event.text):
            self._show_lines("tool", self._format_line(f"  {output}", "dim"))

    def _show_notice(self, text: str, style: str) -> None:
        self._end_streamed_text()
        self._show_lines("notice", self._format_lines(text, style))
        if self._is_finished:
            self._show([""])

    def _show_blocks(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            lines = render_block(block, self._console, colour_budget=self._colour_budget)
            self._show_lines("text", lines)

    def _show_lines(self, line_kind: str, lines: Sequence[str]) -> None:
        """Show finished lines. An empty line separates lines of different kinds."""
        if lines:
            self._show([*self._separator(line_kind), *lines])
            self._last_line_kind = line_kind

    def _separator(self, line_kind: str) -> list[str]:
        return [] if self._is_finished or self._last_line_kind in (line_kind, "") else [""]

    def _format_line(self, line: str, style: str) -> list[str]:
        """Return one line, shortened to the width of the console."""
        from rich.text import Text

        text = Text(one_line(line), style=style)
        text.truncate(self._console.width - 1, overflow="ellipsis")
        return render_lines(self._console, text)

    def _format_lines(self, text: str, style: str) -> list[str]:
        return styled_lines(self._console, text, style)
