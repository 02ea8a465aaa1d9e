"""Messages of other shapes become messages of the chat shape; what has no place stays beside."""

import json
from typing import Any

import pytest

from stenolog.context.request_messages import ProviderRequirements, prepare_messages
from stenolog.transfer.importers import adk, langchain, openai_agents, strands
from stenolog.transfer.importers.chat_format import ImportProblems, NotAMessage
from support.import_sources import said

IMAGE = "data:image/png;base64,aGk="


def call(id: str | None, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# --- items of the OpenAI Agents SDK ----------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}),
        (
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "hi", "annotations": []}],
            },
            {
                "role": "assistant",
                "content": "hi",
                "openai_agents": {"id": "msg_1", "status": "completed"},
            },
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "what is it?"},
                    {"type": "input_image", "image_url": IMAGE, "detail": "low"},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is it?"},
                    {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}},
                ],
            },
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call("c", "f", "{}")],
                "openai_agents": {"id": "fc"},
            },
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "x = 1"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call("c", "f", '{"input": "x = 1"}')],
                "openai_agents": {"type": "custom_tool_call"},
            },
        ),
        (
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [
                    {"type": "input_text", "text": "a"},
                    {"type": "input_text", "text": "b"},
                ],
            },
            {
                "role": "tool",
                "tool_call_id": "c",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
        ),
        (
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [{"type": "summary_text", "text": "I think."}],
                "encrypted_content": "gAAA",
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "I think.",
                "openai_agents": {
                    "type": "reasoning",
                    "id": "rs",
                    "summary": [{"type": "summary_text", "text": "I think."}],
                    "encrypted_content": "gAAA",
                },
            },
        ),
    ],
)
def test_each_item_becomes_one_message(item: dict[str, Any], expected: dict[str, Any]) -> None:
    report = ImportProblems()
    assert openai_agents.message_of(item, report) == expected
    assert report.problems() == ()


def test_unknown_item_is_kept_and_reported() -> None:
    report = ImportProblems()
    item = {"type": "web_search_call", "id": "ws", "status": "completed"}
    found = [openai_agents.message_of(item, report) for _ in range(2)]
    assert found[0] == {"role": "assistant", "content": None, "openai_agents": item}
    words = "stored, but not shown to models: 2 web_search_call"
    assert report.problems() == (words,)
    assert report.dropped == 0
    assert prepare_messages(found, ProviderRequirements()) == []


def test_unknown_part_is_kept_in_extra_field() -> None:
    report = ImportProblems()
    parts = [{"type": "input_text", "text": "see"}, {"type": "hologram", "data": 7}]
    message = openai_agents.message_of({"role": "user", "content": parts}, report)
    assert message == {"role": "user", "content": "see", "openai_agents": {"content": parts}}
    assert "not shown to models: 1 hologram" in report.problems()[0]


def test_parallel_calls_give_a_valid_window_in_order() -> None:
    items = [
        {"role": "user", "content": "both"},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "function_call_output", "call_id": "b", "output": "2"},
    ]
    found = [openai_agents.message_of(item, ImportProblems()) for item in items]
    sent = [
        (body["role"], body.get("tool_call_id") or [c["id"] for c in body.get("tool_calls", [])])
        for body in prepare_messages(found, ProviderRequirements())
    ]
    assert sent == [
        ("user", []),
        ("assistant", ["a"]),
        ("tool", "a"),
        ("assistant", ["b"]),
        ("tool", "b"),
    ]


# --- LangChain -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "data", "expected"),
    [
        (
            "human",
            {"content": "hi", "name": "ada"},
            {"role": "user", "content": "hi", "name": "ada"},
        ),
        ("system", {"content": "be"}, {"role": "system", "content": "be"}),
        (
            "system",
            {"content": "be", "additional_kwargs": {"__openai_role__": "developer"}},
            {
                "role": "developer",
                "content": "be",
                "langchain": {"additional_kwargs": {"__openai_role__": "developer"}},
            },
        ),
        ("chat", {"content": "x", "role": "user"}, {"role": "user", "content": "x"}),
        (
            "AIMessageChunk",
            {"content": "x", "id": "run-1"},
            {
                "role": "assistant",
                "content": "x",
                "langchain": {"id": "run-1", "type": "AIMessageChunk"},
            },
        ),
        (
            "ai",
            {
                "content": [
                    {"type": "text", "text": "let me see"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"q": "é"}},
                ],
                "tool_calls": [{"name": "f", "args": {"q": "é"}, "id": "c", "type": "tool_call"}],
                "usage_metadata": {"input_tokens": 3},
            },
            {
                "role": "assistant",
                "content": "let me see",
                "tool_calls": [call("c", "f", '{"q": "é"}')],
                "langchain": {
                    "usage_metadata": {"input_tokens": 3},
                    "content": [
                        {"type": "text", "text": "let me see"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"q": "é"}},
                    ],
                },
            },
        ),
        (
            "ai",
            {"content": "", "invalid_tool_calls": [{"name": "f", "args": "{bad", "id": "c"}]},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call("c", "f", "{bad")],
                "langchain": {"invalid_tool_calls": [{"name": "f", "args": "{bad", "id": "c"}]},
            },
        ),
        (
            "ai",
            {
                "content": "",
                "additional_kwargs": {"function_call": {"name": "f", "arguments": "{}"}},
            },
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [call(None, "f", "{}")],
                "langchain": {
                    "additional_kwargs": {"function_call": {"name": "f", "arguments": "{}"}}
                },
            },
        ),
        ("function", {"content": "1", "name": "f"}, {"role": "tool", "content": "1", "name": "f"}),
        (
            "human",
            {"content": [{"type": "image", "base64": "aGk=", "mime_type": "image/png"}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]},
        ),
    ],
)
def test_langchain_messages_are_converted(
    kind: str, data: dict[str, Any], expected: dict[str, Any]
) -> None:
    report = ImportProblems()
    message = langchain.message_of({"type": kind, "data": data}, report)
    if kind == "chat":
        assert message.pop("langchain") == {"role": "user", "type": "chat"}
    if kind == "function":
        message.pop("langchain", None)
    assert message == expected
    assert report.problems() == ()


@pytest.mark.parametrize("given", [{}, {"type": "ai"}, {"type": "remove", "data": {}}])
def test_invalid_langchain_messages_are_rejected(given: dict[str, Any]) -> None:
    with pytest.raises(NotAMessage):
        langchain.message_of(given, ImportProblems())


# --- Strands ---------------------------------------------------------------------------------


def test_tool_results_precede_text_of_same_user_message() -> None:
    blocks = [
        {"text": "and now?"},
        {"toolResult": {"toolUseId": "a", "status": "error", "content": [{"text": "no"}]}},
        {"toolResult": {"toolUseId": "b", "content": [{"json": {"n": 1}}]}},
        {"cachePoint": {"type": "default"}},
    ]
    report = ImportProblems()
    found = strands.messages_of({"role": "user", "content": blocks}, report)
    assert found == [
        {"role": "tool", "tool_call_id": "a", "content": "no", "strands": {"status": "error"}},
        {
            "role": "tool",
            "tool_call_id": "b",
            "content": '{"n": 1}',
            "strands": {"result": [{"json": {"n": 1}}]},
        },
        {"role": "user", "content": "and now?", "strands": {"content": blocks}},
    ]
    assert report.problems() == ()


def test_strands_thinking_images_and_unknown_blocks() -> None:
    encoded = {"__bytes_encoded__": True, "data": "aGk="}
    blocks = [
        {"reasoningContent": {"reasoningText": {"text": "hm", "signature": "s"}}},
        {"image": {"format": "png", "source": {"bytes": encoded}}},
        {"hologram": {}},
    ]
    report = ImportProblems()
    message = {"role": "assistant", "content": blocks, "metadata": {"usage": {"inputTokens": 1}}}
    assert strands.messages_of(message, report) == [
        {
            "role": "assistant",
            "content": [{"type": "image_url", "image_url": {"url": IMAGE}}],
            "reasoning_content": "hm",
            "strands": {"metadata": {"usage": {"inputTokens": 1}}, "content": blocks},
        }
    ]
    assert "not shown to models: 1 hologram" in report.problems()[0]


# --- ADK -------------------------------------------------------------------------------------


def test_parts_of_an_event_are_converted() -> None:
    report = ImportProblems()
    event = said(
        0,
        {"text": "thinking", "thought": True},
        {"text": "Look: "},
        {"inline_data": {"mime_type": "image/png", "data": "aGk="}},
        {"function_call": {"id": "c", "name": "f", "args": {"a": 1}}},
        author="agent",
        actions={"state_delta": {"k": 1}, "artifact_delta": {}},
    )
    assert adk.messages_of(event, report) == [
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Look: "},
                {"type": "image_url", "image_url": {"url": IMAGE}},
            ],
            "reasoning_content": "thinking",
            "tool_calls": [call("c", "f", '{"a": 1}')],
            "adk": {
                "id": "0",
                "author": "agent",
                "invocation_id": "i0",
                "actions": {"state_delta": {"k": 1}},
            },
        }
    ]
    assert report.problems() == ()


def test_unknown_event_part_is_kept_and_reported() -> None:
    report = ImportProblems()
    event = said(0, {"executable_code": {"code": "1 + 1"}}, {"text": "x"}, author="agent")
    [message] = adk.messages_of(event, report)
    assert message["content"] == "x"
    assert message["adk"]["content"] == event["content"]
    assert "not shown to models: 1 executable_code" in report.problems()[0]


def test_state_only_event_is_not_a_user_message() -> None:
    report = ImportProblems()
    event = said(0, actions={"state_delta": {"k": 1}})
    found = adk.messages_of(event, report)
    assert [message["role"] for message in found] == ["assistant"]
    assert prepare_messages(found, ProviderRequirements()) == []
    assert found[0]["adk"]["actions"] == {"state_delta": {"k": 1}}


def test_rewound_events_are_hidden_and_nested_rewinds_ignored() -> None:
    turns = [said(n, {"text": str(n)}) for n in range(6)]
    first = said(6, actions={"rewind_before_invocation_id": "i2"}, content=None, invocation_id="r1")
    second = said(7, actions={"rewind_before_invocation_id": "i1"}, content=None)
    events = [adk.Event(str(n), fields) for n, fields in enumerate([*turns, first, second])]
    messages, _ = adk.read_events(events, ImportProblems())
    assert [message.hidden for message in messages] == [False] * 2 + [True] * 6
    unknown = said(2, actions={"rewind_before_invocation_id": "never"})
    events = [adk.Event(str(n), fields) for n, fields in enumerate([*turns[:2], unknown])]
    messages, _ = adk.read_events(events, ImportProblems())
    assert [message.hidden for message in messages] == [False] * 2 + [True]


def _compacted(number: int, first: int, last: int, text: str) -> dict[str, Any]:
    compaction = {
        "start_timestamp": said(first)["timestamp"],
        "end_timestamp": said(last)["timestamp"],
        "compacted_content": {"role": "model", "parts": [{"text": text}]},
    }
    return said(number, actions={"compaction": compaction}, content=None, author="agent")


def test_compacted_events_are_hidden_and_summaries_joined() -> None:
    fields = [said(n, {"text": str(n)}) for n in range(6)]
    fields += [
        _compacted(6, 0, 1, "one"),
        _compacted(7, 0, 2, "one and two"),
        _compacted(8, 3, 3, "three"),
    ]
    messages, summary = adk.read_events(
        [adk.Event(str(n), one) for n, one in enumerate(fields)], ImportProblems()
    )
    # A summary inside another is said by that one.
    assert summary == "one and two\n\nthree"
    assert [message.hidden for message in messages] == [True] * 4 + [False] * 5


def test_partial_events_are_skipped() -> None:
    events = [adk.Event("0", said(0, {"text": "h"}, partial=True))]
    assert adk.read_events(events, ImportProblems())[0] == []


# --- the report ------------------------------------------------------------------------------


def test_only_first_problems_are_listed_and_rest_counted() -> None:
    report = ImportProblems()
    for number in range(1_000):
        report.report_dropped(f"message {number} is not a JSON object")
    assert report.dropped == 1_000
    assert len(report.problems()) == 21
    assert report.problems()[-1] == "and 980 more like these"


def test_reported_problems_are_shortened() -> None:
    report = ImportProblems()
    report.report_dropped("x" * 10_000)
    report.report_loss("y" * 10_000)
    for number in range(100):
        report.count_unseen(f"{number}" * 1_000)
    assert sum(map(len, report.problems())) < 3_000


def test_message_that_cannot_be_stored_is_reported() -> None:
    report = ImportProblems()
    assert report.encode(json.loads('{"role": "user", "n": NaN}'), None, "message 3") == []
    assert report.problems() == ("message 3: n: nan has no place in JSON",)
