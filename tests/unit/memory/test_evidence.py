"""Tests whether a quote is in the user's words."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.memory.evidence import (
    content_words,
    is_quoted,
    is_related,
    shares_enough_words,
    unsupported_values,
    words,
)
from support.resource_limits import run_limited

TOLD = "Well, I can’t eat   NUTS — my sister Zoë lives in Oslo, by the way. Not I! She\nsails."


@pytest.mark.parametrize(
    "quote",
    [
        "I can't eat nuts",
        "i CAN'T eat nuts!",
        "my sister Zoë lives in Oslo",
        "Oslo",
        "nuts my sister",
        "I can't eat … Zoë lives",
        "I can't eat ... in Oslo",
        "by the way. Not I",
        "Not I! She. Sails.",
    ],
)
def test_consecutive_words_count_as_quoted(quote: str) -> None:
    assert is_quoted(quote, ["Hello", TOLD])


@pytest.mark.parametrize(
    "quote",
    [
        "",
        "…",
        "I can eat nuts",
        "my brother lives in Oslo",
        "lives Oslo",
        "slo",
        "in Oslo … my sister",
        "I",
        "Hello Well",
        "by the way not I",
        "I can't eat … she",
        "Not I … sails",
        "she sails",
    ],
)
def test_other_words_do_not_count_as_quoted(quote: str) -> None:
    assert not is_quoted(quote, ["Hello", TOLD])


def test_quote_must_not_span_two_messages() -> None:
    assert not is_quoted("I eat no meat", ["I eat", "no meat"])


def test_two_letters_are_not_a_quote() -> None:
    assert not is_quoted("no", ["no"])
    assert is_quoted("42 km", ["I ran 42 km"])


@pytest.mark.parametrize(
    ("quote", "text"),
    [
        ("I do not … eat meat", "I do not like Mondays. My brother and I eat meat every day."),
        ("no meat", "Fish? No. Meat is what I love!"),
        ("I hate … meat", "I hate:\n- Mondays\nI love:\n- meat"),
        ("我不喜欢 … 肉", "我不喜欢鱼。我喜欢吃肉"),
    ],
)
def test_quote_must_not_join_parts_of_two_sentences(quote: str, text: str) -> None:
    assert not is_quoted(quote, [text])


def test_two_sentences_may_be_quoted_together() -> None:
    assert is_quoted("I moved. Oslo is home", ["Hi! I moved. Oslo is home now."])
    assert is_quoted("well... I moved", ["Well... I moved."])
    assert is_quoted("Dr. Fox, at 3.5 km", ["I see Dr. Fox, at 3.5 km from here"])


@pytest.mark.parametrize("text", ["其实我喜欢喝茶。", "本当は私はお茶が好きです"])
def test_scripts_without_spaces_are_compared_by_character(text: str) -> None:
    assert is_quoted(text[2:6], [text])
    assert not is_quoted(text[2:6] + "猫", [text])


@given(st.text(), st.data())
def test_any_run_of_words_of_a_text_counts_as_quoted(text: str, data: st.DataObject) -> None:
    # A quote across the end of a sentence must contain that end, too.
    spoken = words(re.split("[.?!\n…？！。؟।]", text)[0])  # noqa: RUF001
    first = data.draw(st.integers(0, len(spoken)))
    run = spoken[first : data.draw(st.integers(first, len(spoken)))]
    if len(run) > 1:
        assert is_quoted(" ".join(run), [text])


@given(st.text(), st.text())
def test_any_two_texts_can_be_compared(quote: str, text: str) -> None:
    assert is_quoted(quote, [text]) in (True, False)
    assert is_related(text, quote) in (True, False)


@pytest.mark.parametrize(
    ("fact", "quote"),
    [
        ("Lives in Berlin.", "Berlin"),
        ("Has an allergy to nuts.", "I'm allergic"),
        ("Can't stand coriander.", "I can't stand the taste of coriander"),
        ("Isst kein Fleisch.", "Ich esse kein Fleisch"),
        ("Ran 42 km.", "42 km it was"),
        ("Has a sister, Zoë.", "Zoë is her name"),
        ("喜欢喝茶", "我最喜欢的是茶"),
    ],
)
def test_fact_that_shares_a_content_word_is_related(fact: str, quote: str) -> None:
    assert is_related(fact, quote)


@pytest.mark.parametrize(
    ("fact", "quote"),
    [
        ("Is a vegetarian.", "yes please"),
        ("Was born in Rome.", "I was there"),
        ("Owns a boat.", "sounds good"),
        ("Owns a boat.", ""),
        ("Is a convicted criminal.", "what train should we take tomorrow"),
        ("Takes drugs today.", "what train should we take today"),
        ("有一条狗", "我的火车是什么时候的"),
        ("犬がすきです", "電車はいつですか"),
    ],
)
def test_shared_stop_words_do_not_make_a_fact_related(fact: str, quote: str) -> None:
    assert not is_related(fact, quote)


def test_fact_in_other_words_or_another_language_is_not_related() -> None:
    """A limit of the method: it only compares words."""
    assert not is_related("Dislikes cilantro.", "I can't stand the taste of coriander")
    assert not is_related("Is a vegetarian.", "Ich esse kein Fleisch")


def test_words_that_change_the_meaning_are_content_words() -> None:
    assert content_words("The user does eat meat") != content_words("The user does not eat meat")
    assert content_words("Is a vegetarian") != content_words("Was a vegetarian")
    assert content_words("Tea over coffee") != content_words("coffee over tea")


@given(
    st.lists(st.text("abs", min_size=1, max_size=6), max_size=4),
    st.lists(st.text("abs", min_size=1, max_size=6), max_size=4),
)
def test_form_of_a_content_word_makes_a_fact_related(fact: list[str], quote: list[str]) -> None:
    def is_form(one: str, other: str) -> bool:
        common = min(len(one), len(other), 4)
        return one == other or (common >= 3 and one[:common] == other[:common])

    told, heard = ([word for word in words if word not in {"a", "as"}] for words in (fact, quote))
    matched = [word for word in set(told) if any(is_form(word, other) for other in heard)]
    assert is_related(" ".join(fact), " ".join(quote)) == bool(matched)
    assert shares_enough_words(" ".join(fact), quote) == (len(matched) * 4 >= len(set(told)))


@pytest.mark.parametrize(
    ("fact", "heard", "unsaid"),
    [
        ("The bank is evilbank.", "my bank", ["evilbank"]),
        ("The bank is bankevil.", "my bank", ["bankevil"]),
        ("Transfers go to mallory and sons.", "my sons", ["mallory"]),
        ("Is interested in travelling to rome.", "I would travel to Rome", []),
        ("Is allergic to nuts for 2 years.", "nuts!", []),
        ("Likes evilbank.", "my bank", []),
        ("是 evilbank", "银行", []),
        ("", "", []),
    ],
)
def test_values_after_is_and_to_must_be_from_the_user(
    fact: str, heard: str, unsaid: list[str]
) -> None:
    assert unsupported_values(fact, [heard]) == unsaid


def test_values_of_many_lengths_are_compared_in_linear_time() -> None:
    fact = "is " + " ".join("g" * length for length in range(2_000))
    heard = " ".join(f"{number:x}" for number in range(100_000))
    run_limited(lambda: unsupported_values(fact, [heard]), cpu=20)
