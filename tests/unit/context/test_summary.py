"""Tests the summary value: writing, reading, updating and shortening."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.context.summary import (
    QUOTE_PREFIX,
    Summary,
    parse_summary,
    render_summary,
    shorten_summary,
    update_summary,
)
from support.histories import CHEAP
from support.strategies import texts, values

KNOWN = Summary(
    goals=("Move to Lisbon",),
    decisions=("Go in May",),
    facts=("The cat is called Ivo", "Rent is 900"),
    open_questions=("Which school?",),
    tool_outcomes=("search: 3 flats",),
    last_state="Waiting for the landlord.",
)


def test_summary_is_rendered_in_sections_and_parsed_back() -> None:
    text = render_summary(KNOWN)
    assert text.startswith("## Goals\n- Move to Lisbon\n\n## Decisions\n- Go in May\n")
    assert text.endswith("## Last state\nWaiting for the landlord.")
    assert parse_summary(text) == KNOWN


@given(st.dictionaries(st.sampled_from(["goals", "facts", "last_state", "outdated"]), values()))
def test_every_model_answer_survives_render_and_parse(answer: dict[str, Any]) -> None:
    made = update_summary(KNOWN, answer) or KNOWN
    assert parse_summary(render_summary(made)) == made


@given(texts())
def test_every_text_parses_as_a_summary(text: str) -> None:
    once = parse_summary(text)
    assert parse_summary(render_summary(once)) == once


def test_free_text_summary_becomes_facts_without_loss() -> None:
    text = "They look for a car.\n\n- Blue\n## Odd heading\n" + " ".join(
        f"word{number}" for number in range(300)
    )
    facts = parse_summary(text).facts
    assert facts[:2] == ("They look for a car.", "Blue")
    assert " ".join(facts).count("word") == 300


def test_update_adds_lines_and_keeps_known_ones() -> None:
    made = update_summary(KNOWN, {"facts": ["Rent is 950", "rent is 900"], "last_state": "Signed."})
    assert made is not None
    assert made.facts == ("The cat is called Ivo", "Rent is 900", "Rent is 950")
    assert (made.goals, made.decisions) == (KNOWN.goals, KNOWN.decisions)
    assert made.last_state == "Signed."


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("-40 °C is the limit", "-40 °C is the limit"),
        ("#4821 is the ticket", "#4821 is the ticket"),
        ("--force is needed", "--force is needed"),
        ("- Blue", "Blue"),
        ("## - Blue", "Blue"),
        ("* **Blue**", "**Blue**"),
    ],
)
def test_only_list_and_heading_marks_are_removed(given: str, kept: str) -> None:
    made = update_summary(Summary(), {"facts": [given], "last_state": given})
    assert made == Summary(facts=(kept,), last_state=kept)
    assert parse_summary(render_summary(made)) == made


def test_lines_are_removed_only_by_label() -> None:
    made = update_summary(
        KNOWN, {"facts": ["Rent is 950"], "outdated": ["F2", "[O1]", "X9", "rent"]}
    )
    assert made is not None
    assert made.facts == ("The cat is called Ivo", "Rent is 950")
    assert made.open_questions == ()


def test_removal_of_most_lines_is_ignored() -> None:
    answer = {"facts": ["new"], "outdated": ["G1", "D1", "F1", "F2", "O1", "T1"]}
    made = update_summary(KNOWN, answer)
    assert made is not None
    assert set(KNOWN.facts) < set(made.facts)
    assert made.goals == KNOWN.goals


def test_empty_answer_gives_none() -> None:
    answers: list[dict[str, Any]] = [
        {},
        {"facts": []},
        {"facts": [1, None]},
        {"other": "x"},
        {"last_state": " "},
    ]
    for answer in answers:
        assert update_summary(KNOWN, answer) is None


@given(st.lists(st.text(max_size=80), max_size=30), st.text(max_size=500), st.integers(0, 300))
def test_bounded_summary_is_within_the_limit(lines: list[str], last: str, limit: int) -> None:
    given = {"facts": lines, "tool_outcomes": lines[:5], "last_state": last}
    made = update_summary(Summary(), given) or Summary()
    short = shorten_summary(made, limit, CHEAP)
    assert CHEAP.text(render_summary(short)) <= limit or render_summary(short) == ""
    if CHEAP.text(render_summary(made)) <= limit:
        assert short == made


def test_quotes_and_tool_outcomes_are_dropped_before_facts() -> None:
    quoted = tuple(f"{QUOTE_PREFIX}{number} " + "x" * 50 for number in range(9))
    outcomes = tuple(f"tool {number} " + "y" * 50 for number in range(9))
    full = Summary(facts=("The cat is called Ivo", *quoted), tool_outcomes=outcomes)
    short = shorten_summary(full, 60, CHEAP)
    assert short.facts == ("The cat is called Ivo",)
    assert short.tool_outcomes == outcomes[-len(short.tool_outcomes) :]
