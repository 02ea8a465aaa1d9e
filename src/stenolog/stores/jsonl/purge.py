"""Purge: delete sessions, or the first messages of a session, permanently.

A purge deletes referenced files before the file that refers to them, so that an interrupted purge
can be repeated.

Lock order: archive folder (as in a compaction) → gate → flock of the live file → flock of a file in
the trash → mutex.
"""

import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from stenolog.errors import (
    DamagedStore,
    ForeignLog,
    MaybeStored,
    NoSuchSession,
    StenologError,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.records import Purged, Span, Trashed, Undo
from stenolog.stores import catalog_file, file_names, spans
from stenolog.stores.base import Deleted
from stenolog.stores.catalog_file import delete_catalog
from stenolog.stores.disk import sync_folder
from stenolog.stores.jsonl import archive, leases, rewrite, trash, writer
from stenolog.stores.jsonl.directory import store_error
from stenolog.stores.jsonl.lifecycle import has_session, lock_session, rename_error
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.open_logs import OpenLogCache
from stenolog.stores.jsonl.write_queue import WriteQueue, delete_if_empty
from stenolog.stores.state import copy, not_reached, present

ASIDE_FOLDER: Final = "aside"
"""Folder for files that `steno doctor` moves out of the way."""

_ASIDE_STAMP: Final = r"(\.new)?\.\d{4}-\d\d-\d\dT\d{6}\.\d{6}Z"


class Purger:
    """Purges of one store."""

    def __init__(self, logs: OpenLogCache, queue: WriteQueue, *, busy_timeout: float) -> None:
        self._logs = logs
        self._queue = queue
        self._directory = logs.directory
        self._busy_timeout = busy_timeout

    # --- whole sessions ----------------------------------------------------------------------

    def purge(self, key: str) -> Purged:
        """Purge a whole session, as `Store.purge`."""
        self._queue.run_exclusive(key, lambda: self._hide(key))
        with _partly_done(key):
            hidden = trash.keys(self._directory, purged=True)
            purged = [entry for entry, deleted_key in hidden if deleted_key == key]
            # The process that hid the sessions may have been killed before its sync. Files are
            # deleted only after the sync, because a power cut could make an unsynced session
            # visible again.
            trash.sync_renames(self._directory)  # guard: purge-settles-trash
        if not purged:
            raise NoSuchSession(key)
        return self._delete_hidden(key, purged, alone=True)

    def purge_trash(self, key: str, entries: Collection[Deleted]) -> Purged:
        """Purge deleted sessions, as `PurgingStore.purge_trash`."""
        with _nothing_done(key):
            every = [
                entry for entry, deleted_key in trash.keys(self._directory) if deleted_key == key
            ]
        meant = [entry for entry in every if (entry.uid, entry.deleted) in entries]
        if not meant or len(meant) != len(set(entries)):
            raise NoSuchSession(
                key, "it is not in the trash; it may have been restored or deleted again"
            )
        with _partly_done(key):
            hidden = [self._hide_deleted(entry) for entry in meant]
            trash.sync_renames(self._directory)
        # None stands for an entry that was restored before the purge could hide it.
        return self._delete_hidden(
            key, [entry for entry in hidden if entry is not None], alone=False
        )

    def unfinished(self) -> list[Trashed]:
        """Return interrupted purges, as `PurgingStore.unfinished_purges`."""
        sessions = []
        for entry, key in trash.keys(self._directory, purged=True):
            trashed = Trashed(key=key, uid=entry.uid, deleted=entry.deleted, count=0)
            with suppress(DamagedStore), trash.opened(self._directory, entry) as log:
                trashed = trashed if log is None else trash.describe(log, entry)
            sessions.append(trashed)
        return sessions

    def finish(self, uid: str) -> Purged:
        """Finish an interrupted purge, as `PurgingStore.finish_purge`."""
        for entry, key in trash.keys(self._directory, purged=True):
            if entry.uid == uid:
                return self._delete_hidden(key, [entry], alone=False)
        raise NoSuchSession(uid, "it has no interrupted purge")

    def _delete_hidden(self, key: str, purged: Sequence[trash.Entry], *, alone: bool) -> Purged:
        """Delete hidden sessions.

        With `alone`, also delete files that are found only by the key.
        """
        with _partly_done(key):
            alone = alone or self._is_vacant(key)
            results = [self._delete_files(key, entry, alone=alone) for entry in purged]
            purged_seqs = [seqs for seqs in results if seqs is not None]
            forks, unread = self._forks(key)
            warnings = (*not_reached(key, forks=forks), *unread, *self._unknown_entries(key))
        return Purged(
            messages=sum(map(spans.size, purged_seqs)),
            first=min((seqs[0][0] for seqs in purged_seqs if seqs), default=0),
            last=max((seqs[-1][1] for seqs in purged_seqs if seqs), default=0),
            not_reached=warnings,
        )

    def _hide(self, key: str) -> None:
        """Hide each session of the key in one step, so that only files remain to be deleted."""
        with self._locked_key(key) as log, _nothing_done(key):
            live = log if log is not None and has_session(log) else None
            if live is not None:
                with live.mutex:
                    live.check_known()
            every = trash.keys(self._directory)
            deleted = [entry for entry, deleted_key in every if deleted_key == key]
            with _partly_done(key) if deleted else _nothing_done(key):
                for entry in deleted:
                    self._hide_deleted(entry)
                # The lease ends after all steps that may fail, so that a turn continues if the
                # purge fails early. The lease ends before the log is removed, because a write of
                # the turn would recreate the session.
                if live is not None or log is None or log.file_size() == 0:
                    leases.delete_lock_file(self._directory, key)
            if live is not None:
                with _partly_done(key):
                    trash.move_in(live, writer.now(), purged=True)  # guard: purged-not-restorable
                    _unlink(self._directory.descriptor, f".{live.name}.new")

    def _is_vacant(self, key: str) -> bool:
        """Return whether no session has the key; if so, end the lease of an earlier session."""
        if self._size(key):
            return False
        vacant: list[bool] = []

        def work() -> None:
            with self._locked_key(key) as log:
                vacant.append(log is None or log.file_size() == 0)
                if vacant[0]:
                    leases.delete_lock_file(self._directory, key)

        self._queue.run_exclusive(key, work)
        return vacant[0]

    def _size(self, key: str) -> int:
        status = self._directory.stat(file_names.log_name(key))
        return 0 if status is None else status.st_size

    @contextmanager
    def _locked_key(self, key: str) -> Iterator[Log | None]:
        """Lock the live log of a key, or an empty log.

        While the lock is held, no session of the key can be created, deleted or restored. Yields
        None if another program's log has the name.
        """
        try:
            log = self._logs.lock(key, create=True)
        except ForeignLog:
            if self._size(key):
                raise
            yield None
            return
        try:
            yield log
        finally:
            if log is not None:
                delete_if_empty(log)
                self._logs.discard(log)

    def _hide_deleted(self, entry: trash.Entry) -> trash.Entry | None:
        """Return the renamed entry; None if it is no longer in the trash."""
        with trash.opened(self._directory, entry, until=self._deadline()) as log:
            return None if log is None else trash.hide(self._directory, entry)

    def _delete_files(self, key: str, entry: trash.Entry, *, alone: bool) -> list[Span] | None:
        """Delete all files of a session; the log, which names the other files, comes last.

        Return the seqs of the deleted messages; None if another process has deleted the session
        already.
        """
        with (
            archive.locked_folder(
                self._directory, entry.uid, self._deadline(), create=False
            ) as archives,
            trash.opened(self._directory, entry, until=self._deadline()) as log,
        ):
            if log is None:
                return None
            seqs = _present_seqs(log)
            if archives is not None:
                archive.delete_all(self._directory, archives, entry.uid)
            name = re.escape(file_names.log_name(key))
            of_key = rf"{name}{_ASIDE_STAMP}|" if alone else ""
            copies = re.compile(rf"{of_key}{entry.uid}[.-].*")
            with trash.opened_folder(self._directory, ASIDE_FOLDER) as aside:
                _unlink(aside, *filter(copies.fullmatch, trash.names_in(aside)))
            self._delete_catalog()
            with trash.opened_folder(self._directory, trash.FOLDER) as folder:
                unfinished = f".{entry.name.removesuffix(trash.PURGED)}.new"
                _unlink(folder, unfinished, entry.name)
            return seqs

    # --- the first messages ------------------------------------------------------------------

    def purge_before(self, key: str, before: int) -> Purged:
        """Purge the messages below a seq, as `Store.purge`."""
        purged_seqs, summary = self._purge_before(key, before)
        with _partly_done(key):
            self._delete_catalog()
            deleted = sum(deleted_key == key for _, deleted_key in trash.keys(self._directory))
            forks, unread = self._forks(key)
            warnings = not_reached(key, forks=forks, summary=summary, trashed=deleted)
            warnings = (*warnings, *unread, *self._copies(key), *self._unknown_entries(key))
        return Purged(
            messages=spans.size(purged_seqs),
            first=purged_seqs[0][0] if purged_seqs else 0,
            last=purged_seqs[-1][1] if purged_seqs else 0,
            not_reached=warnings,
        )

    def _purge_before(self, key: str, before: int) -> tuple[list[Span], str]:
        for _ in self._attempts(key):
            state = self._logs.read(key, lambda log: copy(log.known_state()))
            if state is None:
                break
            if before <= 1:
                return [], state.summary
            deadline = self._deadline()
            with (
                _nothing_done(key),
                archive.locked_folder(self._directory, state.uid, deadline, create=True) as folder,
            ):
                done = self._purge_before_once(key, state.uid, folder, before)
            if done is not None:
                return done
        trash.sync_renames(self._directory)
        raise NoSuchSession(key)

    def _purge_before_once(
        self, key: str, uid: str, folder: int | None, before: int
    ) -> tuple[list[Span], str] | None:
        """Try the purge once; return None if the session was replaced.

        The caller holds the lock of the archive folder.
        """
        state = self._logs.read(key, lambda log: copy(log.known_state()))
        if state is None or state.uid != uid or folder is None:
            return None
        prepared = rewrite.prepare_purge(self._directory, folder, state, before)
        done: list[tuple[list[Span], str]] = []

        def work() -> None:
            log = lock_session(self._logs, key)
            with log.mutex:
                state = copy(log.known_state())
            if state.uid != uid:
                return
            try:
                purged_seqs = rewrite.finish_purge(
                    log,
                    prepared,
                    before,
                    lambda entry: self._complete_step(log, entry),
                    writer.now(),
                )
                if purged_seqs is not None:
                    done.append((purged_seqs, state.summary))
            except OSError as error:
                raise rename_error(error, log, f"purging {key!r}") from error
            finally:
                self._logs.discard(log)

        self._queue.run_exclusive(key, work)
        if not done:
            return None
        # Delete the old archives only after the log is replaced, because the old log names them.
        with _partly_done(key):
            archive.delete_others(folder, prepared.names)  # guard: purge-sweeps-archives
        return done[0]

    def _complete_step(self, log: Log, entry: Undo) -> Undo:
        """Return a complete undo step. A damaged step becomes a step that the purge drops."""
        try:
            with log.mutex:
                return log.undo_step(entry)
        except DamagedStore:
            return Undo(number=entry.number, op=entry.op, newly=[(1, 1)])

    # --- copies that a purge does not reach --------------------------------------------------

    def _copies(self, key: str) -> Iterator[str]:
        log_name = re.escape(file_names.log_name(key))
        with trash.opened_folder(self._directory, ASIDE_FOLDER) as folder:
            for file_name in trash.names_in(folder):
                if re.fullmatch(rf"{log_name}{_ASIDE_STAMP}", file_name):
                    path = f"{ASIDE_FOLDER}/{file_name}"
                    yield f"{path} is a copy of {key!r} that `steno doctor` made; delete it"

    def _forks(self, key: str) -> tuple[list[str], list[str]]:
        """Return the keys of all forks of this session, including deleted ones.

        The second list describes the logs that may be forks but cannot be read.
        """
        here, forks, unread = self._directory, list[str](), list[str]()
        with trash.opened_folder(here, trash.FOLDER) as folder:
            logs: list[tuple[int | None, str, str]] = [
                *((here.descriptor, name, name) for name in here.list_names()),
                *((folder, name, f"{trash.FOLDER}/{name}") for name in trash.names_in(folder)),
            ]
            for place, name, path in sorted(logs, key=lambda log: log[2]):
                if not name.endswith(file_names.LOG_SUFFIX):
                    continue
                try:
                    head = trash.head_at(here, place, name, path)
                except StenologError as error:
                    unread.append(f"{path} may be a fork of {key!r}: {error}")
                else:
                    forks += [head.key] if head is not None and head.forked_from == key else []
        return forks, unread

    def _unknown_entries(self, key: str) -> Iterator[str]:
        for entry in trash.entries_without_key(self._directory):
            yield (
                f"{trash.FOLDER}/{entry.name} may be a session of {key!r}: its key cannot be "
                f"read; inspect it, then purge {entry.uid} or delete the file"
            )

    # --- waiting -----------------------------------------------------------------------------

    def _deadline(self) -> float:
        return time.monotonic() + self._busy_timeout

    def _attempts(self, key: str) -> Iterator[None]:
        """Yield until the deadline, for retries while other processes replace the session."""
        deadline = self._deadline()
        while True:
            yield
            if time.monotonic() > deadline:
                raise StoreBusy(f"{key!r}: other processes keep replacing its log; try again")

    def _delete_catalog(self) -> None:
        """Delete the catalog, which quotes purged messages. Raises OSError, StoreBusy."""
        path = self._directory.path / catalog_file.NAME
        delete_catalog(self._directory.descriptor, path, seconds=self._busy_timeout)


@contextmanager
def _nothing_done(key: str) -> Iterator[None]:
    """Translate errors before the first effect. Raises StoreUnavailable, DamagedStore."""
    try:
        yield
    except OSError as error:
        raise store_error(error, f"purging {key!r}") from error


@contextmanager
def _partly_done(key: str) -> Iterator[None]:
    """Translate errors after the first effect.

    Part of the purge is done, and a repeated call does the rest.
    """
    try:
        yield
    except OSError as error:
        reason = store_error(error, f"purging {key!r}")
        raise MaybeStored(f"{reason}. The purge is incomplete: call it again") from error
    except StoreUnavailable as error:
        raise MaybeStored(f"{error}. The purge is incomplete: call it again") from error


def _present_seqs(log: Log) -> list[Span]:
    with log.mutex:
        return present(*log.settled_state())


def _unlink(folder: int | None, *files: str) -> None:
    """Delete the files that exist, durably. Raises OSError."""
    if folder is None or not files:
        return
    for name in files:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
    sync_folder(folder)
