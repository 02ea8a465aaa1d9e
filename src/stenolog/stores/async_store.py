"""The same store for asyncio: every method awaitable, on threads of its own.

A call that is cancelled before it was handed to a thread is not made. Afterwards it runs to its
end, and CancelledError is raised when it is settled: nobody goes on while a write of theirs is
still under way.

Appends to one session go over in groups: while one group is being stored, further appends wait
in the loop and then go together, so that a store which can do so syncs once for all of them.
"""

import asyncio
import copy
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import partial
from time import monotonic
from typing import Any, Final, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

from stenolog.codec import check_key
from stenolog.errors import NoSuchSession, SessionDeleted, StoreBusy, StoreClosed
from stenolog.records import Compacted, Health, Message, Purged, SessionInfo, Span, Trashed, Undone
from stenolog.stores.arguments import check_store
from stenolog.stores.base import Append, GroupStore, Lease, PatientStore, Store
from stenolog.stores.state import check_lease

THREADS: Final = 32
LOOK_UP_SECONDS: Final = 0.5
"""How often the thread of a follower looks whether somebody still listens."""
AHEAD: Final = 256
"""How many messages the thread of a follower may be ahead of its reader."""
WAIT_SECONDS: Final = 5.0
"""How long a lease is waited for, where neither the caller nor the store says."""
LEASE_POLL_SECONDS: Final = 0.01

T = TypeVar("T")
Loop = asyncio.AbstractEventLoop


class AsyncStore:
    """A Store whose methods are awaited; it closes the store that it was given."""

    def __init__(self, store: Store) -> None:
        check_store(store, "AsyncStore")
        self._store = store
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="stenolog")
        self._closed = threading.Event()
        # A key stands here while a group of its appends is under way, with those that wait.
        self._queues: WeakKeyDictionary[Loop, dict[str, list[_Appending]]] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"AsyncStore({self._store!r})"

    async def add_message(
        self, key: str, role: str, content: Any, *, once: str | None = None
    ) -> int:
        """As Store.add_message."""
        return await self.add_full_message(key, {"role": role, "content": content}, once=once)

    async def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """As Store.add_full_message."""
        return (await self._append(key, Append(messages=[message], once=once)))[0]

    async def add_messages(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        once: str | None = None,
        at: Sequence[datetime] | None = None,
    ) -> list[int]:
        """As Store.add_messages."""
        return await self._append(key, Append(messages=messages, once=once, at=at))

    async def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """As Store.get_history."""
        return await self._call(
            partial(self._store.get_history, key, last=last, after=after, full=full)
        )

    async def get_summary(self, key: str) -> str:
        """As Store.get_summary."""
        return await self._call(partial(self._store.get_summary, key))

    async def set_summary(self, key: str, text: str) -> None:
        """As Store.set_summary."""
        await self._call(partial(self._store.set_summary, key, text))

    async def truncate_history(self, key: str, keep_last: int) -> None:
        """As Store.truncate_history."""
        await self._call(partial(self._store.truncate_history, key, keep_last))

    async def clear(self, key: str) -> None:
        """As Store.clear."""
        await self._call(partial(self._store.clear, key))

    async def set_history(self, key: str, messages: Sequence[Message | Mapping[str, Any]]) -> None:
        """As Store.set_history."""
        await self._call(partial(self._store.set_history, key, messages))

    async def hide(self, key: str, first: int, last: int) -> None:
        """As Store.hide."""
        await self._call(partial(self._store.hide, key, first, last))

    async def pop(self, key: str) -> Message | None:
        """As Store.pop."""
        return await self._call(partial(self._store.pop, key))

    async def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """As Store.checkpoint."""
        await self._call(
            partial(
                self._store.checkpoint, key, summary=summary, upto=upto, expect_floor=expect_floor
            )
        )

    async def undo(self, key: str, *, answered: Span | None = None) -> Undone:
        """As Store.undo."""
        return await self._call(partial(self._store.undo, key, answered=answered))

    async def compact(self, key: str) -> Compacted:
        """As Store.compact."""
        return await self._call(partial(self._store.compact, key))

    async def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """As Store.fork."""
        await self._call(partial(self._store.fork, key, new_key, at=at))

    async def delete(self, key: str) -> Trashed:
        """As Store.delete."""
        return await self._call(partial(self._store.delete, key))

    async def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """As Store.restore."""
        await self._call(partial(self._store.restore, key, uid=uid, as_key=as_key))

    async def list_trash(self) -> list[Trashed]:
        """As Store.list_trash."""
        return await self._call(self._store.list_trash)

    async def purge(self, key: str, *, before: int | None = None) -> Purged:
        """As Store.purge."""
        return await self._call(partial(self._store.purge, key, before=before))

    async def lease(self, key: str, *, ttl: float, wait: float | None = None) -> "AsyncLease":
        """As Store.lease; cancelled while it waits, it is not held.

        Waiting takes no thread: or those who wait could keep the holder from ending its turn.
        """
        check_lease(ttl, wait)
        if wait is None:
            store = self._store
            wait = store.busy_timeout if isinstance(store, PatientStore) else WAIT_SECONDS
        deadline = monotonic() + wait
        while True:
            try:
                return AsyncLease(self, await self._take_turn(key, ttl))
            except StoreBusy:
                if (left := deadline - monotonic()) <= 0:
                    raise
            await asyncio.sleep(min(left, LEASE_POLL_SECONDS))

    async def _take_turn(self, key: str, ttl: float) -> Lease:
        taken: list[Lease] = []
        try:
            await self._call(lambda: taken.append(self._store.lease(key, ttl=ttl, wait=0)))
        except asyncio.CancelledError:
            for lease in taken:
                self._submit(lease.release)  # whoever waits for it may be cancelled again
            raise
        return taken[0]

    async def stamps(self) -> dict[str, str]:
        """As Store.stamps."""
        return await self._call(self._store.stamps)

    async def info(self, key: str) -> SessionInfo:
        """As Store.info."""
        return await self._call(partial(self._store.info, key))

    async def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """As Store.list_sessions."""
        return await self._call(
            partial(self._store.list_sessions, prefix=prefix, limit=limit, after=after)
        )

    async def set_meta(self, key: str, /, **fields: Any) -> None:
        """As Store.set_meta."""
        await self._call(partial(self._store.set_meta, key, **fields))

    def follow(
        self, key: str, *, after: int = 0, timeout: float | None = None
    ) -> AsyncGenerator[Message, None]:
        """As Store.follow. Cancelling ends it at once: there is nothing to settle."""
        return _Follower(self._store, key, after=after, timeout=timeout).messages()

    async def health(self) -> Health:
        """As Store.health."""
        return await self._call(self._store.health)

    async def close(self) -> None:
        """As Store.close, for the store and the threads."""
        if self._closed.is_set():
            return
        await self._call(self._store.close)
        self._closed.set()
        self._pool.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _behind(self, store: Store) -> "AsyncStore":
        """The same threads for another face of the same store."""
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
            # Not at once: tasks that are ready now can still join.
            loop.call_soon(self._hand_over, loop, key)
        appending = _Appending(append)
        queues[key].append(appending)
        return await appending.outcome(withdraw=lambda: not appending.handed_over)

    def _hand_over(self, loop: Loop, key: str) -> None:
        """Send off all appends of the session that wait; runs in the loop."""
        queues = self._queues[loop]
        group = [appending for appending in queues.pop(key) if not appending.given_up]
        if not group:
            return
        queues[key] = []
        for appending in group:
            appending.handed_over = True
        try:
            job = self._submit(partial(self._store_group, key, [one.append for one in group]))
        except StoreClosed as error:
            self._settle(loop, key, group, [_own(error) for _ in group])
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
        outcomes = job.result() if error is None else [_own(error) for _ in group]
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
        # Behind the tasks that were just woken, so that their next appends go along.
        loop.call_soon(self._hand_over, loop, key)


class AsyncLease:
    """A Lease whose methods are awaited; an async context manager that releases."""

    def __init__(self, store: AsyncStore, lease: Lease) -> None:
        self._lease = lease
        self._calls = store
        self.store = store._behind(lease.store)
        """The store, whose writes raise LeaseLost once the turn is over: as Lease.store."""

    @property
    def key(self) -> str:
        """The session."""
        return self._lease.key

    @property
    def epoch(self) -> int:
        """As Lease.epoch."""
        return self._lease.epoch

    async def lost(self) -> bool:
        """As Lease.lost, which looks at the store and so must not keep the loop waiting."""
        try:
            return await self._calls._call(lambda: self._lease.lost)
        except StoreClosed:
            return True

    async def renew(self) -> None:
        """As Lease.renew."""
        await self._calls._call(self._lease.renew)

    async def release(self) -> None:
        """As Lease.release; also where the store was closed, which has let go of it.

        Cancelled, it is released all the same.
        """
        with suppress(StoreClosed):
            await self._calls._call(self._lease.release, always=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.release()


class _Waiting(Generic[T]):
    """A call that is under way, as the task that waits for it sees it."""

    def __init__(self) -> None:
        self._wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcome: list[T | BaseException] = []

    @property
    def given_up(self) -> bool:
        """Whether its task was cancelled, also where that has not run since."""
        return self._wake.cancelled()

    def settle(self, outcome: T | BaseException) -> None:
        self._outcome.append(outcome)
        if not self._wake.done():
            self._wake.set_result(None)

    async def outcome(self, withdraw: Callable[[], bool]) -> T:
        """What the call gave. `withdraw` calls it off, and says whether it still could."""
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
    """A thread that follows a session, and what it has found so far.

    It follows for half a second at a time: a store cannot be told that its reader went away.
    """

    def __init__(self, store: Store, key: str, *, after: int, timeout: float | None) -> None:
        self._store = store
        self._key = key
        self._after = after
        self._timeout = timeout
        self._found: asyncio.Queue[Message | BaseException | None] = asyncio.Queue()
        self._room = threading.Semaphore(AHEAD)
        self._stopped = False

    async def messages(self) -> AsyncGenerator[Message, None]:
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._run, args=[loop], name="stenolog-follow", daemon=True).start()
        try:
            while (found := await self._found.get()) is not None:
                if isinstance(found, BaseException):
                    raise found
                yield found
                self._room.release()
        finally:
            self._stopped = True
            self._room.release()

    def _run(self, loop: Loop) -> None:
        try:
            self._follow(loop)
        except Exception as error:  # noqa: BLE001 - it is raised where the messages are awaited
            self._put(loop, error)
        else:
            self._put(loop, None)

    def _follow(self, loop: Loop) -> None:
        seen, uid = self._after, None
        heard = monotonic()
        arrivals = self._store.follow(self._key, after=seen, timeout=self._slice(heard))
        while True:
            for message in arrivals:
                self._room.acquire()
                self._put(loop, message)
                if self._stopped:
                    return
                seen, heard = message.seq, monotonic()
            if self._stopped or loop.is_closed() or self._slice(heard) <= 0:
                return
            try:
                uid = self._same_life(uid)
                arrivals = self._store.follow(self._key, after=seen, timeout=self._slice(heard))
            except StoreClosed:
                return

    def _slice(self, heard: float) -> float:
        if self._timeout is None:
            return LOOK_UP_SECONDS
        return min(LOOK_UP_SECONDS, max(heard + self._timeout - monotonic(), 0))

    def _same_life(self, uid: str | None) -> str | None:
        """The session's uid. Between two rounds it may have been deleted, and made anew."""
        try:
            found = self._store.info(self._key).uid
        except NoSuchSession:
            found = None
        if uid is not None and uid != found:
            raise SessionDeleted(self._key)
        return found

    def _put(self, loop: Loop, found: Message | BaseException | None) -> None:
        _post(loop, partial(self._found.put_nowait, found))


def _attempt(store: Store, key: str, append: Append) -> list[int] | BaseException:
    try:
        return store.add_messages(key, append.messages, once=append.once, at=append.at)
    except Exception as error:  # noqa: BLE001 - it belongs to one caller, who raises it
        return error


def _own(error: BaseException) -> BaseException:
    """One exception object per caller, because raising one adds to it."""
    twin = type(error).__new__(type(error))
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    twin.__cause__ = error
    return twin


def _post_outcome(loop: Loop, waiting: _Waiting[T], job: Future[T]) -> None:
    if not job.cancelled():
        error = job.exception()
        _post(loop, partial(waiting.settle, job.result() if error is None else error))


def _post(loop: Loop, callback: Callable[[], None]) -> None:
    # A closed loop takes nothing more; then nobody waits in it either.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
