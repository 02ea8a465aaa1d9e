"""Tests which notes share words with a question, and the weight of these words."""

from datetime import UTC, datetime

import pytest

from stenolog.memory import notes as notes_module
from stenolog.memory.note_records import Note
from stenolog.memory.notes import WordIndex
from stenolog.memory.scopes import Scope

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


def _notes(*texts: str, about: str = "", quote: str = "") -> dict[str, Note]:
    return {
        text: Note(
            id=text,
            scope=Scope(who="telegram:1"),
            at=NOW,
            kind="core",
            text=text,
            about=about,
            quote=quote,
        )
        for text in texts
    }


def test_note_is_found_by_word_forms_of_text_subject_and_quote() -> None:
    notes = _notes("Eats no meat", about="diet", quote="I am a vegetarian")
    for word in ("eat", "meat", "diet", "vegetarian"):
        assert WordIndex().weigh([word], notes).keys() == notes.keys()
    assert WordIndex().weigh(["boat"], notes) == {}


def test_more_and_rarer_shared_words_score_higher() -> None:
    index = WordIndex()
    notes = _notes("ferry zanzibar", "ferry again", "ferry once more", "zanzibar")
    worth = index.weigh(["ferri", "zanzibar"], notes)
    assert worth["ferry zanzibar"] > worth["zanzibar"] > worth["ferry again"]


def test_later_notes_are_indexed_once() -> None:
    index = WordIndex()
    before = index.weigh(["ferri"], _notes("ferry one"))
    assert index.weigh(["ferri"], _notes("ferry one")) == before
    assert index.weigh(["ferri"], _notes("ferry one", "ferry two")).keys() == {
        *("ferry one", "ferry two"),
    }


def test_only_last_notes_of_a_frequent_word_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes_module, "MAX_NOTES_PER_WORD", 3)
    index = WordIndex()
    for number in range(9):
        index.weigh([], _notes(f"ferry {number}"))
    assert index.weigh(["ferri"], {}).keys() == {f"ferry {number}" for number in (6, 7, 8)}
