"""The folder that holds the logs, and the errors of the system as ours.

Every name is opened relative to a descriptor of the folder, and no symlink below the workspace is
followed.
"""

import errno
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from stenolog.errors import DamagedStore, StoreUnavailable, UsageError
from stenolog.stores import reports
from stenolog.stores.disk import (
    CLOSED,
    READ_ONLY_DISK,
    Descriptor,
    duplicate,
    make_private,
    open_descriptor,
    sync_entries,
    sync_folder,
)
from stenolog.stores.filesystems import network_kind

TRASH: Final = "trash"
"""The folder, beside the logs, of those that were deleted."""

LOW_DISK: Final = 64 * 1024 * 1024
"""Less room than this is a problem before it is an error."""

_BASE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # guard: no-symlinks


def explained(error: OSError, doing: str) -> StoreUnavailable | DamagedStore:
    """What a failed system call means for whoever has to act."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    match error.errno:
        case errno.ELOOP | errno.EMLINK:
            return DamagedStore(f"{doing}: it is a symbolic link, and none is followed here")
        case errno.EISDIR | errno.ENOTDIR | errno.ENXIO:
            return DamagedStore(f"{doing}: {reason}; something else stands in its place")
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            advice = "free some space, then try again"
        case errno.EROFS:
            return StoreUnavailable(f"{doing}: {READ_ONLY_DISK}")
        case errno.EACCES | errno.EPERM:
            advice = "check the permissions of the folder and its files"
        case errno.EMFILE | errno.ENFILE:
            advice = "raise the limit of open files (ulimit -n)"
        case errno.ENOENT | errno.ESTALE:
            advice = "the folder is gone; put it back or open the store anew"
        case _:
            advice = "look at the disk and the system's log"
    return StoreUnavailable(f"{doing}: {reason}; {advice}")


class Directory:
    """One folder of logs, held open."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        if sys.platform == "win32":
            raise UsageError("JSONL stores need flock and fsync of folders; Windows has neither")
        self.path = path
        self.read_only = read_only
        self._settled = False
        self.problems: tuple[str, ...] = ()
        folder = os.O_RDONLY | os.O_DIRECTORY | _BASE
        try:
            try:
                self.descriptor = open_descriptor(path, folder)
            except FileNotFoundError:
                if read_only:
                    raise
                make_private(path)
                self.descriptor = open_descriptor(path, folder)
        except FileNotFoundError as error:
            raise StoreUnavailable(f"opening {path}: there is no such folder") from error
        except OSError as error:
            raise explained(error, f"opening {path}") from error
        except ValueError as error:  # a lone surrogate, or NUL
            raise UsageError(f"{str(path)!r} is not the name of a folder") from error
        self.problems = tuple(self._look())
        for problem in self.problems:
            reports.warning("%s", problem)

    def _look(self) -> list[str]:
        found = []
        above = self.path.parent
        for folder, status in (above, above.stat()), (self.path, os.fstat(self.descriptor)):
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o077:
                found.append(
                    f"{folder} has mode {mode:04o}, so others may read your sessions; "
                    f"chmod 700 {folder}"
                )
        return found

    def network(self) -> list[str]:
        """A warning, where this is on a network file system. Asked when it begins to matter."""
        kind = network_kind(self.path)
        if not kind:
            return []
        return [
            f"{self.path} is on a network file system ({kind}): its locks and syncs cannot be "
            "relied on; use a local disk, or PostgreSQL for many machines"
        ]

    def open(self, name: str, *, create: bool = False) -> Descriptor | None:
        """A descriptor of a log, to be read and, where allowed, appended to; None: not there."""
        flags = _BASE | (os.O_RDONLY if self.read_only else os.O_RDWR | os.O_APPEND)
        try:
            descriptor = self._open(name, flags | (os.O_CREAT if create else 0))
        except FileNotFoundError as error:
            if create:
                raise explained(error, f"opening {self.path / name}") from error
            return None
        except OSError as error:
            raise explained(error, f"opening {self.path / name}") from error
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except OSError as error:
            descriptor.close()
            raise explained(error, f"opening {self.path / name}") from error
        if not regular:
            descriptor.close()
            raise DamagedStore(f"opening {self.path / name}: it is not a regular file")
        return descriptor

    def _open(self, name: str, flags: int) -> Descriptor:
        try:
            # guard: log-mode
            return open_descriptor(name, flags, 0o600, dir_fd=self.descriptor)
        except OSError as error:
            forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            if not forbidden or flags & os.O_CREAT or not flags & os.O_RDWR:
                raise
        # It may still be read; an append will say that it cannot.
        return open_descriptor(name, _BASE | os.O_RDONLY, dir_fd=self.descriptor)

    def stat(self, name: str) -> os.stat_result | None:
        """What the name stands for now; None where it is not there."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise explained(error, f"looking at {self.path / name}") from error

    def how_to_import(self, name: str = "") -> str:
        """The command that takes in a log of another program which stands here, or all of them."""
        import shlex  # for an error alone

        log, workspace = (shlex.quote(str(p)) for p in (self.path / name, self.path.parent))
        it = "it" if name else "them"
        command = f"steno import {log} -w {workspace}"
        return (
            f"if another program wrote {it}, `{command}` takes {it} in, where it knows the layout"
        )

    def names(self) -> list[str]:
        """Everything that is here, unsorted."""
        try:
            # Its own descriptor: two threads that list through one would get half of it each.
            flags = os.O_RDONLY | os.O_DIRECTORY | _BASE
            folder = open_descriptor(".", flags, dir_fd=self.descriptor)
            try:
                with os.scandir(folder) as entries:
                    return [entry.name for entry in entries]
            finally:
                folder.close()
        except OSError as error:
            raise explained(error, f"listing {self.path}") from error

    def sync(self) -> None:
        """Return only when the entries of this folder are on the disk. Raises OSError."""
        if not self._settled:
            # Who made this folder, or the one above, may have died before syncing its entry.
            for above in (self.path.parent, self.path.parent.parent):
                sync_entries(above)
            for problem in self.network():
                reports.warning("%s", problem)
            self._settled = True
        sync_folder(self.descriptor)

    def settle(self) -> None:
        """Have what was renamed into the trash, or out of it, on the disk. Raises OSError.

        Whoever did it may have been killed before that. A name that became free so must not be
        used again before: a power cut may keep the new file and not the rename.
        """
        try:
            trash = self.subfolder(TRASH, create=False)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            trash = None  # what stands in its place has taken nothing in
        if trash is not None:
            try:
                sync_folder(trash)
            finally:
                trash.close()
            self.sync()

    def subfolder(self, *names: str, create: bool) -> Descriptor | None:
        """Open a folder below; None if there is none. Raises OSError.

        With `create` it is made first; None then means that another process removed it again.
        """
        above = duplicate(self.descriptor)
        try:
            for name in names:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=above)
                    # Also if it was there: its creator may have died before syncing this.
                    sync_folder(above)
                try:
                    flags = os.O_RDONLY | os.O_DIRECTORY | _BASE
                    below = open_descriptor(name, flags, dir_fd=above)
                except FileNotFoundError:
                    return None
                above.close()
                above = below
            found, above = above, CLOSED
            return found
        finally:
            above.close()

    def free_bytes(self) -> int:
        """Room left for us. Raises OSError."""
        room = os.fstatvfs(self.descriptor)
        return room.f_bavail * room.f_frsize

    def close(self) -> None:
        """Let go of the folder."""
        descriptor, self.descriptor = self.descriptor, CLOSED
        descriptor.close()


def create_anew(folder: int, name: str) -> Descriptor:
    """A descriptor of a new file that only its owner may read, whatever stood there before."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open_descriptor(name, flags, dir_fd=folder)
