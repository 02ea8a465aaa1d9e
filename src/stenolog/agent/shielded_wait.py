"""Helpers that wait for work that must complete, even if the waiting task is cancelled."""

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

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

    If the caller is cancelled, wait all the same and raise CancelledError then. The future itself
    is not cancelled.
    """
    if await wait_shielded(future):
        if not future.cancelled():
            future.exception()  # mark the error as retrieved
        raise asyncio.CancelledError
    return future.result()


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> bool:
    """Cancel the tasks and wait for them; return whether the caller was cancelled while waiting."""
    found = list(tasks)
    for task in found:
        task.cancel()
    cancelled = await wait_shielded(*found)
    for task in found:
        if not task.cancelled():
            task.exception()
    return cancelled
