"""Tests when a conversation is summarized, and up to which message."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.context.request_messages import ProviderRequirements, to_request_messages
from stenolog.context.summarize import SummaryPlan, Trigger, plan_summary
from stenolog.context.turn_state import find_turns
from stenolog.context.window import Limits
from stenolog.messages import body_of, pair_calls
from support.histories import CHEAP, anything, assistant, sessions, stored, talk, tool, user

SMALL = Limits(max_context_tokens=2_000, max_history_messages=10, reserve=100)


def planned(history: list[dict[str, Any]], **given: Any) -> SummaryPlan | None:
    return plan_summary(stored(history), **{"limits": SMALL, "tokens": CHEAP} | given)


LONG = talk(4, size=1_000)


@pytest.mark.parametrize(
    ("history", "options", "reason", "kept"),
    [
        (talk(5), {}, None, 0),
        ([], {}, None, 0),
        (LONG, {}, "tokens", 2),
        (talk(6), {}, "count", 4),  # complete turns, at most half of ten
        (talk(4), {"trigger": "manual"}, "manual", 2),
        (talk(1), {"trigger": "manual"}, None, 0),
        (talk(4), {"trigger": "overflow"}, "overflow", 2),
        (talk(4), {"overfull": True}, "tokens", 4),
        (talk(4, size=400), {}, None, 0),
        (talk(4, size=400), {"fixed": 1_600}, "tokens", 2),
        (talk(6), {"undone": True}, None, 0),
        (talk(6, size=1_000), {"undone": True}, "tokens", 2),
    ],
)
def test_reason_and_kept_messages_of_a_plan(
    history: list[dict[str, Any]], options: dict[str, Any], reason: str | None, kept: int
) -> None:
    plan = planned(history, **options)
    if plan is None:
        assert reason is None
        return
    assert (plan.reason, plan.kept) == (reason, kept)
    assert (plan.messages[0].seq, plan.upto) == (1, len(history) - kept)


def test_single_turn_is_never_cut() -> None:
    turn = [user("a"), *[message for n in range(30) for message in _step(n)]]
    assert planned(turn) is None
    assert planned([*turn, assistant("done")], trigger="overflow") is None
    plan = planned([*talk(1), *turn])
    assert plan is not None
    assert plan.upto == 2


def _step(number: int) -> list[dict[str, Any]]:
    return [assistant(None, f"c{number}"), tool(f"c{number}", "r" * 400)]


@given(
    st.one_of(sessions(), anything()),
    st.sampled_from(["auto", "manual", "overflow"]),
    st.integers(100, 4_000),
    st.integers(1, 20),
    st.integers(0, 2_000),
    st.sampled_from(["", "They met. " * 20]),
    st.booleans(),
)
def test_every_plan_hides_messages_and_cuts_at_a_turn(
    history: list[dict[str, Any]],
    trigger: Trigger,
    tokens: int,
    count: int,
    fixed: int,
    summary: str,
    undone: bool,
) -> None:
    limits = Limits(max_context_tokens=tokens, max_history_messages=count)
    messages = stored(history)
    plan = plan_summary(
        messages,
        summary=summary,
        floor=0,
        fixed=fixed,
        limits=limits,
        tokens=CHEAP,
        trigger=trigger,
        undone=undone,
    )
    begins = [turn.first for turn in find_turns(history)]
    sent = [
        (begins[entry.turn], entry.body)
        for entry in to_request_messages(messages, ProviderRequirements())
    ]

    def taken(first: int) -> int:
        """Return the tokens of the sent messages from this one on."""
        return sum(CHEAP.message(body) for begin, body in sent if begin >= first)

    if plan is None:
        if trigger == "auto" and len(begins) > 1:
            assert taken(0) + CHEAP.text(summary) <= limits.history(fixed)
            assert undone or len(messages) <= count
        return
    cut = len(plan.messages)
    assert list(plan.messages) == messages[:cut] != []
    assert plan.upto == messages[cut - 1].seq
    assert plan.kept == len(messages) - cut > 0
    assert cut in begins
    for (call, _), (result, _) in pair_calls([body_of(message) for message in messages]).items():
        assert (call < cut) == (result < cut)
    if cut != begins[-1]:
        assert plan.kept <= count // 2
        assert taken(cut) + plan.summary_tokens <= limits.history(fixed) // 2


@pytest.mark.parametrize("trigger", ["auto", "manual", "overflow"])
def test_no_plan_is_needed_after_a_plan(trigger: Trigger) -> None:
    history = talk(30, size=200)
    plan = planned(history, trigger=trigger)
    assert plan is not None
    left = stored(history)[len(plan.messages) :]
    summary = "s" * 4 * plan.summary_tokens
    assert plan_summary(left, summary=summary, limits=SMALL, tokens=CHEAP) is None
