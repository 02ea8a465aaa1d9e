"""Connections to databases of the standard library's SQLite, and what their errors mean."""

import math
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from stenolog.catalog.database import Broken, Busy, Row, Unusable
from stenolog.catalog.statements import VERSION, schema, statements

_CACHE_KB: Final = 64 * 1024
"""Enough for a whole transaction: readers have to wait only while it is committed."""

_NOT_NOW: Final = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
}


def connected(path: Path, mode: str, *, patience: float) -> sqlite3.Connection:
    """A connection to a file, to read ("ro") or to write ("rw"). Raises sqlite3.Error."""
    connection = sqlite3.connect(
        f"file:{_escaped(path)}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=patience,
    )
    try:
        for pragma in (f"cache_size = -{_CACHE_KB}", "synchronous = NORMAL", "mmap_size = 0"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _escaped(path: Path) -> str:
    """A path as it stands in the address of a database."""
    return str(path.absolute()).replace("%", "%25").replace("?", "%3f").replace("#", "%23")


def in_memory() -> sqlite3.Connection:
    """A connection to an empty database of its own."""
    return sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)


def make_tables(connection: sqlite3.Connection, kept: Sequence[Row] = ()) -> None:
    """Empty tables of this version but for calibrations that are kept, all of them or none."""
    connection.execute("BEGIN IMMEDIATE")
    *tables, about = schema()
    for statement in tables:
        connection.execute(statement)
    connection.execute(about, (VERSION,))
    connection.executemany(statements()["calibrate"], kept)
    connection.execute("COMMIT")


def calibrations(connection: sqlite3.Connection) -> list[Row]:
    """Those of any version of the tables, as far as they make sense. Raises sqlite3.Error."""
    return [
        (model, ratio, weight)
        for model, ratio, weight in connection.execute(statements()["calibrations"])
        if isinstance(model, str) and is_calibration(ratio, weight)
    ]


def is_calibration(ratio: object, weight: object) -> bool:
    """Whether these can be what `tokens.Calibration` holds; anything else is damage."""
    if not isinstance(ratio, float) or not isinstance(weight, float):
        return False
    # No estimate is wrong by more.
    return 0.01 <= ratio <= 100 and 0 <= weight < math.inf


def has_tables(connection: sqlite3.Connection) -> bool:
    """Whether the tables are there, and of this version. Raises sqlite3.Error."""
    try:
        found = connection.execute(statements()["version"]).fetchall()
    except sqlite3.OperationalError as error:
        if code_of(error) == sqlite3.SQLITE_ERROR:  # no such table
            return False
        raise
    return found == [(VERSION,)]


def roll_back(connection: sqlite3.Connection) -> None:
    """Undo what is not committed."""
    if connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")


def sorted_out(error: sqlite3.Error, what: str) -> Broken | Unusable:
    """What an error of SQLite's means for an index that can be thrown away."""
    code = code_of(error)
    if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Busy(f"{what}: {error}")
    if code != sqlite3.SQLITE_IOERR_SHORT_READ and code & 0xFF in _NOT_NOW:
        return Unusable(f"{what}: {error} ({getattr(error, 'sqlite_errorname', '')})")
    return Broken(f"{what}: {error}")


def code_of(error: sqlite3.Error) -> int:
    """Its number in full; an error of the module itself, as for a broken text, has none."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    return code


class _Kept(Struct, gc=False):
    """Holds on to something until the process ends, and beyond.

    Closing a connection of the parent would undo what the parent is about to commit. This refers
    to itself and is hidden from the collector, so it is never cleared.
    """

    what: object
    itself: object = None


def keep_for_ever(connection: sqlite3.Connection) -> None:
    """In a forked child: leave a connection of the parent alone."""
    kept = _Kept(connection)
    kept.itself = kept
