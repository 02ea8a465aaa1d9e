"""The index beside a JSONL store: a file `catalog.db` in the folder of the logs.

Any process may find it missing, of another version or damaged, and makes it anew. SQLite has no
checksums, so the file beside it, `catalog.db.lock`, tells which file the last writer left, how long
and of when: a database that was touched by anything else is not believed. While somebody writes,
the lock file says so; who finds that a writer died may rely on SQLite's journal.

One writer at a time holds the flock of that file, and only such a one makes or removes the
database, or puts it in order after a writer that died: a journal is known by its name alone, and
must never meet another database than its own. So who has no flock opens it to read only.
"""

import os
import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from stenolog.catalog.connections import (
    calibrations,
    code_of,
    connected,
    has_tables,
    keep_for_ever,
    make_tables,
    roll_back,
    sorted_out,
)
from stenolog.catalog.database import Broken, Row, Transaction, Unusable
from stenolog.catalog.lock import WRITING, Identity, LockFile, identity, left, set_mark
from stenolog.catalog.statements import statements

if TYPE_CHECKING:
    from stenolog.catalog.language import Language

NAME: Final = "catalog.db"
LOCK: Final = f"{NAME}.lock"
JOURNAL: Final = f"{NAME}-journal"

_PATIENCE: Final = 10.0
_FORK_PATIENCE: Final = 1.0
_MOST_RECOVERIES: Final = 10


class _Opened(Struct, frozen=True):
    """A connection, and which file it was made to."""

    connection: sqlite3.Connection
    identity: Identity


class FileDatabase:
    """The index in a file of its own."""

    def __init__(self, folder: Path, *, writable: bool = True, patience: float = _PATIENCE) -> None:
        self.sql = statements()
        self._path = folder / NAME
        self._journal = folder / JOURNAL
        self._lock = LockFile(folder / LOCK, patience=patience)
        self._writable = writable
        self._mutex = threading.Lock()
        self._connections: dict[str, _Opened] = {}
        """One to read ("ro"), one to write ("rw"), as far as they are made."""
        self._broken: Identity | None = None
        _databases.add(self)

    @property
    def language(self) -> "Language":
        """That of FTS5."""
        # Who only lists does not wait for it.
        from stenolog.catalog.fts5 import FTS5

        return FTS5()

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A look at the tables as they are at one moment."""
        with self._mutex:
            opened = self._begin_to_read()
            with self._sorted(opened):
                yield opened.connection

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A transaction of one's own: committed at the end, undone by any error."""
        with self._mutex, self._held() as lock:
            opened = self._ready_to_write()
            try:
                with self._sorted(opened):
                    opened.connection.execute("BEGIN IMMEDIATE")
                    set_mark(lock, WRITING)
                    yield opened.connection
                    opened.connection.execute("COMMIT")
            finally:
                if identity(self._path) == opened.identity:
                    set_mark(lock, left(self._path))
            if identity(self._path) != opened.identity:
                raise Broken(f"{self._path} was removed meanwhile")

    def renew(self) -> None:
        """Throw away what is broken, and make empty tables."""
        with self._mutex, self._held() as lock:
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
        path = self._path.with_name(f".{NAME}.new")
        for old in (path, path.with_name(f"{path.name}-journal")):
            with suppress(FileNotFoundError):
                old.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        # Closed before SQLite opens it: closing it later would take SQLite's locks away.
        os.close(os.open(path, flags, 0o600))
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
        """Let go of the file."""
        with self._mutex:
            self._disconnect()
            _databases.discard(self)

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
    def _sorted(self, opened: "_Opened") -> Iterator[None]:
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

    def _held(self) -> AbstractContextManager[int]:
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
        """Let nobody be inside SQLite: its locks would stay locked in the child."""
        self._paused = self._mutex.acquire(timeout=_FORK_PATIENCE)

    def after_fork_in_parent(self) -> None:
        """Go on."""
        if self._paused:
            self._mutex.release()

    def after_fork_in_child(self) -> None:
        """Begin anew: the connection belongs to the process that made it."""
        self._mutex = threading.Lock()
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
