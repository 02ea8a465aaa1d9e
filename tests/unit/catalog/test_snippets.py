"""The part of a message that shows why it was found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.catalog import message_search
from stenolog.catalog.message_search import SNIPPET_WIDTH, make_snippet
from stenolog.catalog.query import parse_query
from stenolog.testing.strategies import texts


def _shown(text: str, query: str) -> str:
    found = make_snippet(text, parse_query(query))
    shown, at = "", 0
    for start, end in found.marks:
        shown += f"{found.text[at:start]}[{found.text[start:end]}]"
        at = end
    return shown + found.text[at:]


@pytest.mark.parametrize(
    ("text", "query", "shown"),
    [
        ("One two\nthree", "TWO three", "One [two] [three]"),
        ("call getUserName now", "user", "call [getUserName] now"),
        ("call getUserName now", "getusern*", "call [getUserName] now"),
        ("working words", "wor*", "[working] [words]"),
        ("a b -c", "a -c", "[a] b -c"),
        ("東京都に行く", "京都", "東[京都]に行く"),
        ("東京都に行く", "東京都", "[東京都]に行く"),
        ("東京都に行く", "行", "東京都に[行]く"),
        ("Python入門ガイド", "python 入門", "[Python入門]ガイド"),
        ("nothing of it", "other", "nothing of it"),
        ("", "other", ""),
    ],
)
def test_matching_words_are_marked(text: str, query: str, shown: str) -> None:
    assert _shown(text, query) == shown


def test_long_text_is_cut_at_spaces_around_the_words() -> None:
    text = "far away " * 100 + "the needle is here " + "and so on " * 100
    shown = _shown(text, "needle")
    assert shown.startswith("…")
    assert shown.endswith("…")
    assert "the [needle] is here" in shown
    assert len(shown) <= SNIPPET_WIDTH + 4
    assert shown.strip("…").split()[0] in ("far", "away")


def test_snippet_shows_the_part_with_most_different_words() -> None:
    text = "one " * 50 + "x " * 300 + "one and two " + "y " * 300
    assert "[one] and [two]" in _shown(text, "one two")


def test_number_of_positions_is_limited() -> None:
    for text in ("東京" * 30_000, "one " * 30_000, "東京 " * 30_000):
        assert (
            len(message_search._find_positions(text, parse_query("東京 one")))
            == message_search._MAX_POSITIONS
        )


@given(st.one_of(texts(), st.text(max_size=600)), st.one_of(texts(), st.text(max_size=20)))
def test_marks_lie_within_the_snippet_in_order(text: str, query: str) -> None:
    found = make_snippet(text, parse_query(query))
    places = [place for mark in found.marks for place in mark]
    assert places == sorted(set(places))
    assert all(0 <= place <= len(found.text) for place in places)
    assert "\n" not in found.text
