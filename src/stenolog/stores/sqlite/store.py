"""SQLiteStore: sessions as rows of one database file.

The driver, apsw, is imported when a store is opened: `import stenolog` does without it.
"""

import copy
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from stenolog.codec import check_key, check_once, encode_message, encode_object
from stenolog.errors import NoSuchSession, StenologError, UsageError
from stenolog.records import (
    Compacted,
    Health,
    Message,
    Purged,
    SessionInfo,
    Trashed,
    Undo,
)
from stenolog.stores import state as states
from stenolog.stores.arguments import check_namespace, check_text, check_whole
from stenolog.stores.base import Append, Deleted
from stenolog.stores.batches import Batch
from stenolog.stores.batches import batch as batch_of
from stenolog.stores.changing import Changing
from stenolog.stores.following import News
from stenolog.stores.rows import Session, info
from stenolog.stores.sqlite import appending, changes, life, reading, rows, whole
from stenolog.stores.sqlite.follow import follow
from stenolog.stores.sqlite.lease import Held, SQLiteLease, take
from stenolog.stores.sqlite.opening import open_database
from stenolog.stores.sqlite.queries import SQL
from stenolog.stores.twins import twin
from stenolog.stores.whole import LifeMark, LifeWriter, Reading

if TYPE_CHECKING:
    from stenolog.stores.sqlite.connections import Transaction
    from stenolog.stores.sqlite.database import Database

BUSY_TIMEOUT: Final = 5.0
CACHE_KB: Final = 2048
MOST_CACHE_KB: Final = 2**31 - 1
"""SQLite counts no further."""


class SQLiteStore(Changing["Transaction"]):
    """Sessions in one file; stores/base.py says what each call means.

    `busy_timeout`: how long a call waits for other writers. `synchronous`: with "normal" a power
    cut may take the last messages, though no more. `cache_kb`: how much of the file each of at
    most nine connections may keep in memory. `read_only`: nothing is changed; SQLite may still
    need to make its log beside the file.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        *,
        namespace: str = "sessions",
        read_only: bool = False,
        busy_timeout: float = BUSY_TIMEOUT,
        synchronous: Literal["full", "normal"] = "full",
        cache_kb: int = CACHE_KB,
    ) -> None:
        check_namespace(namespace)
        if synchronous not in ("full", "normal"):
            raise UsageError(f"synchronous={synchronous!r}: full or normal is wanted")
        check_whole(cache_kb=cache_kb)
        if not 1 <= cache_kb <= MOST_CACHE_KB:
            raise UsageError(f"cache_kb: a number from 1 to {MOST_CACHE_KB} is wanted")
        self._namespace = namespace
        self._lease: SQLiteLease | None = None
        self._held = Held()
        self.database: Database = open_database(
            file,
            read_only=read_only,
            busy_timeout=busy_timeout,
            synchronous=synchronous,
            cache_kb=cache_kb,
        )
        """The file itself, for who keeps tables of its own in it."""

    def __repr__(self) -> str:
        return f"SQLiteStore({str(self.database.file)!r}, namespace={self._namespace!r})"

    @property
    def namespace(self) -> str:
        """Which of the sessions in the file are this store's."""
        return self._namespace

    @property
    def busy_timeout(self) -> float:
        """How long a call waits for other writers, in seconds."""
        return self.database.settings.busy_timeout

    # --- appending ---------------------------------------------------------------------------

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        """Append `{"role": role, "content": content}`; its seq."""
        return self._append(key, encode_object({"role": role, "content": content}), once)

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append one message; its seq."""
        return self._append(key, encode_message(message), once)

    def add_messages(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        once: str | None = None,
        at: Sequence[datetime] | None = None,
    ) -> list[int]:
        """Append a batch, whole or not at all; its seqs."""
        check_key(key)
        batch = batch_of(messages, once, at)
        if not batch.payloads:
            self._check_writable()
            return []
        first = self._append_batch(key, batch)
        return list(range(first, first + len(batch.payloads)))

    def add_group(self, key: str, appends: Sequence[Append]) -> list[list[int] | StenologError]:
        """The appends of several callers in one transaction; for each its seqs, or an error."""
        check_key(key)
        self._check_writable()
        results: list[list[int] | StenologError] = [[] for _ in appends]
        group: list[tuple[int, Batch]] = []
        for index, one in enumerate(appends):
            try:
                batch = batch_of(one.messages, one.once, one.at)
            except StenologError as error:
                results[index] = error
            else:
                if batch.payloads:
                    group.append((index, batch))

        def work(transaction: "Transaction") -> None:
            self._check_lease(transaction)
            for index, batch in group:
                try:
                    first = appending.append(transaction, self._namespace, key, batch)
                    results[index] = list(range(first, first + len(batch.payloads)))
                except StenologError as error:
                    results[index] = error

        if group:
            try:
                self.database.share(work)
            except StenologError as error:
                for index, _ in group:
                    results[index] = twin(error)
        return results

    def _append(self, key: str, payload: bytes, once: str | None) -> int:
        check_key(key)
        if once is not None or self._lease is not None:
            check_once(once)
            return self._append_batch(key, Batch((payload,), once))
        return self.database.share(
            lambda transaction: appending.append_one(transaction, self._namespace, key, payload)
        )

    def _append_batch(self, key: str, batch: Batch) -> int:
        def work(transaction: "Transaction") -> int:
            self._check_lease(transaction)
            return appending.append(transaction, self._namespace, key, batch)

        return self.database.share(work)

    # --- changing what is in sight -----------------------------------------------------------

    def _change(
        self,
        key: str,
        decide: changes.Decide,
        *,
        create: bool = False,
        payloads: Sequence[bytes] = (),
    ) -> None:
        """Decide and carry out in one transaction."""
        check_key(key)
        with self._write() as transaction:
            changes.carry_out(
                transaction, self._namespace, key, decide, create=create, payloads=payloads
            )

    def _in_sight(
        self, transaction: "Transaction", session: Session, *, last: int | None
    ) -> list[Message]:
        return reading.in_sight(transaction, session, self.database.damage, last=last, after=None)

    def _looked_up(self, transaction: "Transaction", session: Session, entry: Undo) -> Undo:
        return changes.looked_up(transaction, session, entry)

    def compact(self, key: str) -> Compacted:
        """Mark what lies below the floor as archived.

        Nothing is moved: rows below the floor are not met by who reads those above it. What
        changes is what `info` tells: `archived`, `generation`, and `bytes`.
        """
        check_key(key)
        with self._write() as transaction:
            session = rows.find(transaction, self._namespace, key)
            if session is None:
                return Compacted(archived=0, bytes_before=0, bytes_after=0)
            messages, size = changes.compact(transaction, session)
            return Compacted(
                archived=messages,
                bytes_before=session.bytes,
                bytes_after=session.bytes - size,
            )

    # --- the life of a session ---------------------------------------------------------------

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Make a session of its own from what is in sight."""
        check_key(key)
        check_key(new_key)
        check_whole(at=at)
        with self._write() as transaction:
            life.fork(transaction, self._namespace, key, new_key, at=at)

    def delete(self, key: str) -> Trashed:
        """Put the session into the trash."""
        check_key(key)
        with self._write() as transaction:
            return life.delete(transaction, self._namespace, key)

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Bring back the last deleted session of this key, or the one of this uid."""
        check_key(key)
        target = key if as_key is None else as_key
        check_key(target)
        with self._write() as transaction:
            life.restore(transaction, self._namespace, key, uid=uid, as_key=target)

    def list_trash(self) -> list[Trashed]:
        """The deleted sessions, the last deleted first."""
        with self.database.read() as transaction:
            return life.list_trash(transaction, self._namespace, self.database.damage)

    def purge(self, key: str, *, before: int | None = None) -> Purged:
        """Delete for good. The file is written anew, which takes as long as it is large.

        Nobody else writes meanwhile: who waits longer than its busy_timeout gets StoreBusy.
        """
        check_key(key)
        check_whole(before=before)
        with self._write() as transaction:
            session = rows.find(transaction, self._namespace, key)
            told = () if session is None else states.taken_from(session.state.meta)
            if before is None:
                gone = life.purge_all(transaction, self._namespace, key)
            else:
                gone = life.purge_before(transaction, self._namespace, key, before=before)
            unfinished = life.unfinished(transaction)
            if gone is None and not unfinished:
                raise NoSuchSession(key)
        return self._vanished(gone or life.Gone(0, 0, 0, ()), told, unfinished=unfinished)

    def purge_trash(self, key: str, lives: Collection[Deleted]) -> Purged:
        """Delete these sessions of a key for good, all of them in the trash, and nothing else."""
        check_key(key)
        with self._write() as transaction:
            gone = life.purge_trash(transaction, self._namespace, key, lives)
        if gone is None:
            raise NoSuchSession(key, "the trash has not what is to be purged")
        return self._vanished(gone)

    def unfinished_purges(self) -> list[Trashed]:
        """What interrupted purges left, in the whole file; nobody knows any more of which key."""
        with self.database.read() as transaction:
            return life.left_by_purges(transaction)

    def finish_purge(self, uid: str) -> Purged:
        """End the interrupted purges of this file; none of them has a uid any more."""
        with self._write() as transaction:
            if uid or not life.unfinished(transaction):
                raise NoSuchSession(uid, "no purge of it was interrupted")
        return self._vanished(life.Gone(0, 0, 0, ()))

    def _vanished(
        self, gone: life.Gone, told: tuple[str, ...] = (), *, unfinished: bool = True
    ) -> Purged:
        """What a purge comes to, once its bytes are gone."""
        stayed = life.vanish(self.database) if unfinished else ()
        return Purged(
            messages=gone.messages,
            first=gone.first,
            last=gone.last,
            not_reached=gone.left + stayed + told,
        )

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> SQLiteLease:
        """The turn in this session: one holder at a time, in all processes."""
        check_key(key)
        states.check_lease(ttl, wait)
        wait = self.busy_timeout if wait is None else wait
        self._check_writable()
        epoch = take(self.database, self._held, self._namespace, key, ttl=ttl, wait=wait)
        return SQLiteLease(self, self._held, key, epoch, ttl)

    def behind(self, held: SQLiteLease) -> "SQLiteStore":
        """The same store, which refuses writes once this lease is lost."""
        fenced = copy.copy(self)
        fenced._lease = held
        return fenced

    # --- reading -----------------------------------------------------------------------------

    def get_history(
        self,
        key: str,
        *,
        last: int | None = None,
        after: int | None = None,
        full: bool = False,
    ) -> list[Message]:
        """The visible messages by seq, or with `full` every one."""
        check_key(key)
        check_whole(last=last, after=after)
        if last is not None and last < 0:
            raise UsageError(f"last={last}: how many messages, 0 or more")
        with self.database.read() as transaction:
            session = rows.find(transaction, self._namespace, key)
            if session is None:
                return []
            if full:
                return reading.everything(
                    transaction, session, self.database.damage, last=last, after=max(0, after or 0)
                )
            return reading.in_sight(
                transaction, session, self.database.damage, last=last, after=after
            )

    def get_summary(self, key: str) -> str:
        """The summary; empty where there is none."""
        check_key(key)
        with self.database.read() as transaction:
            session = rows.find(transaction, self._namespace, key)
            return session.state.summary if session is not None else ""

    def info(self, key: str) -> SessionInfo:
        """What is known of the session."""
        check_key(key)
        with self.database.read() as transaction:
            session = life.known(transaction, self._namespace, key)
        return info(session, self.database.damage.of(session.state.uid))

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Keys in the order of their bytes."""
        check_whole(limit=limit)
        if limit is not None and limit < 0:
            raise UsageError(f"limit={limit}: how many keys, 0 or more")
        check_text(prefix=prefix, after=after)
        with self.database.read() as transaction:
            return rows.keys(
                transaction,
                self._namespace,
                self.database.damage,
                prefix=prefix,
                limit=limit,
                after=after,
            )

    def stamps(self) -> dict[str, str]:
        """For each session a mark that is another one after every change."""
        with self.database.read() as transaction:
            return rows.stamps(transaction, self._namespace, self.database.damage)

    def mark(self, name: str) -> str:
        """The mark of this name; empty where it was never changed."""
        with self.database.read() as transaction:
            found = transaction.execute(SQL["find_mark"], (self._namespace, name))
            return "".join(str(number) for (number,) in found)

    def change_mark(self, name: str) -> None:
        """Make it another one."""
        with self._write() as transaction:
            transaction.execute(SQL["change_mark"], (self._namespace, name))

    def follow(
        self, key: str, *, after: int = 0, timeout: float | None = None
    ) -> Iterator[Message]:
        """Each message past `after` once, by seq, as it arrives."""
        check_key(key)
        check_whole(after=after)
        self.database.check_open()
        return follow(
            self.database,
            lambda seen: self._news(key, seen),
            key,
            after=max(0, after),
            timeout=timeout,
        )

    def _news(self, key: str, after: int) -> News | None:
        with self.database.read() as transaction:
            for _, uid, last_seq in transaction.execute(SQL["find_life"], (self._namespace, key)):
                if last_seq <= after:
                    return uid, last_seq, []
                session = life.known(transaction, self._namespace, key)
                found = reading.everything(
                    transaction, session, self.database.damage, last=None, after=after
                )
                return uid, last_seq, found
        return None

    # --- carried whole -----------------------------------------------------------------------

    def namespaces(self) -> list[str]:
        """Those of the file that have a life, be it in the trash only."""
        with self.database.read() as transaction:
            return rows.namespaces(transaction)

    def lives(self) -> list[LifeMark]:
        """Every life of this namespace, the deleted ones first."""
        with self.database.read() as transaction:
            return whole.lives(transaction, self._namespace)

    @contextmanager
    def read_life(self, mark: LifeMark, *, after: int = 0) -> Iterator[Reading]:
        """A look at one life."""
        with self.database.read() as transaction:
            yield whole.read(transaction, self._namespace, mark, after=after)

    @contextmanager
    def hold_life(self, mark: LifeMark, *, after: int = 0) -> Iterator[Reading]:
        """The same while nobody else writes to the file."""
        read_only = self.database.settings.read_only
        with self.database.read() if read_only else self.database.write() as transaction:
            yield whole.read(transaction, self._namespace, mark, after=after)

    @contextmanager
    def writing_lives(self) -> Iterator[LifeWriter]:
        """Write several, in one transaction."""
        with self._write() as transaction:
            yield whole.Writer(transaction, self._namespace)

    # --- health and end ----------------------------------------------------------------------

    def health(self) -> Health:
        """Whether writes can be expected to work."""
        problems = self.database.problems()
        with self.database.read() as transaction:
            if life.unfinished(transaction):
                problems.append("a purge was interrupted; purge again to finish it")
        free, wrong = self.database.room()
        return Health(ok=not wrong, free_bytes=free, problems=(*wrong, *problems))

    def close(self) -> None:
        """Let go of the file and of every lease; a second call does nothing."""
        self._held.release(self.database)
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _write(self) -> Iterator["Transaction"]:
        with self.database.write() as transaction:
            self._check_lease(transaction)
            yield transaction

    def _check_lease(self, transaction: "Transaction") -> None:
        if self._lease is not None:
            self._lease.check(transaction)

    def _check_writable(self) -> None:
        self.database.check_writable()
