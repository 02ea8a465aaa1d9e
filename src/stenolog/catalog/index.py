"""The catalog of a store: titles, counts, states and full-text search."""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.catalog_database import (
    MOST,
    CatalogBusy,
    CatalogDamaged,
    CatalogUnusable,
    Database,
    DatabaseUnreachable,
    Row,
    Transaction,
    clean,
    microseconds,
    moment,
    prefix_range,
)
from stenolog.catalog.catalog_files import FileDatabase, MemoryDatabase
from stenolog.catalog.entries import Candidates, Entry, Hits, Page, State
from stenolog.catalog.owners import Ownership
from stenolog.errors import StoreUnavailable, UsageError
from stenolog.stores import log_reports
from stenolog.stores.base import Store, leased_keys
from stenolog.stores.catalog_file import CatalogFileStore
from stenolog.stores.jsonl import JSONLStore

if TYPE_CHECKING:
    # Imported on demand: a list does not need them.
    from stenolog.catalog.calibrations import Calibrations
    from stenolog.tokens import Calibration


T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with the number of processed sessions and the number of changed sessions."""

_MOST_ROUNDS: Final = 20
_MOST_TRIES: Final = 12
_MOST_BREAKS: Final = 8
_MOST_WAITS: Final = 3
_MOST_CANDIDATES: Final = 10_000
_LATE: Final = (
    "stenolog.catalog.calibrations",
    "stenolog.catalog.candidates",
    "stenolog.catalog.indexing",
    "stenolog.catalog.query",
    "stenolog.catalog.message_search",
    "stenolog.stores.jsonl.session_list",
    "hashlib",
)
"""Modules that are imported on first use."""
_STATES: Final = ("idle", "running", "interrupted")


def open_catalog(store: Store, *, keep: bool | None = None) -> "Catalog":
    """Open the catalog of a store. It stays up to date by itself.

    It is the file `catalog.db` among the logs of a JSONL store, a file next to a SQLite database,
    tables in a PostgreSQL database, or else in memory. It can be deleted at any time. `keep`:
    whether it may be written there. [default: yes, unless the store was opened with read_only=True]
    """
    return Catalog(store, keep=keep)


class Catalog:
    """The list and full-text search of a store. Every read is up to date with the store.

    A catalog that is missing, outdated or damaged is built again. If it cannot be written, it is
    built in memory, and `problems` has the reason. Thread-safe.
    """

    def __init__(self, store: Store, *, keep: bool | None = None) -> None:
        self._store = store
        _catalogs.add(self)
        self._mutex = threading.Lock()
        self._closed = False
        self._keep = not getattr(store, "read_only", False) if keep is None else keep
        self.problems: tuple[str, ...] = ()
        """Reasons why the catalog is not stored at its usual place, one sentence each."""
        self._use(database_of(store, keep=self._keep))
        self._calibrations: Calibrations | None = None

    def __repr__(self) -> str:
        return f"Catalog({self._store!r})"

    def _use(self, database: Database) -> None:
        refresher = Refresher(self._store, database)
        self._current = _Current(database, refresher)

    def refresh(self, progress: Progress | None = None) -> None:
        """Add new messages of the store. Every read does this itself."""
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
        """Return sessions, most recently changed first. `after`: from the previous page.

        Raises UsageError if state, limit or `after` is invalid.
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
            busy = leased_keys(self._store, [row[1] for row in page])
        entries = [_entry(row, tags.get(row[0], ()), row[1] in busy) for row in page]
        return Page(
            entries=entries, after=place_of(entries[-1]) if entries and len(rows) > limit else None
        )

    def entry(self, key: str) -> Entry | None:
        """Return the entry of the session with this key, or None."""
        if clean(key) != key:
            return None  # its cleaned form could be the key of another session
        # Before the read: a turn that ends in between must not leave an outdated entry.
        running = bool(leased_keys(self._store, [key]))
        rows, tags = self._look(lambda tx, db: _listed(tx, db, "entry", (key,)), None)
        entries = [_entry(row, tags.get(row[0], ()), running) for row in rows]
        return entries[0] if entries else None

    def sender(self, key: str) -> str:
        """Return the verified sender of all user messages of a session, or an empty string."""
        if clean(key) != key:
            return ""
        rows, _ = self._look(lambda tx, db: _listed(tx, db, "entry", (key,)), None)
        return _entry(rows[0], (), False).sender if rows else ""

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
        """Return messages with all words of a query, including hidden and archived ones.

        `"in quotes"`: in this order; `-word`: excluded; `wor*`: a prefix. The best matches come
        first (of thousands, the best of the newest), or with `newest` the newest. `since` is
        included, `until` is not. Every query is valid. Raises UsageError if limit or `after` is
        invalid or a time has no time zone.
        """
        # Imported on demand: a list does not need it.
        from stenolog.catalog.message_search import Filter, Search
        from stenolog.catalog.query import parse

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
            found = search.newest(limit, after) if newest else search.best(limit, after)
            rows = transaction.execute(database.sql["unreadable"])
            unreadable = {key: problem for key, problem in rows if key.startswith(prefix)}
            return replace(found, unreadable=unreadable) if unreadable else found

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
        """Return candidates for recall: only messages of the session `owner`.

        These are the messages with the most and the rarest of `stems` (as returned by
        stemming.stem), and their neighbours. `threads`: `owner` is a sender, and all sessions are
        searched whose user messages all have that sender. `agent`: leave out sessions of other
        agents. `in_sight_of`: leave out the visible messages of this session. Messages between
        `since` and `until` come first. Raises UsageError if limit is invalid or a time has no time
        zone.
        """
        # Imported on demand: a list does not need it.
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
        """Return the calibration of a model's token counts, or the default if none is known."""
        return self._calibrated().get(model)

    def calibrate(self, model: str, *, estimated: int, reported: int) -> "Calibration":
        """Add a reported token count and our estimate, and return the new calibration.

        If it cannot be stored, it applies to this process only; losing it only costs accuracy.
        """
        return self._calibrated().take_in(model, estimated=estimated, reported=reported)

    def close(self) -> None:
        """Close the catalog, but not the store. A second call does nothing."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._current.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- recovery ----------------------------------------------------------------------------

    def _running(self, progress: Progress | None) -> set[str]:
        def look(transaction: Transaction, database: Database) -> list[str]:
            return [key for key, _ in transaction.execute(database.sql["stamps"])]

        return leased_keys(self._store, self._look(look, progress))

    def _look(self, look: "Look[T]", progress: Progress | None) -> T:
        """Refresh the catalog and return the result of `look`, after repairs if necessary."""
        for attempt in range(_MOST_TRIES):
            self._check_open()
            current = self._current
            try:
                made = current.refresher.refresh(progress)
                self._check_open()
                with current.database.read() as transaction:
                    if current.refresher.is_in(transaction, made):
                        return look(transaction, current.database)
            except CatalogDamaged as error:
                if attempt < _MOST_BREAKS:
                    self._renew(current, error)
                else:
                    self._fall_back(current, error)
            except CatalogUnusable as error:
                if not isinstance(error, CatalogBusy) or attempt >= _MOST_WAITS:
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

    def _renew(self, broken: "_Current", reason: CatalogDamaged) -> None:
        log_reports.info("the index is made anew: %s", reason)
        try:
            broken.database.renew()
        except (CatalogDamaged, CatalogBusy):
            pass  # the next attempt finds the current state
        except CatalogUnusable as error:
            self._fall_back(broken, error)

    def _fall_back(self, failed: "_Current", reason: Exception) -> None:
        """Continue in memory. Raises StoreUnavailable if the catalog in memory failed."""
        with self._mutex:
            self._check_open()
            if self._current is not failed:
                return  # another thread has already done it
            if isinstance(reason, DatabaseUnreachable):
                # Building it in memory needs the server too, and the server will be back.
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
        log_reports.warning("%s", words)


_catalogs: "weakref.WeakSet[Catalog]" = weakref.WeakSet()


def _import_before_fork() -> None:
    """Finish the imports that a forked child would need.

    A module that another thread is importing at the fork stays locked in the child for ever.
    """
    for catalog in list(_catalogs):
        for name in _LATE:
            import_module(name)
        # The property `language` imports a module.
        _ = catalog._current.database.language


os.register_at_fork(before=_import_before_fork)


Look = Callable[[Transaction, Database], T]


class _Known(Struct, frozen=True):
    """The stamps of all sessions in the catalog."""

    made: int | None
    """Random number that identifies the catalog."""
    writes: int
    """Number of writes to the catalog so far."""
    stamps: dict[str, str | None]

    def only(self, keys: set[str]) -> "_Known":
        """Return the same with only these sessions."""
        return _Known(self.made, self.writes, _only(self.stamps, keys))


class Refresher:
    """An updater that brings a catalog up to date with a store.

    The store's stamps show which sessions changed; only their new messages are read. A stamp is
    taken before its session is read, so that concurrent writes are at worst read again.

    Several processes may refresh one catalog at the same time. Each session has a version. If two
    processes read the same version, only the first can write the next; the other one starts again
    with the new row. The store is never called during a transaction: the tables may be in the
    store's database.
    """

    def __init__(self, store: Store, database: Database) -> None:
        self._store = store
        self._database = database
        self._sql = database.sql
        self._known = _Known(None, 0, {})

    def refresh(self, progress: Progress | None = None) -> int | None:
        """Add all messages stored before this call, and return the id of the catalog.

        Raises Broken and Unusable. Raises Busy if other processes were faster every time; then the
        catalog may be older than the call.
        """
        made: int | None = None
        missed: set[str] | None = None
        for _ in range(_MOST_ROUNDS):
            # First the rows, then the stamps: a session with a row and without a stamp is deleted.
            known = self._look_at_rows()
            stamps = self._store.stamps()
            if known.stamps == stamps:
                return known.made
            if missed is not None and known.made == made:
                # The other sessions are up to date: their stamps were read during this call.
                known, stamps = known.only(missed), _only(stamps, missed)
            missed, made = self._take_in(known, stamps, progress or _silent), known.made
            if not missed:
                return made
            # Another process changed these rows, perhaps with older stamps than ours.
        raise CatalogBusy("the index is changed by others all the time")

    def is_in(self, transaction: Transaction, made: int | None) -> bool:
        """Whether the catalog is still the same: a purge may have emptied it."""
        [(found, _)] = transaction.execute(self._sql["about"])
        return bool(found == made)

    def _take_in(self, known: _Known, stamps: dict[str, str], progress: Progress) -> set[str]:
        """Update the rows to these stamps. Return the keys that another process changed first."""
        # Imported only if there are changes.
        from stenolog.catalog.indexing import Indexer, Reading
        from stenolog.stores.jsonl import session_list

        by_file = isinstance(self._store, JSONLStore)
        reading = Reading(session_list.grew, session_list.write_time) if by_file else Reading()
        intake = Indexer(self._store, self._database, reading, made=known.made, known=known.stamps)
        changed = {key: stamp for key, stamp in stamps.items() if known.stamps.get(key) != stamp}
        if changed:
            intake.take_in(changed, progress)
        intake.remove(known.stamps.keys() - stamps.keys())
        return intake.missed

    def _look_at_rows(self) -> _Known:
        """Return the stamps in the catalog, from the cache if the catalog has not changed."""
        with self._database.read() as transaction:
            [(made, writes)] = transaction.execute(self._sql["about"])
            if (self._known.made, self._known.writes) != (made, writes):
                rows = transaction.execute(self._sql["stamps"])
                self._known = _Known(made, writes, {key: stamp for key, stamp in rows})  # noqa: C416 - rows have any length
        return self._known


def _only(stamps: dict[str, T], keys: set[str]) -> dict[str, T]:
    return {key: stamp for key, stamp in stamps.items() if key in keys}


def _silent(_done: int, _total: int) -> None:
    """Ignore the progress."""


class _Current(Struct, frozen=True):
    """The catalog in use."""

    database: Database
    refresher: Refresher


def database_of(store: Store, *, keep: bool) -> Database:
    """Return the database of a store's catalog. `keep=False`: read-only."""
    if isinstance(store, CatalogFileStore):
        path = store.catalog_file()
        return MemoryDatabase() if path is None else FileDatabase(path, writable=keep)
    # A store of this class exists only if its module was imported.
    postgres = sys.modules.get("stenolog.stores.postgres")
    if postgres is not None and isinstance(store, postgres.PostgresStore):
        from stenolog.catalog.postgres import SchemaDatabase

        return SchemaDatabase(store.database, store.namespace, writable=keep)
    return MemoryDatabase()


# --- lists -----------------------------------------------------------------------------------


def _listed(
    transaction: Transaction, database: Database, name: str, values: Sequence[Any]
) -> tuple[list[Row], dict[int, list[str]]]:
    """Return the rows of a statement, and the tags of each session."""
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
    prompt, lost, damaged, problem, owner, mixed = rest
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
        sender=Ownership(owner, bool(mixed)).sender,
    )


def place_of(entry: Entry) -> str:
    """Return the `after` of a page that ends with this session."""
    # Unreadable sessions have no time and are listed last.
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
    """Encode a key for SQLite's JSON: old versions end a text at a NUL."""
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
