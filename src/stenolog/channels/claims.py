"""What only one gateway does at a time: to poll an app, to deliver in a conversation.

Each such thing is a session in a store of its own, in the namespace `channels` of the workspace:
its lease says who is at it, and its meta keeps what the next one should know. Without such a store
there is one process only, and a store in its memory is enough.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from weakref import WeakValueDictionary

from stenolog.agent import leasing
from stenolog.agent.threads import Threads
from stenolog.errors import NoSuchSession, StoreBusy, StoreClosed
from stenolog.stores.base import Lease, Store
from stenolog.stores.in_memory import InMemoryStore

_TTL: Final = 20.0
_OFTEN: Final = 0.1
"""So many seconds are between two looks whether another has ended."""


class Claims:
    """Who is at what. It owns the store and the threads."""

    def __init__(self, store: Store | None = None, *, ttl: float = _TTL) -> None:
        """Made where an event loop runs. `ttl`: a killed holder is waited for so long, at most."""
        self.ttl: Final = ttl
        self._store = InMemoryStore() if store is None else store
        self._closed = False
        self._threads = Threads()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @asynccontextmanager
    async def held(
        self, name: str, *, wait: bool = True, lost: Callable[[], None] = lambda: None
    ) -> AsyncIterator[None]:
        """Be the one who is at this. Raises StoreBusy where another is, and none is to `wait`.

        `lost` is called where another process took it over. Raises what the store raises.
        """
        self._check_open()
        lock = self._locks.setdefault(name, asyncio.Lock())
        if lock.locked() and not wait:
            raise StoreBusy(f"{name} is being done by this process")
        async with lock:
            self._check_open()
            lease = await self._take(self._store, name, wait=wait)
            async with leasing.held(self._threads, lease, ttl=self.ttl, lost=lost):
                yield

    async def note(self, name: str, **fields: Any) -> None:
        """Keep something for the next one. Raises what the store raises."""
        self._check_open()
        await self._threads.run(self._store.set_meta, name, **fields)

    async def noted(self, name: str) -> Mapping[str, Any]:
        """What was kept. Raises what the store raises."""
        self._check_open()
        try:
            return (await self._threads.run(self._store.info, name)).meta
        except NoSuchSession:
            return {}

    async def counted(self, name: str, token: str, content: str) -> int:
        """The number of what has this token: the next one, where it is new.

        Raises OnceConflict for other content, and what the store raises.
        """
        self._check_open()
        return await self._threads.run(self._store.add_message, name, "user", content, once=token)

    async def close(self) -> None:
        """Close the store and end the threads; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        await self._threads.run(self._store.close)
        self._threads.close()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("the channels were closed before this call")

    async def _take(self, store: Store, name: str, *, wait: bool) -> Lease:
        while True:
            try:
                return await leasing.take(self._threads, store, name, ttl=self.ttl)
            except NoSuchSession:
                await self._threads.run(store.set_meta, name, title=name)
            except StoreBusy:
                if not wait:
                    raise
                await asyncio.sleep(_OFTEN)


def conversation(agent: str | None, key: str) -> str:
    """The name of the right to deliver in a session; of any length it has one."""
    return f"delivery-{_place(agent, key)}"


def said_in(agent: str | None, key: str) -> str:
    """The name of the list of what was said in a chat."""
    return f"said-{_place(agent, key)}"


def _place(agent: str | None, key: str) -> str:
    return hashlib.sha256(f"{agent or ''}\0{key}".encode()).hexdigest()[:32]
