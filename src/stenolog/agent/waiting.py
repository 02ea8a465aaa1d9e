"""Waiting for what must not be left half done, however often who waits is cancelled."""

import asyncio
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def settled(*futures: asyncio.Future[Any]) -> bool:
    """Wait until all of them are done; whether the one who waits was cancelled meanwhile."""
    cancelled = False
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


async def outcome(future: asyncio.Future[T]) -> T:
    """What comes of it. Cancelled, it is waited for all the same, and CancelledError raised then.

    The future itself is not cancelled.
    """
    if await settled(future):
        if not future.cancelled():
            future.exception()  # looked at: nobody else will
        raise asyncio.CancelledError
    return future.result()


async def ended(tasks: Iterable[asyncio.Task[Any]]) -> bool:
    """Cancel these and wait until they have ended; whether who waits was cancelled meanwhile."""
    found = list(tasks)
    for task in found:
        task.cancel()
    cancelled = await settled(*found)
    for task in found:
        if not task.cancelled():
            task.exception()
    return cancelled
