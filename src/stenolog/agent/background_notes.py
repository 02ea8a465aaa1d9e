"""Background consolidation: writes the notes of one session at a time.

Consolidation waits for a pause between answers, so that it does not slow down the answers of a
local model. The memory records which turns have notes, so the next start finds the turns without
notes. If the model or the store fails, a timer starts the next attempt, even if no new message
arrives.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from stenolog.agent.instance import AgentInstance, ModelClosing
from stenolog.agent.threads import Threads, cancel_and_wait
from stenolog.errors import StenologError

_MAX_WAIT_SECONDS: Final = 30.0
"""Maximum wait in seconds for a pause between answers; after that, notes are written anyway."""

_STORE_RETRY_SECONDS: Final = 60.0
"""Delay in seconds before consolidation is retried after a store error."""

_logger = logging.getLogger("stenolog")


class BackgroundNotes:
    """A background task that writes the notes of one agent."""

    def __init__(self, instance: AgentInstance, threads: Threads) -> None:
        self._instance = instance
        self._threads = threads
        self._queued_keys: dict[str, None] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._session_added = asyncio.Event()
        self._answers_done = asyncio.Event()
        self._answers_done.set()
        self._queue_empty = asyncio.Event()
        self._answers_in_progress = 0
        self._task = asyncio.create_task(self._write_queued_notes())

    def add_session(self, key: str) -> None:
        """Queue a session now, and cancel its timer."""
        self._cancel_timer(key)
        self._queued_keys[key] = None
        self._queue_empty.clear()
        self._session_added.set()

    def pause(self) -> None:
        """Register an answer in progress, so that the next consolidation waits."""
        self._answers_in_progress += 1
        self._answers_done.clear()

    def resume(self) -> None:
        """Unregister an answer that is no longer in progress."""
        self._answers_in_progress -= 1
        if not self._answers_in_progress:
            self._answers_done.set()

    async def wait_until_queue_empty(self) -> None:
        """Wait until the queue is empty; sessions that wait for a timer are not in the queue."""
        await self._queue_empty.wait()

    async def close(self) -> None:
        """Cancel the task and the timers.

        The caller must close the model first, so that requests in progress end.
        """
        for key in list(self._timers):
            self._cancel_timer(key)
        await cancel_and_wait([self._task])

    async def _write_queued_notes(self) -> None:
        try:
            await self._queue_earlier_sessions()
            while True:
                while self._queued_keys:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._answers_done.wait(), _MAX_WAIT_SECONDS)
                    await self._consolidate(next(iter(self._queued_keys)))
                self._session_added.clear()
                self._queue_empty.set()
                await self._session_added.wait()
        except ModelClosing:
            return
        finally:
            self._queue_empty.set()

    async def _queue_earlier_sessions(self) -> None:
        """Queue the sessions that an earlier run left without notes."""
        memory = self._instance.memory
        if memory is None:
            return
        try:
            for key in await self._threads.run_model(memory.waiting):
                self.add_session(key)
        except StenologError as error:
            _logger.warning("cannot read which sessions still need notes: %s", error)

    async def _consolidate(self, key: str) -> None:
        self._queued_keys.pop(key)
        try:
            report = await self._threads.run_model(self._instance.consolidate, key)
        except StenologError as error:
            _logger.warning("writing notes about %r failed: %s", key, error)
            self._add_session_later(key, _STORE_RETRY_SECONDS)
            return
        except Exception:
            _logger.exception("writing notes about %r failed", key)
            return
        if report.retry_at is not None:
            self._add_session_later(key, (report.retry_at - _now()).total_seconds())
        elif report.waiting and report.turns:
            self.add_session(key)

    def _add_session_later(self, key: str, seconds: float) -> None:
        """Queue the session after a delay, unless `add_session` queues the session first."""
        self._cancel_timer(key)
        self._timers[key] = _call_later(max(seconds, 0.0), lambda: self.add_session(key))

    def _cancel_timer(self, key: str) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()


def _now() -> datetime:
    return datetime.now(UTC)


def _call_later(seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, callback)
