"""The catalog in a file next to its store (stores/catalog_file.py), or in memory.

Any process may find the file missing, outdated or damaged, and builds it again. SQLite has no
checksums, so a lock file records the identity, size and time of the database after the last write:
a catalog that any other program changed is not used. During a write the lock file says so; if the
writer died, SQLite's journal restores the database.

A writer holds the flock of the lock file. Only the writer creates or removes the database, or
recovers it after another writer died: a journal is identified by its name alone, and must never be
applied to another database. So processes without the flock open the database read-only.
"""

import fcntl
import os
import sqlite3
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from stenolog.catalog.catalog_database import (
    CatalogBusy,
    CatalogDamaged,
    CatalogUnusable,
    Row,
    Transaction,
    statements,
)
from stenolog.catalog.sqlite_connections import (
    ExclusiveLock,
    ExclusiveUse,
    connect_file,
    connect_memory,
    convert_error,
    create_tables,
    error_code,
    has_tables,
    read_calibrations,
    roll_back,
    write_cache,
)
from stenolog.stores.catalog_file import journal_name, lock_name
from stenolog.stores.disk import Descriptor, open_descriptor
from stenolog.stores.locks import keep_forever

if TYPE_CHECKING:
    from stenolog.catalog.query import FullTextDialect


WRITING: Final = b"writing"
"""Content of the lock file during a write, or after a writer died."""

_POLL: Final = 0.002
_MARK_BYTES: Final = 80

Identity = tuple[int, int]
"""Device and inode, which identify a file regardless of its name."""


class LockFile:
    """A file that the writer locks, and that records the state after the last write."""

    def __init__(self, path: Path, *, timeout: float) -> None:
        self._path = path
        self.timeout = timeout
        """Maximum number of seconds to wait for other writers."""

    @contextmanager
    def locked(self) -> Iterator[Descriptor]:
        """Lock the file, and yield it. Raises CatalogUnusable."""
        try:
            lock = self._open()
        except BlockingIOError as error:
            raise CatalogBusy(f"{self._path}: other processes held it for too long") from error
        except OSError as error:
            raise CatalogUnusable(f"{self._path}: {error.strerror}") from error
        try:
            yield lock
        except OSError as error:
            raise CatalogUnusable(f"{self._path}: {error.strerror}") from error
        finally:
            lock.release()

    def _open(self) -> Descriptor:
        """Return the lock file, locked."""
        deadline = time.monotonic() + self.timeout
        while True:
            lock = open_descriptor(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(lock)
                if (found.st_dev, found.st_ino) == file_identity(self._path):
                    return lock
            except BlockingIOError:
                if time.monotonic() > deadline:
                    lock.close()
                    raise
            except BaseException:
                lock.close()
                raise
            lock.close()
            time.sleep(_POLL)

    def mark(self) -> bytes:
        """Return the content that the last writer left; empty if there is none."""
        try:
            # Opening a fifo with this name would block.
            lock = open_descriptor(
                self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except OSError:
            return b""
        try:
            if not stat.S_ISREG(os.fstat(lock).st_mode):
                return b""
            return os.pread(lock, _MARK_BYTES, 0).rstrip()
        finally:
            lock.close()


def set_mark(lock: int, mark: bytes) -> None:
    """Write the mark to the lock file, whose flock is held. Raises OSError."""
    os.pwrite(lock, mark.ljust(_MARK_BYTES - 1) + b"\n", 0)


def file_stamp(path: Path) -> bytes:
    """Return a value that changes with every write or replacement; empty without a file."""
    try:
        found = path.lstat()
    except OSError:
        return b""
    return b"%d:%d:%d:%d" % (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def file_identity(path: Path) -> Identity | None:
    """Return the identity of the file at this path, or None. Raises CatalogUnusable."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CatalogUnusable(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise CatalogUnusable(f"{path}: it is not a regular file")
    return found.st_dev, found.st_ino


_LOCK_TIMEOUT: Final = 10.0
_FORK_TIMEOUT: Final = 1.0
_MAX_RECOVERIES: Final = 10


class _OpenFile(Struct, frozen=True):
    """A connection, and the identity of its file."""

    connection: sqlite3.Connection
    identity: Identity


class FileDatabase:
    """The catalog in a separate file."""

    def __init__(
        self, path: Path, *, writable: bool = True, timeout: float = _LOCK_TIMEOUT
    ) -> None:
        self.sql = statements()
        self._path = path
        self._journal = path.with_name(journal_name(path.name))
        self._lock = LockFile(path.with_name(lock_name(path.name)), timeout=timeout)
        self._writable = writable
        self._exclusive = ExclusiveLock()
        self._paused: dict[int, ExclusiveUse] = {}
        """By thread: the use that keeps other threads out of SQLite during its fork."""
        self._connections: dict[str, _OpenFile] = {}
        """Open connections: for reading ("ro") and for writing ("rw")."""
        self._broken: Identity | None = None
        self._closed = False
        _databases.add(self)

    @property
    def fulltext(self) -> "FullTextDialect":
        """The query language of FTS5."""
        # Imported on demand: a list does not need it.
        from stenolog.catalog.query import FTS5

        return FTS5()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Start a read transaction, which sees a consistent state of the tables."""
        with self._use() as use:
            opened = self._begin_read()
            with self._converted_errors(opened, use):
                yield opened.connection

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """Start a write transaction: committed at the end, rolled back on any error."""
        with self._use() as use, self._locked() as lock:
            use.lock = lock
            opened = self._write_connection()
            try:
                with self._converted_errors(opened, use), write_cache(opened.connection):
                    opened.connection.execute("BEGIN IMMEDIATE")
                    set_mark(lock, WRITING)
                    yield opened.connection
                    opened.connection.execute("COMMIT")
            finally:
                if self._exclusive.is_current(use) and file_identity(self._path) == opened.identity:
                    set_mark(lock, file_stamp(self._path))
            if file_identity(self._path) != opened.identity:
                raise CatalogDamaged(f"{self._path} was removed during the write")

    def rebuild(self) -> None:
        """Discard the file if it is broken, and create empty tables."""
        with self._use() as use, self._locked() as lock:
            use.lock = lock
            self._rebuild(lock)

    def _rebuild(self, lock: Descriptor) -> None:
        if self._broken is None or file_identity(self._path) != self._broken:
            # Another process may have created it already.
            with suppress(CatalogDamaged):
                self._write_connection()
                return
        self._disconnect()
        try:
            growing = self._create_new(self._calibrations())
            # A kill between any two of these steps leaves no database with another one's journal.
            for path in (self._path, self._journal):
                with suppress(FileNotFoundError):
                    path.unlink()
            set_mark(lock, WRITING)
            growing.rename(self._path)
            set_mark(lock, file_stamp(self._path))
        except OSError as error:
            raise CatalogUnusable(f"{self._path} cannot be rebuilt: {error.strerror}") from error
        except sqlite3.Error as error:
            raise CatalogUnusable(f"{self._path} cannot be rebuilt: {error}") from error
        self._broken = None

    def _calibrations(self) -> list[Row]:
        """Return the calibrations of the old file, if it is readable. Nothing else has them."""
        if file_identity(self._path) is None:
            return []
        # In a damaged file, even error messages of SQLite may not be decodable.
        with suppress(sqlite3.Error, UnicodeDecodeError):
            old = connect_file(self._path, "ro", timeout=0)
            try:
                return read_calibrations(old)
            finally:
                old.close()
        return []

    def _create_new(self, calibration_rows: Sequence[Row]) -> Path:
        """Create a database with empty tables and these calibrations, under a temporary name."""
        path = self._path.with_name(f".{self._path.name}.new")
        for old in (path, path.with_name(journal_name(path.name))):
            with suppress(FileNotFoundError):
                old.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # Closed before SQLite opens it: closing it later would release SQLite's locks.
        open_descriptor(path, flags).close()
        connection = connect_file(path, "rw", timeout=self._lock.timeout)
        try:
            create_tables(connection, calibration_rows)
        finally:
            connection.close()
        return path

    def copy_to(self, target: sqlite3.Connection) -> None:
        """Copy all tables to another database."""
        with self.read() as source:
            assert isinstance(source, sqlite3.Connection), "it is one of ours"
            source.backup(target)

    def close(self) -> None:
        """Close the connections. A thread that still uses the catalog gets Unusable."""
        with self._exclusive.use(timeout=self._lock.timeout, what=str(self._path)):
            self._closed = True
            self._disconnect()
            _databases.discard(self)

    @contextmanager
    def _use(self) -> Iterator[ExclusiveUse]:
        """Keep other threads out. Raises CatalogBusy, and CatalogUnusable after `close`."""
        with self._exclusive.use(timeout=self._lock.timeout, what=str(self._path)) as use:
            if self._closed:
                raise CatalogUnusable(f"{self._path} is closed")
            for opened in self._connections.values():
                # A use that Ctrl-C interrupted may have left its transaction open.
                roll_back(opened.connection)
            yield use

    # --- connections -------------------------------------------------------------------------

    def _begin_read(self) -> "_OpenFile":
        """Start a read-only transaction. Raises CatalogDamaged, CatalogUnusable."""
        for _ in range(_MAX_RECOVERIES):
            try:
                opened = self._opened("ro")
                opened.connection.execute("BEGIN")
                # The first read takes SQLite's lock and checks for a journal.
                self._check(opened)
            except UnicodeDecodeError as error:
                self._close_connection("ro")
                self._broken = file_identity(self._path)
                raise CatalogDamaged(f"{self._path} contains invalid data: {error}") from error
            except sqlite3.Error as error:
                self._close_connection("ro")
                if error_code(error) & 0xFF != sqlite3.SQLITE_READONLY:
                    raise self._convert_error(error) from error
                # A writer died; only the holder of the lock can recover the database.
                with self._locked():
                    self._write_connection()
            else:
                return opened
        raise CatalogUnusable(f"{self._path} cannot be recovered: its writers keep dying")

    def _write_connection(self) -> "_OpenFile":
        """Return a writable connection. The caller holds the lock.

        Raises CatalogDamaged, CatalogUnusable.
        """
        try:
            opened = self._opened("rw")
            # If a writer died, this recovers the database.
            self._check(opened)
        except sqlite3.Error as error:
            raise self._convert_error(error) from error
        return opened

    def _check(self, opened: "_OpenFile") -> None:
        """Raise Broken if the tables are missing or have another version."""
        if not has_tables(opened.connection):
            roll_back(opened.connection)
            self._broken = opened.identity
            raise CatalogDamaged(f"{self._path} has another version")

    def _opened(self, mode: str) -> "_OpenFile":
        """Return a connection to the current file if it is unchanged since the last write.

        Raises sqlite3.Error.
        """
        found = file_identity(self._path)
        if found is None:
            self._disconnect()
            raise CatalogDamaged(f"{self._path} is missing")
        if not self._is_unchanged():
            self._broken = found
            raise CatalogDamaged(f"{self._path} was changed by another program")
        opened = self._connections.get(mode)
        if opened is None or opened.identity != found:
            self._close_connection(mode)
            opened = _OpenFile(connect_file(self._path, mode, timeout=self._lock.timeout), found)
            self._connections[mode] = opened
        return opened

    @contextmanager
    def _converted_errors(self, opened: "_OpenFile", use: ExclusiveUse) -> Iterator[None]:
        """Convert errors of SQLite, and leave no transaction open."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._convert_error(error, opened) from error
        except (ValueError, msgspec.MsgspecError) as error:
            # All data here was written by this class: unreadable data is damaged.
            self._broken = opened.identity
            raise CatalogDamaged(f"{self._path} contains invalid data: {error}") from error
        finally:
            if self._exclusive.is_current(use):
                roll_back(opened.connection)

    def _convert_error(
        self, error: sqlite3.Error, opened: "_OpenFile | None" = None
    ) -> CatalogDamaged | CatalogUnusable:
        found = convert_error(error, f"{self._path}")
        at = file_identity(self._path)
        if at is None or (opened is not None and at != opened.identity):
            # The file was removed during the call, which may be the only problem.
            return CatalogDamaged(str(found))
        if isinstance(found, CatalogDamaged):
            self._broken = at
        return found

    def _close_connection(self, mode: str) -> None:
        opened = self._connections.pop(mode, None)
        if opened is not None:
            opened.connection.close()

    def _disconnect(self) -> None:
        for mode in ("ro", "rw"):
            self._close_connection(mode)

    # --- the lock and its mark ---------------------------------------------------------------

    def _locked(self) -> AbstractContextManager[Descriptor]:
        """Lock for writing. Raises CatalogUnusable."""
        if not self._writable:
            raise CatalogUnusable(f"{self._path} was opened read-only")
        return self._lock.locked()

    def _is_unchanged(self) -> bool:
        """Whether the database is as its last writer left it, or a write is in progress."""
        while True:
            mark = self._lock.mark()
            if mark in (WRITING, file_stamp(self._path)):
                return True
            if mark == self._lock.mark():
                return False

    # --- forks -------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Keep other threads out of SQLite: its locks would stay locked in the child."""
        if self._exclusive.is_mine():
            return  # then no other thread is inside
        use = ExclusiveUse()
        with suppress(CatalogBusy):
            self._exclusive.begin(use, timeout=_FORK_TIMEOUT, what=str(self._path))
            self._paused[use.thread] = use

    def after_fork_in_parent(self) -> None:
        """Let other threads continue. Several threads may fork at the same time."""
        use = self._paused.pop(get_ident(), None)
        if use is not None:
            self._exclusive.end(use)

    def after_fork_in_child(self) -> None:
        """Drop all connections: they belong to the parent process."""
        self._exclusive = ExclusiveLock()
        self._paused = {}
        for opened in self._connections.values():
            keep_forever(opened.connection)
        self._connections = {}


_databases: "weakref.WeakSet[FileDatabase]" = weakref.WeakSet()


def _for_each_database(do: Callable[[FileDatabase], None]) -> Callable[[], None]:
    def all_of_them() -> None:
        for database in list(_databases):
            do(database)

    return all_of_them


os.register_at_fork(
    before=_for_each_database(FileDatabase.before_fork),
    after_in_parent=_for_each_database(FileDatabase.after_fork_in_parent),
    after_in_child=_for_each_database(FileDatabase.after_fork_in_child),
)


# --- in memory ------------------------------------------------------------------------------------


_MEMORY_TIMEOUT: Final = 10.0
"""Maximum number of seconds to wait for other threads."""


class MemoryDatabase:
    """A catalog in memory, which ends with the process."""

    def __init__(self, source: object = None) -> None:
        """Start with a copy of a catalog file if it is usable, or else with empty tables."""
        self.sql = statements()
        self._exclusive = ExclusiveLock()
        self._closed = False
        self._connection = connect_memory()
        if isinstance(source, FileDatabase):
            with suppress(CatalogDamaged, CatalogUnusable):
                source.copy_to(self._connection)
                return
        create_tables(self._connection)

    @property
    def fulltext(self) -> "FullTextDialect":
        """The query language of FTS5."""
        # Imported on demand: a list does not need it.
        from stenolog.catalog.query import FTS5

        return FTS5()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Start a read."""
        with self._use():
            yield self._connection

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """Start a write transaction: committed at the end, rolled back on any error."""
        with self._use() as use:
            try:
                self._connection.execute("BEGIN")
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._exclusive.is_current(use):
                    roll_back(self._connection)

    def rebuild(self) -> None:
        """Create empty tables."""
        with self._use():
            self._connection.close()
            self._connection = connect_memory()
            create_tables(self._connection)

    def close(self) -> None:
        """Close the database. A thread that still uses it gets Unusable."""
        with self._exclusive.use(timeout=_MEMORY_TIMEOUT, what="the catalog in memory"):
            self._closed = True
            self._connection.close()

    @contextmanager
    def _use(self) -> Iterator[ExclusiveUse]:
        """Keep other threads out. Raises CatalogBusy, and CatalogUnusable after `close`."""
        with self._exclusive.use(timeout=_MEMORY_TIMEOUT, what="the catalog in memory") as use:
            if self._closed:
                raise CatalogUnusable("the catalog in memory is closed")
            try:
                # A use that Ctrl-C interrupted may have left its transaction open.
                roll_back(self._connection)
                yield use
            except sqlite3.Error as error:
                raise convert_error(error, "the catalog in memory") from error
