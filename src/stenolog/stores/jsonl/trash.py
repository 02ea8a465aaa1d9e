"""Trash: complete logs of deleted sessions, each named by its uid and the time of its deletion.

A delete moves the log into the trash with one rename. A restore first replaces the log in the trash
by a new file, then renames the new file to the live name, where it may replace an empty file. A
process that still has the old file open notices that the name belongs to another file, and syncs
the folder before it writes. So a session is always complete and in exactly one place. If the
restore under another key is interrupted, the session may be in the trash under the new key.
"""

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Struct

from stenolog.errors import DamagedStore, ForeignLog, NewerFormat
from stenolog.records import State, TrashedSession
from stenolog.stores import file_names
from stenolog.stores.disk import lock_until, sync_file, sync_folder, temporary_file, write_all
from stenolog.stores.jsonl import writer
from stenolog.stores.jsonl.directory import TRASH, Directory, names_in, system_errors
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.rewrite import compose_log, intact_states, replay
from stenolog.stores.log_reports import DamageReports

FOLDER: Final = TRASH

PURGED: Final = ".purged"
"""Suffix of a log that a purge has hidden permanently and not yet deleted."""

_ENTRY_NAME: Final = re.compile(r"([0-9a-f]{1,64})\.(\d{8}T\d{6}\.\d{6}Z)\.jsonl(\.purged)?")
_STAMP: Final = "%Y%m%dT%H%M%S.%fZ"  # format of the deletion time in a file name
_FIRST_CHUNK_BYTES: Final = 64 * 1024

_damage_reports = DamageReports()
"""Damaged files that this process has already reported."""


class Entry(Struct, frozen=True):
    """A file in the trash."""

    name: str
    uid: str
    deleted: datetime

    @property
    def purged(self) -> bool:
        """Whether a purge has hidden the file."""
        return self.name.endswith(PURGED)

    @property
    def path(self) -> str:
        """Path of the file, relative to the folder of the live logs."""
        return f"{FOLDER}/{self.name}"


def parse_entry(name: str) -> Entry | None:
    """Parse the file name of a deleted log; return None for any other name."""
    match = _ENTRY_NAME.fullmatch(name)
    if match is None:
        return None
    try:
        deleted = _parse_deletion_time(match[2])
    except ValueError:
        return None
    return Entry(name, match[1], deleted)


def list_entries(directory: Directory, *, purged: bool = False) -> list[Entry]:
    """Return the entries of the trash, last deleted first. Raises StoreUnavailable, DamagedStore.

    With `purged`, return only the logs that a purge has hidden; otherwise only restorable logs.
    """
    with (
        directory.open_subfolder(FOLDER) as folder,
        system_errors(f"listing {directory.path / FOLDER}"),
    ):
        all_entries = [parse_entry(name) for name in names_in(folder)]
    selected = [entry for entry in all_entries if entry is not None and entry.purged == purged]
    return sorted(selected, key=lambda entry: (entry.deleted, entry.uid), reverse=True)


def move_to_trash(log: Log, now: str, *, purged: bool = False) -> Entry:
    """Move a log into the trash with a rename, durably. Raises OSError, NotStored.

    The caller holds the lock of the log.

    The name of a file in the trash does not contain the key. So a log without an intact state first
    gets a new state, which contains the key.
    """
    with log.mutex:
        log.ensure_loaded()
        has_state = log.has_state_record
    if not has_state:
        _, outcome = writer.append_batches(log, [])
        if outcome.error is not None:
            raise outcome.failure(f"writing the state of {log.key!r}")
    with log.mutex:
        directory, uid = log.directory, log.known_state().uid
    with directory.require_subfolder(FOLDER, create=True) as folder:
        deleted = _choose_deletion_time(folder, now)
        name = f"{uid}.{deleted.strftime(_STAMP)}{file_names.LOG_SUFFIX}{PURGED if purged else ''}"
        os.rename(log.name, name, src_dir_fd=directory.descriptor, dst_dir_fd=folder)
        # Sync the target folder first, so that the log keeps a name if the rename is not atomic.
        sync_folder(folder)
        directory.sync_entries()
    return Entry(name, uid, deleted)


def _choose_deletion_time(folder: int, now: str) -> datetime:
    """Return `now`, or a time after all deletions in the trash if the clock was set back."""
    deleted = datetime.fromisoformat(now)
    matches = map(_ENTRY_NAME.fullmatch, names_in(folder))
    newest_stamp = max((match[2] for match in matches if match is not None), default="")
    if newest_stamp >= deleted.strftime(_STAMP):
        with suppress(ValueError, OverflowError):  # another program created the file name
            return _parse_deletion_time(newest_stamp) + timedelta(microseconds=1)
    return deleted


def _parse_deletion_time(stamp: str) -> datetime:
    return datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC)


def mark_purged(directory: Directory, entry: Entry) -> Entry:
    """Make a deleted log unrestorable, durably; the caller holds its lock. Raises OSError."""
    name = entry.name + PURGED
    with directory.require_subfolder(FOLDER, create=False) as folder:
        os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        sync_folder(folder)
    return Entry(name, entry.uid, entry.deleted)


@contextmanager
def open_deleted_log(
    directory: Directory, entry: Entry, *, until: float | None = None
) -> Iterator[Log | None]:
    """Open and read a deleted log; yield None if it is not in the trash.

    With `until`, also lock the log, and wait at most until this time of the monotonic clock. Raises
    the errors of `Log.load`.
    """
    with open_unread_log(directory, entry, until=until) as log:
        if log is not None:
            load_deleted_log(log, entry)
        yield log


@contextmanager
def open_unread_log(
    directory: Directory, entry: Entry, *, until: float | None
) -> Iterator[Log | None]:
    """Open a deleted log like `open_deleted_log`, but do not read it: it may be damaged."""
    descriptor = directory.open_to_read(entry.path)
    if descriptor is None:
        yield None
        return
    log = Log(directory, entry.path, entry.uid, descriptor)
    try:
        if until is not None:
            lock_until(log.descriptor, until, f"the deleted session {entry.uid}")
        yield log if log.is_same_file(directory.file_status(log.name)) else None
    finally:
        log.release()


def load_deleted_log(log: Log, entry: Entry) -> None:
    """Read a log in the trash. Raises DamagedStore, StoreUnavailable.

    If the log has no intact state, the uid in the file name is used as the key.
    """
    with system_errors(f"reading {log.path}"):
        head = head_state(log.descriptor)
        if head is not None:
            log.key = head.key
        with log.mutex:
            log.load(log.file_size())
            state = log.known_state()
    if head is None:
        state.uid = entry.uid
    if state.uid != entry.uid:
        raise DamagedStore(f"{log.path} contains a different session than its name indicates")


def list_deleted(directory: Directory) -> list[TrashedSession]:
    """Return the deleted sessions; report damaged files. Raises StoreUnavailable."""
    sessions = []
    for entry in list_entries(directory):
        try:
            with open_deleted_log(directory, entry) as log:
                if log is not None:
                    sessions.append(trashed_session(log, entry))
        except DamagedStore:
            _damage_reports.report_once(f"the deleted session {directory.path / entry.path}")
    return sessions


def trashed_session(log: Log, entry: Entry) -> TrashedSession:
    """Return key, uid, deletion time and message count of a deleted session."""
    with log.mutex:
        count = log.info().count
    return TrashedSession(key=log.key, uid=entry.uid, deleted=entry.deleted, count=count)


def entries_with_keys(directory: Directory, *, purged: bool = False) -> Iterator[tuple[Entry, str]]:
    """Yield each deleted session with its key, last deleted first. Raises StoreUnavailable."""
    for entry in list_entries(directory, purged=purged):
        if (key := read_key(directory, entry)) is not None:
            yield entry, key


def entries_of_key(directory: Directory, key: str, *, purged: bool = False) -> list[Entry]:
    """Return the deleted sessions of a key, last deleted first. Raises StoreUnavailable."""
    pairs = entries_with_keys(directory, purged=purged)
    return [entry for entry, deleted_key in pairs if deleted_key == key]


def read_key(directory: Directory, entry: Entry) -> str | None:
    """Return the key of a deleted session, or its uid if its file has no intact state.

    Return None if the file is gone or cannot be read, or if another program or a newer stenolog
    wrote it. Raises StoreUnavailable.
    """
    try:
        state = read_head_state(directory, entry.path)
        if state is not None:
            return state.key
    except DamagedStore:
        return None
    try:
        with open_deleted_log(directory, entry) as log:
            return None if log is None else log.key
    except (ForeignLog, NewerFormat):
        return None
    except DamagedStore:
        return entry.uid  # no record is intact; the uid is the only name by which to purge the file


def entries_without_key(directory: Directory) -> Iterator[Entry]:
    """Yield the deleted logs without an intact state, whose key is unknown.

    Raises StoreUnavailable.
    """
    for entry in (*list_entries(directory), *list_entries(directory, purged=True)):
        with suppress(DamagedStore):
            state = read_head_state(directory, entry.path)
            if state is None and directory.file_status(entry.path) is not None:
                yield entry


def move_from_trash(log: Log, entry: Entry, key: str, live_log: Log) -> None:
    """Replace a live log by a log from the trash, under this key. Raises OSError.

    The caller holds the locks of both logs, and the live log contains no session.
    """
    with log.mutex:
        state, updated = log.known_state(), log.updated
    lines = log.read_bytes(0, log.file_size())
    log_states = replay(lines, state)
    log_states.head.key = log_states.end.key = key
    text = compose_log(log_states, lines, updated or log_states.end.created)
    directory = log.directory
    temporary_name = f".{entry.name}.new"
    with (
        directory.require_subfolder(FOLDER, create=False) as folder,
        temporary_file(folder, temporary_name) as descriptor,
    ):
        write_all(descriptor, text)
        sync_file(descriptor)
        # Lock the new file first: no process may append before the rename is on the disk.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(temporary_name, entry.name, src_dir_fd=folder, dst_dir_fd=folder)
        # Sync first: if a power cut kept only the next rename, the session would exist twice.
        sync_folder(folder)
        os.rename(entry.name, live_log.name, src_dir_fd=folder, dst_dir_fd=directory.descriptor)
        directory.sync_entries()
        sync_folder(folder)
        descriptor.release()  # released here too: Ctrl-C may interrupt the end of the `with`


def head_state(descriptor: int) -> State | None:
    """Return the first intact state of a log; None if there is none. Raises OSError."""
    size = os.fstat(descriptor).st_size
    for length in (_FIRST_CHUNK_BYTES, size):
        record = next(intact_states(os.pread(descriptor, length, 0)), None)
        if record is not None or length >= size:
            return record.body if record is not None else None
    return None


def read_head_state(directory: Directory, path: str) -> State | None:
    """Return the first intact state of a log; None if there is none or the file does not exist.

    `path` is relative to the folder. Raises StoreUnavailable, DamagedStore.
    """
    descriptor = directory.open_to_read(path)
    if descriptor is None:
        return None
    with descriptor, system_errors(f"reading {directory.path / path}"):
        return head_state(descriptor)


def sync_renames(directory: Directory) -> None:
    """Sync renames into and out of the trash, so that no power cut reverts them.

    The process that renamed a log may have been killed before its sync. Raises StoreUnavailable.
    """
    with system_errors(f"syncing {directory.path}"):
        directory.sync_renames()
