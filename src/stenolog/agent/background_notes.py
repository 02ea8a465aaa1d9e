"""Background consolidation: writes the notes of one session at a time.

Consolidation waits for a pause between answers, because a model on this machine would answer more
slowly otherwise. The memory knows which turns have notes, so the next start finds the turns without
notes. After a failure a timer starts the next attempt, so that an idle agent writes its notes, too.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from stenolog.agent.blocking_model import ModelClosing
from stenolog.agent.instance import AgentInstance
from stenolog.agent.threads import Threads, cancel_and_wait
from stenolog.errors import StenologError
from stenolog.memory.consolidation import ConsolidationReport

MAX_WAIT: Final = 30.0
"""Maximum wait in seconds for a pause between answers; after that, notes are written anyway."""

_STORE_RETRY: Final = 60.0
"""Delay in seconds before the next attempt after an error of a store."""

_logger = logging.getLogger("stenolog")


class BackgroundNotes:
    """Writes the notes of one agent, in one task."""

    def __init__(
        self, instance: AgentInstance, threads: Threads, *, patience: float = MAX_WAIT
    ) -> None:
        self._instance = instance
        self._threads = threads
        self._patience = patience
        self._waiting: dict[str, None] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._added = asyncio.Event()
        self._no_answers = asyncio.Event()
        self._no_answers.set()
        self._done = asyncio.Event()
        self._answers = 0
        self._task = asyncio.create_task(self._work())

    def add(self, key: str) -> None:
        """Queue a session with new messages."""
        self._cancel_timer(key)
        self._waiting[key] = None
        self._done.clear()
        self._added.set()

    def pause(self) -> None:
        """Register an answer in progress: start no new consolidation."""
        self._answers += 1
        self._no_answers.clear()

    def resume(self) -> None:
        """Unregister an answer in progress."""
        self._answers -= 1
        if not self._answers:
            self._no_answers.set()

    async def idle(self) -> None:
        """Wait until the queue is empty."""
        await self._done.wait()

    async def close(self) -> None:
        """Cancel the task and the timers.

        The caller has closed the model, which ended any request.
        """
        for key in list(self._timers):
            self._cancel_timer(key)
        await cancel_and_wait([self._task])

    async def _work(self) -> None:
        try:
            await self._queue_earlier()
            while True:
                while self._waiting:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._no_answers.wait(), self._patience)
                    await self._consolidate(next(iter(self._waiting)))
                self._added.clear()
                self._done.set()
                await self._added.wait()
        except ModelClosing:
            return
        finally:
            self._done.set()

    async def _queue_earlier(self) -> None:
        """Queue the sessions that an earlier run left without notes."""
        memory = self._instance.memory
        if memory is None:
            return
        try:
            for key in await self._threads.run_model(memory.waiting):
                self.add(key)
        except StenologError as error:
            _logger.warning("cannot read which sessions still need notes: %s", error)

    async def _consolidate(self, key: str) -> None:
        self._waiting.pop(key)
        try:
            done: ConsolidationReport = await self._threads.run_model(
                self._instance.consolidate, key
            )
        except StenologError as error:
            _logger.warning("writing notes about %r failed: %s", key, error)
            self._retry(key, _STORE_RETRY)
            return
        except Exception:
            _logger.exception("writing notes about %r failed", key)
            return
        if done.retry_at is not None:
            self._retry(key, (done.retry_at - _now()).total_seconds())
        elif done.waiting and done.turns:
            self.add(key)

    def _retry(self, key: str, seconds: float) -> None:
        """Queue the session after a delay, unless `add` queues it first."""
        self._cancel_timer(key)
        self._timers[key] = _call_later(max(seconds, 0.0), lambda: self.add(key))

    def _cancel_timer(self, key: str) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()


def _now() -> datetime:
    return datetime.now(UTC)


def _call_later(seconds: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, callback)
