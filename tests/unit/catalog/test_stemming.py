"""Words in their common form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.catalog import tokenizer
from stenolog.catalog.stemming import STOP_WORDS, stem, stem_tokens, stems


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
    assert stems(text) == stem_tokens(tokenizer.token_lines(text).parts.split())


@given(st.text(st.characters(categories=["Ll"]), min_size=1))
def test_stem_is_one_token_and_not_longer_than_its_word(word: str) -> None:
    for token in tokenizer.token_lines(word).parts.split():
        found = stem(token)
        assert len(found) <= len(token) + 1
        assert found.split() in ([found], [])
