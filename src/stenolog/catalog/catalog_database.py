"""SQL statements of a catalog, the interface of its database, and its errors."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, Protocol

# --- values ---------------------------------------------------------------------------------------
# These functions convert texts, keys and times to the values in the tables.


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def to_microseconds(moment: datetime) -> int:
    """Convert a time to microseconds since 1970."""
    return (moment - _EPOCH) // _MICROSECOND


def from_microseconds(microseconds: int) -> datetime:
    """Convert microseconds since 1970 to a time."""
    return _EPOCH + timedelta(microseconds=microseconds)


MAX_INTEGER: Final = 2**63 - 2
"""Largest integer in a query: SQLite's maximum minus 1, because a page is read with limit + 1."""


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot represent, by question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def prefix_range(prefix: str) -> tuple[str | None, bytes | None]:
    """Return the range of keys with a prefix: the inclusive start and the exclusive end."""
    if not prefix:
        return None, None
    prefix_bytes = prefix.encode("utf-8", "replace")
    # 0xff does not occur in UTF-8, so the last byte can always be incremented.
    return prefix_bytes.decode(), prefix_bytes[:-1] + bytes([prefix_bytes[-1] + 1])


# --- statements -----------------------------------------------------------------------------------
# These functions load the SQL statements of a catalog in SQLite.


# A catalog with a different version is discarded and built again.
VERSION: Final = "11"
"""Version of the catalog. Increase it if tables, triggers, tokens, stems, texts or sums change."""

BLOCK_SIZE: Final = 4_096
"""Number of messages per block. The table catalog_block has each block's oldest and newest time."""

_FOLDER: Final = Path(__file__).parent
_SQL_COMMENT: Final = re.compile(r"(?m)^--.*\n")
_SHARED_FRAGMENTS: Final = {"session_filter", "entry_columns"}


@cache
def load_statements() -> Mapping[str, str]:
    """Return the statements of queries.sql by name."""
    return split_named_statements((_FOLDER / "queries.sql").read_text(encoding="utf-8"))


@cache
def load_schema() -> tuple[str, ...]:
    """Return the statements that create the tables; the last one takes the version as parameter."""
    return split_statements((_FOLDER / "schema.sql").read_text(encoding="utf-8"))


def split_named_statements(text: str) -> Mapping[str, str]:
    """Split a file into its named statements, and insert the fragments that statements share."""
    _, *sections = re.split(r"(?m)^-- name: (\w+)\n", text)
    sql_by_name = {
        name: _SQL_COMMENT.sub("", sql).strip().removesuffix(";")
        for name, sql in zip(sections[::2], sections[1::2], strict=True)
    }
    for fragment_name in _SHARED_FRAGMENTS & sql_by_name.keys():
        fragment = sql_by_name[fragment_name]
        sql_by_name = {
            name: sql.replace(f"{{{fragment_name}}}", fragment) for name, sql in sql_by_name.items()
        }
    return sql_by_name


def split_statements(text: str) -> tuple[str, ...]:
    """Split a file into its statements, in order."""
    parts = re.split(r"(?m);\s*$", text)
    return tuple(part.strip() for part in parts if part.strip())


# --- database -------------------------------------------------------------------------------------


Row = tuple[Any, ...]


class CatalogDamaged(Exception):
    """The catalog is damaged or outdated, so it is discarded and built again."""


class CatalogUnusable(Exception):
    """The catalog cannot be read or written now: disk full, no permission, or a time-out."""


class CatalogBusy(CatalogUnusable):
    """Other threads or processes held the lock for too long. A retry may work."""


class DatabaseUnreachable(CatalogBusy):
    """The database server is unreachable, so the store on it is unreachable, too."""


FullTextIndex = Literal["fts5", "tsquery"]
"""Kind of full-text index. `query.DIALECTS` has a dialect for each kind."""


class Transaction(Protocol):
    """An open transaction."""

    fulltext: FullTextIndex

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Iterable[Row]:
        """Execute an SQL statement and return its rows."""

    def run(self, name: str, values: Sequence[Any] = (), /, *, column: str = "") -> Iterable[Row]:
        """Execute a statement of queries.sql and return its rows. `column` replaces `{column}`."""

    def run_many(self, name: str, rows: Iterable[Sequence[Any]], /) -> object:
        """Execute a statement of queries.sql once per row of values."""


class Database(Protocol):
    """The database of a catalog. Every call may raise CatalogDamaged and CatalogUnusable."""

    def read_transaction(self) -> AbstractContextManager[Transaction]:
        """Start a read transaction, which sees a consistent snapshot of the tables."""

    def write_transaction(self) -> AbstractContextManager[Transaction]:
        """Start a write transaction: committed at the end, rolled back on any error."""

    def rebuild(self) -> None:
        """Replace missing, outdated or damaged tables by empty tables."""

    def close(self) -> None:
        """Close the connections."""
