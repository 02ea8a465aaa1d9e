"""SQLiteStore: sessions as rows of one database file.

The driver, apsw, is imported when a store is opened, so `import stenolog` works without apsw.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from stenolog.errors import UsageError, install_command
from stenolog.stores.arguments import check_namespace, check_optional_int
from stenolog.stores.catalog_file import catalog_path
from stenolog.stores.sql.store import SQLStore
from stenolog.stores.sqlite.dialect import SQLiteDialect

if TYPE_CHECKING:
    from stenolog.stores.sqlite.database import Database

BUSY_TIMEOUT_SECONDS: Final = 5.0
CACHE_KB: Final = 2048
MAX_CACHE_KB: Final = 2**31 - 1
"""Largest cache size in KiB that SQLite accepts."""


class SQLiteStore(SQLStore):
    """Sessions in one file. stores/base.py documents each call.

    `busy_timeout`: maximum wait for other writers, in seconds. `synchronous`: with "normal", a
    power cut may lose the last messages, but no other data. `cache_kb`: page cache of each of at
    most nine connections, in KiB. `read_only`: change no data. SQLite may still need to create its
    log files next to the database. `leave_no_files`: with `read_only`, SQLite creates no files.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        namespace: str = "sessions",
        read_only: bool = False,
        leave_no_files: bool = False,
        busy_timeout: float = BUSY_TIMEOUT_SECONDS,
        synchronous: Literal["full", "normal"] = "full",
        cache_kb: int = CACHE_KB,
    ) -> None:
        check_namespace(namespace)
        if synchronous not in ("full", "normal"):
            raise UsageError(f"synchronous must be 'full' or 'normal', not {synchronous!r}")
        check_optional_int(cache_kb=cache_kb)
        if not 1 <= cache_kb <= MAX_CACHE_KB:
            raise UsageError(f"cache_kb must be from 1 to {MAX_CACHE_KB}, not {cache_kb}")

        self.database: Database = _open_database(
            file,
            read_only=read_only,
            leave_no_files=leave_no_files,
            busy_timeout=busy_timeout,
            synchronous=synchronous,
            cache_kb=cache_kb,
        )
        """The open database file."""
        super().__init__(namespace, SQLiteDialect(self.database))

    def catalog_file(self) -> Path | None:
        """Return the path of the catalog; None if the tables have an older version.

        Programs of an older version do not know the catalog file, and their purges would not delete
        it.
        """
        if self.database.is_outdated:
            return None
        return catalog_path(self.database.file, self._namespace)

    def __repr__(self) -> str:
        return f"SQLiteStore({str(self.database.file)!r}, namespace={self._namespace!r})"


def _open_database(file: str | os.PathLike[str], **settings: Any) -> "Database":
    """Open the database in this file. Raises UsageError if the driver is not installed."""
    try:
        from stenolog.stores.sqlite.connections import Settings
        from stenolog.stores.sqlite.database import Database
    except ImportError as error:
        raise missing_driver(error) from error
    return Database(file, Settings(**settings))


def missing_driver(error: ImportError) -> Exception:
    """Return the error to raise if the driver is missing; any other ImportError unchanged."""
    if error.name != "apsw":
        return error
    return UsageError(
        f"a SQLite store needs the package apsw, which includes SQLite: {install_command('sqlite')}"
    )
