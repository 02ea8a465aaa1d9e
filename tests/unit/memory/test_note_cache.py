"""Tests that cached notes are not read again, and that changes of others are seen immediately."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.errors import NothingToUndo, UsageError
from stenolog.memory import notes as notes_module
from stenolog.memory.notes import Draft, Notes
from stenolog.memory.recall import recall
from stenolog.memory.scopes import Scope
from stenolog.records import Message
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.open_store import open_store

ANN = Scope(who="telegram:1")


class CountingStore:
    """A store that counts the messages it returns."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.given = 0

    def get_history(self, key: str, **options: Any) -> list[Message]:
        found = self._store.get_history(key, **options)
        self.given += len(found)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def taken(self) -> int:
        """Return the count since the last call."""
        given, self.given = self.given, 0
        return given


@pytest.fixture(params=["memory:", "{}/w", "sqlite:{}/s.db"], ids=["memory", "jsonl", "sqlite"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    """Yield one store opened twice, as in two processes; in memory it is the same one."""
    where = request.param.format(tmp_path)
    with open_store(where, namespace="notes") as one, open_store(where, namespace="notes") as two:
        yield one, one if where == "memory:" else two


def _drafts(*texts: str) -> list[Draft]:
    return [Draft(kind="core", text=text) for text in texts]


def _texts(notes: Notes) -> list[str]:
    return [note.text for note in notes.list(ANN)]


def test_p9_cached_messages_are_not_read_again(stores: tuple[Store, Store]) -> None:
    store, other = CountingStore(stores[0]), Notes(stores[1])
    notes = Notes(store)
    other.add(ANN, _drafts(*[f"fact {number}" for number in range(300)]))
    assert len(notes.list(ANN)) == 300
    assert store.taken() == 300

    other.add(ANN, _drafts("one more ferry"))

    for _ in range(3):
        assert len(notes.list(ANN)) == 301
        assert notes.search("more", scope=ANN)
        assert len(recall("ferry fact", scope=ANN, notes=notes, catalog=None).found) > 9
    assert store.taken() == 1
    notes.add(ANN, _drafts("last"), once="token")
    assert notes.add(ANN, _drafts("last"), once="token")[0].text == "last"
    assert len(notes.list(ANN, kind="core")) == 302
    assert store.taken() <= 3


def test_p7_changes_of_other_processes_are_seen_by_next_call(
    stores: tuple[Store, Store],
) -> None:
    notes, other = Notes(stores[0]), Notes(stores[1])
    first, second, third = other.add(ANN, _drafts("one", "two", "three"))
    assert _texts(notes) == ["one", "two", "three"]
    other.forget(ANN, second.id)
    assert _texts(notes) == ["one", "three"]
    other.undo(ANN)
    assert _texts(notes) == ["one", "two", "three"]
    [newer] = other.add(ANN, [Draft(kind="core", text="four", supersedes=(first.id,))])
    assert _texts(notes) == ["two", "three", "four"]
    other.purge(ANN, second.id)
    assert _texts(notes) == ["three", "four"]
    other.forget(ANN, newer.id)
    assert _texts(notes) == ["one", "three"]
    other.purge(ANN, third.id)
    stores[1].compact(ANN.key)
    assert _texts(notes) == ["one"]
    stores[1].delete(ANN.key)
    assert _texts(notes) == []
    other.add(ANN, _drafts("anew"))
    assert _texts(notes) == ["anew"]


def test_cache_stays_correct_after_a_forgotten_note_is_purged(stores: tuple[Store, Store]) -> None:
    notes, other = Notes(stores[0]), Notes(stores[1])
    first, _ = other.add(ANN, _drafts("one", "two"))
    other.forget(ANN, first.id)
    assert len(notes.list(ANN, full=True)) == 2
    # As a retention rule does: no visible message changes.
    stores[1].admin.purge(ANN.key, before=2)
    assert [note.text for note in notes.list(ANN, full=True)] == ["two"]


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "supersede", "forget", "undo", "purge", "delete", "read"]),
        st.integers(0, 9),
    ),
    max_size=16,
)


@given(steps)
def test_cached_notes_always_equal_a_full_read(taken: list[tuple[str, int]]) -> None:
    store = InMemoryStore()
    kept, other = Notes(store), Notes(store)
    ids = ["nothing"]
    for number, (step, one) in enumerate(taken):
        chosen = ids[one % len(ids)]
        try:
            if step in ("add", "supersede"):
                older = (chosen,) if step == "supersede" else ()
                draft = Draft(kind="core", text=f"ferry {number}", supersedes=older)
                ids.append(other.add(ANN, [draft])[0].id)
            elif step == "forget":
                other.forget(ANN, chosen)
            elif step == "undo":
                other.undo(ANN)
            elif step == "purge":
                other.purge(ANN, chosen)
            elif step == "delete" and store.list_sessions():
                store.delete(ANN.key)
        except UsageError as error:
            if not isinstance(error, NothingToUndo) and "there is no note" not in str(error):
                raise
        if one % 2 or step == "read":
            fresh = Notes(store)
            assert kept.list(ANN, full=True) == fresh.list(ANN, full=True)
            found = kept.candidates(["ferri"], scope=ANN)
            assert found == fresh.candidates(["ferri"], scope=ANN)
            assert sorted(note.id for note in found) == sorted(note.id for note in kept.list(ANN))


class MeddlingStore(InMemoryStore):
    """A store in which something happens right after a history was read."""

    def __init__(self) -> None:
        super().__init__()
        self.then: list[Any] = []

    def get_history(self, key: str, **options: Any) -> list[Message]:
        found = super().get_history(key, **options)
        if self.then:
            self.then.pop(0)()
        return found


@pytest.mark.parametrize("when", ["first", "later"])
def test_changes_during_a_read_are_not_missed(when: str) -> None:
    store = MeddlingStore()
    notes = Notes(store)
    ids = [note.id for note in Notes(store).add(ANN, _drafts("one", "two", "three"))]
    if when == "later":
        notes.list(ANN)
        ids += [note.id for note in Notes(store).add(ANN, _drafts("four"))]
    store.then = [lambda: store.admin.hide(ANN.key, len(ids), len(ids))]
    notes.list(ANN)
    assert [note.id for note in notes.list(ANN)] == ids[:-1]


def test_number_of_cached_scopes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes_module, "MAX_SCOPES", 4)
    monkeypatch.setattr(notes_module, "MAX_NOTES", 10)
    store = CountingStore(InMemoryStore())
    notes = Notes(store)
    scopes = [Scope(who=f"telegram:{number}") for number in range(9)]
    for number, scope in enumerate(scopes):
        notes.add(scope, _drafts("one", *["more"] * 5 * (number == 8)))
    store.taken()
    for _ in range(2):
        for scope in scopes[:4]:
            notes.list(scope)
    assert store.taken() == 4
    notes.list(scopes[4])
    notes.list(scopes[0])
    assert store.taken() == 2, "the one that was not used for longest went"
    notes.list(scopes[8])
    notes.list(scopes[8])
    assert store.taken() == 6
    for scope in scopes[:4]:
        notes.list(scope)
    assert store.taken() >= 1


def test_threads_can_read_and_add_notes_concurrently() -> None:
    store = InMemoryStore()
    notes = Notes(store)
    wrong: list[str] = []

    def work(name: int) -> None:
        for number in range(20):
            [added] = notes.add(ANN, _drafts(f"ferry {name} {number}"))
            if added.id not in {note.id for note in notes.list(ANN)}:
                wrong.append(added.text)
            found = notes.candidates(["ferri"], scope=ANN, limit=1_000)
            if len({note.id for note in found}) != len(found) or added not in found:
                wrong.append(added.text)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(notes.list(ANN)) == 80
