"""Store calls that the file and database engines share.

Operations change visibility, summary or meta: the engine opens the session and stores the change;
stores/state.py computes the change. `poll_messages` reads new messages as they arrive.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from stenolog.codec import encode_object
from stenolog.errors import NothingToUndo, SessionDeleted, StoreClosed
from stenolog.records import Change, Message, Span, State, Undo, UndoResult
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.arguments import check_int, check_optional_int, check_range, encode_messages

T = TypeVar("T")


class OpenSession(Protocol):
    """An open session, which no other writer can change."""

    @property
    def state(self) -> State:
        """State of the session; a blank state if the session does not exist."""

    @property
    def last_seq(self) -> int:
        """Last assigned seq of the session; 0 if the session does not exist."""

    def visible_messages(self, *, last: int | None = None) -> list[Message]:
        """Return the visible messages, or only the last `last` of them."""

    def complete_undo_step(self, step: Undo) -> Undo:
        """Return an undo step with the parts that the state omits. Raises DamagedStore."""


class Decision(Struct, Generic[T], frozen=True):
    """The effect of one Store call on a session."""

    change: Change | None
    """The change to store. With None, the engine changes nothing and creates no session."""
    result: T
    """Return value of the Store call."""
    payloads: Sequence[bytes] = ()
    """Encoded messages to append in the same write."""


Decide: TypeAlias = Callable[[OpenSession], Decision[T]]
"""Function that decides the change of an open session; a retry calls the function again."""


class SessionOperations(ABC):
    """The Store calls that change visibility, summary or meta; the base class of the engines.

    Each method checks its arguments, and passes `_change` a function that decides the change of the
    open session.
    """

    @abstractmethod
    def _change(self, key: str, decide: Decide[T]) -> T:
        """Open the session, call `decide` on it, and store the decided change in one write."""

    def _change_state(self, key: str, decide: Callable[[State, int], Change | None]) -> None:
        """Store the change that `decide` returns for the state and the last seq."""
        self._change(key, lambda session: Decision(decide(session.state, session.last_seq), None))

    def set_summary(self, key: str, text: str) -> None:
        """Replace the summary and nothing else."""
        states.check_summary(text)
        self._change_state(
            key, lambda state, end: states.decide_hide(state, end, [], op="summary", summary=text)
        )

    def truncate_history(self, key: str, keep_last: int) -> None:
        """Hide all visible messages except the last `keep_last`."""
        check_int(keep_last=keep_last)
        self._change_state(key, lambda state, end: states.decide_truncate(state, end, keep_last))

    def clear(self, key: str, *, upto: int | None = None) -> None:
        """Hide all messages, or all messages up to a seq, and empty the summary."""
        check_optional_int(upto=upto)

        def decide(state: State, last_seq: int) -> Change | None:
            hide_upto = last_seq if upto is None else min(upto, last_seq)
            return states.decide_checkpoint(state, last_seq, summary="", upto=hide_upto, op="clear")

        self._change_state(key, decide)

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """Replace the summary and hide all messages up to the seq `upto`."""
        states.check_summary(summary)
        check_int(upto=upto)
        check_optional_int(expect_floor=expect_floor)
        self._change_state(
            key,
            lambda state, end: states.decide_checkpoint(
                state, end, summary=summary, upto=upto, expect_floor=expect_floor
            ),
        )

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields of the session's meta; None removes a field."""
        encode_object({name: value for name, value in fields.items() if value is not None})
        self._change_state(key, lambda state, _: states.decide_meta(state, fields))

    def pop(self, key: str) -> Message | None:
        """Hide the last visible message and return it."""

        def decide(session: OpenSession) -> Decision[Message | None]:
            popped = session.visible_messages(last=1)
            seqs = spans.from_seqs(message.seq for message in popped)
            change = states.decide_hide(session.state, session.last_seq, seqs)
            return Decision(change, popped[0] if popped else None)

        return self._change(key, decide)

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> None:
        """Make exactly these messages visible."""
        check_optional_int(expect_last=expect_last)
        payloads = encode_messages(messages)

        def decide(session: OpenSession) -> Decision[None]:
            state, last_seq, visible = session.state, session.last_seq, session.visible_messages()
            change, new_payloads = states.decide_replace(
                state, last_seq, visible, payloads, expect_last=expect_last
            )
            return Decision(change, None, new_payloads)

        self._change(key, decide)

    def undo(self, key: str, *, answered: Span | None = None) -> UndoResult:
        """Undo the newest operation that can be undone."""

        def decide(session: OpenSession) -> Decision[UndoResult]:
            state = session.state
            if not state.undo:
                raise NothingToUndo(f"{state.key!r}: there is nothing to undo")
            step = session.complete_undo_step(state.undo[-1])
            change = states.decide_undo(state, step, answered)
            return Decision(change, states.undo_result(state, step, change, answered))

        return self._change(key, decide)


class AdminOperations:
    """The StoreAdmin calls that change visibility; the base class of the admins of the engines."""

    def __init__(self, operations: SessionOperations) -> None:
        self._operations = operations

    def hide(self, key: str, first: int, last: int) -> None:
        """Hide the messages from seq `first` to seq `last`."""
        check_range(first, last)
        self._operations._change_state(
            key, lambda state, end: states.decide_hide(state, end, [(first, last)])
        )

    def show(self, key: str, first: int, last: int) -> None:
        """Show the hidden messages from seq `first` to seq `last`."""
        check_range(first, last)
        self._operations._change_state(
            key, lambda state, end: states.decide_show(state, end, first, last)
        )


# --- following a session ---------------------------------------------------------------------

NewMessages = tuple[str, int, list[Message]]
"""Uid of the session, its last seq, and the new messages."""


def poll_messages(
    fetch: Callable[[int], NewMessages | None],
    wait: Callable[[float], object],
    key: str,
    *,
    after: int,
    uid: str | None,
    timeout: float | None,
    poll: float,
) -> Iterator[Message]:
    """Yield the messages after a seq; end if none arrives for `timeout` seconds, or on close.

    `fetch` returns None if the session does not exist; `poll` is the time between two fetches, in
    seconds. `wait` returns after the given seconds, or earlier. `uid`: follow only the session with
    this uid; None follows the first session that `fetch` returns. Raises SessionDeleted if the
    followed session no longer has the key.
    """
    idle_since = monotonic()
    while True:
        try:
            result = fetch(after)
        except StoreClosed:
            return
        if uid is not None and (result is None or result[0] != uid):
            raise SessionDeleted(key, recreated=result is not None)
        if result is not None:
            uid, last_seq, messages = result
            yield from messages
            if last_seq > after:
                after = last_seq
                idle_since = monotonic()
                continue
        wait_seconds = poll
        if timeout is not None:
            wait_seconds = min(poll, idle_since + timeout - monotonic())
            if wait_seconds <= 0:
                return
        wait(wait_seconds)
