"""Lifecycle of sessions: fork, delete, restore and purge."""

import os
from collections.abc import Collection, Sequence

from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import DamagedStore, NewerFormat, NoSuchSession, SessionExists
from stenolog.records import Trashed
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.base import DeletedSession
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.sql.changes import add_change, complete_undo_step, save_state
from stenolog.stores.sql.dialect import Row, Transaction, UniqueConflict
from stenolog.stores.sql.rows import (
    MAX_SEQ,
    Session,
    deletion_time,
    message_count,
    now,
    parse_time,
    readable_undo_steps,
)
from stenolog.stores.sql.session_rows import (
    create_session,
    decode_text,
    find_current,
    find_session,
    printable_text,
    session_state,
)


def copy_marker(uid: str) -> str:
    """Return the name of the marker with the version that a session had right after its copy."""
    return f"copied:{uid}"


def fork(
    transaction: Transaction, namespace: str, key: str, new_key: str, *, at: int | None
) -> None:
    """Create a session from the visible messages of another session.

    Raises the errors of `Store.fork`.
    """
    source = require_session(transaction, namespace, key, lock=True)
    _check_key_is_free(transaction, namespace, new_key)
    forked = states.decide_fork(
        source.state, source.last_seq, new_key=new_key, at=at, uid=os.urandom(8).hex(), now=now()
    )
    size = sum(
        size_in_bytes
        for first, last in forked.copied
        for *_, size_in_bytes in transaction.run("extent", source.id, first, last)
    )
    number = create_session(transaction, namespace, forked.state, forked.next_seq - 1, size)
    if not number:
        raise SessionExists(new_key)
    for first, last in forked.copied:
        transaction.run("copy_messages", number, source.id, first, last)
    for change in states.changes_for_state(forked.state, []):
        add_change(transaction, Session(number, "", 0, 0, forked.state), change)


def require_session(
    transaction: Transaction, namespace: str, key: str, *, lock: bool = False
) -> Session:
    """Return the session with this key. Raises NoSuchSession."""
    session = find_session(transaction, namespace, key, lock=lock)
    if session is None:
        raise NoSuchSession(key)
    return session


def _check_key_is_free(transaction: Transaction, namespace: str, key: str) -> None:
    if find_current(transaction, namespace, key) is not None:
        raise SessionExists(key)


# --- trash -----------------------------------------------------------------------------------


def delete(transaction: Transaction, namespace: str, key: str) -> Trashed:
    """Mark a session as deleted. Raises NoSuchSession."""
    session = require_session(transaction, namespace, key, lock=True)
    rows = transaction.run("deletion_times", namespace, transaction.key(key))
    at = deletion_time([deleted for (deleted,) in rows])
    transaction.run("delete_session", session.id, at)
    messages = message_count(session.state, session.last_seq)
    return Trashed(key=key, uid=session.state.uid, deleted=parse_time(at), count=messages)


def restore(
    transaction: Transaction, namespace: str, key: str, *, uid: str | None, as_key: str
) -> None:
    """Restore a deleted session. Raises NoSuchSession, SessionExists."""
    transaction.check_format()
    for session, stored_uid in transaction.run("find_deleted", namespace, transaction.key(key)):
        if uid in (None, printable_text(stored_uid)):
            _check_key_is_free(transaction, namespace, as_key)
            try:
                transaction.run("restore_session", session, transaction.key(as_key))
            except UniqueConflict:
                raise SessionExists(as_key) from None
            return
    raise NoSuchSession(key, "the trash has no such session")


def list_trash(
    transaction: Transaction, namespace: str, damage: DamageReports | None = None
) -> list[Trashed]:
    """Return the deleted sessions, the most recent first. Report and skip damaged rows."""
    trashed = []
    for raw_key, raw_uid, deleted, last_seq, body, number in transaction.run(
        "list_deleted", namespace
    ):
        try:
            key, uid = decode_text(raw_key), decode_text(raw_uid)
            state = session_state(transaction, number, key, uid=uid, body=body)
            messages = message_count(state, last_seq)
            trashed.append(Trashed(key=key, uid=uid, deleted=parse_time(deleted), count=messages))
        except (ValueError, TypeError):
            if damage is not None:
                damage.report_once(f"the deleted session with the key {raw_key!r}")
    return trashed


# --- purge -----------------------------------------------------------------------------------


class RemovedMessages(Struct, frozen=True):
    """Result of a purge."""

    messages: int
    first: int
    last: int
    not_reached: tuple[str, ...]
    """Sentences about other places that may still contain purged messages."""


def purge_all(transaction: Transaction, namespace: str, key: str) -> RemovedMessages | None:
    """Remove all sessions of a key and the key's lease; return None if no session has the key."""
    rows = transaction.run("sessions_of_key", namespace, transaction.key(key))
    if not rows:
        return None
    import_notes = _imported_from(transaction, namespace, key)
    return _remove_sessions(transaction, namespace, key, rows, import_notes)


def _imported_from(transaction: Transaction, namespace: str, key: str) -> tuple[str, ...]:
    """Return a sentence about each file that the session was imported from.

    The result is empty if the session is damaged.
    """
    try:
        session = find_session(transaction, namespace, key)
    except NewerFormat:
        raise
    except DamagedStore:
        return ()
    return () if session is None else states.import_sources(session.state.meta)


def purge_trash(
    transaction: Transaction, namespace: str, key: str, expected: Collection[DeletedSession]
) -> RemovedMessages | None:
    """Remove these deleted sessions of a key; return None if one of them is not in the trash."""
    # Lock the sessions first, so that they stay in the trash until the transaction ends.
    rows = transaction.run("find_deleted", namespace, transaction.key(key))
    trashed = list_trash(transaction, namespace)
    deleted_sessions = {(session.uid, session.deleted) for session in trashed if session.key == key}
    if not expected or not deleted_sessions.issuperset(expected):
        return None
    uids = {uid for uid, _ in expected}
    rows = [row for row in rows if printable_text(row[1]) in uids]
    return _remove_sessions(transaction, namespace, key, rows, ())


def _remove_sessions(
    transaction: Transaction,
    namespace: str,
    key: str,
    rows: Sequence[Row],
    import_notes: tuple[str, ...],
) -> RemovedMessages:
    numbers = [number for number, _ in rows]
    extents = [_message_range(transaction, number, MAX_SEQ) for number in numbers]
    with transaction.erasing():
        for number, uid in rows:
            transaction.run("remove_mark", namespace, copy_marker(printable_text(uid)))
            transaction.run("remove_messages", number, MAX_SEQ)
            transaction.run("remove_tokens", number, MAX_SEQ)
            transaction.run("remove_changes", number)
            transaction.run("remove_session", number)
        if not transaction.run("find_current", namespace, transaction.key(key)):
            transaction.run("end_lease_of", namespace, transaction.key(key))
    not_reached = states.describe_remaining(key, forks=_fork_keys(transaction, namespace, key))
    return RemovedMessages(
        sum(messages for messages, *_ in extents),
        min((first for messages, first, _ in extents if messages), default=0),
        max(last for _, _, last in extents),
        not_reached + import_notes,
    )


def purge_before(
    transaction: Transaction, namespace: str, key: str, *, before: int
) -> RemovedMessages | None:
    """Remove the messages with seqs below `before`, and their undo steps.

    Return None if the session does not exist.
    """
    session = find_session(transaction, namespace, key, lock=True)
    if session is None:
        return None
    not_reached = states.describe_remaining(
        key,
        forks=_fork_keys(transaction, namespace, key),
        summary=session.state.summary,
        trashed=len(transaction.run("deletion_times", namespace, transaction.key(key))),
    )
    import_notes = states.import_sources(session.state.meta)
    upto = min(before - 1, session.last_seq)
    messages, first, last = _message_range(transaction, session.id, max(upto, 0))
    steps = readable_undo_steps(
        session.state, lambda entry: complete_undo_step(transaction, session, entry)
    )
    by_number = {entry.number: entry for entry in steps}
    readable = replace(session.state, undo=[e for e in session.state.undo if e.number in by_number])
    state = states.decide_purge(
        readable, session.last_seq, before, lambda entry: by_number[entry.number]
    )
    if messages or state != session.state:
        with transaction.erasing():
            transaction.run("remove_messages", session.id, upto)
            transaction.run("remove_tokens", session.id, upto)
            # Summaries in older changes may describe removed messages: keep only what undo needs.
            transaction.run("remove_changes", session.id)
            for change in states.changes_for_state(
                state, [by_number[entry.number] for entry in state.undo]
            ):
                add_change(transaction, session, change)
            state.generation += 1
            if spans.contains(state.purged, states.archived_upto(state)):
                state.archive = None
            first_live = states.archived_upto(state) + 1
            [(*_, size)] = transaction.run("extent", session.id, first_live, MAX_SEQ)
            save_state(transaction, session, state, size=size)
    return RemovedMessages(messages, first, last, not_reached + import_notes)


def _message_range(transaction: Transaction, session: int, upto: int) -> tuple[int, int, int]:
    """Return the number of messages up to a seq, the first seq and the last seq."""
    [(messages, first, last, _)] = transaction.run("extent", session, 1, upto)
    return messages, first, last


def _fork_keys(transaction: Transaction, namespace: str, key: str) -> list[str]:
    rows = transaction.run("forks", namespace, transaction.key(key))
    return [name.decode(errors="replace") for (name,) in rows]
