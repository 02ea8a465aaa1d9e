"""Recognizes unfinished turns that a stenolog agent started. Other turns are never resumed.

A stenolog agent marks every user message that it receives (docs/decisions/0012). Messages stored by
another program and imported messages have no mark. A turn that a fork copied is resumed only in the
source session.
"""

from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from stenolog.agent.instance import AgentInstance
from stenolog.catalog.entries import Entry
from stenolog.catalog.message_metadata import FIELD, is_received, last_seen_seq, model_of
from stenolog.context.turn_state import turn_state
from stenolog.messages import calls_of, has_text
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import SessionView, find_info, forked_at

_TAIL_MESSAGES: Final = 50
"""Number of newest messages to read first; they usually include the last user message."""
_MAX_CACHED_SESSIONS: Final = 100_000
_MAX_SCANNED_MESSAGES: Final = 200
"""Number of newest messages that are searched for the user message of an answer."""


def is_own_turn(history: Sequence[Message], *, after: int = 0) -> bool:
    """Return whether a stenolog agent received the last user message.

    If the last user message has no seq above `after`, return False.
    """
    last = _last_user_message(history)
    return last is not None and last.seq > after and is_received(last.to_dict())


def is_own_call(history: Sequence[Message], *, after: int = 0) -> bool:
    """Return whether a stenolog agent stored the last tool calls.

    If the message with the last tool calls has no seq above `after`, return False.
    """
    last = next((message for message in reversed(history) if calls_of(message.to_dict())), None)
    return last is not None and last.seq > after and model_of(last.to_dict()) is not None


def read_forked_at(sessions: SessionStore, key: str) -> int:
    """Return the seq up to which a session was copied from another session, or 0."""
    info = find_info(sessions.store, key)
    return 0 if info is None else forked_at(info)


def hide_late_message(sessions: SessionStore, view: SessionView) -> bool:
    """Hide a message that a turn stored after its user message was hidden. This call blocks.

    The turn itself hides this message at its end, unless its process is killed first. Returns
    whether a message was hidden. Only the lease holder may call this function.
    """
    seq = late_seq(sessions, view)
    if seq is None:
        return False
    sessions.store.hide(view.key, seq, seq)  # guard: hide-late-answer-after-kill
    return True


def late_seq(sessions: SessionStore, view: SessionView) -> int | None:
    """Return the seq of a message that was stored after its user message was hidden, or None.

    Before each write, a turn checks that its user message is still visible, so only the last
    message can be late. A late message must be the newest write of the session. If messages were
    hidden after that write, for example by `truncate_history`, the user wants to keep the answer
    visible without its user message.
    """
    info = view.info
    if not view.messages or info.visible == info.count:
        return None
    newest = view.messages[-1]
    body = newest.to_dict()
    is_newest_write = newest.seq == info.last_seq > forked_at(info) and newest.at == info.updated
    if not is_newest_write or body.get("role") == "user" or FIELD not in body:
        return None
    first_seq = info.in_sight[-1][0] if info.in_sight else newest.seq
    last_range = [message for message in view.messages if message.seq >= first_seq]
    if _last_user_message(last_range) is not None:
        return None
    seen_seq = last_seen_seq(body, newest.seq)
    stored_messages = sessions.get_history(view.key, last=_MAX_SCANNED_MESSAGES, full=True)
    seen_messages = [message for message in stored_messages if message.seq <= seen_seq]
    user_message = _last_user_message(seen_messages)
    if user_message is None or not user_message.hidden:
        return None
    visible_seqs = {message.seq for message in view.messages}
    return newest.seq if visible_seqs.isdisjoint(turn_state(seen_messages).unanswered) else None


class ForeignTurns:
    """Cache of sessions with an unfinished turn of another program.

    A cached session is examined again only after it has changed.
    """

    def __init__(self) -> None:
        self._versions = OrderedDict[tuple[str | None, str], tuple[str, datetime | None]]()
        """Uid and last change of each cached session, by agent and session key."""

    def includes(self, instance: AgentInstance, entry: Entry) -> bool:
        """Return whether another program started the unfinished turn of this session."""
        session, version = (instance.id, entry.key), (entry.uid, entry.updated)
        if self._versions.get(session) == version:
            return True
        sessions = instance.sessions
        history = sessions.get_history(entry.key, last=_TAIL_MESSAGES)
        if _last_user_message(history) is None:
            history = sessions.get_history(entry.key)
        if is_own_turn(history, after=read_forked_at(sessions, entry.key)):
            self._versions.pop(session, None)
            return False
        self._versions[session] = version
        if len(self._versions) > _MAX_CACHED_SESSIONS:
            self._versions.popitem(last=False)
        return True


def _last_user_message(history: Sequence[Message]) -> Message | None:
    return next((message for message in reversed(history) if has_text(message.to_dict())), None)
