"""The database file: its path, its header, its tables and their migrations, its file modes.

This module reads the header only through SQLite's file layer, because closing another descriptor
of the file would release the POSIX locks that SQLite holds in this process.

schema.sql creates the tables, and the files in schema/ migrate older tables. A read-only connection
migrates nothing. Instead, the files in older/ with the same numbers define temporary views that
show older tables in the newest form. Only the read-only connection sees the views.
"""

import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import apsw

from stenolog.errors import DamagedStore, ForeignLog, NewerFormat, StoreUnavailable, UsageError
from stenolog.stores import log_reports
from stenolog.stores.catalog_file import find_catalogs
from stenolog.stores.disk import network_filesystem, open_descriptor, replace_file
from stenolog.stores.sql.dialect import numbered_scripts
from stenolog.stores.sqlite.sqlite_errors import read_failure

APPLICATION_ID: Final = 0x53544E4F  # the bytes "STNO"
LOW_DISK_BYTES: Final = 64 * 1024 * 1024
"""Free bytes below which `health` reports a problem, before writes fail."""
COMPANION_SUFFIXES: Final = ("-wal", "-shm", "-gate", "-next")
"""Suffixes of the files next to the database."""

_MAGIC: Final = b"SQLite format 3\0"
_FOLDER: Final = Path(__file__).parent
_WAL_FORMAT: Final = b"\2\2"
_FORMAT_BYTES: Final = slice(18, 20)
"""Position of two bytes in the file header. Both bytes are 2 if the file has a write-ahead log."""
_CATALOG_FILE_VERSION: Final = 6
"""Schema version that moved the catalog to a file; its migration returns DROP statements."""
_LIST_VIEWS_SQL: Final = "SELECT name FROM temp.sqlite_schema WHERE type = 'view'"


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
    check_version(int.from_bytes(header[60:64], "big"), file)


def check_version(version: int, file: Path) -> None:
    """Raise NewerFormat if this code does not know the schema version."""
    if version > newest_version():
        raise NewerFormat(
            f"{file} has schema {version}, written by a newer stenolog; this one supports up to "
            f"{newest_version()}: upgrade stenolog"
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


# --- tables and migrations -------------------------------------------------------------------


@cache
def migrations() -> Sequence[str]:
    """Return the migration scripts in order. The last script makes the newest schema version."""
    return list(numbered_scripts(_FOLDER / "schema").values())


@cache
def view_scripts() -> Mapping[int, str]:
    """Return the scripts with the views for older tables, by schema version (2 or higher)."""
    scripts = numbered_scripts(_FOLDER / "older", first=2)
    assert max(scripts) == newest_version(), "a script number is missing"
    return scripts


def newest_version() -> int:
    """Return the newest schema version that this code knows."""
    return len(migrations())


@cache
def empty_database() -> bytes:
    """Return the bytes of a new, empty database.

    The database is built in memory, so that the disk never has an incomplete database: every
    database file has stenolog's application id in its header.
    """
    connection = apsw.Connection(":memory:")
    try:
        run_script(connection, (_FOLDER / "schema.sql").read_text(encoding="utf-8"))
        run_script(connection, f"PRAGMA user_version = {newest_version()}")
        run_script(connection, f"PRAGMA application_id = {APPLICATION_ID}")
        database_image = bytearray(connection.serialize("main"))
    finally:
        connection.close()
    database_image[_FORMAT_BYTES] = _WAL_FORMAT
    return bytes(database_image)


def migrate(connection: apsw.Connection, version: int) -> None:
    """Migrate tables of this older schema version inside the open transaction."""
    for script in migrations()[version:]:  # guard: sqlite-migrations
        run_script(connection, script)
    run_script(connection, f"PRAGMA user_version = {newest_version()}")


def drop_catalog(connection: apsw.Connection, version: int) -> None:
    """Drop the catalog tables of an older database, each in its own transaction.

    A damaged table stays, and does not prevent opening the store or dropping the other tables.
    """
    if version >= _CATALOG_FILE_VERSION:
        return
    for (statement,) in list(connection.execute(migrations()[_CATALOG_FILE_VERSION - 1])):
        try:
            run_script(connection, statement)
        except (apsw.CorruptError, apsw.SQLError) as error:
            log_reports.warning(
                "the old catalog is damaged; part of it was not removed: %s: %s", statement, error
            )


def create_compatibility_views(connection: apsw.Connection, version: int) -> None:
    """Create temporary views that show older tables in the newest schema.

    No transaction may be open. The file itself does not change, because an older program may still
    use it.
    """
    run_script(connection, "PRAGMA query_only = 0; PRAGMA temp_store = MEMORY")
    for (view,) in list(connection.execute(_LIST_VIEWS_SQL)):
        run_script(connection, f"DROP VIEW temp.{view}")
    for view_version in range(version + 1, newest_version() + 1):
        run_script(connection, view_scripts()[view_version])
    run_script(connection, "PRAGMA query_only = 1")


def run_script(connection: apsw.Connection, script: str) -> None:
    """Execute all statements of a script.

    apsw runs a statement only while its rows are read, so all rows are read.
    """
    for _ in connection.execute(script):
        pass


# --- warnings --------------------------------------------------------------------------------


def find_problems(file: Path) -> list[str]:
    """Return sentences about wide permissions and an unreliable file system. Raises OSError."""
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
    network_type = network_filesystem(file.parent)
    if network_type:
        problems.append(
            f"{file} is on a network file system ({network_type}): SQLite's write-ahead log does "
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
    version_numbers = (*map(int, version.split(".")), 0, 0)[:3]
    is_fixed = (
        version_numbers >= (3, 51, 3)
        or (3, 50, 7) <= version_numbers < (3, 51, 0)
        or (3, 44, 6) <= version_numbers < (3, 45, 0)
    )
    return [] if is_fixed or version_numbers < (3, 7, 0) else [_WAL_RESET_WARNING.format(version)]
