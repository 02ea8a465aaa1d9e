"""A pool of read connections, which replaces connections that see outdated data.

If SQLite cannot create a log next to the file (full or read-only disk), it reads the file as
immutable and does not notice changes. This module checks for them instead.
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

from stenolog.errors import StoreBusy, StoreUnavailable
from stenolog.stores.locks import keep_forever
from stenolog.stores.sqlite import schema
from stenolog.stores.sqlite.connections import (
    Settings,
    close_quietly,
    connect,
    read_version,
)
from stenolog.stores.sqlite.database_file import DatabasePath
from stenolog.stores.sqlite.sqlite_errors import is_no_space_for_index
from stenolog.stores.sqlite.transactions import Transaction

MAX_READERS: Final = 8
_POLL: Final = 0.001
"""Poll interval of a thread that waits for a connection, in seconds."""


class ReadConnection:
    """A read connection."""

    __slots__ = ("_file", "_opened_state", "_version", "connection")

    def __init__(self, file: Path, settings: Settings) -> None:
        self._file = file
        self._version = schema.newest_version()
        self._opened_state: _FileState | None = None
        """State of the file when it was opened as immutable; None if SQLite notices changes itself.
        """
        if settings.read_only:
            self.connection = self._connect_read_only(settings)
        else:
            # Writable, because a reader may have to recover the log after a crash.
            self.connection = connect(file, settings, apsw.SQLITE_OPEN_READWRITE)
        # Only writers checkpoint the log.
        self.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        schema.run_script(self.connection, "PRAGMA query_only = 1")

    def _connect_read_only(self, settings: Settings) -> apsw.Connection:
        opened_state = _file_state(self._file)
        try:
            return connect(self._file, settings, apsw.SQLITE_OPEN_READONLY)
        except apsw.IOError as error:
            if not is_no_space_for_index(error) or _has_log(self._file):
                raise
        except (apsw.CantOpenError, apsw.ReadOnlyError) as error:
            if _has_log(self._file):
                raise StoreUnavailable(
                    f"{self._file} has a write-ahead log that cannot be read here; open it "
                    "where the folder is writable, or close the process that writes to it"
                ) from error
        # No log exists and none can be created, so the file contains everything that was stored.
        self._opened_state = opened_state
        address = f"file:{quote(str(self._file))}?immutable=1"
        return connect(address, settings, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)

    def begin(self) -> Transaction:
        """Begin a read transaction. Raises NewerFormat, apsw.Error."""
        connection = self.connection
        connection.execute("BEGIN")
        while (version := read_version(connection, self._file)) != self._version:
            # The schema is older, or was migrated since.
            connection.execute("ROLLBACK")
            schema.show_as_newest(connection, version)
            self._version = version
            connection.execute("BEGIN")
        return Transaction(connection)

    def is_current(self) -> bool:
        """Return whether the connection sees all stored data. Raises OSError."""
        return self._opened_state is None or not (self._has_changed() or _has_log(self._file))

    def check(self) -> None:
        """Raise StoreUnavailable if the file changed during the read."""
        if self._opened_state is not None and self._has_changed():
            raise StoreUnavailable(f"{self._file} was changed while it was read; try again")

    def _has_changed(self) -> bool:
        return _file_state(self._file) != self._opened_state

    def end(self) -> None:
        """End the transaction. Raises apsw.Error."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")


_FileState = tuple[int, int, int]


def _file_state(file: Path) -> _FileState:
    found = os.lstat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _has_log(file: Path) -> bool:
    """Return whether the log contains data that is not yet in the database file."""
    try:
        return file.with_name(f"{file.name}-wal").stat().st_size > 0
    except FileNotFoundError:
        return False


class _Permit:
    """The right to use one connection. It ends with `release`, or when the object is freed.

    Ctrl-C may raise an exception between any two steps of a caller, also between acquiring a lock
    and the `try` after it. A permit that is lost that way has no reference left, so it no longer
    counts. No Python lock is involved that could stay locked.
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

    def __init__(self, place: DatabasePath, settings: Settings) -> None:
        self._path = place
        self._settings = settings
        self._permits: set[weakref.ref[_Permit]] = set()
        self._idle: list[ReadConnection] = []
        self._closed = False
        self._paused = False

    @contextmanager
    def reader(self) -> Iterator[ReadConnection]:
        """Lend a connection to one thread. Raises StoreBusy, apsw.Error, OSError."""
        permit = self._acquire_permit()
        try:
            self._path.check()
            reader = self._idle_reader() or ReadConnection(self._path.path, self._settings)
            try:
                yield reader
            finally:
                self._return(reader)
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
            time.sleep(_POLL)

    def _idle_reader(self) -> ReadConnection | None:
        with suppress(IndexError):  # no idle connection
            while True:
                reader = self._idle.pop()
                if reader.is_current():
                    return reader
                close_quietly(reader.connection)
        return None

    def _return(self, reader: ReadConnection) -> None:
        try:
            reader.end()
            self._idle.append(reader)
        except apsw.Error:
            close_quietly(reader.connection)

    def close(self) -> None:
        """Close the idle connections now, and the others when they are returned."""
        self._closed = True
        while self._idle:
            with suppress(IndexError):
                close_quietly(self._idle.pop().connection)

    def pause(self, seconds: float) -> None:
        """Stop lending connections, and wait until all are returned, up to `seconds`."""
        deadline = time.monotonic() + seconds
        self._paused = True
        while self._permits and time.monotonic() < deadline:
            time.sleep(_POLL)

    def resume(self) -> None:
        """Lend connections again."""
        self._paused = False

    def abandon(self) -> None:
        """In a forked child: keep the parent's connections open, without using them."""
        for reader in self._idle:
            keep_forever(reader.connection)
