"""The connections of a database: one write connection, and a pool of read connections.

A read-only connection opens the file as immutable if SQLite must not create files next to it
(`leave_no_files`) or cannot (full or read-only disk). SQLite does not notice changes of an
immutable file. So this module checks the file for changes, and the pool replaces connections that
see outdated data.
"""

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

import apsw
from msgspec import Struct

from stenolog.errors import StenologError, StoreBusy, StoreUnavailable
from stenolog.stores import log_reports
from stenolog.stores.catalog_file import delete_catalogs
from stenolog.stores.locks import keep_forever
from stenolog.stores.sqlite.database_file import (
    DatabasePath,
    check_schema,
    create_file,
    empty_database,
    read_header,
    rename_orphaned_log,
    run_script,
)
from stenolog.stores.sqlite.gate import ProcessLock
from stenolog.stores.sqlite.sqlite_errors import (
    commit_failure,
    is_no_space_for_index,
    write_failure,
)
from stenolog.stores.sqlite.transactions import Transaction

SYNCHRONOUS_LEVELS: Final = {"full": "FULL", "normal": "NORMAL"}  # guard: sqlite-synchronous-full
"""SQLite's levels. With NORMAL, a power cut may lose the last commits, but no other data."""

_CHECKPOINT_PAGES: Final = 1_000  # growth of the write-ahead log between two checkpoints
_LOG_RESTART_PAGES: Final = 16_000  # for a longer log, a checkpoint waits for readers
_CHECKPOINT_WAIT_SECONDS: Final = 0.25  # maximum wait of a checkpoint for readers
_BUSY_POLL_SECONDS: Final = 0.002


class Settings(Struct, frozen=True, kw_only=True):
    """Options with which a database is opened."""

    read_only: bool = False
    leave_no_files: bool = False
    """With `read_only`: do not let SQLite create or change any file."""
    busy_timeout: float = 5.0
    synchronous: str = "full"
    cache_kb: int = 2048


class WriteConnection:
    """The write connection, used only by the thread whose turn it is."""

    def __init__(self, path: DatabasePath, settings: Settings) -> None:
        self._path = path
        self._file = path.path
        self._settings = settings
        self._lock = ProcessLock(self._file)
        self._connection: apsw.Connection | None = None
        self.is_entered = False
        """Whether a thread has called `enter` and not yet `leave`."""
        self.lock_waits = 0
        """Number of times that SQLite itself had to wait for a lock of another program."""
        self.deadline = 0.0
        """Value of `time.monotonic` until which the current thread may wait for other programs."""
        self.commit_attempted = False
        """Whether a commit of the last transaction was attempted."""
        self._data_version = -1
        self._log_pages = 0
        self._next_checkpoint_pages = _CHECKPOINT_PAGES

    def prepare_database(self, deadline: float) -> None:
        """Create the database if the file does not exist."""
        try:
            self._lock.lock(deadline)
            if not read_header(self._file):
                rename_orphaned_log(self._file)  # guard: sqlite-foreign-log-set-aside
                # Delete the catalogs of a removed database, because they quote its messages.
                delete_catalogs(self._file, seconds=max(0.0, deadline - time.monotonic()))
                create_file(self._file, empty_database())
            self.enter(deadline)
        finally:
            self.leave()

    def enter(self, deadline: float) -> apsw.Connection:
        """Acquire the gate and return the connection. Raises StoreBusy, apsw.Error, OSError."""
        self.deadline = deadline
        self.is_entered = True
        self._lock.lock(deadline)
        self._path.check_same_file()
        return self._connection or self._connect()

    def begin(self, deadline: float) -> Transaction:
        """Begin a transaction. Raises StoreBusy, NewerFormat, apsw.Error, OSError."""
        self.commit_attempted = False
        connection = self.enter(deadline)
        connection.execute("BEGIN IMMEDIATE")
        # A newer program may have changed the tables since this connection's last commit.
        if connection.data_version() != self._data_version:  # guard: sqlite-newer-schema-refused
            check_tables(connection, self._file)
        return Transaction(connection)

    def commit(self) -> None:
        """Commit the transaction durably. Raises apsw.Error."""
        connection = self._connection
        assert connection is not None, "a transaction is open"
        self.commit_attempted = True
        connection.execute("COMMIT")
        self._data_version = connection.data_version()
        if self._log_pages >= self._next_checkpoint_pages:
            self._checkpoint(connection)

    @property
    def is_committed(self) -> bool:
        """Whether the last transaction was committed, provided that SQLite raised no error."""
        connection = self._connection
        return self.commit_attempted and connection is not None and not connection.in_transaction

    def convert_error(self, error: Exception) -> StenologError:
        """Return the StenologError to raise for a failed transaction."""
        action = f"writing {self._file}"
        connection = self._connection
        if (
            self.commit_attempted
            and connection is not None
            and not isinstance(error, StenologError)
        ):
            failure = commit_failure(error, action, system_errno=connection.system_errno)
            self._close_connection()
        else:
            failure = write_failure(error, action)
        if failure is not error:
            failure.__cause__ = error
        return failure

    def leave(self) -> None:
        """Roll back an open transaction and release the gate. A second call does nothing."""
        try:
            connection = self._connection
            if connection is not None and connection.in_transaction:
                connection.execute("ROLLBACK")
        except apsw.Error:
            self._close_connection()
        finally:
            self._lock.unlock()
            self.is_entered = False

    def _checkpoint(self, connection: apsw.Connection) -> None:
        """Checkpoint the write-ahead log into the database; a failure only costs disk space."""
        pages = self._log_pages
        mode = apsw.SQLITE_CHECKPOINT_PASSIVE
        if pages >= _LOG_RESTART_PAGES:
            # Overlapping readers prevent a restart of the log: wait for these readers.
            mode = apsw.SQLITE_CHECKPOINT_RESTART  # guard: sqlite-log-bounded
        self.deadline = time.monotonic() + _CHECKPOINT_WAIT_SECONDS
        try:
            connection.wal_checkpoint(mode=mode)
        except apsw.BusyError:
            pass
        except apsw.Error as error:
            log_reports.warning("%s: the log could not be checkpointed: %s", self._file, error)
        self._next_checkpoint_pages = pages + _CHECKPOINT_PAGES

    def _connect(self) -> apsw.Connection:
        connection = connect(self._file, self._settings, apsw.SQLITE_OPEN_READWRITE)
        try:
            connection.set_busy_handler(self._on_busy)
            connection.set_wal_hook(self._on_log_growth)
            level = SYNCHRONOUS_LEVELS[self._settings.synchronous]
            run_script(connection, f"PRAGMA synchronous = {level}; PRAGMA fullfsync = 1")
            run_script(connection, "PRAGMA foreign_keys = ON; PRAGMA journal_mode = WAL")
            check_tables(connection, self._file)
            # A killed writer may have left unsynced transactions in the write-ahead log, and the
            # next connection that opens the log treats these transactions as committed. So sync
            # the log before any read.
            # guard: sqlite-checkpoint-leftover-log
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except BaseException:
            close_quietly(connection)
            raise
        self._data_version = -1
        self._log_pages, self._next_checkpoint_pages = 0, _CHECKPOINT_PAGES
        self._connection = connection
        return connection

    def _on_busy(self, _attempts: int) -> bool:
        """Wait briefly for a lock; return False after the deadline.

        SQLite calls this method only if another program writes or uses the log.
        """
        self.lock_waits += 1
        if time.monotonic() >= self.deadline:
            return False
        time.sleep(_BUSY_POLL_SECONDS)
        return True

    def _on_log_growth(self, _connection: apsw.Connection, _name: str, pages: int) -> int:
        if pages < self._log_pages:
            self._next_checkpoint_pages = _CHECKPOINT_PAGES
        self._log_pages = pages
        return apsw.SQLITE_OK

    def _close_connection(self) -> None:
        """Close the connection; the next write opens a new connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            close_quietly(connection)

    def close(self) -> None:
        """Close the connection and the gate."""
        self._close_connection()
        self._lock.close()

    def abandon_in_child(self) -> None:
        """In a forked child: keep the parent's connection open, without using it."""
        if self._connection is not None:
            keep_forever(self._connection)
        self._lock.close()


def connect(file: Path | str, settings: Settings, flags: int) -> apsw.Connection:
    """Open a connection and make it read the file. Raises apsw.Error."""
    connection = apsw.Connection(str(file), flags=flags | apsw.SQLITE_OPEN_NOFOLLOW)
    # Set the timeout before the first read: another process may be recovering the log.
    connection.set_busy_timeout(int(settings.busy_timeout * 1000))
    run_script(connection, f"PRAGMA cache_size = -{settings.cache_kb}")
    return connection


def close_quietly(connection: apsw.Connection) -> None:
    """Close a connection and ignore errors, which no longer matter."""
    with suppress(apsw.Error):
        connection.close()


def check_tables(connection: apsw.Connection, file: Path) -> None:
    """Raise NewerFormat if the database has other tables than this code creates."""
    # `connection.pragma` takes twice as long, and every read calls this function.
    [(found,)] = connection.execute("PRAGMA user_version")
    check_schema(found, file)


# --- read connections ------------------------------------------------------------------------


MAX_READERS: Final = 8
"""Maximum number of connections that are lent at the same time."""
_PERMIT_POLL_SECONDS: Final = 0.001
"""Poll interval of a thread that waits for a connection, in seconds."""


class ReadConnection:
    """A connection for one read transaction at a time."""

    def __init__(self, file: Path, settings: Settings) -> None:
        self._file = file
        self._opened_state: _FileState | None = None
        """Inode, size and mtime of a file opened as immutable; None if SQLite notices changes."""
        if settings.read_only:
            self.connection = self._connect_read_only(settings)
        else:
            # Open the file as writable, because a reader may have to recover the log after a crash.
            self.connection = connect(file, settings, apsw.SQLITE_OPEN_READWRITE)
        # Only writers checkpoint the log.
        self.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        run_script(self.connection, "PRAGMA query_only = 1")

    def _connect_read_only(self, settings: Settings) -> apsw.Connection:
        opened_state = _read_file_state(self._file)
        try:
            if not settings.leave_no_files:
                return connect(self._file, settings, apsw.SQLITE_OPEN_READONLY)
            if _has_log(self._file):
                # A normal reader would create the index of the log (`-shm`) and write to it.
                address = f"file:{quote(str(self._file))}?readonly_shm=1"
                return connect(address, settings, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
        except apsw.IOError as error:
            if not is_no_space_for_index(error) or _has_log(self._file):
                raise
        except (apsw.CantOpenError, apsw.ReadOnlyError) as error:
            if _has_log(self._file):
                raise StoreUnavailable(
                    f"{self._file} has a write-ahead log that cannot be read here; open it "
                    "where the folder is writable, or close the process that writes to it"
                ) from error
        # There is no log with data, so the file contains all stored data.
        self._opened_state = opened_state
        address = f"file:{quote(str(self._file))}?immutable=1"
        return connect(address, settings, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)

    def begin(self) -> Transaction:
        """Begin a read transaction. Raises NewerFormat, apsw.Error."""
        self.connection.execute("BEGIN")
        check_tables(self.connection, self._file)
        return Transaction(self.connection)

    def is_current(self) -> bool:
        """Return whether the connection sees all stored data. Raises OSError."""
        return self._opened_state is None or not (self._has_changed() or _has_log(self._file))

    def check_unchanged(self) -> None:
        """Raise StoreUnavailable if the file changed during the read."""
        if self._opened_state is not None and self._has_changed():
            raise StoreUnavailable(f"{self._file} was changed while it was read; try again")

    def _has_changed(self) -> bool:
        return _read_file_state(self._file) != self._opened_state


_FileState = tuple[int, int, int]


def _read_file_state(file: Path) -> _FileState:
    status = os.lstat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _has_log(file: Path) -> bool:
    """Return whether the write-ahead log may contain data that is not in the database file."""
    try:
        return file.with_name(f"{file.name}-wal").stat().st_size > 0
    except FileNotFoundError:
        return False


class _Permit:
    """The right to use one connection. The right ends with `release`, or when the object is freed.

    Ctrl-C may raise an exception between any two steps of a caller, even between acquiring a lock
    and the `try` that follows. A permit that Ctrl-C makes unreachable is freed, so it no longer
    counts. A Python lock could stay locked, so permits use no lock.
    """

    __slots__ = ("__weakref__", "_active")

    def __init__(self, active: "set[weakref.ref[_Permit]]") -> None:
        self._active = active
        active.add(weakref.ref(self, active.discard))  # guard: sqlite-reader-permit

    def release(self) -> None:
        """End the permit; a second call does nothing."""
        self._active.discard(weakref.ref(self))


class ReadPool:
    """A pool of read connections."""

    def __init__(self, path: DatabasePath, settings: Settings) -> None:
        self._path = path
        self._settings = settings
        self._permits: set[weakref.ref[_Permit]] = set()
        self._idle: list[ReadConnection] = []
        self._closed = False
        self._paused = False

    @contextmanager
    def lend_reader(self) -> Iterator[ReadConnection]:
        """Lend a connection to one thread. Raises StoreBusy, apsw.Error, OSError."""
        permit = self._acquire_permit()
        try:
            self._path.check_same_file()
            reader = self._take_idle_reader() or ReadConnection(self._path.path, self._settings)
            try:
                yield reader
            finally:
                self._return_reader(reader)
        finally:
            permit.release()
            if self._closed:
                self.close()

    def _acquire_permit(self) -> _Permit:
        deadline = time.monotonic() + self._settings.busy_timeout
        while True:
            # Count first, then compare, so that two threads never both get the last permit.
            permit = _Permit(self._permits)
            if len(self._permits) <= MAX_READERS and not self._paused:
                return permit
            permit.release()
            if time.monotonic() >= deadline:
                raise StoreBusy(f"{self._path.path}: too many reads at once")
            time.sleep(_PERMIT_POLL_SECONDS)

    def _take_idle_reader(self) -> ReadConnection | None:
        with suppress(IndexError):  # no idle connection
            while True:
                reader = self._idle.pop()
                if reader.is_current():
                    return reader
                close_quietly(reader.connection)
        return None

    def _return_reader(self, reader: ReadConnection) -> None:
        try:
            if reader.connection.in_transaction:
                reader.connection.execute("ROLLBACK")
            self._idle.append(reader)
        except apsw.Error:
            close_quietly(reader.connection)

    def close(self) -> None:
        """Close the idle connections now, and each lent connection when it is returned."""
        self._closed = True
        while self._idle:
            with suppress(IndexError):
                close_quietly(self._idle.pop().connection)

    def pause_lending(self, seconds: float) -> None:
        """Stop lending connections, and wait up to `seconds` until all are returned."""
        deadline = time.monotonic() + seconds
        self._paused = True
        while self._permits and time.monotonic() < deadline:
            time.sleep(_PERMIT_POLL_SECONDS)

    def resume_lending(self) -> None:
        """Lend connections again."""
        self._paused = False

    def abandon_in_child(self) -> None:
        """In a forked child: keep the parent's connections open, without using them."""
        for reader in self._idle:
            keep_forever(reader.connection)
