"""The tables: made and brought up to date by the numbered files in schema/, one at a time."""

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from stenolog.errors import DamagedStore, NewerFormat, StoreUnavailable
from stenolog.stores.postgres.queries import quoted

if TYPE_CHECKING:
    from stenolog.stores.postgres.connections import Connection, Settings

_LOCK: Final = 0x7374656E6F6C6F67
"""The advisory lock of who brings tables up to date: `stenolog`, in eight letters."""
# By a look at the table of tables: to_regclass may tell what was there when the transaction began.
_TABLES: Final = (
    b"SELECT FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace "
    b"ON pg_namespace.oid = relnamespace WHERE nspname = $1 AND relname = 'about'"
)


@cache
def migrations() -> tuple[str, ...]:
    """The scripts in their order; the last one's number is that of the tables."""
    found = {
        int(entry.name.partition("_")[0]): entry.read_text(encoding="utf-8")
        for entry in (files(__package__) / "schema").iterdir()
        if entry.name.endswith(".sql")
    }
    assert sorted(found) == list(range(1, len(found) + 1)), "a number is missing"
    return tuple(found[number] for number in sorted(found))


def newest() -> int:
    """The number of the tables that this code knows."""
    return len(migrations())


def prepare(connection: "Connection", settings: "Settings") -> bool:
    """Have the tables there as this code knows them; whether they are older and only read.

    Raises NewerFormat, DamagedStore.

    Whoever comes at the same time waits, and then finds them made.
    """
    found = version_of(connection, settings.schema)
    if found is not None and found == newest():
        return False
    if settings.read_only:
        if found is None:
            raise StoreUnavailable(
                f"the database has no schema {settings.schema!r} with sessions; it was opened to "
                "read only, so none is made"
            )
        return True
    with connection.transaction():
        connection.execute("SELECT pg_advisory_xact_lock($1)", (_LOCK,))
        found = version_of(connection, settings.schema)
        if found == newest():
            return False
        if found is None:
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(settings.schema)}".encode())
        for script in migrations()[found or 0 :]:
            connection.execute(script.replace("{schema}", quoted(settings.schema)).encode())
        set_version(connection, settings.schema, newest())
    return False


def set_version(connection: "Connection", schema: str, number: int) -> None:
    """Say of the tables and of each session which version they are: older code refuses them."""
    for table, column in (("about", "version"), ("session", "format")):
        statement = f"UPDATE {quoted(schema)}.{table} SET {column} = $1"  # noqa: S608 - quoted
        connection.execute(statement.encode(), (number,))


def version_of(connection: "Connection", schema: str) -> int | None:
    """The number of the tables that are there; None where there are none. Raises NewerFormat."""
    about = f"{quoted(schema)}.about"
    if not list(connection.execute(_TABLES, (schema,))):
        return None
    rows: list[tuple[Any, ...]] = list(
        connection.execute(f"SELECT version FROM {about}".encode())  # noqa: S608 - quoted
    )
    if len(rows) != 1:
        raise DamagedStore(f"{about} has {len(rows)} rows instead of one")
    return check_version(int(rows[0][0]))


def check_version(found: int) -> int:
    """The number itself, where this code knows it. Raises NewerFormat."""
    if found > newest():
        raise NewerFormat(
            f"the tables are of version {found}, and this stenolog knows up to {newest()}: "
            "upgrade it"
        )
    return found
