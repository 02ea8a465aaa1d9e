"""Tokens and stems of texts and queries, which FTS5 does not split again."""

import re
import sqlite3
import string
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stenolog.catalog import tokenizer
from stenolog.catalog.query import match_expression, parse_query
from stenolog.catalog.tokenizer import (
    MAX_TOKEN_LENGTH,
    STOP_WORDS,
    stem,
    stem_tokens,
    stems,
    token_lines,
)
from support.strategies import texts

NAMES = st.from_regex(r"[A-Za-z0-9_./-]{1,30}", fullmatch=True)
UNSPACED = st.text("東京都千代田区にいくカタカナ한국어ไทย🎉✅", min_size=1, max_size=12)
SOME = st.one_of(texts(), NAMES, UNSPACED, st.text(max_size=40))


@pytest.mark.parametrize(
    ("text", "parts", "more"),
    [
        ("Plain words, and 42!", "plain words and 42", ""),
        ("getUserName", "get user name", "getusername"),
        ("get_user_name", "get user name", "getusername"),
        ("HTTPServer2", "http server 2", "httpserver 2"),
        ("a.b/c-d", "a b c d", ""),
        ("utf8 UTF-8", "utf 8 utf 8", ""),
        ("GitHub iPhone", "git hub i phone", "github iphone"),
        ("PDFs URLs HTML", "pdfs urls html", ""),
        ("__init__ _", "init", ""),
        ("3f2504e04f8911d39a0c0305e82c3301", "3f2504e04f8911d39a0c0305e82c3301", ""),
        ("café CAFÉ cafe\u0301", "cafe cafe cafe", ""),
        ("Straße ΣΊΣΥΦΟΣ", "strasse σισυφοσ", ""),
        ("ёлка йод", "елка йод", ""),
        ("\uff21\uff22\uff23\uff11\uff12 ﬁne ½", "abc 12 fine 1 2", ""),
        ("हिन्दी शब्द", "हिन्दी शब्द", ""),
        ("東京都", "東京 京都", "東 京 都"),
        ("Python入門", "python 入門", "入 門"),
        ("東", "東", "東"),
        ("ｶﾞｲﾄﾞ", "ガイ イド", "ガ イ ド"),
        ("ไทย", "ไท ทย", "ไ ท ย"),
        ("✅ done ❤️", "✅ done ❤", "✅ ❤"),
        ("\x00 \ud800 --- \u200b", "", ""),
    ],
)
def test_text_is_split_into_tokens(text: str, parts: str, more: str) -> None:
    found = token_lines(text)
    assert (found.parts, found.extra_tokens) == (parts, more)


@given(SOME)
@example("a:_:bB")
def test_fts5_leaves_tokens_unchanged(text: str) -> None:
    found = token_lines(text)
    index = sqlite3.connect(":memory:")
    try:
        index.execute(
            "CREATE VIRTUAL TABLE w USING fts5(t, content='', tokenize=\"ascii tokenchars '='\")"
        )
        index.execute("CREATE VIRTUAL TABLE v USING fts5vocab(w, instance)")
        for line in (found.parts, found.extra_tokens):
            index.execute("INSERT INTO w (w) VALUES ('delete-all')")
            index.execute("INSERT INTO w (rowid, t) VALUES (1, ?)", (line,))
            taken = index.execute("SELECT term FROM v ORDER BY offset").fetchall()
            assert " ".join(term for (term,) in taken) == line
    finally:
        index.close()


@given(SOME)
def test_tokens_are_short_and_lower_case_without_index_marks(text: str) -> None:
    for token in f"{token_lines(text).parts} {token_lines(text).extra_tokens}".split():
        assert len(token) <= MAX_TOKEN_LENGTH
        assert not set(token) & set(string.ascii_uppercase + string.punctuation)


def _finds(query: str, text: str) -> bool:
    """Whether an index of this text alone finds it."""
    parsed = parse_query(query)
    if parsed.is_empty:
        return False
    found = token_lines(text)
    index = sqlite3.connect(":memory:")
    try:
        index.execute(
            "CREATE VIRTUAL TABLE w USING fts5"
            "(parts, more, marks, content='', tokenize=\"ascii tokenchars '='\")"
        )
        index.execute(
            "INSERT INTO w (rowid, parts, more) VALUES (1, ?, ?)", [found.parts, found.extra_tokens]
        )
        asked = [match_expression(parsed)]
        return bool(index.execute("SELECT 1 FROM w WHERE w MATCH ?", asked).fetchall())
    finally:
        index.close()


@given(st.lists(NAMES, min_size=1, max_size=6), st.data())
def test_word_is_found_in_any_spelling(names: list[str], data: st.DataObject) -> None:
    text = " ".join(names)
    name = data.draw(st.sampled_from(names))
    for query in (f'"{name}"', f'"{name.upper()}"', f'"{name.lower()}"'):
        assert _finds(query, text) == bool(re.search("[A-Za-z0-9]", name))


@given(st.text(string.ascii_lowercase, min_size=1, max_size=8), st.lists(NAMES, max_size=3))
def test_parts_of_names_are_found(part: str, around: list[str]) -> None:
    for name in (f"get{part.capitalize()}", f"get_{part}_2", f"{part}/x.py", f"a.{part}"):
        assert _finds(part, " ".join([*around, name]))


@given(UNSPACED, st.data())
def test_every_part_of_a_text_without_spaces_is_found(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    assert _finds(text[start:end], f"before {text} after")


@given(SOME, SOME)
def test_text_as_query_finds_itself(text: str, other: str) -> None:
    word = " ".join(w for w in text.replace('"', " ").split() if token_lines(w).parts)
    assert _finds(f'"{word}"', f"{other} {word} {other}") == bool(word)


def test_separate_words_do_not_match_a_phrase() -> None:
    assert _finds('"user name"', "the user name is")
    assert not _finds('"user name"', "name of the user")
    assert not _finds("京東", "東京")


@given(SOME)
def test_word_positions_match_the_text(text: str) -> None:
    found = [text[start:end] for start, end, _ in tokenizer.word_positions(text)]
    assert " ".join(word.line for word in tokenizer.split_words(" ".join(found))) == " ".join(
        word.line for _, _, word in tokenizer.word_positions(text)
    )


@given(st.text("ae\u304b\uff76\uff9e\u0301\u0327\u0344\u0f73\u3099\u00b4\u1f82 ", max_size=200))
@example("a" + "\u0301\u0327\uff9e" * 30)
def test_long_runs_of_marks_are_normalized_as_by_unicodedata(text: str) -> None:
    for form in ("NFKC", "NFKD"):
        assert tokenizer.normalize(form, text) == unicodedata.normalize(form, text)


# --- stems -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forms",
    [
        "deploy deploys deployed deploying deployment deployments",
        "plan plans planned planning planner",
        "move moves moved moving",
        "city cities",
        "agree agrees agreed",
        "use uses used using",
        "happy happily happiness",
        "organize organized organizing organization organisation",
        "invite invited invitation invitations",
        "create created creates creating creation",
        "prefer preferred preference preferences",
        "travel travelled traveling travelling",
        "install installed installing",
        "buy buys bought buying",
        "fly flew flying flight",
        "child children",
        "decide decided decision",
        "box boxes",
        "live lives lived living",
    ],
)
def test_forms_of_a_word_have_the_same_stem(forms: str) -> None:
    assert len({stem(form) for form in forms.split()}) == 1


@pytest.mark.parametrize(
    "words", ["plan plant", "bus business", "wed week", "sing king", "red read", "new knew"]
)
def test_different_words_stay_different(words: str) -> None:
    assert len({stem(word) for word in words.split()}) == 2


def test_stop_words_and_single_letters_have_no_stem() -> None:
    assert stems("What did I do with it? Und was ist das?") == []
    assert all(stem(word) == "" for word in STOP_WORDS)


def test_names_numbers_and_other_scripts_are_not_stemmed() -> None:
    assert stems("Zürich 2026 東京都 getUserNames") == [
        "zurich", "2026", "東京", "京都", "user", "nam",
    ]  # fmt: skip


@given(st.text())
def test_text_and_its_tokens_have_the_same_stems(text: str) -> None:
    assert stems(text) == stem_tokens(token_lines(text).parts.split())


@given(st.text(st.characters(categories=["Ll"]), min_size=1))
def test_stem_is_one_token_and_not_longer_than_its_word(word: str) -> None:
    for token in token_lines(word).parts.split():
        found = stem(token)
        assert len(found) <= len(token) + 1
        assert found.split() in ([found], [])
