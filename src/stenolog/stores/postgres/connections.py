"""A pool of connections to one server, opened on demand, up to a maximum number.

Each caller opens the connection that it needs, and gets the error if connecting fails. So after a
failover, no caller waits for the attempt of another caller.
"""

import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

import psycopg
from msgspec import Struct
from psycopg import waiting
from psycopg.adapt import AdaptersMap
from psycopg.types.array import ListBinaryDumper
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper

from stenolog.errors import StoreBusy, StoreClosed, UsageError
from stenolog.stores.postgres.postgres_errors import is_temporary
from stenolog.stores.postgres.transactions import PoolSlot, ServerProperties, Transaction
from stenolog.stores.sql.dialect import Row

T = TypeVar("T")

_CHECK_AFTER_SECONDS: Final = 0.2
"""Seconds after which an idle connection is checked before it is used again."""

_RETRY_SECONDS: Final = 0.05
"""Seconds between two attempts to connect."""
_RECHECK_SECONDS: Final = 0.05
"""Seconds after which a waiting caller looks for a free connection, even without a wake-up."""
_MAINTENANCE_FACTOR: Final = 10
"""Factor by which vacuum and migration extend the answer timeout."""
_PG_DEFAULTS: Final = {
    "application_name": "stenolog",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    # Milliseconds after which the kernel gives up a connection to an unreachable server.
    "tcp_user_timeout": "15000",
}
_SERVER_QUERY: Final = (
    "SELECT pg_backend_pid(), current_setting('synchronous_commit'), "
    "current_setting('server_encoding'), current_setting('server_version_num')::int8"
)
_MIN_SERVER_VERSION: Final = 140000
_INVALID_URL_TEXT: Final = (
    "postgresql: the URL is invalid; in user and password write %40 for @, %2F for / and %25 for %"
)


class Settings(Struct, frozen=True, kw_only=True):
    """Options with which a database is opened."""

    conninfo: str
    schema: str = "stenolog"
    read_only: bool = False
    busy_timeout: float = 5.0
    connections: int = 16
    answer_timeout: float = 30.0


class NoAnswer(psycopg.OperationalError):
    """The server accepted a statement but did not answer in time."""


class Connection(psycopg.Connection[Row]):
    """A connection that closes itself if the server does not answer."""

    answer_timeout = Settings(conninfo="").answer_timeout
    """Seconds without data from the server after which a statement fails."""

    def wait(self, gen: Generator[Any, Any, T], *options: Any, **named: Any) -> T:
        """Run `gen`, which waits for the server's answer. Raises NoAnswer after the timeout."""
        try:
            # The call passes no `timeout`, because psycopg 3.2 does not have that keyword.
            return super().wait(_run_with_timeout(gen, self.answer_timeout), *options, **named)
        except NoAnswer:
            # The answer may still arrive, and the next caller must not receive this answer.
            self.pgconn.finish()
            raise

    @contextmanager
    def maintenance(self) -> Iterator[None]:
        """Give the server more time, for statements that rewrite tables."""
        normal_timeout = self.answer_timeout
        self.answer_timeout = normal_timeout * _MAINTENANCE_FACTOR
        try:
            yield
        finally:
            self.answer_timeout = normal_timeout


def _run_with_timeout(gen: Generator[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
    """Run `gen`, and raise NoAnswer if no data was ready for `seconds`."""
    deadline = time.monotonic() + seconds
    try:
        events = next(gen)
        while True:
            ready = yield events
            # Data that has arrived counts, even if this process was suspended past the deadline.
            events = gen.send(ready)
            if ready != waiting.READY_NONE:
                deadline = time.monotonic() + seconds
            elif time.monotonic() > deadline:
                # guard: postgres-silent-server
                raise NoAnswer(f"the server did not answer a statement within {seconds:g} s")
    except StopIteration as done:
        result: T = done.value
        return result


def binary_adapters() -> AdaptersMap:
    """Return the adapters that send values in binary, and all integers as eight bytes."""
    adapters = AdaptersMap(psycopg.adapters)
    adapters.register_dumper(int, Int8BinaryDumper)
    # Send texts without escaping: with escaped quotes, a list of long texts took seconds.
    adapters.register_dumper(str, StrBinaryDumper)
    adapters.register_dumper(list, ListBinaryDumper)
    return adapters


class ConnectionPool:
    """A pool of connections to one server.

    An interrupt (Ctrl-C) may strike between any two steps of the pool. Therefore the pool keeps no
    counter. The pool uses no lock whose methods are written in Python, because an interrupt could
    leave the lock locked.
    """

    def __init__(self, settings: Settings, sql: Mapping[str, bytes]) -> None:
        self._settings = settings
        self._sql = sql
        self._adapters = binary_adapters()
        self._defaults = default_parameters(settings.conninfo, read_only=settings.read_only)
        self._idle: deque[Transaction] = deque()
        self._mutex = threading.Lock()
        self._slots: list[weakref.ref[PoolSlot]] = []
        self._waiting: deque[None] = deque()
        """One entry for each waiting caller; interrupted callers may leave their entries."""
        self._freed: SimpleQueue[None] = SimpleQueue()
        self._closed = False

    def acquire(self, deadline: float) -> Transaction:
        """Return a connection that no other caller uses.

        Raises StoreBusy, StoreClosed, psycopg.Error.
        """
        while True:
            if self._closed:
                raise StoreClosed("the store is closed")
            try:
                # `pop` is atomic on a deque, so no lock is needed.
                idle = self._idle.pop()
            except IndexError:
                slot = self._new_slot()
                if slot is not None:
                    return self._connect_in_slot(slot, deadline)
                self._wait_for_connection(deadline)
                continue
            if time.monotonic() - idle.returned_at < _CHECK_AFTER_SECONDS or not _has_unread_data(
                idle.connection
            ):
                return idle
            # An idle connection has unread data only if the server has closed the connection.
            self._close_connection(idle)

    def release(self, transaction: Transaction) -> None:
        """Keep a connection for the next caller, unless it is broken."""
        if not transaction.is_usable:
            self._close_connection(transaction)
            return
        transaction.returned_at = time.monotonic()
        self._idle.append(transaction)
        self._wake_waiting_caller()
        if self._closed:
            self.close_idle()

    def _new_slot(self) -> PoolSlot | None:
        """Return a slot for another connection; None if the maximum is reached."""
        with self._mutex:
            slots = [ref for ref in self._slots if (slot := ref()) is not None and not slot.is_free]
            self._slots = slots
            if len(slots) >= self._settings.connections:
                return None
            slot = PoolSlot()
            slots.append(weakref.ref(slot))
            return slot

    def _wait_for_connection(self, deadline: float) -> None:
        """Wait until a connection may be free. Raises StoreBusy."""
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise StoreBusy(
                f"all {self._settings.connections} connections were in use for too "
                "long; raise the limit with ?connections=NUMBER"
            )
        self._waiting.append(None)
        try:
            self._freed.get(timeout=min(remaining, _RECHECK_SECONDS))
        except Empty:
            pass
        finally:
            with suppress(IndexError):
                self._waiting.pop()

    def _wake_waiting_caller(self) -> None:
        if self._waiting and self._freed.qsize() < len(self._waiting):
            self._freed.put(None)

    def _connect_in_slot(self, slot: PoolSlot, deadline: float) -> Transaction:
        try:
            return self._connect_until(slot, deadline)
        except BaseException:
            # Free the slot now, because the exception may keep this frame and its slot alive.
            slot.is_free = True
            self._wake_waiting_caller()
            raise

    def _close_connection(self, transaction: Transaction) -> None:
        close(transaction.connection)
        transaction.slot.is_free = True
        self._wake_waiting_caller()

    def _connect_until(self, slot: PoolSlot, deadline: float) -> Transaction:
        """Open a new connection; retry until the deadline if the server does not answer yet.

        Raises psycopg.Error, StoreClosed, UsageError.
        """
        while True:
            if self._closed:
                raise StoreClosed("the store is closed")
            try:
                return self._connect(slot)
            except psycopg.OperationalError as error:
                if not is_temporary(error) or time.monotonic() + _RETRY_SECONDS > deadline:
                    raise
            time.sleep(_RETRY_SECONDS)

    def _connect(self, slot: PoolSlot) -> Transaction:
        # Of several hosts, each unreachable host delays the call by at most `connect_timeout`.
        connection = Connection.connect(
            self._settings.conninfo,
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.RawCursor,
            context=self._adapters,
            # This option overrides URL and environment: all data is sent as UTF-8.
            client_encoding="UTF8",
            **self._defaults,  # type: ignore[arg-type]
        )
        # The server may wait for locks, up to busy_timeout, before it answers a statement.
        connection.answer_timeout = self._settings.busy_timeout + self._settings.answer_timeout
        try:
            server = self._configure(connection)
        except BaseException:
            close(connection)
            raise
        return Transaction(connection, self._sql, server, slot)

    def _configure(self, connection: Connection) -> ServerProperties:
        [(server_pid, synchronous_commit, encoding, version)] = connection.execute(_SERVER_QUERY)
        if encoding != "UTF8":
            raise UsageError(
                f"the database has the encoding {encoding}, but UTF8 is required; create another "
                "one with createdb --encoding=UTF8 --template=template0"
            )
        if version < _MIN_SERVER_VERSION:
            raise UsageError(f"the server has version {version // 10000}; 14 or newer is required")
        asynchronous_commit = synchronous_commit == "off"
        has_pooler = server_pid != connection.pgconn.backend_pid
        server = ServerProperties(has_pooler=has_pooler, asynchronous_commit=asynchronous_commit)
        if has_pooler:
            return server
        connection.prepare_threshold = 1
        timeout_ms = max(1, int(self._settings.busy_timeout * 1000))
        connection.execute(f"SET lock_timeout = {timeout_ms}")
        connection.execute("SET default_transaction_isolation = 'read committed'")
        if asynchronous_commit:
            # guard: postgres-synchronous-commit-on
            connection.execute("SET synchronous_commit = on")
        return server

    def close(self) -> None:
        """Close the idle connections now, and each lent connection when it is returned."""
        self._closed = True
        self.close_idle()

    def close_idle(self) -> None:
        """Close the idle connections, for example because another server accepts writes now."""
        with suppress(IndexError):
            while True:
                self._close_connection(self._idle.pop())

    def abandon_in_child(self) -> None:
        """In a forked child: keep the parent's connections open, because the parent uses them."""
        _PARENT_CONNECTIONS.extend(self._idle)


_PARENT_CONNECTIONS: Final[list[Transaction]] = []
"""Connections of the parent process, kept open in a forked child."""


def default_parameters(conninfo: str, *, read_only: bool) -> dict[str, str]:
    """Return values for the connection parameters that `conninfo` omits. Raises UsageError."""
    try:
        parameters = psycopg.conninfo.conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError as error:
        # Show only messages about a query parameter: others may contain parts of the password.
        message = " ".join(str(error).split())
        if "query parameter" in message:
            raise UsageError(f"postgresql: {message}") from None
        raise UsageError(_INVALID_URL_TEXT) from None
    if "@" in str(parameters.get("host") or ""):
        raise UsageError("postgresql: there is an @ in the host; in the password write %40 for it")
    ports = str(parameters.get("port") or "").split(",")
    has_at_in_database = "@" in str(parameters.get("dbname") or "") and "%40" not in conninfo
    if has_at_in_database or not all(port.isdigit() for port in ports if port):
        # If the password contains a /, the driver reads parts of it as port and database name.
        raise UsageError(_INVALID_URL_TEXT)
    defaults = {name: value for name, value in _PG_DEFAULTS.items() if parameters.get(name) is None}
    hosts = str(parameters.get("host") or parameters.get("hostaddr") or "")
    if "," in hosts and not read_only and parameters.get("target_session_attrs") is None:
        # Of several servers, use the server that accepts writes.
        defaults["target_session_attrs"] = "read-write"
    return defaults


def _has_unread_data(connection: Connection) -> bool:
    if connection.closed:
        return True
    poll = select.poll()
    try:
        poll.register(connection.fileno(), select.POLLIN)
    except (psycopg.Error, ValueError):
        return True
    return bool(poll.poll(0))


def close(connection: Connection) -> None:
    """Close a connection in any state."""
    with suppress(psycopg.Error, OSError):
        connection.close()
