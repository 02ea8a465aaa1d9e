"""State shared by all requests: the agents, the limits, and the sessions that clients follow.

Each session is followed once: one thread reads the store for all clients that follow the session.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, Final, TypeVar, cast

from starlette.requests import Request

from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.threads import cancel_and_wait, start_task
from stenolog.catalog.background_catalog import BackgroundCatalog
from stenolog.gateway.limits import ConcurrencyLimit
from stenolog.gateway.login import LoginLinks
from stenolog.records import Message
from stenolog.settings.values import Settings
from stenolog.stores.async_store import AsyncStore
from stenolog.stores.base import Store, find_info

# --- following ------------------------------------------------------------------------------------
# A listener first gets the stored messages that it missed, then new messages.
# All listeners of a session share one thread that polls the store.


_MAX_BUFFERED_MESSAGES: Final = 256
"""Maximum number of messages buffered per listener. A listener further behind reads the store."""


class _Listener:
    """Buffer of the messages that one listener has not received yet."""

    def __init__(self) -> None:
        self.messages: deque[Message] = deque()
        self.must_read_store = True
        """Whether the store may have messages that this buffer lacks."""
        self.ended = False
        self.error: Exception | None = None
        self.changed = asyncio.Event()

    def add(self, message: Message) -> None:
        """Buffer a message, unless the listener has to read the store anyway."""
        if len(self.messages) >= _MAX_BUFFERED_MESSAGES:
            self.messages.clear()
            self.must_read_store = True
        elif not self.must_read_store:
            self.messages.append(message)
        self.changed.set()

    def end(self, error: Exception | None) -> None:
        """End the stream of the listener. The stream raises `error` unless `error` is None."""
        self.ended, self.error = True, error
        self.changed.set()


class _FollowedSession:
    """A followed session and its listeners."""

    def __init__(self) -> None:
        self.listeners: set[_Listener] = set()
        self.task: asyncio.Task[None] | None = None


class SessionFollower:
    """Follows sessions of all agents for any number of listeners."""

    def __init__(self, loop: AgentLoop) -> None:
        self._loop = loop
        self._followed: dict[tuple[int, str, str | None], _FollowedSession] = {}

    @property
    def followed_count(self) -> int:
        """Number of sessions that are followed now."""
        return len(self._followed)

    async def messages(
        self, store: Store, key: str, *, after: int, uid: str | None = None
    ) -> AsyncGenerator[Message, None]:
        """Yield each message with seq greater than `after` once, in order, when it is stored.

        With `uid`, follow only the session with this uid, as in `Store.follow`. Raises
        SessionDeleted.
        """
        followed_key, listener = (id(store), key, uid), _Listener()
        followed = self._followed.setdefault(followed_key, _FollowedSession())
        followed.listeners.add(listener)
        try:
            if followed.task is None:
                info = await self._loop.run(find_info, store, key)
                # Another listener may have started to follow the session in the meantime.
                if followed.task is None:
                    start_seq = 0 if info is None else info.last_seq
                    follow = self._follow(followed, store, key, start_seq, uid)
                    followed.task = asyncio.create_task(follow)
            while True:
                if listener.must_read_store:
                    listener.must_read_store = False
                    stored = await self._loop.run(_read_stored_messages, store, key, after, uid)
                    for message in stored:
                        yield message
                        after = message.seq
                while listener.messages and not listener.must_read_store:
                    message = listener.messages.popleft()
                    if message.seq > after:
                        yield message
                        after = message.seq
                if listener.must_read_store or listener.messages:
                    continue
                if listener.ended:
                    break
                listener.changed.clear()
                await listener.changed.wait()
            if listener.error is not None:
                raise listener.error
        finally:
            followed.listeners.discard(listener)
            if not followed.listeners:
                if self._followed.get(followed_key) is followed:
                    del self._followed[followed_key]
                if followed.task is not None and await cancel_and_wait([followed.task]):
                    raise asyncio.CancelledError

    async def _follow(
        self, followed: _FollowedSession, store: Store, key: str, after: int, uid: str | None
    ) -> None:
        """Pass new messages to all listeners until the stream ends."""
        failure: Exception | None = None
        try:
            async with aclosing(AsyncStore(store).follow(key, after=after, uid=uid)) as messages:
                async for message in messages:
                    for listener in followed.listeners:
                        listener.add(message)
        except Exception as error:  # noqa: BLE001 - each listener raises the error
            failure = error
        # Forget the session, so that the next listener starts to follow it again.
        if self._followed.get((id(store), key, uid)) is followed:
            del self._followed[id(store), key, uid]
        for listener in followed.listeners:
            listener.end(failure)


def _read_stored_messages(store: Store, key: str, after: int, uid: str | None) -> list[Message]:
    """Return the synced messages with seq greater than `after`."""
    return list(store.follow(key, after=after, uid=uid, timeout=0))


# --- state ----------------------------------------------------------------------------------------


T = TypeVar("T")


class Gateway:
    """The served agents, the settings and the limits of a gateway."""

    def __init__(self, loop: AgentLoop, settings: Settings, *, read_only: bool = False) -> None:
        self.loop = loop
        self.settings = settings
        self.read_only = read_only
        """Whether requests that change data are rejected, and no turn is resumed."""
        # Status 429 makes clients retry by themselves.
        self.turns = ConcurrencyLimit(settings.gateway.max_turns, status=429, noun="requests")
        self.streams = ConcurrencyLimit(settings.gateway.max_streams, status=503, noun="streams")
        self.follower = SessionFollower(loop)
        self.login_links = LoginLinks()
        self.closing = asyncio.Event()
        """Set at shutdown: live streams end, and their clients reconnect elsewhere."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def agent(self, name: str | None) -> AgentInstance:
        """Return the named agent; for `main`, empty or None, the main agent. Raises UsageError."""
        return self.loop.registry.agent(None if name in (None, "", "main") else name)

    @property
    def indexing(self) -> tuple[int, int] | None:
        """Number of indexed sessions and of all sessions; None if all are indexed."""
        catalogs = (agent.catalog for agent in self.loop.registry)
        progresses = (item.progress for item in catalogs if isinstance(item, BackgroundCatalog))
        counts = [progress for progress in progresses if progress]
        if not counts:
            return None
        return sum(done for done, _ in counts), sum(total for _, total in counts)

    def start_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that a shutdown waits for."""
        return start_task(work, self._tasks)

    async def wait_for_tasks(self) -> None:
        """Wait until all tasks of `start_task` have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves a request."""
    return cast(Gateway, request.app.state.gateway)
