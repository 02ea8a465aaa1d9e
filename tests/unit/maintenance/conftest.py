"""Fixtures: a workspace with one session that has every kind of record."""

from pathlib import Path

import pytest

from stenolog.stores.open_store import open_store

KEY = "telegram:123"
NAME = "telegram%3A123.jsonl"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Create a workspace with four messages, a batch of three (seq 5-7) and a summary."""
    place = tmp_path / "workspace"
    with open_store(place) as store:
        for content in ("one", "two", "three", "four"):
            store.add_message(KEY, "user", content)
        store.add_messages(KEY, [{"role": "tool", "content": part} for part in ("x", "y", "z")])
        store.set_summary(KEY, "so far")
    return place


@pytest.fixture
def log(workspace: Path) -> Path:
    """Return the log of that session."""
    return workspace / "sessions" / NAME


@pytest.fixture
def compacted(workspace: Path) -> Path:
    """Return that workspace with the first four messages in one archive and three in another."""
    with open_store(workspace) as store:
        store.checkpoint(KEY, summary="the first four", upto=4)
        assert store.compact(KEY).archived == 4
        store.add_message(KEY, "user", "newest")
        store.checkpoint(KEY, summary="the first seven", upto=7)
        assert store.compact(KEY).archived == 3
    return workspace
