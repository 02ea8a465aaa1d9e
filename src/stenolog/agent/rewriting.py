"""Replace the visible messages of a session without hiding messages that arrive meanwhile."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from stenolog.errors import NoSuchSession, StaleHistory
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore

NewHistory = Sequence[Message | Mapping[str, Any]]
RewriteResult = Literal["done", "unchanged", "message arrived"]
"""unchanged: `make` returned None. message arrived: nothing was changed, because of it."""


def rewrite(
    sessions: SessionStore, key: str, make: Callable[[list[Message]], NewHistory | None]
) -> RewriteResult:
    """Make the messages that `make` returns visible, in one step of the store.

    `make` gets the visible messages, and returns None to leave them as they are. If a message
    arrives before the step is stored, nothing is changed. After a crash the old or the new messages
    are visible. Blocks; only the holder of the lease may call it.
    """
    last = last_seq(sessions, key)
    history = make(sessions.get_history(key))
    if history is None:
        return "unchanged"
    try:
        sessions.store.set_history(key, history, expect_last=last)
    except StaleHistory:
        return "message arrived"
    return "done"


def last_seq(sessions: SessionStore, key: str) -> int:
    """Return the last seq of a session, hidden messages included; 0 if there is no session."""
    try:
        return sessions.store.info(key).last_seq
    except NoSuchSession:
        return 0
