"""Tests which requests strict providers reject, and that all others are accepted."""

from typing import Any

import pytest
from hypothesis import given

from stenolog.context.request_messages import ProviderRequirements, prepare_messages
from stenolog.testing.model_server_errors import find_fault
from support.histories import sessions
from support.model_requests import tool

USER = {"role": "user", "content": "hello"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}


def calling(*ids: str, **changed: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": "{}"}
    made = [{"id": id, "type": "function", "function": function, **changed} for id in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def request(*messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": list(messages), **fields}


TWO = {**RESULT, "tool_call_id": "c2"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}

FINE = [
    request(USER),
    request(
        {"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "x"}
    ),
    request(USER, calling("c1", "c2"), TWO, RESULT, USER),
    request(USER, calling("c1"), RESULT, calling("c2"), TWO),
    request({"role": "user", "content": [{"type": "text", "text": "this"}, PICTURE]}),
    request(USER, tools=[tool("look"), tool("now")], stream=True, max_tokens=7),
    request(USER, stream=True, stream_options={"include_usage": True}),
]

FAULTS = [
    ("got `array`", []),
    ("`$.messages`", request()),
    ("required field `model`", {"messages": [USER]}),
    ("unknown field `colour`", request(USER, colour="red")),
    ("`$.max_tokens`", request(USER, max_tokens="7")),
    ("only allowed when 'stream'", request(USER, stream_options={"include_usage": True})),
    ("`$.tools`", request(USER, tools=[])),
    ("field `type` - at `$.tools[0]`", request(USER, tools=[{"name": "x"}])),
    ("1 to 64 letters", request(USER, tools=[tool("a b")])),
    ("unique", request(USER, tools=[tool("a"), tool("a")])),
    ("Invalid value 'bot'", request({"role": "bot", "content": "x"})),
    ("field `role`", request({"content": "x"})),
    ("Expected `object`, got `str`", request("hello")),
    ("field `thinking`", request(USER, {"role": "assistant", "content": "x", "thinking": "y"})),
    ("unknown field `seq`", request({**USER, "seq": 1})),
    ("surrogates not allowed", request({**USER, "\ud800": 1})),
    ("unknown field `tool_calls`", request({**USER, "tool_calls": []})),
    ("content must not be empty", request({"role": "user", "content": " \n"})),
    ("field `content`", request({"role": "user"})),
    ("must not be empty", request(USER, {"role": "assistant", "content": " "})),
    ("`$.messages[2]`", request(USER, calling("c1"), {**RESULT, "content": ""})),
    ("`str | array`", request({"role": "user", "content": {"text": "x"}})),
    ("of length >= 1", request({"role": "user", "content": []})),
    ("content[0]`", request({"role": "user", "content": [{"type": "text", "text": ""}]})),
    ("'thinking'", request(USER, {"role": "assistant", "content": [{"type": "thinking"}]})),
    ("Invalid value 'image_url'", request({"role": "system", "content": [PICTURE]})),
    (".tool_calls`", request(USER, {"role": "assistant", "content": "x", "tool_calls": []})),
    (".arguments`", request(USER, calling("c1", function={"name": "x", "arguments": {}}), RESULT)),
    (".name`", request(USER, calling("c1", function={"name": "", "arguments": "{}"}), RESULT)),
    ("value 'tool'", request(USER, calling("c1", type="tool"), RESULT)),
    ("unknown field `index`", request(USER, calling("c1", index=0), RESULT)),
    ("tool_calls[0].id`", request(USER, calling(""), RESULT)),
    ("`tool_call_id`", request(USER, calling("c1"), {"role": "tool", "content": "x"})),
    ("did not have response messages: c1", request(USER, calling("c1"))),
    ("did not have response messages: c2", request(USER, calling("c1", "c2"), RESULT, USER, TWO)),
    ("No open tool call", request(USER, calling("c2"), TWO, RESULT)),
    ("No open tool call", request(USER, calling("c1"), RESULT, RESULT)),
    ("Duplicate tool call id", request(USER, calling("c1"), RESULT, calling("c1"), RESULT)),
    ("Duplicate tool call id", request(USER, calling("c1", "c1"), RESULT, RESULT)),
]


@pytest.mark.parametrize("fine", FINE, ids=range(len(FINE)))
def test_valid_requests_pass(fine: Any) -> None:
    assert find_fault(fine) is None


@pytest.mark.quick(8)
@pytest.mark.parametrize(("words", "wrong"), FAULTS, ids=[words for words, _ in FAULTS])
def test_invalid_requests_are_rejected(words: str, wrong: Any) -> None:
    found = find_fault(wrong)
    assert found is not None
    assert words in found


@given(sessions())
def test_every_window_is_a_valid_request(said: list[dict[str, Any]]) -> None:
    assert find_fault(request(*prepare_messages(said, ProviderRequirements()))) is None
