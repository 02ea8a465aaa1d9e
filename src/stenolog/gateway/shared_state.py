"""State shared by all requests: the agents, the settings and the limits."""

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.threads import start_task
from stenolog.catalog.background_catalog import BackgroundCatalog
from stenolog.gateway.login import LoginLinks
from stenolog.settings.values import Settings

T = TypeVar("T")


Slot = ExitStack
"""A slot of a concurrency limit. `close` releases the slot; a second call has no effect."""


class ConcurrencyLimit:
    """Limit for concurrent requests. Requests above the limit are rejected at once and do not wait.

    A limit must be used in only one event loop.
    """

    def __init__(self, limit: int, *, status: int, noun: str) -> None:
        self.limit = limit
        self.in_use = 0
        """Number of slots in use."""
        self._status = status
        self._noun = noun

    def admit(self) -> Slot:
        """Take a slot. Raises HTTPException if no slot is free."""
        if self.in_use >= self.limit:  # guard: concurrency-limit
            text = f"Too many {self._noun}: {self.limit:,} are open. Try again in a moment."
            raise HTTPException(self._status, text, {"Retry-After": "1"})
        self.in_use += 1
        slot = Slot()
        slot.callback(self._release)
        return slot

    def _release(self) -> None:
        self.in_use -= 1


class SlotResponse(Response):
    """A response that holds a slot until the response is sent or fails."""

    def __init__(self, response: Response, slot: Slot) -> None:
        super().__init__()
        self._response = response
        self._slot = slot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response and release the slot."""
        with self._slot:
            await self._response(scope, receive, send)


class Gateway:
    """The served agents, the settings and the limits of a gateway."""

    def __init__(self, loop: AgentLoop, settings: Settings, *, read_only: bool = False) -> None:
        self.loop = loop
        self.settings = settings
        self.read_only = read_only
        """Whether requests that change data are rejected, and no turn is resumed."""
        # Status 429 makes clients retry by themselves.
        self.turns = ConcurrencyLimit(settings.gateway.max_turns, status=429, noun="requests")
        self.streams = ConcurrencyLimit(settings.gateway.max_streams, status=503, noun="streams")
        self.login_links = LoginLinks()
        self.closing = asyncio.Event()
        """Set at shutdown: live streams end, and their clients reconnect elsewhere."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def agent(self, name: str | None) -> AgentInstance:
        """Return the named agent; for `main`, empty or None, the main agent. Raises UsageError."""
        return self.loop.registry.agent(None if name in (None, "", "main") else name)

    @property
    def indexing(self) -> tuple[int, int] | None:
        """Number of indexed sessions and of all sessions; None if all are indexed."""
        catalogs = (agent.catalog for agent in self.loop.registry)
        progresses = (item.progress for item in catalogs if isinstance(item, BackgroundCatalog))
        counts = [progress for progress in progresses if progress]
        if not counts:
            return None
        return sum(done for done, _ in counts), sum(total for _, total in counts)

    def start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that a shutdown waits for."""
        return start_task(work, self._tasks)

    async def wait_for_tasks(self) -> None:
        """Wait until all tasks of `start_task` have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves a request."""
    return cast(Gateway, request.app.state.gateway)
