"""What every request of the gateway works with."""

import asyncio
from collections import OrderedDict
from typing import Any, Final, TypeVar, cast

from starlette.requests import Request

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.errors import StoreUnavailable
from stenolog.gateway.following import Following
from stenolog.gateway.limits import streams_admission, turns_admission
from stenolog.settings.values import Settings
from stenolog.stores.base import Store

T = TypeVar("T")

_REMEMBERED: Final = 10_000
OFF: Final = (
    "the store cannot be used in this run, and a stand-in keeps the sessions; messages are "
    "answered, everything else has to wait for the next start"
)


class Gateway:
    """The agents that are served, and the settings they are served by."""

    def __init__(self, loop: AgentLoop, settings: Settings) -> None:
        self.loop = loop
        self.settings = settings
        self.turns = turns_admission(settings.gateway.max_turns)
        self.streams = streams_admission(settings.gateway.max_streams)
        self.following = Following(loop)
        self.closing = asyncio.Event()
        """Set when it ends: live streams end then, and their clients come back elsewhere."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._told: OrderedDict[tuple[str | None, str, int], None] = OrderedDict()

    def agent(self, name: str | None) -> AgentInstance:
        """The agent of this name; `main`, or none, is the first. Raises UsageError."""
        return self.loop.registry.agent(None if name in (None, "", "main") else name)

    def has_told(self, agent: str | None, key: str, seq: int) -> None:
        """Remember that a client has got the answer at this seq."""
        self._told[agent, key, seq] = None
        if len(self._told) > _REMEMBERED:
            self._told.popitem(last=False)

    def was_told(self, agent: str | None, key: str, seq: int) -> bool:
        """Whether a client has got it, as far as this process remembers."""
        return (agent, key, seq) in self._told

    def keep(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Hold a task until it has ended: the event loop alone would let go of it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def quiet(self) -> None:
        """Wait until all of them have ended; none begins another."""
        while self._tasks:
            await asyncio.wait(self._tasks)


def store_of(agent: AgentInstance) -> Store:
    """The store of an agent's sessions. Raises StoreUnavailable where a stand-in keeps them."""
    if agent.store is None:
        raise StoreUnavailable(OFF)
    return agent.store


def gateway_of(request: Request) -> Gateway:
    """The gateway that a request came to."""
    return cast(Gateway, request.app.state.gateway)
