"""Tests `parse_question`: stems and period of a question."""

from datetime import UTC, datetime

from stenolog.memory.ranking import parse_question

NOW = datetime(2026, 6, 17, 15, 30, tzinfo=UTC)


def test_question_is_parsed_into_stems_and_period() -> None:
    found = parse_question("Where did we plan to meet in May, and whom did we meet?", now=NOW)
    assert found.stems == ("plan", "meet")
    assert found.period is not None
    assert found.period.since == datetime(2026, 5, 1, tzinfo=UTC)
    assert not found.is_empty


def test_question_of_only_stop_words_is_empty() -> None:
    assert parse_question("And what about it?", now=NOW).is_empty
    assert not parse_question("And yesterday?", now=NOW).is_empty
