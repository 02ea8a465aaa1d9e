"""Reading messages: the visible ones, or all. Damaged messages are skipped."""

from collections.abc import Sequence

from stenolog.records import Message, Span, State
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.sql.dialect import Transaction
from stenolog.stores.sql.rows import MAX_SEQ, Session

_WIDEN_FACTOR = 4


class MissingRows(Exception):
    """The state counts messages without a row: they were purged at that moment, or are damaged."""


def visible_messages(
    transaction: Transaction,
    session: Session,
    damage: DamageReports | None,
    *,
    last: int | None,
    after: int | None,
) -> list[Message]:
    """Return the visible messages after the seq `after`, or only the last ones.

    Damaged messages are skipped and recorded in `damage`; if that is None, raises MissingRows.
    """
    seqs = states.visible(session.state, session.last_seq)
    if after is not None and after > session.state.floor:
        seqs = spans.clipped(seqs, after + 1, session.last_seq)
    return _read_messages(transaction, session, damage, seqs, last=last, state=None)


def all_messages(
    transaction: Transaction,
    session: Session,
    damage: DamageReports | None,
    *,
    last: int | None,
    after: int,
) -> list[Message]:
    """Return all messages after the seq `after`, or only the last ones, with `hidden` set."""
    seqs = spans.clipped(states.present(session.state, session.last_seq), after + 1, MAX_SEQ)
    return _read_messages(transaction, session, damage, seqs, last=last, state=session.state)


def _read_messages(
    transaction: Transaction,
    session: Session,
    damage: DamageReports | None,
    seqs: Sequence[Span],
    *,
    last: int | None,
    state: State | None,
) -> list[Message]:
    number = last
    while True:
        wanted = seqs if number is None else spans.last_of(seqs, number)
        found = transaction.messages(session.id, wanted, state)
        missing: list[Span] = []
        if len(found) != spans.size(wanted):  # guard: sql-missing-row
            read = spans.union((message.seq, message.seq) for message in found)
            missing = spans.minus(wanted, read)
        if missing and damage is None:
            raise MissingRows
        if damage is not None:
            damage.record_read(session.state.uid, missing, found)
        if not missing or last is None or number is None:
            return found
        if len(found) >= last or wanted == seqs:
            return found[-last:]
        # Read earlier messages instead of the skipped ones.
        number *= _WIDEN_FACTOR
