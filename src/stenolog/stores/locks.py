"""A lock between the threads of one process, which a forked child has anew."""

import os
from threading import RLock
from types import TracebackType


class ThreadLock:
    """Held by `with`, by one thread at a time.

    A thread of the parent that held it at the fork does not exist in the child and would never let
    go: so whoever finds that the process is another one begins with a new lock.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = RLock()

    def __enter__(self) -> None:
        if self._process != os.getpid():
            self._process, self._lock = os.getpid(), RLock()
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
