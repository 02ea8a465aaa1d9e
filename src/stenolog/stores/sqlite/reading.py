"""Reading messages: those in sight or all of them, but for what is damaged."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from msgspec import Raw

from stenolog.records import Message, Span, State
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.damage import Damage
from stenolog.stores.rows import NO_END, Session, read_time
from stenolog.stores.sqlite.damage import checksum, legible
from stenolog.stores.sqlite.queries import SQL

if TYPE_CHECKING:
    from stenolog.stores.sqlite.connections import Transaction

_MESSAGES = SQL["messages"]
_FURTHER = 4
_Row = tuple[Any, ...]


def in_sight(
    transaction: "Transaction",
    session: Session,
    damage: Damage,
    *,
    last: int | None,
    after: int | None,
) -> list[Message]:
    """The visible messages past `after`, of these the last ones."""
    visible = states.visible(session.state, session.last_seq)
    if after is not None and after > session.state.floor:
        visible = spans.clipped(visible, after + 1, session.last_seq)
    return _found(transaction, session, damage, visible, last=last, made=_intact)


def everything(
    transaction: "Transaction", session: Session, damage: Damage, *, last: int | None, after: int
) -> list[Message]:
    """Every message past `after`, of these the last ones, marked as hidden or not."""
    present = spans.clipped(states.present(session.state, session.last_seq), after + 1, NO_END)
    made = partial(_marked, state=session.state)
    return _found(transaction, session, damage, present, last=last, made=made)


def _found(
    transaction: "Transaction",
    session: Session,
    damage: Damage,
    seqs: Sequence[Span],
    *,
    last: int | None,
    made: Callable[[Iterable[_Row]], list[Message]],
) -> list[Message]:
    """Of these seqs what can be read, the last ones of it; what cannot be is noted."""
    reach = last
    while True:
        wanted = seqs if reach is None else spans.last_of(seqs, reach)
        try:
            found = made(_rows(transaction, _MESSAGES, session, wanted))
        except (ValueError, TypeError):
            # One of them is damaged so that it cannot even be looked at.
            found = made(legible(_rows(transaction, SQL["raw_messages"], session, wanted)))
        lost = _lost(wanted, found)
        damage.note(session.state.uid, lost, found)
        if not lost or last is None or reach is None:
            return found
        if len(found) >= last or wanted == seqs:
            return found[-last:]
        # In the place of those that are left out, earlier ones are asked for.
        reach *= _FURTHER


def _rows(
    transaction: "Transaction", sql: str, session: Session, wanted: Sequence[Span]
) -> Iterable[_Row]:
    return chain.from_iterable(
        transaction.execute(sql, (session.id, first, end)) for first, end in wanted
    )


def _intact(rows: Iterable[_Row]) -> list[Message]:
    """Messages that are in sight."""
    return [
        Message(seq, at, Raw(body))
        for seq, at, body, crc in rows
        if (crc is None or crc == checksum(body, seq)) and read_time(at).tzinfo is not None
    ]


def _marked(rows: Iterable[_Row], state: State) -> list[Message]:
    """Messages, each marked as hidden or not."""
    floor, hidden = state.floor, state.hidden
    return [
        Message(
            seq,
            at,
            Raw(body),
            hidden=seq <= floor or (bool(hidden) and spans.contains(hidden, seq)),
        )
        for seq, at, body, crc in rows
        if (crc is None or crc == checksum(body, seq)) and read_time(at).tzinfo is not None
    ]


def _lost(wanted: Sequence[Span], found: Sequence[Message]) -> list[Span]:
    """Those of the wanted seqs that have no message any more."""
    if len(found) == spans.size(wanted):
        return []
    return spans.minus(wanted, spans.union((message.seq, message.seq) for message in found))
