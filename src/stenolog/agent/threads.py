"""Thread pools for blocking calls, and functions that keep waiting after a cancellation.

Stores, model calls and leases have separate pools. A summary that takes a minute must not delay
storing a message or renewing a lease.
"""

import asyncio
import atexit
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Final, TypeVar

from stenolog.errors import StoreClosed

T = TypeVar("T")


async def wait_shielded(*futures: asyncio.Future[Any]) -> bool:
    """Wait until all futures are done; return whether the caller was cancelled while waiting."""
    was_cancelled = False
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            was_cancelled = True
    return was_cancelled


async def get_result_shielded(future: asyncio.Future[T]) -> T:
    """Return the result of a future.

    If the caller is cancelled, wait until the future is done, then raise CancelledError. The future
    itself is not cancelled.
    """
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await wait_shielded(future)
        _retrieve_error(future)
        raise


def start_task(coroutine: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Start a task, and keep it in `tasks` until it ends, so that it is not garbage-collected."""
    task = asyncio.create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> bool:
    """Cancel the tasks and wait until they end; return whether the caller was cancelled, too."""
    all_tasks = list(tasks)
    for task in all_tasks:
        task.cancel()
    was_cancelled = await wait_shielded(*all_tasks)
    for task in all_tasks:
        _retrieve_error(task)
    return was_cancelled


_MAX_THREADS: Final = {"store": 32, "ask": 64, "lease": 4}
"""Maximum number of threads of each pool."""


class ThreadPool:
    """Threads that run calls for one event loop. Only code in that event loop may use the pool.

    A ThreadPool has about half of the overhead of a ThreadPoolExecutor, whose futures have locks
    and are copied into asyncio futures. Results that arrive together wake the event loop once.
    """

    def __init__(self, event_loop: asyncio.AbstractEventLoop, name: str, max_threads: int) -> None:
        self._event_loop = event_loop
        self._name = name
        self._max_threads = max_threads
        self._threads: list[Thread] = []
        self._calls = SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None]()
        self._pending = 0
        """Number of calls whose result the event loop has not received."""
        self._results: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_woken = False
        """Whether the event loop is about to call `deliver_results`."""
        _pools.add(self)

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run the call in a thread; return the future of its result."""
        future: asyncio.Future[T] = self._event_loop.create_future()
        thread_count = len(self._threads)
        if thread_count <= self._pending and thread_count < self._max_threads:
            # The thread is a daemon: only `finish_calls` waits for it when the program ends.
            thread = Thread(
                target=self._run_calls, name=f"{self._name}_{thread_count}", daemon=True
            )
            try:
                thread.start()
                self._threads.append(thread)
            except RuntimeError:  # too many threads on this machine
                if not thread_count:
                    raise  # before the call is queued, so that it does not run later
        self._pending += 1
        self._calls.put((future, call))
        return future

    def cancel_waiting_calls(self) -> None:
        """Cancel the calls that no thread has started."""
        with suppress(Empty):
            while True:
                queued_call = self._calls.get_nowait()
                if queued_call is not None:
                    self._pending -= 1
                    queued_call[0].cancel()

    def finish_calls(self) -> None:
        """Wait until all calls are done, then end the threads."""
        self.end_threads()
        for thread in self._threads:
            thread.join()

    def end_threads(self) -> None:
        """Tell the threads to end after the queued calls; do not wait for the threads."""
        for _ in self._threads:
            self._calls.put(None)

    def deliver_results(self) -> None:
        """Set the results of finished calls in the futures of the callers."""
        self._is_woken = False  # reset first, so that a later result wakes the loop again
        while self._results:
            future, result, error = self._results.popleft()
            self._pending -= 1
            if future.done():
                continue  # cancelled
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

    def _run_calls(self) -> None:
        while (queued_call := self._calls.get()) is not None:
            future, call = queued_call
            result: Any = None
            error: BaseException | None = None
            try:
                result = call()
            except StopIteration as caught:
                # A future rejects StopIteration, so replace it.
                error = RuntimeError(f"the call raised {caught!r}")
            except BaseException as caught:  # noqa: BLE001 - the caller gets it
                error = caught
            self._results.append((future, result, error))
            # Drop all references to the call before this thread waits for the next call.
            del queued_call, future, call, result, error
            if not self._is_woken:
                self._is_woken = True
                with suppress(RuntimeError):  # the event loop is closed
                    self._event_loop.call_soon_threadsafe(self.deliver_results)


_pools: Final = weakref.WeakSet[ThreadPool]()


@atexit.register
def _finish_calls() -> None:
    """Wait for calls in progress when a program ends without closing its agents."""
    for pool in list(_pools):
        pool.finish_calls()


class Threads:
    """The thread pools of one event loop."""

    def __init__(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self._closed = False
        self._pools = {
            name: ThreadPool(self.event_loop, f"stenolog-{name}", count)
            for name, count in _MAX_THREADS.items()
        }
        # If `close` is never called, the threads end when this object is garbage-collected.
        for pool in self._pools.values():
            weakref.finalize(self, pool.end_threads).atexit = False

    async def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function that reads or writes a store, and return its result.

        A cancelled caller waits until the function has ended, because a started write cannot be
        undone.
        """
        return await get_result_shielded(self._submit("store", function, *args, **kwargs))

    async def run_model(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run a function that may call the model.

        If the caller is cancelled, the function continues to run.
        """
        future = self._submit("ask", function, *args, **kwargs)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(_retrieve_error)
            raise

    def run_lease(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> asyncio.Future[T]:
        """Run a function that acquires, renews or releases a lease; return a future."""
        return self._submit("lease", function, *args, **kwargs)

    def close(self) -> None:
        """Cancel the queued calls, wait for the calls in progress, and close the pools."""
        self._closed = True
        for pool in self._pools.values():
            pool.cancel_waiting_calls()
            pool.finish_calls()
            pool.deliver_results()

    def _submit(
        self, pool: str, function: Callable[..., T], *args: Any, **kwargs: Any
    ) -> asyncio.Future[T]:
        if self._closed:
            raise StoreClosed("the agent was closed before this call")
        return self._pools[pool].submit(partial(function, *args, **kwargs))


def _retrieve_error(future: asyncio.Future[Any]) -> None:
    """Mark the error of a future as retrieved, so that asyncio does not log it."""
    if not future.cancelled():
        future.exception()
