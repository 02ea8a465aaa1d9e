"""Location of a database: its folder, its file modes, and whether stenolog created the file.

This module reads the database only through SQLite's file layer. Closing another descriptor of the
file would release the locks that SQLite holds in this process.
"""

import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import apsw

from stenolog.errors import DamagedStore, ForeignLog, NewerFormat, StoreUnavailable, UsageError
from stenolog.stores import log_reports
from stenolog.stores.catalog_file import find_catalogs
from stenolog.stores.disk import network_filesystem, open_descriptor, replace_file
from stenolog.stores.sqlite.sqlite_errors import read_failure

APPLICATION_ID: Final = 0x53544E4F  # the bytes "STNO"
LOW_DISK_BYTES: Final = 64 * 1024 * 1024
"""Free bytes below which `health` reports a problem, before writes fail."""
COMPANION_SUFFIXES: Final = ("-wal", "-shm", "-gate", "-next")
"""Suffixes of the files next to the database."""

_MAGIC: Final = b"SQLite format 3\0"


def resolve_path(file: str | os.PathLike[str]) -> Path:
    """Return the path with symlinks resolved, except in the last part."""
    path = Path(file)
    if path.name in ("", "..") or "\0" in str(path):
        raise UsageError(f"{os.fspath(file)!r} is not the name of a file")
    try:
        resolved = path.parent.resolve() / path.name
        str(resolved).encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{os.fspath(file)!r} is not valid UTF-8, which SQLite requires; rename the "
            "folder, or use a folder as the workspace instead of a file"
        ) from None
    except (OSError, RuntimeError) as error:
        raise StoreUnavailable(f"opening {path}: {error}") from error
    return resolved


def header_version(header: bytes, file: Path, newest: int) -> int:
    """Return the schema number in a header. Raises ForeignLog, NewerFormat."""
    if header[:16] != _MAGIC or int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise ForeignLog(
            f"{file} was not written by stenolog and was not changed; name another file, and run "
            "`steno import` if that program kept sessions there"
        )
    version = int.from_bytes(header[60:64], "big")
    check_version(version, file, newest)
    return version


def check_version(version: int, file: Path, newest: int) -> None:
    """Raise NewerFormat if this code does not know the schema."""
    if version > newest:
        raise NewerFormat(
            f"{file} has schema {version}, written by a newer stenolog; this one supports up to "
            f"{newest}: upgrade stenolog"
        )


def read_header(file: Path) -> bytes | None:
    """Return the header of the database file: empty for an empty file, None without a file.

    Raises DamagedStore, StoreUnavailable, UsageError.
    """
    try:
        mode = file.lstat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise read_failure(error, f"opening {file}") from error
    if stat.S_ISLNK(mode):
        raise DamagedStore(f"opening {file}: it is a symbolic link, which is not followed")
    if stat.S_ISDIR(mode):
        raise UsageError(f"{file} is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise DamagedStore(f"opening {file}: it is not a regular file")
    try:
        flags = [apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_MAIN_DB, 0]
        vfs_file = apsw.VFSFile("", str(file), flags)
        try:
            return vfs_file.xRead(min(100, vfs_file.xFileSize()), 0)
        finally:
            vfs_file.xClose()
    except apsw.Error as error:
        raise read_failure(error, f"opening {file}") from error


def rename_orphaned_log(file: Path) -> None:
    """Rename the log of a removed database, because the log would damage a new database.

    The caller must hold the gate, the lock between processes. Raises OSError.
    """
    log = file.with_name(f"{file.name}-wal")
    if log.exists():
        new_name = file.with_name(f"{log.name}.left-{time.time_ns()}")
        log.rename(new_name)
        log_reports.warning(
            "%s belongs to a database that no longer exists; it was renamed to %s", log, new_name
        )
    file.with_name(f"{file.name}-shm").unlink(missing_ok=True)


def create_file(file: Path, image: bytes) -> None:
    """Create a complete, synced database if the file is missing or empty.

    The caller must hold the gate, the lock between processes. Raises OSError.
    """
    folder = open_descriptor(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        replace_file(folder, file.name, image)
    finally:
        folder.close()


class DatabasePath:
    """A path, and the identity of the first file that was found at the path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)
        self._identity: tuple[int, int] | None = None

    def check_same_file(self) -> None:
        """Raise StoreUnavailable if the file was replaced, OSError if the file is missing.

        Writes to the removed file would be lost, and the log next to the new file belongs to the
        old file.
        """
        now = os.lstat(self._name)
        if self._identity is None:
            self._identity = now.st_dev, now.st_ino
        elif self._identity != (now.st_dev, now.st_ino):
            raise StoreUnavailable(
                f"{self.path}: the file was replaced; close the store, remove "
                f"{self.path.name}-wal and {self.path.name}-shm, and open it again"
            )


# --- warnings --------------------------------------------------------------------------------


def find_problems(file: Path) -> list[str]:
    """Return sentences about wide permissions and an unreliable file system. Raises OSError."""
    # The folder may be shared, for example a project folder.
    # Only the database files must be private.
    problems = []
    companions = [file.with_name(file.name + end) for end in COMPANION_SUFFIXES]
    for path in (file, *companions, *find_catalogs(file)):
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                problems.append(
                    f"{path} has mode {mode:04o}, so other users can read your sessions; "
                    f"run: chmod 600 {path}"
                )
    kind = network_filesystem(file.parent)
    if kind:
        problems.append(
            f"{file} is on a network file system ({kind}): SQLite's write-ahead log does "
            "not work there; use a local disk, or PostgreSQL for many machines"
        )
    return problems


def free_bytes(file: Path) -> int:
    """Return the free space in bytes. Raises OSError."""
    file_system = os.statvfs(file.parent)
    return file_system.f_bavail * file_system.f_frsize


_WAL_RESET_WARNING: Final = (
    "SQLite {} can lose committed transactions when a checkpoint meets a writer (the WAL-reset "
    "bug, fixed in 3.51.3, 3.50.7 and 3.44.6); install a newer apsw"
)


def known_bugs(version: str) -> list[str]:
    """Return the known bugs of this version of SQLite, as sentences."""
    number = (*map(int, version.split(".")), 0, 0)[:3]
    is_fixed = (
        number >= (3, 51, 3)
        or (3, 50, 7) <= number < (3, 51, 0)
        or (3, 44, 6) <= number < (3, 45, 0)
    )
    return [] if is_fixed or number < (3, 7, 0) else [_WAL_RESET_WARNING.format(version)]
