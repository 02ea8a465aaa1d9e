"""SQLStore: the methods of a store that SQLite and PostgreSQL share."""

import copy
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self

from stenolog.codec import check_key, check_once, encode_message, encode_object
from stenolog.errors import NoSuchSession, StenologError, StoreBusy, StoreClosed
from stenolog.records import (
    CompactionResult,
    Health,
    Message,
    SessionInfo,
    TrashedSession,
)
from stenolog.stores.arguments import (
    Batch,
    check_count,
    check_int,
    check_lease_times,
    check_optional_int,
    check_text,
    make_batch,
)
from stenolog.stores.base import SessionView
from stenolog.stores.log_reports import DamageReports
from stenolog.stores.operations import (
    Decide,
    NewMessages,
    SessionOperations,
    T,
    poll_messages,
)
from stenolog.stores.sql import lifecycle, session_rows
from stenolog.stores.sql.admin import SQLAdmin
from stenolog.stores.sql.dialect import Database, Row, Transaction
from stenolog.stores.sql.leases import SQLLease, StoreLeases
from stenolog.stores.sql.rows import session_info
from stenolog.stores.sql.session_rows import printable_text

P = ParamSpec("P")
_Work = Callable[Concatenate[Transaction, str, P], T]
"""Function that takes a transaction, the namespace and other arguments."""


class SQLStore(SessionOperations):
    """Sessions in the tables of a database. stores/base.py documents each call."""

    database: Database
    """The open database."""
    _lease_poll_seconds: float
    """Interval at which a caller that waits for a lease polls, in seconds."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._lease: SQLLease[Any] | None = None
        self._leases = StoreLeases()

    # --- appending ---------------------------------------------------------------------------

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        """Append `{"role": role, "content": content}` and return its seq."""
        return self._append(key, encode_object({"role": role, "content": content}), once)

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append one message and return its seq."""
        return self._append(key, encode_message(message), once)

    def _append(self, key: str, payload: bytes, once: str | None) -> int:
        check_key(key)
        if once is not None or self._lease is not None:
            check_once(once)
            return self._append_batch(key, Batch((payload,), once))
        return self._append_one(key, payload)

    def add_messages(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        once: str | None = None,
        at: Sequence[datetime] | None = None,
    ) -> list[int]:
        """Append a batch, completely or not at all, and return its seqs."""
        check_key(key)
        batch = make_batch(messages, once, at)
        if not batch.payloads:
            self._check_writable()
            return []
        first = self._append_batch(key, batch)
        return list(range(first, first + len(batch.payloads)))

    # --- visibility, summary, meta -----------------------------------------------------------

    def _change(self, key: str, decide: Decide[T]) -> T:
        """Call `decide` and store the change in one transaction, which may be retried."""
        check_key(key)
        decision = self._run_write(session_rows.apply_operation, key, decide, self.database.damage)
        if decision.change is not None:
            self._notify(key)
        return decision.result

    def compact(self, key: str) -> CompactionResult:
        """Mark the messages up to the floor as archived.

        No row is moved, because a query for the rows above the floor does not read the rows below
        the floor. Only `archived`, `generation` and `bytes` of `info` change.
        """
        check_key(key)
        return self._run_write(session_rows.compact, key)

    # --- lifecycle ---------------------------------------------------------------------------

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Create a session from the visible messages of another session."""
        check_key(key)
        check_key(new_key)
        check_optional_int(at=at)
        self._run_write(lifecycle.fork, key, new_key, at=at)
        self._notify(new_key)

    def delete(self, key: str) -> TrashedSession:
        """Move the session into the trash."""
        check_key(key)
        trashed = self._run_write(lifecycle.delete, key)
        self._notify(key)
        return trashed

    # --- leases ------------------------------------------------------------------------------

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> SQLLease[Self]:
        """Acquire the lease of this session: one holder at a time, across all processes."""
        check_key(key)
        check_lease_times(ttl, wait)
        self._check_writable()
        deadline = time.monotonic() + (
            self.database.settings.busy_timeout if wait is None else wait
        )
        while True:
            # Read first, so that waiting callers do not write all the time.
            holder = self._run_read(self._describe_holder, key)
            if holder is None:
                epoch = self._acquire_lease(key, ttl=ttl)
                if epoch:
                    return SQLLease(self, self._leases, key, epoch, ttl)
                continue
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise StoreBusy(f"{key!r} is leased by {holder}")
            time.sleep(min(self._lease_poll_seconds, remaining))

    def _describe_holder(self, transaction: Transaction, namespace: str, key: str) -> str | None:
        """Return a description of the lease's holder; None if the lease is free.

        Raises NoSuchSession.
        """
        if session_rows.uid_and_last_seq(transaction, namespace, key) is None:
            raise NoSuchSession(key)
        rows = transaction.run("find_lease", namespace, transaction.key_parameter(key))
        for holder, since, *lease_row in rows:
            if self._is_lease_held(tuple(lease_row)):
                return f"{printable_text(holder)}, since {printable_text(since)}"
        return None

    def fenced_by(self, lease: SQLLease[Any]) -> Self:
        """Return a copy of this store whose writes fail after release or takeover of the lease."""
        fenced_store = copy.copy(self)
        fenced_store._lease = lease
        return fenced_store

    # --- reading -----------------------------------------------------------------------------

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages, or with `full` all messages, in the order of their seqs."""
        check_key(key)
        check_count(last=last)
        check_optional_int(after=after)

        def read(transaction: Transaction, damage: DamageReports | None) -> list[Message]:
            session = session_rows.find_session(transaction, self._namespace, key)
            if session is None:
                return []
            if full:
                return session_rows.all_messages(
                    transaction, session, damage, last=last, after=max(0, after or 0)
                )
            return session_rows.visible_messages(
                transaction, session, damage, last=last, after=after
            )

        return self._run_message_read(read)

    def get_summary(self, key: str) -> str:
        """Return the summary, or an empty text."""
        check_key(key)
        session = self._run_read(session_rows.find_session, key)
        return session.state.summary if session is not None else ""

    def info(self, key: str) -> SessionInfo:
        """Return the info of the session. Raises NoSuchSession."""
        check_key(key)
        session = self._run_read(lifecycle.require_session, key)
        return session_info(session, self.database.damage.lost_seqs(session.state.uid))

    def view(
        self, key: str, last: int | None = None, *, since: SessionView | None = None
    ) -> SessionView:
        """Return info, summary and visible messages as of one moment.

        With `since`, return only the messages after `since`, or a full view if more has changed.
        """
        check_key(key)
        check_count(last=last)
        last = last if since is None else since.last

        def read(transaction: Transaction, damage: DamageReports | None) -> SessionView:
            session = lifecycle.require_session(transaction, self._namespace, key)
            state = session.state
            is_unchanged = since is not None and since.matches(
                state.uid, state.generation, state.number
            )
            after = since.upto if since is not None and is_unchanged else None
            messages = session_rows.visible_messages(
                transaction, session, damage, last=last, after=after
            )
            return SessionView(
                info=session_info(session, self.database.damage.lost_seqs(state.uid)),
                messages=tuple(messages),
                upto=session.last_seq,
                last=last,
                after=after,
            )

        return self._run_message_read(read)

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return session keys in byte order."""
        check_count(limit=limit)
        check_text(prefix=prefix, after=after)
        return self._run_read(
            session_rows.list_keys, self.database.damage, prefix=prefix, limit=limit, after=after
        )

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message after seq `after` once, as it arrives."""
        check_key(key)
        check_int(after=after)
        self._check_open()
        return self._follow(key, max(0, after), uid, timeout)

    def _follow(
        self, key: str, after: int, uid: str | None, timeout: float | None
    ) -> Iterator[Message]:
        def read_new(last_seq: int) -> NewMessages | None:
            return self._run_message_read(partial(self._read_new_messages, key=key, after=last_seq))

        with self._listen_for_changes(key) as (wait, max_wait):
            yield from poll_messages(
                read_new, wait, key, after=after, uid=uid, timeout=timeout, poll=max_wait
            )

    def _read_new_messages(
        self, transaction: Transaction, damage: DamageReports | None, key: str, after: int
    ) -> NewMessages | None:
        uid_and_seq = session_rows.uid_and_last_seq(transaction, self._namespace, key)
        if uid_and_seq is None or uid_and_seq[1] <= after:
            return None if uid_and_seq is None else (*uid_and_seq, [])
        session = session_rows.find_session(transaction, self._namespace, key)
        if session is None:
            return None
        messages = session_rows.all_messages(transaction, session, damage, last=None, after=after)
        return session.state.uid, session.last_seq, messages

    # --- administration ----------------------------------------------------------------------

    @property
    def admin(self) -> SQLAdmin:
        """The calls that administer the store."""
        return SQLAdmin(self)

    def namespaces(self) -> list[str]:
        """Return the namespaces that have a session, even if only in the trash, sorted."""
        rows = self._run_read(lambda transaction, _: transaction.run("namespaces"))
        return [namespace for (namespace,) in rows]

    # --- close -------------------------------------------------------------------------------

    def close(self) -> None:
        """Release every lease and the database; a second call does nothing."""
        try:
            epochs = self._leases.close()
            with suppress(StenologError):
                if epochs:
                    self._release_leases(epochs)
        finally:
            # Python switches threads only at calls and loops. Between check and assignment there is
            # neither, so only one of two threads releases the database.
            if not self._leases.has_released_database:
                self._leases.has_released_database = True
                self._close_database()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._leases.is_closed:
            raise StoreClosed("the store is closed")

    def _check_writable(self) -> None:
        self._check_open()
        self.database.check_writable()

    # --- transactions ------------------------------------------------------------------------

    def _run_read(self, work: _Work[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call `work` with a read transaction, the namespace and these arguments."""
        self._check_open()
        return self.database.run_read(
            lambda transaction: work(transaction, self._namespace, *args, **options)
        )

    def _run_message_read(self, work: Callable[[Transaction, DamageReports | None], T]) -> T:
        """Run `work`, which reads a session and its messages, on a consistent snapshot.

        PostgresStore overrides this method: it first passes None instead of DamageReports, and
        runs `work` again only if `work` raises MissingRows.
        """
        self._check_open()
        with self.database.read_transaction() as transaction:
            return work(transaction, self.database.damage)

    def _run_write(self, work: _Work[P, T], *args: P.args, **options: P.kwargs) -> T:
        """Call `work` with a write transaction. If this store has a lease, the lease is checked."""
        self._check_open()
        lease = self._lease
        if lease is not None:
            lease.check_ownership()

        def fenced_work(transaction: Transaction) -> T:
            with nullcontext() if lease is None else lease.fence(transaction):
                return work(transaction, self._namespace, *args, **options)

        return self.database.run_write(fenced_work)

    # --- operations that differ between the databases ----------------------------------------

    @abstractmethod
    def _append_one(self, key: str, payload: bytes) -> int:
        """Append one message on the fast path and return its seq."""

    @abstractmethod
    def _append_batch(self, key: str, batch: Batch) -> int:
        """Append a batch and return its first seq. Raises OnceConflict, LeaseLost."""

    @abstractmethod
    def _notify(self, key: str, /) -> None:
        """Tell followers that a session has changed, unless the commit has already told them."""

    @abstractmethod
    def _listen_for_changes(
        self, key: str, /
    ) -> AbstractContextManager[tuple[Callable[[float], object], float]]:
        """Listen for changes of a session.

        Yields a function that waits for a change, and the maximum seconds to pass to it.
        """

    @abstractmethod
    def _is_lease_held(self, row: Row) -> bool:
        """Return whether the lease is held; `row` has the columns of statement `lease_in_force`."""

    @abstractmethod
    def _acquire_lease(self, key: str, *, ttl: float) -> int:
        """Acquire the lease and return its epoch; 0 if another holder was faster."""

    @abstractmethod
    def _renew_lease(self, key: str, epoch: int, *, ttl: float) -> None:
        """Extend a lease to a full ttl from now. Raises LeaseLost, StoreClosed."""

    @abstractmethod
    def _release_leases(self, epochs: Sequence[int]) -> None:
        """Release these leases. Raises StoreUnavailable."""

    @abstractmethod
    def _erase_bytes(self) -> tuple[str, ...]:
        """Erase the bytes of purged rows; return a sentence about each place where bytes remain."""

    @abstractmethod
    def _health(self) -> Health:
        """Return whether writes are expected to work."""

    def _catalog_file(self) -> Path | None:
        """Return the path of the catalog; None if the catalog is in the database."""
        return None

    @abstractmethod
    def _close_database(self) -> None:
        """Release the database. Called once."""
