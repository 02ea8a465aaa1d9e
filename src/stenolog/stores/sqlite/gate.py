"""The gate: a queue of writer threads in each process, and file locks between processes.

SQLite itself waits for a lock by sleeping, longer each time. So a writer that requests the lock
again right after releasing it always wins, and the other writers wait for seconds. Therefore the
threads of a process form a queue, and the first thread polls for a file lock at short intervals.
The thread whose turn it is executes the waiting appends of the next threads in its own transaction.

There is no background thread. No thread blocks on the lock of the queue, because another writer may
hold the lock for long. A thread acquires the lock by `(acquired,) = map(lock.acquire, (False,))`
inside a `try`. The interpreter checks for Ctrl-C after each call in bytecode, so a plain
`lock.acquire` could lose its result. The interpreter does not check between a call that `map` makes
and the assignment. Every wait in the queue is bounded, and after each wait the thread checks again
whether its turn has come. So no thread depends on being woken.
"""

import fcntl
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from stenolog.errors import MaybeStored, StenologError, StoreBusy
from stenolog.stores.disk import CLOSED, open_descriptor

_RECHECK_SECONDS: Final = 0.02
_MAX_COMMIT_SECONDS: Final = 30.0
"""Seconds after its deadline that a caller still waits while another thread writes its data."""
_MAX_GROUP_SIZE: Final = 256
_GATE_POLL_SECONDS: Final = 0.0001
_NEXT_LOCK_POLL_SECONDS: Final = 0.001
_OVERTAKE_SECONDS: Final = 0.2
"""Seconds after which a process overtakes the first waiting process, which may be suspended."""


class QueuedWrite:
    """A thread that waits for its turn to write, or for another thread that writes its data."""

    __slots__ = ("_wakeup", "deadline", "done", "error", "result", "work")

    def __init__(self, work: Callable[[Any], Any] | None = None) -> None:
        self.work = work
        """Work that another thread may do; None if the caller needs its own turn."""
        self.deadline = math.inf
        """Value of `time.monotonic` until which the thread may wait."""
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._wakeup = threading.Lock()
        self._wakeup.acquire()

    def run_work(self, transaction: Any) -> None:
        """Run `work`, and keep its result or its StenologError for this caller."""
        self.error = None
        if self.work is not None:
            try:
                self.result = self.work(transaction)
            except StenologError as error:
                self.error = error

    def finish(self) -> None:
        """Mark the caller as done and wake it."""
        self.done = True
        self.wake()

    def wake(self) -> None:
        """Wake the caller, so that it checks whether it is done or first in the queue."""
        with suppress(RuntimeError):  # the caller is already awake
            self._wakeup.release()

    def wait(self) -> None:
        """Wait for `wake`, but only for a short time."""
        self._wakeup.acquire(timeout=_RECHECK_SECONDS)


class WriteQueue:
    """Queue of the writers of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[QueuedWrite] = []
        self._group: list[QueuedWrite] = []
        """Callers whose work one thread is doing now."""

    def wait_for_turn(
        self, caller: QueuedWrite, run_group: Callable[[list[QueuedWrite]], None], deadline: float
    ) -> None:
        """Wait in the queue until the work is done. Raises StoreBusy, MaybeStored.

        `caller` is already in `waiting`. Either another thread does the work, or this thread calls
        `run_group` with a group whose first member is `caller`; `run_group` must finish all
        members.
        """
        try:
            while not caller.done:
                if not (self.is_first(caller) and self._try_to_run_group(caller, run_group)):
                    caller.wait()
                    self._check_deadline(caller, deadline)
        finally:
            # This code is inline: Ctrl-C during a function call could leave `caller` in the queue.
            if not caller.done and caller in self.waiting:
                try:  # noqa: SIM105
                    self.waiting.remove(caller)
                except ValueError:
                    pass
            caller.done = True  # so that no thread does the work of a caller that has left
            self.wake_next()

    def _try_to_run_group(
        self, caller: QueuedWrite, run_group: Callable[[list[QueuedWrite]], None]
    ) -> bool:
        """Run a group; return False if another thread acquired the lock first."""
        acquired = False
        try:
            (acquired,) = map(self.lock.acquire, (False,))
            if acquired and not caller.done:
                self._run_group(caller, run_group)
        finally:
            if acquired:
                self.lock.release()
        return acquired

    def _run_group(
        self, caller: QueuedWrite, run_group: Callable[[list[QueuedWrite]], None]
    ) -> None:
        """Do the work of a group.

        Callers that were not finished return to the head of the queue.
        """
        try:
            self._form_group(caller)
            run_group(self._group)
        finally:
            unfinished = [write for write in self._group if write is not caller and not write.done]
            self.waiting[:0] = [write for write in unfinished if write not in self.waiting]
            self._group = []

    @contextmanager
    def exclusive_turn(self, deadline: float) -> Iterator[None]:
        """Hold a turn that no other caller shares. Raises StoreBusy."""
        caller = QueuedWrite()
        acquired = False
        try:
            self.waiting.append(caller)
            while True:
                if self.is_first(caller):
                    (acquired,) = map(self.lock.acquire, (False,))
                if acquired:
                    break
                caller.wait()
                self._check_deadline(caller, deadline)
            self.withdraw(caller)
            yield
        finally:
            if acquired:
                self.lock.release()
            # This code is inline for the reason given in `wait_for_turn`.
            if caller in self.waiting:
                try:  # noqa: SIM105
                    self.waiting.remove(caller)
                except ValueError:
                    pass
            self.wake_next()

    def wake_next(self) -> None:
        """Wake the caller that has waited longest."""
        with suppress(IndexError):  # the queue is empty
            self.waiting[0].wake()

    def is_first(self, caller: QueuedWrite) -> bool:
        """Return whether `caller` is first in the queue and no thread is working."""
        # Keep the order of arrival, or a caller that writes in a loop would always be first.
        return self.waiting[:1] == [caller] and not self.lock.locked()

    def _form_group(self, caller: QueuedWrite) -> None:
        """Move `caller` and the next callers whose work can be shared from the queue to the group.

        Each caller joins the group before it leaves the queue, so Ctrl-C cannot lose a caller.
        """
        self._group = [caller]
        self.withdraw(caller)
        while self.waiting and len(self._group) < _MAX_GROUP_SIZE:
            next_caller = self.waiting[0]
            if next_caller.work is None:
                break
            self._group.append(next_caller)
            if not self.withdraw(next_caller):
                self._group.pop()  # the caller has given up

    def withdraw(self, caller: QueuedWrite) -> bool:
        """Remove a caller from the queue; return False if another thread was faster."""
        try:
            self.waiting.remove(caller)
        except ValueError:
            return False
        return True

    def _check_deadline(self, caller: QueuedWrite, deadline: float) -> None:
        late_seconds = time.monotonic() - deadline
        if caller.done or late_seconds < 0:
            return
        if self.withdraw(caller):
            raise StoreBusy("other writers of this process held the database too long")
        if late_seconds > _MAX_COMMIT_SECONDS and not caller.done:
            raise MaybeStored("the transaction has not finished")


class ProcessLock:
    """The lock that all processes share: the empty files `-gate` and `-next` beside the database.

    The process whose turn is next locks `-next`. Only this process polls for the lock of `-gate`,
    the gate; all other waiting processes can sleep longer. So a process that releases the gate and
    requests it again immediately does not overtake the process whose turn is next.

    A suspended process whose turn is next would block all others. Therefore a process that has
    waited for a while takes the gate if the gate is free. Processes that have waited for long may
    take the gate in any order.
    """

    def __init__(self, file: Path) -> None:
        self._gate = _FileLock(file.with_name(f"{file.name}-gate"))
        self._next = _FileLock(file.with_name(f"{file.name}-next"))
        self._is_locked = False

    def lock(self, deadline: float) -> None:
        """Acquire the lock, unless this process holds it already. Raises StoreBusy, OSError."""
        if self._is_locked:
            return  # waiting again would deadlock with the process whose turn is next
        try:
            if self._become_next(deadline):
                self._gate.acquire(_GATE_POLL_SECONDS, deadline)
            self._is_locked = True
        finally:
            self._next.release()

    def _become_next(self, deadline: float) -> bool:
        """Wait until this process is next, and return True. Raises the errors of `lock`.

        Return False if this process has overtaken the others and already holds the gate.
        """
        start_time = time.monotonic()
        overtake_time = start_time + min(_OVERTAKE_SECONDS, (deadline - start_time) / 2)
        while not self._next.try_acquire():
            now = time.monotonic()
            if now >= deadline:
                raise self._next.timeout_error()
            if now >= overtake_time and self._gate.try_acquire():
                return False
            time.sleep(_NEXT_LOCK_POLL_SECONDS)
        return True

    def unlock(self) -> None:
        """Release the lock. Does nothing if the lock is not held."""
        self._is_locked = False
        self._gate.release()

    def close(self) -> None:
        """Close the files."""
        self._gate.close()
        self._next.close()


class _FileLock:
    """A flock on one file, which is created at the first use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = CLOSED

    def acquire(self, poll_seconds: float, deadline: float) -> None:
        """Poll until the lock is acquired. Raises StoreBusy, OSError."""
        while not self.try_acquire():
            if time.monotonic() >= deadline:
                raise self.timeout_error()
            time.sleep(poll_seconds)

    def try_acquire(self) -> bool:
        """Try once to acquire the lock; return whether the lock was acquired. Raises OSError."""
        if self._descriptor < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = open_descriptor(self._path, flags)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def timeout_error(self) -> StoreBusy:
        """Return the error for a wait that took too long."""
        return StoreBusy(f"{self._path}: other processes held the database too long")

    def release(self) -> None:
        """Release the lock. Does nothing if the lock is not held."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, CLOSED
        descriptor.close()
