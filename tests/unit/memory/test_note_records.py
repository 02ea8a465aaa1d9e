"""Tests that the state of notes is the same however their messages are batched."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stenolog.memory.note_records import NoteState
from stenolog.memory.scopes import Scope
from stenolog.records import Message
from stenolog.stores.in_memory import InMemoryStore

ANN = Scope(who="telegram:1")

ids = st.sampled_from(["a", "b", "c", "d-1", "d-2"])
bodies = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["note"] * 5 + ["user"]),
        "kind": st.sampled_from(["core", "core", "daily", "purged", "later"]),
        "id": ids,
        "content": st.sampled_from(["one", "two"]),
        "supersedes": st.lists(ids, max_size=2),
        "forgotten": st.booleans(),
    }
)


def _stored(bodies: list[dict[str, Any]]) -> list[Message]:
    store = InMemoryStore()
    store.add_messages(ANN.key, bodies)
    return store.get_history(ANN.key, full=True)


@given(st.lists(bodies, min_size=1, max_size=12), st.data())
def test_incremental_and_full_reads_give_the_same_notes(
    given: list[dict[str, Any]], data: st.DataObject
) -> None:
    messages = _stored(given)
    at_once = NoteState(ANN).with_messages(messages)
    grown = NoteState(ANN)
    while messages:
        count = data.draw(st.integers(1, len(messages)))
        before = grown
        known = list(before.notes)
        grown = before.with_messages(messages[:count])
        assert before.notes == known, "what somebody holds does not change"
        messages = messages[count:]
    assert grown.notes == at_once.notes
    assert list(grown.in_force.values()) == [note for note in at_once.notes if note.in_force]
    assert grown.records.keys() == at_once.records.keys()
