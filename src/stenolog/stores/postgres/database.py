"""One database: what becomes of a call when the server answers, refuses, or is gone.

A call that only looks is made again on another connection. One that writes is made again only where
that cannot store it twice: it surely was not stored, or its token decides.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import psycopg

from stenolog.errors import (
    NotStored,
    StenologError,
    StoreClosed,
    StoreUnavailable,
)
from stenolog.stores.damage import Damage
from stenolog.stores.postgres import schema
from stenolog.stores.postgres.connections import Connection, Connections, Settings
from stenolog.stores.postgres.failures import (
    commit_failure,
    is_elsewhere,
    is_lost,
    is_passing,
    read_failure,
    refused,
    write_failure,
)
from stenolog.stores.postgres.news import News
from stenolog.stores.postgres.queries import statements
from stenolog.stores.postgres.rows import Clash

T = TypeVar("T")
Row = tuple[Any, ...]

_PAUSE: Final = 0.05
_TROUBLE: Final = (psycopg.Error, OSError)


class Transaction:
    """What can be done inside of one; also what a single statement is, that is one by itself."""

    __slots__ = ("_connection", "sql")

    def __init__(self, connection: Connection, sql: dict[str, bytes]) -> None:
        self._connection = connection
        self.sql = sql
        """The statements by name."""

    def execute(self, sql: bytes | str, values: Sequence[Any] = ()) -> Iterable[Row]:
        """Carry out one statement, with values for its places; its rows, if it has any."""
        cursor = self._connection.execute(_bytes(sql), values, binary=True)
        return cursor.fetchall() if cursor.description is not None else ()

    def executemany(self, sql: bytes | str, rows: Iterable[Sequence[Any]]) -> None:
        """Carry out one statement for each row of values."""
        with self._connection.cursor() as cursor:
            cursor.executemany(_bytes(sql), list(rows))

    def run(self, name: str, *values: Any) -> list[Row]:
        """Carry out the statement of this name; its rows. Raises Clash."""
        try:
            cursor = self._connection.execute(self.sql[name], values, binary=True)
        except psycopg.errors.UniqueViolation as error:
            raise Clash from error
        return cursor.fetchall() if cursor.description is not None else []

    @property
    def connection(self) -> Connection:
        """The driver's own, for what only that can do."""
        return self._connection


def _bytes(sql: bytes | str) -> bytes:
    return sql if isinstance(sql, bytes) else sql.encode()


class Database:
    """A database, reached when it is needed. Raises as `Store`: no error of the driver leaks.

    May be used by several threads and stores; after a fork the child makes connections of its own.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sql = statements(settings.schema)
        self.damage = Damage()
        """What was met that is not as it was stored."""
        self.users = 0
        """How many stores have it open."""
        self._begin()
        try:
            self.outdated = self.look(
                lambda transaction: schema.prepare(transaction.connection, settings)
            )
            """Whether the tables are older than this code, and were left so, being only read."""
        except BaseException:
            self.close()
            raise
        _databases.add(self)

    def _begin(self) -> None:
        self.closed = False
        self._connections = Connections(self.settings)
        self.news = News(self._connections, self.settings, self.sql["tell"])
        """Who waits for something is told through this."""

    @property
    def pooled(self) -> bool:
        """Whether a pooler stands between this process and the server."""
        return self._connections.peer.pooled

    # --- looking -----------------------------------------------------------------------------

    def look(self, work: Callable[[Transaction], T]) -> T:
        """What the work finds, each statement of it by itself. Made again where a connection broke.

        Raises StoreUnavailable, StoreBusy, DamagedStore, StoreClosed.
        """
        deadline = self._deadline()
        while True:
            try:
                with self._connection(deadline) as connection:
                    return work(Transaction(connection, self.sql))
            except _TROUBLE as error:
                if not is_lost(error) or not self._again(deadline):
                    raise read_failure(error, self._doing()) from error

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A look at everything as it is at one moment."""
        with (
            self._sorted(read_failure),
            self._connection(self._deadline()) as connection,
            _ended(connection),
        ):
            connection.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield Transaction(connection, self.sql)
            connection.execute(b"COMMIT")

    # --- writing -----------------------------------------------------------------------------

    def write_once(self, work: Callable[[Transaction], T], *, safe: bool) -> T:
        """What one statement gives, that is a transaction by itself.

        `safe`: it may be made again though nobody knows whether it was stored. Raises NotStored,
        MaybeStored, StoreBusy.
        """
        if self.pooled:
            # What a transaction is to wait for can be said inside of one only.
            return self.change(work, safe=safe)
        return self._repeated(work, safe=safe)

    def change(self, work: Callable[[Transaction], T], *, safe: bool = False) -> T:
        """What the work gives, in a transaction of its own."""

        def whole(transaction: Transaction) -> T:
            with _ended(transaction.connection):
                try:
                    self._begin_writing(transaction.connection)
                    done = work(transaction)
                except _TROUBLE as error:
                    # Whatever it is, it came before the commit.
                    raise _Before(error) from error
                transaction.connection.execute(b"COMMIT")
                return done

        return self._repeated(whole, safe=safe)

    def _repeated(self, work: Callable[[Transaction], T], *, safe: bool) -> T:
        self.check_writable()
        deadline = self._deadline()
        while True:
            try:
                with self._connection(deadline) as connection:
                    try:
                        return work(Transaction(connection, self.sql))
                    except _Before as error:
                        again, failure = True, write_failure(error.cause, self._doing())
                        cause: Exception = error.cause
                    except _TROUBLE as error:
                        again, failure = safe, commit_failure(error, self._doing())
                        cause = error
                    if is_elsewhere(cause):
                        # The next attempt looks for the server that takes writes.
                        connection.close()
            except StoreUnavailable as error:
                # There was no connection.
                raise _not_stored(error) from error
            worth = is_passing(cause) or is_elsewhere(cause) or (again and is_lost(cause))
            if not worth or not self._again(deadline):
                raise failure from cause

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A transaction of one's own: committed at the end, undone by any error."""
        self.check_writable()
        with (
            self._sorted(write_failure),
            self._connection(self._deadline()) as connection,
            _ended(connection),
        ):
            self._begin_writing(connection)
            yield Transaction(connection, self.sql)
            try:
                connection.execute(b"COMMIT")
            except _TROUBLE as error:
                raise commit_failure(error, self._doing()) from error

    def _begin_writing(self, connection: Connection) -> None:
        connection.execute(b"BEGIN")
        if self.pooled:
            milliseconds = max(1, int(self.settings.busy_timeout * 1000))
            connection.execute(f"SET LOCAL lock_timeout = {milliseconds}".encode())
            if self._connections.peer.weak:
                connection.execute(b"SET LOCAL synchronous_commit = on")

    def clean(self) -> None:
        """Have the rows gone that were deleted, as far as nobody looks at them."""
        self.look(lambda transaction: transaction.run("clean"))

    # --- the ground --------------------------------------------------------------------------

    @contextmanager
    def _connection(self, deadline: float) -> Iterator[Connection]:
        self.check_open()
        try:
            connection = self._connections.take(deadline)
        except _TROUBLE as error:
            # It was tried until then, or is not worth another attempt.
            raise read_failure(error, self._doing()) from error
        try:
            yield connection
        finally:
            self._connections.give_back(connection)

    @contextmanager
    def _sorted(self, failure: Callable[[Exception, str], StenologError]) -> Iterator[None]:
        try:
            yield
        except _TROUBLE as error:
            raise failure(error, self._doing()) from error

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.busy_timeout

    def _again(self, deadline: float) -> bool:
        """Whether there is time for another attempt, after a short pause."""
        if time.monotonic() + _PAUSE > deadline:
            return False
        time.sleep(_PAUSE)
        return True

    @property
    def place(self) -> str:
        """Where it is, in words, without the password."""
        return place_of(self.settings.conninfo)

    def _doing(self) -> str:
        return f"PostgreSQL at {self.place}"

    def check_open(self) -> None:
        """Raise StoreClosed where it was closed."""
        if self.closed:
            raise StoreClosed("the store is closed")

    def check_writable(self) -> None:
        """Raise ReadOnly or StoreClosed where nothing can be written."""
        self.check_open()
        if self.settings.read_only:
            raise refused(self.place)

    def problems(self) -> tuple[list[str], list[str]]:
        """What keeps writes from working; and what else somebody should know."""
        try:
            [(recovering, synced)] = self.look(lambda transaction: transaction.run("about_server"))
        except StenologError as error:
            return [str(error)], []
        wrong = ["the server is a standby: it takes no writes"] if recovering else []
        if synced != "on":
            return wrong, [
                "the server runs with fsync = off: what it acknowledges may be lost with its power"
            ]
        return wrong, []

    def let_go(self) -> None:
        """One store less has it open; the last one closes it."""
        let_go(self)

    def close(self) -> None:
        """Let go of all connections; whoever waits for news goes on."""
        self.closed = True
        self.news.close()
        self._connections.close()

    def after_fork(self) -> None:
        """In the child: begin anew, with none of the parent's connections."""
        closed = self.closed
        self._connections.abandon()
        self._begin()
        if closed:
            self.close()


class _Before(Exception):
    """Something went wrong before the commit: nothing was stored."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


@contextmanager
def _ended(connection: Connection) -> Iterator[None]:
    """Whatever goes wrong, no transaction stays open."""
    try:
        yield
    except BaseException:
        try:
            connection.rollback()
        except _TROUBLE:
            connection.close()
        raise


def _not_stored(error: StoreUnavailable) -> StoreUnavailable:
    if type(error) is StoreUnavailable:
        return NotStored(f"{error}. Nothing of it was stored")
    return error


def place_of(conninfo: str) -> str:
    """Where a database is, in words, without its password."""
    given = psycopg.conninfo.conninfo_to_dict(conninfo)
    host = given.get("host") or given.get("hostaddr") or "this machine"
    port = f":{given['port']}" if given.get("port") else ""
    return f"{host}{port}/{given.get('dbname') or given.get('user') or ''}"


# --- sharing -----------------------------------------------------------------------------------

_databases: "weakref.WeakSet[Database]" = weakref.WeakSet()
_shared: dict[Settings, Database] = {}
_sharing = threading.Lock()


def open_database(settings: Settings) -> Database:
    """The database of these settings; the stores of a process share one."""
    with _sharing:
        found = _shared.get(settings)
        if found is None or found.closed:
            found = _shared[settings] = Database(settings)
        found.users += 1
        return found


def let_go(database: Database) -> None:
    """One store less has it open; the last one closes it."""
    with _sharing:
        database.users -= 1
        if database.users > 0:
            return
        if _shared.get(database.settings) is database:
            del _shared[database.settings]
    database.close()


def _after_fork() -> None:
    global _sharing
    _sharing = threading.Lock()
    for database in list(_databases):
        database.after_fork()


os.register_at_fork(after_in_child=_after_fork)
