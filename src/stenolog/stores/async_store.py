"""An asyncio version of `Store`: every method is awaitable and runs on a thread pool.

A call that is cancelled before a thread starts it does not run. A call that is cancelled later
still runs to its end, and then raises CancelledError. So a task never continues while one of its
writes is still running.

Appends to one session are grouped: while the store writes one group, further appends wait in the
loop and then form the next group. A `GroupStore` syncs once for a whole group.
"""

import asyncio
import copy
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import partial, wraps
from time import monotonic
from typing import Any, Concatenate, Final, Generic, ParamSpec, Self, TypeVar
from weakref import WeakKeyDictionary

from stenolog.codec import check_key
from stenolog.errors import NoSuchSession, StoreBusy, StoreClosed, copy_error
from stenolog.records import Message
from stenolog.stores.arguments import check_store
from stenolog.stores.base import Append, GroupStore, Lease, PatientStore, Store
from stenolog.stores.state import check_lease_times

THREADS: Final = 32
LOOK_UP_SECONDS: Final = 0.5
"""Interval in seconds at which a follower's thread checks whether its reader still exists."""
AHEAD: Final = 256
"""Maximum number of messages that a follower's thread reads ahead of its reader."""
WAIT_SECONDS: Final = 5.0
"""Seconds to wait for a lease if neither the caller nor the store sets a limit."""
LEASE_POLL_SECONDS: Final = 0.01

P = ParamSpec("P")
T = TypeVar("T")
Loop = asyncio.AbstractEventLoop


def _awaited(
    method: Callable[Concatenate[Store, P], T],
    by: Callable[..., Coroutine[Any, Any, T]] | None = None,
) -> Callable[Concatenate["AsyncStore", P], Coroutine[Any, Any, T]]:
    """Return the AsyncStore method for this Store method, with its signature and docstring.

    The method runs the Store method on a thread. If `by` is given, the method is `by` instead.
    """
    name = method.__name__

    async def call(self: "AsyncStore", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._call(partial(getattr(self._store, name), *args, **kwargs))

    awaited = wraps(method)(by or call)
    awaited.__qualname__, awaited.__module__ = f"AsyncStore.{name}", __name__
    return awaited


class AsyncStore:
    """A Store with awaitable methods. Closing it closes the underlying store."""

    def __init__(self, store: Store) -> None:
        check_store(store, "AsyncStore")
        self._store = store
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="stenolog")
        self._closing = threading.Event()
        self._closed = threading.Event()
        # Waiting appends by session key. A key is present while the store writes a group of its
        # appends.
        self._queues: WeakKeyDictionary[Loop, dict[str, list[_Appending]]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"AsyncStore({self._store!r})"

    async def _add_message(
        self, key: str, role: str, content: Any, *, once: str | None = None
    ) -> int:
        return await self._add_full_message(key, {"role": role, "content": content}, once=once)

    async def _add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        return (await self._append(key, Append(messages=[message], once=once)))[0]

    async def _add_messages(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        once: str | None = None,
        at: Sequence[datetime] | None = None,
    ) -> list[int]:
        return await self._append(key, Append(messages=messages, once=once, at=at))

    # Same signatures and docstrings as Store. A new Store method needs one more line.
    add_message = _awaited(Store.add_message, by=_add_message)
    add_full_message = _awaited(Store.add_full_message, by=_add_full_message)
    add_messages = _awaited(Store.add_messages, by=_add_messages)
    get_history = _awaited(Store.get_history)
    get_summary = _awaited(Store.get_summary)
    set_summary = _awaited(Store.set_summary)
    truncate_history = _awaited(Store.truncate_history)
    clear = _awaited(Store.clear)
    set_history = _awaited(Store.set_history)
    hide = _awaited(Store.hide)
    pop = _awaited(Store.pop)
    checkpoint = _awaited(Store.checkpoint)
    undo = _awaited(Store.undo)
    compact = _awaited(Store.compact)
    fork = _awaited(Store.fork)
    delete = _awaited(Store.delete)
    restore = _awaited(Store.restore)
    list_trash = _awaited(Store.list_trash)
    purge = _awaited(Store.purge)
    stamps = _awaited(Store.stamps)
    info = _awaited(Store.info)
    view = _awaited(Store.view)
    refresh = _awaited(Store.refresh)
    list_sessions = _awaited(Store.list_sessions)
    set_meta = _awaited(Store.set_meta)
    health = _awaited(Store.health)

    async def lease(self, key: str, *, ttl: float, wait: float | None = None) -> "AsyncLease":
        """Acquire the lease for a turn in this session: one holder at a time, across all processes.

        The lease guards turns, not appends: calls on the store itself always work. Waits up to
        `wait` seconds for the current holder [default: the store's busy_timeout]. A call that is
        cancelled during the wait does not hold the lease. Raises NoSuchSession, also if the session
        is deleted during the wait; StoreBusy.
        """
        check_lease_times(ttl, wait)
        if wait is None:
            store = self._store
            wait = store.busy_timeout if isinstance(store, PatientStore) else WAIT_SECONDS
        # Wait in the loop. Threads that wait for the lease could use up the pool, and its holder
        # could not finish.
        deadline = monotonic() + wait
        while True:
            try:
                return AsyncLease(self, await self._take_turn(key, ttl))
            except StoreBusy:
                if (remaining := deadline - monotonic()) <= 0:
                    raise
            await asyncio.sleep(min(remaining, LEASE_POLL_SECONDS))

    async def _take_turn(self, key: str, ttl: float) -> Lease:
        leases: list[Lease] = []
        try:
            await self._call(lambda: leases.append(self._store.lease(key, ttl=ttl, wait=0)))
        except asyncio.CancelledError:
            for lease in leases:
                self._submit(lease.release)  # not awaited: the waiting task may be cancelled again
            raise
        return leases[0]

    def follow(
        self,
        key: str,
        *,
        after: int = 0,
        uid: str | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[Message, None]:
        """Yield each message after seq `after` once, by seq, as any process stores it.

        Ends when no message arrives for `timeout` seconds, when the store is closed, or immediately
        when its task is cancelled. With `uid`, follows only the session with that
        `SessionInfo.uid`. Raises SessionDeleted if the key has no session or a session with another
        uid. Without `uid`, waits until the session exists, then follows the session until it is
        deleted. If `after` comes from an earlier read, pass `uid` too: a session that was created
        again counts its messages from 1.
        """
        follower = _Follower(
            self._store, key, after=after, uid=uid, timeout=timeout, closing=self._closing
        )
        return follower.messages()

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
        """Return an AsyncStore for a fenced view of the same store, with the same threads."""
        if store is self._store:
            return self
        other = copy.copy(self)
        other._store, other._queues = store, WeakKeyDictionary()
        return other

    # --- one call, one thread ----------------------------------------------------------------

    async def _call(self, call: Callable[[], T], *, always: bool = False) -> T:
        waiting = _Waiting[T]()
        job = self._submit(call)
        job.add_done_callback(partial(_post_outcome, asyncio.get_running_loop(), waiting))
        return await waiting.outcome(withdraw=(lambda: False) if always else job.cancel)

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        try:
            return self._pool.submit(call)
        except RuntimeError as error:
            raise StoreClosed("the store was closed") from error

    # --- appends, in groups ------------------------------------------------------------------

    async def _append(self, key: str, append: Append) -> list[int]:
        check_key(key)
        loop = asyncio.get_running_loop()
        queues = self._queues.setdefault(loop, {})
        if key not in queues:
            queues[key] = []
            # Start the group later, so that tasks that are ready now can join the group.
            loop.call_soon(self._hand_over, loop, key)
        appending = _Appending(append)
        queues[key].append(appending)
        return await appending.outcome(withdraw=lambda: not appending.handed_over)

    def _hand_over(self, loop: Loop, key: str) -> None:
        """Submit all waiting appends of the session as one group. Runs in the loop."""
        queues = self._queues[loop]
        group = [appending for appending in queues.pop(key) if not appending.given_up]
        if not group:
            return
        queues[key] = []
        for appending in group:
            appending.handed_over = True
        try:
            job = self._submit(partial(self._store_group, key, [call.append for call in group]))
        except StoreClosed as error:
            self._settle(loop, key, group, [_copy_for_caller(error) for _ in group])
        else:
            job.add_done_callback(partial(self._post_group, loop, key, group))

    def _store_group(
        self, key: str, appends: Sequence[Append]
    ) -> Sequence[list[int] | BaseException]:
        if isinstance(self._store, GroupStore):
            return self._store.add_group(key, appends)
        return [_attempt(self._store, key, append) for append in appends]

    def _post_group(
        self,
        loop: Loop,
        key: str,
        group: Sequence["_Appending"],
        job: Future[Sequence[list[int] | BaseException]],
    ) -> None:
        error = job.exception()
        outcomes = job.result() if error is None else [_copy_for_caller(error) for _ in group]
        _post(loop, partial(self._settle, loop, key, group, outcomes))

    def _settle(
        self,
        loop: Loop,
        key: str,
        group: Sequence["_Appending"],
        outcomes: Sequence[list[int] | BaseException],
    ) -> None:
        for appending, outcome in zip(group, outcomes, strict=True):
            appending.settle(outcome)
        # Run after the tasks that were just woken, so that their next appends join the group.
        loop.call_soon(self._hand_over, loop, key)


class AsyncLease:
    """A Lease with awaitable methods. As an async context manager it releases on exit."""

    def __init__(self, store: AsyncStore, lease: Lease) -> None:
        self._lease = lease
        self._calls = store
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

        Awaitable, unlike Lease.lost, because it reads from the store.
        """
        try:
            return await self._calls._call(lambda: self._lease.lost)
        except StoreClosed:
            return True

    async def renew(self) -> None:
        """Extend the lease to ttl seconds from now. Raises LeaseLost."""
        await self._calls._call(self._lease.renew)

    async def release(self) -> None:
        """Release the lease; a second call does nothing.

        Does nothing if the store was closed, because closing the store released the lease. A
        cancelled call still releases.
        """
        with suppress(StoreClosed):
            await self._calls._call(self._lease.release, always=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.release()


class _Waiting(Generic[T]):
    """A running call, as seen by the task that waits for it."""

    def __init__(self) -> None:
        self._wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcome: list[T | BaseException] = []

    @property
    def given_up(self) -> bool:
        """Whether the waiting task was cancelled, even if the task has not run since."""
        return self._wake.cancelled()

    def settle(self, outcome: T | BaseException) -> None:
        self._outcome.append(outcome)
        if not self._wake.done():
            self._wake.set_result(None)

    async def outcome(self, withdraw: Callable[[], bool]) -> T:
        """Wait for the outcome of the call, and return or raise it.

        `withdraw` tries to cancel the call and returns whether it succeeded.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self._outcome:
            try:
                await self._wake
            except asyncio.CancelledError as error:
                if withdraw():
                    raise
                cancelled = error
                self._wake = asyncio.get_running_loop().create_future()
        if cancelled is not None:
            raise cancelled
        outcome = self._outcome[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


class _Appending(_Waiting[list[int]]):
    def __init__(self, append: Append) -> None:
        super().__init__()
        self.append = append
        self.handed_over = False


class _Follower:
    """A thread that follows a session, with a queue of new messages.

    The thread follows for half a second at a time, because a store cannot notice that the reader
    has left.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        after: int,
        uid: str | None,
        timeout: float | None,
        closing: threading.Event,
    ) -> None:
        self._store = store
        self._closing = closing
        self._key = key
        self._after = after
        self._uid = uid
        self._timeout = timeout
        self._found: asyncio.Queue[Message | BaseException | None] = asyncio.Queue()
        self._room = threading.Semaphore(AHEAD)
        self._stopped = False

    async def messages(self) -> AsyncGenerator[Message, None]:
        loop = asyncio.get_running_loop()
        was_open = not self._closing.is_set()
        run = partial(self._run, loop, was_open=was_open)
        threading.Thread(target=run, name="stenolog-follow", daemon=True).start()
        try:
            while (item := await self._found.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
                self._room.release()
        finally:
            self._stopped = True
            self._room.release()

    def _run(self, loop: Loop, *, was_open: bool) -> None:
        try:
            self._follow(loop)
        except StoreClosed as error:
            # The store was closed before the thread's first call. End normally, as if it was closed
            # later.
            self._put(loop, None if was_open and self._closing.is_set() else error)
        except Exception as error:  # noqa: BLE001 - raised where the messages are awaited
            self._put(loop, error)
        else:
            self._put(loop, None)

    def _follow(self, loop: Loop) -> None:
        last_seq, uid = self._after, self._uid
        last_arrival = monotonic()
        has_started = False
        while True:
            try:
                # The session may be deleted and created again between two rounds.
                uid = uid or self._current_uid()
                arrivals = self._store.follow(
                    self._key, after=last_seq, uid=uid, timeout=self._slice(last_arrival)
                )
                has_started = True
                for message in arrivals:
                    if uid is None:
                        break  # the session exists now; read its messages once its uid is known
                    self._room.acquire()
                    self._put(loop, message)
                    if self._stopped:
                        return
                    last_seq, last_arrival = message.seq, monotonic()
                else:
                    if self._slice(last_arrival) <= 0:
                        return
            except StoreClosed:
                if has_started:
                    return
                raise
            if self._stopped or loop.is_closed():
                return

    def _slice(self, last_arrival: float) -> float:
        if self._timeout is None:
            return LOOK_UP_SECONDS
        return min(LOOK_UP_SECONDS, max(last_arrival + self._timeout - monotonic(), 0))

    def _current_uid(self) -> str | None:
        try:
            return self._store.info(self._key).uid
        except NoSuchSession:
            return None

    def _put(self, loop: Loop, item: Message | BaseException | None) -> None:
        _post(loop, partial(self._found.put_nowait, item))


def _attempt(store: Store, key: str, append: Append) -> list[int] | BaseException:
    try:
        return store.add_messages(key, append.messages, once=append.once, at=append.at)
    except Exception as error:  # noqa: BLE001 - raised by the caller of this append
        return error


def _copy_for_caller(error: BaseException) -> BaseException:
    """Return a copy of the exception for each caller, because raising an exception modifies it."""
    copied = copy_error(error)
    copied.__cause__ = error
    return copied


def _post_outcome(loop: Loop, waiting: _Waiting[T], job: Future[T]) -> None:
    if not job.cancelled():
        error = job.exception()
        _post(loop, partial(waiting.settle, job.result() if error is None else error))


def _post(loop: Loop, callback: Callable[[], None]) -> None:
    # A closed loop accepts no callbacks, and no task of that loop waits.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
