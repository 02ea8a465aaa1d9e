"""PostgresStore: sessions as rows of a database that many machines share.

The driver, psycopg, is imported when a store is opened, so `import stenolog` works without psycopg.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

from stenolog.errors import (
    DamagedStore,
    LeaseLost,
    OnceConflict,
    StenologError,
    StoreClosed,
    UsageError,
    install_command,
)
from stenolog.records import Health
from stenolog.stores.arguments import (
    Batch,
    check_namespace,
    check_optional_int,
    token_bytes,
)
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.sql import dialect as sql
from stenolog.stores.sql.dialect import Row, UniqueConflict, damaged_repeat_error
from stenolog.stores.sql.leases import holder_name
from stenolog.stores.sql.rows import now
from stenolog.stores.sql.session_rows import MissingRows, create_session
from stenolog.stores.sql.store import SQLStore
from stenolog.stores.state import blank_state

if TYPE_CHECKING:
    from stenolog.stores.postgres.transactions import Transaction

BUSY_TIMEOUT_SECONDS: Final = 5.0
MAX_CONNECTIONS: Final = 16
ANSWER_TIMEOUT_SECONDS: Final = 30.0
DEFAULT_SCHEMA: Final = "stenolog"
_SCHEMA_NAME_PATTERN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
FOLLOW_POLL_SECONDS: Final = 0.25
"""Interval at which a follower polls for commits of other processes, in seconds."""
_MAX_LEASE_SECONDS: Final = 100 * 365 * 86_400.0
"""Maximum duration of a lease, in seconds: the server's timestamps have a limit."""
_MAX_ATTEMPTS: Final = 4
"""Maximum number of attempts to create a session and append to it."""
_TEXT_OID, _BYTEA_OID, _INT8_OID = 25, 17, 20
_APPEND_ONE_TYPES: Final = (_TEXT_OID, _BYTEA_OID, _TEXT_OID, _TEXT_OID, _INT8_OID, _INT8_OID)
"""PostgreSQL type OIDs of the parameters of the statement `append_one`."""

T = TypeVar("T")


class PostgresStore(SQLStore):
    """Sessions in a PostgreSQL database. stores/base.py documents each call.

    `url`: a URL of libpq, `postgresql://user@host1,host2/database?sslmode=require`. `schema`:
    schema of the tables; missing tables are created. `busy_timeout`: maximum wait for other
    writers, and for the return of an unreachable server, in seconds. `connections`: maximum number
    of open connections. `answer_timeout`: seconds that the server may take, beyond `busy_timeout`,
    to answer one statement. If the server takes longer, the connection is closed, and the call
    raises StoreUnavailable, NotStored or MaybeStored. `read_only`: change no data; a standby server
    is enough.

    Purged rows are deleted and vacuumed. For some time, the server's write-ahead log, unused parts
    of its files, standbys and backups may still contain purged rows.
    """

    _lease_poll_seconds = 0.05

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "sessions",
        read_only: bool = False,
        busy_timeout: float = BUSY_TIMEOUT_SECONDS,
        schema: str = DEFAULT_SCHEMA,
        connections: int = MAX_CONNECTIONS,
        answer_timeout: float = ANSWER_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(namespace)
        check_namespace(namespace)
        check_optional_int(connections=connections)
        if connections < 1:
            raise UsageError(f"connections must be 1 or more, not {connections}")
        if not answer_timeout > 0:
            raise UsageError(f"answer_timeout must be more than 0 seconds, not {answer_timeout}")
        if not _SCHEMA_NAME_PATTERN.fullmatch(schema):
            raise UsageError(f"schema must be up to 63 letters, digits and _, not {schema!r}")
        try:
            from stenolog.stores.postgres.connections import Settings
            from stenolog.stores.postgres.database import Database, open_database
        except ImportError as error:
            if not (error.name or "").startswith("psycopg"):
                raise
            raise UsageError(
                f"a PostgreSQL store needs the package psycopg: {install_command('postgres')}"
            ) from error
        settings = Settings(
            conninfo=url,
            schema=schema,
            read_only=read_only,
            busy_timeout=busy_timeout,
            connections=connections,
            answer_timeout=answer_timeout,
        )
        self.database: Database = open_database(settings)
        """The open database, for code that keeps its own tables in the database."""

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

    def _run_message_read(self, work: Callable[[sql.Transaction, DamageReports | None], T]) -> T:
        """Run `work`, which reads a session and its messages, on a consistent snapshot.

        Messages never change, so two statements without a transaction are enough. If messages were
        purged between the two statements, `work` runs again in one transaction.
        """
        try:
            return self._run_read(lambda transaction, _: work(transaction, None))
        except MissingRows:
            return super()._run_message_read(work)

    # --- appends -----------------------------------------------------------------------------

    def _append_one(self, key: str, payload: bytes) -> int:
        self._check_open()
        namespace = self._namespace
        try:
            seq = self.database.run_statement(  # guard: postgres-no-blind-retry
                lambda transaction: _append_one(transaction, namespace, key, payload), safe=False
            )
        except _SessionMissing:
            return self._append_batch(key, Batch((payload,)), is_new=True)
        self._notify(key)
        return seq

    def _append_batch(self, key: str, batch: Batch, *, is_new: bool = False) -> int:
        """Append a batch, in one round trip if the session exists, and return its first seq.

        `is_new`: create the session first. Raises OnceConflict, LeaseLost.
        """
        self._check_open()
        epoch = 0
        if self._lease is not None:
            self._lease.check_ownership()
            epoch = self._lease.epoch

        while True:
            append_batch = _append_new if is_new else _append
            run_work = self.database.run_write if is_new else self.database.run_statement
            work = partial(
                append_batch, namespace=self._namespace, key=key, batch=batch, epoch=epoch
            )
            try:
                first_seq = run_work(work, safe=batch.once is not None)
            except _SessionMissing:
                is_new = True
            except UniqueConflict:
                # guard: postgres-token-race
                continue  # another writer has just stored the same idempotency key
            else:
                self._notify(key)
                return first_seq

    # --- notification ------------------------------------------------------------------------

    def _notify(self, key: str) -> None:
        for namespace, followed_key, signal in list(self.database.followers):
            if (namespace, followed_key) == (self._namespace, key) and signal.empty():
                signal.put(None)

    @contextmanager
    def _listen_for_changes(self, key: str) -> Iterator[tuple[Callable[[float], object], float]]:
        """Listen for changes by this process."""
        followers, signal = self.database.followers, SimpleQueue[None]()

        def wait(seconds: float) -> None:
            with suppress(Empty):
                signal.get(timeout=seconds)

        follower = (self._namespace, key, signal)
        followers.append(follower)
        try:
            yield wait, FOLLOW_POLL_SECONDS
        finally:
            followers.remove(follower)

    # --- leases ------------------------------------------------------------------------------

    def _is_lease_held(self, row: Row) -> bool:
        return bool(row[0])

    def _acquire_lease(self, key: str, *, ttl: float) -> int:
        """Acquire the lease and return its epoch; 0 if the lease is held.

        The server's clock measures the ttl.
        """
        # The random name identifies this call: after a lost response, a retry gets the same lease.
        random_name, seconds = os.urandom(8).hex(), min(float(ttl), _MAX_LEASE_SECONDS)
        values = self._namespace, key.encode(), holder_name(), random_name, seconds
        for (epoch,) in self.database.run_statement(
            lambda transaction: transaction.run("take_lease", *values), safe=True
        ):
            try:
                self._leases.add_lease(epoch)
            except StoreClosed:
                self._release_leases([epoch])
                raise
            return int(epoch)
        return 0

    def _renew_lease(self, key: str, epoch: int, *, ttl: float) -> None:
        self._check_open()
        seconds = min(float(ttl), _MAX_LEASE_SECONDS)
        if not self.database.run_statement(
            lambda transaction: transaction.run("renew_lease", epoch, seconds), safe=True
        ):
            raise LeaseLost(key, epoch)

    def _release_leases(self, epochs: Sequence[int]) -> None:
        self.database.run_statement(
            lambda transaction: transaction.run("end_leases", list(epochs)), safe=True
        )

    # --- purge, health, close ----------------------------------------------------------------

    def _erase_bytes(self) -> tuple[str, ...]:
        try:
            notices = self.database.vacuum()
        except StenologError as error:
            notices = [str(error)]
        remaining_text = "the pages of the tables still contain it until their owner vacuums them"
        return (f"{remaining_text}: {notices[0]}",) if notices else ()

    def _health(self) -> Health:
        """Return whether writes are expected to work."""
        self._check_open()
        errors, warnings = self.database.problems()
        return Health(ok=not errors, free_bytes=None, problems=(*errors, *warnings))

    def _close_database(self) -> None:
        self.database.release()


class _SessionMissing(Exception):
    """The session does not exist, or its row has another version than this code writes."""


def _append_one(transaction: "Transaction", namespace: str, key: str, payload: bytes) -> int:
    """Append one message on the fast path and return its seq. Raises _SessionMissing."""
    key_bytes, at, size, version = (key.encode(), now(), len(payload), transaction.table_version)
    if transaction.server.has_pooler:
        for (seq,) in transaction.run(
            "append_one", namespace, key_bytes, at, payload.decode(), size, version
        ):
            return int(seq)
        raise _SessionMissing
    seq_bytes = transaction.run_prepared(
        "append_one",
        _APPEND_ONE_TYPES,
        (namespace.encode(), key_bytes, at.encode(), payload, _to_int8(size), _to_int8(version)),
    )
    if seq_bytes is None:
        raise _SessionMissing
    return int.from_bytes(seq_bytes, "big")


def _to_int8(number: int) -> bytes:
    return number.to_bytes(8, "big")


def _append(transaction: "Transaction", namespace: str, key: str, batch: Batch, epoch: int) -> int:
    """Append a batch, fenced by the lease of this epoch (0: no lease); return its first seq.

    Raises OnceConflict, LeaseLost, _SessionMissing. After an error nothing was written.
    """
    stored_at, payloads, once = now(), batch.payloads, batch.once
    [(first_seq, session_id, stored_seq, count, is_lease_held)] = transaction.run(
        "append",
        namespace,
        key.encode(),
        stored_at,
        [payload.decode() for payload in payloads],
        list(batch.times or [stored_at] * len(payloads)),
        sum(map(len, payloads)),
        transaction.table_version,
        None if once is None else token_bytes(once),
        epoch or None,
    )
    if stored_seq is not None:
        assert once is not None, "only a batch with an idempotency key can be stored already"
        bodies = transaction.run("bodies", session_id, stored_seq, stored_seq + count - 1)
        if [body.encode() for (body,) in bodies] != list(payloads):
            last_seq = stored_seq + count - 1
            intact = transaction.intact_messages(session_id, stored_seq, last_seq)
            stored = {seq: body for seq, _, body in intact}
            if len(payloads) != count:
                raise OnceConflict(key, once, stored_seq)
            for seq, payload in enumerate(payloads, stored_seq):
                if seq not in stored:
                    raise damaged_repeat_error(key, once, seq)
                if stored[seq] != payload:
                    raise OnceConflict(key, once, stored_seq)
        return int(stored_seq)
    if epoch and not is_lease_held:
        raise LeaseLost(key, epoch)
    if first_seq is None:
        raise _SessionMissing
    return int(first_seq)


def _append_new(
    transaction: "Transaction", namespace: str, key: str, batch: Batch, epoch: int
) -> int:
    """Create the session, unless another writer creates it first, and append the batch."""
    for _ in range(_MAX_ATTEMPTS):
        try:
            return _append(transaction, namespace, key, batch, epoch)
        except _SessionMissing:
            # This statement waits for another writer that is creating the session.
            create_session(
                transaction, namespace, blank_state(key, os.urandom(8).hex(), 1, now()), 0, 0
            )
    raise DamagedStore(f"{key!r}: its row has another version than the tables")
