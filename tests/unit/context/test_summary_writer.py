"""Tests summaries written chunk by chunk, with and without a model."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest

from stenolog.context.summary import (
    MAX_MODEL_CALLS,
    SummaryWriter,
    message_texts,
    parse_summary,
    quote_messages,
    read_messages,
)
from stenolog.context.window import Limits
from support.histories import CHEAP, assistant, hands, stored, talk, tool, user, uses
from support.scripted_completion import CompletionStep, ScriptedCompletion

LIMITS = Limits(max_context_tokens=2_000)
NEW = json.dumps({"facts": ["new"], "last_state": "on"})
BEFORE = "## Facts\n- The cat is called Ivo"


class Written(NamedTuple):
    text: str
    fallback: str
    dropped_lines: int


def made(
    history: Sequence[Mapping[str, Any]],
    *answers: CompletionStep,
    previous: str = BEFORE,
    limits: Limits = LIMITS,
    most: int = 200,
) -> tuple[Written, ScriptedCompletion]:
    model = ScriptedCompletion(answers)
    ask = model if answers else None
    writer = SummaryWriter(ask, most, limits, CHEAP)
    text = writer.write_summary(stored(history), previous)
    return Written(text, writer.fallback, writer.dropped_lines), model


def test_question_has_the_previous_summary_and_the_new_messages() -> None:
    history = [user("find it"), assistant(None, "c1"), tool("c1", "in the attic")]
    _, model = made(history, NEW)
    asked = model.calls[0][-1]["content"]
    assert "- [F1] The cat is called Ivo" in asked
    assert "[1] user: find it" in asked
    assert "[2] assistant: calls look({})" in asked
    assert "[3] tool: result of look: in the attic" in asked


def test_each_chunk_fits_the_model_and_has_the_summary_so_far() -> None:
    history = talk(30, size=300)
    answers = [json.dumps({"facts": [f"chunk {n}"], "last_state": "on"}) for n in range(20)]
    done, model = made(history, *answers)
    assert 2 < len(model.calls) < 20
    for number, asked in enumerate(model.calls):
        assert sum(map(CHEAP.message, asked)) <= LIMITS.room + 16
        assert "The cat is called Ivo" in asked[-1]["content"]
        assert all(f"chunk {n}" in asked[-1]["content"] for n in range(number))
    seen = "".join(asked[-1]["content"] for asked in model.calls)
    assert all(f"question {n} " in seen and f"answer {n} " in seen for n in range(30))
    facts = parse_summary(done.text).facts
    assert facts == ("The cat is called Ivo", *(f"chunk {n}" for n in range(len(model.calls))))


@pytest.mark.parametrize(
    "answer",
    ["", "I cannot do that.", "{}", '{"facts": []}', "[1, 2]", RuntimeError("no route")],
    ids=["empty", "talk", "nothing in it", "no lines", "no object", "an error"],
)
def test_failed_model_leads_to_extracted_lines_with_the_previous_summary(
    answer: CompletionStep,
) -> None:
    done, _ = made([user("My plane leaves at nine"), assistant("Noted.")], answer)
    summary = parse_summary(done.text)
    assert "The cat is called Ivo" in summary.facts
    assert "User said: My plane leaves at nine" in summary.facts
    assert "Noted." in summary.last_state
    assert done.fallback


def test_model_that_raises_is_not_called_again() -> None:
    done, model = made(talk(30, size=300), RuntimeError("no route"), NEW)
    assert len(model.calls) == 1
    assert done.fallback == "the model failed with RuntimeError"


def test_unusable_answer_does_not_stop_the_next_chunk() -> None:
    history = [*talk(8, size=300), user("My plane leaves at nine")]
    done, model = made(history, "what?", *[NEW] * 20)
    assert len(model.calls) > 1
    assert "new" in parse_summary(done.text).facts
    assert done.fallback


def test_too_long_question_is_split() -> None:
    def small(messages: Sequence[Mapping[str, Any]]) -> str:
        if sum(map(CHEAP.message, messages)) > 800:
            raise RuntimeError("prompt is too long: 9000 tokens > 800 maximum")
        return NEW

    done, model = made(talk(6, size=300), *[small] * 40)
    assert done.fallback == ""
    assert "new" in parse_summary(done.text).facts
    assert len(model.calls) < 20


def test_model_that_rejects_every_length_ends_with_extraction() -> None:
    error = RuntimeError("context_length_exceeded")
    done, model = made(talk(6, size=300), *[error] * 99)
    assert len(model.calls) < 10
    assert "RuntimeError" in done.fallback
    assert "The cat is called Ivo" in done.text


def test_summary_without_a_model_is_deterministic_and_bounded() -> None:
    history = talk(200, size=300, calls=1)
    first, _ = made(history)
    second, _ = made(history)
    assert first == second
    assert CHEAP.text(first.text) <= 200
    assert "The cat is called Ivo" in first.text
    assert first.fallback == "no model was given"


def test_number_of_questions_is_limited_and_newest_messages_are_read() -> None:
    history = talk(1_500, size=300)
    done, model = made(history, *[NEW] * 1_500)
    assert len(model.calls) <= 2 * MAX_MODEL_CALLS
    assert "answer 1499 " in model.calls[-1][-1]["content"]
    assert "did not fit into the prompts for the model" in done.fallback
    assert "The cat is called Ivo" in done.text


def test_extracted_lines_have_tool_outcomes() -> None:
    history = [user("find it"), assistant(None, "c1", arguments='{"q": 1}'), tool("c1", "attic")]
    assert quote_messages(read_messages(stored(history))) == {
        "facts": ["User said: find it"],
        "tool_outcomes": ['look({"q": 1}): attic'],
        "last_state": "The user said last: find it",
    }


def test_user_text_next_to_a_result_is_kept() -> None:
    history = stored([user("go"), uses("", "u1"), hands("u1", text="My name is Bo")])
    assert (
        "result of look: seen u1\nMy name is Bo"
        in list(message_texts(read_messages(history), 100, CHEAP))[2]
    )
    made = quote_messages(read_messages(history))
    assert made["facts"] == ["User said: go", "User said: My name is Bo"]
    assert made["tool_outcomes"] == ['look({"at":"x"}): seen u1']
    assert made["last_state"] == "The user said last: My name is Bo"


def test_tool_call_is_not_quoted_as_text() -> None:
    call = {"type": "tool_use", "id": "u1", "name": "look", "input": {}}
    thought = {"type": "thinking", "thinking": "hm"}
    history = stored([user("go"), {"role": "assistant", "content": [thought, call]}])
    assert quote_messages(read_messages(history))["last_state"] == "The user said last: go"
    assert (
        list(message_texts(read_messages(history), 100, CHEAP))[1]
        == "[2] assistant: calls look({})"
    )


def test_dropped_lines_are_counted() -> None:
    lines = [f"fact number {number} of many" for number in range(60)]
    answer = json.dumps({"facts": lines, "last_state": "on"})
    done, _ = made([user("a")], answer)
    kept = parse_summary(done.text).facts
    assert done.dropped_lines == 61 - len(kept) > 0
    assert kept == tuple(lines[-len(kept) :])
    fits, _ = made([user("a")], NEW)
    assert fits.dropped_lines == 0


def test_unread_fields_do_not_prevent_a_question() -> None:
    history = [{**said, "trace": "t" * 9_000} for said in talk(40)]
    done, _ = made(history, *[NEW] * 20)
    assert done.fallback == ""


def test_long_message_is_cut_with_a_pointer() -> None:
    (text,) = message_texts(read_messages(stored([user("x" * 9_000)])), 100, CHEAP)
    assert CHEAP.text(text) < 120
    assert "full text at seq 1]" in text


def _lake_turns(*, in_content: bool) -> list[dict[str, Any]]:
    """Return turns that ask for the depth of a lake with one tool call each."""
    history: list[dict[str, Any]] = []
    for number in range(14):
        arguments, depth = {"lake": f"L{number}"}, f"Depth {number}. " + "It was measured. " * 20
        call: dict[str, Any] = {"type": "tool_use", "id": "c", "name": "depth", "input": arguments}
        result = user([{"type": "tool_result", "tool_use_id": "c", "content": depth}])
        message = assistant([call])
        if not in_content:
            message = assistant(None, "c", arguments=json.dumps(arguments))
            message["tool_calls"][0]["function"]["name"] = "depth"
            result = tool("c", depth)
        history += [user(f"How deep is lake {number}?"), message, result, assistant("Deep.")]
    return history


@pytest.mark.quick(5)
@pytest.mark.parametrize("in_content", [False, True])
@pytest.mark.parametrize("max_tokens", range(500, 1_500, 50))
def test_batch_never_separates_a_tool_call_from_its_result(
    in_content: bool, max_tokens: int
) -> None:
    limits = Limits(max_context_tokens=max_tokens, reserve=50)
    history = _lake_turns(in_content=in_content)
    done, _ = made(history, limits=limits, most=10_000)
    outcomes = parse_summary(done.text).tool_outcomes
    assert len(outcomes) == 14
    assert all(line.startswith("depth({") for line in outcomes)
    answers = [json.dumps({"facts": [f"f{n}"]}) for n in range(60)]
    _, model = made(history, *answers, limits=limits)
    for asked in model.calls:
        part = asked[-1]["content"]
        assert part.count("calls depth(") == part.count("result of depth: ")
        assert "result of a tool" not in part


@pytest.mark.parametrize("last", range(0, 24, 3))
def test_messages_before_the_first_prompt_end_with_the_results_of_their_calls(last: int) -> None:
    looked = [assistant(None, "c", arguments=json.dumps({"q": "w " * 150})), tool("c", "r " * 90)]
    history = [user("Look."), *looked * 70, *[user("And this.")] * last]
    limits = Limits(max_context_tokens=600, reserve=50)
    done, model = made(history, *[NEW] * 100, limits=limits)
    assert "did not fit into the prompts for the model" in done.fallback
    first = model.calls[0][-1]["content"]
    assert first.count("calls look(") == first.count("result of look: ") > 0


def test_calls_whose_results_fill_several_prompts_keep_their_name() -> None:
    ids = [f"c{number}" for number in range(12)]
    history = [user("go"), assistant(None, *ids), *(tool(id, f"{id} " + "r" * 900) for id in ids)]
    done, _ = made(history, limits=Limits(max_context_tokens=600), most=10_000)
    outcomes = parse_summary(done.text).tool_outcomes
    assert len(outcomes) == 12
    assert all(line.startswith("look({}): ") for line in outcomes)
