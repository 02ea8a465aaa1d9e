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
def test_a_key_named_goes_before_patterns(key: str, expected: str) -> None:
    given = keys(
        "app:*=adk:*",
        "app:special=cli:default",
        "s1=telegram:1",
        "user-*=telegram:*",
        "*@example.org=mail:*",
    )
    assert given(key) == expected


def test_a_star_alone_is_about_every_key() -> None:
    assert keys("*=old:*")("a:b") == "old:a:b"


def test_a_star_never_stands_for_less_than_nothing() -> None:
    assert keys("ab*ba=x*")("aba") == "aba"


def test_a_key_that_really_has_a_star_can_be_named() -> None:
    assert keys("*=old:*", "a*=new:*")("a*") == "new:*"


@pytest.mark.parametrize(
    "pair", ["s1", "=x", "s1=", "a*=b", "a=b*", "a**=b*", "a*=b**", "s1=" + "x" * 2_000]
)
def test_what_nobody_can_have_meant_is_refused(pair: str) -> None:
    with pytest.raises(UsageError):
        parse_pair(pair)


def test_a_file_has_one_pair_a_line() -> None:
    found = parse_pairs("# old, new\n\ns1=telegram:1\r\na=b\tc=d\n")
    assert [(pair.old, pair.new) for pair in found] == [("s1", "telegram:1"), ("a=b", "c=d")]
    with pytest.raises(UsageError, match="line 2"):
        parse_pairs("a=b\nwords\n")


def test_pairs_that_are_about_nothing_and_keys_that_would_be_one() -> None:
    given = keys("a=x", "b=x", "c=c2", "d*=e*")
    assert [str(pair) for pair in given.unmatched(["a", "b", "dd"])] == ["c=c2"]
    assert given.duplicates(["a", "b", "c"]) == ["x"]
    assert given.duplicates(["a", "x"]) == ["x"]
    assert given.duplicates(["a", "c"]) == []
