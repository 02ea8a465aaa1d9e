"""The SQL of a catalog, what it needs of a database, and what may go wrong there."""

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from stenolog.catalog.language import Language


# --- filters --------------------------------------------------------------------------------------
# Texts, keys and times in the form that the tables hold them.


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)


def microseconds(moment: datetime) -> int:
    """A time as the index keeps it."""
    return (moment - _EPOCH) // _MICROSECOND


def moment(microseconds: int) -> datetime:
    """A time that the index kept."""
    return _EPOCH + timedelta(microseconds=microseconds)


MOST: Final = 2**63 - 2
"""SQLite counts one further, and no more."""


def clean(text: str) -> str:
    """The same text where UTF-8 can hold it; lone surrogates become question marks."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def prefix_range(prefix: str) -> tuple[str | None, bytes | None]:
    """The keys that begin so: from the one, to just before the other."""
    if not prefix:
        return None, None
    raw = prefix.encode("utf-8", "replace")
    # No byte of UTF-8 is the highest one, so the last can always be raised.
    return raw.decode(), raw[:-1] + bytes([raw[-1] + 1])


# --- statements -----------------------------------------------------------------------------------
# The SQL of a catalog in SQLite, by name.


VERSION: Final = "6"
"""Another one wherever the tables change, or what a text is cut into.

An index of another version is thrown away.
"""

BLOCK: Final = 4_096
"""How many messages share a row that tells of their times."""

_FOLDER: Final = Path(__file__).parent


@cache
def statements() -> Mapping[str, str]:
    """Every statement of queries.sql."""
    return named((_FOLDER / "queries.sql").read_text(encoding="utf-8"))


@cache
def schema() -> tuple[str, ...]:
    """The statements that make the tables; the last one takes the version."""
    return in_order((_FOLDER / "schema.sql").read_text(encoding="utf-8"))


def named(text: str) -> Mapping[str, str]:
    """The statements of a file in which each has a name."""
    _, *sections = re.split(r"(?m)^-- name: (\w+)\n", text)
    return {
        name: part.strip().removesuffix(";")
        for name, part in zip(sections[::2], sections[1::2], strict=True)
    }


def in_order(text: str) -> tuple[str, ...]:
    """The statements of a file, one after the other."""
    parts = re.split(r"(?m);\s*$", text)
    return tuple(part.strip() for part in parts if part.strip())


# --- database -------------------------------------------------------------------------------------


Row = tuple[Any, ...]


class Broken(Exception):
    """The index is not what it should be: it is thrown away and made anew."""


class Unusable(Exception):
    """The index cannot be written or read here and now: no room, no permission, no time."""


class Busy(Unusable):
    """Others held it for as long as one waits; the next time it may be free."""


class Away(Busy):
    """The server of the database cannot be reached; nor can the store that is kept there."""


class Transaction(Protocol):
    """What can be done inside of one."""

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Iterable[Row]:
        """Carry out one statement; its rows."""
        ...

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> object:
        """Carry out one statement for each row of values."""
        ...


class Database(Protocol):
    """Where the tables of a catalog are. Each call raises Broken and Unusable."""

    sql: Mapping[str, str]
    """The statements on its tables, by name."""

    @property
    def language(self) -> "Language":
        """How it is asked for words."""
        ...

    def read(self) -> AbstractContextManager[Transaction]:
        """A look at the tables as they are at one moment."""
        ...

    def write(self) -> AbstractContextManager[Transaction]:
        """A transaction of one's own: committed at the end, undone by any error."""
        ...

    def renew(self) -> None:
        """Throw away what is broken, and make empty tables."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...
