"""PostgresStore: sessions as rows of a database that many machines share.

The driver, psycopg, is imported when a store is opened, so `import stenolog` works without psycopg.
"""

import re
from typing import TYPE_CHECKING, Any, Final

from stenolog.errors import UsageError, install_command
from stenolog.stores.arguments import check_namespace, check_optional_int
from stenolog.stores.postgres.dialect import PostgresDialect
from stenolog.stores.sql.store import SQLStore

if TYPE_CHECKING:
    from stenolog.stores.postgres.database import Database

BUSY_TIMEOUT_SECONDS: Final = 5.0
MAX_CONNECTIONS: Final = 16
ANSWER_TIMEOUT_SECONDS: Final = 30.0
SCHEMA: Final = "stenolog"
_SCHEMA_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


class PostgresStore(SQLStore):
    """Sessions in a PostgreSQL database. stores/base.py documents each call.

    `url`: a URL of libpq, `postgresql://user@host1,host2/database?sslmode=require`. `schema`:
    schema of the tables; missing tables are created. `busy_timeout`: maximum wait for other
    writers, and for the return of an unreachable server, in seconds. `connections`: maximum number
    of open connections. `answer_timeout`: seconds that the server may take, beyond `busy_timeout`,
    to answer one statement. After that time the connection is closed, and the call raises
    StoreUnavailable, NotStored or MaybeStored. `read_only`: change no data; a standby server is
    enough.

    Purged rows are deleted and vacuumed. For some time, the server's log, unused parts of its
    files, standbys and backups may still contain purged rows.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "sessions",
        read_only: bool = False,
        busy_timeout: float = BUSY_TIMEOUT_SECONDS,
        schema: str = SCHEMA,
        connections: int = MAX_CONNECTIONS,
        answer_timeout: float = ANSWER_TIMEOUT_SECONDS,
    ) -> None:
        check_namespace(namespace)
        check_optional_int(connections=connections)
        if connections < 1:
            raise UsageError(f"connections must be 1 or more, not {connections}")
        if not answer_timeout > 0:
            raise UsageError(f"answer_timeout must be more than 0 seconds, not {answer_timeout}")
        if not _SCHEMA_NAME.fullmatch(schema):
            raise UsageError(f"schema must be up to 63 letters, digits and _, not {schema!r}")
        self.database: Database = _open_database(
            conninfo=url,
            schema=schema,
            read_only=read_only,
            busy_timeout=busy_timeout,
            connections=connections,
            answer_timeout=answer_timeout,
        )
        """The open database, for code that keeps its own tables in the database."""
        super().__init__(namespace, PostgresDialect(self.database))

    def __repr__(self) -> str:
        return f"PostgresStore({self.database.address!r}, namespace={self._namespace!r})"

    def is_same_place(self, other: "PostgresStore") -> bool:
        """Return whether another store keeps its sessions in the same tables.

        The check acquires a lock through one store and looks for the lock through the other store.
        Locks belong to a running server, so a server with a restored backup is another place.
        """
        if self.database.settings.schema != other.database.settings.schema:
            return False
        return self.database.is_same_database(other.database)


def _open_database(**settings: Any) -> "Database":
    """Open the database with these settings. Raises UsageError if the driver is not installed."""
    try:
        from stenolog.stores.postgres import database
        from stenolog.stores.postgres.connections import Settings
    except ImportError as error:
        if not (error.name or "").startswith("psycopg"):
            raise
        raise UsageError(
            f"a PostgreSQL store needs the package psycopg: {install_command('postgres')}"
        ) from error
    return database.open_database(Settings(**settings))
