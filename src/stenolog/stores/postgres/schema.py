"""Creates the tables with schema.sql, checks their fingerprint, and loads queries.sql."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stenolog.errors import DamagedStore, ForeignLog, NewerFormat, StoreUnavailable
from stenolog.stores.sql.dialect import named_statements, schema_fingerprint

if TYPE_CHECKING:
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


_TABLES_LOCK: Final = 0x7374656E6F6C6F67
"""Key of the advisory lock for creating the tables: `stenolog` in ASCII."""
# Read the system catalogs: to_regclass may miss tables created since the transaction began.
_TABLES_QUERY: Final = b"""
SELECT relname
FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
WHERE nspname = $1 AND relname IN ('about', 'session', 'message')
"""
_HAS_SCHEMA_QUERY: Final = b"SELECT 1 FROM pg_catalog.pg_namespace WHERE nspname = $1"


@cache
def _schema() -> str:
    return (_FOLDER / "schema.sql").read_text(encoding="utf-8")


@cache
def fingerprint() -> int:
    """Return the number that identifies these tables, stored in `about` and in each session row."""
    return schema_fingerprint(_schema())


def prepare_tables(connection: "Connection", settings: "Settings") -> None:
    """Create the tables if they do not exist.

    The call waits while another process creates them. Raises StoreUnavailable, NewerFormat,
    DamagedStore.
    """
    if has_tables(connection, settings.schema):
        return
    if settings.read_only:
        raise StoreUnavailable(
            f"there are no sessions of stenolog in this database yet (schema "
            f"{settings.schema!r}); check the name. The first write creates the tables"
        )
    with connection.maintenance(), connection.transaction():
        # Each statement must see the tables that the previous lock holder created.
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.execute("SELECT pg_advisory_xact_lock($1)", (_TABLES_LOCK,))
        if has_tables(connection, settings.schema):
            return
        if not list(connection.execute(_HAS_SCHEMA_QUERY, (settings.schema,))):
            connection.execute(f"CREATE SCHEMA {quote_name(settings.schema)}".encode())
        connection.execute(_schema().replace("{schema}", quote_name(settings.schema)).encode())
        about = f"{quote_name(settings.schema)}.about"
        insertion = f"INSERT INTO {about} (version) VALUES ($1)"  # noqa: S608 - quoted
        connection.execute(insertion.encode(), (fingerprint(),))


def has_tables(connection: "Connection", schema: str) -> bool:
    """Return whether the tables exist. Raises NewerFormat, ForeignLog, DamagedStore."""
    version_table = f"{quote_name(schema)}.about"
    tables = {name for (name,) in connection.execute(_TABLES_QUERY, (schema,))}
    if not tables:
        return False
    if tables != {"about", "session", "message"}:
        raise ForeignLog(
            f"the schema {schema} has tables of another program; use another schema: ?schema=NAME"
        )
    rows: list[tuple[Any, ...]] = list(
        connection.execute(f"SELECT version FROM {version_table}".encode())  # noqa: S608 - quoted
    )
    if len(rows) != 1 or not isinstance(rows[0][0], int):
        raise DamagedStore(f"{version_table} does not consist of one version number")
    check_fingerprint(rows[0][0])
    return True


def check_fingerprint(found: int) -> None:
    """Raise NewerFormat if the database has other tables than this code creates."""
    if found != fingerprint():
        raise NewerFormat(
            f"the tables were made by another version of stenolog: they are {found:08x}, but this "
            f"version has {fingerprint():08x}; use the version that made them"
        )
