"""System calls for files and folders, shared by the engines."""

import errno
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, Self

from stenolog.errors import StoreBusy

if sys.platform != "win32":
    import fcntl

    EXCLUSIVE_NOWAIT: Final = fcntl.LOCK_EX | fcntl.LOCK_NB  # guard: append-lock
    """Flags for flock: exclusive and non-blocking, because `lock_until` limits the wait itself."""

LOCK_POLL_SECONDS: Final = 0.0002  # seconds between two attempts to acquire a lock
NO_SPACE_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
READ_ONLY_DISK: Final = "the disk is mounted read-only; remount it writable, or use another folder"
_LOW_DISK_BYTES: Final = 64 * 1024 * 1024
"""Bytes of free disk space below which a problem is reported, before writes fail."""


class Descriptor(int):
    """A file descriptor, closed by `close` or when its last reference is dropped.

    If Ctrl-C strikes after `os.open` returns and before a variable holds the result, a plain
    integer would be lost, and its file would stay open.
    """

    _closed = False

    def close(self) -> None:
        """Close the descriptor; a second call does nothing.

        Errors are ignored, because all data was synced.
        """
        if self >= 0 and not self._closed:
            self._closed = True
            # `os.close` must be the very next call: Ctrl-C could strike after any other call.
            try:  # noqa: SIM105
                os.close(self)
            except OSError:
                pass

    def release(self) -> None:
        """Release the flock of the file, if any, and close the descriptor.

        Closing alone does not release the flock if a forked child shares the open file.
        """
        try:
            if self >= 0 and not self._closed:
                release_lock(self)
        except OSError:
            pass  # closing the descriptor usually releases the lock, too
        finally:
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


CLOSED: Final = Descriptor(-1)
"""Placeholder for a descriptor that is not open."""


def open_descriptor(
    path: str | Path, flags: int, mode: int = 0o600, *, dir_fd: int | None = None
) -> Descriptor:
    """Open a file or a folder. Raises OSError."""
    # If Ctrl-C struck between `os.open` and `Descriptor`, the descriptor would be lost.
    # The interpreter handles signals between bytecode instructions, not between calls in `map`.
    descriptors = map(partial(os.open, dir_fd=dir_fd), (path,), (flags,), (mode,))
    (descriptor,) = map(Descriptor, descriptors)
    return descriptor


def read_all(descriptor: int, start: int, stop: int) -> bytes:
    """Read the bytes from start to stop, fewer if the file ends earlier. Raises OSError."""
    chunks = []
    while start < stop:
        chunk = os.pread(descriptor, stop - start, start)
        if not chunk:
            break
        chunks.append(chunk)
        start += len(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def write_all(descriptor: int, text: bytes) -> None:
    """Write all bytes, in as many calls as needed. Raises OSError."""
    view = memoryview(text)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_file(descriptor: int) -> None:
    """Sync the file: return when all writes, through any descriptor, are on the disk."""
    if sys.platform == "darwin":
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fdatasync(descriptor)  # guard: fdatasync


def sync_folder(descriptor: int) -> None:
    """Sync a folder: return when its entries are on the disk. Raises OSError."""
    try:
        os.fsync(descriptor)  # guard: folder-fsync
        if sys.platform == "darwin":
            sync_file(descriptor)
    except OSError as error:
        # A file system that cannot sync folders reports EINVAL. The error is ignored, because such
        # a file system keeps folder entries in order.
        if error.errno != errno.EINVAL:
            raise


def create_private_folder(path: Path) -> None:
    """Create a folder and its parents with mode 0700, durably."""
    if path.is_dir():
        return
    create_private_folder(path.parent)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    sync_entries(path.parent)


def describe_space(path: Path, *, read_only: bool) -> tuple[int, list[str]]:
    """Return the free bytes at a file or folder, and why writes to it fail or may soon fail.

    Raises OSError if the path cannot be examined.
    """
    file_system = os.statvfs(path)
    free_bytes = file_system.f_bavail * file_system.f_frsize
    problems = []
    if not read_only and file_system.f_flag & os.ST_RDONLY:
        problems.append(f"{path}: {READ_ONLY_DISK}")
    elif not read_only and not os.access(path, os.W_OK):
        problems.append(f"{path}: no write permission; check its permissions and its owner")
    if free_bytes < _LOW_DISK_BYTES:
        problems.append(f"only {free_bytes:,} bytes are free at {path}; free some space")
    return free_bytes, problems


def describe_os_error(error: OSError) -> str:
    """Return the reason for a failed system call, with advice for the user."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    match error.errno:
        case errno.ELOOP | errno.EMLINK:
            return "it is a symbolic link, which is not followed"
        case errno.EROFS:
            return READ_ONLY_DISK
        case errno.EISDIR | errno.ENOTDIR | errno.ENXIO:
            advice = "something else is at this path"
        case number if number in NO_SPACE_ERRNOS:
            advice = "free some space, then try again"
        case errno.EACCES | errno.EPERM:
            advice = "check the permissions of the file and its folder"
        case errno.EMFILE | errno.ENFILE:
            advice = "raise the limit of open files (ulimit -n)"
        case errno.ENOENT | errno.ESTALE:
            advice = "the file or its folder is gone; restore it, or open the store again"
        case _:
            advice = "check the disk and the system log"
    return f"{reason}; {advice}"


def sync_entries(path: Path) -> None:
    """Sync a folder by its path, if this user may open it. Raises OSError."""
    try:
        folder = open_descriptor(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # another user owns the folder
    with folder:
        sync_folder(folder)


def create_private_file(folder: int, name: str) -> Descriptor:
    """Create a file that only its owner may read, replacing an existing file. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open_descriptor(name, flags, dir_fd=folder)


@contextmanager
def temporary_file(folder: int, name: str) -> Iterator[Descriptor]:
    """Create a private file that the caller renames inside the `with`. Raises OSError.

    If the `with` block fails, the file is deleted, so that its content cannot outlive a purge.
    """
    descriptor = create_private_file(folder, name)
    try:
        yield descriptor
    except BaseException:
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        raise
    finally:
        descriptor.release()


def replace_file(folder: int, name: str, text: bytes) -> None:
    """Replace the file `name` atomically, with mode 0600.

    Raises OSError. After an error the previous file is still there, unless only the last sync
    failed.
    """
    temporary_name = f".{name[:180]}.new"
    with temporary_file(folder, temporary_name) as descriptor:
        write_all(descriptor, text)
        sync_file(descriptor)  # guard: fallback-store-sync
        # Close the file before the rename: closing it later would drop the POSIX locks that SQLite,
        # in another thread, may have acquired on the renamed file.
        descriptor.close()
        os.rename(temporary_name, name, src_dir_fd=folder, dst_dir_fd=folder)
    sync_folder(folder)


@contextmanager
def locked(descriptor: Descriptor, deadline: float, name: str) -> Iterator[None]:
    """Hold the flock of an open file, and close the file at the end. Raises StoreBusy, OSError."""
    try:
        lock_until(descriptor, deadline, name)
        yield
    finally:
        descriptor.release()


def wait_for_lock(
    descriptor: int, *, seconds: float, name: str, poll: float = LOCK_POLL_SECONDS
) -> None:
    """Acquire the flock of an open file, waiting for at most `seconds`. Raises StoreBusy."""
    lock_until(descriptor, time.monotonic() + seconds, name, poll=poll)


def lock_until(
    descriptor: int, deadline: float, name: str, *, poll: float = LOCK_POLL_SECONDS
) -> None:
    """Acquire the flock of an open file, waiting until the deadline. Raises StoreBusy.

    The deadline is a time of the monotonic clock. The function polls at a short, constant interval:
    with a growing interval, a process that has waited long would rarely get the lock.
    """
    while True:
        try:
            fcntl.flock(descriptor, EXCLUSIVE_NOWAIT)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreBusy(f"{name} is locked by another process; try again") from None
            time.sleep(poll)
        else:
            return


def release_lock(descriptor: int) -> None:
    """Release a flock. Closing the file is not enough if a forked child shares the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


# --- network file systems, whose locks and syncs are not reliable ------------------------------

_NETWORK_TYPES: Final = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "fuse.sshfs", "afs", "ceph"}
_MOUNT_TABLE: Final = "/proc/self/mountinfo"

_filesystem_types: dict[int, str] = {}
"""Cache of file system types by device number: a lookup takes longer than opening a store."""


def network_filesystem(folder: Path) -> str:
    """Return the network file system type of a folder; empty if the folder is local or unknown.

    Raises OSError if the folder does not exist.
    """
    device = folder.stat().st_dev
    if device not in _filesystem_types:
        _filesystem_types[device] = _find_filesystem_type(device)
    return _filesystem_types[device] if _filesystem_types[device] in _NETWORK_TYPES else ""


def _find_filesystem_type(device: int) -> str:
    """Return the type of the mounted file system with this device number; empty if unknown."""
    device_name = f"{os.major(device)}:{os.minor(device)}"
    with suppress(OSError):  # only Linux has this table
        table = Path(_MOUNT_TABLE).read_text(encoding="utf-8", errors="replace")
        for mount in table.splitlines():
            mount_point, _, file_system = mount.partition(" - ")
            if f" {device_name} " in mount_point:
                return file_system.partition(" ")[0]
    return ""
