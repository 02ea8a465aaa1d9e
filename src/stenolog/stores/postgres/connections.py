"""Connections to one server: made when they are needed, kept for the next, by no more than so many.

The caller connects, on its own time: so it hears why that failed, and after a failover nobody waits
for somebody else's next attempt.
"""

import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import psycopg
from msgspec import Struct
from psycopg import generators
from psycopg.adapt import AdaptersMap
from psycopg.pq import ExecStatus, Format
from psycopg.types.array import ListBinaryDumper
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper

from stenolog.errors import DamagedStore, NotStored, StoreBusy, StoreClosed, UsageError
from stenolog.stores.postgres.failures import Before, is_temporary
from stenolog.stores.postgres.rows import Clash

Row = tuple[Any, ...]
Connection = psycopg.Connection[Row]

_OPEN: Final = psycopg.pq.ConnStatus.OK
_IDLE: Final = psycopg.pq.TransactionStatus.IDLE
COMMAND_OK: Final = ExecStatus.COMMAND_OK
TUPLES_OK: Final = ExecStatus.TUPLES_OK
_MANY: Final = 100
_FOR_ONE: Final = ("token_pkey", "session_live", "session_uid", "lease_namespace_key_key")
"""What one of two who come at once can have: the other one asks again."""
_FRESH: Final = 0.2
"""A connection that was not used for so many seconds is looked at before it is used again."""

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
    """How values are sent: as bytes, and whole numbers as eight of them, whatever their size."""
    found = AdaptersMap(psycopg.adapters)
    found.register_dumper(int, Int8BinaryDumper)
    # As it is, and not with every quote escaped: a list of long texts took seconds.
    found.register_dumper(str, StrBinaryDumper)
    found.register_dumper(list, ListBinaryDumper)
    return found


class Transaction:
    """What can be done on a connection: in a transaction, or each statement as one by itself.

    It is kept with its connection and its cursor: to make a cursor takes as long as half a round
    trip. Not for two threads at once.
    """

    __slots__ = ("_cursor", "_ready", "connection", "peer", "since", "sql")

    def __init__(self, connection: Connection, sql: Mapping[str, bytes], peer: Peer) -> None:
        self.connection = connection
        """The driver's own, for what only that can do."""
        self.peer = peer
        """What is at the other end."""
        self.sql = sql
        """The statements by name."""
        self.since = 0.0
        """When it was last given back."""
        self._cursor = connection.cursor(binary=True)
        self._ready: set[str] = set()

    def run(self, name: str, *values: Any) -> list[Row]:
        """Carry out the statement of this name; its rows. Raises Clash."""
        cursor = self._cursor
        try:
            cursor.execute(self.sql[name], values)
        except psycopg.errors.UniqueViolation as error:
            raise _clash(error) from error
        found = cursor.fetchall() if cursor.description is not None else []
        if len(found) > _MANY:
            # It would keep what it fetched until it is used again.
            self._cursor = self.connection.cursor(binary=True)
        return found

    def run_ready(self, name: str, types: Sequence[int], values: Sequence[bytes]) -> bytes | None:
        """Carry out the statement of this name with values as they are sent; the one it gives.

        Past the cursor, which takes as long as half a round trip: for what is done all the time.
        Raises Before where it could not even be prepared.
        """
        if name in self._ready:
            try:
                return self._send(name, values)
            except psycopg.errors.InvalidSqlStatementName:
                # After a rollback the driver throws away all that was prepared.
                self._ready.clear()
        try:
            self.connection.pgconn.send_prepare(name.encode(), self.sql[name], types)
            self._result(COMMAND_OK)
        except psycopg.Error as error:
            raise Before(error) from error
        self._ready.add(name)
        return self._send(name, values)

    def _send(self, name: str, values: Sequence[bytes]) -> bytes | None:
        formats = [Format.BINARY] * len(values)
        pgconn = self.connection.pgconn
        pgconn.send_query_prepared(name.encode(), values, formats, Format.BINARY)
        result = self._result(TUPLES_OK)
        found: bytes | None = result.get_value(0, 0) if result.ntuples else None
        return found

    def _result(self, expected: ExecStatus) -> Any:
        # A server that ends the connection may answer first, and then say so.
        results = self.connection.wait(generators.execute(self.connection.pgconn))
        for result in results:
            if result.status != expected:
                raise psycopg.errors.error_from_result(result, "utf-8")
        return results[0]

    def copy_in(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Store many rows by the statement of this name. Raises Clash."""
        try:
            with self.connection.cursor() as cursor, cursor.copy(self.sql[name]) as copying:
                for row in rows:
                    copying.write_row(row)
        except psycopg.errors.UniqueViolation as error:
            raise _clash(error) from error

    def commit(self) -> None:
        """End a transaction so that it counts. Raises NotStored after an error in it."""
        cursor = self._cursor.execute(b"COMMIT")
        if cursor.statusmessage != "COMMIT":
            raise NotStored("an error within the transaction was passed over: nothing was stored")

    def execute(self, sql: bytes | str, values: Sequence[Any] = ()) -> Iterable[Row]:
        """Carry out one statement, with values for its places; its rows, if it has any."""
        cursor = self._cursor
        cursor.execute(_bytes(sql), values)
        return cursor.fetchall() if cursor.description is not None else ()

    def executemany(self, sql: bytes | str, rows: Iterable[Sequence[Any]]) -> None:
        """Carry out one statement for each row of values."""
        with self.connection.cursor() as cursor:
            cursor.executemany(_bytes(sql), list(rows))

    @property
    def is_usable(self) -> bool:
        """Whether the next one can use it: it is open, and nothing is under way."""
        connection = self.connection.pgconn
        return connection.status == _OPEN and connection.transaction_status == _IDLE


def _clash(error: psycopg.errors.UniqueViolation) -> Exception:
    """What it means that something stands there already."""
    if error.diag.constraint_name in _FOR_ONE:
        return Clash()
    return DamagedStore(
        f"the tables are not as they should be ({' '.join(str(error).split())}); "
        "`steno doctor` says what is wrong"
    )


def _bytes(sql: bytes | str) -> bytes:
    return sql if isinstance(sql, bytes) else sql.encode()


class Connections:
    """Taken and given back; `close` lets go of those that nobody uses, and of each that comes."""

    def __init__(self, settings: Settings, sql: Mapping[str, bytes]) -> None:
        self._settings = settings
        self._sql = sql
        self._adapters = adapters()
        self._defaults = defaults_for(settings.conninfo, read_only=settings.read_only)
        self._idle: deque[Transaction] = deque()
        self._freed = threading.Condition()
        self._taken = 0
        """How many there are, be they idle or not."""
        self._waiting = 0
        self._closed = False
        self.peer = Peer(pooled=False, weak=False)
        """As of the connection that was made last."""

    def take(self, deadline: float) -> Transaction:
        """One that nobody else uses. Raises StoreBusy, StoreClosed, psycopg.Error."""
        while True:
            if self._closed:
                raise StoreClosed("the store is closed")
            try:
                # Of a deque that is one step, and needs no lock.
                kept = self._idle.pop()
            except IndexError:
                if self._may_connect(deadline):
                    return self._another(deadline)
                continue
            if time.monotonic() - kept.since < _FRESH or not _has_news(kept.connection):
                return kept
            # What an unused connection has to say is that it ends.
            self._drop(kept)

    def give_back(self, kept: Transaction) -> None:
        """It can be used by the next one, unless it is broken."""
        if not kept.is_usable:
            self._drop(kept)
            return
        kept.since = time.monotonic()
        self._idle.append(kept)
        if self._waiting or self._closed:
            with self._freed:
                self._freed.notify()
            if self._closed:
                self._let_go()

    def _may_connect(self, deadline: float) -> bool:
        """Whether there may be one more; otherwise one was given back. Raises StoreBusy."""
        with self._freed:
            if self._taken < self._settings.connections:
                self._taken += 1
                return True
            self._waiting += 1
            try:
                # Whoever gives one back from now on sees that somebody waits.
                while not self._idle and self._taken >= self._settings.connections:
                    left = deadline - time.monotonic()
                    if self._closed:
                        return False
                    if left <= 0:
                        raise StoreBusy(
                            f"all {self._settings.connections} connections were in use for too "
                            "long; ?connections=NUMBER allows for more"
                        )
                    self._freed.wait(left)
            finally:
                self._waiting -= 1
        return False

    def _another(self, deadline: float) -> Transaction:
        try:
            return self.connect(deadline)
        except BaseException:
            self._one_less()
            raise

    def _drop(self, kept: Transaction) -> None:
        close(kept.connection)
        self._one_less()

    def _one_less(self) -> None:
        with self._freed:
            self._taken -= 1
            self._freed.notify()

    def connect(self, deadline: float) -> Transaction:
        """A new one, beyond all others unless `take` asked for it, for its caller to keep.

        A server that does not answer yet is asked again until then. Raises psycopg.Error,
        StoreClosed, UsageError.
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

    def _connect(self) -> Transaction:
        # A deadline for each host alone: of several, the first one may be cut off.
        connection: Connection = psycopg.connect(
            self._settings.conninfo,
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.RawCursor,
            context=self._adapters,
            # Whatever URL and environment say: what is sent is UTF-8.
            client_encoding="UTF8",
            **self._defaults,  # type: ignore[arg-type]
        )
        try:
            self.peer = peer = self._prepare(connection)
        except BaseException:
            close(connection)
            raise
        return Transaction(connection, self._sql, peer)

    def _prepare(self, connection: Connection) -> Peer:
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
        peer = Peer(pooled=pooled, weak=weak)
        if pooled:
            return peer
        connection.prepare_threshold = 1
        milliseconds = max(1, int(self._settings.busy_timeout * 1000))
        connection.execute(f"SET lock_timeout = {milliseconds}")
        connection.execute("SET default_transaction_isolation = 'read committed'")
        if weak:
            connection.execute("SET synchronous_commit = on")
        return peer

    def close(self) -> None:
        """Let go of them."""
        self._closed = True
        with self._freed:
            self._freed.notify_all()
        self._let_go()

    def _let_go(self) -> None:
        with suppress(IndexError):
            while True:
                self._drop(self._idle.pop())

    def forget(self) -> None:
        """Use none of those that are idle again: another server may be the right one by now."""
        self._let_go()

    def abandon(self, others: Iterable[Transaction]) -> None:
        """In a forked child: they belong to the parent, and to close one would end it there."""
        _PARENTS.extend([*self._idle, *others])


_PARENTS: Final[list[Transaction]] = []
"""Connections of the process that this one was forked from."""


def defaults_for(conninfo: str, *, read_only: bool) -> dict[str, str]:
    """What is said of a connection where the caller says nothing. Raises UsageError."""
    try:
        given = psycopg.conninfo.conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError as error:
        # Its words hold parts of the URL, which may be the password.
        words = " ".join(str(error).split())
        told = (
            words if "query parameter" in words else "the URL cannot be read; in user and password"
        )
        raise UsageError(
            f"postgresql: {told}"
            + ("" if told is words else " write %40 for @, %2F for / and %25 for %")
        ) from None
    if "@" in str(given.get("host") or ""):
        raise UsageError("postgresql: there is an @ in the host; in the password write %40 for it")
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


def close(connection: Connection) -> None:
    """End a connection, in whatever state it is."""
    with suppress(psycopg.Error, OSError):
        connection.close()
