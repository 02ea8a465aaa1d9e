"""A workspace with one session of every kind of record, and ways to look at all its bytes."""

from pathlib import Path

import pytest

from stenolog.stores.open_store import open_store

KEY = "telegram:123"
NAME = "telegram%3A123.jsonl"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Four messages, a batch of three (seq 5-7), a summary: seq 8 comes next."""
    place = tmp_path / "workspace"
    with open_store(place) as store:
        for content in ("one", "two", "three", "four"):
            store.add_message(KEY, "user", content)
        store.add_messages(KEY, [{"role": "tool", "content": part} for part in ("x", "y", "z")])
        store.set_summary(KEY, "so far")
    return place


@pytest.fixture
def log(workspace: Path) -> Path:
    """The file of that session."""
    return workspace / "sessions" / NAME


@pytest.fixture
def compacted(workspace: Path) -> Path:
    """The same workspace with the first four messages in one archive and three in another."""
    with open_store(workspace) as store:
        store.checkpoint(KEY, summary="the first four", upto=4)
        assert store.compact(KEY).archived == 4
        store.add_message(KEY, "user", "newest")
        store.checkpoint(KEY, summary="the first seven", upto=7)
        assert store.compact(KEY).archived == 3
    return workspace
