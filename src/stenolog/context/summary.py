"""The summary of a conversation as a value: six sections, rendered as Markdown and parsed back.

The summary is never rewritten as a whole. A model returns new lines and the labels of outdated
ones; all other lines stay. So nothing is lost because a model forgot to repeat it.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.context.shortening import cut_middle
from stenolog.tokens import Tokens

SECTIONS: Final = {
    "goals": "Goals",
    "decisions": "Decisions",
    "facts": "Facts",
    "open_questions": "Open questions",
    "tool_outcomes": "Tool outcomes",
}
LAST_STATE: Final = "Last state"
LONGEST_LINE: Final = 400
QUOTED: Final = "User said: "
"""Prefix of lines that were quoted from user messages without a model."""

_LINES: Final = {"type": "array", "items": {"type": "string"}}
SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {
        **dict.fromkeys(SECTIONS, _LINES),
        "last_state": {"type": "string"},
        "outdated": _LINES,
    },
    "required": [*SECTIONS, "last_state", "outdated"],
    "additionalProperties": False,
}
"""Schema of the model's answer: new lines for each section, and labels of lines to remove."""

_MARKS: Final = re.compile(r"(?:(?:#+|[-*•]) )+")
"""Prefixes that make a line a heading or an item. Without a following space they are text."""
# Sections in the order in which they lose lines when a summary is too long.
_DROP_ORDER: Final = ("tool_outcomes", "open_questions", "decisions", "goals", "facts")


class Summary(Struct, frozen=True, kw_only=True):
    """The content of the hidden part of a conversation."""

    goals: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    open_questions: tuple[str, ...] = ()
    tool_outcomes: tuple[str, ...] = ()
    last_state: str = ""

    def lines(self, section: str) -> tuple[str, ...]:
        """Return the lines of a section."""
        found: tuple[str, ...] = getattr(self, section)
        return found

    def labels(self) -> dict[str, str]:
        """Return the lines by label, such as G1, by which a model can refer to them."""
        return {
            f"{title[0]}{number}": line
            for name, title in SECTIONS.items()
            for number, line in enumerate(self.lines(name), start=1)
        }

    @property
    def count(self) -> int:
        """Number of lines in the sections."""
        return sum(len(self.lines(name)) for name in SECTIONS)


def render(summary: Summary, *, labelled: bool = False) -> str:
    """Return the summary as Markdown; empty text for an empty summary."""
    blocks = []
    for name, title in SECTIONS.items():
        lines = [
            f"- [{title[0]}{number}] {line}" if labelled else f"- {line}"
            for number, line in enumerate(summary.lines(name), start=1)
        ]
        if lines:
            blocks.append("\n".join([f"## {title}", *lines]))
    if summary.last_state:
        blocks.append(f"## {LAST_STATE}\n{summary.last_state}")
    return "\n\n".join(blocks)


def parse(text: str) -> Summary:
    """Parse a summary. Lines under no known heading become facts."""
    names = {title: name for name, title in SECTIONS.items()} | {LAST_STATE: "last_state"}
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    section = "facts"
    for line in text.splitlines():
        heading = line.removeprefix("## ").strip() if line.startswith("## ") else None
        if heading in names:
            section = names[heading]
        elif words := line.strip().removeprefix("- ").strip():
            # Wrapped, not cut: text from another source is kept in full.
            found[section] += textwrap.wrap(words, LONGEST_LINE)
    last_state = _line(" ".join(found.pop("last_state")))
    return Summary(
        last_state=last_state,
        **{name: _distinct(lines) for name, lines in found.items()},
    )


def update(summary: Summary, answer: Mapping[str, Any]) -> Summary | None:
    """Return the summary with a model's answer merged in, or None if the answer is empty."""
    new = {name: _lines_in(answer.get(name)) for name in SECTIONS}
    said = answer.get("last_state")
    last_state = _line(said) if isinstance(said, str) else ""
    if not last_state and not any(new.values()):
        return None
    gone = _outdated(summary, _lines_in(answer.get("outdated")))
    merged = {
        name: _distinct([*(line for line in summary.lines(name) if line not in gone), *lines])
        for name, lines in new.items()
    }
    return Summary(last_state=last_state or summary.last_state, **merged)


def bounded(summary: Summary, limit: int, tokens: Tokens) -> Summary:
    """Return the summary within `limit` tokens. Quoted lines go first, facts last, oldest first."""
    sections = {name: list(summary.lines(name)) for name in SECTIONS}
    last_state = summary.last_state
    while True:
        made = _summary_of(sections, last_state)
        over = tokens.text(render(made)) - limit
        if over <= 0:
            return made
        gone = 0
        while gone < over and (line := _drop_line(sections)):
            gone += tokens.text(line) + 1
        if gone == 0:
            most = limit - tokens.text(render(Summary(last_state=" ")))
            shorter = cut_middle(last_state, max(most, 0), tokens, mark="…").replace("\n", " ")
            return Summary(last_state=shorter if most > 0 and shorter != last_state else "")


def _summary_of(sections: Mapping[str, Sequence[str]], last_state: str) -> Summary:
    return Summary(
        last_state=last_state, **{name: tuple(lines) for name, lines in sections.items()}
    )


def _drop_line(sections: Mapping[str, list[str]]) -> str:
    """Remove and return the least important line; empty text if there is none."""
    facts = sections["facts"]
    quoted = next((at for at, line in enumerate(facts) if line.startswith(QUOTED)), None)
    if quoted is not None:
        return facts.pop(quoted)
    return next((sections[name].pop(0) for name in _DROP_ORDER if sections[name]), "")


def _outdated(summary: Summary, labels: Sequence[str]) -> frozenset[str]:
    """Return the lines to remove; none if a model asks to remove more than half of them."""
    known = summary.labels()
    gone = {known[label] for raw in labels if (label := raw.strip("[] ")) in known}
    return frozenset(gone) if len(gone) <= max(2, len(known) // 2) else frozenset()


def _lines_in(value: Any) -> list[str]:
    """Return the lines in an answer, which may be a text instead of a list."""
    items = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [line for item in items if isinstance(item, str) and (line := _line(item))]


def _line(text: str) -> str:
    """Return one line of bounded length that is not a heading."""
    words = " ".join(text.encode("utf-8", "replace").decode().split())
    if marks := _MARKS.match(words):
        words = words[marks.end() :]
    return words if len(words) <= LONGEST_LINE else words[: LONGEST_LINE - 1] + "…"


def _distinct(lines: Sequence[str]) -> tuple[str, ...]:
    """Return each line once, in its first spelling: models often repeat known lines."""
    found: dict[str, str] = {}
    for line in lines:
        found.setdefault(line.casefold(), line)
    return tuple(found.values())
