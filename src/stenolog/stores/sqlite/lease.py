"""The turn in a session: a row with an epoch, which whoever comes next replaces."""

import os
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from stenolog.errors import LeaseLost, NoSuchSession, StenologError, StoreBusy, StoreClosed
from stenolog.stores.sqlite.queries import SQL
from stenolog.stores.sqlite.rows import now

if TYPE_CHECKING:
    from stenolog.stores.sqlite.connections import Transaction
    from stenolog.stores.sqlite.database import Database
    from stenolog.stores.sqlite.store import SQLiteStore

_POLL: Final = 0.005


def take(database: "Database", namespace: str, key: str, *, ttl: float, wait: float) -> int:
    """The epoch of a new lease. Raises NoSuchSession, StoreBusy."""
    deadline = time.monotonic() + wait
    while True:
        with database.read() as transaction:
            if not list(transaction.execute(SQL["find_life"], (namespace, key))):
                raise NoSuchSession(key)
            holder = _holder(transaction, namespace, key)
        if holder is None:
            with database.write() as transaction:
                # Somebody may have been quicker.
                holder = _holder(transaction, namespace, key)
                if holder is None:
                    return _insert(transaction, namespace, key, ttl)
        if time.monotonic() >= deadline:
            raise StoreBusy(f"{key!r}: {holder} has the turn")
        time.sleep(min(_POLL, max(0.0, deadline - time.monotonic())))


def _holder(transaction: "Transaction", namespace: str, key: str) -> str | None:
    """Who has the turn, in words; None where it is free."""
    for holder, since, expires in transaction.execute(SQL["find_lease"], (namespace, key)):
        if expires > time.time():
            return f"{holder}, since {since},"
    return None


def _insert(transaction: "Transaction", namespace: str, key: str, ttl: float) -> int:
    transaction.execute(SQL["end_lease_of"], (namespace, key))
    holder = f"process {os.getpid()} on {socket.gethostname()}, {threading.current_thread().name}"
    [(epoch,)] = transaction.execute(
        SQL["add_lease"], (namespace, key, holder, now(), time.time() + ttl)
    )
    return int(epoch)


class Held:
    """The leases that were taken by one store and not released, at most one for each key."""

    def __init__(self) -> None:
        self._epochs: dict[str, tuple[int, int]] = {}

    def add(self, key: str, epoch: int) -> None:
        """Remember one; what a forked child does with it is not the child's affair."""
        self._epochs[key] = epoch, os.getpid()

    def forget(self, key: str, epoch: int) -> None:
        """It was released, or lost; a later one of the same key stays."""
        if self._epochs.get(key, (0, 0))[0] == epoch:
            del self._epochs[key]

    def release(self, database: "Database") -> None:
        """Release those of this process, as far as the database can still be written."""
        epochs = [epoch for epoch, process in self._epochs.values() if process == os.getpid()]
        self._epochs.clear()
        if epochs:
            with suppress(StenologError), database.write() as transaction:
                transaction.executemany(SQL["end_lease"], ((epoch,) for epoch in epochs))


class SQLiteLease:
    """A turn in one session. Who took over has another epoch, and then no write gets through."""

    def __init__(self, store: "SQLiteStore", held: Held, key: str, epoch: int, ttl: float) -> None:
        self._database = store.database
        self._held = held
        held.add(key, epoch)
        self._ttl = ttl
        self.key = key
        """The session."""
        self.epoch = epoch
        """Grows with each lease."""
        self.store: SQLiteStore = store.behind(self)
        """The store, whose writes raise LeaseLost once another holder took over."""

    @property
    def lost(self) -> bool:
        """Whether it has run out or somebody else took over, or the store was closed."""
        try:
            with self._database.read() as transaction:
                rows = transaction.execute(SQL["lease_expires"], (self.epoch,))
                return not any(expires > time.time() for (expires,) in rows)
        except StoreClosed:
            return True

    def check(self, transaction: "Transaction") -> None:
        """Raise LeaseLost where somebody else took over; to have run out alone is no harm."""
        if not list(transaction.execute(SQL["lease_expires"], (self.epoch,))):
            raise LeaseLost(self.key, self.epoch)

    def renew(self) -> None:
        """Another ttl from now. Raises LeaseLost."""
        with self._database.write() as transaction:
            values = (self.epoch, time.time() + self._ttl)
            if not list(transaction.execute(SQL["renew_lease"], values)):
                raise LeaseLost(self.key, self.epoch)

    def release(self) -> None:
        """Let the next one in; a second call does nothing."""
        self._held.forget(self.key, self.epoch)
        with suppress(StoreClosed), self._database.write() as transaction:
            transaction.execute(SQL["end_lease"], (self.epoch,))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
