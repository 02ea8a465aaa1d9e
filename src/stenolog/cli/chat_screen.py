"""Render a turn as terminal lines: finished lines, and lines that still change.

Finished lines are passed on once and scroll away like any output; changing lines are requested at
each repaint. This module does not write to the terminal.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from stenolog.agent.turn_events import (
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
from stenolog.cli.chat_messages import (
    Unsaved,
    first_line,
    is_break_off,
    short_call,
    short_time,
    words_of_compaction,
    words_of_outcome,
    words_of_saved,
)
from stenolog.cli.output import one_line, printable, sentence
from stenolog.cli.terminal_markdown import Block, Stream, painted
from stenolog.transfer.export.code_blocks import ColourBudget

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

SPINNER: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME: Final = 0.1
_THOUGHT: Final = "dim italic"
_WARNING: Final = "yellow"
_BAD: Final = "bold red"
_NEARLY_FULL: Final = 80


class Meter:
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

    def forget(self) -> None:
        """Reset everything for another session."""
        self._tokens = self._budget = 0
        self.begin()

    def begin(self) -> None:
        """Reset the counts for a new turn."""
        self.input_tokens = self.output_tokens = self.cached_tokens = self._recalled = 0

    def take(self, event: Event) -> None:
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
        return self.percent >= _NEARLY_FULL

    def words(self) -> str:
        """Return the status line."""
        parts = [printable(self.model)]
        if self._budget:
            parts.append(f"context {self.percent}% (≈{self._tokens:,} of {self._budget:,})")
        if self.input_tokens or self.output_tokens:
            parts.append(f"{self.input_tokens:,} tokens in, {self.output_tokens:,} out")
        if self._recalled:
            parts.append(f"{self._recalled} recalled")
        return " · ".join(part for part in parts if part)


class _Running(Struct, frozen=True, kw_only=True):
    """A tool that is still running."""

    call: str
    began: float


class _PlainLines:
    """Streamed text split into lines, without Markdown."""

    def __init__(self) -> None:
        self._line = ""

    def add(self, text: str) -> list[Block]:
        *whole, self._line = (self._line + text).split("\n")
        return [Block(source=line, gap=0) for line in whole]

    def end(self) -> list[Block]:
        left = self.unfinished
        self._line = ""
        return left

    @property
    def unfinished(self) -> list[Block]:
        return [Block(source=self._line, gap=0)] if self._line else []


class Screen:
    """The lines that one turn shows.

    `show` receives finished lines with the console's colour codes. `reasoning` shows the model's
    thinking, dimmed. `markdown` lays out answers.
    """

    def __init__(
        self,
        console: "Console",
        meter: Meter,
        *,
        show: Callable[[Sequence[str]], None],
        reasoning: bool = False,
        markdown: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._meter = meter
        self._show = show
        self._reasoning = reasoning
        self._clock = clock
        self._began = clock()
        self._markdown = markdown
        self._stream = self._new_stream()
        self._budget = ColourBudget()
        self._thought = ""
        self._thinking = False
        self._tools: dict[str, _Running] = {}
        self._waiting = ""
        self._spoke = False
        self._last = ""
        self._over = False
        self._unsaved = Unsaved()
        self._compacted = False
        self._broke_off = False
        self._counts = False

    def tell(self, event: Event) -> None:
        """Show an event."""
        if not self._counts and isinstance(event, ModelCalled):
            # Not earlier: the meter counts the previous turn until this turn's first request.
            self._counts = True
            self._meter.begin()
        self._meter.take(event)
        self._waiting = ""
        match event:
            case TextDelta():
                self._end_thought()
                self._spoke = True
                self._print_blocks(self._stream.add(event.text))
            case ThinkingDelta():
                self._think(event.text)
            case ModelCalled():
                self._waiting = f"waiting for {printable(event.model)}"
            case ToolStarted():
                self._end_text()
                call = short_call(event.name, event.arguments)
                self._tools[event.id] = _Running(call=call, began=self._clock())
            case ToolFinished():
                self._tool_ended(event)
            case SummaryCreated():
                self._compacted = True
                self._say(f"⊟ {words_of_compaction(event.report)}", "cyan")
            case SaveFailed():
                words = self._unsaved.words(event)
                if words:
                    self._say(f"! {words}", _BAD)
            case SaveRecovered():
                self._unsaved.saved()
                self._say(f"✓ {words_of_saved(event)}", "green")
            case Notice():
                self._broke_off = self._broke_off or is_break_off(event)
                self._say(f"! {sentence(event.text)}", _WARNING)
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
        told = self._compacted if answer.outcome == "command" else self._spoke
        if not told and answer.outcome != "failed":
            stream = self._new_stream()
            self._print_blocks([*stream.add(answer.text), *stream.end()])
        words = words_of_outcome(answer, told=self._broke_off)
        if words:
            self._say(words, _BAD if answer.outcome == "failed" else _WARNING)
        unsaved = self._unsaved.at_the_end()
        if unsaved:
            self._say(f"! {unsaved}", _BAD)
        if answer.outcome in ("answered", "interrupted"):
            took = short_time(self._clock() - self._began)
            self._out("status", self._lines(f"{self._meter.words()} · {took}", "dim"))
        self._show([""])
        self._over = True

    def live(self, rows: int) -> list[str]:
        """Return the text that is still changing: the last lines, at most `rows`."""
        lines: list[str] = []
        budget = self._budget.copy()
        for block in self._stream.unfinished:
            lines += self._apart("text") * (not lines) + self._painted(block, budget)
        if self._thinking and self._reasoning and self._thought:
            lines += self._apart("thought") + self._lines(self._thought, _THOUGHT)
        spinner = SPINNER[int(self._clock() / _FRAME) % len(SPINNER)]
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
        *whole, self._thought = self._thought.split("\n")
        if whole:
            self._out("thought", self._lines("\n".join(whole), _THOUGHT))

    def _end_thought(self) -> None:
        if self._thought.strip():
            self._out("thought", self._lines(self._thought, _THOUGHT))
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
            return painted(block, self._console, budget=budget)
        return self._lines(block.source, "")

    def _new_stream(self) -> "Stream | _PlainLines":
        return Stream() if self._markdown else _PlainLines()

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
