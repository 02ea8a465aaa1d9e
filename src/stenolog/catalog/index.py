"""The catalog of a store: titles, counts, states and full-text search."""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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
from stenolog.catalog.entries import (
    NANO,
    Candidates,
    Entry,
    Group,
    GroupedHits,
    Hits,
    Overview,
    Page,
    ProjectGroup,
    ProjectPage,
    SessionFilter,
    SessionHits,
    Sort,
    State,
)
from stenolog.catalog.message_metadata import Ownership
from stenolog.errors import StoreUnavailable, UsageError
from stenolog.stores import log_reports
from stenolog.stores.base import Store, leased_keys
from stenolog.stores.catalog_file import CatalogFileStore
from stenolog.stores.jsonl import JSONLStore

if TYPE_CHECKING:
    # Imported on demand: a list does not need them.
    from stenolog.catalog.calibrations import Calibrations
    from stenolog.catalog.message_search import FoundGroups
    from stenolog.tokens import Calibration


T = TypeVar("T")

Rows = tuple[list[Row], dict[int, list[str]]]
"""Rows of sessions, and the tags of each session."""

Progress = Callable[[int, int], None]
"""Called with the number of processed sessions and the number of changed sessions."""

_MAX_ROUNDS: Final = 20
_MAX_ATTEMPTS: Final = 12
_MAX_REBUILDS: Final = 8
_MAX_WAITS: Final = 3
_MAX_CANDIDATES: Final = 10_000
_LAZY_MODULES: Final = (
    "stenolog.catalog.answer_prices",
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
        program: str | None = None,
        project: str | None = None,
        model: str | None = None,
        failed: bool | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        sort: Sort = "changed",
        limit: int = 50,
        after: str | None = None,
        progress: Progress | None = None,
    ) -> Page:
        """Return sessions, most recently changed first. `after`: from the previous page.

        The conditions are those of `SessionFilter`. Raises UsageError if a value is invalid.
        """
        where = SessionFilter(
            prefix=prefix,
            tag=tag,
            state=state,
            channel=channel,
            agent=agent,
            program=program,
            project=project,
            model=model,
            failed=failed,
            since=since,
            until=until,
        )
        query, busy = self._list_query(where, sort, limit, after, progress)
        rows = self._read(lambda tx, db: query.read(tx, db), progress)
        return self._page(rows, query, busy)

    def overview(
        self,
        where: SessionFilter,
        *,
        sort: Sort = "newest",
        limit: int = 50,
        after: str | None = None,
        values: int = 10,
    ) -> Overview:
        """Return a page of the list, the number of all matching sessions, and their facets.

        `values`: maximum number of values of each facet. Raises UsageError if a value is invalid.
        """
        query, busy = self._list_query(where, sort, limit, after, None)

        def work(transaction: Transaction, database: Database) -> tuple[Rows, Row, Facets]:
            [totals] = transaction.execute(database.sql["totals"], query.filter_values)
            return query.read(transaction, database), totals, facets(transaction, database)

        def facets(transaction: Transaction, database: Database) -> Facets:
            found: Facets = {}
            for name in FACETS:
                # Other values of the same facet can be chosen instead, so they are counted too.
                others = filter_values(replace(where, **{name: None}), busy)
                sql = database.sql["tag_facet" if name == "tag" else "facet"]
                rows = transaction.execute(sql.replace("{facet}", name), (*others, values))
                found[name] = [_group(row) for row in rows if row[0]]
            return found

        rows, (count, cost, with_cost, failed), found = self._read(work, None)
        return Overview(
            page=self._page(rows, query, busy),
            count=count,
            cost=cost / NANO if with_cost else None,
            failed=failed,
            facets=found,
        )

    def projects(
        self, where: SessionFilter, *, size: int = 5, limit: int = 20, after: int = 0
    ) -> ProjectPage:
        """Return the projects, the most recently used first, each with its newest sessions.

        `size`: maximum number of sessions per project. `after`: from the previous page. Raises
        UsageError if a value is invalid.
        """
        query, busy = self._list_query(where, "newest", size, None, None)
        offset = min(max(0, after), MAX_INTEGER)

        def work(transaction: Transaction, database: Database) -> tuple[list[Row], Rows]:
            values = (*query.filter_values, limit + 1, offset)
            groups = list(transaction.execute(database.sql["projects"], values))
            names = _hex_keys(row[0] for row in groups[:limit])
            of_them = (*query.filter_values, names, size)
            return groups, _read_rows(transaction, database, "of_projects", of_them)

        groups, rows = self._read(work, None)
        found: dict[str, list[Entry]] = {}
        for entry in self._entries(rows, busy):
            found.setdefault(entry.project, []).append(entry)
        return ProjectPage(
            projects=[
                ProjectGroup(group=_group(row), entries=found.get(row[0], []))
                for row in groups[:limit]
            ],
            after=offset + limit if len(groups) > limit else None,
        )

    def _list_query(
        self,
        where: SessionFilter,
        sort: Sort,
        limit: int,
        after: str | None,
        progress: Progress | None,
    ) -> "tuple[_ListQuery, set[str] | None]":
        _check_limit(limit)
        _check_state(where.state)
        _check_times(since=where.since, until=where.until)
        if sort not in _ORDERS:
            raise UsageError(f"sort must be one of {', '.join(_ORDERS)}, not {sort!r}")
        busy = self._running(progress) if where.state is not None else None
        values = filter_values(where, busy)
        return _ListQuery(values, sort, limit, _decode_cursor(after)), busy

    def _page(self, rows: Rows, query: "_ListQuery", busy: set[str] | None) -> Page:
        limit = query.limit
        entries = self._entries((rows[0][:limit], rows[1]), busy)
        more = entries and len(rows[0]) > limit
        return Page(entries=entries, after=page_cursor(entries[-1], query.sort) if more else None)

    def _entries(self, rows: Rows, busy: set[str] | None) -> Sequence[Entry]:
        found, tags = rows
        if busy is None:
            busy = leased_keys(self._store, [row[1] for row in found])
        return [_entry_from_row(row, tags.get(row[0], ()), row[1] in busy) for row in found]

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
        where = SessionFilter(prefix=prefix, tag=tag)
        search_filter = SearchFilter(
            role=_cleaned(role),
            sessions=filter_values(where, None) if where != SessionFilter() else None,
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

    def search_sessions(
        self,
        query: str,
        where: SessionFilter,
        *,
        limit: int = 20,
        size: int = 3,
        after: int = 0,
    ) -> GroupedHits:
        """Return messages with all words of a query, by session, the best match first.

        `where`: which sessions; its `since` and `until` apply to the messages. `size`: maximum
        number of hits per session. `after`: from the previous page. Raises UsageError if a value is
        invalid.
        """
        # Imported on demand: a list does not need it.
        from stenolog.catalog.message_search import Search, SearchFilter
        from stenolog.catalog.query import parse

        _check_limit(limit)
        _check_state(where.state)
        _check_times(since=where.since, until=where.until)
        parsed = parse(query)
        if parsed.is_empty:
            return GroupedHits(sessions=(), count=0, session_count=0, exact=True, after=None)
        busy = self._running(None) if where.state is not None else None
        of_session = replace(where, since=None, until=None)
        search_filter = SearchFilter(
            role=None,
            sessions=filter_values(of_session, busy) if of_session != SessionFilter() else None,
            since=where.since,
            until=where.until,
        )

        def work(transaction: Transaction, database: Database) -> "tuple[FoundGroups, Rows]":
            found = Search(transaction, database, parsed, search_filter).by_session(
                limit, min(max(0, after), MAX_INTEGER), size
            )
            ids = msgspec.json.encode(list(found.hits)).decode()
            return found, _read_rows(transaction, database, "entries", (ids,))

        found, rows = self._read(work, None)
        entries = dict(zip((row[0] for row in rows[0]), self._entries(rows, busy), strict=True))
        return GroupedHits(
            sessions=[
                SessionHits(entry=entries[id_], hits=hits, count=found.counts[id_])
                for id_, hits in found.hits.items()
                if id_ in entries
            ],
            count=sum(found.counts.values()),
            session_count=len(found.counts),
            exact=found.exact,
            after=found.after,
        )

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
        self._price_list = price_list_version()

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
            self._store,
            self._database,
            reading,
            catalog_id=known.catalog_id,
            known=known.stamps,
            price_list=self._price_list,
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
                rows = transaction.execute(self._sql["current_stamps"], (self._price_list,))
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


def price_list_version() -> int:
    """Return a number that is higher for a newer price list; 0 if none is installed.

    It is the time at which the package was installed: importing the package would take too long.
    """
    try:
        found = find_spec("genai_prices")
        return int(Path(found.origin).stat().st_mtime) if found and found.origin else 0
    except (ImportError, ValueError, OSError):
        return 0


# --- lists -----------------------------------------------------------------------------------


Facets = dict[str, list[Group]]
FACETS: Final = ("program", "project", "model", "channel", "tag")
_ORDERS: Final[dict[Sort, str]] = {
    "changed": "updated",
    "newest": "last_message",
    "oldest": "(-last_message)",
    "cost": "cost",
    "tokens": "(input_tokens + output_tokens)",
    "length": "count",
}
"""Column of each order; the highest value comes first."""


class _ListQuery(Struct, frozen=True):
    """One page of the list of sessions."""

    filter_values: Sequence[Any]
    sort: Sort
    limit: int
    cursor: tuple[int | None, str | None]

    def read(self, transaction: Transaction, database: Database) -> Rows:
        """Return one row more than the page has, if there are more."""
        values = (*self.filter_values, *self.cursor, self.limit + 1)
        return _read_rows(transaction, database, "list", values, _ORDERS[self.sort])


def filter_values(where: SessionFilter, busy: set[str] | None) -> list[Any]:
    """Return the values of session_filter. `busy`: the running sessions, if the state matters."""
    texts = (where.program, where.project, where.model)
    return [
        *prefix_range(where.prefix),
        *(_cleaned(text) for text in (where.tag, where.channel, where.agent)),
        None if busy is None else _hex_keys(busy),
        where.state == "running",
        None if where.state == "running" else where.state,
        *map(_cleaned, texts),
        where.failed,
        *(None if time is None else to_microseconds(time) for time in (where.since, where.until)),
    ]


def _cleaned(text: str | None) -> str | None:
    return None if text is None else replace_surrogates(text)


def _group(row: Row) -> Group:
    value, count, cost, with_cost = row
    return Group(value=value, count=count, cost=cost / NANO if with_cost else None)


def _read_rows(
    transaction: Transaction,
    database: Database,
    name: str,
    values: Sequence[Any],
    order: str = "",
) -> Rows:
    """Return the rows of a statement, and the tags of each session."""
    rows = list(transaction.execute(database.sql[name].replace("{order}", order), values))
    tags: dict[int, list[str]] = {}
    ids = msgspec.json.encode([row[0] for row in rows]).decode()
    for session, tag in transaction.execute(database.sql["tags"], (ids,)):
        tags.setdefault(session, []).append(tag)
    return rows, tags


def _entry_from_row(row: Row, tags: Sequence[str], running: bool) -> Entry:
    (_, key, uid, title, state, visible, count, tokens, created, updated, agent, channel, *rest) = (
        row
    )
    prompt, lost, damaged, problem, owner, mixed, program, project, model, *rest = rest
    forked_from, forked_at, last_message, answers, unpriced, *used = rest
    input_tokens, output_tokens, cost, failed = used
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
        last_message=from_microseconds(last_message) if problem is None else None,
        program=program,
        project=project,
        model=model,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cost=cost / NANO if answers > unpriced else None,
        unpriced=unpriced,
        failed=failed,
        forked_from=forked_from,
        forked_at=forked_at,
    )


def page_cursor(entry: Entry, sort: Sort = "changed") -> str:
    """Return the `after` of a page that ends with this session."""
    time = entry.updated if sort == "changed" else entry.last_message
    # Unreadable sessions have no time.
    last = 0 if time is None else to_microseconds(time)
    value = {
        "oldest": -last,
        "cost": round((entry.cost or 0) * NANO),
        "tokens": entry.input_tokens + entry.output_tokens,
        "length": entry.count,
    }.get(sort, last)
    return f"{value}:{entry.key}"


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
    return max(-MAX_INTEGER, min(number, MAX_INTEGER)), replace_surrogates(key)


def _hex_keys(keys: Iterable[str]) -> str:
    """Encode keys for SQLite's JSON: old versions end a text at a NUL."""
    encoded = (replace_surrogates(key).encode().hex().upper() for key in keys)
    return msgspec.json.encode(sorted(encoded)).decode()


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
