"""Tests the accuracy of the token estimate, and which parts of a message it counts."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from stenolog.records import Message
from stenolog.tokens import (
    CALL_TOKENS,
    FILE_CHARACTERS_PER_TOKEN,
    IMAGE_TOKENS,
    LOW_IMAGE_TOKENS,
    MESSAGE_TOKENS,
    Calibration,
    Tokens,
    estimate,
    message_tokens,
    tools_tokens,
)

CORPUS: Final = Path(__file__).parents[1] / "tokens" / "corpus.jsonl"
ROWS: Final[list[dict[str, Any]]] = [
    json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()
]
REPORTED: Final = [row for row in ROWS if row["half"] == "report"]
TUNED: Final = [row for row in ROWS if row["half"] == "tune"]
CLASSES: Final = sorted({row["class"] for row in ROWS})

LONG: Final = 1_000_000
HOSTILE: Final = list("aA0-/='_ \n\téя漢あ한\u0627😀\u0301\ud800\x00\u3000\xa0")


def error(rows: list[dict[str, Any]], *, count: Callable[[str], int] = estimate) -> float:
    exact: int = sum(row["o200k"] for row in rows)
    return sum(count(row["text"]) for row in rows) / exact - 1


# --- comparison with a real tokenizer --------------------------------------------------------


@pytest.mark.quick(5)
@pytest.mark.parametrize("kind", CLASSES)
def test_estimate_is_within_15_percent_on_unseen_texts_of_each_class(kind: str) -> None:
    rows = [row for row in REPORTED if row["class"] == kind]
    assert len(rows) >= 10
    print(f"| {kind} | {len(rows)} | {sum(row['o200k'] for row in rows):,} | {error(rows):+.1%} |")
    assert abs(error(rows)) <= 0.15


def too_few(text: str) -> int:
    return estimate(text) * 3 // 5


def too_many(text: str) -> int:
    return estimate(text) * 9 // 5


@pytest.mark.quick(6)
@pytest.mark.parametrize("tokenizer", ["o200k", "cl100k"])
@pytest.mark.parametrize("count", [estimate, too_few, too_many])
@pytest.mark.parametrize("seed", range(10))
def test_estimate_is_within_5_percent_after_ten_calibrated_turns(
    tokenizer: str, count: Callable[[str], int], seed: int
) -> None:
    random = Random(seed)
    calibration = Calibration()
    for _ in range(10):
        turn = random.sample(TUNED, 60)
        calibration = calibration.after(
            estimated=sum(count(row["text"]) for row in turn),
            reported=sum(row[tokenizer] for row in turn),
        )
    exact: int = sum(row[tokenizer] for row in REPORTED)

    def missed(counter: Tokens) -> float:
        found: float = sum(counter.text(row["text"]) for row in REPORTED) / exact
        return abs(found - 1)

    assert missed(Tokens(count=count, ratio=calibration.ratio)) <= 0.05
    if count is not estimate or tokenizer != "o200k":
        assert missed(Tokens(count=count)) > 0.05


# --- texts -----------------------------------------------------------------------------------


def test_only_empty_text_has_no_tokens() -> None:
    assert estimate("") == 0
    assert estimate(" ") == estimate("a") == estimate("\ud800") == 1


@given(st.text(alphabet=st.characters(codec=None)))
def test_estimate_is_bounded_by_the_number_of_bytes(text: str) -> None:
    found = estimate(text)
    assert (text == "") == (found == 0)
    assert found <= len(text.encode("utf-8", "surrogatepass")) + len(text) / 4 + 1


@given(st.sampled_from(ROWS), st.integers(min_value=2, max_value=6))
def test_repeated_text_takes_proportionally_more_tokens(row: dict[str, Any], times: int) -> None:
    once = estimate(row["text"])
    found = estimate("\n\n".join([row["text"]] * times))
    assert once * times * 0.95 - 2 <= found <= (once + 2) * times * 1.05


@given(st.sampled_from(ROWS), st.data())
def test_prefix_of_a_text_never_takes_clearly_more_tokens(
    row: dict[str, Any], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(min_value=0, max_value=len(row["text"])))
    assert estimate(row["text"][:cut]) <= estimate(row["text"]) * 1.1 + 8


@pytest.mark.parametrize("character", HOSTILE, ids=ascii)
def test_a_million_equal_characters_are_counted_in_time(character: str) -> None:
    # A search that is not linear would exceed the suite's time limit.
    assert LONG / 100 <= estimate(character * LONG) <= LONG * 2.2


def test_noise_takes_more_than_words_of_the_same_length() -> None:
    words = "context/window/budget/compaction_plan/history_of_messages"
    noise = "q8Zr1Xv0KpT7mWc3yBd5NfHs2LgJe9UaRi4OtQx6VnYk8ZwMb1PcD7uFh"
    assert len(words) == len(noise)
    assert estimate(noise) > 2 * estimate(words)


# --- messages --------------------------------------------------------------------------------


def words(text: str) -> int:
    return len(text.split())


def test_message_tokens_are_its_text_and_an_overhead() -> None:
    assert (
        message_tokens({"role": "user", "content": "one two three"}, count=words)
        == MESSAGE_TOKENS + 3
    )
    assert message_tokens({"role": "assistant", "content": None}, count=words) == MESSAGE_TOKENS
    assert message_tokens({"role": "user", "content": ""}) == message_tokens({}) == MESSAGE_TOKENS


def test_a_stored_message_counts_like_the_object_that_was_given() -> None:
    given_object = {"role": "user", "content": "Is it raining in Porto?", "name": "ana"}
    stored = Message(
        seq=1, _at="2026-11-15T12:00:00.000123Z", _body=Raw(json.dumps(given_object).encode())
    )
    assert message_tokens(stored) == message_tokens(given_object) > MESSAGE_TOKENS + 5


def test_name_refusal_and_reasoning_are_counted() -> None:
    message = {
        "role": "assistant",
        "content": "a",
        "name": "b",
        "refusal": "c c",
        "reasoning_content": "d d d",
        "reasoning": "e",
        "thinking": "f",
    }
    assert message_tokens(message, count=words) == MESSAGE_TOKENS + 9


def test_call_tokens_are_name_arguments_id_and_an_overhead() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    assert message_tokens(message, count=words) == MESSAGE_TOKENS + 2 * (CALL_TOKENS + 1 + 2 + 1)
    legacy = {"role": "assistant", "function_call": {"name": "find", "arguments": "x y z"}}
    assert message_tokens(legacy, count=words) == MESSAGE_TOKENS + CALL_TOKENS + 4


def test_result_tokens_are_its_text_and_call_id() -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "four words of it"}
    assert message_tokens(result, count=words) == MESSAGE_TOKENS + 1 + 4
    item = {"type": "function_call_output", "call_id": "c1", "output": "four words of it"}
    assert message_tokens(item, count=words) == MESSAGE_TOKENS + 1 + 4


def test_parts_in_the_shape_of_other_providers_are_counted() -> None:
    parts = [
        {"type": "thinking", "thinking": "one two", "signature": "x y z"},
        {"type": "text", "text": "three"},
        {"type": "tool_use", "id": "c1", "name": "find", "input": {"q": "tea"}},
        "six",
    ]
    assert message_tokens({"role": "assistant", "content": parts}, count=words) == (
        MESSAGE_TOKENS + 2 + 1 + (CALL_TOKENS + 3) + 1
    )
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"text": "a b"}]}
    assert message_tokens({"role": "user", "content": [result]}, count=words) == (
        MESSAGE_TOKENS + CALL_TOKENS + 1 + 2
    )


@pytest.mark.parametrize(
    ("part", "taken"),
    [
        ({"type": "image_url", "image_url": {"url": "data:" + "A" * 9_000}}, IMAGE_TOKENS),
        (
            {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
            LOW_IMAGE_TOKENS,
        ),
        ({"type": "input_image", "image_url": "u", "detail": "low"}, LOW_IMAGE_TOKENS),
        ({"type": "image", "source": {"type": "base64", "data": "A" * 9_000}}, IMAGE_TOKENS),
        ({"inline_data": {"mime_type": "image/png", "data": "A" * 9_000}}, IMAGE_TOKENS),
        ({"type": "input_audio", "input_audio": {"data": "A" * 9_000, "format": "wav"}}, 10),
        (
            {"type": "file", "file": {"file_data": "A" * 4_000}},
            4_000 // FILE_CHARACTERS_PER_TOKEN + 1,
        ),
    ],
)
def test_attachments_count_as_a_fixed_number_of_tokens(part: dict[str, Any], taken: int) -> None:
    assert message_tokens({"role": "user", "content": [part]}) == MESSAGE_TOKENS + taken


def test_a_text_document_is_counted_as_its_text_and_a_spoken_answer_as_audio() -> None:
    text = "The pass is closed for three days. " * 60
    source = {"type": "text", "media_type": "text/plain", "data": text}
    plain = message_tokens({"role": "user", "content": text})
    document = {"role": "user", "content": [{"type": "document", "source": source}]}
    assert message_tokens(document) == plain
    blocks = {"type": "content", "content": [{"type": "text", "text": text}]}
    document = {"role": "user", "content": [{"type": "document", "source": blocks}]}
    assert message_tokens(document) == plain
    audio = {"id": "a1", "data": "A" * 9_000, "transcript": "one two"}
    spoken = {"role": "assistant", "content": None, "audio": audio}
    assert message_tokens(spoken, count=words) == MESSAGE_TOKENS + 10 + 2


def test_call_of_a_provider_tool_is_counted_as_a_call() -> None:
    part = {"type": "server_tool_use", "id": "s1", "name": "search", "input": {"q": "tea"}}
    assert message_tokens({"role": "assistant", "content": [part]}, count=words) == (
        MESSAGE_TOKENS + CALL_TOKENS + 3
    )
    custom = {"id": "c1", "type": "custom", "custom": {"name": "shell", "input": "ls -l"}}
    assert message_tokens({"role": "assistant", "tool_calls": [custom]}, count=words) == (
        MESSAGE_TOKENS + CALL_TOKENS + 4
    )


def test_unknown_part_is_counted_as_its_json() -> None:
    part = {"type": "place", "name": "Porto", "rank": 2**70}
    assert message_tokens({"role": "user", "content": [part]}) > MESSAGE_TOKENS + 15


NOTE: Final = "Snow closed the pass for three days. "


@pytest.mark.parametrize(
    "message",
    [
        {"kind": "event", "note": NOTE * 20},
        {"role": "user", "content": "hello", "note": NOTE * 20},
        {"role": "assistant", "content": "a", "reasoning_details": [{"text": NOTE * 20}]},
        {"role": "assistant", "content": "a", "thinking_blocks": [{"thinking": NOTE * 20}]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": NOTE * 40}]},
        {"role": "user", "content": [{"type": "text", "text": "a", "citations": [NOTE * 20]}]},
        {"role": "assistant", "tool_calls": [{"id": "c1", "custom": {"input": NOTE * 20}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "extra": NOTE * 20}}]},
        {"role": "user", "content": [{"type": "tool_result", "content": "a", "note": NOTE * 20}]},
    ],
    ids=lambda message: str(list(message)[-1]),
)
def test_text_anywhere_in_a_message_is_counted(message: dict[str, Any]) -> None:
    assert message_tokens(message) >= MESSAGE_TOKENS + estimate(NOTE * 20)


def test_role_type_and_signature_are_in_the_overhead() -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "a", "signature": "b c"}]}
    assert message_tokens(message, count=words) == MESSAGE_TOKENS + 1


JSON: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(alphabet=st.characters(codec=None), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=6,
)
PARTS: Final = st.lists(
    st.dictionaries(
        st.sampled_from(["type", "text", "image_url", "data", "source", "content", "input"]),
        st.sampled_from(["text", "image_url", "tool_use", "tool_result", "image"]) | JSON,
    )
)
FIELDS: Final = st.sampled_from(
    [
        "role",
        "content",
        "name",
        "tool_calls",
        "function_call",
        "tool_call_id",
        "output",
        "reasoning",
    ]
)


@given(st.dictionaries(FIELDS | st.text(max_size=5), JSON | PARTS, max_size=6))
def test_any_json_object_can_be_counted(message: dict[str, Any]) -> None:
    assert message_tokens(message) >= MESSAGE_TOKENS
    assert tools_tokens([message]) > 0


def test_deeply_nested_content_can_be_counted() -> None:
    content: Any = "at the bottom"
    for _ in range(5_000):
        content = [{"type": "tool_result", "content": content}]
    assert message_tokens({"role": "user", "content": content}) >= MESSAGE_TOKENS


# --- tools -----------------------------------------------------------------------------------


def test_tool_definitions_are_counted() -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file of the workspace.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    definition = estimate(json.dumps(tool, separators=(",", ":")))
    one, two = tools_tokens([tool]), tools_tokens([tool, tool])
    assert tools_tokens([]) == 0
    assert definition < one <= definition + 20
    assert two - one >= definition


# --- the counter -----------------------------------------------------------------------------


def test_exact_counter_replaces_the_estimate() -> None:
    counter = Tokens(count=words)
    assert counter.text("one two three") == 3
    assert counter.message({"role": "user", "content": "one two"}) == MESSAGE_TOKENS + 2
    assert counter.tools([{"name": "a b c d"}]) == tools_tokens([{"name": "a b c d"}], count=words)


def test_the_ratio_applies_to_texts_messages_and_tools() -> None:
    plain, doubled = Tokens(), Tokens(ratio=2.0)
    message = {"role": "user", "content": "How far is it to the harbour?"}
    tools = [{"name": "distance", "parameters": {"to": "string"}}]
    assert doubled.text("How far is it?") == 2 * plain.text("How far is it?")
    assert doubled.message(message) == 2 * plain.message(message)
    assert doubled.tools(tools) == 2 * plain.tools(tools)


# --- calibration -----------------------------------------------------------------------------


def test_estimate_is_unchanged_before_any_report() -> None:
    assert Calibration() == Calibration(ratio=1.0, weight=0.0)


def test_first_report_counts_fully_and_later_ones_partly() -> None:
    first = Calibration().after(estimated=1_000, reported=1_200)
    assert first == Calibration(ratio=1.2, weight=1.0)
    second = first.after(estimated=1_000, reported=1_000)
    assert second.ratio == pytest.approx(1.1)


@pytest.mark.parametrize(("estimated", "reported"), [(0, 100), (100, 0), (100, -5), (-5, 100)])
def test_a_report_without_tokens_changes_nothing(estimated: int, reported: int) -> None:
    before = Calibration(ratio=1.3, weight=4.0)
    assert before.after(estimated=estimated, reported=reported) is before


@pytest.mark.parametrize("absurd", [1, 10**9, 10**400])
def test_one_absurd_report_has_little_effect_on_the_ratio(absurd: int) -> None:
    calibration = Calibration()
    for _ in range(10):
        calibration = calibration.after(estimated=1_000, reported=1_100)
    calibration = calibration.after(estimated=1_000, reported=absurd)
    assert 0.95 <= calibration.ratio <= 1.25
    for _ in range(15):
        calibration = calibration.after(estimated=1_000, reported=1_100)
    assert calibration.ratio == pytest.approx(1.1, abs=0.03)


def test_ratio_of_three_is_reached_in_ten_reports() -> None:
    calibration = Calibration()
    for _ in range(10):
        calibration = calibration.after(estimated=1_000, reported=3_000)
    assert calibration.ratio == pytest.approx(3.0, rel=0.05)


@given(
    st.floats(allow_nan=False),
    st.floats(allow_nan=False),
    st.lists(st.tuples(st.integers(), st.integers()), min_size=1),
)
def test_ratio_stays_within_its_bounds(
    ratio: float, weight: float, reports: list[tuple[int, int]]
) -> None:
    calibration = Calibration(ratio=ratio, weight=weight).after(estimated=1, reported=1)
    for estimated, reported in reports:
        calibration = calibration.after(estimated=estimated, reported=reported)
        assert 0.25 <= calibration.ratio <= 8
        assert 1 <= calibration.weight <= 8


@pytest.mark.parametrize(
    ("part", "most"),
    [
        ({"type": "thinking", "thinking": "", "signature": "x" * 40_000}, 20),
        ({"type": "file", "data": "", "file": {"file_data": "A" * 40_000}}, 1_100),
        (
            {
                "type": "document",
                "content": "caption",
                "source": {"type": "base64", "media_type": "application/pdf", "data": "A" * 40_000},
            },
            1_100,
        ),
        ({"type": "tool_result", "tool_use_id": "a", "content": "short", "output": ""}, 30),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_signatures_and_encoded_data_do_not_count_as_text(part: dict[str, Any], most: int) -> None:
    assert 0 < message_tokens({"role": "assistant", "content": [part]}) <= most
