"""Notes are made behind the talk: one session after the other, and beside no answer if it can be.

A model that runs on this machine would answer its user more slowly otherwise. What is not done when
the program ends waits in the log: the memory knows which turns it has made notes of.
"""

import asyncio
import logging
from contextlib import suppress
from typing import Final

from stenolog.agent.blocking import Closing
from stenolog.agent.instance import AgentInstance
from stenolog.agent.threads import Threads
from stenolog.agent.waiting import ended
from stenolog.errors import StenologError
from stenolog.memory.consolidation import Consolidated

PATIENCE: Final = 30.0
"""So many seconds it waits for a moment without an answer being made; then it goes on beside."""

_logger = logging.getLogger("stenolog")


class Notetaking:
    """Makes the notes of one agent, in one task."""

    def __init__(
        self, instance: AgentInstance, threads: Threads, *, patience: float = PATIENCE
    ) -> None:
        self._instance = instance
        self._threads = threads
        self._patience = patience
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
        """End; what is being asked was cut off before, by who closes the model."""
        await ended([self._task])

    async def _work(self) -> None:
        try:
            await self._look_back()
            while True:
                while self._waiting:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._quiet.wait(), self._patience)
                    await self._consolidate(next(iter(self._waiting)))
                self._woken.clear()
                self._done.set()
                await self._woken.wait()
        except Closing:
            return
        finally:
            self._done.set()

    async def _look_back(self) -> None:
        """Take up what an earlier run has left."""
        memory = self._instance.memory
        if memory is None:
            return
        try:
            for key in await self._threads.ask(memory.waiting):
                self.add(key)
        except StenologError as error:
            _logger.warning("which notes are still to be made cannot be told: %s", error)

    async def _consolidate(self, key: str) -> None:
        self._waiting.pop(key)
        try:
            done: Consolidated = await self._threads.ask(self._instance.consolidate, key)
        except StenologError as error:
            _logger.warning("no notes could be made of %r: %s", key, error)
            return
        except Exception:
            _logger.exception("no notes could be made of %r", key)
            return
        if done.waiting and done.turns:
            self.add(key)
