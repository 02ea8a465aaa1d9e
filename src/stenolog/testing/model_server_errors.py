"""The check of requests by the model server, like that of a strict provider.

It accepts only requests that all known servers accept.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

_Name = Annotated[str, Meta(min_length=1)]
# `Meta(pattern=…)` is not used: it can crash the interpreter at its end (msgspec issue 717).


def _check_text(content: object) -> None:
    if isinstance(content, str) and not content.strip():
        raise ValueError("content must not be empty")


class _TextPart(Struct, tag_field="type", tag="text"):
    text: str

    def __post_init__(self) -> None:
        _check_text(self.text)


class _RefusalPart(Struct, tag_field="type", tag="refusal"):
    pass


class _ImagePart(Struct, tag_field="type", tag="image_url"):
    pass


class _AudioPart(Struct, tag_field="type", tag="input_audio"):
    pass


class _FilePart(Struct, tag_field="type", tag="file"):
    pass


_TextContent = str | Annotated[list[_TextPart], Meta(min_length=1)]
_UserPart = _TextPart | _ImagePart | _AudioPart | _FilePart


class _Function(Struct, forbid_unknown_fields=True):
    name: _Name
    arguments: str


class _Call(Struct, forbid_unknown_fields=True):
    id: _Name
    type: Literal["function"]
    function: _Function


class _System(Struct, forbid_unknown_fields=True, tag_field="role", tag="system"):
    content: _TextContent
    name: Any = None

    def __post_init__(self) -> None:
        _check_text(self.content)


class _Developer(_System, tag="developer"):
    pass


class _User(Struct, forbid_unknown_fields=True, tag_field="role", tag="user"):
    content: str | Annotated[list[_UserPart], Meta(min_length=1)]
    name: Any = None

    def __post_init__(self) -> None:
        _check_text(self.content)


class _Tool(Struct, forbid_unknown_fields=True, tag_field="role", tag="tool"):
    content: _TextContent
    tool_call_id: str
    name: Any = None

    def __post_init__(self) -> None:
        _check_text(self.content)


class _Assistant(Struct, forbid_unknown_fields=True, tag_field="role", tag="assistant"):
    content: str | Annotated[list[_TextPart | _RefusalPart], Meta(min_length=1)] | None = None
    tool_calls: Annotated[list[_Call], Meta(min_length=1)] | UnsetType = UNSET
    name: Any = None
    refusal: Any = None
    audio: Any = None

    def __post_init__(self) -> None:
        if not self.tool_calls:
            _check_text(self.content or "")


class _ToolFunction(Struct):
    name: str
    parameters: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not re.fullmatch("[A-Za-z0-9_-]{1,64}", self.name):
            raise ValueError("the name of a tool must have 1 to 64 letters, digits, _ or -")


class _ToolDefinition(Struct):
    type: Literal["function"]
    function: _ToolFunction


_Message = _System | _Developer | _User | _Assistant | _Tool
_REQUIRED_FIELDS: Final = {
    "model": _Name,
    "messages": Annotated[list[_Message], Meta(min_length=1)],
}
_OPTIONAL_FIELDS: Final = {
    "stream": bool,
    "stream_options": dict,
    "tools": Annotated[list[_ToolDefinition], Meta(min_length=1)],
    "tool_choice": str | dict,
    "parallel_tool_calls": bool,
    "response_format": dict,
    "max_tokens": int,
    "max_completion_tokens": int,
    "temperature": float,
    "top_p": float,
    "seed": int,
    "stop": str | list,
    "user": str,
    "metadata": dict,
    "reasoning_effort": str,
}
_Request: Final = msgspec.defstruct(
    "Request",
    [
        *_REQUIRED_FIELDS.items(),
        *((name, kind | UnsetType, UNSET) for name, kind in _OPTIONAL_FIELDS.items()),
    ],
    forbid_unknown_fields=True,
)


def find_fault(request: Any) -> str | None:
    """Return a fault of a request to `/chat/completions`, or None."""
    try:
        checked: Any = msgspec.convert(request, _Request)
        if checked.stream_options and not checked.stream:
            return "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        names = [definition.function.name for definition in checked.tools or ()]
        if len(set(names)) < len(names):
            return "Tool names must be unique."
        return _find_result_fault(checked.messages)
    except ValueError as error:
        return str(error)


def _find_result_fault(messages: Sequence[_Message]) -> str | None:
    """Return a missing, repeated or unexpected tool result, or a repeated call id, or None."""
    open_ids: list[str] = []
    used_ids: set[str] = set()
    for message in [*messages, None]:
        if isinstance(message, _Tool):
            if message.tool_call_id not in open_ids:
                return f"No open tool call has the tool_call_id {message.tool_call_id!r}."
            open_ids.remove(message.tool_call_id)
            continue
        if open_ids:
            return (
                "An assistant message with 'tool_calls' must be followed by tool messages. These "
                f"tool_call_ids did not have response messages: {', '.join(open_ids)}"
            )
        if isinstance(message, _Assistant) and message.tool_calls:
            open_ids = [call.id for call in message.tool_calls]
            if len(used_ids.union(open_ids)) < len(used_ids) + len(open_ids):
                return f"Duplicate tool call id: one of {', '.join(open_ids)} was used before."
            used_ids.update(open_ids)
    return None
