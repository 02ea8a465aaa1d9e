"""SQLite files of other programs are read without traces, and cost little if they are hostile."""

import shutil
import sqlite3
import struct
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stenolog.stores.json_file import NotASession
from stenolog.transfer.transcripts.sqlite_file import connect, fetch_dicts
from support import temporary_folders
from support.resource_limits import MB, run_limited


def database(path: Path, *contents: str) -> Path:
    """Write a SQLite file whose table `message` has these contents."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE message (content TEXT)")
        connection.executemany("INSERT INTO message VALUES (?)", [(text,) for text in contents])
    return path


def contents(path: Path) -> list[Any]:
    with connect(path) as connection:
        return [row["content"] for row in fetch_dicts(connection, "SELECT * FROM message")]


# --- cut and damaged -----------------------------------------------------------------------------


def test_p10_cut_database_is_rejected(tmp_path: Path) -> None:
    source = database(tmp_path / "cut.db", *["x" * 900] * 20)
    text = source.read_bytes()
    for cut in range(0, len(text), len(text) // 60):
        source.write_bytes(text[:cut])
        with pytest.raises(NotASession):
            contents(source)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damaged_database_is_read_or_rejected(data: st.DataObject) -> None:
    with temporary_folders.folder() as place:
        source = database(place / "damaged.db", *["x" * 900] * 20)
        text = bytearray(source.read_bytes())
        for _ in range(data.draw(st.integers(1, 30))):
            text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
        source.write_bytes(text)
        with suppress(NotASession):
            contents(source)


def test_invalid_utf8_affects_only_its_row(tmp_path: Path) -> None:
    source = database(tmp_path / "x.db", "a")
    with closing(sqlite3.connect(source)) as connection, connection:
        connection.execute("INSERT INTO message VALUES (CAST(x'ff' AS TEXT))")
    assert contents(source) == ["a", "\ufffd"]


# --- databases in use ----------------------------------------------------------------------------


def test_wal_file_is_read_and_no_files_are_created(tmp_path: Path) -> None:
    live, copy = tmp_path / "live", tmp_path / "copy"
    live.mkdir()
    copy.mkdir()
    source = database(live / "x.db")
    with closing(sqlite3.connect(source)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("PRAGMA wal_autocheckpoint=0")
        writer.execute("INSERT INTO message VALUES ('in the log')")
        writer.commit()
        before = sorted(path.name for path in live.iterdir())
        assert contents(source) == ["in the log"]
        assert sorted(path.name for path in live.iterdir()) == before
        # A copy that was made meanwhile lacks the shared memory.
        for name in (source.name, f"{source.name}-wal"):
            shutil.copyfile(live / name, copy / name)
        with pytest.raises(NotASession, match="unwritten changes"):
            contents(copy / source.name)
        assert len(list(copy.iterdir())) == 2
    # And when its program has ended, and left the mode.
    assert [path.name for path in live.iterdir()] == [source.name]
    assert contents(source) == ["in the log"]
    assert [path.name for path in live.iterdir()] == [source.name]


def test_database_in_a_read_only_folder_is_read(tmp_path: Path) -> None:
    source = database(tmp_path / "x.db", "a")
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    tmp_path.chmod(0o500)
    try:
        assert contents(source) == ["a"]
    finally:
        tmp_path.chmod(0o700)


# --- files made to be expensive ------------------------------------------------------------------


@pytest.mark.slow
def test_small_hostile_database_does_not_use_much_memory(tmp_path: Path) -> None:
    source = tmp_path / "small.db"
    with closing(sqlite3.connect(source)) as connection, connection:
        connection.executescript("""
            CREATE TABLE message (content TEXT, x AS (hex(zeroblob(300000000))) NOT NULL);
            INSERT INTO message VALUES ('a');
        """)
    assert source.stat().st_size < 50_000

    def read_it() -> None:
        with pytest.raises(NotASession, match="has a computed column"):
            contents(source)

    run_limited(read_it, cpu=60, memory=200 * MB)


def test_database_with_rows_that_share_pages_is_rejected(tmp_path: Path) -> None:
    source = tmp_path / "joined.db"
    with closing(sqlite3.connect(source)) as connection, connection:
        connection.execute("CREATE TABLE a (x)")
        connection.execute("CREATE TABLE b (y)")
        connection.execute("INSERT INTO a VALUES (zeroblob(1000000))")
        connection.executemany("INSERT INTO b VALUES (?)", [(n,) for n in range(1_000)])
    with connect(source) as connection:
        assert len(fetch_dicts(connection, "SELECT x FROM a")) == 1
        with pytest.raises(NotASession, match="more data than the file"):
            fetch_dicts(connection, "SELECT x FROM a, b")


def test_endless_query_is_stopped(tmp_path: Path) -> None:
    source = tmp_path / "endless.db"
    with closing(sqlite3.connect(source)) as connection, connection:
        connection.execute("CREATE TABLE a (x)")
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"

    def ask() -> None:
        with pytest.raises(NotASession, match="interrupted"), connect(source) as connection:
            fetch_dicts(connection, endless)

    run_limited(ask, cpu=120)


def test_size_that_a_wal_file_claims_does_not_raise_the_limit(tmp_path: Path) -> None:
    """The last page in the WAL file claims that the database has a million pages."""
    source, copy = tmp_path / "logs.db", tmp_path / "copy.db"
    with closing(sqlite3.connect(source)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE a (x)")
        connection.commit()
        shutil.copyfile(source, copy)
        wal = (tmp_path / "logs.db-wal").read_bytes()
    (tmp_path / "copy.db-wal").write_bytes(_claim_pages(wal, 1_000_000))
    (tmp_path / "copy.db-shm").touch()

    large = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION SELECT i + 1 FROM n WHERE i < 100) "
        "SELECT zeroblob(1000000) FROM n"
    )
    with connect(copy) as reader:
        assert reader.execute("PRAGMA page_count").fetchone() == (1_000_000,)
        with pytest.raises(NotASession, match="many times more data than the file"):
            fetch_dicts(reader, large)


def _claim_pages(wal: bytes, page_count: int) -> bytes:
    """Return a WAL file that claims another size of the database (sqlite.org/walformat.html)."""
    header_bytes, frame_header_bytes = 32, 24
    page_size = int.from_bytes(wal[8:12], "big")
    words = ">I" if wal[3] & 1 else "<I"

    def add_checksum(data: bytes, first: int, second: int) -> tuple[int, int]:
        numbers = [number for (number,) in struct.iter_unpack(words, data)]
        for one, two in zip(numbers[::2], numbers[1::2], strict=True):
            first = (first + one + second) & 0xFFFFFFFF
            second = (second + two + first) & 0xFFFFFFFF
        return first, second

    sums = struct.unpack(">II", wal[24:32])
    result = wal[:header_bytes]
    for start in range(header_bytes, len(wal), frame_header_bytes + page_size):
        frame = wal[start : start + frame_header_bytes + page_size]
        old_count = int.from_bytes(frame[4:8], "big")
        head = frame[:4] + struct.pack(">I", page_count if old_count else 0)
        page = frame[frame_header_bytes:]
        if frame[:4] == struct.pack(">I", 1):
            page = page[:28] + struct.pack(">I", page_count) + page[32:]
        sums = add_checksum(page, *add_checksum(head, *sums))
        result += head + frame[8:16] + struct.pack(">II", *sums) + page
    return result
