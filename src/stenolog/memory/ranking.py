"""Rank notes and messages by relevance to a question. Pure.

The score is BM25 over stems. A message is scored together with up to two messages before it and two
after it, because an answer often shares no word with its question. Age reduces the score by at most
half; the score of a core fact does not depend on age. If the question names a time, candidates of
other times score much lower, except core facts. If the question has no other words, all candidates
of other times are excluded.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.entries import Candidates
from stenolog.catalog.tokenizer import stems
from stenolog.memory.time_words import Period, find_period

# --- question -------------------------------------------------------------------------------------
# A question for recall has stems, and may name a period.


_MAX_QUESTION_CHARACTERS = 4_000
"""Maximum number of characters of a question that are used."""


class Question(Struct, frozen=True, kw_only=True):
    """The words and the period of a question."""

    text: str
    stems: tuple[str, ...]
    """Distinct stems of the question, without stop words and words that name a time."""
    period: Period | None
    """The period that the question names, if any."""

    @property
    def is_empty(self) -> bool:
        """Whether the question has neither stems nor a period to search for."""
        return not self.stems and self.period is None


def parse_question(question: str, *, now: datetime) -> Question:
    """Parse a question. Words such as "yesterday" are relative to `now`."""
    text = question[:_MAX_QUESTION_CHARACTERS]
    period, remaining_text = find_period(text, now=now)
    distinct_stems = tuple(dict.fromkeys(stems(remaining_text)))
    return Question(text=text, stems=distinct_stems, period=period)


# --- ranking --------------------------------------------------------------------------------------


Kind = Literal["core", "daily", "message"]

_BM25_K1: Final = 1.2
_BM25_B: Final = 0.6
"""Parameters k1 and b of BM25."""
_NEIGHBOUR_SHARES: Final = {-2: 0.3, -1: 0.5, 1: 0.5, 2: 0.3}
"""Share of a neighbour's words that counts for a message, by distance in seqs."""
_MIN_AGE_FACTOR: Final = 0.5
"""Factor for the score of a very old candidate."""
_OTHER_PERIOD_FACTOR: Final = 0.3
"""Factor for the score of a candidate outside the period of the question."""
_TOOL_RESULT_FACTOR: Final = 0.6
"""Factor for the score of a tool result."""
_MAX_SCORED_CHARACTERS: Final = 4_000
"""Maximum number of characters of a text that are scored."""

NO_HITS: Final = Candidates(messages=(), count=0, containing={})


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
    score: float = 0.0
    """Relevance to the question, as computed by `rank`."""


class _WordCounts(Struct, frozen=True):
    """Counts of the question's stems in a text, and the length of the text in words."""

    counts_by_stem: Mapping[str, float]
    length: float


def rank(
    question: Question,
    candidates: Sequence[Candidate],
    *,
    now: datetime,
    half_life_days: float = 30.0,
    hits: Candidates = NO_HITS,
) -> list[Candidate]:
    """Return the matching candidates with their scores, best first.

    `hits`: word frequencies in all messages that were searched, not only in the candidates.
    Candidates with equal scores are sorted by time, newest first, then by source.
    """
    word_counts = [_count_words(item, question.stems) for item in candidates]
    weights = _weigh_stems(question.stems, word_counts, hits)
    with_neighbours = _add_neighbour_counts(candidates, word_counts)
    mean_length = math.fsum(counts.length for counts in with_neighbours) / max(len(candidates), 1)
    results = []
    for item, counts in zip(candidates, with_neighbours, strict=True):
        score = _bm25(counts, weights, mean_length) if question.stems else 1.0
        score *= _compute_score_factor(item, question, now=now, half_life_days=half_life_days)
        if score > 0:
            results.append(replace(item, score=score))
    return sorted(results, key=_sort_key)


def _sort_key(candidate: Candidate) -> tuple[float, float, str, str]:
    return -candidate.score, -candidate.at.timestamp(), candidate.source, candidate.text


def _count_words(item: Candidate, question_stems: Sequence[str]) -> _WordCounts:
    words = stems(f"{item.text}\n{item.hints}"[:_MAX_SCORED_CHARACTERS])
    counts = Counter(words)
    return _WordCounts(
        {stem: float(counts[stem]) for stem in question_stems if stem in counts}, len(words)
    )


def _add_neighbour_counts(
    candidates: Sequence[Candidate], counts: Sequence[_WordCounts]
) -> Sequence[_WordCounts]:
    """Add a share of the words of neighbouring messages that are candidates, too."""
    counts_by_position = {
        (item.session, item.seq): word_counts
        for item, word_counts in zip(candidates, counts, strict=True)
        if item.session
    }
    results = []
    for item, word_counts in zip(candidates, counts, strict=True):
        neighbours = [
            (share, neighbour)
            for offset, share in _NEIGHBOUR_SHARES.items()
            if (neighbour := counts_by_position.get((item.session, item.seq + offset))) is not None
            and neighbour.counts_by_stem
        ]
        merged_counts = dict(word_counts.counts_by_stem)
        for share, neighbour in neighbours:
            for stem, count in neighbour.counts_by_stem.items():
                merged_counts[stem] = merged_counts.get(stem, 0.0) + share * count
        extra_length = sum(share * neighbour.length for share, neighbour in neighbours)
        results.append(_WordCounts(merged_counts, word_counts.length + extra_length))
    return results


def _weigh_stems(
    question_stems: Sequence[str], counts: Sequence[_WordCounts], hits: Candidates
) -> dict[str, float]:
    """Return the weight of each stem: rare stems weigh more."""
    total = max(len(counts), hits.count)
    weights = {}
    for stem in question_stems:
        containing_count = sum(stem in text_counts.counts_by_stem for text_counts in counts)
        containing_count = max(containing_count, hits.containing.get(stem, 0))
        weights[stem] = math.log(1 + (total - containing_count + 0.5) / (containing_count + 0.5))
    return weights


def _bm25(counts: _WordCounts, weights: Mapping[str, float], mean_length: float) -> float:
    damping = _BM25_K1 * (1 - _BM25_B + _BM25_B * counts.length / (mean_length or 1.0))
    return math.fsum(
        weights[stem] * count * (_BM25_K1 + 1) / (count + damping)
        for stem, count in counts.counts_by_stem.items()
    )


def _compute_score_factor(
    item: Candidate, question: Question, *, now: datetime, half_life_days: float
) -> float:
    """Return the factor of a candidate's score for age, role, kind and period."""
    factor = 1.0
    if item.kind != "core" and half_life_days > 0:
        age = max(0.0, (now - item.at) / timedelta(days=1))
        factor = _MIN_AGE_FACTOR + (1 - _MIN_AGE_FACTOR) * 2 ** (-age / half_life_days)
    if item.role == "tool":
        factor *= _TOOL_RESULT_FACTOR
    if question.period is not None and not question.period.contains(item.at):
        # A fact is valid at any time, but a question with only a time asks for events of that time.
        if not question.stems:
            return 0.0
        factor *= 1.0 if item.kind == "core" else _OTHER_PERIOD_FACTOR
    return factor
