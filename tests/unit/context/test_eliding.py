"""Texts and turns made shorter."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stenolog.context.arranging import Needs, entries_of
from stenolog.context.eliding import cut, shorten_turn, skeleton
from unit.context.histories import CHEAP, assistant, faults, sessions, stored, tool, user


@given(st.text(max_size=400), st.integers(0, 120))
def test_a_text_that_is_cut_keeps_its_mark_and_its_size(text: str, keep: int) -> None:
    short = cut(text, keep, CHEAP, mark="[…]")
    assert "[…]" in short
    assert short == "[…]" or CHEAP.text(short) <= keep


@given(sessions(), st.integers(0, 2_000))
def test_a_turn_that_was_shortened_fits_and_is_valid(
    history: list[dict[str, Any]], budget: int
) -> None:
    entries = entries_of(stored(history), Needs())
    last = [entry for entry in entries if entry.turn == entries[-1].turn]
    short = shorten_turn(last, budget, CHEAP)
    newest, rest = skeleton(last, CHEAP)
    if short is None:
        assert newest + rest > budget
        return
    bodies = [entry.body for entry in short.entries]
    assert sum(map(CHEAP.message, bodies)) <= budget
    assert faults(bodies) == []
    users = [entry.body for entry in last if entry.body["role"] == "user"]
    assert users[-1] in bodies
    assert len(short.entries) + len(short.left_out) == len(last)


def test_a_turn_that_fits_is_left_as_it_is() -> None:
    entries = entries_of(stored([user("a"), assistant(None, "c1"), tool("c1")]), Needs())
    short = shorten_turn(entries, 10_000, CHEAP)
    assert short is not None
    assert short.entries == entries
    assert (short.elided, short.left_out) == (0, ())


def test_several_new_results_share_the_room_and_short_ones_stay_whole() -> None:
    said = [user("a"), assistant(None, "c1", "c2", "c3"), tool("c1", "x" * 4_000)]
    said += [tool("c2", "short"), tool("c3", "y" * 4_000)]
    short = shorten_turn(entries_of(stored(said), Needs()), 600, CHEAP)
    assert short is not None
    one, two, three = [entry.body["content"] for entry in short.entries[2:]]
    assert two == "short"
    assert abs(len(one) - len(three)) < 300
    assert len(one) > 700
