"""The state of a session's last turn: unanswered messages and tool calls without a result.

The state is derived from the visible messages. A finished answer is an assistant message without
tool calls. A finished answer answers every user message that its model had seen
(`catalog/message_metadata.py`). Messages after the last finished answer are an unfinished turn.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct

from stenolog.catalog.message_metadata import AnsweredMessages, answered_seqs, client_call_ids
from stenolog.messages import CallPosition, ToolCall, calls_of, has_text, pair_calls
from stenolog.records import Message, Span


class TurnRange(Struct, frozen=True):
    """A range of messages by index. `first` is included, `end` is not."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


def find_turns(bodies: Sequence[Mapping[str, Any]]) -> list[TurnRange]:
    """Return the turns, which together contain all messages.

    A turn starts at a user message, unless a tool call is still open. A call is open until its
    result is stored. A call without a result is open until the next assistant message, because the
    model that wrote the message received "[interrupted]" as the result. Otherwise a lost result
    would merge all later messages into one turn. Messages before the first user message form a
    separate turn.
    """
    return split_turns(bodies, pair_calls(bodies), list(map(calls_of, bodies)))


def split_turns(
    bodies: Sequence[Mapping[str, Any]],
    results_by_call: Mapping[CallPosition, CallPosition],
    calls: Sequence[Sequence[ToolCall]],
) -> list[TurnRange]:
    """Return the turns, which together contain all messages.

    `results_by_call`: the position of the result of each tool call, from `pair_calls`. `calls`: the
    calls of each message.
    """
    if not bodies:
        return []
    assistant_indexes = [
        index for index, body in enumerate(bodies) if body.get("role") == "assistant"
    ]
    next_assistant_index = dict(pairwise(assistant_indexes))
    starts = [0]
    last_open = 0  # the last index at which a call is still open
    for index, (body, message_calls) in enumerate(zip(bodies, calls, strict=True)):
        if index > last_open and has_text(body):
            starts.append(index)
        for call_index in range(len(message_calls)):
            result = results_by_call.get((index, call_index))
            end = result[0] if result else next_assistant_index.get(index, len(bodies)) - 1
            last_open = max(last_open, end)
    return [TurnRange(first, end) for first, end in pairwise([*starts, len(bodies)])]


def is_finished_answer(body: Mapping[str, Any]) -> bool:
    """Return whether a message is an assistant message without tool calls."""
    return body.get("role") == "assistant" and not calls_of(body)


class TurnState(Struct, frozen=True, kw_only=True):
    """The pending work of a session."""

    unanswered: tuple[int, ...] = ()
    """Seqs of the user messages that no finished answer has seen."""
    unknown: tuple[int, ...] = ()
    """Seqs of further such messages; a lost message after each of them may be its answer."""
    open_calls: tuple[ToolCall, ...] = ()
    """Tool calls of the unfinished turn that have no result and do not wait for the client."""
    has_calls: bool = False
    """Whether the unfinished turn contains tool calls."""
    client_results: tuple[int, ...] = ()
    """Seqs of the results that the client has stored in the unfinished turn."""
    client_calls: tuple[ToolCall, ...] = ()
    """Calls without a result that the client must run; none after a new user message."""
    abandoned: frozenset[str] = frozenset()
    """Ids of those open calls that the client should have run before the newest user message."""

    @property
    def questions(self) -> tuple[int, ...]:
        """Seqs of the messages that the next answer answers."""
        return tuple(sorted((*self.unanswered, *self.client_results)))

    @property
    def waits_for_client(self) -> bool:
        """Whether the turn waits only for tool results from the client."""
        return bool(self.client_calls) and not self.open_calls

    @property
    def is_unfinished(self) -> bool:
        """Whether a turn must be resumed or closed.

        A turn whose messages may have been answered must not be resumed.
        """
        has_open_turn = self.has_calls and not self.unknown
        return not self.waits_for_client and (bool(self.unanswered) or has_open_turn)


def turn_state(history: Sequence[Message], lost: Sequence[Span] = ()) -> TurnState:
    """Return the state of a session with these visible messages and these lost messages."""
    newest_messages: list[tuple[Message, dict[str, Any]]] = []
    finished_index, seen = None, AnsweredMessages()
    for message in reversed(history):
        # An answer sees only earlier messages, so earlier answers cannot add later messages.
        if message.seq <= seen.upto:
            break
        body = message.to_dict()
        if is_finished_answer(body):
            finished_index = len(newest_messages) if finished_index is None else finished_index
            seen.add(body, message.seq)
        newest_messages.append((message, body))
    # A result comes after its call, so only the messages of the unfinished turn matter.
    unfinished_messages = newest_messages[:finished_index][::-1]
    unfinished_bodies = [body for _, body in unfinished_messages]
    results_by_call = pair_calls(unfinished_bodies)
    calls = [(index, calls_of(body)) for index, body in enumerate(unfinished_bodies)]
    calls_without_result = [
        (index, call)
        for index, message_calls in calls
        for call_index, call in enumerate(message_calls)
        if (index, call_index) not in results_by_call
    ]
    # A new user message abandons earlier client calls.
    last_user_index = max(
        (index for index, body in enumerate(unfinished_bodies) if has_text(body)), default=-1
    )
    calls_for_client = [
        (index, call)
        for index, call in calls_without_result
        if call.id in client_call_ids(unfinished_bodies[index])
    ]
    client_calls = [(index, call) for index, call in calls_for_client if index > last_user_index]
    client_results = {
        unfinished_messages[result_index][0].seq
        for (index, call_index), (result_index, _) in results_by_call.items()
        if calls[index][1][call_index].id in client_call_ids(unfinished_bodies[index])
    }
    without_answer = [
        message.seq
        for message, body in reversed(newest_messages)
        if message.seq not in seen and has_text(body)
    ]
    last_lost = max((last for _, last in lost), default=0)  # guard: lost-answer-is-unknown
    return TurnState(
        unanswered=tuple(seq for seq in without_answer if seq > last_lost),
        unknown=tuple(seq for seq in without_answer if seq < last_lost),
        open_calls=tuple(
            call for index, call in calls_without_result if (index, call) not in client_calls
        ),
        client_calls=tuple(call for _, call in client_calls),
        abandoned=frozenset(
            call.id for index, call in calls_for_client if call.id and index <= last_user_index
        ),
        has_calls=any(message_calls for _, message_calls in calls),
        client_results=tuple(sorted(client_results)),  # guard: answered-tool-result
    )


def answer_to(history: Iterable[Message], seq: int) -> Message | None:
    """Return the first of these messages that names the message at `seq` as answered, or None."""
    for message in history:
        is_later = message.seq > seq
        if is_later and seq in (answered_seqs(message.to_dict()) or ()):  # guard: answer-by-mark
            return message
    return None
