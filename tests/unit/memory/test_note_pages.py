"""Tests pages of notes, and importing an edited page, also if the notes changed since."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import stenolog
from stenolog.errors import UsageError
from stenolog.memory.note_pages import Item, export_notes, format_page, import_notes, parse_page
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


# --- pages ----------------------------------------------------------------------------------------


BEGUN = datetime(2026, 5, 1, 12, tzinfo=UTC)

tricky = st.text(
    st.sampled_from("ab \n\t\r\\<!->&#x;*_:`[]\x00\x85\u2028\ud800\ufeff"), max_size=30
)
written = (texts() | tricky).filter(lambda text: bool(text.strip()))


def _notes(said: list[tuple[str, str, bool]], scope: Scope = ANN) -> list[Note]:
    return [
        Note(
            id=f"n-{number}",
            scope=scope,
            at=BEGUN + timedelta(hours=5 * number),
            kind="daily" if daily else "core",
            text=text,
            about=about,
        )
        for number, (text, about, daily) in enumerate(said)
    ]


def _without_lines(items: list[Item]) -> list[tuple[str, str, str, str]]:
    return sorted((item.id, item.kind, item.about, item.text) for item in items)


@given(st.lists(st.tuples(written, texts() | tricky, st.booleans()), max_size=5), st.booleans())
@example([("a --> b <!-- n-0 --> c", "**x:**", False)], True)
@example([("**x:** y", "", False), ("\\**x:** y", "a\\", True)], False)
@example([("\n\n  a\n\n- b\n## Core facts\n", "\n", False)], False)
@example([("\\\x00 &#x41; \\&#x41; `a\\`", ":", False)], True)
@example([("a\n    code\n\t\n\ttab\n```\n", "", True)], False)
def test_any_note_survives_export_and_parse(
    said: list[tuple[str, str, bool]], edited: bool
) -> None:
    notes = _notes(said)
    text = format_page(ANN, notes, export_name="e1")
    if edited:  # as some editors do
        text = "\ufeff" + "\r\n".join(line.rstrip() for line in text.split("\n"))
    page = parse_page(text.encode().decode())
    assert _without_lines(list(page.items)) == sorted(
        (note.id, note.kind, note.about, note.text) for note in notes
    )
    assert page.exported_ids == {note.id for note in notes}
    assert (page.scope, page.export_name) == (ANN, "e1")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50))
@example("a -->\n<!-- b")
def test_any_scope_survives_export_and_parse(who: str) -> None:
    scope = Scope(agent=who[:9], who=who)
    assert parse_page(format_page(scope, [], export_name="e")).scope == scope


def test_exported_page_is_readable_markdown() -> None:
    said = [
        ("Eats no meat.", "diet", False),
        ("Has two cats:\n- Mia\n- Tom", "", False),
        ("They planned a trip.", "", True),
    ]
    assert format_page(ANN, _notes(said), export_name="e1").split("-->\n", 1)[1] == (
        "\n# Notes on telegram:1 (agent main)\n"
        "\n## Core facts\n"
        "\n- <!-- n-0 --> **diet:** Eats no meat.\n"
        "- <!-- n-1 --> Has two cats:\n  - Mia\n  - Tom\n"
        "\n## Daily entries\n"
        "\n### 2026-05-01\n"
        "\n- <!-- n-2 --> They planned a trip.\n"
        "\n<!-- steno exported ids:\nn-0\nn-1\nn-2\n-->\n"
    )


def test_hand_written_page_is_parsed() -> None:
    page = parse_page(
        "# mine\n## core FACTS\n\n- Likes tea\n* **diet:** No meat & C:\\temp <b>\n"
        "+ **bold** words\n- a\n\n  b\n\tc\n\n## Daily entries\n### today\n- Went home.\n"
    )
    assert (page.scope, page.export_name, page.exported_ids) == (None, "", frozenset())
    assert [(item.kind, item.about, item.text) for item in page.items] == [
        ("core", "", "Likes tea"),
        ("core", "diet", "No meat & C:\\temp <b>"),
        ("core", "", "**bold** words"),
        ("core", "", "a\n\nb\nc"),
        ("daily", "", "Went home."),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- too early", "line 1: a note must be below `## Core facts`"),
        ("## Plans\n- elsewhere", "line 2: a note must be below"),
        ("## Core facts\n- a\nwrapped", "line 3 belongs to no note"),
        ("## Core facts\n\n  indented", "line 3 belongs to no note"),
        ("## Core facts\n- <!-- x -->", "line 2: a note without text"),
        ("## Core facts\n- **diet:**", "line 2: a note without text"),
        ("## Core facts\n- <!-- x --> a\n- <!-- x --> b", "line 3 has the same id as line 2"),
        ("## Core facts\n<!-- a\n- b", "has no end"),
        ("## Core facts\n<!-- a --> please\n- b\n<!-- c -->", "line 2: text after the end"),
        ("<!-- a\nb --> - c\n", "line 2: text after the end"),
        ("<!-- a --> <!-- b -->", "line 1: text after the end"),
        ("<!-- steno notes of main, export e\n-->", "invalid scope"),
    ],
)
def test_parse_errors_name_the_line(text: str, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_page(text)
    assert words in str(raised.value)


def test_invalid_character_reference_is_unchanged() -> None:
    [item] = parse_page("## Core facts\n- &#xFFFFFF; &#x41; \\&#x41;").items
    assert item.text == "&#xFFFFFF; A &#x41;"


def test_items_between_comments_are_parsed() -> None:
    page = parse_page("## Core facts\n<!-- check -->\n- a\n<!-- these\n- no -->\n- b\n")
    assert [item.text for item in page.items] == ["a", "b"]


def test_many_ids_are_parsed_in_linear_time() -> None:
    # Quadratic time would take minutes and exceed the suite's time limit.
    ids = "".join(f"{number}\n" for number in range(300_000))
    assert len(parse_page(f"<!-- steno exported ids:\n{ids}-->\n").exported_ids) == 300_000
