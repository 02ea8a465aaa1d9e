"""Reading of another program's SQLite file without creating files next to it.

In WAL mode even a reader would create files. If there is no WAL file, no process has the database
open, and the database is read as immutable. A WAL file without a shared-memory file, which only an
incomplete copy has, is not read.

`DatabaseReader` is the base of readers of programs that keep all conversations in such a file.
"""

import os
import sqlite3
import stat
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from stenolog.codec import MAX_MESSAGE_BYTES
from stenolog.stores.json_file import NotASession
from stenolog.transfer.transcripts.transcript import Transcript, TranscriptFile, TranscriptReader

MAGIC: Final = b"SQLite format 3\x00"
BUSY_TIMEOUT: Final = 5.0
"""Seconds to wait for a process that writes to the file."""

_MAX_VALUE_BYTES: Final = 2 * MAX_MESSAGE_BYTES
"""Maximum size of a single value, in bytes. SQLite's own limit is a billion."""
_MIN_FETCH_BYTES: Final = 16 * 1024 * 1024
"""Number of bytes that a query may return from even the smallest file."""
_STEPS_PER_CHECK: Final = 1_000_000
"""Number of steps of SQLite's virtual machine between two checks of the limit."""
_MIN_CHECKS: Final = 200
"""Number of checks after which reading a tiny file is stopped. The number grows with the file."""

_APPLICATION_ID: Final = b"STNO"
"""Application id of stenolog's own databases."""
_APPLICATION_ID_OFFSET: Final = 68
_HEADER_BYTES: Final = 100
_WAL_VERSION: Final = 2
_VERSION_OFFSET: Final = 18


def is_sqlite_file(path: Path) -> bool:
    """Return whether this is a SQLite file, judged by its first bytes."""
    return _read_header(path).startswith(MAGIC)


def is_stenolog_database(path: Path) -> bool:
    """Return whether this is a database of stenolog."""
    return _read_header(path).startswith(_APPLICATION_ID, _APPLICATION_ID_OFFSET)


def _read_header(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            return os.read(descriptor, _HEADER_BYTES) if is_file else b""
        finally:
            os.close(descriptor)
    except OSError:
        return b""


@contextmanager
def connect(path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection to a file that is only read. The connection returns texts as bytes.

    Raises NotASession, OSError. Errors of SQLite in the `with` block also become NotASession.
    """
    real_path = path.resolve()
    _check_not_truncated(real_path)  # guard: cut-database-refused
    uri = _make_uri(real_path)
    try:
        opened = sqlite3.connect(uri, uri=True, timeout=BUSY_TIMEOUT, isolation_level=None)
        with closing(opened) as connection:
            # Invalid UTF-8 in one row must not make the other rows unreadable.
            connection.text_factory = bytes
            _limit_cost(connection, _file_size(real_path))
            connection.execute("BEGIN")
            _check_no_generated_columns(connection)
            yield connection
    except (sqlite3.Error, sqlite3.Warning, UnicodeError, OverflowError, MemoryError) as error:
        raise NotASession(f"SQLite cannot read it: {error}") from error


def _make_uri(real_path: Path) -> str:
    """Return the URI with which SQLite creates no files next to the database."""
    wal, shm = (real_path.with_name(real_path.name + suffix) for suffix in ("-wal", "-shm"))
    if _WAL_VERSION not in _read_header(real_path)[_VERSION_OFFSET : _VERSION_OFFSET + 2]:
        return f"file:{quote(str(real_path))}?mode=ro"
    if not _file_size(wal):
        return f"file:{quote(str(real_path))}?mode=ro&immutable=1"
    if not shm.exists():
        raise NotASession("the file has unwritten changes; open and close its program first")
    return f"file:{quote(str(real_path))}?mode=ro"


def _limit_cost(connection: sqlite3.Connection, file_size: int) -> None:
    """Limit the memory and time that a malicious file can cost."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    for pragma in (
        "query_only=ON",
        "trusted_schema=OFF",
        "cell_size_check=ON",
    ):
        connection.execute(f"PRAGMA {pragma}")
    check_numbers = count(1)
    max_checks = _MIN_CHECKS + file_size // 10_000
    connection.set_progress_handler(lambda: next(check_numbers) > max_checks, _STEPS_PER_CHECK)


def _check_no_generated_columns(connection: sqlite3.Connection) -> None:
    """Raise NotASession for a generated column, because few bytes could expand to gigabytes."""
    sql = (
        "SELECT t.name FROM sqlite_master t, pragma_table_xinfo(t.name) c "
        "WHERE t.type = 'table' AND c.hidden IN (2, 3) LIMIT 1"
    )
    for (table,) in connection.execute(sql).fetchall():
        raise NotASession(f"its table {table.decode(errors='replace')!r} has a computed column")


def fetch_dicts(connection: sqlite3.Connection, sql: str, *values: Any) -> list[dict[str, Any]]:
    """Return the rows of a query by column, with texts decoded.

    Raises NotASession if the rows are many times larger than the file. A malicious file may use the
    same pages for several rows.
    """
    cursor = connection.execute(sql, values)
    names = [column[0] for column in cursor.description]
    [(_, _, path)] = connection.execute("PRAGMA database_list").fetchall()
    # Measure the files: `PRAGMA page_count` would return what a malicious WAL file claims.
    file_size = sum(_file_size(Path(os.fsdecode(path + end))) for end in (b"", b"-wal"))
    rows = []
    bytes_left = 4 * file_size + _MIN_FETCH_BYTES
    for row in cursor:
        bytes_left -= sum(len(value) for value in row if isinstance(value, bytes))
        if bytes_left < 0:  # guard: import-bytes
            raise NotASession("its rows contain many times more data than the file")
        rows.append(
            {
                name: value.decode("utf-8", "replace") if isinstance(value, bytes) else value
                for name, value in zip(names, row, strict=True)
            }
        )
    return rows


def _file_size(path: Path) -> int:
    """Return the number of bytes of a file; 0 if the file is missing."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _check_not_truncated(path: Path) -> None:
    """Raise NotASession if the end of the file is missing.

    SQLite would silently return fewer rows.
    """
    header = _read_header(path)
    page_size = int.from_bytes(header[16:18], "big")
    page_count = int.from_bytes(header[28:32], "big")
    # The page size 1 means 65,536.
    page_size = 65_536 if page_size == 1 else page_size
    size = path.stat().st_size
    # Old writers do not maintain the page count: it is valid if both change counters are equal.
    if header[24:28] == header[92:96] and size < page_size * page_count:
        raise NotASession(f"the file is cut: it has {size:,} of {page_size * page_count:,} bytes")


# --- reader of transcripts -------------------------------------------------------------------


class DatabaseReader(TranscriptReader):
    """Reader of a SQLite database that holds all conversations of a program."""

    file_name: str

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the conversations of a database. `path` is the file or its folder.

        Raises NotASession.
        """
        path = path / self.file_name if path.is_dir() else path
        if not path.is_file():
            return
        with connect(path) as connection:
            ids = self.list_ids(connection)
        for id_ in ids:
            yield self.file_at(str(id_), path, conversation_id=id_)

    def fill(self, transcript: Transcript, file: TranscriptFile) -> None:
        """Add the messages of a conversation. Raises NotASession, OSError."""
        path = file.paths[0]
        with connect(path) as connection:
            self.convert(connection, file.conversation_id, transcript)

    @abstractmethod
    def list_ids(self, connection: sqlite3.Connection) -> list[str]:
        """Return the ids of the conversations."""

    @abstractmethod
    def convert(
        self, connection: sqlite3.Connection, conversation_id: str, transcript: Transcript
    ) -> None:
        """Add the conversation with this id to an empty transcript."""
