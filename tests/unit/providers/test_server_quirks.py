"""Tests how requests change after a server has rejected the usual form."""

from typing import Any

import pytest

from stenolog.providers.request_errors import Failure
from stenolog.providers.server_quirks import NO_TOOLS_NOTICE, ServerQuirks
from stenolog.testing.scripted_model import tool_call
from stenolog.testing.strict_requests import find_fault
from support.model_requests import messages, tool

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
