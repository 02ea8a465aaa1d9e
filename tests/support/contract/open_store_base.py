"""The base of all parts of the store contract: an open store, and helpers to use it."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Event
from typing import Any, ParamSpec, TypeVar

import pytest

from stenolog.stores.base import Store

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=Exception)


class ContractPart(ABC):
    """A part of the store contract. Subclasses implement `make_store`."""

    @abstractmethod
    def make_store(self, path: Path) -> Store:
        """Return a new, empty store that keeps all data inside this existing folder."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """Yield a new store for each test, and close it afterwards."""
        workspace = tmp_path / "workspace"
        workspace.mkdir(mode=0o700)
        with self.make_store(workspace) as new_store:
            yield new_store


@contextmanager
def shifted_clock(seconds: float) -> Iterator[None]:
    """Set the wall clock of this process ahead by `seconds`, or back if `seconds` is negative."""
    real_time, real_time_ns = time.time, time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: real_time() + seconds)
        patch.setattr(time, "time_ns", lambda: real_time_ns() + int(seconds * 1e9))
        yield


@contextmanager
def thread_pool(thread_count: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a thread pool, and make the interpreter switch threads very often."""
    old_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(thread_count) as pool:
            yield pool
    finally:
        sys.setswitchinterval(old_interval)


def run_at_once(*actions: Callable[[], R]) -> list[R]:
    """Run each action in a separate thread, all at the same time, and return their results."""
    start_barrier = Barrier(len(actions))

    def run(action: Callable[[], R]) -> R:
        start_barrier.wait()
        return action()

    with thread_pool(len(actions)) as pool:
        return list(pool.map(run, actions))


@contextmanager
def repeat_in_threads(*actions: Callable[[], object]) -> Iterator[None]:
    """Repeat each action in a separate thread until the `with` ends, at least once.

    Raises the errors of the actions.
    """
    done = Event()

    def repeat(action: Callable[[], object]) -> None:
        action()
        while not done.is_set():
            action()

    with thread_pool(len(actions)) as pool:
        futures = [pool.submit(repeat, action) for action in actions]
        try:
            yield
        finally:
            done.set()
        for future in futures:
            future.result()


def assert_raises(
    error: type[E] | tuple[type[E], ...],
    call: Callable[P, object],
    *arguments: P.args,
    **options: P.kwargs,
) -> E:
    """Assert that a call raises this error, or one of these errors, and return the error."""
    __tracebackhide__ = True
    with pytest.raises(error) as raised:
        call(*arguments, **options)
    return raised.value


def user_message(text: str) -> dict[str, Any]:
    """Return a user message with this text, as `append` stores it."""
    return {"role": "user", "content": text}


def user_messages(*texts: str) -> list[dict[str, Any]]:
    """Return one user message per text."""
    return [user_message(text) for text in texts]


def append(store: Store, key: str, *texts: str) -> list[int]:
    """Append one user message per text, each with a separate call, and return the seqs."""
    return [store.add_message(key, "user", text) for text in texts]


def visible_texts(store: Store, key: str) -> list[Any]:
    """Return the contents of the visible messages."""
    return [message.content for message in store.get_history(key)]


def all_messages(store: Store, key: str) -> list[tuple[int, Any, bool]]:
    """Return seq, content and hidden flag of every message."""
    return [
        (message.seq, message.content, message.hidden)
        for message in store.get_history(key, full=True)
    ]


def hidden_seqs(store: Store, key: str) -> list[int]:
    """Return the seqs of the hidden messages."""
    return [seq for seq, _, hidden in all_messages(store, key) if hidden]


def append_conversation(store: Store, key: str) -> None:
    """Store a summary, meta and seven messages, of which two are archived and a third is hidden."""
    append(store, key, "1", "2")
    store.add_messages(key, user_messages("3", "4", "5"), once="batch")
    store.checkpoint(key, summary="so far", upto=2)
    store.compact(key)
    store.admin.hide(key, 4, 4)
    store.add_message(key, "user", "6", once="six")
    store.add_message(key, "user", "7")
    store.set_meta(key, title="A talk", tags=["x"])


def assert_session(store: Store, key: str, **expected: object) -> None:
    """Compare a session with `expected`: values by name.

    A name is a field of `info`, or: `messages` (as `all_messages` returns them), `texts` (contents
    of all messages), `visible` (contents of the visible messages), `hidden` (seqs), `summary`.
    """
    __tracebackhide__ = True
    readers: dict[str, Callable[[Store, str], object]] = {
        "messages": all_messages,
        "texts": lambda store, key: [content for _, content, _ in all_messages(store, key)],
        "visible": visible_texts,
        "hidden": hidden_seqs,
        "summary": lambda store, key: store.get_summary(key),
    }

    def read_value(name: str) -> object:
        return readers[name](store, key) if name in readers else getattr(store.info(key), name)

    assert {name: read_value(name) for name in expected} == expected
