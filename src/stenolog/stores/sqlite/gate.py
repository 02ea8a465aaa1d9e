"""The gate that writers queue at: in one process by order of arrival, between processes by flock.

SQLite's own way to wait is to sleep and look again, longer each time: whoever comes back at once
is always first, and the others wait for seconds. Here the threads of a process stand in a queue,
and the first of them tries for a lock on a file, at short intervals. Who has the turn takes the
appends of those behind it into its own transaction.

There is no background thread. The lock of the queue is never waited for: another writer may hold it
for long. It is taken by `(taken,) = map(lock.acquire, (False,))` inside a `try`: the interpreter
checks for Ctrl-C after each call that it makes itself, which would lose the result of a plain
`lock.acquire`, and not between that call and the assignment. Every wait in the queue is bounded,
and after each the waiter looks again whether it is its turn, so that nobody depends on somebody
else to be woken.
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

_LOOK_AGAIN: Final = 0.02
_UNDER_WAY: Final = 30.0
_MOST_IN_A_GROUP: Final = 256
_POLL: Final = 0.0001
_POLL_TO_BE_NEXT: Final = 0.001
_STOPPED: Final = 0.2
"""Who waits for longer than this to be next may go past one that does not move."""


class Caller:
    """One who waits for a turn, or for another to do its work along with its own."""

    __slots__ = ("_bell", "deadline", "done", "error", "result", "work")

    def __init__(self, work: Callable[[Any], Any] | None = None) -> None:
        self.work = work
        """What may be done in another's transaction; None: it wants a turn of its own."""
        self.deadline = math.inf
        """Until when it may wait for others."""
        self.done = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._bell = threading.Lock()
        self._bell.acquire()

    def attempt(self, transaction: Any) -> None:
        """Do its work; what is wrong with the call itself is its own affair."""
        self.error = None
        if self.work is not None:
            try:
                self.result = self.work(transaction)
            except StenologError as error:
                self.error = error

    def finish(self) -> None:
        """Tell the caller that it is done."""
        self.done = True
        self.ring()

    def ring(self) -> None:
        """Make the caller look."""
        with suppress(RuntimeError):  # it was rung already
            self._bell.release()

    def wait(self) -> None:
        """Until rung, but not for long."""
        self._bell.acquire(timeout=_LOOK_AGAIN)


class Queue:
    """Orders the writers of one process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Caller] = []
        self._taken: list[Caller] = []
        """Those for whom somebody works now."""

    def enter(self, mine: Caller, lead: Callable[[list[Caller]], None], deadline: float) -> None:
        """Stand in the queue, and return when mine is done. Raises StoreBusy, MaybeStored.

        Either `lead` is called, with a group of which mine is the first, and finishes each of
        them; or somebody else's does.
        """
        self.waiting.append(mine)
        self.stay(mine, lead, deadline)

    def stay(self, mine: Caller, lead: Callable[[list[Caller]], None], deadline: float) -> None:
        """The same for one who stands there already."""
        try:
            while not mine.done:
                if not (self.may_go(mine) and self._try_to_lead(mine, lead)):
                    mine.wait()
                    self._check(mine, deadline)
        finally:
            # Not by a call: Ctrl-C may strike on the way into one, and mine would stay first.
            if not mine.done and mine in self.waiting:
                try:  # noqa: SIM105
                    self.waiting.remove(mine)
                except ValueError:
                    pass
            mine.done = True  # nobody works for one who has left
            self.call_next()

    def _try_to_lead(self, mine: Caller, lead: Callable[[list[Caller]], None]) -> bool:
        """Work for a group, unless another thread took the lock first; then return False."""
        taken = False
        try:
            (taken,) = map(self.lock.acquire, (False,))
            if taken and not mine.done:
                self._lead(mine, lead)
        finally:
            if taken:
                self.lock.release()
        return taken

    def _lead(self, mine: Caller, lead: Callable[[list[Caller]], None]) -> None:
        """Work for a group. Who is not told what became of it waits again, and goes first."""
        try:
            self._take(mine)
            lead(self._taken)
        finally:
            untold = [one for one in self._taken if one is not mine and not one.done]
            self.waiting[:0] = [one for one in untold if one not in self.waiting]
            self._taken = []

    @contextmanager
    def alone(self, deadline: float) -> Iterator[None]:
        """A turn of one's own. Raises StoreBusy."""
        mine = Caller()
        taken = False
        try:
            self.waiting.append(mine)
            while True:
                if self.may_go(mine):
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
            # Not by a call, as in `stay`.
            if mine in self.waiting:
                try:  # noqa: SIM105
                    self.waiting.remove(mine)
                except ValueError:
                    pass
            self.call_next()

    def call_next(self) -> None:
        """Wake who has waited longest."""
        with suppress(IndexError):  # nobody waits
            self.waiting[0].ring()

    def may_go(self, mine: Caller) -> bool:
        """Whether it is the first, and nobody is at work."""
        # In the order in which they came, or one who comes back at once is always first.
        return self.waiting[:1] == [mine] and not self.lock.locked()

    def _take(self, mine: Caller) -> None:
        """Mine, and those behind it whose work can go along.

        Each is written down before it leaves the queue: Ctrl-C must not lose it in between.
        """
        self._taken = [mine]
        self.withdraw(mine)
        while self.waiting and len(self._taken) < _MOST_IN_A_GROUP:
            following = self.waiting[0]
            if following.work is None:
                break
            self._taken.append(following)
            if not self.withdraw(following):
                self._taken.pop()  # it has given up

    def withdraw(self, caller: Caller) -> bool:
        """Take it out of the queue; False where somebody else already has."""
        try:
            self.waiting.remove(caller)
        except ValueError:
            return False
        return True

    def _check(self, mine: Caller, deadline: float) -> None:
        late = time.monotonic() - deadline
        if mine.done or late < 0:
            return
        if self.withdraw(mine):
            raise StoreBusy("other writers of this process held the database too long")
        if late > _UNDER_WAY and not mine.done:
            raise MaybeStored("the transaction it went into is still under way")


class FileLock:
    """The lock that all processes share: two files beside the database, which hold nothing.

    Who is next holds the lock on the second file, and only that one tries for the first, the gate.
    So who has just been inside, and comes back at once, does not overtake those who wait; and all
    but one of them may sleep for longer. A process that is stopped while it is next would keep all
    others out: so who has waited for a while takes the gate where it finds it free. That costs the
    order, among those who have waited for long.
    """

    def __init__(self, file: Path) -> None:
        self._gate = _Lock(file.with_name(f"{file.name}-gate"))
        self._next = _Lock(file.with_name(f"{file.name}-next"))
        self._held = False

    def lock(self, deadline: float) -> None:
        """Wait for it; to have it already is no harm. Raises StoreBusy, OSError."""
        if self._held:
            return  # and not ask again: who is next waits for us
        try:
            if self._come_next(deadline):
                self._gate.take(_POLL, deadline)  # guard: sqlite-gate
            self._held = True
        finally:
            self._next.let_go()

    def _come_next(self, deadline: float) -> bool:
        """True: it is our turn to wait at the gate; False: that is ours already. Raises as lock."""
        begun = time.monotonic()
        patience = begun + min(_STOPPED, (deadline - begun) / 2)
        while not self._next.attempt():
            now = time.monotonic()
            if now >= deadline:
                raise self._next.busy()
            if now >= patience and self._gate.attempt():
                return False
            time.sleep(_POLL_TO_BE_NEXT)
        return True

    def unlock(self) -> None:
        """Let the next process in; not to have it is no harm."""
        self._held = False
        self._gate.let_go()

    def close(self) -> None:
        """Let go of the files."""
        self._gate.close()
        self._next.close()


class _Lock:
    """A flock on one file, which is made when it is first needed."""

    __slots__ = ("_descriptor", "_path")

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = CLOSED

    def take(self, pause: float, deadline: float) -> None:
        """Try until it is ours. Raises StoreBusy, OSError."""
        while not self.attempt():
            if time.monotonic() >= deadline:
                raise self.busy()
            time.sleep(pause)

    def attempt(self) -> bool:
        """Try once; whether it is ours now. Raises OSError."""
        if self._descriptor < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = open_descriptor(self._path, flags)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def busy(self) -> StoreBusy:
        """What who waited too long is told."""
        return StoreBusy(f"{self._path}: other processes held the database too long")

    def let_go(self) -> None:
        """Let another have it; not to have it is no harm."""
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file."""
        descriptor, self._descriptor = self._descriptor, CLOSED
        descriptor.close()
