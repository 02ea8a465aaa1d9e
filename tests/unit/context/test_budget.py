"""Tests the token budget: limits of each part of a request."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stenolog.context.window import Limits
from stenolog.errors import UsageError


def test_default_limits_match_the_docs() -> None:
    assert Limits().max_context_tokens == 32_000
    assert Limits().max_history_messages == 50
    assert Limits().answer == 4_096
    assert Limits(max_context_tokens=8_000).answer == 2_000


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"max_context_tokens": 0}, "max_context_tokens must be .* not 0"),
        ({"max_context_tokens": "32000"}, "max_context_tokens must be .* not '32000'"),
        ({"max_history_messages": True}, "max_history_messages must be .* not True"),
        ({"reserve": -1}, "reserve must be .* not -1"),
        (
            {"max_context_tokens": 4_096, "reserve": 4_096},
            r"reserve must be less than max_context_tokens \(4,096\)",
        ),
    ],
)
def test_invalid_limits_are_rejected_by_name(given: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        Limits(**given)


@given(st.integers(1, 100_000), st.one_of(st.none(), st.integers(1, 10_000)))
def test_enough_for_returns_a_sufficient_limit(sent: int, reserve: int | None) -> None:
    limits = Limits(max_context_tokens=100_000, reserve=reserve)
    enough = limits.enough_for(sent)
    assert Limits(max_context_tokens=max(enough, 2), reserve=reserve).room >= sent


@given(st.integers(2, 50_000), st.integers(1, 60_000), st.integers(0, 60_000))
def test_reduced_limits_are_valid(most: int, takes: int, fixed: int) -> None:
    smaller = Limits(max_context_tokens=most).at_most(takes)
    assert smaller.max_context_tokens <= max(min(most, takes), 2)
    assert 0 < smaller.answer < smaller.max_context_tokens
    assert 0 <= smaller.summary(fixed) <= smaller.summary() <= smaller.room // 8 + 1
