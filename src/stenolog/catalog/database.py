"""What a catalog needs of the database that it lives in, and what may go wrong there."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    # Who only lists does not wait for it.
    from stenolog.catalog.language import Language

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
