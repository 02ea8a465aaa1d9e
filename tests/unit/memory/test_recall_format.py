"""Tests the recalled block: dates, sources, and the token budget."""

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from stenolog.memory.prompt_block import CLOSING, HEADING, OPENING
from stenolog.memory.ranking import Candidate, Kind, RankedCandidate, parse_question
from stenolog.memory.recall_format import MAX_TEXT_CHARACTERS, RecallResult, excerpt, format_recall
from stenolog.tokens import estimate

NOW = datetime(2026, 6, 17, 15, 30, tzinfo=UTC)
ASKED = parse_question("when does the ferry leave?", now=NOW)


def _ranked(
    text: str, *, kind: Kind = "message", score: float = 1.0, days: int = 0, source: str = "cli:a:7"
) -> RankedCandidate:
    at = NOW - timedelta(days=days)
    role = "user" if kind == "message" else ""
    candidate = Candidate(kind=kind, source=source, at=at, text=text, role=role)
    return RankedCandidate(candidate=candidate, score=score)


def _format(*ranked: RankedCandidate, budget: int = 1_500) -> RecallResult:
    return format_recall(ranked, ASKED, budget=budget, count=estimate, zone=UTC)


def test_each_line_has_its_date_its_source_and_its_text() -> None:
    found = _format(
        _ranked("The ferry leaves\nat nine."),
        _ranked("Asked about ferries.", kind="daily", score=0.5, days=1, source="n2"),
        _ranked("Is afraid of ferries.", kind="core", score=0.4, days=60, source="n1"),
    )
    assert found.block.splitlines() == [
        OPENING,
        HEADING,
        "- [2026-04-18 15:30] (fact, n1) Is afraid of ferries.",
        "- [2026-06-17 15:30] (user, cli:a:7) The ferry leaves at nine.",
        "- [2026-06-16 15:30] (note, n2) Asked about ferries.",
        CLOSING,
    ]
    assert [one.source for one in found.found] == ["n1", "cli:a:7", "n2"]
    assert found.tokens == estimate(found.block)


def test_dates_are_shown_in_the_zone() -> None:
    east = timezone(timedelta(hours=9))
    found = format_recall([_ranked("x")], ASKED, budget=500, count=estimate, zone=east)
    assert "[2026-06-18 00:30]" in found.block


def test_the_newest_facts_come_first_and_the_rest_by_score() -> None:
    found = _format(
        _ranked("a", score=3, days=9),
        _ranked("b", score=2, days=1),
        _ranked("old", kind="core", score=2, days=50),
        _ranked("new", kind="core", score=1, days=2),
    )
    assert [one.text for one in found.found] == ["new", "old", "a", "b"]


def test_no_results_give_no_block() -> None:
    assert _format() == RecallResult(block="", found=(), tokens=0)


def test_worst_entries_are_dropped_first() -> None:
    many = [_ranked(f"ferry number {n}", score=100 - n, source=f"cli:a:{n}") for n in range(90)]
    found = _format(*many, budget=200)
    assert found.tokens <= 200
    assert [one.source for one in found.found] == [f"cli:a:{n}" for n in range(len(found.found))]
    assert 3 < len(found.found) < 30
    assert _format(*many, budget=5) == RecallResult()


def test_shorter_entry_may_fit_after_a_longer_one_did_not() -> None:
    found = _format(_ranked("ferry " * 60, score=2), _ranked("ferry at nine", score=1), budget=80)
    assert [one.text for one in found.found] == ["ferry at nine"]


def test_excerpt_is_cut_around_the_matched_words() -> None:
    text = f"{'before ' * 200}the ferries leave at nine{' after' * 200}"
    short = excerpt(text, ASKED.stems)
    assert "the ferries leave at nine" in short
    assert short.startswith("…")
    assert short.endswith("…")
    assert len(short) <= MAX_TEXT_CHARACTERS + 2
    assert excerpt("beginning " * 200, ASKED.stems).startswith("beginning beginning")


@given(
    st.lists(st.builds(_ranked, st.text(max_size=900), score=st.floats(0.1, 9))),
    st.integers(0, 600),
)
def test_block_never_exceeds_its_budget(ranked: list[RankedCandidate], budget: int) -> None:
    found = _format(*ranked, budget=budget)
    assert found.tokens == estimate(found.block) <= budget
    assert bool(found.block) == bool(found.found)


def test_budget_holds_for_a_non_additive_token_counter() -> None:
    def count(text: str) -> int:
        return text.count("\n") ** 2

    ranked = [_ranked(f"ferry {number}") for number in range(9)]
    found = format_recall(ranked, ASKED, budget=30, count=count, zone=UTC)
    assert found.tokens == count(found.block) <= 30
    assert len(found.found) == 3
