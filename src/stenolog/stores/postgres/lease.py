"""The turn in a session: a row with an epoch, which whoever comes next replaces.

By the server's clock: those of the machines may differ.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from stenolog.errors import LeaseLost, NoSuchSession, StenologError, StoreBusy, StoreClosed
from stenolog.stores.postgres.rows import find, name_of

if TYPE_CHECKING:
    from stenolog.stores.postgres.connections import Transaction
    from stenolog.stores.postgres.database import Database
    from stenolog.stores.postgres.store import PostgresStore

_POLL: Final = 0.05
_LONGEST: Final = 100 * 365 * 86_400.0
"""Of a lease, in seconds: the server does not count for ever."""


class Held:
    """The leases of one store, and whether it is still open."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._epochs: dict[int, int] = {}
        self.closed = False
        """Whether the store was closed."""

    def add(self, epoch: int) -> bool:
        """Remember one; False where the store was closed meanwhile."""
        with self._mutex:
            if not self.closed:
                self._epochs[epoch] = os.getpid()
            return not self.closed

    def forget(self, epoch: int) -> None:
        """It was released."""
        with self._mutex:
            self._epochs.pop(epoch, None)

    def close(self) -> list[int]:
        """Take no more; those of this process that were not released. Empty the second time."""
        with self._mutex:
            self.closed = True
            epochs, self._epochs = self._epochs, {}
        return [epoch for epoch, process in epochs.items() if process == os.getpid()]


def take(store: "PostgresStore", held: Held, key: str, *, ttl: float, wait: float) -> int:
    """The epoch of a new lease. Raises NoSuchSession, StoreBusy, StoreClosed."""
    database, deadline = store.database, time.monotonic() + wait
    holder = f"process {os.getpid()} on {socket.gethostname()}, {threading.current_thread().name}"
    # Whoever does not get the answer asks again, and is known by this.
    values = (store.namespace, key.encode(), holder, os.urandom(8).hex(), min(float(ttl), _LONGEST))
    name = name_of(store.namespace, key)
    bell = database.news.bell(name)
    try:
        while True:
            if held.closed:
                raise StoreClosed("the store is closed")
            # Looked at first: whoever waits is not to write all the time.
            words = database.look(_holder(store.namespace, key))
            if words is None:
                for (epoch,) in database.write_once(
                    lambda transaction: transaction.run("take_lease", *values), safe=True
                ):
                    if held.add(epoch):
                        return int(epoch)
                    end(database, [epoch])
            left = deadline - time.monotonic()
            if left <= 0 and words is not None:
                raise StoreBusy(f"{key!r}: {words} has the turn")
            if words is not None:
                # Rung when something is stored there, or somebody in this process lets go.
                bell.wait(min(_POLL, left))
                bell.clear()
    finally:
        database.news.forget(name, bell)


def _holder(namespace: str, key: str) -> Callable[["Transaction"], str | None]:
    """Looks who has the turn, in words; None where it is free. Raises NoSuchSession."""

    def look(transaction: "Transaction") -> str | None:
        if find(transaction, namespace, key) is None:
            raise NoSuchSession(key)
        for holder, since, in_force in transaction.run("find_lease", namespace, key.encode()):
            if in_force:
                return f"{holder}, since {since},"
        return None

    return look


def end(database: "Database", epochs: list[int]) -> None:
    """Let the next ones in. Raises StoreUnavailable."""
    database.write_once(lambda transaction: transaction.run("end_leases", epochs), safe=True)


class PostgresLease:
    """A turn in one session. Who took over has another epoch, and then no write gets through.

    It is that of the process which took it: in a forked child it counts as lost.
    """

    def __init__(
        self, store: "PostgresStore", held: Held, key: str, epoch: int, ttl: float
    ) -> None:
        self._database = store.database
        self._held = held
        self._name = name_of(store.namespace, key)
        self._process = os.getpid()
        self._released = False
        self._ttl = min(float(ttl), _LONGEST)
        self.key = key
        """The session."""
        self.epoch = epoch
        """Grows with each lease."""
        self.store: PostgresStore = store.behind(self)
        """The store, whose writes raise LeaseLost once it is released or taken over."""

    @property
    def lost(self) -> bool:
        """Whether it has run out or somebody else took over, or the store was closed."""
        if self._held.closed or self._is_of_parent():
            return True
        try:
            rows = self._database.look(lambda found: found.run("lease_in_force", self.epoch))
        except StoreClosed:
            return True
        return not rows

    def check_own(self) -> None:
        """Raise LeaseLost in a forked child, and once it was released."""
        if self._is_of_parent():
            raise LeaseLost(self.key, self.epoch, reason="is that of the process that took it")
        if self._released:
            raise LeaseLost(self.key, self.epoch, reason="was released")

    def check(self, transaction: "Transaction") -> None:
        """Raise LeaseLost where somebody else took over; to have run out alone is no harm.

        Nobody takes over before the transaction has ended.
        """
        if not transaction.run("check_lease", self.epoch):
            raise LeaseLost(self.key, self.epoch)

    def renew(self) -> None:
        """Another ttl from now. Raises LeaseLost."""
        self.check_own()
        if self._held.closed:
            raise StoreClosed("the store is closed")
        if not self._database.write_once(
            lambda transaction: transaction.run("renew_lease", self.epoch, self._ttl), safe=True
        ):
            raise LeaseLost(self.key, self.epoch)

    def release(self) -> None:
        """Let the next one in; a second call does nothing.

        Where that cannot be written, the next one comes in after the ttl.
        """
        if self._is_of_parent():
            return
        self._released = True
        with suppress(StoreClosed):
            end(self._database, [self.epoch])
            self._database.news.tell(self._name)
        self._held.forget(self.epoch)

    def _is_of_parent(self) -> bool:
        return self._process != os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def release_all(database: "Database", held: Held) -> None:
    """Take no more, and release those of this process, as far as that can be written."""
    epochs = held.close()
    if epochs:
        with suppress(StenologError):
            end(database, epochs)
