"""Locks and in-use counters for the threads of one process, safe against Ctrl-C and fork."""

import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec import Struct

from stenolog.errors import StoreClosed

if TYPE_CHECKING:
    from threading import _RLock as RLock
else:
    RLock = type(threading.RLock())


class ThreadLock(RLock):  # type: ignore[misc]  # final only for type checkers
    """A reentrant lock, used only with `with`.

    The `__enter__` of this lock is written in C, so `with` acquires the lock in one step. In an
    `__enter__` written in Python, Ctrl-C could strike after the acquire, and the lock would stay
    locked for all other threads.

    All locks are reset in a forked child: a thread of the parent that held a lock at the fork does
    not exist in the child and would never release the lock.
    """

    def __init__(self) -> None:
        super().__init__()
        _locks.add(self)


_locks: "weakref.WeakSet[ThreadLock]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        untyped_lock: Any = lock
        untyped_lock._at_fork_reinit()


os.register_at_fork(after_in_child=_after_fork_in_child)


class InUseCounter:
    """Counter of the calls that use a store, so that no file is closed during a call.

    `with counter.entry:` surrounds each call. After `end`, entering raises StoreClosed. After
    `end`, `release` runs as soon as no call is inside: in `end` itself, or when the last call
    leaves. `release` may run twice.

    The interpreter does the counting: `with` keeps a reference to the entry until the block ends,
    normally or with an exception. Ctrl-C could strike between any two steps of a counter written in
    Python.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self.entry: _Entry | _Closed = _Entry()
        self._release = release
        self._releasing = ThreadLock()
        self._ended = False
        self._open = weakref.ref(self.entry, self._on_last_exit)

    def end(self) -> None:
        """Reject new calls, and run `release` if no call is inside.

        A second call has no further effect.
        """
        self.entry = _CLOSED
        self._ended = True
        if self._open() is None:
            self._run_release()

    def _on_last_exit(self, _: object) -> None:
        """Run `release` after the last call, if `end` was called.

        Python ignores exceptions of this method.
        """
        if self._ended:
            # Call `release` twice, because Ctrl-C may interrupt the first call.
            try:
                self._run_release()
            finally:
                self._run_release()

    def _run_release(self) -> None:
        with self._releasing:
            self._release()


class _Entry(str):
    """A context manager without effect.

    Its methods are written in C: the traceback of an exception in a Python method would refer to
    the entry and keep the store in use. `str.strip` and `str.format` of an empty text return an
    empty text, so `__exit__` suppresses no exception.
    """

    __slots__ = ("__weakref__",)

    __enter__: Any = str.strip
    __exit__: Any = str.format


class _Closed:
    """The entry of a closed store."""

    def __enter__(self) -> NoReturn:
        raise StoreClosed("the store is closed")

    def __exit__(self, *error: object) -> None:
        """Do nothing, because `__enter__` of a closed store always raises."""


_CLOSED = _Closed()


class _Immortal(Struct, gc=False):
    """Holder that keeps an object alive until the process ends.

    A forked child must not close a connection of its parent, not even at interpreter exit: closing
    would change the parent's files and locks. This object refers to itself and is hidden from the
    garbage collector, so Python never clears it.
    """

    kept_object: object
    self_reference: object = None


def keep_forever(connection: object) -> None:
    """Keep a connection of the parent open in a forked child."""
    immortal = _Immortal(connection)
    immortal.self_reference = immortal
