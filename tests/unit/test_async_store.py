"""Tests AsyncStore: the same calls, from many tasks, and cancelled at every point."""

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, assert_type

import pytest

import stenolog
from stenolog.errors import (
    LeaseLost,
    NothingToUndo,
    RefusedMessage,
    StoreBusy,
    StoreClosed,
    UsageError,
)
from stenolog.memory import Notes
from stenolog.records import Message, SessionInfo
from stenolog.stores.admin import StoreAdmin
from stenolog.stores.async_store import (
    MAX_THREADS,
    AsyncLease,
    AsyncStore,
    AsyncStoreAdmin,
)
from stenolog.stores.base import Lease, Store
from stenolog.stores.in_memory import InMemoryLease, InMemoryStore
from stenolog.transfer import migrate_from_json
from support.contract.crash_contract import KEY, SCRIPT
from support.contract.open_store_base import append, user_message, visible_texts
from support.store_calls import comparable_result, find_method, session_content

PATIENCE = 120


@pytest.fixture(params=["in memory", "jsonl"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with InMemoryStore() if request.param == "in memory" else stenolog.open_store(tmp_path) as it:
        yield it


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE):
            await main()

    asyncio.run(bounded())


class Gated(InMemoryStore):
    """A store whose writes wait for the test, as for a slow disk."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.waiting = threading.Semaphore(0)

    @contextmanager
    def passing(self) -> Iterator[None]:
        self.waiting.release()
        assert self.gate.wait(PATIENCE)
        yield

    def add_messages(self, *arguments: Any, **options: Any) -> list[int]:
        with self.passing():
            return super().add_messages(*arguments, **options)

    def set_summary(self, key: str, text: str) -> None:
        with self.passing():
            super().set_summary(key, text)

    async def somebody_waits(self) -> None:
        """Wait until one more call waits at the gate."""
        assert await asyncio.to_thread(self.waiting.acquire, timeout=PATIENCE)


# --- same methods --------------------------------------------------------------------------------


INTERFACES = pytest.mark.parametrize(
    ("interface", "asynchronous"), [(Store, AsyncStore), (StoreAdmin, AsyncStoreAdmin)]
)


def calls_of(interface: type) -> list[tuple[str, Any]]:
    """Return the public methods, except those that make copies of sessions."""
    return [
        (name, method)
        for name, method in inspect.getmembers(interface, inspect.isfunction)
        if not name.startswith("_") and name not in ("read_snapshot", "snapshot_writer")
    ]


@INTERFACES
def test_async_store_has_every_method_of_a_store_with_the_same_arguments(
    interface: type, asynchronous: type
) -> None:
    for name, method in calls_of(interface):
        mine = inspect.signature(getattr(asynchronous, name))
        theirs = inspect.signature(method)
        assert mine.parameters == theirs.parameters, name
        if name != "follow":
            assert inspect.iscoroutinefunction(getattr(asynchronous, name)), name
        if name not in ("follow", "lease"):
            assert mine.return_annotation == theirs.return_annotation, name


@INTERFACES
def test_async_store_has_the_docstrings_of_a_store(interface: type, asynchronous: type) -> None:
    for name, method in calls_of(interface):
        docstring = inspect.getdoc(getattr(asynchronous, name))
        if name in ("close", "follow", "lease"):
            assert docstring, name
        else:
            assert docstring == inspect.getdoc(method), name
        assert getattr(asynchronous, name).__qualname__ == f"{asynchronous.__name__}.{name}"


def test_mypy_sees_the_full_signatures() -> None:
    """Mypy checks assert_type, and reports an unused `type: ignore`."""

    async def main() -> None:
        async with AsyncStore(InMemoryStore()) as calls:
            assert_type(await calls.add_message("k", "user", "hello", once="1"), int)
            assert_type(await calls.add_messages("k", [user_message("again")], at=None), list[int])
            assert_type(await calls.get_history("k", last=3, full=True), list[Message])
            assert_type(await calls.info("k"), SessionInfo)
            assert_type(await calls.pop("k"), Message | None)
            assert_type(await calls.set_meta("k", title="A title"), None)
            with pytest.raises(TypeError):
                await calls.get_history("k", lats=3)  # type: ignore[call-arg]
            with pytest.raises(TypeError):
                await calls.get_summary()  # type: ignore[call-arg]
            with pytest.raises(UsageError):
                await calls.get_history("k", last="3")  # type: ignore[arg-type]

    run(main)


def test_async_lease_has_every_member_of_a_lease() -> None:
    public = {name for name in dir(Lease) if not name.startswith("_")}
    assert public <= {name for name in dir(AsyncLease) if not name.startswith("_")} | {"store"}


def test_async_calls_return_the_results_of_the_store(store: Store) -> None:
    async def main() -> None:
        model = InMemoryStore()
        async with AsyncStore(store) as mine:
            for call in SCRIPT:
                given = await find_method(mine, call.name)(KEY, *call.arguments, **call.options)
                assert comparable_result(given) == comparable_result(call.make(model, KEY))
                assert await mine.get_history(KEY) == model.get_history(KEY)
                assert await mine.get_summary(KEY) == model.get_summary(KEY)
            assert await mine.get_history(KEY, full=True, last=2, after=1) == model.get_history(
                KEY, full=True, last=2, after=1
            )
            assert (await mine.info(KEY)).meta == {"title": "A talk"}
            assert await mine.list_sessions(prefix="t", limit=1, after="a") == [KEY]
            assert (await mine.admin.health()).ok
            assert session_content(store, KEY) == session_content(model, KEY)

    run(main)


def test_p8_errors_of_the_store_are_raised(store: Store) -> None:
    async def main() -> None:
        async with AsyncStore(store) as mine:
            with pytest.raises(UsageError):
                await mine.add_message("", "user", "x")
            with pytest.raises(RefusedMessage):
                await mine.add_message("a", "user", float("nan"))
            with pytest.raises(stenolog.NoSuchSession):
                await mine.info("nobody")
            with pytest.raises(NothingToUndo):
                await mine.undo("nobody")

    run(main)


# --- many tasks ----------------------------------------------------------------------------------


def test_p7_messages_of_a_thousand_tasks_are_stored_in_order(store: Store) -> None:
    async def main() -> None:
        given: dict[int, Any] = {}

        async def write(mine: AsyncStore, task: int) -> None:
            for number in range(3):
                seq = await mine.add_message(f"k{task % 3}", "user", [task, number])
                given[task * 10 + number] = seq

        async with AsyncStore(store) as mine:
            await asyncio.gather(*(write(mine, task) for task in range(1000)))
            for session in range(3):
                found = {m.seq: m.content for m in await mine.get_history(f"k{session}")}
                tasks = [task for task in range(1000) if task % 3 == session]
                assert sorted(found) == list(range(1, 3 * len(tasks) + 1))
                for task in tasks:
                    seqs = [given[task * 10 + number] for number in range(3)]
                    assert seqs == sorted(seqs)
                    assert [found[seq] for seq in seqs] == [[task, n] for n in range(3)]

    run(main)


# --- cancellation --------------------------------------------------------------------------------


def test_append_cancelled_before_it_starts_is_not_stored() -> None:
    async def main() -> None:
        store = Gated()
        async with AsyncStore(store) as mine:
            never_run = asyncio.create_task(mine.add_message("a", "user", "never run"))
            never_run.cancel()
            started = [
                asyncio.create_task(mine.add_message("a", "user", "started"))
                for _ in range(MAX_THREADS)
            ]
            for _ in started:
                await store.somebody_waits()
            behind = asyncio.create_task(mine.add_message("a", "user", "behind the others"))
            after = asyncio.create_task(mine.add_message("a", "user", "after"))
            await asyncio.sleep(0)
            behind.cancel()
            for task in (never_run, behind):
                # The gate is closed: these end because there is nothing to wait for.
                with pytest.raises(asyncio.CancelledError):
                    await task
            store.gate.set()
            await asyncio.gather(*started, after)
        texts = [m.content for m in store._sessions["a"].messages.values()]
        assert sorted(texts) == ["after", *["started"] * MAX_THREADS]

    run(main)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_cancellation_waits_for_a_started_call(times: int) -> None:
    async def main() -> None:
        store = Gated()
        async with AsyncStore(store) as mine:
            adding = asyncio.create_task(mine.add_message("a", "user", "x"))
            await store.somebody_waits()
            changing = asyncio.create_task(mine.set_summary("a", "so far"))
            await store.somebody_waits()
            for _ in range(times):
                adding.cancel()
                changing.cancel()
                for _ in range(5):
                    await asyncio.sleep(0)
                assert not adding.done()
                assert not changing.done()
            store.gate.set()
            for task in (adding, changing):
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert task.cancelled()
            assert [m.content for m in await mine.get_history("a")] == ["x"]
            assert await mine.get_summary("a") == "so far"

    run(main)


def test_error_after_cancellation_does_not_replace_cancelled_error() -> None:
    async def main() -> None:
        store = Gated()
        async with AsyncStore(store) as mine:
            task = asyncio.create_task(mine.add_message("a", "user", b"refused"))
            await store.somebody_waits()
            task.cancel()
            await asyncio.sleep(0)
            store.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main)


def test_p8_stop_iteration_of_an_argument_is_an_error() -> None:
    class Stopped(list[dict[str, str]]):
        def __iter__(self) -> Iterator[dict[str, str]]:
            raise StopIteration

    # No task is cancelled at the end: a call that waits forever would not end.
    loop = asyncio.new_event_loop()
    adding = loop.create_task(AsyncStore(InMemoryStore()).add_messages("a", Stopped()))
    loop.run_until_complete(asyncio.wait([adding], timeout=5))
    loop.close()
    assert isinstance(adding.exception(), RuntimeError)


def test_timeout_is_raised_after_the_started_call_ends() -> None:
    async def main() -> None:
        store = Gated()
        async with AsyncStore(store) as mine:
            asyncio.get_running_loop().call_later(0.1, store.gate.set)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await mine.add_message("a", "user", "x")
            assert store.gate.is_set()
            assert [m.content for m in await mine.get_history("a")] == ["x"]

    run(main)


@pytest.mark.parametrize("call", ["add_message", "set_history", "get_history"])
def test_call_cancelled_at_any_await_is_stored_once_or_not_at_all(store: Store, call: str) -> None:
    async def main() -> None:
        async with AsyncStore(store) as mine:
            for turns in range(40):
                key = f"k{turns}"
                arguments: dict[str, tuple[Any, ...]] = {
                    "add_message": ("user", "x"),
                    "set_history": ([user_message("x")],),
                    "get_history": (),
                }
                task = asyncio.create_task(getattr(mine, call)(key, *arguments[call]))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    await task
                    ended = True
                except asyncio.CancelledError:
                    ended = False
                found = visible_texts(store, key)
                assert found in ([], ["x"])
                if turns == 0:
                    assert not ended
                if call == "get_history" or turns == 0:
                    assert found == []
                elif ended:
                    assert found == ["x"]
                # The outcome is final: nothing is stored later.
                await asyncio.sleep(0.001)
                assert visible_texts(store, key) == found
                assert len(append(store, key, "next")) == 1

    run(main)


# --- loops and threads that end ------------------------------------------------------------------


def test_closing_the_loop_during_a_call_does_not_hang() -> None:
    store = Gated()
    mine = AsyncStore(store)
    loop = asyncio.new_event_loop()
    tasks = [
        loop.create_task(mine.add_message("a", "user", "in flight")),
        loop.create_task(mine.set_summary("b", "in flight")),
    ]
    loop.run_until_complete(store.somebody_waits())
    loop.run_until_complete(store.somebody_waits())
    loop.close()
    store.gate.set()

    async def main() -> None:
        # The append in progress is stored, and the session is not stuck.
        assert (await anext(mine.follow("a"))).content == "in flight"
        assert await mine.add_message("a", "user", "in the next loop") == 2
        assert [m.content for m in await mine.get_history("a")] == ["in flight", "in the next loop"]
        await mine.close()

    run(main)
    for task in tasks:
        # Their loop is closed; without this, Python warns that they never ended.
        task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_asyncio_run_waits_for_started_calls() -> None:
    store = Gated()
    mine = AsyncStore(store)

    async def main() -> None:
        _forgotten.append(asyncio.create_task(mine.add_message("a", "user", "x")))
        await store.somebody_waits()
        threading.Timer(0.05, store.gate.set).start()

    _forgotten: list[asyncio.Task[int]] = []
    asyncio.run(main())
    assert _forgotten[0].cancelled()
    assert visible_texts(store, "a") == ["x"]


def test_async_store_works_in_successive_event_loops(store: Store) -> None:
    mine = AsyncStore(store)
    for number in range(3):
        assert asyncio.run(mine.add_message("a", "user", number)) == number + 1
    asyncio.run(mine.close())


def test_close_ends_all_threads(store: Store) -> None:
    before = set(threading.enumerate())

    async def main() -> None:
        async with AsyncStore(store) as mine:
            await asyncio.gather(*(mine.add_message(f"k{n}", "user", "x") for n in range(40)))
            following = asyncio.create_task(anext(mine.follow("nobody")))
            await asyncio.sleep(0)
        with pytest.raises(StopAsyncIteration):
            await following

    run(main)
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_p8_calls_after_close_raise_store_closed(store: Store) -> None:
    async def main() -> None:
        mine = AsyncStore(store)
        await mine.close()
        await mine.close()
        for call in (
            mine.add_message("a", "user", "x"),
            mine.get_history("a"),
            mine.set_summary("a", "x"),
            mine.admin.health(),
            anext(mine.follow("a")),
        ):
            with pytest.raises(StoreClosed):
                await call
        with pytest.raises(StoreClosed):
            store.admin.health()

    run(main)


def test_a_follower_whose_thread_starts_after_the_close_ends() -> None:
    class Late(InMemoryStore):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.closed = threading.Event(), threading.Event()

        def info(self, key: str) -> SessionInfo:
            self.asked.set()
            assert self.closed.wait(PATIENCE)
            return super().info(key)

    async def main() -> None:
        store = Late()
        async with AsyncStore(store) as mine:
            following = asyncio.create_task(anext(mine.follow("nobody")))
            assert await asyncio.to_thread(store.asked.wait, PATIENCE)
        store.closed.set()
        with pytest.raises(StopAsyncIteration):
            await following

    run(main)


# --- follow --------------------------------------------------------------------------------------


def test_follow_returns_stored_and_new_messages(store: Store) -> None:
    async def main() -> None:
        async with AsyncStore(store) as mine:
            await mine.add_messages("a", [user_message("1"), user_message("2")])
            found: list[Message] = []

            async def listen() -> None:
                async for message in mine.follow("a", after=1):
                    found.append(message)
                    if len(found) == 4:
                        return

            listening = asyncio.create_task(listen())
            await mine.add_message("a", "user", "3")
            await mine.clear("a")
            await mine.compact("a")
            await mine.add_messages("a", [user_message("4"), user_message("5")])
            await listening
            assert [m.seq for m in found] == [2, 3, 4, 5]
            found = [message async for message in mine.follow("a", timeout=0)]
            assert [m.content for m in found] == ["1", "2", "3", "4", "5"]
            assert [m async for m in mine.follow("nobody", timeout=0.01)] == []

    run(main)


@pytest.mark.slow
def test_follow_waits_longer_than_one_polling_interval() -> None:
    async def main() -> None:
        async with AsyncStore(InMemoryStore()) as mine:
            await mine.add_message("a", "user", "1")
            loop = asyncio.get_running_loop()
            started = loop.time()
            assert [m.seq async for m in mine.follow("a", timeout=1.2)] == [1]
            assert loop.time() - started >= 1.2
            following = asyncio.create_task(anext(mine.follow("a", after=1)))
            await asyncio.sleep(0.7)
            await mine.add_message("a", "user", "2")
            assert (await following).seq == 2

    run(main)


def test_many_followers_do_not_block_other_calls(store: Store) -> None:
    async def main() -> None:
        async with AsyncStore(store) as mine:
            following = [
                asyncio.create_task(anext(mine.follow("a"))) for _ in range(MAX_THREADS + 8)
            ]
            await asyncio.sleep(0)
            assert await mine.add_message("b", "user", "not held up") == 1
            await mine.add_message("a", "user", "x")
            assert {message.content for message in await asyncio.gather(*following)} == {"x"}

    run(main)


def test_follow_can_be_cancelled_or_abandoned_at_any_time(store: Store) -> None:
    async def main() -> None:
        before = set(threading.enumerate())
        async with AsyncStore(store) as mine:
            await mine.add_messages("a", [user_message(str(n)) for n in range(1000)])
            waiting = asyncio.create_task(anext(mine.follow("nobody")))
            await asyncio.sleep(0.01)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            async with aclosing(mine.follow("a")) as messages:
                async for message in messages:
                    if message.seq == 10:
                        break
            followers = [
                thread
                for thread in set(threading.enumerate()) - before
                if thread.name == "stenolog-follow"
            ]
            for thread in followers:
                await asyncio.to_thread(thread.join, PATIENCE)
                assert not thread.is_alive()
            assert len([m async for m in mine.follow("a", timeout=0)]) == 1000

    run(main)


def test_follow_raises_its_errors_at_the_first_anext(store: Store) -> None:
    async def main() -> None:
        async with AsyncStore(store) as mine:
            messages = mine.follow("")
            with pytest.raises(UsageError):
                await anext(messages)

    run(main)


# --- lifecycle -----------------------------------------------------------------------------------


def test_lease_is_acquired_and_released(store: Store) -> None:
    async def main() -> None:
        async with AsyncStore(store) as mine:
            await mine.add_message("a", "user", "1")
            async with await mine.lease("a", ttl=60) as lease:
                assert (lease.key, lease.epoch > 0, await lease.lost()) == ("a", True, False)
                with pytest.raises(StoreBusy):
                    await mine.lease("a", ttl=60, wait=0)
                await lease.renew()
                assert await lease.store.add_message("a", "user", "2") == 2
                assert [m.content for m in await lease.store.get_history("a")] == ["1", "2"]
                await mine.add_message("a", "user", "plain calls work")
            assert await lease.lost()
            with pytest.raises(LeaseLost):
                await lease.renew()
            await lease.release()
            await (await mine.lease("a", ttl=60, wait=0)).release()

    run(main)


def test_p8_lease_raises_the_errors_of_the_store(store: Store) -> None:
    async def main() -> None:
        async with AsyncStore(store) as mine:
            with pytest.raises(stenolog.NoSuchSession):
                await mine.lease("nobody", ttl=60)
            await mine.add_message("a", "user", "1")
            for ttl, wait in ((0, None), (60, -1), (60, float("nan"))):
                with pytest.raises(stenolog.UsageError):
                    await mine.lease("a", ttl=ttl, wait=wait)
            lease = await mine.lease("a", ttl=60)
        assert await lease.lost()
        await lease.release()
        with pytest.raises(StoreClosed):
            await mine.lease("a", ttl=60)

    run(main)


def test_default_wait_for_a_lease_is_that_of_the_store(tmp_path: Path) -> None:
    async def main() -> None:
        for store in (
            stenolog.JSONLStore(tmp_path, busy_timeout=0.05),
            stenolog.SQLiteStore(tmp_path / "s.db", busy_timeout=0.05),
        ):
            async with AsyncStore(store) as mine:
                await mine.add_message("a", "user", "1")
                async with await mine.lease("a", ttl=60):
                    with pytest.raises(StoreBusy):
                        # Well before the default wait of 5 seconds.
                        await asyncio.wait_for(mine.lease("a", ttl=60), 4)

    run(main)


def test_lost_lease_check_does_not_run_in_the_event_loop_thread() -> None:
    looks: list[int] = []

    class WatchedLease(InMemoryLease):
        @property
        def lost(self) -> bool:
            looks.append(threading.get_ident())
            return super().lost

    class Watched(InMemoryStore):
        def lease(self, *arguments: Any, **options: Any) -> InMemoryLease:
            taken = super().lease(*arguments, **options)
            taken.__class__ = WatchedLease
            return taken

    async def main() -> None:
        async with AsyncStore(Watched()) as mine:
            await mine.add_message("a", "user", "1")
            async with await mine.lease("a", ttl=60) as lease:
                assert not await lease.lost()
            assert await lease.lost()

    run(main)
    assert len(looks) >= 2
    assert threading.get_ident() not in looks


def test_p8_writes_through_a_lost_lease_are_rejected() -> None:
    async def main() -> None:
        async with AsyncStore(InMemoryStore()) as mine:
            await mine.add_message("a", "user", "1")
            first = await mine.lease("a", ttl=0.01)
            async with await mine.lease("a", ttl=60, wait=PATIENCE) as second:
                for write in (
                    first.store.add_message("a", "user", "late"),
                    first.store.add_messages("a", [user_message("late")]),
                    first.store.set_summary("a", "late"),
                ):
                    with pytest.raises(LeaseLost):
                        await write
                assert await second.store.add_message("a", "user", "2") == 2

    run(main)


def test_waiting_for_a_lease_does_not_block_its_holder(store: Store) -> None:
    async def main() -> None:
        async with AsyncStore(store) as mine:
            await mine.add_message("a", "user", "1")
            turns: list[int] = []

            async def wait() -> None:
                async with await mine.lease("a", ttl=60, wait=PATIENCE) as lease:
                    turns.append(lease.epoch)

            async with await mine.lease("a", ttl=60) as lease:
                # More than there are threads.
                waiting = [asyncio.create_task(wait()) for _ in range(MAX_THREADS + 8)]
                await asyncio.sleep(0.05)
                await lease.store.add_message("a", "user", "2")
            await asyncio.gather(*waiting)
            assert turns == sorted(set(turns))
            assert len(turns) == MAX_THREADS + 8

    run(main)


def test_cancelled_wait_for_a_lease_holds_no_lease(store: Store) -> None:
    async def main() -> None:
        async with AsyncStore(store) as mine:
            await mine.add_message("a", "user", "1")
            async with await mine.lease("a", ttl=60):
                waiting = asyncio.create_task(mine.lease("a", ttl=60, wait=PATIENCE))
                await asyncio.sleep(0.05)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            await (await mine.lease("a", ttl=60, wait=0)).release()

    run(main)


def test_lease_granted_during_cancellation_is_released() -> None:
    class Slow(Gated):
        def lease(self, *arguments: Any, **options: Any) -> InMemoryLease:
            taken = super().lease(*arguments, **options)
            with self.passing():
                return taken

    async def main() -> None:
        store = Slow()
        InMemoryStore.add_messages(store, "a", [user_message("1")])
        async with AsyncStore(store) as mine:
            taking = asyncio.create_task(mine.lease("a", ttl=60))
            await store.somebody_waits()
            taking.cancel()
            await asyncio.sleep(0)
            store.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await taking
            # A thread releases it, which may still be in progress.
            await (await mine.lease("a", ttl=60, wait=PATIENCE)).release()

    run(main)


def test_cancelled_release_of_a_lease_still_releases_it() -> None:
    async def main() -> None:
        store = Gated()
        InMemoryStore.add_messages(store, "a", [user_message("1")])
        async with AsyncStore(store) as mine:
            lease = await mine.lease("a", ttl=60)
            for number in range(MAX_THREADS):
                writing = asyncio.create_task(mine.set_summary(f"k{number}", "x"))
                await store.somebody_waits()
            releasing = asyncio.create_task(lease.release())
            for _ in range(3):
                await asyncio.sleep(0)
                releasing.cancel()
            assert not releasing.done()
            store.gate.set()
            with pytest.raises(asyncio.CancelledError):
                await releasing
            await writing
            await (await mine.lease("a", ttl=60, wait=0)).release()

    run(main)


def test_session_store_facade_is_rejected_with_hint_to_its_store(tmp_path: Path) -> None:
    face = stenolog.open_sessions(tmp_path)
    with pytest.raises(UsageError, match=r"needs a Store.*not JSONLBackend;.*as \.store$"):
        AsyncStore(face)  # type: ignore[arg-type]
    assert face.store is not None
    assert repr(AsyncStore(face.store)) == f"AsyncStore({face.store!r})"
    face.close()


CONSUMERS: dict[str, Callable[[Any, Path], object]] = {
    "Context": lambda store, _: stenolog.Context(store),
    "sessions=": lambda store, folder: stenolog.open_memory(folder / "w", sessions=store),
    "notes=": lambda store, _: stenolog.Memory(InMemoryStore(), store),
    "Notes": lambda store, _: Notes(store),
    "open_catalog": lambda store, _: stenolog.open_catalog(store),
    "JSONLBackend": lambda store, _: stenolog.JSONLBackend(store),
    "AsyncStore": lambda store, _: AsyncStore(store),
    "migrate_from_json": lambda store, folder: migrate_from_json(folder, store),
}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_async_store_is_rejected_where_a_store_is_needed(consumer: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncStore(InMemoryStore()) as store:
            await store.add_message("a", "user", "hello")
            with pytest.raises(UsageError) as raised:
                CONSUMERS[consumer](store, tmp_path)
            assert str(raised.value) == (
                f"{consumer} needs a Store, not AsyncStore; pass the store that AsyncStore(…) was "
                "given, and with asyncio make the calls in a thread: asyncio.to_thread(…)"
            )

    run(main)
