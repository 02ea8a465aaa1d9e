"""Ranks notes and messages by relevance to a question. Pure functions.

The score is BM25 over stems. A message is scored together with the two messages before and after
it, because an answer often shares no word with its question. Age reduces a score to at least half,
except for core facts. If the question names a time, candidates of other times score much lower.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, Literal

from msgspec import Struct

from stenolog.catalog.stemming import stems
from stenolog.memory.prompt_block import strip_blocks
from stenolog.memory.time_words import Period, find_period

# --- question -------------------------------------------------------------------------------------
# A question for recall: its stems, and the period that it names.


_MAX_QUESTION = 4_000
"""Maximum number of characters of a question that are used."""


class Question(Struct, frozen=True, kw_only=True):
    """A parsed question."""

    text: str
    stems: tuple[str, ...]
    """Distinct stems of the question, without stop words and words for a time."""
    period: Period | None
    """The period that the question names, if any."""

    @property
    def empty(self) -> bool:
        """Whether the question has neither stems nor a period to search for."""
        return not self.stems and self.period is None


def parse_question(question: str, *, now: datetime) -> Question:
    """Parse a question. Words such as "yesterday" are relative to `now`."""
    text = strip_blocks(question)[:_MAX_QUESTION]
    results = find_period(text, now=now)
    return Question(
        text=text, stems=tuple(dict.fromkeys(stems(results.rest))), period=results.period
    )


# --- ranking --------------------------------------------------------------------------------------


Kind = Literal["core", "daily", "message"]

_K1: Final = 1.2
_B: Final = 0.6
_NEIGHBOURS: Final = {-2: 0.3, -1: 0.5, 1: 0.5, 2: 0.3}
"""Share of a neighbour's words that counts for a message, by distance in seqs."""
_AGE_FLOOR: Final = 0.5
"""Factor of a fully aged candidate."""
_OTHER_PERIOD: Final = 0.3
"""Factor of a candidate outside the period of the question."""
_TOOL_RESULT: Final = 0.6
"""Factor of tool results."""
_SECONDS_PER_DAY: Final = 86_400.0
_MAX_CHARACTERS: Final = 4_000
"""Maximum number of characters of a text that are scored."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A note or message that may be recalled."""

    kind: Kind
    source: str
    """Id of the note, or `key:seq` of the message."""
    at: datetime
    text: str
    hints: str = ""
    """Additional words that count for the score and are not shown."""
    role: str = ""
    session: str = ""
    """Uid of the session of a message; empty for a note."""
    seq: int = 0


class WordFrequencies(Struct, frozen=True, kw_only=True):
    """Word frequencies in a larger collection than the candidates."""

    count: int = 0
    containing: Mapping[str, int] = {}


class RankedCandidate(Struct, frozen=True, kw_only=True):
    """A candidate with its score."""

    candidate: Candidate
    score: float


class _WordCounts(Struct, frozen=True):
    """Counts of the question's stems in a text, and the length of the text in words."""

    words: Mapping[str, float]
    length: float


def rank(
    question: Question,
    candidates: Sequence[Candidate],
    *,
    now: datetime,
    half_life_days: float = 30.0,
    frequencies: WordFrequencies | None = None,
) -> list[RankedCandidate]:
    """Return the candidates that match the question, best first.

    Candidates with equal scores are sorted by time, newest first, then by source.
    """
    own = [_count_words(f"{one.text}\n{one.hints}", question.stems) for one in candidates]
    weights = _weights(question.stems, own, frequencies or WordFrequencies())
    with_neighbours = _with_neighbours(candidates, own)
    mean = (
        math.fsum(one.length for one in with_neighbours) / len(with_neighbours)
        if with_neighbours
        else 1.0
    )
    results = []
    for one, words in zip(candidates, with_neighbours, strict=True):
        score = _bm25(words, weights, mean) if question.stems else 1.0
        score *= _factor(one, question, now=now, half_life_days=half_life_days)
        if score > 0:
            results.append(RankedCandidate(candidate=one, score=score))
    return sorted(results, key=_order)


def _order(ranked: RankedCandidate) -> tuple[float, float, str, str]:
    one = ranked.candidate
    return -ranked.score, -one.at.timestamp(), one.source, one.text


def _count_words(text: str, wanted: Sequence[str]) -> _WordCounts:
    words = stems(text[:_MAX_CHARACTERS])
    counts = Counter(words)
    return _WordCounts({stem: float(counts[stem]) for stem in wanted if stem in counts}, len(words))


def _with_neighbours(
    candidates: Sequence[Candidate], own: Sequence[_WordCounts]
) -> Sequence[_WordCounts]:
    """Add a share of the words of neighbouring messages that are candidates, too."""
    counts_by_place = {
        (one.session, one.seq): word_counts
        for one, word_counts in zip(candidates, own, strict=True)
        if one.session
    }
    results = []
    for one, word_counts in zip(candidates, own, strict=True):
        neighbours = [
            (share, neighbour)
            for step, share in _NEIGHBOURS.items()
            if (neighbour := counts_by_place.get((one.session, one.seq + step))) is not None
            and neighbour.words
        ]
        if not neighbours:
            results.append(word_counts)
            continue
        words = dict(word_counts.words)
        for share, neighbour in neighbours:
            for stem, count in neighbour.words.items():
                words[stem] = words.get(stem, 0.0) + share * count
        length = word_counts.length + sum(
            share * neighbour.length for share, neighbour in neighbours
        )
        results.append(_WordCounts(words, length))
    return results


def _weights(
    wanted: Sequence[str], own: Sequence[_WordCounts], frequencies: WordFrequencies
) -> dict[str, float]:
    """Return the weight of each stem: rare stems weigh more."""
    count = max(len(own), frequencies.count)
    weights = {}
    for stem in wanted:
        containing_count = sum(stem in one.words for one in own)
        containing_count = max(containing_count, frequencies.containing.get(stem, 0))
        weights[stem] = math.log(1 + (count - containing_count + 0.5) / (containing_count + 0.5))
    return weights


def _bm25(one: _WordCounts, weights: Mapping[str, float], mean: float) -> float:
    damping = _K1 * (1 - _B + _B * one.length / (mean or 1.0))
    return math.fsum(
        weights[stem] * count * (_K1 + 1) / (count + damping) for stem, count in one.words.items()
    )


def _factor(one: Candidate, question: Question, *, now: datetime, half_life_days: float) -> float:
    """Return the factor for age, role and kind."""
    factor = 1.0
    if one.kind != "core" and half_life_days > 0:
        age = max(0.0, (now - one.at).total_seconds() / _SECONDS_PER_DAY)
        factor = _AGE_FLOOR + (1 - _AGE_FLOOR) * 2 ** (-age / half_life_days)
    if one.role == "tool":
        factor *= _TOOL_RESULT
    if question.period is not None and not question.period.holds(one.at):
        # A fact is valid at any time, but a question with only a time asks for events of that time.
        if not question.stems:
            return 0.0
        factor *= 1.0 if one.kind == "core" else _OTHER_PERIOD
    return factor
