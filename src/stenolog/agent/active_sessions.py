"""The sessions in which this process is working: their turns, tasks, locks and callers."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from msgspec import Struct, field

from stenolog.agent.instance import AgentInstance
from stenolog.agent.lease_renewal import HeldLease
from stenolog.agent.turn import CancelReason, Turn
from stenolog.agent.turn_events import Answer, EventHandler, ignore_event
from stenolog.errors import LeaseLost, StenologError

TAKEN_OVER_TEXT: Final = "Another process has taken over this turn."


class ActiveSession(Struct, eq=False):
    """The state of one session in this process."""

    instance: AgentInstance
    key: str
    turn: Turn | None = None
    task: asyncio.Task[Answer] | None = None
    summary_task: asyncio.Task[None] | None = None
    lease: HeldLease | None = None
    on_event: EventHandler = ignore_event
    caller_count: int = 0
    waiting_messages: int = 0
    waits_for_lease: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that a turn or a session change holds while it runs or waits for the lease."""
    store_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that keeps new messages in the order in which they arrived."""
    new_seqs: list[int] = []
    """Seqs of the user messages that were stored while this process works in the session."""

    @property
    def is_idle(self) -> bool:
        """Whether this process has no work in the session."""
        return not (self.caller_count or self.summary_task or self.task)

    @asynccontextmanager
    async def hold_lock(self) -> AsyncIterator[None]:
        """Wait until a summary in progress ends, and hold the lock in the `async with` block."""
        async with self.lock:
            if self.summary_task is not None:
                await asyncio.wait([self.summary_task])
            yield

    @contextmanager
    def count_as_waiting(self) -> Iterator[None]:
        """Count a message as waiting while the `with` block runs."""
        self.waiting_messages += 1
        try:
            yield
        finally:
            self.waiting_messages -= 1

    def cancel(self, reason: CancelReason) -> None:
        """Cancel the turn. A second call does not replace the first reason."""
        if self.turn is not None and self.task is not None:
            if not self.turn.cancel_reason:
                self.turn.cancel_reason = reason
            self.task.cancel()


class ActiveSessions:
    """The active sessions of one event loop. A session without work is dropped."""

    def __init__(self) -> None:
        self._sessions: dict[tuple[str | None, str], ActiveSession] = {}
        self.no_callers = asyncio.Event()
        """Set while no caller uses a session."""
        self.no_callers.set()

    def __iter__(self) -> Iterator[ActiveSession]:
        return iter(self._sessions.values())

    def find(self, instance: AgentInstance, key: str) -> ActiveSession | None:
        """Return the state of a session; None if this process is not working on it."""
        return self._sessions.get((instance.id, key))

    @property
    def busy(self) -> set[str]:
        """Keys of the sessions in which this process writes an answer."""
        return {session.key for session in self if session.task is not None}

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The running turns and summaries."""
        tasks = [task for session in self for task in (session.task, session.summary_task)]
        return [task for task in tasks if task is not None]

    @contextmanager
    def use(self, instance: AgentInstance, key: str) -> Iterator[ActiveSession]:
        """Yield the state of a session, and keep the state at least until the block ends."""
        session = self.find(instance, key)
        if session is None:
            session = self._sessions[instance.id, key] = ActiveSession(instance, key)
        session.caller_count += 1
        self.no_callers.clear()
        try:
            yield session
        finally:
            session.caller_count -= 1
            self.drop_if_idle(session)
            if not any(active.caller_count for active in self):
                self.no_callers.set()

    def drop_if_idle(self, session: ActiveSession) -> None:
        """Drop the state of the session if the session is idle."""
        if session.is_idle and self.find(session.instance, session.key) is session:
            del self._sessions[session.instance.id, session.key]


def failed_answer(key: str, error: StenologError, *, text: str = "", saved: bool = True) -> Answer:
    """Return the Answer for a failed turn.

    `text` replaces the text of the error. `saved`: whether the user's message is stored.
    """
    if isinstance(error, LeaseLost):
        text = TAKEN_OVER_TEXT
    return Answer(key=key, text=text or str(error), outcome="failed", saved=saved, error=error)
