"""The base of all parts of the contract: an open store, and helpers to use it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stenolog.stores.base import Store


class Opened(ABC):
    """A part of the contract. `make_store` makes the store under test."""

    @abstractmethod
    def make_store(self, path: Path) -> Store:
        """Return a new, empty store that keeps all data inside this existing folder."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """Yield a new store for each test, and close it afterwards."""
        place = tmp_path / "workspace"
        place.mkdir(mode=0o700)
        with self.make_store(place) as opened:
            yield opened


@contextmanager
def clock_set(seconds: float) -> Iterator[None]:
    """Set the wall clock of this process ahead by this many seconds, or back if negative."""
    seconds_now, nanoseconds_now = time.time, time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: seconds_now() + seconds)
        patch.setattr(time, "time_ns", lambda: nanoseconds_now() + int(seconds * 1e9))
        yield


def say(store: Store, key: str, *texts: str) -> list[int]:
    """Append one user message per text, each with a separate call, and return the seqs."""
    return [store.add_message(key, "user", text) for text in texts]


def user(text: str) -> dict[str, Any]:
    """Return the message that `say` appends."""
    return {"role": "user", "content": text}


def shown(store: Store, key: str) -> list[Any]:
    """Return the contents of the visible messages."""
    return [message.content for message in store.get_history(key)]


def everything(store: Store, key: str) -> list[tuple[int, Any, bool]]:
    """Return seq, content and hidden flag of every message."""
    return [
        (message.seq, message.content, message.hidden)
        for message in store.get_history(key, full=True)
    ]


def hidden(store: Store, key: str) -> list[int]:
    """Return the seqs of the hidden messages."""
    return [seq for seq, _, out_of_sight in everything(store, key) if out_of_sight]


def talk(store: Store, key: str) -> None:
    """Store seven messages: two archived, one hidden, a batch; summary, meta, keys, undo steps."""
    say(store, key, "1", "2")
    store.add_messages(key, [user("3"), user("4"), user("5")], once="batch")
    store.checkpoint(key, summary="so far", upto=2)
    store.compact(key)
    store.hide(key, 4, 4)
    store.add_message(key, "user", "6", once="six")
    store.add_message(key, "user", "7")
    store.set_meta(key, title="A talk", tags=["x"])
