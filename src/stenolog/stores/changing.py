"""Operations on what is in sight, for stores that decide and write in one transaction.

What each one is, stores/state.py decides; how it is carried out is the engine's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from stenolog.codec import encode_object
from stenolog.errors import NothingToUndo, UsageError
from stenolog.records import Change, Message, Span, Undo, Undone
from stenolog.stores import state as states
from stenolog.stores.arguments import check_whole, encoded
from stenolog.stores.rows import Session

Tx = TypeVar("Tx")
"""The transaction of an engine."""


class Changing(ABC, Generic[Tx]):
    """set_summary, truncate_history, clear, set_history, hide, pop, checkpoint, undo, set_meta."""

    @abstractmethod
    def _change(
        self,
        key: str,
        decide: Callable[[Tx, Session], Change | None],
        *,
        create: bool = False,
        payloads: Sequence[bytes] = (),
    ) -> None:
        """Decide and carry out in one transaction, which may be made again from its beginning.

        `create`: also where there is no such session yet. `payloads` is read when it is decided.
        """

    @abstractmethod
    def _in_sight(self, transaction: Tx, session: Session, *, last: int | None) -> list[Message]:
        """The visible messages, or the last ones of them."""

    @abstractmethod
    def _looked_up(self, transaction: Tx, session: Session, entry: Undo) -> Undo:
        """The whole of an undo entry."""

    def set_summary(self, key: str, text: str) -> None:
        """Replace the summary and nothing else."""
        states.check_summary(text)
        self._change(
            key,
            lambda _, session: states.decide_summary(session.state, text),
            create=bool(text),
        )

    def truncate_history(self, key: str, keep_last: int) -> None:
        """Hide all but the last visible ones."""
        check_whole(keep_last=keep_last)
        self._change(
            key,
            lambda _, session: states.decide_truncate(session.state, session.last_seq, keep_last),
        )

    def clear(self, key: str) -> None:
        """Hide all messages and empty the summary."""
        self._change(
            key,
            lambda _, session: states.decide_checkpoint(
                session.state,
                session.last_seq,
                key=key,
                summary="",
                upto=session.last_seq,
                expect_floor=None,
                op="clear",
            ),
        )

    def hide(self, key: str, first: int, last: int) -> None:
        """Hide the messages with these seqs."""
        check_whole(first=first, last=last)
        if first > last:
            raise UsageError(f"hide from {first} to {last}: the first comes after the last")
        self._change(
            key,
            lambda _, session: states.decide_hide(session.state, session.last_seq, [(first, last)]),
        )

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """Replace the summary and hide everything up to this seq."""
        states.check_summary(summary)
        check_whole(upto=upto, expect_floor=expect_floor)
        self._change(
            key,
            lambda _, session: states.decide_checkpoint(
                session.state,
                session.last_seq,
                key=key,
                summary=summary,
                upto=upto,
                expect_floor=expect_floor,
            ),
            create=True,
        )

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields of the session's own data; None removes one."""
        encode_object({name: value for name, value in fields.items() if value is not None})
        self._change(key, lambda _, session: states.decide_meta(session.state, fields), create=True)

    def pop(self, key: str) -> Message | None:
        """Hide the last visible message and return it."""
        popped: list[Message] = []

        def decide(transaction: Tx, session: Session) -> Change | None:
            popped[:] = self._in_sight(transaction, session, last=1)
            hidden = [(message.seq, message.seq) for message in popped]
            return states.decide_hide(session.state, session.last_seq, hidden)

        self._change(key, decide)
        return popped[0] if popped else None

    def set_history(self, key: str, messages: Sequence[Message | Mapping[str, Any]]) -> None:
        """Make exactly these messages visible."""
        payloads = encoded(messages)
        added: list[bytes] = []

        def decide(transaction: Tx, session: Session) -> Change | None:
            before = self._in_sight(transaction, session, last=None)
            change, added[:] = states.decide_replace(
                session.state, session.last_seq, before, payloads
            )
            return change

        self._change(key, decide, create=bool(payloads), payloads=added)

    def undo(self, key: str, *, answered: Span | None = None) -> Undone:
        """Take back the newest operation on what is in sight."""
        undone: list[Undone] = []

        def decide(transaction: Tx, session: Session) -> Change:
            state = session.state
            entry = self._looked_up(transaction, session, states.newest_undo(state, key))
            change = states.decide_undo(state, entry, answered)
            undone[:] = [states.undone(state, entry, change, answered)]
            return change

        self._change(key, decide)
        if not undone:
            raise NothingToUndo(f"{key!r}: there is no such session")
        return undone[0]
