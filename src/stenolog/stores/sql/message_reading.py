"""Reading messages: the visible ones, or all. Damaged messages are skipped."""

from collections.abc import Sequence

from stenolog.records import Message, Span, State
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.damaged_messages import DamageReports
from stenolog.stores.sql.dialect import Transaction
from stenolog.stores.sql.rows import NO_END, Session

_FURTHER = 4


class MissingRows(Exception):
    """The state counts messages without a row: they were purged at that moment, or are damaged."""


def visible(
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
    return _read(transaction, session, damage, seqs, last=last, state=None)


def everything(
    transaction: Transaction,
    session: Session,
    damage: DamageReports | None,
    *,
    last: int | None,
    after: int,
) -> list[Message]:
    """Return all messages after the seq `after`, or only the last ones, with `hidden` set."""
    seqs = spans.clipped(states.present(session.state, session.last_seq), after + 1, NO_END)
    return _read(transaction, session, damage, seqs, last=last, state=session.state)


def _read(
    transaction: Transaction,
    session: Session,
    damage: DamageReports | None,
    seqs: Sequence[Span],
    *,
    last: int | None,
    state: State | None,
) -> list[Message]:
    reach = last
    while True:
        wanted = seqs if reach is None else spans.last_of(seqs, reach)
        found = transaction.messages(session.id, wanted, state)
        lost: list[Span] = []
        if len(found) != spans.size(wanted):  # guard: sql-missing-row
            lost = spans.minus(wanted, spans.union((message.seq, message.seq) for message in found))
        if lost and damage is None:
            raise MissingRows
        if damage is not None:
            damage.record_read(session.state.uid, lost, found)
        if not lost or last is None or reach is None:
            return found
        if len(found) >= last or wanted == seqs:
            return found[-last:]
        # Read earlier messages instead of the skipped ones.
        reach *= _FURTHER
