"""The catalog inside a PostgreSQL store, in a separate set of tables per namespace.

Readers see a consistent snapshot, and wait only while the tables are emptied or created. A writer
locks the row of the table `about`, which excludes other writers and purges.
"""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import psycopg

from stenolog.catalog.catalog_database import (
    VERSION,
    CatalogBusy,
    CatalogDamaged,
    CatalogUnusable,
    DatabaseUnreachable,
    FullTextIndex,
    Row,
    Transaction,
    split_named_statements,
    split_statements,
)
from stenolog.errors import DamagedStore, ReadOnly, StoreBusy, StoreUnavailable
from stenolog.stores.postgres.postgres_errors import is_conflict, is_connection_lost
from stenolog.stores.postgres.schema import quote_name

if TYPE_CHECKING:
    from stenolog.stores.postgres.database import Database as StoreDatabase
    from stenolog.stores.postgres.transactions import Transaction as StoreTransaction


_FOLDER: Final = Path(__file__).with_name("postgres")
PREFIX: Final = "catalog_"  # start of the table names in the SQL files


def table_prefix(namespace: str) -> str:
    """Return the prefix of a namespace's tables, short because PostgreSQL truncates long names."""
    return f"{PREFIX}{blake2b(namespace.encode(), digest_size=8).hexdigest()}_"


@cache
def load_statements(schema: str, prefix: str = PREFIX) -> Mapping[str, str]:
    """Return the statements of queries.sql by name."""
    return split_named_statements(_read_sql("queries.sql", schema, prefix))


@cache
def load_triggers(schema: str, namespace: str) -> Mapping[str, str]:
    """Return the SQL, by name, of the triggers that empty the catalog after a purge."""
    text = _read_sql("triggers.sql", schema, table_prefix(namespace))
    return split_named_statements(text.replace("{namespace}", namespace.encode().hex()))


@cache
def load_schema(schema: str, prefix: str) -> tuple[str, ...]:
    """Return the statements that create the tables; the last one takes the version as parameter."""
    return split_statements(_read_sql("schema.sql", schema, prefix))


def _read_sql(name: str, schema: str, prefix: str) -> str:
    text = (_FOLDER / name).read_text(encoding="utf-8").replace(PREFIX, prefix)
    return text.replace("{schema}", quote_name(schema))


class SchemaDatabase:
    """The catalog of one namespace, in the schema of a PostgreSQL store."""

    def __init__(self, database: "StoreDatabase", namespace: str, *, writable: bool = True) -> None:
        self.schema = schema = database.settings.schema
        self.prefix = table_prefix(namespace)
        self._sql = load_statements(schema, self.prefix)
        self._about = f"{quote_name(schema)}.{self.prefix}about"
        # The triggers contain the schema's name, so it is a part of the version.
        self._version = f"{VERSION}/{schema}"
        self._database = database
        self._namespace = namespace
        self._writable = writable
        self._damaged = False

    @contextmanager
    def read_transaction(self) -> Iterator[Transaction]:
        """Start a read transaction, which sees a consistent snapshot of the tables."""
        with self._convert_errors(), self._database.read_transaction() as store_transaction:
            transaction = _BytesTransaction(store_transaction, self._sql)
            transaction.run("hold")
            self._check_version(transaction.run("look"))
            yield transaction

    @contextmanager
    def write_transaction(self) -> Iterator[Transaction]:
        """Start a write transaction, which does not block readers."""
        self._check_writable()
        with self._convert_errors(), self._database.write_transaction() as store_transaction:
            transaction = _BytesTransaction(store_transaction, self._sql)
            self._check_version(transaction.run("turn"))
            yield transaction

    def rebuild(self) -> None:
        """Create the tables again, unless another process has just done so."""
        self._check_writable()
        was_damaged, self._damaged = self._damaged, False
        # To avoid deadlocks, lock one table at a time: appends and purges use another order.
        for table in ("message", "session"):
            self._create_trigger(table)
        with self._locked_transaction() as transaction:
            [(has_tables,)] = transaction.run("has_tables", (self._about,))
            if was_damaged or not has_tables or transaction.run("version") != [(self._version,)]:
                self._recreate_tables(transaction, has_tables=has_tables)

    def close(self) -> None:
        """Do nothing: the database belongs to the store."""

    def _check_writable(self) -> None:
        if not self._writable:
            raise CatalogUnusable("the catalog in this database was opened read-only")

    @contextmanager
    def _locked_transaction(self) -> "Iterator[_BytesTransaction]":
        with self._convert_errors(), self._database.write_transaction() as store_transaction:
            transaction = _BytesTransaction(store_transaction, self._sql)
            transaction.run("serialize", (self._about,))
            yield transaction

    def _create_trigger(self, table: str) -> None:
        with self._locked_transaction() as transaction:
            watched_table = f"{quote_name(self.schema)}.{table}"
            if transaction.run("has_trigger", (watched_table,)) != [(1,)]:
                self._create_trigger_functions(transaction)
                transaction.execute(load_triggers(self.schema, self._namespace)[f"on_{table}"])

    def _create_trigger_functions(self, transaction: "_BytesTransaction") -> None:
        for name in ("purged", "not_for_others"):
            transaction.execute(load_triggers(self.schema, self._namespace)[name])

    def _recreate_tables(self, transaction: "_BytesTransaction", *, has_tables: bool) -> None:
        if has_tables:
            transaction.run("hold_all")
        *table_statements, about_statement = load_schema(self.schema, self.prefix)
        transaction.run("drop_tables")
        for statement in table_statements:
            transaction.execute(statement)
        self._create_trigger_functions(transaction)
        transaction.execute(about_statement, (self._version,))

    def _check_version(self, rows: Iterable[Row]) -> None:
        if [row[0] for row in rows] != [self._version]:
            raise CatalogDamaged("the catalog is missing or has another version")

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except DamagedStore as error:
            self._damaged = True
            raise CatalogDamaged(str(error)) from error
        except (ValueError, msgspec.MsgspecError) as error:
            # Only this class writes to the catalog, so data that cannot be decoded is damaged.
            self._damaged = True
            raise CatalogDamaged(f"the catalog contains invalid data: {error}") from error
        except StoreBusy as error:
            raise CatalogBusy(str(error)) from error
        except (StoreUnavailable, ReadOnly) as error:
            raise self._convert_error(error) from error

    def _convert_error(self, error: Exception) -> CatalogDamaged | CatalogUnusable:
        cause = error.__cause__ or error
        if is_connection_lost(cause):
            return DatabaseUnreachable(str(error))
        if isinstance(cause, psycopg.IntegrityError):
            # A row refers to a row that is missing.
            self._damaged = True
            return CatalogDamaged(str(error))
        return CatalogBusy(str(error)) if is_conflict(cause) else CatalogUnusable(str(error))


class _BytesTransaction:
    """A transaction that sends and receives texts as bytes."""

    fulltext: FullTextIndex = "tsquery"

    def __init__(self, store_transaction: "StoreTransaction", sql: Mapping[str, str]) -> None:
        self._transaction = store_transaction
        self._sql = sql

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> list[Row]:
        """Execute an SQL statement and return its rows."""
        rows = self._transaction.execute(sql, [_encode_value(value) for value in values])
        return [tuple(map(_decode_value, row)) for row in rows]

    def run(self, name: str, values: Sequence[Any] = (), /, *, column: str = "") -> list[Row]:
        """Execute a statement of queries.sql and return its rows."""
        return self.execute(self._sql[name].replace("{column}", column), values)

    def run_many(self, name: str, rows: Iterable[Sequence[Any]], /) -> None:
        """Execute a statement of queries.sql once per row of values."""
        encoded_rows = [[_encode_value(value) for value in row] for row in rows]
        if encoded_rows:
            self._transaction.executemany(self._sql[name], encoded_rows)


def _encode_value(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    return int(value) if isinstance(value, bool) else value


def _decode_value(value: Any) -> Any:
    """Decode a text, and drop a truncated last character. Raises UnicodeDecodeError."""
    return codecs.utf_8_decode(value)[0] if isinstance(value, bytes) else value
