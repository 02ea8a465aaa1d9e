"""Tests splitting long answers into messages: nothing lost, blank or too long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.channels.delivery import MIN_LIMIT, split_pieces, split_text, utf16_len
from stenolog.errors import UsageError

LIMITS = st.integers(MIN_LIMIT, 200)
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=120),
        st.sampled_from(
            ["\n\n", "\n", ". ", " ", "```", "```python\n", "\n```\n", "😀" * 40, "a" * 99]
        ),
    ),
    max_size=25,
).map("".join)


def _words(text: str) -> str:
    """Return the text without white space and code marks."""
    return "".join(text.split()).replace("`", "")


@given(TEXTS, LIMITS)
def test_no_message_is_blank_or_longer_than_the_limit(text: str, limit: int) -> None:
    for message in split_text(text, limit):
        assert message.strip()
        assert utf16_len(message) <= limit


@given(TEXTS, LIMITS)
def test_split_neither_loses_nor_duplicates_text(text: str, limit: int) -> None:
    assert _words("".join(piece.body for piece in split_pieces(text, limit))) == _words(text)


@given(TEXTS, LIMITS)
def test_only_blank_text_gives_no_message(text: str, limit: int) -> None:
    assert bool(split_text(text, limit)) == bool(_words(text)) or "`" in text


@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.text("abc ", min_size=1, max_size=30), max_size=12)),
        max_size=8,
    ),
    LIMITS,
)
def test_every_message_has_complete_code_blocks(
    blocks: list[tuple[bool, list[str]]], limit: int
) -> None:
    text = "\n\n".join(
        "```py\n" + "\n".join(lines) + "\n```" if code else "\n".join(lines)
        for code, lines in blocks
    )
    for message in split_text(text, limit):
        assert message.count("```") % 2 == 0


def test_short_answer_is_not_split() -> None:
    assert split_text("One.\n\n  Two.", 4096) == ["One.\n\n  Two."]


def test_text_is_split_at_paragraphs_first() -> None:
    first, second = "One two. Three\nfour five " * 2, "Six. Seven\neight " * 3
    assert split_text(f"{first.strip()}\n\n{second.strip()}", 80) == [first.strip(), second.strip()]


@pytest.mark.parametrize("between", ["\n", ". ", " "])
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


def test_split_code_block_keeps_its_language_and_indentation() -> None:
    lines = [f"    line {number:02}" for number in range(18)]
    text = "Look:\n```python\n" + "\n".join(lines) + "\n```\nThat was it."
    found = split_text(text, 100)
    assert len(found) > 2
    assert found[0].endswith("\n```")
    assert found[1].startswith("```python\n    line")
    assert found[-1].endswith("\n```\nThat was it.")


def test_too_small_limit_is_rejected() -> None:
    with pytest.raises(UsageError):
        split_text("hello", MIN_LIMIT - 1)
