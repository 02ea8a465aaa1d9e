"""Tests leases: each write checks the lease in its transaction, and leases outlast deletion."""

import gc
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from stenolog import LeaseLost, SQLiteStore, StenologError, StoreBusy
from stenolog.errors import StoreClosed
from stenolog.stores.sqlite import lease_holders
from support.namespaces import in_namespace


def test_lease_survives_deletion_and_new_session_of_the_key(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    with store.lease("a", ttl=60) as lease:
        lease.store.delete("a")
        lease.store.add_message("a", "user", "y")
        with pytest.raises(StoreBusy):
            store.lease("a", ttl=60, wait=0)
        assert not lease.lost
    store.lease("a", ttl=60, wait=0).release()


def test_p8_lease_is_checked_inside_the_write_transaction(
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
    with store.database.write_transaction() as transaction:
        # The writer waits in the queue with a valid lease, which is lost before it is next.
        late.start()
        while not store.database._queue.waiting:
            pass
        transaction.execute("DELETE FROM lease")
    late.join(20)
    assert found == [lease.epoch]
    assert store.info("a").count == 1


def test_p7_concurrent_acquirers_get_one_lease(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    found: list[object] = []

    def take() -> None:
        try:
            found.append(store.lease("a", ttl=60, wait=0).epoch)
        except StoreBusy as error:
            found.append(type(error))

    takers = [threading.Thread(target=take) for _ in range(2)]
    with store.database.write_transaction():
        # Both have seen that the lease is free when they enter the queue.
        for number, taker in enumerate(takers, start=1):
            taker.start()
            while len(store.database._queue.waiting) < number:
                pass
    for taker in takers:
        taker.join(20)
    assert sorted(found, key=str) == [1, StoreBusy]


def test_leases_of_namespaces_are_independent(file: Path) -> None:
    with SQLiteStore(file) as sessions, SQLiteStore(file, namespace="notes") as notes:
        sessions.add_message("a", "user", "x")
        notes.add_message("a", "user", "x")
        with sessions.lease("a", ttl=60), notes.lease("a", ttl=60, wait=0) as lease:
            assert not lease.lost


# --- closing ---------------------------------------------------------------------------------


def test_close_during_a_release_leaves_no_lease(file: Path) -> None:
    store = SQLiteStore(file)
    store.add_message("a", "user", "x")
    lease = store.lease("a", ttl=600)
    waiting = store.database._queue.waiting
    releasing, closing = (threading.Thread(target=do) for do in (lease.release, store.close))
    with store.database.write_transaction():
        releasing.start()
        while not waiting:
            pass
        closing.start()
        while len(waiting) < 2 and not store.database.closed:
            pass
    releasing.join(20)
    closing.join(20)
    assert _is_free_elsewhere(file)


def test_lease_is_registered_before_it_is_committed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SQLiteStore(file)
    store.add_message("a", "user", "x")
    add_lease, stored = store._leases.add_lease, list[object]()

    def look(epoch: int) -> None:
        with store.database.read_transaction() as transaction:
            stored.extend(transaction.run("lease_in_force", epoch))
        add_lease(epoch)

    monkeypatch.setattr(store._leases, "add_lease", look)
    lease = store.lease("a", ttl=600)
    assert stored == []
    assert not lease.lost
    store.close()
    assert _is_free_elsewhere(file)


def test_no_lease_is_acquired_after_close_began(file: Path) -> None:
    with SQLiteStore(file) as store:
        store.add_message("a", "user", "x")
        store._leases.close()
        with pytest.raises(StoreClosed):
            store.lease("a", ttl=600)
        with SQLiteStore(file) as other:
            other.lease("a", ttl=60, wait=0).release()


# --- forks and clocks ------------------------------------------------------------------------


def _run_in_child(work: Callable[[], bool]) -> bool:
    """Run work in a forked child and return its result."""
    pid = os.fork()
    if pid == 0:
        good = False
        try:
            good = work()
        finally:
            os._exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_p8_lease_counts_as_lost_in_a_forked_child(store: SQLiteStore) -> None:
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

        assert _run_in_child(child)
        assert not lease.lost
        with pytest.raises(StoreBusy):
            store.lease("a", ttl=600, wait=0)
        assert lease.store.add_message("a", "user", "parent") == 2


def _later(clock: Callable[[], float], ahead: int) -> float:
    return clock() + ahead


@contextmanager
def _clock(ahead: int) -> Iterator[None]:
    """Move the wall clock of this process by this number of seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", partial(_later, time.time, ahead))
        patch.setattr(time, "time_ns", partial(_later, time.time_ns, ahead * 10**9))
        yield


def _forget_process(store: SQLiteStore) -> None:
    """Make the lease look as if another machine, or an older version, had acquired it."""
    with store.database.write_transaction() as transaction:
        transaction.execute("UPDATE lease SET process = ''")


def test_lease_with_a_time_in_the_future_does_not_block(
    store: SQLiteStore,
) -> None:
    store.add_message("a", "user", "x")
    for ahead in (3600, 0):
        with _clock(ahead):
            lease = store.lease("a", ttl=60, wait=0)
            _forget_process(store)
            assert not lease.lost
        assert lease.lost == bool(ahead)
    with pytest.raises(StoreBusy):
        store.lease("a", ttl=60, wait=0)


def test_lease_with_damaged_time_does_not_block(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    for spoilt in (b"never", b"\xff"):
        lease = store.lease("a", ttl=60)
        with store.database.write_transaction() as transaction:
            transaction.execute("UPDATE lease SET since = CAST(? AS TEXT)", (spoilt,))
        _forget_process(store)
        assert lease.lost
        store.lease("a", ttl=60, wait=0).release()
    with store.lease("a", ttl=60):
        with store.database.write_transaction() as transaction:
            transaction.execute("UPDATE lease SET holder = CAST(x'ff' AS TEXT)")
        with pytest.raises(StoreBusy, match="since 2"):
            store.lease("a", ttl=60, wait=0)


@pytest.mark.parametrize("ahead", [-3600, -3, 0, 3, 61, 3600])
def test_p7_setting_the_clock_does_not_free_a_held_lease(
    store: SQLiteStore, file: Path, ahead: int
) -> None:
    store.add_message("a", "user", "x")
    with _holder(file, _WAITS), _clock(ahead):
        assert not _is_free(store)
    lease = store.lease("a", ttl=60)
    with _clock(ahead):
        assert not lease.lost
        lease.renew()
        assert not lease.lost
    assert not lease.lost
    lease.release()


def test_lease_expires_by_the_monotonic_clock(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_message("a", "user", "x")
    lease = store.lease("a", ttl=60)
    for later, lost in ((59, False), (61, True)):
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", partial(_later, time.monotonic, later))
            assert lease.lost == lost
            lease.renew()
            assert not lease.lost
        lease.renew()


# --- ended holders ---------------------------------------------------------------------------

_HOLDS = """
import os, sys
from stenolog import SQLiteStore
store = SQLiteStore(sys.argv[1])
lease = store.lease("a", ttl=600)
print(lease.epoch, flush=True)
"""
_WAITS = _HOLDS + "sys.stdin.read()\n"
_HAS_A_CHILD = _HOLDS + "if not os.fork(): sys.stdin.read()\n" + "os._exit(0)\n"


@contextmanager
def _holder(file: Path, program: str, *before: str) -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lease for ten minutes, until its input ends."""
    with subprocess.Popen(
        [*before, sys.executable, "-c", program, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert int(holder.stdout.readline())
            yield holder
        finally:
            holder.kill()


def _is_free(store: SQLiteStore) -> bool:
    try:
        store.lease("a", ttl=600, wait=0).release()
    except StoreBusy:
        return False
    return True


@pytest.fixture
def _tells() -> None:
    if lease_holders.current_process() is None:
        pytest.skip("NOT RUN: the start times of processes are unknown here")


told = pytest.mark.usefixtures("_tells")


@told
def test_p7_lease_of_a_killed_process_is_free_immediately(store: SQLiteStore, file: Path) -> None:
    store.add_message("a", "user", "x")
    with _holder(file, _WAITS) as holder:
        assert not _is_free(store)
        holder.kill()
        holder.wait()
        with store.lease("a", ttl=60, wait=0) as lease:
            assert lease.store.add_message("a", "user", "y") == 2


@told
def test_child_that_outlives_the_holder_does_not_hold_the_lease(
    store: SQLiteStore, file: Path
) -> None:
    store.add_message("a", "user", "x")
    with _holder(file, _HAS_A_CHILD) as holder:
        holder.wait()
        assert _is_free(store)


@told
@pytest.mark.parametrize("field", range(2), ids=["boot", "processes"])
def test_holder_of_another_boot_or_namespace_blocks_until_expiry(
    store: SQLiteStore, file: Path, field: int
) -> None:
    store.add_message("a", "user", "x")
    with _holder(file, _WAITS) as holder:
        holder.kill()
        holder.wait()
        with store.database.write_transaction() as transaction:
            [(process,)] = transaction.execute("SELECT process FROM lease")
            holder = json.loads(process)
            holder[0][field] = "another"
            transaction.execute("UPDATE lease SET process = ?", (json.dumps(holder),))
        assert not _is_free(store)
        with store.database.write_transaction() as transaction:
            transaction.execute("UPDATE lease SET process = ?", (process,))
        assert _is_free(store)


@pytest.mark.parametrize("process", [b"", b'[["\xff"', b"[]", b'[["a","b",1,2],"c",null]'])
def test_unknown_holder_blocks_until_expiry(store: SQLiteStore, process: bytes) -> None:
    store.add_message("a", "user", "x")
    lease = store.lease("a", ttl=600)
    with store.database.write_transaction() as transaction:
        transaction.execute("UPDATE lease SET process = CAST(? AS TEXT)", (process,))
    assert not _is_free(store)
    assert not lease.lost
    lease.release()


@pytest.mark.parametrize("options", [("--mount-proc",), ()], ids=["its own /proc", "our /proc"])
def test_holder_in_a_container_blocks_until_expiry(
    store: SQLiteStore, file: Path, options: tuple[str, ...]
) -> None:
    store.add_message("a", "user", "x")
    with _holder(file, _WAITS, *in_namespace(*options)) as holder:
        assert not _is_free(store)
        holder.kill()
        holder.wait()
        assert not _is_free(store)


# --- leases that this process cannot release -------------------------------------------------


@contextmanager
def _no_file_growth() -> Iterator[None]:
    """Do not let any file grow."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def _is_free_elsewhere(file: Path) -> bool:
    def child() -> bool:
        with SQLiteStore(file) as other:
            return _is_free(other)

    return _run_in_child(child)


@told
def test_p8_lease_whose_release_failed_is_free_in_this_process(
    store: SQLiteStore, file: Path
) -> None:
    store.add_message("a", "user", "x")
    first = store.lease("a", ttl=600)
    with _no_file_growth(), pytest.raises(StenologError):
        first.release()
    assert first.lost
    with pytest.raises(LeaseLost):
        first.renew()
    assert not _is_free_elsewhere(file)
    with SQLiteStore(file) as other, other.lease("a", ttl=600, wait=0) as second:
        assert not _is_free(store)
        assert second.epoch > first.epoch
        with pytest.raises(LeaseLost):
            first.store.add_message("a", "user", "late")
    with store.lease("a", ttl=600, wait=0) as third:
        assert not third.lost


def test_close_in_a_forked_child_keeps_the_lease_of_the_parent(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    with store.lease("a", ttl=600) as lease:
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not lease.lost


@told
def test_lease_of_a_store_closed_on_a_full_disk_is_free_in_this_process(
    store: SQLiteStore, file: Path
) -> None:
    other = SQLiteStore(file)
    other.add_message("a", "user", "x")
    other.lease("a", ttl=600)
    with _no_file_growth():
        other.close()
    with store.database.read_transaction() as transaction:
        [(expires,)] = transaction.execute("SELECT expires FROM lease")
    assert expires > 0
    assert _is_free(store)


@told
def test_lease_whose_acquisition_failed_is_free_in_this_process(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    with _no_file_growth(), pytest.raises(StenologError):
        store.lease("a", ttl=600)
    assert _is_free(store)


def test_failed_takeover_does_not_end_the_lease(file: Path) -> None:
    with SQLiteStore(file, busy_timeout=0.2) as store:
        store.add_message("a", "user", "x")
        lease = store.lease("a", ttl=600)
        with store.database.write_transaction() as transaction:
            transaction.execute("UPDATE lease SET expires = 1")
        with _no_file_growth(), pytest.raises(StenologError):
            store.lease("a", ttl=600)
        lease.renew()
        assert not lease.lost
        assert not _is_free(store)
        lease.release()


@told
def test_garbage_collected_store_holds_no_lease(store: SQLiteStore, file: Path) -> None:
    store.add_message("a", "user", "x")
    forgotten = [SQLiteStore(file)]
    lease = [forgotten[0].lease("a", ttl=600)]
    assert not _is_free(store)
    forgotten.clear()
    gc.collect()
    assert not _is_free(store)
    lease.clear()
    gc.collect()
    assert _is_free(store)


def test_p7_store_closed_by_two_threads_releases_its_database_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SQLiteStore(tmp_path / "s.db")
    both_in_close = threading.Barrier(2)
    close_leases, close_database = store._leases.close, store._close_database
    releases: list[None] = []

    def wait_for_the_other_thread() -> list[int]:
        both_in_close.wait(30)
        return close_leases()

    def count_release() -> None:
        releases.append(None)
        close_database()

    monkeypatch.setattr(store._leases, "close", wait_for_the_other_thread)
    monkeypatch.setattr(store, "_close_database", count_release)
    threads = [threading.Thread(target=store.close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(releases) == 1
