"""Creates the tables with schema.sql, or migrates older tables with the files in schema/.

A read-only connection migrates nothing. Instead, the files in older/ with the same numbers define
temporary views that show older tables in the newest form. Only the read-only connection sees the
views.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Final

import apsw

from stenolog.stores import log_reports
from stenolog.stores.sql.scripts import numbered_scripts
from stenolog.stores.sqlite.database_file import APPLICATION_ID

_FOLDER: Final = Path(__file__).parent
_WAL_FORMAT: Final = b"\2\2"
_FORMAT_BYTES: Final = slice(18, 20)
"""Position of two bytes in the file header. Both bytes are 2 if the file has a write-ahead log."""
_CATALOG_FILE_VERSION: Final = 6
"""Schema version that moved the catalog to a file; its migration returns DROP statements."""
_LIST_VIEWS_SQL: Final = "SELECT name FROM temp.sqlite_schema WHERE type = 'view'"


@cache
def migrations() -> Sequence[str]:
    """Return the migration scripts in order. The last script makes the newest schema version."""
    return list(numbered_scripts(_FOLDER / "schema").values())


@cache
def views() -> Mapping[int, str]:
    """Return, for each schema version from 2 on, the views that replace its migration."""
    scripts = numbered_scripts(_FOLDER / "older", first=2)
    assert max(scripts) == newest_version(), "a number is missing"
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
        image = bytearray(connection.serialize("main"))
    finally:
        connection.close()
    image[_FORMAT_BYTES] = _WAL_FORMAT
    return bytes(image)


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


def show_as_newest(connection: apsw.Connection, version: int) -> None:
    """Make older tables look like the newest schema for a read-only connection.

    Call this function outside a transaction. The file itself does not change, because another
    program may still use it.
    """
    run_script(connection, "PRAGMA query_only = 0; PRAGMA temp_store = MEMORY")
    for (name,) in list(connection.execute(_LIST_VIEWS_SQL)):
        run_script(connection, f"DROP VIEW temp.{name}")
    for number in range(version + 1, newest_version() + 1):
        run_script(connection, views()[number])
    run_script(connection, "PRAGMA query_only = 1")


def run_script(connection: apsw.Connection, script: str) -> None:
    """Execute all statements of a script.

    apsw runs a statement only while its rows are read, so all rows are read.
    """
    for _ in connection.execute(script):
        pass
