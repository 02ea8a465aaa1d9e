"""What every request of the gateway works with."""

import asyncio
from typing import Any, TypeVar, cast

from starlette.requests import Request

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.gateway.limits import streams_admission, turns_admission
from stenolog.settings.values import Settings

T = TypeVar("T")


class Gateway:
    """The agents that are served, and the settings they are served by."""

    def __init__(self, loop: AgentLoop, settings: Settings) -> None:
        self.loop = loop
        self.settings = settings
        self.turns = turns_admission(settings.gateway.max_turns)
        self.streams = streams_admission(settings.gateway.max_streams)
        self.closing = asyncio.Event()
        """Set when it ends: live streams end then, and their clients come back elsewhere."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def agent(self, name: str | None) -> AgentInstance:
        """The agent of this name; `main`, or none, is the first. Raises UsageError."""
        return self.loop.registry.agent(None if name in (None, "", "main") else name)

    def keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Hold a task until it has ended: the event loop alone would let go of it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def quiet(self) -> None:
        """Wait until all of them have ended; none begins another."""
        while self._tasks:
            await asyncio.wait(self._tasks)


def gateway_of(request: Request) -> Gateway:
    """The gateway that a request came to."""
    return cast(Gateway, request.app.state.gateway)
