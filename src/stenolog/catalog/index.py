"""The one index of a store: titles, counts, states, full-text search."""

import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec
from msgspec import Struct

from stenolog.catalog.database import Away, Broken, Busy, Database, Row, Transaction, Unusable
from stenolog.catalog.entries import Candidates, Entry, Hits, Page, State
from stenolog.catalog.files import FileDatabase
from stenolog.catalog.filters import MOST, clean, prefix_range
from stenolog.catalog.memory import MemoryDatabase
from stenolog.catalog.refresh import Progress, Refresher
from stenolog.catalog.tables import HasDatabase, TableDatabase, schema_of
from stenolog.catalog.times import microseconds, moment
from stenolog.catalog.turns import held
from stenolog.errors import StoreUnavailable, UsageError
from stenolog.stores import reports
from stenolog.stores.base import Store
from stenolog.stores.jsonl import JSONLStore

if TYPE_CHECKING:
    # Who only lists does not wait for them.
    from stenolog.catalog.calibrations import Calibrations
    from stenolog.tokens import Calibration

T = TypeVar("T")

_MOST_TRIES: Final = 12
_MOST_BREAKS: Final = 8
_MOST_WAITS: Final = 3
_MOST_CANDIDATES: Final = 10_000
_STATES: Final = ("idle", "running", "interrupted")


def open_catalog(store: Store, *, keep: bool | None = None) -> "Catalog":
    """The index of a store, which keeps itself up to date.

    Beside a JSONL store it is the file `catalog.db`, in a SQLite or PostgreSQL store it has tables
    of its own, else it is in memory. It can be deleted at any time. `keep`: whether it may be
    written there; where that is not said, it is, unless the store was opened to read only.
    """
    return Catalog(store, keep=keep)


class Catalog:
    """What a store holds, listed and searched. Every read is up to date with the store.

    An index that is missing, of another version or damaged is made anew; one that cannot be
    written is made in memory, and `problems` says so. May be used by several threads.
    """

    def __init__(self, store: Store, *, keep: bool | None = None) -> None:
        self._store = store
        self._mutex = threading.Lock()
        self._closed = False
        self._keep = _may_keep(store) if keep is None else keep
        self.problems: tuple[str, ...] = ()
        """Why the index is not where it should be, each as a sentence."""
        self._use(_database_of(store, keep=self._keep))
        self._calibrations: Calibrations | None = None

    def __repr__(self) -> str:
        return f"Catalog({self._store!r})"

    def _use(self, database: Database) -> None:
        refresher = Refresher(self._store, database)
        self._current = _Current(database, refresher)

    def refresh(self, progress: Progress | None = None) -> None:
        """Take in what was stored since. Each read does so by itself."""
        self._look(lambda _transaction, _database: None, progress)

    def list(
        self,
        *,
        prefix: str = "",
        tag: str | None = None,
        state: State | None = None,
        channel: str | None = None,
        agent: str | None = None,
        limit: int = 50,
        after: str | None = None,
        progress: Progress | None = None,
    ) -> Page:
        """The sessions, the last changed first; `after` is that of the page before.

        Raises UsageError for a state, a limit or an `after` that is none.
        """
        _check_limit(limit)
        _check_state(state)
        updated, last = _decoded(after)
        busy = self._running(progress) if state is not None else None
        values = (
            *prefix_range(prefix),
            None if tag is None else clean(tag),
            None if channel is None else clean(channel),
            None if agent is None else clean(agent),
            None if busy is None else msgspec.json.encode(sorted(map(_hex, busy))).decode(),
            state == "running",
            None if state == "running" else state,
            updated,
            last,
            limit + 1,
        )
        rows, tags = self._look(lambda tx, db: _listed(tx, db, "list", values), progress)
        page = rows[:limit]
        if busy is None:
            busy = held(self._store, [row[1] for row in page])
        entries = [_entry(row, tags.get(row[0], ()), row[1] in busy) for row in page]
        return Page(
            entries=entries, after=place_of(entries[-1]) if entries and len(rows) > limit else None
        )

    def entry(self, key: str) -> Entry | None:
        """What a list says of the session with this key; None where there is none."""
        if clean(key) != key:
            return None  # it would be taken for another one
        # First of all: a turn that ends meanwhile must not leave what was said before its end.
        running = bool(held(self._store, [key]))
        rows, tags = self._look(lambda tx, db: _listed(tx, db, "entry", (key,)), None)
        entries = [_entry(row, tags.get(row[0], ()), running) for row in rows]
        return entries[0] if entries else None

    def search(
        self,
        query: str,
        *,
        role: str | None = None,
        prefix: str = "",
        tag: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 20,
        newest: bool = False,
        after: str | None = None,
        progress: Progress | None = None,
    ) -> Hits:
        """Messages that have all the words, hidden and archived ones too.

        `"in quotes"`: in this order; `-word`: without it; `wor*`: words that begin so. The best
        come first (where there are thousands, the best of the newest), or with `newest` the
        newest. From `since` on, before `until`. No query is refused; raises UsageError for a limit
        or an `after` that is none, and for a time without a zone.
        """
        # Who only lists does not wait for it.
        from stenolog.catalog.query import parse
        from stenolog.catalog.search import Filter, Search

        _check_limit(limit)
        _check_times(since=since, until=until)
        parsed = parse(query)
        wanted = Filter(
            role=None if role is None else clean(role),
            prefix=prefix,
            tag=None if tag is None else clean(tag),
            since=since,
            until=until,
        )
        if parsed.empty:
            return Hits(hits=(), count=0, exact=True, after=None)

        def look(transaction: Transaction, database: Database) -> Hits:
            search = Search(transaction, database, parsed, wanted)
            return search.newest(limit, after) if newest else search.best(limit, after)

        return self._look(look, progress)

    def candidates(
        self,
        stems: Sequence[str],
        *,
        owner: str,
        threads: bool = False,
        agent: str | None = None,
        in_sight_of: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 200,
    ) -> Candidates:
        """What recall may choose from: messages of the session `owner`, and of no other.

        Those with the most and the rarest of the words, which are given as stemming.stem makes
        them, and the messages beside those. `threads`: of all sessions that have this owner, as
        owners.py says. `agent`: not of sessions that name another one.
        `in_sight_of`: not what is visible in this session. With `since` and `until`, those of that
        time come first. Raises UsageError for a limit that is none, and for a time without a zone.
        """
        # Who only lists does not wait for it.
        from stenolog.catalog.candidates import Asked, candidates

        _check_limit(limit)
        _check_times(since=since, until=until)
        asked = Asked(
            owner=clean(owner),
            threads=threads,
            stems=[clean(stem) for stem in stems],
            agent=None if agent is None else clean(agent),
            in_sight_of=None if in_sight_of is None else clean(in_sight_of),
            since=None if since is None else microseconds(since),
            until=None if until is None else microseconds(until),
            limit=min(limit, _MOST_CANDIDATES),
        )
        return self._look(lambda tx, database: candidates(tx, database, asked), None)

    def calibration(self, model: str) -> "Calibration":
        """What a model's reports say of our estimates; the default where nothing is known."""
        return self._calibrated().get(model)

    def calibrate(self, model: str, *, estimated: int, reported: int) -> "Calibration":
        """Take in how many tokens a model reported where so many were estimated; what that makes.

        Where it cannot be kept it holds for this process: losing it costs accuracy only.
        """
        return self._calibrated().take_in(model, estimated=estimated, reported=reported)

    def close(self) -> None:
        """Let go of the index; a second call does nothing. The store stays open."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._current.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- keeping it usable -------------------------------------------------------------------

    def _running(self, progress: Progress | None) -> set[str]:
        def look(transaction: Transaction, database: Database) -> list[str]:
            return [key for key, _ in transaction.execute(database.sql["stamps"])]

        return held(self._store, self._look(look, progress))

    def _look(self, look: "Look[T]", progress: Progress | None) -> T:
        """What the index says when it is up to date, whatever state it was in before."""
        for attempt in range(_MOST_TRIES):
            self._check_open()
            current = self._current
            try:
                made = current.refresher.refresh(progress)
                with current.database.read() as transaction:
                    if current.refresher.is_in(transaction, made):
                        return look(transaction, current.database)
            except Broken as error:
                if attempt < _MOST_BREAKS:
                    self._renew(current, error)
                else:
                    self._fall_back(current, error)
            except Unusable as error:
                if not isinstance(error, Busy) or attempt >= _MOST_WAITS:
                    self._fall_back(current, error)
        raise StoreUnavailable("the index is damaged again and again; look at the disk")

    def _calibrated(self) -> "Calibrations":
        from stenolog.catalog.calibrations import Calibrations

        self._check_open()
        with self._mutex:
            if self._calibrations is None:
                self._calibrations = Calibrations(lambda: self._current.database)
            return self._calibrations

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the catalog is closed")

    def _renew(self, broken: "_Current", reason: Broken) -> None:
        reports.info("the index is made anew: %s", reason)
        try:
            broken.database.renew()
        except (Broken, Busy):
            pass  # the next look finds what has become of it
        except Unusable as error:
            self._fall_back(broken, error)

    def _fall_back(self, failed: "_Current", reason: Exception) -> None:
        """Go on in memory. Raises StoreUnavailable where that is what failed."""
        with self._mutex:
            if self._current is not failed:
                return  # another thread did so
            if isinstance(reason, Away):
                # In memory it could not be made either, and the server will come back.
                raise StoreUnavailable(str(reason)) from reason
            if isinstance(failed.database, MemoryDatabase):
                raise StoreUnavailable(f"the index cannot be made: {reason}") from reason
            memory = MemoryDatabase(failed.database)
            failed.database.close()
            self._use(memory)
            if not self._keep:
                return
            words = f"the index cannot be kept, so it was made in memory: {reason}"
            self.problems = (*self.problems, words)
        reports.warning("%s", words)


Look = Callable[[Transaction, Database], T]


class _Current(Struct, frozen=True):
    """The index that is in use."""

    database: Database
    refresher: Refresher


def _may_keep(store: Store) -> bool:
    return not (isinstance(store, JSONLStore) and store.read_only)


def _database_of(store: Store, *, keep: bool) -> Database:
    if isinstance(store, JSONLStore):
        return FileDatabase(store.folder, writable=keep)
    if isinstance(store, HasDatabase) and keep:
        schema = schema_of(store)
        if schema is None:
            return TableDatabase(store.database, store.namespace)
        # Who has one kind of store does not wait for the others.
        from stenolog.catalog.postgres import SchemaDatabase

        return SchemaDatabase(store.database, schema, store.namespace)
    return MemoryDatabase()


# --- lists -----------------------------------------------------------------------------------


def _listed(
    transaction: Transaction, database: Database, name: str, values: Sequence[Any]
) -> tuple[list[Row], dict[int, list[str]]]:
    """The rows that a statement gives, and the tags of each."""
    rows = list(transaction.execute(database.sql[name], values))
    tags: dict[int, list[str]] = {}
    ids = msgspec.json.encode([row[0] for row in rows]).decode()
    for session, tag in transaction.execute(database.sql["tags"], (ids,)):
        tags.setdefault(session, []).append(tag)
    return rows, tags


def _entry(row: Row, tags: Sequence[str], running: bool) -> Entry:
    (_, key, uid, title, state, visible, count, tokens, created, updated, agent, channel, *rest) = (
        row
    )
    prompt, lost, damaged, problem = rest
    return Entry(
        key=key,
        uid=uid,
        title=title,
        prompt=prompt,
        state="running" if running else state,
        visible=visible,
        count=count,
        tokens=tokens,
        created=moment(created) if problem is None else None,
        updated=moment(updated) if problem is None else None,
        tags=tuple(tags),
        agent=agent,
        channel=channel,
        lost=lost,
        damaged=damaged,
        problem=problem,
    )


def place_of(entry: Entry) -> str:
    """The `after` of a page that ends with this session."""
    # What cannot be read was never changed, and is listed last.
    updated = 0 if entry.updated is None else microseconds(entry.updated)
    return f"{updated}:{entry.key}"


def _decoded(after: str | None) -> tuple[int | None, str | None]:
    if after is None:
        return None, None
    updated, colon, key = after.partition(":")
    try:
        number = int(updated)
    except ValueError:
        colon = ""
    if not colon:
        raise UsageError(f"after={after!r} is not what a page before it gave")
    return min(number, MOST), clean(key)


def _hex(key: str) -> str:
    """In a form that SQLite's JSON keeps: its older ones end a text at a NUL."""
    return clean(key).encode().hex().upper()


def _check_limit(limit: int) -> None:
    if type(limit) is not int or not 1 <= limit <= MOST:
        raise UsageError(f"limit={limit!r}: how many, 1 or more")


def _check_state(state: str | None) -> None:
    if state is not None and state not in _STATES:
        raise UsageError(f"state={state!r}: one of {', '.join(_STATES)} is wanted")


def _check_times(**times: datetime | None) -> None:
    for name, time in times.items():
        if time is not None and time.tzinfo is None:
            raise UsageError(f"{name}={time.isoformat()}: a time with its zone is wanted")
