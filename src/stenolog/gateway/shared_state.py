"""State shared by all requests: the agents, the limits, and the sessions that clients follow.

Each session is followed once, for all its listeners: one thread reads the store for all of them.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final, TypeVar, cast

from starlette.requests import Request

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.threads import cancel_and_wait
from stenolog.catalog.background_catalog import BackgroundCatalog
from stenolog.errors import NoSuchSession
from stenolog.gateway.limits import ConcurrencyLimit
from stenolog.records import Message
from stenolog.settings.values import Settings
from stenolog.stores.async_store import AsyncStore
from stenolog.stores.base import Store

# --- following ------------------------------------------------------------------------------------
# A listener first gets the stored messages that it missed, then new ones. Following a session needs
# a thread that polls the store; additional listeners share it.


_MAX_BUFFERED: Final = 256
"""Maximum number of messages buffered per listener; a slower one reads them from the store."""


class _Listener:
    """Messages that one listener has not received yet."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.missed = True
        """Whether the store may have messages that are not buffered."""
        self.ended = False
        self.error: Exception | None = None
        self.news = asyncio.Event()

    def tell(self, message: Message) -> None:
        """Buffer a message, unless the listener has to read the store anyway."""
        if len(self.messages) >= _MAX_BUFFERED:
            self.messages.clear()
            self.missed = True
        elif not self.missed:
            self.messages.append(message)
        self.news.set()

    def end(self, error: Exception | None) -> None:
        """End the listener, which then raises `error`."""
        self.ended, self.error = True, error
        self.news.set()


class _Followed:
    """A followed session and its listeners."""

    def __init__(self) -> None:
        self.listeners: set[_Listener] = set()
        self.task: asyncio.Task[None] | None = None


class SessionFollower:
    """Follows sessions of all agents for any number of listeners."""

    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop
        self._followed: dict[tuple[int, str, str | None], _Followed] = {}

    @property
    def count(self) -> int:
        """Number of sessions that are followed now."""
        return len(self._followed)

    async def messages(
        self, store: Store, key: str, *, after: int, uid: str | None = None
    ) -> AsyncGenerator[Message, None]:
        """Yield each message with seq greater than `after` once, in order, when it is stored.

        Raises SessionDeleted. `uid`: follow only this session of the key, as in `Store.follow`.
        """
        place, listener = (id(store), key, uid), _Listener()
        followed = self._followed.setdefault(place, _Followed())
        followed.listeners.add(listener)
        try:
            await self._begin(followed, store, key, uid)
            while True:
                if listener.missed:
                    listener.missed = False
                    for message in await self._loop.run(_stored, store, key, after, uid):
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
                if followed.task is not None and await cancel_and_wait([followed.task]):
                    raise asyncio.CancelledError

    async def _begin(self, followed: _Followed, store: Store, key: str, uid: str | None) -> None:
        """Start following the session, unless it is followed already."""
        if followed.task is None:
            start = await self._loop.run(_last_seq, store, key)
            # Another listener may have been faster.
            if followed.task is None:
                work = self._follow(followed, store, key, start, uid)
                followed.task = asyncio.create_task(work)

    async def _follow(
        self, followed: _Followed, store: Store, key: str, after: int, uid: str | None
    ) -> None:
        """Pass new messages to all listeners until the stream ends."""
        reason: Exception | None = None
        try:
            async with aclosing(AsyncStore(store).follow(key, after=after, uid=uid)) as arrivals:
                async for message in arrivals:
                    for listener in followed.listeners:
                        listener.tell(message)
        except Exception as error:  # noqa: BLE001 - each listener raises it
            reason = error
        # A later listener starts a new one.
        if self._followed.get((id(store), key, uid)) is followed:
            del self._followed[id(store), key, uid]
        for listener in followed.listeners:
            listener.end(reason)


def _stored(store: Store, key: str, after: int, uid: str | None) -> list[Message]:
    """Return the synced messages with seq greater than `after`."""
    return list(store.follow(key, after=after, uid=uid, timeout=0))


def _last_seq(store: Store, key: str) -> int:
    try:
        return store.info(key).last_seq
    except NoSuchSession:
        return 0


# --- state ----------------------------------------------------------------------------------------


T = TypeVar("T")


class Gateway:
    """The served agents, the settings and the limits of a gateway."""

    def __init__(self, loop: AgentLoop, settings: Settings, *, read_only: bool = False) -> None:
        self.loop = loop
        self.settings = settings
        self.read_only = read_only
        """Whether only reading requests are served, and no turn is resumed."""
        # Clients retry 429 by themselves.
        self.turns = ConcurrencyLimit(settings.gateway.max_turns, status=429, what="requests")
        self.streams = ConcurrencyLimit(settings.gateway.max_streams, status=503, what="streams")
        self.following = SessionFollower(loop)
        self.closing = asyncio.Event()
        """Set at shutdown: live streams end, and their clients reconnect elsewhere."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def agent(self, name: str | None) -> AgentInstance:
        """Return the agent with this name; `main` or None is the first. Raise UsageError."""
        return self.loop.registry.agent(None if name in (None, "", "main") else name)

    @property
    def indexing(self) -> tuple[int, int] | None:
        """Number of indexed sessions and of all sessions; None if all are indexed."""
        found = [
            progress
            for one in self.loop.registry
            if isinstance(one.catalog, BackgroundCatalog)
            and (progress := one.catalog.progress) is not None
        ]
        return (sum(done for done, _ in found), sum(all for _, all in found)) if found else None

    def keep_task(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Keep a reference to a task until it has ended: the event loop has only a weak one."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait_for_tasks(self) -> None:
        """Wait until all kept tasks have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves a request."""
    return cast(Gateway, request.app.state.gateway)
