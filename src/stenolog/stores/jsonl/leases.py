"""Whose turn it is in a session: a lock on a file beside the log, kept for as long as the turn.

The file says in one line who has it, for people and for doctor, and counts the leases. The lock
goes with the process that holds it, so nobody takes it over. Only a purge ends it before: it
deletes the file, and what its holder still writes is refused, or it would bring the session back.
That it does with the lock of the log, right before it takes the log away. So a writer who has
that lock and still has the file is in time; and whoever takes a turn looks, with that lock, whether
there still is a session: else it may have come between the two steps.
"""

import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import msgspec
from msgspec import Struct

from stenolog.errors import DamagedStore, LeaseLost, StoreBusy
from stenolog.records import timestamp
from stenolog.stores.disk import (
    CLOSED,
    Descriptor,
    open_descriptor,
    sync_file,
    sync_folder,
    wait_for_lock,
)
from stenolog.stores.jsonl import names
from stenolog.stores.jsonl.directory import Directory, explained

if TYPE_CHECKING:
    from stenolog.stores.jsonl.store import JSONLStore

FOLDER: Final = "locks"
SUFFIX: Final = ".lock"
HIGHEST: Final = "highest-epoch"
"""File with the highest epoch of all lock files that were deleted."""

_POLL: Final = 0.005
_GLANCE: Final = 0.25
"""For so long somebody may be looking whether the turn is taken, which takes no time at all."""
_LINE: Final = 512
"""How long the line is, filled up with spaces: it is replaced in place, within one sector."""
_RECORD: Final = 5.0
"""Seconds to wait for another process that records the epoch of a deleted lock file."""
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Holder(Struct, frozen=True, kw_only=True):
    """What a lock file says of who had the turn last."""

    epoch: int
    pid: int
    host: str
    since: str
    until: str
    """After this, whoever still holds the lock is called stalled."""

    def words(self) -> str:
        """Who it is."""
        return f"process {self.pid} on {self.host}, since {self.since}"


def read_holder(descriptor: int) -> Holder | None:
    """Who had the turn last; None where nobody did, or that cannot be read. Raises OSError."""
    try:
        return msgspec.json.decode(os.pread(descriptor, _LINE, 0), type=Holder)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def lock_name(key: str) -> str:
    """The name of a session's lock file."""
    return names.file_name(key) + SUFFIX


class JSONLLease:
    """A turn in one session, until it is released or its process ends."""

    _descriptor = CLOSED

    def __init__(
        self,
        directory: Directory,
        store: "JSONLStore",
        key: str,
        descriptor: Descriptor,
        *,
        ttl: float,
    ) -> None:
        # Before the descriptor: Ctrl-C may leave an unfinished object to the finalizer.
        self._mutex = threading.Lock()
        self._descriptor = descriptor
        self.key = key
        self._store = store
        self._process = os.getpid()
        self._directory = directory
        self._file = _identity(os.fstat(descriptor))
        self._path = _path(key)
        self._ttl = ttl
        self._since = datetime.now(UTC)
        self.epoch = 0

    @property
    def store(self) -> "JSONLStore":
        """The store, whose writes raise LeaseLost once the turn is over.

        Raises LeaseLost in a forked child: the turn is its parent's.
        """
        self._check_process()
        # Made anew each time: one that was kept would keep the lease, which goes when forgotten.
        return self._store.behind(self)

    def check(self) -> None:
        """Raise LeaseLost where it was released or ended by a purge; StoreUnavailable.

        Who holds the lock of the log is sure that no purge comes between this and the write. It
        is asked for each write, so it is one look.
        """
        self._check_process()
        try:
            held = self._is_held()
        except OSError as error:
            raise explained(error, f"looking whose turn it is in {self.key!r}") from error
        if not held:
            raise LeaseLost(self.key, self.epoch, reason="was released, or its session purged")

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise LeaseLost(self.key, self.epoch, reason="is that of the process that took it")

    def begin(self) -> None:
        """Set the epoch and write the holder to the lock file. Raises OSError."""
        before = read_holder(self._descriptor)
        if before is not None:
            self.epoch = before.epoch + 1
        else:
            # New, purged or damaged: higher than any epoch before. The clock alone does not
            # ensure that, because it may have been set back.
            clock = time.time_ns() // 1000
            self.epoch = max(clock, _highest_ended(self._directory) + 1)  # guard: epoch-grows
        self._write()

    @property
    def lost(self) -> bool:
        """Whether it was released, or the lock file is not the one that is locked."""
        try:
            return not self._is_held()
        except OSError:
            return True

    def renew(self) -> None:
        """Another ttl from now, before doctor calls it stalled."""
        with self._mutex:
            try:
                if not self._is_held():
                    raise LeaseLost(self.key, self.epoch)
                self._write()
            except OSError as error:
                raise explained(error, f"renewing the lease of {self.key!r}") from error

    def give_back(self) -> None:
        """Release it where there is nothing to have a turn in, and leave no file behind."""
        with suppress(OSError):
            # While it is locked: whoever waits for it sees that it is gone.
            if self._is_held():
                end(self._directory, self.key)
        self.release()

    def release(self) -> None:
        """Let the next one in."""
        with self._mutex:
            descriptor, self._descriptor = self._descriptor, CLOSED
            descriptor.release()

    def __del__(self) -> None:
        if self._descriptor >= 0:
            self.release()

    def forget(self) -> None:
        """In a forked child: the turn is the parent's, so its lock stays as it is."""
        self._mutex = threading.Lock()
        descriptor, self._descriptor = self._descriptor, CLOSED
        descriptor.close()

    def _is_held(self) -> bool:
        """Whether it was not released, and its file still has its name. Raises OSError."""
        return self._descriptor >= 0 and _found(self._directory, self._path) == self._file

    def _write(self) -> None:
        """Say who has the turn; it is on the disk before anybody relies on the epoch."""
        holder = Holder(
            epoch=self.epoch,
            pid=os.getpid(),
            host=os.uname().nodename,
            since=timestamp(self._since),
            until=timestamp(datetime.now(UTC) + timedelta(seconds=min(self._ttl, 1e9))),
        )
        line = msgspec.json.encode(holder).ljust(_LINE - 1) + b"\n"
        os.pwrite(self._descriptor, line, 0)
        sync_file(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def leased(folder: Path, keys: Collection[str]) -> set[str]:
    """Return those of the keys whose lease is held now; `folder` is that of the logs."""
    try:
        locks = open_descriptor(
            folder / FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except OSError:
        return set()  # no session was ever leased here
    try:
        with os.scandir(locks) as entries:
            present = {entry.name for entry in entries}
        return {
            key for key in keys if (name := lock_name(key)) in present and _is_locked(locks, name)
        }
    finally:
        locks.close()


def _is_locked(folder: int, name: str) -> bool:
    """Return whether a lock file is locked; it cannot be locked during the check."""
    try:
        descriptor = open_descriptor(name, _READ, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False
    finally:
        descriptor.close()


def take(
    directory: Directory,
    store: "JSONLStore",
    key: str,
    *,
    ttl: float,
    deadline: float,
    pause: Callable[[float], None],
) -> JSONLLease:
    """The turn in a session, waited for until the deadline. Raises StoreBusy.

    `pause` waits for so many seconds between two looks, and may raise to end it all.
    """
    try:
        while True:
            descriptor = _open(directory, key)
            if _locked(directory, descriptor, key, deadline, pause):
                lease = _begun(JSONLLease(directory, store, key, descriptor, ttl=ttl))
                # A purge that deleted the file before this check may not have seen the epoch.
                if not lease.lost:  # guard: lease-begun-in-a-deleted-file
                    return lease
                lease.release()
    except OSError as error:
        raise explained(error, f"taking the turn in {key!r}") from error


def _begun(lease: JSONLLease) -> JSONLLease:
    try:
        lease.begin()
    except BaseException:
        lease.release()
        raise
    return lease


def _open(directory: Directory, key: str) -> Descriptor:
    folder = directory.subfolder(FOLDER, create=False)
    if folder is None:
        folder = directory.subfolder(FOLDER, create=True)
    if folder is None:
        raise FileNotFoundError(os.fspath(directory.path / FOLDER))
    try:
        descriptor = open_descriptor(lock_name(key), _FLAGS, dir_fd=folder)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedStore(f"{directory.path / FOLDER / lock_name(key)}: it is not a file")
        if not found.st_size:
            # The count must not begin again after a power cut.
            sync_folder(folder)
        return descriptor
    finally:
        folder.close()


def _locked(
    directory: Directory,
    descriptor: int,
    key: str,
    deadline: float,
    pause: Callable[[float], None],
) -> bool:
    """Whether it is locked; False where it was deleted meanwhile. Raises StoreBusy, OSError."""
    patience = max(deadline, time.monotonic() + _GLANCE)
    path, file = _path(key), _identity(os.fstat(descriptor))
    while not _flocked(descriptor, fcntl.LOCK_EX):  # guard: lease-exclusive
        if _found(directory, path) != file:
            return False
        now = time.monotonic()
        # Whoever only looks shares the lock, and is no reason to be turned away.
        if now >= patience or (now >= deadline and not _is_shared(descriptor)):
            holder = read_holder(descriptor)
            who = "another process" if holder is None else holder.words()
            raise StoreBusy(f"{key!r}: {who}, has the turn; try again")
        pause(min(patience - now, _POLL))
    return _found(directory, path) == file


def _flocked(descriptor: int, how: int) -> bool:
    """Whether the lock could be had at once."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_shared(descriptor: int) -> bool:
    """Whether nobody has the lock to himself. It is not kept: two who wait would never get it."""
    shared = _flocked(descriptor, fcntl.LOCK_SH)
    if shared:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return shared


def _highest_ended(directory: Directory) -> int:
    """Return the highest epoch of all deleted lock files; 0 if none is known.

    Raises OSError, StoreBusy.
    """
    path = f"{FOLDER}/{HIGHEST}"
    try:
        descriptor = open_descriptor(path, _READ, dir_fd=directory.descriptor)
    except FileNotFoundError:
        return 0
    with _locked_record(descriptor):
        return _read_number(descriptor)


def _record_ended(folder: Descriptor, epoch: int) -> None:
    """Record the epoch of a lock file that is about to be deleted, durably.

    Raises OSError, StoreBusy.
    """
    descriptor = open_descriptor(HIGHEST, _FLAGS, dir_fd=folder)
    with _locked_record(descriptor):
        if _read_number(descriptor) < epoch:
            # In place and within one sector, like the line of a lock file.
            os.pwrite(descriptor, b"%020d\n" % epoch, 0)
            sync_file(descriptor)
            sync_folder(folder)


@contextmanager
def _locked_record(descriptor: Descriptor) -> Iterator[None]:
    """Hold the lock of the record of epochs, and close it. Raises OSError, StoreBusy."""
    try:
        wait_for_lock(descriptor, seconds=_RECORD, what=f"the file {FOLDER}/{HIGHEST}")
        yield
    finally:
        descriptor.release()


def _read_number(descriptor: Descriptor) -> int:
    try:
        return int(os.pread(descriptor, _LINE, 0))
    except ValueError:
        return 0  # new, or damaged


def _path(key: str) -> str:
    return f"{FOLDER}/{lock_name(key)}"


def _found(directory: Directory, path: str) -> tuple[int, int] | None:
    """Which file is the lock file of a session now; None: there is none. Raises OSError."""
    try:
        return _identity(os.stat(path, dir_fd=directory.descriptor, follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_ino, found.st_dev  # guard: lease-file-identity


def end(directory: Directory, key: str) -> None:
    """Delete the lock file of a session that is purged; the holder has lost its lease then.

    The epoch is recorded first, without the key, and again if another lease began until then: the
    lock of the file cannot be waited for, because a holder keeps it during its turn.
    Raises OSError, StoreBusy.
    """
    folder = directory.subfolder(FOLDER, create=False)
    if folder is None:
        return
    try:
        name = lock_name(key)
        descriptor = open_descriptor(name, _READ, dir_fd=folder)
        try:
            holder = read_holder(descriptor)
            if holder is not None:
                _record_ended(folder, holder.epoch)
            os.unlink(name, dir_fd=folder)
            sync_folder(folder)
            last = read_holder(descriptor)  # no lease begins in a file without a name
            if last is not None and last != holder:  # guard: epoch-read-after-deletion
                _record_ended(folder, last.epoch)
        finally:
            descriptor.close()
    except FileNotFoundError:
        pass
    finally:
        folder.close()
