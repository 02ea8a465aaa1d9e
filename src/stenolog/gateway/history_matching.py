"""Find the new messages in a chat request by comparing the request with its session.

Some clients send only new messages, others send the whole conversation every time. A client has not
seen the tool calls that the agent ran: the client sees all texts of a turn as one message. A client
may also send messages that were summarized and are now hidden. A wrong match loses nothing: at
worst it hides messages, which can be made visible again. All functions are pure.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.message_metadata import client_call_ids, interruption
from stenolog.messages import ToolCall, calls_of, has_text, results_of, text_of, text_parts_of
from stenolog.records import Message

Body = Mapping[str, Any]

SEPARATOR = "\n\n"
"""Separator between the texts of one turn, which a client sees as one message."""


class ClientMessage(Struct, frozen=True, kw_only=True):
    """A message as a client sees it."""

    role: str
    content: object
    """Text, or the content parts of a user message."""
    calls: tuple[tuple[str, object], ...] = ()
    """Calls that the client runs: name and arguments."""
    call_id: str = ""
    """Id of the call, for a result."""
    seq: int = 0
    """Seq of the last stored message whose text is in this message; 0 for a request's message."""
    end: int = 0
    """Number of stored messages up to and including the message with seq `seq`."""
    is_cut: bool = False
    """Whether the answer was cut off, so that the client may have seen only its beginning."""


class Match(Struct, frozen=True, kw_only=True):
    """How a request continues its session."""

    kept_count: int
    """Number of visible messages at the start of the session that stay visible."""
    new_messages: tuple[Body, ...]
    """Messages of the request to append after the messages that stay visible."""
    answer_seq: int | None = None
    """Seq of the last answer, if the request only repeats messages before this answer."""
    question_seq: int = 0
    """Seq of the message that the answer at `answer_seq` answers; 0 if unknown."""
    has_calls: bool = False
    """Whether the answer at `answer_seq` has tool calls for the client."""
    is_stored: bool = False
    """Whether an earlier attempt has stored the request completely."""


def client_messages(history: Sequence[Message], *, start: int = 0) -> list[ClientMessage]:
    """Return the messages from index `start` as the client has seen them, newest last."""
    messages: list[ClientMessage] = []
    texts: list[str] = []
    agent_call_ids: set[str] = set()
    """Ids of the calls that the agent runs."""
    for end, message in enumerate(history[start:], start=start + 1):
        body = message.to_dict()
        if body.get("role") == "assistant":
            client_ids = client_call_ids(body)
            calls = calls_of(body)
            agent_call_ids |= {call.id for call in calls if call.id}
            agent_call_ids -= client_ids  # a later call may have the id of an earlier call
            if text := _normalized_text(body):
                texts.append(text)
            client_calls = [call for call in calls if call.id in client_ids]
            if calls and not client_calls:
                continue  # the agent runs the calls and continues
            messages.append(
                ClientMessage(
                    role="assistant",
                    content=" ".join(texts),
                    calls=tuple(map(_comparable_call, client_calls)),
                    seq=message.seq,
                    end=end,
                    is_cut=bool(interruption(body)),
                )
            )
            texts = []
        elif has_text(body):
            texts = []
            content = _unwrap_single_text(body.get("content"))
            messages.append(ClientMessage(role="user", content=content, seq=message.seq, end=end))
        else:
            messages += [
                _result_message(result.id, result.content, seq=message.seq, end=end)
                for result in results_of(body)
                if not result.id or result.id not in agent_call_ids
            ]
    return messages


def match_history(
    history: Sequence[Message],
    bodies: Sequence[Body],
    *,
    read_hidden: Callable[[], Sequence[Message]] | None = None,
) -> Match:
    """Compare the messages of a request with the visible messages of its session.

    `read_hidden` returns the hidden messages. `read_hidden` is called only if needed, and is None
    if the session has no hidden messages. `bodies` contains no system messages.
    """
    messages = [_parse_request_message(body) for body in bodies]
    if not any(message.role == "assistant" for message in messages):
        # The client sends only new messages: compare them with the end of the session.
        visible = client_messages(history, start=_start_of_last_seen(history, len(messages) + 1))
        return _match_new_messages(len(history), visible, messages, bodies)
    visible = client_messages(history)
    if read_hidden is not None:
        next_index = _index_after_visible(visible, messages)
        if next_index is not None:
            return Match(kept_count=len(history), new_messages=tuple(bodies[next_index:]))
        skipped = _count_hidden(client_messages(read_hidden()), visible, messages)
        if skipped is not None:
            return _match_full_history(len(history), visible, messages[skipped:], bodies[skipped:])
    common_count = _count_common_start(visible, messages)
    if visible and not common_count and (overlap := _count_overlap(visible, messages)):
        return Match(kept_count=len(history), new_messages=tuple(bodies[overlap:]))
    return _match_full_history(len(history), visible, messages, bodies)


def _start_of_last_seen(history: Sequence[Message], count: int) -> int:
    """Return the index of the `count`-th prompt from the end; 0 if there are fewer prompts.

    Returns 0 also if tool results follow that prompt, because the calls before a result determine
    whether the client has seen the result.
    """
    for index in range(len(history) - 1, -1, -1):
        body = history[index].to_dict()
        if has_text(body):
            count -= 1
            if not count:
                return index
        elif results_of(body):
            break
    return 0


def is_system_message(body: Body) -> bool:
    """Return whether a message of a request is a system message."""
    return body.get("role") in ("system", "developer")


def answer_text_at(history: Sequence[Message], seq: int) -> str:
    """Return all texts of the turn with the answer at `seq`, joined as the client sees them.

    `history` starts with the first message that the answer answers. Messages that arrived during
    the turn do not separate its texts.
    """
    texts: list[str] = []
    for message in history:
        body = message.to_dict()
        if body.get("role") == "assistant":
            texts += [text] if (text := text_parts_of(body).strip()) else []
            if message.seq == seq:
                return SEPARATOR.join(texts)
            if not calls_of(body) or client_call_ids(body):
                texts = []
    return ""


# --- the two kinds of clients ----------------------------------------------------------------
# `count` is the number of visible messages in the log.
# `visible` are the visible messages as the client sees them.
# `bodies` are the messages of the request as received, and `messages` as the client sees them.


def _match_new_messages(
    count: int, visible: list[ClientMessage], messages: list[ClientMessage], bodies: Sequence[Body]
) -> Match:
    """Match a request of a client that sends only new messages.

    If the log ends with the first messages of the request, an earlier request has stored them, and
    only the other messages are new. If the log ends with all messages of the request and an answer,
    the match also names the answer.
    """
    overlap = _count_overlap(visible, messages)
    match = Match(kept_count=count, new_messages=tuple(bodies[overlap:]))
    if overlap or len(visible) <= len(messages):
        return match
    before_answer = visible[-1 - len(messages) : -1]
    is_repeated = all(map(_is_same_message, before_answer, messages))
    return _with_answer(match, visible) if is_repeated else match


def _match_full_history(
    count: int, visible: list[ClientMessage], messages: list[ClientMessage], bodies: Sequence[Body]
) -> Match:
    """Match a request with the whole conversation: messages after the common start are new."""
    common_count = _count_common_start(visible, messages)
    kept_count = visible[common_count - 1].end if common_count else 0
    if common_count == len(visible):
        kept_count = count
    match = Match(kept_count=kept_count, new_messages=tuple(bodies[common_count:]))
    if match.new_messages or common_count + 1 != len(visible):
        return match
    return _with_answer(match, visible)


def _with_answer(match: Match, visible: list[ClientMessage]) -> Match:
    """Return the match with the seq of the last visible message, if this message is an answer."""
    answer = visible[-1]
    if answer.role != "assistant":
        return match
    question_seq = visible[-2].seq if len(visible) > 1 else 0
    return replace(
        match, answer_seq=answer.seq, question_seq=question_seq, has_calls=bool(answer.calls)
    )


def _index_after_visible(visible: list[ClientMessage], messages: list[ClientMessage]) -> int | None:
    """Return the index of the first message in the request after the visible messages.

    Returns None if the request lacks a visible message.
    """
    count = len(visible)
    for end in range(len(messages), count - 1, -1) if visible else ():
        if all(map(_is_same_message, visible, messages[end - count : end])):
            return end
    return None


def _count_hidden(
    hidden: list[ClientMessage], visible: list[ClientMessage], messages: list[ClientMessage]
) -> int | None:
    """Return how many messages at the start of the request are hidden; None if this is unclear.

    If several numbers are possible, return the number after which most visible messages follow.
    """
    # `hidden_end` is the number of hidden messages up to and including the last one found.
    hidden_count = hidden_end = 0
    remaining = enumerate(hidden, start=1)
    for message in messages:
        # Skip hidden messages that the client has removed from the conversation.
        end = next((end for end, other in remaining if _is_same_message(other, message)), None)
        if end is None:
            break
        hidden_count, hidden_end = hidden_count + 1, end
    candidates = [
        (common, index)
        for index in range(hidden_count + 1)
        if (common := _count_common_start(visible, messages, start=index)) or not visible
    ]
    if candidates:
        return max(candidates)[1]
    # If the client has removed all visible messages, its request ends with the last hidden message.
    return hidden_count if hidden_count and hidden_end == len(hidden) else None


def _count_common_start(
    visible: Sequence[ClientMessage], messages: Sequence[ClientMessage], *, start: int = 0
) -> int:
    """Return how many messages from index `start` of the request equal the first visible ones."""
    are_same = map(_is_same_message, visible, islice(messages, start, None))
    return sum(takewhile(bool, are_same))


def _count_overlap(visible: Sequence[ClientMessage], messages: Sequence[ClientMessage]) -> int:
    """Return how many messages at the start of the request equal the last visible messages."""
    for count in range(min(len(visible), len(messages)), 0, -1):
        if all(map(_is_same_message, visible[-count:], messages[:count])):
            return count
    return 0


# --- one message -----------------------------------------------------------------------------


def _is_same_message(stored: ClientMessage, sent: ClientMessage) -> bool:
    if stored.role != sent.role or stored.calls != sent.calls or stored.call_id != sent.call_id:
        return False
    if stored.is_cut and isinstance(stored.content, str) and isinstance(sent.content, str):
        return stored.content.startswith(sent.content)
    return stored.content == sent.content


def _parse_request_message(body: Body) -> ClientMessage:
    role, content = body.get("role"), body.get("content")
    if role == "assistant":
        calls = tuple(map(_comparable_call, calls_of(body)))
        return ClientMessage(role=role, content=_normalized_text(body), calls=calls)
    if role == "tool":
        id = body.get("tool_call_id")
        return _result_message(id if isinstance(id, str) else None, content)
    return ClientMessage(role="user", content=_unwrap_single_text(content))


def _normalized_text(body: Body) -> str:
    """Return the text with normalized whitespace: clients join and trim pieces differently."""
    return " ".join(text_parts_of(body).split())


def _comparable_call(call: ToolCall) -> tuple[str, object]:
    """Return a call with decoded arguments: clients format the JSON differently."""
    if isinstance(call.arguments, str):
        with suppress(ValueError, RecursionError):
            return call.name, json.loads(call.arguments)
    return call.name, call.arguments


def _result_message(
    id: str | None, content: object, *, seq: int = 0, end: int = 0
) -> ClientMessage:
    return ClientMessage(role="tool", content=text_of(content), call_id=id or "", seq=seq, end=end)


def _unwrap_single_text(content: object) -> object:
    """Return the text of content that is a single text part, and other content unchanged."""
    match content:
        case [{"type": "text", "text": text, **others}] if not others:
            return text
    return content
