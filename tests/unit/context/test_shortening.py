"""Tests shortening of texts and turns."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stenolog.context.request_messages import NO_RESULT, ProviderRequirements, to_request_messages
from stenolog.context.shortening import cut_middle, minimum_tokens, shorten_turn
from support.histories import (
    CHEAP,
    assistant,
    faults,
    hands,
    sessions,
    stored,
    thinks,
    tool,
    user,
    uses,
)


@given(st.text(max_size=400), st.integers(0, 120))
def test_cut_text_has_its_mark_and_fits(text: str, keep: int) -> None:
    short = cut_middle(text, keep, CHEAP, mark="[…]")
    assert "[…]" in short
    assert short == "[…]" or CHEAP.text(short) <= keep


@given(sessions(), st.integers(0, 2_000))
def test_shortened_turn_fits_and_is_valid(history: list[dict[str, Any]], budget: int) -> None:
    entries = to_request_messages(stored(history), ProviderRequirements())
    last = [entry for entry in entries if entry.turn == entries[-1].turn]
    short = shorten_turn(last, budget, CHEAP)
    newest, rest = minimum_tokens(last, CHEAP)
    if short is None:
        assert newest + rest > budget
        return
    bodies = [entry.body for entry in short.entries]
    assert sum(map(CHEAP.message, bodies)) <= budget
    assert faults(bodies) == []
    users = [entry.body for entry in last if entry.body["role"] == "user"]
    assert users[-1] in bodies
    assert len(short.entries) + len(short.left_out) == len(last)


def test_turn_that_fits_is_unchanged() -> None:
    entries = to_request_messages(
        stored([user("a"), assistant(None, "c1"), tool("c1")]), ProviderRequirements()
    )
    short = shorten_turn(entries, 10_000, CHEAP)
    assert short is not None
    assert short.entries == entries
    assert (short.elided, short.left_out) == (0, ())


def test_pointers_name_the_seq_of_their_text() -> None:
    said = [user("a"), uses("b", "u1", "u2", "u3", "u4"), hands("u1"), hands("u3"), hands("u2")]
    for body, text in zip(said[2:], ["x" * 4_000, "short", "y" * 4_000], strict=True):
        body["content"][0]["content"] = text
    short = shorten_turn(to_request_messages(stored(said), ProviderRequirements()), 200, CHEAP)
    assert short is not None
    one, two, three, four = [part["content"] for part in short.entries[2].body["content"]]
    assert one.strip("x\n") == "[… elided: 1,000 tokens; full text at seq 3]"
    assert two.strip("y\n") == "[… elided: 1,000 tokens; full text at seq 5]"
    assert (three, four) == ("short", NO_RESULT)


@given(sessions(), st.integers(0, 300))
def test_text_shorter_than_its_pointer_is_not_elided(
    history: list[dict[str, Any]], budget: int
) -> None:
    for body in history:
        if body["role"] == "tool":
            body["content"] = body["content"][:20]
    entries = to_request_messages(stored(history), ProviderRequirements())
    last = [entry for entry in entries if entry.turn == entries[-1].turn]
    short = shorten_turn(last, budget, CHEAP)
    if short is not None:
        results = [entry for entry in last if entry.body["role"] == "tool"]
        kept = [entry for entry in short.entries if entry.body["role"] == "tool"]
        assert [entry for entry in results if entry in kept] == kept


def test_short_result_next_to_a_long_one_is_not_elided() -> None:
    said = [user("a"), uses("b", "u1", "u2", "u3"), hands("u1", "u2"), uses("c", "u4"), hands("u4")]
    said[2]["content"][1]["content"] = "x" * 4_000
    short = shorten_turn(to_request_messages(stored(said), ProviderRequirements()), 200, CHEAP)
    assert short is not None
    assert [part["content"] for part in short.entries[2].body["content"]] == [
        "seen u1",
        "[… elided: 1,000 tokens; full text at seq 3]",
        NO_RESULT,
    ]


def test_result_without_text_is_elided() -> None:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    said = [user("a"), assistant(None, "c1"), tool("c1", image), assistant(None, "c2"), tool("c2")]
    short = shorten_turn(to_request_messages(stored(said), ProviderRequirements()), 200, CHEAP)
    assert short is not None
    assert "full text at seq 3" in short.entries[2].body["content"]


def test_thinking_is_dropped_before_an_error() -> None:
    said = [user("a"), {**assistant(None, "c1"), "reasoning_content": "h" * 4_000}, tool("c1")]
    short = shorten_turn(
        to_request_messages(stored(said), ProviderRequirements(reasoning="all")), 200, CHEAP
    )
    assert short is not None
    assert [entry.body for entry in short.entries] == [user("a"), assistant(None, "c1"), tool("c1")]
    said[1] = thinks("h" * 4_000, "u1")
    said[2] = hands("u1")
    short = shorten_turn(
        to_request_messages(stored(said), ProviderRequirements(reasoning="all")), 200, CHEAP
    )
    assert short is not None
    assert [entry.body for entry in short.entries] == [user("a"), uses("so", "u1"), hands("u1")]


def test_new_results_share_the_budget_and_short_ones_are_kept() -> None:
    said = [user("a"), assistant(None, "c1", "c2", "c3"), tool("c1", "x" * 4_000)]
    said += [tool("c2", "short"), tool("c3", "y" * 4_000)]
    short = shorten_turn(to_request_messages(stored(said), ProviderRequirements()), 600, CHEAP)
    assert short is not None
    one, two, three = [entry.body["content"] for entry in short.entries[2:]]
    assert two == "short"
    assert abs(len(one) - len(three)) < 300
    assert len(one) > 700
