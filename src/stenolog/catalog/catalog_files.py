"""The catalog in a file next to its store (stores/catalog_file.py), or in memory.

A process that finds the file missing, outdated or damaged builds it again. SQLite has no checksums:
a lock file records the identity, size and time of the database after the last write. A catalog that
any other program changed is not used. During a write, the lock file contains the word `writing`. If
a writer dies, SQLite's journal restores the database.

A writer holds the flock of the lock file. Only the writer creates, removes or recovers the
database. SQLite finds a journal by its name alone, and must never apply the journal to another
database. Processes without the flock therefore open the database read-only.
"""

import fcntl
import math
import os
import sqlite3
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from stenolog.catalog.catalog_database import (
    VERSION,
    CatalogBusy,
    CatalogDamaged,
    CatalogUnusable,
    Row,
    Transaction,
    load_schema,
    load_statements,
)
from stenolog.catalog.exclusive_lock import ExclusiveLock, ExclusiveUse
from stenolog.stores.catalog_file import journal_name, lock_name
from stenolog.stores.disk import Descriptor, open_descriptor
from stenolog.stores.locks import keep_forever

if TYPE_CHECKING:
    from stenolog.catalog.query import FullTextDialect


WRITING_MARK: Final = b"writing"
"""Content of the lock file during a write, or after a writer died."""

_POLL_SECONDS: Final = 0.002
_MAX_MARK_BYTES: Final = 80

Identity = tuple[int, int]
"""Device and inode, which identify a file regardless of its name."""


class LockFile:
    """A file that the writer locks, and that records the stamp of the database after a write."""

    def __init__(self, path: Path, *, timeout: float) -> None:
        self._path = path
        self.timeout = timeout
        """Maximum number of seconds to wait for other writers."""

    @contextmanager
    def hold_lock(self) -> Iterator[Descriptor]:
        """Lock the file, and yield its descriptor. Raises CatalogUnusable."""
        try:
            lock = self._open()
            try:
                yield lock
            finally:
                lock.release()
        except BlockingIOError as error:
            raise CatalogBusy(f"{self._path}: other processes held it for too long") from error
        except OSError as error:
            raise CatalogUnusable(f"{self._path}: {error.strerror}") from error

    def _open(self) -> Descriptor:
        """Open and lock the lock file, and return its descriptor."""
        deadline = time.monotonic() + self.timeout
        while True:
            lock = open_descriptor(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(lock)
                if (status.st_dev, status.st_ino) == file_identity(self._path):
                    return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    lock.close()
                    raise
            except BaseException:
                lock.close()
                raise
            lock.close()
            time.sleep(_POLL_SECONDS)

    def read_mark(self) -> bytes:
        """Return the mark that the last writer wrote to the lock file; may be empty."""
        try:
            # Without O_NONBLOCK, opening a fifo with this name would block.
            lock = open_descriptor(
                self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            return b""
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                return b""
            return os.pread(lock, _MAX_MARK_BYTES, 0).rstrip()
        finally:
            lock.close()


def set_mark(lock: int, mark: bytes) -> None:
    """Write `mark` to the lock file, which the caller has locked. Raises OSError."""
    os.pwrite(lock, mark.ljust(_MAX_MARK_BYTES - 1) + b"\n", 0)


def file_stamp(path: Path) -> bytes:
    """Return bytes that change with every write or replacement of a file; empty if missing."""
    try:
        status = path.lstat()
    except OSError:
        return b""
    return b"%d:%d:%d:%d" % (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


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


_LOCK_TIMEOUT_SECONDS: Final = 10.0
_FORK_TIMEOUT_SECONDS: Final = 1.0
_MAX_RECOVERIES: Final = 10


class _OpenFile(Struct, frozen=True):
    """A connection to SQLite, and the identity of its file."""

    connection: sqlite3.Connection
    identity: Identity


class FileDatabase:
    """The catalog in a separate file."""

    def __init__(
        self, path: Path, *, writable: bool = True, timeout: float = _LOCK_TIMEOUT_SECONDS
    ) -> None:
        self.sql = load_statements()
        self._path = path
        self._journal = path.with_name(journal_name(path.name))
        self._lock = LockFile(path.with_name(lock_name(path.name)), timeout=timeout)
        self._writable = writable
        self._exclusive = ExclusiveLock(str(path))
        self._uses_during_fork: dict[int, ExclusiveUse] = {}
        """Exclusive uses that block other threads during a fork, by id of the forking thread."""
        self._connections: dict[str, _OpenFile] = {}
        """Open connections: for reading ("ro") and for writing ("rw")."""
        self._damaged_file: Identity | None = None
        """Identity of the file that was found to be damaged."""
        self._closed = False
        _databases.add(self)

    @property
    def fulltext(self) -> "FullTextDialect":
        """The full-text dialect of SQLite: queries for FTS5."""
        # Imported on demand: a list does not need this module.
        from stenolog.catalog.query import FTS5

        return FTS5()

    @contextmanager
    def read_transaction(self) -> Iterator[Transaction]:
        """Start a read transaction, which sees a consistent state of the tables."""
        with self._exclusive_use() as use:
            handle = self._begin_read()
            with self._convert_errors(handle, use):
                yield handle.connection

    @contextmanager
    def write_transaction(self) -> Iterator[Transaction]:
        """Start a write transaction: committed at the end, rolled back on any error."""
        with self._exclusive_use() as use, self._hold_lock() as lock:
            use.lock = lock
            handle = self._write_connection()
            try:
                with self._convert_errors(handle, use), write_cache(handle.connection):
                    handle.connection.execute("BEGIN IMMEDIATE")
                    set_mark(lock, WRITING_MARK)
                    yield handle.connection
                    handle.connection.execute("COMMIT")
            finally:
                if self._exclusive.is_current(use) and file_identity(self._path) == handle.identity:
                    set_mark(lock, file_stamp(self._path))
            if file_identity(self._path) != handle.identity:
                raise CatalogDamaged(f"{self._path} was removed during the write")

    def rebuild(self) -> None:
        """Discard the file if it is damaged, and create empty tables."""
        with self._exclusive_use() as use, self._hold_lock() as lock:
            use.lock = lock
            self._rebuild(lock)

    def _rebuild(self, lock: Descriptor) -> None:
        if self._damaged_file is None or file_identity(self._path) != self._damaged_file:
            # Another process may have created the tables already.
            with suppress(CatalogDamaged):
                self._write_connection()
                return
        self._disconnect()
        try:
            new_file = self._create_new_file(self._read_calibrations())
            # A kill between two steps must not leave a database with another database's journal.
            for path in (self._path, self._journal):
                path.unlink(missing_ok=True)
            set_mark(lock, WRITING_MARK)
            new_file.rename(self._path)
            set_mark(lock, file_stamp(self._path))
        except (OSError, sqlite3.Error) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise CatalogUnusable(f"{self._path} cannot be rebuilt: {reason}") from error
        self._damaged_file = None

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
                for model, ratio, weight in old_connection.execute(self.sql["calibrations"])
                if isinstance(model, str) and is_calibration(ratio, weight)
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
        with closing(connect_file(path, "rw", timeout=self._lock.timeout)) as connection:
            create_tables(connection, calibration_rows)
        return path

    def close(self) -> None:
        """Close the connections. A thread that still uses the catalog gets CatalogUnusable."""
        with self._exclusive.exclusive_use(timeout=self._lock.timeout):
            self._closed = True
            self._disconnect()
            _databases.discard(self)

    @contextmanager
    def _exclusive_use(self) -> Iterator[ExclusiveUse]:
        """Keep other threads out. Raises CatalogBusy, and CatalogUnusable after `close`."""
        with self._exclusive.exclusive_use(timeout=self._lock.timeout) as use:
            if self._closed:
                raise CatalogUnusable(f"{self._path} is closed")
            for handle in self._connections.values():
                # A call that Ctrl-C interrupted may have left its transaction open.
                roll_back(handle.connection)
            yield use

    # --- connections -------------------------------------------------------------------------

    def _begin_read(self) -> "_OpenFile":
        """Start a read-only transaction. Raises CatalogDamaged, CatalogUnusable."""
        for _ in range(_MAX_RECOVERIES):
            try:
                handle = self._connect("ro")
                handle.connection.execute("BEGIN")
                # The first read takes SQLite's lock and checks for a journal.
                self._check_tables(handle)
            except UnicodeDecodeError as error:
                self._close_connection("ro")
                self._damaged_file = file_identity(self._path)
                raise CatalogDamaged(f"{self._path} contains invalid data: {error}") from error
            except sqlite3.Error as error:
                self._close_connection("ro")
                if error_code(error) & 0xFF != sqlite3.SQLITE_READONLY:
                    raise self._convert_error(error) from error
                # A writer died; only the holder of the lock can recover the database.
                with self._hold_lock():
                    self._write_connection()
            else:
                return handle
        raise CatalogUnusable(f"{self._path} cannot be recovered: its writers keep dying")

    def _write_connection(self) -> "_OpenFile":
        """Return a writable connection. The caller holds the lock.

        Raises CatalogDamaged, CatalogUnusable.
        """
        try:
            handle = self._connect("rw")
            # If a writer died, this check recovers the database.
            self._check_tables(handle)
        except sqlite3.Error as error:
            raise self._convert_error(error) from error
        return handle

    def _check_tables(self, open_file: "_OpenFile") -> None:
        """Raise CatalogDamaged if the tables are missing or have another version."""
        if not has_tables(open_file.connection):
            roll_back(open_file.connection)
            self._damaged_file = open_file.identity
            raise CatalogDamaged(f"{self._path} has another version")

    def _connect(self, mode: str) -> "_OpenFile":
        """Return a connection to the current file if it is unchanged since the last write.

        Raises sqlite3.Error.
        """
        identity = file_identity(self._path)
        if identity is None:
            self._disconnect()
            raise CatalogDamaged(f"{self._path} is missing")
        if not self._is_unchanged():
            self._damaged_file = identity
            raise CatalogDamaged(f"{self._path} was changed by another program")
        handle = self._connections.get(mode)
        if handle is None or handle.identity != identity:
            self._close_connection(mode)
            handle = _OpenFile(connect_file(self._path, mode, timeout=self._lock.timeout), identity)
            self._connections[mode] = handle
        return handle

    @contextmanager
    def _convert_errors(self, open_file: "_OpenFile", use: ExclusiveUse) -> Iterator[None]:
        """Convert errors of SQLite, and leave no transaction open."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._convert_error(error, open_file) from error
        except (ValueError, msgspec.MsgspecError) as error:
            # Only this class writes to the catalog, so unreadable data is damaged data.
            self._damaged_file = open_file.identity
            raise CatalogDamaged(f"{self._path} contains invalid data: {error}") from error
        finally:
            if self._exclusive.is_current(use):
                roll_back(open_file.connection)

    def _convert_error(
        self, error: sqlite3.Error, open_file: "_OpenFile | None" = None
    ) -> CatalogDamaged | CatalogUnusable:
        catalog_error = convert_error(error, str(self._path))
        identity = file_identity(self._path)
        if identity is None or (open_file is not None and identity != open_file.identity):
            # The file was removed during the call, which may have caused the error.
            return CatalogDamaged(str(catalog_error))
        if isinstance(catalog_error, CatalogDamaged):
            self._damaged_file = identity
        return catalog_error

    def _close_connection(self, mode: str) -> None:
        handle = self._connections.pop(mode, None)
        if handle is not None:
            handle.connection.close()

    def _disconnect(self) -> None:
        for mode in ("ro", "rw"):
            self._close_connection(mode)

    # --- the lock and its mark ---------------------------------------------------------------

    def _hold_lock(self) -> AbstractContextManager[Descriptor]:
        """Lock for writing. Raises CatalogUnusable."""
        if not self._writable:
            raise CatalogUnusable(f"{self._path} was opened read-only")
        return self._lock.hold_lock()

    def _is_unchanged(self) -> bool:
        """Return whether the database is as the last write left it, or a write is in progress."""
        while True:
            mark = self._lock.read_mark()
            if mark in (WRITING_MARK, file_stamp(self._path)):
                return True
            if mark == self._lock.read_mark():
                return False

    # --- forks -------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Keep other threads out of SQLite: its locks would stay locked in the child."""
        if self._exclusive.is_own_thread():
            return  # this thread uses SQLite, so no other thread does
        use = ExclusiveUse()
        with suppress(CatalogBusy):
            self._exclusive.begin(use, timeout=_FORK_TIMEOUT_SECONDS)
            self._uses_during_fork[use.thread] = use

    def after_fork_in_parent(self) -> None:
        """Let other threads continue. Several threads may fork at the same time."""
        use = self._uses_during_fork.pop(get_ident(), None)
        if use is not None:
            self._exclusive.end(use)

    def after_fork_in_child(self) -> None:
        """Drop all connections: they belong to the parent process."""
        self._exclusive = ExclusiveLock(str(self._path))
        self._uses_during_fork = {}
        for handle in self._connections.values():
            keep_forever(handle.connection)
        self._connections = {}


_databases: "weakref.WeakSet[FileDatabase]" = weakref.WeakSet()


def _for_each_database(action: Callable[[FileDatabase], None]) -> Callable[[], None]:
    def act_on_all() -> None:
        for database in list(_databases):
            action(database)

    return act_on_all


os.register_at_fork(
    before=_for_each_database(FileDatabase.before_fork),
    after_in_parent=_for_each_database(FileDatabase.after_fork_in_parent),
    after_in_child=_for_each_database(FileDatabase.after_fork_in_child),
)


# --- in memory ------------------------------------------------------------------------------------


_MEMORY_TIMEOUT_SECONDS: Final = 10.0
"""Maximum number of seconds to wait for other threads."""
_MEMORY_NAME: Final = "the catalog in memory"


class MemoryDatabase:
    """A catalog in memory, which is lost when the process ends."""

    def __init__(self, source: object = None) -> None:
        """Start with a copy of a catalog file if it is usable, or else with empty tables."""
        self.sql = load_statements()
        self._exclusive = ExclusiveLock(_MEMORY_NAME)
        self._closed = False
        self._connection = connect_memory()
        if isinstance(source, FileDatabase):
            with suppress(CatalogDamaged, CatalogUnusable), source.read_transaction() as connection:
                assert isinstance(connection, sqlite3.Connection), "it is one of ours"
                connection.backup(self._connection)
                return
        create_tables(self._connection)

    fulltext = FileDatabase.fulltext

    @contextmanager
    def read_transaction(self) -> Iterator[Transaction]:
        """Start a read transaction."""
        with self._exclusive_use():
            yield self._connection

    @contextmanager
    def write_transaction(self) -> Iterator[Transaction]:
        """Start a write transaction: committed at the end, rolled back on any error."""
        with self._exclusive_use() as use:
            try:
                self._connection.execute("BEGIN")
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._exclusive.is_current(use):
                    roll_back(self._connection)

    def rebuild(self) -> None:
        """Create empty tables."""
        with self._exclusive_use():
            self._connection.close()
            self._connection = connect_memory()
            create_tables(self._connection)

    def close(self) -> None:
        """Close the database. A thread that still uses the database gets CatalogUnusable."""
        with self._exclusive.exclusive_use(timeout=_MEMORY_TIMEOUT_SECONDS):
            self._closed = True
            self._connection.close()

    @contextmanager
    def _exclusive_use(self) -> Iterator[ExclusiveUse]:
        """Keep other threads out. Raises CatalogBusy, and CatalogUnusable after `close`."""
        with self._exclusive.exclusive_use(timeout=_MEMORY_TIMEOUT_SECONDS) as use:
            if self._closed:
                raise CatalogUnusable(f"{_MEMORY_NAME} is closed")
            try:
                # A call that Ctrl-C interrupted may have left its transaction open.
                roll_back(self._connection)
                yield use
            except sqlite3.Error as error:
                raise convert_error(error, _MEMORY_NAME) from error


# --- connections ----------------------------------------------------------------------------------


_CACHE_KB: Final = 2 * 1024
"""Page cache of a connection in KiB; the operating system caches the file anyway."""
_WRITE_CACHE_KB: Final = 64 * 1024
"""Page cache of a write transaction in KiB; if it suffices, readers wait only for the commit."""

_UNUSABLE_CODES: Final = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
}


def connect_file(path: Path, mode: str, *, timeout: float) -> sqlite3.Connection:
    """Connect to a file for reading ("ro") or writing ("rw"). Raises sqlite3.Error."""
    escaped_path = str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")
    connection = sqlite3.connect(
        f"file:{escaped_path}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=timeout,
    )
    try:
        for pragma in (f"cache_size = -{_CACHE_KB}", "synchronous = NORMAL", "mmap_size = 0"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def write_cache(connection: sqlite3.Connection) -> Iterator[None]:
    """Give a connection the page cache of a write transaction until the `with` block ends."""
    connection.execute(f"PRAGMA cache_size = -{_WRITE_CACHE_KB}")
    try:
        yield
    finally:
        with suppress(sqlite3.Error):
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KB}")


def connect_memory() -> sqlite3.Connection:
    """Connect to a new empty database in memory."""
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


def create_tables(connection: sqlite3.Connection, calibration_rows: Sequence[Row] = ()) -> None:
    """Create empty tables of this version with these calibrations, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    *tables, about = load_schema()
    for statement in tables:
        connection.execute(statement)
    connection.execute(about, (VERSION,))
    connection.executemany(load_statements()["calibrate"], calibration_rows)
    connection.execute("COMMIT")


def is_calibration(ratio: object, weight: object) -> bool:
    """Return whether ratio and weight are valid values of `tokens.Calibration`."""
    if not isinstance(ratio, float) or not isinstance(weight, float):
        return False
    # No estimate differs from the real token count by more than a factor of 100.
    return 0.01 <= ratio <= 100 and 0 <= weight < math.inf


def has_tables(connection: sqlite3.Connection) -> bool:
    """Return whether the tables exist and have this version. Raises sqlite3.Error."""
    try:
        rows = connection.execute(load_statements()["version"]).fetchall()
    except sqlite3.OperationalError as error:
        if error_code(error) == sqlite3.SQLITE_ERROR:  # no such table
            return False
        raise
    return rows == [(VERSION,)]


def roll_back(connection: sqlite3.Connection) -> None:
    """Roll back an open transaction."""
    if connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def convert_error(error: sqlite3.Error, name: str) -> CatalogDamaged | CatalogUnusable:
    """Convert an SQLite error. `name`: name of the database, for the message."""
    code = error_code(error)
    if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return CatalogBusy(f"{name}: {error}")
    if code != sqlite3.SQLITE_IOERR_SHORT_READ and code & 0xFF in _UNUSABLE_CODES:
        return CatalogUnusable(f"{name}: {error} ({getattr(error, 'sqlite_errorname', '')})")
    return CatalogDamaged(f"{name}: {error}")


def error_code(error: sqlite3.Error) -> int:
    """Return SQLite's extended error code; SQLITE_ERROR if the error has no code."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code
