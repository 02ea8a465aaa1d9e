"""The session of a turn: reads its messages, and appends the messages of the turn.

Another process may clear or delete the session at any moment. So a message is appended only while
the messages that it answers are visible.
"""

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.session_history import (
    append_once,
    has_own_last_calls,
    missing_session_error,
    refresh_view,
    withdraw_message,
)
from stenolog.context.turn_state import TurnState, turn_state
from stenolog.errors import NoSuchSession, SessionDeleted
from stenolog.stores.base import SessionView, Store, fork_seq_of

TRIES_FIELD: Final = "tries"
"""Meta field of a session that counts how often tool calls without a result were run again."""
_MAX_CALL_TRIES: Final = 3


class HistoryChanged(Exception):
    """The messages that an answer belongs to are no longer visible."""


class TurnLog(Struct, eq=False):
    """The session of a turn. All methods block. Only the lease holder may use a TurnLog.

    `leased_store`: the store, with writes that are fenced by the lease. `store`: the same store,
    for writes after the lease has ended.
    """

    leased_store: Store
    store: Store
    key: str
    view: SessionView | None
    """Last view that was read; None before the first read."""
    uid: str = ""
    """Uid of the session before the first read, if it is known."""
    question_seqs: frozenset[int] = frozenset()
    """Seqs of the user messages that the turn answers."""
    written_seqs: list[int] = []
    """Seqs of the messages that the turn has appended."""

    def read(self) -> SessionView:
        """Update and return `view`. Raises NoSuchSession if the session is gone."""
        old_view = self.view
        try:
            view = refresh_view(self.leased_store, self.key, old_view)
        except NoSuchSession:
            raise missing_session_error(self.leased_store, self.key) from None
        self.check_uid(view)
        self.view = view
        return view

    def check_uid(self, view: SessionView) -> None:
        """Raise SessionDeleted if `view` is a view of another session that has the key now."""
        expected_uid = self.uid if self.view is None else self.view.uid
        if expected_uid and view.uid != expected_uid:  # guard: waiting-message-own-session
            raise SessionDeleted(self.key, recreated=True)

    def read_questions(self) -> tuple[SessionView, TurnState]:
        """Update and return `view`, and its state; add its unanswered messages to the questions.

        Raises HistoryChanged if the questions are hidden.
        """
        view = self.read()
        if not view.messages or self._are_questions_hidden(view):
            raise HistoryChanged
        state = state_of(view)
        self.question_seqs |= frozenset(state.unanswered)
        return view, state

    def append(self, body: Mapping[str, Any]) -> int:
        """Append a message and return its seq.

        Raises HistoryChanged if the session no longer needs the message, NoSuchSession if the
        session is gone, and the errors of the store.
        """
        old_view = self.view
        if old_view is not None:
            view = self.read()
            is_unchanged = old_view.matches(view.uid, view.generation, view.change)
            if not is_unchanged and not self._is_needed(view, body):
                raise HistoryChanged  # guard: no-answer-after-clear
        seq = append_once(self.leased_store, self.key, body)
        if self.view is not None and seq <= self.view.upto:
            # The session was deleted since the last read, so the append has created a new session.
            withdraw_message(self.store, self.view, seq, body)
            raise SessionDeleted(self.key)
        self.written_seqs.append(seq)
        return seq

    def may_repeat_calls(self, state: TurnState) -> bool:
        """Return whether tool calls without a result may run again, and count this attempt.

        The number of repeats is limited, because a tool may kill the program each time. Calls that
        another program stored, or that a fork copied, must not run here.
        """
        view = self.view
        if not state.open_calls or view is None:
            return True
        info = view.info
        # guard: repeat-own-calls
        if not has_own_last_calls(view.messages, after=fork_seq_of(info)):
            return False
        stored_tries = info.meta.get(TRIES_FIELD)
        seq, tries = (
            stored_tries if isinstance(stored_tries, list) and len(stored_tries) == 2 else (0, 0)
        )
        tries = tries + 1 if seq == info.last_seq else 1
        if tries > _MAX_CALL_TRIES:
            return False
        self.leased_store.set_meta(self.key, **{TRIES_FIELD: [info.last_seq, tries]})
        return True

    def hide_late_messages(self) -> SessionView:
        """Hide the appended messages if the questions were hidden meanwhile; return a new view.

        The lease may have ended.
        """
        view = refresh_view(self.store, self.key, self.view)
        if self.view is not None and self.view.uid == view.uid and self._are_questions_hidden(view):
            visible_seqs = {message.seq for message in view.messages}
            for seq in self.written_seqs:
                if seq in visible_seqs:
                    self.store.admin.hide(self.key, seq, seq)
        return view

    def _are_questions_hidden(self, view: SessionView) -> bool:
        """Return whether all user messages that the turn answers are hidden in `view`."""
        seqs = self.question_seqs
        return bool(seqs) and seqs.isdisjoint(message.seq for message in view.messages)

    def _is_needed(self, view: SessionView, body: Mapping[str, Any]) -> bool:
        """Return whether the visible messages still need the message `body`."""
        if body.get("role") == "tool":
            calls = state_of(view).open_calls
            return body.get("tool_call_id") in {call.id or "" for call in calls}
        return not self._are_questions_hidden(view)


def state_of(view: SessionView) -> TurnState:
    """Return the pending work of a session."""
    return turn_state(view.messages, view.info.lost_spans)
