"""One database: outcome and retry of calls when the server answers, refuses, or is unreachable.

A call that only reads is retried on another connection. A write is retried only if that cannot
store it twice: it was certainly not stored, or it has an idempotency key.
"""

import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import psycopg

from stenolog.errors import (
    NotStored,
    StenologError,
    StoreClosed,
    StoreUnavailable,
)
from stenolog.stores.damaged_messages import DamageReports
from stenolog.stores.postgres import schema
from stenolog.stores.postgres.connections import Connections, Settings, close
from stenolog.stores.postgres.notifications import Notifications
from stenolog.stores.postgres.postgres_errors import (
    Before,
    commit_failure,
    is_elsewhere,
    is_lost,
    is_passing,
    read_failure,
    refused,
    write_failure,
)
from stenolog.stores.postgres.queries import statements
from stenolog.stores.postgres.transactions import Transaction

T = TypeVar("T")

_PAUSE: Final = 0.05
_TROUBLE: Final = (psycopg.Error, OSError)


class Database:
    """A database with a connection pool. It raises the errors of `Store`; driver errors never leak.

    Several threads and stores may use it. After a fork the child opens its own connections.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sql = statements(settings.schema)
        self.damage = DamageReports()
        """Damage that this process has found."""
        self.users = 0
        """Number of stores that have it open."""
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
        self._connections = Connections(self.settings, self.sql)
        self.news = Notifications(self._connections, self.settings)
        """Notifications about changed sessions."""

    # --- reading -----------------------------------------------------------------------------

    def look(self, work: Callable[[Transaction], T]) -> T:
        """Run `work`, which only reads, without a transaction; retry if a connection broke.

        Raises StoreUnavailable, StoreBusy, DamagedStore, StoreClosed.
        """
        deadline = self._deadline()
        while True:
            transaction = self._take(deadline)
            try:
                with transaction.used():
                    return work(transaction)
            except _TROUBLE as error:
                if not is_lost(error) or not self._again(deadline):
                    raise read_failure(error, self._doing()) from error
            finally:
                self._connections.give_back(transaction)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """Open a transaction that reads the data of one moment."""
        with self._sorted(read_failure), self._taken() as transaction:
            transaction.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield transaction
            transaction.execute(b"COMMIT")

    # --- writing -----------------------------------------------------------------------------

    def write_once(self, work: Callable[[Transaction], T], *, safe: bool) -> T:
        """Run `work`, which executes a single statement, as its own transaction.

        `safe`: retry even if it is unknown whether the statement was stored. Raises NotStored,
        MaybeStored, StoreBusy.
        """

        def once(transaction: Transaction) -> T:
            if transaction.peer.pooled:
                # With a pooler, timeouts can only be set inside a transaction.
                return self._whole(transaction, work)
            return work(transaction)

        return self._repeated(once, safe=safe)

    def change(self, work: Callable[[Transaction], T], *, safe: bool = False) -> T:
        """Run `work` in its own write transaction."""
        return self._repeated(lambda transaction: self._whole(transaction, work), safe=safe)

    def _whole(self, transaction: Transaction, work: Callable[[Transaction], T]) -> T:
        try:
            self._begin_writing(transaction)
            done = work(transaction)
        except _TROUBLE as error:
            # Any error here came before the commit.
            raise Before(error) from error
        transaction.commit()
        return done

    def _repeated(self, work: Callable[[Transaction], T], *, safe: bool) -> T:
        self.check_writable()
        deadline = self._deadline()
        lost: Exception | None = None
        """The first error after which it is unknown whether the work was stored."""
        while True:
            try:
                transaction = self._take(deadline)
            except StenologError as error:
                raise self._told(_not_stored(error), lost) from error
            try:
                with transaction.used():
                    return work(transaction)
            except Before as error:
                again, cause = True, error.cause
                failure = write_failure(cause, self._doing())
            except _TROUBLE as error:
                again, cause = safe, error
                failure = commit_failure(error, self._doing())
                if is_lost(error):
                    lost = lost or error
            finally:
                self._settle(transaction)
            if is_elsewhere(cause):
                # The next attempt looks for the server that accepts writes.
                self._connections.forget()
            worth = is_passing(cause) or is_elsewhere(cause) or (again and is_lost(cause))
            if not worth or not self._again(deadline):
                raise self._told(failure, lost) from cause

    def _told(self, failure: StenologError, lost: Exception | None) -> StenologError:
        """Return the error of a call: MaybeStored if the outcome of any attempt is unknown."""
        # guard: postgres-unknown-outcome
        return failure if lost is None else commit_failure(lost, self._doing())

    def _settle(self, transaction: Transaction) -> None:
        """Return a connection to the pool, and roll back a transaction that an error left open."""
        if not transaction.is_usable and not transaction.in_use:
            try:
                transaction.connection.rollback()
            except _TROUBLE:
                close(transaction.connection)
        self._connections.give_back(transaction)

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """Open a write transaction; commit it at the end, or roll it back after any error."""
        self.check_writable()
        with self._sorted(write_failure), self._taken() as transaction:
            self._begin_writing(transaction)
            yield transaction
            try:
                transaction.commit()
            except _TROUBLE as error:
                raise commit_failure(error, self._doing()) from error

    def _begin_writing(self, transaction: Transaction) -> None:
        transaction.execute(b"BEGIN ISOLATION LEVEL READ COMMITTED")
        if transaction.peer.pooled:
            milliseconds = max(1, int(self.settings.busy_timeout * 1000))
            transaction.execute(f"SET LOCAL lock_timeout = {milliseconds}")
            if transaction.peer.weak:
                transaction.execute(b"SET LOCAL synchronous_commit = on")

    def clean(self) -> list[str]:
        """Vacuum the tables; return the server's notices if it did not."""
        told: list[str] = []

        def work(transaction: Transaction) -> None:
            def hear(notice: psycopg.errors.Diagnostic) -> None:
                told.append(notice.message_primary or "")

            transaction.connection.add_notice_handler(hear)
            try:
                with transaction.connection.maintenance():
                    transaction.run("clean")
            finally:
                transaction.connection.remove_notice_handler(hear)

        self.look(work)
        return told

    def is_same(self, other: "Database") -> bool:
        """Return whether both connect to the same database of the same running server."""
        if self is other:
            return True
        name = secrets.randbits(62)
        with self.read() as here, other.read() as there:
            here.execute(b"SELECT pg_advisory_xact_lock($1)", (name,))
            [(is_free,)] = there.execute(b"SELECT pg_try_advisory_xact_lock($1)", (name,))
        return not is_free  # guard: copy-onto-same-database

    # --- connections and state ---------------------------------------------------------------

    def _take(self, deadline: float) -> Transaction:
        self.check_open()
        try:
            return self._connections.take(deadline)
        except _TROUBLE as error:
            # It was retried until the deadline, or a retry cannot help.
            raise read_failure(error, self._doing()) from error

    @contextmanager
    def _taken(self) -> Iterator[Transaction]:
        transaction = self._take(self._deadline())
        try:
            with transaction.used():
                yield transaction
        finally:
            self._settle(transaction)

    @contextmanager
    def _sorted(self, failure: Callable[[Exception, str], StenologError]) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            # Only driver errors: the caller's code inside may raise other errors.
            raise failure(error, self._doing()) from error

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.busy_timeout

    def _again(self, deadline: float) -> bool:
        """Return whether there is time for another attempt, after a short pause."""
        if time.monotonic() + _PAUSE > deadline:
            return False
        time.sleep(_PAUSE)
        return True

    @property
    def place(self) -> str:
        """Address of the database, without the password."""
        return place_of(self.settings.conninfo)

    def _doing(self) -> str:
        return f"PostgreSQL at {self.place}"

    def check_open(self) -> None:
        """Raise StoreClosed if it was closed."""
        if self.closed:
            raise StoreClosed("the store is closed")

    def check_writable(self) -> None:
        """Raise ReadOnly or StoreClosed if nothing can be written."""
        self.check_open()
        if self.settings.read_only:  # guard: postgres-read-only
            raise refused(self.place)

    def problems(self) -> tuple[list[str], list[str]]:
        """Return the problems that prevent writes, and other warnings."""
        try:
            [(recovering, shut, synced)] = self.look(
                lambda transaction: transaction.run("about_server")
            )
        except StenologError as error:
            return [str(error)], []
        wrong = ["the server is a standby: it takes no writes"] if recovering else []
        if shut and not recovering:
            wrong = ["the server takes no writes: see its default_transaction_read_only"]
        if synced != "on":
            return wrong, [
                "the server runs with fsync = off: what it acknowledges may be lost with its power"
            ]
        return wrong, []

    def let_go(self) -> None:
        """Release the database for one store; the last one closes it."""
        with _sharing:
            self.users -= 1
            if self.users > 0:
                return
            if _shared.get(self.settings) is self:
                del _shared[self.settings]
        self.close()

    def close(self) -> None:
        """Close all connections and wake all waiting followers."""
        self.closed = True
        self.news.close()
        self._connections.close()

    def after_fork(self) -> None:
        """In a forked child: start with new connections, without using the parent's."""
        closed = self.closed
        self._connections.abandon(self.news.abandon())
        self._begin()
        if closed:
            self.close()


def _not_stored(error: StenologError) -> StenologError:
    if type(error) is StoreUnavailable:
        return NotStored(f"{error}. Nothing of it was stored")
    return error


def place_of(conninfo: str) -> str:
    """Return the address of a database, without the password."""
    given = psycopg.conninfo.conninfo_to_dict(conninfo)
    host = given.get("host") or given.get("hostaddr") or "this machine"
    port = f":{given['port']}" if given.get("port") else ""
    return f"{host}{port}/{given.get('dbname') or given.get('user') or ''}"


# --- sharing -----------------------------------------------------------------------------------

_databases: "weakref.WeakSet[Database]" = weakref.WeakSet()
_shared: dict[Settings, Database] = {}
_opening: dict[Settings, threading.Lock] = {}
_sharing = threading.Lock()


def open_database(settings: Settings) -> Database:
    """Return the database for these settings, shared by the stores of a process."""
    with _sharing:
        opening = _opening.setdefault(settings, threading.Lock())
    # Only callers with the same settings wait while it connects.
    with opening:
        with _sharing:
            found = _shared.get(settings)
            if found is not None and not found.closed:
                found.users += 1
                return found
        made = Database(settings)
        made.users = 1
        with _sharing:
            _shared[settings] = made
        return made


def _after_fork() -> None:
    global _sharing
    _sharing = threading.Lock()
    _opening.clear()
    for database in list(_databases):
        database.after_fork()


os.register_at_fork(after_in_child=_after_fork)
