"""What the SQL engine needs from a database.

The statements stand in the `queries.sql` of each engine, under equal names, with equal values and
columns. These protocols have what one named statement cannot express.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from stenolog.errors import StenologError
from stenolog.records import Health, Message, Span, State
from stenolog.stores.batches import Batch
from stenolog.stores.damage import Damage

if TYPE_CHECKING:
    from stenolog.stores.sql.leases import Held, SQLLease

Row = tuple[Any, ...]
T = TypeVar("T")


class Clash(Exception):
    """Another writer stored the same unique value at the same moment."""


class Transaction(Protocol):
    """Statements that are committed together, or are read from one connection."""

    @property
    def format(self) -> int:
        """Version of the tables that this code knows; 0 if rows do not carry a version."""
        ...

    def run(self, name: str, /, *values: Any) -> list[Row]:
        """Execute the statement of this name and return its rows. Raises Clash.

        Text comes back as str or bytes, whatever the column holds: see `text` and `raw` in
        sessions.py.
        """
        ...

    def run_many(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute the statement of this name once for each row of values."""
        ...

    def key(self, key: str) -> Any:
        """Return a session key as a value for a statement."""
        ...

    def body(self, body: bytes) -> Any:
        """Return JSON as a value for a statement."""
        ...

    def check_format(self) -> None:
        """Raise NewerFormat if newer code has changed the tables."""
        ...

    def check_row_format(self, version: int | None) -> None:
        """Raise NewerFormat if newer code has written a row with this version."""
        ...

    def messages(self, session: int, wanted: Sequence[Span], state: State | None) -> list[Message]:
        """Return the intact messages with these seqs, in order.

        `state`: mark the messages that it hides. None: all of them are visible.
        """
        ...

    def intact_messages(
        self, session: int, first: int, last: int
    ) -> Iterator[tuple[int, str, bytes]]:
        """Yield seq, time and body of each intact message; not all of them are in memory."""
        ...

    def examine_messages(self, session: int) -> Iterator[tuple[int, bool]]:
        """Yield the seq of each message row, and whether time and body are intact."""
        ...

    def add_messages(self, session: int, rows: Iterable[tuple[int, str, bytes]]) -> None:
        """Store messages given as seq, time and body."""
        ...

    def savepoint(self) -> AbstractContextManager[object]:
        """Undo what is done inside, and nothing else, if it raises."""
        ...

    def erasing(self) -> AbstractContextManager[object]:
        """Delete rows inside so that their bytes can be erased later (`Dialect.erase`)."""
        ...

    def unfinished_purges(self) -> list[str | bytes]:
        """Return the times at which purges began whose bytes were not yet erased."""
        ...


Result = list[int] | StenologError
"""What became of an append in a group: its seqs, or an error."""


class Dialect(Protocol):
    """The database of one store."""

    @property
    def damage(self) -> Damage:
        """Damage that this process has met."""
        ...

    @property
    def read_only(self) -> bool:
        """Whether nothing may be written."""
        ...

    @property
    def busy_timeout(self) -> float:
        """How long a call waits for other writers, in seconds."""
        ...

    def check_open(self) -> None:
        """Raise StoreClosed."""
        ...

    def check_writable(self) -> None:
        """Raise StoreClosed, ReadOnly."""
        ...

    # --- transactions ------------------------------------------------------------------------

    def look(self, work: Callable[[Transaction], T]) -> T:
        """Run `work`, which only reads; maybe more than once, and not always as of one moment."""
        ...

    def look_at_messages(self, work: Callable[[Transaction, Damage | None], T]) -> T:
        """Run `work`, which reads a session and then its messages, as of one moment.

        It is passed None if it must raise MissingRows for missing messages, to be run again.
        """
        ...

    def read(self) -> AbstractContextManager[Transaction]:
        """Open a transaction that reads as of one moment."""
        ...

    def change(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a transaction that writes; maybe more than once."""
        ...

    def write(self) -> AbstractContextManager[Transaction]:
        """Open a transaction that writes; any error undoes it."""
        ...

    # --- appends -----------------------------------------------------------------------------

    def append_one(self, namespace: str, key: str, payload: bytes) -> int:
        """Append one message by the fast path and return its seq."""
        ...

    def append(self, namespace: str, key: str, batch: Batch, lease: "SQLLease[Any] | None") -> int:
        """Append a batch and return its first seq. Raises OnceConflict, LeaseLost."""
        ...

    def append_group(
        self,
        namespace: str,
        key: str,
        group: Sequence[tuple[int, Batch]],
        results: list[Result],
        lease: "SQLLease[Any] | None",
    ) -> None:
        """Append batches in their order; set the result at the index of each."""
        ...

    # --- notification ------------------------------------------------------------------------

    def notify(self, namespace: str, key: str, /) -> None:
        """Tell followers that a session has changed, unless the commit did."""
        ...

    def listening(
        self, namespace: str, key: str, /
    ) -> AbstractContextManager[tuple[Callable[[float], object], float]]:
        """Return a function that waits for a change of the session, and the longest wait."""
        ...

    # --- leases ------------------------------------------------------------------------------

    def waiting_for_lease(
        self, namespace: str, key: str, /
    ) -> AbstractContextManager[Callable[[float], object]]:
        """Return a function that waits until a lease may be free, at most so many seconds."""
        ...

    def lease_holder(self, row: Row) -> str | None:
        """Return who holds the lease of this row (`find_lease`), for people; None if it is free."""
        ...

    def is_held(self, row: Row) -> bool:
        """Return whether a row (`lease_in_force`) says that the lease is held."""
        ...

    def take_lease(self, held: "Held", namespace: str, key: str, *, ttl: float) -> int:
        """Take the lease and return its epoch; 0 if another holder was first."""
        ...

    def renew_lease(self, held: "Held", key: str, epoch: int, *, ttl: float) -> None:
        """Extend a lease to a full ttl from now. Raises LeaseLost, StoreClosed."""
        ...

    def end_leases(self, epochs: Sequence[int]) -> None:
        """Release these leases. Raises StoreUnavailable."""
        ...

    # --- purge, health, end ------------------------------------------------------------------

    def erase(self) -> tuple[str, ...]:
        """Erase the bytes of purged rows; return where they remain."""
        ...

    def health(self) -> Health:
        """Return whether writes can be expected to work."""
        ...

    def close(self) -> None:
        """Let go of the database; a second call does nothing."""
        ...
