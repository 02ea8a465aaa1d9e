"""Keys there and keys here: pairs, patterns, and what nobody can have meant."""

import pytest

from stenolog.errors import UsageError
from stenolog.transfer.importers.key_map import KeyMap, parse_pair, parse_pairs


def keys(*pairs: str) -> KeyMap:
    return KeyMap(tuple(map(parse_pair, pairs)))


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("s1", "telegram:1"),
        ("s2", "s2"),
        ("app:u:1", "adk:u:1"),
        ("app:special", "cli:default"),
        ("app:", "adk:"),
        ("x:app:1", "x:app:1"),
        ("user-7", "telegram:7"),
        ("7@example.org", "mail:7"),
    ],
)
def test_exact_pair_precedes_patterns(key: str, expected: str) -> None:
    given = keys(
        "app:*=adk:*",
        "app:special=cli:default",
        "s1=telegram:1",
        "user-*=telegram:*",
        "*@example.org=mail:*",
    )
    assert given(key) == expected


def test_star_matches_every_key() -> None:
    assert keys("*=old:*")("a:b") == "old:a:b"


def test_star_does_not_match_overlapping_prefix_and_suffix() -> None:
    assert keys("ab*ba=x*")("aba") == "aba"


def test_key_that_contains_a_star_can_be_mapped() -> None:
    assert keys("*=old:*", "a*=new:*")("a*") == "new:*"


@pytest.mark.parametrize(
    "pair", ["s1", "=x", "s1=", "a*=b", "a=b*", "a**=b*", "a*=b**", "s1=" + "x" * 2_000]
)
def test_invalid_pairs_are_rejected(pair: str) -> None:
    with pytest.raises(UsageError):
        parse_pair(pair)


def test_map_file_has_one_pair_per_line() -> None:
    found = parse_pairs("# old, new\n\ns1=telegram:1\r\na=b\tc=d\n")
    assert [(pair.old, pair.new) for pair in found] == [("s1", "telegram:1"), ("a=b", "c=d")]
    with pytest.raises(UsageError, match="line 2"):
        parse_pairs("a=b\nwords\n")


def test_unmatched_pairs_and_duplicate_new_keys_are_reported() -> None:
    given = keys("a=x", "b=x", "c=c2", "d*=e*")
    assert [str(pair) for pair in given.unmatched(["a", "b", "dd"])] == ["c=c2"]
    assert given.duplicates(["a", "b", "c"]) == ["x"]
    assert given.duplicates(["a", "x"]) == ["x"]
    assert given.duplicates(["a", "c"]) == []
