"""Where what blocks is done: stores, indexes, summaries."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")

_MOST: Final = 32

_logger = logging.getLogger("stenolog")


class Threads:
    """A few threads beside one event loop."""

    def __init__(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(_MOST, thread_name_prefix="stenolog-agent")

    def begin(self, function: Callable[..., T], *values: Any, **named: Any) -> asyncio.Future[T]:
        """Call a function in a thread; what it will return."""
        return self.event_loop.run_in_executor(self._pool, partial(function, *values, **named))

    async def run(self, function: Callable[..., T], *values: Any, **named: Any) -> T:
        """What a function returns that is called in a thread.

        Cancelled, it waits until the call has ended: a write that has begun is not taken back.
        """
        called = self.begin(function, *values, **named)
        try:
            return await asyncio.shield(called)
        except asyncio.CancelledError:
            await asyncio.wait([called])
            if not called.cancelled() and called.exception() is not None:
                _logger.debug("failed while it was stopped: %r", called.exception())
            raise

    def close(self) -> None:
        """End the threads; all calls have ended before."""
        self._pool.shutdown(wait=True, cancel_futures=True)
