"""Trash: complete logs of deleted sessions, each named by its uid and the time of its deletion.

A delete moves the log into the trash with one rename. A restore first replaces the log in the trash
by a new file. Then it renames the new file to the live name, replacing an empty file. A process
that still has the old file open notices that the name belongs to another file, and syncs the folder
before it writes. So a session is always complete and in exactly one place. If the session is
restored under another key, the new file also records the old key until the restore is complete. The
last step rewrites the file without the old key.
"""

import fcntl
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from typing import Final

from msgspec import Struct

from stenolog.errors import DamagedStore
from stenolog.records import DeletedAs, State, Trashed
from stenolog.stores import file_names
from stenolog.stores.disk import (
    CLOSED,
    Descriptor,
    lock_until,
    open_descriptor,
    sync_file,
    sync_folder,
    write_all,
)
from stenolog.stores.jsonl import writer
from stenolog.stores.jsonl.directory import TRASH, Directory, create_private_file, store_error
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.rewrite import compose_log, replace_log, replay, states_in
from stenolog.stores.log_reports import DamageReports

FOLDER: Final = TRASH

PURGED: Final = ".purged"
"""Suffix of a log that a purge has hidden permanently and not yet deleted."""

_NAME: Final = re.compile(r"([0-9a-f]{1,64})\.(\d{8}T\d{6}\.\d{6}Z)\.jsonl(\.purged)?")
_STAMP: Final = "%Y%m%dT%H%M%S.%fZ"
_HEAD: Final = 64 * 1024
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


_reported = DamageReports()
"""Damaged files that this process has already reported."""


class Entry(Struct, frozen=True):
    """A file in the trash."""

    name: str
    uid: str
    deleted: datetime
    purged: bool = False


def entry_of(name: str) -> Entry | None:
    """Parse a file name in the trash; return None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        deleted = _moment(match[2])
    except ValueError:
        return None
    return Entry(name, match[1], deleted, purged=match[3] is not None)


def entries(directory: Directory, *, purged: bool = False) -> list[Entry]:
    """Return the entries of the trash, last deleted first. Raises StoreUnavailable, DamagedStore.

    With `purged`, return only the logs that a purge has hidden; otherwise only restorable logs.
    """
    with opened_folder(directory, FOLDER) as folder:
        try:
            here = names_in(folder)
        except OSError as error:
            raise store_error(error, f"listing {directory.path / FOLDER}") from error
    every = [entry for name in here if (entry := entry_of(name)) is not None]
    selected = [entry for entry in every if entry.purged == purged]
    return sorted(selected, key=lambda entry: (entry.deleted, entry.uid), reverse=True)


def move_in(log: Log, at: str, *, purged: bool = False) -> Entry:
    """Rename a log into the trash, durably. Raises OSError, NotStored.

    The caller holds the lock of the log.

    The name of a file in the trash does not contain the key. So a log without an intact state
    gets a new state first.
    """
    with log.mutex:
        log.ensure_loaded()
        has_state = log.has_state_record
    if not has_state:
        _, outcome = writer.append(log, [])
        if outcome.error is not None:
            raise outcome.failure(f"writing the state of {log.key!r}")
    with log.mutex:
        directory, uid = log.directory, log.known_state().uid
    folder = directory.subfolder(FOLDER, create=True)
    if folder is None:
        raise FileNotFoundError(os.fspath(directory.path / FOLDER))
    try:
        deleted = _deletion_time(folder, at)
        name = f"{uid}.{deleted.strftime(_STAMP)}{file_names.LOG_SUFFIX}{PURGED if purged else ''}"
        os.rename(log.name, name, src_dir_fd=directory.descriptor, dst_dir_fd=folder)
        # Sync the target folder first, so that the log keeps a name even if the rename is not
        # atomic.
        sync_folder(folder)
        directory.sync()
    finally:
        folder.close()
    return Entry(name, uid, deleted, purged)


def _deletion_time(folder: int, at: str) -> datetime:
    """Return `at`, or a time after all deletions in the trash if the clock was set back."""
    deleted = datetime.fromisoformat(at)
    stamps = [match[2] for name in names_in(folder) if (match := _NAME.fullmatch(name)) is not None]
    newest = max(stamps, default="")
    if newest >= deleted.strftime(_STAMP):
        with suppress(ValueError, OverflowError):  # another program made the name
            return _moment(newest) + timedelta(microseconds=1)
    return deleted


def _moment(stamp: str) -> datetime:
    return datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC)


def hide(directory: Directory, entry: Entry) -> Entry:
    """Make a log unrestorable, durably. The caller holds its lock. Raises OSError."""
    name = entry.name + PURGED
    with opened_folder(directory, FOLDER) as folder:
        if folder is not None:
            os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=folder)
            sync_folder(folder)
    return Entry(name, entry.uid, entry.deleted, purged=True)


@contextmanager
def opened(
    directory: Directory, entry: Entry, *, until: float | None = None
) -> Iterator[Log | None]:
    """Open and read a log in the trash; None if it is not there. Raises the errors of `Log.load`.

    With `until` (a time of the monotonic clock), wait for the lock of the log until then, and hold
    the lock.
    """
    log = None
    with opened_folder(directory, FOLDER) as folder:
        descriptor = _open(directory, folder, entry.name, f"{FOLDER}/{entry.name}")
        try:
            if descriptor is not None and until is not None:
                lock_until(descriptor, until, f"the deleted session {entry.uid}")
            if descriptor is not None and _is_at(folder, entry.name, descriptor):
                owned, descriptor = descriptor, None
                log = _loaded(directory, entry, owned)
        finally:
            if descriptor is not None:
                descriptor.close()
    try:
        yield log
    finally:
        if log is not None:
            if until is not None:
                log.descriptor.release()
            log.close()


def list_deleted(directory: Directory) -> list[Trashed]:
    """List the deleted sessions; report damaged files. Raises StoreUnavailable."""
    deleted = []
    for entry in entries(directory):
        try:
            with opened(directory, entry) as log:
                if log is not None:
                    deleted.append(describe(log, entry))
        except DamagedStore:
            _reported.report_once(f"the deleted session {directory.path / FOLDER / entry.name}")
    return deleted


def describe(log: Log, entry: Entry) -> Trashed:
    """Return the description of a deleted session."""
    with log.mutex:
        count = log.info().count
    return Trashed(key=log.key, uid=entry.uid, deleted=entry.deleted, count=count)


def keys(directory: Directory, *, purged: bool = False) -> Iterator[tuple[Entry, str]]:
    """Yield each deleted session with its key, last deleted first. Raises StoreUnavailable."""
    for entry in entries(directory, purged=purged):
        if (key := key_at(directory, entry)) is not None:
            yield entry, key


def key_at(directory: Directory, entry: Entry) -> str | None:
    """Return the key of a deleted session, or its uid if its file has no intact state.

    Return None if the file is gone or cannot be read. Raises StoreUnavailable.
    """
    with suppress(DamagedStore):
        with opened_folder(directory, FOLDER) as folder:
            state = head_at(directory, folder, entry.name, f"{FOLDER}/{entry.name}")
        if state is not None:
            return _deleted_key(state, entry)
        with opened(directory, entry) as log:
            return None if log is None else log.key
    return None


def entries_without_key(directory: Directory) -> Iterator[Entry]:
    """Yield the deleted logs without an intact state, whose key is unknown.

    Raises StoreUnavailable.
    """
    for entry in (*entries(directory), *entries(directory, purged=True)):
        with suppress(DamagedStore), opened_folder(directory, FOLDER) as folder:
            state = head_at(directory, folder, entry.name, f"{FOLDER}/{entry.name}")
            if state is None and entry.name in names_in(folder):
                yield entry


def _deleted_key(state: State, entry: Entry) -> str:
    """Return the key that a session had when it was deleted."""
    was = state.deleted_as
    return was.key if was is not None and was.name == _plain(entry) else state.key


def _plain(entry: Entry) -> str:
    return entry.name.removesuffix(PURGED)


def move_out(log: Log, entry: Entry, key: str, live: Log) -> None:
    """Replace a live log by a log of the trash, under this key. Raises OSError.

    The caller holds the locks of both logs, and the live log contains no session.
    """
    was = None if key == log.key else DeletedAs(log.key, _plain(entry))
    text = _restored_text(log, key, was)
    directory = log.directory
    folder = directory.subfolder(FOLDER, create=False)
    if folder is None:
        raise FileNotFoundError(os.fspath(directory.path / FOLDER))
    temporary = f".{entry.name}.new"
    descriptor = CLOSED
    try:
        descriptor = create_private_file(folder, temporary)
        write_all(descriptor, text)
        sync_file(descriptor)
        # Lock the new file before the rename, so that no process appends before the rename is on
        # the disk.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(temporary, entry.name, src_dir_fd=folder, dst_dir_fd=folder)
        # A power cut must not keep the second rename without the first: the session would then
        # be in two places.
        sync_folder(folder)  # guard: restore-sync-between-renames
        os.rename(entry.name, live.name, src_dir_fd=folder, dst_dir_fd=directory.descriptor)
        directory.sync()
        sync_folder(folder)
        if was is not None:
            # The lock is still held, so no append can be missing from this copy.
            replace_log(live, _restored_text(log, key, None, generations=2))
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        descriptor.release()
        folder.close()


def _restored_text(log: Log, key: str, was: DeletedAs | None, *, generations: int = 1) -> bytes:
    """Return the content of the log in a later generation, under this key."""
    with log.mutex:
        known, updated = log.known_state(), log.updated
    text = log.read(0, log.file_size())
    replayed = replay(text, known)
    replayed.head.key = replayed.state.key = key
    replayed.head.deleted_as = replayed.state.deleted_as = was  # guard: cut-restore-keeps-key
    replayed.state.generation += generations - 1  # `composed` adds 1
    return compose_log(
        replayed.head,
        replayed.state,
        text,
        updated or replayed.state.created,
        first_seq=replayed.first_seq,
        next_seq=replayed.next_seq,
        tail=replayed.tail,
    )


def head_state(descriptor: int) -> State | None:
    """Return the first state of a log; None if no state is intact. Raises OSError."""
    size = os.fstat(descriptor).st_size
    for length in (_HEAD, size):
        record = next(states_in(os.pread(descriptor, length, 0)), None)
        if record is not None or length >= size:
            return record.body if record is not None else None
    return None


def head_at(directory: Directory, folder: int | None, name: str, path: str) -> State | None:
    """Return the first state of a log in a folder; None also if the file does not exist.

    Raises StoreUnavailable, DamagedStore.
    """
    descriptor = _open(directory, folder, name, path)
    if descriptor is None:
        return None
    try:
        return head_state(descriptor)
    except OSError as error:
        raise store_error(error, f"reading {directory.path / path}") from error
    finally:
        descriptor.close()


def sync_renames(directory: Directory) -> None:
    """Sync renames into and out of the trash, so that a caller can rely on these renames.

    The process that renamed a log may have been killed before its sync. Raises StoreUnavailable.
    """
    try:
        directory.sync_renames()
    except OSError as error:
        raise store_error(error, f"syncing {directory.path}") from error


# --- folders ---------------------------------------------------------------------------------


@contextmanager
def opened_folder(directory: Directory, *below: str) -> Iterator[int | None]:
    """Open a nested folder; None if it does not exist. Raises the errors of `store_error`."""
    try:
        folder = directory.subfolder(*below, create=False)
    except OSError as error:
        path = directory.path.joinpath(*below)
        raise store_error(error, f"opening {path}") from error
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


def names_in(folder: int | None) -> list[str]:
    """Return the names in a folder; empty if `folder` is None. Raises OSError."""
    if folder is None:
        return []
    with os.scandir(folder) as listing:
        return [entry.name for entry in listing]


def _open(directory: Directory, folder: int | None, name: str, path: str) -> Descriptor | None:
    if folder is None:
        return None
    doing = f"opening {directory.path / path}"
    try:
        descriptor = open_descriptor(name, _READ, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise store_error(error, doing) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        descriptor.close()
        raise DamagedStore(f"{doing}: it is not a regular file")
    return descriptor


def _is_at(folder: int | None, name: str, descriptor: int) -> bool:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(descriptor))


def _loaded(directory: Directory, entry: Entry, descriptor: Descriptor) -> Log:
    """Return the log of a descriptor, and let the log own the descriptor.

    If the log has no intact state, the uid in the file name is used as the key.
    """
    name = f"{FOLDER}/{entry.name}"
    log = Log(directory, name, entry.uid, descriptor)
    try:
        head = head_state(descriptor)
        if head is not None:
            log.key = head.key
        with log.mutex:
            log.load(log.file_size())
            state = log.known_state()
            if head is None:
                state.uid = entry.uid
            same = state.uid == entry.uid
        if head is not None:
            log.key = _deleted_key(head, entry)
    except OSError as error:
        log.close()
        raise store_error(error, f"reading {directory.path / name}") from error
    except BaseException:
        log.close()
        raise
    if not same:
        log.close()
        raise DamagedStore(f"{directory.path / name} contains another session than its name says")
    return log
