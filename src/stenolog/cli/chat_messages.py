"""Short sentences that report a turn, the same in a terminal and on stderr."""

import json
import shlex
from typing import Any, Final

from stenolog.agent.turn_events import Answer, Notice, SaveFailed, SaveRecovered
from stenolog.cli.output import count, error_sentence, one_line, printable
from stenolog.context.summarize import SummaryReport
from stenolog.errors import NoSuchSession

PROMPT: Final = "> "
"""Text before the user's input."""
_VALUE: Final = 40
_CALL: Final = 100


def short_call(name: str, arguments: str) -> str:
    """Return a tool call in one line: `recall(question="the bike")`."""
    try:
        given = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        given = None
    if isinstance(given, dict):
        inside = ", ".join(f"{key}={_short(value)}" for key, value in given.items())
    else:
        inside = _cut(one_line(printable(arguments)), _VALUE)
    return _cut(one_line(printable(f"{name}({inside})")), _CALL)


def _short(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False), _VALUE)


def _cut(text: str, most: int) -> str:
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
    return _cut(one_line(lines[0]), 160) + more


def words_of_compaction(compaction: SummaryReport) -> str:
    """Describe a summary that was made, and how to undo it."""
    done = str(compaction).removesuffix("; undo shows them again")
    return f"{done}. Use /undo to restore them."


class Unsaved:
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
        return f"Not saved: {count(self._count, 'message')} in memory only."


def words_of_saved(event: SaveRecovered) -> str:
    """Return a sentence that all messages are saved now."""
    what = "the unsaved message" if event.count == 1 else f"all {event.count:,} unsaved messages"
    return f"Saved {what}."


def is_break_off(event: Notice) -> bool:
    """Whether the event reports that the answer broke off, so it need not be reported again."""
    return "the text so far is kept" in event.text


def words_of_outcome(answer: Answer, *, told: bool = False, once: bool = False) -> str:
    """Describe the end of a turn; empty after a success.

    `told` means that the broken-off answer was already reported. `once` means that no further input
    is possible, so commands are not suggested.
    """
    chat = f"`steno chat {shlex.quote(one_line(answer.key))}`"
    match answer.outcome:
        case "interrupted" if told:
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
