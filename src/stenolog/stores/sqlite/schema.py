"""The tables: made anew from schema.sql, or brought up to date by the numbered files in schema/.

Who only reads brings nothing up to date: the files in older/, numbered likewise, stand for what
those in schema/ would add, as views that no other connection sees.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Final

import apsw

from stenolog.stores import reports
from stenolog.stores.sqlite.place import APPLICATION_ID

_WAL: Final = b"\2\2"
_FORMAT: Final = slice(18, 20)
"""Where a header says how its database is written: a 2 twice stands for the write-ahead log."""
_CATALOG_FILE: Final = 6
"""Number of the schema whose catalog is a file. Its script returns statements that drop tables."""
_VIEWS: Final = "SELECT name FROM temp.sqlite_schema WHERE type = 'view'"


@cache
def migrations() -> Sequence[str]:
    """The scripts in their order; the last one's number is that of the schema."""
    found = _numbered("schema")
    assert sorted(found) == list(range(1, len(found) + 1)), "a number is missing"
    return [found[number] for number in sorted(found)]


@cache
def views() -> Mapping[int, str]:
    """For each number but the first, what stands for the changes of that script."""
    found = _numbered("older")
    assert sorted(found) == list(range(2, newest() + 1)), "a number is missing"
    return found


def _numbered(folder: str) -> dict[int, str]:
    return {
        int(entry.name.partition("_")[0]): entry.read_text(encoding="utf-8")
        for entry in (files(__package__) / folder).iterdir()
        if entry.name.endswith(".sql")
    }


def newest() -> int:
    """The number of the schema that this code knows."""
    return len(migrations())


@cache
def fresh_image() -> bytes:
    """The bytes of a new, empty database.

    Made in memory, so that on the disk there never is a half-made one: who finds a file finds
    one with our mark in its header.
    """
    connection = apsw.Connection(":memory:")
    try:
        run(connection, (files(__package__) / "schema.sql").read_text(encoding="utf-8"))
        run(connection, f"PRAGMA user_version = {newest()}")
        run(connection, f"PRAGMA application_id = {APPLICATION_ID}")
        image = bytearray(connection.serialize("main"))
    finally:
        connection.close()
    image[_FORMAT] = _WAL
    return bytes(image)


def migrate(connection: apsw.Connection, version: int) -> None:
    """Bring older tables up to date, inside the transaction that is open."""
    for script in migrations()[version:]:  # guard: sqlite-migrations
        run(connection, script)
    run(connection, f"PRAGMA user_version = {newest()}")


def drop_catalog(connection: apsw.Connection, version: int) -> None:
    """Drop the catalog inside an older database, each table in a transaction of its own.

    A damaged table stays: it must not keep the store closed, nor the other tables from going.
    """
    if version >= _CATALOG_FILE:
        return
    for (statement,) in list(connection.execute(migrations()[_CATALOG_FILE - 1])):
        try:
            run(connection, statement)
        except (apsw.CorruptError, apsw.SQLError) as error:
            reports.warning(
                "the old catalog is damaged, part of it stays: %s: %s", statement, error
            )


def show_as_newest(connection: apsw.Connection, version: int) -> None:
    """Let a connection that only reads find older tables as if they were up to date.

    Outside of a transaction. The file stays as it is: another program may still be using it.
    """
    run(connection, "PRAGMA query_only = 0; PRAGMA temp_store = MEMORY")
    for (name,) in list(connection.execute(_VIEWS)):
        run(connection, f"DROP VIEW temp.{name}")
    for number in range(version + 1, newest() + 1):
        run(connection, views()[number])
    run(connection, "PRAGMA query_only = 1")


def run(connection: apsw.Connection, script: str) -> None:
    """Carry out all statements of a script: what is not asked for is not run."""
    for _ in connection.execute(script):
        pass
