"""Claims: only one gateway at a time polls an app, or delivers the answers of a session.

Each claim is a session in a separate store, in the namespace `channels` of the workspace. The
process that holds the lease of the session holds the claim. The meta of the session keeps data for
the next process. If only one process can exist, an in-memory store is enough.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final
from weakref import WeakValueDictionary

from stenolog.agent.lease_renewal import acquire_lease, renew_lease
from stenolog.agent.threads import Threads
from stenolog.errors import NoSuchSession, StoreBusy, StoreClosed
from stenolog.stores.base import Lease, Store, find_info
from stenolog.stores.in_memory import InMemoryStore

_POLL_SECONDS: Final = 0.1
"""Seconds between two checks whether another process still holds a claim."""


class Claims:
    """Claims on exclusive work. Gateways that use the same store share the claims."""

    def __init__(self, store: Store | None = None, *, ttl: float = 20.0) -> None:
        """Create the claims. An event loop must be running.

        `ttl`: seconds after which the claim of a killed process expires.
        """
        self.ttl: Final = ttl
        self._store = InMemoryStore() if store is None else store
        self._threads = Threads()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def hold_claim(
        self, name: str, *, wait: bool = True, on_lost: Callable[[], None] = lambda: None
    ) -> AsyncIterator[None]:
        """Hold the claim `name` inside the `async with` block.

        Raises StoreBusy if the claim is taken and `wait` is false. `on_lost` is called if another
        process takes over the claim. Raises errors of the store.
        """
        lock = self._locks.setdefault(name, asyncio.Lock())
        if lock.locked() and not wait:
            raise StoreBusy(f"this process already holds the claim {name}")
        async with lock:
            lease = await self._acquire_claim(name, wait=wait)
            async with renew_lease(self._threads, lease, ttl=self.ttl, on_lost=on_lost):
                yield

    async def save(self, name: str, **fields: Any) -> None:
        """Store data for the next holder of the claim. Raises errors of the store."""
        await self._threads.run(self._store.set_meta, name, **fields)

    async def read_saved(self, name: str) -> Mapping[str, Any]:
        """Return the data that `save` stored. Raises errors of the store."""
        info = await self._threads.run(find_info, self._store, name)
        return {} if info is None else info.meta

    async def assign_number(self, name: str, once: str, content: str) -> int:
        """Return the number of the idempotency key `once` in the register `name`.

        A new key gets the next number. Raises OnceConflict if the key was used for other content,
        and errors of the store.
        """
        return await self._threads.run(self._store.add_message, name, "user", content, once=once)

    async def close(self) -> None:
        """Close the store and its threads. A second call does nothing."""
        with suppress(StoreClosed):
            await self._threads.run(self._store.close)
        self._threads.close()

    async def _acquire_claim(self, name: str, *, wait: bool) -> Lease:
        while True:
            try:
                return await acquire_lease(self._threads, self._store, name, ttl=self.ttl)
            except NoSuchSession:
                await self._threads.run(self._store.set_meta, name, title=name)
            except StoreBusy:
                if not wait:
                    raise
                await asyncio.sleep(_POLL_SECONDS)


def delivery_claim_name(agent: str | None, key: str) -> str:
    """Return the name of the claim to deliver answers in a session, with a digest of its key."""
    return f"delivery-{_session_digest(agent, key)}"


def register_name(agent: str | None, key: str) -> str:
    """Return the name of the session in the claims store that lists the messages of a chat."""
    return f"said-{_session_digest(agent, key)}"


def _session_digest(agent: str | None, key: str) -> str:
    return hashlib.sha256(f"{agent or ''}\0{key}".encode()).hexdigest()[:32]
