"""Storing changes of a session. stores/state.py decides the changes."""

import os

from stenolog.records import Archive, Change, Message, State, Undo
from stenolog.stores import state as states
from stenolog.stores.damaged_messages import DamageReports
from stenolog.stores.operations import Decide, Decision, T
from stenolog.stores.sql.dialect import Transaction
from stenolog.stores.sql.message_reading import visible
from stenolog.stores.sql.rows import Session, encode, entry_from, now
from stenolog.stores.sql.session_rows import create, find, raw


class OpenRow:
    """A session inside a transaction, as an operation sees it."""

    def __init__(self, transaction: Transaction, session: Session, damage: DamageReports) -> None:
        self._transaction = transaction
        self._session = session
        self._damage = damage

    @property
    def state(self) -> State:
        """State of the session; a blank state if it does not exist."""
        return self._session.state

    @property
    def last_seq(self) -> int:
        """The last assigned seq."""
        return self._session.last_seq

    def visible(self, *, last: int | None = None) -> list[Message]:
        """Return the visible messages, or only the last ones."""
        if not self._session.id:
            return []
        return visible(self._transaction, self._session, self._damage, last=last, after=None)

    def complete(self, step: Undo) -> Undo:
        """Return an undo step with the parts that the state omits. Raises DamagedStore."""
        return looked_up(self._transaction, self._session, step)


def carry_out(
    transaction: Transaction, namespace: str, key: str, decide: Decide[T], damage: DamageReports
) -> Decision[T]:
    """Decide the change of a session, and store it with its messages.

    A session that does not exist is created if the decision contains a change.
    """
    while True:
        session = find(transaction, namespace, key, lock=True)
        if session is None:
            at = now()
            session = Session(0, at, 0, 0, states.blank(key, os.urandom(8).hex(), 1, at))
        decision = decide(OpenRow(transaction, session, damage))
        change, payloads = decision.change, decision.payloads
        if change is None:
            return decision
        if not session.id:
            session.id = create(transaction, namespace, session.state, 0, 0)
        if session.id:
            break
        # Another writer has just created it: decide again.
    state = states.copy(session.state)
    states.apply_change(state, change)
    at = now()
    add_change(transaction, session, change)
    save(
        transaction,
        session,
        state,
        size=session.bytes + sum(map(len, payloads)),
        last_seq=session.last_seq + len(payloads),
        updated=at,
    )
    if payloads:
        first = session.last_seq + 1
        transaction.add_messages(
            session.id, [(seq, at, payload) for seq, payload in enumerate(payloads, first)]
        )
    return decision


def save(
    transaction: Transaction,
    session: Session,
    state: State,
    *,
    size: int,
    last_seq: int | None = None,
    updated: str | None = None,
) -> None:
    """Replace the state of a session."""
    end = session.last_seq if last_seq is None else last_seq
    body = transaction.body(encode(state))
    transaction.run("save_session", session.id, updated or now(), end, size, body)


def add_change(transaction: Transaction, session: Session, change: Change) -> None:
    """Record a change."""
    body = transaction.body(encode(change))
    transaction.run("add_change", session.id, change.number, now(), body)


def looked_up(transaction: Transaction, session: Session, entry: Undo) -> Undo:
    """Complete an undo step: if it is too long for the state, read its change.

    Raises DamagedStore.
    """
    if not entry.elsewhere:
        return entry
    found = transaction.run("find_change", session.id, entry.number)
    return entry_from((raw(body) for (body,) in found), session.state.key, entry)


def compact(transaction: Transaction, session: Session) -> tuple[int, int]:
    """Mark messages up to the floor as archived; return their number and size."""
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
