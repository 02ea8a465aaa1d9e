"""Tests the parts of messages of every shape, and of malformed ones."""

from typing import Any, Final

import pytest
from hypothesis import given

from stenolog.messages import (
    FilePart,
    ImagePart,
    Part,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolResult,
    UnknownPart,
    calls_of,
    encoded_data,
    has_text,
    pair_calls,
    read_content,
    read_message,
    results_of,
    text_of,
    unread_fields,
)
from support.histories import assistant, hands, tool, user, uses
from support.message_samples import SAMPLES
from support.strategies import messages, values

PNG: Final = "data:image/png;base64,iVBORw0KGgo="
URL: Final = "https://example.org/cat.png"
PARTS: Final[dict[str, list[tuple[Any, ...]]]] = {
    "chat: string": [("text", "Is it raining in Porto?")],
    "chat: empty": [],
    "chat: text parts": [("text", "one"), ("text", "two")],
    "chat: plain strings": [("text", "one"), ("text", "two")],
    "chat: system": [("text", "Be brief.")],
    "chat: image": [("text", "What is this?"), ("image", PNG, ""), ("image", URL, "low")],
    "chat: audio": [("audio", "", None)],
    "chat: file": [("file", "plan.pdf", None)],
    "chat: video": [("video", "", None)],
    "chat: refusal part": [("text", "I cannot help with that.")],
    "chat: refusal": [("text", "I cannot help with that.")],
    "chat: spoken answer": [("audio", "", "It is raining.")],
    "chat: call": [("call", "c1", "weather", '{"city": "Porto"}')],
    "chat: custom call": [("call", "c1", "shell", "ls -l")],
    "chat: flat call": [("text", ""), ("call", "c1", "weather", {"city": "Porto"})],
    "chat: old call": [("call", None, "weather", '{"city": "Porto"}')],
    "chat: result": [("result", "c1", '{"sky": "rain"}')],
    "chat: result of parts": [
        ("result", "c1", [{"type": "text", "text": "rain"}, {"type": "text", "text": "wind"}])
    ],
    "chat: old result": [("result", None, '{"sky": "rain"}')],
    "chat: reasoning content": [("thinking", "Let me see."), ("text", "42")],
    "chat: reasoning": [("thinking", "Let me see."), ("text", "42")],
    "chat: thinking field": [("thinking", "Let me see."), ("text", "42")],
    "chat: reasoning details": [("thinking", "Let me see."), ("text", "42")],
    "chat: reasoning twice": [
        ("thinking", "Let me see."),
        ("thinking", "Let me see."),
        ("text", "42"),
    ],
    "chat: thinking blocks": [("thinking", "Let me see."), ("text", "42")],
    "anthropic: thinking": [("thinking", "Let me see."), ("text", "42")],
    "anthropic: redacted thinking": [("thinking", ""), ("text", "42")],
    "anthropic: tool use": [
        ("text", "I look it up."),
        ("call", "u1", "weather", {"city": "Porto"}),
    ],
    "anthropic: tool result": [("result", "u1", "rain")],
    "anthropic: image base64": [("image", PNG, "")],
    "anthropic: image address": [("image", URL, "")],
    "anthropic: document": [("file", "Plan", None)],
    "anthropic: text document": [("file", "Notes", "The pass is closed.")],
    "anthropic: document of blocks": [
        ("file", "", [{"type": "text", "text": "The pass is closed."}])
    ],
    "anthropic: search result": [
        ("file", "Passes", [{"type": "text", "text": "The pass is closed."}])
    ],
    "responses: input message": [
        ("text", "What is this?"),
        ("image", URL, "low"),
        ("file", "plan.pdf", None),
    ],
    "responses: output message": [("text", "A cat.")],
    "responses: reasoning item": [("thinking", "Let me see.")],
    "responses: function call": [("call", "c1", "weather", '{"city": "Porto"}')],
    "responses: function call output": [("result", "c1", '{"sky": "rain"}')],
    "responses: custom tool call": [("call", "c1", "shell", "ls -l")],
    "responses: custom tool call output": [
        ("result", "c1", [{"type": "input_text", "text": "total 0"}])
    ],
    "responses: web search call": [
        ("call", "ws_1", "web_search", {"action": {"type": "search", "query": "pass"}})
    ],
    "responses: mcp call": [
        ("call", "mcp_1", "find", '{"q": 1}'),
        ("result", "mcp_1", "nothing found"),
    ],
    "responses: computer call output": [
        ("result", "c1", {"type": "computer_screenshot", "image_url": URL})
    ],
    "responses: item reference": [("unknown", "item_reference")],
    "responses: compaction": [("unknown", "compaction")],
    "odd: nothing": [],
    "odd: unknown part": [("unknown", "place")],
    "odd: unknown part with text": [("unknown", "verse")],
    "odd: part without type": [("text", "one"), ("unknown", ""), ("unknown", "")],
    "odd: inline data": [("unknown", "")],
    "odd: numbers": [("unknown", "")] * 4,
    "odd: lists in lists": [("unknown", "")] * 2,
    "odd: part instead of parts": [("text", "one")],
    "odd: object instead of parts": [("unknown", "")],
    "odd: number instead of parts": [("unknown", "")],
    "odd: calls of wrong types": [
        ("text", "x"),
        ("unknown", "tool_calls"),
        ("call", None, "unknown", None),
        ("unknown", "tool_calls"),
    ],
    "odd: no list of calls": [("text", "x"), ("unknown", "tool_calls")],
    "odd: reasoning of a wrong type": [("unknown", "reasoning"), ("text", "x")],
    "odd: types of wrong types": [
        ("unknown", "text"),
        ("unknown", ""),
        ("image", "", ""),
        ("result", None, {"a": 1}),
        ("audio", "", None),
    ],
    "odd: other fields": [("text", "x")],
    "odd: unknown role": [("text", "Once upon a time.")],
}


def _short(part: Part) -> tuple[Any, ...]:
    match part:
        case TextPart():
            return ("text", part.text)
        case ThinkingPart():
            return ("thinking", part.text)
        case ImagePart():
            return ("image", part.url, part.detail)
        case FilePart():
            return (part.kind, part.name, part.content)
        case ToolCall():
            return ("call", part.id, part.name, part.arguments)
        case ToolResult():
            return ("result", part.id, part.content)
        case UnknownPart():
            return ("unknown", part.type)


@pytest.mark.parametrize("name", PARTS)
def test_each_shape_is_read_as_typed_parts(name: str) -> None:
    assert [_short(part) for part in read_message(SAMPLES[name])] == PARTS[name]


def test_tool_run_by_the_provider_has_a_call_and_a_result() -> None:
    parts = [*read_message(SAMPLES["anthropic: server tool"])]
    assert [type(part) for part in parts] == [ToolCall, ToolResult, TextPart]
    image = [*read_message(SAMPLES["responses: image generation call"])]
    assert [type(part) for part in image] == [ToolCall, ToolResult]
    assert isinstance(image[1], ToolResult)
    assert [_short(part) for part in read_content(image[1].content)] == [("image", PNG, "")]


def test_nested_blocks_of_a_result_are_read_by_the_same_function() -> None:
    [result, text] = read_message(SAMPLES["anthropic: tool result of blocks"])
    assert isinstance(result, ToolResult)
    assert result.is_error
    assert [_short(part) for part in read_content(result.content)] == [
        ("text", "rain"),
        ("image", PNG, ""),
    ]
    assert _short(text) == ("text", "and now?")


@pytest.mark.parametrize("name", SAMPLES)
def test_every_field_is_read_or_reported_as_unread(name: str) -> None:
    body = SAMPLES[name]
    rest = unread_fields(body)
    assert rest.items() <= body.items()
    if name == "odd: other fields":
        assert rest == {"name": "ana", "place": {"city": "Porto"}}
    if name == "responses: reasoning item":
        assert rest == {"encrypted_content": "c2VjcmV0"}
    if name in ("responses: function call", "responses: web search call"):
        assert rest == {}


@given(values())
def test_no_part_of_a_content_is_dropped(value: Any) -> None:
    parts = [value, {"type": value}, {"type": "text", "text": value}, "text", {}]
    kinds = ("image", "document", "thinking", "tool_use", "tool_result", "x_call", "refusal")
    parts += [{"type": kind, "source": value, "content": value} for kind in kinds]
    found = [part.value for part in read_content(parts)]
    assert [any(one is part for one in found) for part in parts] == [True] * len(parts)


def test_encoded_data_is_found_with_its_media_type() -> None:
    assert encoded_data({"inline_data": {"mime_type": "image/png", "data": "AAAA"}}) == (
        "image/png",
        "AAAA",
    )
    assert encoded_data({"type": "input_file", "file_data": "AAAA"}) == ("", "AAAA")
    assert encoded_data({"data": 7}) == ("", "")


def test_calls_and_results_of_chat_and_anthropic_messages_are_read() -> None:
    assert [call.id for call in calls_of(assistant(None, "c1", "c2"))] == ["c1", "c2"]
    assert [call.id for call in calls_of(uses("x", "u1"))] == ["u1"]
    assert [result.id for result in results_of(tool("c1"))] == ["c1"]
    assert [result.id for result in results_of(hands("u1", "u2"))] == ["u1", "u2"]


def test_tool_call_in_flat_form_is_read() -> None:
    flat = {"role": "assistant", "tool_calls": [{"id": "1", "name": "look", "arguments": "{}"}]}
    assert [(call.name, call.arguments) for call in calls_of(flat)] == [("look", "{}")]


def test_a_user_message_with_only_tool_results_has_no_text() -> None:
    assert has_text(user("a"))
    assert has_text(hands("u1", text="and?"))
    assert not has_text(hands("u1"))
    assert not has_text(assistant("a"))


def test_a_result_answers_the_newest_call_of_its_id() -> None:
    bodies = [assistant(None, "c1"), assistant(None, "c1"), tool("c1"), tool("c1")]
    assert pair_calls(bodies) == {(1, 0): (2, 0)}
    assert pair_calls([assistant(None, "c1", "c1"), tool("c1"), tool("c1")]) == {
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
def test_text_of_content_is_extracted(content: Any, text: str) -> None:
    assert text_of(content) == text


@given(messages(), values())
def test_reader_accepts_every_message(message: dict[str, Any], value: Any) -> None:
    for body in (message, {**message, "role": "assistant", "tool_calls": value}, user(value)):
        calls_of(body)
        results_of(body)
        has_text(body)
        list(read_message(body))
        unread_fields(body)
        assert isinstance(text_of(body.get("content")), str)
        assert pair_calls([body, body]) is not None
