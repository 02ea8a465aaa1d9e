"""Write queue of each session: which thread writes, and the result of each caller's append.

One thread of this process at a time holds the gate of a session and the lock of its log. Threads
that wait to append to the same session share one write and one sync (group commit). There is no
background thread. A thread that finds the gate free leads: it takes every append that waits for its
session, writes these appends, and wakes the other threads. Every wait is bounded, and after each
wait the thread checks again whether it should lead. So no thread depends on another thread to wake
it. If a thread is in no queue while no thread leads, Ctrl-C interrupted the leader that took the
thread's append.

No thread blocks on the gate's lock. A thread takes the lock by `(taken,) = map(lock.acquire,
(False,))` inside a `try`. The interpreter checks for Ctrl-C after each call in bytecode, so a plain
`lock.acquire` could lose its result. The interpreter does not check between a call that `map` makes
and the assignment.
"""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from msgspec import Raw

from stenolog.codec import digest, plain_line
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
from stenolog.stores.jsonl.open_logs import OpenLogCache
from stenolog.stores.jsonl.writer import STATE_EVERY_BYTES, STORED, Outcome, now, write_and_sync

GATES: Final = 1024
"""Maximum number of gates for all sessions; a gate is created at its first use."""

_RECHECK_SECONDS: Final = 0.02
_MAX_WRITE_SECONDS: Final = 30.0
_MAX_GROUP: Final = 256
_MAX_GROUP_BYTES: Final = 8 * 1024 * 1024
_TOUCH_EVERY: Final = 63  # used as a bit mask

Check = Callable[[], None]
"""Function that raises StenologError if the caller is no longer allowed to write."""


class Pending:
    """A caller that waits for a session, to append messages or for other work."""

    __slots__ = ("_wakeup", "batch", "begun", "check", "done", "error", "first", "key")

    def __init__(
        self, key: str, batch: Batch | None = None, check: Callable[[], None] | None = None
    ) -> None:
        self.key = key
        self.batch = batch
        self.check = check
        """Function that raises, while the log is locked, if the append is no longer allowed."""
        self.begun = False
        """Whether a leader has started to write this append."""
        self.done = False
        self.first = 0
        """Seq of the first message of this append."""
        self.error: BaseException | None = None
        self._wakeup = threading.Lock()
        self._wakeup.acquire()

    def finish(self, *, first: int = 0, error: BaseException | None = None) -> None:
        """Set the result and wake the caller."""
        self.first, self.error = first, error
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
    """Queue of the writers of this process that may use the same session."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Pending] = []

    def enter(self, mine: Pending, lead: Callable[[list[Pending]], None], deadline: float) -> None:
        """Return when `mine` is done. Raises StoreBusy, MaybeStored.

        Either this thread or another thread calls `lead` with a group that contains `mine`. `lead`
        finishes each member of the group.
        """
        try:
            self.waiting.append(mine)
            while not mine.done:
                if not (self._may_lead(mine) and self._try_to_lead(mine, lead)):
                    mine.wait()
                    self._check_deadline(mine, deadline)
        finally:
            # Twice, because Ctrl-C may interrupt the first call.
            try:
                self._leave(mine)
            finally:
                self._leave(mine)

    def _may_lead(self, mine: Pending) -> bool:
        if self.lock.locked():
            return False
        # Serve threads in order of arrival: otherwise a thread that returns immediately would
        # always be first.
        # guard: write-queue-interrupt
        return self.waiting[:1] == [mine] or mine not in self.waiting

    def _try_to_lead(self, mine: Pending, lead: Callable[[list[Pending]], None]) -> bool:
        """Lead and return True; return False if another thread took the lock first."""
        acquired = False
        try:
            (acquired,) = map(self.lock.acquire, (False,))
            if acquired and not mine.done:
                self._lead_group(mine, lead)
        finally:
            if acquired:
                self.lock.release()
        return acquired

    def _lead_group(self, mine: Pending, lead: Callable[[list[Pending]], None]) -> None:
        """Lead, unless a leader was interrupted while it wrote `mine`.

        The caller holds the lock.
        """
        if mine.begun:  # guard: begun-write-not-repeated
            mine.finish(
                error=MaybeStored(f"{mine.key!r}: the write that includes it was interrupted")
            )
            return
        group = self._take_group(mine)
        for pending in group:
            pending.begun = True
        lead(group)

    def _leave(self, mine: Pending) -> None:
        if not mine.done:
            self._withdraw(mine)
        self.wake_next()

    def wake_next(self) -> None:
        """Wake the caller that has waited longest."""
        if self.waiting:
            with suppress(IndexError):  # the caller has stopped waiting
                self.waiting[0].wake()

    def _take_group(self, mine: Pending) -> list[Pending]:
        """Remove and return `mine` and the appends that wait for the same session."""
        self._withdraw(mine)
        group = [mine]
        if mine.batch is None or not self.waiting:
            return group
        size = sum(map(len, mine.batch.payloads))
        for pending in self.waiting.copy():
            if pending.key == mine.key and pending.batch is not None:
                size += sum(map(len, pending.batch.payloads))
                if len(group) >= _MAX_GROUP or size > _MAX_GROUP_BYTES:
                    break
                if self._withdraw(pending):
                    group.append(pending)
        return group

    def _withdraw(self, pending: Pending) -> bool:
        """Remove `pending` from the queue; return False if another thread was faster."""
        try:
            self.waiting.remove(pending)
        except ValueError:
            return False
        return True

    def _check_deadline(self, mine: Pending, deadline: float) -> None:
        late = time.monotonic() - deadline
        if mine.done or late < 0:
            return
        if self._withdraw(mine):
            raise StoreBusy(f"{mine.key!r}: other threads of this process were writing; try again")
        if late > _MAX_WRITE_SECONDS and not mine.done:
            raise MaybeStored(f"{mine.key!r}: the write that includes it has not finished")


class WriteQueue:
    """Write queues of one store in this process."""

    def __init__(self, logs: OpenLogCache, *, busy_timeout: float) -> None:
        self._logs = logs
        self._busy_timeout = busy_timeout
        self._gates: dict[int, Gate] = {}

    def try_fast_append(self, key: str, payload: bytes, check: Check | None = None) -> int:
        """Append one message to an open log if no other writer waits; return its seq.

        Return 0 if nothing was done and a full append is needed. Raises NotStored, MaybeStored and
        the errors of `check`.
        """
        log, gate = self._logs.opened(key), self._gates.get(hash(key) % GATES)
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
                self._logs.trim(log)
            if not seq & _TOUCH_EVERY:
                self._logs.touch(log)
        finally:
            if acquired:
                gate.lock.release()
        if gate.waiting:
            gate.wake_next()
        return seq

    def append(self, key: str, batch: Batch, check: Check | None = None) -> int:
        """Append messages of one caller; return the first seq.

        Raises the errors of `Store.add_messages`.
        """
        mine = Pending(key, batch, check)
        self._gate(key).enter(mine, self._lead, time.monotonic() + self._busy_timeout)
        if mine.error is not None:
            raise mine.error
        return mine.first

    def append_group(
        self, key: str, batches: Sequence[Batch], check: Check | None = None
    ) -> list[int | StenologError]:
        """Append messages of several callers; return the first seq or the error of each caller."""
        group = [Pending(key, batch, check) for batch in batches]
        if group:
            self.run_exclusive(key, lambda: self._lead(group))
        return [
            pending.error if isinstance(pending.error, StenologError) else pending.first
            for pending in group
        ]

    def run_exclusive(self, key: str, work: Callable[[], None]) -> None:
        """Call `work` while no other writer of this process uses the session."""

        def lead(group: list[Pending]) -> None:
            try:
                self._work(key, work)
            finally:
                group[0].finish()

        self._gate(key).enter(Pending(key), lead, time.monotonic() + self._busy_timeout)

    def _work(self, key: str, work: Callable[[], None]) -> None:
        try:
            work()
        except StoreUnavailable as error:
            raise _not_stored(error) from error
        except OSError as error:
            raise Outcome(0, error).failure(f"writing {key!r}") from error
        finally:
            # Twice, because Ctrl-C may interrupt the first call.
            try:
                self._logs.unlock(key)
            finally:
                self._logs.unlock(key)

    def _gate(self, key: str) -> Gate:
        place = hash(key) % GATES
        return self._gates.get(place) or self._gates.setdefault(place, Gate())

    def _lead(self, group: list[Pending]) -> None:
        """Write all appends of a group in one write, and always finish each append."""
        key = group[0].key
        log = None
        try:
            log = self._logs.lock(key, create=True)
            if log is not None:
                allowed = [pending for pending in group if not _is_refused(pending)]
                if allowed:
                    self._write(log, allowed)
                else:
                    delete_if_empty(log)
        except StenologError as error:
            for pending in group:
                if not pending.done:
                    pending.finish(error=_not_stored(error))
        except OSError as error:
            for pending in group:
                if not pending.done:
                    pending.finish(error=Outcome(0, error).failure(f"writing {key!r}"))
        finally:
            try:
                self._logs.unlock(key)
            finally:
                self._logs.unlock(key)
            for pending in group:
                if not pending.done:
                    # Only an interruption reaches this line. It is unknown whether the write
                    # happened.
                    pending.finish(error=MaybeStored(f"{key!r}: the write was interrupted"))
        if log is not None:
            self._logs.trim(log)

    def _write(self, log: Log, group: list[Pending]) -> None:
        tokens: set[str] = set()
        chosen: list[Pending] = []
        batches: list[Batch] = []
        later: list[Pending] = []
        for pending in group:
            batch = pending.batch
            if batch is None:
                continue
            if batch.once is not None:
                if batch.once in tokens:
                    # If two appends of a group have the same idempotency key, the second waits for
                    # the first.
                    later.append(pending)
                    continue
                tokens.add(batch.once)
                if self._finish_if_stored(log, pending, batch, batch.once):
                    continue
            chosen.append(pending)
            batches.append(batch)
        if batches:
            firsts, outcome = writer.append(log, batches)
            for pending, first in zip(chosen, firsts, strict=True):
                if first:
                    pending.finish(first=first)
                else:
                    pending.finish(error=outcome.failure(f"writing {log.key!r}"))
            self.drop_after_error(log, outcome)
            if outcome.error is not None:
                for pending in later:
                    pending.finish(error=outcome.failure(f"writing {log.key!r}"))
                return
        if later:
            self._write(log, later)

    def _finish_if_stored(self, log: Log, pending: Pending, batch: Batch, once: str) -> bool:
        """Return whether the session has the idempotency key; if so, finish the append."""
        with log.mutex:
            token = log.token(once) if log.state_if_any() is not None else None
        if token is None:
            return False
        other = token.digest not in ("", digest(batch.payloads))
        if other or token.count != len(batch.payloads):
            pending.finish(error=OnceConflict(log.key, once, token.first))
            return True
        # Another process may have written the message. It counts as stored once it is on the disk.
        try:
            writer.sync(log)
        except OSError as error:
            # Allow no more appends to a log whose sync has failed.
            pending.finish(error=Outcome(0, error, unknown=True).failure(f"syncing {log.key!r}"))
            raise
        pending.finish(first=token.first)
        return True

    def drop_after_error(self, log: Log, outcome: Outcome) -> None:
        """After an error, drop the log so that the file is read again; raise an interruption."""
        if outcome.error is None:
            return
        self._logs.discard(log)
        if not isinstance(outcome.error, OSError | StenologError):
            raise outcome.error


def fast_append(
    logs: OpenLogCache, log: Log, payload: bytes, check: Check | None = None
) -> tuple[int, Outcome | None, bool]:
    """Append one message to an open log that no other process has changed.

    Return its seq or 0, the outcome, and whether the cache grew. The outcome is None if nothing was
    done and a full append is needed. The caller holds the gate of the session. `check` raises
    StenologError if the write is no longer allowed.

    This is a single function on purpose: right after a sync the processor's caches are cold, and
    each call of a Python function then costs several times as much as in a loop.
    """
    descriptor = log.descriptor
    cached = False
    try:
        fcntl.flock(descriptor, EXCLUSIVE_NOWAIT)
        status = os.stat(log.name, dir_fd=logs.directory.descriptor, follow_symlinks=False)
        at = now()
        with log.mutex:
            before, seq, identity = log.size, log.next_seq, (log.inode, log.device)
            if (  # guard: fast-append-size, fast-append-inode
                log.phase is not LoadPhase.READY
                or log.suspect
                or status.st_size != before
                or (status.st_ino, status.st_dev) != identity
                or logs.entries.get(log.name) != identity
                or logs.suspects
                or log.synced != before
                or log.end != before
                or log.tail is not None
                or not log.ends_line
                or log.unknown_kind is not None
                or log.lines_since_state >= STATE_EVERY_LINES
                or log.bytes_since_state >= STATE_EVERY_BYTES
            ):
                return 0, None, False
        if check is not None:
            check()
        line = plain_line(seq, at, payload)
        outcome = write_and_sync(log, before, line)
        if outcome.error is not None:
            return (seq if outcome.covers(len(line)) else 0), outcome, False
        try:
            with log.mutex:
                cached = log.keeps_messages
                # guard: fast-append-tail
                if (
                    cached
                    or log.phase is not LoadPhase.READY
                    or not before == log.end == log.size
                    or log.tail is not None
                ):
                    # Keep the message in memory, unless a reader of this process has read or
                    # dropped the log.
                    log.extend(before, [Message(seq=seq, _at=at, _body=Raw(payload))], len(line))
                else:
                    log.advance(seq, at, before + len(line), len(line))
        except BaseException as error:  # noqa: BLE001  it is stored; the caller raises the error
            return seq, Outcome(len(line), error), False
    except (BlockingIOError, FileNotFoundError):
        return 0, None, False
    except OSError as error:
        return 0, Outcome(0, error), False
    finally:
        # Not in a separate function, because Ctrl-C may interrupt a function call.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError:
            # The lock ends with the descriptor, which closes after the last use of the log.
            logs.discard(log)
    return seq, outcome, cached


def _is_refused(pending: Pending) -> bool:
    """Return whether the append is no longer allowed; if so, finish it."""
    try:
        if pending.check is not None:
            pending.check()
    except StenologError as error:
        pending.finish(error=error)
    return pending.done


def delete_if_empty(log: Log) -> None:
    """Delete the file of a log if the file is empty and still has its name.

    The caller holds the lock of the log.
    """
    with suppress(OSError, StenologError):
        if log.file_size() == 0 and log.is_same_file(log.directory.stat(log.name)):
            os.unlink(log.name, dir_fd=log.directory.descriptor)


def _not_stored(error: StenologError) -> StenologError:
    """Return a copy of an error for another caller; NotStored if the store cannot be opened."""
    error_copy = NotStored(*error.args) if type(error) is StoreUnavailable else copy_error(error)
    error_copy.__cause__ = error
    return error_copy
