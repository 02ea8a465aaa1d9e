"""Exclusive use of a connection by one thread at a time, which survives Ctrl-C.

KeyboardInterrupt may be raised between any two steps, even directly after a lock is acquired. Each
use of the connection is therefore an object. The use ends when the object is marked as ended or
garbage-collected. If a traceback keeps the object alive, as in a notebook, the thread that started
the use takes it over at its next call. Other threads wait no longer than their timeout.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import Final, Literal

from stenolog.catalog.catalog_database import CatalogBusy
from stenolog.stores.disk import Descriptor
from stenolog.stores.locks import ThreadLock

_CHECK_INTERVAL_SECONDS: Final = 0.01
"""Seconds after which a waiting thread checks again, even if no other thread has woken it."""
_STALE_SECONDS: Final = 0.2
"""Seconds without a check after which a waiting thread loses its place in the queue."""


class ExclusiveUse:
    """One use of the connection, by the thread that creates this object."""

    __slots__ = ("__weakref__", "checked_at", "ended", "lock", "process", "thread", "wakeup")

    def __init__(self) -> None:
        self.thread = get_ident()
        self.process = os.getpid()
        self.ended = False
        self.lock: Descriptor | None = None
        """Descriptor of the lock file, if this use writes."""
        self.wakeup: SimpleQueue[None] = SimpleQueue()
        """Queue that wakes the waiting thread. The queue is written in C, and survives Ctrl-C."""
        self.checked_at = 0.0
        """Monotonic time at which the thread last checked whether it may start."""


class ExclusiveLock:
    """A lock that allows one use of a connection at a time, in the order of the requests.

    `name`: name of the database, for error messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # This lock is held only briefly, and only in a `with` block, which acquires it in one step.
        self._guard = ThreadLock()
        self._current: weakref.ref[ExclusiveUse] | None = None
        self._waiting: deque[weakref.ref[ExclusiveUse]] = deque()

    @contextmanager
    def exclusive_use(self, *, timeout: float) -> Iterator[ExclusiveUse]:
        """Start a use for a `with` block. Raises CatalogBusy after `timeout` seconds."""
        use = ExclusiveUse()
        try:
            self.begin(use, timeout=timeout)
            yield use
        finally:
            self.end(use)

    def begin(self, use: ExclusiveUse, *, timeout: float) -> None:
        """Wait until no other use is active. Raises CatalogBusy after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._try_begin(use):
            if time.monotonic() > deadline:
                raise CatalogBusy(f"another thread used {self._name} for too long")
            with suppress(Empty):
                use.wakeup.get(timeout=_CHECK_INTERVAL_SECONDS)

    def end(self, use: ExclusiveUse) -> None:
        """Mark a use as ended and wake the thread that has waited longest."""
        use.ended = True
        if self._waiting:
            with self._guard:
                next_use = self._first_waiting_use()
            if next_use is not None:
                next_use.wakeup.put(None)

    def is_current(self, use: ExclusiveUse) -> bool:
        """Return whether this use is active. Only an active use may clean up."""
        return self._active_use() is use

    def is_own_thread(self) -> bool:
        """Return whether this thread started the active use."""
        active_use = self._active_use()
        return active_use is not None and active_use.thread == get_ident()

    def _try_begin(self, use: ExclusiveUse) -> bool:
        with self._guard:
            use.checked_at = time.monotonic()
            active_use = self._active_use()
            if active_use is None:
                # A thread that calls again at once must not overtake the waiting threads.
                if self._first_waiting_use() not in (None, use):
                    return self._add_to_queue(use)
                if self._waiting:
                    self._waiting.popleft()
            elif active_use.thread != use.thread:
                return self._add_to_queue(use)
            elif active_use.lock is not None:
                # A traceback keeps the interrupted use alive, so no finalizer closes its file.
                active_use.lock.close()
            self._current = weakref.ref(use)
            return True

    def _add_to_queue(self, use: ExclusiveUse) -> Literal[False]:
        if all(waiting() is not use for waiting in self._waiting):
            self._waiting.append(weakref.ref(use))
        return False

    def _first_waiting_use(self) -> ExclusiveUse | None:
        """Return the use that has waited longest. Drop abandoned uses."""
        now = time.monotonic()
        while self._waiting:
            use = self._waiting[0]()
            if use is not None and not use.ended and now - use.checked_at < _STALE_SECONDS:
                return use
            self._waiting.popleft()
        return None

    def _active_use(self) -> ExclusiveUse | None:
        active_use = self._current() if self._current is not None else None
        if active_use is None or active_use.ended or active_use.process != os.getpid():
            return None  # threads of the parent do not exist in a forked child
        return active_use
