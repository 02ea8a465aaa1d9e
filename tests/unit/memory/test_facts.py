"""Tests which facts become notes, and which notes they supersede."""

from datetime import UTC, datetime, timedelta

import pytest

from stenolog.memory.facts import (
    MAX_TEXT_CHARACTERS,
    Fact,
    is_supported,
    new_notes,
    normalize_subject,
)
from stenolog.memory.notes import Note
from stenolog.memory.scopes import Scope

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


def _note(id: str, text: str, about: str = "", *, at: datetime = NOW) -> Note:
    return Note(id=id, scope=Scope(who="telegram:1"), at=at, kind="core", text=text, about=about)


def test_a_new_fact_is_a_core_note_with_its_source() -> None:
    fact = Fact(text="Eats no meat.", about="Diet", quote="I eat no meat", confidence=0.9)

    [draft] = new_notes([fact], [], at=NOW, session="telegram:1", uid="u", seqs=(3, 4))

    assert (draft.kind, draft.text, draft.about, draft.quote) == (
        *("core", "Eats no meat.", "diet", "I eat no meat"),
    )
    assert (draft.session, draft.uid, draft.seqs, draft.at) == ("telegram:1", "u", (3, 4), NOW)
    assert (draft.confidence, draft.supersedes) == (0.9, ())


@pytest.mark.parametrize("again", ["Eats no meat", "The user eats no meat!", "EATS  no meat."])
def test_repeated_fact_adds_no_note(again: str) -> None:
    known = [_note("a", "Eats no meat.", "diet")]

    assert new_notes([Fact(text=again, about="diet")], known) == []
    assert new_notes([Fact(text=again, about="what they eat")], known) == []


def test_repeated_fact_in_one_answer_is_one_note() -> None:
    twice = [Fact(text="Lives in Oslo."), Fact(text="The user lives in Oslo", about="town")]

    assert len(new_notes(twice, [])) == 1


def test_new_fact_supersedes_fact_with_same_subject() -> None:
    known = [_note("a", "Lives in Rome.", "home town"), _note("b", "Eats no meat.", "diet")]

    [draft] = new_notes([Fact(text="Lives in Oslo.", about="Home-Town ")], known)

    assert draft.supersedes == ("a",)


def test_new_fact_supersedes_all_notes_of_its_subject() -> None:
    known = [_note("a", "Likes chess.", "hobby"), _note("b", "Likes sailing.", "hobby")]

    [draft] = new_notes([Fact(text="Has no hobby any more.", about="hobby")], known)

    assert draft.supersedes == ("a", "b")


def test_two_facts_of_one_turn_do_not_supersede_each_other() -> None:
    both = [Fact(text="Likes chess.", about="hobby"), Fact(text="Likes sailing.", about="hobby")]

    assert [draft.supersedes for draft in new_notes(both, [])] == [(), ()]


def test_fact_without_a_subject_supersedes_nothing() -> None:
    known = [_note("a", "Has a dog.")]

    assert [draft.supersedes for draft in new_notes([Fact(text="Has a cat.")], known)] == [()]


def test_older_fact_does_not_supersede_newer_note() -> None:
    known = [_note("a", "Lives in Oslo.", "town")]
    old = Fact(text="Lives in Rome.", about="town")

    assert new_notes([old], known, at=NOW - timedelta(days=300)) == []
    assert len(new_notes([old], known, at=NOW)) == 1


def test_negated_fact_is_not_a_repetition() -> None:
    known = [_note("a", "Eats meat.", "diet")]

    [draft] = new_notes([Fact(text="Eats no meat.", about="diet")], known)

    assert draft.supersedes == ("a",)


def test_long_texts_are_truncated_and_confidence_is_clamped() -> None:
    [draft] = new_notes([Fact(text="word " * 500, confidence=7.0)], [])

    assert len(draft.text) == MAX_TEXT_CHARACTERS
    assert draft.confidence == 1.0


def test_fact_must_quote_the_user() -> None:
    spoken = ["I moved to Oslo last week"]

    assert is_supported(Fact(text="Lives in Oslo.", quote="I moved to Oslo"), spoken)
    assert not is_supported(Fact(text="Lives in Oslo.", quote="I live in Oslo"), spoken)
    assert not is_supported(Fact(text="Lives in Oslo."), spoken)
    assert not is_supported(Fact(text="Owns a boat.", quote="last week"), spoken)
    hung = Fact(text="Is a convicted criminal.", about="Oslo", quote="I moved to Oslo last week")
    assert not is_supported(hung, spoken), "what it is about is the model's word"


def test_subjects_are_compared_without_case_and_punctuation() -> None:
    assert normalize_subject("  Home-Town! ") == normalize_subject("home town") == "home town"
