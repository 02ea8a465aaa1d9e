"""Tests files that a crash or a user may leave next to a database."""

import subprocess
import sys
import threading
from pathlib import Path

import apsw
import pytest

from stenolog import JSONLBackend, SQLiteStore, StoreBusy, StoreUnavailable
from support import needs
from support.viewing import state_of


def _left_behind(file: Path, *, key: str = "a") -> None:
    """Leave a database with its log, as a process that ends without closing."""
    code = (
        "import os, sys, stenolog; store = stenolog.SQLiteStore(sys.argv[1]);"
        "store.add_message(sys.argv[2], 'user', 'left behind', once='t'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, file, key], check=True)
    assert file.with_name(f"{file.name}-wal").stat().st_size > 0


def test_p1_p12_log_of_a_killed_writer_is_synced_before_reads(file: Path, tmp_path: Path) -> None:
    needs.tool("strace")
    _left_behind(file)
    code = (
        "import os, sys, stenolog; store = stenolog.SQLiteStore(sys.argv[1]);"
        "seq = store.add_message('a', 'user', 'left behind', once='t');"
        "os.write(1, b'answered %d' % seq)"
    )
    log = tmp_path / "calls"
    command = [sys.executable, "-c", code, str(file)]
    calls = "trace=fsync,fdatasync,write"
    ended = subprocess.run(
        ["strace", "-f", "-y", "-e", calls, "-o", log, *command],
        check=True,
        capture_output=True,
        text=True,
    )
    assert ended.stdout == "answered 1"
    before, _, _ = log.read_text().partition("answered")
    assert any("sync(" in line and "-wal>" in line for line in before.splitlines())


def test_reader_that_leaves_no_files_reads_the_log_of_a_killed_writer(file: Path) -> None:
    with SQLiteStore(file) as store:
        store.add_message("a", "user", "in the file")
    expected = ["in the file"]
    for log in (None, "left behind"):
        if log is not None:
            _left_behind(file)
            expected.append(log)
        before = state_of(file.parent)
        with SQLiteStore(file, read_only=True, leave_no_files=True) as store:
            assert [message.content for message in store.get_history("a")] == expected
            assert state_of(file.parent) == before
        assert state_of(file.parent) == before
    file.with_name(f"{file.name}-shm").unlink()
    before = state_of(file.parent)
    with pytest.raises(StoreUnavailable, match="write-ahead log"):
        SQLiteStore(file, read_only=True, leave_no_files=True)
    assert state_of(file.parent) == before


def test_p3_log_of_a_removed_database_is_not_applied_to_a_new_one(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _left_behind(file, key="old")
    log = file.with_name(f"{file.name}-wal")
    before = log.read_bytes()
    file.unlink()
    with SQLiteStore(file) as store:
        assert store.list_sessions() == []
        store.add_message("new", "user", "x")
    connection = apsw.Connection(str(file))
    assert list(connection.execute("PRAGMA integrity_check")) == [("ok",)]
    connection.close()
    [aside] = file.parent.glob(f"{log.name}.left-*")
    assert aside.read_bytes() == before
    assert any("belongs to a database that no longer exists" in r.message for r in caplog.records)


def test_p8_open_waits_for_the_process_that_holds_the_database(file: Path) -> None:
    SQLiteStore(file).close()
    other = apsw.Connection(str(file))
    list(other.execute("PRAGMA locking_mode = EXCLUSIVE; BEGIN EXCLUSIVE"))
    opened: list[SQLiteStore] = []
    opening = threading.Thread(target=lambda: opened.append(SQLiteStore(file, busy_timeout=30)))
    opening.start()
    opening.join(0.2)
    assert opening.is_alive()
    other.execute("COMMIT")
    other.close()
    opening.join()
    opened[0].close()


def test_p4_finished_purge_keeps_the_record_of_another(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("mine", "theirs"):
        store.add_message(key, "user", "a secret")
    rewrite = store.database.rewrite

    def rewrite_while_another_begins() -> None:
        rewrite()
        with store.database.write_transaction() as transaction:
            transaction.execute("INSERT INTO purge (begun) VALUES ('2026-01-01T00:00:00.000000Z')")

    monkeypatch.setattr(store.database, "rewrite", rewrite_while_another_begins)
    store.admin.purge("mine")
    with store.database.read_transaction() as transaction:
        assert transaction.unfinished_purges()


def test_p9_released_lease_uses_no_memory(store: SQLiteStore) -> None:
    store.add_message("a", "user", "x")
    for number in range(50):
        key = f"k{number}"
        store.add_message(key, "user", "x")
        store.lease(key, ttl=60).release()
    assert store._leases._processes == {}


def test_p7_threads_that_fork_at_once_leave_the_store_usable(file: Path) -> None:
    code = """
import os, sys, threading, time
os.register_at_fork(before=lambda: time.sleep(0.01))  # between our hook and the fork
import stenolog
store = stenolog.SQLiteStore(sys.argv[1], busy_timeout=2)
store.add_message("a", "user", "x")

def fork():
    for _ in range(5):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

threads = [threading.Thread(target=fork) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
readers = [threading.Thread(target=store.get_history, args=("a",)) for _ in range(12)]
for reader in readers:
    reader.start()
for reader in readers:
    reader.join()
assert len(store.get_history("a")) == 1
assert store.add_message("a", "user", "y") == 2
store.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, file], check=True, timeout=60)


def test_failed_alias_lookup_creates_no_second_session(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add_message("telegram:1", "user", "x")
    from stenolog.sessions.aliases import change_alias_mark, prepare_alias_mark

    prepare_alias_mark(store)
    store.set_meta("telegram:1", aliases=["telegram_1"])
    change_alias_mark(store)
    sessions = JSONLBackend(store)
    info = store.info

    def busy(key: str) -> object:
        if key == "telegram:1":
            raise StoreBusy("just now")
        return info(key)

    with monkeypatch.context() as patched:
        patched.setattr(store, "info", busy)
        assert sessions.add_message("telegram_1", "user", "y") is None
    assert sessions.add_message("telegram_1", "user", "y") == 2
    assert store.list_sessions() == ["telegram:1"]
