"""Readers for the parts of a message: tool calls, tool results, text.

Two formats are supported: OpenAI's (`tool_calls`, role `tool`) and Anthropic's (`tool_use` and
`tool_result` parts of the content). Other objects have no calls and no results; nothing raises.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from msgspec import Struct

from stenolog.records import Message

Body = dict[str, Any]
Spot = tuple[int, int]
"""Index of a message, and index of a call or result in it."""

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
REASONING: Final = ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks")
"""Fields in which providers return the model's thinking."""
THINKING_PARTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
_NOT_WORDS: Final = THINKING_PARTS | {"tool_use", "tool_result"}


class Call(Struct, frozen=True, kw_only=True):
    """A tool call of an assistant message."""

    id: str | None
    name: str
    arguments: Any
    part: Mapping[str, Any]
    """The call as the message contains it."""
    in_content: bool
    """Whether the call is a part of the content, not an item of `tool_calls`."""


class Result(Struct, frozen=True, kw_only=True):
    """The result of a tool call."""

    id: str | None
    content: Any
    part: Mapping[str, Any]
    """The message, or the part of its content, that is the result."""
    in_content: bool


def body_of(message: Message | Mapping[str, Any]) -> Body:
    """Return the stored object as a new dictionary."""
    return message.to_dict() if isinstance(message, Message) else dict(message)


def seq_of(message: Message | Mapping[str, Any]) -> int | None:
    """Return the seq of a message, or None if it is not stored."""
    return message.seq if isinstance(message, Message) else None


def role_of(body: Mapping[str, Any]) -> str:
    """Return the role, or empty text if it is not a role of the providers' APIs."""
    role = body.get("role")
    return role if isinstance(role, str) and role in ROLES else ""


def calls_of(body: Mapping[str, Any]) -> list[Call]:
    """Return the tool calls of an assistant message, in order."""
    if body.get("role") != "assistant":
        return []
    listed = [call for call in _items(body.get("tool_calls")) if isinstance(call, Mapping)]
    if listed:
        return [_listed_call(call) for call in listed]
    return [
        Call(
            id=_text(part.get("id")),
            name=_text(part.get("name")) or "unknown",
            arguments=part.get("input"),
            part=part,
            in_content=True,
        )
        for part in parts_of(body, "tool_use")
    ]


def results_of(body: Mapping[str, Any]) -> list[Result]:
    """Return the tool results in a message, in order."""
    role = body.get("role")
    if role == "tool":
        found = _text(body.get("tool_call_id"))
        return [Result(id=found, content=body.get("content"), part=body, in_content=False)]
    if role != "user":
        return []
    return [
        Result(
            id=_text(part.get("tool_use_id")),
            content=part.get("content"),
            part=part,
            in_content=True,
        )
        for part in parts_of(body, "tool_result")
    ]


def parts_of(body: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """Return the content parts of this kind."""
    parts = _items(body.get("content"))
    return [part for part in parts if isinstance(part, Mapping) and part.get("type") == kind]


def has_text(body: Mapping[str, Any]) -> bool:
    """Whether this is a user message with content other than tool results."""
    if body.get("role") != "user":
        return False
    content = body.get("content")
    results = len(parts_of(body, "tool_result"))
    return results == 0 or (isinstance(content, list) and len(content) > results)


def text_of(content: Any) -> str:
    """Return the text of a content in any format, with other parts as their type in brackets."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(filter(None, (_part_text(part) for part in content)))
    return as_json(content)


def text_parts_of(body: Mapping[str, Any]) -> str:
    """Return the text of a message without calls, results and thinking."""
    if body.get("role") == "tool":
        return ""
    content = body.get("content")
    if isinstance(content, list):
        content = [part for part in content if _kind(part) not in _NOT_WORDS]
    return text_of(content)


def as_json(value: Any) -> str:
    """Return the value as JSON text, or as `repr` if JSON cannot represent it."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        pass
    # The fast codec rejects lone surrogates and integers beyond 64 bits.
    try:
        return json.dumps(value, default=repr)
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def pair(bodies: Sequence[Mapping[str, Any]]) -> dict[Spot, Spot]:
    """Return the position of the result for each answered call.

    A result answers the newest call with its id; without an id, the first open call of the newest
    message with calls. A call that reuses an id replaces earlier open calls with that id.
    """
    answers: dict[Spot, Spot] = {}
    open_by_id: dict[str, list[Spot]] = {}
    newest: list[Spot] = []
    for index, body in enumerate(bodies):
        calls = calls_of(body)
        if calls:
            newest = [(index, place) for place in range(len(calls))]
            for call in calls:
                if call.id is not None:
                    open_by_id[call.id] = []
            for place, call in enumerate(calls):
                if call.id is not None:
                    open_by_id[call.id].append((index, place))
        for place, result in enumerate(results_of(body)):
            waiting = newest if result.id is None else open_by_id.get(result.id, [])
            spot = next((spot for spot in waiting if spot not in answers), None)
            if spot is not None:
                answers[spot] = (index, place)
    return answers


def _listed_call(call: Mapping[str, Any]) -> Call:
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else call
    return Call(
        id=_text(call.get("id")),
        name=_text(inner.get("name")) or "unknown",
        arguments=inner.get("arguments"),
        part=call,
        in_content=False,
    )


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return as_json(part)
    for field in ("text", "content", "refusal"):
        value = part.get(field)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return text_of(value)
    return f"[{_kind(part) or 'part'}]"


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else ""


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
