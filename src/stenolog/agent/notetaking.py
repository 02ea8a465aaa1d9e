"""Notes are made behind the talk: one session after the other, and never beside an answer.

A model that runs on this machine would answer its user more slowly otherwise. What is not done when
the program ends waits in the log: the memory knows which turns it has made notes of.
"""

import asyncio
import logging
from contextlib import suppress

from stenolog.agent.blocking import Closing
from stenolog.agent.in_hand import Run
from stenolog.errors import StenologError
from stenolog.memory.consolidation import Consolidated
from stenolog.memory.memory import Memory

_logger = logging.getLogger("stenolog")


class Notetaking:
    """Makes the notes of one agent, in one task."""

    def __init__(self, memory: Memory, run: Run) -> None:
        self._memory = memory
        self._run = run
        self._waiting: dict[str, None] = {}
        self._woken = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._done = asyncio.Event()
        self._held = 0
        self._task = asyncio.create_task(self._work())

    def add(self, key: str) -> None:
        """Have notes made of what is new in a session."""
        self._waiting[key] = None
        self._done.clear()
        self._woken.set()

    def hold(self) -> None:
        """An answer is being made: begin nothing."""
        self._held += 1
        self._quiet.clear()

    def let_go(self) -> None:
        """One answer less is being made."""
        self._held -= 1
        if not self._held:
            self._quiet.set()

    async def idle(self) -> None:
        """Wait until there is nothing to do."""
        await self._done.wait()

    async def close(self) -> None:
        """End; what is being written is ended first, by who closes the model."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _work(self) -> None:
        try:
            for key in await self._run(self._memory.waiting):
                self.add(key)
            while True:
                while self._waiting:
                    await self._quiet.wait()
                    await self._consolidate(next(iter(self._waiting)))
                self._woken.clear()
                self._done.set()
                await self._woken.wait()
        except Closing:
            return

    async def _consolidate(self, key: str) -> None:
        self._waiting.pop(key)
        try:
            done: Consolidated = await self._run(self._memory.consolidate, key, most_calls=1)
        except StenologError as error:
            _logger.warning("no notes could be made of %r: %s", key, error)
            return
        if done.waiting and done.turns:
            self.add(key)
