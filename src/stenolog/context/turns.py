"""Where turns begin: the only places at which a conversation may be cut."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from stenolog.context.shapes import Spot, calls_of, pair, speaks


class Turn(Struct, frozen=True):
    """A run of messages by their index: from `first` up to `end`, which is not part of it."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def find_turns(bodies: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The turns, which together are all messages.

    A turn begins at a user message that has no open tool call before it. A call is open until its
    result; one that never gets a result, until the model speaks again: it has been told then that
    the call was interrupted, and one lost result must not make everything after it one turn. What
    stands before the first user message is a turn of its own.
    """
    return turns_of(bodies, pair(bodies))


def turns_of(bodies: Sequence[Mapping[str, Any]], answers: Mapping[Spot, Spot]) -> list[Turn]:
    """The same, where it is known already which result answers which call."""
    if not bodies:
        return []
    begins = [0]
    open_until = _open_until(bodies, answers)
    for index, body in enumerate(bodies):
        if index > 0 and index > open_until[index] and speaks(body):
            begins.append(index)
    return [Turn(first, end) for first, end in zip(begins, [*begins[1:], len(bodies)], strict=True)]


def _open_until(bodies: Sequence[Mapping[str, Any]], answers: Mapping[Spot, Spot]) -> list[int]:
    """For each message the last index at which a call from before it is still open."""
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
