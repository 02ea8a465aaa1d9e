"""Boundaries of turns: the only positions at which a conversation may be cut."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from stenolog.messages import Spot, calls_of, has_text, pair


class TurnRange(Struct, frozen=True):
    """A range of messages by index. `first` is included, `end` is not."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def find_turns(bodies: Sequence[Mapping[str, Any]]) -> list[TurnRange]:
    """Return the turns, which together contain all messages.

    A turn starts at a user message that follows no open tool call. A call is open until its result;
    a call without a result is open until the next assistant message, because the model has been
    sent "[interrupted]" by then. So one lost result does not merge everything after it into one
    turn. Messages before the first user message form a separate turn.
    """
    return split_turns(bodies, pair(bodies))


def split_turns(
    bodies: Sequence[Mapping[str, Any]], answers: Mapping[Spot, Spot]
) -> list[TurnRange]:
    """Return the turns, given the result of each call (see `pair`)."""
    if not bodies:
        return []
    begins = [0]
    open_until = _open_until(bodies, answers)
    for index, body in enumerate(bodies):
        if index > 0 and index > open_until[index] and has_text(body):
            begins.append(index)
    return [
        TurnRange(first, end) for first, end in zip(begins, [*begins[1:], len(bodies)], strict=True)
    ]


def _open_until(bodies: Sequence[Mapping[str, Any]], answers: Mapping[Spot, Spot]) -> list[int]:
    """Return for each message the last index at which an earlier call is still open."""
    spoken = [index for index, body in enumerate(bodies) if body.get("role") == "assistant"]
    again = dict(pairwise(spoken))
    found = []
    reach = -1
    for index, body in enumerate(bodies):
        found.append(reach)
        for place in range(len(calls_of(body))):
            result = answers.get((index, place))
            end = result[0] if result is not None else again.get(index, len(bodies)) - 1
            reach = max(reach, end)
    return found
