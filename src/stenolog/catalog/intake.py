"""Reads what is new of the sessions that changed, and has it written into the index."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from stenolog.catalog import steps, texts
from stenolog.catalog.database import Database, microseconds
from stenolog.catalog.entries import State
from stenolog.catalog.steps import Row, Seen, Settled, Step
from stenolog.catalog.writing import Writer
from stenolog.errors import (
    DamagedStore,
    ForeignLog,
    NoSuchSession,
    StenologError,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import reports, spans
from stenolog.stores.base import Store

_MOST_TRIES: Final = 20
_TAIL: Final = 32
"""So many of the last messages mostly tell whether a turn came to its end."""


class Reading(Struct, frozen=True):
    """What the stamps of a store tell besides that something changed; most tell nothing."""

    grew: Callable[[str, str], bool] = lambda _before, _now: True
    """Whether what happened from one to the other can have been an append, and nothing else."""
    age: Callable[[str], int] = lambda _stamp: 0
    """The more, the later the session was changed."""


class NotIndexable(Exception):
    """A session whose messages the catalog cannot process: a defect of the catalog."""

    def __init__(self, error: Exception) -> None:
        kind = type(error).__name__
        super().__init__(f"it cannot be indexed ({kind}: {error}); its messages are intact")
        self.passing = isinstance(error, MemoryError)
        """Whether the next attempt may succeed."""


class Intake:
    """One round of taking in, from what was known before the store was asked for its stamps.

    `made` is which index that was, `known` the stamps that it had.
    """

    def __init__(
        self,
        store: Store,
        database: Database,
        reading: Reading,
        *,
        made: int | None,
        known: Mapping[str, str | None],
    ) -> None:
        self._known = known
        self._store = store
        self._database = database
        self._sql = database.sql
        self._reading = reading
        self._sessions = SessionReader(store, reading)
        self._writer = Writer(database, made)

    @property
    def missed(self) -> set[str]:
        """The sessions that somebody else changed before we could."""
        return self._writer.missed

    def take_in(self, changed: Mapping[str, str], progress: Callable[[int, int], None]) -> None:
        """Read the sessions with these stamps, as far as they are new."""
        # What was said at about the same time comes together, which makes the newest easy to find.
        keys = sorted(changed, key=lambda key: self._reading.age(changed[key]))
        # Several who begin at once share the work, instead of all doing the same.
        begin = int.from_bytes(os.urandom(4)) % max(1, len(keys))
        for done, key in enumerate(keys[begin:] + keys[:begin]):
            progress(done, len(keys))
            self._take_in(key, changed[key])
        self._writer.flush()
        progress(len(keys), len(keys))

    def remove(self, gone: Iterable[str]) -> None:
        """Forget these sessions, but for what came back since."""
        for key in gone:
            row = self._row(key)
            if row is not None and row.stamp == self._known[key]:
                self._writer.put(key, steps.removal(key, row))
        self._writer.flush()

    def _row(self, key: str) -> Row | None:
        with self._database.read() as transaction:
            for found in list(transaction.execute(self._sql["row"], (key,))):
                # What is no such row is met here, where that means that the index is broken.
                return steps.row_of(found)
        return None

    def _take_in(self, key: str, stamp: str) -> None:
        row = self._row(key)
        if row is not None and row.stamp == stamp:
            return  # somebody else was quicker
        if (row.stamp if row is not None else None) != self._known.get(key):
            # And perhaps even later: then our stamp is an old one by now.
            self._writer.miss(key)
            return
        writer = self._writer
        try:
            writer.put(key, self._sessions.steps(key, stamp, row))
        except NoSuchSession:
            # Deleted since, or not finished yet: it is asked for again the next time.
            writer.put(key, steps.removal(key, row) if row is not None else ())
        except ForeignLog:
            self._settle(key, row, Settled(stamp=stamp, listed=False))
        except DamagedStore as error:
            self._settle(key, row, Settled(stamp=stamp, problem=str(error)))
        except StoreUnavailable as error:
            # It may be readable the next time, without a change.
            self._settle(key, row, Settled(stamp=None, problem=str(error)))
        except NotIndexable as error:
            reports.warning("session %r: %s", key, error)
            # Steps before the failure may have changed the row.
            writer.flush()
            settled = Settled(stamp=None if error.passing else stamp, problem=str(error))
            self._settle(key, self._row(key), settled)

    def _settle(self, key: str, row: Row | None, settled: Settled) -> None:
        """Replace the row of a session by one without messages."""
        if key not in self._writer.missed:
            self._writer.put(key, steps.emptied(key, row, settled=settled))


class SessionReader:
    """Reads sessions of a store in the form that the index takes them in."""

    def __init__(self, store: Store, reading: Reading) -> None:
        self._store = store
        self._reading = reading

    def steps(self, key: str, stamp: str, row: Row | None) -> Iterator[Step]:
        """Yield the steps from `row` to what the store holds now.

        Raises what the store raises, and NotIndexable if the content causes any other error: one
        session must not keep the others out of the index.
        """
        try:
            yield from steps.steps(key, stamp, row, self._look(key, stamp, row))
        except StenologError:
            raise
        except Exception as error:  # guard: catalog-contains-one-session
            raise NotIndexable(error) from error

    def _look(self, key: str, stamp: str, row: Row | None) -> Seen:
        """The session as far as it is new, or all of it. Raises what the store raises."""
        # Where a row is being emptied, nothing of it counts.
        known = row if row is not None and row.uid and (row.indexed or not row.count) else None
        for _ in range(_MOST_TRIES):
            before = self._store.info(key)
            if known is not None and self._is_other(before, stamp, known):
                known = None
            after = known.indexed if known is not None else 0
            messages = self._store.get_history(key, after=after, full=True)
            state, tail = self._state(key)
            info = self._store.info(key)
            if info.uid != before.uid:
                known = None
                continue
            if known is not None and not self._continues(info, known, tail):
                known = None
                continue
            if known is not None:
                count = known.count + len(messages)
                if not before.count <= count <= info.count:
                    # Messages that the index has are not there any more.
                    known = None
                    continue
                owner = known.ownership.after(messages).owner
                if known.count and owner != known.ownership.owner:
                    # All messages of a session are found under its sender, earlier ones too.
                    known = None
                    continue
            sight = self._sight(info, messages, known)
            return Seen(info, messages, sight, known is None, state)
        raise StoreBusy(f"{key!r} is deleted and made anew all the time")

    def _continues(self, info: SessionInfo, known: Row, tail: Sequence[Message]) -> bool:
        """Return whether the last message in the index is the one that the store has at its seq.

        It is not if another store was put in the place of the one whose catalog this is, such as a
        backup. A message in an archive is not compared: reading it would cost too much.
        """
        last = known.indexed
        if known.last_at is None or last <= info.archived:
            return True
        found = [message for message in tail if message.seq == last]
        if not found:
            found = self._store.get_history(info.key, after=last - 1, full=True)[:1]
        # guard: catalog-checks-last-message
        return [(one.seq, microseconds(one.at)) for one in found] == [(last, known.last_at)]

    def _sight(
        self, info: SessionInfo, messages: Sequence[Message], known: Row | None
    ) -> list[Span]:
        """The seqs in sight, as far as they are read.

        Nothing is read again for it: an append must not cost what the history does. Only where
        messages are damaged, or a store does not tell, each one is looked at.
        """
        if known is None:
            return spans.union((one.seq, one.seq) for one in messages if not one.hidden)
        # guard: catalog-reads-new-only
        if info.lost or info.damaged or spans.size(info.in_sight) != info.visible:
            seen = self._store.get_history(info.key)
            return spans.union((one.seq, one.seq) for one in seen)
        return spans.clipped(info.in_sight, 1, messages[-1].seq if messages else known.indexed)

    def _is_other(self, info: SessionInfo, stamp: str, row: Row) -> bool:
        """Whether what the index has of a session may be said otherwise by now."""
        if info.uid != row.uid or info.last_seq < row.indexed:
            return True
        if info.generation != row.generation:
            # A compaction moves messages as they are; whatever else writes a log anew may not.
            return info.archived <= row.archived
        return row.stamp is not None and not self._reading.grew(row.stamp, stamp)

    def _state(self, key: str) -> tuple[State, list[Message]]:
        """Return the state of the session, and the visible messages that tell it."""
        last = _TAIL
        while True:
            tail = self._store.get_history(key, last=last)
            state = texts.state_from(tail, whole=len(tail) < last)
            if state is not None:
                return state, tail
            last *= 8
