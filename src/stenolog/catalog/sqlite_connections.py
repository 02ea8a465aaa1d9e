"""Connections to SQLite databases, and the meaning of their errors."""

import math
import os
import sqlite3
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import Final, Literal

from stenolog.catalog.catalog_database import (
    VERSION,
    CatalogBusy,
    CatalogDamaged,
    CatalogUnusable,
    Row,
    schema,
    statements,
)
from stenolog.stores.disk import Descriptor
from stenolog.stores.locks import ThreadLock

# --- exclusive ------------------------------------------------------------------------------------
# Exclusive use of a connection by one thread at a time, which survives Ctrl-C.
#
# KeyboardInterrupt may be raised between any two steps, even directly after a lock is acquired. So
# a use is an object: it ends when it is marked as ended or when it is garbage-collected. A
# traceback may keep it alive, as in a notebook; then the thread that started it takes it over at
# its next call, and other threads wait no longer than their patience.


_CHECK_INTERVAL: Final = 0.01
"""Seconds until a waiting thread checks again if no other thread has woken it."""
_STALE: Final = 0.2
"""Seconds without a check after which a waiting thread loses its place in the queue."""


class ExclusiveUse:
    """One use, by the thread that creates it."""

    __slots__ = ("__weakref__", "checked", "ended", "lock", "process", "thread", "wakeup")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.process = os.getpid()
        self.ended = False
        self.lock: Descriptor | None = None
        """The lock file that it holds, if it writes."""
        self.wakeup: SimpleQueue[None] = SimpleQueue()
        """Wakes the thread while it waits. It is written in C, so Ctrl-C leaves it usable."""
        self.checked = 0.0
        """Monotonic time at which the thread last checked whether it may start."""


class ExclusiveLock:
    """A lock that allows one use at a time, in the order in which the threads asked."""

    def __init__(self) -> None:
        # Held only briefly, and by `with`, which acquires it in one step.
        self._guard = ThreadLock()
        self._current: weakref.ref[ExclusiveUse] | None = None
        self._waiting: deque[weakref.ref[ExclusiveUse]] = deque()

    @contextmanager
    def use(self, *, timeout: float, what: str) -> Iterator[ExclusiveUse]:
        """Start a use, and end it with the block. Raises CatalogBusy after `timeout` seconds."""
        use = ExclusiveUse()
        try:
            self.begin(use, timeout=timeout, what=what)
            yield use
        finally:
            self.end(use)

    def begin(self, use: ExclusiveUse, *, timeout: float, what: str) -> None:
        """Wait until no other use is active. Raises CatalogBusy after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._take(use):
            if time.monotonic() > deadline:
                raise CatalogBusy(f"another thread used {what} for too long")
            with suppress(Empty):
                use.wakeup.get(timeout=_CHECK_INTERVAL)

    def end(self, use: ExclusiveUse) -> None:
        """Mark a use as ended and wake the thread that has waited longest."""
        use.ended = True
        if self._waiting:
            with self._guard:
                first = self._first_waiting()
            if first is not None:
                first.wakeup.put(None)

    def is_current(self, use: ExclusiveUse) -> bool:
        """Whether this use is active. A use that was taken over must not clean up."""
        return self._running() is use

    def is_mine(self) -> bool:
        """Whether this thread started the active use."""
        running = self._running()
        return running is not None and running.thread == get_ident()

    def _take(self, use: ExclusiveUse) -> bool:
        with self._guard:
            use.checked = time.monotonic()
            running = self._running()
            if running is None:
                # Otherwise a thread that returns at once would keep all others out.
                if self._first_waiting() not in (None, use):
                    return self._queue(use)
                if self._waiting:
                    self._waiting.popleft()
            elif running.thread != use.thread:
                return self._queue(use)
            elif running.lock is not None:
                # Interrupted, and kept alive by a traceback, so no finalizer closes it.
                running.lock.close()
            self._current = weakref.ref(use)
            return True

    def _queue(self, use: ExclusiveUse) -> Literal[False]:
        if all(waiting() is not use for waiting in self._waiting):
            self._waiting.append(weakref.ref(use))
        return False

    def _first_waiting(self) -> ExclusiveUse | None:
        """Return the use that has waited longest. Drop abandoned ones."""
        now = time.monotonic()
        while self._waiting:
            first = self._waiting[0]()
            if first is not None and not first.ended and now - first.checked < _STALE:
                return first
            self._waiting.popleft()
        return None

    def _running(self) -> ExclusiveUse | None:
        running = self._current() if self._current is not None else None
        if running is None or running.ended or running.process != os.getpid():
            return None  # threads of the parent do not exist in a forked child
        return running


# --- connections ----------------------------------------------------------------------------------


_CACHE_KB: Final = 2 * 1024
"""Page cache of a connection; more would only duplicate the cache of the operating system."""
_WRITE_CACHE_KB: Final = 64 * 1024
"""Page cache during a write transaction: if it fits, readers wait only for the commit."""

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
    connection = sqlite3.connect(
        f"file:{_escaped(path)}?mode={mode}",
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
    """Give a connection the page cache of a write transaction until the block ends."""
    connection.execute(f"PRAGMA cache_size = -{_WRITE_CACHE_KB}")
    try:
        yield
    finally:
        with suppress(sqlite3.Error):
            connection.execute(f"PRAGMA cache_size = -{_CACHE_KB}")


def _escaped(path: Path) -> str:
    """Escape a path for the URI of a database."""
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def connect_memory() -> sqlite3.Connection:
    """Connect to a new empty database in memory."""
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


def create_tables(connection: sqlite3.Connection, calibration_rows: Sequence[Row] = ()) -> None:
    """Create empty tables of this version with these calibrations, in one transaction."""
    connection.execute("BEGIN IMMEDIATE")
    *tables, about = schema()
    for statement in tables:
        connection.execute(statement)
    connection.execute(about, (VERSION,))
    connection.executemany(statements()["calibrate"], calibration_rows)
    connection.execute("COMMIT")


def read_calibrations(connection: sqlite3.Connection) -> list[Row]:
    """Return the valid calibrations of tables of any version. Raises sqlite3.Error."""
    return [
        (model, ratio, weight)
        for model, ratio, weight in connection.execute(statements()["calibrations"])
        if isinstance(model, str) and is_calibration(ratio, weight)
    ]


def is_calibration(ratio: object, weight: object) -> bool:
    """Whether these are valid values of `tokens.Calibration`; other values are damage."""
    if not isinstance(ratio, float) or not isinstance(weight, float):
        return False
    # No estimate is off by more.
    return 0.01 <= ratio <= 100 and 0 <= weight < math.inf


def has_tables(connection: sqlite3.Connection) -> bool:
    """Whether the tables exist and have this version. Raises sqlite3.Error."""
    try:
        found = connection.execute(statements()["version"]).fetchall()
    except sqlite3.OperationalError as error:
        if error_code(error) == sqlite3.SQLITE_ERROR:  # no such table
            return False
        raise
    return found == [(VERSION,)]


def roll_back(connection: sqlite3.Connection) -> None:
    """Roll back an open transaction."""
    if connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def convert_error(error: sqlite3.Error, what: str) -> CatalogDamaged | CatalogUnusable:
    """Convert an SQLite error: what it means for a catalog that can be built again."""
    code = error_code(error)
    if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return CatalogBusy(f"{what}: {error}")
    if code != sqlite3.SQLITE_IOERR_SHORT_READ and code & 0xFF in _UNUSABLE_CODES:
        return CatalogUnusable(f"{what}: {error} ({getattr(error, 'sqlite_errorname', '')})")
    return CatalogDamaged(f"{what}: {error}")


def error_code(error: sqlite3.Error) -> int:
    """Return the extended error code. Errors of the Python module itself have none."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code
