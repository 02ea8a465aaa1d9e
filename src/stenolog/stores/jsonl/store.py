"""JSONLStore: sessions as append-only files in a folder.

The order of locks: gate (this process) → flock (all processes) → mutex (memory).
"""

import copy
import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from msgspec.structs import replace

from stenolog.codec import check_key, check_once, check_times, encode_message, encode_object
from stenolog.errors import (
    DamagedStore,
    LeaseLost,
    NoSuchSession,
    NothingToUndo,
    ReadOnly,
    StenologError,
    StoreClosed,
    UsageError,
)
from stenolog.records import (
    Change,
    ChangeRecord,
    Compacted,
    Health,
    Message,
    Purged,
    SessionInfo,
    Span,
    State,
    Trashed,
    Undo,
    Undone,
)
from stenolog.stores import state as states
from stenolog.stores.arguments import check_whole, encoded
from stenolog.stores.base import Append, Deleted
from stenolog.stores.disk import refusal
from stenolog.stores.following import News, arrivals
from stenolog.stores.jsonl import (
    archive,
    compaction,
    leases,
    listing,
    marks,
    trash,
    whole,
    writer,
)
from stenolog.stores.jsonl.copies import Copies
from stenolog.stores.jsonl.directory import LOW_DISK, Directory, explained
from stenolog.stores.jsonl.follow import POLL, news
from stenolog.stores.jsonl.leases import JSONLLease
from stenolog.stores.jsonl.listing import keys
from stenolog.stores.jsonl.lives import Lives
from stenolog.stores.jsonl.log import Found, Log
from stenolog.stores.jsonl.purging import Purging
from stenolog.stores.jsonl.scan import gather
from stenolog.stores.jsonl.table import Logs, T, flock
from stenolog.stores.jsonl.turns import Check, Turns, clear_away
from stenolog.stores.jsonl.uses import Uses
from stenolog.stores.jsonl.writer import Batch, Outcome
from stenolog.stores.whole import LifeMark, LifeWriter, Reading

CACHE_BYTES: Final = 64 * 1024 * 1024
BUSY_TIMEOUT: Final = 5.0

_stores: "weakref.WeakSet[JSONLStore]" = weakref.WeakSet()

Decide = Callable[[Log, State, int], Change | None]
"""Turns a log, its state and its last seq into the change to be made."""


class JSONLStore:
    """Sessions as files under `workspace/namespace`; stores/base.py says what each call means.

    `busy_timeout`: how long a call waits for other writers. `cache_bytes`: how much of the newest
    messages may stay in memory. `read_only`: no lock, no repair, no write at all.
    """

    def __init__(
        self,
        workspace: str | os.PathLike[str],
        *,
        namespace: str = "sessions",
        read_only: bool = False,
        busy_timeout: float = BUSY_TIMEOUT,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if namespace in ("", ".", "..") or "/" in namespace or "\0" in namespace:
            raise UsageError(f"namespace {namespace!r} is not the name of a folder")
        self._read_only = read_only
        self._busy_timeout = busy_timeout
        self._cache_bytes = cache_bytes
        self._closed = threading.Event()
        self._directory = Directory(Path(workspace) / namespace, read_only=read_only)
        self._leases: weakref.WeakSet[JSONLLease] = weakref.WeakSet()
        self._fence: Check | None = None
        """Raises LeaseLost where the turn is over behind which this store is."""
        self._begin()
        _stores.add(self)

    def _begin(self) -> None:
        """Locks and tables as a process begins with them, a forked child included."""
        self._leasing = threading.Lock()
        self._uses = Uses(self._release)
        self._logs = Logs(
            self._directory, busy_timeout=self._busy_timeout, cache_bytes=self._cache_bytes
        )
        self._turns = Turns(self._logs, busy_timeout=self._busy_timeout)
        self._lives = Lives(self._logs, self._turns, busy_timeout=self._busy_timeout)
        self._memory = whole.Memory()
        self._copies = Copies(
            self._logs,
            self._turns,
            self._lives,
            self._memory,
            busy_timeout=self._busy_timeout,
        )
        self._purging = Purging(
            self._logs, self._turns, busy_timeout=self._busy_timeout, look_up=_looked_up
        )

    def __repr__(self) -> str:
        return f"JSONLStore({str(self.folder.parent)!r}, namespace={self.folder.name!r})"

    @property
    def folder(self) -> Path:
        """Where the logs are, and the index beside them."""
        return self._directory.path

    @property
    def read_only(self) -> bool:
        """Whether it was opened so that nothing is written."""
        return self._read_only

    @property
    def busy_timeout(self) -> float:
        """How long a call waits for other writers, in seconds."""
        return self._busy_timeout

    # --- appending ---------------------------------------------------------------------------

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        """Append `{"role": role, "content": content}`; its seq."""
        return self._append(key, encode_object({"role": role, "content": content}), once)

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append one message; its seq."""
        payload = encode_object(message) if type(message) is dict else encode_message(message)
        return self._append(key, payload, once)

    def add_messages(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        once: str | None = None,
        at: Sequence[datetime] | None = None,
    ) -> list[int]:
        """Append a batch, whole or not at all; its seqs."""
        payloads = encoded(messages)
        times = None if at is None else check_times(at, len(payloads))
        if not payloads:
            with self._uses:
                check_once(once)
                self._check_turn(key)
            return []
        first = self._append_batch(key, Batch(payloads, once, times))
        return list(range(first, first + len(payloads)))

    def add_group(self, key: str, appends: Sequence[Append]) -> list[list[int] | StenologError]:
        """The appends of several callers in one write; for each its seqs, or what went wrong."""
        results: list[list[int] | StenologError] = [[] for _ in appends]
        group: list[tuple[int, Batch]] = []
        for index, one in enumerate(appends):
            try:
                check_once(one.once)
                payloads = encoded(one.messages)
                times = None if one.at is None else check_times(one.at, len(payloads))
            except StenologError as error:
                results[index] = error
            else:
                if payloads:
                    group.append((index, Batch(payloads, one.once, times)))
        with self._uses:
            self._check_turn(key)
            found = self._turns.append_group(key, [batch for _, batch in group], self._fence)
        for (index, batch), first in zip(group, found, strict=True):
            if isinstance(first, StenologError):
                results[index] = first
            else:
                results[index] = list(range(first, first + len(batch.payloads)))
        return results

    def _append(self, key: str, payload: bytes, once: str | None) -> int:
        """One message: at once where nobody is in the way, else like any batch."""
        if once is None and type(key) is str and not self._read_only:
            with self._uses:
                seq = self._turns.append_at_once(key, payload, self._fence)
            if seq:
                return seq
        return self._append_batch(key, Batch((payload,), once))

    def _append_batch(self, key: str, batch: Batch) -> int:
        with self._uses:
            self._check(key, batch.once)
            return self._turns.append(key, batch, self._fence)

    # --- changing what is in sight -----------------------------------------------------------

    def set_summary(self, key: str, text: str) -> None:
        """Replace the summary and nothing else."""
        states.check_summary(text)
        self._change(
            key, lambda _, state, __: states.decide_summary(state, text), create=bool(text)
        )

    def truncate_history(self, key: str, keep_last: int) -> None:
        """Hide all but the last visible ones."""
        check_whole(keep_last=keep_last)
        self._change(key, lambda _, state, end: states.decide_truncate(state, end, keep_last))

    def clear(self, key: str) -> None:
        """Hide all messages and empty the summary."""
        self._change(
            key,
            lambda _, state, end: states.decide_checkpoint(
                state, end, key=key, summary="", upto=end, expect_floor=None, op="clear"
            ),
        )

    def hide(self, key: str, first: int, last: int) -> None:
        """Hide the messages with these seqs."""
        check_whole(first=first, last=last)
        if first > last:
            raise UsageError(f"hide from {first} to {last}: the first comes after the last")
        self._change(key, lambda _, state, end: states.decide_hide(state, end, [(first, last)]))

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """Replace the summary and hide everything up to this seq."""
        states.check_summary(summary)
        check_whole(upto=upto, expect_floor=expect_floor)

        def decide(_: Log | None, state: State, end: int) -> Change | None:
            return states.decide_checkpoint(
                state, end, key=key, summary=summary, upto=upto, expect_floor=expect_floor
            )

        self._check_lease(None)
        # A call that must fail on an empty session does so before a file is made for it.
        log = self._logs.opened(key)
        if (log is None or not log.exists) and self._read(key, lambda _: True) is None:
            decide(None, _empty(key), 0)
        self._change(key, decide, create=bool(summary))

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields of the session's own data; None removes one."""
        given = {name: value for name, value in fields.items() if value is not None}
        encode_object(given)
        self._change(
            key, lambda _, state, __: states.decide_meta(state, fields), create=bool(given)
        )

    def pop(self, key: str) -> Message | None:
        """Hide the last visible message and return it."""
        popped: list[Message] = []

        def decide(log: Log, state: State, end: int) -> Change | None:
            popped[:] = log.history(last=1, after=None)
            return states.decide_hide(state, end, [(m.seq, m.seq) for m in popped])

        self._change(key, decide)
        return popped[0] if popped else None

    def set_history(self, key: str, messages: Sequence[Message | Mapping[str, Any]]) -> None:
        """Make exactly these messages visible."""
        payloads = encoded(messages)
        added: list[bytes] = []

        def decide(log: Log, state: State, end: int) -> Change | None:
            before = log.history(last=None, after=None) if log.state is not None else []
            change, added[:] = states.decide_replace(state, end, before, payloads)
            return change

        self._change(key, decide, create=bool(payloads), payloads=added)

    def undo(self, key: str, *, answered: Span | None = None) -> Undone:
        """Take back the newest operation on what is in sight."""
        undone: list[Undone] = []

        def decide(log: Log, state: State, _: int) -> Change:
            entry = states.newest_undo(state, key)
            if entry.elsewhere:
                entry = _looked_up(log, state, entry)
            change = states.decide_undo(state, entry, answered)
            undone[:] = [states.undone(state, entry, change, answered)]
            return change

        self._change(key, decide)
        if not undone:
            raise NothingToUndo(f"{key!r}: there is no such session")
        return undone[0]

    def _change(
        self, key: str, decide: Decide, *, create: bool = False, payloads: Sequence[bytes] = ()
    ) -> None:
        """Decide under the lock, and carry it out in one write."""

        def work() -> None:
            log = self._logs.lock(key, create=create)
            self._check_lease(log)
            if log is None:
                # There is nothing to do only if who deleted it has done so for good.
                trash.settle(self._directory)
                return
            if log.state is None and not create:
                return
            with log.mutex:
                state, end = log.settled() if log.state is not None else (_empty(key), 0)
                decided = decide(log, state, end)
            # A change carries the result of all that came before, so that must be on the disk:
            # another process may have died before it synced what it wrote. And one that changes
            # nothing is done only when what did it before is there to stay.
            writer.sync(log)
            if decided is not None:
                stored, outcome = writer.change(log, decided, payloads)
                self._turns.settle(log, outcome)
                if not stored:
                    raise outcome.failure(f"writing {key!r}")

        with self._uses:
            self._check(key, None)
            self._turns.alone(key, work)

    # --- compaction --------------------------------------------------------------------------

    def compact(self, key: str) -> Compacted:
        """Move what lies below the floor into an archive."""
        with self._uses:
            self._check_turn(key)
            return self._compact(key)

    def _compact(self, key: str) -> Compacted:
        # The uid is taken where the log stands still: a reader beside may be loading it anew.
        found = self._read(key, lambda log: (log, log.known_state().uid))
        if found is None:
            return compaction.NOTHING
        try:
            uid = found[1]
            folder = compaction.archive_folder(self._directory, uid)
            try:
                flock(folder, time.monotonic() + self._busy_timeout, f"the archive of {key!r}")
                # Whoever held it before may have replaced the file.
                found = self._read(key, lambda log: (log, log.known_state().uid))
                if found is None or found[1] != uid:
                    return compaction.NOTHING
                prepared = compaction.prepare(found[0], folder)
                return self._finish(key, prepared) if prepared is not None else compaction.NOTHING
            finally:
                fcntl.flock(folder, fcntl.LOCK_UN)
                os.close(folder)
        except OSError as error:
            raise Outcome(0, error).failure(f"archiving {key!r}") from error

    def _finish(self, key: str, prepared: compaction.Prepared) -> Compacted:
        done = [compaction.NOTHING]

        def work() -> None:
            log = self._logs.lock(key, create=False)
            if log is not None and log.state is not None:
                try:
                    done[0] = compaction.finish(log, prepared, writer.now())
                finally:
                    self._logs.discard(log)

        with self._uses:
            self._check_turn(key)
            self._turns.alone(key, work)
        return done[0]

    # --- beginning and ending ----------------------------------------------------------------

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Make a session of its own from what is in sight, up to the seq `at`."""
        check_key(new_key)
        check_whole(at=at)
        with self._uses:
            self._check_turn(key)
            self._lives.fork(key, new_key, at)

    def delete(self, key: str) -> Trashed:
        """Put the session into the trash."""
        with self._uses:
            self._check_turn(key)
            return self._lives.delete(key)

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Bring back the last deleted session of this key, or the one of this uid."""
        if as_key is not None:
            check_key(as_key)
        with self._uses:
            self._check_turn(key)
            self._lives.restore(key, uid, as_key)

    def list_trash(self) -> list[Trashed]:
        """The deleted sessions, the last deleted first."""
        with self._uses:
            return trash.listed(self._directory)

    def purge(self, key: str, *, before: int | None = None) -> Purged:
        """Delete for good: the session, or its messages below a seq."""
        check_whole(before=before)
        with self._uses:
            self._check_turn(key)
            meta = self._meta(key)
            if before is None:
                purged = self._purging.purge(key)
            else:
                purged = self._purging.purge_before(key, before)
        return replace(purged, not_reached=(*purged.not_reached, *states.taken_from(meta)))

    def purge_trash(self, key: str, lives: Collection[Deleted]) -> Purged:
        """Delete these sessions of a key for good, all of them in the trash, and nothing else."""
        with self._uses:
            self._check_turn(key)
            return self._purging.purge_trash(key, lives)

    def unfinished_purges(self) -> list[Trashed]:
        """What interrupted purges left."""
        with self._uses:
            return self._purging.unfinished()

    def finish_purge(self, uid: str) -> Purged:
        """End the interrupted purge of the session with this uid."""
        with self._uses:
            self._check_writable()
            return self._purging.finish(uid)

    def _meta(self, key: str) -> Mapping[str, Any]:
        try:
            return self._logs.read(key, lambda log: log.known_state().meta) or {}
        except DamagedStore:
            return {}

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> JSONLLease:
        """The turn in this session: one holder at a time, in all processes."""
        states.check_lease(ttl, wait)
        deadline = time.monotonic() + (self._busy_timeout if wait is None else wait)
        with self._uses:
            self._check_turn(key)
            if self._logs.read(key, lambda _: True) is None:
                raise NoSuchSession(key)
            lease = leases.take(
                self._directory, self, key, ttl=ttl, deadline=deadline, pause=self._pause
            )
            try:
                self._turns.alone(key, lambda: self._check_there(key))
            except NoSuchSession:
                lease.give_back()
                raise
            except BaseException:
                lease.release()
                raise
            with self._leasing:
                self._leases.add(lease)
        if self._closed.is_set():
            lease.release()
            raise StoreClosed("the store is closed")
        return lease

    def _check_there(self, key: str) -> None:
        """Raise NoSuchSession where it was purged while the turn was waited for.

        With the lock of the log, because a purge ends the turn first, and then takes the log away.
        """
        log = self._logs.lock(key, create=False)
        if log is None or not log.exists:
            raise NoSuchSession(key)

    def behind(self, lease: JSONLLease) -> "JSONLStore":
        """The same store, which refuses writes once the lease is over."""
        fenced = copy.copy(self)
        fenced._fence = lease.check
        _stores.add(fenced)
        return fenced

    def _check_lease(self, log: Log | None) -> None:
        """Raise LeaseLost where the turn is over; the log, whose lock is held, is as it was."""
        try:
            if self._fence is not None:
                self._fence()
        except LeaseLost:
            if log is not None:
                clear_away(log)
            raise

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise StoreClosed("the store is closed")

    def stamps(self) -> dict[str, str]:
        """For each session a mark that is another one after every change, made anywhere."""
        with self._uses:
            return listing.stamps(self._directory)

    def mark(self, name: str) -> str:
        """The mark of this name; empty where it was never changed."""
        with self._uses:
            return marks.current(self._directory, name)

    def change_mark(self, name: str) -> None:
        """Make it another one."""
        self._check_writable()
        with self._uses:
            marks.change(self._directory, name)

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
        check_whole(last=last, after=after)
        if last is not None and last < 0:
            raise UsageError(f"last={last}: how many messages, 0 or more")

        def look(log: Log) -> tuple[None, Found]:
            if full:
                return None, log.everything(after=max(0, after or 0))
            return None, log.in_sight(last=last, after=after)

        with self._uses:
            check_key(key)
            seen = self._logs.gathered(key, look)
        messages = seen[1] if seen is not None else []
        return messages if last is None or not full else messages[max(0, len(messages) - last) :]

    def get_summary(self, key: str) -> str:
        """The summary; empty where there is none."""
        return self._read(key, lambda log: log.known_state().summary) or ""

    def info(self, key: str) -> SessionInfo:
        """What is known of the session."""
        found = self._read(key, lambda log: log.info())
        if found is None:
            raise NoSuchSession(key)
        return found

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Keys in the order of their bytes."""
        check_whole(limit=limit)
        if limit is not None and limit < 0:
            raise UsageError(f"limit={limit}: how many keys, 0 or more")
        with self._uses:
            return keys(self._directory, prefix=prefix, limit=limit, after=after)

    def follow(
        self, key: str, *, after: int = 0, timeout: float | None = None
    ) -> Iterator[Message]:
        """Each message past `after` once, by seq, as it arrives."""
        check_key(key)
        check_whole(after=after)
        if self._closed.is_set():
            raise StoreClosed("the store is closed")
        return arrivals(
            lambda seen: self._news(key, seen),
            self._closed.wait,
            key,
            after=max(0, after),
            timeout=timeout,
            poll=POLL,
        )

    def _news(self, key: str, after: int) -> News | None:
        with self._uses:
            return news(self._logs, key, after)

    # --- carried whole -----------------------------------------------------------------------

    def lives(self) -> list[LifeMark]:
        """Every life in this folder, the deleted ones first."""
        with self._uses:
            return whole.lives(self._directory, self._memory)

    @contextmanager
    def read_life(self, mark: LifeMark, *, after: int = 0) -> Iterator[Reading]:
        """A look at one life."""
        with self._uses, self._reading(mark, after, hold=False) as reading:
            yield reading

    @contextmanager
    def hold_life(self, mark: LifeMark, *, after: int = 0) -> Iterator[Reading]:
        """The same with the lock of its log, which all writers wait for."""
        with self._uses, self._reading(mark, after, hold=not self._read_only) as reading:
            yield reading

    def _reading(
        self, mark: LifeMark, after: int, *, hold: bool
    ) -> AbstractContextManager[Reading]:
        until = time.monotonic() + self._busy_timeout
        return whole.read(self._directory, mark, self._memory, after=after, until=until, hold=hold)

    @contextmanager
    def writing_lives(self) -> Iterator[LifeWriter]:
        """Write several, each to a file of its own."""
        self._check_writable()
        with self._uses, self._copies.writing() as writing:
            yield writing

    # --- health and end ----------------------------------------------------------------------

    def health(self) -> Health:
        """Whether writes can be expected to work."""
        with self._uses:
            return self._health()

    def _health(self) -> Health:
        problems = list(self._directory.problems)
        wrong = [
            f"{name}: a sync failed and the log could not be renewed yet; look at the disk"
            for name in sorted(self._logs.suspects)
        ]
        try:
            problems += self._directory.network()
            cannot = None if self._read_only else refusal(self._directory.path)
            wrong += [] if cannot is None else [cannot]
            free: int | None = self._directory.free_bytes()
        except OSError as error:
            free = None
            wrong.append(str(explained(error, f"looking at {self._directory.path}")))
        if free is not None and free < LOW_DISK:
            wrong.append(f"only {free:,} bytes are free at {self._directory.path}; make room")
        return Health(ok=not wrong, free_bytes=free, problems=(*wrong, *problems))

    def close(self) -> None:
        """Let go of every file; a second call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            _stores.discard(self)
            with self._leasing:
                held = list(self._leases)
            for lease in held:
                lease.release()
            self._uses.end()

    def _release(self) -> None:
        self._logs.close()
        listing.close(self._directory)
        self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _read(self, key: str, look: Callable[[Log], T]) -> T | None:
        check_key(key)
        with self._uses:
            return self._logs.read(key, look)

    def _check(self, key: str, once: str | None) -> None:
        """For what looks whether the turn is over while the log stands still."""
        check_key(key)
        check_once(once)
        self._check_mode()

    def _check_turn(self, key: str) -> None:
        """For what does not."""
        check_key(key)
        self._check_writable()

    def _check_writable(self) -> None:
        self._check_mode()
        if self._fence is not None:
            self._fence()

    def _check_mode(self) -> None:
        if self._read_only:
            raise ReadOnly("the store was opened with read_only=True")

    def _after_fork(self) -> None:
        self._logs.close()
        for lease in list(self._leases):
            lease.forget()
        if self._closed.is_set():
            # One behind a lease: what was closed is not opened again by a fork.
            return
        # A thread of the parent may have held what is inside of it.
        self._closed = threading.Event()
        self._begin()


def _empty(key: str) -> State:
    """A session before its first record."""
    return states.blank(key, "", 1, "")


def _looked_up(log: Log, state: State, entry: Undo) -> Undo:
    """An undo entry too long for the state: its change has it, in the log or in an archive."""
    records, _ = gather(log.read(0, log.end), offset=0)
    changes = [record.body for record in records if isinstance(record, ChangeRecord)]
    for change in changes:
        if change.number == entry.number:
            return states.entry_of(change)
    for opened in archive.chain(log.directory, state, 1):
        for change in opened.changes:
            if change.number == entry.number:
                return states.entry_of(change)
    raise DamagedStore(
        f"{log.key!r}: what change {entry.number} did is damaged and cannot be taken back"
    )


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
