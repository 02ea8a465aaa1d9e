"""A pool of connections to one server, opened on demand, up to a maximum number.

The caller itself connects: so it gets the error if that fails, and after a failover no caller waits
for the next attempt of another one.
"""

import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
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
from stenolog.stores.postgres.transactions import Peer, Slot, Transaction
from stenolog.stores.sql.dialect import Row

T = TypeVar("T")

_FRESH: Final = 0.2
"""Seconds after which an idle connection is checked before it is used again."""

_RETRY: Final = 0.05
_LOOK_AGAIN: Final = 0.05
"""Seconds after which a waiting caller checks again, even without a wake-up."""
_MAINTENANCE: Final = 10
"""Factor by which the answer timeout is longer for vacuum and migration."""
_DEFAULTS: Final = {
    "application_name": "stenolog",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    # In milliseconds: gives up an unreachable server that does not close the connection.
    "tcp_user_timeout": "15000",
}
_ABOUT: Final = (
    "SELECT pg_backend_pid(), current_setting('synchronous_commit'), "
    "current_setting('server_encoding'), current_setting('server_version_num')::int8"
)
_OLDEST: Final = 140000
_UNREADABLE: Final = (
    "postgresql: the URL cannot be read; in user and password write %40 for @, %2F for / and "
    "%25 for %"
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
        """Run an exchange with the server. Raises NoAnswer."""
        try:
            # Without our own keyword: psycopg 3.2 has no `timeout` here.
            return super().wait(_limited(gen, self.answer_timeout), *options, **named)
        except NoAnswer:
            # The answer may still arrive, and the next caller must not get it.
            self.pgconn.finish()
            raise

    @contextmanager
    def maintenance(self) -> Iterator[None]:
        """Give the server more time, for statements that rewrite tables."""
        usual = self.answer_timeout
        self.answer_timeout = usual * _MAINTENANCE
        try:
            yield
        finally:
            self.answer_timeout = usual


def _limited(gen: Generator[Any, Any, T], seconds: float) -> Generator[Any, Any, T]:
    """Run `gen`, and raise NoAnswer if no data was ready for `seconds`."""
    deadline = time.monotonic() + seconds
    try:
        wanted = next(gen)
        while True:
            ready = yield wanted
            # Data that has arrived counts, even if this process was stopped in between.
            wanted = gen.send(ready)
            if ready != waiting.READY_NONE:
                deadline = time.monotonic() + seconds
            elif time.monotonic() > deadline:
                # guard: postgres-silent-server
                raise NoAnswer(f"the server did not answer a statement within {seconds:g} s")
    except StopIteration as done:
        found: T = done.value
        return found


def adapters() -> AdaptersMap:
    """Return the adapters that send values in binary, and all integers as eight bytes."""
    found = AdaptersMap(psycopg.adapters)
    found.register_dumper(int, Int8BinaryDumper)
    # Unescaped: with escaped quotes, a list of long texts took seconds.
    found.register_dumper(str, StrBinaryDumper)
    found.register_dumper(list, ListBinaryDumper)
    return found


class Connections:
    """Pool of connections; `close` closes the idle ones, and the others when they are returned.

    An interrupt (Ctrl-C) may strike between any two steps here. Therefore it keeps no counter, and
    uses no lock whose methods are written in Python: such a lock can stay locked.
    """

    def __init__(self, settings: Settings, sql: Mapping[str, bytes]) -> None:
        self._settings = settings
        self._sql = sql
        self._adapters = adapters()
        self._defaults = defaults_for(settings.conninfo, read_only=settings.read_only)
        self._idle: deque[Transaction] = deque()
        self._mutex = threading.Lock()
        self._slots: list[weakref.ref[Slot]] = []
        self._waiting: deque[None] = deque()
        """One entry for each waiting caller; an interrupted one may leave its entry in the queue.
        """
        self._freed: SimpleQueue[None] = SimpleQueue()
        self._closed = False
        self.peer = Peer(pooled=False, weak=False)
        """Properties of the server, from the newest connection."""

    def take(self, deadline: float) -> Transaction:
        """Return a connection that no other caller uses.

        Raises StoreBusy, StoreClosed, psycopg.Error.
        """
        while True:
            if self._closed:
                raise StoreClosed("the store is closed")
            try:
                # Atomic on a deque, so no lock is needed.
                kept = self._idle.pop()
            except IndexError:
                slot = self._new_slot()
                if slot is not None:
                    return self._another(slot, deadline)
                self._wait(deadline)
                continue
            if time.monotonic() - kept.since < _FRESH or not _has_news(kept.connection):
                return kept
            # An idle connection has data only if the server closes it.
            self._drop(kept)

    def give_back(self, kept: Transaction) -> None:
        """Keep a connection for the next caller, unless it is broken."""
        if not kept.is_usable:
            self._drop(kept)
            return
        kept.since = time.monotonic()
        self._idle.append(kept)
        self._wake()
        if self._closed:
            self._let_go()

    def _new_slot(self) -> Slot | None:
        """Return a slot for one more connection; None if the maximum is reached."""
        with self._mutex:
            used = [slot for slot in self._slots if (held := slot()) is not None and not held.free]
            self._slots = used
            if len(used) >= self._settings.connections:
                return None
            slot = Slot()
            used.append(weakref.ref(slot))
            return slot

    def _wait(self, deadline: float) -> None:
        """Wait until a connection may be free. Raises StoreBusy."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreBusy(
                f"all {self._settings.connections} connections were in use for too "
                "long; ?connections=NUMBER allows for more"
            )
        self._waiting.append(None)
        try:
            self._freed.get(timeout=min(left, _LOOK_AGAIN))
        except Empty:
            pass
        finally:
            with suppress(IndexError):
                self._waiting.pop()

    def _wake(self) -> None:
        if self._waiting and self._freed.qsize() < len(self._waiting):
            self._freed.put(None)

    def _another(self, slot: Slot, deadline: float) -> Transaction:
        try:
            made = self.connect(deadline)
        except BaseException:
            # Immediately: the exception may keep this frame alive.
            slot.free = True
            self._wake()
            raise
        made.slot = slot
        return made

    def _drop(self, kept: Transaction) -> None:
        close(kept.connection)
        if kept.slot is not None:
            kept.slot.free = True
        self._wake()

    def connect(self, deadline: float) -> Transaction:
        """Open a new connection. It is outside the pool unless `take` gives it a slot.

        Retries until the deadline if the server does not answer yet. Raises psycopg.Error,
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
        # The timeout applies to each host: the first of several may be unreachable.
        connection = Connection.connect(
            self._settings.conninfo,
            autocommit=True,
            prepare_threshold=None,
            cursor_factory=psycopg.RawCursor,
            context=self._adapters,
            # Overrides URL and environment: all data is sent as UTF-8.
            client_encoding="UTF8",
            **self._defaults,  # type: ignore[arg-type]
        )
        # A statement may wait for locks for busy_timeout before the server answers.
        connection.answer_timeout = self._settings.busy_timeout + self._settings.answer_timeout
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
        weak = commit == "off"  # guard: postgres-weak-commit-detected
        pooled = process != connection.pgconn.backend_pid
        peer = Peer(pooled=pooled, weak=weak)
        if pooled:
            return peer
        connection.prepare_threshold = 1
        milliseconds = max(1, int(self._settings.busy_timeout * 1000))
        connection.execute(f"SET lock_timeout = {milliseconds}")
        connection.execute("SET default_transaction_isolation = 'read committed'")
        if weak:
            # guard: postgres-synchronous-commit-on
            connection.execute("SET synchronous_commit = on")
        return peer

    def close(self) -> None:
        """Close the idle connections; the others are closed when they are returned."""
        self._closed = True
        self._let_go()

    def _let_go(self) -> None:
        with suppress(IndexError):
            while True:
                self._drop(self._idle.pop())

    def forget(self) -> None:
        """Close the idle connections: another server may be the right one now."""
        self._let_go()

    def abandon(self, others: Iterable[Transaction]) -> None:
        """In a forked child: keep the parent's connections open; closing one would end it there."""
        _PARENTS.extend([*self._idle, *others])


_PARENTS: Final[list[Transaction]] = []
"""Connections of the parent process."""


def defaults_for(conninfo: str, *, read_only: bool) -> dict[str, str]:
    """Return the connection parameters that the caller did not set. Raises UsageError."""
    try:
        given = psycopg.conninfo.conninfo_to_dict(conninfo)
    except psycopg.ProgrammingError as error:
        # The driver's message contains parts of the URL, perhaps of the password.
        words = " ".join(str(error).split())
        if "query parameter" in words:
            raise UsageError(f"postgresql: {words}") from None
        raise UsageError(_UNREADABLE) from None
    if "@" in str(given.get("host") or ""):
        raise UsageError("postgresql: there is an @ in the host; in the password write %40 for it")
    ports = str(given.get("port") or "").split(",")
    in_database = "@" in str(given.get("dbname") or "") and "%40" not in conninfo
    if in_database or not all(port.isdigit() for port in ports if port):
        # The driver ends the host at a / in the password, and would print the rest.
        raise UsageError(_UNREADABLE)
    found = {name: value for name, value in _DEFAULTS.items() if given.get(name) is None}
    hosts = str(given.get("host") or given.get("hostaddr") or "")
    if "," in hosts and not read_only and given.get("target_session_attrs") is None:
        # Of several servers, use the one that accepts writes.
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
    """Close a connection in any state."""
    with suppress(psycopg.Error, OSError):
        connection.close()
