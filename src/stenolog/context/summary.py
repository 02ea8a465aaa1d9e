"""The summary of a conversation as a value: six sections, written as Markdown and read back.

It is never rewritten as a whole. A model says what is new and what is out of date, and the rest
stays by construction: nothing that was known is lost because a model forgot to repeat it.
"""

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.context.eliding import cut
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
"""How a line begins that was taken over word by word, because no model was there to read it."""

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
"""What a model answers: new lines for each section, and the labels of lines to take out."""

_MARKS: Final = re.compile(r"(?:(?:#+|[-*•]) )+")
"""What makes a line a heading or an item; a sign without a space behind it is part of a word."""
# What is given up first where a summary grows too long.
_GIVEN_UP: Final = ("tool_outcomes", "open_questions", "decisions", "goals", "facts")


class Summary(Struct, frozen=True, kw_only=True):
    """What is known of the part of a conversation that is out of sight."""

    goals: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    open_questions: tuple[str, ...] = ()
    tool_outcomes: tuple[str, ...] = ()
    last_state: str = ""

    def lines(self, section: str) -> tuple[str, ...]:
        """The lines of one section."""
        found: tuple[str, ...] = getattr(self, section)
        return found

    def labels(self) -> dict[str, str]:
        """Each line by the label under which a model can name it, such as G1."""
        return {
            f"{title[0]}{number}": line
            for name, title in SECTIONS.items()
            for number, line in enumerate(self.lines(name), start=1)
        }

    @property
    def count(self) -> int:
        """How many lines there are in the sections."""
        return sum(len(self.lines(name)) for name in SECTIONS)


def render(summary: Summary, *, labelled: bool = False) -> str:
    """The summary as Markdown; empty where it says nothing."""
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
    """The summary that a text holds; what stands under none of the headings becomes facts."""
    names = {title: name for name, title in SECTIONS.items()} | {LAST_STATE: "last_state"}
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    section = "facts"
    for line in text.splitlines():
        heading = line.removeprefix("## ").strip() if line.startswith("## ") else None
        if heading in names:
            section = names[heading]
        elif words := line.strip().removeprefix("- ").strip():
            # Wrapped, not cut: somebody else's paragraph is kept whole.
            found[section] += textwrap.wrap(words, LONGEST_LINE)
    last_state = _line(" ".join(found.pop("last_state")))
    return Summary(
        last_state=last_state,
        **{name: _distinct(lines) for name, lines in found.items()},
    )


def update(summary: Summary, answer: Mapping[str, Any]) -> Summary | None:
    """The summary with a model's answer taken in; None where the answer says nothing."""
    new = {name: _given(answer.get(name)) for name in SECTIONS}
    said = answer.get("last_state")
    last_state = _line(said) if isinstance(said, str) else ""
    if not last_state and not any(new.values()):
        return None
    gone = _outdated(summary, _given(answer.get("outdated")))
    merged = {
        name: _distinct([*(line for line in summary.lines(name) if line not in gone), *lines])
        for name, lines in new.items()
    }
    return Summary(last_state=last_state or summary.last_state, **merged)


def bounded(summary: Summary, limit: int, tokens: Tokens) -> Summary:
    """The summary in this many tokens: quoted lines go first, facts last, each oldest first."""
    sections = {name: list(summary.lines(name)) for name in SECTIONS}
    last_state = summary.last_state
    while True:
        made = _made(sections, last_state)
        over = tokens.text(render(made)) - limit
        if over <= 0:
            return made
        gone = 0
        while gone < over and (line := _give_up(sections)):
            gone += tokens.text(line) + 1
        if gone == 0:
            most = limit - tokens.text(render(Summary(last_state=" ")))
            shorter = cut(last_state, max(most, 0), tokens, mark="…").replace("\n", " ")
            return Summary(last_state=shorter if most > 0 and shorter != last_state else "")


def _made(sections: Mapping[str, Sequence[str]], last_state: str) -> Summary:
    return Summary(
        last_state=last_state, **{name: tuple(lines) for name, lines in sections.items()}
    )


def _give_up(sections: Mapping[str, list[str]]) -> str:
    """Take out the line that is missed least; empty where there is none left."""
    facts = sections["facts"]
    quoted = next((at for at, line in enumerate(facts) if line.startswith(QUOTED)), None)
    if quoted is not None:
        return facts.pop(quoted)
    return next((sections[name].pop(0) for name in _GIVEN_UP if sections[name]), "")


def _outdated(summary: Summary, labels: Sequence[str]) -> frozenset[str]:
    """The lines to take out; none where a model would take out most of what is known."""
    known = summary.labels()
    gone = {known[label] for raw in labels if (label := raw.strip("[] ")) in known}
    return frozenset(gone) if len(gone) <= max(2, len(known) // 2) else frozenset()


def _given(value: Any) -> list[str]:
    """The lines in an answer, which may be a text where a list was asked for."""
    items = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [line for item in items if isinstance(item, str) and (line := _line(item))]


def _line(text: str) -> str:
    """One line of bounded length, that can be no heading."""
    words = " ".join(text.encode("utf-8", "replace").decode().split())
    if marks := _MARKS.match(words):
        words = words[marks.end() :]
    return words if len(words) <= LONGEST_LINE else words[: LONGEST_LINE - 1] + "…"


def _distinct(lines: Sequence[str]) -> tuple[str, ...]:
    """Each line once, as it was written first: models like to repeat what is known."""
    found: dict[str, str] = {}
    for line in lines:
        found.setdefault(line.casefold(), line)
    return tuple(found.values())
