"""Tests splitting long answers into messages: nothing lost, blank or too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.channels.delivery import split_text, utf16_len

LIMITS = st.integers(64, 200)
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=120),
        st.sampled_from(["\n\n", "\n", ". ", " ", "😀" * 40, "a" * 99]),
    ),
    max_size=25,
).map("".join)


def _words(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


@given(TEXTS, LIMITS)
def test_no_text_is_lost_and_no_message_is_blank_or_too_long(text: str, limit: int) -> None:
    messages = split_text(text, limit)
    assert _words("".join(messages)) == _words(text)
    for message in messages:
        assert message.strip()
        assert utf16_len(message) <= limit


def test_short_answer_is_not_split() -> None:
    assert split_text("One.\n\n  Two.", 4096) == ["One.\n\n  Two."]


def test_text_is_split_at_paragraphs_first() -> None:
    first, second = "One two. Three\nfour five " * 2, "Six. Seven\neight " * 3
    assert split_text(f"{first.strip()}\n\n{second.strip()}", 80) == [first.strip(), second.strip()]


@pytest.mark.parametrize("between", ["\n", ". ", '." ', ".”) ", " "])
def test_text_without_paragraphs_is_split_at_lines_sentences_or_words(between: str) -> None:
    first, second = "a" * 50, "b" * 50
    found = split_text(f"{first}{between}{second}", 64)
    assert found == [f"{first}{between.rstrip()}", second]


def test_too_long_word_is_split_anywhere() -> None:
    assert "".join(split_text("x" * 1000, 64)) == "x" * 1000


def test_emoji_counts_as_two_units_and_is_never_split() -> None:
    found = split_text("😀" * 3000, 4096)
    assert "".join(found) == "😀" * 3000
    assert all(len(one.encode("utf-16-le")) // 2 <= 4096 for one in found)


def test_split_code_keeps_its_indentation() -> None:
    lines = [f"    line {number:02}" for number in range(18)]
    found = split_text("Look:\n" + "\n".join(lines), 100)
    assert len(found) > 2
    assert "\n".join(found).splitlines()[1:] == lines
