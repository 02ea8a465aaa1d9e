"""The turn in a session: a row with an epoch, which whoever comes next replaces."""

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from stenolog.errors import LeaseLost, NoSuchSession, StenologError, StoreBusy, StoreClosed
from stenolog.stores.locks import ThreadLock
from stenolog.stores.sqlite.queries import SQL
from stenolog.stores.sqlite.rows import now

if TYPE_CHECKING:
    from stenolog.stores.sqlite.connections import Transaction
    from stenolog.stores.sqlite.database import Database
    from stenolog.stores.sqlite.store import SQLiteStore

_POLL: Final = 0.005
_SET_BACK: Final = 2.0
"""A clock that was set back by more than this says nothing of leases taken before."""


def take(
    database: "Database", held: "Held", namespace: str, key: str, *, ttl: float, wait: float
) -> int:
    """The epoch of a new lease. Raises NoSuchSession, StoreBusy, StoreClosed."""
    deadline = time.monotonic() + wait
    while True:
        with database.read() as transaction:
            if not list(transaction.execute(SQL["find_life"], (namespace, key))):
                raise NoSuchSession(key)
            holder = _holder(transaction, namespace, key)
        if holder is None:
            epoch, holder = _try_to_take(database, held, namespace, key, ttl)
            if epoch:
                return epoch
        if time.monotonic() >= deadline:
            raise StoreBusy(f"{key!r}: {holder} has the turn")
        time.sleep(min(_POLL, max(0.0, deadline - time.monotonic())))


def _try_to_take(
    database: "Database", held: "Held", namespace: str, key: str, ttl: float
) -> tuple[int, str | None]:
    """The epoch of a new lease; or 0, and who was quicker."""
    epoch = 0
    try:
        with database.write() as transaction:
            holder = _holder(transaction, namespace, key)
            if holder is None:
                epoch = _insert(transaction, namespace, key, ttl)
                held.add(key, epoch)
    except BaseException:
        # It does not count, and its epoch may be given to another.
        held.forget(key, epoch)
        raise
    return epoch, holder


def _holder(transaction: "Transaction", namespace: str, key: str) -> str | None:
    """Who has the turn, in words; None where it is free."""
    for holder, since, expires in transaction.execute(SQL["find_lease"], (namespace, key)):
        if _in_force(since, expires):
            return f"{holder.decode(errors='replace')}, since {since.decode()},"
    return None


def _in_force(since: bytes, expires: float) -> bool:
    """Whether a lease, taken or renewed at `since`, has time left."""
    present = time.time()
    try:
        # From the future: the clock was ahead then, and may have been by years.
        begun = datetime.fromisoformat(since.decode()).timestamp()
        return begun - _SET_BACK < present < expires
    except (ValueError, TypeError):  # damaged
        return False


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
        self._mutex = ThreadLock()
        self._epochs: dict[str, tuple[int, int]] = {}
        self._closed = False

    def add(self, key: str, epoch: int) -> None:
        """Remember one, before it counts: closing must not miss it. Raises StoreClosed."""
        with self._mutex:
            if self._closed:
                raise StoreClosed("the store is closed")
            # What a forked child does with it is not the child's affair.
            self._epochs[key] = epoch, os.getpid()

    def forget(self, key: str, epoch: int) -> None:
        """It was released, or never counted; a later one of the same key stays."""
        with self._mutex:
            if self._epochs.get(key, (None, 0))[0] == epoch:
                del self._epochs[key]

    def release(self, database: "Database") -> None:
        """Take no more, and release those of this process, as far as that can be written."""
        with self._mutex:
            self._closed = True
            epochs = [epoch for epoch, process in self._epochs.values() if process == os.getpid()]
            self._epochs.clear()
        if epochs:
            with suppress(StenologError), database.write() as transaction:
                transaction.executemany(SQL["end_lease"], ((epoch,) for epoch in epochs))


class SQLiteLease:
    """A turn in one session. Who took over has another epoch, and then no write gets through.

    It is that of the process which took it: in a forked child it counts as lost.
    """

    def __init__(self, store: "SQLiteStore", held: Held, key: str, epoch: int, ttl: float) -> None:
        self._database = store.database
        self._held = held
        self._process = os.getpid()
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
        if self._is_of_parent():
            return True
        try:
            with self._database.read() as transaction:
                rows = transaction.execute(SQL["lease_expires"], (self.epoch,))
                return not any(_in_force(since, expires) for since, expires in rows)
        except StoreClosed:
            return True

    def check(self, transaction: "Transaction") -> None:
        """Raise LeaseLost where somebody else took over; to have run out alone is no harm."""
        self._check_process()
        if not list(transaction.execute(SQL["lease_expires"], (self.epoch,))):
            raise LeaseLost(self.key, self.epoch)

    def renew(self) -> None:
        """Another ttl from now. Raises LeaseLost."""
        self._check_process()
        with self._database.write() as transaction:
            values = (self.epoch, now(), time.time() + self._ttl)
            if not list(transaction.execute(SQL["renew_lease"], values)):
                raise LeaseLost(self.key, self.epoch)

    def release(self) -> None:
        """Let the next one in; a second call does nothing."""
        if self._is_of_parent():
            return
        with suppress(StoreClosed), self._database.write() as transaction:
            transaction.execute(SQL["end_lease"], (self.epoch,))
        # Not before: whoever closes the store meanwhile releases it.
        self._held.forget(self.key, self.epoch)

    def _is_of_parent(self) -> bool:
        return self._process != os.getpid()

    def _check_process(self) -> None:
        if self._is_of_parent():
            raise LeaseLost(self.key, self.epoch, reason="is that of the process that took it")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
