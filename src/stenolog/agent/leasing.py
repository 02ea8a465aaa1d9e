"""The turn of a session, taken for this process, renewed while it runs, and given back."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from stenolog.agent.threads import Threads
from stenolog.errors import LeaseLost, StenologError
from stenolog.sessions.session_store import JSONLBackend, SessionStore
from stenolog.stores.base import Lease, Store

_OFTEN: Final = 3
"""So often within its time a lease is renewed."""

_logger = logging.getLogger("stenolog")


async def take(threads: Threads, store: Store, key: str, *, ttl: float, wait: float) -> Lease:
    """The lease, waited for so many seconds. Raises StoreBusy, NoSuchSession and others."""
    taking = threads.begin(store.lease, key, ttl=ttl, wait=wait)
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        # Nobody waits for it any more, and nobody would give it back.
        await asyncio.wait([taking])
        if taking.exception() is None:
            await threads.run(_release, taking.result())
        raise


@asynccontextmanager
async def held(threads: Threads, lease: Lease, *, ttl: float) -> AsyncIterator[SessionStore]:
    """The sessions as the holder of a lease writes them; it is given back in the end."""
    renewing = asyncio.create_task(_renew(threads, lease, ttl))
    try:
        yield JSONLBackend(lease.store)
    finally:
        renewing.cancel()
        await asyncio.wait([renewing])
        await threads.run(_release, lease)


async def _renew(threads: Threads, lease: Lease, ttl: float) -> None:
    while True:
        await asyncio.sleep(ttl / _OFTEN)
        try:
            await threads.run(lease.renew)
        except LeaseLost:
            return  # the next write says so
        except StenologError as error:
            _logger.warning("the lease of %r could not be renewed: %s", lease.key, error)


def _release(lease: Lease) -> None:
    try:
        lease.release()
    except StenologError as error:
        _logger.warning("the lease of %r could not be given back: %s", lease.key, error)
