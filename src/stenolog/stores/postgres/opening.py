"""Opening the database of a store: the driver is imported here, and nowhere before."""

import re
from typing import TYPE_CHECKING, Final

from stenolog.errors import UsageError

if TYPE_CHECKING:
    from stenolog.stores.postgres.database import Database


_SCHEMA: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


def open_database(
    url: str, *, schema: str, read_only: bool, busy_timeout: float, connections: int
) -> "Database":
    """The database at this place. Raises UsageError where the driver is not installed."""
    if not _SCHEMA.fullmatch(schema):
        raise UsageError(f"schema={schema!r}: letters, digits and _ are wanted, at most 63")
    try:
        from stenolog.stores.postgres import database
        from stenolog.stores.postgres.connections import Settings
    except ImportError as error:
        if not (error.name or "").startswith("psycopg"):
            raise
        raise UsageError(
            "a PostgreSQL store needs the package psycopg: pip install 'stenolog[postgres]'"
        ) from error
    return database.open_database(
        Settings(
            conninfo=url,
            schema=schema,
            read_only=read_only,
            busy_timeout=busy_timeout,
            connections=connections,
        )
    )
