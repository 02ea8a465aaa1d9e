"""The state of a session's last turn: unanswered messages and tool calls without a result.

The state is derived from the visible messages. A finished answer is an assistant message without
tool calls. A finished answer answers every user message that its model had seen
(`catalog/message_metadata.py`). Messages after the last finished answer are an unfinished turn.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from stenolog.catalog.message_metadata import client_call_ids, last_seen_seq
from stenolog.messages import CallPosition, ToolCall, calls_of, has_text, pair
from stenolog.records import Message


class TurnRange(Struct, frozen=True):
    """A range of messages by index. `first` is included, `end` is not."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def find_turns(bodies: Sequence[Mapping[str, Any]]) -> list[TurnRange]:
    """Return the turns, which together contain all messages.

    A turn starts at a user message, unless a tool call is still open. A call is open until its
    result. A call without a result is open until the next assistant message, because the model of
    that message received "[interrupted]" as the result. Without this rule, a lost result would
    merge all later messages into one turn. Messages before the first user message form a separate
    turn.
    """
    return split_turns(bodies, pair(bodies))


def split_turns(
    bodies: Sequence[Mapping[str, Any]],
    answers: Mapping[CallPosition, CallPosition],
    calls: Sequence[Sequence[ToolCall]] | None = None,
) -> list[TurnRange]:
    """Return the turns, given the result of each call (see `pair`).

    `calls`: the calls of each message, if the caller has read them.
    """
    if not bodies:
        return []
    calls = list(map(calls_of, bodies)) if calls is None else calls
    last_open = _last_open_indexes(bodies, answers, calls) if any(calls) else [-1] * len(bodies)
    starts = [0]
    for index, body in enumerate(bodies):
        if index > 0 and index > last_open[index] and has_text(body):
            starts.append(index)
    return [
        TurnRange(first, end) for first, end in zip(starts, [*starts[1:], len(bodies)], strict=True)
    ]


def _last_open_indexes(
    bodies: Sequence[Mapping[str, Any]],
    answers: Mapping[CallPosition, CallPosition],
    calls: Sequence[Sequence[ToolCall]],
) -> list[int]:
    """Return for each message the last index at which an earlier call is still open."""
    by_assistant = [index for index, body in enumerate(bodies) if body.get("role") == "assistant"]
    next_assistant = dict(pairwise(by_assistant))
    last_open_indexes = []
    last_open = -1
    for index, message_calls in enumerate(calls):
        last_open_indexes.append(last_open)
        for place in range(len(message_calls)):
            result = answers.get((index, place))
            end = result[0] if result else next_assistant.get(index, len(bodies)) - 1
            last_open = max(last_open, end)
    return last_open_indexes


def is_finished_answer(body: Mapping[str, Any]) -> bool:
    """Return whether a message is an assistant message without tool calls."""
    return body.get("role") == "assistant" and not calls_of(body)


class TurnState(Struct, frozen=True, kw_only=True):
    """The pending work of a session."""

    unanswered: tuple[int, ...] = ()
    """Seqs of the user messages that no finished answer has seen."""
    open_calls: tuple[ToolCall, ...] = ()
    """Tool calls of the unfinished turn that have no result and do not wait for the client."""
    has_calls: bool = False
    """Whether the unfinished turn contains tool calls."""
    client_calls: tuple[ToolCall, ...] = ()
    """Calls without a result that the client must run; none after a new user message."""
    abandoned: frozenset[str] = frozenset()
    """Ids of those open calls that the client should have run before the newest user message."""

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
    newest_messages: list[tuple[Message, dict[str, Any]]] = []
    finished, seen_seq = None, 0
    for message in reversed(history):
        # An answer sees only earlier messages, so earlier answers cannot raise `seen_seq`.
        if message.seq <= seen_seq:
            break
        body = message.to_dict()
        if is_finished_answer(body):
            finished = len(newest_messages) if finished is None else finished
            seen_seq = max(seen_seq, last_seen_seq(body, message.seq))
        newest_messages.append((message, body))
    # A result comes after its call, so only the messages of the unfinished turn matter.
    unfinished_bodies = [body for _, body in newest_messages[:finished]][::-1]
    answers = pair(unfinished_bodies)
    calls = [(index, calls_of(body)) for index, body in enumerate(unfinished_bodies)]
    unanswered_calls = [
        (index, call)
        for index, message_calls in calls
        for place, call in enumerate(message_calls)
        if (index, place) not in answers
    ]
    # A new user message abandons earlier client calls.
    last_user_message = max(
        (index for index, body in enumerate(unfinished_bodies) if has_text(body)), default=-1
    )
    client_calls = [
        (index, call)
        for index, call in unanswered_calls
        if index > last_user_message and call.id in client_call_ids(unfinished_bodies[index])
    ]
    return TurnState(
        unanswered=tuple(
            message.seq
            for message, body in reversed(newest_messages)
            if message.seq > seen_seq and has_text(body)
        ),
        open_calls=tuple(
            call for index, call in unanswered_calls if (index, call) not in client_calls
        ),
        client_calls=tuple(call for _, call in client_calls),
        abandoned=frozenset(
            call.id
            for index, call in unanswered_calls
            if call.id
            and index <= last_user_message
            and call.id in client_call_ids(unfinished_bodies[index])
        ),
        has_calls=any(message_calls for _, message_calls in calls),
    )


def answer_to(history: Sequence[Message], seq: int) -> Message | None:
    """Return the finished answer that has seen the message at `seq`, or None."""
    for message in history:
        if message.seq > seq:
            body = message.to_dict()
            if is_finished_answer(body) and last_seen_seq(body, message.seq) >= seq:
                return message
    return None
