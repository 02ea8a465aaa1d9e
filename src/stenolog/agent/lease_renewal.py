"""Leases that are renewed until their holder is done, for turns and for claims of channels."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from stenolog.agent.threads import Threads, cancel_and_wait, get_result_shielded, wait_shielded
from stenolog.errors import LeaseLost, StenologError
from stenolog.stores.base import Lease, Store

LEASE_SECONDS: Final = 20.0
"""Lifetime of a lease in seconds; a running turn renews its lease."""
_RENEWALS_PER_LIFETIME: Final = 3
"""Number of renewals within the lifetime of a lease."""

_logger = logging.getLogger("stenolog")


async def acquire_lease(threads: Threads, store: Store, key: str, *, ttl: float) -> Lease:
    """Acquire the lease of a session without waiting. Raises the errors of `Store.lease`."""
    future = threads.run_lease(store.lease, key, ttl=ttl, wait=0.0)
    try:
        return await get_result_shielded(future)
    except asyncio.CancelledError:
        # The cancelled caller will not release the lease, so release it here.
        if not future.cancelled() and future.exception() is None:
            await wait_shielded(threads.run_lease(release_lease, future.result()))
        raise


class HeldLease:
    """A lease that is renewed until it is released. Thread-safe."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._mutex = threading.Lock()
        self.is_released = False

    def renew(self) -> None:
        """Renew the lease, unless it is released. Raises the errors of `Lease.renew`."""
        with self._mutex:
            if not self.is_released:
                self._lease.renew()

    def release(self) -> None:
        """Release the lease; a second call does nothing. Errors are logged."""
        with self._mutex:
            if not self.is_released:
                self.is_released = True
                release_lease(self._lease)


@asynccontextmanager
async def renew_lease(
    threads: Threads, lease: Lease, *, ttl: float, on_lost: Callable[[], None]
) -> AsyncIterator[HeldLease]:
    """Renew the lease inside the `async with` block, and release the lease at the end.

    The block may release the lease earlier. If another process takes the lease, call `on_lost`.
    """
    held_lease = HeldLease(lease)
    interval = ttl / _RENEWALS_PER_LIFETIME
    tasks: list[asyncio.Task[None]] = []

    async def renew_until_lost() -> None:
        while True:
            try:
                await get_result_shielded(threads.run_lease(held_lease.renew))
            except LeaseLost:
                on_lost()
                return
            except StenologError as error:
                _logger.warning("the lease of %r could not be renewed: %s", lease.key, error)
            await asyncio.sleep(interval)

    def start_renewing() -> None:
        tasks.append(asyncio.create_task(renew_until_lost()))

    # Most turns end before the first renewal, so the task is created only when a renewal is due.
    timer = asyncio.get_running_loop().call_later(interval, start_renewing)
    try:
        yield held_lease
    finally:
        timer.cancel()
        was_cancelled = await cancel_and_wait(tasks)
        if not held_lease.is_released:
            was_cancelled |= await wait_shielded(threads.run_lease(held_lease.release))
        if was_cancelled:
            raise asyncio.CancelledError


def release_lease(lease: Lease) -> None:
    """Release a lease. Errors are logged. This call blocks."""
    try:
        lease.release()
    except Exception as error:  # noqa: BLE001 - the answer is stored, and the lease expires
        _logger.warning("the lease of %r could not be released: %s", lease.key, error)
