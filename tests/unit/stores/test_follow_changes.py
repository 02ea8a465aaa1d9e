"""Tests that a follower receives all changes of a session, on every engine."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stenolog.errors import SessionDeleted
from stenolog.records import Message
from stenolog.stores import following
from stenolog.stores.base import Store
from stenolog.stores.following import SessionChange, changes_between, follow_changes
from stenolog.stores.open_store import open_store
from support import temporary_folders

ENGINES = ("jsonl", "sqlite", "memory", "postgresql")


def _open(engine: str, folder: Path, url: str) -> Store:
    where = {"jsonl": str(folder), "sqlite": f"sqlite:{folder / 's.db'}", "memory": "memory:"}
    return open_store(where.get(engine, url))


@pytest.mark.parametrize("engine", ENGINES)
def test_messages_and_changes_are_returned_in_order(
    engine: str, own_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "CHECK_SECONDS", 0.05)
    with temporary_folders.folder() as folder, _open(engine, folder, own_url) as store:
        for number in range(4):
            store.add_message("s", "user", f"m{number}")
        found: list[Message | SessionChange] = []
        failed: list[BaseException] = []

        def listen() -> None:
            try:
                for one in follow_changes(store, "s", timeout=30):
                    found.append(one)
            except SessionDeleted as error:
                failed.append(error)

        # Wait for each: two changes between two polls may be reported as one.
        steps: list[Callable[[], Any]] = [
            lambda: store.checkpoint("s", summary="before", upto=1),
            lambda: store.admin.hide("s", 3, 3),
            lambda: store.undo("s"),
            lambda: store.set_summary("s", "another"),
            lambda: store.add_message("s", "user", "m4"),
            lambda: store.set_meta("s", title="A name"),
        ]
        listening = threading.Thread(target=listen)
        listening.start()
        try:
            for expected, step in enumerate(steps, start=5):
                _wait_until(partial(_has_count, found, expected - 1))
                step()
            _wait_until(partial(_has_count, found, 10))
        finally:
            store.delete("s")
            listening.join(60)
    assert _kinds_and_texts(found) == [
        "m0", "m1", "m2", "m3", "checkpoint", "hide", "undo", "summary", "m4", "meta",
    ]  # fmt: skip
    assert len(failed) == 1


def _kinds_and_texts(found: list[Message | SessionChange]) -> list[Any]:
    return [one.kind if isinstance(one, SessionChange) else one.content for one in list(found)]


def _has_count(found: list[Message | SessionChange], count: int) -> bool:
    return len(found) >= count


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline, "it was never told"
        time.sleep(0.005)


def test_unknown_session_has_no_changes() -> None:
    with open_store("memory:") as store:
        store.add_message("s", "user", "x")
        info = store.info("s")
        assert changes_between(None, info) == changes_between(info, None) == []
        store.delete("s")
        store.add_message("s", "user", "y")
        assert changes_between(info, store.info("s")) == []
