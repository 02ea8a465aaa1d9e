"""Tests the turn state of a session, computed from its log."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from stenolog.context.turn_state import answer_to, turn_state
from stenolog.records import Message, Span
from stenolog.stores.in_memory import InMemoryStore

USER = {"role": "user", "content": "?"}
ANSWER = {"role": "assistant", "content": "!"}


def _stored(said: Sequence[Mapping[str, Any]]) -> list[Message]:
    with InMemoryStore() as store:
        if said:
            store.add_messages("k", said)
        return store.get_history("k")


def _seen(upto: int) -> dict[str, Any]:
    return {**ANSWER, "stenolog": {"seen": upto}}


def _answering(*seqs: int) -> dict[str, Any]:
    return {**ANSWER, "stenolog": {"seen": max(seqs), "answers": list(seqs)}}


def _added(*seqs: int) -> dict[str, Any]:
    return {**ANSWER, "stenolog": {"seen": 2, "answers": list(seqs)}}


def _calls(*ids: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": one, "type": "function", "function": {"name": "f", "arguments": "{}"}}
            for one in ids
        ],
    }


def _result(of: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": of, "content": "x"}


@pytest.mark.parametrize(
    ("said", "unanswered", "open_calls", "unfinished"),
    [
        ([], (), [], False),
        ([USER, ANSWER], (), [], False),
        ([USER], (1,), [], True),
        ([USER, USER, _seen(1)], (2,), [], True),
        ([USER, USER, _seen(1), _seen(2)], (), [], False),
        ([USER, USER, _seen(2)], (), [], False),
        ([USER, _calls("a", "b")], (1,), ["a", "b"], True),
        ([USER, _calls("a", "b"), _result("b")], (1,), ["a"], True),
        ([USER, _calls("a"), _result("a")], (1,), [], True),
        ([USER, _calls("a"), USER, _result("a"), _seen(4)], (), [], False),
        ([USER, _calls("a"), _result("a"), ANSWER, USER], (5,), [], True),
        # These answers were added from another session, and have not seen message 3.
        ([USER, _seen(1), USER, USER, _added(4)], (3,), [], True),
        ([USER, _seen(1), USER, USER, _added(4), USER, USER, _added(6)], (3, 7), [], True),
        ([USER, _seen(1), USER, USER, _added(4), _seen(4)], (), [], False),
        ([USER, _added(1, 3), USER], (3,), [], True),  # no answer answers a later message
        # A call without a result is not pending if messages followed it.
        ([USER, _calls("a"), ANSWER], (), [], False),
        ([{"role": "system", "content": "x"}], (), [], False),
    ],
)
def test_turn_state_of_histories(
    said: list[dict[str, Any]], unanswered: tuple[int, ...], open_calls: list[str], unfinished: bool
) -> None:
    found = turn_state(_stored(said))
    assert found.unanswered == unanswered
    assert [call.id for call in found.open_calls] == open_calls
    assert found.is_unfinished == unfinished


@pytest.mark.parametrize(
    ("lost", "unanswered", "unknown", "unfinished"),
    [
        ([], (3,), (), True),
        ([(1, 1)], (3,), (), True),
        ([(4, 4)], (), (3,), False),
        ([(6, 6)], (), (3,), False),
    ],
)
def test_answer_of_a_message_before_a_lost_message_is_unknown(
    lost: list[Span], unanswered: tuple[int, ...], unknown: tuple[int, ...], unfinished: bool
) -> None:
    found = turn_state(_stored([USER, _seen(1), USER, _calls("a"), _result("a")]), lost)
    assert (found.unanswered, found.unknown) == (unanswered, unknown)
    assert found.is_unfinished == unfinished


def test_answer_to_returns_only_an_answer_that_names_the_message() -> None:
    history = _stored([USER, USER, _answering(1), ANSWER, _seen(2), _answering(2), _answering(2)])
    assert [getattr(answer_to(history, seq), "seq", None) for seq in (1, 2, 5)] == [3, 6, None]
