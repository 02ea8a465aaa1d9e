"""One database: what becomes of a call when the server answers, refuses, or is gone.

A call that only looks is made again on another connection. One that writes is made again only where
that cannot store it twice: it surely was not stored, or its token decides.
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
from stenolog.stores.damage import Damage
from stenolog.stores.postgres import schema
from stenolog.stores.postgres.connections import Connections, Settings, close
from stenolog.stores.postgres.failures import (
    Before,
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
from stenolog.stores.postgres.transactions import Transaction

T = TypeVar("T")

_PAUSE: Final = 0.05
_TROUBLE: Final = (psycopg.Error, OSError)


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
        self._connections = Connections(self.settings, self.sql)
        self.news = News(self._connections, self.settings)
        """Who waits for something is told through this."""

    # --- looking -----------------------------------------------------------------------------

    def look(self, work: Callable[[Transaction], T]) -> T:
        """What the work finds, each statement of it by itself. Made again where a connection broke.

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
        """A look at everything as it is at one moment."""
        with self._sorted(read_failure), self._taken() as transaction:
            transaction.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield transaction
            transaction.execute(b"COMMIT")

    # --- writing -----------------------------------------------------------------------------

    def write_once(self, work: Callable[[Transaction], T], *, safe: bool) -> T:
        """What one statement gives, that is a transaction by itself.

        `safe`: it may be made again though nobody knows whether it was stored. Raises NotStored,
        MaybeStored, StoreBusy.
        """

        def once(transaction: Transaction) -> T:
            if transaction.peer.pooled:
                # What is to be waited for can be said inside of a transaction only.
                return self._whole(transaction, work)
            return work(transaction)

        return self._repeated(once, safe=safe)

    def change(self, work: Callable[[Transaction], T], *, safe: bool = False) -> T:
        """What the work gives, in a transaction of its own."""
        return self._repeated(lambda transaction: self._whole(transaction, work), safe=safe)

    def _whole(self, transaction: Transaction, work: Callable[[Transaction], T]) -> T:
        try:
            self._begin_writing(transaction)
            done = work(transaction)
        except _TROUBLE as error:
            # Whatever it is, it came before the commit.
            raise Before(error) from error
        transaction.commit()
        return done

    def _repeated(self, work: Callable[[Transaction], T], *, safe: bool) -> T:
        self.check_writable()
        deadline = self._deadline()
        lost: Exception | None = None
        """The first error after which nobody knows whether it was stored."""
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
                # The next attempt looks for the server that takes writes.
                self._connections.forget()
            worth = is_passing(cause) or is_elsewhere(cause) or (again and is_lost(cause))
            if not worth or not self._again(deadline):
                raise self._told(failure, lost) from cause

    def _told(self, failure: StenologError, lost: Exception | None) -> StenologError:
        """What a failure means: after an attempt of unknown fate, it is unknown as well."""
        # guard: postgres-unknown-outcome
        return failure if lost is None else commit_failure(lost, self._doing())

    def _settle(self, transaction: Transaction) -> None:
        """Give it back, and leave nothing open that an error has left so."""
        if not transaction.is_usable and not transaction.in_use:
            try:
                transaction.connection.rollback()
            except _TROUBLE:
                close(transaction.connection)
        self._connections.give_back(transaction)

    @contextmanager
    def write(self) -> Iterator[Transaction]:
        """A transaction of one's own: committed at the end, undone by any error."""
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
        """Have the rows gone that were deleted; what the server says where it does not do so."""
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
        """Return whether another one leads to the same database of the same running server."""
        if self is other:
            return True
        name = secrets.randbits(62)
        with self.read() as here, other.read() as there:
            here.execute(b"SELECT pg_advisory_xact_lock($1)", (name,))
            [(is_free,)] = there.execute(b"SELECT pg_try_advisory_xact_lock($1)", (name,))
        return not is_free  # guard: copy-onto-same-database

    # --- the ground --------------------------------------------------------------------------

    def _take(self, deadline: float) -> Transaction:
        self.check_open()
        try:
            return self._connections.take(deadline)
        except _TROUBLE as error:
            # It was tried until then, or is not worth another attempt.
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
            # No other: what the caller does inside may fail in its own way.
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
        if self.settings.read_only:  # guard: postgres-read-only
            raise refused(self.place)

    def problems(self) -> tuple[list[str], list[str]]:
        """What keeps writes from working; and what else somebody should know."""
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
        """One store less has it open; the last one closes it."""
        with _sharing:
            self.users -= 1
            if self.users > 0:
                return
            if _shared.get(self.settings) is self:
                del _shared[self.settings]
        self.close()

    def close(self) -> None:
        """Let go of all connections; whoever waits for news goes on."""
        self.closed = True
        self.news.close()
        self._connections.close()

    def after_fork(self) -> None:
        """In the child: begin anew, with none of the parent's connections."""
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
    """Where a database is, in words, without its password."""
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
    """The database of these settings; the stores of a process share one."""
    with _sharing:
        opening = _opening.setdefault(settings, threading.Lock())
    # Only who wants the same one waits while it is being reached.
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
