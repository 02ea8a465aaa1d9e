"""The turn in a session: a row with an epoch, which whoever comes next replaces.

It is free when its time is over, and also when its holder certainly is done: a process that is
gone, or one of this process's stores that does not have it any more.
"""

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self
from weakref import WeakValueDictionary

from stenolog.errors import LeaseLost, NoSuchSession, StenologError, StoreBusy, StoreClosed
from stenolog.stores.locks import ThreadLock
from stenolog.stores.rows import now
from stenolog.stores.sqlite import processes
from stenolog.stores.sqlite.queries import SQL

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
                epoch = _insert(transaction, held, namespace, key, ttl)
                held.add(key, epoch)
    except BaseException:
        # It does not count, and its epoch may be given to another.
        held.forget(key, epoch)
        raise
    return epoch, holder


def _holder(transaction: "Transaction", namespace: str, key: str) -> str | None:
    """Who has the turn, in words; None where it is free. Raises NoSuchSession."""
    if not list(transaction.execute(SQL["find_life"], (namespace, key))):
        raise NoSuchSession(key)
    for holder, *lease in transaction.execute(SQL["find_lease"], (namespace, key)):
        if is_held(*lease):
            since = lease[1]
            return f"{holder.decode(errors='replace')}, since {since.decode()},"
    return None


def is_held(epoch: int, since: bytes, expires: float, process: bytes) -> bool:
    """Whether a row says that somebody has the turn."""
    return _in_force(since, expires) and not _is_left(epoch, process)


def _is_left(epoch: int, process: bytes) -> bool:
    """Whether who took a lease certainly is done with it, though its time is not over."""
    holder, _, name = process.decode(errors="replace").rpartition(" ")
    taker, here = processes.parse(holder), processes.current()
    if taker is None or here is None or not here.sees(taker):
        return False
    if taker == here:
        held = _STORES.get(name)
        return held is None or not held.has(epoch)
    return processes.is_gone(taker)


def _in_force(since: bytes, expires: float) -> bool:
    """Whether a lease, taken or renewed at `since`, has time left."""
    present = time.time()
    try:
        # From the future: the clock was ahead then, and may have been by years.
        begun = datetime.fromisoformat(since.decode()).timestamp()
        return begun - _SET_BACK < present < expires
    except (ValueError, TypeError):  # damaged
        return False


def _insert(transaction: "Transaction", held: "Held", namespace: str, key: str, ttl: float) -> int:
    transaction.execute(SQL["end_lease_of"], (namespace, key))
    holder = f"process {os.getpid()} on {socket.gethostname()}, {threading.current_thread().name}"
    here = processes.current()
    process = "" if here is None else f"{here} {held.name}"
    [(epoch,)] = transaction.execute(
        SQL["add_lease"], (namespace, key, holder, now(), time.time() + ttl, process)
    )
    return int(epoch)


class Held:
    """The leases that were taken by one store and not released, at most one for each key."""

    def __init__(self) -> None:
        self.name = os.urandom(8).hex()
        """Tells one store of a process from another."""
        self._mutex = ThreadLock()
        self._epochs: dict[str, tuple[int, int]] = {}
        self._given_up: set[int] = set()
        """Those of them that could not be released."""
        self._closed = False
        _STORES[self.name] = self

    def add(self, key: str, epoch: int) -> None:
        """Remember one, before it counts: closing must not miss it. Raises StoreClosed."""
        with self._mutex:
            if self._closed:
                raise StoreClosed("the store is closed")
            self._given_up.discard(self._epochs.get(key, (0, 0))[0])
            # What a forked child does with it is not the child's affair.
            self._epochs[key] = epoch, os.getpid()

    def keep(self, key: str, epoch: int) -> bool:
        """Whether one that is renewed was not given up before. Raises StoreClosed."""
        with self._mutex:
            if epoch in self._given_up:
                return False
            # Somebody may have tried to take over, and failed.
            self.add(key, epoch)
            return True

    def has(self, epoch: int) -> bool:
        """Whether somebody is in this turn."""
        with self._mutex:
            taken = any(epoch == one for one, _ in self._epochs.values())
            return taken and epoch not in self._given_up

    def give_up(self, epoch: int) -> None:
        """Nobody is in this turn any more; whether that was written down or not."""
        with self._mutex:
            self._given_up.add(epoch)

    def forget(self, key: str, epoch: int) -> None:
        """It was released, or never counted; a later one of the same key stays."""
        with self._mutex:
            if self._epochs.get(key, (None, 0))[0] == epoch:
                del self._epochs[key]
            self._given_up.discard(epoch)

    def release(self, database: "Database") -> None:
        """Take no more, and release those of this process, as far as that can be written."""
        with self._mutex:
            self._closed = True
            epochs = [epoch for epoch, process in self._epochs.values() if process == os.getpid()]
            self._epochs.clear()
        if epochs:
            with suppress(StenologError), database.write() as transaction:
                transaction.executemany(SQL["end_lease"], ((epoch,) for epoch in epochs))


_STORES: Final = WeakValueDictionary[str, Held]()
"""What each store of this process holds, by name."""


class SQLiteLease:
    """A turn in one session. Who took over has another epoch, and then no write gets through.

    It is that of the process which took it: in a forked child it counts as lost.
    """

    def __init__(self, store: "SQLiteStore", held: Held, key: str, epoch: int, ttl: float) -> None:
        self._database = store.database
        self._held = held
        self._process = os.getpid()
        self._released = False
        self._ttl = ttl
        self.key = key
        """The session."""
        self.epoch = epoch
        """Grows with each lease."""
        self.store: SQLiteStore = store.behind(self)
        """The store, whose writes raise LeaseLost once it is released or taken over."""

    @property
    def lost(self) -> bool:
        """Whether it has run out or somebody else took over, or the store was closed."""
        if self._is_of_parent():
            return True
        try:
            with self._database.read() as transaction:
                rows = transaction.execute(SQL["lease_expires"], (self.epoch,))
                return not any(is_held(*lease) for lease in rows)
        except StoreClosed:
            return True

    def check(self, transaction: "Transaction") -> None:
        """Raise LeaseLost where it was released or taken over; to have run out is no harm."""
        self._check_process()
        if self._released:
            raise LeaseLost(self.key, self.epoch, reason="was released")
        if not list(transaction.execute(SQL["lease_expires"], (self.epoch,))):
            raise LeaseLost(self.key, self.epoch)

    def renew(self) -> None:
        """Another ttl from now. Raises LeaseLost."""
        self._check_process()
        with self._database.write() as transaction:
            values = (self.epoch, now(), time.time() + self._ttl)
            renewed = list(transaction.execute(SQL["renew_lease"], values))
            if not renewed or not self._held.keep(self.key, self.epoch):
                raise LeaseLost(self.key, self.epoch)

    def release(self) -> None:
        """Let the next one in; a second call does nothing.

        Where that cannot be written, it lets in this process, and others after the ttl.
        """
        if not self._is_of_parent():
            self._released = True
            try:
                self._end()
            except BaseException:
                self._held.give_up(self.epoch)
                raise

    def _end(self) -> None:
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
