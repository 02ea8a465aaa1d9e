"""The state of a session's last turn: unanswered messages and open tool calls.

The state is derived from the visible messages. A finished answer is an assistant message without
tool calls. It answers every user message that its model had seen (`catalog/message_metadata.py`).
Messages after the last finished answer are an unfinished turn.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from stenolog.catalog.message_metadata import client_call_ids, last_seen_seq
from stenolog.messages import Spot, ToolCall, calls_of, has_text, pair
from stenolog.records import Message


class TurnRange(Struct, frozen=True):
    """A range of messages by index. `first` is included, `end` is not."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def find_turns(bodies: Sequence[Mapping[str, Any]]) -> list[TurnRange]:
    """Return the turns, which together contain all messages.

    A turn starts at a user message that follows no open tool call. A call is open until its result.
    A call without a result is open until the next assistant message, because the model then
    received "[interrupted]" as the result. So a lost result does not merge all later messages into
    one turn. Messages before the first user message form a separate turn.
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
    next_spoken = dict(pairwise(spoken))
    last_open = []
    reach = -1
    for index, body in enumerate(bodies):
        last_open.append(reach)
        for place in range(len(calls_of(body))):
            result = answers.get((index, place))
            end = result[0] if result is not None else next_spoken.get(index, len(bodies)) - 1
            reach = max(reach, end)
    return last_open


class TurnState(Struct, frozen=True, kw_only=True):
    """The pending work of a session."""

    unanswered: tuple[int, ...] = ()
    """Seqs of the user messages that no finished answer has seen."""
    open_calls: tuple[ToolCall, ...] = ()
    """Tool calls of the unfinished turn that have no result and do not wait for the client."""
    has_calls: bool = False
    """Whether the unfinished turn contains tool calls."""
    client_calls: tuple[ToolCall, ...] = ()
    """Calls of the client without a result.

    If the user sent another message instead of a result, these calls are in `open_calls`.
    """

    abandoned: frozenset[str] = frozenset()
    """Ids of the open calls that the client should have run."""

    @property
    def waits_for_client(self) -> bool:
        """Whether the turn waits only for tool results from the client."""
        return bool(self.client_calls) and not self.open_calls

    @property
    def is_unfinished(self) -> bool:
        """Whether a turn must be resumed or closed."""
        return not self.waits_for_client and (bool(self.unanswered) or self.has_calls)


def turn_state(history: Sequence[Message]) -> TurnState:
    """Return the state of a session with these visible messages."""
    bodies = [message.to_dict() for message in history]
    finished, seen_seq = -1, 0
    for index, body in enumerate(bodies):
        if body.get("role") == "assistant" and not calls_of(body):
            finished = index
            seen_seq = max(seen_seq, last_seen_seq(body, history[index].seq))
    answers = pair(bodies)
    after = range(finished + 1, len(bodies))
    calls = [(index, calls_of(bodies[index])) for index in after]
    without = [
        (index, call)
        for index, message_calls in calls
        for place, call in enumerate(message_calls)
        if (index, place) not in answers
    ]
    # A new user message abandons earlier client calls.
    last_said = max((index for index in after if has_text(bodies[index])), default=-1)
    client_calls = [
        (index, call)
        for index, call in without
        if index > last_said and call.id in client_call_ids(bodies[index])
    ]
    return TurnState(
        unanswered=tuple(
            message.seq
            for message, body in zip(history, bodies, strict=True)
            if message.seq > seen_seq and has_text(body)
        ),
        open_calls=tuple(call for index, call in without if (index, call) not in client_calls),
        client_calls=tuple(call for _, call in client_calls),
        abandoned=frozenset(
            call.id
            for index, call in without
            if call.id and index <= last_said and call.id in client_call_ids(bodies[index])
        ),
        has_calls=any(message_calls for _, message_calls in calls),
    )


def answer_to(history: Sequence[Message], seq: int) -> Message | None:
    """Return the finished answer that has seen the message at `seq`, or None."""
    for message in history:
        if message.seq > seq:
            body = message.to_dict()
            is_answer = body.get("role") == "assistant" and not calls_of(body)
            if is_answer and last_seen_seq(body, message.seq) >= seq:
                return message
    return None
