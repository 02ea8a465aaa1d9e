"""Find the new messages in a chat request by comparing the request with its session.

Some clients send only new messages, others send the whole conversation every time. A client has not
seen the tool calls that the agent ran: the client sees all texts of a turn as one message. A client
may also send messages that were summarized and are now hidden. A wrong match loses nothing, because
hidden messages can be made visible again. All functions are pure.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.message_metadata import client_call_ids, interruption
from stenolog.messages import ToolCall, calls_of, has_text, results_of, text_of, text_parts_of
from stenolog.records import Message

Body = Mapping[str, Any]

SEPARATOR = "\n\n"
"""Separator between the texts of one turn, for clients that see them as one message."""
_SYSTEM_ROLES = ("system", "developer")


class ClientMessage(Struct, frozen=True, kw_only=True):
    """A message as a client sees it."""

    role: str
    content: object
    """Content parts of a user message, otherwise the text."""
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

    keep: int
    """Number of visible messages at the start of the session that stay visible."""
    new: tuple[Body, ...]
    """Messages of the request to append after the messages that stay visible."""
    answer_seq: int | None = None
    """Seq of the last answer if the request only repeats messages before it, as a retry does."""
    asked_seq: int = 0
    """Seq of the message that the answer at `answer_seq` answers; 0 if unknown."""
    has_calls: bool = False
    """Whether the answer at `answer_seq` has tool calls for the client."""


def client_view(history: Sequence[Message], *, start: int = 0) -> list[ClientMessage]:
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
            messages.append(
                ClientMessage(
                    role="user",
                    content=_unwrap_single_text(body.get("content")),
                    seq=message.seq,
                    end=end,
                )
            )
        else:
            for result in results_of(body):
                if result.id and result.id in agent_call_ids:
                    continue
                messages.append(
                    _result_message(result.id, result.content, seq=message.seq, end=end)
                )
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
    messages = [_client_message(body) for body in bodies]
    if not any(part.role == "assistant" for part in messages):
        # The client sends only new messages: compare them with the end of the session.
        visible = client_view(history, start=_start_of_last(history, len(messages) + 1))
        return _match_new_messages(len(history), visible, messages, bodies)
    visible = client_view(history)
    if read_hidden is not None:
        next_index = _index_after_visible(visible, messages)
        if next_index is not None:
            return Match(keep=len(history), new=tuple(bodies[next_index:]))
        skipped = _count_hidden(client_view(read_hidden()), visible, messages)
        if skipped is not None:
            return _match_full_history(len(history), visible, messages[skipped:], bodies[skipped:])
    common_count = _count_common_start(visible, messages)
    if visible and not common_count and (overlap := _count_overlap(visible, messages)):
        return Match(keep=len(history), new=tuple(bodies[overlap:]))
    return _match_full_history(len(history), visible, messages, bodies)


def _start_of_last(history: Sequence[Message], count: int) -> int:
    """Return an index from which the client has seen at least `count` messages, or 0.

    The index is 0 or that of a user message after all tool results. Whether the client has seen a
    tool result depends on earlier calls.
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
    return body.get("role") in _SYSTEM_ROLES


def text_at(history: Sequence[Message], seq: int) -> str:
    """Return the text of the answer at this seq for the client: all texts of its turn."""
    texts: list[str] = []
    for message in history:
        body = message.to_dict()
        if body.get("role") == "assistant":
            texts += [text] if (text := text_parts_of(body).strip()) else []
            if message.seq == seq:
                return SEPARATOR.join(texts)
            client_calls = client_call_ids(body)
            if not calls_of(body) or client_calls:
                texts = []
        elif has_text(body):
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

    If the log ends with the same unanswered messages, the client repeats a request that stored
    them. All other messages of the request are new.
    """
    overlap = _count_overlap(visible, messages)
    match = Match(keep=count, new=tuple(bodies[overlap:]))
    before_answer = visible[-1 - len(messages) : -1]
    if (
        overlap
        or len(visible) <= len(messages)
        or not all(map(_is_same_message, before_answer, messages))
    ):
        return match
    return _with_answer(match, visible)


def _match_full_history(
    count: int, visible: list[ClientMessage], messages: list[ClientMessage], bodies: Sequence[Body]
) -> Match:
    """Match a request with the whole conversation: messages after the common start are new."""
    common = _count_common_start(visible, messages)
    keep = count if common == len(visible) else (visible[common - 1].end if common else 0)
    match = Match(keep=keep, new=tuple(bodies[common:]))
    return match if match.new or common + 1 != len(visible) else _with_answer(match, visible)


def _with_answer(match: Match, visible: list[ClientMessage]) -> Match:
    """Return the match with the seq of the last visible message, if this message is an answer."""
    answer = visible[-1]
    if answer.role != "assistant":
        return match
    question_seq = visible[-2].seq if len(visible) > 1 else 0
    return replace(
        match, answer_seq=answer.seq, asked_seq=question_seq, has_calls=bool(answer.calls)
    )


def _index_after_visible(visible: list[ClientMessage], messages: list[ClientMessage]) -> int | None:
    """Return the index of the first message in the request after the visible messages.

    Returns None if the request lacks a visible message.
    """
    count = len(visible)
    starts = range(len(messages) - count, -1, -1) if visible else ()
    matching_starts = (
        at for at in starts if all(map(_is_same_message, visible, messages[at : at + count]))
    )
    start = next(matching_starts, None)
    return None if start is None else start + count


def _count_hidden(
    hidden: list[ClientMessage], visible: list[ClientMessage], messages: list[ClientMessage]
) -> int | None:
    """Return how many messages at the start of the request are hidden; None if this is unclear.

    If several numbers are possible, return the one after which most visible messages follow.
    """
    hidden_count = 0
    next_index = 0
    for message in messages:
        # Skip hidden messages that the client has removed from the conversation.
        index = next(
            (at for at in range(next_index, len(hidden)) if _is_same_message(hidden[at], message)),
            None,
        )
        if index is None:
            break
        next_index = index + 1
        hidden_count += 1
    candidates = [
        (common, at)
        for at in range(hidden_count + 1)
        if (common := _count_common_start(visible, messages, start=at)) or not visible
    ]
    if not candidates and hidden_count and next_index == len(hidden):
        return hidden_count  # the client has removed all visible messages
    if not candidates:
        return None
    return max(candidates)[1]


def _count_common_start(
    visible: Sequence[ClientMessage], messages: Sequence[ClientMessage], *, start: int = 0
) -> int:
    """Return how many messages from index `start` of the request equal the first visible ones."""
    count = 0
    for first, second in zip(visible, islice(messages, start, None), strict=False):
        if not _is_same_message(first, second):
            break
        count += 1
    return count


def _count_overlap(visible: Sequence[ClientMessage], messages: Sequence[ClientMessage]) -> int:
    """Return how many messages at the start of the request equal the last visible messages."""
    for count in range(min(len(visible), len(messages)), 0, -1):
        if all(map(_is_same_message, visible[-count:], messages[:count])):
            return count
    return 0


# --- one message -----------------------------------------------------------------------------


def _is_same_message(first: ClientMessage, second: ClientMessage) -> bool:
    if first.role != second.role or first.calls != second.calls or first.call_id != second.call_id:
        return False
    if first.is_cut and isinstance(first.content, str) and isinstance(second.content, str):
        return first.content.startswith(second.content)
    return first.content == second.content


def _client_message(body: Body) -> ClientMessage:
    role = body.get("role")
    match role:
        case "assistant":
            return ClientMessage(
                role=role,
                content=_normalized_text(body),
                calls=tuple(map(_comparable_call, calls_of(body))),
            )
        case "tool":
            id = body.get("tool_call_id")
            return _result_message(id if isinstance(id, str) else None, body.get("content"))
    return ClientMessage(role="user", content=_unwrap_single_text(body.get("content")))


def _normalized_text(body: Body) -> str:
    """Return the text with normalized whitespace: clients join and trim pieces differently."""
    return " ".join(text_parts_of(body).split())


def _comparable_call(call: ToolCall) -> tuple[str, object]:
    """Return a call with decoded arguments: clients format the JSON differently."""
    arguments = call.arguments
    if isinstance(arguments, str):
        try:
            return call.name, json.loads(arguments)
        except (ValueError, RecursionError):
            return call.name, arguments
    return call.name, arguments


def _result_message(
    id: str | None, content: object, *, seq: int = 0, end: int = 0
) -> ClientMessage:
    return ClientMessage(role="tool", content=text_of(content), call_id=id or "", seq=seq, end=end)


def _unwrap_single_text(content: object) -> object:
    """Return the text of content that is a single text part, and other content unchanged."""
    if isinstance(content, list) and len(content) == 1:
        [part] = content
        if isinstance(part, Mapping) and set(part) == {"type", "text"} and part["type"] == "text":
            return part["text"]
    return content
