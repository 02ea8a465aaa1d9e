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
    checked_version,
    close_quietly,
    connected,
)
from stenolog.stores.sqlite.database_file import Place
from stenolog.stores.sqlite.sqlite_errors import is_no_room_for_index
from stenolog.stores.sqlite.transactions import Transaction

READERS: Final = 8
_POLL: Final = 0.001
"""Poll interval of a thread that waits for a connection, in seconds."""


class Reader:
    """A read connection."""

    __slots__ = ("_file", "_stood", "_version", "connection")

    def __init__(self, file: Path, settings: Settings) -> None:
        self._file = file
        self._version = schema.newest()
        self._stood: _Stand | None = None
        """State of the file when it was opened as immutable; None if SQLite notices changes itself.
        """
        if settings.read_only:
            self.connection = self._connected(settings)
        else:
            # Writable, because a reader may have to recover the log after a crash.
            self.connection = connected(file, settings, apsw.SQLITE_OPEN_READWRITE)
        # Only writers checkpoint the log.
        self.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        schema.run(self.connection, "PRAGMA query_only = 1")

    def _connected(self, settings: Settings) -> apsw.Connection:
        stood = _stand(self._file)
        try:
            return connected(self._file, settings, apsw.SQLITE_OPEN_READONLY)
        except apsw.IOError as error:
            if not is_no_room_for_index(error) or _has_log(self._file):
                raise
        except (apsw.CantOpenError, apsw.ReadOnlyError) as error:
            if _has_log(self._file):
                raise StoreUnavailable(
                    f"{self._file} has a log beside it that cannot be read from here; read it "
                    "where the folder can be written, or close who writes to it"
                ) from error
        # No log exists and none can be created, so the file contains everything that was stored.
        self._stood = stood
        address = f"file:{quote(str(self._file))}?immutable=1"
        return connected(address, settings, apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)

    def begin(self) -> Transaction:
        """Begin a read transaction. Raises NewerFormat, apsw.Error."""
        connection = self.connection
        connection.execute("BEGIN")
        while (version := checked_version(connection, self._file)) != self._version:
            # The schema is older, or was migrated since.
            connection.execute("ROLLBACK")
            schema.show_as_newest(connection, version)
            self._version = version
            connection.execute("BEGIN")
        return Transaction(connection)

    def is_current(self) -> bool:
        """Return whether the connection sees all stored data. Raises OSError."""
        return self._stood is None or not (self._has_changed() or _has_log(self._file))

    def check(self) -> None:
        """Raise StoreUnavailable if the file changed during the read."""
        if self._stood is not None and self._has_changed():
            raise StoreUnavailable(f"{self._file} was written to while it was read; try again")

    def _has_changed(self) -> bool:
        return _stand(self._file) != self._stood

    def end(self) -> None:
        """End the transaction. Raises apsw.Error."""
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")


_Stand = tuple[int, int, int]


def _stand(file: Path) -> _Stand:
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

    __slots__ = ("__weakref__", "_counted")

    def __init__(self, counted: "set[weakref.ref[_Permit]]") -> None:
        self._counted = counted
        counted.add(weakref.ref(self, counted.discard))  # guard: sqlite-reader-permit

    def release(self) -> None:
        """End the permit; a second call does nothing."""
        self._counted.discard(weakref.ref(self))


class Readers:
    """A pool of read connections."""

    def __init__(self, place: Place, settings: Settings) -> None:
        self._place = place
        self._settings = settings
        self._permits: set[weakref.ref[_Permit]] = set()
        self._idle: list[Reader] = []
        self._closed = False
        self._paused = False

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """Lend a connection to one thread. Raises StoreBusy, apsw.Error, OSError."""
        permit = self._permit()
        try:
            self._place.check()
            reader = self._idle_reader() or Reader(self._place.path, self._settings)
            try:
                yield reader
            finally:
                self._give(reader)
        finally:
            permit.release()
            if self._closed:
                self.close()

    def _permit(self) -> _Permit:
        deadline = time.monotonic() + self._settings.busy_timeout
        while True:
            # Count first, then compare, so that two threads never both get the last permit.
            permit = _Permit(self._permits)
            if len(self._permits) <= READERS and not self._paused:
                return permit
            permit.release()
            if time.monotonic() >= deadline:
                raise StoreBusy(f"{self._place.path}: too many others read at once")
            time.sleep(_POLL)

    def _idle_reader(self) -> Reader | None:
        with suppress(IndexError):  # no idle connection
            while True:
                reader = self._idle.pop()
                if reader.is_current():
                    return reader
                close_quietly(reader.connection)
        return None

    def _give(self, reader: Reader) -> None:
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
