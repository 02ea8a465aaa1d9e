"""Leases, stored as one row per session key. Each new holder gets a new epoch."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar
from weakref import WeakValueDictionary

from stenolog.errors import LeaseLost, NoSuchSession, StoreClosed
from stenolog.stores.sql.dialect import Transaction

if TYPE_CHECKING:
    from stenolog.stores.sql.store import SQLStore

S = TypeVar("S", bound="SQLStore")


class StoreLeases:
    """The unreleased leases of one store."""

    def __init__(self) -> None:
        self.name = os.urandom(8).hex()
        """Name that identifies this store among the stores of the process."""
        self._processes: dict[int, int] = {}
        """Process that acquired each lease, by epoch: a forked child must not release a lease."""
        self.is_closed = False
        """Whether the store is closed and accepts no new leases."""
        self.has_released_database = False
        LEASES_BY_STORE[self.name] = self

    def add_lease(self, epoch: int) -> None:
        """Record a lease before the lease is committed, so that `close` can release it.

        Raises StoreClosed.
        """
        # `close` does these two steps in reverse order, so that one of both calls sees the other.
        self._processes[epoch] = os.getpid()
        if self.is_closed:
            raise StoreClosed("the store is closed")

    def is_active(self, epoch: int) -> bool:
        """Return whether this store still uses the lease."""
        return epoch in self._processes

    def forget_lease(self, epoch: int) -> None:
        """Forget a lease that was released or never committed, or whose release failed."""
        self._processes.pop(epoch, None)

    def close(self) -> list[int]:
        """Stop accepting leases, and return the epochs of this process's unreleased leases."""
        self.is_closed = True
        processes, self._processes = self._processes.copy(), {}
        return [epoch for epoch, pid in processes.items() if pid == os.getpid()]


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
        if self._released or self._leases.is_closed or self._is_in_forked_child():
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
        finally:
            # Forget the lease last, so that a concurrent `close` still releases the lease.
            self._leases.forget_lease(self.epoch)

    def _is_in_forked_child(self) -> bool:
        return self._process != os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
