"""The SQLite dialect of SQLStore: transactions, appends, leases, purges."""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct

from stenolog.errors import LeaseLost, OnceConflict, StenologError, StoreBusy, copy_error
from stenolog.records import Health
from stenolog.stores.arguments import AppendResult, Batch, token_bytes
from stenolog.stores.catalog_file import delete_catalogs
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.sql.dialect import Row
from stenolog.stores.sql.leases import (
    LEASES_BY_STORE,
    SQLLease,
    StoreLeases,
    find_holder,
    holder_name,
)
from stenolog.stores.sql.rows import now
from stenolog.stores.sql.session_rows import create_session
from stenolog.stores.sqlite import processes
from stenolog.stores.sqlite.transactions import SQL, Transaction, checksum
from stenolog.stores.state import blank_state

if TYPE_CHECKING:
    from stenolog.stores.sqlite.database import Database

FOLLOW_POLL_SECONDS: Final = 0.03
"""Interval at which a follower polls for commits of other processes, in seconds."""
_LEASE_POLL_SECONDS: Final = 0.005
_CLOCK_TOLERANCE_SECONDS: Final = 2.0
"""Seconds by which the clock may be set back without freeing earlier leases."""
_ALLOCATE_SEQS, _ADD_MESSAGE = SQL["take_seqs"], SQL["add_message"]

T = TypeVar("T")


class SQLiteDialect:
    """One database file. Implements `sql.dialect.Dialect`."""

    def __init__(self, database: "Database") -> None:
        self.database = database
        self.settings = database.settings
        self.damage: DamageReports = database.damage
        self.check_open = database.check_open
        self.check_writable = database.check_writable
        self.read_transaction = database.read_transaction
        self.write_transaction = database.write_transaction
        self.close = database.close

    # --- transactions ------------------------------------------------------------------------

    def run_read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work`, which only reads, on the data of one moment."""
        with self.read_transaction() as transaction:
            return work(transaction)

    def run_message_read(self, work: Callable[[Transaction, DamageReports | None], T]) -> T:
        """Run `work`, which reads a session and its messages, on the data of one moment."""
        with self.read_transaction() as transaction:
            return work(transaction, self.damage)

    def run_write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a write transaction."""
        with self.write_transaction() as transaction:
            return work(transaction)

    # --- appends -----------------------------------------------------------------------------

    def append_one(self, namespace: str, key: str, payload: bytes) -> int:
        """Append one message on the fast path and return its seq."""

        def work(transaction: Transaction) -> int:
            at = now()
            rows = list(transaction.execute(_ALLOCATE_SEQS, (namespace, key, at, 1, len(payload))))
            if not rows:
                return _append(transaction, namespace, key, Batch((payload,)))
            [(session, seq)] = rows
            transaction.execute(_ADD_MESSAGE, (session, seq, at, payload, checksum(payload, seq)))
            return int(seq)

        return self.database.run_shared(work)

    def append(self, namespace: str, key: str, batch: Batch, lease: SQLLease[Any] | None) -> int:
        """Append a batch and return its first seq. Raises OnceConflict, LeaseLost."""

        def work(transaction: Transaction) -> int:
            if lease is not None:
                lease.check_held(transaction)
            return _append(transaction, namespace, key, batch)

        return self.database.run_shared(work)

    def append_group(
        self,
        namespace: str,
        key: str,
        group: Sequence[tuple[int, Batch]],
        results: list[AppendResult],
        lease: SQLLease[Any] | None,
    ) -> None:
        """Append batches in one transaction; put each outcome at its index in `results`."""

        def work(transaction: Transaction) -> None:
            if lease is not None:
                lease.check_held(transaction)
            for index, batch in group:
                try:
                    first = _append(transaction, namespace, key, batch)
                    results[index] = list(range(first, first + len(batch.payloads)))
                except StenologError as error:
                    results[index] = error

        try:
            self.database.run_shared(work)
        except StenologError as error:
            for index, _ in group:
                results[index] = copy_error(error)

    # --- notification ------------------------------------------------------------------------

    def notify(self, _namespace: str, _key: str, /) -> None:
        """Do nothing: each commit wakes the followers of this process; other processes poll."""

    @contextmanager
    def listen_for_changes(
        self, _namespace: str, _key: str, /
    ) -> Iterator[tuple[Callable[[float], object], float]]:
        """Listen for commits of this process.

        Yields a function that waits for a commit, and the maximum wait in seconds.

        By default a commit is on the disk before readers see the commit. So a power cut cannot
        remove messages that a follower has received.
        """
        signal, events = threading.Event(), self.database.commit_events
        events.append(signal)

        def wait(seconds: float) -> None:
            signal.wait(seconds)
            # The next read sees every commit that was signalled until now.
            signal.clear()

        try:
            yield wait, FOLLOW_POLL_SECONDS
        finally:
            events.remove(signal)

    # --- leases ------------------------------------------------------------------------------

    @contextmanager
    def waiting_for_lease(
        self, _namespace: str, _key: str, /
    ) -> Iterator[Callable[[float], object]]:
        """Yield a function that waits for a few milliseconds."""
        yield lambda seconds: time.sleep(min(_LEASE_POLL_SECONDS, seconds))

    def is_lease_held(self, row: Row) -> bool:
        """Return whether the lease of this row is held."""
        return _is_held(*row)

    def acquire_lease(self, leases: StoreLeases, namespace: str, key: str, *, ttl: float) -> int:
        """Acquire the lease and return its epoch; 0 if another holder was faster."""
        epoch = 0
        try:
            with self.database.write_transaction() as transaction:
                # guard: sqlite-one-lease-holder
                if find_holder(transaction, self, namespace, key) is not None:
                    return 0
                transaction.run("end_lease_of", namespace, key)
                [(epoch,)] = transaction.run(
                    "add_lease",
                    namespace,
                    key,
                    holder_name(),
                    now(),
                    time.time() + ttl,
                    _format_holder(leases.name, ttl),
                )
                leases.add_lease(key, epoch)
        except BaseException:
            # The lease was not committed, and another lease may get the same epoch.
            leases.forget_lease(key, epoch)
            raise
        return int(epoch)

    def renew_lease(self, leases: StoreLeases, key: str, epoch: int, *, ttl: float) -> None:
        """Extend a lease to a full ttl from now. Raises LeaseLost, StoreClosed."""
        with self.database.write_transaction() as transaction:
            until, holder = time.time() + ttl, _format_holder(leases.name, ttl)
            renewed_rows = transaction.run("renew_lease", epoch, now(), until, holder)
            if not renewed_rows or not leases.confirm_renewal(key, epoch):
                raise LeaseLost(key, epoch)

    def release_leases(self, epochs: Sequence[int]) -> None:
        """Release these leases."""
        with self.database.write_transaction() as transaction:
            transaction.run_many("end_leases", ((epoch,) for epoch in epochs))

    # --- purge and health --------------------------------------------------------------------

    def erase_purged_bytes(self) -> tuple[str, ...]:
        """Rewrite the file and empty its log after a purge; return where purged bytes remain."""
        database = self.database
        try:
            with database.read_transaction() as transaction:
                [(last_purge,)] = transaction.run("last_purge")
            if last_purge is None:
                return ()
            try:
                # Keep the row of the purge: after a failure, a later purge repeats all steps.
                delete_catalogs(database.file, seconds=database.settings.busy_timeout)
            except (OSError, StoreBusy) as error:
                return (f"the catalog of {database.file} still contains it: {error}; purge again",)
            database.rewrite()
            with database.write_transaction() as transaction:
                # Keep the rows of purges that other processes started after `last_purge`.
                transaction.run("end_purge", last_purge)
        except StoreBusy:
            return (f"the log of {database.file}, in use by readers, contains it; purge again",)
        except StenologError as error:
            return (f"free pages of {database.file} still contain it: {error}; purge again",)
        return ()

    def health(self) -> Health:
        """Return whether writes are expected to work."""
        problems = self.database.problems()
        with self.database.read_transaction() as transaction:
            if transaction.unfinished_purges():
                problems.append("a purge was interrupted; purge again to finish it")
        free_bytes, errors = self.database.disk_space()
        return Health(ok=not errors, free_bytes=free_bytes, problems=(*errors, *problems))


def _append(transaction: Transaction, namespace: str, key: str, batch: Batch) -> int:
    """Append a batch and return its first seq. Raises OnceConflict before anything is written."""
    once, payloads = batch.once, batch.payloads
    if once is not None:
        stored_seq = _find_stored(transaction, namespace, key, once, payloads)
        if stored_seq:
            return stored_seq
    at, count, size = now(), len(payloads), sum(map(len, payloads))
    rows = list(transaction.execute(_ALLOCATE_SEQS, (namespace, key, at, count, size)))
    if rows:
        [(session, last)] = rows
    else:
        state = blank_state(key, os.urandom(8).hex(), 1, at)
        session, last = create_session(transaction, namespace, state, count, size), count
    first: int = last - count + 1
    times = batch.times or [at] * count
    transaction.add_messages(session, zip(range(first, last + 1), times, payloads, strict=True))
    if once is not None:
        transaction.execute(SQL["add_token"], (session, token_bytes(once), first, count))
    return first


def _find_stored(
    transaction: Transaction, namespace: str, key: str, once: str, payloads: Sequence[bytes]
) -> int:
    """Return the first seq stored with this idempotency key; 0 for an unknown key."""
    for session, first, count in transaction.execute(
        SQL["find_token"], (namespace, key, token_bytes(once))
    ):
        bodies = transaction.execute(SQL["bodies"], (session, first, first + count - 1))
        if [body for (body,) in bodies] != list(payloads):
            raise OnceConflict(key, once, first)
        return int(first)
    return 0


# --- lease holders ---------------------------------------------------------------------------


def _is_held(epoch: int, since: bytes, expires: float, process: bytes) -> bool:
    """Return whether the lease of a row is held.

    A lease expires by the monotonic clock of the machine. A lease from another machine, or from
    before a reboot, expires by the wall clock. A lease is also free if its process has ended, or if
    a store of this process has released it.
    """
    holder = _parse_holder(process)
    return _is_unexpired(since, expires, holder) and not _is_abandoned(epoch, holder)


class _LeaseHolder(Struct, frozen=True):
    """The holder of a lease as stored in its row: `PROCESS NAME@UNTIL`."""

    process: processes.Process
    name: str
    """Name of the store in the holder's process (`StoreLeases.name`)."""
    until: float | None
    """Expiry by the monotonic clock of the machine; None in rows of older versions."""


def _parse_holder(text: bytes) -> _LeaseHolder | None:
    process, _, store = text.decode(errors="replace").rpartition(" ")
    holder_process = processes.parse_process(process)
    if holder_process is None:
        return None
    name, _, until = store.partition("@")
    try:
        return _LeaseHolder(holder_process, name, float(until) if until else None)
    except ValueError:
        return _LeaseHolder(holder_process, name, None)


def _is_abandoned(epoch: int, holder: _LeaseHolder | None) -> bool:
    """Return whether the holder of an unexpired lease certainly no longer uses the lease."""
    current = processes.current_process()
    if holder is None or current is None or not current.can_check(holder.process):
        return False
    if holder.process == current:
        leases = LEASES_BY_STORE.get(holder.name)
        return leases is None or not leases.is_active(epoch)
    return processes.has_ended(holder.process)


def _is_unexpired(since: bytes, expires: float, holder: _LeaseHolder | None) -> bool:
    """Return whether a lease that was acquired or renewed at `since` has not expired.

    If the lease was acquired on this machine since its last boot, the monotonic clock decides:
    setting the wall clock has no effect. Otherwise the wall clock decides.
    """
    if isinstance(expires, float) and expires <= 0:
        return False  # the lease was released
    current = processes.current_process()
    is_local = holder is not None and current is not None and current.shares_clock(holder.process)
    until = holder.until if holder is not None and is_local else None
    if until is not None:  # guard: sqlite-lease-clock
        return time.monotonic() < until
    wall_time = time.time()
    try:
        # If `since` is in the future, the clock was ahead, perhaps by years.
        acquired_at = datetime.fromisoformat(since.decode()).timestamp()
        return acquired_at - _CLOCK_TOLERANCE_SECONDS < wall_time < expires
    except (ValueError, TypeError):  # the row is damaged
        return False


def _format_holder(name: str, ttl: float) -> str:
    """Return the holder text for the row of a lease that a store acquires now."""
    current = processes.current_process()
    return "" if current is None else f"{current} {name}@{time.monotonic() + ttl:.6f}"
