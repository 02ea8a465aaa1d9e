"""Consolidation progress: the mark of each session.

Marks are stored in the notes store: deleting the notes deletes the marks too, and consolidation
starts from the beginning. A mark is named by the uid of its session. So a session that was deleted
and created again has no mark, a restored one finds its own, and no key is too long. The mark does
not contain the key of the session: a mark that is written during a purge reveals nothing about the
user. Its name starts with a colon, which the key of a scope never does.
"""

from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct

from stenolog.errors import NoSuchSession
from stenolog.memory.scopes import agent_prefix
from stenolog.records import timestamp
from stenolog.stores.base import Store

PREFIX: Final = ":mark:"


class ProgressMark(Struct, frozen=True, kw_only=True):
    """The progress of a session, and the number of failed attempts at the next turn."""

    seq: int = 0
    """Every finished turn up to this seq is in the notes."""
    attempts: int = 0
    retry_at: datetime | None = None
    """Time of the next model call after a failure, or None."""


class ConsolidationProgress:
    """The marks of one agent."""

    def __init__(self, store: Store, *, agent: str) -> None:
        """Store the marks in the notes store."""
        self._store = store
        self._prefix = PREFIX + agent_prefix(agent)

    def read(self, uid: str) -> ProgressMark:
        """Return the mark of a session; without one, a mark at the beginning."""
        try:
            meta = self._store.info(self._prefix + uid).meta
        except NoSuchSession:
            return ProgressMark()
        attempts, retry_at = _positive_int(meta.get("attempts")), meta.get("retry_at")
        return ProgressMark(
            seq=_positive_int(meta.get("seq")),
            attempts=attempts,
            retry_at=datetime.fromisoformat(retry_at) if isinstance(retry_at, str) else None,
        )

    def move(self, uid: str, seq: int) -> None:
        """Record that every finished turn up to this seq is in the notes.

        The mark never moves backwards, except that of two concurrent calls the lower one may win.
        Then turns are read again, and their idempotency keys prevent duplicate notes. Raises the
        errors of the store.
        """
        mark = self.read(uid)
        if seq > mark.seq:
            # Earlier versions wrote `session`; see the module docstring.
            self._store.set_meta(
                self._prefix + uid, seq=seq, attempts=None, retry_at=None, session=None
            )

    def failed(self, uid: str, *, attempts: int, retry_at: datetime) -> None:
        """Record the number of failed attempts at the turn after the mark, and the next time."""
        self._store.set_meta(
            self._prefix + uid,
            attempts=attempts,
            retry_at=timestamp(retry_at.astimezone(UTC)),
            session=None,
        )


def mark_uid(key: str) -> str | None:
    """Return the uid of the session of a mark, or None if the key does not belong to a mark."""
    return key.rpartition(":")[2] if key.startswith(PREFIX) else None


def _positive_int(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0
