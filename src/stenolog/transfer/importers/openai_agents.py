"""Items of the OpenAI Agents SDK (Responses API) as messages in the chat format.

Each item, even a tool call, becomes one message, so that a later import recognizes the messages of
an earlier import. Parallel calls become consecutive messages.
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
    omit,
    text_part,
    with_extra,
)

EXTRA_FIELD: Final = "openai_agents"
"""Field of a message with the data that the chat format does not have."""
ENCRYPTED_FIELD: Final = "__enc__"

_TEXT_TYPES: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ARGUMENT_FIELDS: Final = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUT_TYPES: Final = ("function_call_output", "custom_tool_call_output")


def is_encrypted(item: dict[str, Any]) -> bool:
    """Return whether an EncryptedSession wrote the item, so that the item cannot be read."""
    return ENCRYPTED_FIELD in item and "payload" in item


def message_of(item: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    """Return the item as a message. Raises NotAMessage, ValueError, RecursionError."""
    kind = item.get("type")
    if isinstance(kind, str) and kind in _ARGUMENT_FIELDS:
        return _call_message(item, _ARGUMENT_FIELDS[kind])
    if kind in _OUTPUT_TYPES:
        return _output_message(item, report)
    if kind == "reasoning":
        return _reasoning_message(item)
    if isinstance(item.get("role"), str) and kind in (None, "message"):
        return _chat_message(item, report)
    if not isinstance(kind, str):
        raise NotAMessage("it has neither a role nor a type")
    report.count_unseen(kind)
    return with_extra({"role": "assistant", "content": None}, EXTRA_FIELD, item)


def _chat_message(item: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    content = item.get("content")
    other_fields = omit(item, "role", "content")
    if isinstance(content, list):
        parts, is_lossless = _to_parts(content, report)
        other_fields |= {} if is_lossless else {"content": content}
        content = make_content(parts)
    elif content is not None and not isinstance(content, str):
        raise NotAMessage("its content is neither text nor a list of parts")
    if other_fields.get("type") == "message":
        del other_fields["type"]
    message = {"role": item["role"], "content": content}
    return with_extra(message, EXTRA_FIELD, non_empty(other_fields))


def _call_message(item: dict[str, Any], field: str) -> dict[str, Any]:
    value = item.get(field)
    arguments = {"input": value} if field == "input" else value
    call = make_call(item.get("call_id"), item.get("name"), arguments)
    extra = omit(item, "call_id", "name", field, *(("type",) if field == "arguments" else ()))
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return with_extra(message, EXTRA_FIELD, non_empty(extra))


def _output_message(item: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    output = item.get("output")
    other_fields = omit(item, "call_id", "output")
    if item["type"] == "function_call_output":
        del other_fields["type"]
    if output is not None and not isinstance(output, str):
        is_list = isinstance(output, list)
        parts, is_lossless = _to_parts(output if is_list else [output], report, texts_only=True)
        if not is_list or not is_lossless:
            other_fields["output"] = output
        output = make_content(parts)
    message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output or ""}
    return with_extra(message, EXTRA_FIELD, non_empty(other_fields))


def _reasoning_message(item: dict[str, Any]) -> dict[str, Any]:
    lists = [p for p in (item.get("summary"), item.get("content")) if isinstance(p, list)]
    texts = [text for parts in lists for part in parts if (text := _text_of_part(part)) is not None]
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if texts:
        message["reasoning_content"] = "\n\n".join(texts)
    return with_extra(message, EXTRA_FIELD, item)


def _to_parts(
    values: list[Any], report: ImportProblems, *, texts_only: bool = False
) -> tuple[list[Part], bool]:
    """Return the parts of a content, and whether the conversion is lossless."""
    parts: list[Part] = []
    is_lossless = True
    for part in values:
        converted, part_is_lossless = _convert_part(part, texts_only=texts_only)
        is_lossless = is_lossless and part_is_lossless
        if converted is not None:
            parts.append(converted)
        else:
            kind = part.get("type") if isinstance(part, dict) else None
            report.count_unseen(kind if isinstance(kind, str) else "unknown part")
    return parts, is_lossless


def _convert_part(part: Any, *, texts_only: bool) -> tuple[Part | None, bool]:
    text = _text_of_part(part)
    if text is not None:
        return text_part(text), isinstance(part, str) or not _other_fields(part, "text")
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


def _other_fields(part: dict[str, Any], *names: str) -> dict[str, Any]:
    return non_empty(omit(part, "type", *names))


def _text_of_part(part: Any) -> str | None:
    match part:
        case str():
            return part
        case {"type": kind, "text": str(text)} if kind in _TEXT_TYPES:
            return text
    return None
