"""Messages in the form that providers accept: every call has its result, and ids are unique.

Each result follows directly after its call, in the order of the calls. Messages between a call and
its result are moved after the result. Orphaned and duplicate results are dropped. A call without a
result gets the result `NO_RESULT`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from stenolog.catalog.message_metadata import last_seen_seq
from stenolog.context.turn_state import TurnRange, is_finished_answer, split_turns
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
    pair,
    results_of,
    role_of,
    seq_of,
)
from stenolog.records import Message

NO_RESULT: Final = "[interrupted]"
"""The result sent for a call without a stored result."""
NO_TEXT: Final = "[no text]"
"""Content sent for an empty user message or tool result, because providers require content."""
FIRST_USER_CONTENT: Final = "[the conversation goes on]"
_SYSTEM_ROLES: Final = ("system", "developer")
"""Roles whose messages come before the conversation."""
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
    """Return all messages in a form that a provider accepts. The input is not changed."""
    return finish_messages([entry.body for entry in to_request_messages(messages, needs)], needs)


def to_request_messages(
    messages: Sequence[Message | Mapping[str, Any]], needs: ProviderRequirements
) -> list[RequestMessage]:
    """Return all messages as they will be sent, turn by turn. User messages are not merged yet."""
    ordered = _order_by_answers([(body_of(message), seq_of(message)) for message in messages])
    return _Arrangement([body for body, _ in ordered], [seq for _, seq in ordered], needs).entries()


def _order_by_answers(stored: Sequence[tuple[Body, int | None]]) -> list[tuple[Body, int | None]]:
    """Move each user message that the next answer did not see to a place after the answer.

    A message that was stored while an answer was being written precedes the answer in the log.
    Without the move, a model would consider the message answered.
    """
    ordered: list[tuple[Body, int | None]] = []
    for body, seq in stored:
        at = len(ordered)
        if seq is not None and is_finished_answer(body):
            seen_seq = last_seen_seq(body, seq)
            while at and has_text(ordered[at - 1][0]) and (ordered[at - 1][1] or 0) > seen_seq:
                at -= 1
        ordered.insert(at, (body, seq))
    return ordered


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
    start = next(
        (at for at, body in enumerate(finished_messages) if body["role"] not in _SYSTEM_ROLES), None
    )
    if needs.user_first and start is not None and finished_messages[start]["role"] != "user":
        finished_messages.insert(start, {"role": "user", "content": FIRST_USER_CONTENT})
    return finished_messages


class _Arrangement:
    """One pass over the messages, which assigns unique call ids."""

    def __init__(
        self, bodies: Sequence[Body], seqs: Sequence[int | None], needs: ProviderRequirements
    ) -> None:
        self._bodies = bodies
        self._seqs = seqs
        self._needs = needs
        self._calls = list(map(calls_of, bodies))
        self._answers = pair(bodies) if any(self._calls) else {}
        self._ids: set[str] = set()
        self._uses: Counter[str] = Counter()
        """Number of later calls that had the same id, by id."""

    def entries(self) -> list[RequestMessage]:
        turns = split_turns(self._bodies, self._answers, self._calls)
        messages: list[RequestMessage] = []
        for number, turn in enumerate(turns):
            keeps_reasoning = self._needs.reasoning == "all" or (
                self._needs.reasoning == "newest" and number == len(turns) - 1
            )
            messages += self._turn(turn, number, keep_reasoning=keeps_reasoning)
        return messages

    def _turn(self, turn: TurnRange, number: int, *, keep_reasoning: bool) -> list[RequestMessage]:
        parts: list[RequestMessage] = []
        for index in range(turn.first, turn.end):
            body, calls = self._bodies[index], self._calls[index]
            ids = [
                self._unique_id(call.id or f"call_{index + 1}_{n}") for n, call in enumerate(calls)
            ]
            cleaned = self._clean_message(body, calls, ids, keep_reasoning=keep_reasoning)
            if cleaned is not None:
                parts.append(RequestMessage(body=cleaned, seqs=(self._seqs[index],), turn=number))
            if calls:
                parts += self._result_messages(index, calls, ids, number)
        return parts

    def _unique_id(self, id: str) -> str:
        """Return `id`, or a similar id if another call of the request already has `id`."""
        unique_id = id
        while unique_id in self._ids:
            # Continue at the last number, because a model may use one id for all its calls.
            self._uses[id] += 1
            unique_id = f"{id}_{self._uses[id] + 1}"
        self._ids.add(unique_id)
        return unique_id

    def _result_messages(
        self, index: int, calls: Sequence[ToolCall], ids: Sequence[str], number: int
    ) -> list[RequestMessage]:
        messages: list[RequestMessage] = []
        for place, call in enumerate(calls):
            seq, result = None, None
            if (spot := self._answers.get((index, place))) is not None:
                seq, result = self._seqs[spot[0]], results_of(self._bodies[spot[0]])[spot[1]]
            body = self._result_message(call, ids[place], result)
            if call.in_content and messages:
                # Providers of this format expect all results of a message's calls in one message.
                contents = [*messages[-1].body["content"], *body["content"]]
                messages[-1] = RequestMessage(
                    body={"role": "user", "content": contents},
                    seqs=(*messages[-1].seqs, seq),
                    turn=number,
                )
            else:
                messages.append(RequestMessage(body=body, seqs=(seq,), turn=number))
        return messages

    def _result_message(self, call: ToolCall, id: str, result: ToolResult | None) -> Body:
        content = NO_RESULT if result is None else _sendable_content(result.content) or NO_TEXT
        if call.in_content:
            part: Body = {"type": "tool_result", "tool_use_id": id, "content": content}
            if result is not None and result.is_error:
                part["is_error"] = True
            return _make_sendable({"role": "user", "content": [part]})
        body: Body = {"role": "tool", "tool_call_id": id, "content": content}
        if result is not None and not result.in_content:
            body |= self._kept_fields(result.value)
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
        content = _sendable_content(
            body.get("content"), without=_dropped_part_types(role, keep_reasoning=keep_reasoning)
        )
        message: Body = {"role": role, "content": content}
        if role == "assistant":
            if content is None and isinstance(body.get("refusal"), str):
                message["content"] = _sendable_content(body["refusal"])
            message |= _content_and_calls(message["content"], calls, ids)
            if keep_reasoning:
                message |= {name: body[name] for name in SENT_REASONING_FIELDS if body.get(name)}
            if not message["content"] and not calls:
                return None
        elif not content:
            if role != "user":
                return None
            message["content"] = NO_TEXT
        return _make_sendable(message | self._kept_fields(body))

    def _kept_fields(self, body: Mapping[str, Any]) -> Body:
        kept_fields = {
            name: body[name]
            for name in self._needs.keep_fields
            if name in body and name not in ("role", "content", "tool_calls")
        }
        name = body.get("name")
        return kept_fields | {"name": name} if isinstance(name, str) and name else kept_fields


def _dropped_part_types(role: str, *, keep_reasoning: bool) -> frozenset[str]:
    if role == "user":
        return frozenset({"tool_result", "tool_use"})
    return frozenset() if keep_reasoning else THINKING_TYPES


def _content_and_calls(content: Any, calls: Sequence[ToolCall], ids: Sequence[str]) -> Body:
    """Return the content and the calls of an assistant message."""
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
    other_parts = [part for part in content if part.get("type") not in ("tool_use", "tool_result")]
    return other_parts or None


def _make_tool_call(call: ToolCall, id: str) -> Body:
    custom = call.value.get("custom")
    if call.value.get("type") == "custom" and isinstance(custom, Mapping):
        return {**call.value, "id": id}
    function = call.value.get("function")
    function_body = dict(function) if isinstance(function, Mapping) else {}
    function_body |= {"name": call.name, "arguments": _arguments_text(call.arguments)}
    return {**call.value, "id": id, "type": "function", "function": function_body}


def _arguments_text(value: Any) -> str:
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
    """Return the body unchanged if JSON can represent it.

    Otherwise replace the values that JSON cannot represent.
    """
    try:
        msgspec.json.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        safe_body = {name: _make_json_safe(value, depth=0) for name, value in body.items()}
        return {str(name): value for name, value in safe_body.items()}
    return body


def _make_json_safe(value: Any, *, depth: int) -> Any:
    if isinstance(value, str):
        # A lone surrogate cannot be sent in a request.
        return value.encode("utf-8", "replace").decode()
    if depth > 50:
        return "[too deep]"
    if isinstance(value, Mapping):
        return {
            _make_json_safe(str(name), depth=depth): _make_json_safe(inner, depth=depth + 1)
            for name, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_make_json_safe(inner, depth=depth + 1) for inner in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return as_json(value)
