"""The database file: its path, its header, its tables, its file modes.

This module reads the header only through SQLite's file layer, because closing another descriptor
of the file would release the POSIX locks that SQLite holds in this process.

schema.sql creates the tables. The header has the fingerprint of the schema, so that a database with
other tables is refused.
"""

import os
import stat
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import apsw

from stenolog.errors import DamagedStore, ForeignLog, NewerFormat, StoreUnavailable, UsageError
from stenolog.stores import log_reports
from stenolog.stores.catalog_file import find_catalogs
from stenolog.stores.disk import network_filesystem, open_descriptor, replace_file
from stenolog.stores.sql.dialect import schema_fingerprint
from stenolog.stores.sqlite.sqlite_errors import read_failure

APPLICATION_ID: Final = 0x53544E4F  # the bytes "STNO"
COMPANION_SUFFIXES: Final = ("-wal", "-shm", "-gate", "-next")
"""Suffixes of the files next to the database."""

_MAGIC: Final = b"SQLite format 3\0"
_FOLDER: Final = Path(__file__).parent
_WAL_FORMAT: Final = b"\2\2"
_FORMAT_BYTES: Final = slice(18, 20)
"""Position of two bytes in the file header. Both bytes are 2 if the file has a write-ahead log."""


def resolve_path(file: str | os.PathLike[str]) -> Path:
    """Return the path with the symlinks of its folder resolved, but not of the file itself."""
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


def check_header(header: bytes, file: Path) -> None:
    """Raise ForeignLog or NewerFormat if this code cannot use a file with this header."""
    if header[:16] != _MAGIC or int.from_bytes(header[68:72], "big") != APPLICATION_ID:
        raise ForeignLog(
            f"{file} was not written by stenolog and was not changed; name another file, and run "
            "`steno import` if that program kept sessions there"
        )
    check_schema(int.from_bytes(header[60:64], "big"), file)


def check_schema(found: int, file: Path) -> None:
    """Raise NewerFormat if the database has other tables than this code creates."""
    if found != fingerprint():
        raise NewerFormat(
            f"{file} was written by another version of stenolog: its tables are {found:08x}, but "
            f"this version has {fingerprint():08x}; use the version that wrote it"
        )


def read_header(file: Path) -> bytes | None:
    """Return the header of the database file; empty if the file is empty, None if it is missing.

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
    """Rename the write-ahead log that a deleted database left behind.

    SQLite would apply the log to a new database of the same name, and damage the database.
    The caller must hold the gate, the lock between processes. Raises OSError.
    """
    wal = file.with_name(f"{file.name}-wal")
    if wal.exists():
        new_path = file.with_name(f"{wal.name}.left-{time.time_ns()}")
        wal.rename(new_path)
        log_reports.warning(
            "%s belongs to a database that no longer exists; it was renamed to %s", wal, new_path
        )
    file.with_name(f"{file.name}-shm").unlink(missing_ok=True)


def create_file(file: Path, content: bytes) -> None:
    """Create a database file with this content, or replace an empty file, and sync it.

    The caller must hold the gate, the lock between processes. Raises OSError.
    """
    folder = open_descriptor(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        replace_file(folder, file.name, content)
    finally:
        folder.close()


class DatabasePath:
    """The path of a database, and the identity of the file that was first found there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._name = str(path)
        self._identity: tuple[int, int] | None = None

    def check_same_file(self) -> None:
        """Raise StoreUnavailable if the file was replaced, OSError if the file is missing.

        Writes to the removed file would be lost, and the write-ahead log next to the new file
        belongs to the old file.
        """
        status = os.lstat(self._name)
        if self._identity is None:
            self._identity = status.st_dev, status.st_ino
        elif self._identity != (status.st_dev, status.st_ino):
            raise StoreUnavailable(
                f"{self.path}: the file was replaced; close the store, remove "
                f"{self.path.name}-wal and {self.path.name}-shm, and open it again"
            )


# --- tables ----------------------------------------------------------------------------------


@cache
def _schema() -> str:
    return (_FOLDER / "schema.sql").read_text(encoding="utf-8")


@cache
def fingerprint() -> int:
    """Return the number that the header of a database with these tables has."""
    return schema_fingerprint(_schema())


@cache
def empty_database() -> bytes:
    """Return the bytes of a new, empty database.

    The database is built in memory, so that the disk never has an incomplete database: every
    database file has stenolog's application id in its header.
    """
    connection = apsw.Connection(":memory:")
    try:
        # Only an empty database accepts this option, which later frees pages in small steps.
        run_script(connection, "PRAGMA auto_vacuum = INCREMENTAL")
        run_script(connection, _schema())
        run_script(connection, f"PRAGMA user_version = {fingerprint()}")
        run_script(connection, f"PRAGMA application_id = {APPLICATION_ID}")
        database_image = bytearray(connection.serialize("main"))
    finally:
        connection.close()
    database_image[_FORMAT_BYTES] = _WAL_FORMAT
    return bytes(database_image)


def run_script(connection: apsw.Connection, script: str) -> None:
    """Execute all statements of a script.

    apsw runs a statement only while its rows are read, so all rows are read.
    """
    for _ in connection.execute(script):
        pass


# --- warnings --------------------------------------------------------------------------------


def find_wide_modes(file: Path) -> list[str]:
    """Return sentences about files that other users may read. Raises OSError."""
    # The mode of the folder is not checked: the folder may be shared, like a project folder.
    problems = []
    companions = [file.with_name(file.name + suffix) for suffix in COMPANION_SUFFIXES]
    for path in (file, *companions, *find_catalogs(file)):
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                problems.append(
                    f"{path} has mode {mode:04o}, so other users can read your sessions; "
                    f"run: chmod 600 {path}"
                )
    return problems


def find_problems(file: Path) -> list[str]:
    """Return sentences about wide permissions and an unreliable file system. Raises OSError."""
    problems = find_wide_modes(file)
    network_type = network_filesystem(file.parent)
    if network_type:
        problems.append(
            f"{file} is on a network file system ({network_type}): SQLite's write-ahead log does "
            "not work there; use a local disk, or PostgreSQL for many machines"
        )
    return problems
