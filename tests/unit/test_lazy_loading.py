"""Patterns that are compiled on first use."""

import re

import pytest

from stenolog.lazy_loading import lazy_pattern


def test_pattern_is_compiled_on_first_use() -> None:
    invalid = lazy_pattern("(")
    with pytest.raises(re.error):
        invalid.search("(")


def test_pattern_has_the_methods_and_attributes_of_a_compiled_pattern() -> None:
    pattern, compiled = lazy_pattern("B+", re.IGNORECASE), re.compile("B+", re.IGNORECASE)
    text = "abba bub"
    for _ in range(2):
        assert pattern.findall(text) == compiled.findall(text)
        assert [one.span() for one in pattern.finditer(text)] == [(1, 3), (5, 6), (7, 8)]
        assert (pattern.fullmatch(text), pattern.match(text)) == (None, None)
        assert pattern.search(text, 3).span() == (5, 6)  # type: ignore[union-attr]
        assert pattern.split(text, 1) == ["a", "a bub"]
        assert pattern.sub("-", text, count=1) == "a-a bub"
        assert pattern.subn("-", text) == ("a-a -u-", 3)
        assert (pattern.pattern, pattern.flags) == (compiled.pattern, compiled.flags)
