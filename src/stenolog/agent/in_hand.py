"""Messages on their way into the store: what could not be written stays in hand, in its order.

Nothing is written past a message that waits, so that the log never has an answer before its
question. Each keeps the token it was first written with: whether or not a write that failed has
arrived after all, it is there once.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from msgspec import Struct

from stenolog.agent.events import NotSaved, SavedAfterAll, Tell
from stenolog.errors import InvalidKey, LeaseLost, OnceConflict, RefusedMessage
from stenolog.sessions.session_store import SessionStore

Run = Callable[..., Awaitable[Any]]
"""Calls a function in a thread and waits for what it returns."""


class _Waiting(Struct, frozen=True):
    body: Mapping[str, Any]
    token: str


class InHand:
    """What of one session is said and not stored."""

    def __init__(self, key: str, run: Run) -> None:
        self._key = key
        self._run = run
        self._waiting: list[_Waiting] = []
        self._order = asyncio.Lock()

    @property
    def bodies(self) -> list[Mapping[str, Any]]:
        """The messages that wait, the oldest first."""
        return [one.body for one in self._waiting]

    async def keep(
        self, sessions: SessionStore, body: Mapping[str, Any], *, tell: Tell, once: str = ""
    ) -> int | None:
        """Store a message; its seq, or None where it stays in hand, which is told.

        Raises UsageError where it will never be taken, and LeaseLost.
        """
        one = _Waiting(body, once or secrets.token_hex(12))
        async with self._order:
            seq = await self._write(sessions, one) if await self._cleared(sessions, tell) else None
            if seq is None:
                self._waiting.append(one)
        if seq is None:
            tell(NotSaved(count=len(self._waiting), words=await self._run(_why, sessions)))
        return seq

    async def flush(self, sessions: SessionStore, *, tell: Tell) -> bool:
        """Whether all that waited is stored now. Raises LeaseLost."""
        async with self._order:
            if await self._cleared(sessions, tell):
                return True
        tell(NotSaved(count=len(self._waiting), words=await self._run(_why, sessions)))
        return False

    async def _cleared(self, sessions: SessionStore, tell: Tell) -> bool:
        waited = len(self._waiting)
        while self._waiting:
            if await self._write(sessions, self._waiting[0]) is None:
                return False
            del self._waiting[0]
        if waited:
            tell(SavedAfterAll(count=waited))
        return True

    async def _write(self, sessions: SessionStore, one: _Waiting) -> int | None:
        seq: int | None = await self._run(
            sessions.add_full_message, self._key, one.body, once=one.token
        )
        if seq is None and sessions.store is not None:
            # The face does not say why. With the same token the store can be asked again.
            seq = await self._run(_again, sessions, self._key, one)
        return seq


def _again(sessions: SessionStore, key: str, one: _Waiting) -> int | None:
    """The same write, of which only what will never succeed is raised."""
    store = sessions.store
    assert store is not None
    try:
        return store.add_full_message(key, one.body, once=one.token)
    except (InvalidKey, LeaseLost, OnceConflict, RefusedMessage):
        raise
    except Exception:  # noqa: BLE001 - it is counted and logged by the face, and tried again
        return None


def _why(sessions: SessionStore) -> str:
    health = sessions.health()
    return "; ".join(health.problems) or health.last_error or "the store does not say why"
