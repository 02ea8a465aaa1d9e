"""How far the answers of a session were delivered, as its meta says; and which are due. Pure.

`sending` stands there before the first piece of an answer is sent, `sent` after the last one. So
who finds `sending` alone knows that nobody knows. Answers that surely were not sent are owed, also
when later ones are sent.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, cast, get_args

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.answers import origin_of
from stenolog.channels.base import Place
from stenolog.context.shapes import words_of
from stenolog.context.standing import answer_to
from stenolog.records import Message

FIELD: Final = "delivery"
"""The field of a session's meta."""

State = Literal["sending", "sent", "unsure", "refused", "owed"]
"""unsure: it may have arrived, and its reader was told so. refused: the app did not take it. owed:
surely it was not sent."""
MOST_OWED: Final = 20
"""So many are sent after all; of a chat that is out of reach for longer, the newest."""


class Mark(Struct, frozen=True, kw_only=True):
    """How far the answers of a session were sent, and what became of the one that was last."""

    seq: int
    """The newest answer that was sent, or begun to be."""
    state: State
    """Of the one that was begun last: an older one, where that was owed."""
    origin: Place
    owed: tuple[int, ...] = ()
    """Those up to `seq` that are still to be sent, in order."""

    def fields(self) -> dict[str, Any]:
        """As it stands in the meta."""
        told = {"seq": self.seq, "mark": self.state, "origin": dict(self.origin)}
        return {**told, "owed": list(self.owed)} if self.owed else told


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
    owed = told.get("owed", ())
    found = [one for one in owed if isinstance(one, int)] if isinstance(owed, list | tuple) else []
    return Mark(seq=seq, state=cast(State, state), origin=origin, owed=tuple(sorted(found)))


def is_due(mark: Mark | None, seq: int) -> bool:
    """Whether the answer at this seq was neither sent nor begun to be."""
    return mark is None or seq > mark.seq or seq in mark.owed


def begun(mark: Mark | None, answer: Due) -> Mark:
    """The mark that stands there while an answer is being sent."""
    if mark is None:
        return Mark(seq=answer.seq, state="sending", origin=answer.origin)
    return Mark(
        seq=max(mark.seq, answer.seq),
        state="sending",
        origin=answer.origin,
        owed=tuple(seq for seq in mark.owed if seq != answer.seq),
    )


def owing(mark: Mark, seq: int) -> Mark:
    """The mark once it is sure that this answer was not sent."""
    owed = sorted({*mark.owed, seq})[-MOST_OWED:]
    return replace(mark, state="owed", owed=tuple(owed))


def due(
    history: Sequence[Message], *, mark: Mark | None, channel: str, since: datetime
) -> list[Due]:
    """The answers to messages of a channel that are to be sent, if those were said since then.

    By seq: what is owed comes first. Messages that came from no chat app, as those of imported
    sessions, have none.
    """
    found: dict[int, Due] = {}
    for index, message in enumerate(history):
        body = message.to_dict()
        origin = origin_of(body)
        if origin is None or origin.get("channel") != channel or message.at < since:
            continue
        answer = answer_to(history[index:], message.seq)
        if answer is not None and is_due(mark, answer.seq):
            text = words_of(answer.to_dict())
            found[answer.seq] = Due(seq=answer.seq, text=text, origin=origin)
    return [found[seq] for seq in sorted(found)]
