"""Lives of sessions as they are carried to another store and back: rows ↔ stores/whole.py."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from stenolog.errors import NoSuchSession, SessionExists, StoreBusy
from stenolog.records import Archive, Message, Token
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.batches import token_bytes, token_text
from stenolog.stores.postgres.appending import check_format
from stenolog.stores.postgres.changes import add_change, looked_up
from stenolog.stores.postgres.rows import Clash, copied_mark
from stenolog.stores.postgres.schema import check_version, newest
from stenolog.stores.rows import NO_END, Session, decode_state, encode
from stenolog.stores.whole import Life, LifeMark, Reading, life_of, state_of, token_of

if TYPE_CHECKING:
    from stenolog.stores.postgres.connections import Transaction

_PAGE: Final = 2_000
"""So many messages are fetched at once: a session need not fit in memory."""


class _Found(Session):
    """A session, with what else its row says."""

    version: int
    deleted: str | None
    written: str


def lives(transaction: "Transaction", namespace: str) -> list[LifeMark]:
    """Every life in a namespace, the deleted ones first."""
    found = transaction.run("list_lives", namespace)
    return [
        LifeMark(
            key=key.decode(),
            uid=uid,
            deleted=deleted,
            stamp=f"{uid}:{written}:{version}",
            last_seq=last_seq,
        )
        for key, uid, deleted, written, version, last_seq in found
    ]


def read(
    transaction: "Transaction", namespace: str, mark: LifeMark, *, after: int, lock: bool = False
) -> Reading:
    """A look at one life, for as long as the transaction lasts. Raises NoSuchSession.

    `lock`: nobody else changes it meanwhile.
    """
    session = _find(transaction, namespace, mark.uid, lock=lock)
    if session is None or not _is_at(session, mark):
        raise NoSuchSession(mark.key, "it was deleted, restored or purged")
    begun = {
        first: (token_text(token), count)
        for token, first, count in transaction.run("tokens", session.id)
    }
    strays = [
        Token(token_text(token), first, count, "")
        for token, first, count in transaction.run("missing_tokens", session.id)
    ]
    state = session.state
    return Reading(
        life=life_of(
            state,
            last_seq=session.last_seq,
            updated=session.updated,
            undo=[looked_up(transaction, session, entry) for entry in state.undo],
            deleted=session.deleted,
            tokens=strays,
        ),
        messages=_messages(transaction, session, begun, after),
        stamp=_stamp(session),
        untouched=_is_untouched(transaction, namespace, session),
    )


def _find(
    transaction: "Transaction", namespace: str, uid: str, *, lock: bool = False
) -> _Found | None:
    for row in transaction.run("lock_uid" if lock else "find_uid", namespace, uid):
        number, raw_key, created, updated, last_seq, size, fork_of, deleted = row[:8]
        version, body, tables, written = row[8:]
        check_version(tables)
        state = decode_state(body.encode(), raw_key.decode())
        state.uid, state.created = uid, created
        state.forked_from = None if fork_of is None else fork_of.decode()
        return _Found(number, updated, last_seq, size, state, version, deleted, written)
    return None


def _is_at(session: _Found, mark: LifeMark) -> bool:
    return (session.state.key, session.deleted is None) == (mark.key, mark.deleted is None)


def _stamp(session: _Found) -> str:
    return f"{session.state.uid}:{session.written}:{session.version}"


def _messages(
    transaction: "Transaction", session: Session, begun: dict[int, tuple[str, int]], after: int
) -> Iterator[Message]:
    gone = states.missing(session.state)
    for first in range(after + 1, session.last_seq + 1, _PAGE):
        last = min(first + _PAGE - 1, session.last_seq)
        for seq, at, body in transaction.run("messages", session.id, first, last):
            if gone and spans.contains(gone, seq):
                continue
            once, count = begun.get(seq, (None, 1))
            part = (1, count) if count > 1 else None
            yield Message(seq, at, Raw(body.encode()), _part=part, _once=once)


def _is_untouched(transaction: "Transaction", namespace: str, session: _Found) -> bool:
    """Whether the version is the one that a copy left it in."""
    found = transaction.run("find_mark", namespace, copied_mark(session.state.uid))
    return [version for (version,) in found] == [session.version]


class Writer:
    """Puts lives into a database, in one transaction."""

    def __init__(self, transaction: "Transaction", namespace: str) -> None:
        self._transaction = transaction
        self._namespace = namespace

    def write(
        self, life: Life, messages: Iterable[Message], *, after: int = 0, instead_of: str = ""
    ) -> None:
        """Make this life stand exactly so. Raises SessionExists, StoreBusy."""
        try:
            with self._transaction.connection.transaction():
                self._write(life, messages, after, instead_of)
        except Clash:
            raise SessionExists(life.key) from None

    def _write(self, life: Life, messages: Iterable[Message], after: int, instead_of: str) -> None:
        run = self._transaction.run
        old = _find(self._transaction, self._namespace, life.uid, lock=True)
        self._check(life, old, instead_of)
        key, fork_of = life.key.encode(), life.forked_from
        origin = None if fork_of is None else fork_of.encode()
        said = life.created, life.updated, life.last_seq, life.deleted, origin
        if old is None:
            added = run("add_life", self._namespace, key, life.uid, *said, newest())
            if not added:
                check_format(self._transaction)
            [(number,)] = added
        else:
            number = old.id
            run("set_life", number, key, *said)
            if old.last_seq > after:
                run("remove_messages_past", number, after)
                run("remove_tokens_past", number, after)
            run("remove_changes", number)
        self._put_messages(number, messages)
        self._put_state(number, life, old)
        run("put_mark", number, copied_mark(life.uid))

    def _check(self, life: Life, old: _Found | None, instead_of: str) -> None:
        """Raise SessionExists, StoreBusy."""
        if old is None and instead_of:
            raise StoreBusy(f"{life.key!r}: it is gone; try again")
        if old is not None and not instead_of:
            raise SessionExists(life.key, f"there is a session with its uid, {life.uid}")
        if old is not None and _stamp(old) != instead_of:
            raise StoreBusy(f"{life.key!r}: it has changed; try again")

    def _put_messages(self, number: int, messages: Iterable[Message]) -> None:
        tokens: list[tuple[int, bytes, int, int]] = []

        def rows() -> Iterator[tuple[int, int, str, str]]:
            for message in messages:
                found = token_of(message)
                if found is not None:
                    tokens.append((number, token_bytes(found[0]), message.seq, found[1]))
                yield number, message.seq, message._at, message.to_json().decode()

        self._transaction.copy_in("copy_in", rows())
        if tokens:
            self._transaction.executemany(self._transaction.sql["put_token"], tokens)

    def _put_state(self, number: int, life: Life, old: _Found | None) -> None:
        run = self._transaction.run
        generation = 1 if old is None else old.state.generation + 1
        state, changes = state_of(life, generation=generation)
        if life.archived:
            state.archive = Archive("", 1, life.archived)
        session = Session(number, life.updated, life.last_seq, 0, state)
        for change in changes:
            add_change(self._transaction, session, change)
        for token in life.tokens:
            run("put_token", number, token_bytes(token.token), token.first, token.count)
        [(*_, size)] = run("extent", number, life.archived + 1, NO_END)
        run("set_state", number, size, encode(state).decode())
