"""LangChain's messages (`{"type": "ai", "data": {…}}`) as messages in the chat format."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    NotAMessage,
    Part,
    as_id,
    as_object,
    image_part,
    make_call,
    make_content,
    non_empty,
    stem_of,
    text_part,
    with_extra,
)
from stenolog.transfer.importers.legacy_session import LegacySession

FIELD: Final = "langchain"
"""Field of a message with the data that the chat format does not have."""
ROLES: Final = {
    "human": "user",
    "ai": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}

_THINKING_TYPES: Final = ("thinking", "redacted_thinking", "reasoning")
_CALL_TYPES: Final = (
    "tool_use",
    "tool_call",
    "tool_call_chunk",
    "function_call",
    "input_json_delta",
)
_CONVERTED_FIELDS: Final = ("content", "type", "name", "tool_calls", "tool_call_id")


def read(found: list[Any], *, name: str, changed: datetime) -> LegacySession:
    """Return the session in the array of a file of this name. Raises NotASession."""
    return session_of(
        ((f"message {number}", value) for number, value in enumerate(found, 1)),
        ImportProblems(),
        key=stem_of(name),
        changed=changed,
    )


def session_of(
    given: Iterable[tuple[str, Any]], report: ImportProblems, *, key: str, changed: datetime
) -> LegacySession:
    """Return the session of these messages, each given with its name in reports.

    LangChain keeps no times, so all times come from the file. Raises NotASession.
    """
    messages: list[JSONMessage] = []
    for label, value in given:
        try:
            message = message_of(as_object(value, "it"), report)
        except (ValueError, RecursionError) as error:
            report.report_dropped(f"{label} cannot be read: {error}")
            continue
        messages += report.encode(message, None, label)
    report.check_not_empty(messages)
    return report.session("langchain", key, messages, changed=changed)


def looks_like(found: list[Any]) -> bool:
    """Return whether this array contains a message of LangChain."""
    return any(isinstance(one, dict) and isinstance(one.get("data"), dict) for one in found)


def message_of(given: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    """Return the message in the chat format. Raises NotAMessage, ValueError, RecursionError."""
    data = as_object(given.get("data"), "its data")
    role = _role(given.get("type"), data)
    rest = {name: value for name, value in data.items() if name not in _CONVERTED_FIELDS}
    content, is_lossless = _content(data.get("content"), report, is_result=role == "tool")
    if not is_lossless:
        rest["content"] = data["content"]
    message: dict[str, Any] = {"role": role, "content": content}
    name = data.get("name")
    if isinstance(name, str) and name:
        message["name"] = name
    calls = _calls(data) if role == "assistant" else []
    if calls:
        message["tool_calls"] = calls
    if role == "tool" and data.get("tool_call_id") is not None:
        message["tool_call_id"] = as_id(data["tool_call_id"])
    if given.get("type") not in (*ROLES, data.get("role")):
        rest["type"] = given.get("type")
    return with_extra(message, FIELD, non_empty(rest))


def _role(kind: Any, data: dict[str, Any]) -> str:
    if not isinstance(kind, str):
        raise NotAMessage("it has no type")
    short = kind.removesuffix("MessageChunk").lower() if kind.endswith("MessageChunk") else kind
    if short == "chat" and isinstance(data.get("role"), str):
        role: str = data["role"]
        return role
    extra = data.get("additional_kwargs")
    if short == "system" and isinstance(extra, dict):
        return "developer" if extra.get("__openai_role__") == "developer" else "system"
    if short not in ROLES:
        raise NotAMessage(f"its type is {kind!r}")
    return ROLES[short]


def _calls(data: dict[str, Any]) -> list[dict[str, Any]]:
    found = [*_objects(data.get("tool_calls")), *_objects(data.get("invalid_tool_calls"))]
    if found:
        return [make_call(call.get("id"), call.get("name"), call.get("args")) for call in found]
    # Versions without a field for tool calls kept them in the provider's format.
    extra = data.get("additional_kwargs")
    if not isinstance(extra, dict):
        return []
    given = _objects(extra.get("tool_calls"))
    inner = [(call.get("id"), call.get("function")) for call in given]
    inner += [(None, extra["function_call"])] if "function_call" in extra else []
    return [
        make_call(id, function.get("name"), function.get("arguments"))
        for id, function in inner
        if isinstance(function, dict)
    ]


def _content(value: Any, report: ImportProblems, *, is_result: bool) -> tuple[Any, bool]:
    """Return the content in the chat format, and whether the conversion is lossless."""
    if value is None or isinstance(value, str):
        return value, True
    if not isinstance(value, list):
        raise NotAMessage("its content is neither text nor a list of parts")
    parts: list[Part] = []
    is_lossless = True
    for part in value:
        converted, part_is_lossless = _part(part)
        if is_result and converted is not None and converted["type"] != "text":
            converted, part_is_lossless = None, False
        is_lossless = is_lossless and part_is_lossless
        if converted is not None:
            parts.append(converted)
        elif not (isinstance(part, dict) and part.get("type") in _CALL_TYPES):
            kind = part.get("type") if isinstance(part, dict) else None
            report.count_unseen(kind if isinstance(kind, str) else "unknown part")
    return make_content(parts), is_lossless


def _part(part: Any) -> tuple[Part | None, bool]:
    if isinstance(part, str):
        return text_part(part), True
    if not isinstance(part, dict):
        return None, False
    match part.get("type"):
        case "text" if isinstance(part.get("text"), str):
            rest = non_empty({n: v for n, v in part.items() if n not in ("type", "text")})
            return text_part(part["text"]), not rest
        case "image_url" | "input_audio" | "file" | "refusal" if part.keys() - {"type"}:
            return part, True
        case "image" if isinstance(part.get("url"), str):
            return image_part(part["url"]), part.keys() <= {"type", "url"}
        case "image" if isinstance(part.get("base64"), str):
            kind = part.get("mime_type") or "image/png"
            is_lossless = part.keys() <= {"type", "base64", "mime_type"}
            return image_part(f"data:{kind};base64,{part['base64']}"), is_lossless
        case kind if kind in _THINKING_TYPES:
            return part, True
    return None, False


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
