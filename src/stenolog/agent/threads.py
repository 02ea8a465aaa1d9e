"""Thread pools for blocking calls: stores, model calls, leases.

The pools are separate, so that a summary that takes a minute does not delay storing a message or
renewing a lease.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from stenolog.agent.shielded_wait import result_shielded
from stenolog.errors import StoreClosed

T = TypeVar("T")

_STORE_THREADS: Final = 32
_MODEL_THREADS: Final = 64
_LEASE_THREADS: Final = 4


class Threads:
    """The thread pools of one event loop."""

    def __init__(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self._closed = False
        self._pools = {
            name: ThreadPoolExecutor(count, thread_name_prefix=f"stenolog-{name}")
            for name, count in (
                ("store", _STORE_THREADS),
                ("ask", _MODEL_THREADS),
                ("lease", _LEASE_THREADS),
            )
        }

    async def run(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """Run a function that reads or writes a store, and return its result.

        If this is cancelled, it waits until the call has ended: a started write cannot be undone.
        """
        return await result_shielded(self._begin("store", function, *values, **named))

    async def ask(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """Run a function that may call the model. If cancelled, the call continues."""
        called = self._begin("ask", function, *values, **named)
        try:
            return await asyncio.shield(called)
        except asyncio.CancelledError:
            called.add_done_callback(_retrieve_error)
            raise

    def lease(self, function: Callable[..., T], *values: Any, **named: Any) -> asyncio.Future[T]:
        """Run a function that acquires, renews or releases a lease."""
        return self._begin("lease", function, *values, **named)

    def close(self) -> None:
        """Close the pools, after the calls in progress have ended."""
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


def _retrieve_error(called: asyncio.Future[Any]) -> None:
    if not called.cancelled():
        called.exception()
