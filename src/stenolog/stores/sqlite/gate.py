"""The gate: writers queue in order of arrival inside a process, and by flock between processes.

SQLite itself waits by sleeping, longer each time: a writer that returns immediately always wins,
and the others wait for seconds. Here the threads of a process form a queue, and the first one polls
for a file lock at short intervals. The thread whose turn it is executes the waiting appends of the
next threads in its own transaction.

There is no background thread. No thread blocks on the lock of the queue, because another writer may
hold it for long. It is acquired by `(taken,) = map(lock.acquire, (False,))` inside a `try`: the
interpreter checks for Ctrl-C after each call in bytecode, which would lose the result of a plain
`lock.acquire`, but not between that call and the assignment. Every wait in the queue is bounded,
and after each wait the thread checks again whether it is its turn, so no thread depends on being
woken.
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
"""Seconds after which a waiter may overtake the process that is next but does not run."""


class QueuedWrite:
    """A thread that waits for a turn, or for another thread to do its work."""

    __slots__ = ("_wakeup", "deadline", "done", "error", "result", "work")

    def __init__(self, work: Callable[[Any], Any] | None = None) -> None:
        self.work = work
        """Work that another thread may do in its transaction; None if the caller needs its own
        turn.
        """
        self.deadline = math.inf
        """Time until which it may wait."""
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._wakeup = threading.Lock()
        self._wakeup.acquire()

    def run(self, transaction: Any) -> None:
        """Do its work. An error of this call concerns only this caller."""
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
        """Wake the caller, so that it checks its state."""
        with suppress(RuntimeError):  # already woken
            self._wakeup.release()

    def wait(self) -> None:
        """Wait until woken, for a short time at most."""
        self._wakeup.acquire(timeout=_RECHECK_SECONDS)


class WriteQueue:
    """Queue of the writers of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[QueuedWrite] = []
        self._group: list[QueuedWrite] = []
        """Callers whose work is being done now."""

    def enter(
        self, mine: QueuedWrite, run_group: Callable[[list[QueuedWrite]], None], deadline: float
    ) -> None:
        """Join the queue, and return when the work is done. Raises StoreBusy, MaybeStored.

        Either this thread calls `run_group` with a group whose first member is `mine`, which must
        finish all of them; or another thread does the work.
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
            # Inline: Ctrl-C may strike on the way into a function, and `mine` would stay first.
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
        taken = False
        try:
            (taken,) = map(self.lock.acquire, (False,))
            if taken and not mine.done:
                self._run_group(mine, run_group)
        finally:
            if taken:
                self.lock.release()
        return taken

    def _run_group(self, mine: QueuedWrite, run_group: Callable[[list[QueuedWrite]], None]) -> None:
        """Do the work of a group.

        Callers that were not finished return to the head of the queue.
        """
        try:
            self._form_group(mine)
            run_group(self._group)
        finally:
            unfinished = [one for one in self._group if one is not mine and not one.done]
            self.waiting[:0] = [one for one in unfinished if one not in self.waiting]
            self._group = []

    @contextmanager
    def exclusive_turn(self, deadline: float) -> Iterator[None]:
        """Hold a turn without sharing it. Raises StoreBusy."""
        mine = QueuedWrite()
        taken = False
        try:
            self.waiting.append(mine)
            while True:
                if self.is_first(mine):
                    (taken,) = map(self.lock.acquire, (False,))
                if taken:
                    break
                mine.wait()
                self._check(mine, deadline)
            self.withdraw(mine)
            yield
        finally:
            if taken:
                self.lock.release()
            # Inline, as in `wait_for_turn`.
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
        """Return whether it is the first, and no thread is working."""
        # In order of arrival; otherwise a caller that returns immediately would always be first.
        return self.waiting[:1] == [mine] and not self.lock.locked()

    def _form_group(self, mine: QueuedWrite) -> None:
        """Take `mine` and the next callers whose work can be shared.

        Each is recorded before it leaves the queue, so that Ctrl-C cannot lose it in between.
        """
        self._group = [mine]
        self.withdraw(mine)
        while self.waiting and len(self._group) < _MAX_GROUP:
            following = self.waiting[0]
            if following.work is None:
                break
            self._group.append(following)
            if not self.withdraw(following):
                self._group.pop()  # it has given up

    def withdraw(self, caller: QueuedWrite) -> bool:
        """Remove a caller from the queue; return False if it was removed already."""
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

    The process that is next holds the lock of the second file, and only that process tries to get
    the first one, the gate. So a process that has just left and returns immediately does not
    overtake the waiting ones, and all but one of these can sleep longer. A process that is stopped
    while it is next would block all others: therefore a process that has waited for a while takes
    the gate if it is free. That gives up the order among processes that have waited long.
    """

    def __init__(self, file: Path) -> None:
        self._gate = _FileLock(file.with_name(f"{file.name}-gate"))
        self._next = _FileLock(file.with_name(f"{file.name}-next"))
        self._is_locked = False

    def lock(self, deadline: float) -> None:
        """Wait for the lock, unless it is held already. Raises StoreBusy, OSError."""
        if self._is_locked:
            return  # without another attempt: the process that is next waits for this one
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
        begun = time.monotonic()
        overtake_at = begun + min(_OVERTAKE_SECONDS, (deadline - begun) / 2)
        while not self._next.run():
            now = time.monotonic()
            if now >= deadline:
                raise self._next.timeout_error()
            if now >= overtake_at and self._gate.run():
                return False
            time.sleep(_NEXT_POLL)
        return True

    def unlock(self) -> None:
        """Release the lock. It does nothing if the lock is not held."""
        self._is_locked = False
        self._gate.release()

    def close(self) -> None:
        """Close the files."""
        self._gate.close()
        self._next.close()


class _FileLock:
    """A flock on one file. The file is created when it is first needed."""

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
        """Try once; return whether the lock is acquired. Raises OSError."""
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
        """Release the lock. It does nothing if the lock is not held."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file."""
        descriptor, self._descriptor = self._descriptor, CLOSED
        descriptor.close()
