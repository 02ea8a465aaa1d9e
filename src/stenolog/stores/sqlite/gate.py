"""The gate: a queue of writer threads in each process, and file locks between processes.

SQLite itself waits by sleeping, longer each time. A writer that returns immediately always wins,
and the other writers wait for seconds. Here the threads of a process form a queue, and the first
thread polls for a file lock at short intervals. The thread whose turn it is executes the waiting
appends of the next threads in its own transaction.

There is no background thread. No thread blocks on the lock of the queue, because another writer may
hold the lock for long. A thread acquires the lock by `(taken,) = map(lock.acquire, (False,))`
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
_MAX_COMMIT_WAIT: Final = 30.0
_MAX_GROUP: Final = 256
_GATE_POLL: Final = 0.0001
_NEXT_POLL: Final = 0.001
_OVERTAKE_SECONDS: Final = 0.2
"""Seconds after which a waiting process may overtake the next process, which may be stopped."""


class QueuedWrite:
    """A thread that waits for a turn, or for another thread to do its work."""

    __slots__ = ("_wakeup", "deadline", "done", "error", "result", "work")

    def __init__(self, work: Callable[[Any], Any] | None = None) -> None:
        self.work = work
        """Work that another thread may do; None if the caller needs its own turn."""
        self.deadline = math.inf
        """Time until which the thread may wait."""
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._wakeup = threading.Lock()
        self._wakeup.acquire()

    def run(self, transaction: Any) -> None:
        """Do the work of this caller. An error concerns only this caller."""
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
        """Wake the caller, so that the caller checks its state."""
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
        """Callers whose work a thread is doing now."""

    def enter(
        self, mine: QueuedWrite, run_group: Callable[[list[QueuedWrite]], None], deadline: float
    ) -> None:
        """Join the queue, and return when the work is done. Raises StoreBusy, MaybeStored.

        Either another thread does the work, or this thread calls `run_group` with a group whose
        first member is `mine`. `run_group` must finish all members.
        """
        self.waiting.append(mine)
        self.wait_for_turn(mine, run_group, deadline)

    def wait_for_turn(
        self, mine: QueuedWrite, run_group: Callable[[list[QueuedWrite]], None], deadline: float
    ) -> None:
        """Do the same as `enter` for a caller that is already in the queue."""
        try:
            while not mine.done:
                if not (self.is_first(mine) and self._try_to_run_group(mine, run_group)):
                    mine.wait()
                    self._check(mine, deadline)
        finally:
            # The code is inline: Ctrl-C may strike on the way into a function, and `mine` would
            # stay first.
            if not mine.done and mine in self.waiting:
                try:  # noqa: SIM105
                    self.waiting.remove(mine)
                except ValueError:
                    pass
            mine.done = True  # no thread does the work of a caller that has left
            self.wake_next()

    def _try_to_run_group(
        self, mine: QueuedWrite, run_group: Callable[[list[QueuedWrite]], None]
    ) -> bool:
        """Run a group; return False if another thread acquired the lock first."""
        acquired = False
        try:
            (acquired,) = map(self.lock.acquire, (False,))
            if acquired and not mine.done:
                self._run_group(mine, run_group)
        finally:
            if acquired:
                self.lock.release()
        return acquired

    def _run_group(self, mine: QueuedWrite, run_group: Callable[[list[QueuedWrite]], None]) -> None:
        """Do the work of a group.

        Callers that were not finished return to the head of the queue.
        """
        try:
            self._form_group(mine)
            run_group(self._group)
        finally:
            unfinished = [write for write in self._group if write is not mine and not write.done]
            self.waiting[:0] = [write for write in unfinished if write not in self.waiting]
            self._group = []

    @contextmanager
    def exclusive_turn(self, deadline: float) -> Iterator[None]:
        """Hold a turn that no other caller shares. Raises StoreBusy."""
        mine = QueuedWrite()
        acquired = False
        try:
            self.waiting.append(mine)
            while True:
                if self.is_first(mine):
                    (acquired,) = map(self.lock.acquire, (False,))
                if acquired:
                    break
                mine.wait()
                self._check(mine, deadline)
            self.withdraw(mine)
            yield
        finally:
            if acquired:
                self.lock.release()
            # The code is inline, as in `wait_for_turn`.
            if mine in self.waiting:
                try:  # noqa: SIM105
                    self.waiting.remove(mine)
                except ValueError:
                    pass
            self.wake_next()

    def wake_next(self) -> None:
        """Wake the caller that has waited longest."""
        with suppress(IndexError):  # the queue is empty
            self.waiting[0].wake()

    def is_first(self, mine: QueuedWrite) -> bool:
        """Return whether `mine` is first in the queue and no thread is working."""
        # Serve callers in order of arrival: otherwise a caller that returns immediately would
        # always be first.
        return self.waiting[:1] == [mine] and not self.lock.locked()

    def _form_group(self, mine: QueuedWrite) -> None:
        """Take `mine` and the next callers whose work can be shared.

        Each caller is recorded before it leaves the queue, so that Ctrl-C cannot lose a caller.
        """
        self._group = [mine]
        self.withdraw(mine)
        while self.waiting and len(self._group) < _MAX_GROUP:
            following = self.waiting[0]
            if following.work is None:
                break
            self._group.append(following)
            if not self.withdraw(following):
                self._group.pop()  # the caller has given up

    def withdraw(self, caller: QueuedWrite) -> bool:
        """Remove a caller from the queue; return False if another thread was faster."""
        try:
            self.waiting.remove(caller)
        except ValueError:
            return False
        return True

    def _check(self, mine: QueuedWrite, deadline: float) -> None:
        late = time.monotonic() - deadline
        if mine.done or late < 0:
            return
        if self.withdraw(mine):
            raise StoreBusy("other writers of this process held the database too long")
        if late > _MAX_COMMIT_WAIT and not mine.done:
            raise MaybeStored("its transaction has not finished")


class ProcessLock:
    """The lock that all processes share: two empty files next to the database.

    The next process holds the lock of the second file. Only the next process tries to lock the
    first file, the gate. So a process that leaves and returns immediately does not overtake waiting
    processes, and all other waiting processes can sleep longer.

    A stopped process that is next would block all other processes. Therefore a process that has
    waited for a while takes the gate if the gate is free. The order among processes that have
    waited long is then lost.
    """

    def __init__(self, file: Path) -> None:
        self._gate = _FileLock(file.with_name(f"{file.name}-gate"))
        self._next = _FileLock(file.with_name(f"{file.name}-next"))
        self._is_locked = False

    def lock(self, deadline: float) -> None:
        """Acquire the lock, unless this process holds it already. Raises StoreBusy, OSError."""
        if self._is_locked:
            return  # do not queue again: the next process waits for this process
        try:
            if self._become_next(deadline):
                self._gate.acquire(_GATE_POLL, deadline)  # guard: sqlite-gate
            self._is_locked = True
        finally:
            self._next.release()

    def _become_next(self, deadline: float) -> bool:
        """Return True if this process is next, False if it already holds the gate.

        Raises the errors of `lock`.
        """
        started = time.monotonic()
        overtake_at = started + min(_OVERTAKE_SECONDS, (deadline - started) / 2)
        while not self._next.run():
            now = time.monotonic()
            if now >= deadline:
                raise self._next.timeout_error()
            if now >= overtake_at and self._gate.run():
                return False
            time.sleep(_NEXT_POLL)
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

    __slots__ = ("_descriptor", "_path")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = CLOSED

    def acquire(self, pause: float, deadline: float) -> None:
        """Poll until the lock is acquired. Raises StoreBusy, OSError."""
        while not self.run():
            if time.monotonic() >= deadline:
                raise self.timeout_error()
            time.sleep(pause)

    def run(self) -> bool:
        """Try once to acquire the lock; return whether that worked. Raises OSError."""
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
