"""State of a session: functions that apply records to a state or decide operations on it.

`apply_…` functions apply a record to a State. `decide_…` functions turn a call into one Change, or
None if the call changes nothing. This module reads and writes no files.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from stenolog.codec import encode_object
from stenolog.errors import Conflict, RefusedMessage, UsageError
from stenolog.records import (
    FORMAT,
    Change,
    ChangeRecord,
    Message,
    SessionInfo,
    Span,
    State,
    StateRecord,
    Undo,
    UndoResult,
    Void,
    VoidRecord,
)
from stenolog.stores import spans
from stenolog.stores.base import conversation_times, forked_meta

UNDO_DEPTH: Final = 8
"""Number of operations that can be undone; older undo steps are dropped."""
MAX_HIDDEN_SPANS: Final = 1_000
"""Maximum number of hidden ranges above the floor."""
MAX_META_BYTES: Final = 64 * 1024
"""Maximum size of a session's meta, encoded as JSON."""
_MAX_STEP_BYTES: Final = 4 * 1024
"""Maximum size of an undo step in a state; the state omits the data of a longer step."""

_UNDOABLE_OPERATIONS: Final = frozenset(
    {"truncate", "clear", "hide", "show", "replace", "checkpoint", "summary"}
)


# --- applying records ------------------------------------------------------------------------


def apply_change(state: State, change: Change) -> None:
    """Apply a change to the state."""
    is_known = change.number <= state.number
    state.floor = change.floor
    state.hidden = change.hidden
    state.number = max(state.number, change.number)
    if change.summary is not None:
        state.summary = change.summary
    if change.meta is not None:
        state.meta = change.meta
    if change.undoes is not None:
        # Find the step by its number, so that reading an undo record twice removes only one step.
        state.undo = [step for step in state.undo if step.number < change.undoes]
    if change.op in _UNDOABLE_OPERATIONS and not is_known:
        state.undo = [*state.undo, _short_step(change)][-UNDO_DEPTH:]


def apply_void(state: State, void: Void) -> None:
    """Apply a void, which lists bytes and records that a writer invalidated."""
    state.void_bytes += void.bytes
    state.void = spans.union(state.void, void.seqs)
    state.lost = spans.union(state.lost, void.lost)
    if void.changes:
        state.number = max(state.number, *void.changes)


def apply_record(state: State, record: StateRecord | ChangeRecord | VoidRecord) -> State:
    """Return the state after applying this record."""
    match record:
        case StateRecord():
            # The new state keeps damage that was found earlier.
            lost, state = state.lost, copy_state(record.body)
            state.lost = spans.union(lost, state.lost)
        case ChangeRecord():
            apply_change(state, record.body)
        case VoidRecord():
            apply_void(state, record.body)
    return state


def replay_changes(state: State, changes: Iterable[Change]) -> None:
    """Apply changes, in the order of their numbers, to a blank state.

    After a purge or a copy, the remaining changes may lack the current floor. So a message is also
    hidden if a remaining change hid the message and was not undone.
    """
    hidden_by_change: dict[int, list[Span]] = {}
    for change in changes:
        apply_change(state, change)
        if change.shown:
            hidden_by_change = {
                number: spans.minus(seqs, change.shown) for number, seqs in hidden_by_change.items()
            }
        if change.undoes is not None:
            hidden_by_change = {
                number: seqs for number, seqs in hidden_by_change.items() if number < change.undoes
            }
        if change.op in _UNDOABLE_OPERATIONS:
            hidden_by_change[change.number] = change.newly_hidden
    state.floor, state.hidden = _split_floor(
        spans.union(_all_hidden(state), *hidden_by_change.values())
    )


def undo_step_of(change: Change) -> Undo:
    """Return the complete undo step of a change."""
    return Undo(
        number=change.number,
        op=change.op,
        newly_hidden=change.newly_hidden,
        appended=change.appended,
        shown=change.shown,
        old_summary=change.old_summary,
    )


def _short_step(change: Change) -> Undo:
    """Return the undo step of a change, without its data if the step is too long for a state."""
    step = undo_step_of(change)
    step_bytes = len((change.old_summary or "").encode("utf-8", "surrogatepass")) + 16 * len(
        [*change.newly_hidden, *change.shown]
    )
    if step_bytes > _MAX_STEP_BYTES:
        return Undo(number=change.number, op=change.op, elsewhere=True)
    return step


# --- visibility ------------------------------------------------------------------------------


def missing_seqs(state: State) -> list[Span]:
    """Return the seqs without a readable message."""
    if not (state.lost or state.void or state.purged):
        return []
    return spans.union(state.lost, state.void, state.purged)


def visible_seqs(state: State, last_seq: int) -> list[Span]:
    """Return the visible seqs of a session whose last assigned seq is `last_seq`."""
    if last_seq <= state.floor:
        return []
    return spans.minus(
        [(state.floor + 1, last_seq)], spans.union(state.hidden, missing_seqs(state))
    )


def _split_floor(hidden: Sequence[Span]) -> tuple[int, list[Span]]:
    """Return the floor and the spans above the floor; a span that starts at 1 becomes the floor."""
    if hidden and hidden[0][0] <= 1:
        return hidden[0][1], list(hidden[1:])
    return 0, list(hidden)


def _all_hidden(state: State) -> list[Span]:
    return spans.union([(1, state.floor)] if state.floor else [], state.hidden)


# --- deciding --------------------------------------------------------------------------------


def decide_hide(
    state: State,
    last_seq: int,
    spans_to_hide: Sequence[Span],
    *,
    op: str = "hide",
    summary: str | None = None,
    appended: Span | None = None,
) -> Change | None:
    """Return the change that hides these seqs and sets `summary`, if given.

    Return None if nothing would change. `appended`: seqs of messages that the same write appends.
    Raises UsageError if too many separate ranges would be hidden.
    """
    if summary is not None and summary == state.summary:
        summary = None
    hidden_before = _all_hidden(state)
    hidden_after = spans.union(hidden_before, spans.clipped(spans_to_hide, 1, last_seq))
    newly_hidden = spans.minus(spans.minus(hidden_after, hidden_before), missing_seqs(state))
    if not newly_hidden and summary is None and appended is None:
        return None
    floor, hidden = _split_floor(hidden_after) if newly_hidden else (state.floor, state.hidden)
    _check_hidden_count(hidden)
    return Change(
        op=op,
        number=state.number + 1,
        floor=floor,
        hidden=hidden,
        newly_hidden=newly_hidden,
        appended=appended,
        summary=summary,
        old_summary=None if summary is None else state.summary,
    )


def decide_show(state: State, last_seq: int, first: int, last: int) -> Change | None:
    """Return the change that shows the hidden messages of these seqs; None if there are none.

    Raises UsageError if too many separate ranges would stay hidden.
    """
    hidden_before = _all_hidden(state)
    seqs_to_show = spans.clipped([(first, last)], 1, last_seq)
    unaffected = spans.minus([(1, last_seq)], hidden_before)
    shown = spans.minus(seqs_to_show, spans.union(unaffected, missing_seqs(state)))
    if not shown:
        return None
    floor, hidden = _split_floor(spans.minus(hidden_before, shown))
    _check_hidden_count(hidden)
    return Change(op="show", number=state.number + 1, floor=floor, hidden=hidden, shown=shown)


def _check_hidden_count(hidden: Sequence[Span]) -> None:
    if len(hidden) > MAX_HIDDEN_SPANS:
        raise UsageError(
            f"more than {MAX_HIDDEN_SPANS:,} separate ranges would be hidden; "
            "checkpoint or truncate first"
        )


def decide_replace(
    state: State,
    last_seq: int,
    visible_messages: Sequence[Message],
    payloads: Sequence[bytes],
    *,
    expect_last: int | None = None,
) -> tuple[Change | None, Sequence[bytes]]:
    """Return the change that makes exactly these payloads visible, and the payloads to append.

    The common prefix of the visible messages and the payloads is not touched; all other visible
    messages are hidden. Raises Conflict if the last seq differs from `expect_last`.
    """
    if expect_last is not None and expect_last != last_seq:  # guard: replace-unseen-message
        raise Conflict(state.key, "last seq", expect_last, last_seq)
    prefix_length = 0
    for message, payload in zip(visible_messages, payloads, strict=False):
        if message.to_json() != payload:
            break
        prefix_length += 1
    new_payloads = payloads[prefix_length:]
    change = decide_hide(
        state,
        last_seq,
        spans.from_seqs(message.seq for message in visible_messages[prefix_length:]),
        op="replace",
        appended=(last_seq + 1, last_seq + len(new_payloads)) if new_payloads else None,
    )
    return change, new_payloads


def decide_truncate(state: State, last_seq: int, keep_last: int) -> Change | None:
    """Return the change that hides all visible messages except the last `keep_last`."""
    kept_spans = spans.last_seqs(visible_seqs(state, last_seq), keep_last)
    return decide_hide(
        state, last_seq, [(1, kept_spans[0][0] - 1 if kept_spans else last_seq)], op="truncate"
    )


def decide_checkpoint(
    state: State,
    last_seq: int,
    *,
    summary: str,
    upto: int,
    expect_floor: int | None = None,
    op: str = "checkpoint",
) -> Change | None:
    """Return the change that moves the floor up to `upto` and replaces the summary.

    Raises UsageError, Conflict.
    """
    if upto > last_seq:
        raise UsageError(
            f"{state.key!r}: upto must be at most {last_seq}, the last seq, not {upto}"
        )
    if expect_floor is not None and expect_floor != state.floor:
        raise Conflict(state.key, "floor", expect_floor, state.floor)
    return decide_hide(  # guard: checkpoint-by-seq
        state, last_seq, [(1, upto)] if upto > state.floor else [], op=op, summary=summary
    )


def decide_meta(state: State, fields: Mapping[str, Any]) -> Change | None:
    """Return the change that sets or removes fields of the session's meta.

    Raises UsageError if the meta is too large.
    """
    meta = {name: value for name, value in {**state.meta, **fields}.items() if value is not None}
    payload = encode_object(meta)
    if len(payload) > MAX_META_BYTES:
        raise UsageError(f"meta must have at most {MAX_META_BYTES:,} bytes, not {len(payload):,}")
    if payload == encode_object(state.meta):
        return None
    return Change(
        op="meta", number=state.number + 1, floor=state.floor, hidden=state.hidden, meta=meta
    )


def decide_undo(state: State, step: Undo, answered: Span | None = None) -> Change:
    """Return the change that undoes exactly the operation of this undo step.

    If the operation is a replace, the change also hides the messages `answered`, because the undo
    hides the user message that they answer.
    """
    hidden_after = spans.minus(_all_hidden(state), step.newly_hidden)
    hidden_after = spans.union(hidden_after, _seqs_hidden_by_undo(step, answered))
    floor, hidden = _split_floor(hidden_after)
    changes_summary = step.old_summary is not None and step.old_summary != state.summary
    return Change(
        op="undo",
        number=state.number + 1,
        floor=floor,
        hidden=hidden,
        undoes=step.number,
        summary=step.old_summary if changes_summary else None,
        old_summary=state.summary if changes_summary else None,
    )


class Fork(Struct, frozen=True):
    """Content of a fork."""

    state: State
    copied: list[Span]
    """Seqs of the messages that are copied."""
    next_seq: int


def decide_fork(
    state: State, last_seq: int, *, new_key: str, at: int | None, uid: str, now: str
) -> Fork:
    """Return a fork of the session with its visible messages up to `at`. Raises UsageError."""
    upto = last_seq if at is None else at
    if upto > last_seq:
        raise UsageError(f"{state.key!r}: at must be at most {last_seq}, the last seq, not {upto}")
    if upto < state.floor:
        raise UsageError(
            f"{state.key!r}: cannot fork at seq {upto}: the summary covers all messages up to seq "
            f"{state.floor}; fork at {state.floor} or later, or undo the summary first"
        )
    copied_spans = spans.clipped(visible_seqs(state, last_seq), 1, upto)
    fork_state = blank_state(new_key, uid, 1, now)
    fork_state.floor = state.floor
    # A fork starts with a change: an empty fork without a change would not count as a session.
    # The change has a new number, because numbers are not reused.
    fork_state.number = state.number + 1
    fork_state.summary, fork_state.meta = state.summary, forked_meta(state.meta, upto)
    fork_state.purged = spans.minus([(1, upto)], copied_spans)
    fork_state.forked_from = state.key
    return Fork(fork_state, copied_spans, upto + 1)


def decide_purge(
    state: State, last_seq: int, before: int, complete_step: Callable[[Undo], Undo]
) -> State:
    """Return the state after a purge of all messages below the seq `before`.

    An undo step is dropped if it would bring back a purged message, or an older summary, which may
    describe purged messages. Earlier steps are dropped, too, because undoing only these steps would
    not restore any former state. `complete_step` returns a step with all of its data, even if the
    state has only a part of the data.
    """
    new_state = copy_state(state)
    upto = min(before - 1, last_seq)
    if upto < 1:
        return new_state
    purged_spans = [(1, upto)]
    new_state.floor, new_state.hidden = _split_floor(spans.union(_all_hidden(state), purged_spans))
    new_state.purged = spans.union(state.purged, purged_spans)
    new_state.lost = spans.clipped(state.lost, upto + 1, last_seq)
    new_state.void = spans.clipped(state.void, upto + 1, last_seq)
    new_state.void_bytes = 0
    new_state.undo = []
    for step in state.undo:
        # guard: purge-ends-undo
        new_state.undo = (
            [] if _affects_purged_data(complete_step(step), upto) else [*new_state.undo, step]
        )
    return new_state


def _affects_purged_data(step: Undo, purged_upto: int) -> bool:
    """Return whether the step refers to a purged message, or to a summary that may describe one."""
    affected_spans = [
        *step.newly_hidden,
        *step.shown,
        *([] if step.appended is None else [step.appended]),
    ]
    return bool(step.old_summary) or any(first <= purged_upto for first, _ in affected_spans)


def present_seqs(state: State, last_seq: int) -> list[Span]:
    """Return the seqs that have a message, visible or hidden."""
    return spans.minus([(1, last_seq)], missing_seqs(state))


def describe_remaining(
    key: str, *, forks: Sequence[str], summary: str = "", trashed: int = 0
) -> tuple[str, ...]:
    """Return sentences about kept data that may still describe purged messages."""
    sentences = [f"the fork {fork!r} has messages of {key!r}; purge it too" for fork in forks]
    if summary:
        sentences.append(f"the summary of {key!r} is kept; replace it and purge again")
    if trashed:
        sentences.append(
            f"{trashed:,} deleted sessions of {key!r} stay in the trash; purge the key"
        )
    return tuple(sentences)


def import_sources(meta: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a sentence about each file from which the session with this meta was imported."""
    receipts = meta.get("imported")
    # Any client may write meta, so values that are not receipts are skipped.
    receipts = receipts if isinstance(receipts, list) else ()
    files = [receipt.get("file") for receipt in receipts if isinstance(receipt, dict)]
    return tuple(
        f"it was imported from {file}; delete that file or {file}.migrated if it still exists"
        for file in files
        if isinstance(file, str)
    )


def session_info(
    state: State,
    last_seq: int,
    *,
    times: tuple[datetime, datetime],
    lost: Iterable[Span],
    count: int,
    size: int,
    damaged: int = 0,
    void_bytes: int = 0,
) -> SessionInfo:
    """Return the info of a session. `times`: when it was created and last changed in the store.

    `lost`, `count`, `size`, `damaged` and `void_bytes` are the facts that an engine knows besides
    the state.
    """
    meta = {} if state.forked_from is not None else state.meta
    created, updated = conversation_times(*times, meta=meta, last_seq=last_seq)
    visible_spans = visible_seqs(state, last_seq)
    return SessionInfo(
        key=state.key,
        uid=state.uid,
        created=created,
        updated=updated,
        last_seq=last_seq,
        floor=state.floor,
        visible=spans.size(visible_spans),
        count=count,
        lost_spans=tuple(lost),
        damaged=damaged,
        void_bytes=void_bytes,
        archived=archived_upto(state),
        generation=state.generation,
        bytes=size,
        undoable=len(state.undo),
        summary=state.summary,
        meta=state.meta,
        forked_from=state.forked_from,
        visible_spans=tuple(visible_spans),
        change=state.number,
    )


def archived_upto(state: State) -> int:
    """Return the last archived seq; 0 without an archive."""
    return state.archive.last if state.archive is not None else 0


def rebuild_change(step: Undo, *, floor: int = 0, hidden: Sequence[Span] = ()) -> Change:
    """Rebuild the change that an undo step would revert, with this floor and these hidden spans."""
    return Change(
        op=step.op,
        number=step.number,
        floor=floor,
        hidden=list(hidden),
        newly_hidden=step.newly_hidden,
        appended=step.appended,
        shown=step.shown,
        old_summary=step.old_summary,
    )


def changes_for_state(state: State, steps: Sequence[Undo]) -> list[Change]:
    """Return changes that lead to this state, for a session whose changes are missing.

    `steps` are the complete undo steps of the session. For a session that was never changed, the
    result is empty.
    """
    changes = [rebuild_change(step, floor=state.floor, hidden=state.hidden) for step in steps]
    if state.number > max((change.number for change in changes), default=0):
        changes.append(
            Change(op="state", number=state.number, floor=state.floor, hidden=state.hidden)
        )
    if changes:
        changes[-1] = msgspec.structs.replace(changes[-1], summary=state.summary, meta=state.meta)
    return changes


def undo_result(
    state: State, step: Undo, change: Change, answered: Span | None = None
) -> UndoResult:
    """Return the value that `Store.undo` returns for this change."""
    hidden_by_undo = spans.minus(_seqs_hidden_by_undo(step, answered), missing_seqs(state))
    return UndoResult(
        op=step.op,
        shown=spans.size(step.newly_hidden),
        hid=spans.size(spans.minus(hidden_by_undo, _all_hidden(state))),
        summary_restored=change.summary is not None,
    )


def _seqs_hidden_by_undo(step: Undo, answered: Span | None) -> list[Span]:
    """Return the seqs that an undo with this step hides."""
    added_spans = [step.appended] if step.appended is not None else step.shown
    if step.op != "replace" or answered is None:
        return added_spans
    # An answer comes after all messages that the replace hid or appended: ignore earlier seqs.
    last_replaced = max(
        (last for _, last in (*step.newly_hidden, *added_spans)), default=answered[1]
    )
    return spans.union(added_spans, spans.clipped([answered], last_replaced + 1, answered[1]))


def check_summary(text: str) -> None:
    """Raise UsageError unless the summary is text that can be stored."""
    if not isinstance(text, str):
        raise UsageError(f"summary must be text, not {type(text).__name__}")
    try:
        encode_object({"summary": text})
    except RefusedMessage as error:
        raise UsageError(str(error)) from error


def blank_state(key: str, uid: str, generation: int, created: str) -> State:
    """Return the state of a session before its first record."""
    return State(format=FORMAT, key=key, uid=uid, generation=generation, created=created)


def copy_state(state: State) -> State:
    """Return a shallow copy, which suffices because fields are never changed in place."""
    return msgspec.structs.replace(state)
