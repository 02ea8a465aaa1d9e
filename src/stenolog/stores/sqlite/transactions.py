"""Transactions on a SQLite connection: named statements, and messages with checksums.

SQLite checks the structure of its pages, not their content: a byte that changed on the disk would
be returned as if it had been stored. Therefore each message has a crc.

A name in queries.sql may have several statements, which `Transaction.run` executes in order. Two
names may share statements: SQLite needs no row locks, so `lock_session` is `find_session`.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from msgspec import Raw

from stenolog.records import Message, Span, State
from stenolog.stores import spans
from stenolog.stores.sql.dialect import Row, named_statements
from stenolog.stores.sql.rows import now, parse_iso, parse_time

if TYPE_CHECKING:
    import apsw

_PARAMETER_PATTERN: Final = re.compile(r"\?(\d+)")


_STATEMENTS: Final = named_statements(
    Path(__file__).with_name("queries.sql").read_text(encoding="utf-8")
)
SQL: Final = {name: statements[0] for name, statements in _STATEMENTS.items()}
"""First SQL statement of each name in queries.sql."""
FURTHER_SQL: Final = {name: sql[1:] for name, sql in _STATEMENTS.items() if sql[1:]}
"""Statements after the first, for each name in queries.sql that has several statements."""
PARAMETER_COUNTS: Final = {
    statement: max(map(int, _PARAMETER_PATTERN.findall(statement)), default=0)
    for statements in _STATEMENTS.values()
    for statement in statements
}
"""Number of parameters of each SQL statement."""


# This is `crc32` itself: each read checks every message, and a wrapper would double the time.
# The checksum does not cover the time of the message.
checksum = crc32
"""Function whose result `checksum(body, seq)` is stored with each message."""

_MESSAGES, _RAW_MESSAGES, _ADD_MESSAGE = SQL["messages"], SQL["raw_messages"], SQL["add_message"]


class Transaction:
    """An open transaction."""

    __slots__ = ("_connection", "execute")

    table_version = 0
    """Always 0, because rows contain no version. Each transaction checks the file's version."""

    def __init__(self, connection: "apsw.Connection") -> None:
        self._connection = connection
        # This is the driver's method itself: a wrapper would make each append noticeably slower.
        self.execute: Callable[..., Iterable[Row]] = connection.execute
        """Function that executes one statement with its values, and returns its rows."""

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute one statement for each row of values."""
        for _ in self._connection.executemany(sql, rows):
            pass

    def run(self, name: str, /, *values: Any) -> list[Row]:
        """Execute the statements of this name and return the rows of the first statement."""
        sql = SQL[name]
        rows = list(self.execute(sql, values[: PARAMETER_COUNTS[sql]]))
        if name in FURTHER_SQL:
            for statement in FURTHER_SQL[name]:
                list(self.execute(statement, values[: PARAMETER_COUNTS[statement]]))
        return rows

    def run_many(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute the statement of this name once for each row of values."""
        self.executemany(SQL[name], rows)

    def key_parameter(self, key: str) -> str:
        """Return the key unchanged, because SQLite stores keys as text."""
        return key

    def json_parameter(self, encoded: bytes) -> bytes:
        """Return the JSON unchanged, because SQLite stores JSON as a blob."""
        return encoded

    def check_format(self) -> None:
        """Do nothing: the version was checked at the start of the transaction."""

    def check_row_format(self, version: int | None) -> None:
        """Do nothing: the version was checked at the start of the transaction."""

    # --- messages ----------------------------------------------------------------------------

    def messages(self, session_id: int, seqs: Sequence[Span], state: State | None) -> list[Message]:
        """Return the intact messages with these seqs, with `hidden` set according to `state`."""
        make = _make_messages if state is None else partial(_make_messages_with_hidden, state=state)
        try:
            return make(self._read_message_rows(_MESSAGES, session_id, seqs))
        except (ValueError, TypeError):
            # A row is damaged: read the columns as bytes, and skip damaged rows.
            return make(readable_rows(self._read_message_rows(_RAW_MESSAGES, session_id, seqs)))

    def _read_message_rows(self, sql: str, session_id: int, seqs: Sequence[Span]) -> Iterable[Row]:
        return chain.from_iterable(
            self.execute(sql, (session_id, first, last)) for first, last in seqs
        )

    def intact_messages(
        self, session_id: int, first: int, last: int
    ) -> Iterator[tuple[int, str, bytes]]:
        """Yield seq, time and body of each intact message."""
        for seq, at, body, crc in readable_rows(
            self.execute(_RAW_MESSAGES, (session_id, first, last))
        ):
            if crc == checksum(body, seq):
                yield seq, at, body

    def add_messages(self, session_id: int, rows: Iterable[tuple[int, str, bytes]]) -> None:
        """Store messages given as seq, time and body."""
        self.executemany(
            _ADD_MESSAGE,
            ((session_id, seq, at, body, checksum(body, seq)) for seq, at, body in rows),
        )

    # --- savepoints and purges ---------------------------------------------------------------

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Roll back only the statements inside the `with` if an error is raised."""
        self.execute("SAVEPOINT snapshot")
        try:
            yield
        except BaseException:
            # After some errors SQLite has rolled back the whole transaction and its savepoint.
            if self._connection.in_transaction:
                self.execute("ROLLBACK TO snapshot")
                self.execute("RELEASE snapshot")
            raise
        self.execute("RELEASE snapshot")

    @contextmanager
    def erase_on_delete(self) -> Iterator[None]:
        """Overwrite deleted rows with zeros, and record that the file must be rewritten.

        Until the rewrite, the deleted bytes stay in free pages, in unused parts of other pages, and
        in the write-ahead log.
        """
        list(self.execute("PRAGMA secure_delete = ON"))
        try:
            yield
            self.run("begin_purge", now())
        finally:
            list(self.execute("PRAGMA secure_delete = OFF"))

    def unfinished_purges(self) -> list[str | bytes]:
        """Return the start times of purges after which the file was not yet rewritten."""
        return [started for (started,) in self.run("purge_begun")]


def readable_rows(rows: Iterable[Row]) -> Iterator[tuple[int, str, bytes, int | None]]:
    """Yield the message rows with the right types and a valid time. Times in `rows` are bytes."""
    for seq, at, body, crc in rows:
        if isinstance(seq, int) and isinstance(body, bytes) and isinstance(crc, int):
            with suppress(ValueError, AttributeError):
                parse_time(at)
                yield seq, at.decode(), body, crc


def _make_messages(rows: Iterable[Row]) -> list[Message]:
    return [  # guard: sqlite-row-crc
        Message(seq, at, Raw(body))
        for seq, at, body, crc in rows
        if crc == checksum(body, seq) and parse_iso(at).tzinfo is not None
    ]


def _make_messages_with_hidden(rows: Iterable[Row], state: State) -> list[Message]:
    floor, hidden = state.floor, state.hidden
    return [
        Message(
            seq,
            at,
            Raw(body),
            hidden=seq <= floor or (bool(hidden) and spans.contains(hidden, seq)),
        )
        for seq, at, body, crc in rows
        if crc == checksum(body, seq) and parse_iso(at).tzinfo is not None
    ]
