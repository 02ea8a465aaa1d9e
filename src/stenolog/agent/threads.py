"""Where what blocks is done: stores and indexes; what waits for a model; and leases.

Each has threads of its own: a summary that takes a minute keeps no message from being stored, and
no lease from being renewed.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from stenolog.agent.waiting import outcome
from stenolog.errors import StoreClosed

T = TypeVar("T")

_STORING: Final = 32
_ASKING: Final = 64
_LEASING: Final = 4


class Threads:
    """A few threads beside one event loop."""

    def __init__(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self._closed = False
        self._pools = {
            name: ThreadPoolExecutor(count, thread_name_prefix=f"stenolog-{name}")
            for name, count in (("store", _STORING), ("ask", _ASKING), ("lease", _LEASING))
        }

    async def run(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """What a function returns that reads or writes a store.

        Cancelled, it waits until the call has ended: a write that has begun is not taken back.
        """
        return await outcome(self._begin("store", function, *values, **named))

    async def ask(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """What a function returns that may ask the model. Cancelled, it is left to itself."""
        called = self._begin("ask", function, *values, **named)
        try:
            return await asyncio.shield(called)
        except asyncio.CancelledError:
            called.add_done_callback(_looked_at)
            raise

    def lease(self, function: Callable[..., T], *values: Any, **named: Any) -> asyncio.Future[T]:
        """What a function will return that takes, renews or gives back a lease."""
        return self._begin("lease", function, *values, **named)

    def close(self) -> None:
        """End the threads, once what they do has ended."""
        self._closed = True
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)

    def _begin(
        self, pool: str, function: Callable[..., T], *values: Any, **named: Any
    ) -> asyncio.Future[T]:
        if self._closed:
            raise StoreClosed("the agent was closed before this call")
        call = partial(function, *values, **named)
        return self.event_loop.run_in_executor(self._pools[pool], call)


def _looked_at(called: asyncio.Future[Any]) -> None:
    if not called.cancelled():
        called.exception()
