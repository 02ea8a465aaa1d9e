"""Tests the write queue: order of arrival, shared transactions, and no endless waits."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw
import pytest

from stenolog import MaybeStored, NotStored, SQLiteStore, StoreBusy
from stenolog.errors import StenologError, StoreClosed
from stenolog.stores.sqlite.gate import ProcessLock, QueuedWrite


def _wait_until(reached: Callable[[], bool]) -> None:
    """Wait until another thread has reached a state."""
    limit = time.monotonic() + 120
    while not reached():
        assert time.monotonic() < limit, "timed out waiting for the queue"
        time.sleep(0.0005)


def _wait_for(store: SQLiteStore, writers: int) -> None:
    """Wait until this number of writers is in the queue."""
    _wait_until(lambda: len(store.database._queue.waiting) >= writers)


# --- groups in a store -----------------------------------------------------------------------


def _hold_transaction(store: SQLiteStore) -> tuple[threading.Event, threading.Thread]:
    """Hold a transaction open in a thread until told to leave."""
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store.database.write_transaction():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(20)
    return leave, thread


def test_p7_waiting_threads_share_one_transaction(store: SQLiteStore) -> None:
    leave, holder = _hold_transaction(store)
    found: dict[int, int] = {}

    def append(number: int) -> None:
        found[number] = store.add_message(f"session {number % 3}", "user", number)

    writers = [threading.Thread(target=append, args=[number]) for number in range(9)]
    for number, writer in enumerate(writers):
        writer.start()
        _wait_for(store, number + 1)
    with store.database.read_transaction() as transaction:
        [(before,)] = transaction.execute("PRAGMA data_version")
        leave.set()
        for thread in [holder, *writers]:
            thread.join(20)
    with store.database.read_transaction() as transaction:
        [(after,)] = transaction.execute("PRAGMA data_version")
    assert sorted(found.values()) == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    # The holder changed nothing, so there was one commit.
    assert after == before + 1


def test_p7_exclusive_turns_keep_the_order_of_arrival(store: SQLiteStore) -> None:
    order: list[int] = []

    def share(number: int) -> None:
        store.database.run_shared(lambda _: order.append(number))

    def exclude(number: int) -> None:
        with store.database.write_transaction():
            order.append(number)

    leave, holder = _hold_transaction(store)
    threads = [
        threading.Thread(target=write, args=[number])
        for number, write in enumerate([share, share, exclude, share, exclude])
    ]
    for number, thread in enumerate(threads, start=1):
        thread.start()
        _wait_for(store, number)
    leave.set()
    for thread in [holder, *threads]:
        thread.join(20)
    assert order == [0, 1, 2, 3, 4]


def _append_together(store: SQLiteStore, appends: Sequence[dict[str, Any]]) -> list[object]:
    """Append from threads that wait in this order for the same transaction."""
    found: list[object] = [None] * len(appends)

    def append(index: int) -> None:
        try:
            found[index] = store.add_full_message("a", **appends[index])
        except StenologError as error:
            found[index] = error

    leave, holder = _hold_transaction(store)
    threads = [threading.Thread(target=append, args=[index]) for index in range(len(appends))]
    for number, thread in enumerate(threads):
        thread.start()
        _wait_for(store, number + 1)
    leave.set()
    for thread in [holder, *threads]:
        thread.join(20)
    return found


def test_p12_failed_append_of_a_group_does_not_affect_the_others(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x", once="t")
    found = _append_together(
        store,
        [
            {"message": {"role": "user", "content": "1"}},
            {"message": {"role": "user", "content": "other"}, "once": "t"},
            {"message": {"role": "user", "content": "x"}, "once": "t"},
            {"message": {"role": "user", "content": "2"}, "once": "u"},
            {"message": {"role": "user", "content": "2"}, "once": "u"},
        ],
    )
    assert [one if isinstance(one, int) else type(one).__name__ for one in found] == [
        2,
        "OnceConflict",
        1,
        3,
        3,
    ]
    assert [message.content for message in store.get_history("a")] == ["x", "1", "2"]


def test_p8_failed_group_raises_for_each_caller(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_message("a", "user", "x")
    writer = store.database._writer
    commit, commits = writer.commit, list[None]()

    def fail_after_the_holder() -> None:
        commits.append(None)
        if len(commits) > 1:
            raise apsw.FullError("database or disk is full")
        commit()

    with monkeypatch.context() as patch:
        patch.setattr(writer, "commit", fail_after_the_holder)
        found = _append_together(store, [{"message": {"role": "user", "content": "1"}}] * 2)
    assert [type(one) for one in found] == [NotStored, NotStored]
    assert found[0] is not found[1]
    assert store.info("a").count == 1


def test_interrupted_leader_does_not_affect_other_callers(store: SQLiteStore) -> None:
    leave, holder = _hold_transaction(store)
    found: list[object] = []

    class Interruption(BaseException):
        pass

    def interrupted(_: object) -> None:
        raise Interruption

    def lead() -> None:
        with suppress(Interruption):
            store.database.run_shared(interrupted)
        found.append("interrupted")

    def append() -> None:
        found.append(store.add_message("a", "user", "x"))

    threads = [threading.Thread(target=lead), threading.Thread(target=append)]
    for number, thread in enumerate(threads):
        thread.start()
        _wait_for(store, number + 1)
    leave.set()
    for thread in [holder, *threads]:
        thread.join(20)
    assert sorted(found, key=str) == [1, "interrupted"]
    assert store.add_message("a", "user", "y") == 2


def test_interrupt_after_commit_is_raised_after_all_callers_finished(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_message("a", "user", "x")
    writer = store.database._writer
    commit = writer.commit

    def commit_and_press_ctrl_c() -> None:
        commit()
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "commit", commit_and_press_ctrl_c)
    mine, other = QueuedWrite(lambda _: 1), QueuedWrite(lambda _: 2)
    with pytest.raises(KeyboardInterrupt):
        store.database._run_group([mine, other])
    assert (mine.done, other.done) == (True, True)
    assert (other.result, other.error) == (2, None)


def test_every_caller_finishes_after_any_interrupt(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store.database._writer, "leave", strike)
    mine, other = QueuedWrite(lambda _: 1), QueuedWrite(lambda _: 2)
    with pytest.raises(KeyboardInterrupt):
        store.database._run_group([mine, other])
    monkeypatch.undo()
    store.database._writer.leave()
    assert isinstance(other.error, MaybeStored)
    assert store.add_message("a", "user", "x") == 1


class _InterceptedLock:
    """A lock that lets another caller act between a check and the next step."""

    def __init__(self, lock: threading.Lock, then: Callable[[], object]) -> None:
        self._lock = lock
        self._then = [then]

    def locked(self) -> bool:
        found = self._lock.locked()
        while self._then:
            self._then.pop()()
        return found

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *how: object) -> None:
        self._lock.release()

    def acquire(self, blocking: bool = True) -> bool:
        return self._lock.acquire(blocking)

    def release(self) -> None:
        self._lock.release()


@pytest.mark.parametrize("first", ["append", "change"])
def test_p8_no_caller_waits_behind_a_later_one(store: SQLiteStore, first: str) -> None:
    store.add_message("a", "user", "1")
    queue, inside, leave = store.database._queue, threading.Event(), threading.Event()
    waited: list[bool] = []

    def purge() -> None:
        with store.database.write_transaction():
            inside.set()
            waited.append(leave.wait(10))

    other = threading.Thread(target=purge)

    def start_other() -> None:
        other.start()
        _wait_until(lambda: inside.is_set() or len(queue.waiting) > 1)

    queue.lock = _InterceptedLock(queue.lock, start_other)  # type: ignore[assignment]
    if first == "append":
        assert store.add_message("a", "user", "2") == 2
    else:
        store.set_summary("a", "text")
    leave.set()
    other.join(20)
    assert waited == [True], "it waited for as long as the other was at work"


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.add_message("k", "user", "second"),
        lambda store: store.set_summary("k", "second"),
    ],
    ids=["shared", "alone"],
)
def test_p8_wait_for_an_earlier_writer_is_limited_by_busy_timeout(
    file: Path, write: Callable[[SQLiteStore], object]
) -> None:
    with SQLiteStore(file, busy_timeout=0.1) as store:
        store.add_message("k", "user", "first")
        queue = store.database._queue
        real = queue.lock
        queue.lock = _InterceptedLock(real, lambda: bool(real.acquire()))  # type: ignore[assignment]
        outcome: list[object] = []

        def call() -> None:
            try:
                outcome.append(write(store))
            except StoreBusy as error:
                outcome.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        try:
            thread.join(60)
            assert not thread.is_alive(), "the caller waits for the lock of the queue"
        finally:
            real.release()
            thread.join()
        assert isinstance(outcome[0], StoreBusy)
        assert len(store.get_history("k")) == 1


def test_p7_caller_returns_the_result_of_work_done_by_another_thread(file: Path) -> None:
    with SQLiteStore(file) as store:
        database = store.database
        queue = database._queue
        real = queue.lock

        def lead() -> None:
            with real:
                queue._run_group(queue.waiting[0], database._run_group)

        queue.lock = _InterceptedLock(real, lead)  # type: ignore[assignment]
        assert store.add_message("k", "user", "first") == 1
        assert store.add_message("k", "user", "second") == 2


# --- closing ---------------------------------------------------------------------------------


def test_close_does_not_wait_and_running_calls_finish(file: Path) -> None:
    store = SQLiteStore(file)
    leave, holder = _hold_transaction(store)
    found: list[object] = []

    def append() -> None:
        try:
            found.append(store.add_message("a", "user", "x"))
        except StoreClosed as error:
            found.append(type(error))

    waiting = threading.Thread(target=append)
    waiting.start()
    _wait_for(store, 1)
    with store.database.read_transaction() as transaction:
        store.close()
        assert list(transaction.execute("SELECT count(*) FROM session")) == [(0,)]
    leave.set()
    for thread in (holder, waiting):
        thread.join(20)
    assert found == [StoreClosed]
    # The last call to end has checkpointed the log.
    assert not file.with_name("sessions.db-wal").exists()
    store.close()


def test_p8_readers_beyond_the_limit_wait(file: Path) -> None:
    with SQLiteStore(file, busy_timeout=0.05) as store:
        store.add_message("a", "user", "x")
        inside = [store.database.read_transaction() for _ in range(8)]
        for one in inside:
            one.__enter__()
        with pytest.raises(StoreBusy, match="reads at once"):
            store.get_history("a")
        for one in inside:
            one.__exit__(None, None, None)
        assert len(store.get_history("a")) == 1
        assert len(store.database._readers._idle) == 8


# --- between processes -----------------------------------------------------------------------

_NEXT = """
import sys, time
from pathlib import Path
from stenolog.stores.sqlite.gate import ProcessLock

lock = ProcessLock(Path(sys.argv[1]))
lock.lock(time.monotonic() + 20)
print("inside", flush=True)
sys.stdin.read()
"""


def test_p7_returning_process_does_not_overtake_waiting_ones(file: Path) -> None:
    mine = ProcessLock(file)
    mine.lock(0)
    next_one = file.with_name(f"{file.name}-next")
    next_one.touch()
    with (
        subprocess.Popen(
            [sys.executable, "-c", _NEXT, str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as other,
        next_one.open("r+b") as looking,
    ):
        _wait_until(lambda: _is_taken(looking.fileno()))
        mine.unlock()
        with pytest.raises(StoreBusy):
            mine.lock(0)
        assert other.stdout is not None
        assert other.stdout.readline() == "inside\n"
        other.communicate()
    mine.lock(0)
    # Locking again does no harm.
    mine.lock(0)
    mine.close()


def test_p7_writer_stopped_at_the_gate_does_not_block_others(file: Path) -> None:
    code = "import sys, stenolog; stenolog.SQLiteStore(sys.argv[1]).add_message('k', 'user', 'b')"
    with SQLiteStore(file) as store:
        store.add_message("k", "user", "a")
        with (
            file.with_name(f"{file.name}-next").open("r+b") as looking,
            store.database.write_transaction() as transaction,
        ):
            transaction.execute("UPDATE session SET version = version + 1")
            other = subprocess.Popen([sys.executable, "-c", code, str(file)])
            _wait_until(lambda: _is_taken(looking.fileno()))
            other.send_signal(signal.SIGSTOP)
            assert os.WIFSTOPPED(os.waitpid(other.pid, os.WUNTRACED)[1])
        try:
            assert store.add_message("k", "user", "c") == 2
            store.lease("k", ttl=1).release()
        finally:
            other.send_signal(signal.SIGCONT)
            assert other.wait(60) == 0
        assert [message.content for message in store.get_history("k")] == ["a", "c", "b"]


def _is_taken(descriptor: int) -> bool:
    """Return whether another process is next."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
