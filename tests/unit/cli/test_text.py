"""Text from elsewhere must not drive the terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.cli.text import one_line, printable, sentence


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
        ("👩\u200d💻 ü é", "👩\u200d💻 ü é"),
    ],
)
def test_sequences_go_as_a_whole(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert all(c in "\n\t" or unicodedata.category(c) != "Cc" for c in printable(text))


@given(st.text(), st.text())
def test_a_line_stays_one_line_and_keys_stay_apart(one: str, other: str) -> None:
    assert not any(unicodedata.category(c) == "Cc" for c in one_line(one))
    if "\\" not in one + other:
        assert (one_line(one) == one_line(other)) == (one == other)


def test_an_error_ends_with_a_full_stop() -> None:
    assert sentence("no room") == "no room."
    assert sentence("is the name right?") == "is the name right?"
