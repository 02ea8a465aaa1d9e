"""Tests reading JSON from answers with text around it, or with broken JSON."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.providers.json_answers import read_object

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)
objects = st.dictionaries(st.text(), _values, max_size=4)


@given(objects)
def test_valid_json_is_returned_unchanged(given_object: dict[str, Any]) -> None:
    assert read_object(json.dumps(given_object)) == given_object


@given(objects)
def test_code_fence_and_text_around_json_are_ignored(given_object: dict[str, Any]) -> None:
    answer = (
        f"Sure! Here it is:\n```json\n{json.dumps(given_object, indent=1)}\n```\nAnything else?"
    )

    assert read_object(answer) == given_object


@given(st.text() | st.text(alphabet="{}[]\"',:\\ut1ae \n/*"))
def test_no_text_raises_an_error(text: str) -> None:
    assert read_object("{" + text) is None or isinstance(read_object("{" + text), dict)
    assert read_object(text) is None or isinstance(read_object(text), dict)


@given(objects, st.data())
def test_truncated_answer_has_only_complete_values(
    given_object: dict[str, Any], data: st.DataObject
) -> None:
    whole = json.dumps(given_object)
    cut = data.draw(st.integers(0, len(whole)))

    found = read_object(whole[:cut])

    assert found is None or _is_part_of(found, given_object)


@pytest.mark.parametrize("number", ["-", "-1", "1.", "1.5", "1e", "1e+", "1e+1"])
def test_unfinished_number_is_dropped(number: str) -> None:
    assert read_object('{"a": {"b": 1}, "c": [2, ' + number) == {"a": {"b": 1}, "c": [2]}


def _is_part_of(found: Any, whole: Any) -> bool:
    """Return whether it is equal except for parts that are missing at the end."""
    if isinstance(found, dict) and isinstance(whole, dict):
        return all(name in whole and _is_part_of(found[name], whole[name]) for name in found)
    if isinstance(found, list) and isinstance(whole, list):
        return len(found) <= len(whole) and all(map(_is_part_of, found, whole))
    return bool(found == whole)


@pytest.mark.parametrize(
    ("answer", "meant"),
    [
        ('{"a": [1, 2,], }', {"a": [1, 2]}),
        ("{'a': 'it', b: True, c: None}", {"a": "it", "b": True, "c": None}),
        ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
        ('{"a": "two\nlines",}', {"a": "two\nlines"}),
        ('{"a": [{"b": 1}', {"a": [{"b": 1}]}),
        ('{"a": [1, 2}', {"a": [1, 2]}),
        ('{"a": 1, // one\n "b": /* two */ 2,}', {"a": 1, "b": 2}),
        ("{\N{LEFT DOUBLE QUOTATION MARK}a\N{RIGHT DOUBLE QUOTATION MARK}: 1}", {"a": 1}),
        ('{"a": "\\ud83d\\ude00", "b": "\\u00e9",}', {"a": "\N{GRINNING FACE}", "b": "é"}),
        ('{"a": NaN, "b": -Infinity}', {"a": None, "b": None}),
        ('{"a": 1e999,}', {"a": None}),
        ('<think>{"a": 0}</think>{"a": 1}', {"a": 1}),
        ('<think>it is {"a": 1}', {"a": 1}),
        ('{is} not, but {"a": 1} is', {"a": 1}),
        ('{"a": 1} or rather {"a": 1, "b": 2}', {"a": 1, "b": 2}),
    ],
)
def test_common_mistakes_are_repaired(answer: str, meant: dict[str, Any]) -> None:
    assert read_object(answer) == meant


@pytest.mark.parametrize(
    "answer", ["", "no", "[1, 2]", '{"a" "b"}', '{"a": maybe}', "{" * 5_000, "{1: 2}"]
)
def test_text_without_an_object_gives_none(answer: str) -> None:
    assert read_object(answer) is None or read_object(answer) == {}


def test_unfinished_text_is_dropped() -> None:
    answer = '{"facts": [{"text": "eats no meat", "quote": "I eat no meat"}, {"text": "is aller'

    assert read_object(answer) == {
        "facts": [{"text": "eats no meat", "quote": "I eat no meat"}, {}]
    }


def test_partial_number_is_dropped() -> None:
    assert read_object('{"a": 1, "b": 12') == {"a": 1}


def test_endless_nesting_is_not_parsed() -> None:
    assert read_object('{"a":' * 50_000) is None


@pytest.mark.parametrize("answer", [None, 5, b"{}", ["{}"], {"a": 1}])
def test_value_that_is_not_text_gives_none(answer: object) -> None:
    assert read_object(answer) is None


@pytest.mark.parametrize("broken", ['"' + "x" * 300_000 + '"', "[" + "1," * 150_000])
def test_broken_nesting_is_not_read_again_from_every_brace(broken: str) -> None:
    assert read_object("{a:" * 2 + broken + ' ;} {"a": 1}') == {"a": 1}
    assert read_object("{a:" * 9 + broken + ' ;} {"a": 1}') is None
