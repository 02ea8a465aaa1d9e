"""Changes of what is in sight, carried out: stores/state.py decides what each one is."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from stenolog.records import Archive, Change, State, Undo
from stenolog.stores import state as states
from stenolog.stores.postgres import appending
from stenolog.stores.postgres.appending import Place
from stenolog.stores.postgres.rows import find
from stenolog.stores.rows import Session, decode_change, encode, now

if TYPE_CHECKING:
    from stenolog.stores.postgres.connections import Transaction

Decide = Callable[["Transaction", Session], Change | None]
"""Turns a session, as a transaction finds it, into the change to be made."""


def carry_out(
    transaction: "Transaction",
    place: Place,
    decide: Decide,
    *,
    create: bool,
    payloads: Sequence[bytes],
) -> bool:
    """Decide what becomes of a session, and store it with the messages that belong to it.

    `create`: also where there is no such session yet. `payloads` is read when it is decided.
    Whether anything was changed.
    """
    session = find(transaction, place.namespace, place.key, lock=True)
    while session is None:
        if not create:
            return False
        at = now()
        session = Session(0, at, 0, 0, states.blank(place.key, os.urandom(8).hex(), 1, at))
        if decide(transaction, session) is None:
            return False
        session.id = appending.create(transaction, place.namespace, session.state, 0, 0)
        if not session.id:
            session = find(transaction, place.namespace, place.key, lock=True)
    decided = decide(transaction, session)
    if decided is None:
        return False
    state = states.copy(session.state)
    states.apply_change(state, decided)
    at = now()
    add_change(transaction, session, decided)
    save(
        transaction,
        session,
        state,
        size=session.bytes + sum(map(len, payloads)),
        last_seq=session.last_seq + len(payloads),
        updated=at,
    )
    appending.add_messages(
        transaction, session.id, session.last_seq + 1, payloads, [at] * len(payloads)
    )
    return True


def save(
    transaction: "Transaction",
    session: Session,
    state: State,
    *,
    size: int,
    last_seq: int | None = None,
    updated: str | None = None,
) -> None:
    """Put a new state in the place of the old one."""
    end = session.last_seq if last_seq is None else last_seq
    body = encode(state).decode()
    transaction.run("save_session", session.id, updated or now(), end, size, body)


def add_change(transaction: "Transaction", session: Session, change: Change) -> None:
    """Keep an operation."""
    body = encode(change).decode()
    transaction.run("add_change", session.id, change.number, now(), body)


def looked_up(transaction: "Transaction", session: Session, entry: Undo) -> Undo:
    """The whole of an undo entry: where it is too long for the state, its change has it."""
    if not entry.elsewhere:
        return entry
    [(body,)] = transaction.run("find_change", session.id, entry.number)
    return states.entry_of(decode_change(body.encode(), session.state.key))


def compact(transaction: "Transaction", session: Session) -> tuple[int, int]:
    """Move the mark up to the floor; how many messages and bytes that concerns."""
    state = states.copy(session.state)
    first, last = states.archived_upto(state) + 1, state.floor
    if last < first:
        return 0, 0
    [(messages, _, _, size)] = transaction.run("extent", session.id, first, last)
    if messages:
        state.archive = Archive("", 1, last)
        state.generation += 1
        save(transaction, session, state, size=session.bytes - size, updated=session.updated)
    return messages, size
