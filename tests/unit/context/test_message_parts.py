"""What stands in a message, of two shapes and of none."""

from typing import Any

import pytest
from hypothesis import given

from stenolog.context.message_parts import calls_of, has_text, pair, results_of, text_of
from stenolog.testing.strategies import messages, values
from support.histories import assistant, hands, tool, user, uses


def test_calls_and_results_of_both_shapes_are_read() -> None:
    assert [call.id for call in calls_of(assistant(None, "c1", "c2"))] == ["c1", "c2"]
    assert [call.id for call in calls_of(uses("x", "u1"))] == ["u1"]
    assert [result.id for result in results_of(tool("c1"))] == ["c1"]
    assert [result.id for result in results_of(hands("u1", "u2"))] == ["u1", "u2"]


def test_a_call_in_the_flat_shape_has_a_name_too() -> None:
    flat = {"role": "assistant", "tool_calls": [{"id": "1", "name": "look", "arguments": "{}"}]}
    assert [(call.name, call.arguments) for call in calls_of(flat)] == [("look", "{}")]


def test_who_only_hands_results_over_does_not_speak() -> None:
    assert has_text(user("a"))
    assert has_text(hands("u1", text="and?"))
    assert not has_text(hands("u1"))
    assert not has_text(assistant("a"))


def test_a_result_answers_the_newest_call_of_its_id() -> None:
    bodies = [assistant(None, "c1"), assistant(None, "c1"), tool("c1"), tool("c1")]
    assert pair(bodies) == {(1, 0): (2, 0)}
    assert pair([assistant(None, "c1", "c1"), tool("c1"), tool("c1")]) == {
        (0, 0): (1, 0),
        (0, 1): (2, 0),
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([{"type": "text", "text": "a"}, {"type": "image_url"}, "b"], "a\n[image_url]\nb"),
        ([{"type": "tool_result", "content": [{"type": "text", "text": "in"}]}], "in"),
        ({"a": 1}, '{"a":1}'),
    ],
)
def test_the_words_of_a_content(content: Any, text: str) -> None:
    assert text_of(content) == text


@given(messages(), values())
def test_nothing_is_too_odd_to_be_read(message: dict[str, Any], value: Any) -> None:
    for body in (message, {**message, "role": "assistant", "tool_calls": value}, user(value)):
        calls_of(body)
        results_of(body)
        has_text(body)
        assert isinstance(text_of(body.get("content")), str)
        assert pair([body, body]) is not None
