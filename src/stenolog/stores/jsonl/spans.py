"""Sets of seqs as sorted, disjoint spans `(first, last)`. Pure."""

from collections.abc import Iterable, Iterator
from itertools import chain

from stenolog.records import Span


def union(*sets: Iterable[Span]) -> list[Span]:
    """Every seq that is in one of them; spans that touch become one."""
    result: list[Span] = []
    for first, last in sorted(chain.from_iterable(sets)):
        if result and first <= result[-1][1] + 1:
            if last > result[-1][1]:
                result[-1] = (result[-1][0], last)
        else:
            result.append((first, last))
    return result


def minus(spans: Iterable[Span], holes: Iterable[Span]) -> list[Span]:
    """Every seq of `spans` that is in none of `holes`. Both sorted and disjoint."""
    result: list[Span] = []
    gaps = list(holes)
    for first, last in spans:
        start = first
        for hole_first, hole_last in gaps:
            if hole_last < start or hole_first > last:
                continue
            if hole_first > start:
                result.append((start, hole_first - 1))
            start = hole_last + 1
        if start <= last:
            result.append((start, last))
    return result


def size(spans: Iterable[Span]) -> int:
    """How many seqs."""
    return sum(last - first + 1 for first, last in spans)


def contains(spans: Iterable[Span], seq: int) -> bool:
    """Whether the seq is in one of them."""
    return any(first <= seq <= last for first, last in spans)


def seqs(spans: Iterable[Span]) -> Iterator[int]:
    """Each seq, ascending."""
    return chain.from_iterable(range(first, last + 1) for first, last in spans)


def clipped(spans: Iterable[Span], low: int, high: int) -> list[Span]:
    """Only the part from low to high, both included."""
    return [
        (max(first, low), min(last, high)) for first, last in spans if first <= high and last >= low
    ]
