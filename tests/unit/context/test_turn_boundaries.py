"""Tests where turns start."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.context.turn_state import find_turns
from stenolog.messages import body_of, pair_calls
from support.histories import anything, assistant, hands, sessions, tool, user, uses


def begins(messages: list[dict[str, Any]]) -> list[int]:
    return [turn.first for turn in find_turns(messages)]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], []),
        ([user("a"), assistant("b"), user("c"), assistant("d")], [0, 2]),
        ([assistant("hello"), user("a")], [0, 1]),
        ([user("a"), user("b")], [0, 1]),
        ([user("a"), assistant(None, "c1"), tool("c1"), assistant("b"), user("c")], [0, 4]),
        ([user("a"), assistant(None, "c1"), user("wait"), tool("c1"), assistant("b")], [0]),
        ([user("a"), assistant(None, "c1", "c2"), tool("c2"), user("wait"), tool("c1")], [0]),
        ([user("a"), assistant(None, "c1"), user("still there?")], [0]),
        ([user("a"), uses("b", "u1"), hands("u1"), assistant("c"), user("d")], [0, 4]),
        (
            [user("a"), assistant(None, "c1"), user("b"), assistant("c"), user("d"), user("e")],
            [0, 4, 5],
        ),
        (
            [
                *(user("a"), assistant(None, "c1"), assistant("b")),
                *(user("c"), assistant(None, "c1"), tool("c1"), assistant("d")),
            ],
            [0, 3],
        ),
    ],
    ids=[
        "nothing",
        "questions and answers",
        "a greeting first",
        "two questions in a row",
        "a call and its result",
        "a user who does not wait",
        "results in another order",
        "a call that runs",
        "calls as parts of the content",
        "a missing result",
        "a reused id",
    ],
)
def test_turn_starts(messages: list[dict[str, Any]], expected: list[int]) -> None:
    assert begins(messages) == expected


@given(st.one_of(sessions(), anything()))
def test_turns_cover_all_messages_and_keep_calls_with_results(
    messages: list[dict[str, Any]],
) -> None:
    turns = find_turns(messages)
    assert [at for turn in turns for at in range(turn.first, turn.end)] == [*range(len(messages))]
    assert all(len(turn) > 0 for turn in turns)
    numbers = {at: n for n, turn in enumerate(turns) for at in range(turn.first, turn.end)}
    for (call, _), (result, _) in pair_calls([body_of(message) for message in messages]).items():
        assert call < result
        assert numbers[call] == numbers[result]


@given(sessions())
def test_every_later_turn_starts_with_a_user_message(messages: list[dict[str, Any]]) -> None:
    assert all(messages[turn.first]["role"] == "user" for turn in find_turns(messages))
