"""Messages that a person withdrew before a summary hid the messages around them.

After a summary, a withdrawn message looks like every other hidden message. So each summary records
the withdrawn seqs in the session's meta, and the memory learns nothing from these messages later.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from stenolog.records import Span
from stenolog.stores import spans

META_FIELD: Final = "taken_back"
"""Field of a session's meta: a sorted list of [first, last] ranges of seqs that do not touch."""
MAX_RANGES: Final = 200
"""Maximum number of ranges, to keep meta small; the oldest are dropped first."""


def withdrawn_seqs(meta: Mapping[str, Any]) -> list[Span]:
    """Return the withdrawn seqs, sorted; values that are not ranges are skipped.

    The list covers messages up to the floor, the seq up to which every message is hidden. Above the
    floor, every hidden message was withdrawn. A listed message that is visible again does not count
    as withdrawn.
    """
    ranges = meta.get(META_FIELD)
    if not isinstance(ranges, list | tuple):
        return []
    return spans.union(span for item in ranges if (span := _parse_span(item)) is not None)


def updated_field(
    meta: Mapping[str, Any], withdrawn: Iterable[Span] = (), *, visible: Iterable[Span] = ()
) -> list[list[int]] | None:
    """Return the meta field with `withdrawn` added and `visible` removed; None if empty."""
    ranges = spans.union(spans.minus(withdrawn_seqs(meta), visible), withdrawn)[-MAX_RANGES:]
    return [[first, last] for first, last in ranges] or None


def _parse_span(item: Any) -> Span | None:
    if not isinstance(item, list | tuple) or len(item) != 2:
        return None
    first, last = item
    if not (type(first) is int and type(last) is int and 1 <= first <= last):
        return None
    return first, last
