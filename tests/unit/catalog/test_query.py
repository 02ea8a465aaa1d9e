"""What a person types, and what the index is asked."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stenolog.catalog.catalog_database import load_schema
from stenolog.catalog.query import match_expression, parse_query
from support.strategies import texts


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("two words", '"two" AND "words"'),
        ('"two words"', '"two words"'),
        ("well-known", '"well known"'),
        ("this -that", '("this") NOT ("that")'),
        ('a -"b c" -d', '("a") NOT ("b c" OR "d")'),
        ("wor*", '"wor" *'),
        ('"two wor"*', '"two wor" *'),
        ("getUser*", '("get user" * OR "getuser" *)'),
        ("GitHub", '("git hub" OR "github")'),
        ("--flag", '"flag"'),
        ('an "open quote', '"an" AND "open" AND "quote"'),
        ("東京都", '"東京 京都"'),
        ("東", '"東"'),
        ("Python入", '("python" AND "入")'),
        ("東京*", '"東京"'),
        ("a AND b OR c", '"a" AND "and" AND "b" AND "or" AND "c"'),
        ("x:y^2", '"x y 2"'),
    ],
)
def test_query_is_translated_to(typed: str, asked: str) -> None:
    assert match_expression(parse_query(typed)) == asked


@pytest.mark.parametrize("typed", ["", "   ", '"', '""', "*", "-", "-x", '-"x y"', "()&|", "\x00"])
def test_query_without_words_is_empty(typed: str) -> None:
    assert parse_query(typed).is_empty


def test_marks_limit_a_query_to_a_role_and_to_sessions() -> None:
    asked = match_expression(parse_query("a -b"), role="user", sessions=[3, 4])
    assert asked == '("a" AND "=r75736572" AND ("=s3" OR "=s4")) NOT ("b")'
    assert len(match_expression(parse_query("a"), role="x" * 1000)) < 100


@pytest.fixture(scope="module")
def index() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in load_schema()[:-1]:
            connection.execute(statement)
        yield connection


SIGNS = st.text("ab\"*-+^:(){}[]\\ 'NEARO東,\x00\n", max_size=30)


@given(st.one_of(texts(), SIGNS, st.text(max_size=60)), st.sampled_from([None, "user", '"', "東"]))
@example('"', None)
@example("NOT", None)
@example("a NEAR(b c, 3)", None)
@example("{parts} : a", None)
@example("a" * 100_000, None)
@example("a " * 10_000, None)
def test_every_text_is_a_valid_query(
    index: sqlite3.Connection, typed: str, role: str | None
) -> None:
    parsed = parse_query(typed)
    if not parsed.is_empty:
        asked = match_expression(parsed, role=role, sessions=[1])
        assert index.execute("SELECT 1 FROM catalog_words WHERE catalog_words MATCH ?", [asked])
