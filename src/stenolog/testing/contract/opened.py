"""What every part of the contract starts from: an open store, and plain words for its use."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stenolog.stores.base import Store


class Opened(ABC):
    """One part of the contract; the store under test is made by `make_store`."""

    @abstractmethod
    def make_store(self, path: Path) -> Store:
        """A new, empty store that keeps everything inside this folder, which exists."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        """A store of the test's own, closed behind it."""
        place = tmp_path / "workspace"
        place.mkdir(mode=0o700)
        with self.make_store(place) as opened:
            yield opened


@contextmanager
def clock_set(seconds: float) -> Iterator[None]:
    """Set the wall clock of this process ahead, or back, by so many seconds."""
    seconds_now, nanoseconds_now = time.time, time.time_ns
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: seconds_now() + seconds)
        patch.setattr(time, "time_ns", lambda: nanoseconds_now() + int(seconds * 1e9))
        yield


def say(store: Store, key: str, *texts: str) -> list[int]:
    """Append one user message per text, each by a call of its own; their seqs."""
    return [store.add_message(key, "user", text) for text in texts]


def user(text: str) -> dict[str, Any]:
    """The message that `say` appends."""
    return {"role": "user", "content": text}


def shown(store: Store, key: str) -> list[Any]:
    """The contents in sight."""
    return [message.content for message in store.get_history(key)]


def everything(store: Store, key: str) -> list[tuple[int, Any, bool]]:
    """Seq, content and whether it is hidden, of every message there is."""
    return [
        (message.seq, message.content, message.hidden)
        for message in store.get_history(key, full=True)
    ]


def hidden(store: Store, key: str) -> list[int]:
    """The seqs out of sight."""
    return [seq for seq, _, out_of_sight in everything(store, key) if out_of_sight]


def talk(store: Store, key: str) -> None:
    """Seven messages: two archived, one hidden, a batch; a summary, meta, tokens, undo steps."""
    say(store, key, "1", "2")
    store.add_messages(key, [user("3"), user("4"), user("5")], once="batch")
    store.checkpoint(key, summary="so far", upto=2)
    store.compact(key)
    store.hide(key, 4, 4)
    store.add_message(key, "user", "6", once="six")
    store.add_message(key, "user", "7")
    store.set_meta(key, title="A talk", tags=["x"])
