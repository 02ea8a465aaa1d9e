"""SQLiteStore: sessions as rows of one database file.

The driver, apsw, is imported when a store is opened, so `import stenolog` works without apsw.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from stenolog.errors import (
    LeaseLost,
    OnceConflict,
    StenologError,
    StoreBusy,
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
from stenolog.stores.catalog_file import catalog_path, delete_catalogs
from stenolog.stores.sql.dialect import Row, damaged_repeat_error
from stenolog.stores.sql.leases import holder_name
from stenolog.stores.sql.rows import now
from stenolog.stores.sql.session_rows import create_session
from stenolog.stores.sql.store import SQLStore
from stenolog.stores.sqlite.lease_holders import format_holder, is_held
from stenolog.stores.sqlite.transactions import SQL, Transaction, checksum
from stenolog.stores.state import blank_state

BUSY_TIMEOUT_SECONDS: Final = 5.0
DEFAULT_CACHE_KB: Final = 2048
MAX_CACHE_KB: Final = 2**31 - 1
"""Largest cache size in KiB that SQLite accepts."""
FOLLOW_POLL_SECONDS: Final = 0.03
"""Interval at which a follower polls for commits of other processes, in seconds."""
_ALLOCATE_SEQS, _ADD_MESSAGE = SQL["take_seqs"], SQL["add_message"]


class SQLiteStore(SQLStore):
    """Sessions in one file. stores/base.py documents each call.

    `busy_timeout`: maximum wait for other writers, in seconds. `synchronous`: with "normal", a
    power cut may lose the last messages, but no other data. `cache_kb`: page cache of each of at
    most nine connections, in KiB. `read_only`: change no data. SQLite may still need to create its
    log files next to the database. `leave_no_files`: with `read_only`, SQLite creates no files.
    """

    _lease_poll_seconds = 0.005

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        namespace: str = "sessions",
        read_only: bool = False,
        leave_no_files: bool = False,
        busy_timeout: float = BUSY_TIMEOUT_SECONDS,
        synchronous: Literal["full", "normal"] = "full",
        cache_kb: int = DEFAULT_CACHE_KB,
    ) -> None:
        super().__init__(namespace)
        check_namespace(namespace)
        if synchronous not in ("full", "normal"):
            raise UsageError(f"synchronous must be 'full' or 'normal', not {synchronous!r}")
        check_optional_int(cache_kb=cache_kb)
        if not 1 <= cache_kb <= MAX_CACHE_KB:
            raise UsageError(f"cache_kb must be from 1 to {MAX_CACHE_KB}, not {cache_kb}")
        try:
            from stenolog.stores.sqlite.connections import Settings
            from stenolog.stores.sqlite.database import Database
        except ImportError as error:
            raise missing_driver_error(error) from error
        settings = Settings(
            read_only=read_only,
            leave_no_files=leave_no_files,
            busy_timeout=busy_timeout,
            synchronous=synchronous,
            cache_kb=cache_kb,
        )
        self.database: Database = Database(file, settings)
        """The open database file."""

    def _catalog_file(self) -> Path:
        """Return the path of the catalog."""
        return catalog_path(self.database.file, self._namespace)

    def __repr__(self) -> str:
        return f"SQLiteStore({str(self.database.file)!r}, namespace={self._namespace!r})"

    # --- appends -----------------------------------------------------------------------------

    def _append_one(self, key: str, payload: bytes) -> int:
        namespace = self._namespace

        def work(transaction: Transaction) -> int:
            at = now()
            rows = list(transaction.execute(_ALLOCATE_SEQS, (namespace, key, at, 1, len(payload))))
            if not rows:
                return _append(transaction, namespace, key, Batch((payload,)))
            [(session_id, seq)] = rows
            transaction.execute(
                _ADD_MESSAGE, (session_id, seq, at, payload, checksum(payload, seq))
            )
            return int(seq)

        return self.database.run_shared(work)

    def _append_batch(self, key: str, batch: Batch) -> int:
        def work(transaction: Transaction) -> int:
            if self._lease is not None:
                self._lease.check_held(transaction)
            return _append(transaction, self._namespace, key, batch)

        return self.database.run_shared(work)

    # --- notification ------------------------------------------------------------------------

    def _notify(self, _key: str, /) -> None:
        """Do nothing: each commit wakes the followers of this process; other processes poll."""

    @contextmanager
    def _listen_for_changes(
        self, _key: str, /
    ) -> Iterator[tuple[Callable[[float], object], float]]:
        """Listen for commits of this process.

        By default, a commit is on the disk before readers see it. So a power cut cannot remove
        messages that a follower has received.
        """
        signal, events = threading.Event(), self.database.commit_events
        events.append(signal)

        def wait(seconds: float) -> None:
            signal.wait(seconds)
            # The next read sees every commit that was signalled until now.
            signal.clear()

        try:
            yield wait, FOLLOW_POLL_SECONDS
        finally:
            events.remove(signal)

    # --- leases ------------------------------------------------------------------------------

    def _is_lease_held(self, row: Row) -> bool:
        return is_held(*row)

    def _acquire_lease(self, key: str, *, ttl: float) -> int:
        namespace, leases, epoch = self._namespace, self._leases, 0
        try:
            with self.database.write_transaction() as transaction:
                # guard: sqlite-one-lease-holder
                if self._describe_holder(transaction, namespace, key) is not None:
                    return 0
                transaction.run("end_lease_of", namespace, key)
                [(epoch,)] = transaction.run(
                    "add_lease",
                    namespace,
                    key,
                    holder_name(),
                    now(),
                    time.time() + ttl,
                    format_holder(leases.name, ttl),
                )
                leases.add_lease(epoch)
        except BaseException:
            # Forget the lease, which no caller uses: if uncommitted, another may get its epoch.
            leases.forget_lease(epoch)
            raise
        return int(epoch)

    def _renew_lease(self, key: str, epoch: int, *, ttl: float) -> None:
        with self.database.write_transaction() as transaction:
            expires_at, holder = time.time() + ttl, format_holder(self._leases.name, ttl)
            renewed_rows = transaction.run("renew_lease", epoch, now(), expires_at, holder)
            if not renewed_rows:
                raise LeaseLost(key, epoch)

    def _release_leases(self, epochs: Sequence[int]) -> None:
        with self.database.write_transaction() as transaction:
            transaction.run_many("end_leases", ((epoch,) for epoch in epochs))

    # --- purge, health, close ----------------------------------------------------------------

    def _erase_bytes(self) -> tuple[str, ...]:
        database = self.database
        try:
            with database.read_transaction() as transaction:
                [(last_purge,)] = transaction.run("last_purge")
            if last_purge is None:
                return ()
            try:
                # The purge's row still exists: after a failure, a later purge repeats all steps.
                delete_catalogs(database.file, seconds=database.settings.busy_timeout)
            except (OSError, StoreBusy) as error:
                return (f"the catalog of {database.file} still contains it: {error}; purge again",)
            database.rewrite()
            with database.write_transaction() as transaction:
                # Keep the rows of purges that other processes started after `last_purge`.
                transaction.run("end_purge", last_purge)
            with database.read_transaction() as transaction:
                [(stray_count,)] = transaction.run("stray_rows")
        except StoreBusy:
            return (f"the log of {database.file}, in use by readers, contains it; purge again",)
        except StenologError as error:
            return (f"free pages of {database.file} still contain it: {error}; purge again",)
        if not stray_count:
            return ()
        # A damaged row of the table `session` hides the session's other rows from the purge.
        return (
            f"{stray_count:,} rows of {database.file} belong to no session, because the file is "
            "damaged; they may contain it: run `steno doctor`",
        )

    def _health(self) -> Health:
        """Return whether writes are expected to work."""
        problems = self.database.problems()
        with self.database.read_transaction() as transaction:
            if transaction.unfinished_purges():
                problems.append("a purge was interrupted; purge again to finish it")
        free_bytes, errors = self.database.disk_space()
        return Health(ok=not errors, free_bytes=free_bytes, problems=(*errors, *problems))

    def _close_database(self) -> None:
        self.database.close()


def missing_driver_error(error: ImportError) -> Exception:
    """Return the error to raise if the driver is missing; any other ImportError unchanged."""
    if error.name != "apsw":
        return error
    return UsageError(
        f"a SQLite store needs the package apsw, which includes SQLite: {install_command('sqlite')}"
    )


def _append(transaction: Transaction, namespace: str, key: str, batch: Batch) -> int:
    """Append a batch and return its first seq. Raises OnceConflict before anything is written."""
    once, payloads = batch.once, batch.payloads
    if once is not None:
        stored_seq = _find_stored_seq(transaction, namespace, key, once, payloads)
        if stored_seq:
            return stored_seq
    stored_at, count, size = now(), len(payloads), sum(map(len, payloads))
    rows = list(transaction.execute(_ALLOCATE_SEQS, (namespace, key, stored_at, count, size)))
    if rows:
        [(session_id, last_seq)] = rows
    else:
        state = blank_state(key, os.urandom(8).hex(), 1, stored_at)
        session_id, last_seq = create_session(transaction, namespace, state, count, size), count
    first_seq: int = last_seq - count + 1
    times = batch.times or [stored_at] * count
    transaction.add_messages(
        session_id, zip(range(first_seq, last_seq + 1), times, payloads, strict=True)
    )
    if once is not None:
        transaction.execute(SQL["add_token"], (session_id, token_bytes(once), first_seq, count))
    return first_seq


def _find_stored_seq(
    transaction: Transaction, namespace: str, key: str, once: str, payloads: Sequence[bytes]
) -> int:
    """Return the first seq stored with this idempotency key; 0 for an unknown key.

    Raises OnceConflict if different messages were stored with this idempotency key.
    """
    for session_id, first_seq, count in transaction.execute(
        SQL["find_token"], (namespace, key, token_bytes(once))
    ):
        bodies = transaction.execute(SQL["bodies"], (session_id, first_seq, first_seq + count - 1))
        if [body for (body,) in bodies] != list(payloads):
            rows = transaction.execute(
                SQL["raw_messages"], (session_id, first_seq, first_seq + count - 1)
            )
            sums = {seq: (body, crc) for seq, _, body, crc in rows}
            if len(payloads) != count:
                raise OnceConflict(key, once, first_seq)
            for seq, payload in enumerate(payloads, first_seq):
                body, crc = sums.get(seq, (None, None))
                # The checksum also identifies a message whose text is damaged.
                if crc == checksum(payload, seq):  # guard: damaged-message-is-compared
                    continue
                if isinstance(body, bytes) and crc == checksum(body, seq):
                    raise OnceConflict(key, once, first_seq)
                raise damaged_repeat_error(key, once, seq)
        return int(first_seq)
    return 0
