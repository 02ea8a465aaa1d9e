"""Keeps an index up to date with its store.

The store's stamps tell which sessions changed; of these only what is new is read. A stamp is taken
before its session is read, so what is written meanwhile is at worst read again the next time.

Several may refresh one index at once, in any number of processes: each session has a version, and
of two who read the same one only the first can store the next; the other begins again with what
it finds then. Nothing of the store is called while a transaction is open, because in a SQLite store
nobody could write meanwhile; and no transaction is long, for the same reason.
"""

from collections.abc import Callable
from typing import Final, TypeVar

from msgspec import Struct

from stenolog.catalog.database import Busy, Database, Transaction
from stenolog.stores.base import Store
from stenolog.stores.jsonl import JSONLStore

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with how many of the changed sessions are done, and how many there are."""

_MOST_ROUNDS: Final = 20


class _Known(Struct, frozen=True):
    """What the index has of each session."""

    made: int | None
    """Which index it was."""
    writes: int
    """How often it was written until then."""
    stamps: dict[str, str | None]

    def only(self, keys: set[str]) -> "_Known":
        """The same of these sessions."""
        return _Known(self.made, self.writes, _only(self.stamps, keys))


class Refresher:
    """Brings an index up to date with a store."""

    def __init__(self, store: Store, database: Database) -> None:
        self._store = store
        self._database = database
        self._sql = database.sql
        self._known = _Known(None, 0, {})

    def refresh(self, progress: Progress | None = None) -> int | None:
        """Take in all that was stored before this call; into which index. Raises Broken, Unusable.

        Busy: others were quicker every time, so what the index has may be older than the call.
        """
        made: int | None = None
        missed: set[str] | None = None
        for _ in range(_MOST_ROUNDS):
            # The rows first, then the stamps: a session that has a row and no stamp is gone.
            known = self._look_at_rows()
            stamps = self._store.stamps()
            if known.stamps == stamps:
                return known.made
            if missed is not None and known.made == made:
                # The others were taken in by a look that is not older than this call.
                known, stamps = known.only(missed), _only(stamps, missed)
            missed, made = self._take_in(known, stamps, progress or _silent), known.made
            if not missed:
                return made
            # Somebody else changed these rows, perhaps by an older look at the store than ours.
        raise Busy("the index is changed by others all the time")

    def is_in(self, transaction: Transaction, made: int | None) -> bool:
        """Whether this is still a look at that index: a purge may have emptied it since."""
        [(found, _)] = transaction.execute(self._sql["about"])
        return bool(found == made)

    def _take_in(self, known: _Known, stamps: dict[str, str], progress: Progress) -> set[str]:
        """Bring the rows up to these stamps; those that somebody else changed meanwhile."""
        # Who finds nothing to do does not wait for it.
        from stenolog.catalog.intake import Intake, Reading
        from stenolog.stores.jsonl import listing

        by_file = isinstance(self._store, JSONLStore)
        reading = Reading(listing.grew, listing.changed) if by_file else Reading()
        intake = Intake(self._store, self._database, reading, made=known.made, known=known.stamps)
        changed = {key: stamp for key, stamp in stamps.items() if known.stamps.get(key) != stamp}
        if changed:
            intake.take_in(changed, progress)
        intake.remove(known.stamps.keys() - stamps.keys())
        return intake.missed

    def _look_at_rows(self) -> _Known:
        """What the index has, from memory where nobody changed it."""
        with self._database.read() as transaction:
            [(made, writes)] = transaction.execute(self._sql["about"])
            if (self._known.made, self._known.writes) != (made, writes):
                rows = transaction.execute(self._sql["stamps"])
                self._known = _Known(made, writes, {key: stamp for key, stamp in rows})  # noqa: C416 - rows have any length
        return self._known


def _only(stamps: dict[str, T], keys: set[str]) -> dict[str, T]:
    return {key: stamp for key, stamp in stamps.items() if key in keys}


def _silent(_done: int, _total: int) -> None:
    """Nobody wants to know."""
