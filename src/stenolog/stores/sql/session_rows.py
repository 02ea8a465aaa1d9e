"""Finds, creates and lists session rows, and reads messages; rows.py decodes the values."""

import operator
from collections.abc import Sequence

from stenolog.records import Message, Span, State
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.sql.dialect import Row, Transaction
from stenolog.stores.sql.rows import (
    MAX_SEQ,
    Session,
    damaged_session,
    encode,
    prefix_end,
    read_state,
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
    name = "lock_session" if lock else "find_session"
    try:
        for row in transaction.run(name, namespace, transaction.key(key)):
            return session_from_row(transaction, row, key=key, uid=row[1])
    except (UnicodeDecodeError, TypeError) as error:
        raise damaged_session(key, error) from error
    return None


def session_from_row(transaction: Transaction, row: Row, *, key: str, uid: str) -> Session:
    """Return the session of a row. Raises NewerFormat, UnicodeDecodeError, TypeError."""
    number, _, created, updated, last_seq, size, fork_of, body, version, *_ = row
    transaction.check_row_format(version)
    state = session_state(transaction, number, key, uid=uid, body=body)
    state.uid, state.created = uid, created
    state.forked_from = None if fork_of is None else decode_text(fork_of)
    return Session(number, updated, operator.index(last_seq), size, state)


def find_current(transaction: Transaction, namespace: str, key: str) -> tuple[str, int] | None:
    """Return uid and last seq of the session with this key, without reading its state.

    Raises NewerFormat.
    """
    for uid, last_seq, version in transaction.run("find_current", namespace, transaction.key(key)):
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
    for (session,) in transaction.run(
        "add_session",
        namespace,
        transaction.key(state.key),
        state.uid,
        state.created,
        last_seq,
        size,
        None if fork_of is None else transaction.key(fork_of),
        transaction.body(encode(state)),
        transaction.format,
    ):
        return int(session)
    transaction.check_format()
    return 0


def session_state(
    transaction: Transaction, session: int, key: str, *, uid: str, body: str | bytes | None
) -> State:
    """Return the state of a session; rebuild a damaged state from the changes."""
    return read_state(
        None if body is None else to_bytes(body),
        key,
        uid=uid,
        changes=lambda: recorded_changes(transaction, session),
    )


def recorded_changes(transaction: Transaction, session: int) -> list[tuple[int, bytes]]:
    """Return number and body of each change, in order of the numbers."""
    return [(number, to_bytes(body)) for number, body in transaction.run("changes", session)]


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
    end = prefix_end(prefix)
    rows = transaction.run(
        "list_keys",
        namespace,
        transaction.key(prefix),
        transaction.key(after or ""),
        None if end is None else transaction.key(end),
        MAX_SEQ if limit is None else min(limit, MAX_SEQ),
    )
    try:
        return [key.decode() for (key,) in rows]
    except UnicodeDecodeError:
        # A damaged key must not hide the other keys.
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


_WIDEN_FACTOR = 4


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
        missing: list[Span] = []
        if len(messages) != spans.size(selected_seqs):  # guard: sql-missing-row
            read_seqs = spans.union((message.seq, message.seq) for message in messages)
            missing = spans.minus(selected_seqs, read_seqs)
        if missing and damage is None:
            raise MissingRows
        if damage is not None:
            damage.record_read(session.state.uid, missing, messages)
        if not missing or last is None or count is None:
            return messages
        if len(messages) >= last or selected_seqs == seqs:
            return messages[-last:]
        # Damaged messages were skipped: read more messages to replace them.
        count *= _WIDEN_FACTOR
