"""Transactions on a PostgreSQL connection: named statements, and messages as rows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, Self

import psycopg
from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder
from psycopg import generators
from psycopg.pq import ExecStatus, Format

from stenolog.errors import DamagedStore, NotStored
from stenolog.records import Message, Span, State, decode_object
from stenolog.stores import spans
from stenolog.stores.postgres import schema
from stenolog.stores.postgres.postgres_errors import FailedBeforeCommit
from stenolog.stores.sql.dialect import Row, UniqueConflict
from stenolog.stores.sql.rows import parse_time

if TYPE_CHECKING:
    from stenolog.stores.postgres.connections import Connection

_STATUS_OPEN: Final = psycopg.pq.ConnStatus.OK
_STATUS_IDLE: Final = psycopg.pq.TransactionStatus.IDLE
_COMMAND_OK: Final = ExecStatus.COMMAND_OK
_TUPLES_OK: Final = ExecStatus.TUPLES_OK
_MANY_ROWS: Final = 100  # from this number of rows on, COPY is faster than one statement
_PAGE_SIZE: Final = 2_000
"""Number of messages per fetch, because a whole session may not fit in memory."""
_RETRYABLE_CONSTRAINTS: Final = (
    "token_pkey",
    "session_live",
    "session_uid",
    "lease_namespace_key_key",
)
"""Unique constraints that two concurrent writers may violate; the second writer retries."""
_validate_json = Decoder(Raw).decode
"""Function that checks that a text is JSON, without decoding the values."""


class ServerProperties(Struct, frozen=True):
    """Properties of the server at the other end of a connection."""

    has_pooler: bool
    """Whether a pooler forwards the connection: each transaction may use another server process."""
    asynchronous_commit: bool
    """Whether the server by default confirms a commit before the commit is synced."""


class PoolSlot:
    """The right to one connection of the pool, which holds only a weak reference to the slot."""

    def __init__(self) -> None:
        self.is_free = False


class Transaction:
    """Operations on a connection, inside a transaction or with one transaction per statement.

    A Transaction is kept with its connection and its cursor, because creating a cursor takes as
    long as half a round trip. A Transaction is not thread-safe.
    """

    def __init__(
        self,
        connection: "Connection",
        sql: Mapping[str, bytes],
        server: ServerProperties,
        slot: PoolSlot,
    ) -> None:
        self.connection = connection
        """The driver's connection, for driver-specific operations."""
        self.server = server
        """Properties of the server."""
        self.sql = sql
        """Statements by name."""
        self.returned_at = 0.0
        """Time at which the connection was last returned to the pool."""
        self.in_use = False
        """Whether a call uses the connection, or was interrupted (Ctrl-C) while using it."""
        self.slot = slot
        """Slot of the connection in the pool."""
        self._cursor = connection.cursor(binary=True)
        self._prepared: set[str] = set()

    def run(self, name: str, /, *values: Any) -> list[Row]:
        """Execute the statement of this name and return its rows. Raises UniqueConflict."""
        cursor = self._cursor
        try:
            cursor.execute(self.sql[name], values)
        except psycopg.errors.UniqueViolation as error:
            raise _unique_violation_error(error) from error
        rows = cursor.fetchall() if cursor.description is not None else []
        if len(rows) > _MANY_ROWS:
            # The old cursor would keep the fetched rows in memory until its next use.
            self._cursor = self.connection.cursor(binary=True)
        return rows

    def run_prepared(
        self, name: str, types: Sequence[int], values: Sequence[bytes]
    ) -> bytes | None:
        """Execute the statement of this name with encoded values and return its single value.

        This method uses no cursor, because a cursor takes as long as half a round trip.
        Raises FailedBeforeCommit if the statement could not be prepared.
        """
        if name in self._prepared:
            try:
                return self._send_prepared(name, values)
            except psycopg.errors.InvalidSqlStatementName:
                # After a rollback the driver deallocates all prepared statements.
                self._prepared.clear()
        try:
            self.connection.pgconn.send_prepare(name.encode(), self.sql[name], types)
            self._fetch_result(_COMMAND_OK)
        except psycopg.Error as error:
            raise FailedBeforeCommit(error) from error
        self._prepared.add(name)
        return self._send_prepared(name, values)

    def _send_prepared(self, name: str, values: Sequence[bytes]) -> bytes | None:
        formats = [Format.BINARY] * len(values)
        pgconn = self.connection.pgconn
        pgconn.send_query_prepared(name.encode(), values, formats, Format.BINARY)
        result = self._fetch_result(_TUPLES_OK)
        value: bytes | None = result.get_value(0, 0) if result.ntuples else None
        return value

    def _fetch_result(self, expected_status: ExecStatus) -> Any:
        # Check all results: a server that closes the connection may send a result, then the error.
        results = self.connection.wait(generators.execute(self.connection.pgconn))
        for result in results:
            if result.status != expected_status:
                raise psycopg.errors.error_from_result(result, "utf-8")
        return results[0]

    def run_many(self, name: str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute the statement of this name once for each row of values."""
        all_rows = list(rows)
        if all_rows:
            self.executemany(self.sql[name], all_rows)

    def commit(self) -> None:
        """Commit the transaction. Raises NotStored if one of its statements has failed."""
        cursor = self._cursor.execute(b"COMMIT")
        if cursor.statusmessage != "COMMIT":
            raise NotStored("an error inside the transaction was ignored: nothing was stored")

    def execute(self, sql: bytes | str, values: Sequence[Any] = ()) -> Iterable[Row]:
        """Execute one statement with its values and return its rows, if any."""
        cursor = self._cursor
        cursor.execute(_as_bytes(sql), values)
        return cursor.fetchall() if cursor.description is not None else ()

    def executemany(self, sql: bytes | str, rows: Iterable[Sequence[Any]]) -> None:
        """Execute one statement for each row of values."""
        with self.connection.cursor() as cursor:
            cursor.executemany(_as_bytes(sql), list(rows))

    @property
    def is_usable(self) -> bool:
        """Whether the next caller can use the connection, because it is open and idle."""
        pgconn = self.connection.pgconn
        is_idle = pgconn.status == _STATUS_OPEN and pgconn.transaction_status == _STATUS_IDLE
        return is_idle and not self.in_use

    @contextmanager
    def mark_in_use(self) -> Iterator[Self]:
        """Mark the connection as in use while a call uses it.

        After an interrupt the connection stays marked and is not used again, because driver and
        server may disagree about the state of the connection.
        """
        self.in_use = True
        try:
            yield self
        except Exception:
            self.in_use = False
            raise
        self.in_use = False

    @property
    def table_version(self) -> int:
        """Fingerprint of the tables, which every session row has, too."""
        return schema.fingerprint()

    def key_parameter(self, key: str) -> bytes:
        """Return the key as bytes, because a text column cannot contain a zero byte."""
        return key.encode()

    def json_parameter(self, encoded: bytes) -> str:
        """Return the JSON as str, because PostgreSQL stores JSON as text."""
        return encoded.decode()

    def check_format(self) -> None:
        """Raise NewerFormat if a newer stenolog has changed the tables."""
        [(version,)] = self.run("format")
        schema.check_fingerprint(version)

    def check_row_format(self, version: int | None) -> None:
        """Raise NewerFormat if this code does not know the version of a row."""
        if version is not None:
            schema.check_fingerprint(version)

    # --- messages ----------------------------------------------------------------------------

    def messages(self, session_id: int, seqs: Sequence[Span], state: State | None) -> list[Message]:
        """Return the intact messages with these seqs, with `hidden` set according to `state`."""
        floor, hidden = (0, []) if state is None else (state.floor, state.hidden)
        return [
            Message(
                seq,
                at,
                Raw(body.encode()),
                hidden=seq <= floor or (bool(hidden) and spans.contains(hidden, seq)),
            )
            for first, last in seqs
            for seq, at, body in self.run("messages", session_id, first, last)
            if is_intact(at, body)
        ]

    def intact_messages(
        self, session_id: int, first: int, last: int
    ) -> Iterator[tuple[int, str, bytes]]:
        """Yield seq, time and body of each intact message."""
        for first_in_page in range(first, last + 1, _PAGE_SIZE):
            last_in_page = min(first_in_page + _PAGE_SIZE - 1, last)
            for seq, at, body in self.run("messages", session_id, first_in_page, last_in_page):
                if is_intact(at, body):
                    yield seq, at, body.encode()

    def add_messages(self, session_id: int, rows: Iterable[tuple[int, str, bytes]]) -> None:
        """Store messages given as seq, time and body. Raises UniqueConflict."""
        remaining_rows = iter(rows)
        first_rows = list(islice(remaining_rows, _MANY_ROWS))
        if len(first_rows) < _MANY_ROWS:
            # This statement needs one round trip; COPY needs two.
            if first_rows:
                seqs, times, bodies = zip(*first_rows, strict=True)
                texts = [body.decode() for body in bodies]
                self.run("add_messages", session_id, list(seqs), list(times), texts)
            return
        try:
            with self.connection.cursor() as cursor, cursor.copy(self.sql["copy_in"]) as copy:
                for seq, at, body in chain(first_rows, remaining_rows):
                    copy.write_row((session_id, seq, at, body.decode()))
        except psycopg.errors.UniqueViolation as error:
            raise _unique_violation_error(error) from error

    # --- savepoints and purges ---------------------------------------------------------------

    def savepoint(self) -> AbstractContextManager[object]:
        """Roll back only the statements inside the `with` if an error is raised."""
        return self.connection.transaction()

    def erase_on_delete(self) -> AbstractContextManager[object]:
        """Do nothing: rows are deleted normally, and vacuumed afterwards."""
        return nullcontext()

    def unfinished_purges(self) -> list[str | bytes]:
        """Return an empty list: a purge is one transaction, and a missed vacuum is not recorded."""
        return []


def is_intact(at: str, body: str) -> bool:
    """Return whether a message row contains a valid time and a JSON object."""
    try:
        parse_time(at)
        try:
            _validate_json(body)
        except (DecodeError, RecursionError):
            # Only the slower decoder accepts lone surrogates.
            return isinstance(decode_object(body.encode()), dict)
    except ValueError:
        return False
    return body.lstrip().startswith("{")


def _unique_violation_error(error: psycopg.errors.UniqueViolation) -> Exception:
    """Return the error for a unique violation; UniqueConflict if a retry can help."""
    if error.diag.constraint_name in _RETRYABLE_CONSTRAINTS:
        return UniqueConflict()
    return DamagedStore(
        f"the tables are damaged or were changed ({' '.join(str(error).split())}); "
        "run `steno doctor` for details"
    )


def _as_bytes(sql: bytes | str) -> bytes:
    return sql if isinstance(sql, bytes) else sql.encode()
