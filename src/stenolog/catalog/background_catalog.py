"""A catalog that answers from what is indexed so far, while a thread adds the rest.

The first list of thousands of sessions must not wait until all their messages are indexed. The
thread first adds a row for each new session, from a look at the start of its file, and then the
messages.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.catalog.catalog_database import Database, Transaction
from stenolog.catalog.index import (
    ActiveDatabase,
    Catalog,
    CatalogRead,
    Progress,
    Refresher,
    T,
    price_list_version,
)
from stenolog.errors import StenologError, StoreClosed
from stenolog.stores.base import Store

LIST_WAIT: Final = 5.0
"""Maximum number of seconds that the first read waits for the rows of the newest sessions."""
FRESH_WAIT: Final = 0.2
"""Maximum number of seconds that a read waits for changes of the store to be added."""
_FEW: Final = 20
"""Number of new sessions that are indexed at once, without a row in advance."""
_FIRST_ROWS: Final = 200
"""Number of rows after which the first list is shown."""
_COUNT_INTERVAL: Final = 0.5
"""Seconds between two counts of the indexed sessions."""
_CLOSE_WAIT: Final = 10.0

_logger = logging.getLogger("stenolog")


class SessionHead(Struct, frozen=True, kw_only=True):
    """What a look at the start of a session tells. Times are microseconds since 1970."""

    key: str
    prompt: str = ""
    created: int = 0
    updated: int = 0
    meta: Mapping[str, Any] = {}


Heads = Callable[[Sequence[str]], Iterator[SessionHead]]
"""Yields the heads of the sessions with these keys, the newest first."""


class BackgroundCatalog(Catalog):
    """A catalog that a thread keeps up to date. A read may be a moment behind the store.

    Only reads make the thread look for changes.
    """

    def __init__(self, store: Store, *, heads: Heads) -> None:
        self._heads = heads
        self._news = threading.Condition()
        self._asked = 1
        """Number of the newest request for an update; the first one starts with the catalog."""
        self._done = 0
        """Number of the newest request that was fulfilled."""
        self._is_listed = False
        """Whether the newest sessions that existed at the start have a row."""
        self._is_refreshing = False
        self._ends = False
        self._progress: tuple[int, int] | None = None
        self._count = 0
        self._counted_at = 0.0
        self._thread = threading.Thread(target=self._run, name="catalog", daemon=True)
        super().__init__(store)
        self._thread.start()

    @property
    def progress(self) -> tuple[int, int] | None:
        """Number of indexed sessions and of all sessions; None if all are indexed."""
        return self._progress

    def close(self) -> None:
        """Stop the thread and close the catalog. A second call does nothing."""
        with self._news:
            self._ends = True
            self._news.notify_all()
        self._thread.join(_CLOSE_WAIT)
        super().close()

    def _use(self, database: Database) -> None:
        self._active = ActiveDatabase(database, _ThreadRefresher(self, self._store, database))

    def is_refreshing_here(self) -> bool:
        """Return whether this is the thread, and it adds messages now."""
        return self._is_refreshing and threading.current_thread() is self._thread

    def _read(self, work: CatalogRead[T], progress: Progress | None) -> T:
        if threading.current_thread() is not self._thread:
            self._ask_for_update()
        return super()._read(work, progress)

    def _ask_for_update(self) -> None:
        with self._news:
            self._asked += 1
            mine = self._asked
            self._news.notify_all()
            self._news.wait_for(lambda: self._is_listed or self._ends, LIST_WAIT)
            if self._progress is None:
                self._news.wait_for(lambda: self._done >= mine or self._ends, FRESH_WAIT)

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._asked > self._done or self._ends)
                if self._ends:
                    return
                asked = self._asked
            try:
                self._add_rows()
                self._is_refreshing = True
                self.refresh(self._note)
            except StoreClosed:
                return
            except StenologError as error:
                _logger.warning("the catalog could not be updated: %s", error)
            except Exception:
                _logger.exception("updating the catalog failed")
            finally:
                self._is_refreshing = False
                self._set(listed=True, done=asked)

    def _set(self, *, listed: bool, done: int = 0) -> None:
        with self._news:
            self._is_listed = listed
            if done:
                self._done, self._progress = done, None
            self._news.notify_all()

    def _note(self, _done: int, changed: int) -> None:
        """Note the progress, or stop."""
        if self._ends:
            raise StoreClosed("the catalog is closed")
        if changed > _FEW and time.monotonic() - self._counted_at > _COUNT_INTERVAL:
            # Counted, because other processes may index at the same time.
            with self._active.database.read() as transaction:
                rows = transaction.execute(self._active.database.sql["stamps"])
                indexed = sum(stamp is not None for _, stamp in rows)
            self._counted_at = time.monotonic()
            with self._news:
                self._progress = min(indexed, self._count), self._count

    def _add_rows(self) -> None:
        """Add a row without messages for each new session, if there are many."""
        # Imported on demand: only the first start with many sessions needs it.
        from stenolog.catalog.indexing import CatalogWriter
        from stenolog.catalog.steps import SessionColumns, Step

        def read(transaction: Transaction, database: Database) -> tuple[int, set[str], Database]:
            [(catalog_id, _)] = transaction.execute(database.sql["about"])
            rows = transaction.execute(database.sql["stamps"])
            return catalog_id, {key for key, _ in rows}, database

        catalog_id, known, database = self._read(read, None)
        self._set(listed=self._is_listed or bool(known))
        keys = self._store.stamps().keys()
        self._count = len(keys)
        new = [key for key in keys if key not in known]
        if len(new) <= _FEW:
            return
        writer = CatalogWriter(database, catalog_id, price_list_version())
        self._progress = len(keys) - len(new), len(keys)
        for number, head in enumerate(self._heads(new)):
            if self._ends:
                raise StoreClosed("the catalog is closed")
            columns = SessionColumns(
                stamp=None,
                prompt=head.prompt,
                created=head.created,
                updated=head.updated,
                meta=head.meta,
            )
            if number == _FIRST_ROWS:
                # The newest come first: enough for the first page.
                writer.flush()
                self._set(listed=True)
            writer.put(head.key, [Step(key=head.key, version=None, columns=columns)])
        writer.flush()
        self._set(listed=True)


class _ThreadRefresher(Refresher):
    """A refresher that only the thread of the catalog uses; other threads read at once."""

    def __init__(self, catalog: BackgroundCatalog, store: Store, database: Database) -> None:
        super().__init__(store, database)
        self._catalog = catalog

    def refresh(self, progress: Progress | None = None) -> int | None:
        """Return the id of the catalog, in the thread after adding all messages."""
        if self._catalog.is_refreshing_here():
            return super().refresh(progress)
        with self._database.read() as transaction:
            [(catalog_id, _)] = transaction.execute(self._sql["about"])
            return int(catalog_id)
