"""The interface between SQLStore and a database.

Each engine has a file `queries.sql`. Both files define statements with the same names, parameters
and result columns. The protocols in this module declare the operations that need more than one
named statement. `named_statements` reads the statements of an engine.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeVar
from zlib import crc32

from stenolog.errors import DamagedStore, NotStored, StenologError, StoreUnavailable
from stenolog.records import Message, Span, State
from stenolog.stores.admin import Finding
from stenolog.stores.log_reports import DamageReports

Row = tuple[Any, ...]
T = TypeVar("T")

RETRY_ADVICE: Final = "Whether it was stored is unknown: retry with the same idempotency key"


def to_not_stored(error: StenologError) -> StenologError:
    """Convert StoreUnavailable, but none of its subclasses, to NotStored.

    Any other error is returned unchanged. Only for errors raised before the commit.
    """
    if type(error) is StoreUnavailable:
        return NotStored(f"{error}. Nothing of it was stored")
    return error


class UniqueConflict(Exception):
    """Another writer stored the same unique value concurrently."""


class Transaction(Protocol):
    """Statements on one connection. A write transaction commits its statements together."""

    @property
    def table_version(self) -> int:
        """Newest version of the tables that this code knows; 0 if rows contain no version."""

    def run(self, name: str, /, *values: Any) -> list[Row]:
        """Execute the statement of this name and return its rows. Raises UniqueConflict.

        A text column may be str or bytes: `decode_text` in session_rows.py accepts both.
        """

    def run_many(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute the statement of this name once for each row of values."""

    def key_parameter(self, key: str) -> Any:
        """Convert a session key to a parameter of a statement."""

    def json_parameter(self, encoded: bytes) -> Any:
        """Convert encoded JSON to a parameter of a statement."""

    def check_format(self) -> None:
        """Raise NewerFormat if a newer stenolog has changed the tables."""

    def check_row_format(self, version: int | None) -> None:
        """Raise NewerFormat if this code does not know the version of a row."""

    def messages(self, session_id: int, seqs: Sequence[Span], state: State | None) -> list[Message]:
        """Return the intact messages with these seqs, in order.

        `state`: set `hidden` on the messages that this state hides. Without `state`, no message
        is marked as hidden.
        """

    def intact_messages(
        self, session_id: int, first: int, last: int
    ) -> Iterator[tuple[int, str, bytes]]:
        """Yield seq, time and body of each intact message, without loading all into memory."""

    def add_messages(self, session_id: int, rows: Iterable[tuple[int, str, bytes]]) -> None:
        """Store messages given as seq, time and body."""

    def savepoint(self) -> AbstractContextManager[object]:
        """Return a context manager that, after an error, rolls back only the statements inside."""

    def erase_on_delete(self) -> AbstractContextManager[object]:
        """Return a context manager for the statements that delete rows in a purge.

        `SQLStore._erase_bytes` erases the bytes that these statements leave behind.
        """

    def unfinished_purges(self) -> list[str | bytes]:
        """Return the start times of purges whose bytes are not yet erased."""


class Settings(Protocol):
    """Options that the databases of both engines have."""

    @property
    def read_only(self) -> bool:
        """Whether the database was opened read-only."""

    @property
    def busy_timeout(self) -> float:
        """Maximum time that a call waits for other writers, in seconds."""


class Database(Protocol):
    """The database of a store. Every method raises the errors of `Store`, never driver errors."""

    @property
    def damage(self) -> DamageReports:
        """Damage that this process has found in the database."""

    @property
    def settings(self) -> Settings:
        """Options with which the database was opened."""

    @property
    def address(self) -> str:
        """Path of the file, or address of the server without the password."""

    def find_damage(self, transaction: Any) -> Iterable[Finding]:
        """Return the damage that `steno doctor` finds outside the sessions."""

    def check_writable(self) -> None:
        """Raise StoreClosed or ReadOnly if nothing can be written."""

    def run_read(self, work: Callable[[Transaction], T]) -> T:
        """Run `work`, which only reads. After a lost connection, `work` runs again.

        Two reads in `work` may see different data.
        """

    def read_transaction(self) -> AbstractContextManager[Transaction]:
        """Open a transaction that reads a consistent snapshot of the database."""

    def run_write(self, work: Callable[[Transaction], T]) -> T:
        """Run `work` in a write transaction.

        After a conflict or a lost connection, `work` may run again.
        """

    def write_transaction(self) -> AbstractContextManager[Transaction]:
        """Open a write transaction; any error rolls it back."""


# --- SQL files -------------------------------------------------------------------------------

_NAME_COMMENT_PATTERN: Final = re.compile(r"^-- name: (\w+(?:, \w+)*)\n", re.MULTILINE)


def named_statements(text: str) -> dict[str, list[str]]:
    """Return the statements of a file `queries.sql` by name. Several names may share statements.

    Comments must not contain a semicolon, because the text is split at semicolons.
    """
    _, *sections = _NAME_COMMENT_PATTERN.split(text)
    return {
        name: [statement.strip() for statement in statements.split(";")[:-1]]
        for names, statements in zip(sections[::2], sections[1::2], strict=True)
        for name in names.split(", ")
    }


def damaged_repeat_error(key: str, once: str, seq: int) -> DamagedStore:
    """Return the error for a known idempotency key whose stored message cannot be compared."""
    return DamagedStore(
        f"{key!r}: message {seq}, stored with the idempotency key {once!r}, is damaged, so it is "
        "unknown whether this is the same message; see `steno doctor`, or use a new idempotency key"
    )


def schema_fingerprint(script: str) -> int:
    """Return a positive number that identifies these tables; comments and white space are ignored.

    The first release will have a number of its own for each schema. Until then, a database of
    another development version must not be mistaken for a current one.
    """
    statements = "".join(line.partition("--")[0] for line in script.splitlines())
    return crc32("".join(statements.split()).encode()) & 0x7FFF_FFFF
