"""Group commit: threads that append to one session at once share one write and one sync.

There is no background thread. Who finds the gate free leads: it takes everything that waits for
its session, writes it, and wakes the others. The gate's lock is taken by `with` alone, because
Ctrl-C may strike between an acquire and a try; every wait is bounded, and after each the waiter
looks again whether it should lead, so that nobody depends on somebody else to be woken. Nor to be
put back: whoever is in no queue while nobody leads was taken by one whom Ctrl-C struck.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from stenolog.errors import MaybeStored, StoreBusy
from stenolog.stores.jsonl.writer import Batch

GATES: Final = 1024
"""At most so many, whatever the number of sessions; each is made when it is first needed."""

_LOOK_AGAIN: Final = 0.02
_UNDER_WAY: Final = 30.0
_MOST_IN_A_GROUP: Final = 256
_MOST_BYTES: Final = 8 * 1024 * 1024


class Pending:
    """One caller's turn at a session: an append, which may go in a group, or something else."""

    __slots__ = ("_bell", "batch", "begun", "check", "done", "error", "first", "key")

    def __init__(
        self, key: str, batch: Batch | None = None, check: Callable[[], None] | None = None
    ) -> None:
        self.key = key
        self.batch = batch
        self.check = check
        """Raises where it may not be carried out any more; asked while the log stands still."""
        self.begun = False
        """Somebody has begun to carry it out."""
        self.done = False
        self.first = 0
        """The seq of its first message."""
        self.error: BaseException | None = None
        self._bell = threading.Lock()
        self._bell.acquire()

    def finish(self, *, first: int = 0, error: BaseException | None = None) -> None:
        """Tell the caller what became of it."""
        self.first, self.error = first, error
        self.done = True
        self.ring()

    def ring(self) -> None:
        """Make the caller look."""
        with suppress(RuntimeError):  # it was rung already
            self._bell.release()

    def wait(self) -> None:
        """Until rung, but not for long."""
        self._bell.acquire(timeout=_LOOK_AGAIN)


class Gate:
    """Orders the writers of this process that may touch the same session."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: list[Pending] = []

    def enter(self, mine: Pending, lead: Callable[[list[Pending]], None], deadline: float) -> None:
        """Return when mine is done. Raises StoreBusy, MaybeStored.

        Either `lead` is called, with a group of which mine is the first, and finishes each of
        them; or somebody else's does.
        """
        try:
            self.waiting.append(mine)
            while not mine.done:
                if self._may_go(mine):
                    with self.lock:
                        if not mine.done:
                            self._go(mine, lead)
                else:
                    mine.wait()
                    self._check(mine, deadline)
        finally:
            # Left twice, because Ctrl-C may strike within the first.
            try:
                self._leave(mine)
            finally:
                self._leave(mine)

    def _may_go(self, mine: Pending) -> bool:
        if self.lock.locked():
            return False
        # In the order in which they came, or one who comes back at once is always first.
        return self.waiting[:1] == [mine] or mine not in self.waiting

    def _go(self, mine: Pending, lead: Callable[[list[Pending]], None]) -> None:
        """Lead, unless somebody has who was struck down. The lock is held."""
        if mine.begun:
            mine.finish(error=MaybeStored(f"{mine.key!r}: the write it went into was interrupted"))
            return
        group = self._take(mine)
        for pending in group:
            pending.begun = True
        lead(group)

    def _leave(self, mine: Pending) -> None:
        if not mine.done:
            self._withdraw(mine)
        self.call_next()

    def call_next(self) -> None:
        """Wake who has waited longest."""
        if self.waiting:
            with suppress(IndexError):  # it did not wait
                self.waiting[0].ring()

    def _take(self, mine: Pending) -> list[Pending]:
        """Mine, and the appends that wait for the same session."""
        self._withdraw(mine)
        group = [mine]
        if mine.batch is None or not self.waiting:
            return group
        size = sum(map(len, mine.batch.payloads))
        for pending in self.waiting.copy():
            if pending.key == mine.key and pending.batch is not None:
                size += sum(map(len, pending.batch.payloads))
                if len(group) >= _MOST_IN_A_GROUP or size > _MOST_BYTES:
                    break
                if self._withdraw(pending):
                    group.append(pending)
        return group

    def _withdraw(self, pending: Pending) -> bool:
        """Take it out of the queue; False where somebody else already has."""
        try:
            self.waiting.remove(pending)
        except ValueError:
            return False
        return True

    def _check(self, mine: Pending, deadline: float) -> None:
        late = time.monotonic() - deadline
        if mine.done or late < 0:
            return
        if self._withdraw(mine):
            raise StoreBusy(f"{mine.key!r}: other writers of this process held it too long")
        if late > _UNDER_WAY and not mine.done:
            raise MaybeStored(f"{mine.key!r}: the write it went into is still under way")
