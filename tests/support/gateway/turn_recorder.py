"""Records the store calls and thread hops of a turn, and runs a hook before each store call."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest

from stenolog.agent.threads import ThreadPool
from stenolog.stores.admin import StoreAdmin
from stenolog.stores.base import Lease, Store

CALLS: Final = tuple(
    name
    for name in vars(Store)
    if not name.startswith("_") and name not in ("admin", "close", "follow")
)
ADMIN_CALLS: Final = tuple(
    name
    for name in vars(StoreAdmin)
    if not name.startswith("_") and name not in ("health", "place", "read_snapshot")
)
BACKGROUND: Final = ("_summarize_and_queue_notes", "_renew", "resume", "BackgroundNotes", "Daemon.")
"""Parts of the names of coroutines that run during a turn but are not part of it, or after it."""


class Recorder:
    """Store calls and thread hops since the last `clear`."""

    def __init__(self) -> None:
        self._here = threading.local()
        self.calls: list[str] = []
        """Names of the store calls of the turn; `release` is that of its lease."""
        self.others: list[str] = []
        """Names of the calls of stores that are not watched, for example the one of the notes."""
        self.hops: list[list[str]] = []
        """For each thread hop of the turn the store calls made in it."""
        self.watched: Callable[[Any], bool] = lambda _: True
        self.before_call: Callable[[str], None] = lambda _: None
        """Called before each store call of the turn, and after the last one with `end`."""
        self.blocking: list[str] = []
        """Names of the store calls that were made on the thread of an event loop."""

    def clear(self) -> None:
        """Clear the records."""
        self.calls, self.others, self.hops, self.blocking = [], [], [], []

    def check(self) -> None:
        """Assert that no store call has blocked an event loop since the last `clear`."""
        assert not self.blocking

    def hop(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that an event loop runs in a thread."""
        task = asyncio.current_task()
        name = "" if task is None else task.get_coro().__qualname__  # type: ignore[union-attr]
        if any(part in name for part in BACKGROUND):
            return work
        made: list[str] = []
        self.hops.append(made)

        def counted(*values: Any) -> Any:
            self._here.made = made
            try:
                return work(*values)
            finally:
                self._here.made = None

        return counted

    @contextmanager
    def call(self, name: str, store: Any) -> Iterator[None]:
        """Record a store call, unless another one makes it, or a hop that is not recorded."""
        if _on_event_loop():
            self.blocking.append(name)
            raise AssertionError(f"the store call {name} blocks the event loop")
        made = getattr(self._here, "made", None)
        inside = getattr(self._here, "inside", False)
        if made is None or inside or not any(hop is made for hop in self.hops):
            yield
            return
        self._here.inside = True
        try:
            if self.watched(store):
                self.before_call(name)
                self.calls.append(name)
                made.append(name)
            else:
                self.others.append(name)
            yield
        finally:
            self._here.inside = False


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def record(
    patch: pytest.MonkeyPatch, store: type[Store], admin: type[StoreAdmin], lease: type[Lease]
) -> Recorder:
    """Record the calls of an engine's stores and leases, and the hops of every event loop.

    A hop is a call in a thread pool of the agent, or in any other executor.
    """
    recorder = Recorder()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *values: Any, **named: Any) -> Any:
            with recorder.call(name, self):
                return function(self, *values, **named)

        return call

    def counted_admin(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *values: Any, **named: Any) -> Any:
            with recorder.call(name, self._store):
                return function(self, *values, **named)

        return call

    for name in CALLS:
        patch.setattr(store, name, counted(name, getattr(store, name)))
    for name in ADMIN_CALLS:
        patch.setattr(admin, name, counted_admin(name, getattr(admin, name)))
    patch.setattr(lease, "release", counted("release", lease.release))
    in_executor = asyncio.BaseEventLoop.run_in_executor

    def run_in_executor(self: Any, pool: Any, work: Callable[..., Any], *values: Any) -> Any:
        return in_executor(self, pool, recorder.hop(work), *values)

    patch.setattr(asyncio.BaseEventLoop, "run_in_executor", run_in_executor)
    submit = ThreadPool.submit
    patch.setattr(ThreadPool, "submit", lambda self, work: submit(self, recorder.hop(work)))
    return recorder
