"""The PostgreSQL dialect of SQLStore: transactions, appends, leases, notifications."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stenolog.errors import (
    DamagedStore,
    LeaseLost,
    OnceConflict,
    StenologError,
    StoreClosed,
    copy_error,
)
from stenolog.records import Health
from stenolog.stores.arguments import AppendResult, Batch, token_bytes
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.sql.dialect import Row, UniqueConflict
from stenolog.stores.sql.leases import SQLLease, StoreLeases, holder_name
from stenolog.stores.sql.rows import now
from stenolog.stores.sql.session_rows import MissingRows, create_session
from stenolog.stores.state import blank_state

if TYPE_CHECKING:
    from stenolog.stores.postgres.database import Database
    from stenolog.stores.postgres.transactions import Transaction

_LEASE_POLL_SECONDS: Final = 0.05
_MAX_LEASE_SECONDS: Final = 100 * 365 * 86_400.0
"""Maximum duration of a lease, in seconds: the server's timestamps have a limit."""
_MAX_ATTEMPTS: Final = 4
_TEXT, _BYTEA, _INT8 = 25, 17, 20
_APPEND_ONE_TYPES: Final = (_TEXT, _BYTEA, _TEXT, _TEXT, _INT8, _INT8)
"""PostgreSQL type OIDs of the parameters of the statement `append_one`."""

T = TypeVar("T")


class PostgresDialect:
    """A database shared by the stores of a process. Implements `sql.dialect.Dialect`."""

    def __init__(self, database: "Database") -> None:
        self.database = database
        self.settings = database.settings
        self.damage: DamageReports = database.damage
        self._closed = False

    def check_open(self) -> None:
        """Raise StoreClosed if the store is closed."""
        if self._closed:
            raise StoreClosed("the store is closed")

    def check_writable(self) -> None:
        """Raise StoreClosed or ReadOnly if nothing can be written."""
        self.check_open()
        self.database.check_writable()

    # --- transactions ------------------------------------------------------------------------

    def run_read(self, work: Callable[["Transaction"], T]) -> T:
        """Run `work`, which only reads, without a transaction. Retry after a lost connection."""
        self.check_open()
        return self.database.run_read(work)

    def run_message_read(self, work: Callable[["Transaction", DamageReports | None], T]) -> T:
        """Run `work`, which reads a session and its messages, on the data of one moment.

        Messages never change, so two statements without a transaction are enough. If messages were
        purged between the statements, both run again in one transaction.
        """
        try:
            return self.run_read(lambda transaction: work(transaction, None))
        except MissingRows:
            with self.read_transaction() as transaction:
                return work(transaction, self.damage)

    @contextmanager
    def read_transaction(self) -> Iterator["Transaction"]:
        """Open a transaction that reads the data of one moment."""
        self.check_open()
        with self.database.read_transaction() as transaction:
            yield transaction

    def run_write(self, work: Callable[["Transaction"], T]) -> T:
        """Run `work` in a write transaction. Retry if the transaction was certainly not stored."""
        self.check_open()
        return self.database.run_write(work)

    def write_transaction(self) -> AbstractContextManager["Transaction"]:
        """Open a write transaction; any error rolls it back."""
        self.check_writable()
        return self.database.write_transaction()

    # --- appends -----------------------------------------------------------------------------

    def append_one(self, namespace: str, key: str, payload: bytes) -> int:
        """Append one message in one round trip and return its seq."""
        self.check_open()
        try:
            seq = self.database.run_statement(  # guard: postgres-no-blind-retry
                lambda transaction: _append_one(transaction, namespace, key, payload), safe=False
            )
        except _SessionMissing:
            return self.append(namespace, key, Batch((payload,)), None, new=True)
        self.notify(namespace, key)
        return seq

    def append(
        self,
        namespace: str,
        key: str,
        batch: Batch,
        lease: SQLLease[Any] | None,
        *,
        new: bool = False,
    ) -> int:
        """Append a batch in one round trip and return its first seq.

        `new`: create the session first. Raises OnceConflict, LeaseLost.
        """
        self.check_open()
        if lease is not None:
            lease.check_ownership()
        epoch = lease.epoch if lease is not None else 0

        while True:
            append = _append_new if new else _append
            run = self.database.run_write if new else self.database.run_statement
            work = partial(append, namespace=namespace, key=key, batch=batch, epoch=epoch)
            try:
                first = run(work, safe=batch.once is not None)
            except _SessionMissing:
                new = True
            except UniqueConflict:
                # guard: postgres-token-race
                continue  # another writer has just stored the same idempotency key
            else:
                self.notify(namespace, key)
                return first

    def append_group(
        self,
        namespace: str,
        key: str,
        group: Sequence[tuple[int, Batch]],
        results: list[AppendResult],
        lease: SQLLease[Any] | None,
    ) -> None:
        """Append batches in order; put the outcome of each batch at its index in `results`.

        Adjacent batches without idempotency keys are merged, and stored completely or not at all.
        """
        # Each batch with an idempotency key forms its own group.
        groups = groupby(group, lambda item: None if item[1].once is None else item[0])
        for adjacent in (list(items) for _, items in groups):
            try:
                merged = _merge_batches([batch for _, batch in adjacent])
                first = self.append(namespace, key, merged, lease)
            except StenologError as error:
                for index, _ in adjacent:
                    results[index] = copy_error(error)
                continue
            for index, batch in adjacent:
                results[index] = list(range(first, first + len(batch.payloads)))
                first += len(batch.payloads)

    # --- notification ------------------------------------------------------------------------

    def notify(self, namespace: str, key: str) -> None:
        """Notify followers in all processes that a session has changed."""
        self.database.notifications.notify(_notification_name(namespace, key))

    @contextmanager
    def listen_for_changes(
        self, namespace: str, key: str
    ) -> Iterator[tuple[Callable[[float], object], float]]:
        """Listen for changes of a session.

        Yields a function that waits for a change, and the maximum wait in seconds.
        """
        notifications, name = self.database.notifications, _notification_name(namespace, key)
        signal = notifications.subscribe(name)
        try:
            yield (
                lambda seconds: signal.wait(min(seconds, notifications.poll_interval)),
                notifications.max_poll_interval,
            )
        finally:
            notifications.unsubscribe(name, signal)

    # --- leases ------------------------------------------------------------------------------

    @contextmanager
    def waiting_for_lease(self, namespace: str, key: str) -> Iterator[Callable[[float], object]]:
        """Yield a function that waits for a change of the session, but only for a short time."""
        with self.listen_for_changes(namespace, key) as (wait, _):
            yield lambda seconds: wait(min(_LEASE_POLL_SECONDS, seconds))

    def is_lease_held(self, row: Row) -> bool:
        """Return whether the lease of this row is held."""
        return bool(row[0])

    def acquire_lease(self, leases: StoreLeases, namespace: str, key: str, *, ttl: float) -> int:
        """Acquire the lease and return its epoch; 0 if the lease is held.

        The server's clock measures the ttl.
        """
        # The random name makes a retry safe after a lost response.
        name, seconds = os.urandom(8).hex(), min(float(ttl), _MAX_LEASE_SECONDS)
        values = namespace, key.encode(), holder_name(), name, seconds
        for (epoch,) in self.database.run_statement(
            lambda transaction: transaction.run("take_lease", *values), safe=True
        ):
            try:
                leases.add_lease(key, epoch)
            except StoreClosed:
                self.release_leases([epoch])
                raise
            return int(epoch)
        return 0

    def renew_lease(self, leases: StoreLeases, key: str, epoch: int, *, ttl: float) -> None:
        """Extend a lease to a full ttl from now. Raises LeaseLost, StoreClosed."""
        self.check_open()
        seconds = min(float(ttl), _MAX_LEASE_SECONDS)
        if not self.database.run_statement(
            lambda transaction: transaction.run("renew_lease", epoch, seconds), safe=True
        ) or not leases.confirm_renewal(key, epoch):
            raise LeaseLost(key, epoch)

    def release_leases(self, epochs: Sequence[int]) -> None:
        """Release these leases. Raises StoreUnavailable."""
        self.database.run_statement(
            lambda transaction: transaction.run("end_leases", list(epochs)), safe=True
        )

    # --- purge, health, close ----------------------------------------------------------------

    def erase_purged_bytes(self) -> tuple[str, ...]:
        """Vacuum the tables after a purge; return where purged bytes remain."""
        try:
            notices = self.database.vacuum()
        except StenologError as error:
            notices = [str(error)]
        remainder = "the pages of the tables still contain it until their owner vacuums them"
        return (f"{remainder}: {notices[0]}",) if notices else ()

    def health(self) -> Health:
        """Return whether writes are expected to work."""
        self.check_open()
        errors, problems = self.database.problems()
        return Health(ok=not errors, free_bytes=None, problems=(*errors, *problems))

    def close(self) -> None:
        """Release the shared database; the last store closes it. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.database.release()


class _SessionMissing(Exception):
    """The session does not exist, or the version of the tables is unknown to this code."""


def _notification_name(namespace: str, key: str) -> str:
    """Return a short name of a session for notifications."""
    text = f"{namespace}\0{key}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=8).hexdigest()


def _merge_batches(batches: Sequence[Batch]) -> Batch:
    """Join batches without idempotency keys into one; return a single batch unchanged."""
    if len(batches) == 1:
        return batches[0]
    at = now()
    return Batch(
        [payload for batch in batches for payload in batch.payloads],
        None,
        [time for batch in batches for time in batch.times or [at] * len(batch.payloads)],
    )


def _append_one(transaction: "Transaction", namespace: str, key: str, payload: bytes) -> int:
    """Append one message on the fast path and return its seq. Raises _SessionMissing."""
    raw_key, at, size, format = key.encode(), now(), len(payload), transaction.format
    if transaction.server.has_pooler:
        for (seq,) in transaction.run(
            "append_one", namespace, raw_key, at, payload.decode(), size, format
        ):
            return int(seq)
        raise _SessionMissing
    row = transaction.run_prepared(
        "append_one",
        _APPEND_ONE_TYPES,
        (namespace.encode(), raw_key, at.encode(), payload, _int8(size), _int8(format)),
    )
    if row is None:
        raise _SessionMissing
    return int.from_bytes(row, "big")


def _int8(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _append(transaction: "Transaction", namespace: str, key: str, batch: Batch, epoch: int) -> int:
    """Append a batch, fenced by the lease of this epoch (0: no lease); return its first seq.

    Raises OnceConflict, LeaseLost, _SessionMissing. After an error nothing was written.
    """
    at, payloads, once = now(), batch.payloads, batch.once
    [(first, session, stored_seq, count, is_lease_held)] = transaction.run(
        "append",
        namespace,
        key.encode(),
        at,
        [payload.decode() for payload in payloads],
        list(batch.times or [at] * len(payloads)),
        sum(map(len, payloads)),
        transaction.format,
        None if once is None else token_bytes(once),
        epoch or None,
    )
    if stored_seq is not None:
        assert once is not None, "only a token can be known"
        bodies = transaction.run("bodies", session, stored_seq, stored_seq + count - 1)
        if [body.encode() for (body,) in bodies] != list(payloads):
            raise OnceConflict(key, once, stored_seq)
        return int(stored_seq)
    if epoch and not is_lease_held:
        raise LeaseLost(key, epoch)
    if first is None:
        raise _SessionMissing
    return int(first)


def _append_new(
    transaction: "Transaction", namespace: str, key: str, batch: Batch, epoch: int
) -> int:
    """Create the session, unless another writer creates it first, and append the batch."""
    for _ in range(_MAX_ATTEMPTS):
        try:
            return _append(transaction, namespace, key, batch, epoch)
        except _SessionMissing:
            # This statement waits for another writer that is creating the session.
            create_session(
                transaction, namespace, blank_state(key, os.urandom(8).hex(), 1, now()), 0, 0
            )
    raise DamagedStore(f"{key!r}: its row has another version than the tables")
