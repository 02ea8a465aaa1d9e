"""The trash: logs of deleted sessions, whole, each under its uid and the time of its end.

Into it a log goes by one rename. Out of it, it goes in two: first it is renewed where it lies, so
that it is another file from then on, then it is renamed into the place of an empty one. Whoever
still has the old file open sees that the name stands for another, and syncs the folder before it
writes. So a session is always whole, and in one place only. Where it gets another key, the file
says in between which one it has in the trash; last of all it is renewed once more, without that.
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
from stenolog.stores.damage import Damage
from stenolog.stores.disk import (
    CLOSED,
    Descriptor,
    open_descriptor,
    sync_file,
    sync_folder,
    write_all,
)
from stenolog.stores.jsonl import names, writer
from stenolog.stores.jsonl.directory import TRASH, Directory, create_anew, explained
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.open_logs import flock
from stenolog.stores.jsonl.rewrite import composed, replay, states_in, swap

FOLDER: Final = TRASH

PURGED: Final = ".purged"
"""Behind the name of a log that is out of sight for good, and not yet deleted."""

_NAME: Final = re.compile(r"([0-9a-f]{1,64})\.(\d{8}T\d{6}\.\d{6}Z)\.jsonl(\.purged)?")
_STAMP: Final = "%Y%m%dT%H%M%S.%fZ"
_HEAD: Final = 64 * 1024
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


_reported = Damage()
"""Damaged files that this process has reported."""


class Entry(Struct, frozen=True):
    """A file in the trash."""

    name: str
    uid: str
    deleted: datetime
    purged: bool = False


def entry_of(name: str) -> Entry | None:
    """What a file name in the trash says; None for any other name."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    try:
        deleted = _moment(found[2])
    except ValueError:
        return None
    return Entry(name, found[1], deleted, purged=found[3] is not None)


def entries(directory: Directory, *, purged: bool = False) -> list[Entry]:
    """What lies in the trash, the last deleted first. Raises StoreUnavailable, DamagedStore.

    `purged`: only what is about to be deleted for good; else that is left out.
    """
    with opened_folder(directory, FOLDER) as folder:
        try:
            here = names_in(folder)
        except OSError as error:
            raise explained(error, f"listing {directory.path / FOLDER}") from error
    every = [entry for name in here if (entry := entry_of(name)) is not None]
    found = [entry for entry in every if entry.purged == purged]
    return sorted(found, key=lambda entry: (entry.deleted, entry.uid), reverse=True)


def put(log: Log, at: str, *, purged: bool = False) -> Entry:
    """Rename a log into the trash, durably. The caller holds its lock. Raises OSError, NotStored.

    The name of a file in the trash does not tell the key, so a log whose states are all damaged
    gets a new one first.
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
        name = f"{uid}.{deleted.strftime(_STAMP)}{names.SUFFIX}{PURGED if purged else ''}"
        os.rename(log.name, name, src_dir_fd=directory.descriptor, dst_dir_fd=folder)
        # Where it went to first: so it is somewhere, also where a rename is not one step.
        sync_folder(folder)
        directory.sync()
    finally:
        folder.close()
    return Entry(name, uid, deleted, purged)


def _deletion_time(folder: int, at: str) -> datetime:
    """Return this time, or a later one than all in the trash: the clock may have been set back."""
    deleted = datetime.fromisoformat(at)
    stamps = [found[2] for name in names_in(folder) if (found := _NAME.fullmatch(name)) is not None]
    newest = max(stamps, default="")
    if newest >= deleted.strftime(_STAMP):
        with suppress(ValueError, OverflowError):  # a name that another program made
            return _moment(newest) + timedelta(microseconds=1)
    return deleted


def _moment(stamp: str) -> datetime:
    return datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC)


def hide(directory: Directory, entry: Entry) -> Entry:
    """Let nobody restore a log any more, durably. The caller holds its lock. Raises OSError."""
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
    """A log in the trash, read; None where it is not there. Raises what reading it raises.

    With a time (of the monotonic clock) its lock is held, and waited for until then.
    """
    log = None
    with opened_folder(directory, FOLDER) as folder:
        descriptor = _open(directory, folder, entry.name, f"{FOLDER}/{entry.name}")
        try:
            if descriptor is not None and until is not None:
                flock(descriptor, until, f"the deleted session {entry.uid}")
            if descriptor is not None and _is_at(folder, entry.name, descriptor):
                given, descriptor = descriptor, None
                log = _loaded(directory, entry, given)
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


def listed(directory: Directory) -> list[Trashed]:
    """List the deleted sessions; report damaged files. Raises StoreUnavailable."""
    found = []
    for entry in entries(directory):
        try:
            with opened(directory, entry) as log:
                if log is not None:
                    found.append(told(log, entry))
        except DamagedStore:
            _reported.tell(f"the deleted session {directory.path / FOLDER / entry.name}")
    return found


def told(log: Log, entry: Entry) -> Trashed:
    """What there is to say of a deleted session."""
    with log.mutex:
        count = log.info().count
    return Trashed(key=log.key, uid=entry.uid, deleted=entry.deleted, count=count)


def keys(directory: Directory, *, purged: bool = False) -> Iterator[tuple[Entry, str]]:
    """The key of each deleted session, the last deleted first. Raises StoreUnavailable."""
    for entry in entries(directory, purged=purged):
        if (key := key_at(directory, entry)) is not None:
            yield entry, key


def key_at(directory: Directory, entry: Entry) -> str | None:
    """Return the key of a deleted session, or its uid if no state in its file is intact.

    None if the file is gone or cannot be read. Raises StoreUnavailable.
    """
    with suppress(DamagedStore):
        with opened_folder(directory, FOLDER) as folder:
            state = head_at(directory, folder, entry.name, f"{FOLDER}/{entry.name}")
        if state is not None:
            return _deleted_key(state, entry)
        with opened(directory, entry) as log:
            return None if log is None else log.key
    return None


def nameless(directory: Directory) -> Iterator[Entry]:
    """Files of which nobody can tell what key they had: no state in them is intact.

    Raises StoreUnavailable.
    """
    for entry in (*entries(directory), *entries(directory, purged=True)):
        with suppress(DamagedStore), opened_folder(directory, FOLDER) as folder:
            state = head_at(directory, folder, entry.name, f"{FOLDER}/{entry.name}")
            if state is None and entry.name in names_in(folder):
                yield entry


def _deleted_key(state: State, entry: Entry) -> str:
    """The key that a session had when it was deleted."""
    was = state.deleted_as
    return was.key if was is not None and was.name == _plain(entry) else state.key


def _plain(entry: Entry) -> str:
    return entry.name.removesuffix(PURGED)


def take_out(log: Log, entry: Entry, key: str, live: Log) -> None:
    """Let a log of the trash take the place of a live one, under this key. Raises OSError.

    The caller holds the locks of both, and nothing that counts is in the live one.
    """
    was = None if key == log.key else DeletedAs(log.key, _plain(entry))
    text = _renewed(log, key, was)
    directory = log.directory
    folder = directory.subfolder(FOLDER, create=False)
    if folder is None:
        raise FileNotFoundError(os.fspath(directory.path / FOLDER))
    temporary = f".{entry.name}.new"
    descriptor = CLOSED
    try:
        descriptor = create_anew(folder, temporary)
        write_all(descriptor, text)
        sync_file(descriptor)
        # Locked before it has the name: nobody appends to it before the name is on the disk.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(temporary, entry.name, src_dir_fd=folder, dst_dir_fd=folder)
        # Or the second rename might last and the first not: then it were in two places.
        sync_folder(folder)  # guard: restore-sync-between-renames
        os.rename(entry.name, live.name, src_dir_fd=folder, dst_dir_fd=directory.descriptor)
        directory.sync()
        sync_folder(folder)
        if was is not None:
            # While the lock is still held: nothing was appended that this would leave out.
            swap(live, _renewed(log, key, None, generations=2))
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        descriptor.release()
        folder.close()


def _renewed(log: Log, key: str, was: DeletedAs | None, *, generations: int = 1) -> bytes:
    """The same log in a later generation, under this key."""
    with log.mutex:
        known, updated = log.known_state(), log.updated
    text = log.read(0, log.file_size())
    found = replay(text, known)
    found.head.key = found.state.key = key
    found.head.deleted_as = found.state.deleted_as = was  # guard: cut-restore-keeps-key
    found.state.generation += generations - 1  # `composed` adds one
    return composed(
        found.head,
        found.state,
        text,
        updated or found.state.created,
        first_seq=found.first_seq,
        next_seq=found.next_seq,
        tail=found.tail,
    )


def head_state(descriptor: int) -> State | None:
    """The state that a log begins with; None where no state is intact. Raises OSError."""
    size = os.fstat(descriptor).st_size
    for length in (_HEAD, size):
        found = next(states_in(os.pread(descriptor, length, 0)), None)
        if found is not None or length >= size:
            return found.body if found is not None else None
    return None


def head_at(directory: Directory, folder: int | None, name: str, path: str) -> State | None:
    """The same of a file in a folder; None also where it is not there.

    Raises StoreUnavailable, DamagedStore.
    """
    descriptor = _open(directory, folder, name, path)
    if descriptor is None:
        return None
    try:
        return head_state(descriptor)
    except OSError as error:
        raise explained(error, f"reading {directory.path / path}") from error
    finally:
        descriptor.close()


def settle(directory: Directory) -> None:
    """Have what was put in and taken out on the disk, before anybody is told of it.

    Who did it may have been killed before that. Raises StoreUnavailable.
    """
    try:
        directory.settle()
    except OSError as error:
        raise explained(error, f"syncing {directory.path}") from error


# --- folders ---------------------------------------------------------------------------------


@contextmanager
def opened_folder(directory: Directory, *below: str) -> Iterator[int | None]:
    """A descriptor of a folder below; None where it is not there. Raises as `explained` has it."""
    try:
        folder = directory.subfolder(*below, create=False)
    except OSError as error:
        path = directory.path.joinpath(*below)
        raise explained(error, f"opening {path}") from error
    try:
        yield folder
    finally:
        if folder is not None:
            folder.close()


def names_in(folder: int | None) -> list[str]:
    """What stands in a folder, if there is one. Raises OSError."""
    if folder is None:
        return []
    with os.scandir(folder) as found:
        return [entry.name for entry in found]


def _open(directory: Directory, folder: int | None, name: str, path: str) -> Descriptor | None:
    if folder is None:
        return None
    doing = f"opening {directory.path / path}"
    try:
        descriptor = open_descriptor(name, _READ, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explained(error, doing) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        descriptor.close()
        raise DamagedStore(f"{doing}: it is not a regular file")
    return descriptor


def _is_at(folder: int | None, name: str, descriptor: int) -> bool:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))


def _loaded(directory: Directory, entry: Entry, descriptor: Descriptor) -> Log:
    """The log behind a descriptor, which is its own from now on.

    If no state in it is intact, the name of the file has the uid, and that stands for the key.
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
        raise explained(error, f"reading {directory.path / name}") from error
    except BaseException:
        log.close()
        raise
    if not same:
        log.close()
        raise DamagedStore(f"{directory.path / name} holds another session than its name says")
    return log
