"""Items of the OpenAI Agents SDK (Responses API) as messages in the chat format.

Each item, even a tool call, becomes one message, so that a later import recognizes the messages of
an earlier import. Parallel calls become consecutive messages.
"""

from itertools import chain
from typing import Any, Final

from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    NotAMessage,
    Part,
    convert_parts,
    image_part,
    make_call,
    non_empty,
    omit,
    text_part,
    with_extra,
)

EXTRA_FIELD: Final = "openai_agents"
"""Field of a message with the data that the chat format does not have."""


_TEXT_TYPES: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ARGUMENT_FIELDS: Final = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUT_TYPES: Final = ("function_call_output", "custom_tool_call_output")


def is_encrypted(item: dict[str, Any]) -> bool:
    """Return whether an EncryptedSession wrote the item, so that the item cannot be read."""
    return "__enc__" in item and "payload" in item


def message_of(item: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    """Return the item as a message. Raises NotAMessage, ValueError, RecursionError."""
    item_type = item.get("type")
    if isinstance(item_type, str) and item_type in _ARGUMENT_FIELDS:
        return _call_message(item, _ARGUMENT_FIELDS[item_type])
    if item_type in _OUTPUT_TYPES:
        return _output_message(item, report)
    if item_type == "reasoning":
        return _reasoning_message(item)
    if isinstance(item.get("role"), str) and item_type in (None, "message"):
        return _chat_message(item, report)
    if not isinstance(item_type, str):
        raise NotAMessage("it has neither a role nor a type")
    report.count_unseen(item_type)
    return with_extra({"role": "assistant", "content": None}, EXTRA_FIELD, item)


def _chat_message(item: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    content = item.get("content")
    other_fields = omit(item, "role", "content")
    if isinstance(content, list):
        content, is_lossless = convert_parts(content, _convert_part, report)
        other_fields |= {} if is_lossless else {"content": item["content"]}
    elif content is not None and not isinstance(content, str):
        raise NotAMessage("its content is neither text nor a list of parts")
    if other_fields.get("type") == "message":
        del other_fields["type"]
    message = {"role": item["role"], "content": content}
    return with_extra(message, EXTRA_FIELD, non_empty(other_fields))


def _call_message(item: dict[str, Any], arguments_field: str) -> dict[str, Any]:
    value = item.get(arguments_field)
    arguments = {"input": value} if arguments_field == "input" else value
    call = make_call(item.get("call_id"), item.get("name"), arguments)
    other_fields = omit(item, "call_id", "name", arguments_field)
    if arguments_field == "arguments":
        del other_fields["type"]
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return with_extra(message, EXTRA_FIELD, non_empty(other_fields))


def _output_message(item: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    output = item.get("output")
    other_fields = omit(item, "call_id", "output")
    if item["type"] == "function_call_output":
        del other_fields["type"]
    if output is not None and not isinstance(output, str):
        is_list = isinstance(output, list)
        output, is_lossless = convert_parts(
            output if is_list else [output], _convert_part, report, texts_only=True
        )
        if not is_list or not is_lossless:
            other_fields["output"] = item["output"]
    message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output or ""}
    return with_extra(message, EXTRA_FIELD, non_empty(other_fields))


def _reasoning_message(item: dict[str, Any]) -> dict[str, Any]:
    part_lists = [p for p in (item.get("summary"), item.get("content")) if isinstance(p, list)]
    texts = [text for text in map(_text_of_part, chain(*part_lists)) if text is not None]
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if texts:
        message["reasoning_content"] = "\n\n".join(texts)
    return with_extra(message, EXTRA_FIELD, item)


def _convert_part(part: Any) -> tuple[Part | None, bool]:
    text = _text_of_part(part)
    if text is not None:
        return text_part(text), isinstance(part, str) or not _other_fields(part, "text")
    if not isinstance(part, dict):
        return None, False
    match part.get("type"):
        case "input_image" if isinstance(part.get("image_url"), str):
            image = image_part(part["image_url"], detail=part.get("detail"))
            return image, not _other_fields(part, "image_url", "detail")
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
