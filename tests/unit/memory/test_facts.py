"""Tests which facts become notes, and which notes they supersede."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.memory.facts import (
    MAX_FACTS,
    MAX_TEXT_CHARACTERS,
    ExtractedFacts,
    Fact,
    answer_schema,
    build_prompt,
    is_supported,
    make_drafts,
    max_answer_tokens,
    parse_answer,
)
from stenolog.memory.notes import Note
from stenolog.memory.scopes import Scope
from stenolog.memory.transcript import Line, Turn

NOW = datetime(2026, 5, 4, 12, 0, tzinfo=UTC)


def _note(id: str, text: str, about: str = "", *, at: datetime = NOW) -> Note:
    return Note(id=id, scope=Scope(who="telegram:1"), at=at, kind="core", text=text, about=about)


def test_a_new_fact_is_a_core_note_with_its_source() -> None:
    fact = Fact(text="Eats no meat.", about="Diet", quote="I eat no meat")

    [draft] = make_drafts([fact], [], at=NOW, session="telegram:1", uid="u", seqs=(3, 4))

    assert (draft.kind, draft.text, draft.about, draft.quote) == (
        *("core", "Eats no meat.", "diet", "I eat no meat"),
    )
    assert (draft.session, draft.uid, draft.seqs, draft.at) == ("telegram:1", "u", (3, 4), NOW)
    assert draft.supersedes == ()


@pytest.mark.parametrize("again", ["Eats no meat", "The user eats no meat!", "EATS  no meat."])
def test_repeated_fact_adds_no_note(again: str) -> None:
    known = [_note("a", "Eats no meat.", "diet")]

    assert make_drafts([Fact(text=again, about="diet")], known) == []
    assert make_drafts([Fact(text=again, about="what they eat")], known) == []


def test_repeated_fact_in_one_answer_is_one_note() -> None:
    twice = [Fact(text="Lives in Oslo."), Fact(text="The user lives in Oslo", about="town")]

    assert len(make_drafts(twice, [])) == 1


def test_new_fact_supersedes_fact_with_same_subject() -> None:
    known = [_note("a", "Lives in Rome.", "home town"), _note("b", "Eats no meat.", "diet")]

    [draft] = make_drafts([Fact(text="Lives in Oslo.", about="Home-Town ")], known)

    assert draft.supersedes == ("a",)


def test_new_fact_supersedes_all_notes_of_its_subject() -> None:
    known = [_note("a", "Likes chess.", "hobby"), _note("b", "Likes sailing.", "hobby")]

    [draft] = make_drafts([Fact(text="Has no hobby any more.", about="hobby")], known)

    assert draft.supersedes == ("a", "b")


def test_two_facts_of_one_turn_do_not_supersede_each_other() -> None:
    both = [Fact(text="Likes chess.", about="hobby"), Fact(text="Likes sailing.", about="hobby")]

    assert [draft.supersedes for draft in make_drafts(both, [])] == [(), ()]


def test_fact_without_a_subject_supersedes_nothing() -> None:
    known = [_note("a", "Has a dog.")]

    assert [draft.supersedes for draft in make_drafts([Fact(text="Has a cat.")], known)] == [()]


def test_older_fact_does_not_supersede_newer_note() -> None:
    known = [_note("a", "Lives in Oslo.", "town")]
    old = Fact(text="Lives in Rome.", about="town")

    assert make_drafts([old], known, at=NOW - timedelta(days=300)) == []
    assert len(make_drafts([old], known, at=NOW)) == 1


def test_negated_fact_is_not_a_repetition() -> None:
    known = [_note("a", "Eats meat.", "diet")]

    [draft] = make_drafts([Fact(text="Eats no meat.", about="diet")], known)

    assert draft.supersedes == ("a",)


def test_long_texts_are_truncated() -> None:
    [draft] = make_drafts([Fact(text="word " * 500)], [])

    assert len(draft.text) == MAX_TEXT_CHARACTERS


def test_fact_must_quote_the_user() -> None:
    spoken = ["I moved to Oslo last week"]

    assert is_supported(Fact(text="Lives in Oslo.", quote="I moved to Oslo"), spoken)
    assert not is_supported(Fact(text="Lives in Oslo.", quote="I live in Oslo"), spoken)
    assert not is_supported(Fact(text="Lives in Oslo."), spoken)
    assert not is_supported(Fact(text="Owns a boat.", quote="last week"), spoken)
    hung = Fact(text="Is a convicted criminal.", about="Oslo", quote="I moved to Oslo last week")
    assert not is_supported(hung, spoken), "what it is about is the model's word"


# --- questions to a model -------------------------------------------------------------------------


FACT = {"text": "Eats no meat.", "about": "diet", "quote": "I eat no meat"}
TURN = Turn(
    last_seq=2,
    seqs=(1, 2),
    at=datetime(2026, 5, 4, 12, 0, tzinfo=UTC),
    lines=(Line("user", "I eat no meat"), Line("assistant", "Noted.")),
    redacted=0,
)


def _answer(*turns: dict[str, Any]) -> str:
    return json.dumps({"turns": turns})


def test_prompt_numbers_the_turns() -> None:
    [task, shown] = build_prompt([TURN, TURN], budget=1_000)

    assert "quote" in task["content"]
    assert "## Turn 1, 2026-05-04 12:00 UTC\nuser:\n    I eat no meat\n" in shown["content"]
    assert "## Turn 2," in shown["content"]


def test_prompt_has_known_subjects_but_not_their_texts() -> None:
    [_, shown] = build_prompt([TURN], subjects=["diet", "town", "diet"], budget=1_000)

    assert shown["content"].startswith('Names already in use for "about": diet, town.')


def test_only_the_newest_subjects_are_in_the_prompt() -> None:
    names = [f"name {number}" for number in range(100)]

    [_, shown] = build_prompt([TURN], subjects=["", *names, "name 99"], budget=1_000)

    newest = ", ".join(f"name {number}" for number in range(99, 59, -1))
    assert shown["content"].startswith(f'Names already in use for "about": {newest}.')


def test_schema_requires_as_many_turns_as_are_shown() -> None:
    wanted = answer_schema(3)["properties"]["turns"]

    assert (wanted["minItems"], wanted["maxItems"]) == (3, 3)
    assert set(wanted["items"]["required"]) == {"turn", "daily", "facts"}
    assert max_answer_tokens(3) > max_answer_tokens(1)


def test_valid_answer_is_parsed_per_turn() -> None:
    answer = _answer(
        {"turn": 2, "daily": "Talked.", "facts": []},
        {"turn": 1, "daily": "Said what\nthey eat.", "facts": [FACT]},
    )

    found = parse_answer(answer, turn_count=2)

    assert found is not None
    assert found[1].daily == "Said what they eat."
    assert [fact.about for fact in found[1].facts] == ["diet"]
    assert found[2] == ExtractedFacts(daily="Talked.")


def test_answer_for_one_turn_may_omit_the_list_and_number() -> None:
    bare = parse_answer(json.dumps({"daily": "Talked.", "facts": [FACT]}), turn_count=1)
    numbered = parse_answer(_answer({"turn": 7, "daily": "Talked.", "facts": [FACT]}), turn_count=1)

    assert bare == numbered
    assert bare is not None
    assert len(bare[1].facts) == 1


@pytest.mark.parametrize(
    "answer", ["", "I cannot do that.", "{}", '{"turns": []}', '{"turns": "none"}', "[1]"]
)
def test_unusable_answers_are_none(answer: str) -> None:
    assert parse_answer(answer, turn_count=2) is None


def test_truncated_fenced_answer_gives_complete_turns() -> None:
    whole = _answer({"turn": 1, "daily": "One.", "facts": [FACT, FACT]})

    found = parse_answer("Here:\n```json\n" + whole[:-40], turn_count=1)

    assert found is not None
    assert found[1].daily == "One."
    assert len(found[1].facts) == 1
    assert found[1].malformed == 1


@pytest.mark.parametrize(
    "fact",
    [
        "Eats no meat.",
        {"text": "", "quote": "I eat no meat"},
        {"text": "Eats no meat."},
        {"text": ["Eats"], "quote": "I eat no meat"},
        {"text": "Eats no meat.", "quote": None},
    ],
)
def test_malformed_fact_is_dropped_and_counted(fact: Any) -> None:
    found = parse_answer(_answer({"turn": 1, "daily": "", "facts": [fact, FACT]}), turn_count=1)

    assert found is not None
    assert (len(found[1].facts), found[1].malformed) == (1, 1)


def test_number_of_facts_is_limited() -> None:
    found = parse_answer(_answer({"turn": 1, "daily": "", "facts": [FACT] * 50}), turn_count=1)

    assert found is not None
    assert len(found[1].facts) == MAX_FACTS


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["turns", "turn", "daily", "facts", "text", "quote"]), inner, max_size=4
        )
    ),
)


@given(_json, st.integers(1, 3))
def test_any_json_is_read_without_an_error(value: Any, turns: int) -> None:
    found = parse_answer(json.dumps({"turns": value}), turn_count=turns)

    assert found is None or set(found) <= set(range(1, turns + 1))


@pytest.mark.parametrize("empty", ["…", "...", " - ", ""])
def test_placeholder_dots_are_neither_entry_nor_fact(empty: str) -> None:
    fact = {"text": empty, "about": "x", "quote": "I live in Lisbon"}
    answer = {"turns": [{"turn": 1, "daily": empty, "facts": [fact]}]}
    assert parse_answer(json.dumps(answer), turn_count=1) == {1: ExtractedFacts(malformed=1)}


def test_single_word_is_not_a_fact_but_a_sentence_without_spaces_is() -> None:
    told = [
        {"text": text, "about": "", "quote": "q"}
        for text in ("Ingrid", "里斯本に住んでいます", "Likes tea.")
    ]
    heard = parse_answer(json.dumps({"turns": [{"daily": "A talk.", "facts": told}]}), turn_count=1)
    assert heard is not None
    assert [fact.text for fact in heard[1].facts] == ["里斯本に住んでいます", "Likes tea."]
    assert heard[1].malformed == 1
