"""The part of a message that shows why it was found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.catalog import message_search
from stenolog.catalog.message_search import SNIPPET_WIDTH, make_snippet
from stenolog.catalog.query import parse_query
from stenolog.catalog.searchable_text import LONGEST_TEXT
from support.strategies import texts


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


_KEY = "sk-proj-" + "Ab3dEf6hIj9kLm2nOp5qRs8tUv1wXy4z" * 3
_PEM = "-----BEGIN PRIV" + "ATE KEY-----\n" + f"{_KEY[8:]}\n" * 20 + "-----END PRIVATE KEY-----"


@pytest.mark.quick(5)
@pytest.mark.parametrize("secret", [_KEY, f"password: {_KEY[8:]}", f"\x1b[32m{_KEY}\x1b[0m", _PEM])
@pytest.mark.parametrize("query", ["park", "park sk", _KEY, "nothing", "Ab3d*"])
def test_no_part_of_a_secret_is_in_a_snippet(secret: str, query: str) -> None:
    parts = [_KEY[start : start + 12] for start in range(8, len(_KEY) - 12)]
    for pad in range(0, 320, 4):
        text = "w " * (pad // 2) + secret + " " + "v " * ((320 - pad) // 2) + "park " + "u " * 80
        found = make_snippet(text, parse_query(query))
        assert not any(part in found.text for part in parts)
        assert "\x1b" not in found.text


def test_secret_at_the_end_of_the_indexed_text_is_not_shown() -> None:
    text = ("w " * LONGEST_TEXT)[: LONGEST_TEXT - 40] + "park " + _KEY
    assert _shown(text[:LONGEST_TEXT], "park").endswith("w [park]")


def test_words_of_a_redacted_secret_are_no_matches() -> None:
    text = f"it is {_KEY}. {'w ' * 300} the api key of the door"
    assert "the [api] [key] of the door" in _shown(text, "api key")
    assert _shown("my password is tulip99", "redacted tulip99") == (
        "my password is [redacted: password]"
    )
