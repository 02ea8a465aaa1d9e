"""Numbers and times as people say them."""

from datetime import UTC, datetime, timedelta

from stenolog.gateway.viewer.words import age, plural, seconds, segment, short

_NOW = datetime(2026, 3, 14, 12, tzinfo=UTC)


def test_an_age_has_one_unit() -> None:
    ages = [timedelta(seconds=1), timedelta(seconds=50), timedelta(minutes=5), timedelta(hours=30)]
    assert [age(_NOW - one, _NOW) for one in ages] == ["now", "50 s", "5 min", "1 d"]
    assert age(_NOW - timedelta(days=30), _NOW) == "2026-02-12"
    assert age(None) == ""


def test_numbers_are_short() -> None:
    assert [short(one) for one in (0, 950, 1_234, 34_000, 5_600_000)] == [
        "0",
        "950",
        "1.2k",
        "34k",
        "5.6M",
    ]
    assert [seconds(one) for one in (0.412, 2.5, 125.0)] == ["412 ms", "2.5 s", "2 min 5 s"]
    assert (plural(1, "turn"), plural(2_000, "turn")) == ("1 turn", "2,000 turns")


def test_a_key_is_one_segment() -> None:
    assert segment("a/b?c#d%e ü") == "a%2Fb%3Fc%23d%25e%20%C3%BC"
