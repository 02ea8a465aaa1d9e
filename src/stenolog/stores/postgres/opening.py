"""Opening the database of a store: the driver is imported here, and nowhere before."""

from typing import TYPE_CHECKING

from stenolog.errors import UsageError

if TYPE_CHECKING:
    from stenolog.stores.postgres.database import Database


def open_database(
    url: str, *, schema: str, read_only: bool, busy_timeout: float, connections: int
) -> "Database":
    """The database at this place. Raises UsageError where the driver is not installed."""
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
