"""The catalog of a store: titles, counts, states and full-text search."""

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
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
    load_statements,
    prefix_range,
    replace_surrogates,
    to_microseconds,
)
from stenolog.catalog.catalog_files import FileDatabase, MemoryDatabase
from stenolog.catalog.entries import (
    NANODOLLARS,
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
from stenolog.errors import DamagedStore, StoreUnavailable, UsageError
from stenolog.stores import log_reports
from stenolog.stores.arguments import check_store
from stenolog.stores.base import Store

if TYPE_CHECKING:
    # Imported on demand: a list does not need these modules.
    from stenolog.catalog.message_search import SearchFilter, SessionGroups
    from stenolog.tokens import Calibration


T = TypeVar("T")


Progress = Callable[[int, int], None]
"""Function that receives the number of processed sessions and of all changed sessions."""

_MAX_REFRESH_ROUNDS: Final = 20
_MAX_READ_ATTEMPTS: Final = 12
_MAX_REBUILDS: Final = 8
"""Number of attempts after which a damaged catalog is replaced by one in memory."""
_MAX_BUSY_RETRIES: Final = 3
"""Number of retries after which a busy catalog is replaced by one in memory."""
_MAX_CANDIDATES: Final = 10_000
_STATES: Final = ("idle", "running", "interrupted")
_CALIBRATION_TOLERANCE: Final = 0.01
"""A new ratio is stored only if it differs from the stored ratio by more than this fraction."""
_CALIBRATION_ERRORS: Final = (CatalogDamaged, CatalogUnusable, DamagedStore, StoreUnavailable)


def open_catalog(store: Store, *, keep: bool | None = None) -> "Catalog":
    """Open the catalog of a store, which stays up to date by itself.

    The catalog is the file `catalog.db` among the logs of a JSONL store, a file next to a SQLite
    database, or tables in a PostgreSQL database. The catalog of any other store is kept in memory.
    A catalog can be deleted at any time. `keep`: whether the catalog may be stored. [default: yes,
    unless the store was opened with read_only=True] Raises UsageError if `store` is not a Store.
    """
    return Catalog(store, keep=keep)


class Catalog:
    """The list and full-text search of a store. Every read is up to date with the store.

    A catalog that is missing, outdated or damaged is built again. If the catalog cannot be written,
    it is built in memory, and `problems` has the reason. Thread-safe.
    """

    def __init__(self, store: Store, *, keep: bool | None = None) -> None:
        check_store(store, "open_catalog")
        self._store = store
        self._mutex = threading.Lock()
        self._closed = False
        self._keep = store.admin.place.writes_catalog if keep is None else keep
        self.problems: tuple[str, ...] = ()
        """Reasons why the catalog is not stored at its usual place, one sentence each."""
        self._active = Refresher(store, database_of(store, keep=self._keep))
        self._calibrations: dict[str, Calibration] = {}
        """The newest calibration of this process for each model that it calibrated."""

    def __repr__(self) -> str:
        return f"Catalog({self._store!r})"

    def refresh(self, progress: Progress | None = None) -> None:
        """Add new messages of the store to the catalog. Every read starts with a refresh."""
        self._read(lambda _transaction: None, progress)

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
        """Return a page of sessions in the order `sort`.

        `after`: `Page.after` of the previous page. The other arguments are described in
        `SessionFilter`. Raises UsageError if an argument is invalid.
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
        query = self._make_list_query(where, sort, limit, after, progress)
        return self._make_page(self._read(query.read, progress), query)

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

        `values`: maximum number of values of each facet. Raises UsageError if an argument is
        invalid.
        """
        query = self._make_list_query(where, sort, limit, after)

        def read_overview(transaction: Transaction) -> tuple[list[Row], Row, Facets]:
            [totals] = transaction.run("totals", query.filter_values)
            facets: Facets = {}
            for name in FACETS:
                # Ignore the condition on this facet, so that its other values are counted, too.
                filters = filter_values(replace(where, **{name: None}), query.running_keys)
                statement = "tag_facet" if name == "tag" else "facet"
                groups = transaction.run(statement, (*filters, values), column=name)
                facets[name] = [_group_from_row(group) for group in groups if group[0]]
            return query.read(transaction), totals, facets

        rows, (count, cost, priced_count, failed), facets = self._read(read_overview)
        return Overview(
            page=self._make_page(rows, query),
            count=count,
            cost=cost / NANODOLLARS if priced_count else None,
            failed=failed,
            facets=facets,
        )

    def projects(
        self, where: SessionFilter, *, size: int = 5, limit: int = 20, after: int = 0
    ) -> ProjectPage:
        """Return the projects, the most recently used first, each with its newest sessions.

        `size`: maximum number of sessions per project. `after`: `ProjectPage.after` of the previous
        page. Raises UsageError if an argument is invalid.
        """
        query = self._make_list_query(where, "newest", size)
        offset = min(max(0, after), MAX_INTEGER)

        def read_projects(transaction: Transaction) -> tuple[list[Row], list[Row]]:
            values = (*query.filter_values, limit + 1, offset)
            groups = list(transaction.run("projects", values))
            project_names = _encode_keys(row[0] for row in groups[:limit])
            project_values = (*query.filter_values, project_names, size)
            return groups, _read_rows(transaction, "of_projects", project_values)

        groups, rows = self._read(read_projects)
        entries_by_project: dict[str, list[Entry]] = {}
        for entry in self._to_entries(rows, query.running_keys):
            entries_by_project.setdefault(entry.project, []).append(entry)
        return ProjectPage(
            projects=[
                ProjectGroup(group=_group_from_row(row), entries=entries_by_project.get(row[0], []))
                for row in groups[:limit]
            ],
            after=offset + limit if len(groups) > limit else None,
        )

    def _make_list_query(
        self,
        where: SessionFilter,
        sort: Sort,
        limit: int,
        after: str | None = None,
        progress: Progress | None = None,
    ) -> "_ListQuery":
        _check_arguments(limit, where.since, where.until, where.state)
        if sort not in _ORDER_EXPRESSIONS:
            raise UsageError(f"sort must be one of {', '.join(_ORDER_EXPRESSIONS)}, not {sort!r}")
        running_keys = self._find_running_keys(where, progress)
        values = filter_values(where, running_keys)
        return _ListQuery(values, running_keys, sort, limit, _decode_cursor(after))

    def _make_page(self, rows: Sequence[Row], query: "_ListQuery") -> Page:
        entries = self._to_entries(rows[: query.limit], query.running_keys)
        after = page_cursor(entries[-1], query.sort) if len(rows) > query.limit else None
        return Page(entries=entries, after=after)

    def _to_entries(self, rows: Sequence[Row], running_keys: set[str] | None) -> Sequence[Entry]:
        if running_keys is None:
            running_keys = self._store.admin.leased([row[1] for row in rows])
        return [_entry_from_row(row, row[1] in running_keys) for row in rows]

    def entry(self, key: str) -> Entry | None:
        """Return the entry of the session with this key, or None."""
        return self._read_entry(key, with_state=True)

    def sender(self, key: str) -> str:
        """Return the verified sender of all user messages of a session, or an empty string."""
        entry = self._read_entry(key, with_state=False)
        return entry.sender if entry is not None else ""

    def _read_entry(self, key: str, *, with_state: bool) -> Entry | None:
        if replace_surrogates(key) != key:
            return None  # the key without surrogates could belong to another session
        # Check the lease before the read: otherwise a turn that ends in between looks interrupted.
        is_running = with_state and bool(self._store.admin.leased([key]))
        rows = self._read(lambda transaction: _read_rows(transaction, "entry", (key,)))
        return _entry_from_row(rows[0], is_running) if rows else None

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
        """Return the messages, even hidden and archived ones, that have all words of a query.

        `"in quotes"`: words in this order; `-word`: excluded; `wor*`: a prefix. The best matches
        come first, or with `newest` the newest. If thousands of messages match, only the newest are
        ranked. `since` is included, `until` is not. Every query is valid. Raises UsageError if
        limit or `after` is invalid or a time has no time zone.
        """
        # Imported on demand: a list does not need this module.
        from stenolog.catalog.message_search import Search
        from stenolog.catalog.query import parse_query

        _check_arguments(limit, since, until)
        parsed_query = parse_query(query)
        if parsed_query.is_empty:
            return Hits(hits=(), count=0, exact=True, after=None)
        where = SessionFilter(prefix=prefix, tag=tag, since=since, until=until)
        search_filter = _make_search_filter(where, role=_clean_text(role))

        def read_hits(transaction: Transaction) -> Hits:
            search = Search(transaction, parsed_query, search_filter)
            hits = search.find_newest(limit, after) if newest else search.find_best(limit, after)
            rows = transaction.run("unreadable")
            unreadable = {key: problem for key, problem in rows if key.startswith(prefix)}
            return replace(hits, unreadable=unreadable) if unreadable else hits

        return self._read(read_hits, progress)

    def search_sessions(
        self, query: str, where: SessionFilter, *, limit: int = 20, size: int = 3, after: int = 0
    ) -> GroupedHits:
        """Return messages with all words of a query, grouped by session, the best match first.

        `where`: conditions on the sessions; only `since` and `until` apply to the messages. `size`:
        maximum number of hits per session. `after`: `GroupedHits.after` of the previous page.
        Raises UsageError if an argument is invalid.
        """
        # Imported on demand: a list does not need this module.
        from stenolog.catalog.message_search import Search
        from stenolog.catalog.query import parse_query

        _check_arguments(limit, where.since, where.until, where.state)
        parsed_query = parse_query(query)
        if parsed_query.is_empty:
            return GroupedHits(sessions=(), count=0, session_count=0, exact=True, after=None)
        running_keys = self._find_running_keys(where)
        search_filter = _make_search_filter(where, running_keys)

        def read_groups(transaction: Transaction) -> "tuple[SessionGroups, list[Row]]":
            search = Search(transaction, parsed_query, search_filter)
            groups = search.find_by_session(limit, min(max(0, after), MAX_INTEGER), size)
            ids = msgspec.json.encode(list(groups.hits)).decode()
            return groups, _read_rows(transaction, "entries", (ids,))

        groups, rows = self._read(read_groups)
        ids = (row[0] for row in rows)
        entries = dict(zip(ids, self._to_entries(rows, running_keys), strict=True))
        return GroupedHits(
            sessions=[
                SessionHits(entry=entries[id_], hits=hits, count=groups.counts[id_])
                for id_, hits in groups.hits.items()
                if id_ in entries
            ],
            count=sum(groups.counts.values()),
            session_count=len(groups.counts),
            exact=groups.exact,
            after=groups.after,
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
        """Return candidates for recall from the session with the key `owner`.

        Candidates are the messages with the most and the rarest of `stems` (as returned by
        tokenizer.stem), and the neighbours of these messages. `threads`: `owner` is a sender;
        search every session in which all user messages have that sender. `agent`: leave out
        sessions of other agents. `exclude_visible_of`: leave out the visible messages of this
        session. Messages between `since` and `until` come first. Raises UsageError if limit is
        invalid or a time has no time zone.
        """
        # Imported on demand: a list does not need this module.
        from stenolog.catalog.message_search import CandidateQuery, CandidateSearch

        _check_arguments(limit, since, until)
        query = CandidateQuery(
            owner=replace_surrogates(owner),
            threads=threads,
            stems=[replace_surrogates(stem) for stem in stems],
            agent=_clean_text(agent),
            exclude_visible_of=_clean_text(exclude_visible_of),
            since=_optional_microseconds(since),
            until=_optional_microseconds(until),
            limit=min(limit, _MAX_CANDIDATES),
        )
        return self._read(lambda transaction: CandidateSearch(transaction, query).find())

    def calibration(self, model: str) -> "Calibration":
        """Return the calibration of a model's token counts; the default for an unknown model.

        The calibration of this process is preferred to that of another process in the catalog.
        """
        from stenolog.tokens import Calibration

        name = replace_surrogates(model)
        return self._calibrations.get(name) or self._read_calibration(name) or Calibration()

    def calibrate(self, model: str, *, estimated: int, reported: int) -> "Calibration":
        """Update a model's calibration with an estimated and a reported token count; return it.

        A calibration whose ratio hardly changed is only kept in memory, because the next turn would
        wait for the write. A calibration that cannot be stored is kept in memory, too; losing it
        only costs accuracy.
        """
        from stenolog.tokens import Calibration

        name, database = replace_surrogates(model), self._active.database
        stored = self._read_calibration(name)
        newest = self._calibrations.get(name) or stored or Calibration()
        result = newest.after(estimated=estimated, reported=reported)
        self._calibrations[name] = result

        def store_calibration() -> None:
            with database.write_transaction() as transaction:
                transaction.run("calibrate", (name, result.ratio, result.weight))

        if stored is None or not _is_similar(result, stored):
            with suppress(*_CALIBRATION_ERRORS):
                try:
                    store_calibration()
                except CatalogDamaged:
                    # The tables are missing if the catalog was never read.
                    database.rebuild()
                    store_calibration()
        return result

    def _read_calibration(self, model: str) -> "Calibration | None":
        from stenolog.tokens import Calibration

        self._check_open()
        with (
            suppress(*_CALIBRATION_ERRORS),
            self._active.database.read_transaction() as transaction,
        ):
            for ratio, weight in transaction.run("calibration", (model,)):
                return Calibration(ratio=ratio, weight=weight)
        return None

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

    def _find_running_keys(
        self, where: SessionFilter, progress: Progress | None = None
    ) -> set[str] | None:
        """Return the keys of the running sessions; None if the filter has no state."""
        if where.state is None:
            return None
        rows = self._read(lambda transaction: list(transaction.run("stamps")), progress)
        return self._store.admin.leased([key for key, _ in rows])

    def _read(self, work: "CatalogRead[T]", progress: Progress | None = None) -> T:
        """Refresh the catalog and return the result of `work`."""
        try:
            return self._read_updated(work, progress)
        except (OSError, ImportError) as error:
            # The first update imports modules and reads SQL files, which needs free descriptors.
            raise StoreUnavailable(f"the catalog cannot be updated now: {error}") from error

    def _read_updated(self, work: "CatalogRead[T]", progress: Progress | None) -> T:
        """Refresh the catalog and return the result of `work`.

        If the catalog is damaged, rebuild it and try again.
        """
        for attempt in range(_MAX_READ_ATTEMPTS):
            self._check_open()
            refresher = self._active
            try:
                catalog_id = self._refresh(refresher, progress)
                self._check_open()
                with refresher.database.read_transaction() as transaction:
                    [(current_id, _)] = transaction.run("about")
                    # If a purge has emptied the catalog since the refresh, refresh it again.
                    if current_id == catalog_id:
                        return work(transaction)
            except CatalogDamaged as error:
                if attempt < _MAX_REBUILDS:
                    self._rebuild(refresher, error)
                else:
                    self._use_memory(refresher, error)
            except CatalogUnusable as error:
                if not isinstance(error, CatalogBusy) or attempt >= _MAX_BUSY_RETRIES:
                    self._use_memory(refresher, error)
        raise StoreUnavailable("the catalog was damaged repeatedly; check the disk")

    def _refresh(self, refresher: "Refresher", progress: Progress | None) -> int | None:
        """Bring the catalog up to date, and return its id."""
        return refresher.refresh(progress)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the catalog is closed")

    def _rebuild(self, broken_refresher: "Refresher", reason: CatalogDamaged) -> None:
        log_reports.info("rebuilding the catalog: %s", reason)
        try:
            broken_refresher.database.rebuild()
        except (CatalogDamaged, CatalogBusy):
            pass  # the next attempt reads the catalog again
        except CatalogUnusable as error:
            self._use_memory(broken_refresher, error)

    def _use_memory(self, failed_refresher: "Refresher", reason: Exception) -> None:
        """Continue with a database in memory. Raises StoreUnavailable if that cannot help."""
        with self._mutex:
            self._check_open()
            if self._active is not failed_refresher:
                return  # another thread has already replaced the database
            if isinstance(reason, DatabaseUnreachable):
                # A catalog in memory would be built from the same unreachable server.
                raise StoreUnavailable(str(reason)) from reason
            if isinstance(failed_refresher.database, MemoryDatabase):
                if isinstance(reason, CatalogBusy | CatalogDamaged):
                    # No other process has it: it was copied from a damaged file.
                    failed_refresher.database.rebuild()
                    return
                raise StoreUnavailable(f"the catalog cannot be built: {reason}") from reason
            memory = MemoryDatabase(failed_refresher.database)
            failed_refresher.database.close()
            self._active = Refresher(self._store, memory)
            if not self._keep:
                return
            problem = f"the catalog cannot be stored and was built in memory: {reason}"
            self.problems = (*self.problems, problem)
        log_reports.warning("%s", problem)


CatalogRead = Callable[[Transaction], T]
"""Function that reads from the catalog in a transaction."""


class _KnownStamps(Struct, frozen=True):
    """The stamps of all sessions in the catalog. A stamp changes with every change of a session."""

    catalog_id: int | None
    """Random number that identifies the catalog."""
    write_count: int
    """Number of writes to the catalog so far."""
    stamps: dict[str, str | None]


class Refresher:
    """An updater that brings a catalog up to date with a store.

    The stamps of the store show which sessions changed. Only the new messages of changed sessions
    are read. A stamp is read before its session: concurrent writes may be read twice, but are never
    missed.

    Several processes may refresh one catalog at the same time. Each session has a version. If two
    processes read the same version, only the first can write the next version; the second process
    starts again with the new row. The store is never called during a transaction, because the
    tables may be in the store's database.
    """

    def __init__(self, store: Store, database: Database) -> None:
        self._store = store
        self.database = database
        """Database with the tables that are updated."""
        self._known = _KnownStamps(None, 0, {})
        self._price_list_version = price_list_version()

    def refresh(self, progress: Progress | None = None) -> int | None:
        """Add all messages stored before this call, and return the id of the catalog.

        Raises CatalogDamaged and CatalogUnusable. Raises CatalogBusy if other processes changed
        the same sessions first in every round. After CatalogBusy, the catalog may be out of date.
        """
        catalog_id: int | None = None
        missed_keys: set[str] | None = None
        for _ in range(_MAX_REFRESH_ROUNDS):
            # Read the catalog first: then a session that only the catalog has was deleted.
            catalog_stamps = self._read_known_stamps()
            store_stamps = self._store.admin.stamps()
            if catalog_stamps.stamps == store_stamps:
                return catalog_stamps.catalog_id
            if missed_keys is not None and catalog_stamps.catalog_id == catalog_id:
                # Only the missed sessions are left: this call has already updated the others.
                known_stamps = _select_stamps(catalog_stamps.stamps, missed_keys)
                catalog_stamps = replace(catalog_stamps, stamps=known_stamps)
                store_stamps = _select_stamps(store_stamps, missed_keys)
            catalog_id = catalog_stamps.catalog_id
            missed_keys = self._index_changes(
                catalog_stamps, store_stamps, progress or (lambda _done, _total: None)
            )
            if not missed_keys:
                return catalog_id
            # Another process changed the missed sessions, perhaps with older stamps, so retry them.
        raise CatalogBusy("other processes kept changing the catalog")

    def _index_changes(
        self, catalog_stamps: _KnownStamps, store_stamps: dict[str, str], progress: Progress
    ) -> set[str]:
        """Index the changes. Return the keys of sessions that another process changed first."""
        # Imported on demand: this module is needed only if there are changes.
        from stenolog.catalog.indexing import Indexer

        indexer = Indexer(
            self._store,
            self.database,
            catalog_id=catalog_stamps.catalog_id,
            known_stamps=catalog_stamps.stamps,
            price_list_version=self._price_list_version,
        )
        new_stamps = {
            key: stamp
            for key, stamp in store_stamps.items()
            if catalog_stamps.stamps.get(key) != stamp
        }
        if new_stamps:
            indexer.index(new_stamps, progress)
        indexer.remove_sessions(catalog_stamps.stamps.keys() - store_stamps.keys())
        return indexer.missed_keys

    def _read_known_stamps(self) -> _KnownStamps:
        """Return the stamps in the catalog, from the cache if the catalog has not changed."""
        with self.database.read_transaction() as transaction:
            [(catalog_id, write_count)] = transaction.run("about")
            if (self._known.catalog_id, self._known.write_count) != (catalog_id, write_count):
                rows = transaction.run("current_stamps", (self._price_list_version,))
                self._known = _KnownStamps(catalog_id, write_count, dict(rows))
        return self._known


def _select_stamps(stamps: dict[str, T], keys: set[str]) -> dict[str, T]:
    return {key: stamp for key, stamp in stamps.items() if key in keys}


def database_of(store: Store, *, keep: bool) -> Database:
    """Return the database of a store's catalog. `keep`: whether the catalog may be written."""
    place = store.admin.place
    if place.catalog_file is not None:
        return FileDatabase(place.catalog_file, writable=keep)
    # A PostgresStore exists only if its module was imported.
    postgres = sys.modules.get("stenolog.stores.postgres")
    if postgres is not None and isinstance(store, postgres.PostgresStore):
        from stenolog.catalog.catalog_tables import SchemaDatabase

        return SchemaDatabase(store.database, place.namespace, writable=keep)
    return MemoryDatabase()


def price_list_version() -> int:
    """Return a number that is higher for a newer price list; 0 if none is installed.

    The number is the time at which the package was installed, because importing the package would
    take too long.
    """
    try:
        spec = find_spec("genai_prices")
        return int(Path(spec.origin).stat().st_mtime) if spec and spec.origin else 0
    except (ImportError, ValueError, OSError):
        return 0


def _is_similar(calibration: "Calibration", stored: "Calibration") -> bool:
    """Return whether a calibration differs too little from the stored one to be stored."""
    difference = abs(calibration.ratio - stored.ratio)
    is_close = difference <= _CALIBRATION_TOLERANCE * stored.ratio
    return is_close and calibration.weight == stored.weight


# --- lists -----------------------------------------------------------------------------------


Facets = dict[str, list[Group]]
FACETS: Final = ("program", "project", "model", "channel", "tag")
_ORDER_EXPRESSIONS: Final[dict[Sort, str]] = {
    "changed": "updated",
    "newest": "last_message",
    "oldest": "(-last_message)",
    "cost": "cost",
    "tokens": "(input_tokens + output_tokens)",
    "length": "count",
}
"""SQL expression for each order; the highest value comes first."""


class _ListQuery(Struct, frozen=True):
    """The query for one page of the list of sessions."""

    filter_values: Sequence[Any]
    running_keys: set[str] | None
    """Keys of the running sessions; None if the filter has no state."""
    sort: Sort
    limit: int
    cursor: tuple[int | None, str | None]

    def read(self, transaction: Transaction) -> list[Row]:
        """Return the rows of the page, and one more row if another page follows."""
        values = (*self.filter_values, *self.cursor, self.limit + 1)
        return _read_rows(transaction, "list", values, column=_ORDER_EXPRESSIONS[self.sort])


def filter_values(where: SessionFilter, running_keys: set[str] | None = None) -> list[Any]:
    """Return the values for `session_filter` in queries.sql.

    `running_keys`: keys of the running sessions; None if the filter has no state.
    """
    return [
        *prefix_range(where.prefix),
        *map(_clean_text, (where.tag, where.channel, where.agent)),
        None if running_keys is None else _encode_keys(running_keys),
        where.state == "running",
        None if where.state == "running" else where.state,
        *map(_clean_text, (where.program, where.project, where.model)),
        where.failed,
        *map(_optional_microseconds, (where.since, where.until)),
    ]


def _make_search_filter(
    where: SessionFilter, running_keys: set[str] | None = None, *, role: str | None = None
) -> "SearchFilter":
    """Return the filter of a search. `since` and `until` apply to messages, not to sessions."""
    from stenolog.catalog.message_search import SearchFilter

    session_filter = replace(where, since=None, until=None)
    is_empty = session_filter == SessionFilter()
    sessions = None if is_empty else filter_values(session_filter, running_keys)
    return SearchFilter(role, sessions, *map(_optional_microseconds, (where.since, where.until)))


def _clean_text(text: str | None) -> str | None:
    return None if text is None else replace_surrogates(text)


def _optional_microseconds(time: datetime | None) -> int | None:
    return None if time is None else to_microseconds(time)


def _group_from_row(row: Row) -> Group:
    value, count, cost, priced_count = row
    return Group(value=value, count=count, cost=cost / NANODOLLARS if priced_count else None)


def _read_rows(
    transaction: Transaction, statement: str, values: Sequence[Any], *, column: str = ""
) -> list[Row]:
    """Return the rows of a statement, each with the tags of its session as an additional column."""
    rows = list(transaction.run(statement, values, column=column))
    tags: dict[int, list[str]] = {}
    ids = msgspec.json.encode([row[0] for row in rows]).decode()
    for session, tag in transaction.run("tags", (ids,)):
        tags.setdefault(session, []).append(tag)
    return [(*row, tuple(tags.get(row[0], ()))) for row in rows]


@cache
def _entry_column_names() -> list[str]:
    return [*load_statements()["entry_columns"].replace(",", " ").split(), "tags"]


def _entry_from_row(row: Row, is_running: bool) -> Entry:
    _, *columns = zip(_entry_column_names(), row, strict=True)
    fields = dict(columns)
    ownership = Ownership(fields.pop("owner"), bool(fields.pop("mixed")))
    is_readable = fields["problem"] is None
    for name in ("created", "updated", "last_message"):
        fields[name] = from_microseconds(fields[name]) if is_readable else None
    has_price = fields.pop("answers") > fields["unpriced"]
    fields["cost"] = fields["cost"] / NANODOLLARS if has_price else None
    fields["state"] = "running" if is_running else fields["state"]
    return Entry(**fields, sender=ownership.sender)


def page_cursor(entry: Entry, sort: Sort = "changed") -> str:
    """Return the value of `after` for the page that starts after this session."""
    time = entry.updated if sort == "changed" else entry.last_message
    # Unreadable sessions have no time.
    last_time = 0 if time is None else to_microseconds(time)
    value = {
        "oldest": -last_time,
        "cost": round((entry.cost or 0) * NANODOLLARS),
        "tokens": entry.input_tokens + entry.output_tokens,
        "length": entry.count,
    }.get(sort, last_time)
    return f"{value}:{entry.key}"


def _decode_cursor(after: str | None) -> tuple[int | None, str | None]:
    if after is None:
        return None, None
    try:
        value_text, key = after.split(":", 1)
        sort_value = int(value_text)
    except ValueError:
        raise UsageError(f"after={after!r} is not the `after` of a previous page") from None
    return max(-MAX_INTEGER, min(sort_value, MAX_INTEGER)), replace_surrogates(key)


def _encode_keys(keys: Iterable[str]) -> str:
    """Encode keys as hexadecimal JSON texts, because old SQLite versions end a text at a NUL."""
    hex_keys = (replace_surrogates(key).encode().hex().upper() for key in keys)
    return msgspec.json.encode(sorted(hex_keys)).decode()


def _check_arguments(
    limit: int, since: datetime | None, until: datetime | None, state: str | None = None
) -> None:
    if type(limit) is not int or not 1 <= limit <= MAX_INTEGER:
        raise UsageError(f"limit must be from 1 to {MAX_INTEGER}, not {limit!r}")
    if state is not None and state not in _STATES:
        raise UsageError(f"state must be one of {', '.join(_STATES)}, not {state!r}")
    for name, time in (("since", since), ("until", until)):
        if time is not None and time.tzinfo is None:
            raise UsageError(f"{name} must have a time zone, not {time.isoformat()}")
