"""One database: runs calls, and retries a call after a conflict, failover or lost connection.

A call that only reads is retried on another connection. A write is retried only if it was certainly
not stored, or if a second attempt is harmless, for example because of an idempotency key.
"""

import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Final, TypeVar

import psycopg

from stenolog.errors import ReadOnly, StenologError, StoreClosed
from stenolog.stores.admin import Finding
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.postgres import schema
from stenolog.stores.postgres.connections import ConnectionPool, Settings, close
from stenolog.stores.postgres.postgres_errors import (
    FailedBeforeCommit,
    commit_failure,
    is_conflict,
    is_connection_lost,
    is_read_only_server,
    read_failure,
    write_failure,
)
from stenolog.stores.postgres.schema import statements
from stenolog.stores.postgres.transactions import Transaction
from stenolog.stores.sql.dialect import to_not_stored
from stenolog.stores.sql.verification import stray_row_finding

T = TypeVar("T")

_RETRY_SECONDS: Final = 0.05
_DRIVER_ERRORS: Final = (psycopg.Error, OSError)


class Database:
    """A database with a connection pool. Every method raises the errors of `Store`.

    Several threads and stores may share a Database. After a fork the child opens its own
    connections.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sql = statements(settings.schema)
        self.damage = DamageReports()
        """Damage that this process has found in the database."""
        self.store_count = 0
        """Number of stores that have this database open."""
        self.closed = False
        self._create_pool()
        try:
            self.run_read(
                lambda transaction: schema.prepare_tables(transaction.connection, settings)
            )
        except BaseException:
            self.close()
            raise
        _databases.add(self)

    def _create_pool(self) -> None:
        self._connections = ConnectionPool(self.settings, self.sql)
        # Ctrl-C in the `set` of a `threading.Event` could leave the event locked.
        self.followers: list[tuple[str, str, SimpleQueue[None]]] = []
        """Namespace, key and wake-up queue of each follower of this process."""

    # --- reading -----------------------------------------------------------------------------

    def run_read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work`, which only reads, without a transaction. Retry after a lost connection.

        Raises StoreUnavailable, StoreBusy, DamagedStore, StoreClosed.
        """
        deadline = self._deadline()
        while True:
            transaction = self._acquire_connection(deadline)
            try:
                with transaction.mark_in_use():
                    return work(transaction)
            except _DRIVER_ERRORS as error:
                if not is_connection_lost(error) or not self._pause_before_retry(deadline):
                    raise read_failure(error, self._error_prefix()) from error
            finally:
                self._connections.release(transaction)

    @contextmanager
    def read_transaction(self) -> Iterator[Transaction]:
        """Open a transaction that reads a consistent snapshot."""
        with self._borrow_connection(read_failure) as transaction:
            transaction.execute(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield transaction
            transaction.execute(b"COMMIT")

    # --- writing -----------------------------------------------------------------------------

    def run_statement(self, work: Callable[[Transaction], T], *, safe: bool) -> T:
        """Run `work`, which executes a single statement, as its own transaction.

        `safe`: retry even if it is unknown whether the statement was stored. Raises NotStored,
        MaybeStored, StoreBusy.
        """

        def run_once(transaction: Transaction) -> T:
            if transaction.server.has_pooler:
                # With a pooler, timeouts can only be set inside a transaction.
                return self._run_transaction(transaction, work)
            return work(transaction)

        return self._run_with_retries(run_once, safe=safe)

    def run_write(self, work: Callable[[Transaction], T], *, safe: bool = False) -> T:
        """Run `work` in its own write transaction. `safe`: see `run_statement`."""
        return self._run_with_retries(
            lambda transaction: self._run_transaction(transaction, work), safe=safe
        )

    def _run_transaction(self, transaction: Transaction, work: Callable[[Transaction], T]) -> T:
        try:
            self._begin_write(transaction)
            result = work(transaction)
        except _DRIVER_ERRORS as error:
            # Any error of `work` came before the commit.
            raise FailedBeforeCommit(error) from error
        transaction.commit()
        return result

    def _run_with_retries(self, work: Callable[[Transaction], T], *, safe: bool) -> T:
        self.check_writable()
        deadline = self._deadline()
        loss_error: Exception | None = None
        """First error that left it unknown whether the work was stored."""
        while True:
            try:
                transaction = self._acquire_connection(deadline)
            except StenologError as error:
                raise self._final_error(to_not_stored(error), loss_error) from error
            try:
                with transaction.mark_in_use():
                    return work(transaction)
            except FailedBeforeCommit as error:
                can_retry, cause = True, error.cause
                failure = write_failure(cause, self._error_prefix())
            except _DRIVER_ERRORS as error:
                can_retry, cause = safe, error
                failure = commit_failure(error, self._error_prefix())
                if is_connection_lost(error):
                    loss_error = loss_error or error
            finally:
                self._return_connection(transaction)
            if is_read_only_server(cause):
                # The next attempt looks for the server that accepts writes.
                self._connections.close_idle()
            should_retry = (
                is_conflict(cause)
                or is_read_only_server(cause)
                or (can_retry and is_connection_lost(cause))
            )
            if not should_retry or not self._pause_before_retry(deadline):
                raise self._final_error(failure, loss_error) from cause

    def _final_error(self, failure: StenologError, loss_error: Exception | None) -> StenologError:
        """Return the error of a call: MaybeStored if the outcome of any attempt is unknown."""
        # guard: postgres-unknown-outcome
        return failure if loss_error is None else commit_failure(loss_error, self._error_prefix())

    def _return_connection(self, transaction: Transaction) -> None:
        """Return a connection to the pool, and roll back a transaction that an error left open."""
        if not transaction.is_usable and not transaction.in_use:
            try:
                transaction.connection.rollback()
            except _DRIVER_ERRORS:
                close(transaction.connection)
        self._connections.release(transaction)

    @contextmanager
    def write_transaction(self) -> Iterator[Transaction]:
        """Open a write transaction, committed at the end or rolled back after any error."""
        self.check_writable()
        with self._borrow_connection(write_failure) as transaction:
            self._begin_write(transaction)
            yield transaction
            try:
                transaction.commit()
            except _DRIVER_ERRORS as error:
                raise commit_failure(error, self._error_prefix()) from error

    def _begin_write(self, transaction: Transaction) -> None:
        transaction.execute(b"BEGIN ISOLATION LEVEL READ COMMITTED")
        if transaction.server.has_pooler:
            timeout_ms = max(1, int(self.settings.busy_timeout * 1000))
            transaction.execute(f"SET LOCAL lock_timeout = {timeout_ms}")
            if transaction.server.asynchronous_commit:
                transaction.execute(b"SET LOCAL synchronous_commit = on")

    def vacuum(self) -> list[str]:
        """Vacuum the tables; return the server's notices about tables that were not vacuumed."""
        notices: list[str] = []

        def work(transaction: Transaction) -> None:
            def record_notice(notice: psycopg.errors.Diagnostic) -> None:
                notices.append(notice.message_primary or "")

            transaction.connection.add_notice_handler(record_notice)
            try:
                with transaction.connection.maintenance():
                    transaction.run("clean")
            finally:
                transaction.connection.remove_notice_handler(record_notice)

        self.run_read(work)
        return notices

    def is_same_database(self, other: "Database") -> bool:
        """Return whether `other` connects to the same database of the same running server."""
        if self is other:
            return True
        lock_key = secrets.randbits(62)
        with self.read_transaction() as first, other.read_transaction() as second:
            first.execute(b"SELECT pg_advisory_xact_lock($1)", (lock_key,))
            [(is_free,)] = second.execute(b"SELECT pg_try_advisory_xact_lock($1)", (lock_key,))
        return not is_free  # guard: copy-onto-same-database

    # --- connections and state ---------------------------------------------------------------

    def _acquire_connection(self, deadline: float) -> Transaction:
        self.check_open()
        try:
            return self._connections.acquire(deadline)
        except _DRIVER_ERRORS as error:
            # Do not retry: the pool has retried until the deadline, or a retry cannot help.
            raise read_failure(error, self._error_prefix()) from error

    @contextmanager
    def _borrow_connection(
        self, to_failure: Callable[[Exception, str], StenologError]
    ) -> Iterator[Transaction]:
        transaction = self._acquire_connection(self._deadline())
        try:
            with transaction.mark_in_use():
                yield transaction
        except psycopg.Error as error:
            # Convert only driver errors: the code inside the `with` may raise other errors.
            raise to_failure(error, self._error_prefix()) from error
        finally:
            self._return_connection(transaction)

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.busy_timeout

    def _pause_before_retry(self, deadline: float) -> bool:
        """Pause briefly and return True; return False if the deadline allows no other attempt."""
        if time.monotonic() + _RETRY_SECONDS > deadline:
            return False
        time.sleep(_RETRY_SECONDS)
        return True

    @property
    def address(self) -> str:
        """Address of the database, without the password."""
        parameters = psycopg.conninfo.conninfo_to_dict(self.settings.conninfo)
        host = parameters.get("host") or parameters.get("hostaddr") or "this machine"
        port = f":{parameters['port']}" if parameters.get("port") else ""
        return f"{host}{port}/{parameters.get('dbname') or parameters.get('user') or ''}"

    def _error_prefix(self) -> str:
        return f"PostgreSQL at {self.address}"

    def check_open(self) -> None:
        """Raise StoreClosed if the database was closed."""
        if self.closed:
            raise StoreClosed("the store is closed")

    def check_writable(self) -> None:
        """Raise ReadOnly or StoreClosed if nothing can be written."""
        self.check_open()
        if self.settings.read_only:
            raise ReadOnly(f"{self.address} was opened read-only")

    def problems(self) -> tuple[list[str], list[str]]:
        """Return the problems that prevent writes, and other warnings."""
        try:
            [(is_recovering, is_read_only, fsync)] = self.run_read(
                lambda transaction: transaction.run("about_server")
            )
        except StenologError as error:
            return [str(error)], []
        errors, warnings = [], []
        if is_recovering:
            errors = ["the server is a standby: it accepts no writes"]
        elif is_read_only:
            errors = ["the server accepts no writes: check its default_transaction_read_only"]
        if fsync != "on":
            warning = "the server runs with fsync = off: a power cut may lose acknowledged messages"
            warnings = [warning]
        return errors, warnings

    def find_damage(self, transaction: Transaction) -> Iterator[Finding]:
        """Yield the damage that `steno doctor` finds outside the sessions."""
        for table, count in transaction.run("stray_rows"):
            if count:
                meaning = f"{count:,} rows belong to sessions that do not exist."
                yield stray_row_finding(table, meaning)

    def release(self) -> None:
        """Release the database for one store; the last store closes the database."""
        with _sharing_lock:
            self.store_count -= 1
            if self.store_count > 0:
                return
            if _shared_databases.get(self.settings) is self:
                del _shared_databases[self.settings]
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self.closed = True
        self._connections.close()

    def after_fork(self) -> None:
        """In a forked child: use new connections instead of the parent's connections."""
        self._connections.abandon_in_child()
        self._create_pool()
        if self.closed:
            self._connections.close()


# --- sharing -----------------------------------------------------------------------------------

_databases: "weakref.WeakSet[Database]" = weakref.WeakSet()
_shared_databases: dict[Settings, Database] = {}
_sharing_lock = threading.Lock()


def open_database(settings: Settings) -> Database:
    """Return the database for these settings, which all stores of this process share."""
    with _sharing_lock:
        database = _shared_databases.get(settings)
        if database is None or database.closed:
            database = _shared_databases[settings] = Database(settings)
        database.store_count += 1
        return database


def _after_fork() -> None:
    global _sharing_lock
    _sharing_lock = threading.Lock()
    for database in list(_databases):
        database.after_fork()


os.register_at_fork(after_in_child=_after_fork)
