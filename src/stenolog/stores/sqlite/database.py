"""One database file: gives each writer its turn, lends read connections, converts errors.

One connection writes and a few connections read (connections.py). No connection survives a fork.
Writers queue at the gate (gate.py), so SQLite itself waits only if another program writes. Readers
see the data that was committed when they started, and never wait for writers.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import apsw

from stenolog.errors import (
    DamagedStore,
    MaybeStored,
    ReadOnly,
    StenologError,
    StoreBusy,
    StoreClosed,
    StoreUnavailable,
    copy_error,
)
from stenolog.stores import log_reports
from stenolog.stores.admin import Finding
from stenolog.stores.disk import create_private_folder, describe_space
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.sql.verification import damaged_database_finding, stray_row_finding
from stenolog.stores.sqlite import database_file
from stenolog.stores.sqlite.connections import ReadPool, Settings, WriteConnection
from stenolog.stores.sqlite.gate import QueuedWrite, WriteQueue
from stenolog.stores.sqlite.sqlite_errors import read_failure, write_failure
from stenolog.stores.sqlite.transactions import Transaction

_FORK_WAIT_SECONDS: Final = 1.0
_MAX_INTEGRITY_PROBLEMS: Final = 20
_DRIVER_ERRORS: Final = (apsw.Error, OSError, UnicodeDecodeError, StoreUnavailable)

T = TypeVar("T")


class Database:
    """An open database file. Every method raises the errors of `Store`, never driver errors."""

    def __init__(self, file: str | os.PathLike[str], settings: Settings) -> None:
        self.file = database_file.resolve_path(file)
        self._path = database_file.DatabasePath(self.file)
        self.address = str(self.file)
        self.settings = settings
        self.damage = DamageReports()
        """Damage that this process has found in the database."""
        self.closed = False
        self._create_connections()
        try:
            self._prepare_file()
        except BaseException:
            self._close_connections()
            raise
        for problem in self.problems():
            log_reports.warning("%s", problem)
        _databases.add(self)

    def _create_connections(self) -> None:
        """Create the locks and connections. A forked child calls this method again."""
        self.commit_events: list[threading.Event] = []
        """Events that are set after every commit of this process, and on close."""
        self._queue = WriteQueue()
        self._writer = WriteConnection(self._path, self.settings)
        self._readers = ReadPool(self._path, self.settings)

    def _prepare_file(self) -> None:
        action = f"opening {self.file}"
        # Check the header first, so that no file is created next to another program's file.
        header = database_file.read_header(self.file)
        if header:
            database_file.check_header(header, self.file)
        elif self.settings.read_only:
            raise StoreUnavailable(f"{action}: there is no such file")
        try:
            if not self.settings.read_only:
                create_private_folder(self.file.parent)
                self._writer.prepare_database(self._deadline())
            with self.read_transaction():
                pass
        except (apsw.Error, OSError) as error:
            raise read_failure(error, action) from error

    def problems(self) -> list[str]:
        """Return warnings about problems that do not prevent the use of the database."""
        try:
            return database_file.find_problems(self.file)
        except OSError as error:
            return [str(read_failure(error, f"looking at {self.file}"))]

    # --- writing -----------------------------------------------------------------------------

    @contextmanager
    def write_transaction(self) -> Iterator[Transaction]:
        """Open a write transaction, committed at the end or rolled back after any error.

        Raises StoreBusy, NotStored, MaybeStored, and any error raised inside the `with`.
        """
        with self._exclusive_turn() as deadline:
            try:
                yield self._writer.begin(deadline)
                self._writer.commit()
            except _DRIVER_ERRORS as error:
                failure = self._writer.convert_error(error)
                if failure is error:
                    raise
                raise failure from error

    def run_write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a write transaction."""
        with self.write_transaction() as transaction:
            return work(transaction)

    def rewrite(self) -> None:
        """Rewrite the file and empty its write-ahead log, so that no bytes of deleted rows remain.

        Raises StoreBusy if a reader still needs the log, NotStored if the rewrite fails.
        """
        with self._exclusive_turn() as deadline:
            try:
                connection = self._writer.enter(deadline)
                connection.execute("VACUUM")  # guard: sqlite-purge-vacuum
                # The rewrite may have taken long; wait for readers with a full timeout.
                self._writer.deadline = self._deadline()
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            except (apsw.Error, OSError) as error:
                raise write_failure(error, f"rewriting {self.file}") from error

    @contextmanager
    def _exclusive_turn(self) -> Iterator[float]:
        """Hold the right to write, which no other caller shares; yield the deadline."""
        self.check_writable()
        deadline = self._deadline()
        try:
            with self._queue.exclusive_turn(deadline):
                # Call `leave` twice, because Ctrl-C may interrupt the first call.
                try:
                    try:
                        self.check_open()
                        yield deadline
                    finally:
                        self._writer.leave()
                finally:
                    self._writer.leave()
        finally:
            self._finish_turn()

    def run_shared(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction that other threads of this process may share.

        If `work` raises an error, `work` must not have written anything. Raises the errors of
        `write_transaction`.
        """
        if self.closed or self.settings.read_only:
            self.check_writable()
        queue, caller = self._queue, QueuedWrite(work)
        acquired = False
        try:
            queue.waiting.append(caller)
            if queue.is_first(caller):
                (acquired,) = map(queue.lock.acquire, (False,))
            if acquired:
                if queue.withdraw(caller):  # guard: sqlite-shared-work-done-once
                    return self._run_alone(work)
                # Another thread has done this work since the queue was checked.
                acquired = False
                queue.lock.release()
            result: T = self._run_queued(caller)
            return result
        finally:
            if acquired:
                queue.lock.release()
            if queue.waiting or self.commit_events or self.closed:
                caller.done = True
                # Ctrl-C may have left `caller` in the queue.
                # This code is inline for the reason given in `WriteQueue.wait_for_turn`.
                if caller in queue.waiting:
                    try:  # noqa: SIM105
                        queue.waiting.remove(caller)
                    except ValueError:
                        pass
                self._finish_turn()

    def _run_alone(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in its own transaction: the fast path, with the fewest steps."""
        writer = self._writer
        try:
            try:
                self.check_open()
                result = work(writer.begin(self._deadline()))
                writer.commit()
            except _DRIVER_ERRORS as error:
                failure = writer.convert_error(error)
                if failure is error:
                    raise
                raise failure from error
            finally:
                writer.leave()
        finally:
            if writer.is_entered:
                writer.leave()
        return result

    def _run_queued(self, caller: QueuedWrite) -> Any:
        """Wait in the queue, and share a transaction with other callers if possible."""
        caller.deadline = self._deadline()
        self._queue.wait_for_turn(caller, self._run_group, caller.deadline)
        if caller.error is not None:
            raise caller.error
        return caller.result

    def _run_group(self, group: list[QueuedWrite]) -> None:
        """Do the work of all callers. A caller left unfinished has stored nothing."""
        if not self._try_group(group):
            # Perhaps only one session is damaged: in their own transactions, other callers succeed.
            for caller in group:
                self._try_group([caller])

    def _try_group(self, group: list[QueuedWrite]) -> bool:
        """Run one transaction for all callers.

        Return False if nothing was stored and each caller needs its own transaction.
        """
        try:
            return self._run_transaction(group)
        finally:
            if self._writer.commit_attempted:
                # A caller is unfinished only after an interruption, and its outcome is unknown.
                _finish_group(group, MaybeStored("the transaction was interrupted"))

    def _run_transaction(self, group: list[QueuedWrite]) -> bool:
        writer = self._writer
        writer.commit_attempted = False
        failure: StenologError | None = None
        interruption: BaseException | None = None
        try:
            try:
                self.check_open()
                # The first caller has already waited for a part of its timeout.
                transaction = writer.begin(min(group[0].deadline, self._deadline()))
                for caller in group:
                    caller.run_work(transaction)
                writer.commit()
            except (apsw.Error, OSError, UnicodeDecodeError, StenologError) as error:
                failure = writer.convert_error(error)
            except BaseException as error:  # noqa: BLE001 - raised below
                writer.commit_attempted, interruption = writer.is_committed, error
            finally:
                writer.leave()
        finally:
            writer.leave()
        # guard: sqlite-group-without-damaged
        if isinstance(failure, DamagedStore) and len(group) > 1 and not writer.commit_attempted:
            return False
        if isinstance(failure, StoreBusy) and not writer.commit_attempted:
            # The other callers continue to wait until their deadlines.
            now = time.monotonic()
            group = [caller for caller in group if caller is group[0] or caller.deadline <= now]
        if interruption is None or writer.commit_attempted:
            _finish_group(group, failure)
        if interruption is not None:
            raise interruption
        return True

    def _finish_turn(self) -> None:
        self._queue.wake_next()
        for event in self.commit_events:
            event.set()
        if self.closed:
            self._close_connections()

    def _deadline(self) -> float:
        return time.monotonic() + self.settings.busy_timeout

    def disk_space(self) -> tuple[int | None, list[str]]:
        """Return the free bytes, and the reasons why writes fail or may soon fail."""
        try:
            return describe_space(self.file, read_only=self.settings.read_only)
        except OSError as error:
            return None, [str(read_failure(error, f"looking at {self.file}"))]

    def check_writable(self) -> None:
        """Raise StoreClosed or ReadOnly if nothing can be written."""
        self.check_open()
        if self.settings.read_only:
            raise ReadOnly("the store was opened with read_only=True")

    def check_open(self) -> None:
        """Raise StoreClosed if the database is closed."""
        if self.closed:
            raise StoreClosed("the store is closed")

    # --- reading -----------------------------------------------------------------------------

    @contextmanager
    def read_transaction(self) -> Iterator[Transaction]:
        """Open a transaction that reads a consistent snapshot.

        Raises StoreUnavailable, DamagedStore.
        """
        self.check_open()
        try:
            with self._readers.lend_reader() as reader:
                try:
                    yield reader.begin()
                    reader.check_unchanged()
                except (apsw.Error, StenologError):
                    reader.check_unchanged()
                    raise
        except (apsw.Error, OSError, UnicodeDecodeError) as error:
            raise read_failure(error, f"reading {self.file}") from error

    def run_read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work`, which only reads, on a consistent snapshot."""
        with self.read_transaction() as transaction:
            return work(transaction)

    def find_damage(self, transaction: Transaction) -> Iterator[Finding]:
        """Yield the damage that `steno doctor` finds outside the sessions."""
        for meaning in database_file.find_wide_modes(self.file):
            yield Finding(kind="wide permissions", meaning=meaning, advice="Change its mode.")
        for (problem,) in transaction.execute(f"PRAGMA integrity_check({_MAX_INTEGRITY_PROBLEMS})"):
            if problem != "ok":
                yield damaged_database_finding(f"SQLite reports: {problem}")
        for table, row, parent, _ in transaction.execute("PRAGMA foreign_key_check"):
            meaning = f"It refers to a row of {parent} that does not exist."
            yield stray_row_finding(f"{table}, row {row}", meaning)
        if transaction.unfinished_purges():
            yield Finding(
                kind="unfinished purge",
                meaning="A purge was interrupted; purged bytes may still be in the file.",
                advice="Purge again, even a session that is already gone: that finishes the purge.",
            )

    # --- close and fork ----------------------------------------------------------------------

    def close(self) -> None:
        """Reject new calls, and close each connection when no call uses it any more."""
        if not self.closed:
            self.closed = True
            _databases.discard(self)
            self._finish_turn()

    def _close_connections(self) -> None:
        self._readers.close()
        # If another thread has the turn, that thread calls this method afterwards.
        if self._queue.lock.acquire(blocking=False):
            try:
                self._writer.close()
            finally:
                self._queue.lock.release()

    def before_fork(self) -> bool:
        """Wait until no thread is inside SQLite, whose locks would stay locked in the child.

        Return whether the writers' queue was stopped. Both waits are limited, because a thread that
        forks inside its own transaction waits for itself.
        """
        self._readers.pause_lending(_FORK_WAIT_SECONDS)
        return self._queue.lock.acquire(timeout=_FORK_WAIT_SECONDS)

    def after_fork_in_parent(self, *, stopped: bool) -> None:
        """Resume the writers and readers."""
        if stopped:
            self._queue.lock.release()
        self._readers.resume_lending()

    def after_fork_in_child(self) -> None:
        """Open new connections, because a connection belongs to the process that opened it."""
        self._writer.abandon_in_child()
        self._readers.abandon_in_child()
        # Replace the old objects: a thread of the parent may have held locks inside them.
        self.closed = False
        self._create_connections()


def _finish_group(group: list[QueuedWrite], failure: StenologError | None) -> None:
    """Finish the unfinished callers, each with its own error object."""
    for caller in group:
        if not caller.done:
            if failure is not None:
                caller.error = failure if caller is group[0] else copy_error(failure)
            caller.finish()


# --- forks -----------------------------------------------------------------------------------

_databases: "weakref.WeakSet[Database]" = weakref.WeakSet()
_paused_databases: list[tuple[Database, bool]] = []
_fork_lock = threading.Lock()
"""Lock held during a fork: a second fork must not resume writers that the first fork paused."""


def _before_fork() -> None:
    _fork_lock.acquire()
    _paused_databases[:] = [(database, database.before_fork()) for database in list(_databases)]


def _after_fork_in_parent() -> None:
    while _paused_databases:
        database, stopped = _paused_databases.pop()
        database.after_fork_in_parent(stopped=stopped)
    _fork_lock.release()


def _after_fork_in_child() -> None:
    while _paused_databases:
        database, _ = _paused_databases.pop()
        database.after_fork_in_child()
    _fork_lock.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)
