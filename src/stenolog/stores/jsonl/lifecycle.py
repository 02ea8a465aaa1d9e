"""Fork, delete, restore and purge sessions as files.

The purge of a whole session deletes the log last, because the log refers to the other files. So an
interrupted purge can be repeated.

Lock order: archive folder (as in a compaction) → gate → flock of the live file → flock of a file in
the trash → mutex.
"""

import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Final

from stenolog.codec import message_line
from stenolog.errors import (
    DamagedStore,
    ForeignLog,
    MaybeStored,
    NewerFormat,
    NoSuchSession,
    SessionExists,
    StenologError,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.records import Message, PurgeResult, SessionInfo, Span, TrashedSession
from stenolog.stores import catalog_file, file_names, spans
from stenolog.stores.admin import DeletedSession
from stenolog.stores.disk import lock_until, sync_folder
from stenolog.stores.jsonl import archive, leases, rewrite, trash, writer
from stenolog.stores.jsonl.directory import names_in, store_error, system_errors
from stenolog.stores.jsonl.log import LiveMessages, Log
from stenolog.stores.jsonl.open_logs import OpenLogCache, T
from stenolog.stores.jsonl.rewrite import LogStates, compose_log, replace_log
from stenolog.stores.jsonl.scan import read_records
from stenolog.stores.jsonl.write_queue import WriteQueue, delete_if_empty
from stenolog.stores.jsonl.writer import Outcome
from stenolog.stores.state import (
    Fork,
    copy_state,
    decide_fork,
    describe_remaining,
    present_seqs,
)

ASIDE_FOLDER: Final = "aside"
"""Folder for files that `steno doctor` moves out of the way."""

_ASIDE_STAMP: Final = r"(\.new)?\.\d{4}-\d\d-\d\dT\d{6}\.\d{6}Z"
"""Pattern of the suffix that the name of a log gets in the folder `aside`."""


class _LogReplaced(Exception):
    """The log was replaced or removed after it was read."""


_ForkSource = tuple[Log, tuple[str, int], Fork]
"""Log of the session that is forked, its uid and generation, and the planned fork."""


class Lifecycle:
    """Fork, delete and restore operations of one store."""

    def __init__(self, logs: OpenLogCache, queue: WriteQueue) -> None:
        self._logs = logs
        self._queue = queue
        self._directory = logs.directory

    # --- fork --------------------------------------------------------------------------------

    def fork(self, key: str, new_key: str, at: int | None) -> None:
        """Fork a session, as `Store.fork` describes."""
        deadline = self._logs.deadline()
        while True:
            (log, version, fork), messages = self._read_source(key, new_key, at)
            # Sync first: the fork must not keep messages that a power cut removes from the source.
            self._logs.sync_log(log)
            text = compose_forked_log(fork, messages)
            with suppress(_LogReplaced):
                write_log = partial(
                    self._write_fork, text=text, key=key, version=version, deadline=deadline
                )
                self.create_session(new_key, write_log, f"forking {key!r} to {new_key!r}")
                return
            if time.monotonic() > deadline:
                raise StoreBusy(f"{key!r}: other processes keep replacing its log; try again")

    def _write_fork(
        self, log: Log, *, text: bytes, key: str, version: tuple[str, int], deadline: float
    ) -> None:
        """Create the fork while its source `key` is locked. Raises _LogReplaced.

        Purged messages must not remain in a fork that the purge does not report. So a purge of the
        source either finds and reports the fork, or runs earlier and this method raises.
        """
        descriptor = self._directory.open_log(file_names.log_name(key))
        if descriptor is None:
            raise _LogReplaced
        try:
            lock_until(descriptor, deadline, f"the log of {key!r}")
            # guard: fork-sees-purge
            if self._logs.read_log(key, _read_version) != version:
                raise _LogReplaced
            replace_log(log, text)
        finally:
            descriptor.release()

    def _read_source(
        self, key: str, new_key: str, at: int | None
    ) -> tuple[_ForkSource, list[Message]]:
        """Return the source (see `_ForkSource`), and the visible messages of the session."""
        if self._logs.read_log(key, lambda _: True) is None:
            trash.sync_renames(self._directory)
            raise NoSuchSession(key)
        self._check_key_unused(new_key)
        uid, now = os.urandom(8).hex(), writer.now()

        def read_source(log: Log) -> tuple[_ForkSource, LiveMessages]:
            state, last_seq = log.settled_state()
            fork = decide_fork(state, last_seq, new_key=new_key, at=at, uid=uid, now=now)
            live_part = log.visible_messages(last=None, after=None)
            return (log, _read_version(log), fork), live_part

        source = self._logs.read_with_archives(key, read_source)
        if source is None:
            raise NoSuchSession(key)
        return source

    # --- creating a live log -----------------------------------------------------------------

    def _check_key_unused(self, key: str) -> None:
        if self._logs.read_log(key, lambda _: True) is not None:
            trash.sync_renames(self._directory)
            raise SessionExists(key)

    def create_session(self, key: str, write_log: Callable[[Log], None], action: str) -> None:
        """Create a session by calling `write_log` on a locked file without a session.

        No other writer can start a session in the locked file. `action` describes the call in error
        messages. Raises SessionExists; `write_log` may raise OSError.
        """

        def write_new_log() -> None:
            log = self._logs.lock(key, create=True)
            if log is None:
                raise NoSuchSession(key)
            try:
                check_no_session(log)  # guard: fork-needs-free-key
                write_log(log)
            except OSError as error:
                raise error_after_rename(error, log, action) from error
            finally:
                delete_if_empty(log)
                self._logs.drop_log(log)

        self._queue.run_exclusive(key, write_new_log)

    # --- trash -------------------------------------------------------------------------------

    def delete(self, key: str) -> TrashedSession:
        """Delete a session, as `Store.delete` describes."""

        def move_log(log: Log) -> TrashedSession:
            return trash.trashed_session(log, trash.move_to_trash(log, writer.now()))

        return self.change_file(key, move_log, f"deleting {key!r}")

    def delete_unchanged(self, info: SessionInfo) -> TrashedSession | None:
        """Delete a session, as `StoreAdmin.delete_unchanged` describes."""

        def move_unchanged_log(log: Log) -> TrashedSession | None:
            with log.mutex:
                current = log.info()
            version = current.uid, current.last_seq, current.change
            if version != (info.uid, info.last_seq, info.change):
                return None
            return trash.trashed_session(log, trash.move_to_trash(log, writer.now()))

        return self.change_file(info.key, move_unchanged_log, f"deleting {info.key!r}")

    def change_file(self, key: str, change: Callable[[Log], T], action: str) -> T:
        """Lock the log of a session, call `change` to rename or replace it, and return the result.

        `action` describes the call in error messages. Raises NoSuchSession; `change` may raise
        OSError.
        """

        def change_locked_log() -> T:
            log = lock_session(self._logs, key)
            try:
                return change(log)
            except OSError as error:
                raise error_after_rename(error, log, action) from error
            finally:
                self._logs.drop_log(log)

        return self._queue.run_exclusive(key, change_locked_log)

    def restore(self, key: str, uid: str | None, as_key: str | None) -> None:
        """Restore a session, as `StoreAdmin.restore` describes."""
        target_key = key if as_key is None else as_key
        for entry, deleted_key in trash.entries_with_keys(self._directory):
            if deleted_key == key and uid in (None, entry.uid):
                break
        else:
            trash.sync_renames(self._directory)
            raise NoSuchSession(key, "it is not in the trash")
        self._check_key_unused(target_key)

        def move_log(live_log: Log) -> None:
            with trash.open_deleted_log(self._directory, entry, until=self._logs.deadline()) as log:
                if log is None:
                    raise NoSuchSession(key, "another process restored or purged it")
                trash.move_from_trash(log, entry, target_key, live_log)

        self.create_session(target_key, move_log, f"restoring {key!r}")


def _read_version(log: Log) -> tuple[str, int]:
    """Return uid and generation; a purge changes at least one. The caller holds the log's mutex."""
    state = log.known_state()
    return state.uid, state.generation


def compose_forked_log(fork: Fork, messages: Sequence[Message]) -> bytes:
    """Return the content of the log of a fork; `messages` are those of the source session."""
    copied_messages = [message for message in messages if spans.contains(fork.copied, message.seq)]
    state = copy_state(fork.state)
    copied_spans = spans.from_seqs(message.seq for message in copied_messages)
    state.purged = spans.minus([(1, fork.next_seq - 1)], copied_spans)
    # A new log has generation 1, and `compose_log` adds 1.
    state.generation = 0
    # Lines of a fork need no idempotency keys and no batches: the whole file appears in one step.
    lines = b"".join(message_line(m.seq, m._at, m.to_json()) for m in copied_messages)
    first_seq = copied_messages[0].seq if copied_messages else fork.next_seq
    return compose_log(LogStates(state, first_seq, state, fork.next_seq), lines, state.created)


def lock_session(logs: OpenLogCache, key: str) -> Log:
    """Lock the log of a session and return the log.

    Raises NoSuchSession and the errors of `OpenLogCache.lock`.
    """
    log = logs.lock(key, create=False)
    if log is None or not has_session(log):
        trash.sync_renames(logs.directory)
        raise NoSuchSession(key)
    return log


def has_session(log: Log) -> bool:
    """Return whether the log holds a session. Raises the errors of `Log.load`."""
    with log.mutex:  # guard: log-fields-under-mutex
        return log.exists


def check_no_session(log: Log) -> None:
    """Raise SessionExists if any content of the file may have been acknowledged."""
    with log.mutex:
        if log.exists:
            raise SessionExists(log.key)
        tail = log.tail
    text = log.read_bytes(0, log.file_size())
    # A single line, or NULs, may be an interrupted first write.
    # Several damaged lines are the remains of a session.
    has_only_damaged_lines = not read_records(text, offset=0)[0] and b"\n" in text.strip(b"\0\n")
    if has_only_damaged_lines or (tail is not None and tail.lost):
        raise SessionExists(log.key, "the key has a damaged session; run `steno doctor`")


def error_after_rename(error: OSError, log: Log, action: str) -> StoreUnavailable:
    """Return NotStored if the path still names the same file, otherwise MaybeStored."""
    try:
        is_renamed = not log.is_same_file(log.directory.file_status(log.name))
    except StenologError:
        is_renamed = True
    return Outcome(0, error, is_unknown=is_renamed).failure(action)  # guard: unknown-rename


# --- purge -----------------------------------------------------------------------------------


class Purger:
    """Purge operations of one store."""

    def __init__(self, logs: OpenLogCache, queue: WriteQueue, lifecycle: Lifecycle) -> None:
        self._logs = logs
        self._queue = queue
        self._lifecycle = lifecycle
        self._directory = logs.directory

    # --- whole sessions ----------------------------------------------------------------------

    def purge_session(self, key: str) -> PurgeResult:
        """Purge a whole session, as `StoreAdmin.purge` describes."""
        self._queue.run_exclusive(key, lambda: self._hide_sessions(key))
        with _errors_after_effect(key):
            purged_entries = trash.entries_of_key(self._directory, key, purged=True)
            # The process that hid the sessions may have been killed before its sync.
            # Sync before files are deleted: a power cut could make the sessions visible again.
            trash.sync_renames(self._directory)
        if not purged_entries:
            raise NoSuchSession(key)
        return self._delete_hidden_sessions(key, purged_entries, key_unused=True)

    def purge_trash(self, key: str, entries: Collection[DeletedSession]) -> PurgeResult:
        """Purge deleted sessions, as `StoreAdmin.purge(trash=…)` describes."""
        with _errors_before_effect(key):
            deleted_entries = trash.entries_of_key(self._directory, key)
        selected_entries = [
            entry for entry in deleted_entries if (entry.uid, entry.deleted) in entries
        ]
        if not selected_entries or len(selected_entries) != len(set(entries)):
            raise NoSuchSession(
                key, "it is not in the trash; it may have been restored or deleted again"
            )
        for entry in selected_entries:
            self._check_format(entry)
        with _errors_after_effect(key):
            hidden_entries = [self._hide_deleted_session(entry) for entry in selected_entries]
            trash.sync_renames(self._directory)
        # An entry is None if its session was restored before the purge could hide it.
        return self._delete_hidden_sessions(
            key, [entry for entry in hidden_entries if entry is not None], key_unused=False
        )

    def unfinished_purges(self) -> list[TrashedSession]:
        """Return interrupted purges, as `StoreAdmin.list_trash(unfinished=True)` describes."""
        sessions = []
        for entry, key in trash.entries_with_keys(self._directory, purged=True):
            session = TrashedSession(key=key, uid=entry.uid, deleted=entry.deleted, count=0)
            with suppress(DamagedStore), trash.open_deleted_log(self._directory, entry) as log:
                session = session if log is None else trash.trashed_session(log, entry)
            sessions.append(session)
        return sessions

    def finish_purge(self, uid: str) -> PurgeResult:
        """Finish an interrupted purge, as `StoreAdmin.finish_purge` describes."""
        for entry, key in trash.entries_with_keys(self._directory, purged=True):
            if entry.uid == uid:
                return self._delete_hidden_sessions(key, [entry], key_unused=False)
        raise NoSuchSession(uid, "it has no interrupted purge")

    def _delete_hidden_sessions(
        self, key: str, entries: Sequence[trash.Entry], *, key_unused: bool
    ) -> PurgeResult:
        """Delete the files of hidden sessions.

        Files named after the key are deleted only if no other session has the key. `key_unused`
        means that this is certain; otherwise this method checks it.
        """
        with _errors_after_effect(key):
            key_unused = key_unused or self._end_lease_if_unused(key)
            seqs_by_session = [
                self._delete_files(key, entry, key_unused=key_unused) for entry in entries
            ]
            return _purge_result(seqs_by_session, self._describe_remaining_data(key))

    def _hide_sessions(self, key: str) -> None:
        """Hide each session of the key with one rename; later steps only delete files."""
        with self._locked_key(key) as log, _errors_before_effect(key):
            session_log = log if log is not None and has_session(log) else None
            deleted_entries = trash.entries_of_key(self._directory, key)
            for entry in deleted_entries:
                self._check_format(entry)
            with _errors_after_effect(key) if deleted_entries else _errors_before_effect(key):
                for entry in deleted_entries:
                    self._hide_deleted_session(entry)
                # The lease ends after all steps that may fail: an early error must not end a turn.
                # The lease ends before the log is removed: no write may recreate the session.
                if session_log is not None or log is None or log.file_size() == 0:
                    leases.delete_lock_file(self._directory, key)
            with _errors_after_effect(key):
                if session_log is not None:
                    trash.move_to_trash(session_log, writer.now(), purged=True)
                if session_log is not None or deleted_entries:
                    self._unlink_interrupted_rewrite(key)

    def _unlink_interrupted_rewrite(self, key: str) -> None:
        """Delete what an interrupted rewrite of the live log left; the caller holds its lock."""
        _unlink(self._directory.descriptor, f".{file_names.log_name(key)}.new")

    def _end_lease_if_unused(self, key: str) -> bool:
        """End the lease of the key if no session has the key. Return whether no session has it."""
        if self._log_size(key):
            return False

        def end_lease() -> bool:
            with self._locked_key(key) as log:
                is_unused = log is None or log.file_size() == 0
                if is_unused:
                    leases.delete_lock_file(self._directory, key)
                    self._unlink_interrupted_rewrite(key)
                return is_unused

        return self._queue.run_exclusive(key, end_lease)

    def _log_size(self, key: str) -> int:
        status = self._directory.file_status(file_names.log_name(key))
        return 0 if status is None else status.st_size

    @contextmanager
    def _locked_key(self, key: str) -> Iterator[Log | None]:
        """Lock the live log of a key; create an empty log if the key has none.

        While the lock is held, no session of the key can be created, deleted or restored. Yields
        None if another program has a log for the key under another file name.
        """
        try:
            log = self._logs.lock(key, create=True)
        except ForeignLog:
            if self._log_size(key):
                raise
            yield None
            return
        try:
            yield log
        finally:
            if log is not None:
                delete_if_empty(log)
                self._logs.drop_log(log)

    def _check_format(self, entry: trash.Entry) -> None:
        """Raise NewerFormat if a newer stenolog wrote the log: it may name files unknown here."""
        try:
            with trash.open_deleted_log(self._directory, entry):
                pass
        except NewerFormat:
            raise
        except DamagedStore:
            pass  # a damaged log can be deleted

    def _hide_deleted_session(self, entry: trash.Entry) -> trash.Entry | None:
        """Hide a deleted session; return its renamed entry, or None if it is not in the trash."""
        with trash.open_unread_log(self._directory, entry, until=self._logs.deadline()) as log:
            return None if log is None else trash.mark_purged(self._directory, entry)

    def _delete_files(self, key: str, entry: trash.Entry, *, key_unused: bool) -> list[Span]:
        """Delete all files of a session; the log, which names the other files, comes last.

        Return the seqs of the deleted messages; none if another process has deleted the session.
        """
        with (
            archive.locked_folder(
                self._directory, entry.uid, self._logs.deadline(), create=False
            ) as archive_folder,
            trash.open_unread_log(self._directory, entry, until=self._logs.deadline()) as log,
        ):
            if log is None:
                return []
            seqs = _read_present_seqs(log, entry)
            if archive_folder is not None:
                archive.delete_archives(self._directory, archive_folder, entry.uid)
            log_name_pattern = re.escape(file_names.log_name(key))
            key_pattern = rf"{log_name_pattern}{_ASIDE_STAMP}|" if key_unused else ""
            copy_pattern = re.compile(rf"{key_pattern}{entry.uid}[.-].*")
            with self._directory.open_subfolder(ASIDE_FOLDER) as aside_folder:
                _unlink(aside_folder, *filter(copy_pattern.fullmatch, names_in(aside_folder)))
            self._delete_catalog()
            with self._directory.open_subfolder(trash.FOLDER) as trash_folder:
                _unlink(trash_folder, f".{entry.name.removesuffix(trash.PURGED)}.new", entry.name)
            return seqs

    # --- the first messages ------------------------------------------------------------------

    def purge_before(self, key: str, before: int) -> PurgeResult:
        """Purge the messages below a seq, as `StoreAdmin.purge` describes."""
        purged_seqs, summary = self._purge_before(key, before)
        with _errors_after_effect(key):
            self._delete_catalog()
            trashed_count = len(trash.entries_of_key(self._directory, key))
            copies = self._find_copies(key)
            return _purge_result(
                [purged_seqs], self._describe_remaining_data(key, summary, trashed_count, copies)
            )

    def _purge_before(self, key: str, before: int) -> tuple[list[Span], str]:
        deadline = self._logs.deadline()
        while (
            state := self._logs.read_log(key, lambda log: copy_state(log.known_state()))
        ) is not None:
            if before <= 1:
                return [], state.summary
            until = self._logs.deadline()
            with (
                _errors_before_effect(key),
                archive.locked_folder(self._directory, state.uid, until, create=True) as folder,
            ):
                result = self._purge_before_once(key, state.uid, folder, before)
            if result is not None:
                return result
            if time.monotonic() > deadline:
                raise StoreBusy(f"{key!r}: other processes keep replacing its log; try again")
        trash.sync_renames(self._directory)
        raise NoSuchSession(key)

    def _purge_before_once(
        self, key: str, uid: str, folder: int | None, before: int
    ) -> tuple[list[Span], str] | None:
        """Try the purge once; return the purged seqs and the summary.

        Return None if another process replaced the session or its archives. The caller holds the
        lock of the archive folder.
        """
        state = self._logs.read_log(key, lambda log: copy_state(log.known_state()))
        if state is None or state.uid != uid or folder is None:
            return None
        old_archive = state.archive
        new_archives = rewrite.prepare_purge(self._directory, folder, state, before)
        new_names = frozenset(new_archive.name for new_archive in new_archives)

        def rewrite_log(log: Log) -> tuple[list[Span], str] | None:
            with log.mutex:
                current_state = copy_state(log.known_state())
            if current_state.uid != uid:
                return None
            purged_seqs = rewrite.finish_purge(log, old_archive, new_archives, before, writer.now())
            return None if purged_seqs is None else (purged_seqs, current_state.summary)

        result = self._lifecycle.change_file(key, rewrite_log, f"purging {key!r}")
        if result is not None:
            # Delete the old archives only after the log that names these archives is replaced.
            with _errors_after_effect(key):
                archive.delete_except(folder, new_names)  # guard: purge-sweeps-archives
        return result

    # --- copies that a purge does not reach --------------------------------------------------

    def _describe_remaining_data(
        self,
        key: str,
        summary: str = "",
        trashed_count: int = 0,
        copies: Iterable[str] = (),
    ) -> list[str]:
        """Return sentences about remaining data that may contain purged messages."""
        forks, fork_warnings = self._find_forks(key)
        return [
            *describe_remaining(key, forks=forks, summary=summary, trashed=trashed_count),
            *fork_warnings,
            *(
                f"{path} is a copy of {key!r} that `steno doctor` made; delete it"
                for path in copies
            ),
            *(
                f"{entry.path} may be a session of {key!r}: its key cannot be "
                f"read; inspect it, then purge {entry.uid} or delete the file"
                for entry in trash.entries_without_key(self._directory)
            ),
        ]

    def _find_copies(self, key: str) -> list[str]:
        """Return the paths of the copies that `steno doctor` made of a log."""
        pattern = re.compile(rf"{re.escape(file_names.log_name(key))}{_ASIDE_STAMP}")
        with self._directory.open_subfolder(ASIDE_FOLDER) as folder:
            return [
                f"{ASIDE_FOLDER}/{name}" for name in filter(pattern.fullmatch, names_in(folder))
            ]

    def _find_forks(self, key: str) -> tuple[list[str], list[str]]:
        """Return the keys of all forks of this session, including deleted ones.

        The second list describes the logs that may be forks but cannot be read, and the files that
        interrupted forks left.
        """
        forks, warnings = list[str](), list[str]()
        paths = self._directory.list_names()
        with self._directory.open_subfolder(trash.FOLDER) as folder:
            paths += [f"{trash.FOLDER}/{name}" for name in names_in(folder)]
        for path in sorted(paths):
            if path.removesuffix(".new").endswith(file_names.LOG_SUFFIX):
                try:
                    head = trash.read_head_state(self._directory, path)
                except StenologError as error:
                    warnings.append(f"{path} may be a fork of {key!r}: {error}")
                    continue
                if head is not None and head.forked_from == key:
                    if path.endswith(".new"):
                        warnings.append(f"{path} is left of an interrupted fork; delete it")
                    else:
                        forks.append(head.key)
        return forks, warnings

    def _delete_catalog(self) -> None:
        """Delete the catalog, which may quote purged messages. Raises OSError, StoreBusy."""
        path = self._directory.path / catalog_file.CATALOG_NAME
        catalog_file.delete_catalog(
            self._directory.descriptor, path, seconds=self._logs.busy_timeout
        )


def _errors_before_effect(key: str) -> AbstractContextManager[None]:
    """Translate OSError into StoreUnavailable or DamagedStore.

    Only for steps before the first effect of a purge.
    """
    return system_errors(f"purging {key!r}")


@contextmanager
def _errors_after_effect(key: str) -> Iterator[None]:
    """Translate OSError and StoreUnavailable into MaybeStored.

    Only for steps after the first effect of a purge: a part of the purge is done, and a repeated
    call completes the purge.
    """
    try:
        yield
    except OSError as error:
        reason = store_error(error, f"purging {key!r}")
        raise MaybeStored(f"{reason}. The purge is incomplete: call it again") from error
    except StoreUnavailable as error:
        raise MaybeStored(f"{error}. The purge is incomplete: call it again") from error


def _read_present_seqs(log: Log, entry: trash.Entry) -> list[Span]:
    """Return the seqs of the messages in a deleted log; none if the log is damaged."""
    try:
        trash.load_deleted_log(log, entry)
    except NewerFormat:
        raise
    except DamagedStore:
        return []
    with log.mutex:
        return present_seqs(*log.settled_state())


def _purge_result(
    seqs_by_session: Sequence[Sequence[Span]], warnings: Sequence[str]
) -> PurgeResult:
    purged_spans = [span for seqs in seqs_by_session for span in seqs]
    return PurgeResult(
        messages=spans.size(purged_spans),
        first=min((first for first, _ in purged_spans), default=0),
        last=max((last for _, last in purged_spans), default=0),
        not_reached=tuple(warnings),
    )


def _unlink(folder: int | None, *names: str) -> None:
    """Durably delete the files with these names; missing files are skipped. Raises OSError."""
    if folder is None or not names:
        return
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
    sync_folder(folder)
