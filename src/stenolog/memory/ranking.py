"""Which notes and messages answer a question best: one pure function.

BM25 over words in their common form. A message is scored together with the two before and the two
after it, because an answer often shares no word with its question. Newer ones count more, down to
half; core facts do not grow old. Where the question names a time, what is not of it counts little.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, Literal

from msgspec import Struct

from stenolog.catalog.stemming import stems
from stenolog.memory.blocks import strip_blocks
from stenolog.memory.time_words import Period, told

# --- question -------------------------------------------------------------------------------------
# A question as recall takes it: its words in their common form, and the time it names.


_LONGEST = 4_000
"""Of a longer question, so many characters count."""


class Question(Struct, frozen=True, kw_only=True):
    """What is asked for."""

    text: str
    stems: tuple[str, ...]
    """Its words, each once, without stop words and without those that name a time."""
    period: Period | None
    """The time that it names."""

    @property
    def empty(self) -> bool:
        """Whether nothing can be looked for."""
        return not self.stems and self.period is None


def understood(question: str, *, now: datetime) -> Question:
    """The question taken apart, as seen from `now`."""
    text = strip_blocks(question)[:_LONGEST]
    found = told(text, now=now)
    return Question(text=text, stems=tuple(dict.fromkeys(stems(found.rest))), period=found.period)


# --- ranking --------------------------------------------------------------------------------------


Kind = Literal["core", "daily", "message"]

_K1: Final = 1.2
_B: Final = 0.6
_NEIGHBOURS: Final = {-2: 0.3, -1: 0.5, 1: 0.5, 2: 0.3}
"""How much of the words beside a message counts as its own, by how far away they are."""
_OLDEST: Final = 0.5
"""What is left of a score when it has fully aged."""
_ELSEWHEN: Final = 0.3
"""What is left of a score outside of the time that was asked for."""
_OF_TOOLS: Final = 0.6
"""What is left of a score for what no person said."""
_SECONDS: Final = 86_400.0
_MOST_CHARACTERS: Final = 4_000
"""Of a longer text, so many are looked at."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A note or a message that may be recalled."""

    kind: Kind
    source: str
    """The id of the note, or `key:seq`."""
    at: datetime
    text: str
    hints: str = ""
    """More words that it is found by, and that are not told."""
    role: str = ""
    session: str = ""
    """Which life of which session it was said in; empty for a note."""
    seq: int = 0


class Commonness(Struct, frozen=True, kw_only=True):
    """How common words are, where more is known than the candidates tell."""

    count: int = 0
    containing: Mapping[str, int] = {}


class Ranked(Struct, frozen=True, kw_only=True):
    """A candidate and how well it answers."""

    candidate: Candidate
    score: float


class _Weighed(Struct, frozen=True):
    """The words of the question in a text, and how long that is."""

    words: Mapping[str, float]
    length: float


def rank(
    question: Question,
    candidates: Sequence[Candidate],
    *,
    now: datetime,
    half_life_days: float = 30.0,
    commonness: Commonness | None = None,
) -> list[Ranked]:
    """Those that have to do with the question, the best first; in whatever order they are given.

    Of equal ones the newest come first, then by their source.
    """
    own = [_weighed(f"{one.text}\n{one.hints}", question.stems) for one in candidates]
    weights = _weights(question.stems, own, commonness or Commonness())
    joint = _with_neighbours(candidates, own)
    mean = math.fsum(one.length for one in joint) / len(joint) if joint else 1.0
    found = []
    for one, words in zip(candidates, joint, strict=True):
        score = _bm25(words, weights, mean) if question.stems else 1.0
        score *= _factor(one, question, now=now, half_life_days=half_life_days)
        if score > 0:
            found.append(Ranked(candidate=one, score=score))
    return sorted(found, key=_order)


def _order(ranked: Ranked) -> tuple[float, float, str, str]:
    one = ranked.candidate
    return -ranked.score, -one.at.timestamp(), one.source, one.text


def _weighed(text: str, wanted: Sequence[str]) -> _Weighed:
    words = stems(text[:_MOST_CHARACTERS])
    counts = Counter(words)
    return _Weighed({stem: float(counts[stem]) for stem in wanted if stem in counts}, len(words))


def _with_neighbours(
    candidates: Sequence[Candidate], own: Sequence[_Weighed]
) -> Sequence[_Weighed]:
    """Each text with a part of what stands beside it, where that is a candidate, too."""
    places = {
        (one.session, one.seq): weighed
        for one, weighed in zip(candidates, own, strict=True)
        if one.session
    }
    found = []
    for one, weighed in zip(candidates, own, strict=True):
        beside = [
            (part, near)
            for step, part in _NEIGHBOURS.items()
            if (near := places.get((one.session, one.seq + step))) is not None and near.words
        ]
        if not beside:
            found.append(weighed)
            continue
        words = dict(weighed.words)
        for part, near in beside:
            for stem, count in near.words.items():
                words[stem] = words.get(stem, 0.0) + part * count
        length = weighed.length + sum(part * near.length for part, near in beside)
        found.append(_Weighed(words, length))
    return found


def _weights(
    wanted: Sequence[str], own: Sequence[_Weighed], commonness: Commonness
) -> dict[str, float]:
    """The rarer a word, the more it tells."""
    count = max(len(own), commonness.count)
    weights = {}
    for stem in wanted:
        holding = sum(stem in one.words for one in own)
        holding = max(holding, commonness.containing.get(stem, 0))
        weights[stem] = math.log(1 + (count - holding + 0.5) / (holding + 0.5))
    return weights


def _bm25(one: _Weighed, weights: Mapping[str, float], mean: float) -> float:
    damping = _K1 * (1 - _B + _B * one.length / (mean or 1.0))
    return math.fsum(
        weights[stem] * count * (_K1 + 1) / (count + damping) for stem, count in one.words.items()
    )


def _factor(one: Candidate, question: Question, *, now: datetime, half_life_days: float) -> float:
    """What time, role and kind make of a score."""
    factor = 1.0
    if one.kind != "core" and half_life_days > 0:
        age = max(0.0, (now - one.at).total_seconds() / _SECONDS)
        factor = _OLDEST + (1 - _OLDEST) * 2 ** (-age / half_life_days)
    if one.role == "tool":
        factor *= _OF_TOOLS
    if question.period is not None and not question.period.holds(one.at):
        # A fact holds whenever it was learnt; but to ask for a time alone asks for what was said.
        if not question.stems:
            return 0.0
        factor *= 1.0 if one.kind == "core" else _ELSEWHEN
    return factor
