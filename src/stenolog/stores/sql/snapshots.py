"""Snapshots in a database: reading and writing complete sessions for copies between stores.

See stores/snapshots.py for the protocols.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress

from msgspec import Raw
from msgspec.structs import astuple, replace

from stenolog.errors import NoSuchSession, SessionExists, StoreBusy
from stenolog.records import Archive, Message, Token
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.arguments import token_bytes, token_text
from stenolog.stores.snapshots import (
    Snapshot,
    SnapshotMark,
    SnapshotReading,
    snapshot_of,
    state_of,
    token_of,
)
from stenolog.stores.sql.changes import add_change, complete_undo_step
from stenolog.stores.sql.dialect import Transaction, UniqueConflict
from stenolog.stores.sql.lifecycle import copy_marker
from stenolog.stores.sql.rows import MAX_SEQ, Session, damaged_session, encode, readable_undo_steps
from stenolog.stores.sql.session_rows import decode_text, printable_text, session_from_row


class _SnapshotRow(Session):
    """A session, with the columns of its row that `Session` lacks."""

    namespace: str
    version: int
    deleted: str | None
    stamp: str


def list_snapshots(transaction: Transaction, namespace: str) -> list[SnapshotMark]:
    """Return the SnapshotMark of every session in a namespace, deleted sessions first."""
    marks = []
    for key, uid, deleted, stamp, last_seq, *_ in transaction.run("list_snapshots", namespace):
        mark = SnapshotMark(
            key=printable_text(key), uid="", stamp=printable_text(stamp), last_seq=last_seq
        )
        # If a text of the row is damaged, the uid stays empty.
        with suppress(UnicodeDecodeError):
            time = None if deleted is None else decode_text(deleted)
            mark = replace(mark, key=decode_text(key), uid=decode_text(uid), deleted=time)
        marks.append(mark)
    return marks


def read_snapshot(
    transaction: Transaction,
    namespace: str,
    mark: SnapshotMark,
    *,
    after: int = 0,
    lock: bool = False,
) -> SnapshotReading:
    """Read one session. The result is valid until the transaction ends. Raises NoSuchSession.

    `lock`: prevent other writers from changing the session until the transaction ends.
    """
    session = _find_session(transaction, namespace, mark, lock=lock)
    if session is None or session.namespace != namespace:
        raise NoSuchSession(mark.key, "it was purged")
    tokens_by_seq = {
        first: (token_text(token), count)
        for token, first, count in transaction.run("tokens", session.id)
    }
    stray_tokens = [
        Token(token_text(token), first, count, "")
        for token, first, count in transaction.run("missing_tokens", session.id)
    ]
    state = session.state
    marker_versions = transaction.run("find_mark", namespace, copy_marker(state.uid))
    return SnapshotReading(
        snapshot=snapshot_of(
            state,
            last_seq=session.last_seq,
            updated=session.updated,
            undo=readable_undo_steps(
                state, lambda entry: complete_undo_step(transaction, session, entry)
            ),
            deleted=session.deleted,
            tokens=stray_tokens,
        ),
        messages=_snapshot_messages(transaction, session, tokens_by_seq, after),
        stamp=session.stamp,
        untouched=[version for (version,) in marker_versions] == [session.version],
    )


def _find_session(
    transaction: Transaction, namespace: str, mark: SnapshotMark, *, lock: bool = False
) -> _SnapshotRow | None:
    """Return the session with this uid, possibly from another namespace. Raises DamagedStore."""
    try:
        for row in transaction.run("lock_uid" if lock else "find_uid", namespace, mark.uid):
            key = decode_text(row[1])
            session = session_from_row(transaction, row, key=key, uid=mark.uid)
            return _SnapshotRow(*astuple(session), *row[9:])
    except (UnicodeDecodeError, TypeError) as error:
        raise damaged_session(mark.key, error) from error
    if not mark.uid:
        raise damaged_session(mark.key, ValueError("its row is damaged"))
    return None


def _snapshot_messages(
    transaction: Transaction,
    session: Session,
    tokens_by_seq: dict[int, tuple[str, int]],
    after: int,
) -> Iterator[Message]:
    missing = states.missing_seqs(session.state)
    for seq, at, body in transaction.intact_messages(session.id, after + 1, session.last_seq):
        if missing and spans.contains(missing, seq):
            continue
        once, count = tokens_by_seq.get(seq, (None, 1))
        part = (1, count) if count > 1 else None
        yield Message(seq, at, Raw(body), _part=part, _once=once)


class SQLSnapshotWriter:
    """Writer of complete sessions in one transaction."""

    def __init__(self, transaction: Transaction, namespace: str) -> None:
        self._transaction = transaction
        self._namespace = namespace

    def write(
        self, snapshot: Snapshot, messages: Iterable[Message], *, instead_of: str = ""
    ) -> None:
        """Write a session as `SnapshotWriter.write` describes. Raises SessionExists, StoreBusy."""
        try:
            with self._transaction.savepoint():
                self._write(snapshot, messages, instead_of)
        except UniqueConflict:
            raise SessionExists(snapshot.key) from None

    def _write(self, snapshot: Snapshot, messages: Iterable[Message], instead_of: str) -> None:
        transaction, run = self._transaction, self._transaction.run
        mark = SnapshotMark(key=snapshot.key, uid=snapshot.uid, stamp="")
        replaced = _find_session(transaction, self._namespace, mark, lock=True)
        self._check(snapshot, replaced, instead_of)
        key, fork_of = transaction.key(snapshot.key), snapshot.forked_from
        origin = None if fork_of is None else transaction.key(fork_of)
        columns = snapshot.created, snapshot.updated, snapshot.last_seq, snapshot.deleted, origin
        if replaced is None:
            rows = run(
                "add_snapshot", self._namespace, key, snapshot.uid, *columns, transaction.format
            )
            if not rows:
                transaction.check_format()
            [(number,)] = rows
        else:
            number = replaced.id
            run("set_snapshot", number, key, *columns)
            run("remove_messages", number, MAX_SEQ)
            run("remove_tokens", number, MAX_SEQ)
            run("remove_changes", number)
        self._put_messages(number, messages)
        self._put_state(number, snapshot, replaced)
        run("put_mark", number, copy_marker(snapshot.uid))

    def _check(self, snapshot: Snapshot, replaced: _SnapshotRow | None, instead_of: str) -> None:
        """Raise SessionExists or StoreBusy if the session cannot be written."""
        if replaced is None and instead_of:
            raise StoreBusy(f"{snapshot.key!r}: it was removed meanwhile; try again")
        if replaced is not None and (not instead_of or replaced.namespace != self._namespace):
            raise SessionExists(snapshot.key, f"another session has its uid, {snapshot.uid}")
        if replaced is not None and replaced.stamp != instead_of:
            raise StoreBusy(f"{snapshot.key!r}: it has changed; try again")
        if snapshot.deleted is None:
            key = self._transaction.key(snapshot.key)
            rows = self._transaction.run("find_current", self._namespace, key)
            if any(uid != snapshot.uid for uid, *_ in rows):
                raise SessionExists(snapshot.key)

    def _put_messages(self, number: int, messages: Iterable[Message]) -> None:
        tokens: list[tuple[int, bytes, int, int]] = []

        def rows() -> Iterator[tuple[int, str, bytes]]:
            for message in messages:
                if message._once is not None and (token := token_of(message)) is not None:
                    tokens.append((number, token_bytes(token[0]), message.seq, token[1]))
                yield message.seq, message._at, message.to_json()

        self._transaction.add_messages(number, rows())
        self._transaction.run_many("put_token", tokens)

    def _put_state(self, number: int, snapshot: Snapshot, replaced: _SnapshotRow | None) -> None:
        transaction = self._transaction
        generation = 1 if replaced is None else replaced.state.generation + 1
        state, _ = state_of(snapshot, generation=generation)
        if snapshot.archived:
            state.archive = Archive("", 1, snapshot.archived)
        session = Session(number, snapshot.updated, snapshot.last_seq, 0, state)
        for change in states.changes_for_state(state, snapshot.undo):
            add_change(transaction, session, change)
        tokens = [
            (number, token_bytes(token.token), token.first, token.count)
            for token in snapshot.tokens
        ]
        transaction.run_many("put_token", tokens)
        [(*_, size)] = transaction.run("extent", number, snapshot.archived + 1, MAX_SEQ)
        transaction.run("set_state", number, size, transaction.body(encode(state)))
