"""Reads and writes the rows of sessions, messages and changes.

rows.py decodes the values, and stores/state.py decides the changes.
"""

import operator
import os
from collections.abc import Sequence

from stenolog.records import Archive, Change, CompactionResult, Message, Span, State, Undo
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.operations import Decide, Decision, T
from stenolog.stores.sql.dialect import Row, Transaction
from stenolog.stores.sql.rows import (
    MAX_SEQ,
    Session,
    damage_error,
    encode,
    now,
    prefix_end,
    read_state,
    undo_step_from_changes,
)


def decode_text(value: str | bytes) -> str:
    """Return a text column as str. Raises UnicodeDecodeError."""
    return value if isinstance(value, str) else value.decode()


def printable_text(value: str | bytes | None) -> str:
    """Return a text column as str, with escapes for bytes that are not UTF-8."""
    if value is None:
        return ""
    return value if isinstance(value, str) else value.decode(errors="backslashreplace")


def to_bytes(value: str | bytes) -> bytes:
    """Return a JSON column as bytes."""
    return value.encode() if isinstance(value, str) else value


def find_session(
    transaction: Transaction, namespace: str, key: str, *, lock: bool = False
) -> Session | None:
    """Return the session with this key. Raises NewerFormat, DamagedStore.

    `lock`: prevent other writers from changing the session until the transaction ends.
    """
    statement = "lock_session" if lock else "find_session"
    try:
        for row in transaction.run(statement, namespace, transaction.key_parameter(key)):
            return session_from_row(transaction, row, key=key, uid=row[1])
    except (UnicodeDecodeError, TypeError) as error:
        raise damage_error(key, error) from error
    return None


def session_from_row(transaction: Transaction, row: Row, *, key: str, uid: str) -> Session:
    """Return the session of a row. Raises NewerFormat, UnicodeDecodeError, TypeError."""
    session_id, _, created, updated, last_seq, size, fork_of, encoded_state, version, *_ = row
    transaction.check_row_format(version)
    state = session_state(transaction, session_id, key, uid=uid, encoded=encoded_state)
    state.uid, state.created = uid, created
    state.forked_from = None if fork_of is None else decode_text(fork_of)
    return Session(session_id, updated, operator.index(last_seq), size, state)


def uid_and_last_seq(transaction: Transaction, namespace: str, key: str) -> tuple[str, int] | None:
    """Return uid and last seq of the session with this key, without reading its state.

    Raises NewerFormat.
    """
    for uid, last_seq, version in transaction.run(
        "find_current", namespace, transaction.key_parameter(key)
    ):
        transaction.check_row_format(version)
        return uid, last_seq
    return None


def create_session(
    transaction: Transaction, namespace: str, state: State, last_seq: int, size: int
) -> int:
    """Create a session and return its id; 0 if another writer has just created it.

    Raises NewerFormat.
    """
    fork_of = state.forked_from
    for (session_id,) in transaction.run(
        "add_session",
        namespace,
        transaction.key_parameter(state.key),
        state.uid,
        state.created,
        last_seq,
        size,
        None if fork_of is None else transaction.key_parameter(fork_of),
        transaction.json_parameter(encode(state)),
        transaction.table_version,
    ):
        return int(session_id)
    transaction.check_format()
    return 0


def session_state(
    transaction: Transaction, session_id: int, key: str, *, uid: str, encoded: str | bytes | None
) -> State:
    """Return the state of a session; rebuild a damaged state from the changes."""
    return read_state(
        None if encoded is None else to_bytes(encoded),
        key,
        uid=uid,
        changes=lambda: recorded_changes(transaction, session_id),
    )


def recorded_changes(transaction: Transaction, session_id: int) -> list[tuple[int, bytes]]:
    """Return number and body of each change, in order of the numbers."""
    return [
        (number, to_bytes(encoded)) for number, encoded in transaction.run("changes", session_id)
    ]


def list_keys(
    transaction: Transaction,
    namespace: str,
    damage: DamageReports,
    *,
    prefix: str,
    limit: int | None,
    after: str | None,
) -> list[str]:
    """Return a page of keys in byte order."""
    upper_bound = prefix_end(prefix)
    rows = transaction.run(
        "list_keys",
        namespace,
        transaction.key_parameter(prefix),
        transaction.key_parameter(after or ""),
        None if upper_bound is None else transaction.key_parameter(upper_bound),
        MAX_SEQ if limit is None else min(limit, MAX_SEQ),
    )
    try:
        return [key.decode() for (key,) in rows]
    except UnicodeDecodeError:
        # A damaged key must not hide the other keys: `session_stamps` skips only this key.
        stamps = session_stamps(transaction, namespace, damage)
        keys = sorted(key for key in stamps if key.startswith(prefix) and key > (after or ""))
        return keys[:limit]


def session_stamps(
    transaction: Transaction, namespace: str, damage: DamageReports
) -> dict[str, str]:
    """Return a stamp for each session: a text that differs after every change."""
    stamps: dict[str, str] = {}
    for key, stamp in transaction.run("stamps", namespace):
        try:
            stamps[key.decode()] = printable_text(stamp)
        except UnicodeDecodeError:
            damage.report_once(f"the session with the key {key!r}")
    return stamps


# --- messages --------------------------------------------------------------------------------


# Factor by which the next read asks for more messages if damaged messages were skipped.
_READ_GROWTH_FACTOR = 4


class MissingRows(Exception):
    """The state of a session counts messages that have no row in the table.

    The missing messages were purged during the read, or their rows are damaged.
    """


def visible_messages(
    transaction: Transaction,
    session: Session,
    damage: DamageReports | None,
    *,
    last: int | None,
    after: int | None,
) -> list[Message]:
    """Return the visible messages after the seq `after`, or only the last `last` of them.

    Damaged messages are skipped and recorded in `damage`. If `damage` is None, damaged
    messages raise MissingRows.
    """
    seqs = states.visible_seqs(session.state, session.last_seq)
    if after is not None and after > session.state.floor:
        seqs = spans.clipped(seqs, after + 1, session.last_seq)
    return _read_messages(transaction, session, damage, seqs, last=last, state=None)


def all_messages(
    transaction: Transaction,
    session: Session,
    damage: DamageReports | None,
    *,
    last: int | None,
    after: int,
) -> list[Message]:
    """Return all messages after the seq `after`, or only the last `last` of them.

    `hidden` is set on the messages that the state of the session hides.
    """
    seqs = spans.clipped(states.present_seqs(session.state, session.last_seq), after + 1, MAX_SEQ)
    return _read_messages(transaction, session, damage, seqs, last=last, state=session.state)


def _read_messages(
    transaction: Transaction,
    session: Session,
    damage: DamageReports | None,
    seqs: Sequence[Span],
    *,
    last: int | None,
    state: State | None,
) -> list[Message]:
    count = last
    while True:
        selected_seqs = seqs if count is None else spans.last_seqs(seqs, count)
        messages = transaction.messages(session.id, selected_seqs, state)
        missing_seqs: list[Span] = []
        if len(messages) != spans.size(selected_seqs):  # guard: sql-missing-row
            read_seqs = spans.union((message.seq, message.seq) for message in messages)
            missing_seqs = spans.minus(selected_seqs, read_seqs)
        if missing_seqs and damage is None:
            raise MissingRows
        if damage is not None:
            damage.record_read(session.state.uid, missing_seqs, messages)
        if not missing_seqs or last is None or count is None:
            return messages
        if len(messages) >= last or selected_seqs == seqs:
            return messages[-last:]
        # Damaged messages were skipped: read more messages to replace them.
        count *= _READ_GROWTH_FACTOR


# --- changes ---------------------------------------------------------------------------------


class OpenSQLSession:
    """An `OpenSession` inside a transaction."""

    def __init__(self, transaction: Transaction, session: Session, damage: DamageReports) -> None:
        self._transaction = transaction
        self._session = session
        self._damage = damage

    @property
    def state(self) -> State:
        """State of the session; a blank state if the session does not exist."""
        return self._session.state

    @property
    def last_seq(self) -> int:
        """Last assigned seq of the session."""
        return self._session.last_seq

    def visible_messages(self, *, last: int | None = None) -> list[Message]:
        """Return the visible messages, or only the last `last` of them."""
        if not self._session.id:
            return []
        return visible_messages(
            self._transaction, self._session, self._damage, last=last, after=None
        )

    def complete_undo_step(self, step: Undo) -> Undo:
        """Return the undo step with the long parts that the state omits. Raises DamagedStore."""
        return complete_undo_step(self._transaction, self._session, step)


def apply_operation(
    transaction: Transaction, namespace: str, key: str, decide: Decide[T], damage: DamageReports
) -> Decision[T]:
    """Call `decide` on a session, and store the change and the messages that `decide` returns.

    If the decision contains a change, a missing session is created.
    """
    while True:
        session = find_session(transaction, namespace, key, lock=True)
        if session is None:
            created = now()
            session = Session(
                0, created, 0, 0, states.blank_state(key, os.urandom(8).hex(), 1, created)
            )
        decision = decide(OpenSQLSession(transaction, session, damage))
        change, payloads = decision.change, decision.payloads
        if change is None:
            return decision
        if not session.id:
            session.id = create_session(transaction, namespace, session.state, 0, 0)
        if session.id:
            break
        # Another writer has just created the session: decide again.
    state = states.copy_state(session.state)
    states.apply_change(state, change)
    at = now()
    add_change(transaction, session, change)
    save_state(
        transaction,
        session,
        state,
        size=session.bytes + sum(map(len, payloads)),
        last_seq=session.last_seq + len(payloads),
        updated=at,
    )
    if payloads:
        first_seq = session.last_seq + 1
        transaction.add_messages(
            session.id, [(seq, at, payload) for seq, payload in enumerate(payloads, first_seq)]
        )
    return decision


def save_state(
    transaction: Transaction,
    session: Session,
    state: State,
    *,
    size: int,
    last_seq: int | None = None,
    updated: str | None = None,
) -> None:
    """Replace state, size and `updated` (default: now) of a session, and its last seq if given."""
    new_last_seq = session.last_seq if last_seq is None else last_seq
    encoded_state = transaction.json_parameter(encode(state))
    transaction.run("save_session", session.id, updated or now(), new_last_seq, size, encoded_state)


def add_change(transaction: Transaction, session: Session, change: Change) -> None:
    """Store a change record of a session."""
    encoded_change = transaction.json_parameter(encode(change))
    transaction.run("add_change", session.id, change.number, now(), encoded_change)


def complete_undo_step(transaction: Transaction, session: Session, step: Undo) -> Undo:
    """Return the complete undo step. Raises DamagedStore.

    An undo step that is too long for the state is read from its change record.
    """
    if not step.elsewhere:
        return step
    rows = transaction.run("find_change", session.id, step.number)
    return undo_step_from_changes(
        (to_bytes(encoded) for (encoded,) in rows), session.state.key, step
    )


def compact(transaction: Transaction, namespace: str, key: str) -> CompactionResult:
    """Mark the messages up to the floor as archived."""
    session = find_session(transaction, namespace, key, lock=True)
    if session is None:
        return CompactionResult(archived=0, bytes_before=0, bytes_after=0)
    state = states.copy_state(session.state)
    first, last = states.archived_upto(state) + 1, state.floor
    count = archived_bytes = 0
    if first <= last:
        [(count, _, _, archived_bytes)] = transaction.run("extent", session.id, first, last)
    bytes_after = session.bytes - archived_bytes
    if count:
        state.archive = Archive("", 1, last)
        state.generation += 1
        save_state(transaction, session, state, size=bytes_after, updated=session.updated)
    return CompactionResult(archived=count, bytes_before=session.bytes, bytes_after=bytes_after)
