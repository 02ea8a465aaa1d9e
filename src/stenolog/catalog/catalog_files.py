"""The catalog in a file next to its store (stores/catalog_file.py), or in memory.

A process that finds the file missing, outdated or damaged builds it again. SQLite has no checksums,
so a lock file records the identity, size and time of the database after the last write. A catalog
that any other program changed is not used. During a write, the lock file contains the word
`writing`. If a writer dies, SQLite's journal restores the database.

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import Any, Final

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

WRITING_MARK: Final = b"writing"
"""Content of the lock file during a write, or after a writer died."""

_TIMEOUT_SECONDS: Final = 10.0
"""Maximum number of seconds to wait for other processes or threads."""
_POLL_SECONDS: Final = 0.002
_LOCK_CONTENT_BYTES: Final = 80

Identity = tuple[int, int]
"""Device and inode, which identify a file regardless of its name."""


class LockFile:
    """The lock file of the writers, which also records the database's stamp after each write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.timeout = _TIMEOUT_SECONDS
        """Maximum number of seconds to wait for other writers."""

    @contextmanager
    def hold_lock(self) -> Iterator[Descriptor]:
        """Lock the file, and yield its descriptor. Raises CatalogUnusable."""
        try:
            lock = self._open_and_lock()
            try:
                yield lock
            finally:
                lock.release()
        except BlockingIOError as error:
            raise CatalogBusy(f"{self._path}: other processes held it for too long") from error
        except OSError as error:
            raise CatalogUnusable(f"{self._path}: {error.strerror}") from error

    def _open_and_lock(self) -> Descriptor:
        """Open and lock the lock file, and return its descriptor."""
        deadline = time.monotonic() + self.timeout
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            lock = open_descriptor(self._path, flags)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(lock)
                if (status.st_dev, status.st_ino) == file_identity(self._path):
                    return lock
            except BaseException as error:
                lock.close()
                if not isinstance(error, BlockingIOError) or time.monotonic() > deadline:
                    raise
            lock.close()
            time.sleep(_POLL_SECONDS)

    def read_content(self) -> bytes:
        """Return the content of the lock file, which the last writer wrote; may be empty."""
        # Without O_NONBLOCK, opening a fifo with this name would block.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            lock = open_descriptor(self._path, flags)
        except OSError:
            return b""
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                return b""
            return os.pread(lock, _LOCK_CONTENT_BYTES, 0).rstrip()
        finally:
            lock.close()


def write_lock_content(lock: int, content: bytes) -> None:
    """Write `content` to the lock file, which the caller has locked. Raises OSError."""
    os.pwrite(lock, content.ljust(_LOCK_CONTENT_BYTES - 1) + b"\n", 0)


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


# --- threads ---------------------------------------------------------------------------------
# One thread at a time uses a connection. KeyboardInterrupt may be raised at any time, even directly
# after a lock is acquired. Each use of the connection is therefore represented by an object. The
# use ends when the object is marked as ended or garbage-collected. If a traceback keeps the object
# alive, as in a notebook, the next call of the same thread replaces it. Other threads wait no
# longer than their timeout.


_CHECK_INTERVAL_SECONDS: Final = 0.01
"""Seconds after which a waiting thread checks again, even if no other thread has woken it."""
_STALE_SECONDS: Final = 0.2
"""Seconds without a check after which a waiting thread loses its place in the queue."""


class ExclusiveUse:
    """One use of the connection, by the thread that creates this object."""

    __slots__ = ("__weakref__", "checked_at", "ended", "lock", "process", "thread", "wakeup")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.process = os.getpid()
        self.ended = False
        self.lock: Descriptor | None = None
        """Descriptor of the lock file, if this use writes."""
        self.wakeup: SimpleQueue[None] = SimpleQueue()
        """Queue that wakes the waiting thread. It is written in C, so Ctrl-C cannot break it."""
        self.checked_at = 0.0
        """Monotonic time at which the thread last checked whether it may start."""


class ExclusiveLock:
    """A lock that allows one use of a connection at a time, in the order of the requests.

    `name`: name of the database, for error messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Held only briefly, and only in `with` blocks, so that Ctrl-C cannot leave it locked.
        self._mutex = ThreadLock()
        self._active_ref: weakref.ref[ExclusiveUse] | None = None
        self._queue: deque[weakref.ref[ExclusiveUse]] = deque()

    @contextmanager
    def exclusive_use(self, *, timeout: float) -> Iterator[ExclusiveUse]:
        """Lock the connection for a `with` block. Raises CatalogBusy after `timeout` seconds."""
        use = ExclusiveUse()
        try:
            self.begin(use, timeout=timeout)
            yield use
        finally:
            self.end(use)

    def begin(self, use: ExclusiveUse, *, timeout: float) -> None:
        """Wait until no other use is active. Raises CatalogBusy after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._try_begin(use):
            if time.monotonic() > deadline:
                raise CatalogBusy(f"another thread used {self._name} for too long")
            with suppress(Empty):
                use.wakeup.get(timeout=_CHECK_INTERVAL_SECONDS)

    def end(self, use: ExclusiveUse) -> None:
        """Mark a use as ended and wake the thread that has waited longest."""
        use.ended = True
        if self._queue:
            with self._mutex:
                next_use = self._first_waiting_use()
            if next_use is not None:
                next_use.wakeup.put(None)

    def is_active(self, use: ExclusiveUse) -> bool:
        """Return whether this use is active. Only an active use may clean up."""
        return self._active_use() is use

    def is_held_by_caller(self) -> bool:
        """Return whether the calling thread started the active use."""
        active_use = self._active_use()
        return active_use is not None and active_use.thread == get_ident()

    def _try_begin(self, use: ExclusiveUse) -> bool:
        with self._mutex:
            use.checked_at = time.monotonic()
            active_use = self._active_use()
            if active_use is None:
                # A thread that calls again at once must not overtake the waiting threads.
                if self._first_waiting_use() not in (None, use):
                    self._add_to_queue(use)
                    return False
                if self._queue:
                    self._queue.popleft()
            elif active_use.thread != use.thread:
                self._add_to_queue(use)
                return False
            elif active_use.lock is not None:
                # A traceback keeps the interrupted use alive, so no finalizer closes the lock file.
                active_use.lock.close()
            self._active_ref = weakref.ref(use)
            return True

    def _add_to_queue(self, use: ExclusiveUse) -> None:
        if all(waiting() is not use for waiting in self._queue):
            self._queue.append(weakref.ref(use))

    def _first_waiting_use(self) -> ExclusiveUse | None:
        """Drop abandoned uses from the queue, and return the use that has waited longest."""
        now = time.monotonic()
        while self._queue:
            use = self._queue[0]()
            if use is not None and not use.ended and now - use.checked_at < _STALE_SECONDS:
                return use
            self._queue.popleft()
        return None

    def _active_use(self) -> ExclusiveUse | None:
        active_use = self._active_ref() if self._active_ref is not None else None
        if active_use is None or active_use.ended or active_use.process != os.getpid():
            return None  # threads of the parent do not exist in a forked child
        return active_use


# --- in a file -------------------------------------------------------------------------------


_FORK_TIMEOUT_SECONDS: Final = 1.0
_MAX_RECOVERIES: Final = 10


class Connection(sqlite3.Connection):
    """A connection to SQLite with the statements of a catalog."""

    fulltext: FullTextIndex = "fts5"
    identity: Identity | None = None
    """Identity of the connected file; None for a database in memory."""

    def run(self, name: str, values: Sequence[Any] = (), /, *, column: str = "") -> sqlite3.Cursor:
        """Execute a statement of queries.sql and return its rows."""
        return self.execute(load_statements()[name].replace("{column}", column), values)

    def run_many(self, name: str, rows: Iterable[Sequence[Any]], /) -> None:
        """Execute a statement of queries.sql once per row of values."""
        self.executemany(load_statements()[name], rows)


class FileDatabase:
    """The catalog in a separate file."""

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self._path = path
        self._journal = path.with_name(journal_name(path.name))
        self._lock = LockFile(path.with_name(lock_name(path.name)))
        self._writable = writable
        self._exclusive_lock = ExclusiveLock(str(path))
        self._uses_during_fork: dict[int, ExclusiveUse] = {}
        """Exclusive uses that block other threads during a fork, by id of the forking thread."""
        self._connections: dict[str, Connection] = {}
        """Open connections by mode: "ro" for reading, "rw" for writing."""
        self._damaged_file: Identity | None = None
        """Identity of the file that was found to be damaged."""
        self._closed = False
        _databases.add(self)

    @contextmanager
    def read_transaction(self) -> Iterator[Connection]:
        """Start a read transaction, which sees a consistent snapshot of the tables."""
        with self._exclusive_use() as use:
            connection = self._begin_read()
            with self._convert_errors(connection, use):
                yield connection

    @contextmanager
    def write_transaction(self) -> Iterator[Connection]:
        """Start a write transaction: committed at the end, rolled back on any error."""
        with self._exclusive_use() as use, self._hold_lock() as lock:
            use.lock = lock
            connection = self._open_for_writing()
            try:
                with self._convert_errors(connection, use), larger_page_cache(connection):
                    connection.execute("BEGIN IMMEDIATE")
                    write_lock_content(lock, WRITING_MARK)
                    yield connection
                    connection.execute("COMMIT")
            finally:
                if (
                    self._exclusive_lock.is_active(use)
                    and file_identity(self._path) == connection.identity
                ):
                    write_lock_content(lock, file_stamp(self._path))
            if file_identity(self._path) != connection.identity:
                raise CatalogDamaged(f"{self._path} was removed during the write")

    def rebuild(self) -> None:
        """Replace the file by a file with empty tables, unless another process has done so."""
        with self._exclusive_use() as use, self._hold_lock() as lock:
            use.lock = lock
            if self._damaged_file is None or file_identity(self._path) != self._damaged_file:
                # Another process may have created the tables already.
                with suppress(CatalogDamaged):
                    self._open_for_writing()
                    return
            self._close_connections()
            try:
                new_file = self._create_new_file(self._read_calibrations())
                # Remove the old files before the rename: a kill must not leave the new database
                # with the old journal.
                for path in (self._path, self._journal):
                    path.unlink(missing_ok=True)
                write_lock_content(lock, WRITING_MARK)
                new_file.rename(self._path)
                write_lock_content(lock, file_stamp(self._path))
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
        with closing(connect_file(path, "rw", timeout=self._lock.timeout)) as connection:
            create_tables(connection, calibration_rows)
        return path

    def close(self) -> None:
        """Close the connections. A thread that still uses the catalog gets CatalogUnusable."""
        with self._exclusive_lock.exclusive_use(timeout=self._lock.timeout):
            self._closed = True
            self._close_connections()
            _databases.discard(self)

    @contextmanager
    def _exclusive_use(self) -> Iterator[ExclusiveUse]:
        """Block other threads. Raises CatalogBusy, and CatalogUnusable after `close`."""
        with self._exclusive_lock.exclusive_use(timeout=self._lock.timeout) as use:
            if self._closed:
                raise CatalogUnusable(f"{self._path} is closed")
            for connection in self._connections.values():
                # A call that Ctrl-C interrupted may have left its transaction open.
                roll_back(connection)
            yield use

    # --- connections -------------------------------------------------------------------------

    def _begin_read(self) -> Connection:
        """Start a read-only transaction. Raises CatalogDamaged, CatalogUnusable."""
        for _ in range(_MAX_RECOVERIES):
            try:
                connection = self._connect("ro")
                connection.execute("BEGIN")
                # The first read takes SQLite's lock and checks for a journal.
                self._check_tables(connection)
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
                    self._open_for_writing()
            else:
                return connection
        raise CatalogUnusable(f"{self._path} cannot be recovered: its writers keep dying")

    def _open_for_writing(self) -> Connection:
        """Return a writable connection. The caller must hold the lock.

        Raises CatalogDamaged, CatalogUnusable.
        """
        try:
            connection = self._connect("rw")
            # If a writer died, this check recovers the database.
            self._check_tables(connection)
        except sqlite3.Error as error:
            raise self._convert_error(error) from error
        return connection

    def _check_tables(self, connection: Connection) -> None:
        """Raise CatalogDamaged if the tables are missing or have another version."""
        if not has_tables(connection):
            roll_back(connection)
            self._damaged_file = connection.identity
            raise CatalogDamaged(f"{self._path} has another version")

    def _connect(self, mode: str) -> Connection:
        """Return a connection to the current file if it is unchanged since the last write.

        Raises sqlite3.Error.
        """
        identity = file_identity(self._path)
        if identity is None:
            self._close_connections()
            raise CatalogDamaged(f"{self._path} is missing")
        if not self._is_unchanged():
            self._damaged_file = identity
            raise CatalogDamaged(f"{self._path} was changed by another program")
        connection = self._connections.get(mode)
        if connection is None or connection.identity != identity:
            self._close_connection(mode)
            connection = connect_file(self._path, mode, timeout=self._lock.timeout)
            connection.identity = identity
            self._connections[mode] = connection
        return connection

    @contextmanager
    def _convert_errors(self, connection: Connection, use: ExclusiveUse) -> Iterator[None]:
        """Convert errors of SQLite to errors of the catalog, and leave no transaction open."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._convert_error(error, connection) from error
        except (ValueError, msgspec.MsgspecError) as error:
            # Only this class writes to the catalog, so data that cannot be decoded is damaged.
            self._damaged_file = connection.identity
            raise CatalogDamaged(f"{self._path} contains invalid data: {error}") from error
        finally:
            if self._exclusive_lock.is_active(use):
                roll_back(connection)

    def _convert_error(
        self, error: sqlite3.Error, connection: Connection | None = None
    ) -> CatalogDamaged | CatalogUnusable:
        catalog_error = convert_error(error, str(self._path))
        identity = file_identity(self._path)
        if identity is None or (connection is not None and identity != connection.identity):
            # The file was removed during the call, which may have caused the error.
            return CatalogDamaged(str(catalog_error))
        if isinstance(catalog_error, CatalogDamaged):
            self._damaged_file = identity
        return catalog_error

    def _close_connection(self, mode: str) -> None:
        connection = self._connections.pop(mode, None)
        if connection is not None:
            connection.close()

    def _close_connections(self) -> None:
        for mode in ("ro", "rw"):
            self._close_connection(mode)

    # --- the lock and its content ------------------------------------------------------------

    def _hold_lock(self) -> AbstractContextManager[Descriptor]:
        """Lock the catalog for writing. Raises CatalogUnusable."""
        if not self._writable:
            raise CatalogUnusable(f"{self._path} was opened read-only")
        return self._lock.hold_lock()

    def _is_unchanged(self) -> bool:
        """Return whether the file is unchanged since the last write; True during a write."""
        while True:
            content = self._lock.read_content()
            if content in (WRITING_MARK, file_stamp(self._path)):
                return True
            if content == self._lock.read_content():
                return False

    # --- forks -------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Keep other threads out of SQLite: locks that they hold would stay locked in the child."""
        if self._exclusive_lock.is_held_by_caller():
            return  # this thread uses SQLite, so no other thread does
        use = ExclusiveUse()
        with suppress(CatalogBusy):
            self._exclusive_lock.begin(use, timeout=_FORK_TIMEOUT_SECONDS)
            self._uses_during_fork[use.thread] = use

    def after_fork_in_parent(self) -> None:
        """Let other threads continue: end the use that this thread began before the fork."""
        use = self._uses_during_fork.pop(get_ident(), None)
        if use is not None:
            self._exclusive_lock.end(use)

    def after_fork_in_child(self) -> None:
        """Drop all connections: they belong to the parent process."""
        self._exclusive_lock = ExclusiveLock(str(self._path))
        self._uses_during_fork = {}
        for connection in self._connections.values():
            keep_forever(connection)
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


_MEMORY_NAME: Final = "the catalog in memory"


class MemoryDatabase:
    """A catalog in memory, which is lost when the process ends."""

    def __init__(self, source: object = None) -> None:
        """Copy `source` if it is a catalog file that can be read; otherwise create empty tables."""
        self._exclusive_lock = ExclusiveLock(_MEMORY_NAME)
        self._closed = False
        self._connection = connect_memory()
        if isinstance(source, FileDatabase):
            with suppress(CatalogDamaged, CatalogUnusable), source.read_transaction() as connection:
                connection.backup(self._connection)
                return
        create_tables(self._connection)

    @contextmanager
    def read_transaction(self) -> Iterator[Connection]:
        """Start a read transaction."""
        with self._exclusive_use():
            yield self._connection

    @contextmanager
    def write_transaction(self) -> Iterator[Connection]:
        """Start a write transaction: committed at the end, rolled back on any error."""
        with self._exclusive_use() as use:
            try:
                self._connection.execute("BEGIN")
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._exclusive_lock.is_active(use):
                    roll_back(self._connection)

    def rebuild(self) -> None:
        """Create empty tables."""
        with self._exclusive_use():
            self._connection.close()
            self._connection = connect_memory()
            create_tables(self._connection)

    def close(self) -> None:
        """Close the database. A thread that still uses the database gets CatalogUnusable."""
        with self._exclusive_lock.exclusive_use(timeout=_TIMEOUT_SECONDS):
            self._closed = True
            self._connection.close()

    @contextmanager
    def _exclusive_use(self) -> Iterator[ExclusiveUse]:
        """Block other threads. Raises CatalogBusy, and CatalogUnusable after `close`."""
        with self._exclusive_lock.exclusive_use(timeout=_TIMEOUT_SECONDS) as use:
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
"""Page cache size in KiB; small, because the operating system caches the file, too."""
_WRITE_CACHE_KB: Final = 64 * 1024
"""Page cache size in KiB during a write. If the changes fit, readers wait only for the commit."""

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
    try:
        for pragma in (f"cache_size = -{_CACHE_KB}", "synchronous = NORMAL", "mmap_size = 0"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def larger_page_cache(connection: Connection) -> Iterator[None]:
    """Enlarge the page cache of a connection during the `with` block."""
    connection.execute(f"PRAGMA cache_size = -{_WRITE_CACHE_KB}")
    try:
        yield
    finally:
        with suppress(sqlite3.Error):
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KB}")


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


def has_tables(connection: Connection) -> bool:
    """Return whether the tables exist and have this version. Raises sqlite3.Error."""
    try:
        rows = connection.run("version").fetchall()
    except sqlite3.OperationalError as error:
        if error_code(error) == sqlite3.SQLITE_ERROR:  # no such table
            return False
        raise
    return rows == [(VERSION,)]


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
