"""Tests expressions of time in English and German."""

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.memory.time_words import find_period

NOW = datetime(2026, 6, 17, 15, 30, tzinfo=UTC)
"""A Wednesday."""


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("What did I say yesterday?", "2026-06-16", "2026-06-16"),
        ("was habe ich gestern gesagt", "2026-06-16", "2026-06-16"),
        ("the day before yesterday", "2026-06-15", "2026-06-15"),
        ("vorgestern", "2026-06-15", "2026-06-15"),
        ("this morning", "2026-06-17", "2026-06-17"),
        ("heute", "2026-06-17", "2026-06-17"),
        ("three days ago", "2026-06-14", "2026-06-14"),
        ("vor drei Tagen", "2026-06-14", "2026-06-14"),
        ("10 days ago", "2026-06-07", "2026-06-07"),
        ("a week ago", "2026-06-07", "2026-06-13"),
        ("vor zwei Wochen", "2026-05-31", "2026-06-06"),
        ("two months ago", "2026-04-01", "2026-04-30"),
        ("vor 7 Monaten", "2025-11-01", "2025-11-30"),
        ("a year ago", "2025-01-01", "2025-12-31"),
        ("in the last 3 days", "2026-06-14", "2026-06-17"),
        ("in den letzten zwei Wochen", "2026-06-03", "2026-06-17"),
        ("last week", "2026-06-08", "2026-06-14"),
        ("letzte Woche", "2026-06-08", "2026-06-14"),
        ("this week", "2026-06-15", "2026-06-21"),
        ("last weekend", "2026-06-13", "2026-06-14"),
        ("last month", "2026-05-01", "2026-05-31"),
        ("letzten Monat", "2026-05-01", "2026-05-31"),
        ("diesen Monat", "2026-06-01", "2026-06-30"),
        ("last year", "2025-01-01", "2025-12-31"),
        ("letztes Jahr", "2025-01-01", "2025-12-31"),
        ("in May", "2026-05-01", "2026-05-31"),
        ("im Mai", "2026-05-01", "2026-05-31"),
        ("im März", "2026-03-01", "2026-03-31"),
        ("in June", "2026-06-01", "2026-06-30"),
        ("in December", "2025-12-01", "2025-12-31"),
        ("May 2024", "2024-05-01", "2024-05-31"),
        ("last March", "2026-03-01", "2026-03-31"),
        ("on May 3rd", "2026-05-03", "2026-05-03"),
        ("on 24 December", "2025-12-24", "2025-12-24"),
        ("am 3. Juni", "2026-06-03", "2026-06-03"),
        ("on the 20th of June", "2025-06-20", "2025-06-20"),
        ("on Monday", "2026-06-15", "2026-06-15"),
        ("last Wednesday", "2026-06-10", "2026-06-10"),
        ("am Freitag", "2026-06-12", "2026-06-12"),
        ("on Wednesday", "2026-06-17", "2026-06-17"),
        ("on February 29", "2024-02-29", "2024-02-29"),
        ("am 29. Februar", "2024-02-29", "2024-02-29"),
        ("on February 29, 2020", "2020-02-29", "2020-02-29"),
        ("2026-03", "2026-03-01", "2026-03-31"),
        ("on 2026-03-14", "2026-03-14", "2026-03-14"),
        ("2025-12", "2025-12-01", "2025-12-31"),
        ("in 2024", "2024-01-01", "2024-12-31"),
    ],
)
def test_time_expressions_are_parsed(text: str, first: str, last: str) -> None:
    period = find_period(f"{text}?", now=NOW)[0]
    assert period is not None
    assert period.since == datetime.fromisoformat(first).replace(tzinfo=UTC)
    assert period.until == datetime.fromisoformat(last).replace(tzinfo=UTC) + timedelta(days=1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "may I ask",
        "march on",
        "the last question",
        "version 2.10",
        "2026-13-45",
        "monday",
        "a few",
        "mayor of June Lake",
        "yesterdays",
        "in 0000-00",
        "on May 45",
        "on February 30",
        "on February 29, 2026",
        "on FR\u0130DAY",
        "S\u0131X days ago",
    ],
)
def test_text_without_time_is_unchanged(text: str) -> None:
    assert find_period(text, now=NOW) == (None, text)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("on \u017funday", "on Sunday"),
        ("in AUGU\u017fT", "in August"),
        ("in O\u212atober", "im Oktober"),
        ("in MÄRZ", "in March"),
        ("three day\u017f ago", "three days ago"),
    ],
)
def test_case_folded_letters_are_parsed_as_the_same_time(text: str, plain: str) -> None:
    assert find_period(text, now=NOW)[0] == find_period(plain, now=NOW)[0] is not None


def test_time_expressions_are_removed_from_the_question() -> None:
    assert find_period("What broke last week in Rome?", now=NOW)[1].split() == [
        "What", "broke", "in", "Rome?",
    ]  # fmt: skip
    assert find_period("Who called in May?", now=NOW)[1].split() == [
        "Who",
        "called",
        "?",
    ]


def test_days_are_calendar_days_of_the_zone() -> None:
    east = timezone(timedelta(hours=9))
    late = datetime(2026, 6, 17, 20, tzinfo=UTC).astimezone(east)
    period = find_period("today", now=late)[0]
    assert period is not None
    assert period.since == datetime(2026, 6, 18, tzinfo=east)
    assert period.contains(late)
    assert not period.contains(late - timedelta(days=1))


moments = st.datetimes(datetime(1970, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001
WORDS = (
    "in on last this may june 31 2024 2026-02-30 0 999 days weeks months years ago monday vor "
    "letzten jahren the past february 29th of feb 2023 FR\u0130DAY fr\u0131day s\u0131x AUGU\u017fT"
)
words = st.lists(st.sampled_from(WORDS.split())).map(" ".join)


@given(words, moments)
def test_every_text_is_parsed_or_returned_unchanged(text: str, now: datetime) -> None:
    period, remaining_text = find_period(text, now=now)
    if period is None:
        assert remaining_text == text
    else:
        assert period.since < period.until
        assert len(remaining_text) <= len(text) + 1
