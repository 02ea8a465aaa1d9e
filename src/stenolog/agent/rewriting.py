"""Replacing what is in sight, while others may speak: what they say meanwhile stays in sight."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from stenolog.errors import NoSuchSession
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore

Wanted = Sequence[Message | Mapping[str, Any]]
Rewritten = Literal["done", "nothing", "not saved", "others speak"]
"""nothing: it was not wanted after all. others speak: all the time, so that it was given up."""

_TRIES: Final = 5


def rewrite(
    sessions: SessionStore, key: str, make: Callable[[list[Message]], Wanted | None]
) -> Rewritten:
    """Show what `make` makes of what is in sight, in one step; None: leave it as it is.

    After a crash the old messages are in sight, or the new ones. Only who has the turn calls it;
    it blocks.
    """
    for _ in range(_TRIES):
        newest = _last_seq(sessions, key)
        wanted = make(sessions.get_history(key))
        if wanted is None:
            return "nothing"
        if not sessions.set_history(key, wanted):
            return "not saved"
        store = sessions.store
        if store is None or not any(
            message.hidden for message in store.get_history(key, after=newest, full=True)
        ):
            return "done"
        # Somebody said something at that moment, and it must not be hidden.
        store.undo(key)
    return "others speak"


def _last_seq(sessions: SessionStore, key: str) -> int:
    if sessions.store is None:
        return 0
    try:
        return sessions.store.info(key).last_seq
    except NoSuchSession:
        return 0
