"""Operations that change visibility, summary or meta, for engines that decide inside a transaction.

Each function here checks the arguments of one Store call and returns a `Decide` function, which
runs once the session is open. stores/state.py computes the change. The engine opens the session and
stores the change.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from stenolog.codec import encode_object
from stenolog.errors import UsageError
from stenolog.records import Change, Message, Span, State, Undo, Undone
from stenolog.stores import state as states
from stenolog.stores.arguments import check_int, check_optional_int, encode_messages

T = TypeVar("T")


class OpenSession(Protocol):
    """A session while no other writer can change it."""

    @property
    def state(self) -> State:
        """State of the session; a blank state if the session does not exist."""

    @property
    def last_seq(self) -> int:
        """Last assigned seq of the session; 0 if the session does not exist."""

    def visible(self, *, last: int | None = None) -> list[Message]:
        """Return the visible messages, or only the last `last` of them."""

    def complete(self, step: Undo) -> Undo:
        """Return an undo step with the parts that the state omits. Raises DamagedStore."""


class Decision(Struct, Generic[T], frozen=True):
    """The effect of one call of Store on a session."""

    change: Change | None
    """The change to store. With None, the engine changes nothing and creates no session."""
    result: T
    """Return value of the Store call."""
    payloads: Sequence[bytes] = ()
    """Encoded messages to append in the same write."""


Decide: TypeAlias = Callable[[OpenSession], Decision[T]]
"""Function that decides on one open session. A retried transaction calls the function again."""


def set_summary(text: str) -> Decide[None]:
    """Replace the summary, and hide no messages."""
    states.check_summary(text)
    return lambda session: Decision(states.decide_summary(session.state, text), None)


def truncate(keep_last: int) -> Decide[None]:
    """Hide all but the last visible messages."""
    check_int(keep_last=keep_last)
    return lambda session: Decision(
        states.decide_truncate(session.state, session.last_seq, keep_last), None
    )


def clear(upto: int | None) -> Decide[None]:
    """Hide all messages, or all messages up to a seq, and empty the summary."""
    check_optional_int(upto=upto)

    def decide(session: OpenSession) -> Decision[None]:
        end = session.last_seq
        last = end if upto is None else min(upto, end)
        state = session.state
        return Decision(
            states.decide_checkpoint(
                state, end, key=state.key, summary="", upto=last, expect_floor=None, op="clear"
            ),
            None,
        )

    return decide


def hide(first: int, last: int) -> Decide[None]:
    """Hide the messages from seq `first` to seq `last`."""
    check_int(first=first, last=last)
    if first > last:
        raise UsageError(f"first must not be greater than last, but {first} > {last}")
    return lambda session: Decision(
        states.decide_hide(session.state, session.last_seq, [(first, last)]), None
    )


def checkpoint(*, summary: str, upto: int, expect_floor: int | None) -> Decide[None]:
    """Replace the summary and hide everything up to this seq."""
    states.check_summary(summary)
    check_int(upto=upto)
    check_optional_int(expect_floor=expect_floor)

    def decide(session: OpenSession) -> Decision[None]:
        state, end = session.state, session.last_seq
        return Decision(
            states.decide_checkpoint(
                state, end, key=state.key, summary=summary, upto=upto, expect_floor=expect_floor
            ),
            None,
        )

    return decide


def set_meta(fields: Mapping[str, Any]) -> Decide[None]:
    """Set fields of the session's meta; None removes a field."""
    encode_object({name: value for name, value in fields.items() if value is not None})
    return lambda session: Decision(states.decide_meta(session.state, fields), None)


def pop(session: OpenSession) -> Decision[Message | None]:
    """Hide the last visible message and return it."""
    popped = session.visible(last=1)
    seqs = [(message.seq, message.seq) for message in popped]
    change = states.decide_hide(session.state, session.last_seq, seqs)
    return Decision(change, popped[0] if popped else None)


def set_history(
    messages: Sequence[Message | Mapping[str, Any]], *, expect_last: int | None
) -> Decide[None]:
    """Make exactly these messages visible."""
    check_optional_int(expect_last=expect_last)
    payloads = encode_messages(messages)

    def decide(session: OpenSession) -> Decision[None]:
        change, added = states.decide_replace(
            session.state, session.last_seq, session.visible(), payloads, expect_last=expect_last
        )
        return Decision(change, None, added)

    return decide


def undo(answered: Span | None) -> Decide[Undone]:
    """Undo the newest operation that can be undone."""

    def decide(session: OpenSession) -> Decision[Undone]:
        state = session.state
        step = session.complete(states.newest_undo(state, state.key))
        change = states.decide_undo(state, step, answered)
        return Decision(change, states.undo_result(state, step, change, answered))

    return decide
