"""Tests the prompt for extraction, and the parsing of its answer."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.memory.extraction import (
    MAX_FACTS,
    ExtractedFacts,
    answer_schema,
    answer_tokens,
    build_prompt,
    parse_answer,
)
from stenolog.memory.transcript import Line, Turn

FACT = {"text": "Eats no meat.", "about": "diet", "quote": "I eat no meat", "confidence": 0.9}
TURN = Turn(
    last=2,
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
    assert answer_tokens(3) > answer_tokens(1)


def test_valid_answer_is_parsed_per_turn() -> None:
    answer = _answer(
        {"turn": 2, "daily": "Talked.", "facts": []},
        {"turn": 1, "daily": "Said what\nthey eat.", "facts": [FACT]},
    )

    found = parse_answer(answer, turns=2)

    assert found is not None
    assert found[1].daily == "Said what they eat."
    assert [fact.about for fact in found[1].facts] == ["diet"]
    assert found[2] == ExtractedFacts(daily="Talked.")


def test_answer_for_one_turn_may_omit_the_list_and_number() -> None:
    bare = parse_answer(json.dumps({"daily": "Talked.", "facts": [FACT]}), turns=1)
    numbered = parse_answer(_answer({"turn": 7, "daily": "Talked.", "facts": [FACT]}), turns=1)

    assert bare == numbered
    assert bare is not None
    assert len(bare[1].facts) == 1


@pytest.mark.parametrize(
    "answer", ["", "I cannot do that.", "{}", '{"turns": []}', '{"turns": "none"}', "[1]"]
)
def test_unusable_answers_are_none(answer: str) -> None:
    assert parse_answer(answer, turns=2) is None


def test_truncated_fenced_answer_gives_complete_turns() -> None:
    whole = _answer({"turn": 1, "daily": "One.", "facts": [FACT, FACT]})

    found = parse_answer("Here:\n```json\n" + whole[:-40], turns=1)

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
    found = parse_answer(_answer({"turn": 1, "daily": "", "facts": [fact, FACT]}), turns=1)

    assert found is not None
    assert (len(found[1].facts), found[1].malformed) == (1, 1)


@pytest.mark.parametrize(
    ("told", "taken"), [(0.3, 0.3), (7, 1.0), (-1, 0.0), (10**400, 1.0), ("high", 0.5), (True, 0.5)]
)
def test_confidence_is_clamped_between_0_and_1(told: Any, taken: float) -> None:
    answer = _answer({"turn": 1, "daily": "", "facts": [{**FACT, "confidence": told}]})

    found = parse_answer(answer, turns=1)

    assert found is not None
    assert found[1].facts[0].confidence == taken


def test_number_of_facts_is_limited() -> None:
    found = parse_answer(_answer({"turn": 1, "daily": "", "facts": [FACT] * 50}), turns=1)

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
    found = parse_answer(json.dumps({"turns": value}), turns=turns)

    assert found is None or set(found) <= set(range(1, turns + 1))


@pytest.mark.parametrize("empty", ["…", "...", " - ", ""])
def test_placeholder_dots_are_neither_entry_nor_fact(empty: str) -> None:
    fact = {"text": empty, "about": "x", "quote": "I live in Lisbon", "confidence": 1}
    answer = {"turns": [{"turn": 1, "daily": empty, "facts": [fact]}]}
    assert parse_answer(json.dumps(answer), turns=1) == {1: ExtractedFacts(malformed=1)}


def test_single_word_is_not_a_fact_but_a_sentence_without_spaces_is() -> None:
    told = [
        {"text": text, "about": "", "quote": "q", "confidence": 1}
        for text in ("Ingrid", "里斯本に住んでいます", "Likes tea.")
    ]
    heard = parse_answer(json.dumps({"turns": [{"daily": "A talk.", "facts": told}]}), turns=1)
    assert heard is not None
    assert [fact.text for fact in heard[1].facts] == ["里斯本に住んでいます", "Likes tea."]
    assert heard[1].malformed == 1
