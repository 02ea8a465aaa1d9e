"""Tests pages of notes: every text is preserved, and changes by editors do no harm."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stenolog.errors import UsageError
from stenolog.memory.note_pages import Item, from_markdown, to_markdown
from stenolog.memory.note_records import Note
from stenolog.memory.scopes import Scope
from stenolog.testing.strategies import texts

ANN = Scope(who="telegram:1")
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
    text = to_markdown(ANN, notes, export="e1")
    if edited:  # as some editors do
        text = "\ufeff" + "\r\n".join(line.rstrip() for line in text.split("\n"))
    page = from_markdown(text.encode().decode())
    assert _without_lines(list(page.items)) == sorted(
        (note.id, note.kind, note.about, note.text) for note in notes
    )
    assert page.exported == {note.id for note in notes}
    assert (page.scope, page.export) == (ANN, "e1")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50))
@example("a -->\n<!-- b")
def test_any_scope_survives_export_and_parse(who: str) -> None:
    scope = Scope(agent=who[:9], who=who)
    assert from_markdown(to_markdown(scope, [], export="e")).scope == scope


def test_exported_page_is_readable_markdown() -> None:
    said = [
        ("Eats no meat.", "diet", False),
        ("Has two cats:\n- Mia\n- Tom", "", False),
        ("They planned a trip.", "", True),
    ]
    assert to_markdown(ANN, _notes(said), export="e1").split("-->\n", 1)[1] == (
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
    page = from_markdown(
        "# mine\n## core FACTS\n\n- Likes tea\n* **diet:** No meat & C:\\temp <b>\n"
        "+ **bold** words\n- a\n\n  b\n\tc\n\n## Daily entries\n### today\n- Went home.\n"
    )
    assert (page.scope, page.export, page.exported) == (None, "", frozenset())
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
        from_markdown(text)
    assert words in str(raised.value)


def test_invalid_character_reference_is_unchanged() -> None:
    [item] = from_markdown("## Core facts\n- &#xFFFFFF; &#x41; \\&#x41;").items
    assert item.text == "&#xFFFFFF; A &#x41;"


def test_items_between_comments_are_parsed() -> None:
    page = from_markdown("## Core facts\n<!-- check -->\n- a\n<!-- these\n- no -->\n- b\n")
    assert [item.text for item in page.items] == ["a", "b"]


def test_many_ids_are_parsed_in_linear_time() -> None:
    # Quadratic time would take minutes and exceed the suite's time limit.
    ids = "".join(f"{number}\n" for number in range(300_000))
    assert len(from_markdown(f"<!-- steno exported ids:\n{ids}-->\n").exported) == 300_000
