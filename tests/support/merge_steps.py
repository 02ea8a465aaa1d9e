"""Merges of the fallback store that are killed, or disturbed, before any of their durable steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from stenolog.errors import StoreUnavailable
from stenolog.stores import disk
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store
from stenolog.stores.operations import AdminOperations
from stenolog.transfer import fallback as fallbacks
from stenolog.transfer import open_sessions as opening
from stenolog.transfer.open_sessions import open_sessions


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No store can be opened meanwhile."""

    def refuse(*_: object, **__: object) -> Store:
        raise StoreUnavailable("the disk is away")

    with monkeypatch.context() as patched:
        patched.setattr(opening, "open_store", refuse)
        yield


@contextmanager
def steps(
    monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None] = lambda _: None
) -> Iterator[list[str]]:
    """Call `before` with the number of each durable step of a merge, and yield the steps so far."""
    done: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            before(len(done))
            return call(*arguments, **options)

        return step

    def opened(place: Any, **options: Any) -> Store:
        store = open_store(place, **options)
        for name in ("add_messages", "checkpoint", "set_meta"):
            setattr(store, name, counted(name, getattr(store, name)))
        return store

    with monkeypatch.context() as patched:
        patched.setattr(opening, "open_store", opened)
        patched.setattr(AdminOperations, "hide", counted("hide", AdminOperations.hide))
        rename = counted("rename", fallbacks._rename_merged_folder)
        patched.setattr(fallbacks, "_rename_merged_folder", rename)
        record = counted("record", disk.replace_file)
        patched.setattr(fallbacks, "disk", SimpleNamespace(**vars(disk) | {"replace_file": record}))
        yield done


def merge_killed(where: str, monkeypatch: pytest.MonkeyPatch, number: int) -> bool:
    """Start, and end the merge before this step; return whether there was such a step."""

    def kill(step: int) -> None:
        if step == number:
            raise KeyboardInterrupt

    with steps(monkeypatch, kill) as done:
        try:
            open_sessions(where).close()
        except KeyboardInterrupt:
            assert len(done) == number
            return True
    return False
