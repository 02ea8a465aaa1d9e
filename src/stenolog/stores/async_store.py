"""An asyncio version of `Store`: every method is awaitable and runs on a thread pool.

A call that is cancelled before it starts on a thread does not run. A call that is cancelled later
still runs to its end, and then raises CancelledError. So a task never continues while one of its
writes is still running.
"""

import asyncio
import copy
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial, wraps
from time import monotonic
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from msgspec import Struct, field

from stenolog.errors import StoreBusy, StoreClosed
from stenolog.records import Message
from stenolog.stores.admin import Place, StoreAdmin
from stenolog.stores.arguments import check_lease_times, check_store
from stenolog.stores.base import Lease, Store, find_info

MAX_THREADS: Final = 32
"""Maximum number of calls that run at once; followers have their own threads and do not count."""
READER_CHECK_SECONDS: Final = 0.5
"""Interval in seconds at which a follower's thread checks whether its reader still exists."""
MAX_READ_AHEAD: Final = 256
"""Maximum number of messages that a follower's thread reads ahead of its reader."""
LEASE_POLL_SECONDS: Final = 0.01
"""Seconds between two attempts to acquire a lease."""

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
Loop = asyncio.AbstractEventLoop


def _async_method(
    method: Callable[Concatenate[S, P], T],
) -> "Callable[Concatenate[AsyncStore | AsyncStoreAdmin, P], Coroutine[Any, Any, T]]":
    """Return a method that runs this method of Store or StoreAdmin on a thread.

    The returned method has the same signature and docstring.
    """
    name = method.__name__

    @wraps(method)
    async def call(self: "AsyncStore | AsyncStoreAdmin", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._call(partial(getattr(self._store, name), *args, **kwargs))

    call.__qualname__, call.__module__ = f"Async{method.__qualname__}", __name__
    return call


class AsyncStore:
    """A Store with awaitable methods. Closing an AsyncStore closes the underlying store."""

    def __init__(self, store: Store) -> None:
        check_store(store, "AsyncStore")
        self._store = store
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="stenolog")
        self._closing = threading.Event()
        self._closed = threading.Event()

    def __repr__(self) -> str:
        return f"AsyncStore({self._store!r})"

    @property
    def admin(self) -> "AsyncStoreAdmin":
        """The calls that administer the store, with awaitable methods."""
        return AsyncStoreAdmin(self)

    # These methods get signature and docstring from Store; a new Store method needs a line here.
    add_message = _async_method(Store.add_message)
    add_full_message = _async_method(Store.add_full_message)
    add_messages = _async_method(Store.add_messages)
    get_history = _async_method(Store.get_history)
    get_summary = _async_method(Store.get_summary)
    set_summary = _async_method(Store.set_summary)
    truncate_history = _async_method(Store.truncate_history)
    clear = _async_method(Store.clear)
    set_history = _async_method(Store.set_history)
    pop = _async_method(Store.pop)
    checkpoint = _async_method(Store.checkpoint)
    undo = _async_method(Store.undo)
    compact = _async_method(Store.compact)
    fork = _async_method(Store.fork)
    delete = _async_method(Store.delete)
    info = _async_method(Store.info)
    view = _async_method(Store.view)
    list_sessions = _async_method(Store.list_sessions)
    set_meta = _async_method(Store.set_meta)

    async def lease(self, key: str, *, ttl: float, wait: float | None = None) -> "AsyncLease":
        """Acquire the lease for a turn in this session: one holder at a time, across all processes.

        The lease guards turns, not appends: calls on the store itself need no lease. Waits up to
        `wait` seconds for the current holder [default: the store's busy_timeout]. A call that is
        cancelled during the wait does not hold the lease. Raises StoreBusy; NoSuchSession, also if
        the session is deleted during the wait.
        """
        check_lease_times(ttl, wait)
        if wait is None:
            wait = self._store.admin.place.busy_timeout
        # Wait in the event loop, not on a thread: waiting calls could use up the thread pool, but
        # the holder needs a free thread to release the lease.
        deadline = monotonic() + wait
        while True:
            try:
                return AsyncLease(self, await self._try_lease(key, ttl))
            except StoreBusy:
                if (remaining := deadline - monotonic()) <= 0:
                    raise
            await asyncio.sleep(min(remaining, LEASE_POLL_SECONDS))

    async def _try_lease(self, key: str, ttl: float) -> Lease:
        leases: list[Lease] = []
        try:
            await self._call(lambda: leases.append(self._store.lease(key, ttl=ttl, wait=0)))
        except asyncio.CancelledError:
            for lease in leases:
                self._submit(lease.release)  # not awaited: the waiting task may be cancelled again
            raise
        return leases[0]

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> AsyncGenerator[Message, None]:
        """Yield each message after seq `after` once, in order; wait for new ones from any process.

        Ends when no message arrives for `timeout` seconds, when the store is closed, or immediately
        when its task is cancelled. With `uid`, follows only the session with that
        `SessionInfo.uid`. Raises SessionDeleted if the key has no session or a session with another
        uid. Without `uid`, waits until the session exists, then follows the session until it is
        deleted. If `after` comes from an earlier read, pass `uid` too: a session that was created
        again counts its messages from 1.
        """
        return _Follower(self._store, self._closing, key, after, uid, timeout).messages()

    async def close(self) -> None:
        """Close the store and end the threads. Later calls raise StoreClosed.

        Closing a store twice does nothing.
        """
        if self._closed.is_set():
            return
        self._closing.set()
        await self._call(self._store.close)
        self._closed.set()
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _fenced_by(self, store: Store) -> "AsyncStore":
        """Return an AsyncStore for `store`, a store that rejects writes once a lease is lost.

        Both AsyncStores use the same threads.
        """
        if store is self._store:
            return self
        fenced = copy.copy(self)
        fenced._store = store
        return fenced

    # --- one call, one thread ----------------------------------------------------------------

    async def _call(self, call: Callable[[], T], *, must_run: bool = False) -> T:
        """Run `call` on a thread; with `must_run`, even if the task is cancelled beforehand."""
        job = self._submit(call)
        outcome = asyncio.wrap_future(job)
        try:
            return await (asyncio.shield(outcome) if must_run else outcome)
        except asyncio.CancelledError:
            # A call that has started cannot be withdrawn any more: wait for its end.
            if must_run or not job.cancel():
                ended = asyncio.gather(asyncio.wrap_future(job), return_exceptions=True)
                while not ended.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait([ended])
            raise

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        try:
            return self._pool.submit(_run, call)
        except RuntimeError as error:
            raise StoreClosed("the store was closed") from error


def _run(call: Callable[[], T]) -> T:
    try:
        return call()
    except StopIteration as error:
        # A future of asyncio refuses this error in Python 3.11, and its task would wait forever.
        raise RuntimeError("the call raised StopIteration") from error


class AsyncStoreAdmin:
    """A StoreAdmin with awaitable methods.

    Copies are made in a thread, with `read_snapshot` and `snapshot_writer` of the store itself.
    """

    def __init__(self, store: AsyncStore) -> None:
        self._store = store._store.admin
        self._call = store._call

    # These methods get signature and docstring from StoreAdmin; a new method needs a line here.
    hide = _async_method(StoreAdmin.hide)
    show = _async_method(StoreAdmin.show)
    list_trash = _async_method(StoreAdmin.list_trash)
    restore = _async_method(StoreAdmin.restore)
    delete_unchanged = _async_method(StoreAdmin.delete_unchanged)
    purge = _async_method(StoreAdmin.purge)
    finish_purge = _async_method(StoreAdmin.finish_purge)
    stamps = _async_method(StoreAdmin.stamps)
    leased = _async_method(StoreAdmin.leased)
    read_marker = _async_method(StoreAdmin.read_marker)
    update_marker = _async_method(StoreAdmin.update_marker)
    list_snapshots = _async_method(StoreAdmin.list_snapshots)
    health = _async_method(StoreAdmin.health)

    @property
    def place(self) -> Place:
        """The place of the sessions and of their search index."""
        return self._store.place


class AsyncLease:
    """A Lease with awaitable methods; an async context manager releases the lease on exit."""

    def __init__(self, store: AsyncStore, lease: Lease) -> None:
        self._lease = lease
        self._async_store = store
        self.store = store._fenced_by(lease.store)
        """The store, with writes that are fenced by the lease. See `Lease.store`."""

    @property
    def key(self) -> str:
        """Key of the session."""
        return self._lease.key

    @property
    def epoch(self) -> int:
        """Fencing token: a number that grows with each lease of the key."""
        return self._lease.epoch

    async def lost(self) -> bool:
        """Return whether this lease was released, expired or taken over, or its session was purged.

        This method is awaitable, unlike `Lease.lost`, because it reads from the store.
        """
        try:
            return await self._async_store._call(lambda: self._lease.lost)
        except StoreClosed:
            return True

    async def renew(self) -> None:
        """Extend the lease to ttl seconds from now. Raises LeaseLost."""
        await self._async_store._call(self._lease.renew)

    async def release(self) -> None:
        """Release the lease; a second call does nothing.

        Does nothing if the store was closed, because closing the store released the lease. A
        cancelled call still releases the lease.
        """
        with suppress(StoreClosed):
            await self._async_store._call(self._lease.release, must_run=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.release()


class _Follower(Struct, eq=False):
    """A thread that follows a session, with a queue of new messages.

    The thread follows for half a second at a time, because a waiting `Store.follow` cannot notice
    that its reader is gone.
    """

    store: Store
    closing: threading.Event
    key: str
    after: int
    uid: str | None
    timeout: float | None
    arrivals: asyncio.Queue[Message | BaseException | None] = field(default_factory=asyncio.Queue)
    free_slots: threading.Semaphore = field(
        default_factory=lambda: threading.Semaphore(MAX_READ_AHEAD)
    )
    stopped: bool = False

    async def messages(self) -> AsyncGenerator[Message, None]:
        loop = asyncio.get_running_loop()
        was_open = not self.closing.is_set()
        run = partial(self._run, loop, was_open=was_open)
        threading.Thread(target=run, name="stenolog-follow", daemon=True).start()
        try:
            while (item := await self.arrivals.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
                self.free_slots.release()
        finally:
            self.stopped = True
            self.free_slots.release()

    def _run(self, loop: Loop, *, was_open: bool) -> None:
        last_item: BaseException | None = None
        try:
            self._follow(loop)
        except StoreClosed as error:
            # If the store was closed after the follower started, end without an error.
            last_item = None if was_open and self.closing.is_set() else error
        except Exception as error:  # noqa: BLE001 - raised where the messages are awaited
            last_item = error
        self._put_item(loop, last_item)

    def _follow(self, loop: Loop) -> None:
        last_seq, uid = self.after, self.uid
        last_arrival = monotonic()
        has_started = False
        while True:
            try:
                # Follow by uid: the session may be recreated between two calls of `follow`.
                if uid is None and (info := find_info(self.store, self.key)) is not None:
                    uid = info.uid
                new_messages = self.store.follow(
                    self.key, after=last_seq, uid=uid, timeout=self._follow_seconds(last_arrival)
                )
                has_started = True
                for message in new_messages:
                    if uid is None:
                        break  # the session exists now; read its messages once its uid is known
                    self.free_slots.acquire()
                    self._put_item(loop, message)
                    if self.stopped:
                        return
                    last_seq, last_arrival = message.seq, monotonic()
                else:
                    if self._follow_seconds(last_arrival) <= 0:
                        return
            except StoreClosed:
                if has_started:
                    return
                raise
            if self.stopped or loop.is_closed():
                return

    def _follow_seconds(self, last_arrival: float) -> float:
        if self.timeout is None:
            return READER_CHECK_SECONDS
        return min(READER_CHECK_SECONDS, max(last_arrival + self.timeout - monotonic(), 0))

    def _put_item(self, loop: Loop, item: Message | BaseException | None) -> None:
        # A closed loop rejects the callback with RuntimeError; no task of that loop waits for it.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self.arrivals.put_nowait, item)
