"""SQLAdmin: the administration of a store in a database."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from msgspec.structs import replace

from stenolog.codec import check_key
from stenolog.errors import NoSuchSession
from stenolog.records import Health, PurgeResult, SessionInfo, TrashedSession
from stenolog.stores.admin import DeletedSession, Place
from stenolog.stores.arguments import check_purge_options
from stenolog.stores.operations import AdminOperations
from stenolog.stores.snapshots import SnapshotMark, SnapshotReading, SnapshotWriter
from stenolog.stores.sql import lifecycle, session_rows
from stenolog.stores.sql.dialect import Transaction
from stenolog.stores.sql.rows import parse_time
from stenolog.stores.sql.session_rows import decode_text

if TYPE_CHECKING:
    from stenolog.stores.sql.store import SQLStore

_NOTHING_REMOVED = PurgeResult(messages=0, first=0, last=0, not_reached=())


class SQLAdmin(AdminOperations):
    """Administration of a SQLStore; stores/admin.py documents each call."""

    def __init__(self, store: "SQLStore") -> None:
        super().__init__(store)
        self._store = store

    # --- trash and purge ---------------------------------------------------------------------

    def list_trash(self, *, unfinished: bool = False) -> list[TrashedSession]:
        """Return the deleted sessions, or the interrupted purges of all namespaces.

        The keys of interrupted purges are unknown.
        """
        store = self._store
        if not unfinished:
            return store._run_read(lifecycle.list_trash, store.database.damage)
        start_times = store._run_read(lambda transaction, _: transaction.unfinished_purges())
        return [
            TrashedSession(key="", uid="", deleted=parse_time(at), count=0) for at in start_times
        ]

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Restore the last deleted session of this key, or the session with this uid."""
        check_key(key)
        target_key = key if as_key is None else as_key
        check_key(target_key)
        self._store._run_write(lifecycle.restore, key, uid=uid, as_key=target_key)
        self._store._notify(target_key)

    def delete_unchanged(self, info: SessionInfo) -> TrashedSession | None:
        """Move a session into the trash, unless it changed since `info` was read."""
        check_key(info.key)
        trashed = self._store._run_write(lifecycle.delete_unchanged, info.key, info)
        if trashed is not None:
            self._store._notify(info.key)
        return trashed

    def purge(
        self,
        key: str,
        *,
        before: int | None = None,
        trash: Collection[DeletedSession] | None = None,
    ) -> PurgeResult:
        """Delete a session, its older messages, or deleted sessions permanently; erase their bytes.

        SQLite rewrites the whole file, so the time depends on the file size. Another writer that
        waits longer than its busy_timeout gets StoreBusy. PostgreSQL vacuums the tables.
        """
        check_key(key)
        check_purge_options(before, trash)
        if trash is not None:
            return self._purge_trash(key, trash)

        def work(transaction: Transaction, namespace: str) -> tuple[PurgeResult | None, bool]:
            if before is None:
                removed = lifecycle.purge_all(transaction, namespace, key)
            else:
                removed = lifecycle.purge_before(transaction, namespace, key, before=before)
            return removed, bool(transaction.unfinished_purges())

        removed, has_unfinished = self._store._run_write(work)
        if removed is None and not has_unfinished:
            raise NoSuchSession(key)
        self._store._notify(key)
        return self._erase_purged_bytes(removed or _NOTHING_REMOVED)

    def _purge_trash(self, key: str, entries: Collection[DeletedSession]) -> PurgeResult:
        removed = self._store._run_write(lifecycle.purge_trash, key, entries)
        if removed is None:
            raise NoSuchSession(key, "not in the trash; it may have been restored or deleted again")
        self._store._notify(key)
        return self._erase_purged_bytes(removed)

    def finish_purge(self, uid: str) -> PurgeResult:
        """Finish all interrupted purges of this database. `uid` must be empty."""
        if uid or not self._store._run_write(
            lambda transaction, _: transaction.unfinished_purges()
        ):
            raise NoSuchSession(uid, "it has no interrupted purge")
        return self._erase_purged_bytes(_NOTHING_REMOVED)

    def _erase_purged_bytes(self, removed: PurgeResult) -> PurgeResult:
        """Erase the bytes of a purge, and add to its result the places where bytes remain."""
        return replace(removed, not_reached=removed.not_reached + self._store._erase_bytes())

    # --- changes -----------------------------------------------------------------------------

    def stamps(self) -> dict[str, str]:
        """Return a stamp for each session: a text that differs after every change."""
        return self._store._run_read(session_rows.session_stamps, self._store.database.damage)

    def leased(self, keys: Collection[str]) -> set[str]:
        """Return those of `keys` whose sessions are leased now, by any process."""
        store = self._store
        rows = store._run_read(lambda transaction, namespace: transaction.run("leases", namespace))
        return {
            decode_text(key) for key, *lease_row in rows if store._is_lease_held(tuple(lease_row))
        }.intersection(keys)

    def read_marker(self, name: str) -> str:
        """Return the value of the change marker `name`; empty for a marker without a value."""
        rows = self._store._run_read(lambda tx, namespace: tx.run("find_mark", namespace, name))
        return "".join(str(value) for (value,) in rows)

    def update_marker(self, name: str) -> None:
        """Give the change marker `name` a new value."""
        self._store._run_write(lambda tx, namespace: tx.run("change_mark", namespace, name))

    # --- copies ------------------------------------------------------------------------------

    def list_snapshots(self) -> list[SnapshotMark]:
        """Return the SnapshotMark of every session of this namespace, deleted sessions first."""
        return self._store._run_read(lifecycle.list_snapshots)

    @contextmanager
    def read_snapshot(self, mark: SnapshotMark, *, after: int = 0) -> Iterator[SnapshotReading]:
        """Read one session."""
        store = self._store
        store._check_open()
        with store.database.read_transaction() as transaction:
            yield lifecycle.read_snapshot(transaction, store._namespace, mark, after=after)

    @contextmanager
    def snapshot_writer(self) -> Iterator[SnapshotWriter]:
        """Open a writer that stores several sessions in one transaction."""
        store = self._store
        store._check_open()
        with (
            store.database.write_transaction() as transaction,
            nullcontext() if store._lease is None else store._lease.fence(transaction),
        ):
            yield lifecycle.SQLSnapshotWriter(transaction, store._namespace)

    # --- health and place --------------------------------------------------------------------

    def health(self) -> Health:
        """Return whether writes are expected to work."""
        return self._store._health()

    @property
    def place(self) -> Place:
        """The namespace of the sessions, and the file of their search index."""
        settings = self._store.database.settings
        return Place(
            namespace=self._store._namespace,
            busy_timeout=settings.busy_timeout,
            catalog_file=self._store._catalog_file(),
            writes_catalog=not settings.read_only,
        )
