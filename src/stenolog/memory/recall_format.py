"""Format recalled notes and messages: one line each with date, source and text. Pure."""

from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo
from typing import Final

from msgspec import Struct

from stenolog.catalog.stemming import stem
from stenolog.catalog.tokenizer import word_positions
from stenolog.memory.prompt_block import memory_block
from stenolog.memory.ranking import Kind, Question, Ranked

WIDTH: Final = 400
"""Maximum number of characters of a text in a line."""

_BEFORE: Final = 60
"""Maximum number of characters of a text before the first matching word."""
_CUT: Final = "…"
_MOST_LOOKED_AT: Final = 8_000
_MOST_MISSES: Final = 3
"""Number of entries that do not fit after which the search for shorter ones stops."""


class RecallHit(Struct, frozen=True, kw_only=True):
    """A recalled note or message."""

    kind: Kind
    source: str
    """The id of a note, or `key:seq` of a message."""
    at: datetime
    role: str
    """Role of the message; empty for a note."""
    text: str
    """Text in the block: one line, and only the part around the matching words."""
    score: float


class RecallResult(Struct, frozen=True, kw_only=True):
    """The result of recall: the block for the prompt, its entries, and its number of tokens."""

    block: str = ""
    """Empty if nothing was found."""
    found: tuple[RecallHit, ...] = ()
    tokens: int = 0


def tell(
    ranked: Sequence[Ranked],
    question: Question,
    *,
    more: Sequence[Ranked] = (),
    budget: int,
    count: Callable[[str], int],
    zone: tzinfo | None,
) -> RecallResult:
    """Format as many of the best entries as fit the budget.

    Core facts come first, newest first; the other entries follow by score. An entry that does not
    fit is left out; a shorter one that follows soon may still fit. `more`: additional entries,
    added as soon as the best entries have used half of the budget.
    """
    chosen: list[RecallHit] = []
    spent = count(memory_block([""]))
    # Poor matches must not displace facts about the user.
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
            return RecallResult(block=block, found=tuple(ordered), tokens=tokens)
        # The sum over lines was smaller: token counts are not additive.
        chosen.pop()
    return RecallResult()


def _order(found: RecallHit) -> tuple[bool, float]:
    is_core = found.kind == "core"
    return not is_core, -found.at.timestamp() if is_core else -found.score


def _line(found: RecallHit, zone: tzinfo | None) -> str:
    day = found.at.astimezone(zone).strftime("%Y-%m-%d %H:%M")
    who = "fact" if found.kind == "core" else found.role or "note"
    return f"- [{day}] ({who}, {found.source}) {found.text}"


def _found(ranked: Ranked, question: Question) -> RecallHit:
    one = ranked.candidate
    return RecallHit(
        kind=one.kind,
        source=one.source,
        at=one.at,
        role=one.role,
        text=shortened(one.text, question.stems),
        score=ranked.score,
    )


def shortened(text: str, stems: Sequence[str], *, width: int = WIDTH) -> str:
    """Return a text as one line. Of a long text, return the part with the most of these stems."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    wanted = set(stems)
    spots = [
        (start, said)
        for start, _, word in word_positions(line[:_MOST_LOOKED_AT])
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
    """Return the start of the first window that has the most different stems."""
    best, start = 0, 0
    for first, _ in spots:
        different = len({one for at, said in spots if first <= at < first + width for one in said})
        if different > best:
            best, start = different, first
    return start
