"""PostgresStore: sessions as rows of a database that many machines share.

The driver, psycopg, is imported when a store is opened: `import stenolog` does without it.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from stenolog.codec import check_key, check_once, encode_message, encode_object
from stenolog.errors import NoSuchSession, StenologError, StoreClosed, UsageError
from stenolog.records import Compacted, Health, Message, Purged, SessionInfo, Trashed, Undo
from stenolog.stores import state as states
from stenolog.stores.arguments import check_namespace, check_text, check_whole
from stenolog.stores.base import Append, Deleted
from stenolog.stores.batches import Batch
from stenolog.stores.batches import batch as batch_of
from stenolog.stores.changing import Changing
from stenolog.stores.following import News, arrivals
from stenolog.stores.postgres import appending, changes, life, reading, rows, whole
from stenolog.stores.postgres.appending import Absent, Place
from stenolog.stores.postgres.lease import Held, PostgresLease, release_all, take
from stenolog.stores.postgres.opening import open_database
from stenolog.stores.rows import Session, info
from stenolog.stores.twins import twin
from stenolog.stores.whole import LifeMark, LifeWriter, Reading

if TYPE_CHECKING:
    from stenolog.stores.postgres.connections import Transaction
    from stenolog.stores.postgres.database import Database

T = TypeVar("T")

BUSY_TIMEOUT: Final = 5.0
CONNECTIONS: Final = 16
SCHEMA: Final = "stenolog"


class PostgresStore(Changing["Transaction"]):
    """Sessions in a database; stores/base.py says what each call means.

    `url`: as libpq takes it, `postgresql://user@host1,host2/database?sslmode=require`. `schema`:
    where in the database the tables are; they are made if they are not there. `busy_timeout`: how
    long a call waits for other writers, and for a server that is gone to come back. `connections`:
    how many may be open at once. `read_only`: nothing is changed, and a standby will do.

    What is purged is deleted and cleaned away; the server's log, its standbys and its backups, and
    unused parts of its files, may still hold it for a while.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "sessions",
        read_only: bool = False,
        busy_timeout: float = BUSY_TIMEOUT,
        schema: str = SCHEMA,
        connections: int = CONNECTIONS,
    ) -> None:
        check_namespace(namespace)
        check_whole(connections=connections)
        if connections < 1:
            raise UsageError(f"connections={connections}: 1 or more are wanted")
        self._namespace = namespace
        self._lease: PostgresLease | None = None
        self._held = Held()
        self.database: Database = open_database(
            url,
            schema=schema,
            read_only=read_only,
            busy_timeout=busy_timeout,
            connections=connections,
        )
        """The database itself, for who keeps tables of its own in it."""

    def __repr__(self) -> str:
        return f"PostgresStore({self.database.place!r}, namespace={self._namespace!r})"

    @property
    def namespace(self) -> str:
        """Which of the sessions in the database are this store's."""
        return self._namespace

    @property
    def busy_timeout(self) -> float:
        """How long a call waits for other writers, in seconds."""
        return self.database.settings.busy_timeout

    @property
    def read_only(self) -> bool:
        """Whether it was opened to read only."""
        return self.database.settings.read_only

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
        """The appends of several callers, in their order; for each its seqs, or an error.

        Neighbours without tokens are one batch, and have one fate.
        """
        check_key(key)
        self._check_writable()
        results: list[list[int] | StenologError] = [[] for _ in appends]
        run: list[tuple[int, Batch]] = []
        for index, one in enumerate(appends):
            try:
                batch = batch_of(one.messages, one.once, one.at)
            except StenologError as error:
                results[index] = error
                continue
            if batch.once is not None:
                self._append_run(key, run, results)
                self._append_run(key, [(index, batch)], results)
                run = []
            elif batch.payloads:
                run.append((index, batch))
        self._append_run(key, run, results)
        return results

    def _append_run(
        self,
        key: str,
        run: Sequence[tuple[int, Batch]],
        results: list[list[int] | StenologError],
    ) -> None:
        """Append these as one batch; what became of it is what became of each."""
        if not run or not any(batch.payloads for _, batch in run):
            return
        batches = [batch for _, batch in run]
        try:
            first = self._append_batch(key, appending.joined(batches))
        except StenologError as error:
            for index, _ in run:
                results[index] = twin(error)
            return
        for index, batch in run:
            results[index] = list(range(first, first + len(batch.payloads)))
            first += len(batch.payloads)

    def _append(self, key: str, payload: bytes, once: str | None) -> int:
        check_key(key)
        if once is not None or self._lease is not None:
            check_once(once)
            return self._append_batch(key, Batch((payload,), once))
        self._check_open()
        place = Place(self._namespace, key)
        try:
            seq = self.database.write_once(
                lambda transaction: appending.append_one(transaction, place, payload), safe=False
            )
        except Absent:
            return self._append_batch(key, Batch((payload,)), new=True)
        self._tell(key)
        return seq

    def _append_batch(self, key: str, batch: Batch, *, new: bool = False) -> int:
        place, safe = self._place(key), batch.once is not None
        while True:
            try:
                if new:
                    first = self.database.change(
                        lambda transaction: appending.append_anew(transaction, place, batch),
                        safe=safe,
                    )
                else:
                    first = self.database.write_once(
                        lambda transaction: appending.append(transaction, place, batch), safe=safe
                    )
            except Absent:
                new = True
            except rows.Clash:
                continue  # somebody else has just stored the same token
            else:
                self._tell(key)
                return first

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
        place = Place(self._namespace, key)
        if self._write(
            lambda transaction: changes.carry_out(
                transaction, place, decide, create=create, payloads=payloads
            )
        ):
            self._tell(key)

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

        def work(transaction: "Transaction") -> Compacted:
            session = rows.find(transaction, self._namespace, key, lock=True)
            if session is None:
                return Compacted(archived=0, bytes_before=0, bytes_after=0)
            messages, size = changes.compact(transaction, session)
            return Compacted(
                archived=messages, bytes_before=session.bytes, bytes_after=session.bytes - size
            )

        return self._write(work)

    # --- the life of a session ---------------------------------------------------------------

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Make a session of its own from what is in sight."""
        check_key(key)
        check_key(new_key)
        check_whole(at=at)
        self._write(
            lambda transaction: life.fork(transaction, self._namespace, key, new_key, at=at)
        )
        self._tell(new_key)

    def delete(self, key: str) -> Trashed:
        """Put the session into the trash."""
        check_key(key)
        trashed = self._write(lambda transaction: life.delete(transaction, self._namespace, key))
        self._tell(key)
        return trashed

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Bring back the last deleted session of this key, or the one of this uid."""
        check_key(key)
        target = key if as_key is None else as_key
        check_key(target)
        self._write(
            lambda transaction: life.restore(
                transaction, self._namespace, key, uid=uid, as_key=target
            )
        )
        self._tell(target)

    def list_trash(self) -> list[Trashed]:
        """The deleted sessions, the last deleted first."""
        return self._look(lambda transaction: life.list_trash(transaction, self._namespace))

    def purge(self, key: str, *, before: int | None = None) -> Purged:
        """Delete for good, and have the server clean up behind it."""
        check_key(key)
        check_whole(before=before)

        def work(transaction: "Transaction") -> life.Gone | None:
            if before is None:
                return life.purge_all(transaction, self._namespace, key)
            return life.purge_before(transaction, self._namespace, key, before=before)

        gone = self._write(work)
        if gone is None:
            raise NoSuchSession(key)
        return self._purged(key, gone)

    def purge_trash(self, key: str, lives: Collection[Deleted]) -> Purged:
        """Delete these sessions of a key for good, all of them in the trash, and nothing else."""
        check_key(key)
        gone = self._write(
            lambda transaction: life.purge_trash(transaction, self._namespace, key, lives)
        )
        if gone is None:
            raise NoSuchSession(key, "the trash has not what is to be purged")
        return self._purged(key, gone)

    def unfinished_purges(self) -> list[Trashed]:
        """None: a purge is one transaction."""
        return []

    def finish_purge(self, uid: str) -> Purged:
        """Raise NoSuchSession: a purge is one transaction."""
        raise NoSuchSession(uid, "no purge of it was interrupted")

    def _purged(self, key: str, gone: life.Gone) -> Purged:
        self._tell(key)
        return Purged(
            messages=gone.messages,
            first=gone.first,
            last=gone.last,
            not_reached=gone.left + self._cleaned(),
        )

    def _cleaned(self) -> tuple[str, ...]:
        try:
            told = self.database.clean()
        except StenologError as error:
            told = [str(error)]
        left = "the pages of the tables have it until their owner vacuums them"
        return (f"{left}: {told[0]}",) if told else ()

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> PostgresLease:
        """The turn in this session: one holder at a time, on all machines."""
        check_key(key)
        states.check_lease(ttl, wait)
        self._check_writable()
        wait = self.busy_timeout if wait is None else wait
        epoch = take(self, self._held, key, ttl=ttl, wait=wait)
        return PostgresLease(self, self._held, key, epoch, ttl)

    def behind(self, held: PostgresLease) -> "PostgresStore":
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

        def look(transaction: "Transaction", *, certain: bool) -> list[Message]:
            session = rows.find(transaction, self._namespace, key)
            if session is None:
                return []
            damage = self.database.damage if certain else None
            if full:
                return reading.everything(
                    transaction, session, damage, last=last, after=max(0, after or 0)
                )
            return reading.in_sight(transaction, session, damage, last=last, after=after)

        return self._look_at_messages(look)

    def _look_at_messages(self, look: Callable[..., T]) -> T:
        """What is found of messages whose session was read before them.

        No message changes, so that two looks do, unless it was purged between them: then all is
        read as of one moment.
        """
        try:
            return self._look(lambda transaction: look(transaction, certain=False))
        except reading.Gone:
            with self.database.read() as transaction:
                return look(transaction, certain=True)

    def get_summary(self, key: str) -> str:
        """The summary; empty where there is none."""
        check_key(key)
        session = self._look(lambda transaction: rows.find(transaction, self._namespace, key))
        return session.state.summary if session is not None else ""

    def info(self, key: str) -> SessionInfo:
        """What is known of the session."""
        check_key(key)
        session = self._look(lambda transaction: life.known(transaction, self._namespace, key))
        return info(session, self.database.damage.of(session.state.uid))

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Keys in the order of their bytes."""
        check_whole(limit=limit)
        if limit is not None and limit < 0:
            raise UsageError(f"limit={limit}: how many keys, 0 or more")
        check_text(prefix=prefix, after=after)
        return self._look(
            lambda transaction: rows.keys(
                transaction, self._namespace, prefix=prefix, limit=limit, after=after
            )
        )

    def stamps(self) -> dict[str, str]:
        """For each session a mark that is another one after every change."""
        return self._look(lambda transaction: rows.stamps(transaction, self._namespace))

    def mark(self, name: str) -> str:
        """The mark of this name; empty where it was never changed."""
        found = self._look(lambda transaction: transaction.run("find_mark", self._namespace, name))
        return "".join(str(number) for (number,) in found)

    def change_mark(self, name: str) -> None:
        """Make it another one."""
        self._write(lambda transaction: transaction.run("change_mark", self._namespace, name))

    def follow(
        self, key: str, *, after: int = 0, timeout: float | None = None
    ) -> Iterator[Message]:
        """Each message past `after` once, by seq, as it arrives."""
        check_key(key)
        check_whole(after=after)
        self._check_open()
        return self._follow(key, max(0, after), timeout)

    def _follow(self, key: str, after: int, timeout: float | None) -> Iterator[Message]:
        news, name = self.database.news, rows.name_of(self._namespace, key)
        bell = news.bell(name)

        def wait(seconds: float) -> None:
            bell.wait(min(seconds, news.patience))
            # Whatever rang until now is seen by the look that follows.
            bell.clear()

        try:
            yield from arrivals(
                lambda seen: self._news(key, seen),
                wait,
                key,
                after=after,
                timeout=timeout,
                poll=news.longest,
            )
        finally:
            news.forget(name, bell)

    def _news(self, key: str, after: int) -> News | None:
        def look(transaction: "Transaction", *, certain: bool) -> News | None:
            for _, uid, last_seq in transaction.run("find_life", self._namespace, key.encode()):
                if last_seq <= after:
                    return uid, last_seq, []
                session = rows.find(transaction, self._namespace, key)
                if session is None:
                    return None
                damage = self.database.damage if certain else None
                found = reading.everything(transaction, session, damage, last=None, after=after)
                return session.state.uid, session.last_seq, found
            return None

        return self._look_at_messages(look)

    # --- carried whole -----------------------------------------------------------------------

    def namespaces(self) -> list[str]:
        """Those of the database that have a life, be it in the trash only."""
        return self._look(lambda transaction: [name for (name,) in transaction.run("namespaces")])

    def lives(self) -> list[LifeMark]:
        """Every life of this namespace, the deleted ones first."""
        return self._look(lambda transaction: whole.lives(transaction, self._namespace))

    @contextmanager
    def read_life(self, mark: LifeMark, *, after: int = 0) -> Iterator[Reading]:
        """A look at one life."""
        self._check_open()
        with self.database.read() as transaction:
            yield whole.read(transaction, self._namespace, mark, after=after)

    @contextmanager
    def hold_life(self, mark: LifeMark, *, after: int = 0) -> Iterator[Reading]:
        """The same while nobody else can change it."""
        self._check_open()
        lock = not self.read_only
        with self.database.write() if lock else self.database.read() as transaction:
            yield whole.read(transaction, self._namespace, mark, after=after, lock=lock)

    @contextmanager
    def writing_lives(self) -> Iterator[LifeWriter]:
        """Write several, in one transaction."""
        self._check_writable()
        with self.database.write() as transaction:
            if self._lease is not None:
                self._lease.check_own()
                self._lease.check(transaction)
            yield whole.Writer(transaction, self._namespace)

    # --- health and end ----------------------------------------------------------------------

    def health(self) -> Health:
        """Whether writes can be expected to work."""
        self._check_open()
        wrong, problems = self.database.problems()
        return Health(ok=not wrong, free_bytes=None, problems=(*wrong, *problems))

    def close(self) -> None:
        """Let go of every lease, and of the database; a second call does nothing."""
        if self._held.closed:
            return
        release_all(self.database, self._held)
        self.database.let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _look(self, work: Callable[["Transaction"], T]) -> T:
        self._check_open()
        return self.database.look(work)

    def _write(self, work: Callable[["Transaction"], T]) -> T:
        """What the work gives, in a transaction behind the lease, if there is one."""
        self._check_open()
        lease = self._lease
        if lease is None:
            return self.database.change(work)
        lease.check_own()

        def fenced(transaction: "Transaction") -> T:
            lease.check(transaction)
            return work(transaction)

        return self.database.change(fenced)

    def _place(self, key: str) -> Place:
        self._check_open()
        if self._lease is None:
            return Place(self._namespace, key)
        self._lease.check_own()
        return Place(self._namespace, key, self._lease.epoch)

    def _tell(self, key: str) -> None:
        self.database.news.tell(rows.name_of(self._namespace, key))

    def _check_open(self) -> None:
        if self._held.closed:
            raise StoreClosed("the store is closed")

    def _check_writable(self) -> None:
        self._check_open()
        self.database.check_writable()
