"""Strands' messages (Bedrock's content blocks) as messages of the chat shape.

Results that stand in a user's message become messages of their own, before what the user says.
"""

from collections.abc import Sequence
from typing import Any, Final

from stenolog.sessions.importers.chat import (
    Part,
    as_id,
    as_object,
    as_text,
    beside,
    call_of,
    content_of,
    filled,
    image_part,
    text_part,
)
from stenolog.sessions.importers.report import NotAMessage, Report

FIELD: Final = "strands"
"""The field of a message that has what is not in the chat shape."""

_SILENT: Final = ("cachePoint",)
"""Blocks that say nothing to a model."""


class _Said:
    """What the blocks of one message come to."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.calls: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        self.thoughts: list[str] = []
        self.whole = True
        """Whether all of it is said in the chat shape."""


def messages_of(message: dict[str, Any], report: Report) -> list[dict[str, Any]]:
    """The messages in one of its own. Raises NotAMessage, ValueError, RecursionError."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise NotAMessage("it has no role")
    blocks: Sequence[Any] = [{"text": content}] if isinstance(content, str) else content or ()
    if not isinstance(blocks, list):
        raise NotAMessage("its content is no list of blocks")
    said = _Said()
    for block in blocks:
        _add(said, as_object(block, "a block of its content"), report)
    rest = filled({name: message[name] for name in message if name not in ("role", "content")})
    if not said.whole:
        rest["content"] = content
    found = list(said.results)
    if said.parts or said.calls or said.thoughts or not found:
        made: dict[str, Any] = {"role": role, "content": content_of(said.parts)}
        if said.thoughts:
            made["reasoning_content"] = "\n\n".join(said.thoughts)
        if said.calls:
            made["tool_calls"] = said.calls
        found.append(made)
    if rest:
        found[-1] = {**found[-1], FIELD: {**found[-1].get(FIELD, {}), **rest}}
    return found


def text_of(message: Any) -> str:
    """The words of a message, whatever else is in it."""
    content = message.get("content") if isinstance(message, dict) else None
    blocks = content if isinstance(content, list) else []
    texts = [block.get("text") for block in blocks if isinstance(block, dict)]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _add(said: _Said, block: dict[str, Any], report: Report) -> None:
    for kind, value in block.items():
        match kind, value:
            case "text", str():
                said.parts.append(text_part(value))
            case "toolUse", dict():
                call = call_of(value.get("toolUseId"), value.get("name"), value.get("input"))
                said.calls.append(call)
                said.whole = said.whole and value.keys() <= {"toolUseId", "name", "input"}
            case "toolResult", dict():
                said.results.append(_result(value, report))
            case "image", {"format": str(), "source": {"bytes": {"data": str()}}}:
                data = value["source"]["bytes"]["data"]
                said.parts.append(image_part(f"data:image/{value['format']};base64,{data}"))
            case "reasoningContent", {"reasoningText": {"text": str()}}:
                said.thoughts.append(value["reasoningText"]["text"])
                said.whole = said.whole and value["reasoningText"].keys() <= {"text"}
            case "guardContent", {"text": {"text": str()}}:
                said.parts.append(text_part(value["text"]["text"]))
                said.whole = False
            case "citationsContent", {"content": list()}:
                said.parts += map(text_part, _texts(value["content"]))
                said.whole = False
            case _:
                said.whole = False
                if kind not in _SILENT:
                    report.unseen(kind)


def _result(value: dict[str, Any], report: Report) -> dict[str, Any]:
    content = value.get("content")
    parts: list[Part] = []
    whole = True
    for block in content if isinstance(content, list) else []:
        match block:
            case {"text": str(text), **more} if not more:
                parts.append(text_part(text))
            case {"json": inside, **more} if not more:
                # As text nobody could tell it from a text that looks the same.
                parts.append(text_part(as_text(inside)))
                whole = False
            case _:
                whole = False
                kinds = " and ".join(block) if isinstance(block, dict) else ""
                report.unseen(f"{kinds or 'unknown part'} in a result")
    rest = {n: value[n] for n in value if n not in ("toolUseId", "content")}
    rest |= {} if whole else {"result": content}
    message = {
        "role": "tool",
        "tool_call_id": as_id(value.get("toolUseId")),
        "content": content_of(parts) or "",
    }
    return beside(message, FIELD, filled(rest))


def _texts(blocks: list[Any]) -> list[str]:
    found = (block.get("text") for block in blocks if isinstance(block, dict))
    return [text for text in found if isinstance(text, str)]
