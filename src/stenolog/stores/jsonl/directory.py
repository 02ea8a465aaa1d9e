"""Folder of the logs, and the translation of system errors into errors of this package.

All names are opened relative to a descriptor of the folder, and symlinks below the workspace are
not followed.
"""

import errno
import os
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from stenolog.errors import DamagedStore, StoreUnavailable, UsageError
from stenolog.stores import log_reports
from stenolog.stores.disk import (
    CLOSED,
    READ_ONLY_DISK,
    Descriptor,
    duplicate,
    make_private,
    network_kind,
    open_descriptor,
    sync_entries,
    sync_folder,
)

TRASH: Final = "trash"
"""Folder of deleted logs, next to the live logs."""

LOW_DISK: Final = 64 * 1024 * 1024
"""Bytes of free disk space below which a warning is reported, before writes fail."""

_BASE: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # guard: no-symlinks


def store_error(error: OSError, doing: str) -> StoreUnavailable | DamagedStore:
    """Return the error of this package for a failed system call, with advice for the user."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    match error.errno:
        case errno.ELOOP | errno.EMLINK:
            return DamagedStore(f"{doing}: it is a symbolic link, which is not followed here")
        case errno.EISDIR | errno.ENOTDIR | errno.ENXIO:
            return DamagedStore(f"{doing}: {reason}; something else is at this path")
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            advice = "free some space, then try again"
        case errno.EROFS:
            return StoreUnavailable(f"{doing}: {READ_ONLY_DISK}")
        case errno.EACCES | errno.EPERM:
            advice = "check the permissions of the folder and its files"
        case errno.EMFILE | errno.ENFILE:
            advice = "raise the limit of open files (ulimit -n)"
        case errno.ENOENT | errno.ESTALE:
            advice = "the folder is gone; restore it, or open the store again"
        case _:
            advice = "check the disk and the system log"
    return StoreUnavailable(f"{doing}: {reason}; {advice}")


class Directory:
    """A folder of logs, with an open descriptor."""

    def __init__(self, path: Path, *, read_only: bool) -> None:
        if sys.platform == "win32":
            raise UsageError(
                "JSONL stores need flock and fsync of folders, which Windows lacks; use sqlite:FILE"
            )
        self.path = path
        self.read_only = read_only
        self._parents_synced = False
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
            raise StoreUnavailable(f"opening {path}: the folder does not exist") from error
        except OSError as error:
            raise store_error(error, f"opening {path}") from error
        except ValueError as error:  # the name contains a lone surrogate or NUL
            raise UsageError(f"{str(path)!r} is not a valid folder name") from error
        self.problems = tuple(self._permission_problems())
        for problem in self.problems:
            log_reports.warning("%s", problem)

    def _permission_problems(self) -> list[str]:
        problems = []
        above = self.path.parent
        for folder, status in (above, above.stat()), (self.path, os.fstat(self.descriptor)):
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o077:
                problems.append(
                    f"{folder} has mode {mode:04o}, so others may read your sessions; "
                    f"chmod 700 {folder}"
                )
        return problems

    def network(self) -> list[str]:
        """Return a warning if the folder is on a network file system."""
        kind = network_kind(self.path)
        if not kind:
            return []
        return [
            f"{self.path} is on a network file system ({kind}): its locks and syncs cannot be "
            "relied on; use a local disk, or PostgreSQL for many machines"
        ]

    def open(self, name: str, *, create: bool = False) -> Descriptor | None:
        """Open a log for reading and, if allowed, for appending; return None if it is missing."""
        flags = _BASE | (os.O_RDONLY if self.read_only else os.O_RDWR | os.O_APPEND)
        try:
            descriptor = self._open(name, flags | (os.O_CREAT if create else 0))
        except FileNotFoundError as error:
            if create:
                raise store_error(error, f"opening {self.path / name}") from error
            return None
        except OSError as error:
            raise store_error(error, f"opening {self.path / name}") from error
        try:
            regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        except OSError as error:
            descriptor.close()
            raise store_error(error, f"opening {self.path / name}") from error
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
        # Without write permission the file may still be readable; an append reports the error.
        return open_descriptor(name, _BASE | os.O_RDONLY, dir_fd=self.descriptor)

    def stat(self, name: str) -> os.stat_result | None:
        """Return the status of the file `name`; None if the file does not exist."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(error, f"looking at {self.path / name}") from error

    def how_to_import(self, name: str = "") -> str:
        """Return advice on the command that imports this log, or all logs, of another program."""
        import shlex  # only error messages need this import

        log, workspace = (shlex.quote(str(p)) for p in (self.path / name, self.path.parent))
        it = "it" if name else "them"
        command = f"steno import {log} -w {workspace}"
        return f"if another program wrote {it}, `{command}` imports {it} if it knows the format"

    def list_names(self) -> list[str]:
        """Return the names of all entries, unsorted."""
        try:
            # Use a separate descriptor: threads that share a descriptor would each get only part of
            # the entries.
            flags = os.O_RDONLY | os.O_DIRECTORY | _BASE
            folder = open_descriptor(".", flags, dir_fd=self.descriptor)
            try:
                with os.scandir(folder) as entries:
                    return [entry.name for entry in entries]
            finally:
                folder.close()
        except OSError as error:
            raise store_error(error, f"listing {self.path}") from error

    def sync(self) -> None:
        """Sync the folder: wait until its entries are on the disk. Raises OSError."""
        if not self._parents_synced:
            # The creator of this folder or its parent may have died before syncing the entry.
            for above in (self.path.parent, self.path.parent.parent):
                sync_entries(above)
            for problem in self.network():
                log_reports.warning("%s", problem)
            self._parents_synced = True
        sync_folder(self.descriptor)

    def sync_renames(self) -> None:
        """Sync renames into and out of the trash. Raises OSError.

        The process that renamed a log may have been killed before its sync. A name that such a
        rename freed must not be reused before the sync: a power cut may keep the new file and
        lose the rename.
        """
        try:
            trash = self.subfolder(TRASH, create=False)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            trash = None  # the trash is a file or symlink, so no log was moved into it
        if trash is not None:
            try:
                sync_folder(trash)
            finally:
                trash.close()
            self.sync()

    def subfolder(self, *names: str, create: bool) -> Descriptor | None:
        """Open a nested folder; return None if it does not exist. Raises OSError.

        With `create`, the folder is created first. None then means that another process has removed
        the new folder.
        """
        above = duplicate(self.descriptor)
        try:
            for name in names:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=above)
                    # Sync even if the folder exists: its creator may have died before this sync.
                    sync_folder(above)
                try:
                    flags = os.O_RDONLY | os.O_DIRECTORY | _BASE
                    below = open_descriptor(name, flags, dir_fd=above)
                except FileNotFoundError:
                    return None
                above.close()
                above = below
            folder, above = above, CLOSED
            return folder
        finally:
            above.close()

    def free_bytes(self) -> int:
        """Return the free disk space in bytes. Raises OSError."""
        room = os.fstatvfs(self.descriptor)
        return room.f_bavail * room.f_frsize

    def close(self) -> None:
        """Close the descriptor of the folder."""
        descriptor, self.descriptor = self.descriptor, CLOSED
        descriptor.close()


def create_private_file(folder: int, name: str) -> Descriptor:
    """Create a file that only its owner may read, replacing an existing file."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open_descriptor(name, flags, dir_fd=folder)
