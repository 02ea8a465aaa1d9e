"""When a conversation began and last went on: pure.

A session that was taken in from another program has a receipt in its meta, `imported`, with the
times that it had there. Whoever lists sessions wants these, and not the moment of the import.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any


def conversation_times(
    created: datetime, updated: datetime, *, meta: Mapping[str, Any], last_seq: int
) -> tuple[datetime, datetime]:
    """What a session tells of its times, from when it was made here and last changed here.

    One that was taken in began when it began there; and until somebody says something here, it
    last went on when it did there.
    """
    if "imported" not in meta:
        return created, updated
    told = list(_told(meta["imported"]))
    began = min([created, *(first for first, _, _ in told)])
    still = [last for _, last, end in told if end == last_seq]
    return began, max([began, *still]) if still else max(began, updated)


def _told(receipts: object) -> Iterator[tuple[datetime, datetime, object]]:
    """Of each receipt its two times, and the last seq when it was made.

    Meta is anybody's to write: what is no receipt is passed over.
    """
    for one in receipts if isinstance(receipts, list) else ():
        try:
            first, last = (datetime.fromisoformat(one[name]) for name in ("created", "updated"))
            if first.tzinfo is not None and last.tzinfo is not None:
                yield first.astimezone(UTC), last.astimezone(UTC), one.get("last_seq")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            continue
