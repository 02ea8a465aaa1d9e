"""Tests P6: conversion between keys and file names."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.stores.file_names import has_long_key, key_of_log, log_name

keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=300).filter(
    lambda key: len(key.encode()) <= 1024
)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("telegram:123", "telegram%3A123.jsonl"),
        ("a_b", "a_b.jsonl"),
        ("A:B", "%41%3A%42.jsonl"),
        ("..", "%2E..jsonl"),
        ("../x", "%2E.%2Fx.jsonl"),
        ("CON", "%43%4F%4E.jsonl"),
        ("ü", "%C3%BC.jsonl"),
        ("\n", "%0A.jsonl"),
    ],
)
def test_p6_log_names_match_the_format(key: str, name: str) -> None:
    assert log_name(key) == name
    assert key_of_log(name) == key


@given(keys, keys)
def test_p6_log_names_of_two_keys_differ_on_any_file_system(one: str, other: str) -> None:
    assert (one == other) == (log_name(one).casefold() == log_name(other).casefold())


@given(keys)
def test_p6_log_name_is_short_ascii_and_encodes_its_key(key: str) -> None:
    name = log_name(key)
    assert len(name) <= 210
    assert name.isascii()
    assert "/" not in name
    assert not name.startswith(".")
    assert key_of_log(name) == key or (has_long_key(name) and key_of_log(name) is None)


@pytest.mark.parametrize(
    "name", ["x", ".jsonl", "%zz.jsonl", "%41.jsonl.gz", "A.jsonl", "%ff.jsonl"]
)
def test_other_file_names_are_not_log_names(name: str) -> None:
    assert key_of_log(name) is None
