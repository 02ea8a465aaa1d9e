"""Tests importing an edited page of notes, also if the notes changed since its export."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stenolog
from stenolog.errors import UsageError
from stenolog.memory.note_files import export_notes, import_notes
from stenolog.memory.notes import Draft, Note, Notes
from stenolog.memory.scopes import Scope
from stenolog.stores.in_memory import InMemoryStore
from stenolog.testing.strategies import texts

ANN = Scope(who="telegram:1")
BOB = Scope(who="telegram:2")


@pytest.fixture(params=["memory", "jsonl", "sqlite"])
def notes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Notes]:
    """Yield three notes of Ann and one of Bob in a store of each kind."""
    where = {"jsonl": str(tmp_path / "w"), "sqlite": f"sqlite:{tmp_path}/s.db", "memory": "memory:"}
    with stenolog.open_store(where[request.param], namespace="notes") as store:
        found = Notes(store)
        found.add(ANN, [_core("Eats meat.", "diet"), _core("Has two cats.")])
        found.add(ANN, [Draft(kind="daily", text="They talked.", session="telegram:1", seqs=(1,))])
        found.add(BOB, [_core("Bob's own.")])
        yield found


def _core(text: str, about: str = "") -> Draft:
    return Draft(kind="core", text=text, about=about)


def _texts(notes: Notes) -> list[str]:
    return [note.text for note in notes.list(ANN)]


def _all(notes: Notes) -> list[Note]:
    return [note for scope in notes.scopes() for note in notes.list(scope, full=True)]


def test_import_of_an_unchanged_page_changes_nothing(notes: Notes) -> None:
    before = _all(notes)
    edits = import_notes(notes, export_notes(notes, ANN))
    assert (edits.scope, edits.count, edits.conflicts) == (ANN, 0, ())
    assert _all(notes) == before


def test_a_changed_text_supersedes_the_old_one(notes: Notes) -> None:
    old = notes.list(ANN)[0]
    page = export_notes(notes, ANN).replace("Eats meat.", "Eats no meat.\n  Since May.")
    assert len(import_notes(notes, page).changed) == 1
    [new] = [note for note in notes.list(ANN) if note.about == "diet"]
    assert (new.text, new.session, new.supersedes) == ("Eats no meat.\nSince May.", "", (old.id,))
    assert notes.get(ANN, old.id).superseded_by == new.id
    assert len(_texts(notes)) == 3


def test_deleted_item_is_forgotten_and_can_be_restored(notes: Notes) -> None:
    cats = notes.list(ANN)[1]
    page = "\n".join(line for line in export_notes(notes, ANN).split("\n") if "cats" not in line)
    assert [note.id for note in import_notes(notes, page).forgotten] == [cats.id]
    assert _texts(notes) == ["Eats meat.", "They talked."]
    notes.undo(ANN)
    assert len(_texts(notes)) == 3


def test_added_item_becomes_a_manual_note(notes: Notes) -> None:
    page = export_notes(notes, ANN).replace(
        "## Daily", "- **job:** Baker\n- Baker\n- Baker\n\n## Daily"
    )
    assert len(import_notes(notes, page).added) == 2
    made = [note for note in notes.list(ANN) if note.text == "Baker"]
    assert sorted((note.about, note.kind, note.session) for note in made) == [
        ("", "core", ""),
        ("job", "core", ""),
    ]


def test_item_moved_to_another_heading_changes_its_kind(notes: Notes) -> None:
    page = export_notes(notes, ANN)
    [line] = [line for line in page.split("\n") if "cats" in line]
    import_notes(notes, page.replace(f"{line}\n", "").replace("### ", f"{line}\n### "))
    assert [note.text for note in notes.list(ANN, kind="daily")] == [
        "They talked.",
        "Has two cats.",
    ]
    assert _texts(notes).count("Has two cats.") == 1


def test_importing_edited_page_twice_changes_nothing(notes: Notes) -> None:
    page = (
        export_notes(notes, ANN)
        .replace("Eats meat.", "Eats no meat.")
        .replace("## Daily", "- new\n\n## Daily")
    )
    page = "\n".join(line for line in page.split("\n") if "They talked" not in line)
    assert import_notes(notes, page).count == 3
    before = _all(notes)
    again = import_notes(notes, page)
    assert (again.count, again.conflicts) == (0, ())
    assert _all(notes) == before


def test_notes_forgotten_after_an_import_are_not_restored_by_the_same_page(
    notes: Notes,
) -> None:
    page = export_notes(notes, ANN).replace("Eats meat.", "Eats no meat.\n- Likes tea")
    import_notes(notes, page)
    for note in notes.list(ANN):
        if note.text in ("Eats no meat.", "Likes tea"):
            notes.forget(ANN, note.id)
    assert import_notes(notes, page).count == 0
    assert "Likes tea" not in _texts(notes)
    fresh = export_notes(notes, ANN).replace("## Daily", "- Likes tea\n\n## Daily")
    assert import_notes(notes, fresh).count == 1
    assert "Likes tea" in _texts(notes)


def test_dry_run_reports_the_same_edits_and_changes_nothing(notes: Notes) -> None:
    page = export_notes(notes, ANN).replace("Eats meat.", "Eats no meat.")
    before = _all(notes)
    planned = import_notes(notes, page, dry_run=True)
    assert _all(notes) == before
    assert import_notes(notes, page) == planned


def test_notes_added_after_the_export_are_kept(notes: Notes) -> None:
    page = export_notes(notes, ANN)
    notes.add(ANN, [_core("Came later.")])
    assert import_notes(notes, page).count == 0
    assert "Came later." in _texts(notes)


@pytest.mark.parametrize(
    ("meanwhile", "words"),
    [("supersede", "superseded by"), ("forget", "was forgotten"), ("purge", "there is no note")],
)
def test_note_changed_since_export_is_reported_and_kept(
    notes: Notes, meanwhile: str, words: str
) -> None:
    page = export_notes(notes, ANN).replace("Eats meat.", "Eats no meat.")
    old = notes.list(ANN)[0]
    if meanwhile == "supersede":
        notes.add(ANN, [Draft(kind="core", text="Eats fish.", supersedes=(old.id,))])
    else:
        (notes.purge if meanwhile == "purge" else notes.forget)(ANN, old.id)
    before = _all(notes)
    edits = import_notes(notes, page)
    assert edits.count == 0
    [conflict] = edits.conflicts
    assert words in conflict
    assert old.id in conflict
    assert _all(notes) == before


def test_deleting_an_item_keeps_the_note_that_superseded_it(notes: Notes) -> None:
    old = notes.list(ANN)[0]
    page = "\n".join(line for line in export_notes(notes, ANN).split("\n") if "meat" not in line)
    notes.add(ANN, [Draft(kind="core", text="Eats fish.", supersedes=(old.id,))])
    edits = import_notes(notes, page)
    assert (edits.count, len(edits.conflicts)) == (0, 1)
    assert "Eats fish." in _texts(notes)


def test_unchanged_items_cause_no_conflicts(notes: Notes) -> None:
    page = export_notes(notes, ANN)
    first, second, _ = notes.list(ANN)
    notes.forget(ANN, first.id)
    notes.add(ANN, [Draft(kind="core", text="Has three cats.", supersedes=(second.id,))])
    edits = import_notes(notes, page)
    assert (edits.count, edits.conflicts) == (0, ())


def test_page_of_another_scope_is_rejected(notes: Notes) -> None:
    page = export_notes(notes, ANN)
    with pytest.raises(UsageError, match="telegram:1"):
        import_notes(notes, page, scope=BOB)
    own = "## Core facts\n- Likes tea\n"
    with pytest.raises(UsageError, match="does not name its scope"):
        import_notes(notes, own)
    assert import_notes(notes, own, scope=ANN).count == 1
    assert import_notes(notes, own, scope=ANN).count == 0
    assert [note.text for note in notes.list(BOB)] == ["Bob's own."]


def test_invalid_page_changes_nothing(notes: Notes) -> None:
    before = _all(notes)
    with pytest.raises(UsageError, match="nothing was changed"):
        import_notes(notes, export_notes(notes, ANN).replace("Eats meat.", "Eats fish.\nwrapped"))
    assert _all(notes) == before


@given(st.lists(texts().filter(lambda text: bool(text.strip())), min_size=1, max_size=4))
def test_export_and_import_change_no_notes(said: list[str]) -> None:
    notes = Notes(InMemoryStore())
    notes.add(ANN, [_core(text, about=text) for text in said])
    before = _all(notes)
    edits = import_notes(notes, export_notes(notes, ANN))
    assert (edits.count, edits.conflicts) == (0, ())
    assert _all(notes) == before


def test_page_may_delete_more_items_than_the_hidden_range_limit() -> None:
    notes = Notes(InMemoryStore())
    notes.add(ANN, [_core(f"fact number {number}") for number in range(2_100)])
    page = export_notes(notes, ANN)
    kept = [line for line in page.split("\n") if not (line[:2] == "- " and line[-1] in "13579")]

    assert len(import_notes(notes, "\n".join(kept)).forgotten) == 1_050

    assert len(notes.list(ANN)) == 1_050
    assert all(note.forgotten for note in notes.list(ANN, full=True) if note.text[-1] in "13579")
    assert import_notes(notes, "\n".join(kept)).count == 0


def test_text_after_a_comment_is_rejected_and_changes_nothing(notes: Notes) -> None:
    before = _all(notes)
    page = export_notes(notes, ANN).replace("## Core", "<!-- check --> these\n\n## Core")
    with pytest.raises(UsageError, match="text after the end of a comment"):
        import_notes(notes, page)
    assert _all(notes) == before
