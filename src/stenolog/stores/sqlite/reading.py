"""Reading messages: those in sight or all of them, but for what is damaged."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Raw

from stenolog.records import Message, SessionInfo, Span, State
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.sqlite.changes import archived_upto
from stenolog.stores.sqlite.damage import Damage, checksum
from stenolog.stores.sqlite.queries import SQL
from stenolog.stores.sqlite.rows import NO_END, Session, count
from stenolog.stores.times import conversation_times

if TYPE_CHECKING:
    from stenolog.stores.sqlite.connections import Transaction

_MESSAGES = SQL["messages"]


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
    while True:
        wanted = visible if last is None else _last(visible, last)
        found = [
            Message(seq, at, Raw(body))
            for first, end in wanted
            for seq, at, body, crc in transaction.execute(_MESSAGES, (session.id, first, end))
            if crc is None or crc == checksum(body, seq)
        ]
        damaged = _noted(transaction, session, damage, wanted, found)
        if not damaged or last is None:
            return found
        # In the place of those that are left out, earlier ones are asked for.
        visible = spans.minus(visible, damaged)


def _last(seen: Sequence[Span], count: int) -> list[Span]:
    """The last so many seqs."""
    kept: list[Span] = []
    for first, last in reversed(seen):
        if count <= 0:
            break
        kept.append((max(first, last - count + 1), last))
        count -= last - first + 1
    return kept[::-1]


def everything(
    transaction: "Transaction", session: Session, damage: Damage, *, last: int | None, after: int
) -> list[Message]:
    """Every message past `after`, of these the last ones, marked as hidden or not."""
    if after >= session.last_seq:
        return []
    wanted = spans.clipped(states.present(session.state, session.last_seq), after + 1, NO_END)
    if last is None:
        rows = transaction.execute(_MESSAGES, (session.id, after + 1, NO_END))
    else:
        wanted = _last(wanted, last)
        values = (session.id, after, min(last, NO_END))
        rows = list(transaction.execute(SQL["last_messages"], values))[::-1]
    found = _marked(rows, session.state)
    if _noted(transaction, session, damage, wanted, found) and last is not None:
        return everything(transaction, session, damage, last=None, after=after)[-last:]
    return found


def _marked(rows: Iterable[tuple[Any, ...]], state: State) -> list[Message]:
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
        if crc is None or crc == checksum(body, seq)
    ]


def _noted(
    transaction: "Transaction",
    session: Session,
    damage: Damage,
    wanted: Sequence[Span],
    found: Sequence[Message],
) -> list[Span]:
    """Those of the wanted seqs that have a row and no message any more, after they were noted."""
    damaged: list[int] = []
    if len(found) < spans.size(wanted):
        intact = {message.seq for message in found}
        damaged = [
            seq
            for first, end in wanted
            for seq, *_ in transaction.execute(_MESSAGES, (session.id, first, end))
            if seq not in intact
        ]
    damage.note(session.state.uid, damaged, found)
    return spans.union((seq, seq) for seq in damaged)


def info(session: Session, damage: Damage) -> SessionInfo:
    """What is known of the session."""
    end, met = session.last_seq, damage.of(session.state.uid)
    state = session.state if not met else msgspec.structs.replace(session.state, lost=met)
    created, updated = conversation_times(
        datetime.fromisoformat(state.created),
        datetime.fromisoformat(session.updated),
        meta={} if state.forked_from is not None else state.meta,
        last_seq=end,
    )
    sight = states.visible(state, end)
    return SessionInfo(
        key=state.key,
        uid=state.uid,
        created=created,
        updated=updated,
        last_seq=end,
        floor=state.floor,
        visible=spans.size(sight),
        count=count(state, end),
        lost=spans.size(met),
        damaged=spans.size(met),
        void_bytes=0,
        archived=archived_upto(state),
        generation=state.generation,
        bytes=session.bytes,
        undoable=len(state.undo),
        summary=state.summary,
        meta=state.meta,
        forked_from=state.forked_from,
        in_sight=tuple(sight),
    )
