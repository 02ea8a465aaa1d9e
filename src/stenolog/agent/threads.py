"""Thread pools for blocking calls, and waits that continue after the task is cancelled.

Stores, model calls and leases have separate pools, so that a summary that takes a minute does not
delay storing a message or renewing a lease.
"""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from stenolog.errors import StoreClosed

T = TypeVar("T")


async def wait_shielded(*futures: asyncio.Future[Any]) -> bool:
    """Wait until all futures are done; return whether the caller was cancelled while waiting."""
    cancelled = False
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def result_shielded(future: asyncio.Future[T]) -> T:
    """Return the result of a future.

    If the caller is cancelled, wait until the future is done, then raise CancelledError. The future
    itself is not cancelled.
    """
    if await wait_shielded(future):
        if not future.cancelled():
            future.exception()  # mark the error as retrieved
        raise asyncio.CancelledError
    return future.result()


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> bool:
    """Cancel the tasks and wait until they end; return whether the caller was cancelled, too."""
    all_tasks = list(tasks)
    for task in all_tasks:
        task.cancel()
    cancelled = await wait_shielded(*all_tasks)
    for task in all_tasks:
        if not task.cancelled():
            task.exception()
    return cancelled


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

        A cancelled caller still waits until the function has ended, because a started write cannot
        be undone.
        """
        return await result_shielded(self._begin("store", function, *values, **named))

    async def run_model(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """Run a function that may call the model.

        If the caller is cancelled, the function continues to run.
        """
        called = self._begin("ask", function, *values, **named)
        try:
            return await asyncio.shield(called)
        except asyncio.CancelledError:
            called.add_done_callback(_retrieve_error)
            raise

    def run_lease(
        self, function: Callable[..., T], *values: Any, **named: Any
    ) -> asyncio.Future[T]:
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
