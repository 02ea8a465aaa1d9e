"""What PostgreSQL is asked: nothing that anybody typed is a sign of its language."""

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stenolog.catalog import tokenizer
from stenolog.catalog.catalog_database import BLOCK_SIZE, replace_surrogates
from stenolog.catalog.query import MessageTokens, TSQuery, parse_query, stem_mark
from support.strategies import texts

Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture(scope="module")
def connection(postgres_database: str) -> Iterator[Connection]:
    with psycopg.connect(postgres_database, autocommit=True) as opened:
        yield opened


@pytest.mark.parametrize(
    ("typed", "words", "looked_up"),
    [
        ("two words", "('two' & 'words')", None),
        ('"two words"', "('two' & 'words')", [[False, [[" two words "]]]]),
        ("this -that", "('this' & !'that')", None),
        ('a -"b c"', "'a'", [[True, [[" b c "]]]]),
        ("wor*", "'wor':*", None),
        ('"two wor"*', "('two' & 'wor':*)", [[False, [[" two wor"]]]]),
        ("GitHub", "(('git' & 'hub') | 'github')", [[False, [[" git hub "], [" github "]]]]),
        ("東", "'東'", None),
        ("Python入", "('python' & '入')", None),
        ("it's a:* & (b | !c)", "((('it' & 's') & 'a':*) & ('b' & 'c'))", [[False, [[" it s "]]]]),
    ],
)
def test_query_is_translated_to(typed: str, words: str, looked_up: object) -> None:
    asked, more = TSQuery().match_values(parse_query(typed), role=None, sessions=())
    assert asked == words
    assert (None if more is None else json.loads(more)) == looked_up


@settings(max_examples=150)
@given(typed=texts(), role=texts(), stems=st.lists(texts(), max_size=3))
@example(
    typed="'a' & !b | (c", role="\\'", stems=["'", "\\", "\0", "a' | 'b", "x" * 5_000, "é" * 3_000]
)
@example(typed=f'"{"word " * 30_000}"', role="x", stems=[f"s{number}" for number in range(9_000)])
@example(typed=f'"{"東 a " * 9_000}" -"{"x 京 " * 9_000}"', role="x", stems=[])
def test_p10_no_text_breaks_a_query(
    connection: Connection, typed: str, role: str, stems: list[str]
) -> None:
    language, parsed = TSQuery(), parse_query(typed)
    marks = [stem_mark(replace_surrogates(stem)) for stem in [*stems, "x"]]
    asked = [language.mark_values([marks, ["=o1"]], excluded=marks)]
    if not parsed.is_empty:
        asked.append(
            language.match_values(parsed, role=replace_surrogates(role), sessions=range(64))[:1]
        )
    ranking = language.rank_values(parsed)
    asked += [ranking] if ranking is not None else []
    for (words,) in asked:
        [(nodes,)] = connection.execute("SELECT numnode(%s::tsquery)", (words,))
        assert nodes >= 1


def _of(text: str) -> MessageTokens:
    lines = tokenizer.token_lines(text)
    stems = " ".join(f"=w{token}" for token in dict.fromkeys(lines.parts.split()))
    return MessageTokens(3 * BLOCK_SIZE, lines.parts, lines.extra_tokens, f"=s1 =o2 =r3 {stems}")


@settings(max_examples=150)
@given(text=texts())
def test_p10_every_token_of_any_text_can_be_searched(connection: Connection, text: str) -> None:
    said = _of(replace_surrogates(text))
    [(_, words, _)] = TSQuery().tokens_to_add([said])
    [(found,)] = connection.execute("SELECT tsvector_to_array(%s::tsvector)", (words,))
    assert set(found) == {
        "=b3",
        *said.parts.split(),
        *said.extra_tokens.split(),
        *said.marks.split(),
    }


@pytest.mark.parametrize(
    "text",
    [
        # As many different words as there can be, of three and of four bytes a character.
        "".join(chr(0x4E00 + number * 7919 % 20_900) for number in range(65_536)),
        "".join(chr(0x20000 + number * 7919 % 42_000) for number in range(65_536)),
        # One sign for four letters, again and again; then the same in one.
        " ".join(
            "".join("\ufdf2\ufdf3\ufdf4\ufdf6\ufdf8\ufdfc"[number // 6**n % 6] for n in range(7))
            + "_\ufdfb\ufdfa"
            for number in range(6_000)
        ),
    ],
)
def test_largest_possible_message_is_indexed(connection: Connection, text: str) -> None:
    said = _of(text)
    [(_, words, _)] = TSQuery().tokens_to_add([said])
    [(found,)] = connection.execute("SELECT tsvector_to_array(%s::tsvector)", (words,))
    assert {"=b3", "=s1", "=o2", "=r3", *said.parts.split(), *said.extra_tokens.split()} <= set(
        found
    )
