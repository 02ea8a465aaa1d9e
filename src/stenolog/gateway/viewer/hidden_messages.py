"""Hidden messages of a session, and the operations that hid them.

A store reports which seqs are visible. A seq that is not visible is either hidden or has no
message: a fork keeps the seqs of its origin without all of its messages. The undo steps name the
operation that hid a message; for older operations only the fact that it is hidden is known.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import StenologError
from stenolog.records import SessionInfo, Span, Undo
from stenolog.stores import spans
from stenolog.stores.base import Store
from stenolog.stores.snapshots import Snapshot, SnapshotMark, SnapshotStore

HIDDEN: Final = "hidden"
"""Reason of a hidden message if the operation that hid it is unknown."""
SUMMARIZED: Final = "summarized"
_REASONS: Final = {
    "checkpoint": SUMMARIZED,
    "clear": "cleared",
    "replace": "replaced",
    "truncate": "truncated",
}


class Gap(Struct, frozen=True, kw_only=True):
    """A range of messages that are hidden from the model."""

    first: int
    last: int
    count: int
    """Number of messages. 0 if the session has only their summary, as in a fork."""
    why: str
    """Reason: summarized, cleared, replaced, truncated, or hidden."""
    has_summary: bool = False
    """Whether the summary is shown at this gap."""
    undo: bool = False
    """Whether undoing the last operation makes any of them visible again."""


class Visibility(Struct, frozen=True, kw_only=True):
    """The messages that a session contains, and the hidden ones among them."""

    present: Sequence[Span]
    """Seqs that have a message."""
    gaps: Sequence[Gap] = ()
    lost: Sequence[Span] = ()
    """Seqs of damaged messages."""

    def why(self, seq: int) -> str:
        """Return the reason why a message is hidden."""
        found = (one.why for one in self.gaps if one.first <= seq <= one.last)
        return next(found, HIDDEN)


def read_visibility(store: Store, info: SessionInfo) -> Visibility:
    """Return the visibility of a session's messages. Reads only `info` if all are visible."""
    if info.visible == info.last_seq:
        return Visibility(present=info.in_sight)
    snapshot = _snapshot(store, info)
    missing = [] if snapshot is None else spans.union(snapshot.lost, snapshot.void, snapshot.purged)
    lost = [] if snapshot is None else snapshot.lost
    if spans.size(lost) < info.lost:
        lost = spans.union(lost, _unreadable(store, info, missing))
        missing = spans.union(missing, lost)
    visibility = compute_visibility(
        info, missing=missing, steps=[] if snapshot is None else snapshot.undo
    )
    return replace(visibility, lost=lost)


def _unreadable(store: Store, info: SessionInfo, missing: Sequence[Span]) -> list[Span]:
    """Return the seqs of hidden messages that cannot be read. A database does not report them."""
    sought = spans.minus([(1, info.last_seq)], spans.union(info.in_sight, missing))
    if not sought:
        return []
    read = store.get_history(info.key, after=sought[0][0] - 1, full=True)
    return spans.minus(sought, [(one.seq, one.seq) for one in read])


def compute_visibility(
    info: SessionInfo, *, missing: Iterable[Span], steps: Sequence[Undo]
) -> Visibility:
    """Compute the visibility from the seqs without a message and the undo steps, without I/O."""
    everything = [(1, info.last_seq)] if info.last_seq else []
    present = spans.minus(everything, spans.minus(missing, info.in_sight))
    hidden = spans.minus(present, info.in_sight)
    pieces = [(span, SUMMARIZED if info.summary else HIDDEN) for span in _below(hidden, info.floor)]
    pieces += [(span, HIDDEN) for span in _above(hidden, info.floor)]
    for step in steps:
        pieces = _with_reason(pieces, step.newly, _REASONS.get(step.op, HIDDEN))
    newly = steps[-1].newly if steps else []
    gaps = [
        Gap(
            first=run[0][0],
            last=run[-1][1],
            count=spans.size(run),
            why=why,
            undo=spans.minus(run, newly) != run,
        )
        for why, run in _runs(sorted(pieces), present)
    ]
    if info.summary and info.floor:
        gaps = _with_summary(gaps, info.floor, undo=bool(steps) and steps[-1].op == "summary")
    return Visibility(present=present, gaps=gaps)


def _snapshot(store: Store, info: SessionInfo) -> Snapshot | None:
    """Return everything the store knows of a session except messages; None if it cannot."""
    if not isinstance(store, SnapshotStore):
        return None
    try:
        with store.read_snapshot(SnapshotMark(key=info.key, uid=info.uid, stamp="")) as reading:
            return reading.snapshot
    except StenologError:
        # The page can do without the reason why a message is hidden.
        return None


def _below(hidden: Sequence[Span], floor: int) -> list[Span]:
    return spans.clipped(hidden, 1, floor)


def _above(hidden: Sequence[Span], floor: int) -> list[Span]:
    return spans.clipped(hidden, floor + 1, hidden[-1][1]) if hidden else []


def _with_reason(
    pieces: Iterable[tuple[Span, str]], newly: Sequence[Span], why: str
) -> list[tuple[Span, str]]:
    """Return the pieces, with `why` as the reason of those that this step hid."""
    made: list[tuple[Span, str]] = []
    for span, before in pieces:
        others = spans.minus([span], newly)
        made += [(one, before) for one in others]
        made += [(one, why) for one in spans.minus([span], others)]
    return made


def _runs(
    pieces: Iterable[tuple[Span, str]], present: Sequence[Span]
) -> list[tuple[str, list[Span]]]:
    """Join pieces with the same reason and no message between them."""
    made: list[tuple[str, list[Span]]] = []
    for span, why in pieces:
        if made and made[-1][0] == why:
            before = made[-1][1][-1][1]
            between = [] if span[0] == before + 1 else [(before + 1, span[0] - 1)]
            # The seqs between two pieces may have no message.
            if spans.minus(between, present) == between:
                made[-1][1].append(span)
                continue
        made.append((why, [span]))
    return made


def _with_summary(gaps: Sequence[Gap], floor: int, *, undo: bool) -> list[Gap]:
    """Mark the last gap that the summary can describe as the one that shows it."""
    below = [one for one in gaps if one.last <= floor]
    candidates = [one for one in below if one.why == SUMMARIZED] or below
    if candidates:
        last = candidates[-1]
        marked = replace(last, has_summary=True, undo=last.undo or undo)
        return [marked if one is last else one for one in gaps]
    # A fork has the summary, but not the messages it covers.
    only = Gap(first=floor, last=floor, count=0, why=SUMMARIZED, has_summary=True, undo=undo)
    return [only, *gaps]
