"""Tests the progress mark of consolidation."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stenolog.memory.consolidation import ConsolidationProgress, ProgressMark
from stenolog.memory.notes import Draft, Notes
from stenolog.memory.scopes import Scope
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store

LATER = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


@pytest.fixture(params=["memory:", "{}/w", "sqlite:{}/s.db"], ids=["memory", "jsonl", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Yield an empty store for notes."""
    with open_store(request.param.format(tmp_path), namespace="notes") as opened:
        yield opened


def test_mark_of_a_new_session_is_at_the_beginning(store: Store) -> None:
    assert ConsolidationProgress(store, agent="main").read_mark("u1") == ProgressMark(
        seq=0, attempts=0, retry_at=None
    )


def test_progress_mark_only_moves_forward(store: Store) -> None:
    progress = ConsolidationProgress(store, agent="main")

    progress.move_mark("u1", 7)
    progress.move_mark("u1", 4)

    assert progress.read_mark("u1") == ProgressMark(seq=7)


def test_each_session_uid_and_agent_has_its_own_progress_mark(store: Store) -> None:
    ConsolidationProgress(store, agent="main").move_mark("u1", 7)

    assert ConsolidationProgress(store, agent="main").read_mark("u2").seq == 0
    assert ConsolidationProgress(store, agent="other").read_mark("u1").seq == 0


def test_failed_attempts_are_counted_until_the_mark_moves(store: Store) -> None:
    progress = ConsolidationProgress(store, agent="main")

    progress.move_mark("u1", 2)
    progress.record_failure("u1", attempts=3, retry_at=LATER)

    assert progress.read_mark("u1") == ProgressMark(seq=2, attempts=3, retry_at=LATER)
    progress.move_mark("u1", 4)
    assert progress.read_mark("u1") == ProgressMark(seq=4)


def test_progress_mark_is_neither_a_scope_nor_a_note(store: Store) -> None:
    notes = Notes(store)
    ann = Scope(who="telegram:1")
    notes.add(ann, [Draft(kind="core", text="Has a dog.")])

    ConsolidationProgress(store, agent="main").move_mark("u1", 7)

    assert notes.scopes() == [ann]
    assert notes.scopes(agent="main") == [ann]


def test_progress_mark_does_not_contain_the_session_key(store: Store) -> None:
    progress = ConsolidationProgress(store, agent="main")

    progress.record_failure("u2", attempts=1, retry_at=LATER)
    progress.move_mark("u1", 7)

    assert [store.info(key).meta.get("session") for key in store.list_sessions()] == [None, None]
