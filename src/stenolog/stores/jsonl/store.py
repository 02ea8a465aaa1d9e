"""JSONLStore: sessions as append-only files in a folder.

Lock order: gate (this process) → flock (all processes) → mutex (memory).
"""

import copy
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

from stenolog.codec import check_key, check_once, encode_message, encode_object
from stenolog.errors import (
    LeaseLost,
    NoSuchSession,
    ReadOnly,
    StoreBusy,
    StoreClosed,
)
from stenolog.records import (
    CompactionResult,
    Message,
    SessionInfo,
    TrashedSession,
    Undo,
)
from stenolog.stores import operations
from stenolog.stores import state as states
from stenolog.stores.arguments import (
    Batch,
    check_count,
    check_int,
    check_lease_times,
    check_namespace,
    check_optional_int,
    check_text,
    make_batch,
)
from stenolog.stores.base import SessionView
from stenolog.stores.jsonl import archive, leases, rewrite, trash, writer
from stenolog.stores.jsonl.admin import JSONLAdmin
from stenolog.stores.jsonl.directory import (
    Directory,
)
from stenolog.stores.jsonl.leases import JSONLLease
from stenolog.stores.jsonl.lifecycle import Lifecycle, Purger, has_session
from stenolog.stores.jsonl.log import LiveMessages, Log
from stenolog.stores.jsonl.open_logs import OpenLogCache, T
from stenolog.stores.jsonl.session_list import StampCache, list_keys
from stenolog.stores.jsonl.write_queue import WriteCheck, WriteQueue, delete_if_empty
from stenolog.stores.jsonl.writer import Outcome
from stenolog.stores.locks import InUseCounter

CACHE_BYTES: Final = 64 * 1024 * 1024
BUSY_TIMEOUT_SECONDS: Final = 5.0
_FOLLOW_POLL_SECONDS: Final = 0.02
"""Seconds between two checks of a followed log."""

_stores: "weakref.WeakSet[JSONLStore]" = weakref.WeakSet()


class _OpenSession:
    """A session during an operation: its locked log, or None if the session has no log."""

    def __init__(self, key: str, log: Log | None) -> None:
        """Read the state. The caller holds the mutex of the log."""
        self._log = log if log is not None and log.state_if_any() is not None else None
        if self._log is None:
            self.state, self.last_seq = states.blank_state(key, "", 1, ""), 0
        else:
            self.state, self.last_seq = self._log.settled_state()

    def visible_messages(self, *, last: int | None = None) -> list[Message]:
        """Return the visible messages, or only the last `last` of them."""
        if self._log is None:
            return []
        live_part = self._log.visible_messages(last=last, after=None)
        if not live_part.archived_from:
            return live_part.messages
        return self._log.add_archived_messages(live_part, self._log.read_archives(live_part))

    def complete_undo_step(self, step: Undo) -> Undo:
        """Return an undo step with the fields that the state omits."""
        return step if self._log is None else self._log.complete_undo_step(step)


class JSONLStore(operations.SessionOperations):
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
        busy_timeout: float = BUSY_TIMEOUT_SECONDS,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        check_namespace(namespace)
        self._read_only = read_only
        self._busy_timeout = busy_timeout
        self._cache_bytes = cache_bytes
        self._closed = threading.Event()
        self._directory = Directory(Path(workspace) / namespace, read_only=read_only)
        self._leases: weakref.WeakSet[JSONLLease] = weakref.WeakSet()
        self._fence: WriteCheck | None = None
        """Function that raises LeaseLost if the lease of this store has ended."""
        self._create_locks()
        _stores.add(self)

    def _create_locks(self) -> None:
        """Create the locks and caches of this process: at the start, and in a forked child."""
        self._leasing = threading.Lock()
        self._in_use = InUseCounter(self._close_files)
        self._logs = OpenLogCache(
            self._directory, busy_timeout=self._busy_timeout, cache_bytes=self._cache_bytes
        )
        self._stamp_cache = StampCache(self._directory)
        self._queue = WriteQueue(self._logs)
        self._lifecycle = Lifecycle(self._logs, self._queue)
        self._synced_stamps: dict[str, str] = {}
        """Change stamps of the logs that were synced for a copy, by file name."""
        self._purger = Purger(self._logs, self._queue, self._lifecycle)

    def __repr__(self) -> str:
        return f"JSONLStore({str(self.folder.parent)!r}, namespace={self.folder.name!r})"

    @property
    def admin(self) -> JSONLAdmin:
        """The calls that administer the store."""
        return JSONLAdmin(self)

    @property
    def folder(self) -> Path:
        """Folder of the logs and of the catalog."""
        return self._directory.path

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
            check_key(key)
            check_once(batch.once)
            self._check_not_read_only()  # the lease is checked later, under the log's lock
            return self._queue.append(key, batch, self._fence)

    # --- changing what is visible ------------------------------------------------------------

    def _change(self, key: str, decide: operations.Decide[T]) -> T:
        """Call `decide` under the lock, and store the change in one write."""

        def decide_and_write() -> T:
            log = self._logs.lock(key, create=False)
            self._check_lease(log)
            if log is None:
                # Call `decide` before a file is created: most operations do not create a session.
                decision = self._decide_without_log(key, decide)
                if decision.change is None:
                    return decision.result
                log = self._logs.lock(key, create=True)
                self._check_lease(log)
            if log is None:
                raise NoSuchSession(key)
            with log.mutex:
                decision = decide(_OpenSession(key, log))
            # A change contains the result of all earlier records, so sync these records first.
            # Another process may have died before it synced these records.
            # An operation without a change also waits until the records that it read are durable.
            writer.sync_log(log)  # guard: change-syncs-ground
            if decision.change is not None:
                is_stored, outcome = writer.append_change(log, decision.change, decision.payloads)
                self._queue.drop_after_error(log, outcome)
                if not is_stored:
                    raise outcome.failure(f"writing {key!r}")
            return decision.result

        with self._in_use.entry:
            check_key(key)
            self._check_not_read_only()
            return self._queue.run_exclusive(key, decide_and_write)

    def _decide_without_log(self, key: str, decide: operations.Decide[T]) -> operations.Decision[T]:
        """Call `decide` for a session that does not exist."""
        decision = None
        try:
            decision = decide(_OpenSession(key, None))
        finally:
            if decision is None or decision.change is None:
                # If the session was just deleted, make the deletion durable before returning.
                trash.sync_renames(self._directory)
        return decision

    # --- compaction --------------------------------------------------------------------------

    def compact(self, key: str) -> CompactionResult:
        """Move the hidden messages at the start of the session into an archive."""
        with self._in_use.entry:
            self._check_write(key)
            return self._compact(key)

    def _compact(self, key: str) -> CompactionResult:
        def log_and_uid_of(log: Log) -> tuple[Log, str]:
            return log, log.known_state().uid

        deadline = self._logs.deadline()
        try:
            while (log_and_uid := self._read_log(key, log_and_uid_of)) is not None:
                uid = log_and_uid[1]
                with archive.locked_folder(self._directory, uid, deadline, create=True) as folder:
                    # The previous holder of the lock may have replaced or removed the log.
                    log_and_uid = self._read_log(key, log_and_uid_of)
                    if log_and_uid is None or log_and_uid[1] != uid:
                        break
                    # If a purge has removed the folder, try again.
                    if folder is not None and os.fstat(folder).st_nlink:
                        prepared = rewrite.prepare_archive(log_and_uid[0], folder)
                        # Drop this reference, so that the log can be closed.
                        # If a lock cannot be released, only closing the file ends the lock.
                        log_and_uid = None
                        return (
                            rewrite.NOTHING_ARCHIVED
                            if prepared is None
                            else self._finish_compaction(key, prepared)
                        )
                if time.monotonic() > deadline:
                    raise StoreBusy(
                        f"{key!r}: other processes keep removing its archive folder; try again"
                    )
        except OSError as error:
            raise Outcome(0, error).failure(f"archiving {key!r}") from error
        return rewrite.NOTHING_ARCHIVED

    def _finish_compaction(self, key: str, prepared: rewrite.PreparedArchive) -> CompactionResult:
        with suppress(NoSuchSession):
            self._check_write(key)
            return self._lifecycle.change_file(
                key,
                lambda log: rewrite.finish_compaction(log, prepared, writer.now()),
                f"archiving {key!r}",
            )
        return rewrite.NOTHING_ARCHIVED

    # --- lifecycle ---------------------------------------------------------------------------

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Create a new session from the visible messages, up to the seq `at`."""
        check_key(new_key)
        check_optional_int(at=at)
        with self._in_use.entry:
            self._check_write(key)
            self._lifecycle.fork(key, new_key, at)

    def delete(self, key: str) -> TrashedSession:
        """Move the session to the trash."""
        with self._in_use.entry:
            self._check_write(key)
            return self._lifecycle.delete(key)

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> JSONLLease:
        """Take the lease of this session: one holder at a time, in all processes."""
        check_lease_times(ttl, wait)
        deadline = time.monotonic() + (self._busy_timeout if wait is None else wait)
        with self._in_use.entry:
            self._check_write(key)
            if self._logs.read_log(key, lambda _: True) is None:
                raise NoSuchSession(key)
            lease = leases.acquire_lease(
                self._directory, self, key, deadline=deadline, pause=self._pause
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
        """Return a copy of this store that rejects writes once the lease has ended."""
        fenced = copy.copy(self)
        fenced._fence = lease.check_held
        _stores.add(fenced)
        return fenced

    def _check_lease(self, log: Log | None) -> None:
        """Raise LeaseLost if the lease has ended; in this case, first delete an empty log."""
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

    # --- reading -----------------------------------------------------------------------------

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages by seq, or with `full` all messages."""
        check_count(last=last)
        check_optional_int(after=after)

        def read_log(log: Log) -> tuple[None, LiveMessages]:
            if full:
                return None, log.all_messages(after=max(0, after or 0))
            return None, log.visible_messages(last=last, after=after)

        with self._in_use.entry:
            check_key(key)
            result = self._logs.read_with_archives(key, read_log)
        messages = result[1] if result is not None else []
        return messages if last is None or not full else messages[max(0, len(messages) - last) :]

    def get_summary(self, key: str) -> str:
        """Return the summary; may be empty."""
        return self._read_log(key, lambda log: log.known_state().summary) or ""

    def info(self, key: str) -> SessionInfo:
        """Return the info of the session. Raises NoSuchSession."""
        info = self._read_log(key, lambda log: log.info())
        if info is None:
            raise NoSuchSession(key)
        return info

    def view(
        self, key: str, last: int | None = None, *, since: SessionView | None = None
    ) -> SessionView:
        """Return a consistent snapshot of info, summary and visible messages.

        With `since`, return the messages after `since`; a full view if not only appends happened.
        """
        check_count(last=last)
        last = last if since is None else since.last

        def read_log(log: Log) -> tuple[tuple[SessionInfo, int, int | None], LiveMessages]:
            state = log.known_state()
            has_only_appends = since is not None and since.matches(
                state.uid, state.generation, state.number
            )
            after = since.upto if since is not None and has_only_appends else None
            live_part = log.visible_messages(last=last, after=after)
            return (log.info(), log.next_seq - 1, after), live_part

        with self._in_use.entry:
            check_key(key)
            result = self._logs.read_with_archives(key, read_log)
        if result is None:
            raise NoSuchSession(key)
        (info, upto, after), messages = result
        return SessionView(info=info, messages=tuple(messages), upto=upto, last=last, after=after)

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return the keys in byte order."""
        check_count(limit=limit)
        check_text(prefix=prefix, after=after)
        with self._in_use.entry:
            return list_keys(self._directory, prefix=prefix, limit=limit, after=after)

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message after seq `after` once, in order, and wait for new messages."""
        check_key(key)
        check_int(after=after)
        if self._closed.is_set():
            raise StoreClosed("the store is closed")
        return operations.poll_messages(
            lambda last_seq: self._new_messages(key, last_seq),
            self._closed.wait,
            key,
            after=max(0, after),
            uid=uid,
            timeout=timeout,
            poll=_FOLLOW_POLL_SECONDS,
        )

    def _new_messages(self, key: str, after: int) -> operations.NewMessages | None:
        """Return the messages after a seq; None if the session does not exist.

        The messages are synced before a follower sees them. Without the sync, a power cut could
        remove messages that the follower saw, and later messages would get the same seqs.
        """

        def read_log(log: Log) -> tuple[tuple[Log, str, int], LiveMessages]:
            has_new = log.next_seq > after + 1
            live_part = log.all_messages(after=after) if has_new else LiveMessages([])
            return (log, log.known_state().uid, log.next_seq - 1), live_part

        with self._in_use.entry:
            result = self._logs.read_with_archives(key, read_log)
            if result is None:
                return None
            (log, uid, last_seq), messages = result
            if messages:
                self._logs.sync_log(log)  # guard: follow-syncs-first
            return uid, last_seq, messages

    # --- close --------------------------------------------------------------------

    def close(self) -> None:
        """Release all leases and close all files. A second call completes an interrupted one."""
        try:
            self._closed.set()
            _stores.discard(self)
            with self._leasing:
                held_leases = list(self._leases)
            for lease in held_leases:
                lease.release()
        finally:
            # Call `end` twice, because Ctrl-C may interrupt the first call.
            try:
                self._in_use.end()
            finally:
                self._in_use.end()

    def _close_files(self) -> None:
        self._logs.close()
        self._stamp_cache.close()
        self._directory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _read_log(self, key: str, read_log: Callable[[Log], T]) -> T | None:
        check_key(key)
        with self._in_use.entry:
            return self._logs.read_log(key, read_log)

    def _check_write(self, key: str) -> None:
        """Check the key, that the store is writable, and that its lease has not ended."""
        check_key(key)
        self._check_writable()

    def _check_writable(self) -> None:
        self._check_not_read_only()
        if self._fence is not None:
            self._fence()

    def _check_not_read_only(self) -> None:
        if self._read_only:
            raise ReadOnly("the store was opened with read_only=True")

    def _reset_in_child(self) -> None:
        self._logs.close()
        for lease in list(self._leases):
            lease.close_in_child()
        if self._closed.is_set():
            # After `close`, `_stores` still has the copies that leases use; these stay closed.
            return
        # Use a new event: a thread of the parent may have held the lock inside it at the fork.
        self._closed = threading.Event()
        self._create_locks()


def _reset_stores_in_child() -> None:
    for store in list(_stores):
        store._reset_in_child()


os.register_at_fork(after_in_child=_reset_stores_in_child)
