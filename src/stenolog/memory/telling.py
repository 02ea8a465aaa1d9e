"""What was recalled in words: one line each with its date, its source and its text. Pure."""

from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo
from typing import Final

from msgspec import Struct

from stenolog.catalog.stemming import stem
from stenolog.catalog.tokenizer import places
from stenolog.memory.blocks import memory_block
from stenolog.memory.ranking import Kind, Question, Ranked

WIDTH: Final = 400
"""A line has no more characters of a text."""

_BEFORE: Final = 60
"""How much of a text may stand before the words that were asked for."""
_CUT: Final = "…"
_MOST_LOOKED_AT: Final = 8_000
_MOST_MISSES: Final = 3
"""After so many that do not fit, none is looked for that might."""


class Found(Struct, frozen=True, kw_only=True):
    """One thing that was recalled."""

    kind: Kind
    source: str
    """The id of a note, or `key:seq` of a message."""
    at: datetime
    role: str
    """Who said it; empty for a note."""
    text: str
    """As it stands in the block: in one line, and only the part around what was asked for."""
    score: float


class Recalled(Struct, frozen=True, kw_only=True):
    """What was recalled: the block for the prompt, what is in it, and how many tokens it takes."""

    block: str = ""
    """Empty where nothing was found."""
    found: tuple[Found, ...] = ()
    tokens: int = 0


def tell(
    ranked: Sequence[Ranked],
    question: Question,
    *,
    more: Sequence[Ranked] = (),
    budget: int,
    count: Callable[[str], int],
    zone: tzinfo | None,
) -> Recalled:
    """As many of the best as fit the budget: core facts first, the newest of them first.

    The others follow by how well they answer. What does not fit is left out, and a shorter one
    that comes soon after it may still be told. `more`: told as well, in what the best leave
    of the budget when they have taken half of it.
    """
    chosen: list[Found] = []
    spent = count(memory_block([""]))
    # What hardly answers the question must not crowd out what is known of the user.
    for some, most in ((ranked, budget // 2), (more, budget), (ranked, budget)):
        misses = 0
        told = {found.source for found in chosen}
        for one in some:
            if one.candidate.source in told:
                continue
            found = _found(one, question)
            cost = count(f"\n{_line(found, zone)}")
            if spent + cost <= (most if chosen else budget):
                chosen.append(found)
                spent += cost
            elif (misses := misses + 1) == _MOST_MISSES:
                break
    while chosen:
        ordered = sorted(chosen, key=_order)
        block = memory_block([_line(found, zone) for found in ordered])
        tokens = count(block)
        if tokens <= budget:
            return Recalled(block=block, found=tuple(ordered), tokens=tokens)
        # Counted by the line it was a little less: a counter need not add up.
        chosen.pop()
    return Recalled()


def _order(found: Found) -> tuple[bool, float]:
    is_core = found.kind == "core"
    return not is_core, -found.at.timestamp() if is_core else -found.score


def _line(found: Found, zone: tzinfo | None) -> str:
    day = found.at.astimezone(zone).strftime("%Y-%m-%d %H:%M")
    who = "fact" if found.kind == "core" else found.role or "note"
    return f"- [{day}] ({who}, {found.source}) {found.text}"


def _found(ranked: Ranked, question: Question) -> Found:
    one = ranked.candidate
    return Found(
        kind=one.kind,
        source=one.source,
        at=one.at,
        role=one.role,
        text=shortened(one.text, question.stems),
        score=ranked.score,
    )


def shortened(text: str, stems: Sequence[str], *, width: int = WIDTH) -> str:
    """A text in one line; of a longer one the part with the most of these words."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    wanted = set(stems)
    spots = [
        (start, said)
        for start, _, word in places(line[:_MOST_LOOKED_AT])
        if (said := wanted.intersection(map(stem, word.parts)))
    ]
    start = max(0, min(_start(spots, width) - _BEFORE, len(line) - width))
    end = start + width
    if start > 0:
        start = line.find(" ", start, start + _BEFORE) + 1 or start
    if end < len(line):
        space = line.rfind(" ", end - _BEFORE, end)
        end = space if space > start else end
    return f"{_CUT * (start > 0)}{line[start:end]}{_CUT * (end < len(line))}"


def _start(spots: Sequence[tuple[int, set[str]]], width: int) -> int:
    """Where the first stretch begins that has the most different words."""
    best, start = 0, 0
    for first, _ in spots:
        different = len({one for at, said in spots if first <= at < first + width for one in said})
        if different > best:
            best, start = different, first
    return start
