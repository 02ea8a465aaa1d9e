"""How far each session has been consolidated: the mark.

The mark stands in the notes store, because it says what that store has: whoever deletes the notes
deletes the marks with them, and starts anew. It is named by the uid of the session, so that a
session deleted and made again has none yet, one that is restored finds its own, and no key is too
long. Its name begins with a colon, as that of no scope does.
"""

from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct

from stenolog.errors import NoSuchSession
from stenolog.memory.scopes import agent_prefix
from stenolog.records import timestamp
from stenolog.stores.base import Store

PREFIX: Final = ":mark:"


class Mark(Struct, frozen=True, kw_only=True):
    """How far a session has been consolidated, and how often the next turn was tried in vain."""

    seq: int = 0
    """Every finished turn up to here is in the notes."""
    attempts: int = 0
    retry_at: datetime | None = None
    """When to ask the model again; None where nothing failed."""


class Progress:
    """The marks of one agent."""

    def __init__(self, store: Store, *, agent: str) -> None:
        """Keep them in this store, the one of the notes."""
        self._store = store
        self._prefix = PREFIX + agent_prefix(agent)

    def read(self, uid: str) -> Mark:
        """The mark of a session; at its beginning where there is none."""
        try:
            meta = self._store.info(self._prefix + uid).meta
        except NoSuchSession:
            return Mark()
        attempts, retry_at = _whole(meta.get("attempts")), meta.get("retry_at")
        return Mark(
            seq=_whole(meta.get("seq")),
            attempts=attempts,
            retry_at=datetime.fromisoformat(retry_at) if isinstance(retry_at, str) else None,
        )

    def move(self, uid: str, seq: int, *, session: str) -> None:
        """Every finished turn up to this seq is in the notes. Raises what the store raises.

        Who comes late moves nothing. Two at once may still leave the mark at the lower one: then
        turns are looked at once more, and their tokens keep them from being noted twice.
        """
        mark = self.read(uid)
        if seq > mark.seq:
            self._store.set_meta(
                self._prefix + uid, session=session, seq=seq, attempts=None, retry_at=None
            )

    def failed(self, uid: str, *, attempts: int, retry_at: datetime, session: str) -> None:
        """The turn behind the mark was tried in vain so many times."""
        self._store.set_meta(
            self._prefix + uid,
            session=session,
            attempts=attempts,
            retry_at=timestamp(retry_at.astimezone(UTC)),
        )


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
