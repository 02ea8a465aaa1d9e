"""A scheduler that stops one thread of a JSONL store at a lock operation or a system call.

The modules of the engine get replacements for `os`, `fcntl` and `threading`. Every lock operation
and every system call of the *first* thread is a numbered point, the same in every run. The thread
stops before the chosen point, the *second* thread makes a call until it returns or has to wait for
a lock, and then the first one continues, or an error is raised in it. All waits are for events.

No clock decides whether a call waits too long: a call that waits although no other call is running
waits for a lock that is never released.
"""

import errno
import fcntl
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from stenolog.stores import disk, jsonl

LIMIT: Final = 30.0
"""Seconds after which a thread counts as hung."""

BUSY_TIMEOUT: Final = 2 * LIMIT
"""Busy timeout of the stores in a test; no call may depend on it."""

_MOST_WAITS: Final = 5
"""How often a call may wait alone: the other call may have ended just before the wait."""

INJECTED: Final = "injected by the test"

_Lock = threading.Lock
_OPENS: Final = {"open", "dup", "scandir"}
_CALLS: Final = _OPENS | {
    "access",
    "close",
    "fdatasync",
    "fdopen",
    "fstat",
    "fstatvfs",
    "fsync",
    "link",
    "lstat",
    "mkdir",
    "pread",
    "pwrite",
    "read",
    "rename",
    "rmdir",
    "stat",
    "unlink",
    "write",
}


class Kind(Enum):
    """Kind of step at a point."""

    ACQUIRE = "acquire"
    RELEASE = "release"
    OPEN = "open"
    CLOSE = "close"
    LOCK = "lock"
    UNLOCK = "unlock"
    CALL = "call"


class Fault(Enum):
    """What happens to the first thread when it continues."""

    NONE = "continue"
    INTERRUPT = "KeyboardInterrupt before"
    INTERRUPT_AFTER = "KeyboardInterrupt after"
    MEMORY = "MemoryError"
    SYSTEM = "OSError"
    SYSTEM_AFTER = "OSError after"
    HELD = "held by another process"

    def error(self) -> BaseException:
        """Return a new error to raise."""
        if self in (Fault.INTERRUPT, Fault.INTERRUPT_AFTER):
            return KeyboardInterrupt(INJECTED)
        if self is Fault.HELD:
            return BlockingIOError(errno.EAGAIN, INJECTED)
        return MemoryError(INJECTED) if self is Fault.MEMORY else OSError(errno.EIO, INJECTED)


FAULTS: Final = {
    # The interpreter raises KeyboardInterrupt after a call, or in place of a wait. A `with` block
    # of a lock is entered and left in one step; close(2) frees the descriptor whatever it returns.
    Kind.ACQUIRE: (Fault.INTERRUPT, Fault.MEMORY),
    Kind.RELEASE: (Fault.INTERRUPT_AFTER,),
    Kind.OPEN: (Fault.INTERRUPT, Fault.MEMORY, Fault.SYSTEM),
    Kind.CLOSE: (Fault.INTERRUPT_AFTER, Fault.SYSTEM_AFTER),
    Kind.LOCK: (
        Fault.INTERRUPT,
        Fault.INTERRUPT_AFTER,
        Fault.MEMORY,
        Fault.SYSTEM,
        Fault.HELD,
    ),
    Kind.UNLOCK: (Fault.INTERRUPT_AFTER, Fault.SYSTEM),
    Kind.CALL: (Fault.INTERRUPT, Fault.INTERRUPT_AFTER, Fault.MEMORY, Fault.SYSTEM),
}
"""Errors that can occur at each kind of point."""


@dataclass(frozen=True)
class Point:
    """One step of the first thread."""

    kind: Kind
    label: str


class Scheduler:
    """Runs two calls, the first of which stops before the point with number `stop_at`."""

    def __init__(self, stop_at: int = 0, fault: Fault = Fault.NONE) -> None:
        self.points: list[Point] = []
        self.waited = False
        """Whether the second thread had to wait for a lock."""
        self._stop_at = stop_at
        self._fault = fault
        self._first = self._second = 0
        self._waits_alone = 0
        self._reached = threading.Event()
        self._settled = threading.Event()
        self._resume = threading.Event()

    def run(
        self, first: Callable[[], Any], second: Callable[[], Any] | None = None
    ) -> tuple[Any, Any]:
        """Make both calls and return their results; an error counts as a result."""
        results: list[Any] = [None, None]
        threads = [threading.Thread(target=self._run_first, args=(first, results), daemon=True)]
        threads[0].start()
        self._wait(self._reached)
        if second is not None:
            later = threading.Thread(target=self._run_second, args=(second, results), daemon=True)
            threads.append(later)
            later.start()
            self._wait(self._settled)
        self._resume.set()
        for thread in threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a call hangs"
        return results[0], results[1]

    def _wait(self, event: threading.Event) -> None:
        assert event.wait(LIMIT), "a call hangs"

    def _run_first(self, call: Callable[[], Any], results: list[Any]) -> None:
        self._first = threading.get_ident()
        results[0] = _outcome(call)
        self._first = 0
        self._reached.set()

    def _run_second(self, call: Callable[[], Any], results: list[Any]) -> None:
        self._second = threading.get_ident()
        results[1] = _outcome(call)
        self._second = 0
        self._settled.set()

    def visit(self, kind: Kind, label: str, call: Callable[[], Any]) -> Any:
        """Make a call of the engine, which is a point if the first thread makes it."""
        if threading.get_ident() != self._first:
            return call()
        self.points.append(Point(kind, label))
        if len(self.points) != self._stop_at:
            return call()
        self._reached.set()
        self._wait(self._resume)
        after = self._fault in (Fault.INTERRUPT_AFTER, Fault.SYSTEM_AFTER)
        result = call() if after or self._fault is Fault.NONE else None
        # Nothing here refers to the error: its traceback would keep the logs of the engine open.
        if self._fault is not Fault.NONE:
            raise self._fault.error()
        return result

    def waiting(self) -> None:
        """Record that the calling thread has to wait for a lock."""
        me = threading.get_ident()
        if me == self._second:
            self.waited = True
            self._settled.set()
        if not {self._first, self._second} - {0, me}:
            self._waits_alone += 1
            assert self._waits_alone <= _MOST_WAITS, "a call waits for a lock that nobody releases"


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:  # noqa: BLE001  the test examines it
        # The traceback keeps the frames and their logs, whose descriptors are counted.
        return error.with_traceback(None)


class Engine:
    """The patched modules of the engine."""

    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.descriptors: set[int] = set()
        """Descriptors that were opened and not closed."""

    def visit(self, kind: Kind, label: str, call: Callable[[], Any]) -> Any:
        """Make a call under the current scheduler."""
        return self.scheduler.visit(kind, label, call)

    def system_call(self, module: str, name: str, *args: Any, **options: Any) -> Any:
        """Make a call of the module `os`."""
        real = partial(getattr(os, name), *args, **options)
        kind = Kind.OPEN if name in _OPENS else Kind.CLOSE if name == "close" else Kind.CALL
        if name in ("close", "fdopen"):
            self.descriptors.discard(args[0])
        if name == "close" and sys._getframe(2).f_code.co_name == "__del__":
            return real()  # an error in a finalizer reaches no caller
        result = self.visit(kind, f"{module} {name}", real)
        if name in ("open", "dup"):
            self.descriptors.add(result)
        return result

    def flock(self, module: str, descriptor: int, operation: int) -> None:
        """Call flock, and report a lock that another thread or process holds."""

        def call() -> None:
            try:
                fcntl.flock(descriptor, operation)
            except BlockingIOError:
                self.scheduler.waiting()
                raise

        kind = Kind.UNLOCK if operation & fcntl.LOCK_UN else Kind.LOCK
        self.visit(kind, f"{module} flock", call)


class TracedLock:
    """A lock whose operations are points. `owner` is the thread that holds it, or 0."""

    def __init__(self, engine: Engine, module: str) -> None:
        self._engine = engine
        self._module = module
        self._lock = _Lock()
        self.owner = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As threading.Lock.acquire."""
        call = partial(self._acquire, blocking, timeout)
        return bool(self._engine.visit(Kind.ACQUIRE, f"{self._module} acquire", call))

    def _acquire(self, blocking: bool, timeout: float) -> bool:
        got = self._lock.acquire(False)
        if not got and blocking:
            self._engine.scheduler.waiting()
            got = self._lock.acquire(True, timeout)
        if got:
            self.owner = threading.get_ident()
        return got

    def release(self) -> None:
        """As threading.Lock.release."""
        self._engine.visit(Kind.RELEASE, f"{self._module} release", self._release)

    def _release(self) -> None:
        self.owner = 0
        self._lock.release()

    def locked(self) -> bool:
        """As threading.Lock.locked."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _StandIn:
    """A module some of whose functions are replaced."""

    def __init__(self, real: ModuleType, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def traced_engine() -> Iterator[Engine]:
    """Patch the modules of the JSONL engine while the block runs."""
    engine = Engine()
    names = [found.name for found in pkgutil.iter_modules(jsonl.__path__)]
    modules = [disk, *(import_module(f"{jsonl.__name__}.{name}") for name in names)]
    replaced: list[tuple[ModuleType, str, Any]] = []
    for module in modules:
        name = module.__name__.rpartition(".")[2]
        stand_ins = {
            "os": _StandIn(os, **{c: partial(engine.system_call, name, c) for c in _CALLS}),
            "fcntl": _StandIn(fcntl, flock=partial(engine.flock, name)),
            "threading": _StandIn(threading, Lock=partial(TracedLock, engine, name)),
        }
        for attribute, stand_in in stand_ins.items():
            real = vars(module).get(attribute)
            if isinstance(real, ModuleType):
                replaced.append((module, attribute, real))
                setattr(module, attribute, stand_in)
        if "ThreadLock" in vars(module):
            replaced.append((module, "ThreadLock", vars(module)["ThreadLock"]))
            setattr(module, "ThreadLock", partial(TracedLock, engine, name))  # noqa: B010
    try:
        yield engine
    finally:
        for module, attribute, real in replaced:
            setattr(module, attribute, real)
