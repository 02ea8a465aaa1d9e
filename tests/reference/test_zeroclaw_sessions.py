"""The six tests of zeroclaw's session store, by their names, on every store of ours."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from stenolog import InMemoryStore, Store, open_store

STORES: Final[dict[str, Callable[[Path], Store]]] = {
    "jsonl": open_store,
    "memory": lambda _: InMemoryStore(),
    "sqlite": lambda place: open_store(f"sqlite:{place}/sessions.db"),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with STORES[request.param](tmp_path / "workspace") as opened:
        yield opened


def test_round_trip_append_and_load(store: Store) -> None:
    store.add_message("telegram_user123", "user", "hello")
    store.add_message("telegram_user123", "assistant", "hi there")
    found = [(m.role, m.content) for m in store.get_history("telegram_user123")]
    assert found == [("user", "hello"), ("assistant", "hi there")]


def test_load_nonexistent_session_returns_empty(store: Store) -> None:
    assert store.get_history("nonexistent") == []


def test_key_sanitization(store: Store) -> None:
    store.add_message("slack/thread:123/user", "user", "test")
    assert len(store.get_history("slack/thread:123/user")) == 1
    # There, what is replaced by `_` is lost, and these are one session.
    assert store.get_history("slack_thread_123_user") == []
    assert store.list_sessions() == ["slack/thread:123/user"]


def test_list_sessions_returns_keys(store: Store) -> None:
    store.add_message("telegram_alice", "user", "hi")
    store.add_message("discord_bob", "user", "hey")
    assert store.list_sessions() == ["discord_bob", "telegram_alice"]


def test_append_is_truly_append_only(tmp_path: Path) -> None:
    log = tmp_path / "sessions" / "test_session.jsonl"
    with open_store(tmp_path) as store:
        store.add_message("test_session", "user", "msg1")
        first = log.read_bytes()
        store.add_message("test_session", "user", "msg2")
        store.truncate_history("test_session", 1)
        second = log.read_bytes()
    assert second.startswith(first)
    assert [line.count(b'"kind":"message"') for line in second.splitlines()].count(1) == 2


def test_handles_corrupt_lines_gracefully(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(tmp_path) as store:
        for content in ("hello", "this will not be valid", "world"):
            store.add_message("corrupt_test", "user", content)
    log = tmp_path / "sessions" / "corrupt_test.jsonl"
    log.write_bytes(log.read_bytes().replace(b"this will not be valid", b"this is not valid json"))
    with open_store(tmp_path) as store:
        assert [m.content for m in store.get_history("corrupt_test")] == ["hello", "world"]
        # There, it is skipped without a word.
        assert store.info("corrupt_test").lost == 1
    assert "corrupt_test" in caplog.text
