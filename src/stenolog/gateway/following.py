"""Following sessions for many listeners: each session is followed once, whoever listens.

A listener first hears what it has missed, then what comes. Following takes a thread and a look at
the store now and then, which a listener alone does not.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from stenolog.agent.loop import AgentLoop
from stenolog.agent.waiting import ended
from stenolog.errors import NoSuchSession
from stenolog.records import Message
from stenolog.stores.async_store import AsyncStore
from stenolog.stores.base import Store

_MOST_AHEAD: Final = 256
"""So many messages are kept for a listener; who is further behind reads them from the store."""


class _Listener:
    """What is new for one who listens."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.missed = True
        """Whether there may be messages in the store that are not here."""
        self.ended = False
        self.error: Exception | None = None
        self.news = asyncio.Event()

    def tell(self, message: Message) -> None:
        """Keep a message for it, unless it reads from the store anyhow."""
        if len(self.messages) >= _MOST_AHEAD:
            self.messages.clear()
            self.missed = True
        elif not self.missed:
            self.messages.append(message)
        self.news.set()

    def end(self, error: Exception | None) -> None:
        """Tell it that nothing more comes, and why."""
        self.ended, self.error = True, error
        self.news.set()


class _Followed:
    """One session, and who listens."""

    def __init__(self) -> None:
        self.listeners: set[_Listener] = set()
        self.task: asyncio.Task[None] | None = None


class Following:
    """The sessions of all agents that somebody listens to."""

    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop
        self._followed: dict[tuple[int, str], _Followed] = {}

    @property
    def count(self) -> int:
        """How many sessions are followed now."""
        return len(self._followed)

    async def messages(
        self, store: Store, key: str, *, after: int
    ) -> AsyncGenerator[Message, None]:
        """Each message past `after` once, by seq, as it comes. Raises SessionDeleted."""
        place, listener = (id(store), key), _Listener()
        followed = self._followed.setdefault(place, _Followed())
        followed.listeners.add(listener)
        try:
            await self._begin(followed, store, key)
            while True:
                if listener.missed:
                    listener.missed = False
                    for message in await self._loop.run(_stored, store, key, after):
                        yield message
                        after = message.seq
                while listener.messages and not listener.missed:
                    message = listener.messages.popleft()
                    if message.seq > after:
                        yield message
                        after = message.seq
                if listener.missed or listener.messages:
                    continue
                if listener.ended:
                    break
                listener.news.clear()
                await listener.news.wait()
            if listener.error is not None:
                raise listener.error
        finally:
            followed.listeners.discard(listener)
            if not followed.listeners:
                if self._followed.get(place) is followed:
                    del self._followed[place]
                if followed.task is not None and await ended([followed.task]):
                    raise asyncio.CancelledError

    async def _begin(self, followed: _Followed, store: Store, key: str) -> None:
        """Follow the session, unless that is done already."""
        if followed.task is None:
            start = await self._loop.run(_last_seq, store, key)
            # Somebody else may have been quicker.
            if followed.task is None:
                work = self._follow(followed, store, key, start)
                followed.task = asyncio.create_task(work)

    async def _follow(self, followed: _Followed, store: Store, key: str, after: int) -> None:
        """Tell all listeners of what comes, until nobody listens any more."""
        reason: Exception | None = None
        try:
            async with aclosing(AsyncStore(store).follow(key, after=after)) as arrivals:
                async for message in arrivals:
                    for listener in followed.listeners:
                        listener.tell(message)
        except Exception as error:  # noqa: BLE001 - each listener raises it
            reason = error
        # Who comes from now on is told by another one.
        if self._followed.get((id(store), key)) is followed:
            del self._followed[id(store), key]
        for listener in followed.listeners:
            listener.end(reason)


def _stored(store: Store, key: str, after: int) -> list[Message]:
    """What is stored behind this seq, and synced."""
    return list(store.follow(key, after=after, timeout=0))


def _last_seq(store: Store, key: str) -> int:
    try:
        return store.info(key).last_seq
    except NoSuchSession:
        return 0
