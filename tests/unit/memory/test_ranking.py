"""Tests of questions, and of the score of notes and messages."""

import random
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from stenolog.catalog.entries import Candidates
from stenolog.memory.ranking import Candidate, Kind, parse_question, rank

NOW = datetime(2026, 6, 17, 15, 30, tzinfo=UTC)


def _message(
    text: str, *, seq: int = 1, days: float = 0, role: str = "user", session: str = "s"
) -> Candidate:
    return Candidate(
        kind="message",
        source=f"{session}:{seq}",
        at=NOW - timedelta(days=days),
        text=text,
        role=role,
        session=session,
        seq=seq,
    )


def _note(kind: Kind, text: str, *, days: float = 0, id: str = "n1", hints: str = "") -> Candidate:
    return Candidate(kind=kind, source=id, at=NOW - timedelta(days=days), text=text, hints=hints)


def _ranked(question: str, *candidates: Candidate, half_life_days: float = 30.0) -> list[str]:
    asked = parse_question(question, now=NOW)
    found = rank(asked, candidates, now=NOW, half_life_days=half_life_days)
    return [one.text for one in found]


def test_question_is_parsed_into_stems_and_period() -> None:
    found = parse_question("Where did we plan to meet in May, and whom did we meet?", now=NOW)
    assert found.stems == ("plan", "meet")
    assert found.period is not None
    assert found.period.since == datetime(2026, 5, 1, tzinfo=UTC)
    assert not found.is_empty


def test_question_of_only_stop_words_is_empty() -> None:
    assert parse_question("And what about it?", now=NOW).is_empty
    assert not parse_question("And yesterday?", now=NOW).is_empty


def test_word_forms_match_and_stop_words_do_not() -> None:
    assert _ranked(
        "when did we deploy it?",
        _message("when did we do it", seq=1),
        _message("deployed at noon", seq=5),
    ) == ["deployed at noon"]


def test_rare_words_count_more() -> None:
    common = [_message(f"the ferry {number}", seq=10 * number) for number in range(1, 9)]
    found = _ranked("ferry captain", *common, _message("the captain said", seq=200))
    assert found[0] == "the captain said"


def test_short_text_scores_more_than_a_long_text_with_the_same_word() -> None:
    short_note = _note("core", "fears ferries", id="n2")
    long_note = _note("core", "fears ferries, planes, dogs, dentists and the dark", id="n1")
    for notes in ((short_note, long_note), (long_note, short_note)):
        assert _ranked("ferry", *notes) == [short_note.text, long_note.text]


def test_word_that_a_neighbour_repeats_counts_more() -> None:
    ranked = _ranked(
        "ferry",
        _message("red boat", seq=1, session="once"),
        _message("ferry dock", seq=2, session="once"),
        _message("blue boat", seq=1, session="twice"),
        _message("ferry ferry", seq=2, session="twice"),
    )
    assert ranked.index("blue boat") < ranked.index("red boat")


def test_word_of_a_long_neighbour_counts_less() -> None:
    ranked = _ranked(
        "ferry",
        _message("red ferry", seq=1, session="long"),
        _message("ferry planes dogs dentists harbours islands captains", seq=2, session="long"),
        _message("blue ferry", seq=1, session="short"),
        _message("ferry dock", seq=2, session="short"),
    )
    assert ranked.index("blue ferry") < ranked.index("red ferry")


def test_word_frequencies_can_be_given() -> None:
    asked = parse_question("ferry captain", now=NOW)
    both = [_message("a ferry", seq=1), _message("a captain", seq=5)]
    for rare, common, first in (("ferri", "captain", "a ferry"), ("captain", "ferri", "a captain")):
        known = Candidates(messages=(), count=10_000, containing={rare: 2, common: 900})
        assert rank(asked, both, now=NOW, hits=known)[0].text == first


def test_answer_is_found_by_the_preceding_question() -> None:
    found = _ranked(
        "when is the dentist appointment?",
        _message("when is my appointment with the dentist?", seq=4),
        _message("At half past four.", seq=5, role="assistant"),
        _message("Tell me a joke.", seq=7),
        _message("At half past nine.", seq=5, session="other"),
    )
    assert found == ["when is my appointment with the dentist?", "At half past four."]


def test_age_reduces_a_score_by_at_most_half() -> None:
    old, new = _message("the ferry left", seq=1, days=60), _message("the ferry came", seq=5)
    assert _ranked("ferry", old, new) == ["the ferry came", "the ferry left"]
    scores = [
        rank(parse_question("ferry", now=NOW), [_message("ferry", days=days)], now=NOW)[0].score
        for days in (0, 30, 10_000)
    ]
    assert scores[1] == scores[0] * 0.75
    assert round(scores[2] / scores[0], 9) == 0.5


def test_age_has_no_effect_without_a_half_life() -> None:
    asked = parse_question("ferry", now=NOW)
    ages = [_message("ferry", days=days) for days in (0, 400)]
    first, second = (rank(asked, [one], now=NOW, half_life_days=0)[0].score for one in ages)
    assert first == second


def test_age_does_not_reduce_the_score_of_core_facts() -> None:
    fact, entry = (
        rank(parse_question("tea", now=NOW), [_note(kind, "likes tea", days=900)], now=NOW)[0].score
        for kind in ("core", "daily")
    )
    assert entry < 0.51 * fact


def test_candidates_of_other_periods_come_last() -> None:
    found = _ranked(
        "which ferry in May?",
        _message("the ferry", seq=1),
        _message("a ferry and other things that were said at length", seq=5, days=40),
    )
    assert found[0].startswith("a ferry and")
    assert len(found) == 2
    assert _ranked("what was in May?", _message("now"), _message("then", days=40)) == ["then"]


def test_daily_notes_of_other_periods_come_last_and_facts_keep_their_score() -> None:
    recent_note = _note("daily", "took the ferry home", days=1, id="n1")
    note_of_last_week = _note("daily", "took the ferry back", days=6, id="n2")
    assert (
        _ranked("which ferry last week?", recent_note, note_of_last_week)[0]
        == "took the ferry back"
    )
    fact = _note("core", "the ferry is slow today", days=90, id="n3")
    assert _ranked("which ferry last week?", recent_note, fact)[0] == "the ferry is slow today"


def test_tool_results_score_less() -> None:
    assert _ranked("ferry", _message("ferry", seq=1, role="tool"), _message("ferry a", seq=5)) == [
        "ferry a",
        "ferry",
    ]


def test_note_is_found_by_its_subject() -> None:
    assert _ranked("diet", _note("core", "eats no meat", hints="diet")) == ["eats no meat"]


words = ["ferry", "ferries", "captain", "tea", "the", "of", "dentist"]
texts = st.lists(st.sampled_from(words)).map(" ".join)
some = st.lists(
    st.builds(
        _message,
        texts,
        seq=st.integers(1, 9),
        days=st.floats(0, 900),
        role=st.sampled_from(["user", "tool"]),
        session=st.sampled_from("st"),
    ),
    unique_by=lambda one: one.source,
)
facts = st.lists(
    st.builds(_note, st.sampled_from(["core", "daily"]), texts, id=st.uuids().map(str))
)


@given(some, facts, texts, st.randoms(use_true_random=False))
def test_ranking_does_not_depend_on_the_order_of_candidates(
    messages: list[Candidate], notes: list[Candidate], question: str, chance: random.Random
) -> None:
    asked = parse_question(f"{question} captain", now=NOW)
    candidates = [*messages, *notes]
    shuffled = chance.sample(candidates, len(candidates))
    found = rank(asked, candidates, now=NOW)
    assert rank(asked, shuffled, now=NOW) == found == rank(asked, candidates, now=NOW)
    assert all(one.score > 0 for one in found)
    scores = [one.score for one in found]
    assert scores == sorted(scores, reverse=True)
