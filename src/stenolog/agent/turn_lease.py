"""Leases: acquired for a turn, renewed while it runs, and released at its end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from stenolog.agent.shielded_wait import cancel_and_wait, result_shielded, wait_shielded
from stenolog.agent.threads import Threads
from stenolog.errors import LeaseLost, StenologError
from stenolog.sessions.session_store import JSONLBackend, SessionStore
from stenolog.stores.base import Lease, Store

_RENEWALS: Final = 3
"""Number of renewals within the lifetime of a lease."""

_logger = logging.getLogger("stenolog")


async def acquire_lease(threads: Threads, store: Store, key: str, *, ttl: float) -> Lease:
    """Acquire the lease without waiting. Raise StoreBusy, NoSuchSession and others."""
    taking = threads.lease(store.lease, key, ttl=ttl, wait=0.0)
    try:
        return await result_shielded(taking)
    except asyncio.CancelledError:
        # The cancelled caller cannot release the lease.
        if not taking.cancelled() and taking.exception() is None:
            await wait_shielded(threads.lease(_release, taking.result()))
        raise


@asynccontextmanager
async def renewed_lease(
    threads: Threads, lease: Lease, *, ttl: float, lost: Callable[[], None]
) -> AsyncIterator[SessionStore]:
    """Yield sessions that write through the lease; renew it, and release it at the end.

    `lost` is called when another process has the lease.
    """
    renewing = asyncio.create_task(_renew(threads, lease, ttl, lost))
    try:
        yield JSONLBackend(lease.store, session=lease.key)
    finally:
        cancelled = await cancel_and_wait([renewing])
        cancelled |= await wait_shielded(threads.lease(_release, lease))
        if cancelled:
            raise asyncio.CancelledError


async def _renew(threads: Threads, lease: Lease, ttl: float, lost: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(ttl / _RENEWALS)
        try:
            await result_shielded(threads.lease(lease.renew))
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
