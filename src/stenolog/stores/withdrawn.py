"""Which messages a person took back before a compaction hid what was left around them. Pure.

Once a checkpoint has moved the floor past them, they look like all else below it. So that nothing
is learnt from them later, each compaction notes their seqs in the session's meta.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from stenolog.records import Span
from stenolog.stores import spans

META: Final = "taken_back"
"""The field of a session's meta: a list of [first, last], sorted, none touching the next."""
MOST: Final = 200
"""How many runs are remembered, so that meta stays small; the oldest are given up first."""


def withdrawn(meta: Mapping[str, Any]) -> list[Span]:
    """The seqs that were taken back, sorted; what cannot be read as a run of seqs is passed over.

    It tells of hidden messages at or below the floor. Above it, whatever is hidden was taken back;
    and what is in sight again was not, whatever stands here.
    """
    listed = meta.get(META)
    if not isinstance(listed, list | tuple):
        return []
    return spans.union(span for item in listed if (span := _span(item)) is not None)


def noted(
    meta: Mapping[str, Any], taken: Iterable[Span] = (), *, shown: Iterable[Span] = ()
) -> list[list[int]] | None:
    """The field with these seqs besides and without those in sight; None where there is none."""
    known = spans.union(spans.minus(withdrawn(meta), shown), taken)[-MOST:]
    return [[first, last] for first, last in known] or None


def _span(item: Any) -> Span | None:
    if not isinstance(item, list | tuple) or len(item) != 2:
        return None
    first, last = item
    if not (type(first) is int and type(last) is int and 1 <= first <= last):
        return None
    return first, last
