"""Stores the changes of sessions in a database; stores/state.py decides the changes."""

import os

from stenolog.records import Archive, Change, Message, State, Undo
from stenolog.stores import state as states
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.operations import Decide, Decision, T
from stenolog.stores.sql.dialect import Transaction
from stenolog.stores.sql.rows import Session, encode, now, undo_step_from
from stenolog.stores.sql.session_rows import (
    create_session,
    find_session,
    to_bytes,
    visible_messages,
)


class OpenSQLSession:
    """An `OpenSession` inside a transaction."""

    def __init__(self, transaction: Transaction, session: Session, damage: DamageReports) -> None:
        self._transaction = transaction
        self._session = session
        self._damage = damage

    @property
    def state(self) -> State:
        """State of the session; a blank state if the session does not exist."""
        return self._session.state

    @property
    def last_seq(self) -> int:
        """Last assigned seq of the session."""
        return self._session.last_seq

    def visible_messages(self, *, last: int | None = None) -> list[Message]:
        """Return the visible messages, or only the last `last` of them."""
        if not self._session.id:
            return []
        return visible_messages(
            self._transaction, self._session, self._damage, last=last, after=None
        )

    def complete_undo_step(self, step: Undo) -> Undo:
        """Return the undo step with the long parts that the state omits. Raises DamagedStore."""
        return complete_undo_step(self._transaction, self._session, step)


def apply_operation(
    transaction: Transaction, namespace: str, key: str, decide: Decide[T], damage: DamageReports
) -> Decision[T]:
    """Call `decide` on a session, and store the change and the messages that `decide` returns.

    If the decision contains a change, a missing session is created.
    """
    while True:
        session = find_session(transaction, namespace, key, lock=True)
        if session is None:
            at = now()
            session = Session(0, at, 0, 0, states.blank_state(key, os.urandom(8).hex(), 1, at))
        decision = decide(OpenSQLSession(transaction, session, damage))
        change, payloads = decision.change, decision.payloads
        if change is None:
            return decision
        if not session.id:
            session.id = create_session(transaction, namespace, session.state, 0, 0)
        if session.id:
            break
        # Another writer has just created the session: decide again.
    state = states.copy_state(session.state)
    states.apply_change(state, change)
    at = now()
    add_change(transaction, session, change)
    save_state(
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


def save_state(
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
    """Store a change record of a session."""
    body = transaction.body(encode(change))
    transaction.run("add_change", session.id, change.number, now(), body)


def complete_undo_step(transaction: Transaction, session: Session, entry: Undo) -> Undo:
    """Return the complete undo step. Raises DamagedStore.

    A step that is too long for the state is read from its change record.
    """
    if not entry.elsewhere:
        return entry
    rows = transaction.run("find_change", session.id, entry.number)
    return undo_step_from((to_bytes(body) for (body,) in rows), session.state.key, entry)


def compact(transaction: Transaction, session: Session) -> tuple[int, int]:
    """Mark the messages up to the floor as archived; return their number and size in bytes."""
    state = states.copy_state(session.state)
    first, last = states.archived_upto(state) + 1, state.floor
    if last < first:
        return 0, 0
    [(messages, _, _, size)] = transaction.run("extent", session.id, first, last)
    if messages:
        state.archive = Archive("", 1, last)
        state.generation += 1
        save_state(transaction, session, state, size=session.bytes - size, updated=session.updated)
    return messages, size
