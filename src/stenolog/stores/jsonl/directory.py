"""Folder of the logs, and the translation of system errors into errors of this package.

All files are opened relative to a descriptor of the folder, and symlinks below the workspace are
not followed.
"""

import errno
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain
from pathlib import Path
from typing import Final

from stenolog.errors import DamagedStore, StoreUnavailable, UsageError
from stenolog.stores import log_reports
from stenolog.stores.disk import (
    CLOSED,
    Descriptor,
    create_private_folder,
    describe_os_error,
    network_filesystem,
    open_descriptor,
    sync_entries,
    sync_folder,
)
from stenolog.stores.file_names import LOG_SUFFIX

TRASH: Final = "trash"
"""Folder of deleted logs, next to the live logs."""

_RECORD_START: Final = b'{"kind":"'
"""Start of every line of a log."""

_BASE_FLAGS: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # guard: no-symlinks
_FOLDER_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | _BASE_FLAGS


def store_error(error: OSError, action: str) -> StoreUnavailable | DamagedStore:
    """Return the error of this package for a failed system call, with advice for the user."""
    something_else = errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENOTDIR, errno.ENXIO
    kind = DamagedStore if error.errno in something_else else StoreUnavailable
    return kind(f"{action}: {describe_os_error(error)}")


@contextmanager
def system_errors(action: str) -> Iterator[None]:
    """Translate an OSError of the `with` block. Raises StoreUnavailable, DamagedStore."""
    try:
        yield
    except OSError as error:
        raise store_error(error, action) from error


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
        try:
            try:
                self.descriptor = open_descriptor(path, _FOLDER_FLAGS)
            except FileNotFoundError:
                if read_only:
                    raise
                create_private_folder(path)
                self.descriptor = open_descriptor(path, _FOLDER_FLAGS)
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
        parent = self.path.parent
        for folder, status in (parent, parent.stat()), (self.path, os.fstat(self.descriptor)):
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o077:
                problems.append(
                    f"{folder} has mode {mode:04o}, so others may read your sessions; "
                    f"chmod 700 {folder}"
                )
        return problems

    def network_warning(self) -> list[str]:
        """Return one warning if the folder is on a network file system, otherwise an empty list."""
        kind = network_filesystem(self.path)
        if not kind:
            return []
        return [
            f"{self.path} is on a network file system ({kind}): its locks and syncs cannot be "
            "relied on; use a local disk, or PostgreSQL for many machines"
        ]

    def open_log(self, name: str, *, create: bool = False) -> Descriptor | None:
        """Open a log for reading and, if allowed, for appending.

        Return None if the log is missing; with `create`, create a missing log instead. Raises
        StoreUnavailable, DamagedStore.
        """
        flags = _BASE_FLAGS | (os.O_RDONLY if self.read_only else os.O_RDWR | os.O_APPEND)
        try:
            descriptor = self._open_file(name, flags | (os.O_CREAT if create else 0))
            return self._require_regular_file(descriptor, name)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not create:
                return None
            raise store_error(error, f"opening {self.path / name}") from error

    def open_to_read(self, path: str) -> Descriptor | None:
        """Open a file in this folder or in a folder below it; return None if it is missing.

        Raises StoreUnavailable, DamagedStore.
        """
        *folder_names, name = path.split("/")
        with system_errors(f"opening {self.path / path}"), suppress(FileNotFoundError):
            folder = self.subfolder(*folder_names, create=False)
            if folder is not None:
                with folder:
                    descriptor = open_descriptor(name, os.O_RDONLY | _BASE_FLAGS, dir_fd=folder)
                return self._require_regular_file(descriptor, path)
        return None

    def _require_regular_file(self, descriptor: Descriptor, path: str) -> Descriptor:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            descriptor.close()
            raise DamagedStore(f"opening {self.path / path}: it is not a regular file")
        return descriptor

    def _open_file(self, name: str, flags: int) -> Descriptor:
        try:
            # guard: log-mode
            return open_descriptor(name, flags, 0o600, dir_fd=self.descriptor)
        except OSError as error:
            is_forbidden = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
            if not is_forbidden or flags & os.O_CREAT or not flags & os.O_RDWR:
                raise
        # Without write permission, open the file only for reading; an append reports the error.
        return open_descriptor(name, _BASE_FLAGS | os.O_RDONLY, dir_fd=self.descriptor)

    def check_writable(self, name: str) -> None:
        """Raise OSError if the file `name` exists and cannot be opened for writing."""
        with suppress(FileNotFoundError):
            open_descriptor(name, os.O_RDWR | _BASE_FLAGS, dir_fd=self.descriptor).close()

    def file_status(self, name: str) -> os.stat_result | None:
        """Return the status of the file `name`; None if the file does not exist."""
        try:
            return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise store_error(error, f"looking at {self.path / name}") from error

    def import_advice(self, name: str = "") -> str:
        """Return advice on importing a log of another program; all its logs if `name` is empty."""
        import shlex  # only error messages need this import

        source, workspace = (shlex.quote(str(p)) for p in (self.path / name, self.path.parent))
        it = "it" if name else "them"
        command = f"steno import {source} -w {workspace}"
        return f"if another program wrote {it}, `{command}` imports {it} if it knows the format"

    def list_names(self) -> list[str]:
        """Return the names of all files and folders in this folder, unsorted."""
        # Open the folder again: threads with one descriptor share its position and miss entries.
        with (
            system_errors(f"listing {self.path}"),
            open_descriptor(".", _FOLDER_FLAGS, dir_fd=self.descriptor) as folder,
        ):
            return names_in(folder)

    def sync_entries(self) -> None:
        """Sync the folder: wait until its entries are on the disk. Raises OSError."""
        if not self._parents_synced:
            # The process that created the folders may have died before its sync: sync the parents.
            for parent in (self.path.parent, self.path.parent.parent):
                sync_entries(parent)
            for problem in self.network_warning():
                log_reports.warning("%s", problem)
            self._parents_synced = True
        sync_folder(self.descriptor)

    def sync_renames(self) -> None:
        """Sync renames into and out of the trash. Raises OSError.

        The process that renamed a log may have been killed before its sync. A name that a rename
        freed must not be reused before the sync: a power cut may keep the new file and lose the
        rename.
        """
        try:
            trash_folder = self.subfolder(TRASH, create=False)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            trash_folder = None  # the trash is a file or symlink, so no log was moved into it
        if trash_folder is not None:
            with trash_folder:
                sync_folder(trash_folder)
            self.sync_entries()

    def subfolder(self, *names: str, create: bool) -> Descriptor | None:
        """Open a nested folder; return None if it does not exist. Raises OSError.

        With `create`, the folder is created first, and None means that another process has removed
        the new folder.
        """
        # With `map`, Ctrl-C cannot strike between the call and the assignment.
        (parent,) = map(Descriptor, map(os.dup, (self.descriptor,)))
        try:
            for name in names:
                if create:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=parent)
                    # Sync even if the folder exists: its creator may have died before the sync.
                    sync_folder(parent)
                try:
                    child = open_descriptor(name, _FOLDER_FLAGS, dir_fd=parent)
                except FileNotFoundError:
                    return None
                parent.close()
                parent = child
            folder, parent = parent, CLOSED
            return folder
        finally:
            parent.close()

    def open_subfolder(self, name: str) -> AbstractContextManager[Descriptor | None]:
        """Return a context manager that yields the open subfolder, or None if it does not exist.

        Raises StoreUnavailable, DamagedStore.
        """
        with system_errors(f"opening {self.path / name}"):
            folder = self.subfolder(name, create=False)
        return nullcontext() if folder is None else folder

    def require_subfolder(self, name: str, *, create: bool) -> Descriptor:
        """Open a subfolder of this folder. Raises OSError, also if the folder does not exist."""
        folder = self.subfolder(name, create=create)
        if folder is None:
            raise FileNotFoundError(os.fspath(self.path / name))
        return folder

    def close(self) -> None:
        """Close the descriptor of the folder."""
        descriptor, self.descriptor = self.descriptor, CLOSED
        descriptor.close()


def names_in(folder: int | None) -> list[str]:
    """Return the names in a folder, unsorted; empty if `folder` is None. Raises OSError."""
    if folder is None:
        return []
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def has_logs(folder: Path, *, by_name: bool = False) -> bool:
    """Return whether a folder or its trash has a log of stenolog. Raises OSError.

    With `by_name`, every file that is named like a log counts as a log.
    """
    paths = chain(log_files(folder), log_files(folder / TRASH))
    return any(by_name or is_log(path) for path in paths)


def log_files(folder: Path) -> Iterator[str]:
    """Yield the paths of all files named like a log, including files of other programs.

    Raises OSError.
    """
    if folder.is_dir() and not folder.is_symlink():
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(LOG_SUFFIX) and entry.is_file(follow_symlinks=False):
                    yield entry.path


def is_log(path: str) -> bool:
    """Return whether a readable file begins like a log of stenolog."""
    # Use `os.open`: a Python file object is half as fast, and there may be thousands of files.
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not wait
    except OSError:
        return False
    try:
        return os.read(file, len(_RECORD_START)) == _RECORD_START
    except OSError:
        return False  # for example a folder
    finally:
        os.close(file)
