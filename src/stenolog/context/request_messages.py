"""Messages in the form that providers accept: every call has its result, and ids are unique.

Each result follows directly after its call, in the order of the calls. Messages between a call and
its result are moved after the result. Orphaned and duplicate results are dropped. A call without a
result gets the result `NO_RESULT`.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from stenolog.catalog.message_metadata import has_seen, last_seen_seq
from stenolog.context.turn_state import is_finished_answer, split_turns
from stenolog.errors import UnsupportedFormat
from stenolog.messages import (
    REASONING_FIELDS,
    TEXT_TYPES,
    THINKING_TYPES,
    Body,
    ToolCall,
    ToolResult,
    as_json,
    body_of,
    calls_of,
    has_text,
    pair_calls,
    results_of,
    role_of,
    seq_of,
    type_of,
)
from stenolog.records import Message

NO_RESULT: Final = "[interrupted]"
"""The result sent for a call without a stored result."""
NO_TEXT: Final = "[no text]"
"""Content sent for an empty user message or tool result, because providers require content."""
FIRST_USER_CONTENT: Final = "[the conversation goes on]"
"""Content of the user message that is inserted for a provider with `user_first`."""
_SYSTEM_ROLES: Final = ("system", "developer")
"""Roles whose messages come before the conversation."""
_CALL_TYPES: Final = frozenset({"tool_use", "tool_result"})
_NOT_CHAT_TYPES: Final = _CALL_TYPES | {"input_text", "output_text", "input_image", "input_file"}
"""Types of parts that only Anthropic's API and OpenAI's Responses API know."""
SENT_REASONING_FIELDS: Final = tuple(name for name in REASONING_FIELDS if name != "thinking")
"""Fields with thinking that may be sent back to a provider."""


class ProviderRequirements(Struct, frozen=True, kw_only=True):
    """Requirements of a provider. The defaults suit OpenAI-compatible servers."""

    merge_user: bool = False
    """Whether to merge consecutive user messages."""
    user_first: bool = False
    """Whether the first message after the system prompt must be a user message."""
    reasoning: Literal["none", "newest", "all"] = "none"
    """Messages whose reasoning fields are sent back: no messages, the newest turn, or all."""
    keep_fields: tuple[str, ...] = ()
    """Unknown fields to send. All other unknown fields are dropped, as many servers reject them."""
    chat_only: bool = False
    """Whether content in the formats of other APIs than OpenAI's chat API is an error."""


class RequestMessage(Struct, frozen=True, kw_only=True):
    """A message in the form in which it is sent, with its seqs and its turn."""

    body: Body
    seqs: tuple[int | None, ...]
    """Seq of the message, or of each result in it; None for a message that is not stored."""
    turn: int
    """Index of the turn in the history."""

    @property
    def seq(self) -> int | None:
        """The first of the message's `seqs`."""
        return self.seqs[0]


def prepare_messages(
    messages: Sequence[Message | Mapping[str, Any]], needs: ProviderRequirements
) -> list[Body]:
    """Return all messages in a form that a provider accepts. The input is not changed.

    Raises UnsupportedFormat.
    """
    return finish_messages([entry.body for entry in to_request_messages(messages, needs)], needs)


def to_request_messages(
    messages: Sequence[Message | Mapping[str, Any]], needs: ProviderRequirements
) -> list[RequestMessage]:
    """Return all messages as they will be sent, turn by turn. User messages are not merged yet.

    Raises UnsupportedFormat.
    """
    stored_messages = [(body_of(message), seq_of(message)) for message in messages]
    for body, seq in stored_messages:
        _check_format(body, seq, needs)
    return _MessageArranger(_order_by_answers(stored_messages), needs).arrange_messages()


def _check_format(body: Body, seq: int | None, needs: ProviderRequirements) -> None:
    """Raise UnsupportedFormat if the message, or a part of it, cannot be sent."""
    if "role" not in body and (item_type := type_of(body)):
        raise UnsupportedFormat(
            f"is an item of type {item_type!r} without a role, as in OpenAI's Responses API. Only "
            "chat messages and Anthropic messages can be sent or summarized: send these items with "
            "a client of the Responses API, or store chat messages instead",
            seq=seq,
        )
    content = body.get("content")
    if needs.chat_only and isinstance(content, list):
        for part in content:
            if (part_type := type_of(part)) in _NOT_CHAT_TYPES:
                raise UnsupportedFormat(
                    f"has content of type {part_type!r}, but the model accepts only messages in "
                    "the format of OpenAI's chat API",
                    seq=seq,
                )


def _order_by_answers(
    stored_messages: Sequence[tuple[Body, int | None]],
) -> list[tuple[Body, int | None]]:
    """If the next answer has not seen a user message, move the message after that answer.

    A message that was stored while an answer was being written precedes the answer in the log.
    Without the move, a model would consider the message answered. A message that waits since before
    the messages of another session were added is moved, too.
    """
    ordered_messages: list[tuple[Body, int | None]] = []
    start = 0  # the first message after the last finished answer
    for body, seq in stored_messages:
        unseen: list[tuple[Body, int | None]] = []
        if seq is not None and is_finished_answer(body):
            if last_seen_seq(body, seq) < seq - 1:
                turn = ordered_messages[start:]
                unseen = _unseen_messages(turn, body, seq)
                seqs = {unseen_seq for _, unseen_seq in unseen}
                ordered_messages[start:] = [m for m in turn if m[1] not in seqs]
            start = len(ordered_messages) + 1
        ordered_messages += [(body, seq), *unseen]
    return ordered_messages


def _unseen_messages(
    turn: Sequence[tuple[Body, int | None]], answer: Body, answer_seq: int
) -> list[tuple[Body, int | None]]:
    """Return the user messages of a turn that neither its answer nor its tool calls have seen."""
    upto = last_seen_seq(answer, answer_seq)
    unseen = [(body, seq) for body, seq in turn if seq and seq > upto and has_text(body)]
    if not unseen:
        return []
    replies = [(body, seq) for body, seq in turn if seq and body.get("role") == "assistant"]
    replies.append((answer, answer_seq))
    return [
        (body, seq)
        for body, seq in unseen
        if seq and not any(has_seen(reply, reply_seq, seq) for reply, reply_seq in replies)
    ]


def finish_messages(bodies: Iterable[Body], needs: ProviderRequirements) -> list[Body]:
    """Merge user messages and insert a first user message where `needs` requires it.

    This step comes last, because its result depends on which messages are sent.
    """
    finished_messages: list[Body] = []
    for body in bodies:
        previous = finished_messages[-1] if finished_messages else None
        if needs.merge_user and previous and previous["role"] == body["role"] == "user":
            finished_messages[-1] = _merge_messages(previous, body)
        else:
            finished_messages.append(body)
    if needs.user_first:
        roles = [body["role"] for body in finished_messages]
        first_index = next((i for i, role in enumerate(roles) if role not in _SYSTEM_ROLES), None)
        if first_index is not None and roles[first_index] != "user":
            finished_messages.insert(first_index, {"role": "user", "content": FIRST_USER_CONTENT})
    return finished_messages


class _MessageArranger:
    """Arranges the messages for a request, and assigns unique call ids."""

    def __init__(
        self, messages: Sequence[tuple[Body, int | None]], needs: ProviderRequirements
    ) -> None:
        self._bodies = [body for body, _ in messages]
        self._seqs = [seq for _, seq in messages]
        self._needs = needs
        self._calls = list(map(calls_of, self._bodies))
        self._results_by_call = pair_calls(self._bodies) if any(self._calls) else {}
        self._ids: set[str] = set()
        self._repeat_counts: Counter[str] = Counter()
        """Number of repeated uses of each id."""

    def arrange_messages(self) -> list[RequestMessage]:
        turns = split_turns(self._bodies, self._results_by_call, self._calls)
        messages: list[RequestMessage] = []
        for turn_index, turn in enumerate(turns):
            keep_reasoning = self._needs.reasoning == "all" or (
                self._needs.reasoning == "newest" and turn_index == len(turns) - 1
            )
            for index in range(turn.first, turn.end):
                calls, seqs = self._calls[index], (self._seqs[index],)
                ids = [
                    self._make_unique_id(call.id or f"call_{index + 1}_{call_index}")
                    for call_index, call in enumerate(calls)
                ]
                body = self._clean_message(
                    self._bodies[index], calls, ids, keep_reasoning=keep_reasoning
                )
                if body is not None:
                    messages.append(RequestMessage(body=body, seqs=seqs, turn=turn_index))
                if calls:
                    messages += self._make_result_messages(index, calls, ids, turn_index)
        return messages

    def _make_unique_id(self, id: str) -> str:
        """Return `id`, or a similar id if another call of the request already has `id`."""
        unique_id = id
        while unique_id in self._ids:
            # Continue after the last suffix, because a model may use one id for all its calls.
            self._repeat_counts[id] += 1
            unique_id = f"{id}_{self._repeat_counts[id] + 1}"
        self._ids.add(unique_id)
        return unique_id

    def _make_result_messages(
        self, message_index: int, calls: Sequence[ToolCall], ids: Sequence[str], turn_index: int
    ) -> list[RequestMessage]:
        messages: list[RequestMessage] = []
        for call_index, call in enumerate(calls):
            seq, result = None, None
            if (position := self._results_by_call.get((message_index, call_index))) is not None:
                index, result_index = position
                seq, result = self._seqs[index], results_of(self._bodies[index])[result_index]
            body = self._make_result_message(call, ids[call_index], result)
            if call.in_content and messages:
                # Providers of this format expect all results of a message's calls in one message.
                contents = [*messages[-1].body["content"], *body["content"]]
                messages[-1] = RequestMessage(
                    body={"role": "user", "content": contents},
                    seqs=(*messages[-1].seqs, seq),
                    turn=turn_index,
                )
            else:
                messages.append(RequestMessage(body=body, seqs=(seq,), turn=turn_index))
        return messages

    def _make_result_message(self, call: ToolCall, id: str, result: ToolResult | None) -> Body:
        content = NO_RESULT if result is None else _sendable_content(result.content) or NO_TEXT
        if call.in_content:
            part: Body = {"type": "tool_result", "tool_use_id": id, "content": content}
            if result is not None and result.is_error:
                part["is_error"] = True
            return _make_sendable({"role": "user", "content": [part]})
        body: Body = {"role": "tool", "tool_call_id": id, "content": content}
        if result is not None and not result.in_content:
            body |= self._select_kept_fields(result.value)
        return _make_sendable(body)

    def _clean_message(
        self, body: Body, calls: Sequence[ToolCall], ids: Sequence[str], *, keep_reasoning: bool
    ) -> Body | None:
        """Return the message without parts that providers reject, or None if no part remains."""
        role, text = role_of(body), body.get("content")
        is_plain = isinstance(text, str) and text and text.isascii() and not text.isspace()
        if is_plain and not (calls or keep_reasoning or self._needs.keep_fields or "name" in body):
            # Most messages need no cleaning: only role and text are sent.
            return {"role": role, "content": text} if role not in ("", "tool") else None
        if role in ("", "tool") or (role == "user" and not has_text(body)):
            return None
        dropped_types = frozenset[str]() if keep_reasoning else THINKING_TYPES
        content = _sendable_content(text, without=_CALL_TYPES if role == "user" else dropped_types)
        message: Body = {"role": role, "content": content}
        if role == "assistant":
            if content is None and isinstance(body.get("refusal"), str):
                message["content"] = _sendable_content(body["refusal"])
            message |= _combine_content_and_calls(message["content"], calls, ids)
            if keep_reasoning:
                message |= {name: body[name] for name in SENT_REASONING_FIELDS if body.get(name)}
            if not message["content"] and not calls:
                return None
        elif not content:
            if role != "user":
                return None
            message["content"] = NO_TEXT
        return _make_sendable(message | self._select_kept_fields(body))

    def _select_kept_fields(self, body: Mapping[str, Any]) -> Body:
        kept_fields = {
            name: body[name]
            for name in self._needs.keep_fields
            if name in body and name not in ("role", "content", "tool_calls")
        }
        name = body.get("name")
        return kept_fields | {"name": name} if isinstance(name, str) and name else kept_fields


def _combine_content_and_calls(content: Any, calls: Sequence[ToolCall], ids: Sequence[str]) -> Body:
    """Return the fields `content` and `tool_calls` of an assistant message."""
    if not calls:
        return {"content": _without_calls(content)}
    if not calls[0].in_content:
        tool_calls = [_make_tool_call(call, id) for call, id in zip(calls, ids, strict=True)]
        return {"content": _without_calls(content), "tool_calls": tool_calls}
    calls_and_ids = iter(zip(calls, ids, strict=True))
    parts = []
    for part in content:
        if part.get("type") == "tool_use":
            call, id = next(calls_and_ids)
            arguments = call.arguments if isinstance(call.arguments, Mapping) else {}
            part = {name: value for name, value in part.items() if name != "text"}
            parts.append({**part, "id": id, "name": call.name, "input": arguments})
        elif part.get("type") != "tool_result":
            parts.append(part)
    return {"content": parts}


def _without_calls(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    return [part for part in content if part.get("type") not in _CALL_TYPES] or None


def _make_tool_call(call: ToolCall, id: str) -> Body:
    custom = call.value.get("custom")
    if call.value.get("type") == "custom" and isinstance(custom, Mapping):
        return {**call.value, "id": id}
    function = call.value.get("function")
    function_body = dict(function) if isinstance(function, Mapping) else {}
    function_body |= {"name": call.name, "arguments": _encode_arguments(call.arguments)}
    return {**call.value, "id": id, "type": "function", "function": function_body}


def _encode_arguments(value: Any) -> str:
    """Return the arguments as the text of a JSON object.

    Servers that parse the arguments reject any other text.
    """
    text = "" if value is None else value if isinstance(value, str) else as_json(value)
    if not text.strip():
        return "{}"
    try:
        is_object = isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        is_object = False
    return text if is_object else as_json({"unreadable": text})


def _sendable_content(value: Any, *, without: frozenset[str] = frozenset()) -> Any:
    """Return the content as a text or a list of parts; None if the content is empty."""
    if value is None or isinstance(value, str):
        return value if value and value.strip() else None
    if not isinstance(value, list):
        return as_json(value)
    parts: list[Mapping[str, Any]] = []
    for part in value:
        if isinstance(part, Mapping) and isinstance(part.get("type"), str):
            if part["type"] not in without and (sendable := _without_empty_text(part)) is not None:
                parts.append(sendable)
        elif part is not None:
            text = part if isinstance(part, str) else as_json(part)
            if text.strip():
                parts.append({"type": "text", "text": text})
    return parts or None


def _without_empty_text(part: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the part, or None for an empty text, which strict providers reject."""
    if part["type"] not in TEXT_TYPES:  # in parts of other types, an empty `text` is allowed
        return part
    text = part.get("text")
    if text is None:
        return None
    if not isinstance(text, str):
        return {**part, "text": as_json(text)}
    return part if text.strip() else None


def _merge_messages(first: Body, second: Body) -> Body:
    first_content, second_content = first["content"], second["content"]
    if isinstance(first_content, str) and isinstance(second_content, str):
        return {**first, "content": f"{first_content}\n\n{second_content}"}
    return {**first, "content": [*_content_parts(first_content), *_content_parts(second_content)]}


def _content_parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _make_sendable(body: Body) -> Body:
    """Return the body. In a body that cannot be sent, a lone surrogate becomes a question mark."""
    try:
        msgspec.json.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        text = json.dumps(body, default=_to_json_value, ensure_ascii=False)
        sendable_body: Body = json.loads(text.encode("utf-8", "replace"))
        return sendable_body
    return body


def _to_json_value(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else repr(value)
