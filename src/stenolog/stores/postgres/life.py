"""The life of a session: fork, trash, and the end of it."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from stenolog.errors import NoSuchSession, SessionExists
from stenolog.records import State, Trashed, Undo
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.base import Deleted
from stenolog.stores.postgres.appending import check_format, create
from stenolog.stores.postgres.changes import add_change, looked_up, save
from stenolog.stores.postgres.rows import Clash, copied_mark, find
from stenolog.stores.rows import NO_END, Session, count, decode_state, moment, now

if TYPE_CHECKING:
    from stenolog.stores.postgres.connections import Transaction


def fork(
    transaction: "Transaction", namespace: str, key: str, new_key: str, *, at: int | None
) -> None:
    """A session of its own from what is in sight. Raises as Store.fork."""
    source = known(transaction, namespace, key, lock=True)
    if transaction.run("find_life", namespace, new_key.encode()):
        raise SessionExists(new_key)
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
        for *_, bytes_ in transaction.run("extent", source.id, first, last)
    )
    session = create(transaction, namespace, made.state, made.next_seq - 1, size)
    if not session:
        raise SessionExists(new_key)
    for first, last in made.taken:
        transaction.run("copy_messages", session, source.id, first, last)


def known(transaction: "Transaction", namespace: str, key: str, *, lock: bool = False) -> Session:
    """The session that lives under this key. Raises NoSuchSession."""
    session = find(transaction, namespace, key, lock=lock)
    if session is None:
        raise NoSuchSession(key)
    return session


# --- the trash -------------------------------------------------------------------------------


def delete(transaction: "Transaction", namespace: str, key: str) -> Trashed:
    """Set the mark. Raises NoSuchSession."""
    session = known(transaction, namespace, key, lock=True)
    at = now()
    transaction.run("delete_session", session.id, at)
    return _trashed(key, session.state.uid, at, count(session.state, session.last_seq))


def restore(
    transaction: "Transaction", namespace: str, key: str, *, uid: str | None, as_key: str
) -> None:
    """Take the mark off again. Raises NoSuchSession, SessionExists."""
    check_format(transaction)
    for session, found in transaction.run("find_deleted", namespace, key.encode()):
        if uid in (None, found):
            try:
                transaction.run("restore_session", session, as_key.encode())
            except Clash:
                raise SessionExists(as_key) from None
            return
    raise NoSuchSession(key, "the trash has no such session")


def list_trash(transaction: "Transaction", namespace: str) -> list[Trashed]:
    """What is marked, the last deleted first."""
    found = []
    for raw_key, uid, deleted, last_seq, body in transaction.run("list_deleted", namespace):
        key = raw_key.decode()
        state = decode_state(body.encode(), key)
        found.append(_trashed(key, uid, deleted, count(state, last_seq)))
    return found


def _trashed(key: str, uid: str, deleted: str, messages: int) -> Trashed:
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
    lives = transaction.run("lives", namespace, key.encode())
    if not lives:
        return None
    session = find(transaction, namespace, key)
    told = () if session is None else states.taken_from(session.state.meta)
    return _removed(transaction, namespace, key, lives, told)


def purge_trash(
    transaction: "Transaction", namespace: str, key: str, meant: Collection[Deleted]
) -> Gone | None:
    """Remove these lives of the key, which are in the trash; None where not all of them are."""
    # Locked first, so that they are in the trash for as long as this takes.
    rows = transaction.run("find_deleted", namespace, key.encode())
    known = {(one.uid, one.deleted) for one in list_trash(transaction, namespace) if one.key == key}
    if not meant or not known.issuperset(meant):
        return None
    uids = {uid for uid, _ in meant}
    return _removed(transaction, namespace, key, [row for row in rows if row[1] in uids], ())


def _removed(
    transaction: "Transaction",
    namespace: str,
    key: str,
    found_lives: Sequence[tuple[Any, ...]],
    told: tuple[str, ...],
) -> Gone:
    lives = [number for number, _ in found_lives]
    for _, uid in found_lives:
        transaction.run("remove_mark", namespace, copied_mark(uid))
    found = [_extent(transaction, number, NO_END) for number in lives]
    for number in lives:
        for name in ("remove_messages", "remove_tokens"):
            transaction.run(name, number, NO_END)
        transaction.run("remove_changes", number)
        transaction.run("remove_session", number)
    if not transaction.run("find_life", namespace, key.encode()):
        transaction.run("end_lease_of", namespace, key.encode())
    left = states.not_reached(key, forks=_forks(transaction, namespace, key))
    return Gone(
        sum(messages for messages, *_ in found),
        min((first for messages, first, _ in found if messages), default=0),
        max(last for _, _, last in found),
        left + told,
    )


def purge_before(
    transaction: "Transaction", namespace: str, key: str, *, before: int
) -> Gone | None:
    """Remove the messages below this seq, and what leads to them; None: no such session."""
    session = find(transaction, namespace, key, lock=True)
    if session is None:
        return None
    trashed = len(transaction.run("find_deleted", namespace, key.encode()))
    left = states.not_reached(
        key,
        forks=_forks(transaction, namespace, key),
        summary=session.state.summary,
        trashed=trashed,
    )
    told = states.taken_from(session.state.meta)
    upto = min(before - 1, session.last_seq)
    messages, first, last = _extent(transaction, session.id, max(upto, 0))
    entries = {entry.number: looked_up(transaction, session, entry) for entry in session.state.undo}
    state = states.decide_purge(
        session.state, session.last_seq, before, lambda entry: entries[entry.number]
    )
    if messages or state != session.state:
        transaction.run("remove_messages", session.id, upto)
        transaction.run("remove_tokens", session.id, upto)
        # Older summaries may tell of what is gone: only what undo still needs is kept.
        transaction.run("remove_changes", session.id)
        _keep(transaction, session, state, entries)
    return Gone(messages, first, last, left + told)


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
    [(*_, size)] = transaction.run("extent", session.id, above, NO_END)
    save(transaction, session, state, size=size)


def _extent(transaction: "Transaction", session: int, upto: int) -> tuple[int, int, int]:
    """How many messages there are up to this seq, the first and the last."""
    [(messages, first, last, _)] = transaction.run("extent", session, 1, upto)
    return messages, first, last


def _forks(transaction: "Transaction", namespace: str, key: str) -> list[str]:
    return [name.decode() for (name,) in transaction.run("forks", namespace, key.encode())]
