"""Leases: the fence is in the transaction of each write, and a turn outlasts a life."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from stenolog import LeaseLost, NoSuchSession, SQLiteStore, StoreBusy, StoreClosed
from stenolog.stores.base import Append
from stenolog.stores.sqlite.lease import Held


def _take_over(store: SQLiteStore, key: str) -> None:
    """As if the holder's time were over and another had come."""
    with store.database.write() as transaction:
        transaction.execute("UPDATE lease SET expires = 1 WHERE key = ?", (key,))
    store.lease(key, ttl=60).release()


def test_p7_an_epoch_is_never_given_out_twice(file: Path) -> None:
    epochs: list[int] = []
    for turn in range(3):
        with SQLiteStore(file) as store:
            store.add_message("a", "user", "x")
            store.add_message("b", "user", "x")
            for key in ("a", "b", "a"):
                with store.lease(key, ttl=60) as lease:
                    epochs.append(lease.epoch)
            if turn:
                store.purge("a")
    assert epochs == sorted(set(epochs))


def test_a_turn_outlasts_a_session_that_is_made_anew(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    with store.lease("a", ttl=60) as lease:
        lease.store.delete("a")
        lease.store.add_message("a", "user", "y")
        with pytest.raises(StoreBusy):
            store.lease("a", ttl=60, wait=0)
        assert not lease.lost
    store.lease("a", ttl=60, wait=0).release()


def test_p8_a_purge_by_another_ends_the_turn(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    with store.lease("a", ttl=60) as lease:
        store.purge("a")
        assert lease.lost
        with pytest.raises(LeaseLost):
            lease.store.add_message("a", "user", "late")
        with pytest.raises(NoSuchSession):
            store.lease("a", ttl=60)
    assert store.list_sessions() == []


def test_p8_a_group_through_a_lost_lease_is_refused_whole(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    lease = store.lease("a", ttl=60)
    _take_over(store, "a")
    message = {"role": "user", "content": "late"}
    found = lease.store.add_group("a", [Append(messages=[message]), Append(messages=[message])])
    assert [type(one) for one in found] == [LeaseLost, LeaseLost]
    with pytest.raises(LeaseLost):
        lease.store.restore("a")
    with pytest.raises(LeaseLost):
        lease.store.compact("a")
    assert store.info("a").count == 1


def test_p8_the_fence_is_looked_at_when_the_write_is_made_and_not_before(
    store: SQLiteStore,
) -> None:
    store.add_message("a", "user", "x")
    lease = store.lease("a", ttl=60)
    found: list[object] = []

    def append() -> None:
        try:
            found.append(lease.store.add_message("a", "user", "late"))
        except LeaseLost as error:
            found.append(error.epoch)

    late = threading.Thread(target=append)
    with store.database.write() as transaction:
        # The writer stands at the gate, its lease still good; it is taken away before it gets in.
        late.start()
        while not store.database._queue.waiting:
            pass
        transaction.execute("DELETE FROM lease")
    late.join(20)
    assert found == [lease.epoch]
    assert store.info("a").count == 1


def test_p7_of_two_who_find_the_turn_free_at_once_one_has_it(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    found: list[object] = []

    def take() -> None:
        try:
            found.append(store.lease("a", ttl=60, wait=0).epoch)
        except StoreBusy as error:
            found.append(type(error))

    takers = [threading.Thread(target=take) for _ in range(2)]
    with store.database.write():
        # Both have seen that nobody has it when they come to the gate.
        for number, taker in enumerate(takers, start=1):
            taker.start()
            while len(store.database._queue.waiting) < number:
                pass
    for taker in takers:
        taker.join(20)
    assert sorted(found, key=str) == [1, StoreBusy]


def test_the_holder_is_named(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    with store.lease("a", ttl=60), pytest.raises(StoreBusy, match=f"process {os.getpid()} on"):
        store.lease("a", ttl=60, wait=0)


def test_closing_ends_the_wait_for_a_lease(file: Path) -> None:
    store = SQLiteStore(file)
    store.add_message("a", "user", "x")
    held = store.lease("a", ttl=60)
    found: list[object] = []

    def wait() -> None:
        try:
            store.lease("a", ttl=60, wait=60)
        except StoreClosed as error:
            found.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    store.close()
    waiting.join(20)
    assert found == [StoreClosed]
    assert held.lost
    held.release()


def test_a_lease_in_one_namespace_is_none_in_another(file: Path) -> None:
    with SQLiteStore(file) as sessions, SQLiteStore(file, namespace="notes") as notes:
        sessions.add_message("a", "user", "x")
        notes.add_message("a", "user", "x")
        with sessions.lease("a", ttl=60), notes.lease("a", ttl=60, wait=0) as lease:
            assert not lease.lost


# --- closing ---------------------------------------------------------------------------------


def test_who_closes_while_a_lease_is_being_released_leaves_nothing_behind(file: Path) -> None:
    store = SQLiteStore(file)
    store.add_message("a", "user", "x")
    lease = store.lease("a", ttl=600)
    waiting = store.database._queue.waiting
    releasing, closing = (threading.Thread(target=do) for do in (lease.release, store.close))
    with store.database.write():
        releasing.start()
        while not waiting:
            pass
        closing.start()
        while len(waiting) < 2 and not store.database.closed:
            pass
    releasing.join(20)
    closing.join(20)
    with SQLiteStore(file) as again:
        again.lease("a", ttl=60, wait=0).release()


class _Watching(Held):
    """Looks, when a lease is written down, whether it counts already."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self.counted: list[int] = []

    def add(self, key: str, epoch: int) -> None:
        with SQLiteStore(self._file, read_only=True) as other:
            with other.database.read() as transaction:
                [(counted,)] = transaction.execute("SELECT count(*) FROM lease")
            self.counted.append(counted)
        super().add(key, epoch)


def test_a_lease_is_written_down_for_closing_before_it_counts(file: Path) -> None:
    store = SQLiteStore(file)
    store.add_message("a", "user", "x")
    store._held = watching = _Watching(file)
    lease = store.lease("a", ttl=600)
    assert watching.counted == [0]
    assert not lease.lost
    store.close()
    with SQLiteStore(file) as again:
        again.lease("a", ttl=60, wait=0).release()


def test_once_closing_has_begun_no_lease_is_taken(file: Path) -> None:
    with SQLiteStore(file) as store:
        store.add_message("a", "user", "x")
        store._held.release(store.database)
        with pytest.raises(StoreClosed):
            store.lease("a", ttl=600)
        with SQLiteStore(file) as other:
            other.lease("a", ttl=60, wait=0).release()


# --- forks and clocks ------------------------------------------------------------------------


def _in_a_child(work: Callable[[], bool]) -> bool:
    """What comes of it in a forked child."""
    pid = os.fork()
    if pid == 0:
        good = False
        try:
            good = work()
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_p8_in_a_forked_child_the_turn_is_still_the_parents(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    with store.lease("a", ttl=600) as lease:

        def is_refused(call: Callable[[], object]) -> bool:
            try:
                call()
            except LeaseLost:
                return True
            return False

        def child() -> bool:
            with lease:
                return (
                    lease.lost
                    and is_refused(lambda: lease.store.add_message("a", "user", "child"))
                    and is_refused(lambda: lease.store.set_summary("a", "child"))
                    and is_refused(lease.renew)
                )

        assert _in_a_child(child)
        assert not lease.lost
        with pytest.raises(StoreBusy):
            store.lease("a", ttl=600, wait=0)
        assert lease.store.add_message("a", "user", "parent") == 2


def _later(clock: Callable[[], float], ahead: int) -> float:
    return clock() + ahead


def test_a_lease_that_was_taken_when_the_clock_was_ahead_keeps_nobody_out(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_message("a", "user", "x")
    for ahead in (3600, 0):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", partial(_later, time.time, ahead))
            patch.setattr(time, "time_ns", partial(_later, time.time_ns, ahead * 10**9))
            lease = store.lease("a", ttl=60, wait=0)
            assert not lease.lost
        assert lease.lost == bool(ahead)
    with pytest.raises(StoreBusy):
        store.lease("a", ttl=60, wait=0)


def test_a_renewal_counts_from_the_time_when_it_was_made(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_message("a", "user", "x")
    lease = store.lease("a", ttl=60)
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", partial(_later, time.time, 3600))
        patch.setattr(time, "time_ns", partial(_later, time.time_ns, 3600 * 10**9))
        lease.renew()
        seen = [lease.lost]
    seen.append(lease.lost)
    lease.renew()
    seen.append(lease.lost)
    assert seen == [False, True, False]
    lease.release()


def test_a_lease_whose_time_is_damaged_keeps_nobody_out(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    for spoilt in (b"never", b"\xff"):
        lease = store.lease("a", ttl=60)
        with store.database.write() as transaction:
            transaction.execute("UPDATE lease SET since = CAST(? AS TEXT)", (spoilt,))
        assert lease.lost
        store.lease("a", ttl=60, wait=0).release()
    with store.lease("a", ttl=60):
        with store.database.write() as transaction:
            transaction.execute("UPDATE lease SET holder = CAST(x'ff' AS TEXT)")
        with pytest.raises(StoreBusy, match="since 2"):
            store.lease("a", ttl=60, wait=0)
