"""Connections to one server: made when they are needed, kept for the next, by no more than so many.

The caller connects, on its own time: so it hears why that failed, and after a failover nobody waits
for somebody else's next attempt.
"""

import select
import threading
import time
from contextlib import suppress
from typing import Any, Final

import psycopg
from msgspec import Struct
from psycopg.adapt import AdaptersMap
from psycopg.types.numeric import Int8BinaryDumper

from stenolog.errors import StoreBusy, StoreClosed, UsageError
from stenolog.stores.postgres.failures import is_temporary

Connection = psycopg.Connection[tuple[Any, ...]]

_RETRY: Final = 0.05
_DEFAULTS: Final = {
    "application_name": "stenolog",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    # In milliseconds: a server that is cut off is given up, though nobody says that it is gone.
    "tcp_user_timeout": "15000",
}
_ABOUT: Final = (
    "SELECT pg_backend_pid(), current_setting('synchronous_commit'), "
    "current_setting('server_encoding'), current_setting('server_version_num')::int8"
)
_OLDEST: Final = 140000


class Settings(Struct, frozen=True, kw_only=True):
    """How a database is reached."""

    conninfo: str
    schema: str = "stenolog"
    read_only: bool = False
    busy_timeout: float = 5.0
    connections: int = 16


class Peer(Struct, frozen=True):
    """What was found at the other end of a connection."""

    pooled: bool
    """A pooler stands between: each transaction may meet another process of the server."""
    weak: bool
    """Commits there are not synced unless that is asked for."""


def adapters() -> AdaptersMap:
    """How values are sent: whole numbers as such of eight bytes, whatever their size."""
    found = AdaptersMap(psycopg.adapters)
    found.register_dumper(int, Int8BinaryDumper)
    return found


class Connections:
    """Taken and given back; `close` lets go of those that nobody uses, and of each that comes."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._adapters = adapters()
        self._defaults = defaults_for(settings.conninfo, read_only=settings.read_only)
        self._mutex = threading.Lock()
        self._places = threading.BoundedSemaphore(settings.connections)
        self._idle: list[Connection] = []
        self._closed = False
        self.peer = Peer(pooled=False, weak=False)
        """As of the connection that was made last."""

    def take(self, deadline: float) -> Connection:
        """One that nobody else uses. Raises StoreBusy, StoreClosed, psycopg.Error."""
        if not self._places.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreBusy(
                f"all {self._settings.connections} connections were in use for too long; "
                "?connections=NUMBER allows for more"
            )
        try:
            return self._kept() or self.connect(deadline)
        except BaseException:
            self._places.release()
            raise

    def give_back(self, connection: Connection) -> None:
        """It can be used by the next one, unless it is broken."""
        usable = (
            not connection.closed
            and connection.pgconn.transaction_status == psycopg.pq.TransactionStatus.IDLE
        )
        with self._mutex:
            if usable and not self._closed:
                self._idle.append(connection)
                connection = None  # type: ignore[assignment]
        self._places.release()
        if connection is not None:
            _close(connection)

    def _kept(self) -> Connection | None:
        while True:
            with self._mutex:
                if self._closed:
                    raise StoreClosed("the store is closed")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not _has_news(connection):
                return connection
            # What an unused connection has to say is that it ends.
            _close(connection)

    def connect(self, deadline: float) -> Connection:
        """A new one; a server that does not answer yet is asked again until then.

        Raises psycopg.Error, StoreClosed, UsageError.
        """
        while True:
            if self._closed:
                raise StoreClosed("the store is closed")
            try:
                return self._connect()
            except psycopg.OperationalError as error:
                if not is_temporary(error) or time.monotonic() + _RETRY > deadline:
                    raise
            time.sleep(_RETRY)

    def _connect(self) -> Connection:
        # A deadline for each host alone: of several, the first one may be cut off.
        connection: Connection = psycopg.connect(
            self._settings.conninfo,
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.RawCursor,
            context=self._adapters,
            **self._defaults,  # type: ignore[arg-type]
        )
        try:
            self._prepare(connection)
        except BaseException:
            _close(connection)
            raise
        return connection

    def _prepare(self, connection: Connection) -> None:
        [(process, commit, encoding, version)] = connection.execute(_ABOUT)
        if encoding != "UTF8":
            raise UsageError(
                f"the database's encoding is {encoding}, and UTF8 is needed; make another one "
                "with createdb --encoding=UTF8 --template=template0"
            )
        if version < _OLDEST:
            raise UsageError(f"the server's version is {version // 10000}; 14 or newer is needed")
        weak = commit == "off"
        pooled = process != connection.pgconn.backend_pid
        self.peer = Peer(pooled=pooled, weak=weak)
        if pooled:
            return
        connection.prepare_threshold = 1
        milliseconds = max(1, int(self._settings.busy_timeout * 1000))
        connection.execute(f"SET lock_timeout = {milliseconds}")
        if weak:
            connection.execute("SET synchronous_commit = on")

    def close(self) -> None:
        """Let go of them."""
        with self._mutex:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            _close(connection)

    def abandon(self) -> None:
        """In a forked child: they belong to the parent, and to close one would end it there."""
        _PARENTS.extend(self._idle)


_PARENTS: Final[list[Connection]] = []
"""Connections of the process that this one was forked from."""


def defaults_for(conninfo: str, *, read_only: bool) -> dict[str, str]:
    """What is said of a connection where the caller says nothing. Raises UsageError."""
    try:
        given = psycopg.conninfo.conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError as error:
        raise UsageError(f"postgresql: {' '.join(str(error).split())}") from error
    found = {name: value for name, value in _DEFAULTS.items() if given.get(name) is None}
    hosts = str(given.get("host") or given.get("hostaddr") or "")
    if "," in hosts and not read_only and given.get("target_session_attrs") is None:
        # Of several servers the one that takes writes.
        found["target_session_attrs"] = "read-write"
    return found


def _has_news(connection: Connection) -> bool:
    if connection.closed:
        return True
    poll = select.poll()
    try:
        poll.register(connection.fileno(), select.POLLIN)
    except (psycopg.Error, ValueError):
        return True
    return bool(poll.poll(0))


def _close(connection: Connection) -> None:
    with suppress(psycopg.Error, OSError):
        connection.close()
