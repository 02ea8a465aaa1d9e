"""Hidden messages of a session, and the operations that hid them.

A store reports which seqs are visible. Every other seq either belongs to a hidden message or has no
message: a fork keeps the seqs of its source, but not all messages. The undo steps name the
operation that hid a message. Older operations have no undo step, so their names are unknown.
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
"""Reason of a hidden message if the operation that hid the message is unknown."""
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
    reason: str
    """Reason: summarized, cleared, replaced, truncated, or hidden."""
    has_summary: bool = False
    """Whether the summary is shown at this gap."""
    can_undo: bool = False
    """Whether undoing the last operation makes any of these messages visible again."""


class Visibility(Struct, frozen=True, kw_only=True):
    """The messages that a session contains, and which of them are hidden."""

    present: Sequence[Span]
    """Seqs that have a message."""
    gaps: Sequence[Gap] = ()
    lost: Sequence[Span] = ()
    """Seqs of damaged messages."""

    def reason_at(self, seq: int) -> str:
        """Return the reason why a message is hidden."""
        reasons = (gap.reason for gap in self.gaps if gap.first <= seq <= gap.last)
        return next(reasons, HIDDEN)


def read_visibility(store: Store, info: SessionInfo) -> Visibility:
    """Return the visibility of a session's messages. If all are visible, read nothing."""
    if info.visible == info.last_seq:
        return Visibility(present=info.in_sight)
    snapshot = _read_snapshot(store, info)
    missing = [] if snapshot is None else spans.union(snapshot.lost, snapshot.void, snapshot.purged)
    lost = [] if snapshot is None else snapshot.lost
    if spans.size(lost) < info.lost:
        lost = spans.union(lost, _unreadable_spans(store, info, missing))
        missing = spans.union(missing, lost)
    visibility = compute_visibility(
        info, missing=missing, steps=[] if snapshot is None else snapshot.undo
    )
    return replace(visibility, lost=lost)


def _unreadable_spans(store: Store, info: SessionInfo, missing: Sequence[Span]) -> list[Span]:
    """Return the seqs of hidden messages that cannot be read, by reading all hidden messages."""
    hidden_spans = spans.minus([(1, info.last_seq)], spans.union(info.in_sight, missing))
    if not hidden_spans:
        return []
    readable = store.get_history(info.key, after=hidden_spans[0][0] - 1, full=True)
    return spans.minus(hidden_spans, [(message.seq, message.seq) for message in readable])


def compute_visibility(
    info: SessionInfo, *, missing: Iterable[Span], steps: Sequence[Undo]
) -> Visibility:
    """Compute the visibility without I/O, from the undo steps and the seqs without a message."""
    all_spans = [(1, info.last_seq)] if info.last_seq else []
    present = spans.minus(all_spans, spans.minus(missing, info.in_sight))
    hidden = spans.minus(present, info.in_sight)
    below_floor = spans.clipped(hidden, 1, info.floor)
    pieces = [(span, SUMMARIZED if info.summary else HIDDEN) for span in below_floor]
    pieces += [(span, HIDDEN) for span in spans.clipped(hidden, info.floor + 1, info.last_seq)]
    for step in steps:
        pieces = _with_reason(pieces, step.newly, _REASONS.get(step.op, HIDDEN))
    last_hidden = steps[-1].newly if steps else []
    gaps = [
        Gap(
            first=run[0][0],
            last=run[-1][1],
            count=spans.size(run),
            reason=reason,
            can_undo=spans.minus(run, last_hidden) != run,
        )
        for reason, run in _join_pieces(sorted(pieces), present)
    ]
    if info.summary and info.floor:
        gaps = _with_summary(gaps, info.floor, can_undo=bool(steps) and steps[-1].op == "summary")
    return Visibility(present=present, gaps=gaps)


def _read_snapshot(store: Store, info: SessionInfo) -> Snapshot | None:
    """Return the snapshot of a session, without messages; None if it cannot be read."""
    if not isinstance(store, SnapshotStore):
        return None
    try:
        with store.read_snapshot(SnapshotMark(key=info.key, uid=info.uid, stamp="")) as reading:
            return reading.snapshot
    except StenologError:
        # Without a snapshot, the page does not show the reason why a message is hidden.
        return None


def _with_reason(
    pieces: Iterable[tuple[Span, str]], new_spans: Sequence[Span], reason: str
) -> list[tuple[Span, str]]:
    """Return ranges of seqs with their reasons. Seqs in `new_spans` get the new `reason`."""
    result: list[tuple[Span, str]] = []
    for span, old_reason in pieces:
        unchanged = spans.minus([span], new_spans)
        result += [(piece, old_reason) for piece in unchanged]
        result += [(piece, reason) for piece in spans.minus([span], unchanged)]
    return result


def _join_pieces(
    pieces: Iterable[tuple[Span, str]], present: Sequence[Span]
) -> list[tuple[str, list[Span]]]:
    """Join neighbouring hidden ranges with the same reason and no message between them."""
    runs: list[tuple[str, list[Span]]] = []
    for span, reason in pieces:
        if runs and runs[-1][0] == reason:
            last_seq = runs[-1][1][-1][1]
            between = [] if span[0] == last_seq + 1 else [(last_seq + 1, span[0] - 1)]
            # The seqs between two ranges may have no messages.
            if spans.minus(between, present) == between:
                runs[-1][1].append(span)
                continue
        runs.append((reason, [span]))
    return runs


def _with_summary(gaps: Sequence[Gap], floor: int, *, can_undo: bool) -> list[Gap]:
    """Return the gaps with `has_summary` set at the last gap that the summary can describe."""
    gaps_below = [gap for gap in gaps if gap.last <= floor]
    candidates = [gap for gap in gaps_below if gap.reason == SUMMARIZED] or gaps_below
    if candidates:
        last_gap = candidates[-1]
        marked_gap = replace(last_gap, has_summary=True, can_undo=last_gap.can_undo or can_undo)
        return [marked_gap if gap is last_gap else gap for gap in gaps]
    # A fork has the summary, but not the summarized messages.
    summary_gap = Gap(
        first=floor, last=floor, count=0, reason=SUMMARIZED, has_summary=True, can_undo=can_undo
    )
    return [summary_gap, *gaps]
