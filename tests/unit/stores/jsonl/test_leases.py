"""Tests leases: lock files that end with their process and that no other process can release."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from stenolog import DamagedStore, JSONLStore, LeaseLost, NoSuchSession, StenologError, StoreBusy
from stenolog.errors import NewerFormat, StoreClosed
from stenolog.stores.arguments import Batch
from stenolog.stores.jsonl import leases, trash
from stenolog.stores.jsonl.log import Log
from support.group_appends import append_as_group

KEY = "telegram:123"
PATIENCE = 120

_HOLD = """
import sys
from stenolog import JSONLStore
store = JSONLStore(sys.argv[1])
lease = store.lease("telegram:123", ttl=float(sys.argv[2]))
print(lease.epoch, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JSONLStore]:
    with JSONLStore(tmp_path) as opened:
        opened.add_message(KEY, "user", "hello")
        yield opened


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "sessions" / "locks" / "telegram%3A123.jsonl.lock"


@contextmanager
def holder(place: Path, ttl: float = 60) -> Iterator[subprocess.Popen[str]]:
    """Run another process that holds the lease."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(place), str(ttl)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert int(process.stdout.readline()) > 0
            yield process
        finally:
            process.kill()


def test_lock_file_names_the_lease_holder(store: JSONLStore, lock: Path) -> None:
    before = datetime.now(UTC)
    lease = store.lease(KEY, ttl=30)
    text = lock.read_text()
    assert text.endswith("\n")
    assert text.count("\n") == 1
    told = json.loads(text)
    assert told.keys() == {"epoch", "pid", "host", "since"}
    assert told["epoch"] == lease.epoch
    assert (told["pid"], told["host"]) == (os.getpid(), os.uname().nodename)
    assert before <= datetime.fromisoformat(told["since"]) <= datetime.now(UTC)
    lease.renew()
    assert lock.read_text() == text
    lease.release()


@pytest.mark.parametrize("text", [b"garbage", b'{"epoch":7', b"\0" * 512, b'{"epoch":"x"}\n'])
def test_unreadable_lock_file_does_not_reset_the_epoch(
    store: JSONLStore, lock: Path, text: bytes
) -> None:
    for _ in range(9):
        before = store.lease(KEY, ttl=60)
        before.release()
    lock.write_bytes(text)
    with store.lease(KEY, ttl=60) as lease:
        assert lease.epoch > before.epoch
    with store.lease(KEY, ttl=60) as after:
        assert after.epoch == lease.epoch + 1
    assert after.epoch < 2**53


def test_running_holder_keeps_the_lease_after_its_ttl(store: JSONLStore, tmp_path: Path) -> None:
    lease = store.lease(KEY, ttl=0.001)
    with JSONLStore(tmp_path) as other, pytest.raises(StoreBusy, match=str(os.getpid())):
        other.lease(KEY, ttl=60, wait=0.05)
    assert not lease.lost
    lease.store.add_message(KEY, "user", "still mine")
    lease.renew()
    lease.release()


def test_p7_lease_of_a_killed_holder_is_free(store: JSONLStore, tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(StoreBusy, match=f"process {process.pid} on"):
            store.lease(KEY, ttl=60, wait=0)
        store.add_message(KEY, "user", "plain calls work")
        os.kill(process.pid, signal.SIGKILL)
        with store.lease(KEY, ttl=60, wait=PATIENCE) as lease:
            assert not lease.lost


def test_forked_child_neither_holds_nor_keeps_the_lease(store: JSONLStore, tmp_path: Path) -> None:
    lease = store.lease(KEY, ttl=60)
    ready, told = os.pipe()
    end, wait = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(wait)
            try:
                lease.store.add_message(KEY, "user", "child")
            except LeaseLost as error:
                code = 0 if lease.lost and "the process that took it" in str(error) else 1
            lease.release()
            os.write(told, b"x")
            os.read(end, 1)
        finally:
            os._exit(code)
    try:
        os.close(end)
        assert os.read(ready, 1) == b"x"
        assert not lease.lost, "what the child does with it is its own affair"
        with JSONLStore(tmp_path) as other, pytest.raises(StoreBusy):
            other.lease(KEY, ttl=60, wait=0)
        lease.release()
        store.lease(KEY, ttl=60, wait=0).release()
    finally:
        os.close(wait)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(ready)
        os.close(told)


def test_lease_with_a_replaced_lock_file_is_lost(store: JSONLStore, lock: Path) -> None:
    lease = store.lease(KEY, ttl=60)
    lock.unlink()
    assert lease.lost
    with pytest.raises(LeaseLost):
        lease.renew()
    with store.lease(KEY, ttl=60, wait=0) as other:
        assert lease.lost
        lease.release()
        assert not other.lost


@pytest.mark.parametrize("what", ["symlink", "folder", "pipe"])
def test_p11_lock_path_that_is_not_a_regular_file_is_rejected(
    store: JSONLStore, lock: Path, tmp_path: Path, what: str
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"")
    lock.parent.mkdir(mode=0o700)
    match what:
        case "symlink":
            lock.symlink_to(outside)
        case "folder":
            lock.mkdir()
        case _:
            os.mkfifo(lock)
    with pytest.raises(DamagedStore):
        store.lease(KEY, ttl=60)
    assert outside.read_bytes() == b""


def test_p11_symlinked_locks_folder_is_rejected(
    store: JSONLStore, lock: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    lock.parent.symlink_to(outside)
    with pytest.raises(StenologError):
        store.lease(KEY, ttl=60)
    with pytest.raises(StenologError):
        store.admin.purge(KEY)
    assert list(outside.iterdir()) == []


def test_each_key_has_its_own_lock_file(tmp_path: Path) -> None:
    with JSONLStore(tmp_path) as store:
        held = []
        for key in ("a:b", "a_b", "A:B", "k" * 1024, "..", "K" * 1024):
            store.add_message(key, "user", "x")
            held.append(store.lease(key, ttl=60, wait=0))
        assert not any(lease.lost for lease in held)
        assert len(list((tmp_path / "sessions" / "locks").iterdir())) == 6
        for lease in held:
            lease.release()


@contextmanager
def check_lease(lock: Path) -> Iterator[int]:
    """Check whether the lease is held, as a list of sessions does."""
    looking = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(looking, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield looking
    finally:
        os.close(looking)


def test_checking_a_lease_does_not_block_acquiring_it(store: JSONLStore, lock: Path) -> None:
    store.lease(KEY, ttl=60).release()
    with check_lease(lock) as looking:
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            fcntl.flock(looking, fcntl.LOCK_UN)

        with leases.acquire_lease(store._directory, store, KEY, deadline=0, pause=pause) as lease:
            assert not lease.lost
        assert len(pauses) == 1


def test_acquire_past_its_deadline_raises_store_busy_without_waiting(
    store: JSONLStore,
) -> None:
    def pause(seconds: float) -> None:
        raise AssertionError(f"it waited for {seconds} s")

    with store.lease(KEY, ttl=60), pytest.raises(StoreBusy):
        leases.acquire_lease(store._directory, store, KEY, deadline=0, pause=pause)


def test_endless_check_of_a_lease_does_not_block_for_ever(store: JSONLStore, lock: Path) -> None:
    store.lease(KEY, ttl=60).release()
    with check_lease(lock), pytest.raises(StoreBusy):
        store.lease(KEY, ttl=60, wait=0)
    store.lease(KEY, ttl=60, wait=0).release()


@pytest.mark.parametrize(
    "write",
    [
        lambda behind: behind.add_message(KEY, "assistant", "late"),
        lambda behind: behind.add_message(KEY, "assistant", "late", once="t"),
        lambda behind: behind.set_summary(KEY, "late"),
    ],
    ids=["append", "append once", "change"],
)
def test_write_after_a_concurrent_purge_creates_no_file(
    store: JSONLStore, monkeypatch: pytest.MonkeyPatch, write: Callable[[JSONLStore], object]
) -> None:
    lock, at_once, purged = store._logs.lock, store._queue.try_fast_append, list[int]()

    def purge() -> None:
        if not purged:
            with JSONLStore(store.folder.parent) as other:
                purged.append(other.admin.purge(KEY).messages)

    def purge_first(key: str, *, create: bool) -> Log | None:
        purge()
        return lock(key, create=create)

    def purge_before_the_fast_append(*arguments: Any) -> int:
        purge()
        return at_once(*arguments)

    with store.lease(KEY, ttl=60) as lease:
        monkeypatch.setattr(store._logs, "lock", purge_first)
        monkeypatch.setattr(store._queue, "try_fast_append", purge_before_the_fast_append)
        with pytest.raises(LeaseLost):
            write(lease.store)
    assert purged == [1]
    assert not list(store.folder.glob("*.jsonl"))


def test_group_append_after_a_purge_raises_lease_lost(store: JSONLStore) -> None:
    said = Batch([b'{"role":"user","content":"late"}'])
    with store.lease(KEY, ttl=60) as lease:
        behind = lease.store
        assert append_as_group(behind, KEY, [said, said]) == [2, 3]
        store.admin.purge(KEY)
        errors = append_as_group(behind, KEY, [said, said])
        assert [type(error) for error in errors] == [LeaseLost, LeaseLost]


def test_store_of_a_lease_does_not_keep_the_lease_alive(store: JSONLStore) -> None:
    lease = store.lease(KEY, ttl=60)
    assert lease.store.add_message(KEY, "user", "2") == 2
    del lease
    store.lease(KEY, ttl=60, wait=0).release()


def test_p9_append_through_a_lease_is_a_fast_append_with_one_lease_check(
    store: JSONLStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, looks = leases.JSONLLease.check_held, list[int]()

    def counted(lease: leases.JSONLLease) -> None:
        looks.append(lease.epoch)
        check(lease)

    monkeypatch.setattr(leases.JSONLLease, "check_held", counted)
    with store.lease(KEY, ttl=60) as lease:
        behind = lease.store
        assert behind.add_message(KEY, "user", "2", once="t") == 2
        assert len(looks) == 1
        behind.set_summary(KEY, "x")
        assert len(looks) == 2
        monkeypatch.setattr(store._queue, "append", None)
        assert behind.add_message(KEY, "user", "3") == 3
        assert len(looks) == 3


@contextmanager
def busy(log: Path) -> Iterator[None]:
    """Hold the lock of a log, as a slow writer does."""
    writing = os.open(log, os.O_RDWR)
    try:
        fcntl.flock(writing, fcntl.LOCK_EX)
        yield
    finally:
        os.close(writing)


def test_p8_failed_purge_does_not_end_the_lease(
    store: JSONLStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(entry: trash.Entry) -> None:
        raise NewerFormat(f"{entry.name} was written by a newer version")

    store.delete(KEY)
    store.add_message(KEY, "user", "1")
    [log] = store.folder.glob("*.jsonl")
    with JSONLStore(tmp_path, busy_timeout=0.05) as other, store.lease(KEY, ttl=60) as lease:
        with busy(log), pytest.raises(StoreBusy):
            other.admin.purge(KEY)
        assert lease.store.add_message(KEY, "user", "2") == 2
        monkeypatch.setattr(other._purger, "_check_format", refuse)
        with pytest.raises(NewerFormat):
            other.admin.purge(KEY)
        assert not lease.lost


def test_p8_purge_that_fails_in_the_trash_does_not_end_the_lease(
    store: JSONLStore, tmp_path: Path
) -> None:
    store.delete(KEY)
    store.add_message(KEY, "user", "another life")
    [deleted] = (store.folder / "trash").iterdir()
    with JSONLStore(tmp_path, busy_timeout=0.05) as other, store.lease(KEY, ttl=60) as lease:
        with busy(deleted), pytest.raises(StenologError):
            other.admin.purge(KEY)
        assert not lease.lost
        assert other.admin.purge(KEY).messages == 2
        assert lease.lost


def test_lease_acquired_during_a_purge_is_lost(
    store: JSONLStore, lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, told = trash.move_to_trash, list[StenologError]()

    def take(other: JSONLStore) -> None:
        try:
            other.lease(KEY, ttl=60).store.add_message(KEY, "user", "back again")
        except StenologError as error:
            told.append(error)

    def put_late(*arguments: Any, **options: Any) -> trash.Entry:
        taking.start()
        limit = time.monotonic() + PATIENCE
        while not (lock.exists() and lock.stat().st_size) and time.monotonic() < limit:
            time.sleep(0.001)
        return put(*arguments, **options)

    with JSONLStore(tmp_path) as other, store.lease(KEY, ttl=60):
        taking = Thread(target=take, args=[other])
        monkeypatch.setattr(trash, "move_to_trash", put_late)
        assert store.admin.purge(KEY).messages == 1
        taking.join(PATIENCE)
    assert [type(error) for error in told] == [NoSuchSession]
    assert list(lock.parent.iterdir()) == []
    assert store.list_sessions() == []


@pytest.mark.parametrize("how", ["purge_trash", "finish_purge"])
def test_lease_of_a_new_session_survives_a_purge_of_the_trash(
    store: JSONLStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store.lease(KEY, ttl=60).release()
    gone = store.delete(KEY)
    if how == "finish_purge":
        [log] = (store.folder / "trash").iterdir()
        log.rename(f"{log}.purged")
    end, begun = leases.delete_lock_file, list[leases.JSONLLease]()

    def begin_first(*arguments: Any) -> None:
        with suppress(StoreBusy):
            other.add_message(KEY, "user", "another life")
            begun.append(other.lease(KEY, ttl=60))
        end(*arguments)

    with JSONLStore(tmp_path, busy_timeout=0.05) as other:
        monkeypatch.setattr(leases, "delete_lock_file", begin_first)
        if how == "finish_purge":
            store.admin.finish_purge(gone.uid)
        else:
            store.admin.purge(KEY, trash=[(gone.uid, gone.deleted)])
        assert not any(lease.lost for lease in begun)
        monkeypatch.undo()
        assert not list(store.folder.glob("*.jsonl"))
        assert other.add_message(KEY, "user", "another life") == 1
        with other.lease(KEY, ttl=60) as lease:
            assert not lease.lost


def test_p8_a_closed_store_stays_closed_in_a_forked_child(tmp_path: Path) -> None:
    store = JSONLStore(tmp_path)
    store.add_message(KEY, "user", "1")
    lease = store.lease(KEY, ttl=60)
    behind = lease.store
    store.close()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            behind.get_history(KEY)
        except StoreClosed:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_p7_lease_is_acquired_again_if_its_lock_file_is_deleted_meanwhile(
    store: JSONLStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = leases.JSONLLease.start
    deleted = list[int]()

    def delete_before(lease: leases.JSONLLease) -> None:
        if not deleted:
            leases.delete_lock_file(store._directory, KEY)
            begin(lease)
            deleted.append(lease.epoch)
        else:
            begin(lease)

    monkeypatch.setattr(leases.JSONLLease, "start", delete_before)
    with store.lease(KEY, ttl=60) as lease:
        assert deleted
        assert not lease.lost
        lease.store.add_message(KEY, "user", "written with the lease")
