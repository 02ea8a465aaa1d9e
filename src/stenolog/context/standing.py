"""Where a session stands, from its log alone: what is answered, and what was left in the middle.

A finished answer is an assistant message without tool calls; it answers every user message that it
had seen (`catalog/answers.py`). Whatever stands behind the last one is a turn that is not over.
"""

from collections.abc import Sequence

from msgspec import Struct

from stenolog.catalog.answers import calls_of_client, seen_by
from stenolog.context.shapes import Call, calls_of, pair, speaks
from stenolog.records import Message


class Standing(Struct, frozen=True, kw_only=True):
    """What is left to do in a session."""

    unanswered: tuple[int, ...] = ()
    """The seqs of the user messages that no finished answer has seen."""
    open_calls: tuple[Call, ...] = ()
    """The tool calls of the unfinished turn that have no result."""
    in_tools: bool = False
    """Whether the turn broke off after the model had called tools."""
    of_client: tuple[Call, ...] = ()
    """Of the calls without a result, those that the client carries out. Where the user has gone on
    without them, they are among the open calls."""

    given_up: frozenset[str] = frozenset()
    """Of the open calls, the ids of those that the client was to carry out."""

    @property
    def waits(self) -> bool:
        """Whether the turn waits for its client: for results of tools, and for nothing else."""
        return bool(self.of_client) and not self.open_calls

    @property
    def unfinished(self) -> bool:
        """Whether a turn has to be gone on with, or closed."""
        return not self.waits and (bool(self.unanswered) or self.in_tools)


def standing(history: Sequence[Message]) -> Standing:
    """Where the session of these visible messages stands."""
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
    # Whoever says something else instead has given the calls before it up.
    last_said = max((index for index in after if speaks(bodies[index])), default=-1)
    of_client = [
        (index, call)
        for index, call in without
        if index > last_said and call.id in calls_of_client(bodies[index])
    ]
    return Standing(
        unanswered=tuple(
            message.seq
            for message, body in zip(history, bodies, strict=True)
            if message.seq > seen and speaks(body)
        ),
        open_calls=tuple(call for index, call in without if (index, call) not in of_client),
        of_client=tuple(call for _, call in of_client),
        given_up=frozenset(
            call.id
            for index, call in without
            if call.id and index <= last_said and call.id in calls_of_client(bodies[index])
        ),
        in_tools=any(made for _, made in calls),
    )


def answer_to(history: Sequence[Message], seq: int) -> Message | None:
    """The finished answer that has seen the message at this seq; None where there is none yet."""
    for message in history:
        if message.seq > seq:
            body = message.to_dict()
            is_answer = body.get("role") == "assistant" and not calls_of(body)
            if is_answer and seen_by(body, message.seq) >= seq:
                return message
    return None
