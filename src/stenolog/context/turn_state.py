"""The state of a session's last turn: unanswered messages and open tool calls.

It is derived from the visible messages. A finished answer is an assistant message without tool
calls; it answers every user message that it had seen (`catalog/message_metadata.py`). Messages
after the last finished answer are an unfinished turn.
"""

from collections.abc import Sequence

from msgspec import Struct

from stenolog.catalog.message_metadata import client_call_ids, seen_by
from stenolog.messages import ToolCall, calls_of, has_text, pair
from stenolog.records import Message


class TurnState(Struct, frozen=True, kw_only=True):
    """The pending work of a session."""

    unanswered: tuple[int, ...] = ()
    """Seqs of the user messages that no finished answer has seen."""
    open_calls: tuple[ToolCall, ...] = ()
    """Tool calls of the unfinished turn that have no result and do not wait for the client."""
    in_tools: bool = False
    """Whether the unfinished turn contains tool calls."""
    of_client: tuple[ToolCall, ...] = ()
    """Calls without a result that the client runs. If the user sent another message instead, these
    calls are in `open_calls`."""

    given_up: frozenset[str] = frozenset()
    """Ids of the open calls that the client should have run."""

    @property
    def waits(self) -> bool:
        """Whether the turn waits only for tool results from the client."""
        return bool(self.of_client) and not self.open_calls

    @property
    def unfinished(self) -> bool:
        """Whether a turn must be resumed or closed."""
        return not self.waits and (bool(self.unanswered) or self.in_tools)


def turn_state(history: Sequence[Message]) -> TurnState:
    """Return the state of a session with these visible messages."""
    bodies = [message.to_dict() for message in history]
    finished, seen = -1, 0
    for index, body in enumerate(bodies):
        if body.get("role") == "assistant" and not calls_of(body):
            finished = index
            seen = max(seen, seen_by(body, history[index].seq))
    answers = pair(bodies)
    after = range(finished + 1, len(bodies))
    calls = [(index, calls_of(bodies[index])) for index in after]
    without = [
        (index, call)
        for index, made in calls
        for place, call in enumerate(made)
        if (index, place) not in answers
    ]
    # A new user message abandons the client calls before it.
    last_said = max((index for index in after if has_text(bodies[index])), default=-1)
    of_client = [
        (index, call)
        for index, call in without
        if index > last_said and call.id in client_call_ids(bodies[index])
    ]
    return TurnState(
        unanswered=tuple(
            message.seq
            for message, body in zip(history, bodies, strict=True)
            if message.seq > seen and has_text(body)
        ),
        open_calls=tuple(call for index, call in without if (index, call) not in of_client),
        of_client=tuple(call for _, call in of_client),
        given_up=frozenset(
            call.id
            for index, call in without
            if call.id and index <= last_said and call.id in client_call_ids(bodies[index])
        ),
        in_tools=any(made for _, made in calls),
    )


def answer_to(history: Sequence[Message], seq: int) -> Message | None:
    """Return the finished answer that has seen the message at `seq`, or None."""
    for message in history:
        if message.seq > seq:
            body = message.to_dict()
            is_answer = body.get("role") == "assistant" and not calls_of(body)
            if is_answer and seen_by(body, message.seq) >= seq:
                return message
    return None
