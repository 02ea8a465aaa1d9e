"""The catalog in a file beside its store (stores/catalog_file.py), or in memory.

Any process may find it missing, of another version or damaged, and makes it again. SQLite has no
checksums, so the lock file beside it names the file that the last writer left, its length and its
time: a catalog that was changed by anything else is not used. During a write the lock file says so;
a process that finds that the writer died may rely on SQLite's journal.

One writer at a time holds the flock of that file, and only such a one makes or removes the
database, or puts it in order after a writer that died: a journal is known by its name alone, and
must never meet another database than its own. So who has no flock opens it to read only.
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

from stenolog.catalog.connections import (
    Exclusive,
    Use,
    calibrations,
    code_of,
    connected,
    has_tables,
    in_memory,
    make_tables,
    roll_back,
    room_to_write,
    sorted_out,
)
from stenolog.catalog.database import Broken, Busy, Row, Transaction, Unusable, statements
from stenolog.stores.catalog_file import journal_of, lock_of
from stenolog.stores.disk import Descriptor, open_descriptor
from stenolog.stores.locks import keep_for_ever

if TYPE_CHECKING:
    from stenolog.catalog.language import Language


WRITING: Final = b"writing"
"""Stands in the lock file while somebody writes, or died doing so."""

_POLL: Final = 0.002
_MARK_BYTES: Final = 80

Identity = tuple[int, int]
"""Device and inode: which file it is, whatever its name."""


class LockFile:
    """A file that is locked by who writes, and tells what they left."""

    def __init__(self, path: Path, *, patience: float) -> None:
        self._path = path
        self.patience = patience
        """How long to wait for other writers, in seconds."""

    @contextmanager
    def held(self) -> Iterator[Descriptor]:
        """The lock file, with its flock held. Raises Unusable."""
        try:
            lock = self._open()
        except BlockingIOError as error:
            raise Busy(f"{self._path}: others write all the time") from error
        except OSError as error:
            raise Unusable(f"{self._path}: {error.strerror}") from error
        try:
            yield lock
        except OSError as error:
            raise Unusable(f"{self._path}: {error.strerror}") from error
        finally:
            lock.release()

    def _open(self) -> Descriptor:
        """Return the lock file, locked."""
        deadline = time.monotonic() + self.patience
        while True:
            lock = open_descriptor(
                self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(lock)
                if (found.st_dev, found.st_ino) == identity(self._path):
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
        """What the last writer wrote; empty where there is none."""
        try:
            # A fifo of this name would keep whoever opens it waiting.
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
    """Write it into the lock file that is held. Raises OSError."""
    os.pwrite(lock, mark.ljust(_MARK_BYTES - 1) + b"\n", 0)


def left(path: Path) -> bytes:
    """What changes whenever a file is written to or replaced; empty where there is none."""
    try:
        found = path.lstat()
    except OSError:
        return b""
    return b"%d:%d:%d:%d" % (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def identity(path: Path) -> Identity | None:
    """Which file stands there; None where there is none. Raises Unusable."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise Unusable(f"{path}: something else stands in its place")
    return found.st_dev, found.st_ino


_PATIENCE: Final = 10.0
_FORK_PATIENCE: Final = 1.0
_MOST_RECOVERIES: Final = 10


class _Opened(Struct, frozen=True):
    """A connection, and which file it was made to."""

    connection: sqlite3.Connection
    identity: Identity


class FileDatabase:
    """The index in a file of its own."""

    def __init__(self, path: Path, *, writable: bool = True, patience: float = _PATIENCE) -> None:
        self.sql = statements()
        self._path = path
        self._journal = path.with_name(journal_of(path.name))
        self._lock = LockFile(path.with_name(lock_of(path.name)), patience=patience)
        self._writable = writable
        self._exclusive = Exclusive()
        self._paused: dict[int, Use] = {}
        """For each thread that is about to fork, what keeps others out of SQLite meanwhile."""
        self._connections: dict[str, _Opened] = {}
        """One to read ("ro"), one to write ("rw"), as far as they are made."""
        self._broken: Identity | None = None
        self._closed = False
        _databases.add(self)

    @property
    def language(self) -> "Language":
        """That of FTS5."""
        # Who only lists does not wait for it.
        from stenolog.catalog.language import FTS5

        return FTS5()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A look at the tables as they are at one moment."""
        with self._use() as use:
            opened = self._begin_to_read()
            with self._sorted(opened, use):
                yield opened.connection

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A transaction of one's own: committed at the end, undone by any error."""
        with self._use() as use, self._held() as lock:
            use.lock = lock
            opened = self._ready_to_write()
            try:
                with self._sorted(opened, use), room_to_write(opened.connection):
                    opened.connection.execute("BEGIN IMMEDIATE")
                    set_mark(lock, WRITING)
                    yield opened.connection
                    opened.connection.execute("COMMIT")
            finally:
                if self._exclusive.is_current(use) and identity(self._path) == opened.identity:
                    set_mark(lock, left(self._path))
            if identity(self._path) != opened.identity:
                raise Broken(f"{self._path} was removed meanwhile")

    def renew(self) -> None:
        """Throw away what is broken, and make empty tables."""
        with self._use() as use, self._held() as lock:
            use.lock = lock
            self._renew(lock)

    def _renew(self, lock: Descriptor) -> None:
        if self._broken is None or identity(self._path) != self._broken:
            # Somebody else may have made it anew already.
            with suppress(Broken):
                self._ready_to_write()
                return
        self._disconnect()
        try:
            growing = self._grown(self._calibrations())
            # Killed between any two of these, no database has another's journal.
            for path in (self._path, self._journal):
                with suppress(FileNotFoundError):
                    path.unlink()
            set_mark(lock, WRITING)
            growing.rename(self._path)
            set_mark(lock, left(self._path))
        except OSError as error:
            raise Unusable(f"{self._path} cannot be made anew: {error.strerror}") from error
        except sqlite3.Error as error:
            raise Unusable(f"{self._path} cannot be made anew: {error}") from error
        self._broken = None

    def _calibrations(self) -> list[Row]:
        """What only the old file knows, as far as it can be read."""
        if identity(self._path) is None:
            return []
        # Of a damaged file, the module cannot even read every error that SQLite tells of.
        with suppress(sqlite3.Error, UnicodeDecodeError):
            old = connected(self._path, "ro", patience=0)
            try:
                return calibrations(old)
            finally:
                old.close()
        return []

    def _grown(self, kept: Sequence[Row]) -> Path:
        """A database with empty tables but for what is kept, under another name."""
        path = self._path.with_name(f".{self._path.name}.new")
        for old in (path, path.with_name(journal_of(path.name))):
            with suppress(FileNotFoundError):
                old.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # Closed before SQLite opens it: closing it later would take SQLite's locks away.
        open_descriptor(path, flags).close()
        connection = connected(path, "rw", patience=self._lock.patience)
        try:
            make_tables(connection, kept)
        finally:
            connection.close()
        return path

    def copy_to(self, target: sqlite3.Connection) -> None:
        """Fill another database with all that is in this one."""
        with self.read() as source:
            assert isinstance(source, sqlite3.Connection), "it is one of ours"
            source.backup(target)

    def close(self) -> None:
        """Let go of the file for good: a thread that still wants it gets Unusable."""
        with self._exclusive.use(patience=self._lock.patience, what=str(self._path)):
            self._closed = True
            self._disconnect()
            _databases.discard(self)

    @contextmanager
    def _use(self) -> Iterator[Use]:
        """Keep other threads out. Raises Busy, and Unusable after `close`."""
        with self._exclusive.use(patience=self._lock.patience, what=str(self._path)) as use:
            if self._closed:
                raise Unusable(f"{self._path} is closed")
            for opened in self._connections.values():
                # A use that Ctrl-C interrupted may have left its transaction open.
                roll_back(opened.connection)
            yield use

    # --- connections -------------------------------------------------------------------------

    def _begin_to_read(self) -> "_Opened":
        """A transaction in which nothing can be written. Raises Broken, Unusable."""
        for _ in range(_MOST_RECOVERIES):
            try:
                opened = self._opened("ro")
                opened.connection.execute("BEGIN")
                # The lock is taken, and a journal looked for, with the first look.
                self._check(opened)
            except UnicodeDecodeError as error:
                self._let_go("ro")
                self._broken = identity(self._path)
                raise Broken(f"{self._path} holds what nobody wrote: {error}") from error
            except sqlite3.Error as error:
                self._let_go("ro")
                if code_of(error) & 0xFF != sqlite3.SQLITE_READONLY:
                    raise self._meaning(error) from error
                # A writer died, and who holds the lock can put that in order.
                with self._held():
                    self._ready_to_write()
            else:
                return opened
        raise Unusable(f"{self._path}: its writers die all the time")

    def _ready_to_write(self) -> "_Opened":
        """A connection that may write; only for who holds the lock. Raises Broken, Unusable."""
        try:
            opened = self._opened("rw")
            # If a writer died, this puts the database in order.
            self._check(opened)
        except sqlite3.Error as error:
            raise self._meaning(error) from error
        return opened

    def _check(self, opened: "_Opened") -> None:
        """Raises Broken where the tables are missing, or not those of this version."""
        if not has_tables(opened.connection):
            roll_back(opened.connection)
            self._broken = opened.identity
            raise Broken(f"{self._path} is of another version")

    def _opened(self, mode: str) -> "_Opened":
        """A connection to what stands at the path now, if that can be relied on.

        Raises sqlite3.Error.
        """
        found = identity(self._path)
        if found is None:
            self._disconnect()
            raise Broken(f"{self._path} is missing")
        if not self._untouched():
            self._broken = found
            raise Broken(f"{self._path} is not as its last writer left it")
        opened = self._connections.get(mode)
        if opened is None or opened.identity != found:
            self._let_go(mode)
            opened = _Opened(connected(self._path, mode, patience=self._lock.patience), found)
            self._connections[mode] = opened
        return opened

    @contextmanager
    def _sorted(self, opened: "_Opened", use: Use) -> Iterator[None]:
        """Whatever happens: no transaction stays open, and no error of SQLite's comes out."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._meaning(error, opened) from error
        except (ValueError, msgspec.MsgspecError) as error:
            # Whatever is read here was written here: what cannot be read is damaged.
            self._broken = opened.identity
            raise Broken(f"{self._path} holds what nobody wrote: {error}") from error
        finally:
            if self._exclusive.is_current(use):
                roll_back(opened.connection)

    def _meaning(self, error: sqlite3.Error, opened: "_Opened | None" = None) -> Broken | Unusable:
        found = sorted_out(error, f"{self._path}")
        at = identity(self._path)
        if at is None or (opened is not None and at != opened.identity):
            # It was taken away under our hands, and that may be all that is wrong.
            return Broken(str(found))
        if isinstance(found, Broken):
            self._broken = at
        return found

    def _let_go(self, mode: str) -> None:
        opened = self._connections.pop(mode, None)
        if opened is not None:
            opened.connection.close()

    def _disconnect(self) -> None:
        for mode in ("ro", "rw"):
            self._let_go(mode)

    # --- the lock and its mark ---------------------------------------------------------------

    def _held(self) -> AbstractContextManager[Descriptor]:
        """The lock, for who is going to write. Raises Unusable."""
        if not self._writable:
            raise Unusable(f"{self._path} is only read")
        return self._lock.held()

    def _untouched(self) -> bool:
        """Whether the database is as its last writer left it, or somebody is writing."""
        while True:
            mark = self._lock.mark()
            if mark in (WRITING, left(self._path)):
                return True
            if mark == self._lock.mark():
                return False

    # --- forks -------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Keep other threads out of SQLite: its locks would stay locked in the child."""
        if self._exclusive.is_mine():
            return  # then no other thread is inside
        use = Use()
        with suppress(Busy):
            self._exclusive.begin(use, patience=_FORK_PATIENCE, what=str(self._path))
            self._paused[use.thread] = use

    def after_fork_in_parent(self) -> None:
        """Let other threads continue; several may fork at once."""
        use = self._paused.pop(get_ident(), None)
        if use is not None:
            self._exclusive.end(use)

    def after_fork_in_child(self) -> None:
        """Begin anew: the connection belongs to the process that made it."""
        self._exclusive = Exclusive()
        self._paused = {}
        for opened in self._connections.values():
            keep_for_ever(opened.connection)
        self._connections = {}


_databases: "weakref.WeakSet[FileDatabase]" = weakref.WeakSet()


def _each(do: Callable[[FileDatabase], None]) -> Callable[[], None]:
    def all_of_them() -> None:
        for database in list(_databases):
            do(database)

    return all_of_them


os.register_at_fork(
    before=_each(FileDatabase.before_fork),
    after_in_parent=_each(FileDatabase.after_fork_in_parent),
    after_in_child=_each(FileDatabase.after_fork_in_child),
)


# --- in memory ------------------------------------------------------------------------------------


_MEMORY_PATIENCE: Final = 10.0
"""Seconds to wait for other threads."""


class MemoryDatabase:
    """Tables that are gone with the process."""

    def __init__(self, source: object = None) -> None:
        """Begin with what a file has, as far as that is of use, else with empty tables."""
        self.sql = statements()
        self._exclusive = Exclusive()
        self._closed = False
        self._connection = in_memory()
        if isinstance(source, FileDatabase):
            with suppress(Broken, Unusable):
                source.copy_to(self._connection)
                return
        make_tables(self._connection)

    @property
    def language(self) -> "Language":
        """That of FTS5."""
        # Who only lists does not wait for it.
        from stenolog.catalog.language import FTS5

        return FTS5()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A look at the tables."""
        with self._use():
            yield self._connection

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A transaction: committed at the end, undone by any error."""
        with self._use() as use:
            try:
                self._connection.execute("BEGIN")
                yield self._connection
                self._connection.execute("COMMIT")
            finally:
                if self._exclusive.is_current(use):
                    roll_back(self._connection)

    def renew(self) -> None:
        """Begin with empty tables."""
        with self._use():
            self._connection.close()
            self._connection = in_memory()
            make_tables(self._connection)

    def close(self) -> None:
        """Let go of the memory for good: a thread that still wants it gets Unusable."""
        with self._exclusive.use(patience=_MEMORY_PATIENCE, what="the index in memory"):
            self._closed = True
            self._connection.close()

    @contextmanager
    def _use(self) -> Iterator[Use]:
        """Keep other threads out. Raises Busy, and Unusable after `close`."""
        with self._exclusive.use(patience=_MEMORY_PATIENCE, what="the index in memory") as use:
            if self._closed:
                raise Unusable("the index in memory is closed")
            try:
                # A use that Ctrl-C interrupted may have left its transaction open.
                roll_back(self._connection)
                yield use
            except sqlite3.Error as error:
                raise sorted_out(error, "the index in memory") from error
