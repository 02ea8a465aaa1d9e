"""Leases: the right to run a turn in a session, as a file lock that is held during the turn.

One line in the lock file describes the holder, for users, and contains the epoch of the lease,
which is higher than the epochs of all earlier leases of the session. The operating system releases
the lock when the process ends, so no process has to take over the lease of a dead process. Only a
purge ends a lease early: the purge deletes the lock file. Later writes of the holder are rejected,
because they would recreate the session.

The purge deletes the lock file while it holds the lock of the log, right before it removes the log.
So if a writer holds the lock of the log and the lock file of its lease still exists, its write
comes before the purge. A process that takes a lease checks under the lock of the log that the
session still exists, because a purge deletes the lock file first and the log later.
"""

import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
from msgspec import Struct

from stenolog.errors import DamagedStore, LeaseLost, StoreBusy
from stenolog.records import timestamp
from stenolog.stores import file_names
from stenolog.stores.disk import CLOSED, Descriptor, open_descriptor, sync_file, sync_folder
from stenolog.stores.jsonl.directory import Directory, names_in, store_error

if TYPE_CHECKING:
    from stenolog.stores.jsonl.store import JSONLStore

FOLDER: Final = "locks"
SUFFIX: Final = ".lock"

_POLL_SECONDS: Final = 0.005
"""Seconds between two attempts to acquire a lease."""
_CHECK_WAIT_SECONDS: Final = 0.25
"""Seconds to keep trying, even past the deadline, while other processes only check the lease."""
_LINE_BYTES: Final = 512
"""Bytes of the padded holder line; a write replaces the line in place, within one sector."""
_READ_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Holder(Struct, frozen=True, kw_only=True):
    """Content of a lock file: the last holder of the lease."""

    epoch: int
    pid: int
    host: str
    since: str

    def describe(self) -> str:
        """Return a description of the holder for an error message."""
        return f"process {self.pid} on {self.host}, since {self.since}"


def read_holder(descriptor: int) -> Holder | None:
    """Return the last holder; None if the lock file is empty or damaged. Raises OSError."""
    try:
        return msgspec.json.decode(os.pread(descriptor, _LINE_BYTES, 0), type=Holder)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def lock_name(key: str) -> str:
    """Return the name of a session's lock file."""
    return file_names.log_name(key) + SUFFIX


class JSONLLease:
    """A lease of one session, held until `release` or until its process ends."""

    _descriptor = CLOSED

    def __init__(
        self, directory: Directory, store: "JSONLStore", key: str, descriptor: Descriptor
    ) -> None:
        # Set `_mutex` before `_descriptor`: after Ctrl-C, `__del__` may see a partial object.
        self._mutex = threading.Lock()
        self._descriptor = descriptor
        self.key = key
        self._store = store
        self._process_id = os.getpid()
        self._directory = directory
        self._lock_identity = _file_identity(os.fstat(descriptor))
        self._path = _lock_path(key)
        self.epoch = 0

    @property
    def store(self) -> "JSONLStore":
        """The store for this turn: its writes raise LeaseLost once the lease has ended.

        Raises LeaseLost in a forked child: the lease belongs to the parent.
        """
        self._check_process()
        # The fenced store is not cached: its reference would keep a forgotten lease alive.
        return self._store.fenced_by(self)

    def check_held(self) -> None:
        """Raise LeaseLost if the lease was released or ended by a purge. Raises StoreUnavailable.

        If the caller holds the lock of the log, no purge can run between this check and the write.
        Every write calls this method, so the check must not cost more than one system call.
        """
        self._check_process()
        try:
            is_held = self._is_held()
        except OSError as error:  # `system_errors` is too slow for every write
            raise store_error(error, f"checking the lease of {self.key!r}") from error
        if not is_held:
            raise LeaseLost(self.key, self.epoch, reason="was released, or its session purged")

    def _check_process(self) -> None:
        if self._process_id != os.getpid():
            raise LeaseLost(self.key, self.epoch, reason="belongs to the process that took it")

    def start(self) -> None:
        """Set the epoch and write the holder to the lock file. Raises OSError."""
        last_holder = read_holder(self._descriptor)
        # For a new, purged or damaged file, use the clock: microseconds pass faster than leases.
        clock = time.time_ns() // 1000
        self.epoch = clock if last_holder is None else last_holder.epoch + 1
        holder = Holder(
            epoch=self.epoch,
            pid=os.getpid(),
            host=os.uname().nodename,
            since=timestamp(datetime.now(UTC)),
        )
        line = msgspec.json.encode(holder).ljust(_LINE_BYTES - 1) + b"\n"
        os.pwrite(self._descriptor, line, 0)
        sync_file(self._descriptor)

    @property
    def lost(self) -> bool:
        """Whether the lease was released, or its lock file was deleted or replaced."""
        try:
            return not self._is_held()
        except OSError:
            return True

    def renew(self) -> None:
        """Raise LeaseLost if the lease has ended; the ttl does not end it.

        Raises StoreUnavailable.
        """
        self.check_held()

    def release_and_delete(self) -> None:
        """Release the lease of a session that does not exist, and delete its lock file."""
        with suppress(OSError):
            # Delete the file while it is locked, so that a waiting process notices the deletion.
            if self._is_held():
                delete_lock_file(self._directory, self.key)
        self.release()

    def release(self) -> None:
        """Release the lock, so that another process can take the lease."""
        with self._mutex:
            descriptor, self._descriptor = self._descriptor, CLOSED
            descriptor.release()

    def __del__(self) -> None:
        if self._descriptor >= 0:
            self.release()

    def close_in_child(self) -> None:
        """Close the descriptor in a forked child without releasing the parent's lock."""
        self._mutex = threading.Lock()
        descriptor, self._descriptor = self._descriptor, CLOSED
        descriptor.close()

    def _is_held(self) -> bool:
        """Return whether the lease is held and its lock file still exists. Raises OSError."""
        return (
            self._descriptor >= 0
            and _file_identity_at(self._directory, self._path) == self._lock_identity
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def leased_keys(folder: Path, keys: Collection[str]) -> set[str]:
    """Return the keys whose lease is held now; `folder` is the folder of the logs."""
    try:
        lock_folder = open_descriptor(
            folder / FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except OSError:
        return set()  # usually because no session of this folder was ever leased
    with lock_folder:
        names = set(names_in(lock_folder))
        return {
            key
            for key in keys
            if (name := lock_name(key)) in names and _is_locked(lock_folder, name)
        }


def _is_locked(folder: int, name: str) -> bool:
    """Return whether a lock file is locked. No process can take the lease during the check."""
    try:
        descriptor = open_descriptor(name, _READ_FLAGS, dir_fd=folder)
    except OSError:
        return False
    with descriptor:
        return _is_locked_exclusively(descriptor)


def acquire_lease(
    directory: Directory,
    store: "JSONLStore",
    key: str,
    *,
    deadline: float,
    pause: Callable[[float], None],
) -> JSONLLease:
    """Acquire the lease of a session before the deadline.

    `pause` sleeps for the given seconds between two attempts. An exception of `pause` ends the
    wait. Raises StoreBusy, StoreUnavailable, DamagedStore.
    """
    while True:
        descriptor = CLOSED
        try:
            descriptor = _open_lock_file(directory, key)
            if _acquire_file_lock(directory, descriptor, key, deadline, pause):
                lease = JSONLLease(directory, store, key, descriptor)
                lease.start()
                # Try again if a purge deleted the lock file before the epoch was written to it.
                if not lease.lost:
                    return lease
        except BaseException as error:
            # Release the lock now: a traceback may refer to the descriptor for a long time.
            descriptor.release()
            if isinstance(error, OSError):
                raise store_error(error, f"taking the lease of {key!r}") from error
            raise
        descriptor.release()


def _open_lock_file(directory: Directory, key: str) -> Descriptor:
    create = directory.file_status(FOLDER) is None  # `create=True` costs a sync
    with directory.require_subfolder(FOLDER, create=create) as folder:
        descriptor = open_descriptor(lock_name(key), _LOCK_FLAGS, dir_fd=folder)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedStore(
                f"{directory.path / FOLDER / lock_name(key)}: it is not a regular file"
            )
        if not status.st_size:
            # Sync the folder entry of the new file: epochs must not restart after a power cut.
            sync_folder(folder)
        return descriptor


def _acquire_file_lock(
    directory: Directory, descriptor: int, key: str, deadline: float, pause: Callable[[float], None]
) -> bool:
    """Lock a lock file; return False if the file was deleted. Raises StoreBusy, OSError."""
    give_up_at = max(deadline, time.monotonic() + _CHECK_WAIT_SECONDS)
    path, identity = _lock_path(key), _file_identity(os.fstat(descriptor))
    while not _try_flock(descriptor, fcntl.LOCK_EX):  # guard: lease-exclusive
        if _file_identity_at(directory, path) != identity:
            return False
        now = time.monotonic()
        # Past the deadline, wait only for shared locks, which are held briefly to check a lease.
        if now >= give_up_at or (now >= deadline and _is_locked_exclusively(descriptor)):
            holder = read_holder(descriptor)
            holder_description = "another process" if holder is None else holder.describe()
            raise StoreBusy(f"{key!r}: the lease is held by {holder_description}; try again")
        pause(min(give_up_at - now, _POLL_SECONDS))
    return _file_identity_at(directory, path) == identity


def _try_flock(descriptor: int, flags: int) -> bool:
    """Try to lock the file without waiting; return whether the lock was acquired."""
    try:
        fcntl.flock(descriptor, flags | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_locked_exclusively(descriptor: int) -> bool:
    """Return whether a process holds the lock exclusively.

    The check acquires a shared lock and releases it at once, because two waiting processes with
    shared locks would block each other.
    """
    is_acquired = _try_flock(descriptor, fcntl.LOCK_SH)
    if is_acquired:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return not is_acquired


def _lock_path(key: str) -> str:
    return f"{FOLDER}/{lock_name(key)}"


def _file_identity_at(directory: Directory, path: str) -> tuple[int, int] | None:
    """Return inode and device of a file; None if the file does not exist. Raises OSError."""
    try:
        return _file_identity(os.stat(path, dir_fd=directory.descriptor, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _file_identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_ino, status.st_dev


def delete_lock_file(directory: Directory, key: str) -> None:
    """Delete the lock file of a session that is being purged. The holder loses its lease.

    This function does not wait for the lock of the file, because a holder keeps the lock during its
    turn. Raises OSError.
    """
    with (
        suppress(FileNotFoundError),
        directory.require_subfolder(FOLDER, create=False) as folder,
    ):
        os.unlink(lock_name(key), dir_fd=folder)
        sync_folder(folder)
