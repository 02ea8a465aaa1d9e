"""Locks and in-use counters for the threads of one process; Ctrl-C leaves none of them held.

And what a forked child must never close.
"""

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


class ThreadLock(RLock):  # type: ignore[misc]  # final for type checkers alone
    """A reentrant lock, used by `with` alone.

    `with` enters a lock that is written in C in one step. In a Python `__enter__` Ctrl-C could
    strike after the acquire, and the lock would stay locked for all other threads.

    A thread of the parent that held the lock at the fork does not exist in the child and would
    never release it, so all locks are free in the child.
    """

    def __init__(self) -> None:
        super().__init__()
        _locks.add(self)


_locks: "weakref.WeakSet[ThreadLock]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        reinit: Any = lock
        reinit._at_fork_reinit()


os.register_at_fork(after_in_child=_after_fork_in_child)


class InUseCounter:
    """Counts the calls that use a store, so that no file is closed while a call uses it.

    `with counter.entry:` surrounds each call. After `end`, entering raises StoreClosed.

    `release` is called once `end` was called and no call is inside: by `end`, or by the last call
    that leaves. It may be called twice.

    The interpreter counts: `with` keeps a reference to the entry until the block ends, however it
    ends. Ctrl-C could strike between any two steps of a counter that is written in Python.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self.entry: _Entry | _Closed = _Entry()
        self._release = release
        self._releasing = ThreadLock()
        self._ended = False
        self._open = weakref.ref(self.entry, self._left)

    def end(self) -> None:
        """Let no more calls in, and release if no call is inside. It can be repeated."""
        self.entry = _CLOSED
        self._ended = True
        if self._open() is None:  # guard: close-releases-files
            self._release_once()

    def _left(self, _: object) -> None:
        """React to the end of the last call. Python ignores an exception that is raised here."""
        if self._ended:
            # Twice, because Ctrl-C may strike within the first.
            try:
                self._release_once()
            finally:
                self._release_once()

    def _release_once(self) -> None:
        with self._releasing:
            self._release()


class _Entry(str):
    """A context manager without effect.

    Its methods are written in C: the traceback of an exception in a Python method would refer to
    the entry, and so count as a call that is inside.
    """

    __slots__ = ("__weakref__",)

    __enter__: Any = str.strip
    __exit__: Any = str.format


class _Closed:
    """Takes the place of the entry in a closed store."""

    def __enter__(self) -> NoReturn:
        raise StoreClosed("the store is closed")

    def __exit__(self, *error: object) -> None:
        """Nothing was entered."""


_CLOSED = _Closed()


class _Kept(Struct, gc=False):
    """Holds on to something until the process is gone.

    A connection of the parent must not be closed in the child, not even when the interpreter ends
    and clears everything: it would work on files and locks that are not its own. This refers to
    itself and is hidden from the collector, so nobody ever clears it.
    """

    what: object
    itself: object = None


def keep_for_ever(connection: object) -> None:
    """In a forked child: never close it, because it is the parent's."""
    kept = _Kept(connection)
    kept.itself = kept  # guard: sqlite-fork
