"""Items of the OpenAI Agents SDK (Responses API) as messages in the chat format.

Each item becomes one message, tool calls too: a later import then recognizes the messages of an
earlier one. Parallel calls become consecutive messages, which a window puts in order.
"""

from typing import Any, Final

from stenolog.transfer.importers.chat_format import (
    NotAMessage,
    Part,
    Report,
    beside,
    call_of,
    content_of,
    filled,
    image_part,
    text_part,
)

FIELD: Final = "openai_agents"
"""Field of a message with the rest of an item."""
ENCRYPTED: Final = "__enc__"

_TEXTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_CALLS: Final = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS: Final = ("function_call_output", "custom_tool_call_output")


def is_encrypted(item: dict[str, Any]) -> bool:
    """Return whether an EncryptedSession wrote the item, so that it cannot be read here."""
    return ENCRYPTED in item and "payload" in item


def message_of(item: dict[str, Any], report: Report) -> dict[str, Any]:
    """Return the item as a message. Raises NotAMessage, ValueError, RecursionError."""
    kind = item.get("type")
    if isinstance(kind, str) and kind in _CALLS:
        return _call(item, _CALLS[kind])
    if kind in _OUTPUTS:
        return _output(item, report)
    if kind == "reasoning":
        return _reasoning(item)
    if isinstance(item.get("role"), str) and kind in (None, "message"):
        return _said(item, report)
    if not isinstance(kind, str):
        raise NotAMessage("it has neither a role nor a type")
    report.unseen(kind)
    return beside({"role": "assistant", "content": None}, FIELD, item)


def _said(item: dict[str, Any], report: Report) -> dict[str, Any]:
    content = item.get("content")
    rest = {name: value for name, value in item.items() if name not in ("role", "content")}
    if isinstance(content, list):
        parts, whole = _parts(content, report)
        rest |= {} if whole else {"content": content}
        content = content_of(parts)
    elif content is not None and not isinstance(content, str):
        raise NotAMessage("its content is neither text nor a list of parts")
    if rest.get("type") == "message":
        del rest["type"]
    return beside({"role": item["role"], "content": content}, FIELD, filled(rest))


def _call(item: dict[str, Any], field: str) -> dict[str, Any]:
    given = item.get(field)
    arguments = {"input": given} if field == "input" else given
    call = call_of(item.get("call_id"), item.get("name"), arguments)
    taken = ("call_id", "name", field, *(("type",) if field == "arguments" else ()))
    rest = {name: value for name, value in item.items() if name not in taken}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return beside(message, FIELD, filled(rest))


def _output(item: dict[str, Any], report: Report) -> dict[str, Any]:
    output = item.get("output")
    taken = ("call_id", "output", *(("type",) if item["type"] == _OUTPUTS[0] else ()))
    rest = {name: value for name, value in item.items() if name not in taken}
    if isinstance(output, list):
        parts, whole = _parts(output, report, texts_only=True)
        rest |= {} if whole else {"output": output}
        output = content_of(parts)
    elif output is not None and not isinstance(output, str):
        rest["output"] = output
        parts, _ = _parts([output], report, texts_only=True)
        output = content_of(parts)
    message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output or ""}
    return beside(message, FIELD, filled(rest))


def _reasoning(item: dict[str, Any]) -> dict[str, Any]:
    said = [*_items(item.get("summary")), *_items(item.get("content"))]
    texts = [text for part in said if (text := _text(part)) is not None]
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if texts:
        message["reasoning_content"] = "\n\n".join(texts)
    return beside(message, FIELD, item)


def _parts(
    given: list[Any], report: Report, *, texts_only: bool = False
) -> tuple[list[Part], bool]:
    """Return the parts of a content, and whether the conversion is lossless."""
    parts: list[Part] = []
    whole = True
    for part in given:
        made, said_all = _part(part, texts_only=texts_only)
        whole = whole and said_all
        if made is not None:
            parts.append(made)
        else:
            kind = part.get("type") if isinstance(part, dict) else None
            report.unseen(kind if isinstance(kind, str) else "unknown part")
    return parts, whole


def _part(part: Any, *, texts_only: bool) -> tuple[Part | None, bool]:
    text = _text(part)
    if text is not None:
        rest = {} if isinstance(part, str) else {n: part[n] for n in part if n not in _OF_TEXT}
        return text_part(text), not filled(rest)
    if not isinstance(part, dict) or texts_only:
        return None, False
    match part.get("type"):
        case "input_image" if isinstance(part.get("image_url"), str):
            detail = part.get("detail")
            return image_part(part["image_url"], detail=detail), not _more(
                part, "image_url", "detail"
            )
        case "input_file" if part.get("file_id") or part.get("file_data"):
            names = ("file_id", "file_data", "filename")
            file = filled({name: part.get(name) for name in names})
            return {"type": "file", "file": file}, not _more(part, *names)
        case "input_audio" | "image_url" | "refusal":
            return part, True
    return None, False


_OF_TEXT: Final = ("type", "text")


def _more(part: dict[str, Any], *names: str) -> dict[str, Any]:
    return filled({n: v for n, v in part.items() if n not in ("type", *names)})


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in _TEXTS and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    return None


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
