"""Tests messages in the form that providers accept."""

import copy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.catalog.message_metadata import mark_seen
from stenolog.context.request_messages import (
    FIRST_USER_CONTENT,
    NO_RESULT,
    NO_TEXT,
    ProviderRequirements,
    prepare_messages,
)
from stenolog.errors import UnsupportedFormat
from stenolog.stores.in_memory import InMemoryStore
from support.histories import (
    anything,
    assistant,
    faults,
    hands,
    sessions,
    tool,
    user,
    uses,
    uses_with_a_text,
)

PLAIN = ProviderRequirements()
NEEDS = st.builds(
    ProviderRequirements,
    merge_user=st.booleans(),
    user_first=st.booleans(),
    reasoning=st.sampled_from(["none", "newest", "all"]),
    keep_fields=st.sampled_from([(), ("cache", "at")]),
)


def outline(messages: list[dict[str, Any]]) -> list[str]:
    """Return role and id or text of each message."""
    return [f"{body['role']} {body.get('tool_call_id') or body['content']}" for body in messages]


@given(anything(), NEEDS)
def test_every_history_becomes_valid(
    messages: list[dict[str, Any]], needs: ProviderRequirements
) -> None:
    before = copy.deepcopy(messages)
    made = prepare_messages(messages, needs)
    assert faults(made) == []
    assert messages == before
    if needs.merge_user:
        roles = [body["role"] for body in made]
        assert all(pair != ("user", "user") for pair in pairwise(roles))
    if needs.user_first:
        talk = [body["role"] for body in made if body["role"] not in ("system", "developer")]
        assert talk[:1] in ([], ["user"])


@given(anything(), NEEDS)
def test_order_of_messages_is_kept(
    messages: list[dict[str, Any]], needs: ProviderRequirements
) -> None:
    """Numbers each message in an extra field, which derived messages keep."""
    numbered = [{**body, "number": at} for at, body in enumerate(messages)]
    made = prepare_messages(
        numbered, ProviderRequirements(reasoning=needs.reasoning, keep_fields=("number",))
    )
    said = [body["number"] for body in made if "number" in body and body["role"] != "tool"]
    assert said == sorted(set(said))
    assert {at for at, body in enumerate(messages) if must_be_sent(body)} <= set(said)
    for at, body in enumerate(made):
        # A result is never before its call, and belongs to the call before it.
        if body["role"] == "tool" and "number" in body:
            calls = [other for other in made[:at] if other.get("tool_calls")]
            assert calls[-1]["number"] < body["number"]


def must_be_sent(body: dict[str, Any]) -> bool:
    content = body.get("content")
    if isinstance(content, str):
        says = bool(content.strip())
        return body.get("role") == "user" or (body.get("role") == "assistant" and says)
    return body.get("role") == "user" and "tool_result" not in str(content)


@given(sessions())
def test_only_messages_between_call_and_results_move(
    messages: list[dict[str, Any]],
) -> None:
    made = prepare_messages(messages, PLAIN)
    assert [body for body in made if body["role"] != "tool"] == [
        body for body in messages if body["role"] != "tool"
    ]
    results = {body["tool_call_id"]: body for body in messages if body["role"] == "tool"}
    for at, body in enumerate(made):
        ids = [call["id"] for call in body.get("tool_calls", [])]
        behind = made[at + 1 : at + 1 + len(ids)]
        assert [result["tool_call_id"] for result in behind] == ids
        for result in behind:
            told = results.get(result["tool_call_id"], {"content": NO_RESULT})
            assert result["content"] == told["content"]


def test_call_without_a_result_gets_interrupted() -> None:
    made = prepare_messages([user("a"), assistant(None, "c1"), user("b")], PLAIN)
    assert made[2] == {"role": "tool", "tool_call_id": "c1", "content": NO_RESULT}


def test_orphaned_and_duplicate_results_are_dropped() -> None:
    messages = [tool("c0"), user("a"), assistant(None, "c1"), tool("c1", "1"), tool("c1", "2")]
    made = prepare_messages(messages, PLAIN)
    assert [body["content"] for body in made if body["role"] == "tool"] == ["1"]


def test_reused_ids_are_replaced_in_call_and_result() -> None:
    turn = [user("a"), assistant(None, "c1"), tool("c1", "x")]
    made = prepare_messages([*turn, *turn], PLAIN)
    assert [body["tool_call_id"] for body in made if body["role"] == "tool"] == ["c1", "c1_2"]
    assert faults(made) == []


def test_calls_without_ids_are_matched_in_order() -> None:
    messages = [user("a"), assistant(None, None, None), tool(None, "1"), tool(None, "2")]
    made = prepare_messages(messages, PLAIN)
    assert [body["content"] for body in made[2:]] == ["1", "2"]
    assert faults(made) == []


def test_result_parts_stay_together_and_the_rest_follows() -> None:
    messages = [user("a"), uses("b", "u1", "u2"), hands("u2", text="and?"), user("c")]
    made = prepare_messages(messages, PLAIN)
    assert faults(made) == []
    assert [part["content"] for part in made[2]["content"]] == [NO_RESULT, "seen u2"]
    assert made[3]["content"] == [{"type": "text", "text": "and?"}]


def test_consecutive_user_messages_are_merged_on_request() -> None:
    messages = [user("a"), user([{"type": "text", "text": "b"}]), user("c"), user("d")]
    assert len(prepare_messages(messages, PLAIN)) == 4
    assert prepare_messages([user("c"), user("d")], ProviderRequirements(merge_user=True)) == [
        user("c\n\nd")
    ]
    assert len(prepare_messages(messages, ProviderRequirements(merge_user=True))) == 1


def test_first_user_message_is_inserted_on_request() -> None:
    made = prepare_messages([assistant("hello"), user("a")], ProviderRequirements(user_first=True))
    assert made[0] == user(FIRST_USER_CONTENT)


def test_system_and_developer_precede_the_first_user_message() -> None:
    messages = [{"role": role, "content": "be brief"} for role in ("system", "developer")]
    assert prepare_messages([*messages, user("a")], ProviderRequirements(user_first=True)) == [
        *messages,
        user("a"),
    ]
    made = prepare_messages([*messages, assistant("hello")], ProviderRequirements(user_first=True))
    assert [body["role"] for body in made] == ["system", "developer", "user", "assistant"]


def test_reasoning_is_sent_back_on_request() -> None:
    thought = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    messages = [user("a"), thought, user("c"), thought]
    kept = {
        reasoning: [
            "reasoning_content" in body
            for body in prepare_messages(messages, ProviderRequirements(reasoning=reasoning))
            if body["role"] == "assistant"
        ]
        for reasoning in ("none", "newest", "all")
    }
    assert kept == {"none": [False, False], "newest": [False, True], "all": [True, True]}


def test_unknown_fields_are_not_sent() -> None:
    message = {**user("a"), "created_at": "2026-01-01", "name": "ann", "cache": 1}
    assert prepare_messages([message], PLAIN) == [{**user("a"), "name": "ann"}]
    assert (
        prepare_messages([message], ProviderRequirements(keep_fields=("cache",)))[0]["cache"] == 1
    )


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ({"a": 1}, '{"a":1}'),
        ({"a": 2**70}, '{"a":1180591620717411303424}'),
        ({"a": "\ud800"}, '{"unreadable":"{\\"a\\": \\"\\\\ud800\\"}"}'),
        ([1], '{"unreadable":"[1]"}'),
        ("", "{}"),
        (None, "{}"),
        ('{"a": 1', '{"unreadable":"{\\"a\\": 1"}'),
    ],
)
def test_arguments_are_always_a_json_object(given: Any, sent: Any) -> None:
    made = prepare_messages([assistant(None, "c1", arguments=given)], PLAIN)
    assert made[0]["tool_calls"][0]["function"]["arguments"] == sent


@pytest.mark.parametrize(
    "nothing", [None, "", " \n", [], [{"type": "text", "text": ""}], ["\t"], [{"type": "text"}]]
)
def test_empty_messages_are_dropped_except_user_messages(nothing: Any) -> None:
    messages = [user(nothing), assistant(nothing), {"role": "system", "content": nothing}]
    assert prepare_messages([*messages, {"role": "odd", "content": "x"}], PLAIN) == [user(NO_TEXT)]
    call = prepare_messages([assistant(nothing, "c1"), tool("c1", nothing)], PLAIN)
    assert [body["content"] for body in call] == [None, NO_TEXT]


def test_empty_text_parts_are_dropped() -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    assert prepare_messages([user([{"type": "text", "text": " "}, image])], PLAIN) == [
        user([image])
    ]
    said = {
        "role": "assistant",
        "content": [{"type": "text", "text": ""}, *uses("", "u1")["content"]],
    }
    assert [part["type"] for part in prepare_messages([said], PLAIN)[0]["content"]] == ["tool_use"]


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
@pytest.mark.parametrize(
    ("given", "sent"),
    [("", None), (" \n", None), (None, None), (5, "5"), (["a"], '["a"]'), ({"a": 1}, '{"a":1}')],
)
def test_text_of_a_part_is_a_string(kind: str, given: Any, sent: str | None) -> None:
    [made] = prepare_messages([user(["so", {"type": kind, "text": given, "note": 1}])], PLAIN)
    kept = [] if sent is None else [{"type": kind, "text": sent, "note": 1}]
    assert made["content"] == [{"type": "text", "text": "so"}, *kept]


@pytest.mark.parametrize("text", ["", " ", None])
def test_other_parts_may_have_an_empty_text(text: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}, "text": text}
    assert prepare_messages([user(["what is it?", image])], PLAIN)[0]["content"][1] == image


@pytest.mark.parametrize("text", ["", " ", "x", None])
def test_tool_use_part_with_text_is_a_call(text: Any) -> None:
    said = uses_with_a_text(text, "u1", "u2")
    made = prepare_messages([user("hi"), said, hands("u1", "u2")], PLAIN)
    assert made == prepare_messages([user("hi"), uses("so", "u1", "u2"), hands("u1", "u2")], PLAIN)
    assert faults(made) == []


def test_lone_surrogate_can_be_sent() -> None:
    assert prepare_messages([user("a\ud800b")], PLAIN) == [user("a?b")]


def test_message_that_an_answer_has_not_seen_follows_it() -> None:
    store = InMemoryStore()
    for text in ("first", "second", "third"):
        store.add_message("a", "user", text)
    store.add_full_message("a", mark_seen(assistant("to the first"), seen=1))
    store.add_full_message("a", mark_seen(assistant("to all"), seen=4))
    store.add_message("a", "user", "fourth")
    assert outline(prepare_messages(store.get_history("a"), PLAIN)) == [
        "user first",
        "assistant to the first",
        "user second",
        "user third",
        "assistant to all",
        "user fourth",
    ]


@pytest.mark.parametrize("uses_tool", [False, True])
def test_message_that_waits_since_before_added_messages_follows_them(uses_tool: bool) -> None:
    def add(message: dict[str, Any], **seqs: Any) -> int:
        return store.add_full_message("a", mark_seen(message, seen=seqs.pop("seen", None), **seqs))

    store = InMemoryStore()
    store.add_message("a", "user", "waits")
    for text in ("second", "third"):
        seq = store.add_message("a", "user", text)
        if uses_tool:
            add(uses("", f"u{seq}"), seen=0)
            store.add_full_message("a", hands(f"u{seq}"))
        add(assistant(f"to {text}"), seen=0, answers=[seq])
    lines = outline(prepare_messages(store.get_history("a"), PLAIN))
    texts = [line for line in lines if line.startswith("user ") or " to " in line]
    assert lines[-1] == "user waits"
    assert [text for text in texts if "second" in text or "third" in text] == [
        "user second",
        "assistant to second",
        "user third",
        "assistant to third",
    ]


def test_message_that_a_tool_call_has_seen_stays_before_the_call() -> None:
    store = InMemoryStore()
    store.add_message("a", "user", "waits")
    store.add_full_message("a", mark_seen(uses("", "u1"), seen=1))
    store.add_message("a", "user", "second")
    store.add_full_message("a", mark_seen(assistant("to second"), seen=0, answers=[3]))
    lines = outline(prepare_messages(store.get_history("a"), PLAIN))
    assert (lines[0], lines[-1]) == ("user waits", "assistant to second")


RESPONSES_ITEMS: list[dict[str, Any]] = [
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {"type": "reasoning", "summary": []},
    {"type": "an_item_of_next_year"},
]


@pytest.mark.parametrize("item", RESPONSES_ITEMS, ids=lambda item: str(item["type"]))
def test_responses_item_is_refused_not_dropped(item: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedFormat, match=f"a message is an item of type '{item['type']}'"):
        prepare_messages([user("What is the weather?"), item], PLAIN)


@pytest.mark.parametrize(
    "message",
    [
        uses("Let me look.", "c1"),
        hands("c1"),
        user([{"type": "input_text", "text": "hello"}]),
        assistant([{"type": "output_text", "text": "hello"}]),
        user([{"type": "input_image", "image_url": "https://example.org/a.png"}]),
    ],
    ids=["tool_use", "tool_result", "input_text", "output_text", "input_image"],
)
def test_provider_of_chat_messages_gets_no_other_format(message: dict[str, Any]) -> None:
    prepare_messages([user("hello"), message], PLAIN)
    with pytest.raises(UnsupportedFormat, match="OpenAI's chat API"):
        prepare_messages([user("hello"), message], ProviderRequirements(chat_only=True))
