"""Items of the OpenAI Agents SDK (Responses API) as messages in the chat format.

Each item becomes one message, tool calls too: a later import then recognizes the messages of an
earlier one. Parallel calls become consecutive messages, which a window puts in order.
"""

from typing import Any, Final

from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    NotAMessage,
    Part,
    image_part,
    make_call,
    make_content,
    non_empty,
    text_part,
    with_extra,
)

FIELD: Final = "openai_agents"
"""Field of a message with the rest of an item."""
ENCRYPTED_FIELD: Final = "__enc__"

_TEXT_TYPES: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ARGUMENT_FIELDS: Final = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUT_TYPES: Final = ("function_call_output", "custom_tool_call_output")


def is_encrypted(item: dict[str, Any]) -> bool:
    """Return whether an EncryptedSession wrote the item, so that it cannot be read here."""
    return ENCRYPTED_FIELD in item and "payload" in item


def message_of(item: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    """Return the item as a message. Raises NotAMessage, ValueError, RecursionError."""
    kind = item.get("type")
    if isinstance(kind, str) and kind in _ARGUMENT_FIELDS:
        return _call(item, _ARGUMENT_FIELDS[kind])
    if kind in _OUTPUT_TYPES:
        return _output(item, report)
    if kind == "reasoning":
        return _reasoning(item)
    if isinstance(item.get("role"), str) and kind in (None, "message"):
        return _chat_message(item, report)
    if not isinstance(kind, str):
        raise NotAMessage("it has neither a role nor a type")
    report.count_unseen(kind)
    return with_extra({"role": "assistant", "content": None}, FIELD, item)


def _chat_message(item: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    content = item.get("content")
    rest = {name: value for name, value in item.items() if name not in ("role", "content")}
    if isinstance(content, list):
        parts, is_lossless = _parts(content, report)
        rest |= {} if is_lossless else {"content": content}
        content = make_content(parts)
    elif content is not None and not isinstance(content, str):
        raise NotAMessage("its content is neither text nor a list of parts")
    if rest.get("type") == "message":
        del rest["type"]
    return with_extra({"role": item["role"], "content": content}, FIELD, non_empty(rest))


def _call(item: dict[str, Any], field: str) -> dict[str, Any]:
    given = item.get(field)
    arguments = {"input": given} if field == "input" else given
    call = make_call(item.get("call_id"), item.get("name"), arguments)
    converted_fields = ("call_id", "name", field, *(("type",) if field == "arguments" else ()))
    rest = {name: value for name, value in item.items() if name not in converted_fields}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return with_extra(message, FIELD, non_empty(rest))


def _output(item: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    output = item.get("output")
    converted_fields = (
        "call_id",
        "output",
        *(("type",) if item["type"] == _OUTPUT_TYPES[0] else ()),
    )
    rest = {name: value for name, value in item.items() if name not in converted_fields}
    if isinstance(output, list):
        parts, is_lossless = _parts(output, report, texts_only=True)
        rest |= {} if is_lossless else {"output": output}
        output = make_content(parts)
    elif output is not None and not isinstance(output, str):
        rest["output"] = output
        parts, _ = _parts([output], report, texts_only=True)
        output = make_content(parts)
    message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output or ""}
    return with_extra(message, FIELD, non_empty(rest))


def _reasoning(item: dict[str, Any]) -> dict[str, Any]:
    texts_and_parts = [*_items(item.get("summary")), *_items(item.get("content"))]
    texts = [text for part in texts_and_parts if (text := _text(part)) is not None]
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if texts:
        message["reasoning_content"] = "\n\n".join(texts)
    return with_extra(message, FIELD, item)


def _parts(
    given: list[Any], report: ImportProblems, *, texts_only: bool = False
) -> tuple[list[Part], bool]:
    """Return the parts of a content, and whether the conversion is lossless."""
    parts: list[Part] = []
    is_lossless = True
    for part in given:
        converted, part_is_lossless = _part(part, texts_only=texts_only)
        is_lossless = is_lossless and part_is_lossless
        if converted is not None:
            parts.append(converted)
        else:
            kind = part.get("type") if isinstance(part, dict) else None
            report.count_unseen(kind if isinstance(kind, str) else "unknown part")
    return parts, is_lossless


def _part(part: Any, *, texts_only: bool) -> tuple[Part | None, bool]:
    text = _text(part)
    if text is not None:
        rest = {} if isinstance(part, str) else {n: part[n] for n in part if n not in _TEXT_FIELDS}
        return text_part(text), not non_empty(rest)
    if not isinstance(part, dict) or texts_only:
        return None, False
    match part.get("type"):
        case "input_image" if isinstance(part.get("image_url"), str):
            detail = part.get("detail")
            return image_part(part["image_url"], detail=detail), not _other_fields(
                part, "image_url", "detail"
            )
        case "input_file" if part.get("file_id") or part.get("file_data"):
            names = ("file_id", "file_data", "filename")
            file = non_empty({name: part.get(name) for name in names})
            return {"type": "file", "file": file}, not _other_fields(part, *names)
        case "input_audio" | "image_url" | "refusal":
            return part, True
    return None, False


_TEXT_FIELDS: Final = ("type", "text")


def _other_fields(part: dict[str, Any], *names: str) -> dict[str, Any]:
    return non_empty({n: v for n, v in part.items() if n not in ("type", *names)})


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if (
        isinstance(part, dict)
        and part.get("type") in _TEXT_TYPES
        and isinstance(part.get("text"), str)
    ):
        text: str = part["text"]
        return text
    return None


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
