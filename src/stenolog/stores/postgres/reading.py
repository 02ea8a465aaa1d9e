"""Reading messages: those in sight, or all of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Raw

from stenolog.records import Message, Span, State
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.damage import Damage
from stenolog.stores.rows import NO_END, Session

if TYPE_CHECKING:
    from stenolog.stores.postgres.connections import Transaction


class Gone(Exception):
    """Messages are not there that the state counts: purged meanwhile, or lost."""


def in_sight(
    transaction: "Transaction",
    session: Session,
    damage: Damage | None,
    *,
    last: int | None,
    after: int | None,
) -> list[Message]:
    """The visible messages past `after`, of these the last ones. Raises Gone without `damage`."""
    visible = states.visible(session.state, session.last_seq)
    if after is not None and after > session.state.floor:
        visible = spans.clipped(visible, after + 1, session.last_seq)
    return _found(transaction, session, damage, visible, last=last)


def everything(
    transaction: "Transaction",
    session: Session,
    damage: Damage | None,
    *,
    last: int | None,
    after: int,
) -> list[Message]:
    """Every message past `after`, of these the last ones, marked as hidden or not."""
    present = spans.clipped(states.present(session.state, session.last_seq), after + 1, NO_END)
    return _found(transaction, session, damage, present, last=last)


def _found(
    transaction: "Transaction",
    session: Session,
    damage: Damage | None,
    seqs: Sequence[Span],
    *,
    last: int | None,
) -> list[Message]:
    """Of these seqs what is there, the last ones of it; what is not is noted."""
    reach = last
    while True:
        wanted = seqs if reach is None else spans.last_of(seqs, reach)
        found = _marked(transaction, session, wanted)
        lost = _lost(wanted, found)
        if lost and damage is None:
            raise Gone
        if damage is not None:
            damage.note(session.state.uid, lost, found)
        if not lost or last is None or reach is None:
            return found
        if len(found) >= last or wanted == seqs:
            return found[-last:]
        # In the place of those that are left out, earlier ones are asked for.
        reach *= 4


def _marked(transaction: "Transaction", session: Session, wanted: Sequence[Span]) -> list[Message]:
    is_hidden = _hidden(session.state)
    return [
        Message(seq, at, Raw(body.encode()), hidden=is_hidden and is_out(session.state, seq))
        for first, end in wanted
        for seq, at, body in transaction.run("messages", session.id, first, end)
    ]


def _hidden(state: State) -> bool:
    return bool(state.floor or state.hidden)


def is_out(state: State, seq: int) -> bool:
    """Whether a message is out of sight."""
    return seq <= state.floor or (bool(state.hidden) and spans.contains(state.hidden, seq))


def _lost(wanted: Sequence[Span], found: Sequence[Message]) -> list[Span]:
    """Those of the wanted seqs that have no message any more."""
    if len(found) == spans.size(wanted):
        return []
    return spans.minus(wanted, spans.union((message.seq, message.seq) for message in found))
