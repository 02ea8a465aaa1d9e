"""Snapshots: the complete content of a session, for copies between stores.

transfer/copy.py copies between any two stores, through `Store.admin`. A session is identified
by its uid; the trash may contain several sessions that had the same key. Engines do not import each
other; they exchange a Snapshot and its messages.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from msgspec import Struct

from stenolog.errors import StenologError
from stenolog.records import Change, Message, SessionInfo, Span, State, Token, Undo
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.base import Store


class SnapshotMark(Struct, frozen=True, kw_only=True):
    """A session in a list of snapshots; the session may be in the trash."""

    key: str
    uid: str
    """Uid of the session; empty if the uid cannot be read."""
    deleted: str | None = None
    """Deletion time in stored form; None if the session is not in the trash."""
    problem: str = ""
    """Reason why the session cannot be opened now; empty for an available or a damaged session."""


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything about one session except its messages.

    A Snapshot has no values that depend on the engine, such as generation and bytes. All times are
    in stored form: UTC, microseconds, `Z`.
    """

    key: str
    """Key of the session; for a session in the trash, its key when it was deleted."""
    uid: str
    created: str
    """Time at which the session was created in the store; meta may have an earlier time."""
    updated: str
    deleted: str | None = None
    last_seq: int = 0
    """Last assigned seq of the session, even if its message cannot be read."""
    floor: int = 0
    hidden: list[Span] = []
    """Hidden ranges above the floor."""
    number: int = 0
    """Number of the newest change; later changes have higher numbers."""
    summary: str = ""
    meta: dict[str, Any] = {}
    undo: list[Undo] = []
    """Undo steps, oldest first, each with all of its data (`Undo.elsewhere` is False)."""
    lost: list[Span] = []
    """Seqs of lost messages. After a read, these are only the known ones; a write needs all."""
    void: list[Span] = []
    purged: list[Span] = []
    archived: int = 0
    """Last archived seq of the session; 0 without an archive."""
    forked_from: str | None = None
    tokens: list[Token] = []
    """Idempotency keys whose first message is missing; messages carry all other keys."""


class SnapshotReading(Struct, frozen=True, kw_only=True):
    """The content of a session at one moment; valid only inside the `with` that returned it.

    `messages` can be iterated once, and skips damaged messages. If a seq has no message and is
    neither void nor purged, its message is lost. The first message of an idempotency key (P12) has
    `_once`. If the key covers more than one message, `_part` of this first message is `(1, count)`
    (see `token_of`). Other values of `_part`, and `_joined` and `hidden`, have no meaning here.
    """

    snapshot: Snapshot
    messages: Iterator[Message]
    """Messages after the requested seq, including hidden and archived ones."""
    is_damaged: Callable[[], bool] = lambda: False
    """Return whether any data of the session is damaged or lost. Reads all messages."""


class SnapshotWriter(Protocol):
    """A writer of snapshots into a store."""

    def write(self, snapshot: Snapshot, messages: Iterable[Message]) -> None:
        """Write this session with all of its messages in one step.

        Raises SessionExists if a session of the store has the key or the uid; NotStored,
        MaybeStored, ReadOnly like an append; any error that `messages` raises. Except after
        MaybeStored, an error leaves the store unchanged.
        """


# --- conversion between a Snapshot and the State of an engine -----------------------------------


def snapshot_of(
    state: State,
    *,
    last_seq: int,
    updated: str,
    undo: list[Undo],
    deleted: str | None = None,
    tokens: Iterable[Token] = (),
) -> Snapshot:
    """Return the snapshot of a state. `undo`: complete undo steps."""
    return Snapshot(
        key=state.key,
        uid=state.uid,
        created=state.created,
        updated=updated,
        deleted=deleted,
        last_seq=last_seq,
        floor=state.floor,
        hidden=list(state.hidden),
        number=state.number,
        summary=state.summary,
        meta=state.meta,
        undo=undo,
        lost=spans.minus(state.lost, spans.union(state.void, state.purged)),
        void=list(state.void),
        purged=list(state.purged),
        archived=states.archived_upto(state),
        forked_from=state.forked_from,
        tokens=sorted(tokens, key=lambda token: (token.first, token.token)),
    )


def state_of(snapshot: Snapshot) -> tuple[State, list[Change]]:
    """Return the state of a snapshot without `archive` and `tokens`, and a list of changes.

    The list has a change for each undo step that is too long for the state, with the same number.
    """
    state = states.blank_state(snapshot.key, snapshot.uid, 1, snapshot.created)
    state.floor, state.hidden, state.number = snapshot.floor, list(snapshot.hidden), snapshot.number
    state.summary, state.meta = snapshot.summary, snapshot.meta
    state.lost, state.void, state.purged = (
        list(snapshot.lost),
        list(snapshot.void),
        list(snapshot.purged),
    )
    state.forked_from = snapshot.forked_from
    changes = []
    for step in snapshot.undo:
        change = states.rebuild_change(step)
        scratch_state = states.blank_state("", "", 1, "")
        states.apply_change(scratch_state, change)
        state.undo = [*state.undo, *scratch_state.undo]
        if scratch_state.undo[-1].elsewhere:
            changes.append(change)
    return state, changes


def token_of(message: Message) -> tuple[str, int] | None:
    """Return the idempotency key that starts at this message and its message count, or None."""
    if message._once is None:
        return None
    return message._once, message._part[1] if message._part is not None else 1


def iterate_messages(store: Store, info: SessionInfo, after: int = 0) -> Iterator[Message]:
    """Yield all messages after a seq, visible or hidden, if possible without building a list."""
    last_seq = after
    mark = SnapshotMark(key=info.key, uid=info.uid)
    try:
        with store.admin.read_snapshot(mark, after=after) as reading:
            for message in reading.messages:
                last_seq = message.seq
                yield message
            return
    except StenologError:
        pass  # The session is damaged or was replaced: read it with `get_history`.
    yield from store.get_history(info.key, after=last_seq, full=True)
