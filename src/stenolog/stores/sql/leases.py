"""Leases, stored as one row per session key. Each new holder gets a new epoch."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar
from weakref import WeakValueDictionary

from stenolog.errors import LeaseLost, NoSuchSession, StoreClosed
from stenolog.stores.locks import ThreadLock
from stenolog.stores.sql.dialect import Transaction

if TYPE_CHECKING:
    from stenolog.stores.sql.store import SQLStore

S = TypeVar("S", bound="SQLStore")


class StoreLeases:
    """The unreleased leases of one store, at most one for each key."""

    def __init__(self) -> None:
        self.name = os.urandom(8).hex()
        """Name that identifies this store among the stores of the process."""
        self._mutex = ThreadLock()
        self._epochs: dict[str, tuple[int, int]] = {}
        self._abandoned: set[int] = set()
        """Epochs of leases whose release failed."""
        self.is_closed = False
        """Whether the store is closed and accepts no new leases."""
        self.has_released_database = False
        LEASES_BY_STORE[self.name] = self

    def add_lease(self, key: str, epoch: int) -> None:
        """Record a lease before the lease is committed, so that `close` can release it.

        Raises StoreClosed.
        """
        with self._mutex:
            if self.is_closed:
                raise StoreClosed("the store is closed")
            self._abandoned.discard(self._epochs.get(key, (0, 0))[0])
            # Store the process id, too: a forked child must not release the lease.
            self._epochs[key] = epoch, os.getpid()

    def confirm_renewal(self, key: str, epoch: int) -> bool:
        """Record a renewed lease; return False if an earlier release failed. Raises StoreClosed."""
        with self._mutex:
            if epoch in self._abandoned:
                return False
            # Record the epoch again: a thread that tried to take over may have replaced it.
            self.add_lease(key, epoch)
            return True

    def is_active(self, epoch: int) -> bool:
        """Return whether this store still uses the lease."""
        with self._mutex:
            is_known = any(epoch == active_epoch for active_epoch, _ in self._epochs.values())
            return is_known and epoch not in self._abandoned

    def abandon_lease(self, epoch: int) -> None:
        """Stop using a lease whose release failed."""
        with self._mutex:
            self._abandoned.add(epoch)

    def forget_lease(self, key: str, epoch: int) -> None:
        """Forget a lease that was released or never committed.

        A later lease of the same key is kept.
        """
        with self._mutex:
            if self._epochs.get(key, (None, 0))[0] == epoch:
                del self._epochs[key]
            self._abandoned.discard(epoch)

    def close(self) -> list[int]:
        """Stop accepting leases, and return the epochs of this process's unreleased leases."""
        with self._mutex:
            self.is_closed = True
            epochs = [epoch for epoch, pid in self._epochs.values() if pid == os.getpid()]
            self._epochs.clear()
        return epochs


LEASES_BY_STORE: Final = WeakValueDictionary[str, StoreLeases]()
"""Leases of each store of this process, by `StoreLeases.name`."""


def holder_name() -> str:
    """Return a readable description of this thread for the row of a lease."""
    return f"process {os.getpid()} on {socket.gethostname()}, {threading.current_thread().name}"


class SQLLease(Generic[S]):
    """A lease on one session. Writes are rejected after another holder took over the lease.

    A lease belongs to the process that acquired it. In a forked child the lease counts as lost.
    """

    def __init__(self, store: S, leases: StoreLeases, key: str, epoch: int, ttl: float) -> None:
        self._leases = leases
        self._process = os.getpid()
        self._released = False
        self._ttl = ttl
        self.key = key
        """Key of the session."""
        self.epoch = epoch
        """Fencing token: each new lease of the key has a greater epoch."""
        self.store: S = store.fenced_by(self)
        """Store whose writes raise LeaseLost after the lease was released or taken over."""

    @property
    def lost(self) -> bool:
        """Whether the lease was released, expired or taken over, or the store was closed."""
        if self._leases.is_closed or self._is_in_forked_child():
            return True
        try:
            rows = self.store._run_read(lambda tx, _: tx.run("lease_in_force", self.epoch))
        except StoreClosed:
            return True
        return not any(self.store._is_lease_held(row) for row in rows)

    def check_ownership(self) -> None:
        """Raise LeaseLost in a forked child or after a release."""
        if self._is_in_forked_child():
            raise LeaseLost(self.key, self.epoch, reason="belongs to the process that acquired it")
        if self._released:
            raise LeaseLost(self.key, self.epoch, reason="was released")

    def check_held(self, transaction: Transaction) -> None:
        """Raise LeaseLost if the lease was released or taken over.

        An expired lease still allows writes.
        """
        self.check_ownership()
        self._require_lease_row(transaction, "find_epoch")  # guard: sql-lease-fence

    @contextmanager
    def fence(self, transaction: Transaction) -> Iterator[None]:
        """Check the lease before the statements inside the `with`, and lock the lease after them.

        The lock prevents a takeover before the transaction ends. Sessions are locked before leases,
        as in a purge: the opposite order could deadlock.
        """
        self.check_held(transaction)
        try:
            yield
        except NoSuchSession:
            # A purge removes the lease, too. In that case raise LeaseLost, not NoSuchSession.
            self._require_lease_row(transaction, "check_lease")
            raise
        self._require_lease_row(transaction, "check_lease")

    def _require_lease_row(self, transaction: Transaction, statement: str) -> None:
        if not transaction.run(statement, self.epoch):
            raise LeaseLost(self.key, self.epoch)

    def renew(self) -> None:
        """Extend the lease to ttl seconds from now. Raises LeaseLost."""
        self.check_ownership()
        self.store._renew_lease(self.key, self.epoch, ttl=self._ttl)

    def release(self) -> None:
        """Release the lease; a second call does nothing.

        If the release cannot be written, another process can acquire the lease after its ttl.
        """
        if self._is_in_forked_child():
            return
        self._released = True
        try:
            with suppress(StoreClosed):
                self.store._release_leases([self.epoch])
            # Forget the lease last, so that a concurrent `close` still releases the lease.
            self._leases.forget_lease(self.key, self.epoch)
        except BaseException:
            self._leases.abandon_lease(self.epoch)
            raise

    def _is_in_forked_child(self) -> bool:
        return self._process != os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
