"""Hidden messages of a session, and the operations that hid them.

A store reports which seqs are visible. Every other seq either belongs to a hidden message or has no
message: a fork keeps the seqs of its source, but not all messages. The undo steps name the
operation that hid a message. Older operations have no undo step, so their names are unknown.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import StenologError
from stenolog.records import Message, SessionInfo, Span, Undo
from stenolog.stores import spans
from stenolog.stores.base import Store
from stenolog.stores.snapshots import Snapshot, SnapshotMark
from stenolog.transfer.transcripts.program_messages import is_in_place, is_shown

HIDDEN: Final = "hidden"
"""Reason if the operation that hid a message is unknown."""
SUMMARIZED: Final = "summarized"
_REASONS: Final = {
    "checkpoint": SUMMARIZED,
    "clear": "cleared",
    "replace": "replaced",
    "truncate": "truncated",
}


MAX_SUMMARIZED: Final = 10_000
"""If a session has more summarized messages, an export omits all of them by default."""
MAX_SUMMARIZED_BYTES: Final = 20_000_000
"""The same limit for the stored size of all summarized messages, in bytes."""


class Gap(Struct, frozen=True, kw_only=True):
    """A range of messages that are hidden from the model."""

    first: int
    last: int
    count: int
    """Number of messages. 0 if the session has only a summary of the messages, as in a fork."""
    reason: str
    """Why the messages are hidden: summarized, cleared, replaced, truncated, or hidden."""
    has_summary: bool = False
    """Whether the summary is shown at this gap."""
    can_undo: bool = False
    """Whether undoing the last operation makes a message of this gap visible again."""


class Visibility(Struct, frozen=True, kw_only=True):
    """The messages that a session contains, and which of them are hidden."""

    present: Sequence[Span]
    """Seqs that have a message."""
    gaps: Sequence[Gap] = ()
    lost: Sequence[Span] = ()
    """Seqs of damaged messages."""


def read_visibility(store: Store, info: SessionInfo) -> Visibility:
    """Return the visibility of a session's messages. If all are visible, read nothing."""
    if info.visible == info.last_seq:
        return Visibility(present=info.visible_spans)
    snapshot = _read_snapshot(store, info)
    missing = spans.union(snapshot.lost, snapshot.void, snapshot.purged)
    lost = snapshot.lost
    if spans.size(lost) < info.lost:
        lost = spans.union(lost, _find_unreadable_spans(store, info, missing))
        missing = spans.union(missing, lost)
    present = spans.minus([(1, info.last_seq)], spans.minus(missing, info.visible_spans))
    return Visibility(present=present, gaps=_find_gaps(info, present, snapshot.undo), lost=lost)


def read_shared_messages(store: Store, info: SessionInfo) -> Sequence[Message]:
    """Return the messages to share: visible messages, and summarized messages.

    Messages that were hidden for other reasons, for example cleared, are left out, but not those
    that another program hid. All summarized messages are left out if they exceed MAX_SUMMARIZED or
    MAX_SUMMARIZED_BYTES.
    """
    # In a session of another program, the reasons are unknown.
    in_place = is_in_place(info)
    reasons = (SUMMARIZED, HIDDEN) if in_place else (SUMMARIZED,)
    gaps = [gap for gap in read_visibility(store, info).gaps if gap.reason in reasons]
    shared_spans = [(gap.first, gap.last) for gap in gaps]
    if 0 < sum(gap.count for gap in gaps) <= MAX_SUMMARIZED:
        shared_messages = [
            message
            for message in store.get_history(info.key, full=True)
            if not message.hidden
            or (spans.contains(shared_spans, message.seq) and (not in_place or is_shown(message)))
        ]
        if sum(len(m.to_json()) for m in shared_messages if m.hidden) <= MAX_SUMMARIZED_BYTES:
            return shared_messages
    return store.get_history(info.key)


def _find_unreadable_spans(store: Store, info: SessionInfo, missing: Sequence[Span]) -> list[Span]:
    """Return the seqs of hidden messages that cannot be read, by reading all hidden messages."""
    hidden_spans = spans.minus([(1, info.last_seq)], spans.union(info.visible_spans, missing))
    if not hidden_spans:
        return []
    readable = store.get_history(info.key, after=hidden_spans[0][0] - 1, full=True)
    return spans.minus(hidden_spans, [(message.seq, message.seq) for message in readable])


def _find_gaps(
    info: SessionInfo, present: Sequence[Span], undo_steps: Sequence[Undo]
) -> Sequence[Gap]:
    """Return the gaps between the visible messages, with the reasons that the undo steps give."""
    hidden_ranges = [(span, HIDDEN) for span in spans.minus(present, info.visible_spans)]
    if info.summary:
        hidden_ranges = _with_reason(hidden_ranges, [(1, info.floor)], SUMMARIZED)
    for step in undo_steps:
        hidden_ranges = _with_reason(
            hidden_ranges, step.newly_hidden, _REASONS.get(step.op, HIDDEN)
        )
    undoable_spans = undo_steps[-1].newly_hidden if undo_steps else []
    gaps = [
        Gap(
            first=gap_spans[0][0],
            last=gap_spans[-1][1],
            count=spans.size(gap_spans),
            reason=reason,
            can_undo=spans.minus(gap_spans, undoable_spans) != gap_spans,
        )
        for reason, gap_spans in _join_ranges(sorted(hidden_ranges), present)
    ]
    if not info.summary or not info.floor:
        return gaps
    can_undo = bool(undo_steps) and undo_steps[-1].op == "summary"
    return _with_summary(gaps, info.floor, can_undo=can_undo)


def _read_snapshot(store: Store, info: SessionInfo) -> Snapshot:
    """Return the snapshot of a session, without messages; empty if it cannot be read."""
    # Without a snapshot, the page does not show the reason why a message is hidden.
    mark = SnapshotMark(key=info.key, uid=info.uid)
    with suppress(StenologError), store.admin.read_snapshot(mark) as reading:
        return reading.snapshot
    return Snapshot(key=info.key, uid=info.uid, created="", updated="")


def _with_reason(
    ranges: Iterable[tuple[Span, str]], new_spans: Sequence[Span], reason: str
) -> list[tuple[Span, str]]:
    """Return ranges of seqs with their reasons. Seqs in `new_spans` get the new `reason`."""
    result: list[tuple[Span, str]] = []
    for span, old_reason in ranges:
        unchanged = spans.minus([span], new_spans)
        result += [(part, old_reason) for part in unchanged]
        result += [(part, reason) for part in spans.minus([span], unchanged)]
    return result


def _join_ranges(
    ranges: Iterable[tuple[Span, str]], present: Sequence[Span]
) -> list[tuple[str, list[Span]]]:
    """Join neighbouring hidden ranges with the same reason and no message between them."""
    runs: list[tuple[str, list[Span]]] = []
    for span, reason in ranges:
        if runs and runs[-1][0] == reason:
            last_seq = runs[-1][1][-1][1]
            between = [] if span[0] == last_seq + 1 else [(last_seq + 1, span[0] - 1)]
            # Ranges are joined if the seqs between them have no messages.
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
        summarized_gap = candidates[-1]
        marked_gap = replace(
            summarized_gap, has_summary=True, can_undo=summarized_gap.can_undo or can_undo
        )
        return [marked_gap if gap is summarized_gap else gap for gap in gaps]
    # A fork has the summary, but not the summarized messages.
    summary_gap = Gap(
        first=floor, last=floor, count=0, reason=SUMMARIZED, has_summary=True, can_undo=can_undo
    )
    return [summary_gap, *gaps]
