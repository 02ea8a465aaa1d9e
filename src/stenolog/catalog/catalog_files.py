"""The catalog in a file next to its store (stores/catalog_file.py), or in memory.

The file can be thrown away at any time. Whoever doubts it builds an empty one beside it and renames
the new file into place; docs/decisions/0017 has the rules. Only the holder of the flock of the lock
file writes, creates or removes the database. SQLite finds a journal by its name alone, and must
never apply the journal to another database. Processes without the flock therefore open the
database read-only.
"""

import fcntl
import math
import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import Any, Final, NamedTuple

import msgspec

from stenolog.catalog.catalog_database import (
    VERSION,
    CatalogBusy,
    CatalogDamaged,
    CatalogUnusable,
    FullTextIndex,
    Row,
    load_schema,
    load_statements,
)
from stenolog.stores.catalog_file import journal_name, lock_name
from stenolog.stores.disk import Descriptor, open_descriptor
from stenolog.stores.locks import ThreadLock, keep_forever

_TIMEOUT_SECONDS: Final = 10.0
"""Maximum number of seconds to wait for other processes or threads."""
_POLL_SECONDS: Final = 0.002
_MAX_RECOVERIES: Final = 10

Identity = tuple[int, int]
"""Device and inode, which identify a file regardless of its name."""


class Connection(sqlite3.Connection):
    """A connection to SQLite with the statements of a catalog."""

    fulltext: FullTextIndex = "fts5"
    identity: Identity | None = None
    """Identity of the connected file; None for a database in memory."""
    process: int = 0
    """Id of the process that opened the connection."""
    is_configured: bool = False

    def run(self, name: str, values: Sequence[Any] = (), /, *, column: str = "") -> sqlite3.Cursor:
        """Execute a statement of queries.sql and return its rows."""
        return self.execute(load_statements()[name].replace("{column}", column), values)

    def run_many(self, name: str, rows: Iterable[Sequence[Any]], /) -> None:
        """Execute a statement of queries.sql once per row of values."""
        self.executemany(load_statements()[name], rows)


_Stamp = tuple[int, ...]


class _Content(NamedTuple):
    """What the tables say about themselves."""

    catalog_id: int
    """Random number that identifies the catalog."""
    write_count: int
    """A number that grows with every write."""

    @property
    def expected_time(self) -> int:
        """The modification time, in nanoseconds, of a file with this content.

        The writer sets it after each commit. Another program that changes the file changes the
        time, too. Whole even seconds are exact on every file system.
        """
        return (self.catalog_id ^ self.write_count * 0x9E3779B1) % 2**30 * 2 * 10**9


class _Seen(NamedTuple):
    """The file and the content that this process has seen last."""

    identity: Identity
    content: _Content


class FileDatabase:
    """The catalog in a separate file.

    Every transaction has a connection of its own, so threads do not wait for each other. A thread
    has one transaction at a time.
    """

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self._path = path
        self._journal = path.with_name(journal_name(path.name))
        self._lock_path = path.with_name(lock_name(path.name))
        self._writable = writable
        self.timeout = _TIMEOUT_SECONDS
        """Maximum number of seconds to wait for other writers."""
        self._idle_connections: list[Connection] = []
        """Connections for reading that no thread uses. A list is safe without a lock."""
        self._in_use: dict[int, list[Connection | Descriptor]] = {}
        """What the open transaction of each thread uses, by id of the thread."""
        self._last_seen: _Seen | None = None
        self._doubtful_file: Identity | None = None
        """Identity of the file that must be built again."""
        self._closed = False

    @contextmanager
    def read_transaction(self) -> Iterator[Connection]:
        """Start a read transaction, which sees a consistent snapshot of the tables."""
        self._end_interrupted_transaction()
        connection, stamp = self._begin_read()
        is_reusable = False
        try:
            with self._convert_errors(connection):
                yield connection
            # SQLite's lock keeps other writers out, so only a program that ignores the lock can
            # have changed the file.
            if self._read_stamp() != stamp:
                raise self._doubt(connection.identity, "was changed during a read")
            roll_back(connection)
            is_reusable = not self._closed
        finally:
            self._in_use.pop(get_ident(), None)
            if is_reusable:
                self._idle_connections.append(connection)
            else:
                discard(connection)

    @contextmanager
    def write_transaction(self) -> Iterator[Connection]:
        """Start a write transaction: committed at the end, rolled back on any error."""
        self._end_interrupted_transaction()
        with self._hold_lock():
            connection, content = self._open_for_writing()
            self._in_use[get_ident()].append(connection)
            try:
                with self._convert_errors(connection):
                    connection.execute("BEGIN IMMEDIATE")
                    yield connection
                    # SQLite changes the file only in the commit.
                    if not self._is_intact(connection, content):
                        raise self._doubt(connection.identity, "was changed during a write")
                    connection.execute("COMMIT")
                    self._set_time(connection)
            finally:
                discard(connection)

    def rebuild(self) -> None:
        """Replace the file by a file with empty tables, unless another process has done so."""
        with self._hold_lock():
            if self._doubtful_file is None or file_identity(self._path) != self._doubtful_file:
                # Another process may have created the tables already.
                with suppress(CatalogDamaged):
                    self._open_for_writing()[0].close()
                    return
            try:
                new_file = self._create_new_file(self._read_calibrations())
                # Remove the old files before the rename: a kill must not leave the new database
                # with the old journal.
                for path in (self._path, self._journal):
                    path.unlink(missing_ok=True)
                new_file.rename(self._path)
            except (OSError, sqlite3.Error) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise CatalogUnusable(f"{self._path} cannot be rebuilt: {reason}") from error
            self._doubtful_file = None

    def _read_calibrations(self) -> list[Row]:
        """Return the token calibrations of the old file; empty if the file is unreadable.

        No other file has the calibrations, so they are copied to the new file.
        """
        if file_identity(self._path) is None:
            return []
        # In a damaged file, even error messages of SQLite may not be decodable.
        with (
            suppress(sqlite3.Error, UnicodeDecodeError),
            closing(connect_file(self._path, "ro", timeout=0)) as old_connection,
        ):
            return [
                (model, ratio, weight)
                for model, ratio, weight in old_connection.run("calibrations")
                if isinstance(model, str) and is_valid_calibration(ratio, weight)
            ]
        return []

    def _create_new_file(self, calibration_rows: Sequence[Row]) -> Path:
        """Create a database with empty tables and these calibrations, under a temporary name."""
        path = self._path.with_name(f".{self._path.name}.new")
        for leftover in (path, path.with_name(journal_name(path.name))):
            leftover.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # Close the file before SQLite opens it: closing it later would release SQLite's locks.
        open_descriptor(path, flags).close()
        with closing(connect_file(path, "rw", timeout=self.timeout)) as connection:
            create_tables(connection, calibration_rows)
            content = read_content(connection)
        assert content is not None, "the tables were just created"
        os.utime(path, ns=(content.expected_time, content.expected_time))
        return path

    def close(self) -> None:
        """Close the connections. Later transactions raise CatalogUnusable."""
        self._closed = True
        self._end_interrupted_transaction()
        while self._idle_connections:
            discard(self._idle_connections.pop())

    # --- reading and writing -----------------------------------------------------------------

    def _begin_read(self) -> tuple[Connection, _Stamp]:
        """Start a read-only transaction, and return the stamp of the file.

        Raises CatalogDamaged, CatalogUnusable.
        """
        for _ in range(_MAX_RECOVERIES):
            connection = self._connect()
            self._in_use[get_ident()] = [connection]
            try:
                with self._convert_errors(connection):
                    content = self._try_begin(connection)
                stamp = self._read_stamp()
                if content is not None and self._is_intact(connection, content):
                    self._check_not_replaced(connection, content)
                    return connection, stamp
            except BaseException:
                connection.close()
                raise
            connection.close()
            # A writer is about to set the time, or died, or another program changed the file. Only
            # the holder of the lock can tell, and can recover the database.
            if self._writable:
                with self._hold_lock():
                    self._open_for_writing()[0].close()
            else:
                time.sleep(_POLL_SECONDS)
        raise CatalogUnusable(
            f"{self._path} was changed by another program, or its writers keep dying"
        )

    def _try_begin(self, connection: Connection) -> _Content | None:
        """Start a transaction; return None if a writer left changes that must be rolled back."""
        try:
            configure(connection)
            connection.execute("BEGIN")
            # The first read takes SQLite's lock and checks for a journal.
            return self._check_content(connection)
        except sqlite3.Error as error:
            if error_code(error) & 0xFF == sqlite3.SQLITE_READONLY:
                return None
            raise

    def _check_not_replaced(self, connection: Connection, content: _Content) -> None:
        """Raise CatalogDamaged if the file is an older copy of a file that was seen before.

        The caller has a transaction or the lock, so the content cannot get newer during the check.
        """
        assert connection.identity is not None, "the connection is to a file"
        last = self._last_seen
        if last is not None and last.content.catalog_id == content.catalog_id:
            is_copy = last.identity != connection.identity
            if is_copy or content.write_count < last.content.write_count:
                raise self._doubt(connection.identity, "was replaced by an older copy")
        self._last_seen = _Seen(connection.identity, content)

    def _open_for_writing(self) -> tuple[Connection, _Content]:
        """Return a writable connection, and the content. The caller must hold the lock.

        If a writer died, its unfinished changes are rolled back. Raises CatalogDamaged,
        CatalogUnusable.
        """
        self._check_open()
        identity = self._require_identity()
        has_journal = self._journal.exists()
        connection = self._open("rw", identity)
        try:
            with self._convert_errors(connection):
                configure(connection)
                content = self._check_content(connection)
                if has_journal:
                    self._set_time(connection)
            if not self._is_intact(connection, content):
                doubt = self._doubt(identity, "was changed by another program")
                raise doubt  # noqa: TRY301
            self._check_not_replaced(connection, content)
        except BaseException:
            connection.close()
            raise
        return connection, content

    def _check_content(self, connection: Connection) -> _Content:
        """Raise CatalogDamaged if the tables are missing or have another version."""
        content = read_content(connection)
        if content is None:
            raise self._doubt(connection.identity, "has another version")
        return content

    def _is_intact(self, connection: Connection, content: _Content) -> bool:
        """Return whether the connected file has its name and the time that the last writer set."""
        stamp = self._read_stamp()
        return stamp[:2] == connection.identity and stamp[-1] == content.expected_time

    def _set_time(self, connection: Connection) -> None:
        """Set the time of the file after a write. Raises CatalogDamaged, OSError, sqlite3.Error."""
        if connection.identity is None or file_identity(self._path) != connection.identity:
            raise CatalogDamaged(f"{self._path} was removed during the write")
        content = read_content(connection)
        if content is not None:
            os.utime(self._path, ns=(content.expected_time, content.expected_time))
            self._last_seen = _Seen(connection.identity, content)

    # --- connections -------------------------------------------------------------------------

    def _connect(self) -> Connection:
        """Return a connection for reading the current file. Raises CatalogDamaged."""
        self._check_open()
        identity = self._require_identity()
        while self._idle_connections:
            with suppress(IndexError):  # another thread may take the last one
                connection = self._idle_connections.pop()
                if connection.identity == identity and connection.process == os.getpid():
                    return connection
                discard(connection)
        return self._open("ro", identity)

    def _open(self, mode: str, identity: Identity) -> Connection:
        try:
            connection = connect_file(self._path, mode, timeout=self.timeout)
        except sqlite3.Error as error:
            raise self._convert_error(error, identity) from error
        connection.identity = identity
        connection.process = os.getpid()
        return connection

    def _end_interrupted_transaction(self) -> None:
        """End a transaction of this thread that Ctrl-C interrupted.

        A traceback, as in a notebook, may keep its connection and its lock open.
        """
        for used in reversed(self._in_use.pop(get_ident(), [])):
            if isinstance(used, Connection):
                discard(used)
            else:
                used.close()

    def _check_open(self) -> None:
        if self._closed:
            raise CatalogUnusable(f"{self._path} is closed")

    def _require_identity(self) -> Identity:
        identity = file_identity(self._path)
        if identity is None:
            raise CatalogDamaged(f"{self._path} is missing")
        return identity

    def _read_stamp(self) -> _Stamp:
        """Return numbers that change if another program changes or replaces the file."""
        try:
            status = self._path.lstat()
        except OSError:
            return ()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def _doubt(self, identity: Identity | None, reason: str) -> CatalogDamaged:
        """Record that this file must be built again, and return the error to raise."""
        self._doubtful_file = identity
        return CatalogDamaged(f"{self._path} {reason}")

    @contextmanager
    def _convert_errors(self, connection: Connection) -> Iterator[None]:
        """Convert errors of SQLite and of decoding to errors of the catalog."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._convert_error(error, connection.identity) from error
        except OSError as error:
            raise CatalogUnusable(f"{self._path}: {error.strerror}") from error
        except (ValueError, msgspec.MsgspecError) as error:
            # Only this class writes to the catalog, so data that cannot be decoded is damaged.
            raise self._doubt(connection.identity, f"contains invalid data: {error}") from error

    def _convert_error(
        self, error: sqlite3.Error, identity: Identity | None
    ) -> CatalogDamaged | CatalogUnusable:
        """Convert an SQLite error during the use of the file with this identity."""
        catalog_error = convert_error(error, str(self._path))
        if self._closed:
            return CatalogUnusable(f"{self._path} is closed")
        if file_identity(self._path) != identity:
            # The file was removed during the call, which may have caused the error.
            return CatalogDamaged(str(catalog_error))
        if isinstance(catalog_error, CatalogDamaged):
            self._doubtful_file = identity
        return catalog_error

    # --- the lock ----------------------------------------------------------------------------

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Lock the catalog for writing. Raises CatalogUnusable."""
        if not self._writable:
            raise CatalogUnusable(f"{self._path} was opened read-only")
        deadline = time.monotonic() + self.timeout
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            while True:
                with open_descriptor(self._lock_path, flags) as lock:
                    if _try_lock(lock) and _is_same_file(lock, self._lock_path):
                        self._in_use[get_ident()] = [lock]
                        try:
                            yield
                        finally:
                            lock.release()
                            self._in_use.pop(get_ident(), None)
                        return
                if time.monotonic() > deadline:
                    raise CatalogBusy(f"{self._lock_path}: other processes held it for too long")
                time.sleep(_POLL_SECONDS)
        except OSError as error:
            raise CatalogUnusable(f"{self._lock_path}: {error.strerror}") from error


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    status = os.fstat(descriptor)
    return (status.st_dev, status.st_ino) == file_identity(path)


def discard(connection: Connection) -> None:
    """Close a connection and roll back, unless it belongs to the parent of this forked process."""
    if connection.process == os.getpid():
        connection.close()
    else:
        keep_forever(connection)


def file_identity(path: Path) -> Identity | None:
    """Return the identity of the file at this path, or None. Raises CatalogUnusable."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CatalogUnusable(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise CatalogUnusable(f"{path} is not a regular file")
    return status.st_dev, status.st_ino


# --- in memory ------------------------------------------------------------------------------------


_MEMORY_NAME: Final = "the catalog in memory"


class MemoryDatabase:
    """A catalog in memory, which is lost when the process ends. Threads use it one at a time."""

    def __init__(self, source: object = None) -> None:
        """Copy `source` if it is a catalog file that can be read; otherwise create empty tables."""
        self._lock = ThreadLock()
        self._closed = False
        self._connection = connect_memory()
        if isinstance(source, FileDatabase):
            try:
                with source.read_transaction() as connection:
                    connection.backup(self._connection)
            except (CatalogDamaged, CatalogUnusable):
                self._connection.close()
                self._connection = connect_memory()
            else:
                return
        create_tables(self._connection)

    @contextmanager
    def read_transaction(self) -> Iterator[Connection]:
        """Start a read transaction."""
        with self._lock, self._convert_errors():
            yield self._connection

    @contextmanager
    def write_transaction(self) -> Iterator[Connection]:
        """Start a write transaction: committed at the end, rolled back on any error."""
        with self._lock, self._convert_errors():
            try:
                self._connection.execute("BEGIN")
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                roll_back(self._connection)

    def rebuild(self) -> None:
        """Create empty tables."""
        with self._lock, self._convert_errors():
            self._connection.close()
            self._connection = connect_memory()
            create_tables(self._connection)

    def close(self) -> None:
        """Close the database. A thread that still uses the database gets CatalogUnusable."""
        with self._lock:
            self._closed = True
            self._connection.close()

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        if self._closed:
            raise CatalogUnusable(f"{_MEMORY_NAME} is closed")
        # A call that Ctrl-C interrupted may have left its transaction open.
        roll_back(self._connection)
        try:
            yield
        except sqlite3.Error as error:
            raise convert_error(error, _MEMORY_NAME) from error


# --- connections ----------------------------------------------------------------------------------


_PRAGMAS: Final = (
    "cache_size = -2048",  # in KiB; small, because the operating system caches the file, too
    "cache_spill = OFF",  # SQLite changes the file only in the commit
    "synchronous = NORMAL",
    "mmap_size = 0",
)

_UNUSABLE_ERROR_CODES: Final = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
}


def connect_file(path: Path, mode: str, *, timeout: float) -> Connection:
    """Connect to a file for reading ("ro") or writing ("rw"). Raises sqlite3.Error."""
    escaped_path = str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    connection = sqlite3.connect(
        f"file:{escaped_path}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=timeout,
        factory=Connection,
    )
    return connection


def configure(connection: Connection) -> None:
    """Set the options of a new connection, which may read the file. Raises sqlite3.Error."""
    if not connection.is_configured:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
        connection.is_configured = True


def connect_memory() -> Connection:
    """Connect to a new empty database in memory."""
    return sqlite3.connect(
        ":memory:", isolation_level=None, check_same_thread=False, factory=Connection
    )


def create_tables(connection: Connection, calibration_rows: Sequence[Row] = ()) -> None:
    """Create empty tables of this version with these calibrations, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    *table_statements, about_statement = load_schema()
    for statement in table_statements:
        connection.execute(statement)
    connection.execute(about_statement, (VERSION,))
    connection.run_many("calibrate", calibration_rows)
    connection.execute("COMMIT")


def is_valid_calibration(ratio: object, weight: object) -> bool:
    """Return whether ratio and weight are valid values of `tokens.Calibration`."""
    if not isinstance(ratio, float) or not isinstance(weight, float):
        return False
    # No estimate differs from the real token count by more than a factor of 100.
    return 0.01 <= ratio <= 100 and 0 <= weight < math.inf


def read_content(connection: Connection) -> _Content | None:
    """Return id and write count; None if there are no tables of this version.

    Raises sqlite3.Error, ValueError.
    """
    try:
        if connection.run("version").fetchall() != [(VERSION,)]:
            return None
        [(catalog_id, write_count)] = connection.run("about")
    except sqlite3.OperationalError as error:
        if error_code(error) == sqlite3.SQLITE_ERROR:  # no such table
            return None
        raise
    if not isinstance(catalog_id, int) or not isinstance(write_count, int):
        raise ValueError("the id or the write count is not a number")  # noqa: TRY004
    return _Content(catalog_id, write_count)


def roll_back(connection: Connection) -> None:
    """Roll back the open transaction, if any."""
    if connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def convert_error(error: sqlite3.Error, name: str) -> CatalogDamaged | CatalogUnusable:
    """Convert an SQLite error to an error of the catalog. `name`: the database, for the message."""
    code = error_code(error)
    if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return CatalogBusy(f"{name}: {error}")
    if code != sqlite3.SQLITE_IOERR_SHORT_READ and code & 0xFF in _UNUSABLE_ERROR_CODES:
        return CatalogUnusable(f"{name}: {error} ({getattr(error, 'sqlite_errorname', '')})")
    return CatalogDamaged(f"{name}: {error}")


def error_code(error: sqlite3.Error) -> int:
    """Return SQLite's extended error code; SQLITE_ERROR if the error has no code."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR))
