"""Render a turn as terminal lines: finished lines, and lines that still change.

Finished lines are passed on once and scroll away like any output; changing lines are requested at
each repaint. This module does not write to the terminal.
"""

import json
import shlex
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from stenolog.agent.turn_events import (
    TEXT_KEPT,
    Answer,
    Event,
    ModelCalled,
    Notice,
    SaveFailed,
    SaveRecovered,
    SummaryCreated,
    TextDelta,
    ThinkingDelta,
    ToolFinished,
    ToolStarted,
    UsageReported,
)
from stenolog.catalog.message_metadata import model_label
from stenolog.cli.output import error_sentence, one_line, plural, printable, sentence
from stenolog.cli.terminal_markdown import Block, MarkdownStream, render_block
from stenolog.context.summarize import UNDO_HINT, SummaryReport
from stenolog.errors import NoSuchSession
from stenolog.transfer.export.code_blocks import ColourBudget

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


# --- texts ----------------------------------------------------------------------------------------


PROMPT: Final = "> "
"""Text before the user's input."""
_MAX_VALUE: Final = 40
_MAX_CALL: Final = 100


def short_call(name: str, arguments: str) -> str:
    """Return a tool call in one line: `recall(question="the bike")`."""
    try:
        given = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, dict):
        inside = ", ".join(
            f"{key}={_shorten(json.dumps(value, ensure_ascii=False), _MAX_VALUE)}"
            for key, value in given.items()
        )
    else:
        inside = _shorten(one_line(printable(arguments)), _MAX_VALUE)
    return _shorten(one_line(printable(f"{name}({inside})")), _MAX_CALL)


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def short_time(seconds: float) -> str:
    """Return a duration: `0.3 s`, `12 s`, `3 min 5 s`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def first_line(text: str) -> str:
    """Return the first non-empty line of a text, and the number of further ones."""
    lines = [line.strip() for line in printable(text).split("\n") if line.strip()]
    if not lines:
        return ""
    more = f" (+{len(lines) - 1} lines)" if len(lines) > 1 else ""
    return _shorten(one_line(lines[0]), 160) + more


def compaction_text(compaction: SummaryReport) -> str:
    """Describe a summary that was made, and how to undo it."""
    done = str(compaction).removesuffix(UNDO_HINT)
    return f"{done}. Use /undo to restore them."


class UnsavedReport:
    """Reports about unsaved messages: once in full, and a short one at the end of the turn."""

    def __init__(self) -> None:
        self._why = ""
        self._told = 0
        self._count = 0

    def words(self, event: SaveFailed) -> str:
        """Return the problem, its cause and the remedy; empty if it was already reported."""
        self._count = event.count
        if event.text == self._why:
            return ""
        self._why, self._told = event.text, event.count
        return f"{self._how_many()} {error_sentence(event.text)}"

    def saved(self) -> None:
        """Reset, because all messages are saved now."""
        self._why, self._told, self._count = "", 0, 0

    def at_the_end(self) -> str:
        """Return the number of unsaved messages, unless it was already reported."""
        if self._count == self._told:
            return ""
        self._told = self._count
        return self._how_many()

    def _how_many(self) -> str:
        return f"Not saved: {plural(self._count, 'message')} in memory only."


def saved_text(event: SaveRecovered) -> str:
    """Return a sentence that all messages are saved now."""
    what = "the unsaved message" if event.count == 1 else f"all {event.count:,} unsaved messages"
    return f"Saved {what}."


def is_interruption_notice(event: Notice) -> bool:
    """Whether the event reports that the answer broke off, so it need not be reported again."""
    return TEXT_KEPT in event.text


def outcome_text(answer: Answer, *, reported: bool = False, once: bool = False) -> str:
    """Describe the end of a turn; empty after a success.

    `reported` means that the interruption was already reported. `once` means that no further input
    is possible, so commands are not suggested.
    """
    chat = f"`steno chat {shlex.quote(one_line(answer.key))}`"
    match answer.outcome:
        case "interrupted" if reported:
            return f"Continue with {chat}." if once and answer.saved else ""
        case "interrupted" if not answer.saved:
            return "Stopped." if once else "Stopped. /retry asks for another answer."
        case "interrupted" if once:
            return f"Stopped. The answer so far is saved; continue with {chat}."
        case "interrupted":
            return "Stopped. The answer so far is saved; /retry asks for another answer."
        case "failed" if isinstance(answer.error, NoSuchSession):
            return "This session was deleted by another process, and your message with it."
        case "failed" if not answer.saved:
            again = (
                "Your question was not saved; ask again." if once else "Use /retry to try again."
            )
            return f"{error_sentence(answer.text)} {again}"
        case "failed" if once:
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
_THINKING_STYLE: Final = "dim italic"
_WARNING_STYLE: Final = "yellow"
_ERROR_STYLE: Final = "bold red"
_NEARLY_FULL_PERCENT: Final = 80


class StatusLine:
    """Data of the status line: model, use of the context, token counts."""

    def __init__(self, model: str = "") -> None:
        self.model = model
        self._tokens = 0
        self._budget = 0
        self.input_tokens = 0
        """Input tokens of this turn, over all its requests."""
        self.output_tokens = 0
        self.cached_tokens = 0
        self._recalled = 0

    def reset(self) -> None:
        """Reset everything for another session."""
        self._tokens = self._budget = 0
        self.start_turn()

    def start_turn(self) -> None:
        """Reset the counts for a new turn."""
        self.input_tokens = self.output_tokens = self.cached_tokens = self._recalled = 0

    def count(self, event: Event) -> None:
        """Count an event."""
        match event:
            case ModelCalled():
                self.model = event.model
                self._tokens, self._budget = event.tokens, event.budget
                self._recalled = max(self._recalled, event.recalled)
            case UsageReported():
                self.input_tokens += event.usage.prompt
                self.output_tokens += event.usage.answer
                self.cached_tokens += event.usage.cached
            case SummaryCreated():
                self._tokens = event.report.tokens_after
            case _:
                pass

    @property
    def percent(self) -> int:
        """Return the percentage of the budget that the last request used."""
        return round(100 * self._tokens / self._budget) if self._budget else 0

    @property
    def nearly_full(self) -> bool:
        """Whether the session will soon be summarized."""
        return self.percent >= _NEARLY_FULL_PERCENT

    def text(self) -> str:
        """Return the status line."""
        parts = [printable(model_label(self.model))]
        if self._budget:
            parts.append(f"context {self.percent}% (≈{self._tokens:,} of {self._budget:,})")
        if self.input_tokens or self.output_tokens:
            parts.append(f"{self.input_tokens:,} tokens in, {self.output_tokens:,} out")
        if self._recalled:
            parts.append(f"{self._recalled} recalled")
        return " · ".join(part for part in parts if part)


class _RunningTool(Struct, frozen=True, kw_only=True):
    """A tool that is still running."""

    call: str
    began: float


class _PlainLines:
    """Streamed text split into lines, without Markdown."""

    def __init__(self) -> None:
        self._line = ""

    def add(self, text: str) -> list[Block]:
        *complete, self._line = (self._line + text).split("\n")
        return [Block(source=line, gap=0) for line in complete]

    def end(self) -> list[Block]:
        left = self.unfinished
        self._line = ""
        return left

    @property
    def unfinished(self) -> list[Block]:
        return [Block(source=self._line, gap=0)] if self._line else []


class TurnScreen:
    """The lines that one turn shows.

    `show` receives finished lines with the console's colour codes. `reasoning` shows the model's
    thinking, dimmed. `markdown` lays out answers.
    """

    def __init__(
        self,
        console: "Console",
        status: StatusLine,
        *,
        show: Callable[[Sequence[str]], None],
        reasoning: bool = False,
        markdown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._status = status
        self._show = show
        self._reasoning = reasoning
        self._clock = clock
        self._began = clock()
        self._markdown = markdown
        self._stream = self._new_stream()
        self._budget = ColourBudget()
        self._thought = ""
        self._thinking = False
        self._tools: dict[str, _RunningTool] = {}
        self._waiting = ""
        self._spoke = False
        self._last = ""
        self._over = False
        self._unsaved = UnsavedReport()
        self._compacted = False
        self._broke_off = False
        self._counts = False

    def tell(self, event: Event) -> None:
        """Show an event."""
        if not self._counts and isinstance(event, ModelCalled):
            # Not earlier: the status counts the previous turn until this turn's first request.
            self._counts = True
            self._status.start_turn()
        self._status.count(event)
        self._waiting = ""
        match event:
            case TextDelta():
                self._end_thought()
                self._spoke = True
                self._print_blocks(self._stream.add(event.text))
            case ThinkingDelta():
                self._think(event.text)
            case ModelCalled():
                self._waiting = f"waiting for {printable(model_label(event.model))}"
            case ToolStarted():
                self._end_text()
                call = short_call(event.name, event.arguments)
                self._tools[event.id] = _RunningTool(call=call, began=self._clock())
            case ToolFinished():
                self._tool_ended(event)
            case SummaryCreated():
                self._compacted = True
                self._say(f"⊟ {compaction_text(event.report)}", "cyan")
            case SaveFailed():
                words = self._unsaved.words(event)
                if words:
                    self._say(f"! {words}", _ERROR_STYLE)
            case SaveRecovered():
                self._unsaved.saved()
                self._say(f"✓ {saved_text(event)}", "green")
            case Notice():
                self._broke_off = self._broke_off or is_interruption_notice(event)
                self._say(f"! {sentence(event.text)}", _WARNING_STYLE)
            case UsageReported():
                pass

    def note(self, words: str) -> None:
        """Show these words at the end, instead of an answer."""
        self._say(words, "dim")
        self._show([""])

    def finish(self, answer: Answer) -> None:
        """Show the end of the turn."""
        self._end_text()
        self._tools.clear()
        self._waiting = ""
        reported = self._compacted if answer.outcome == "command" else self._spoke
        if not reported and answer.outcome != "failed":
            stream = self._new_stream()
            self._print_blocks([*stream.add(answer.text), *stream.end()])
        words = outcome_text(answer, reported=self._broke_off)
        if words:
            self._say(words, _ERROR_STYLE if answer.outcome == "failed" else _WARNING_STYLE)
        unsaved = self._unsaved.at_the_end()
        if unsaved:
            self._say(f"! {unsaved}", _ERROR_STYLE)
        if answer.outcome in ("answered", "interrupted"):
            took = short_time(self._clock() - self._began)
            self._out("status", self._lines(f"{self._status.text()} · {took}", "dim"))
        self._show([""])
        self._over = True

    def live(self, rows: int) -> list[str]:
        """Return the text that is still changing: the last lines, at most `rows`."""
        lines: list[str] = []
        budget = self._budget.copy()
        for block in self._stream.unfinished:
            lines += self._apart("text") * (not lines) + self._painted(block, budget)
        if self._thinking and self._reasoning and self._thought:
            lines += self._apart("thought") + self._lines(self._thought, _THINKING_STYLE)
        spinner = SPINNER[int(self._clock() / _FRAME_SECONDS) % len(SPINNER)]
        if self._thinking and not self._reasoning:
            lines += self._line(f"{spinner} thinking", "dim")
        for tool in self._tools.values():
            since = short_time(self._clock() - tool.began)
            lines += self._line(f"{spinner} {tool.call} · {since}", "cyan")
        if self._waiting:
            since = short_time(self._clock() - self._began)
            lines += self._line(f"{spinner} {self._waiting} · {since}", "dim")
        return lines[-rows:] if rows > 0 else []

    def _think(self, text: str) -> None:
        self._thinking = True
        if not self._reasoning:
            return
        self._thought += text
        *complete, self._thought = self._thought.split("\n")
        if complete:
            self._out("thought", self._lines("\n".join(complete), _THINKING_STYLE))

    def _end_thought(self) -> None:
        if self._thought.strip():
            self._out("thought", self._lines(self._thought, _THINKING_STYLE))
        self._thinking, self._thought = False, ""

    def _end_text(self) -> None:
        self._end_thought()
        self._print_blocks(self._stream.end())

    def _tool_ended(self, event: ToolFinished) -> None:
        self._end_text()
        running = self._tools.pop(event.id, None)
        call = running.call if running is not None else short_call(event.name, "")
        mark, style = ("✗", "red") if event.failed else ("✓", "green")
        self._out("tool", self._line(f"{mark} {call} · {short_time(event.seconds)}", style))
        said = first_line(event.text)
        if said:
            self._out("tool", self._line(f"  {said}", "dim"))

    def _say(self, words: str, style: str) -> None:
        """Show a notice."""
        self._end_text()
        self._out("words", self._lines(words, style))
        if self._over:
            self._show([""])

    def _print_blocks(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self._out("text", self._painted(block, self._budget))

    def _painted(self, block: Block, budget: ColourBudget) -> list[str]:
        if self._markdown:
            return render_block(block, self._console, budget=budget)
        return self._lines(block.source, "")

    def _new_stream(self) -> "MarkdownStream | _PlainLines":
        return MarkdownStream() if self._markdown else _PlainLines()

    def _out(self, kind: str, lines: Sequence[str]) -> None:
        """Show finished lines, separated by an empty line from those of another kind."""
        if lines:
            self._show([*self._apart(kind), *lines])
            self._last = kind

    def _apart(self, kind: str) -> list[str]:
        return [] if self._over or self._last in (kind, "") else [""]

    def _line(self, words: str, style: str) -> list[str]:
        """Return one line, shortened to the width of the console."""
        from rich.text import Text

        text = Text(one_line(words), style=style)
        text.truncate(self._console.width - 1, overflow="ellipsis")
        return self._captured(text)

    def _lines(self, words: str, style: str) -> list[str]:
        from rich.text import Text

        return self._captured(Text(printable(words), style=style))

    def _captured(self, text: "Text") -> list[str]:
        with self._console.capture() as captured:
            self._console.print(text, highlight=False)
        return captured.get().removesuffix("\n").split("\n")
