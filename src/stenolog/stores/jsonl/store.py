"""JSONLStore: sessions as append-only files in a folder.

Lock order: gate (this process) → flock (all processes) → mutex (memory).
"""

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

from msgspec.structs import replace

from stenolog.codec import check_key, check_once, encode_message, encode_object
from stenolog.errors import (
    DamagedStore,
    LeaseLost,
    NoSuchSession,
    ReadOnly,
    StenologError,
    StoreBusy,
    StoreClosed,
)
from stenolog.records import (
    Compacted,
    Health,
    Message,
    Purged,
    SessionInfo,
    Span,
    Trashed,
    Undo,
    Undone,
)
from stenolog.stores import catalog_file, operations
from stenolog.stores import state as states
from stenolog.stores.arguments import (
    Batch,
    check_count,
    check_int,
    check_namespace,
    check_optional_int,
    make_batch,
    make_group,
)
from stenolog.stores.base import Append, Deleted, SessionView
from stenolog.stores.disk import (
    open_descriptor,
    sync_file,
    sync_folder,
    write_all,
    write_problem,
)
from stenolog.stores.following import NewMessages, poll_messages
from stenolog.stores.jsonl import archive, leases, rewrite, session_list, snapshots, trash, writer
from stenolog.stores.jsonl.directory import LOW_DISK, Directory, store_error
from stenolog.stores.jsonl.leases import JSONLLease
from stenolog.stores.jsonl.lifecycle import Lifecycle, has_session
from stenolog.stores.jsonl.log import Log, LogLookup
from stenolog.stores.jsonl.open_logs import OpenLogCache, T
from stenolog.stores.jsonl.purge import Purger
from stenolog.stores.jsonl.session_list import list_keys
from stenolog.stores.jsonl.snapshot_writer import JSONLSnapshotWriter
from stenolog.stores.jsonl.write_queue import Check, WriteQueue, delete_if_empty
from stenolog.stores.jsonl.writer import Outcome
from stenolog.stores.locks import InUseCounter
from stenolog.stores.snapshots import SnapshotMark, SnapshotReading, SnapshotWriter

CACHE_BYTES: Final = 64 * 1024 * 1024
BUSY_TIMEOUT: Final = 5.0
_FOLLOW_POLL: Final = 0.02
"""Seconds between two checks of a followed log."""

_stores: "weakref.WeakSet[JSONLStore]" = weakref.WeakSet()


class _OpenSession:
    """A session during an operation: its locked log, or None if the session has no log."""

    def __init__(self, key: str, log: Log | None) -> None:
        """Read the state. The caller holds the mutex of the log."""
        self._log = log if log is not None and log.state_if_any() is not None else None
        self.state, self.last_seq = states.blank(key, "", 1, ""), 0
        if self._log is not None:
            self.state, self.last_seq = self._log.settled_state()

    def visible(self, *, last: int | None = None) -> list[Message]:
        """Return the visible messages, or only the last `last` of them."""
        return [] if self._log is None else self._log.history(last=last, after=None)

    def complete(self, step: Undo) -> Undo:
        """Return an undo step with the parts that the state omits."""
        return step if self._log is None else self._log.undo_step(step)


class JSONLStore:
    """Sessions as files under `workspace/namespace`; stores/base.py documents each method.

    `busy_timeout` is the time in seconds that a call waits for other writers. `cache_bytes` limits
    the memory for the newest messages. With `read_only` the store takes no lock, repairs nothing
    and writes nothing.
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
        check_namespace(namespace)
        self._read_only = read_only
        self._busy_timeout = busy_timeout
        self._cache_bytes = cache_bytes
        self._closed = threading.Event()
        self._directory = Directory(Path(workspace) / namespace, read_only=read_only)
        self._leases: weakref.WeakSet[JSONLLease] = weakref.WeakSet()
        self._fence: Check | None = None
        """Function that raises LeaseLost if the lease of this store has ended."""
        self._start()
        _stores.add(self)

    def _start(self) -> None:
        """Create the locks and tables, at the start and in a forked child."""
        self._leasing = threading.Lock()
        self._in_use = InUseCounter(self._release)
        self._logs = OpenLogCache(
            self._directory, busy_timeout=self._busy_timeout, cache_bytes=self._cache_bytes
        )
        self._queue = WriteQueue(self._logs, busy_timeout=self._busy_timeout)
        self._lifecycle = Lifecycle(self._logs, self._queue, busy_timeout=self._busy_timeout)
        self._snapshot_cache = snapshots.SnapshotCache()
        self._snapshot_writer = JSONLSnapshotWriter(
            self._logs,
            self._lifecycle,
            self._snapshot_cache,
            busy_timeout=self._busy_timeout,
        )
        self._purger = Purger(self._logs, self._queue, busy_timeout=self._busy_timeout)

    def __repr__(self) -> str:
        return f"JSONLStore({str(self.folder.parent)!r}, namespace={self.folder.name!r})"

    @property
    def folder(self) -> Path:
        """Folder of the logs and of the catalog."""
        return self._directory.path

    def catalog_file(self) -> Path:
        """Return the path of the catalog."""
        return self.folder / catalog_file.NAME

    @property
    def read_only(self) -> bool:
        """Whether the store was opened read-only."""
        return self._read_only

    @property
    def busy_timeout(self) -> float:
        """Seconds that a call waits for other writers."""
        return self._busy_timeout

    # --- appending ---------------------------------------------------------------------------

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        """Append `{"role": role, "content": content}`; return its seq."""
        return self._append(key, encode_object({"role": role, "content": content}), once)

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append one message; return its seq."""
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
        """Append a batch completely or not at all; return its seqs."""
        batch = make_batch(messages, once, at)
        if not batch.payloads:
            with self._in_use.entry:
                self._check_write(key)
            return []
        first = self._append_batch(key, batch)
        return list(range(first, first + len(batch.payloads)))

    def add_group(self, key: str, appends: Sequence[Append]) -> list[list[int] | StenologError]:
        """Append for several callers in one write; return the seqs or error of each caller."""
        group, results = make_group(appends)
        with self._in_use.entry:
            self._check_write(key)
            outcomes = self._queue.append_group(key, [batch for _, batch in group], self._fence)
        for (index, batch), first in zip(group, outcomes, strict=True):
            if isinstance(first, StenologError):
                results[index] = first
            else:
                results[index] = list(range(first, first + len(batch.payloads)))
        return results

    def _append(self, key: str, payload: bytes, once: str | None) -> int:
        """Append one message, by the fast path if no other writer is active."""
        if once is None and type(key) is str and not self._read_only:
            with self._in_use.entry:
                seq = self._queue.try_fast_append(key, payload, self._fence)
            if seq:
                return seq
        return self._append_batch(key, Batch((payload,), once))

    def _append_batch(self, key: str, batch: Batch) -> int:
        with self._in_use.entry:
            self._check(key, batch.once)
            return self._queue.append(key, batch, self._fence)

    # --- changing what is visible ------------------------------------------------------------

    def set_summary(self, key: str, text: str) -> None:
        """Replace the summary and nothing else."""
        self._change(key, operations.set_summary(text))

    def truncate_history(self, key: str, keep_last: int) -> None:
        """Hide all but the last `keep_last` visible messages."""
        self._change(key, operations.truncate(keep_last))

    def clear(self, key: str, *, upto: int | None = None) -> None:
        """Hide all messages and empty the summary."""
        self._change(key, operations.clear(upto))

    def hide(self, key: str, first: int, last: int) -> None:
        """Hide the messages with these seqs."""
        self._change(key, operations.hide(first, last))

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """Replace the summary and hide everything up to this seq."""
        decide = operations.checkpoint(summary=summary, upto=upto, expect_floor=expect_floor)
        self._change(key, decide)

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields of the session's metadata; None removes a field."""
        self._change(key, operations.set_meta(fields))

    def pop(self, key: str) -> Message | None:
        """Hide the last visible message and return it."""
        return self._change(key, operations.pop)

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> None:
        """Make exactly these messages visible."""
        self._change(key, operations.set_history(messages, expect_last=expect_last))

    def undo(self, key: str, *, answered: Span | None = None) -> Undone:
        """Undo the newest operation that can be undone."""
        return self._change(key, operations.undo(answered))

    def _change(self, key: str, decide: operations.Decide[T]) -> T:
        """Decide under the lock, and store the change in one write."""
        results: list[T] = []

        def work() -> None:
            log = self._logs.lock(key, create=False)
            self._check_lease(log)
            if log is None:
                # Decide before a file is created: most operations do not create a session.
                decision = self._decide_without_log(key, decide)
                if decision.change is None:
                    results.append(decision.result)
                    return
                log = self._logs.lock(key, create=True)
                self._check_lease(log)
            if log is None:
                raise NoSuchSession(key)
            with log.mutex:
                decision = decide(_OpenSession(key, log))
            # A change contains the result of all earlier records, so the earlier records must be on
            # the disk. Another process may have died before its sync. An operation that changes
            # nothing also waits until the records that it read are durable.
            writer.sync(log)  # guard: change-syncs-ground
            if decision.change is not None:
                stored, outcome = writer.append_change(log, decision.change, decision.payloads)
                self._queue.drop_after_error(log, outcome)
                if not stored:
                    raise outcome.failure(f"writing {key!r}")
            results.append(decision.result)

        with self._in_use.entry:
            self._check(key, None)
            self._queue.run_exclusive(key, work)
        return results[0]

    def _decide_without_log(self, key: str, decide: operations.Decide[T]) -> operations.Decision[T]:
        """Decide on a session that does not exist."""
        decision = None
        try:
            decision = decide(_OpenSession(key, None))
        finally:
            if decision is None or decision.change is None:
                # The session may have just been deleted. Its deletion must be durable before this
                # call returns.
                trash.sync_renames(self._directory)
        return decision

    # --- compaction --------------------------------------------------------------------------

    def compact(self, key: str) -> Compacted:
        """Move the messages up to the floor into an archive."""
        with self._in_use.entry:
            self._check_write(key)
            return self._compact(key)

    def _compact(self, key: str) -> Compacted:
        def look(log: Log) -> tuple[Log, str]:
            return log, log.known_state().uid

        deadline = time.monotonic() + self._busy_timeout
        try:
            while (log_and_uid := self._read(key, look)) is not None:
                uid = log_and_uid[1]
                with archive.locked_folder(self._directory, uid, deadline, create=True) as folder:
                    # The previous holder of the lock may have replaced or removed the log.
                    log_and_uid = self._read(key, look)
                    if log_and_uid is None or log_and_uid[1] != uid:
                        break
                    # A purge may have removed the folder.
                    if folder is not None and os.fstat(folder).st_nlink:
                        prepared = rewrite.prepare_archive(log_and_uid[0], folder)
                        # Drop the log: its descriptor keeps the lock if the release failed.
                        log_and_uid = None
                        return (
                            rewrite.NOTHING_ARCHIVED
                            if prepared is None
                            else self._finish(key, prepared)
                        )
                if time.monotonic() > deadline:
                    raise StoreBusy(
                        f"{key!r}: other processes keep removing its archive folder; try again"
                    )
        except OSError as error:
            raise Outcome(0, error).failure(f"archiving {key!r}") from error
        return rewrite.NOTHING_ARCHIVED

    def _finish(self, key: str, prepared: rewrite.PreparedArchive) -> Compacted:
        done = [rewrite.NOTHING_ARCHIVED]

        def work() -> None:
            log = self._logs.lock(key, create=False)
            if log is not None:
                try:
                    done[0] = rewrite.finish_compaction(log, prepared, writer.now())
                finally:
                    self._logs.discard(log)

        with self._in_use.entry:
            self._check_write(key)
            self._queue.run_exclusive(key, work)
        return done[0]

    # --- lifecycle ---------------------------------------------------------------------------

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Create a new session from the visible messages, up to the seq `at`."""
        check_key(new_key)
        check_optional_int(at=at)
        with self._in_use.entry:
            self._check_write(key)
            self._lifecycle.fork(key, new_key, at)

    def delete(self, key: str) -> Trashed:
        """Move the session to the trash."""
        with self._in_use.entry:
            self._check_write(key)
            return self._lifecycle.delete(key)

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Restore the last deleted session of this key, or the session with this uid."""
        if as_key is not None:
            check_key(as_key)
        with self._in_use.entry:
            self._check_write(key)
            self._lifecycle.restore(key, uid, as_key)

    def list_trash(self) -> list[Trashed]:
        """Return the deleted sessions, last deleted first."""
        with self._in_use.entry:
            return trash.list_deleted(self._directory)

    def purge(self, key: str, *, before: int | None = None) -> Purged:
        """Delete the session, or its messages below a seq, permanently."""
        check_optional_int(before=before)
        with self._in_use.entry:
            self._check_write(key)
            meta = self._meta(key)
            if before is None:
                purged = self._purger.purge(key)
            else:
                purged = self._purger.purge_before(key, before)
        return replace(purged, not_reached=(*purged.not_reached, *states.import_sources(meta)))

    def purge_trash(self, key: str, entries: Collection[Deleted]) -> Purged:
        """Delete exactly these sessions of a key from the trash, permanently."""
        with self._in_use.entry:
            self._check_write(key)
            return self._purger.purge_trash(key, entries)

    def unfinished_purges(self) -> list[Trashed]:
        """Return the sessions whose purge was interrupted."""
        with self._in_use.entry:
            return self._purger.unfinished()

    def finish_purge(self, uid: str) -> Purged:
        """Finish the interrupted purge of the session with this uid."""
        with self._in_use.entry:
            self._check_writable()
            return self._purger.finish(uid)

    def _meta(self, key: str) -> Mapping[str, Any]:
        try:
            return self._logs.read(key, lambda log: log.known_state().meta) or {}
        except DamagedStore:
            return {}

    def leased(self, keys: Collection[str]) -> set[str]:
        """Return the keys whose lease is held now, by any process."""
        return leases.leased(self.folder, keys)

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> JSONLLease:
        """Take the lease of this session: one holder at a time, in all processes."""
        states.check_lease_times(ttl, wait)
        deadline = time.monotonic() + (self._busy_timeout if wait is None else wait)
        with self._in_use.entry:
            self._check_write(key)
            if self._logs.read(key, lambda _: True) is None:
                raise NoSuchSession(key)
            lease = leases.acquire(
                self._directory, self, key, ttl=ttl, deadline=deadline, pause=self._pause
            )
            try:
                self._queue.run_exclusive(key, lambda: self._check_exists(key))
            except NoSuchSession:
                lease.release_and_delete()
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

    def _check_exists(self, key: str) -> None:
        """Raise NoSuchSession if the session was purged while this call waited for the lease.

        The check holds the lock of the log, because a purge first ends the lease and then removes
        the log.
        """
        log = self._logs.lock(key, create=False)
        if log is None or not has_session(log):
            raise NoSuchSession(key)

    def fenced_by(self, lease: JSONLLease) -> "JSONLStore":
        """Return this store with a check that rejects writes once the lease has ended."""
        fenced = copy.copy(self)
        fenced._fence = lease.check
        _stores.add(fenced)
        return fenced

    def _check_lease(self, log: Log | None) -> None:
        """Raise LeaseLost if the lease has ended; then delete the locked log if it is empty."""
        try:
            if self._fence is not None:
                self._fence()
        except LeaseLost:
            if log is not None:
                delete_if_empty(log)
            raise

    def _pause(self, seconds: float) -> None:
        if self._closed.wait(seconds):
            raise StoreClosed("the store is closed")

    def stamps(self) -> dict[str, str]:
        """Return a stamp for each session that differs after every change by any process."""
        with self._in_use.entry:
            return session_list.stamps(self._directory)

    def mark(self, name: str) -> str:
        """Return the value of the change marker `name`; empty for a marker without a value."""
        with self._in_use.entry:
            status = self._directory.stat(f".{name}")
        return "" if status is None else f"{status.st_ino}:{status.st_size}"

    def change_mark(self, name: str) -> None:
        """Give the change marker `name` a new value."""
        self._check_writable()
        # Append a line instead of replacing the file: concurrent processes do not conflict.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        folder = self._directory.descriptor
        with self._in_use.entry:
            try:
                descriptor = open_descriptor(f".{name}", flags, dir_fd=folder)
                try:
                    write_all(descriptor, f"{writer.now()} {name}\n".encode())
                    sync_file(descriptor)
                finally:
                    descriptor.close()
                sync_folder(folder)
            except OSError as error:
                raise store_error(error, f"writing {self.folder / f'.{name}'}") from error

    # --- reading -----------------------------------------------------------------------------

    def get_history(
        self,
        key: str,
        *,
        last: int | None = None,
        after: int | None = None,
        full: bool = False,
    ) -> list[Message]:
        """Return the visible messages by seq, or with `full` all messages."""
        check_count(last=last)
        check_optional_int(after=after)

        def look(log: Log) -> tuple[None, LogLookup]:
            if full:
                return None, log.all_messages(after=max(0, after or 0))
            return None, log.visible_messages(last=last, after=after)

        with self._in_use.entry:
            check_key(key)
            result = self._logs.read_with_archives(key, look)
        messages = result[1] if result is not None else []
        return messages if last is None or not full else messages[max(0, len(messages) - last) :]

    def get_summary(self, key: str) -> str:
        """Return the summary; may be empty."""
        return self._read(key, lambda log: log.known_state().summary) or ""

    def info(self, key: str) -> SessionInfo:
        """Return the session's metadata and counts."""
        info = self._read(key, lambda log: log.info())
        if info is None:
            raise NoSuchSession(key)
        return info

    def view(self, key: str, last: int | None = None) -> SessionView:
        """Return info, summary and visible messages of one moment."""
        return self._view(key, last, None)

    def refresh(self, view: SessionView) -> SessionView:
        """Return the messages since a view was taken, or a full view."""
        return self._view(view.key, view.last, view)

    def _view(self, key: str, last: int | None, old: SessionView | None) -> SessionView:
        check_count(last=last)

        def look(log: Log) -> tuple[tuple[SessionInfo, int, int | None], LogLookup]:
            state = log.known_state()
            unchanged = old is not None and old.holds(state.uid, state.generation, state.number)
            after = old.upto if old is not None and unchanged else None
            lookup = log.visible_messages(last=last, after=after)
            # guard: view-reads-on-after-complete-writes
            return (log.info(), log.next_seq - 1, after), lookup

        with self._in_use.entry:
            check_key(key)
            result = self._logs.read_with_archives(key, look)
        if result is None:
            raise NoSuchSession(key)
        (info, upto, after), messages = result
        return SessionView(info=info, messages=tuple(messages), upto=upto, last=last, after=after)

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return the keys in byte order."""
        check_count(limit=limit)
        with self._in_use.entry:
            return list_keys(self._directory, prefix=prefix, limit=limit, after=after)

    def follow(
        self,
        key: str,
        *,
        after: int = 0,
        uid: str | None = None,
        timeout: float | None = None,
    ) -> Iterator[Message]:
        """Yield each message after `after` once, by seq, as it arrives."""
        check_key(key)
        check_int(after=after)
        if self._closed.is_set():
            raise StoreClosed("the store is closed")
        return poll_messages(
            lambda last_seq: self._new_messages(key, last_seq),
            self._closed.wait,
            key,
            after=max(0, after),
            uid=uid,
            timeout=timeout,
            poll=_FOLLOW_POLL,
        )

    def _new_messages(self, key: str, after: int) -> NewMessages | None:
        """Return the messages after a seq; None if the session does not exist.

        The messages are synced before a follower sees them. Otherwise a power cut could remove
        messages, and later messages would get their seqs.
        """

        def look(log: Log) -> tuple[tuple[Log, str, int], LogLookup]:
            lookup = log.all_messages(after=after) if log.next_seq > after + 1 else LogLookup([])
            return (log, log.known_state().uid, log.next_seq - 1), lookup

        with self._in_use.entry:
            result = self._logs.read_with_archives(key, look)
            if result is None:
                return None
            (log, uid, end), messages = result
            if messages:
                try:
                    writer.sync(log)  # guard: follow-syncs-first
                except OSError as error:
                    self._logs.discard(log)
                    raise store_error(error, f"syncing the log of {key!r}") from error
            return uid, end, messages

    # --- snapshots ---------------------------------------------------------------------------

    def list_snapshots(self) -> list[SnapshotMark]:
        """Return every session in this folder, deleted sessions first."""
        with self._in_use.entry:
            return snapshots.list_snapshots(self._directory, self._snapshot_cache)

    @contextmanager
    def read_snapshot(self, mark: SnapshotMark, *, after: int = 0) -> Iterator[SnapshotReading]:
        """Read one session as of one moment."""
        with self._in_use.entry, self._reading(mark, after, hold=False) as reading:
            yield reading

    @contextmanager
    def hold_snapshot(self, mark: SnapshotMark) -> Iterator[SnapshotReading]:
        """Read one session while the lock of its log makes all writers wait."""
        with self._in_use.entry, self._reading(mark, 0, hold=not self._read_only) as reading:
            yield reading

    def _reading(
        self, mark: SnapshotMark, after: int, *, hold: bool
    ) -> AbstractContextManager[SnapshotReading]:
        until = time.monotonic() + self._busy_timeout
        return snapshots.read(
            self._directory, mark, self._snapshot_cache, after=after, until=until, hold=hold
        )

    @contextmanager
    def snapshot_writer(self) -> Iterator[SnapshotWriter]:
        """Write several sessions, each to a separate file."""
        self._check_writable()
        with self._in_use.entry, self._snapshot_writer.writing() as writing:
            yield writing

    # --- health and close --------------------------------------------------------------------

    def health(self) -> Health:
        """Return whether writes can be expected to succeed, and known problems."""
        with self._in_use.entry:
            return self._health()

    def _health(self) -> Health:
        problems = list(self._directory.problems)
        wrong = [
            f"{name}: a sync failed and the log could not be rewritten yet; check the disk"
            for name in sorted(self._logs.suspects)
        ]
        try:
            problems += self._directory.network()
            cannot = None if self._read_only else write_problem(self._directory.path)
            wrong += [] if cannot is None else [cannot]  # guard: health-read-only-disk
            free: int | None = self._directory.free_bytes()
        except OSError as error:
            free = None
            wrong.append(str(store_error(error, f"looking at {self._directory.path}")))
        if free is not None and free < LOW_DISK:
            wrong.append(f"only {free:,} bytes are free at {self._directory.path}; free some space")
        return Health(ok=not wrong, free_bytes=free, problems=(*wrong, *problems))

    def close(self) -> None:
        """Close every file. A second call completes an interrupted first call."""
        try:
            self._closed.set()
            _stores.discard(self)
            with self._leasing:
                leases = list(self._leases)
            for lease in leases:
                lease.release()
        finally:
            # Call it twice, because Ctrl-C may interrupt the first call.
            try:
                self._in_use.end()
            finally:
                self._in_use.end()

    def _release(self) -> None:
        self._logs.close()
        session_list.close(self._directory)
        self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read(self, key: str, look: Callable[[Log], T]) -> T | None:
        check_key(key)
        with self._in_use.entry:
            return self._logs.read(key, look)

    def _check(self, key: str, once: str | None) -> None:
        """Check the arguments of a write that checks the lease later, under the log's lock."""
        check_key(key)
        check_once(once)
        self._check_read_only()

    def _check_write(self, key: str) -> None:
        """Check the key, and the lease for an operation that has no later check under a lock."""
        check_key(key)
        self._check_writable()

    def _check_writable(self) -> None:
        self._check_read_only()
        if self._fence is not None:
            self._fence()

    def _check_read_only(self) -> None:
        if self._read_only:
            raise ReadOnly("the store was opened with read_only=True")

    def _after_fork(self) -> None:
        self._logs.close()
        for lease in list(self._leases):
            lease.close_in_child()
        if self._closed.is_set():
            # Only the store of a lease reaches this line: a fork must not reopen a closed store.
            return
        # A thread of the parent may have held the event's internal lock at the fork.
        self._closed = threading.Event()
        self._start()


def _after_fork() -> None:
    for store in list(_stores):
        store._after_fork()


os.register_at_fork(after_in_child=_after_fork)
