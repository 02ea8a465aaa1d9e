"""Opening the database of a store: the driver is imported here, and nowhere before."""

import os
from typing import TYPE_CHECKING

from stenolog.errors import UsageError

if TYPE_CHECKING:
    from stenolog.stores.sqlite.database import Database


def missing_driver(error: ImportError) -> Exception:
    """What to raise where the driver could not be imported; any other module's error as it is."""
    if error.name != "apsw":
        return error
    return UsageError(
        "a SQLite store needs the package apsw, which has a SQLite of its own: "
        "pip install 'stenolog[sqlite]'"
    )


def open_database(
    file: str | os.PathLike[str],
    *,
    read_only: bool,
    busy_timeout: float,
    synchronous: str,
    cache_kb: int,
) -> "Database":
    """The database in this file. Raises UsageError where the driver is not installed."""
    try:
        from stenolog.stores.sqlite.connections import Settings
        from stenolog.stores.sqlite.database import Database
    except ImportError as error:
        raise missing_driver(error) from error
    settings = Settings(
        read_only=read_only,
        busy_timeout=busy_timeout,
        synchronous=synchronous,
        cache_kb=cache_kb,
    )
    return Database(file, settings)
