"""A catalog that answers from the messages indexed so far, while a thread indexes the rest.

The first list of thousands of sessions must not wait until all their messages are indexed. The
thread therefore first adds a row for each new session, read from the start of the session's file,
and adds the messages afterwards.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.catalog.catalog_database import Transaction
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
"""Number of rows that are added before the first list is shown."""
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

    The thread looks for changes of the store at the start, and at each read of the catalog.
    """

    def __init__(self, store: Store, *, heads: ReadHeads) -> None:
        self._read_heads = heads
        self._condition = threading.Condition()
        self._newest_request = 1
        """Number of the newest request for an update; the first request is made at the start."""
        self._fulfilled_request = 0
        """Number of the newest request that was fulfilled."""
        self._can_list = False
        """Whether a list can be shown: the catalog has old rows, or rows of the newest sessions."""
        self._is_refreshing = False
        self._is_closing = False
        self._progress: tuple[int, int] | None = None
        self._session_count = 0
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

    def _read(self, work: CatalogRead[T], progress: Progress | None = None) -> T:
        if threading.current_thread() is not self._thread:
            self._request_update()
        return super()._read(work, progress)

    def _refresh(self, refresher: Refresher, progress: Progress | None) -> int | None:
        """Return the id of the catalog. Only a refresh by its own thread adds messages first."""
        if self._is_refreshing and threading.current_thread() is self._thread:
            return super()._refresh(refresher, progress)
        with refresher.database.read_transaction() as transaction:
            [(catalog_id, _)] = transaction.run("about")
            return int(catalog_id)

    def _request_update(self) -> None:
        with self._condition:
            self._newest_request += 1
            request = self._newest_request
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._can_list or self._is_closing, LIST_WAIT_SECONDS)
            if self._progress is None:
                self._condition.wait_for(
                    lambda: self._fulfilled_request >= request or self._is_closing,
                    REFRESH_WAIT_SECONDS,
                )

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._newest_request > self._fulfilled_request or self._is_closing
                )
                if self._is_closing:
                    return
                request = self._newest_request
            try:
                self._add_rows()
                self._is_refreshing = True
                self.refresh(self._record_progress)
            except StoreClosed:
                return
            except StenologError as error:
                _logger.warning("the catalog could not be updated: %s", error)
            except Exception:
                _logger.exception("updating the catalog failed")
            finally:
                self._is_refreshing = False
                self._notify_readers(can_list=True, fulfilled_request=request)

    def _notify_readers(self, *, can_list: bool, fulfilled_request: int = 0) -> None:
        with self._condition:
            self._can_list = can_list
            if fulfilled_request:
                self._fulfilled_request, self._progress = fulfilled_request, None
            self._condition.notify_all()

    def _record_progress(self, done: int, total: int) -> None:
        """Record the progress of the refresh. Raises StoreClosed if the catalog is being closed."""
        if self._is_closing:
            raise StoreClosed("the catalog is closed")
        if total > _FEW_NEW_SESSIONS:
            self._progress = max(self._session_count - total, 0) + done, self._session_count

    def _add_rows(self) -> None:
        """If many sessions are new, add a row without messages for each of them."""

        def read_known_keys(transaction: Transaction) -> tuple[int, set[str]]:
            [(catalog_id, _)] = transaction.run("about")
            return catalog_id, {key for key, _ in transaction.run("stamps")}

        catalog_id, known_keys = self._read(read_known_keys)
        self._notify_readers(can_list=self._can_list or bool(known_keys))
        keys = self._store.admin.stamps().keys()
        self._session_count = len(keys)
        new_keys = [key for key in keys if key not in known_keys]
        if len(new_keys) <= _FEW_NEW_SESSIONS:
            return
        # Imported on demand: these modules are needed only if many sessions are new.
        from stenolog.catalog.indexing import CatalogWriter
        from stenolog.catalog.steps import SessionColumns, Step

        writer = CatalogWriter(self._active.database, catalog_id, price_list_version())
        self._progress = len(keys) - len(new_keys), len(keys)
        for row_count, head in enumerate(self._read_heads(new_keys)):
            if self._is_closing:
                raise StoreClosed("the catalog is closed")
            columns = SessionColumns(
                stamp=None,
                prompt=head.prompt,
                created=head.created,
                updated=head.updated,
                meta=head.meta,
            )
            if row_count == _FIRST_ROW_COUNT:
                # The newest sessions come first, so these rows are enough for the first page.
                writer.flush()
                self._notify_readers(can_list=True)
            writer.add_steps(head.key, [Step(key=head.key, version=None, columns=columns)])
        writer.flush()
        self._notify_readers(can_list=True)
