"""Write queue of each session: which thread writes, and the result of each caller's append.

One thread of this process at a time holds the gate of a session and the lock of its log. Threads
that wait to append to the same session share one write and one sync (group commit). There is no
background thread. A thread that finds the gate free leads: it takes every append that waits for its
session, writes these appends, and wakes the other threads. Every wait is bounded, and after each
wait the thread checks again whether it should lead. So no thread depends on another thread to wake
it. If a waiting thread is no longer in the queue and no thread leads, Ctrl-C interrupted the thread
that led its group.

No thread blocks on the gate's lock. A thread takes the lock by `(acquired,) = map(lock.acquire,
(False,))` inside a `try`. The interpreter checks for Ctrl-C after each call in bytecode, so a plain
`lock.acquire` could lose its result. The interpreter does not check for Ctrl-C between a call that
`map` makes and the assignment.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from msgspec import Raw

from stenolog.codec import payload_digest, plain_line
from stenolog.errors import (
    MaybeStored,
    NotStored,
    OnceConflict,
    StenologError,
    StoreBusy,
    StoreUnavailable,
    copy_error,
)
from stenolog.records import Message
from stenolog.stores.arguments import Batch
from stenolog.stores.disk import EXCLUSIVE_NOWAIT
from stenolog.stores.jsonl import writer
from stenolog.stores.jsonl.log import STATE_EVERY_LINES, LoadPhase, Log
from stenolog.stores.jsonl.open_logs import OpenLogCache, T
from stenolog.stores.jsonl.writer import STATE_EVERY_BYTES, STORED, Outcome, now, write_and_sync

MAX_GATES: Final = 1024
"""Maximum number of gates; each gate lets one thread at a time write to its sessions."""

_RECHECK_SECONDS: Final = 0.02
"""Seconds after which a waiting thread checks again whether it should lead."""
_MAX_WRITE_SECONDS: Final = 30.0
"""Seconds past the deadline that a caller waits for a write that already includes its append."""
_MAX_GROUP_SIZE: Final = 256
"""Maximum number of appends in one write."""
_MAX_GROUP_BYTES: Final = 8 * 1024 * 1024
"""Maximum size of all payloads in one write; a single append may be larger."""
_TOUCH_SEQ_MASK: Final = 63
"""Bit mask of a seq: the log is marked as recently used at every 64th message."""

WriteCheck = Callable[[], None]
"""Function that raises StenologError if the caller is no longer allowed to write."""


class Waiter:
    """A caller that waits for its turn to append messages to a session, or to run other work."""

    __slots__ = ("_wakeup", "batch", "check", "done", "error", "first_seq", "is_started", "key")

    def __init__(
        self, key: str, batch: Batch | None = None, check: Callable[[], None] | None = None
    ) -> None:
        self.key = key
        self.batch = batch
        self.check = check
        """Function that raises if the append is no longer allowed; called under the log's lock."""
        self.is_started = False
        """Whether a thread has started to write this append."""
        self.done = False
        self.first_seq = 0
        """Seq of the first message of this append."""
        self.error: BaseException | None = None
        self._wakeup = threading.Lock()
        self._wakeup.acquire()

    def finish(self, *, first: int = 0, error: BaseException | None = None) -> None:
        """Set the result and wake the caller."""
        self.first_seq, self.error = first, error
        self.done = True
        self.wake()

    def wake(self) -> None:
        """Wake the caller."""
        with suppress(RuntimeError):  # the caller is already awake
            self._wakeup.release()

    def wait(self) -> None:
        """Wait for `wake`, but only for a short time."""
        self._wakeup.acquire(timeout=_RECHECK_SECONDS)


class Gate:
    """Lock and queue for the threads of this process that write to certain sessions."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Waiter] = []

    def enter(
        self, caller: Waiter, run_group: Callable[[list[Waiter]], None], deadline: float
    ) -> None:
        """Return when `caller` is done. Raises StoreBusy, MaybeStored.

        Either this thread or another thread calls `run_group` with a group that contains `caller`.
        `run_group` finishes each member of the group.
        """
        try:
            self.waiting.append(caller)
            while not caller.done:
                if not (self._may_lead(caller) and self._try_to_lead(caller, run_group)):
                    caller.wait()
                    self._check_deadline(caller, deadline)
        finally:
            # Call `_leave` twice, because Ctrl-C may interrupt the first call.
            try:
                self._leave(caller)
            finally:
                self._leave(caller)

    def _may_lead(self, caller: Waiter) -> bool:
        if self.lock.locked():
            return False
        # Keep the order of arrival, or a thread that appends in a loop would always be first.
        # guard: write-queue-interrupt
        return self.waiting[:1] == [caller] or caller not in self.waiting

    def _try_to_lead(self, caller: Waiter, run_group: Callable[[list[Waiter]], None]) -> bool:
        """Write the group and return True; return False if another thread took the lock first."""
        acquired = False
        try:
            (acquired,) = map(self.lock.acquire, (False,))
            if acquired and not caller.done:
                self._lead_group(caller, run_group)
        finally:
            if acquired:
                self.lock.release()
        return acquired

    def _lead_group(self, caller: Waiter, run_group: Callable[[list[Waiter]], None]) -> None:
        """Write the group of `caller`. This thread holds the lock of the gate.

        If Ctrl-C interrupted an earlier write of this append, finish `caller` with an error.
        """
        if caller.is_started:  # guard: begun-write-not-repeated
            caller.finish(
                error=MaybeStored(f"{caller.key!r}: the write that includes it was interrupted")
            )
            return
        group = self._take_group(caller)
        for waiter in group:
            waiter.is_started = True
        run_group(group)

    def _leave(self, caller: Waiter) -> None:
        if not caller.done:
            self._withdraw(caller)
        self.wake_next()

    def wake_next(self) -> None:
        """Wake the caller that has waited longest."""
        if self.waiting:
            with suppress(IndexError):  # the caller has stopped waiting
                self.waiting[0].wake()

    def _take_group(self, caller: Waiter) -> list[Waiter]:
        """Remove and return `caller` and the callers that wait to append to the same session."""
        self._withdraw(caller)
        group = [caller]
        if caller.batch is None or not self.waiting:
            return group
        size = sum(map(len, caller.batch.payloads))
        for waiter in self.waiting.copy():
            if waiter.key == caller.key and waiter.batch is not None:
                size += sum(map(len, waiter.batch.payloads))
                if len(group) >= _MAX_GROUP_SIZE or size > _MAX_GROUP_BYTES:
                    break
                if self._withdraw(waiter):
                    group.append(waiter)
        return group

    def _withdraw(self, waiter: Waiter) -> bool:
        """Remove `waiter` from the queue; return False if another thread was faster."""
        try:
            self.waiting.remove(waiter)
        except ValueError:
            return False
        return True

    def _check_deadline(self, caller: Waiter, deadline: float) -> None:
        late_seconds = time.monotonic() - deadline
        if caller.done or late_seconds < 0:
            return
        if self._withdraw(caller):
            raise StoreBusy(
                f"{caller.key!r}: other threads of this process were writing; try again"
            )
        if late_seconds > _MAX_WRITE_SECONDS and not caller.done:
            raise MaybeStored(f"{caller.key!r}: the write that includes it has not finished")


class WriteQueue:
    """Write queues of one store in this process."""

    def __init__(self, logs: OpenLogCache) -> None:
        self._logs = logs
        self._gates: dict[int, Gate] = {}

    def try_fast_append(self, key: str, payload: bytes, check: WriteCheck | None = None) -> int:
        """Append one message to an open log if no other writer waits; return its seq.

        Return 0 if nothing was done and a full append is needed. Raises NotStored, MaybeStored and
        the errors of `check`.
        """
        log, gate = self._logs.get_open_log(key), self._gates.get(hash(key) % MAX_GATES)
        if log is None or gate is None or gate.waiting:
            return 0
        acquired = False
        try:
            (acquired,) = map(gate.lock.acquire, (False,))
            if not acquired:
                return 0
            seq, outcome, cached = fast_append(self._logs, log, payload, check)
            if outcome is not STORED and outcome is not None:
                self.drop_after_error(log, outcome)
                if not seq:
                    raise outcome.failure(f"writing {key!r}")
            elif cached:
                self._logs.trim_memory(log)
            if not seq & _TOUCH_SEQ_MASK:
                self._logs.mark_used(log)
        finally:
            if acquired:
                gate.lock.release()
        if gate.waiting:
            gate.wake_next()
        return seq

    def append(self, key: str, batch: Batch, check: WriteCheck | None = None) -> int:
        """Append messages of one caller; return the first seq.

        Raises the errors of `Store.add_messages`.
        """
        caller = Waiter(key, batch, check)
        self._get_gate(key).enter(caller, self._run_group, self._logs.deadline())
        if caller.error is not None:
            raise caller.error
        return caller.first_seq

    def run_exclusive(self, key: str, work: Callable[[], T]) -> T:
        """Call `work` while no other thread writes to the session; return its result.

        After the call, the log of the session is unlocked.
        """
        gate = self._get_gate(key)
        if not gate.waiting:
            acquired = False
            try:
                (acquired,) = map(gate.lock.acquire, (False,))
                if acquired:
                    return self._run_work(key, work)
            finally:
                if acquired:
                    gate.lock.release()
                    gate.wake_next()
        results: list[T] = []

        def run_and_finish(group: list[Waiter]) -> None:
            try:
                results.append(self._run_work(key, work))
            finally:
                group[0].finish()

        gate.enter(Waiter(key), run_and_finish, self._logs.deadline())
        return results[0]

    def _run_work(self, key: str, work: Callable[[], T]) -> T:
        """Call `work`, translate its errors, and unlock the log of the session."""
        try:
            return work()
        except (StoreUnavailable, OSError) as error:
            raise _error_for_caller(error, key) from error
        finally:
            # Call `unlock` twice, because Ctrl-C may interrupt the first call.
            try:
                self._logs.unlock(key)
            finally:
                self._logs.unlock(key)

    def _get_gate(self, key: str) -> Gate:
        gate_number = hash(key) % MAX_GATES
        return self._gates.get(gate_number) or self._gates.setdefault(gate_number, Gate())

    def _run_group(self, group: list[Waiter]) -> None:
        """Write all appends of a group in one write, and always finish each append."""
        key = group[0].key
        log = None
        try:
            log = self._logs.lock(key, create=True)
            if log is not None:
                allowed_waiters = [waiter for waiter in group if not _is_refused(waiter)]
                if allowed_waiters:
                    self._write_group(log, allowed_waiters)
                else:
                    delete_if_empty(log)
        except (StenologError, OSError) as error:
            for waiter in group:
                if not waiter.done:
                    waiter.finish(error=_error_for_caller(error, key))
        finally:
            try:
                self._logs.unlock(key)
            finally:
                self._logs.unlock(key)
            for waiter in group:
                if not waiter.done:
                    # Ctrl-C interrupted the write: it is unknown whether the append is stored.
                    waiter.finish(error=MaybeStored(f"{key!r}: the write was interrupted"))
        if log is not None:
            self._logs.trim_memory(log)

    def _write_group(self, log: Log, group: list[Waiter]) -> None:
        """Write the batches of a group, except batches that are already stored."""
        idempotency_keys: set[str] = set()
        writing_waiters: list[Waiter] = []
        batches: list[Batch] = []
        postponed_waiters: list[Waiter] = []
        for waiter in group:
            batch = waiter.batch
            if batch is None:
                continue
            if batch.once is not None:
                if batch.once in idempotency_keys:
                    # The second append with the same idempotency key waits for the first.
                    postponed_waiters.append(waiter)
                    continue
                idempotency_keys.add(batch.once)
                if self._finish_if_stored(log, waiter, batch, batch.once):
                    continue
            writing_waiters.append(waiter)
            batches.append(batch)
        if batches:
            first_seqs, outcome = writer.append_batches(log, batches)
            for waiter, first in zip(writing_waiters, first_seqs, strict=True):
                error = None if first else outcome.failure(f"writing {log.key!r}")
                waiter.finish(first=first, error=error)
            self.drop_after_error(log, outcome)
            if outcome.error is not None:
                for waiter in postponed_waiters:
                    waiter.finish(error=outcome.failure(f"writing {log.key!r}"))
                return
        if postponed_waiters:
            self._write_group(log, postponed_waiters)

    def _finish_if_stored(self, log: Log, waiter: Waiter, batch: Batch, once: str) -> bool:
        """Finish the append if its idempotency key is already stored. Return whether it is."""
        with log.mutex:
            token = log.find_token(once) if log.state_if_any() is not None else None
        if token is None:
            return False
        is_different = token.digest not in ("", payload_digest(batch.payloads))
        if is_different or token.count != len(batch.payloads):
            waiter.finish(error=OnceConflict(log.key, once, token.first))
            return True
        # Another process may have written the message, which counts as stored only after a sync.
        try:
            writer.sync_log(log)
        except OSError as error:
            # Raise the error, so that nothing is appended to a log whose sync has failed.
            waiter.finish(error=Outcome(0, error, is_unknown=True).failure(f"syncing {log.key!r}"))
            raise
        waiter.finish(first=token.first)
        return True

    def drop_after_error(self, log: Log, outcome: Outcome) -> None:
        """Drop the log after a failed write, so that it is read again; re-raise an interruption."""
        if outcome.error is None:
            return
        self._logs.drop_log(log)
        if not isinstance(outcome.error, OSError | StenologError):
            raise outcome.error


def fast_append(
    logs: OpenLogCache, log: Log, payload: bytes, check: WriteCheck | None = None
) -> tuple[int, Outcome | None, bool]:
    """Append one message to an open log that no other process has changed.

    Return the message's seq or 0, the outcome, and whether the cache grew. The outcome is None if
    nothing was done and a full append is needed. The caller holds the gate of the session. `check`
    raises StenologError if the write is no longer allowed.

    The fast append is a single function on purpose. Right after a sync the processor's caches are
    cold, and each call to a Python function costs several times as much as usual.
    """
    descriptor = log.descriptor
    cached = False
    try:
        fcntl.flock(descriptor, EXCLUSIVE_NOWAIT)
        status = os.stat(log.name, dir_fd=logs.directory.descriptor, follow_symlinks=False)
        at = now()
        with log.mutex:
            old_size, seq, identity = log.size, log.next_seq, (log.inode, log.device)
            if (  # guard: fast-append-size, fast-append-inode
                log.phase is not LoadPhase.READY
                or log.is_suspect
                or status.st_size != old_size
                or (status.st_ino, status.st_dev) != identity
                or logs.synced_entries.get(log.name) != identity
                or logs.suspect_names
                or log.synced_offset != old_size
                or log.end_offset != old_size
                or log.tail is not None
                or not log.ends_line
                or log.lines_since_state >= STATE_EVERY_LINES
                or log.bytes_since_state >= STATE_EVERY_BYTES
            ):
                return 0, None, False
        if check is not None:
            check()
        line = plain_line(seq, at, payload)
        outcome = write_and_sync(log, old_size, line)
        if outcome.error is not None:
            return (seq if outcome.covers(len(line)) else 0), outcome, False
        try:
            with log.mutex:
                cached = log.keeps_messages
                if (
                    cached
                    or log.phase is not LoadPhase.READY
                    or not old_size == log.end_offset == log.size
                    or log.tail is not None
                ):
                    # `record_append` handles cached messages and concurrent readers.
                    log.record_append(
                        old_size, [Message(seq=seq, _at=at, _body=Raw(payload))], len(line)
                    )
                else:
                    log.record_uncached_append(seq, at, old_size + len(line), len(line))
        except BaseException as error:  # noqa: BLE001  it is stored; the caller raises the error
            return seq, Outcome(len(line), error), False
    except (BlockingIOError, FileNotFoundError):
        return 0, None, False
    except OSError as error:
        return 0, Outcome(0, error), False
    finally:
        # This code is not a separate function, because Ctrl-C may interrupt a function call.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            # The lock ends with the descriptor, which closes after the last use of the log.
            logs.drop_log(log)
    return seq, outcome, cached


def _is_refused(waiter: Waiter) -> bool:
    """Finish the append with an error if it is no longer allowed. Return whether it is refused."""
    try:
        if waiter.check is not None:
            waiter.check()
    except StenologError as error:
        waiter.finish(error=error)
    return waiter.done


def delete_if_empty(log: Log) -> None:
    """Delete the file of a log if the file is empty and still has its name.

    The caller holds the lock of the log.
    """
    with suppress(OSError, StenologError):
        if log.file_size() == 0 and log.is_same_file(log.directory.file_status(log.name)):
            os.unlink(log.name, dir_fd=log.directory.descriptor)


def _error_for_caller(error: StenologError | OSError, key: str) -> StenologError:
    """Return a new error for one caller; OSError and plain StoreUnavailable become NotStored.

    Only for errors raised before anything was written.
    """
    if isinstance(error, OSError):
        return Outcome(0, error).failure(f"writing {key!r}")
    error_copy = NotStored(*error.args) if type(error) is StoreUnavailable else copy_error(error)
    error_copy.__cause__ = error
    return error_copy
