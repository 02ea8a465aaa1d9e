"""JSONLAdmin: the administration of a JSONLStore."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from stenolog.codec import check_key
from stenolog.errors import DamagedStore
from stenolog.records import Health, PurgeResult, SessionInfo, TrashedSession
from stenolog.stores import catalog_file
from stenolog.stores import state as states
from stenolog.stores.admin import DeletedSession, Place
from stenolog.stores.arguments import check_purge_options
from stenolog.stores.disk import (
    describe_space,
    open_descriptor,
    sync_file,
    sync_folder,
    write_all,
)
from stenolog.stores.jsonl import leases, snapshots, trash, writer
from stenolog.stores.jsonl.directory import has_logs, store_error, system_errors
from stenolog.stores.jsonl.snapshot_writer import JSONLSnapshotWriter
from stenolog.stores.operations import AdminOperations
from stenolog.stores.snapshots import SnapshotMark, SnapshotReading, SnapshotWriter

if TYPE_CHECKING:
    from stenolog.stores.jsonl.store import JSONLStore


class JSONLAdmin(AdminOperations):
    """Administration of a JSONLStore; stores/admin.py documents each call."""

    def __init__(self, store: "JSONLStore") -> None:
        super().__init__(store)
        self._store = store

    # --- trash and purge ---------------------------------------------------------------------

    def list_trash(self, *, unfinished: bool = False) -> list[TrashedSession]:
        """Return the deleted sessions, or the sessions whose purge was interrupted."""
        store = self._store
        with store._in_use.entry:
            if unfinished:
                return store._purger.unfinished_purges()
            return trash.list_deleted(store._directory)

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Restore the last deleted session of this key, or the session with this uid."""
        if as_key is not None:
            check_key(as_key)
        store = self._store
        with store._in_use.entry:
            store._check_write(key)
            store._lifecycle.restore(key, uid, as_key)

    def delete_unchanged(self, info: SessionInfo) -> TrashedSession | None:
        """Move a session into the trash, unless it changed since `info` was read."""
        store = self._store
        with store._in_use.entry:
            store._check_write(info.key)
            return store._lifecycle.delete_unchanged(info)

    def purge(
        self,
        key: str,
        *,
        before: int | None = None,
        trash: Collection[DeletedSession] | None = None,
    ) -> PurgeResult:
        """Delete the session, its messages below a seq, or sessions in the trash, permanently."""
        check_purge_options(before, trash)
        store = self._store
        with store._in_use.entry:
            store._check_write(key)
            if trash is not None:
                return store._purger.purge_trash(key, trash)
            meta: Mapping[str, Any] = {}
            with suppress(DamagedStore):
                meta = store._logs.read_log(key, lambda log: log.known_state().meta) or {}
            if before is None:
                purge_result = store._purger.purge_session(key)
            else:
                purge_result = store._purger.purge_before(key, before)
        return replace(
            purge_result, not_reached=(*purge_result.not_reached, *states.import_sources(meta))
        )

    def finish_purge(self, uid: str) -> PurgeResult:
        """Finish the interrupted purge of the session with this uid."""
        with self._store._in_use.entry:
            self._store._check_writable()
            return self._store._purger.finish_purge(uid)

    # --- changes -----------------------------------------------------------------------------

    def stamps(self) -> dict[str, str]:
        """Return a stamp for each session: a text that differs after each change by any process."""
        with self._store._in_use.entry:
            return self._store._stamp_cache.stamps()

    def leased(self, keys: Collection[str]) -> set[str]:
        """Return the keys whose lease is held now, by any process."""
        return leases.leased_keys(self._store.folder, keys)

    def read_marker(self, name: str) -> str:
        """Return the value of the change marker `name`; empty for a marker without a value."""
        with self._store._in_use.entry:
            status = self._store._directory.file_status(f".{name}")
        return "" if status is None else f"{status.st_ino}:{status.st_size}"

    def update_marker(self, name: str) -> None:
        """Give the change marker `name` a new value."""
        store = self._store
        store._check_writable()
        # Append a line instead of replacing the file, so that concurrent processes do not conflict.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = store._directory.descriptor
        with (
            store._in_use.entry,
            system_errors(f"writing {store.folder / f'.{name}'}"),
            open_descriptor(f".{name}", flags, dir_fd=folder) as descriptor,
        ):
            write_all(descriptor, f"{writer.now()} {name}\n".encode())
            sync_file(descriptor)
            sync_folder(folder)

    # --- copies ------------------------------------------------------------------------------

    def list_snapshots(self) -> list[SnapshotMark]:
        """Return the SnapshotMark of every session in this folder, deleted sessions first."""
        with self._store._in_use.entry:
            return snapshots.list_snapshots(self._store._directory)

    @contextmanager
    def read_snapshot(self, mark: SnapshotMark, *, after: int = 0) -> Iterator[SnapshotReading]:
        """Read a consistent snapshot of one session."""
        store = self._store
        until, stamps = store._logs.deadline(), store._synced_stamps
        with (
            store._in_use.entry,
            snapshots.read_session(
                store._directory, mark, stamps, after=after, until=until
            ) as reading,
        ):
            yield reading

    @contextmanager
    def snapshot_writer(self) -> Iterator[SnapshotWriter]:
        """Yield a writer of several sessions, each in a separate file."""
        store = self._store
        store._check_writable()
        snapshot_writer = JSONLSnapshotWriter(store._logs, store._lifecycle, store._synced_stamps)
        with store._in_use.entry, snapshot_writer.writing():
            yield snapshot_writer

    # --- health and place --------------------------------------------------------------------

    def health(self) -> Health:
        """Return whether writes can be expected to succeed, and known problems."""
        store = self._store
        with store._in_use.entry:
            problems = list(store._directory.problems)
            failures = [
                f"{name}: a sync failed and the log could not be rewritten yet; check the disk"
                for name in sorted(store._logs.suspect_names)
            ]
            free_bytes: int | None = None
            try:
                problems += store._directory.network_warning()
                free_bytes, disk_problems = describe_space(store.folder, read_only=store._read_only)
                failures += disk_problems
            except OSError as error:
                failures.append(str(store_error(error, f"looking at {store.folder}")))
        return Health(ok=not failures, free_bytes=free_bytes, problems=(*failures, *problems))

    @property
    def place(self) -> Place:
        """The folder of the sessions and of their search index.

        There is no catalog file if another program may own the folder: if the store is read-only
        and the folder has neither a catalog nor logs.
        """
        store = self._store
        path = store.folder / catalog_file.CATALOG_NAME
        has_catalog = True
        with suppress(OSError):  # reading the logs reports the error
            has_catalog = not store._read_only or path.exists() or has_logs(store.folder)
        return Place(
            namespace=store.folder.name,
            busy_timeout=store._busy_timeout,
            catalog_file=path if has_catalog else None,
            writes_catalog=not store._read_only,
        )
