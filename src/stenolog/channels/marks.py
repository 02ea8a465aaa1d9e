"""How far the answers of a session were delivered, as its meta says; and which are due. Pure.

`sending` stands there before the first piece of an answer is sent, `sent` after the last one. So
who finds `sending` alone knows that nobody knows.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, cast, get_args

from msgspec import Struct

from stenolog.catalog.answers import origin_of
from stenolog.channels.base import Place
from stenolog.context.shapes import words_of
from stenolog.context.standing import answer_to
from stenolog.records import Message

FIELD: Final = "delivery"
"""The field of a session's meta."""

State = Literal["sending", "sent", "unsure", "refused"]
"""unsure: it may have arrived, and its reader was told so. refused: the app did not take it."""


class Mark(Struct, frozen=True, kw_only=True):
    """The newest answer of a session that was sent, or begun to be."""

    seq: int
    state: State
    origin: Place

    def fields(self) -> dict[str, Any]:
        """As it stands in the meta."""
        return {"seq": self.seq, "mark": self.state, "origin": dict(self.origin)}


class Due(Struct, frozen=True, kw_only=True):
    """An answer that is to be delivered."""

    seq: int
    text: str
    origin: Place


def mark_in(meta: Mapping[str, Any]) -> Mark | None:
    """The mark in a session's meta; None where there is none."""
    told = meta.get(FIELD)
    if not isinstance(told, Mapping):
        return None
    seq, state, origin = told.get("seq"), told.get("mark"), told.get("origin")
    if not isinstance(seq, int) or state not in get_args(State) or not isinstance(origin, Mapping):
        return None
    return Mark(seq=seq, state=cast(State, state), origin=origin)


def due(history: Sequence[Message], *, after: int, channel: str, since: datetime) -> list[Due]:
    """The answers past this seq to messages of a channel that were said since then, by seq.

    Messages that came from no chat app, as those of imported sessions, have none.
    """
    found: dict[int, Due] = {}
    for index, message in enumerate(history):
        body = message.to_dict()
        origin = origin_of(body)
        if origin is None or origin.get("channel") != channel or message.at < since:
            continue
        answer = answer_to(history[index:], message.seq)
        if answer is not None and answer.seq > after:
            text = words_of(answer.to_dict())
            found[answer.seq] = Due(seq=answer.seq, text=text, origin=origin)
    return [found[seq] for seq in sorted(found)]
