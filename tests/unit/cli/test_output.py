"""Text from elsewhere must not drive the terminal."""

import json
import time
import unicodedata
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.cli.output import (
    error_sentence,
    format_age,
    format_local_time,
    json_text,
    one_line,
    parse_time,
    printable,
    sentence,
)
from stenolog.errors import UsageError

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)


@pytest.mark.quick(6)
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[2J\x1b[1;1Hgone", "gone"),
        ("\x1b]0;a title\x07after", "after"),
        ("\x1b]8;;https://example.org\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPq#0\x1b\\after", "after"),
        ("\x9b31mred", "red"),
        ("\x9dtitle\x9cafter", "after"),
        ("\x1bcreset", "reset"),
        ("\x1b(0lines", "lines"),
        ("over\rwritten", "overwritten"),
        ("a\x08b\x00c\x7fd", "abcd"),
        ("\u202etxet\u202c", "txet"),
        ("ends with \x1b", "ends with "),
        # Quotes in UTF-8 that were decoded as Latin-1.
        ("\xe2\x80\x9cstop\xe2\x80\x9d and \xe2\x80\x9cgo\xe2\x80\x9d", "âstopâ and âgoâ"),
        ("\xe2\x9a\x9b React", "â React"),
        # A sequence without its end in the same line is cut.
        ("\x1b]0;build\nerror: disk full\x07", "0;build\nerror: disk full"),
        ("\x1b_ cut \x1b[1mand\x1b[0m go\x07", " cut and go"),
        ("\x9d the rest", " the rest"),
        ("\x1bP" + 9_000 * "x" + "\x07", 9_000 * "x"),
        ("👩\u200d💻 ü é", "👩\u200d💻 ü é"),
    ],
)
def test_control_sequences_are_removed_completely(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.fixture
def new_york(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("new_york")
def test_terminal_output_has_times_in_the_local_zone() -> None:
    assert format_local_time(datetime(2026, 3, 1, 2, 30, tzinfo=UTC)) == "2026-02-28 21:30:00 EST"
    assert format_local_time(datetime(2026, 7, 1, 2, 30, tzinfo=UTC)) == "2026-06-30 22:30:00 EDT"
    assert format_local_time(datetime.min.replace(tzinfo=UTC)) == "0001-01-01T00:00:00Z"
    assert format_age(datetime(2026, 3, 1, 2, 30, tzinfo=UTC), NOW) == "2026-02-28"


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert all(c in "\n\t" or unicodedata.category(c) != "Cc" for c in printable(text))


@given(st.text(), st.text())
def test_one_line_has_no_control_characters_and_keeps_keys_distinct(one: str, other: str) -> None:
    assert not any(unicodedata.category(c) == "Cc" for c in one_line(one))
    if "\\" not in one + other:
        assert (one_line(one) == one_line(other)) == (one == other)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("there is no such session", "There is no such session."),
        ("'k': there is no such session", "'k': there is no such session."),
        ("sqlite: needs a path", "sqlite: needs a path."),
        ("workspace/x is in the way", "workspace/x is in the way."),
        ("x at http://h/v1 is down", "x at http://h/v1 is down."),
        ("gpt-5-mini at http://h/v1 is down", "gpt-5-mini at http://h/v1 is down."),
        ("max_context_tokens=1 is too small", "max_context_tokens=1 is too small."),
        ("", "."),
    ],
)
def test_an_error_begins_as_a_sentence_does_unless_with_a_name(words: str, shown: str) -> None:
    assert error_sentence(UsageError(words)) == shown


def test_an_error_ends_with_a_full_stop() -> None:
    assert sentence("no room") == "no room."
    assert sentence("is the name right?") == "is the name right?"


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("2026-11-05", datetime(2026, 11, 5, tzinfo=UTC)),
        ("2026-11-05T14:30", datetime(2026, 11, 5, 14, 30, tzinfo=UTC)),
        ("2026-11-05T14:30:01Z", datetime(2026, 11, 5, 14, 30, 1, tzinfo=UTC)),
        ("2026-11-05T14:30+02:00", datetime(2026, 11, 5, 12, 30, tzinfo=UTC)),
        ("90m", NOW - timedelta(minutes=90)),
        ("3d", NOW - timedelta(days=3)),
        ("2w", NOW - timedelta(weeks=2)),
        ("yesterday", datetime(2026, 11, 14, tzinfo=UTC)),
        ("Today", datetime(2026, 11, 15, tzinfo=UTC)),
        ("tomorrow", None),
        ("", None),
        ("999999w", None),
    ],
)
def test_parse_time_accepts_dates_ages_and_words(words: str, meant: datetime | None) -> None:
    assert parse_time(words, NOW) == meant


@given(st.text())
def test_parse_time_never_raises(words: str) -> None:
    parse_time(words, NOW)


@pytest.mark.parametrize(
    ("ago", "shown"),
    [
        (timedelta(seconds=-5), "now"),
        (timedelta(seconds=59), "now"),
        (timedelta(minutes=1), "1m"),
        (timedelta(hours=23, minutes=59), "23h"),
        (timedelta(days=6), "6d"),
        (timedelta(weeks=8, days=6), "8w"),
        (timedelta(weeks=9), "2026-09-13"),
    ],
)
def test_age_has_one_unit(ago: timedelta, shown: str) -> None:
    assert format_age(NOW - ago, NOW) == shown


def test_json_escapes_control_characters_and_can_be_parsed() -> None:
    value = {"key": "a\x9b31m\u202eb\x1b[0m\ud83d ☃ 漢", "lines": ["1\n2"]}
    for indent in (None, 2):
        text = json_text(value, indent=indent)
        assert not set(text) & {"\x9b", "\x1b", "\u202e", "\ud83d"}
        assert "☃ 漢" in text
        assert json.loads(text) == value
