"""Tests P8, P11 and P13: unsuitable files raise typed errors and are left unchanged."""

import fcntl
import gc
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw
import pytest

from stenolog import (
    DamagedStore,
    NotStored,
    SQLiteStore,
    StoreBusy,
    StoreUnavailable,
    UsageError,
    open_store,
)
from stenolog.errors import ForeignLog, NewerFormat, StoreClosed
from stenolog.stores.sqlite.database_file import fingerprint, run_script
from support import needs
from support.crash.disks import tiny_tmpfs

SAMPLES = Path(__file__).resolve().parents[3] / "samples"
KEY = "a"


def _beside(file: Path) -> list[str]:
    return sorted(path.name for path in file.parent.iterdir())


@contextmanager
def _connection(file: Path) -> Iterator[apsw.Connection]:
    """Yield a connection of another program."""
    connection = apsw.Connection(str(file))
    try:
        yield connection
    finally:
        connection.close()


# --- P11 -------------------------------------------------------------------------------------


def test_p11_created_files_are_private_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with SQLiteStore(tmp_path / "new" / "workspace" / "sessions.db") as store:
            store.add_message(KEY, "user", "hello")
            found = sorted((tmp_path / "new").rglob("*"))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in found}
    finally:
        os.umask(before)
    assert modes == {
        "workspace": 0o700,
        "sessions.db": 0o600,
        "sessions.db-gate": 0o600,
        "sessions.db-next": 0o600,
        "sessions.db-shm": 0o600,
        "sessions.db-wal": 0o600,
    }


@pytest.mark.parametrize(
    "name", [f"sessions.db{end}" for end in ("", "-wal", "-shm", "-gate", "-next")]
)
def test_p11_wide_permissions_cause_a_warning(
    file: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    with SQLiteStore(file) as store:
        store.add_message(KEY, "user", "hello")
        assert store.admin.health().problems == ()
        wide = file.parent / name
        wide.chmod(0o644)
        with SQLiteStore(file) as again:
            advice = f"chmod 600 {wide}"
            assert advice in caplog.text
            for opened in (store, again):
                health = opened.admin.health()
                assert health.ok
                assert any(advice in problem for problem in health.problems)


def test_p11_shared_folder_is_accepted_if_files_are_private(file: Path) -> None:
    file.parent.chmod(0o755)
    with SQLiteStore(file) as store:
        store.add_message(KEY, "user", "hello")
        assert store.admin.health().problems == ()


def test_p11_the_folder_may_be_behind_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with SQLiteStore(tmp_path / "link" / "sessions.db") as store:
        store.add_message(KEY, "user", "hello")
    assert (tmp_path / "real" / "sessions.db").is_file()


def test_p11_symlinked_database_file_is_rejected(file: Path) -> None:
    outside = file.parent / "outside.db"
    SQLiteStore(outside).close()
    before = outside.read_bytes()
    file.symlink_to(outside)
    for read_only in (False, True):
        with pytest.raises(DamagedStore, match="symbolic link"):
            SQLiteStore(file, read_only=read_only)
    assert outside.read_bytes() == before
    assert "sessions.db-gate" not in _beside(file)


@pytest.mark.parametrize("end", ["-gate", "-next", "-wal"])
def test_p11_symlinked_companion_files_are_rejected(file: Path, end: str) -> None:
    target = file.parent / "target"
    target.write_bytes(b"mine")
    SQLiteStore(file).close()
    beside = file.with_name(file.name + end)
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    with pytest.raises(StoreUnavailable):
        SQLiteStore(file)
    assert target.read_bytes() == b"mine"


# --- other files at the path -----------------------------------------------------------------


def test_p8_database_of_another_program_is_rejected_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "theirs.db"
    shutil.copyfile(SAMPLES / "transcripts/llm-logs/logs.db", file)
    before, changed = file.read_bytes(), file.stat().st_mtime_ns
    for read_only in (False, True):
        with pytest.raises(ForeignLog, match="steno import"):
            SQLiteStore(file, read_only=read_only)
    assert file.read_bytes() == before
    assert file.stat().st_mtime_ns == changed
    assert _beside(file) == ["theirs.db"]


@pytest.mark.parametrize("text", [b"hello", b"SQLite format 3\0", b"\0" * 4096, b"{}\n" * 1000])
def test_p8_file_that_is_not_a_database_is_rejected_unchanged(file: Path, text: bytes) -> None:
    file.write_bytes(text)
    with pytest.raises(ForeignLog):
        SQLiteStore(file)
    assert file.read_bytes() == text
    assert _beside(file) == ["sessions.db"]


def test_p8_folder_instead_of_a_file_is_rejected(file: Path) -> None:
    with pytest.raises(UsageError, match="is a folder"):
        SQLiteStore(file.parent)
    with pytest.raises(UsageError):
        SQLiteStore("/")


def test_p8_pipe_instead_of_a_file_does_not_hang(file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(DamagedStore):
        SQLiteStore(file)


def test_an_empty_file_becomes_a_database(file: Path) -> None:
    file.touch(0o600)
    with SQLiteStore(file) as store:
        assert store.add_message(KEY, "user", "hello") == 1


def test_leftovers_of_a_killed_creator_do_not_prevent_opening(file: Path) -> None:
    file.with_name(f".{file.name}.new").write_bytes(b"half of it")
    with SQLiteStore(file) as store:
        store.add_message(KEY, "user", "hello")
    assert _beside(file) == ["sessions.db", "sessions.db-gate", "sessions.db-next"]


# --- P13 -------------------------------------------------------------------------------------


def test_p13_database_with_other_tables_is_rejected_with_its_fingerprint(file: Path) -> None:
    SQLiteStore(file).close()
    with _connection(file) as connection:
        run_script(connection, f"PRAGMA user_version = {fingerprint() + 1}")
    before = file.read_bytes()
    for read_only in (False, True):
        with pytest.raises(NewerFormat, match=f"tables are {fingerprint() + 1:08x}"):
            SQLiteStore(file, read_only=read_only)
    assert file.read_bytes() == before


def test_p13_running_process_rejects_other_tables(file: Path) -> None:
    with SQLiteStore(file) as store:
        store.add_message(KEY, "user", "hello")
        with _connection(file) as connection:
            run_script(connection, f"PRAGMA user_version = {fingerprint() + 1}")
        for call in (
            lambda: store.add_message(KEY, "user", "again"),
            lambda: store.set_summary(KEY, "text"),
            lambda: store.get_history(KEY),
            lambda: store.list_sessions(),
        ):
            with pytest.raises(NewerFormat):
                call()
        with _connection(file) as connection:
            assert list(connection.execute("SELECT count(*) FROM message")) == [(1,)]


# --- files that change under a running store -------------------------------------------------


def test_p8_missing_file_raises_and_is_not_recreated(file: Path) -> None:
    with SQLiteStore(file) as store:
        store.add_message(KEY, "user", "hello")
        for path in file.parent.iterdir():
            path.unlink()
        with pytest.raises(NotStored, match="gone"):
            store.add_message(KEY, "user", "again")
        with pytest.raises(StoreUnavailable, match="gone"):
            store.get_history(KEY)
    assert not file.exists()


def test_p8_replaced_file_is_neither_read_nor_written(file: Path) -> None:
    other = file.with_name("other.db")
    SQLiteStore(other).close()
    with SQLiteStore(file) as store:
        store.add_message(KEY, "user", "hello")
        other.replace(file)
        before = file.read_bytes()
        with pytest.raises(NotStored, match="the file was replaced"):
            store.add_message(KEY, "user", "again")
        with pytest.raises(StoreUnavailable, match="the file was replaced"):
            store.get_history(KEY)
        assert file.read_bytes() == before


def test_p8_damaged_page_raises_damaged_store_and_names_the_doctor(file: Path) -> None:
    with SQLiteStore(file) as store:
        for number in range(200):
            store.add_message(KEY, "user", f"{number} " * 50)
    with file.open("r+b") as database:
        database.seek(4096)
        database.write(b"\xff" * (file.stat().st_size - 4096))
    with (
        pytest.raises(DamagedStore, match="steno doctor") as raised,
        SQLiteStore(file) as store,
    ):
        store.get_history(KEY)
    assert not isinstance(raised.value, ForeignLog)
    with pytest.raises(DamagedStore, match="steno doctor"), SQLiteStore(file) as store:
        store.add_message(KEY, "user", "x")


# --- read-only -------------------------------------------------------------------------------


def test_read_only_store_sees_writes_of_others(file: Path) -> None:
    with SQLiteStore(file) as writing, SQLiteStore(file, read_only=True) as reading:
        for number in range(3):
            writing.add_message(KEY, "user", number)
            assert len(reading.get_history(KEY)) == number + 1


def test_p8_read_only_store_creates_no_file(file: Path) -> None:
    with pytest.raises(StoreUnavailable, match="no such file"):
        SQLiteStore(file, read_only=True)
    assert _beside(file) == []


def test_a_database_on_a_read_only_disk_can_be_read(tmp_path: Path) -> None:
    needs.kernel("mount")
    with tiny_tmpfs(tmp_path, "1m") as mounted:
        file = mounted / "sessions.db"
        with SQLiteStore(file) as store:
            store.add_message(KEY, "user", "hello")
        subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
        with SQLiteStore(file, read_only=True) as store:
            assert [message.content for message in store.get_history(KEY)] == ["hello"]
        with pytest.raises(StoreUnavailable):
            SQLiteStore(file)


@contextmanager
def _mounted_to_read(folder: Path) -> Iterator[Path]:
    """Mount the same folder read-only at a second path."""
    needs.kernel("mount")
    second = folder.with_name("to read")
    second.mkdir()
    subprocess.run(["mount", "--bind", folder, second], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", second], check=True)
        yield second
    finally:
        subprocess.run(["umount", second], check=True)


def _texts(store: SQLiteStore) -> list[object]:
    return [message.content for message in store.get_history(KEY)]


def test_p8_reader_on_a_read_only_disk_sees_writes_of_others(file: Path) -> None:
    with SQLiteStore(file) as store:
        store.add_message(KEY, "user", 0)
    with (
        _mounted_to_read(file.parent) as folder,
        SQLiteStore(folder / file.name, read_only=True) as reading,
    ):
        assert _texts(reading) == [0]
        # A writer that opens, writes and closes: everything is in the file.
        with SQLiteStore(file) as writing:
            writing.add_message(KEY, "user", 1)
        assert _texts(reading) == [0, 1]
        # A writer that stays open: the newest messages are in its log.
        with SQLiteStore(file) as writing:
            for number in range(2, 400):
                writing.add_message(KEY, "user", number)
            assert _texts(reading) == list(range(400))
            writing.admin.purge(KEY, before=301)
            assert _texts(reading) == list(range(300, 400))
        assert _texts(reading) == list(range(300, 400))


def test_p8_read_fails_if_the_file_changed_during_it(file: Path) -> None:
    with SQLiteStore(file) as store:
        store.add_message(KEY, "user", 0)
    with (
        _mounted_to_read(file.parent) as folder,
        SQLiteStore(folder / file.name, read_only=True) as reading,
    ):
        look = reading.database.read_transaction()
        list(look.__enter__().execute("SELECT 1 FROM message"))
        with SQLiteStore(file) as writing:
            writing.add_message(KEY, "user", 1)
        with pytest.raises(StoreUnavailable, match="changed while it was read"):
            look.__exit__(None, None, None)
        assert _texts(reading) == [0, 1]


def test_p8_unreadable_log_raises(file: Path) -> None:
    code = (
        "import os, sys, stenolog; store = stenolog.SQLiteStore(sys.argv[1]);"
        "store.add_message('a', 'user', 'in the log'); os._exit(0)"
    )
    with SQLiteStore(file) as store:
        store.add_message(KEY, "user", "in the file")
    with _mounted_to_read(file.parent) as folder:
        with SQLiteStore(folder / file.name, read_only=True) as reading:
            assert _texts(reading) == ["in the file"]
            subprocess.run([sys.executable, "-c", code, file], check=True)
            file.with_name(f"{file.name}-shm").unlink()
            with pytest.raises(StoreUnavailable, match="has a write-ahead log"):
                reading.get_history(KEY)
        with pytest.raises(StoreUnavailable, match="has a write-ahead log"):
            SQLiteStore(folder / file.name, read_only=True)


_AS_NOBODY = """
import os, sys
import stenolog
from stenolog.maintenance.workspace_check import examine

# What is read from the package when it is first needed may not be for everybody either.
with stenolog.SQLiteStore(sys.argv[2]) as store:
    store.add_message("a", "user", "x")
    store.get_history("a")
    examine(f"sqlite:{sys.argv[2]}")

os.setgroups([]), os.setgid(65534), os.setuid(65534)
with stenolog.SQLiteStore(sys.argv[1], read_only=True) as store:
    while True:
        print(len(store.get_history("a")), store.admin.health().ok, flush=True)
        if not sys.stdin.readline():
            break
print(examine(f"sqlite:{sys.argv[1]}").sessions)
"""


def test_p8_user_without_write_permission_can_read_the_file(tmp_path: Path) -> None:
    needs.root()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as open_to_all:
        Path(open_to_all).chmod(0o755)
        file = Path(open_to_all, "sessions.db")
        with SQLiteStore(file) as store:
            store.add_message(KEY, "user", "hello")
        file.chmod(0o644)
        with subprocess.Popen(
            [sys.executable, "-c", _AS_NOBODY, file, tmp_path / "own.db"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as reading:
            assert reading.stdin is not None
            assert reading.stdout is not None
            assert reading.stdout.readline() == "1 True\n"
            with SQLiteStore(file) as store:
                store.add_message(KEY, "user", "again")
                reading.stdin.write("\n")
                reading.stdin.flush()
                assert reading.stdout.readline() == "2 True\n"
            rest, _ = reading.communicate()
            assert rest == "1\n"


# --- the disk is full ------------------------------------------------------------------------


def _fill(store: SQLiteStore) -> int:
    """Append until the disk is full; return the number of stored messages."""
    for stored in range(1000):
        try:
            store.add_message(KEY, "user", "x" * 20_000)
        except NotStored:
            return stored
    raise AssertionError("it never was full")


def test_p8_full_disk_stores_nothing_and_recovers_when_space_is_free(tmp_path: Path) -> None:
    needs.kernel("mount")
    with tiny_tmpfs(tmp_path, "2m") as mounted:
        with SQLiteStore(mounted / "sessions.db") as store:
            stored = _fill(store)
            assert not store.admin.health().ok
            with pytest.raises(NotStored, match="disk is full"):
                store.add_message(KEY, "user", "x" * 100_000)
            subprocess.run(["mount", "-o", "remount,size=8m", mounted], check=True)
            assert store.add_message(KEY, "user", "x" * 20_000) == stored + 1
        with open_store(f"sqlite:{mounted}/sessions.db") as store:
            assert len(store.get_history(KEY)) == stored + 1


def test_store_on_a_full_disk_can_be_opened_read_only(tmp_path: Path) -> None:
    needs.root()
    needs.kernel("mount")
    with tiny_tmpfs(tmp_path, "2m") as mounted:
        where = f"sqlite:{mounted}/sessions.db"
        with SQLiteStore(mounted / "sessions.db") as store:
            stored = _fill(store)
            _fill_up(mounted)
            with open_store(where, read_only=True) as reader:
                assert len(reader.get_history(KEY)) == stored
        with open_store(where, read_only=True) as reader:
            assert len(reader.get_history(KEY)) == stored
        with pytest.raises(StoreUnavailable, match="the disk is full; free some space"):
            open_store(where)


def test_closed_store_on_a_full_disk_can_be_opened_read_only(tmp_path: Path) -> None:
    needs.root()
    needs.kernel("mount")
    with tiny_tmpfs(tmp_path, "2m") as mounted:
        where = f"sqlite:{mounted}/sessions.db"
        with open_store(where) as store:
            store.add_message(KEY, "user", "hello")
        _fill_up(mounted)
        with open_store(where, read_only=True) as reader:
            assert [message.content for message in reader.get_history(KEY)] == ["hello"]
            with pytest.raises(StoreUnavailable, match="the disk is full; free some space"):
                open_store(where)
            (mounted / "rest").unlink()
            with open_store(where) as store:
                store.add_message(KEY, "user", "again")
                assert len(reader.get_history(KEY)) == 2
            assert len(reader.get_history(KEY)) == 2


def test_p8_log_without_space_for_its_index_raises(tmp_path: Path) -> None:
    needs.root()
    needs.kernel("mount")
    code = (
        "import os, sys, stenolog; store = stenolog.SQLiteStore(sys.argv[1]);"
        "store.add_message('a', 'user', 'in the log'); os._exit(0)"
    )
    with tiny_tmpfs(tmp_path, "2m") as mounted:
        file = mounted / "sessions.db"
        subprocess.run([sys.executable, "-c", code, file], check=True)
        file.with_name(f"{file.name}-shm").unlink()
        _fill_up(mounted)
        with pytest.raises(StoreUnavailable, match="the disk is full; free some space"):
            SQLiteStore(file, read_only=True)
        (mounted / "rest").unlink()
        with SQLiteStore(file, read_only=True) as reader:
            assert _texts(reader) == ["in the log"]


def _fill_up(folder: Path) -> None:
    """Use up the remaining space."""
    with (folder / "rest").open("wb", 0) as rest, suppress(OSError):
        while True:
            rest.write(b"x" * 512)
    assert os.statvfs(folder).f_bavail == 0


# --- locks and closing -----------------------------------------------------------------------


def test_p8_long_write_of_another_program_raises_store_busy(file: Path) -> None:
    with SQLiteStore(file, busy_timeout=0.1) as store, _connection(file) as connection:
        store.add_message(KEY, "user", "hello")
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy):
            store.add_message(KEY, "user", "x")
        with pytest.raises(StoreBusy):
            store.set_summary(KEY, "x")
        # Readers do not wait for writers.
        assert len(store.get_history(KEY)) == 1
        connection.execute("COMMIT")
        assert store.add_message(KEY, "user", "x") == 2


def test_p8_gate_held_too_long_raises_store_busy(file: Path) -> None:
    with SQLiteStore(file, busy_timeout=0.1) as store:
        store.add_message(KEY, "user", "hello")
        with file.with_name(f"{file.name}-gate").open("r+b") as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            with pytest.raises(StoreBusy):
                store.add_message(KEY, "user", "x")
            assert len(store.get_history(KEY)) == 1
        assert store.add_message(KEY, "user", "x") == 2


def test_close_closes_every_file(file: Path) -> None:
    gc.collect()  # do not count what earlier tests left
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - of this process
    with SQLiteStore(file) as store:
        store.add_message(KEY, "user", "hello")
        store.get_history(KEY)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert _beside(file) == ["sessions.db", "sessions.db-gate", "sessions.db-next"]
    with pytest.raises(StoreClosed):
        store.database.check_open()


@pytest.mark.parametrize("wrong", [b"hello", None])
def test_failed_open_leaves_no_file_open(file: Path, wrong: bytes | None) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if wrong is not None:
        file.write_bytes(wrong)
    else:
        SQLiteStore(file).close()
        with file.open("r+b") as database:
            database.seek(100)
            database.write(b"\xff" * 3996)
    with pytest.raises(DamagedStore):
        SQLiteStore(file).get_history(KEY)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
