"""Compiled templates are stored like Python's compiled modules, and templates format values."""

import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from jinja2 import Environment, compiler

from stenolog.gateway.viewer.templating import (
    age,
    damage_html,
    dollars,
    duration_text,
    message_count_text,
    new_environment,
    path_segment,
    plural,
    short_number,
    time_of_day,
    unreadable_text,
)

_TEMPLATE = "failure.html"
_NOW = datetime(2026, 3, 14, 12, tzinfo=UTC)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    return tmp_path


def compile_template() -> None:
    new_environment().get_template(_TEMPLATE)


def files_in(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_template_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_template()
    assert len(files_in(cache)) == 1
    monkeypatch.setattr(Environment, "compile", lambda *_: pytest.fail("compiled again"))
    compile_template()


def test_template_is_compiled_again_for_another_version_of_jinja(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_template()
    [file] = files_in(cache)
    earlier = file.read_bytes()
    monkeypatch.setattr(compiler, "__file__", __file__)
    compile_template()
    assert file.read_bytes() != earlier


def test_incomplete_file_is_replaced(cache: Path) -> None:
    compile_template()
    [file] = files_in(cache)
    complete = file.read_bytes()
    for length in (0, 10, 30, len(complete) // 2, len(complete) - 1):
        file.write_bytes(complete[:length])
        compile_template()
        assert (files_in(cache), file.read_bytes()) == ([file], complete)


def test_code_of_another_template_is_not_used(cache: Path) -> None:
    compile_template()
    [file] = files_in(cache)
    complete = file.read_bytes()
    new_environment().get_template("empty.html")
    [other] = set(files_in(cache)) - {file}
    file.write_bytes(other.read_bytes())
    compile_template()
    assert file.read_bytes() == complete


def test_template_is_compiled_if_its_code_cannot_be_stored(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("not a folder")
    monkeypatch.setattr(sys, "pycache_prefix", str(cache / "file"))
    compile_template()
    monkeypatch.setattr(sys, "pycache_prefix", str(cache / "folder"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    compile_template()
    assert files_in(cache) == [cache / "file"]


# --- numbers, times and phrases ---------------------------------------------------------------


def test_age_has_one_unit() -> None:
    ages = [timedelta(seconds=1), timedelta(seconds=50), timedelta(minutes=5), timedelta(hours=30)]
    assert [age(_NOW - one, _NOW) for one in ages] == ["now", "50 s", "5 min", "1 d"]
    assert age(_NOW - timedelta(days=30), _NOW) == "2026-02-12"
    assert age(None) == ""


def test_large_numbers_are_shortened() -> None:
    assert [short_number(one) for one in (0, 950, 1_234, 34_000, 5_600_000)] == [
        "0",
        "950",
        "1.2k",
        "34k",
        "5.6M",
    ]
    assert [duration_text(one) for one in (0.412, 2.5, 125.0)] == ["412 ms", "2.5 s", "2 min 5 s"]
    assert (plural(1, "turn"), plural(2_000, "turn")) == ("1 turn", "2,000 turns")


def test_duration_is_rounded_once() -> None:
    told = [duration_text(one) for one in (0.9996, 59.97, 61, 90, 119.7, 150, 3_599.6)]
    assert told == [
        "1.0 s",
        "1 min 0 s",
        "1 min 1 s",
        "1 min 30 s",
        "2 min 0 s",
        "2 min 30 s",
        "60 min 0 s",
    ]


def test_key_is_one_segment_of_a_path() -> None:
    assert path_segment("a/b?c#d%e ü") == "a%2Fb%3Fc%23d%25e%20%C3%BC"


def test_small_amounts_are_not_shown_as_zero() -> None:
    amounts = (0.0, 0.000_01, 0.0042, 0.5, 1.0, 1_234.567)
    assert [dollars(one) for one in amounts] == [
        "$0.00",
        "<$0.0001",
        "$0.0042",
        "$0.5000",
        "$1.00",
        "$1,234.57",
    ]


def test_message_count_names_visible_messages_if_some_are_hidden() -> None:
    told = [
        message_count_text(1, 1),
        message_count_text(11, 11),
        message_count_text(8, 11),
        message_count_text(0, 1),
    ]
    assert told == [
        "1 message",
        "11 messages",
        "11 messages · model sees 8",
        "1 message · model sees 0",
    ]


def test_time_of_another_day_has_its_date() -> None:
    assert time_of_day(_NOW - timedelta(hours=3), _NOW) == "09:00"
    assert time_of_day(_NOW - timedelta(hours=13), _NOW) == "2026-03-13 23:00"


def test_damage_text_has_the_number_of_lost_messages() -> None:
    assert damage_html(0, 0, "w") == ""
    told = "damaged and cannot be read. For details, run <code>steno doctor w</code>"
    assert damage_html(1, 1, "w") == f"1 message is {told}"
    assert damage_html(2, 0, "w") == f"2 messages are {told}"
    assert damage_html(0, 1, "w").startswith("The log is damaged, but all messages that were read")
    assert "steno doctor &#39;a &lt;b&gt;&#39;" in damage_html(1, 0, "a <b>")
    assert unreadable_text(2, 2) == "Message 2 is damaged and cannot be read"
    assert unreadable_text(2, 4) == "Messages 2 to 4 are damaged and cannot be read"
