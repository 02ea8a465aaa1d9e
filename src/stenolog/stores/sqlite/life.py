"""The life of a session: fork, trash, and the end of it.

`delete` sets a mark on the row. `purge` removes rows, and then has their bytes overwritten: what
is deleted stays in free pages, in the unused parts of others, and in the log.
"""

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from stenolog.errors import DamagedStore, NoSuchSession, SessionExists, StenologError, StoreBusy
from stenolog.records import State, Trashed, Undo
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.base import Deleted
from stenolog.stores.damage import Damage
from stenolog.stores.rows import NO_END, Session, count, decode_state, moment, now
from stenolog.stores.sqlite.appending import create
from stenolog.stores.sqlite.changes import add_change, looked_up, save
from stenolog.stores.sqlite.queries import SQL
from stenolog.stores.sqlite.rows import find

if TYPE_CHECKING:
    from stenolog.stores.sqlite.connections import Transaction
    from stenolog.stores.sqlite.database import Database


def fork(
    transaction: "Transaction", namespace: str, key: str, new_key: str, *, at: int | None
) -> None:
    """A session of its own from what is in sight. Raises as Store.fork."""
    source = known(transaction, namespace, key)
    _check_free(transaction, namespace, new_key)
    made = states.decide_fork(
        source.state,
        source.last_seq,
        new_key=new_key,
        at=at,
        uid=os.urandom(8).hex(),
        now=now(),
    )
    size = sum(
        bytes_
        for first, last in made.taken
        for *_, bytes_ in transaction.execute(SQL["extent"], (source.id, first, last))
    )
    session = create(transaction, namespace, made.state, made.next_seq - 1, size)
    for first, last in made.taken:
        transaction.execute(SQL["copy_messages"], (session, source.id, first, last))


def known(transaction: "Transaction", namespace: str, key: str) -> Session:
    """The session that lives under this key. Raises NoSuchSession."""
    session = find(transaction, namespace, key)
    if session is None:
        raise NoSuchSession(key)
    return session


def _check_free(transaction: "Transaction", namespace: str, key: str) -> None:
    if list(transaction.execute(SQL["find_life"], (namespace, key))):
        raise SessionExists(key)


# --- the trash -------------------------------------------------------------------------------


def delete(transaction: "Transaction", namespace: str, key: str) -> Trashed:
    """Set the mark. Raises NoSuchSession."""
    session = known(transaction, namespace, key)
    at = now()
    transaction.execute(SQL["delete_session"], (session.id, at))
    return _trashed(key, session.state.uid, at, count(session.state, session.last_seq))


def restore(
    transaction: "Transaction", namespace: str, key: str, *, uid: str | None, as_key: str
) -> None:
    """Take the mark off again. Raises NoSuchSession, SessionExists."""
    for session, found in list(transaction.execute(SQL["find_deleted"], (namespace, key))):
        if uid in (None, found.decode(errors="replace")):
            _check_free(transaction, namespace, as_key)
            transaction.execute(SQL["restore_session"], (session, as_key))
            return
    raise NoSuchSession(key, "the trash has no such session")


def list_trash(transaction: "Transaction", namespace: str, damage: Damage) -> list[Trashed]:
    """What is marked, the last deleted first."""
    return list(_listed(transaction, namespace, damage))


def _listed(
    transaction: "Transaction", namespace: str, damage: Damage | None = None
) -> Iterator[Trashed]:
    rows = transaction.execute(SQL["list_deleted"], (namespace,))
    for raw_key, uid, deleted, last_seq, body in rows:
        try:
            key = raw_key.decode()
            messages = count(decode_state(body, key), last_seq)
            trashed = _trashed(key, uid.decode(), deleted, messages)
        except (DamagedStore, ValueError, TypeError):
            if damage is not None:
                damage.tell(f"the deleted session with the key {raw_key!r}")
            continue
        yield trashed


def _trashed(key: str, uid: str, deleted: str | bytes, messages: int) -> Trashed:
    return Trashed(key=key, uid=uid, deleted=moment(deleted), count=messages)


# --- purge -----------------------------------------------------------------------------------


class Gone(Struct, frozen=True):
    """What a transaction removed."""

    messages: int
    first: int
    last: int
    left: tuple[str, ...]
    """What may still tell of it."""


def purge_all(transaction: "Transaction", namespace: str, key: str) -> Gone | None:
    """Remove every life of the key, and the lease; None where there is none."""
    lives = [number for (number,) in transaction.execute(SQL["lives"], (namespace, key))]
    return _removed(transaction, namespace, key, lives) if lives else None


def purge_trash(
    transaction: "Transaction", namespace: str, key: str, meant: Collection[Deleted]
) -> Gone | None:
    """Remove these lives of the key, which are in the trash; None where not all of them are."""
    rows = list(transaction.execute(SQL["find_deleted"], (namespace, key)))
    known = {(one.uid, one.deleted) for one in _listed(transaction, namespace) if one.key == key}
    if not meant or not known.issuperset(meant):
        return None
    uids = {uid for uid, _ in meant}
    lives = [number for number, uid in rows if uid.decode(errors="replace") in uids]
    return _removed(transaction, namespace, key, lives)


def _removed(transaction: "Transaction", namespace: str, key: str, lives: Sequence[int]) -> Gone:
    found = [_extent(transaction, number, NO_END) for number in lives]
    with _overwriting(transaction):
        for number in lives:
            transaction.execute(SQL["remove_session"], (number,))
        if not list(transaction.execute(SQL["find_life"], (namespace, key))):
            transaction.execute(SQL["end_lease_of"], (namespace, key))
        transaction.execute(SQL["begin_purge"], (now(),))
    left = states.not_reached(key, forks=_forks(transaction, namespace, key))
    return Gone(
        sum(messages for messages, *_ in found),
        min((first for messages, first, _ in found if messages), default=0),
        max(last for _, _, last in found),
        left,
    )


def purge_before(
    transaction: "Transaction", namespace: str, key: str, *, before: int
) -> Gone | None:
    """Remove the messages below this seq, and what leads to them; None: no such session."""
    session = find(transaction, namespace, key)
    if session is None:
        return None
    trashed = len(list(transaction.execute(SQL["find_deleted"], (namespace, key))))
    left = states.not_reached(
        key,
        forks=_forks(transaction, namespace, key),
        summary=session.state.summary,
        trashed=trashed,
    )
    upto = min(before - 1, session.last_seq)
    messages, first, last = _extent(transaction, session.id, max(upto, 0))
    entries = {entry.number: looked_up(transaction, session, entry) for entry in session.state.undo}
    state = states.decide_purge(
        session.state, session.last_seq, before, lambda entry: entries[entry.number]
    )
    if messages or state != session.state:
        with _overwriting(transaction):
            _remove(transaction, session, upto)
            _keep(transaction, session, state, entries)
            transaction.execute(SQL["begin_purge"], (now(),))
    return Gone(messages, first, last, left)


def _remove(transaction: "Transaction", session: Session, upto: int) -> None:
    transaction.execute(SQL["remove_messages"], (session.id, upto))
    transaction.execute(SQL["remove_tokens"], (session.id, upto))
    # Older summaries may tell of what is gone: only what undo still needs is kept.
    transaction.execute(SQL["remove_changes"], (session.id,))


def _keep(
    transaction: "Transaction", session: Session, state: State, entries: Mapping[int, Undo]
) -> None:
    for entry in state.undo:
        if entry.elsewhere:
            add_change(transaction, session, states.only(entries[entry.number]))
    state.generation += 1
    if spans.contains(state.purged, states.archived_upto(state)):
        state.archive = None
    above = states.archived_upto(state) + 1
    [(*_, size)] = transaction.execute(SQL["extent"], (session.id, above, NO_END))
    save(transaction, session, state, size=size)


def _extent(transaction: "Transaction", session: int, upto: int) -> tuple[int, int, int]:
    """How many messages there are up to this seq, the first and the last."""
    [(messages, first, last, _)] = transaction.execute(SQL["extent"], (session, 1, upto))
    return messages, first, last


def _forks(transaction: "Transaction", namespace: str, key: str) -> list[str]:
    rows = transaction.execute(SQL["forks"], (namespace, key))
    return [name.decode(errors="replace") for (name,) in rows]


@contextmanager
def _overwriting(transaction: "Transaction") -> Iterator[None]:
    """What is deleted meanwhile is overwritten with zeros."""
    list(transaction.execute("PRAGMA secure_delete = ON"))
    try:
        yield
    finally:
        list(transaction.execute("PRAGMA secure_delete = OFF"))


def unfinished(transaction: "Transaction") -> bool:
    """Whether a purge was cut short before its bytes were gone."""
    return bool(list(transaction.execute(SQL["purge_begun"])))


def left_by_purges(transaction: "Transaction") -> list[Trashed]:
    """What purges that were cut short left: bytes of which nobody knows any more whose they are."""
    begun = transaction.execute(SQL["purge_begun"])
    return [_trashed("", "", at, 0) for (at,) in begun]


def vanish(database: "Database") -> tuple[str, ...]:
    """Have the bytes of what was purged gone from the file and from its log; what stays, if any."""
    try:
        with database.read() as transaction:
            [(last,)] = transaction.execute(SQL["last_purge"])
        database.rewrite()
        with database.write() as transaction:
            # Only those that were there before: somebody else's may have begun since.
            transaction.execute(SQL["end_purge"], (last,))
    except StoreBusy:
        return (f"the log of {database.file} has it while others read; purge again",)
    except StenologError as error:
        return (f"free pages of {database.file} have it: {error}; purge again",)
    return ()
