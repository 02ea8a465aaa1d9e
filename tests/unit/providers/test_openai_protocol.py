"""Tests requests after a rejection, and parsing of stream chunks of every known shape."""

import json
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.providers.chat_model import Delta, StreamedAnswer, ToolCallDelta, Usage
from stenolog.providers.openai_protocol import (
    NO_TOOLS_NOTICE,
    ChunkReader,
    ServerQuirks,
    _CallParser,
)
from stenolog.providers.request_errors import Failure
from stenolog.testing.model_server_errors import find_fault
from stenolog.testing.scripted_model import tool_call
from support.model_requests import messages, tool


def reader() -> ChunkReader:
    numbers = count(1)
    return ChunkReader(new_id=lambda: f"new_{next(numbers)}")


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


def read(*chunks: Any) -> StreamedAnswer:
    reading, reply = reader(), StreamedAnswer()
    for chunk in chunks:
        found = reading.read_event(chunk if isinstance(chunk, str) else json.dumps(chunk))
        if found is not None:
            reply.add(found)
    last = reading.read_rest()
    if last is not None:
        reply.add(last)
    return reply


def call(index: Any = None, *, id: Any = None, name: Any = None, arguments: Any = None) -> Any:
    made: dict[str, Any] = {"function": {}}
    if index is not None:
        made["index"] = index
    if id is not None:
        made["id"] = id
    if name is not None:
        made["function"]["name"] = name
    if arguments is not None:
        made["function"]["arguments"] = arguments
    return made


def calls(reply: StreamedAnswer) -> list[tuple[str, str, str]]:
    return [
        (one["id"], one["function"]["name"], one["function"]["arguments"]) for one in reply.calls
    ]


def test_events_without_content_are_skipped() -> None:
    reading = reader()
    for nothing in (
        "",
        " ",
        "{}",
        '{"choices": []}',
        '{"choices": null}',
        '{"choices": [{"index": 0, "delta": null}]}',
        json.dumps(delta(role="assistant", content="")),
        json.dumps(delta(content=None, tool_calls=None)),
    ):
        assert reading.read_event(nothing) is None
    assert (reading.done, reading.finished, reading.read_rest()) == (False, False, None)
    assert reading.read_event("[DONE]") is None
    assert (reading.done, reading.finished, reading.read_rest()) == (True, False, None)


def test_only_the_first_choice_is_read() -> None:
    first = {"index": 0, "delta": {"content": "yes"}}
    other = {"index": 1, "delta": {"content": "no"}}
    assert read({"choices": [other]}, {"choices": [other, first]}).text == "yes"


def test_finish_reason_is_sent_once() -> None:
    reading = reader()
    ended = '{"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"length"}]}'
    first, again = reading.read_event(ended), reading.read_event(ended)
    assert first is not None
    assert first.finish == "length"
    assert again is not None
    assert again.finish == ""
    assert reading.finished


def test_last_reported_usage_counts() -> None:
    told = read(
        {**delta(content="a"), "usage": {"prompt_tokens": 5, "completion_tokens": 1}},
        {**delta(content="b"), "usage": None},
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 5,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 3},
            },
        },
    )
    assert told.usage == Usage(prompt=5, answer=2, cached=3)
    cached = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_cache_hit_tokens": 8}
    assert read({"choices": [], "usage": cached}).usage == Usage(prompt=9, answer=1, cached=8)


@pytest.mark.parametrize(
    "usage", [None, {}, [], "many", {"prompt_tokens": "x"}, {"prompt_tokens": -1}]
)
def test_empty_usage_is_none(usage: Any) -> None:
    assert read({"choices": [], "usage": usage}).usage is None


def test_content_parts_and_their_reasoning_are_read() -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    reply = read(delta(content=[thinking]), delta(content=[{"type": "text", "text": "yes"}, 7]))
    assert (reply.reasoning, reply.text) == ("hm", "yes")


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_separate_from_the_answer(field: str) -> None:
    reply = read(delta(**{field: "hm"}), delta(content="yes"))
    assert (reply.reasoning, reply.text) == ("hm", "yes")


def test_duplicate_reasoning_is_read_once() -> None:
    assert read(delta(reasoning="hm", reasoning_content="hm")).reasoning == "hm"


def test_refusal_is_part_of_the_text() -> None:
    assert read(delta(refusal="I will not.")).text == "I will not."


# --- tool calls ------------------------------------------------------------------------------


def test_call_parts_are_joined_by_index() -> None:
    reply = read(
        delta(tool_calls=[call(0, id="a", name="x", arguments="")]),
        delta(tool_calls=[call(1, id="b", name="y", arguments='{"n"')]),
        delta(tool_calls=[call(0, arguments='{"m":')]),
        delta(tool_calls=[call(0, arguments=" 1}"), call(1, arguments=": 2}")]),
    )
    assert calls(reply) == [("a", "x", '{"m": 1}'), ("b", "y", '{"n": 2}')]


def test_parts_with_the_same_id_are_one_call() -> None:
    parts = [call(0, id="a", name="x", arguments=piece) for piece in ('{"m":', " 1}")]
    assert calls(read(*(delta(tool_calls=[part]) for part in parts))) == [("a", "x", '{"m": 1}')]


def test_calls_with_index_0_are_separated() -> None:
    by_id = [call(0, id=id, name="x", arguments="{}") for id in "ab"]
    assert calls(read(*(delta(tool_calls=[one]) for one in by_id))) == [
        ("a", "x", "{}"),
        ("b", "x", "{}"),
    ]
    without = [call(0, name="x", arguments=given) for given in ('{"n": 1}', '{"n": 2}')]
    assert calls(read(delta(tool_calls=without))) == [
        ("new_1", "x", '{"n": 1}'),
        ("new_2", "x", '{"n": 2}'),
    ]


def test_calls_without_an_index_are_separated_by_id_or_name() -> None:
    reply = read(
        delta(tool_calls=[call(id="a", name="x", arguments="{")]),
        delta(tool_calls=[call(arguments='"n": 1')]),
        delta(tool_calls=[call(id="b", name="y", arguments="{")]),
        delta(tool_calls=[call(id="a", arguments="}")]),
        delta(tool_calls=[call(id="b", arguments="}")]),
        delta(tool_calls=[call(name="z", arguments="{}")]),
        delta(tool_calls=[call(name="z", arguments="{}")]),
    )
    assert calls(reply) == [
        ("a", "x", '{"n": 1}'),
        ("b", "y", "{}"),
        ("new_1", "z", "{}"),
        ("new_2", "z", "{}"),
    ]


def test_object_arguments_become_text() -> None:
    assert calls(read(delta(tool_calls=[call(0, id="a", name="x", arguments={"n": 1})]))) == [
        ("a", "x", '{"n": 1}')
    ]


def test_half_a_surrogate_pair_is_replaced() -> None:
    halves = '{"choices":[{"delta":{"content":"%s"}}]}'
    assert read(halves % "a\\ud83d\\ude00b").text == "a\N{GRINNING FACE}b"
    assert read(halves % "a\\ud83d", halves % "b").text == "a\ufffdb"
    assert read(halves % "\\ude00").text == "\ufffd"


# --- invalid chunks --------------------------------------------------------------------------

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "delta",
                    "index",
                    "content",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "id",
                    "usage",
                    "finish_reason",
                    "prompt_tokens",
                    "reasoning",
                    "error",
                    "message",
                    "type",
                    "text",
                ]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=12,
)


def _trouble(way: str, text: str) -> str | None:
    try:
        getattr(reader(), way)(text)
    except Failure as trouble:
        return trouble.description
    return None


@given(JSON)
def test_every_chunk_is_parsed_or_raises_a_request_error(sent: Any) -> None:
    chunk = json.dumps({"choices": [{"delta": sent, "finish_reason": sent}], "usage": sent})
    for text in (json.dumps(sent), chunk):
        for way in ("read_event", "read_complete"):
            found = _trouble(way, text)
            assert found is None or "malformed" in found or "error" in found


def test_complete_answer_with_an_error_or_no_choices_raises() -> None:
    with pytest.raises(Failure, match="no such model"):
        reader().read_complete('{"error": {"message": "no such model"}}')
    for nothing in ("{}", "[]", '{"choices": []}', "null"):
        with pytest.raises(Failure, match="malformed answer"):
            reader().read_complete(nothing)


def test_extra_fields_of_a_call_are_kept_and_storable() -> None:
    first = {**call(0, id="a", name="look"), "type": "function", "extra_content": {"s": "1"}}
    later = {**call(0, arguments="{}"), "note": "\ud83d\ude00\ud83d", "none": None}
    odd = '{"choices":[{"delta":{"tool_calls":[{"index":0,"n":NaN,"deep":{"m":NaN}}]}}]}'
    reply = read(delta(tool_calls=[first]), delta(tool_calls=[later]), odd)
    assert reply.calls == [
        {
            "extra_content": {"s": "1"},
            "note": "\N{GRINNING FACE}\ufffd",
            "n": None,
            "deep": {"m": None},
            "id": "a",
            "type": "function",
            "function": {"name": "look", "arguments": "{}"},
        }
    ]


def test_malformed_reasoning_details_are_skipped() -> None:
    said = {"type": "reasoning.text", "text": "It is "}
    odd: Any
    for odd in (None, "x", 7, {}, ["x", None]):
        reply = read(delta(reasoning_details=odd), delta(reasoning_details=[said]))
        assert reply.details == [said]
    apart = [said, {"type": "reasoning.summary", "summary": "a"}, said, {**said, "index": 1}]
    assert read(*(delta(reasoning_details=[one]) for one in apart)).details == apart


class Piece(str):
    """A text that must not be appended to another: a long one would be copied each time."""

    def __radd__(self, other: object) -> str:
        raise AssertionError(f"{self!r} was put behind a text")


def test_many_pieces_are_joined_once() -> None:
    reply = StreamedAnswer()
    part = ToolCallDelta(index=0, id="a", name="look", arguments=Piece("x"))
    detail = {"type": "reasoning.text", "text": "t"}
    for _ in range(3):
        reply.add(Delta(text=Piece("a"), reasoning=Piece("b"), details=(detail,), calls=(part,)))
    assert (reply.text, reply.reasoning) == ("aaa", "bbb")
    assert calls(reply) == [("a", "look", "xxx")]
    reply.add(Delta(text=Piece("c"), details=(detail,), calls=(part,)))
    message = reply.message()
    reply.add(Delta(text="d", details=(detail,), calls=(part,)))
    assert message["content"] == "aaac"
    assert message["reasoning_details"] == [{**detail, "text": "tttt"}]
    assert message["tool_calls"][0]["function"]["arguments"] == "xxxx"
    assert (reply.text, reply.details) == ("aaacd", [{**detail, "text": "ttttt"}])


def test_pieces_of_a_call_are_joined_when_read() -> None:
    found = _CallParser(lambda: "new")
    for piece in ("{", "}"):
        function = {"name": "", "arguments": Piece(piece)}
        assert found.parse_part({"index": 0, "function": function}).index == 0
    again = {"index": 0, "function": {"name": "look", "arguments": "{}"}}
    assert found.parse_part(again).index == 1


NOT_9 = Failure(
    "answered 400: Tool call id was call_a but must be a-z, A-Z, 0-9, with a length of 9.", 400
)
NO_TOOL = Failure("answered 400: gemma does not support tools", 400)


def request(*further: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [*messages("look"), *further],
        "tools": [tool("look"), tool("now")],
    }


def called(*ids: str, content: Any = None) -> list[dict[str, Any]]:
    calls = [tool_call("look", {"at": id}, id=id) for id in ids]
    results = [{"role": "tool", "tool_call_id": id, "content": f"saw {id}"} for id in ids]
    return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]


def test_calls_and_results_become_text_without_tools() -> None:
    said = {"role": "assistant", "content": "Both are high."}
    parts = [{"type": "text", "text": "I look."}, {"type": "image_url", "image_url": {}}]
    sent = request(*called("a", "b"), said, *messages("again"), *called("c", content=parts))
    fallbacks = ServerQuirks()
    assert fallbacks.learn_from(sent, NO_TOOL) == NO_TOOLS_NOTICE
    made = fallbacks.apply_changes(sent)
    assert made == {
        "model": "m",
        "messages": [
            *messages("look"),
            {
                "role": "assistant",
                "content": '[called the tool look with {"at": "a"}]\n'
                '[called the tool look with {"at": "b"}]',
            },
            *messages("[the tool answered: saw a]\n[the tool answered: saw b]"),
            said,
            *messages("again"),
            {"role": "assistant", "content": 'I look.\n[called the tool look with {"at": "c"}]'},
            *messages("[the tool answered: saw c]"),
        ],
    }
    assert find_fault(made) is None
    assert sent["messages"][1]["tool_calls"]


def test_short_ids_are_the_same_in_every_request() -> None:
    sent = request(*called("call_a", "abcDEF123"))
    fallbacks = ServerQuirks()
    assert fallbacks.learn_from(sent, NOT_9) == ""
    made = fallbacks.apply_changes(sent)
    ids = [call["id"] for call in made["messages"][1]["tool_calls"]]
    assert ids == [message["tool_call_id"] for message in made["messages"][2:]]
    assert [len(id) for id in ids] == [9, 9]
    assert ids[0].isalnum()
    assert ids[1] == "abcDEF123"
    assert find_fault(made) is None
    assert (
        fallbacks.apply_changes(request(*called("call_a")))["messages"][2]["tool_call_id"] == ids[0]
    )


@pytest.mark.parametrize(
    "words",
    [
        "Unknown parameter: 'messages[1].tool_calls[0].note'.",
        "'messages.1.tool_calls.0' : property 'note' is unsupported",
        "Additional properties are not allowed (['note']) - 'messages.[1].tool_calls[0]'",
        'loc: ["body", "messages", 1, "tool_calls", 0, "note"], msg: Extra inputs',
    ],
)
def test_call_fields_of_another_server_are_removed(words: str) -> None:
    sent = request(*called("a"))
    plain = request(*called("a"))
    sent["messages"][1]["tool_calls"][0]["note"] = "x"
    fallbacks = ServerQuirks()
    assert fallbacks.learn_from(plain, Failure(words, 400)) is None
    assert fallbacks.learn_from(sent, Failure(words, 400)) == ""
    assert fallbacks.apply_changes(sent) == plain


def test_quirks_are_learned_once_and_only_if_they_change_the_request() -> None:
    fallbacks = ServerQuirks()
    assert fallbacks.learn_from({"messages": messages("x")}, NO_TOOL) is None
    assert fallbacks.learn_from(request(), Failure(NO_TOOL.description, 503)) is None
    assert fallbacks.learn_from(request(), Failure(NO_TOOL.description, 500)) == NO_TOOLS_NOTICE
    assert fallbacks.learn_from(request(), NO_TOOL) is None
    assert fallbacks.learn_from(request(), NOT_9) is None


def test_malformed_messages_do_not_raise() -> None:
    odd: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": "x"},
        {"role": "assistant", "tool_calls": [{"id": None, "function": "x"}]},
        {"role": "assistant", "tool_calls": ["x"]},
        {"role": "assistant", "tool_calls": [tool_call("look", id="\ud83d")]},
        {"role": "tool", "tool_call_id": None, "content": [{"type": "text"}, "x", None]},
    ]
    fallbacks = ServerQuirks()
    for failure in (NOT_9, NO_TOOL):
        assert fallbacks.learn_from(request(*odd), failure) is not None
    assert "tools" not in fallbacks.apply_changes(request(*odd))


@pytest.mark.parametrize("ids", [("call_1", "call_1"), ("", "call_0"), ("x", "x"), ("", "")])
def test_calls_with_equal_ids_are_all_kept(ids: tuple[str, str]) -> None:
    reply = StreamedAnswer()
    for index, call_id in enumerate(ids):
        reply.add(Delta(calls=(ToolCallDelta(index=index, id=call_id, name=f"f{index}"),)))
    assert [call["function"]["name"] for call in reply.calls] == ["f0", "f1"]
    assert len({call["id"] for call in reply.calls}) == 2
