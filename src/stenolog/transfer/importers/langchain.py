"""LangChain's messages (`{"type": "ai", "data": {…}}`) as messages in the chat format."""

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    NotAMessage,
    Part,
    as_id,
    as_object,
    as_objects,
    convert_parts,
    image_part,
    make_call,
    non_empty,
    omit,
    text_part,
    with_extra,
    with_labels,
)
from stenolog.transfer.importers.legacy_session import LegacySession

EXTRA_FIELD: Final = "langchain"
"""Field of a message with the data that the chat format does not have."""
ROLES: Final = {
    **{"human": "user", "ai": "assistant", "system": "system"},
    **dict.fromkeys(("tool", "function"), "tool"),
}

_THINKING_TYPES: Final = ("thinking", "redacted_thinking", "reasoning")
# A tuple, because `x in set` raises TypeError if a malformed part has a list as its type.
_CALL_TYPES: Final = (
    "tool_use",
    "tool_call",
    "tool_call_chunk",
    "function_call",
    "input_json_delta",
)


def read(messages: list[Any], *, name: str, mtime: datetime) -> LegacySession:
    """Return the session with the messages of a file of this name. Raises NotASession."""
    return session_of(with_labels(messages), ImportProblems(), key=Path(name).stem, mtime=mtime)


def session_of(
    labelled_messages: Iterable[tuple[str, Any]],
    report: ImportProblems,
    *,
    key: str,
    mtime: datetime,
) -> LegacySession:
    """Return the session with these messages. Each message has a label, its name in reports.

    LangChain keeps no times, so all times come from the file. Raises NotASession.
    """
    messages: list[JSONMessage] = []
    for label, value in labelled_messages:
        with report.skip_unreadable(label):
            messages += report.encode(message_of(as_object(value, "it"), report), None, label)
    return report.build_session("langchain", key, messages, mtime=mtime)


def has_message(values: list[Any]) -> bool:
    """Return whether this array contains a message of LangChain."""
    return any(isinstance(value, dict) and isinstance(value.get("data"), dict) for value in values)


def message_of(stored_message: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    """Return the message in the chat format. Raises NotAMessage, ValueError, RecursionError."""
    data = as_object(stored_message.get("data"), "its data")
    role = _read_role(stored_message.get("type"), data)
    other_fields = omit(data, "content", "type", "name", "tool_calls", "tool_call_id")
    content, is_lossless = _convert_content(data.get("content"), report, is_result=role == "tool")
    if not is_lossless:
        other_fields["content"] = data["content"]
    message: dict[str, Any] = {"role": role, "content": content}
    name = data.get("name")
    if isinstance(name, str) and name:
        message["name"] = name
    calls = _read_calls(data) if role == "assistant" else []
    if calls:
        message["tool_calls"] = calls
    if role == "tool" and data.get("tool_call_id") is not None:
        message["tool_call_id"] = as_id(data["tool_call_id"])
    if stored_message.get("type") not in (*ROLES, data.get("role")):
        other_fields["type"] = stored_message.get("type")
    return with_extra(message, EXTRA_FIELD, non_empty(other_fields))


def _read_role(kind: Any, data: dict[str, Any]) -> str:
    if not isinstance(kind, str):
        raise NotAMessage("it has no type")
    type_name = kind.removesuffix("MessageChunk").lower() if kind.endswith("MessageChunk") else kind
    match type_name, data:
        case "chat", {"role": str(role)}:
            return role
        case "system", {"additional_kwargs": {"__openai_role__": "developer"}}:
            return "developer"
    if type_name not in ROLES:
        raise NotAMessage(f"its type is {kind!r}")
    return ROLES[type_name]


def _read_calls(data: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [*as_objects(data.get("tool_calls")), *as_objects(data.get("invalid_tool_calls"))]
    if calls:
        return [make_call(call.get("id"), call.get("name"), call.get("args")) for call in calls]
    # Versions without a field for tool calls stored the calls in the provider's format.
    extra = data.get("additional_kwargs")
    if not isinstance(extra, dict):
        return []
    provider_calls = as_objects(extra.get("tool_calls"))
    ids_and_functions = [(call.get("id"), call.get("function")) for call in provider_calls]
    ids_and_functions += [(None, extra["function_call"])] if "function_call" in extra else []
    return [
        make_call(id, function.get("name"), function.get("arguments"))
        for id, function in ids_and_functions
        if isinstance(function, dict)
    ]


def _convert_content(value: Any, report: ImportProblems, *, is_result: bool) -> tuple[Any, bool]:
    """Return the content in the chat format, and whether the conversion is lossless."""
    if value is None or isinstance(value, str):
        return value, True
    if not isinstance(value, list):
        raise NotAMessage("its content is neither text nor a list of parts")
    return convert_parts(
        value, _convert_part, report, texts_only=is_result, ignored_types=_CALL_TYPES
    )


def _convert_part(part: Any) -> tuple[Part | None, bool]:
    if isinstance(part, str):
        return text_part(part), True
    if not isinstance(part, dict):
        return None, False
    match part.get("type"):
        case "text" if isinstance(part.get("text"), str):
            return text_part(part["text"]), not non_empty(omit(part, "type", "text"))
        case "image_url" | "input_audio" | "file" | "refusal" if part.keys() - {"type"}:
            return part, True
        case "image" if isinstance(part.get("url"), str):
            return image_part(part["url"]), part.keys() <= {"type", "url"}
        case "image" if isinstance(part.get("base64"), str):
            mime_type = part.get("mime_type") or "image/png"
            is_lossless = part.keys() <= {"type", "base64", "mime_type"}
            return image_part(f"data:{mime_type};base64,{part['base64']}"), is_lossless
        case kind if kind in _THINKING_TYPES:
            return part, True
    return None, False
