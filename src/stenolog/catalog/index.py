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
    MAX_INTEGER,
    CatalogBusy,
    CatalogDamaged,
    CatalogUnusable,
    Database,
    DatabaseUnreachable,
    Row,
    Transaction,
    from_microseconds,
    prefix_range,
    replace_surrogates,
    to_microseconds,
)
from stenolog.catalog.catalog_files import FileDatabase, MemoryDatabase
from stenolog.catalog.entries import Candidates, Entry, Hits, Page, State
from stenolog.catalog.message_metadata import Ownership
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

_MAX_ROUNDS: Final = 20
_MAX_ATTEMPTS: Final = 12
_MAX_REBUILDS: Final = 8
_MAX_WAITS: Final = 3
_MAX_CANDIDATES: Final = 10_000
_LAZY_MODULES: Final = (
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
        self._active = ActiveDatabase(database, refresher)

    def refresh(self, progress: Progress | None = None) -> None:
        """Add new messages of the store. Every read does this itself."""
        self._read(lambda _transaction, _database: None, progress)

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
        updated, last = _decode_cursor(after)
        busy = self._running(progress) if state is not None else None
        values = (
            *prefix_range(prefix),
            None if tag is None else replace_surrogates(tag),
            None if channel is None else replace_surrogates(channel),
            None if agent is None else replace_surrogates(agent),
            None if busy is None else msgspec.json.encode(sorted(map(_hex_key, busy))).decode(),
            state == "running",
            None if state == "running" else state,
            updated,
            last,
            limit + 1,
        )
        rows, tags = self._read(lambda tx, db: _read_rows(tx, db, "list", values), progress)
        page = rows[:limit]
        if busy is None:
            busy = leased_keys(self._store, [row[1] for row in page])
        entries = [_entry_from_row(row, tags.get(row[0], ()), row[1] in busy) for row in page]
        return Page(
            entries=entries,
            after=page_cursor(entries[-1]) if entries and len(rows) > limit else None,
        )

    def entry(self, key: str) -> Entry | None:
        """Return the entry of the session with this key, or None."""
        if replace_surrogates(key) != key:
            return None  # its cleaned form could be the key of another session
        # Before the read: a turn that ends in between must not leave an outdated entry.
        running = bool(leased_keys(self._store, [key]))
        rows, tags = self._read(lambda tx, db: _read_rows(tx, db, "entry", (key,)), None)
        entries = [_entry_from_row(row, tags.get(row[0], ()), running) for row in rows]
        return entries[0] if entries else None

    def sender(self, key: str) -> str:
        """Return the verified sender of all user messages of a session, or an empty string."""
        if replace_surrogates(key) != key:
            return ""
        rows, _ = self._read(lambda tx, db: _read_rows(tx, db, "entry", (key,)), None)
        return _entry_from_row(rows[0], (), False).sender if rows else ""

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
        from stenolog.catalog.message_search import Search, SearchFilter
        from stenolog.catalog.query import parse

        _check_limit(limit)
        _check_times(since=since, until=until)
        parsed = parse(query)
        search_filter = SearchFilter(
            role=None if role is None else replace_surrogates(role),
            prefix=prefix,
            tag=None if tag is None else replace_surrogates(tag),
            since=since,
            until=until,
        )
        if parsed.is_empty:
            return Hits(hits=(), count=0, exact=True, after=None)

        def work(transaction: Transaction, database: Database) -> Hits:
            search = Search(transaction, database, parsed, search_filter)
            found = search.newest(limit, after) if newest else search.best(limit, after)
            rows = transaction.execute(database.sql["unreadable"])
            unreadable = {key: problem for key, problem in rows if key.startswith(prefix)}
            return replace(found, unreadable=unreadable) if unreadable else found

        return self._read(work, progress)

    def candidates(
        self,
        stems: Sequence[str],
        *,
        owner: str,
        threads: bool = False,
        agent: str | None = None,
        exclude_visible_of: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 200,
    ) -> Candidates:
        """Return candidates for recall: only messages of the session `owner`.

        These are the messages with the most and the rarest of `stems` (as returned by
        stemming.stem), and their neighbours. `threads`: `owner` is a sender, and all sessions are
        searched whose user messages all have that sender. `agent`: leave out sessions of other
        agents. `exclude_visible_of`: leave out the visible messages of this session. Messages
        between `since` and `until` come first. Raises UsageError if limit is invalid or a time has
        no time zone.
        """
        # Imported on demand: a list does not need it.
        from stenolog.catalog.candidates import CandidateQuery, find_candidates

        _check_limit(limit)
        _check_times(since=since, until=until)
        query_values = CandidateQuery(
            owner=replace_surrogates(owner),
            threads=threads,
            stems=[replace_surrogates(stem) for stem in stems],
            agent=None if agent is None else replace_surrogates(agent),
            exclude_visible_of=None
            if exclude_visible_of is None
            else replace_surrogates(exclude_visible_of),
            since=None if since is None else to_microseconds(since),
            until=None if until is None else to_microseconds(until),
            limit=min(limit, _MAX_CANDIDATES),
        )
        return self._read(lambda tx, database: find_candidates(tx, database, query_values), None)

    def calibration(self, model: str) -> "Calibration":
        """Return the calibration of a model's token counts, or the default if none is known."""
        return self._calibrated().get(model)

    def calibrate(self, model: str, *, estimated: int, reported: int) -> "Calibration":
        """Add a reported token count and our estimate, and return the new calibration.

        If it cannot be stored, it applies to this process only; losing it only costs accuracy.
        """
        return self._calibrated().add_report(model, estimated=estimated, reported=reported)

    def close(self) -> None:
        """Close the catalog, but not the store. A second call does nothing."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._active.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- recovery ----------------------------------------------------------------------------

    def _running(self, progress: Progress | None) -> set[str]:
        def work(transaction: Transaction, database: Database) -> list[str]:
            return [key for key, _ in transaction.execute(database.sql["stamps"])]

        return leased_keys(self._store, self._read(work, progress))

    def _read(self, work: "CatalogRead[T]", progress: Progress | None) -> T:
        """Refresh the catalog and return the result of `work`, after repairs if necessary."""
        for attempt in range(_MAX_ATTEMPTS):
            self._check_open()
            current = self._active
            try:
                catalog_id = current.refresher.refresh(progress)
                self._check_open()
                with current.database.read() as transaction:
                    if current.refresher.is_same_catalog(transaction, catalog_id):
                        return work(transaction, current.database)
            except CatalogDamaged as error:
                if attempt < _MAX_REBUILDS:
                    self._rebuild(current, error)
                else:
                    self._use_memory(current, error)
            except CatalogUnusable as error:
                if not isinstance(error, CatalogBusy) or attempt >= _MAX_WAITS:
                    self._use_memory(current, error)
        raise StoreUnavailable("the catalog was damaged repeatedly; check the disk")

    def _calibrated(self) -> "Calibrations":
        from stenolog.catalog.calibrations import Calibrations

        self._check_open()
        with self._mutex:
            if self._calibrations is None:
                self._calibrations = Calibrations(lambda: self._active.database)
            return self._calibrations

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the catalog is closed")

    def _rebuild(self, broken: "ActiveDatabase", reason: CatalogDamaged) -> None:
        log_reports.info("rebuilding the catalog: %s", reason)
        try:
            broken.database.rebuild()
        except (CatalogDamaged, CatalogBusy):
            pass  # the next attempt finds the current state
        except CatalogUnusable as error:
            self._use_memory(broken, error)

    def _use_memory(self, failed: "ActiveDatabase", reason: Exception) -> None:
        """Continue in memory. Raises StoreUnavailable if the catalog in memory failed."""
        with self._mutex:
            self._check_open()
            if self._active is not failed:
                return  # another thread has already done it
            if isinstance(reason, DatabaseUnreachable):
                # Building it in memory needs the server too, and the server will be back.
                raise StoreUnavailable(str(reason)) from reason
            if isinstance(failed.database, MemoryDatabase):
                raise StoreUnavailable(f"the catalog cannot be built: {reason}") from reason
            memory = MemoryDatabase(failed.database)
            failed.database.close()
            self._use(memory)
            if not self._keep:
                return
            problem = f"the catalog cannot be stored and was built in memory: {reason}"
            self.problems = (*self.problems, problem)
        log_reports.warning("%s", problem)


_catalogs: "weakref.WeakSet[Catalog]" = weakref.WeakSet()


def _import_before_fork() -> None:
    """Finish the imports that a forked child would need.

    A module that another thread is importing at the fork stays locked in the child for ever.
    """
    for catalog in list(_catalogs):
        for name in _LAZY_MODULES:
            import_module(name)
        # The property `fulltext` imports a module.
        _ = catalog._active.database.fulltext


os.register_at_fork(before=_import_before_fork)


CatalogRead = Callable[[Transaction, Database], T]


class _KnownStamps(Struct, frozen=True):
    """The stamps of all sessions in the catalog."""

    catalog_id: int | None
    """Random number that identifies the catalog."""
    writes: int
    """Number of writes to the catalog so far."""
    stamps: dict[str, str | None]

    def select(self, keys: set[str]) -> "_KnownStamps":
        """Return the same with only these sessions."""
        return _KnownStamps(self.catalog_id, self.writes, _select_keys(self.stamps, keys))


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
        self._known = _KnownStamps(None, 0, {})

    def refresh(self, progress: Progress | None = None) -> int | None:
        """Add all messages stored before this call, and return the id of the catalog.

        Raises CatalogDamaged and CatalogUnusable.
        Raises CatalogBusy if other processes were faster every time; then the
        catalog may be older than the call.
        """
        catalog_id: int | None = None
        missed: set[str] | None = None
        for _ in range(_MAX_ROUNDS):
            # First the rows, then the stamps: a session with a row and without a stamp is deleted.
            known = self._read_known()
            stamps = self._store.stamps()
            if known.stamps == stamps:
                return known.catalog_id
            if missed is not None and known.catalog_id == catalog_id:
                # The other sessions are up to date: their stamps were read during this call.
                known, stamps = known.select(missed), _select_keys(stamps, missed)
            missed, catalog_id = (
                self._index(known, stamps, progress or _ignore_progress),
                known.catalog_id,
            )
            if not missed:
                return catalog_id
            # Another process changed these rows, perhaps with older stamps than ours.
        raise CatalogBusy("other processes kept changing the catalog")

    def is_same_catalog(self, transaction: Transaction, catalog_id: int | None) -> bool:
        """Whether the catalog is still the same: a purge may have emptied it."""
        [(found, _)] = transaction.execute(self._sql["about"])
        return bool(found == catalog_id)

    def _index(self, known: _KnownStamps, stamps: dict[str, str], progress: Progress) -> set[str]:
        """Update the rows to these stamps. Return the keys that another process changed first."""
        # Imported only if there are changes.
        from stenolog.catalog.indexing import Indexer, StampRules
        from stenolog.stores.jsonl import session_list

        by_file = isinstance(self._store, JSONLStore)
        reading = (
            StampRules(session_list.grew, session_list.write_time) if by_file else StampRules()
        )
        intake = Indexer(
            self._store, self._database, reading, catalog_id=known.catalog_id, known=known.stamps
        )
        changed = {key: stamp for key, stamp in stamps.items() if known.stamps.get(key) != stamp}
        if changed:
            intake.index(changed, progress)
        intake.remove(known.stamps.keys() - stamps.keys())
        return intake.missed

    def _read_known(self) -> _KnownStamps:
        """Return the stamps in the catalog, from the cache if the catalog has not changed."""
        with self._database.read() as transaction:
            [(catalog_id, writes)] = transaction.execute(self._sql["about"])
            if (self._known.catalog_id, self._known.writes) != (catalog_id, writes):
                rows = transaction.execute(self._sql["stamps"])
                self._known = _KnownStamps(catalog_id, writes, {key: stamp for key, stamp in rows})  # noqa: C416 - rows have any length
        return self._known


def _select_keys(stamps: dict[str, T], keys: set[str]) -> dict[str, T]:
    return {key: stamp for key, stamp in stamps.items() if key in keys}


def _ignore_progress(_done: int, _total: int) -> None:
    """Ignore the progress."""


class ActiveDatabase(Struct, frozen=True):
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


def _read_rows(
    transaction: Transaction, database: Database, name: str, values: Sequence[Any]
) -> tuple[list[Row], dict[int, list[str]]]:
    """Return the rows of a statement, and the tags of each session."""
    rows = list(transaction.execute(database.sql[name], values))
    tags: dict[int, list[str]] = {}
    ids = msgspec.json.encode([row[0] for row in rows]).decode()
    for session, tag in transaction.execute(database.sql["tags"], (ids,)):
        tags.setdefault(session, []).append(tag)
    return rows, tags


def _entry_from_row(row: Row, tags: Sequence[str], running: bool) -> Entry:
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
        created=from_microseconds(created) if problem is None else None,
        updated=from_microseconds(updated) if problem is None else None,
        tags=tuple(tags),
        agent=agent,
        channel=channel,
        lost=lost,
        damaged=damaged,
        problem=problem,
        sender=Ownership(owner, bool(mixed)).sender,
    )


def page_cursor(entry: Entry) -> str:
    """Return the `after` of a page that ends with this session."""
    # Unreadable sessions have no time and are listed last.
    updated = 0 if entry.updated is None else to_microseconds(entry.updated)
    return f"{updated}:{entry.key}"


def _decode_cursor(after: str | None) -> tuple[int | None, str | None]:
    if after is None:
        return None, None
    updated, colon, key = after.partition(":")
    try:
        number = int(updated)
    except ValueError:
        colon = ""
    if not colon:
        raise UsageError(f"after={after!r} is not the `after` of a previous page")
    return min(number, MAX_INTEGER), replace_surrogates(key)


def _hex_key(key: str) -> str:
    """Encode a key for SQLite's JSON: old versions end a text at a NUL."""
    return replace_surrogates(key).encode().hex().upper()


def _check_limit(limit: int) -> None:
    if type(limit) is not int or not 1 <= limit <= MAX_INTEGER:
        raise UsageError(f"limit must be from 1 to {MAX_INTEGER}, not {limit!r}")


def _check_state(state: str | None) -> None:
    if state is not None and state not in _STATES:
        raise UsageError(f"state must be one of {', '.join(_STATES)}, not {state!r}")


def _check_times(**times: datetime | None) -> None:
    for name, time in times.items():
        if time is not None and time.tzinfo is None:
            raise UsageError(f"{name} must have a time zone, not {time.isoformat()}")
