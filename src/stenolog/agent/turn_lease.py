"""Leases: acquired for a turn, renewed while it runs, and released at its end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from stenolog.agent.shielded_wait import outcome, settled, wait_until_done
from stenolog.agent.threads import Threads
from stenolog.errors import LeaseLost, StenologError
from stenolog.sessions.session_store import JSONLBackend, SessionStore
from stenolog.stores.base import Lease, Store

_OFTEN: Final = 3
"""Number of renewals within the lifetime of a lease."""

_logger = logging.getLogger("stenolog")


async def take(threads: Threads, store: Store, key: str, *, ttl: float) -> Lease:
    """Acquire the lease without waiting. Raise StoreBusy, NoSuchSession and others."""
    taking = threads.lease(store.lease, key, ttl=ttl, wait=0.0)
    try:
        return await outcome(taking)
    except asyncio.CancelledError:
        # The cancelled caller cannot release the lease.
        if not taking.cancelled() and taking.exception() is None:
            await settled(threads.lease(_release, taking.result()))
        raise


@asynccontextmanager
async def held(
    threads: Threads, lease: Lease, *, ttl: float, lost: Callable[[], None]
) -> AsyncIterator[SessionStore]:
    """Yield sessions that write through the lease; renew it, and release it at the end.

    `lost` is called when another process has the lease.
    """
    renewing = asyncio.create_task(_renew(threads, lease, ttl, lost))
    try:
        yield JSONLBackend(lease.store, session=lease.key)
    finally:
        cancelled = await wait_until_done([renewing])
        cancelled |= await settled(threads.lease(_release, lease))
        if cancelled:
            raise asyncio.CancelledError


async def _renew(threads: Threads, lease: Lease, ttl: float, lost: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(ttl / _OFTEN)
        try:
            await outcome(threads.lease(lease.renew))
        except LeaseLost:
            lost()
            return
        except StenologError as error:
            _logger.warning("the lease of %r could not be renewed: %s", lease.key, error)


def _release(lease: Lease) -> None:
    try:
        lease.release()
    except StenologError as error:
        _logger.warning("the lease of %r could not be given back: %s", lease.key, error)
