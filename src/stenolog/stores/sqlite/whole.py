"""Lives of sessions as they are carried to another store and back: rows ↔ stores/whole.py."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Raw

from stenolog.errors import NoSuchSession, SessionExists, StoreBusy
from stenolog.records import Archive, Message, Token
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.batches import token_bytes, token_text
from stenolog.stores.rows import NO_END, Session, damaged, decode_state, encode
from stenolog.stores.sqlite.changes import add_change, looked_up
from stenolog.stores.sqlite.damage import checksum, legible
from stenolog.stores.sqlite.queries import SQL
from stenolog.stores.whole import Life, LifeMark, Reading, life_of, state_of, token_of

if TYPE_CHECKING:
    from stenolog.stores.sqlite.connections import Transaction


class _Found(Session):
    """A session, with what else its row says."""

    version: int
    deleted: str | None
    namespace: str


def lives(transaction: "Transaction", namespace: str) -> list[LifeMark]:
    """Every life in a namespace, the deleted ones first."""
    found = []
    every = chain.from_iterable(
        transaction.execute(SQL[name], (namespace,)) for name in ("deleted_lives", "living_lives")
    )
    for number, key, uid, deleted, updated, last_seq, version in every:
        try:
            texts = key.decode(), uid.decode(), None if deleted is None else deleted.decode()
        except UnicodeDecodeError:
            texts = key.decode(errors="backslashreplace"), "", None
        changed = updated.decode(errors="backslashreplace")
        stamp = _stamp(uid=texts[1], number=number, version=version, updated=changed)
        found.append(
            LifeMark(key=texts[0], uid=texts[1], deleted=texts[2], stamp=stamp, last_seq=last_seq)
        )
    return found


def read(transaction: "Transaction", namespace: str, mark: LifeMark, *, after: int) -> Reading:
    """A look at one life, for as long as the transaction lasts. Raises NoSuchSession."""
    session = _find(transaction, mark)
    if session is None or session.namespace != namespace:
        raise NoSuchSession(mark.key, "it was purged")
    begun = {
        first: (token_text(token), count)
        for token, first, count in transaction.execute(SQL["tokens"], (session.id,))
    }
    state = session.state
    strays = [
        Token(token_text(token), first, count, "")
        for token, first, count in transaction.execute(SQL["missing_tokens"], (session.id,))
    ]
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
        stamp=_stamp_of(session),
        untouched=_is_untouched(transaction, session),
    )


def _find(transaction: "Transaction", mark: LifeMark) -> _Found | None:
    try:
        for row in transaction.execute(SQL["find_uid"], (mark.uid,)):
            number, key, created, updated, last_seq, size, fork_of, deleted, version, room, body = (
                row
            )
            state = decode_state(body, key)
            state.uid, state.created, state.forked_from = mark.uid, created, fork_of
            return _Found(number, updated, last_seq, size, state, version, deleted, room)
    except (UnicodeDecodeError, TypeError) as error:
        raise damaged(mark.key, error) from error
    if not mark.uid:
        raise damaged(mark.key, ValueError("its row is damaged"))
    return None


def _stamp_of(session: _Found) -> str:
    return _stamp(
        uid=session.state.uid,
        number=session.id,
        version=session.version,
        updated=session.updated,
    )


def _stamp(*, uid: str, number: int, version: int, updated: str) -> str:
    # Versions begin anew with a row, and the numbers of rows with a file that is made anew.
    return f"{uid}:{number}:{version}:{updated}"


def _messages(
    transaction: "Transaction", session: Session, begun: dict[int, tuple[str, int]], after: int
) -> Iterator[Message]:
    gone = states.missing(session.state)
    rows = transaction.execute(SQL["raw_messages"], (session.id, after + 1, session.last_seq))
    for seq, at, body, crc in legible(rows):
        if (crc is not None and crc != checksum(body, seq)) or (gone and spans.contains(gone, seq)):
            continue
        if seq in begun:
            once, count = begun[seq]
            part = (1, count) if count > 1 else None
            yield Message(seq, at, Raw(body), _part=part, _once=once)
        else:
            yield Message(seq, at, Raw(body))


def _mark_name(uid: str) -> str:
    return f"copied:{uid}"


def _is_untouched(transaction: "Transaction", session: _Found) -> bool:
    """Whether the version is the one that a copy left it in."""
    name = _mark_name(session.state.uid)
    found = transaction.execute(SQL["find_mark"], (session.namespace, name))
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
        execute = self._transaction.execute
        execute("SAVEPOINT life")
        try:
            self._write(life, messages, after, instead_of)
        except BaseException:
            # After some errors SQLite has undone all of it by itself.
            if self._transaction.is_open:
                execute("ROLLBACK TO life")
                execute("RELEASE life")
            raise
        execute("RELEASE life")

    def _write(self, life: Life, messages: Iterable[Message], after: int, instead_of: str) -> None:
        execute = self._transaction.execute
        old = _find(self._transaction, LifeMark(key=life.key, uid=life.uid, stamp=""))
        self._check(life, old, instead_of)
        if old is None:
            [(number,)] = execute(
                SQL["add_life"],
                (
                    self._namespace,
                    life.key,
                    life.uid,
                    life.created,
                    life.updated,
                    life.last_seq,
                    life.deleted,
                    life.forked_from,
                ),
            )
        else:
            number = old.id
            execute(
                SQL["set_life"],
                (
                    number,
                    life.key,
                    life.created,
                    life.updated,
                    life.last_seq,
                    life.deleted,
                    life.forked_from,
                ),
            )
            execute(SQL["remove_messages_past"], (number, after))
            execute(SQL["remove_tokens_past"], (number, after))
            execute(SQL["remove_changes"], (number,))
        self._put_messages(number, messages)
        self._put_state(number, life, old)
        execute(SQL["put_mark"], (number, _mark_name(life.uid)))

    def _check(self, life: Life, old: _Found | None, instead_of: str) -> None:
        """Raise SessionExists, StoreBusy."""
        if old is None and instead_of:
            raise StoreBusy(f"{life.key!r}: it is gone; try again")
        if old is not None and (not instead_of or old.namespace != self._namespace):
            raise SessionExists(life.key, f"there is a session with its uid, {life.uid}")
        if old is not None and _stamp_of(old) != instead_of:
            raise StoreBusy(f"{life.key!r}: it has changed; try again")
        if life.deleted is None:
            found = self._transaction.execute(SQL["find_life"], (self._namespace, life.key))
            if any(uid != life.uid for _, uid, _ in found):
                raise SessionExists(life.key)

    def _put_messages(self, number: int, messages: Iterable[Message]) -> None:
        tokens: list[tuple[int, bytes, int, int]] = []

        def rows() -> Iterator[tuple[int, int, str, bytes, int]]:
            for message in messages:
                body, seq = message.to_json(), message.seq
                if message._once is not None and (found := token_of(message)) is not None:
                    tokens.append((number, token_bytes(found[0]), seq, found[1]))
                yield number, seq, message._at, body, checksum(body, seq)

        self._transaction.executemany(SQL["add_message"], rows())
        self._transaction.executemany(SQL["put_token"], tokens)

    def _put_state(self, number: int, life: Life, old: _Found | None) -> None:
        execute = self._transaction.execute
        generation = 1 if old is None else old.state.generation + 1
        state, changes = state_of(life, generation=generation)
        if life.archived:
            state.archive = Archive("", 1, life.archived)
        execute(SQL["add_state" if old is None else "set_state"], (number, encode(state)))
        session = Session(number, life.updated, life.last_seq, 0, state)
        for change in changes:
            add_change(self._transaction, session, change)
        for token in life.tokens:
            values = number, token_bytes(token.token), token.first, token.count
            execute(SQL["put_token"], values)
        [(*_, size)] = execute(SQL["extent"], (number, life.archived + 1, NO_END))
        execute(SQL["set_bytes"], (number, size))
