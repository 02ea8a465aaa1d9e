"""The face of an agent loop, taken for a store: for the stand-in, which has none beneath.

What the face does not tell is put together from its messages; meta is kept for as long as this
lives, since it only says what a compaction did last.
"""

from datetime import UTC, datetime
from typing import Any, Final

from stenolog.context.compaction import Talk
from stenolog.errors import NoSuchSession, NotStored
from stenolog.records import Message, SessionInfo
from stenolog.sessions.session_store import SessionStore
from stenolog.stores import spans
from stenolog.stores.base import Store

_EPOCH: Final = datetime.fromtimestamp(0, UTC)


def talk_of(sessions: Store | SessionStore) -> Talk:
    """The store beneath a face, the face itself where it has none, or the store that was given."""
    if not isinstance(sessions, SessionStore):
        return sessions
    return sessions.store if sessions.store is not None else OverFace(sessions)


class OverFace:
    """What a compaction needs of a store, over the face. Raises NotStored where a write failed."""

    def __init__(self, face: SessionStore) -> None:
        self._face = face
        self._meta: dict[str, dict[str, Any]] = {}

    def info(self, key: str) -> SessionInfo:
        """What the messages tell. Raises NoSuchSession where there is nothing at all."""
        everything = self._face.get_history(key, full=True)
        summary = self._face.get_summary(key)
        if not everything and not summary:
            raise NoSuchSession(key)
        shown = [message for message in everything if not message.hidden]
        last = everything[-1].seq if everything else 0
        times = [message.at for message in everything] or [_EPOCH]
        return SessionInfo(
            key=key,
            uid="",
            created=times[0],
            updated=times[-1],
            last_seq=last,
            floor=shown[0].seq - 1 if shown else last,
            visible=len(shown),
            count=len(everything),
            lost=0,
            damaged=0,
            void_bytes=0,
            archived=0,
            generation=0,
            bytes=0,
            undoable=0,
            summary=summary,
            meta=dict(self._meta.get(key, {})),
            forked_from=None,
            in_sight=tuple(spans.union([(message.seq, message.seq) for message in shown])),
        )

    def get_history(self, key: str) -> list[Message]:
        """The visible messages."""
        return self._face.get_history(key)

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields, for this run."""
        kept = self._meta.setdefault(key, {}) | fields
        self._meta[key] = {name: value for name, value in kept.items() if value is not None}

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """Summary and floor in one step. Raises NotStored."""
        # The floor that was expected is one of ours: the face counts from its own.
        del expect_floor
        if not self._face.checkpoint(key, summary=summary, upto=upto):
            raise NotStored(f"{key!r}: {self._face.health().last_error}")

    def delete(self, key: str) -> object:
        """A session of the face is not deleted."""
        return self._meta.pop(key, None)
