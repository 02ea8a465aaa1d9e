"""The catalog in a file next to its store (stores/catalog_file.py), or in memory.

The file can be thrown away at any time. Whoever doubts it builds an empty one beside it and renames
the new file into place; docs/decisions/0017 has the rules. Only the holder of the flock of the lock
file writes, creates or removes the database. SQLite finds a journal by its name alone, and must
never apply the journal to another database. Processes without the flock therefore open the
database read-only.
"""

import os
import sqlite3
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from stenolog.catalog.catalog_database import (
    VERSION,
    CatalogBusy,
    CatalogDamaged,
    CatalogUnusable,
    FullTextIndex,
    load_schema,
    load_statements,
)
from stenolog.errors import StoreBusy
from stenolog.stores.catalog_file import journal_name, lock_name
from stenolog.stores.disk import open_descriptor, wait_for_lock
from stenolog.stores.locks import ThreadLock

_TIMEOUT_SECONDS: Final = 10.0
"""Maximum number of seconds to wait for other processes or threads."""
_POLL_SECONDS: Final = 0.002
_MAX_RECOVERIES: Final = 10

Identity = tuple[int, int]
"""Device and inode, which identify a file regardless of its name."""


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


class Connection(sqlite3.Connection):
    """A connection to SQLite with the statements of a catalog."""

    fulltext: FullTextIndex = "fts5"
    identity: Identity | None = None
    """Identity of the connected file; None for a database in memory."""
    content: _Content
    """Content of the file when the transaction started."""
    process: int = 0
    """Id of the process that opened the connection."""
    is_configured: bool = False

    def run(self, name: str, values: Sequence[Any] = (), /, *, column: str = "") -> sqlite3.Cursor:
        """Execute a statement of queries.sql and return its rows."""
        return self.execute(load_statements()[name].replace("{column}", column), values)

    def run_many(self, name: str, rows: Iterable[Sequence[Any]], /) -> None:
        """Execute a statement of queries.sql once per row of values."""
        self.executemany(load_statements()[name], rows)


class FileDatabase:
    """The catalog in a separate file.

    Every transaction has a connection of its own, so threads do not wait for each other.
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
        self._last_seen: tuple[Identity | None, _Content] | None = None
        """The file and the content that this process has seen last."""
        self._doubtful_file: Identity | None = None
        """Identity of the file that must be built again."""
        self._closed = False

    @contextmanager
    def read_transaction(self) -> Iterator[Connection]:
        """Start a read transaction, which sees a consistent snapshot of the tables."""
        connection = self._begin_read()
        try:
            with self._convert_errors(connection.identity):
                yield connection
                # SQLite's lock keeps other writers out, so only a program that ignores the lock
                # can have changed the file.
                self._check_intact(connection)
                connection.rollback()
        except BaseException:
            connection.close()
            raise
        if self._closed:
            connection.close()
        else:
            self._idle_connections.append(connection)

    @contextmanager
    def write_transaction(self) -> Iterator[Connection]:
        """Start a write transaction: committed at the end, rolled back on any error."""
        with self._hold_lock(), self._open_for_writing() as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            # SQLite changes the file only in the commit.
            self._check_intact(connection)
            connection.execute("COMMIT")
            self._set_time(connection)

    def rebuild(self) -> None:
        """Replace the file by a file with empty tables, unless another process has done so."""
        with self._hold_lock():
            if file_identity(self._path) != self._doubtful_file:
                # Another process may have created the tables already.
                with suppress(CatalogDamaged), self._open_for_writing():
                    return
            try:
                new_file = self._create_new_file()
                # Remove the old files before the rename: a kill must not leave the new database
                # with the old journal.
                for path in (self._path, self._journal):
                    path.unlink(missing_ok=True)
                new_file.rename(self._path)
            except (OSError, sqlite3.Error) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                raise CatalogUnusable(f"{self._path} cannot be rebuilt: {reason}") from error
            self._doubtful_file = None

    def _create_new_file(self) -> Path:
        """Create a database with empty tables under a temporary name."""
        path = self._path.with_name(f".{self._path.name}.new")
        for leftover in (path, path.with_name(journal_name(path.name))):
            leftover.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # Close the file before SQLite opens it: closing it later would release SQLite's locks.
        open_descriptor(path, flags).close()
        with closing(connect_file(path, "rw", timeout=self.timeout)) as connection:
            create_tables(connection)
            expected_time = self._read_content(connection).expected_time
        os.utime(path, ns=(expected_time, expected_time))
        return path

    def close(self) -> None:
        """Close the connections; a connection in use is closed after its transaction."""
        self._closed = True
        with suppress(IndexError):  # no connection is left
            while True:
                self._idle_connections.pop().close()

    # --- reading and writing -----------------------------------------------------------------

    def _begin_read(self) -> Connection:
        """Return a connection with a read-only transaction.

        Raises CatalogDamaged, CatalogUnusable.
        """
        for _ in range(_MAX_RECOVERIES):
            connection = self._connect()
            try:
                with self._convert_errors(connection.identity):
                    if self._try_begin(connection):
                        self._check_not_replaced(connection)
                        return connection
            except BaseException:
                connection.close()
                raise
            connection.close()
            # A writer is about to set the time, or died, or another program changed the file. Only
            # the holder of the lock can tell, and can recover the database.
            if self._writable:
                with self._hold_lock(), self._open_for_writing():
                    pass
            else:
                time.sleep(_POLL_SECONDS)
        raise CatalogUnusable(
            f"{self._path} was changed by another program, or its writers keep dying"
        )

    def _try_begin(self, connection: Connection) -> bool:
        """Start a transaction; return False if the file may have to be recovered."""
        try:
            configure(connection)
            connection.execute("BEGIN")
            # The first read takes SQLite's lock and checks for a journal.
            connection.content = self._read_content(connection)
        except sqlite3.Error as error:
            if error_code(error) & 0xFF == sqlite3.SQLITE_READONLY:
                return False  # a writer left changes that must be rolled back
            raise
        return self._is_intact(connection)

    @contextmanager
    def _open_for_writing(self) -> Iterator[Connection]:
        """Yield a writable connection. The caller must hold the lock.

        If a writer died, its unfinished changes are rolled back. Raises CatalogDamaged,
        CatalogUnusable.
        """
        identity = self._require_identity()
        has_journal = self._journal.exists()
        with closing(self._open("rw", identity)) as connection, self._convert_errors(identity):
            configure(connection)
            connection.content = self._read_content(connection)
            if has_journal:
                self._set_time(connection)
            self._check_intact(connection)
            self._check_not_replaced(connection)
            yield connection

    def _read_content(self, connection: Connection) -> _Content:
        """Return id and write count. Raises CatalogDamaged, sqlite3.Error, ValueError."""
        if connection.run("version").fetchall() != [(VERSION,)]:
            raise self._doubt(connection.identity, "has another version")
        [numbers] = connection.run("about")
        return msgspec.convert(numbers, _Content)

    def _is_intact(self, connection: Connection) -> bool:
        """Return whether the connected file has its name and the time that the last writer set."""
        try:
            status = self._path.lstat()
        except OSError:
            return False
        identity = status.st_dev, status.st_ino
        return (
            identity == connection.identity
            and status.st_mtime_ns == connection.content.expected_time
        )

    def _check_intact(self, connection: Connection) -> None:
        if not self._is_intact(connection):
            raise self._doubt(connection.identity, "was changed by another program")

    def _check_not_replaced(self, connection: Connection) -> None:
        """Raise CatalogDamaged if the file is an older copy of a file that was seen before.

        The caller has a transaction or the lock, so the content cannot get newer during the check.
        """
        if self._last_seen is not None:
            identity, content = self._last_seen
            is_other_file = connection.identity != identity
            is_older = connection.content.write_count < content.write_count
            if connection.content.catalog_id == content.catalog_id and (is_other_file or is_older):
                raise self._doubt(connection.identity, "was replaced by an older copy")
        self._last_seen = connection.identity, connection.content

    def _set_time(self, connection: Connection) -> None:
        """Set the time of the file after a write. Raises CatalogDamaged, OSError, sqlite3.Error."""
        if file_identity(self._path) != connection.identity:
            raise CatalogDamaged(f"{self._path} was removed during the write")
        connection.content = self._read_content(connection)
        expected_time = connection.content.expected_time
        os.utime(self._path, ns=(expected_time, expected_time))
        self._last_seen = connection.identity, connection.content

    # --- connections -------------------------------------------------------------------------

    def _connect(self) -> Connection:
        """Return a connection for reading the current file. Raises CatalogDamaged."""
        identity = self._require_identity()
        while self._idle_connections:
            with suppress(IndexError):  # another thread may take the last one
                connection = self._idle_connections.pop()
                # A forked child must not use the connections of its parent.
                if connection.identity == identity and connection.process == os.getpid():
                    return connection
                connection.close()
        return self._open("ro", identity)

    def _open(self, mode: str, identity: Identity) -> Connection:
        with self._convert_errors(identity):
            connection = connect_file(self._path, mode, timeout=self.timeout)
        connection.identity = identity
        connection.process = os.getpid()
        return connection

    def _require_identity(self) -> Identity:
        identity = file_identity(self._path)
        if identity is None:
            raise CatalogDamaged(f"{self._path} is missing")
        return identity

    def _doubt(self, identity: Identity | None, reason: str) -> CatalogDamaged:
        """Record that this file must be built again, and return the error to raise."""
        self._doubtful_file = identity
        return CatalogDamaged(f"{self._path} {reason}")

    @contextmanager
    def _convert_errors(self, identity: Identity | None) -> Iterator[None]:
        """Convert errors during the use of the file with this identity to errors of the catalog."""
        try:
            yield
        except sqlite3.Error as error:
            catalog_error = convert_error(error, str(self._path))
            if file_identity(self._path) != identity:
                # The file was removed during the call, which may have caused the error.
                raise CatalogDamaged(str(catalog_error)) from error
            if isinstance(catalog_error, CatalogDamaged):
                self._doubtful_file = identity
            raise catalog_error from error
        except OSError as error:
            raise CatalogUnusable(f"{self._path}: {error.strerror}") from error
        except (ValueError, msgspec.MsgspecError) as error:
            # Only this class writes to the catalog, so data that cannot be decoded is damaged.
            raise self._doubt(identity, f"contains invalid data: {error}") from error

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Lock the catalog for writing. Raises CatalogUnusable."""
        if not self._writable:
            raise CatalogUnusable(f"{self._path} was opened read-only")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open_descriptor(self._lock_path, flags) as lock:
                name, poll = str(self._lock_path), _POLL_SECONDS
                wait_for_lock(lock, seconds=self.timeout, name=name, poll=poll)
                try:
                    status = os.fstat(lock)
                    if (status.st_dev, status.st_ino) != file_identity(self._lock_path):
                        raise CatalogBusy(f"{self._lock_path} was removed by another program")
                    yield
                finally:
                    lock.release()
        except StoreBusy as error:
            raise CatalogBusy(str(error)) from error
        except OSError as error:
            raise CatalogUnusable(f"{self._lock_path}: {error.strerror}") from error


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


class MemoryDatabase:
    """A catalog in memory, which is lost when the process ends. Threads use it one at a time."""

    def __init__(self, source: object = None) -> None:
        """Copy `source` if it is a catalog file that can be read; otherwise create empty tables."""
        self._lock = ThreadLock()
        self._connection = connect_memory()
        if isinstance(source, FileDatabase):
            with (
                suppress(CatalogDamaged, CatalogUnusable),
                source.read_transaction() as connection,
            ):
                connection.backup(self._connection)
                return
        self.rebuild()

    @contextmanager
    def read_transaction(self) -> Iterator[Connection]:
        """Start a read transaction."""
        with self._lock:
            try:
                yield self._connection
            except sqlite3.Error as error:
                raise convert_error(error, "the catalog in memory") from error

    @contextmanager
    def write_transaction(self) -> Iterator[Connection]:
        """Start a write transaction: committed at the end, rolled back on any error."""
        with self.read_transaction() as connection:
            try:
                connection.execute("BEGIN")
                yield connection
                connection.execute("COMMIT")
            finally:
                connection.rollback()

    def rebuild(self) -> None:
        """Create empty tables."""
        with self._lock:
            self._connection.close()
            self._connection = connect_memory()
            create_tables(self._connection)

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._connection.close()


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


def create_tables(connection: Connection) -> None:
    """Create empty tables of this version, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    *table_statements, about_statement = load_schema()
    for statement in table_statements:
        connection.execute(statement)
    connection.execute(about_statement, (VERSION,))
    connection.execute("COMMIT")


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
