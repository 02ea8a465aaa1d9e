"""Tests undo of user operations, one at a time, together with their consequences."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stenolog.errors import NothingToUndo
from stenolog.sessions.session_store import undo_last
from stenolog.stores.base import Store
from stenolog.stores.open_store import open_store

KEY = "cli:a"


@pytest.fixture(params=["jsonl", "sqlite", "memory", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    places = {
        "jsonl": str(tmp_path / "w"),
        "sqlite": f"sqlite:{tmp_path}/s.db",
        "memory": "memory:",
    }
    where = places.get(request.param) or request.getfixturevalue("own_url")
    with open_store(where) as opened:
        yield opened


def _said(store: Store) -> list[str]:
    return [str(message.content) for message in store.get_history(KEY)]


def _edit(store: Store, text: str, answer: str) -> None:
    """Replace the last question and add its answer, as /edit does."""
    kept = [message.to_dict() for message in store.get_history(KEY)][:-2]
    store.set_history(KEY, [*kept, {"role": "user", "content": text}])
    store.add_message(KEY, "assistant", answer)


def test_each_undo_restores_the_previous_state(store: Store) -> None:
    for role, text in (("user", "one?"), ("assistant", "one.")):
        store.add_message(KEY, role, text)
    _edit(store, "two?", "two.")
    _edit(store, "three?", "three.")
    assert _said(store) == ["three?", "three."]
    first = undo_last(store, KEY)
    assert (first.op, first.shown, first.hid) == ("replace", 2, 2)
    assert _said(store) == ["two?", "two."]
    assert undo_last(store, KEY).hid == 2
    assert _said(store) == ["one?", "one."]
    with pytest.raises(NothingToUndo):
        undo_last(store, KEY)
    assert len(store.get_history(KEY, full=True)) == 6, "nothing is gone"


def test_later_questions_stay_visible_after_undo(store: Store) -> None:
    for role, text in (("user", "one?"), ("assistant", "one.")):
        store.add_message(KEY, role, text)
    _edit(store, "two?", "two.")
    store.add_message(KEY, "user", "and?")
    store.add_message(KEY, "assistant", "and.")
    undo_last(store, KEY)
    assert _said(store) == ["one?", "one.", "and?", "and."]


def test_other_steps_are_undone_by_the_store(store: Store) -> None:
    for text in ("one", "two", "three"):
        store.add_message(KEY, "user", text)
    store.truncate_history(KEY, keep_last=1)
    store.add_message(KEY, "assistant", "four")
    assert undo_last(store, KEY).op == "truncate"
    assert _said(store) == ["one", "two", "three", "four"]
    with pytest.raises(NothingToUndo):
        undo_last(store, "nobody")


def test_undo_of_a_retry_hides_the_new_answer(store: Store) -> None:
    for role, text in (("user", "one?"), ("assistant", "one.")):
        store.add_message(KEY, role, text)
    for answer in ("uno.", "un."):
        store.set_history(KEY, [store.get_history(KEY)[0].to_dict()])
        store.add_message(KEY, "assistant", answer)
    undo_last(store, KEY)
    assert _said(store) == ["one?", "uno."]
    undo_last(store, KEY)
    assert _said(store) == ["one?", "one."]
