"""Pure functions on sets of sequence numbers (seqs): sorted, disjoint spans `(first, last)`."""

import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain

from stenolog.records import Span


def from_seqs(seqs: Iterable[int]) -> list[Span]:
    """Return these seqs as spans."""
    return union((seq, seq) for seq in seqs)


def union(*sets: Iterable[Span]) -> list[Span]:
    """Return the union of several sets of spans; adjacent spans become one span."""
    result: list[Span] = []
    for first, last in sorted(chain.from_iterable(sets)):
        if result and first <= result[-1][1] + 1:
            if last > result[-1][1]:
                result[-1] = (result[-1][0], last)
        else:
            result.append((first, last))
    return result


def minus(spans: Iterable[Span], excluded: Iterable[Span]) -> list[Span]:
    """Return the seqs of `spans` that are not in `excluded`; both are sorted and disjoint."""
    result: list[Span] = []
    excluded_spans = list(excluded)
    start_index = 0
    for first, last in spans:
        start = first
        while start_index < len(excluded_spans) and excluded_spans[start_index][1] < start:
            start_index += 1
        index = start_index
        while index < len(excluded_spans) and excluded_spans[index][0] <= last:
            if excluded_spans[index][0] > start:
                result.append((start, excluded_spans[index][0] - 1))
            start = excluded_spans[index][1] + 1
            index += 1
        if start <= last:
            result.append((start, last))
    return result


def size(spans: Iterable[Span]) -> int:
    """Return the number of seqs in the spans."""
    return sum(last - first + 1 for first, last in spans)


def contains(spans: Sequence[Span], seq: int) -> bool:
    """Return whether the seq is in one of the sorted, disjoint spans."""
    index = bisect_right(spans, (seq, sys.maxsize)) - 1
    return index >= 0 and seq <= spans[index][1]


def clipped(spans: Iterable[Span], low: int, high: int) -> list[Span]:
    """Return the part of the spans from seq `low` to seq `high`, both included."""
    return [
        (max(first, low), min(last, high)) for first, last in spans if first <= high and last >= low
    ]


def last_seqs(spans: Sequence[Span], count: int) -> list[Span]:
    """Return the last `count` seqs of the spans."""
    last_spans: list[Span] = []
    for first, last in reversed(spans):
        if count <= 0:
            break
        last_spans.append((max(first, last - count + 1), last))
        count -= last - first + 1
    return last_spans[::-1]
