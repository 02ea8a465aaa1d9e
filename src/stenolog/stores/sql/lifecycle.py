"""Lifecycle of sessions: fork, delete, restore and purge, and snapshots for copies.

See stores/snapshots.py for the protocols of snapshots.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress

from msgspec import Raw
from msgspec.structs import astuple, replace

from stenolog.errors import DamagedStore, NewerFormat, NoSuchSession, SessionExists
from stenolog.records import Archive, Message, PurgeResult, SessionInfo, Token, TrashedSession
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.admin import DeletedSession
from stenolog.stores.arguments import token_bytes, token_text
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.snapshots import (
    Snapshot,
    SnapshotMark,
    SnapshotReading,
    snapshot_of,
    state_of,
    token_of,
)
from stenolog.stores.sql.dialect import Row, Transaction, UniqueConflict
from stenolog.stores.sql.rows import (
    MAX_SEQ,
    Session,
    damage_error,
    deletion_time,
    encode,
    message_count,
    now,
    parse_time,
    readable_undo_steps,
)
from stenolog.stores.sql.session_rows import (
    add_change,
    complete_undo_step,
    create_session,
    decode_text,
    find_session,
    printable_text,
    save_state,
    session_from_row,
    session_state,
    uid_and_last_seq,
)
from stenolog.stores.sql.verification import examine_session


def fork(
    transaction: Transaction, namespace: str, key: str, new_key: str, *, at: int | None
) -> None:
    """Create a session from the visible messages of another session.

    Raises the errors of `Store.fork`.
    """
    source = require_session(transaction, namespace, key, lock=True)
    _check_key_is_free(transaction, namespace, new_key)
    new_fork = states.decide_fork(
        source.state, source.last_seq, new_key=new_key, at=at, uid=os.urandom(8).hex(), now=now()
    )
    size = sum(
        size_in_bytes
        for first, last in new_fork.copied
        for *_, size_in_bytes in transaction.run("extent", source.id, first, last)
    )
    session_id = create_session(transaction, namespace, new_fork.state, new_fork.next_seq - 1, size)
    if not session_id:
        raise SessionExists(new_key)
    for first, last in new_fork.copied:
        transaction.run("copy_messages", session_id, source.id, first, last)
    for change in states.changes_for_state(new_fork.state, []):
        add_change(transaction, Session(session_id, "", 0, 0, new_fork.state), change)


def require_session(
    transaction: Transaction, namespace: str, key: str, *, lock: bool = False
) -> Session:
    """Return the session with this key. Raises NoSuchSession."""
    session = find_session(transaction, namespace, key, lock=lock)
    if session is None:
        raise NoSuchSession(key)
    return session


def _check_key_is_free(transaction: Transaction, namespace: str, key: str) -> None:
    if uid_and_last_seq(transaction, namespace, key) is not None:
        raise SessionExists(key)


# --- trash -----------------------------------------------------------------------------------


def delete(transaction: Transaction, namespace: str, key: str) -> TrashedSession:
    """Mark a session as deleted. Raises NoSuchSession."""
    session = require_session(transaction, namespace, key, lock=True)
    return _mark_deleted(transaction, namespace, key, session)


def delete_unchanged(
    transaction: Transaction, namespace: str, key: str, info: SessionInfo
) -> TrashedSession | None:
    """Mark a session as deleted; return None if it changed since `info`. Raises NoSuchSession."""
    session = require_session(transaction, namespace, key, lock=True)
    version = session.state.uid, session.last_seq, session.state.number
    if version != (info.uid, info.last_seq, info.change):
        return None
    return _mark_deleted(transaction, namespace, key, session)


def _mark_deleted(
    transaction: Transaction, namespace: str, key: str, session: Session
) -> TrashedSession:
    rows = transaction.run("deletion_times", namespace, transaction.key_parameter(key))
    deleted_at = deletion_time(printable_text(deleted) for (deleted,) in rows)
    transaction.run("delete_session", session.id, deleted_at)
    count = message_count(session.state, session.last_seq)
    return TrashedSession(
        key=key, uid=session.state.uid, deleted=parse_time(deleted_at), count=count
    )


def restore(
    transaction: Transaction, namespace: str, key: str, *, uid: str | None, as_key: str
) -> None:
    """Restore a deleted session. Raises NoSuchSession, SessionExists."""
    transaction.check_format()
    for session_id, stored_uid in transaction.run(
        "find_deleted", namespace, transaction.key_parameter(key)
    ):
        if uid in (None, printable_text(stored_uid)):
            _check_key_is_free(transaction, namespace, as_key)
            try:
                transaction.run("restore_session", session_id, transaction.key_parameter(as_key))
            except UniqueConflict:
                raise SessionExists(as_key) from None
            return
    raise NoSuchSession(key, "the trash has no such session")


def list_trash(
    transaction: Transaction, namespace: str, damage: DamageReports | None = None
) -> list[TrashedSession]:
    """Return the deleted sessions, the last deleted first. Report and skip damaged rows."""
    trashed = []
    for raw_key, raw_uid, deleted, last_seq, encoded, session_id in transaction.run(
        "list_deleted", namespace
    ):
        try:
            key, uid = decode_text(raw_key), decode_text(raw_uid)
            state = session_state(transaction, session_id, key, uid=uid, encoded=encoded)
            count = message_count(state, last_seq)
            trashed.append(
                TrashedSession(key=key, uid=uid, deleted=parse_time(deleted), count=count)
            )
        except (ValueError, TypeError):
            if damage is not None:
                damage.report_once(f"the deleted session with the key {raw_key!r}")
    return trashed


# --- purge -----------------------------------------------------------------------------------


def purge_all(transaction: Transaction, namespace: str, key: str) -> PurgeResult | None:
    """Remove all sessions of a key and the key's lease; return None if no session has the key."""
    rows = transaction.run("sessions_of_key", namespace, transaction.key_parameter(key))
    if not rows:
        return None
    import_notes = _describe_import_sources(transaction, namespace, key)
    return _remove_sessions(transaction, namespace, key, rows, import_notes)


def _describe_import_sources(transaction: Transaction, namespace: str, key: str) -> tuple[str, ...]:
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
) -> PurgeResult | None:
    """Remove the deleted sessions in `expected`, all of this key.

    Return None and remove nothing if `expected` is empty or has a session that is not in the trash.
    """
    # Lock the sessions first, so that they stay in the trash until the transaction ends.
    rows = transaction.run("find_deleted", namespace, transaction.key_parameter(key))
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
) -> PurgeResult:
    session_ids = [session_id for session_id, _ in rows]
    ranges = [_message_range(transaction, session_id, MAX_SEQ) for session_id in session_ids]
    with transaction.erase_on_delete():
        for session_id in session_ids:
            transaction.run("remove_messages", session_id, MAX_SEQ)
            transaction.run("remove_tokens", session_id, MAX_SEQ)
            transaction.run("remove_changes", session_id)
            transaction.run("remove_session", session_id)
        if not transaction.run("find_current", namespace, transaction.key_parameter(key)):
            transaction.run("end_lease_of", namespace, transaction.key_parameter(key))
    not_reached = states.describe_remaining(key, forks=_find_fork_keys(transaction, namespace, key))
    return PurgeResult(
        messages=sum(count for count, *_ in ranges),
        first=min((first for count, first, _ in ranges if count), default=0),
        last=max(last for _, _, last in ranges),
        not_reached=not_reached + import_notes,
    )


def purge_before(
    transaction: Transaction, namespace: str, key: str, *, before: int
) -> PurgeResult | None:
    """Remove the messages with seqs below `before`, and the undo steps that `decide_purge` drops.

    Return None if the session does not exist.
    """
    session = find_session(transaction, namespace, key, lock=True)
    if session is None:
        return None
    not_reached = states.describe_remaining(
        key,
        forks=_find_fork_keys(transaction, namespace, key),
        summary=session.state.summary,
        trashed=len(transaction.run("deletion_times", namespace, transaction.key_parameter(key))),
    )
    import_notes = states.import_sources(session.state.meta)
    last_purged_seq = min(before - 1, session.last_seq)
    count, first, last = _message_range(transaction, session.id, max(last_purged_seq, 0))
    steps = readable_undo_steps(
        session.state, lambda step: complete_undo_step(transaction, session, step)
    )
    steps_by_number = {step.number: step for step in steps}
    readable_state = replace(
        session.state, undo=[step for step in session.state.undo if step.number in steps_by_number]
    )
    state = states.decide_purge(
        readable_state, session.last_seq, before, lambda step: steps_by_number[step.number]
    )
    if count or state != session.state:
        with transaction.erase_on_delete():
            transaction.run("remove_messages", session.id, last_purged_seq)
            transaction.run("remove_tokens", session.id, last_purged_seq)
            # Summaries in older changes may describe removed messages: keep only what undo needs.
            transaction.run("remove_changes", session.id)
            for change in states.changes_for_state(
                state, [steps_by_number[step.number] for step in state.undo]
            ):
                add_change(transaction, session, change)
            state.generation += 1
            if spans.contains(state.purged, states.archived_upto(state)):
                state.archive = None
            first_unarchived_seq = states.archived_upto(state) + 1
            [(*_, size)] = transaction.run("extent", session.id, first_unarchived_seq, MAX_SEQ)
            save_state(transaction, session, state, size=size)
    return PurgeResult(
        messages=count, first=first, last=last, not_reached=not_reached + import_notes
    )


def _message_range(transaction: Transaction, session_id: int, upto: int) -> tuple[int, int, int]:
    """Return the number of messages with seqs up to `upto`, and their first and last seq."""
    [(count, first, last, _)] = transaction.run("extent", session_id, 1, upto)
    return count, first, last


def _find_fork_keys(transaction: Transaction, namespace: str, key: str) -> list[str]:
    rows = transaction.run("forks", namespace, transaction.key_parameter(key))
    return [fork_key.decode(errors="replace") for (fork_key,) in rows]


# --- snapshots -------------------------------------------------------------------------------


class _SnapshotRow(Session):
    """A session with all columns of its row."""

    encoded_state: str | bytes | None
    namespace: str
    deleted: str | None


def list_snapshots(transaction: Transaction, namespace: str) -> list[SnapshotMark]:
    """Return the SnapshotMark of every session in a namespace, deleted sessions first."""
    marks = []
    for key, uid, deleted, *_ in transaction.run("list_snapshots", namespace):
        mark = SnapshotMark(key=printable_text(key), uid="")
        # If a text in the row is damaged, the uid stays empty.
        with suppress(UnicodeDecodeError):
            deleted_at = None if deleted is None else decode_text(deleted)
            mark = replace(mark, key=decode_text(key), uid=decode_text(uid), deleted=deleted_at)
        marks.append(mark)
    return marks


def read_snapshot(
    transaction: Transaction, namespace: str, mark: SnapshotMark, *, after: int = 0
) -> SnapshotReading:
    """Read one session. The result is valid until the transaction ends. Raises NoSuchSession."""
    session = _find_by_uid(transaction, namespace, mark)
    if session is None or session.namespace != namespace:
        raise NoSuchSession(mark.key, "it was purged")
    tokens_by_seq = {
        first: (token_text(token), count)
        for token, first, count in transaction.run("tokens", session.id)
    }
    tokens_without_message = [
        Token(token_text(token), first, count, "")
        for token, first, count in transaction.run("missing_tokens", session.id)
    ]
    state = session.state
    row = session.id, state.key, session.last_seq, session.encoded_state
    return SnapshotReading(
        snapshot=snapshot_of(
            state,
            last_seq=session.last_seq,
            updated=session.updated,
            undo=readable_undo_steps(
                state, lambda step: complete_undo_step(transaction, session, step)
            ),
            deleted=session.deleted,
            tokens=tokens_without_message,
        ),
        messages=_read_snapshot_messages(transaction, session, tokens_by_seq, after),
        is_damaged=lambda: any(examine_session(transaction, *row)),
    )


def _find_by_uid(
    transaction: Transaction, namespace: str, mark: SnapshotMark
) -> _SnapshotRow | None:
    """Return the session with the uid of `mark`. Raises DamagedStore.

    In SQLite, where a uid is unique in the file, the session may be in another namespace.
    """
    try:
        for row in transaction.run("find_uid", namespace, mark.uid):
            key = decode_text(row[1])
            session = session_from_row(transaction, row, key=key, uid=mark.uid)
            return _SnapshotRow(*astuple(session), *row[7:8], *row[9:])
    except (UnicodeDecodeError, TypeError) as error:
        raise damage_error(mark.key, error) from error
    if not mark.uid:
        raise damage_error(mark.key, ValueError("its row is damaged"))
    return None


def _read_snapshot_messages(
    transaction: Transaction,
    session: Session,
    tokens_by_seq: dict[int, tuple[str, int]],
    after: int,
) -> Iterator[Message]:
    missing_seqs = states.missing_seqs(session.state)
    for seq, at, body in transaction.intact_messages(session.id, after + 1, session.last_seq):
        if missing_seqs and spans.contains(missing_seqs, seq):
            continue
        once, count = tokens_by_seq.get(seq, (None, 1))
        batch_position = (1, count) if count > 1 else None
        yield Message(seq, at, Raw(body), _part=batch_position, _once=once)


class SQLSnapshotWriter:
    """Writer of complete sessions in one transaction."""

    def __init__(self, transaction: Transaction, namespace: str) -> None:
        self._transaction = transaction
        self._namespace = namespace

    def write(self, snapshot: Snapshot, messages: Iterable[Message]) -> None:
        """Write a session as `SnapshotWriter.write` describes. Raises SessionExists."""
        try:
            with self._transaction.savepoint():
                self._write(snapshot, messages)
        except UniqueConflict:
            raise SessionExists(snapshot.key) from None

    def _write(self, snapshot: Snapshot, messages: Iterable[Message]) -> None:
        transaction, fork_of = self._transaction, snapshot.forked_from
        if transaction.run("find_uid", self._namespace, snapshot.uid):
            raise SessionExists(snapshot.key, f"another session has its uid, {snapshot.uid}")
        if snapshot.deleted is None:
            _check_key_is_free(transaction, self._namespace, snapshot.key)
        rows = transaction.run(
            "add_snapshot",
            self._namespace,
            transaction.key_parameter(snapshot.key),
            snapshot.uid,
            snapshot.created,
            snapshot.updated,
            snapshot.last_seq,
            snapshot.deleted,
            None if fork_of is None else transaction.key_parameter(fork_of),
            transaction.table_version,
        )
        if not rows:
            transaction.check_format()
        [(session_id,)] = rows
        self._put_messages(session_id, messages)
        self._put_state(session_id, snapshot)

    def _put_messages(self, session_id: int, messages: Iterable[Message]) -> None:
        token_rows: list[tuple[int, bytes, int, int]] = []

        def message_rows() -> Iterator[tuple[int, str, bytes]]:
            for message in messages:
                if message._once is not None and (token := token_of(message)) is not None:
                    token_rows.append((session_id, token_bytes(token[0]), message.seq, token[1]))
                yield message.seq, message._at, message.to_json()

        self._transaction.add_messages(session_id, message_rows())
        self._transaction.run_many("put_token", token_rows)

    def _put_state(self, session_id: int, snapshot: Snapshot) -> None:
        transaction = self._transaction
        state, _ = state_of(snapshot)
        if snapshot.archived:
            state.archive = Archive("", 1, snapshot.archived)
        session = Session(session_id, snapshot.updated, snapshot.last_seq, 0, state)
        for change in states.changes_for_state(state, snapshot.undo):
            add_change(transaction, session, change)
        token_rows = [
            (session_id, token_bytes(token.token), token.first, token.count)
            for token in snapshot.tokens
        ]
        transaction.run_many("put_token", token_rows)
        [(*_, size)] = transaction.run("extent", session_id, snapshot.archived + 1, MAX_SEQ)
        transaction.run("set_state", session_id, size, transaction.json_parameter(encode(state)))
