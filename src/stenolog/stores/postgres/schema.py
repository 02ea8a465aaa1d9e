"""Creates and migrates the tables with the files in schema/, and loads queries.sql."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stenolog.errors import DamagedStore, ForeignLog, NewerFormat
from stenolog.stores.snapshots import EmptyStore
from stenolog.stores.sql.dialect import named_statements, numbered_scripts

if TYPE_CHECKING:
    import psycopg

    from stenolog.stores.postgres.connections import Connection, Settings

_FOLDER: Final = Path(__file__).parent


@cache
def statements(schema: str) -> dict[str, bytes]:
    """Return the statements of queries.sql by name, as bytes, because the driver sends bytes."""
    text = (_FOLDER / "queries.sql").read_text(encoding="utf-8")
    statements_by_name = named_statements(text.replace("{schema}", quote_name(schema)))
    return {name: sql_statements[0].encode() for name, sql_statements in statements_by_name.items()}


def quote_name(name: str) -> str:
    """Return a name quoted for use in a statement."""
    return '"' + name.replace('"', '""') + '"'


_MIGRATION_LOCK: Final = 0x7374656E6F6C6F67
"""Key of the advisory lock for migrations: `stenolog` in ASCII."""
# Read the system catalogs: to_regclass may miss tables created since the transaction began.
_TABLES_QUERY: Final = b"""
SELECT relname, relkind::text || coalesce(' ' || (
    SELECT typname
    FROM pg_catalog.pg_attribute JOIN pg_catalog.pg_type ON pg_type.oid = atttypid
    WHERE attrelid = pg_class.oid AND attname = 'version' AND relname = 'about'
), '')
FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = $1 AND relname IN ('about', 'session', 'message')
"""
_HAS_SCHEMA_QUERY: Final = b"SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1"


@cache
def migrations() -> tuple[str, ...]:
    """Return the migration scripts in order. The last script makes the newest version."""
    return tuple(numbered_scripts(_FOLDER / "schema").values())


def newest_version() -> int:
    """Return the newest version of the tables that this code knows."""
    return len(migrations())


def prepare_tables(connection: "Connection", settings: "Settings") -> bool:
    """Create or migrate the tables.

    Return True if the tables have an older version, which a read-only store does not migrate. The
    call waits while another process changes the tables. Raises NewerFormat, DamagedStore,
    EmptyStore.
    """
    version = table_version(connection, settings.schema)
    if version is not None and version == newest_version():
        return False
    if settings.read_only:
        if version is None:
            raise EmptyStore(
                f"there are no sessions of stenolog in this database yet (schema "
                f"{settings.schema!r}); check the name. The first write creates the tables"
            )
        return True
    with connection.maintenance(), connection.transaction():
        # Each statement must see the tables that the previous lock holder created.
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.execute("SELECT pg_advisory_xact_lock($1)", (_MIGRATION_LOCK,))
        version = table_version(connection, settings.schema)
        if version == newest_version():
            return False
        if version is None and not list(connection.execute(_HAS_SCHEMA_QUERY, (settings.schema,))):
            connection.execute(f"CREATE SCHEMA {quote_name(settings.schema)}".encode())
        if version is not None:
            # Lock the table: a session that another process creates now would not be migrated.
            connection.execute(f"LOCK TABLE {quote_name(settings.schema)}.session".encode())
        for script in migrations()[version or 0 :]:
            connection.execute(script.replace("{schema}", quote_name(settings.schema)).encode())
        set_version(connection, settings.schema, newest_version())
    return False


def set_version(connection: "psycopg.Connection[Any]", schema: str, version: int) -> None:
    """Set the version of the tables and of each session, so that an older stenolog rejects both."""
    for table, column in (("about", "version"), ("session", "format")):
        statement = f"UPDATE {quote_name(schema)}.{table} SET {column} = $1"  # noqa: S608 - quoted
        connection.execute(statement.encode(), (version,))


def table_version(connection: "Connection", schema: str) -> int | None:
    """Return the version of the tables; None if the tables do not exist.

    Raises NewerFormat, ForeignLog, DamagedStore.
    """
    version_table = f"{quote_name(schema)}.about"
    kinds: dict[str, str] = dict(list(connection.execute(_TABLES_QUERY, (schema,))))
    if not kinds:
        return None
    if kinds.get("about") != "r int8" or kinds.keys() != {"about", "session", "message"}:
        raise ForeignLog(
            f"the schema {schema} has tables of another program; use another schema: ?schema=NAME"
        )
    rows: list[tuple[Any, ...]] = list(
        connection.execute(f"SELECT version FROM {version_table}".encode())  # noqa: S608 - quoted
    )
    if len(rows) != 1:
        raise DamagedStore(f"{version_table} has {len(rows)} rows instead of one")
    return check_version(int(rows[0][0]))


def check_version(version: int) -> int:
    """Return `version` if this code knows this version of the tables. Raises NewerFormat."""
    if version > newest_version():
        raise NewerFormat(
            f"the tables have version {version}, but this stenolog supports up to "
            f"{newest_version()}: upgrade stenolog"
        )
    return version
