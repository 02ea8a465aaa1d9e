"""A catalog that answers from the messages indexed so far, while a thread indexes the rest.

The first list of thousands of sessions must not wait until all their messages are indexed. The
thread therefore first adds a row for each new session, read from the start of the session's file,
and adds the messages afterwards.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.catalog.catalog_database import Database, Transaction
from stenolog.catalog.index import Catalog, CatalogRead, Progress, Refresher, T, price_list_version
from stenolog.errors import StenologError, StoreClosed
from stenolog.stores.base import Store

LIST_WAIT_SECONDS: Final = 5.0
"""Maximum number of seconds that the first read waits for the rows of the newest sessions."""
REFRESH_WAIT_SECONDS: Final = 0.2
"""Maximum number of seconds that a read waits until changes of the store are indexed."""
_FEW_NEW_SESSIONS: Final = 20
"""Maximum number of new sessions that are indexed directly, without adding rows first."""
_FIRST_ROW_COUNT: Final = 200
"""Number of rows after which the first list is shown."""
_COUNT_SECONDS: Final = 0.5
"""Seconds between two counts of the indexed sessions."""
_CLOSE_WAIT_SECONDS: Final = 10.0

_logger = logging.getLogger("stenolog")


class SessionHead(Struct, frozen=True, kw_only=True):
    """Facts from the start of a session's file. Times are microseconds since 1970."""

    key: str
    prompt: str = ""
    created: int = 0
    updated: int = 0
    meta: Mapping[str, Any] = {}


ReadHeads = Callable[[Sequence[str]], Iterator[SessionHead]]
"""Function that yields the heads of the sessions with these keys, newest first."""


class BackgroundCatalog(Catalog):
    """A catalog that a thread keeps up to date. A read may miss the newest changes of the store.

    The thread looks for changes of the store at the start, and after each read of the catalog.
    """

    def __init__(self, store: Store, *, heads: ReadHeads) -> None:
        self._heads = heads
        self._condition = threading.Condition()
        self._requested = 1
        """Number of the newest request for an update; the first request is made at the start."""
        self._fulfilled = 0
        """Number of the newest request that was fulfilled."""
        self._is_listed = False
        """Whether the newest sessions that existed at the start have a row."""
        self._is_refreshing = False
        self._is_closing = False
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
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._thread.join(_CLOSE_WAIT_SECONDS)
        super().close()

    def _use_database(self, database: Database) -> None:
        self._active = _ThreadRefresher(self, self._store, database)

    def is_refreshing_thread(self) -> bool:
        """Return whether the caller is this catalog's thread, and a refresh is in progress."""
        return self._is_refreshing and threading.current_thread() is self._thread

    def _read(self, work: CatalogRead[T], progress: Progress | None = None) -> T:
        if threading.current_thread() is not self._thread:
            self._request_update()
        return super()._read(work, progress)

    def _request_update(self) -> None:
        with self._condition:
            self._requested += 1
            request = self._requested
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._is_listed or self._is_closing, LIST_WAIT_SECONDS)
            if self._progress is None:
                self._condition.wait_for(
                    lambda: self._fulfilled >= request or self._is_closing, REFRESH_WAIT_SECONDS
                )

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._requested > self._fulfilled or self._is_closing
                )
                if self._is_closing:
                    return
                request = self._requested
            try:
                self._add_rows()
                self._is_refreshing = True
                self.refresh(self._store_progress)
            except StoreClosed:
                return
            except StenologError as error:
                _logger.warning("the catalog could not be updated: %s", error)
            except Exception:
                _logger.exception("updating the catalog failed")
            finally:
                self._is_refreshing = False
                self._set_progress(listed=True, fulfilled=request)

    def _set_progress(self, *, listed: bool, fulfilled: int = 0) -> None:
        with self._condition:
            self._is_listed = listed
            if fulfilled:
                self._fulfilled, self._progress = fulfilled, None
            self._condition.notify_all()

    def _store_progress(self, _done: int, total: int) -> None:
        """Store the progress. Raises StoreClosed if the catalog is being closed."""
        if self._is_closing:
            raise StoreClosed("the catalog is closed")
        if total > _FEW_NEW_SESSIONS and time.monotonic() - self._counted_at > _COUNT_SECONDS:
            # Count the rows of the table, because other processes may index at the same time.
            with self._active.database.read_transaction() as transaction:
                rows = transaction.execute(self._active.database.sql["stamps"])
                indexed_count = sum(stamp is not None for _, stamp in rows)
            self._counted_at = time.monotonic()
            with self._condition:
                self._progress = min(indexed_count, self._count), self._count

    def _add_rows(self) -> None:
        """If many sessions are new, add a row without messages for each of them."""

        def read(transaction: Transaction, database: Database) -> tuple[int, set[str], Database]:
            [(catalog_id, _)] = transaction.execute(database.sql["about"])
            rows = transaction.execute(database.sql["stamps"])
            return catalog_id, {key for key, _ in rows}, database

        catalog_id, known_keys, database = self._read(read)
        self._set_progress(listed=self._is_listed or bool(known_keys))
        keys = self._store.stamps().keys()
        self._count = len(keys)
        new_keys = [key for key in keys if key not in known_keys]
        if len(new_keys) <= _FEW_NEW_SESSIONS:
            return
        # Imported on demand: these modules are needed only if many sessions are new.
        from stenolog.catalog.indexing import CatalogWriter
        from stenolog.catalog.steps import SessionColumns, Step

        writer = CatalogWriter(database, catalog_id, price_list_version())
        self._progress = len(keys) - len(new_keys), len(keys)
        for number, head in enumerate(self._heads(new_keys)):
            if self._is_closing:
                raise StoreClosed("the catalog is closed")
            columns = SessionColumns(
                stamp=None,
                prompt=head.prompt,
                created=head.created,
                updated=head.updated,
                meta=head.meta,
            )
            if number == _FIRST_ROW_COUNT:
                # The newest sessions come first, so these rows are enough for the first page.
                writer.flush()
                self._set_progress(listed=True)
            writer.add_steps(head.key, [Step(key=head.key, version=None, columns=columns)])
        writer.flush()
        self._set_progress(listed=True)


class _ThreadRefresher(Refresher):
    """A refresher that adds messages only in the catalog's thread; other threads do not wait."""

    def __init__(self, catalog: BackgroundCatalog, store: Store, database: Database) -> None:
        super().__init__(store, database)
        self._catalog = catalog

    def refresh(self, progress: Progress | None = None) -> int | None:
        """Return the id of the catalog. The catalog's own thread adds all new messages first."""
        if self._catalog.is_refreshing_thread():
            return super().refresh(progress)
        with self.database.read_transaction() as transaction:
            [(catalog_id, _)] = transaction.execute(self._sql["about"])
            return int(catalog_id)
