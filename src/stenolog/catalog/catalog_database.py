"""SQL statements of a catalog, the interface of its database, and its errors."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from stenolog.catalog.query import FullTextDialect


# --- filters --------------------------------------------------------------------------------------
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
"""Largest integer in a query: one less than SQLite's maximum, because one may be added."""


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot represent, by question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def prefix_range(prefix: str) -> tuple[str | None, bytes | None]:
    """Return the range of keys with a prefix: the first key, and the end, which is excluded."""
    if not prefix:
        return None, None
    raw = prefix.encode("utf-8", "replace")
    # 0xff does not occur in UTF-8, so the last byte can always be incremented.
    return raw.decode(), raw[:-1] + bytes([raw[-1] + 1])


# --- statements -----------------------------------------------------------------------------------
# These functions load the SQL statements of a catalog in SQLite.


# A catalog of another version is discarded and built again.
VERSION: Final = "10"
"""Version of tables, tokens, stems, searchable text and sums, increased with each change."""

BLOCK_SIZE: Final = 4_096
"""Number of messages per block. The table catalog_block has each block's oldest and newest time."""

_FOLDER: Final = Path(__file__).parent
_SQL_COMMENT: Final = re.compile(r"(?m)^--.*\n")
_SHARED_PART_NAMES: Final = {"session_filter", "entry_columns"}


@cache
def load_statements() -> Mapping[str, str]:
    """Return the statements of queries.sql by name."""
    return split_named_statements((_FOLDER / "queries.sql").read_text(encoding="utf-8"))


@cache
def load_schema() -> tuple[str, ...]:
    """Return the statements that create the tables; the last one needs the version as value."""
    return split_statements((_FOLDER / "schema.sql").read_text(encoding="utf-8"))


def split_named_statements(text: str) -> Mapping[str, str]:
    """Split a file into its named statements, and insert the parts that statements share."""
    _, *sections = re.split(r"(?m)^-- name: (\w+)\n", text)
    named = {
        name: _SQL_COMMENT.sub("", part).strip().removesuffix(";")
        for name, part in zip(sections[::2], sections[1::2], strict=True)
    }
    for shared in _SHARED_PART_NAMES & named.keys():
        named = {name: sql.replace(f"{{{shared}}}", named[shared]) for name, sql in named.items()}
    return named


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
    """The database server is unreachable, and so is the store in it."""


class Transaction(Protocol):
    """An open transaction."""

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Iterable[Row]:
        """Execute a statement and return its rows."""

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> object:
        """Execute a statement once per row of values."""


class Database(Protocol):
    """The database of a catalog. Every call may raise CatalogDamaged and CatalogUnusable."""

    sql: Mapping[str, str]
    """The SQL statements for the tables, by name."""

    @property
    def fulltext(self) -> "FullTextDialect":
        """The full-text dialect of the database, which makes the queries of the full-text index."""

    def read_transaction(self) -> AbstractContextManager[Transaction]:
        """Start a read transaction, which sees a consistent state of the tables."""

    def write_transaction(self) -> AbstractContextManager[Transaction]:
        """Start a write transaction: committed at the end, rolled back on any error."""

    def rebuild(self) -> None:
        """Discard the tables if they are damaged, and create empty tables."""

    def close(self) -> None:
        """Close the connections."""
