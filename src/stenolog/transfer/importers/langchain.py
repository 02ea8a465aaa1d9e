"""LangChain's messages (`{"type": "ai", "data": {…}}`) as messages in the chat format."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final

from stenolog.stores.json_file import JSONMessage
from stenolog.transfer.importers.chat_format import (
    NotAMessage,
    Part,
    Report,
    as_id,
    as_object,
    beside,
    call_of,
    content_of,
    filled,
    image_part,
    text_part,
)
from stenolog.transfer.importers.legacy_session import LegacySession
from stenolog.transfer.importers.plain_messages import stem_of

FIELD: Final = "langchain"
"""Field of a message with the data that the chat format does not have."""
ROLES: Final = {
    "human": "user",
    "ai": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
}

_THOUGHTS: Final = ("thinking", "redacted_thinking", "reasoning")
_CALLS: Final = ("tool_use", "tool_call", "tool_call_chunk", "function_call", "input_json_delta")
_TAKEN: Final = ("content", "type", "name", "tool_calls", "tool_call_id")


def read(found: list[Any], *, name: str, changed: datetime) -> LegacySession:
    """Return the session in the array of a file of this name. Raises NotASession."""
    return session_of(
        ((f"message {number}", value) for number, value in enumerate(found, 1)),
        Report(),
        key=stem_of(name),
        changed=changed,
    )


def session_of(
    given: Iterable[tuple[str, Any]], report: Report, *, key: str, changed: datetime
) -> LegacySession:
    """Return the session of these messages, each given with its name in reports.

    LangChain keeps no times, so all times come from the file. Raises NotASession.
    """
    messages: list[JSONMessage] = []
    for what, value in given:
        try:
            message = message_of(as_object(value, "it"), report)
        except (ValueError, RecursionError) as error:
            report.drop(f"{what} cannot be read: {error}")
            continue
        messages += report.keep(message, None, what)
    report.check(messages)
    return report.session("langchain", key, messages, changed=changed)


def looks_like(found: list[Any]) -> bool:
    """Return whether this array contains a message of LangChain."""
    return any(isinstance(one, dict) and isinstance(one.get("data"), dict) for one in found)


def message_of(given: dict[str, Any], report: Report) -> dict[str, Any]:
    """Return the message in the chat format. Raises NotAMessage, ValueError, RecursionError."""
    data = as_object(given.get("data"), "its data")
    role = _role(given.get("type"), data)
    rest = {name: value for name, value in data.items() if name not in _TAKEN}
    content, whole = _content(data.get("content"), report, is_result=role == "tool")
    if not whole:
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
    return beside(message, FIELD, filled(rest))


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
        return [call_of(call.get("id"), call.get("name"), call.get("args")) for call in found]
    # Versions without a field for tool calls kept them in the provider's format.
    extra = data.get("additional_kwargs")
    if not isinstance(extra, dict):
        return []
    given = _objects(extra.get("tool_calls"))
    inner = [(call.get("id"), call.get("function")) for call in given]
    inner += [(None, extra["function_call"])] if "function_call" in extra else []
    return [
        call_of(id, function.get("name"), function.get("arguments"))
        for id, function in inner
        if isinstance(function, dict)
    ]


def _content(value: Any, report: Report, *, is_result: bool) -> tuple[Any, bool]:
    """Return the content in the chat format, and whether the conversion is lossless."""
    if value is None or isinstance(value, str):
        return value, True
    if not isinstance(value, list):
        raise NotAMessage("its content is neither text nor a list of parts")
    parts: list[Part] = []
    whole = True
    for part in value:
        made, said_all = _part(part)
        if is_result and made is not None and made["type"] != "text":
            made, said_all = None, False
        whole = whole and said_all
        if made is not None:
            parts.append(made)
        elif not (isinstance(part, dict) and part.get("type") in _CALLS):
            kind = part.get("type") if isinstance(part, dict) else None
            report.unseen(kind if isinstance(kind, str) else "unknown part")
    return content_of(parts), whole


def _part(part: Any) -> tuple[Part | None, bool]:
    if isinstance(part, str):
        return text_part(part), True
    if not isinstance(part, dict):
        return None, False
    match part.get("type"):
        case "text" if isinstance(part.get("text"), str):
            rest = filled({n: v for n, v in part.items() if n not in ("type", "text")})
            return text_part(part["text"]), not rest
        case "image_url" | "input_audio" | "file" | "refusal" if part.keys() - {"type"}:
            return part, True
        case "image" if isinstance(part.get("url"), str):
            return image_part(part["url"]), part.keys() <= {"type", "url"}
        case "image" if isinstance(part.get("base64"), str):
            kind = part.get("mime_type") or "image/png"
            whole = part.keys() <= {"type", "base64", "mime_type"}
            return image_part(f"data:{kind};base64,{part['base64']}"), whole
        case kind if kind in _THOUGHTS:
            return part, True
    return None, False


def _objects(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
