"""Format recalled notes and messages: one line each with date, source and text. Pure."""

from collections.abc import Callable, Sequence
from datetime import datetime, tzinfo
from typing import Final

from msgspec import Struct

from stenolog.catalog.stemming import stem
from stenolog.catalog.tokenizer import word_positions
from stenolog.memory.prompt_block import memory_block
from stenolog.memory.ranking import Kind, Question, RankedCandidate

MAX_TEXT_CHARACTERS: Final = 400
"""Maximum number of characters of a recalled text in a line."""

_CONTEXT_CHARACTERS: Final = 60
"""Maximum number of characters of a text before the first matching word."""
_ELLIPSIS: Final = "…"
_MAX_SCANNED_CHARACTERS: Final = 8_000
_MAX_MISSES: Final = 3
"""After this number of entries that do not fit, no shorter entries are tried."""


class RecallHit(Struct, frozen=True, kw_only=True):
    """A recalled note or message."""

    kind: Kind
    source: str
    """Id of a note, or `key:seq` of a message."""
    at: datetime
    role: str
    """Role of the message; empty for a note."""
    text: str
    """Text in the block: one line, and only the part around the matching words."""
    score: float


class RecallResult(Struct, frozen=True, kw_only=True):
    """The result of recall: the block for the prompt, its entries, and its number of tokens."""

    block: str = ""
    """Block for the prompt; empty if recall found nothing."""
    found: tuple[RecallHit, ...] = ()
    tokens: int = 0


def format_recall(
    ranked: Sequence[RankedCandidate],
    question: Question,
    *,
    extra: Sequence[RankedCandidate] = (),
    budget: int,
    count: Callable[[str], int],
    zone: tzinfo | None,
) -> RecallResult:
    """Format as many of the best entries as fit the budget.

    Core facts come first, newest first; the other entries follow by score. An entry that does not
    fit is left out, but a shorter entry that follows soon may still fit. `extra`: additional
    entries, which are added as soon as the best entries have used half of the budget.
    """
    chosen_hits: list[RecallHit] = []
    spent_tokens = count(memory_block([""]))
    # Poor matches must not displace facts about the user.
    for entries, limit in ((ranked, budget // 2), (extra, budget), (ranked, budget)):
        misses = 0
        chosen_sources = {hit.source for hit in chosen_hits}
        for entry in entries:
            if entry.candidate.source in chosen_sources:
                continue
            hit = _to_hit(entry, question)
            cost = count(f"\n{_format_line(hit, zone)}")
            if spent_tokens + cost <= (limit if chosen_hits else budget):
                chosen_hits.append(hit)
                spent_tokens += cost
            elif (misses := misses + 1) == _MAX_MISSES:
                break
    while chosen_hits:
        ordered_hits = sorted(chosen_hits, key=_sort_key)
        block = memory_block([_format_line(hit, zone) for hit in ordered_hits])
        tokens = count(block)
        if tokens <= budget:
            return RecallResult(block=block, found=tuple(ordered_hits), tokens=tokens)
        # The block may have more tokens than its lines: token counts are not additive.
        chosen_hits.pop()
    return RecallResult()


def _sort_key(hit: RecallHit) -> tuple[bool, float]:
    is_core = hit.kind == "core"
    return not is_core, -hit.at.timestamp() if is_core else -hit.score


def _format_line(hit: RecallHit, zone: tzinfo | None) -> str:
    day = hit.at.astimezone(zone).strftime("%Y-%m-%d %H:%M")
    speaker = "fact" if hit.kind == "core" else hit.role or "note"
    return f"- [{day}] ({speaker}, {hit.source}) {hit.text}"


def _to_hit(ranked: RankedCandidate, question: Question) -> RecallHit:
    candidate = ranked.candidate
    return RecallHit(
        kind=candidate.kind,
        source=candidate.source,
        at=candidate.at,
        role=candidate.role,
        text=excerpt(candidate.text, question.stems),
        score=ranked.score,
    )


def excerpt(text: str, stems: Sequence[str], *, width: int = MAX_TEXT_CHARACTERS) -> str:
    """Return a text as one line. Of a long text, return only the part with the most `stems`."""
    line = " ".join(text.split())
    if len(line) <= width:
        return line
    wanted_stems = set(stems)
    matches = [
        (start, matched)
        for start, _, word in word_positions(line[:_MAX_SCANNED_CHARACTERS])
        if (matched := wanted_stems.intersection(map(stem, word.parts)))
    ]
    start = max(0, min(_best_start(matches, width) - _CONTEXT_CHARACTERS, len(line) - width))
    end = start + width
    if start > 0:
        start = line.find(" ", start, start + _CONTEXT_CHARACTERS) + 1 or start
    if end < len(line):
        space = line.rfind(" ", end - _CONTEXT_CHARACTERS, end)
        end = space if space > start else end
    return f"{_ELLIPSIS * (start > 0)}{line[start:end]}{_ELLIPSIS * (end < len(line))}"


def _best_start(matches: Sequence[tuple[int, set[str]]], width: int) -> int:
    """Return the start of the first part of the text with the most distinct stems."""
    best, start = 0, 0
    for first, _ in matches:
        in_window = (matched for at, matched in matches if first <= at < first + width)
        distinct_count = len(set().union(*in_window))
        if distinct_count > best:
            best, start = distinct_count, first
    return start
