"""What an index takes from messages and sessions."""

from typing import Any

import pytest
from hypothesis import given

from stenolog.catalog.catalog_database import prefix_range
from stenolog.catalog.searchable_text import (
    LONGEST_TEXT,
    agent_from,
    channel_of,
    prompt_from,
    role_of,
    state_from,
    tags_from,
    text_of,
    title_from,
)
from stenolog.records import Message
from stenolog.redaction import redact
from stenolog.stores.in_memory import InMemoryStore
from support.strategies import messages


def _call(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": one} for one in ids]}


def _seen(upto: object) -> dict[str, Any]:
    return {"role": "assistant", "content": "x", "stenolog": {"seen": upto}}


def _answering(seen: int, *seqs: int) -> dict[str, Any]:
    return {**ANSWER, "stenolog": {"seen": seen, "answers": list(seqs)}}


def _stored(said: list[dict[str, Any]]) -> list[Message]:
    with InMemoryStore() as store:
        if said:
            store.add_messages("k", said)
        return store.get_history("k")


def _result(of: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": "x"}


USER = {"role": "user", "content": "x"}
ANSWER = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "plain"}, "plain"),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": [{"type": "text", "text": "one"}, {"type": "image"}, "two"]}, "one\ntwo"),
        ({"content": {"type": "text", "text": "one"}}, "one"),
        ({"content": "said", "reasoning_content": "thought"}, "said"),
        ({"content": [{"type": "thinking", "text": "thought"}]}, ""),
        (
            {"tool_calls": [{"function": {"name": "read", "arguments": '{"path":"a\\nb"}'}}]},
            "read path: a\nb",
        ),
        ({"tool_calls": [{"function": {"name": "read", "arguments": "{broken"}}]}, "read {broken"),
        ({"tool_calls": [{"name": "ls", "arguments": {"a": [1, None]}}, 7]}, "ls a: 1, "),
        ({"function_call": {"name": "old", "arguments": "{}"}}, "old"),
        ({"role": "tool", "content": '{"out":"line\\nnext"}'}, "out: line\nnext"),
        ({"role": "user", "content": '{"out":"as it is\\n"}'}, '{"out":"as it is\\n"}'),
        (
            {"content": [{"type": "tool_use", "name": "grep", "input": {"q": "x"}}]},
            "grep q: x",
        ),
        (
            {"content": [{"type": "tool_result", "content": [{"type": "text", "text": "y"}]}]},
            "y",
        ),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, "I cannot."),
        ({"audio": {"data": "UklGRg==", "transcript": "It rains."}}, "It rains."),
        (
            {"content": [{"type": "document", "title": "Plan", "source": {}}, "What is this?"]},
            "What is this?\nPlan",
        ),
        ({"type": "function_call", "name": "ls", "arguments": '{"a":"b"}'}, "ls a: b"),
        ({"type": "function_call_output", "call_id": "1", "output": '{"a":"b"}'}, "a: b"),
        ({"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}, ""),
        ({"content": "x", "reasoning": {"text": "hm"}}, "x"),
        ({"content": [{"type": "place", "name": "Porto", "map": "A" * 300}]}, "name: Porto, map:"),
        ({"content": [[["deep"]]]}, "deep"),
        ({"content": "a\ud800b"}, "a?b"),
        ({"content": "x" * (LONGEST_TEXT + 5)}, "x" * LONGEST_TEXT),
    ],
)
def test_searchable_text_of_a_message(message: dict[str, Any], text: str) -> None:
    assert text_of(message) == text


@given(messages())
def test_any_message_has_storable_text(message: dict[str, Any]) -> None:
    (text_of(message) + role_of(message)).encode()


@pytest.mark.parametrize(
    ("tail", "state"),
    [
        ([USER, ANSWER], "idle"),
        ([USER], "interrupted"),
        ([ANSWER, USER], "interrupted"),
        ([USER, _call("1")], "interrupted"),
        ([USER, _call("1", "2"), _result("2")], "interrupted"),
        ([USER, _call("1", "2"), _result("2"), _result("1")], "interrupted"),
        ([USER, _call("1"), _result("1"), ANSWER], "idle"),
        ([USER, _call("1"), _result("1"), _seen(3)], "idle"),
        ([USER, USER, _seen(1)], "interrupted"),
        ([USER, USER, _seen(2)], "idle"),
        ([USER, _call("1"), USER, _result("1"), _seen(2)], "interrupted"),
        ([USER, USER, _seen("two")], "idle"),
        ([USER, ANSWER, USER, _answering(0, 3)], "idle"),
        ([USER, ANSWER, USER, _answering(0, 3), USER, _answering(0, 5)], "idle"),
        ([USER, ANSWER, USER, USER, _answering(2, 4)], "interrupted"),
        ([USER, ANSWER, USER, USER, _answering(2, 4), USER, _answering(2, 6)], "interrupted"),
        ([{"role": "system", "content": "x"}], "idle"),
        ([{"content": "x"}], "idle"),
        ([_result("1")], "interrupted"),
        ([USER, {"role": "assistant", "content": [{"type": "tool_use"}]}], "interrupted"),
        ([], "idle"),
    ],
)
def test_turn_is_idle_when_the_last_answer_saw_all_messages(
    tail: list[dict[str, Any]], state: str
) -> None:
    assert state_from(_stored(tail), whole=True) == state


def test_session_of_responses_items_is_interrupted_until_a_message_follows_the_calls() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    assert state_from(_stored([USER, call]), whole=True) == "interrupted"
    assert state_from(_stored([USER, call, result]), whole=True) == "interrupted"
    answer = {"type": "message", **ANSWER}
    assert state_from(_stored([USER, call, result, answer]), whole=True) == "idle"


def test_state_is_unknown_if_the_tail_is_too_short() -> None:
    stored = _stored([USER, *[_call("1"), _result("1")] * 3, _seen(1)])
    assert state_from(stored[-3:], whole=False) is None
    assert state_from(stored, whole=True) == "idle"


@pytest.mark.parametrize(
    ("meta", "prompt", "title"),
    [
        ({}, "short\n and  simple", "short and simple"),
        ({"title": " by\nhand "}, "prompt", "by hand"),
        ({"title": ""}, "prompt", "prompt"),
        ({"title": 7}, "prompt", "prompt"),
        ({}, "", ""),
    ],
)
def test_title_comes_from_meta_or_the_first_prompt(
    meta: dict[str, Any], prompt: str, title: str
) -> None:
    assert title_from(meta, prompt) == title


def test_long_title_is_cut_at_a_word_if_possible() -> None:
    assert title_from({}, "words, " * 30) == "words, " * 10 + "words…"
    assert title_from({}, "東" * 200) == "東" * 79 + "…"


def test_prompt_is_the_first_user_message() -> None:
    said = [("system", "s"), ("user", " \n"), ("user", " first "), ("user", "second")]
    assert prompt_from(said) == "first"
    assert prompt_from([("assistant", "a")]) == ""
    assert prompt_from([("user", "x" * 900)]) == "x" * 500
    secret = "ghp_" + "A1b2C3d4" * 5
    for length in range(460, 500):
        assert secret[:9] not in prompt_from([("user", f"see{' ' * length}{secret} more")])


def test_valid_tags_agent_and_channel_are_used() -> None:
    assert tags_from({"tags": ["b", "a", "b", 7, ""]}) == ("a", "b")
    assert tags_from({"tags": "one"}) == ("one",)
    assert tags_from({"tags": {"x": 1}}) == tags_from({}) == ()
    assert agent_from({"agent": "bob"}) == "bob"
    assert agent_from({"agent": []}) is None
    assert [channel_of(key) for key in ("telegram:1:2", "plain", ":x")] == ["telegram", None, None]


def test_prefix_range_contains_exactly_the_keys_with_the_prefix() -> None:
    keys = ["a", "ab", "abc", "ac", "b", "é", "a\U0010ffff", "a\x00", "ab\U0010ffffz"]
    for prefix in ("a", "ab", "a\U0010ffff", "é", "a\x00"):
        low, high = prefix_range(prefix)
        assert low is not None
        assert high is not None
        inside = [key for key in keys if low.encode() <= key.encode() < high]
        assert inside == [key for key in keys if key.startswith(prefix)]
    assert prefix_range("") == (None, None)


@pytest.mark.parametrize("depth", [500, 100_000])
def test_deeply_nested_content_keeps_its_text(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    assert text_of({"role": "tool", "content": deep})
    called = {"tool_calls": [{"function": {"name": "read", "arguments": deep}}]}
    assert text_of(called).startswith("read")


@pytest.mark.parametrize("depth", [1, 150, 500, 900, 10_000])
def test_words_in_deeply_nested_json_are_found(depth: int) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        text = text_of(
            {"role": "tool", "content": f'{opening * depth}"xylophone"{closing * depth}'}
        )
        assert "xylophone" in text


def test_text_of_nested_values_does_not_depend_on_the_call_depth() -> None:
    deep: Any = "xylophone"
    for _ in range(2_000):
        deep = {"a": [deep]}
    assert text_of({"function_call": {"name": "f", "arguments": deep}}).endswith("xylophone")
    content: Any = "xylophone"
    for _ in range(95):
        content = [{"type": "tool_result", "content": content}]
    assert text_of({"content": content}) == "xylophone"


def test_secret_in_a_title_is_whole_so_that_it_can_be_redacted() -> None:
    secret = "ghp_" + "A1b2C3d4" * 5
    for length in range(90):
        title = title_from({}, f"{'a ' * (length // 2)}{'b' * (length % 2)} {secret} and more")
        assert secret[:8] not in redact(title).text


@pytest.mark.parametrize(
    ("kind", "state"), [("command", "idle"), ("summary", "idle"), ("interruption", "interrupted")]
)
def test_messages_of_a_program_are_no_part_of_a_turn(kind: str, state: str) -> None:
    written = {"role": "user", "content": "x", "stenolog": {"kind": kind}}
    assert state_from(_stored([USER, ANSWER, written]), whole=True) == state
