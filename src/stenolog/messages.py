"""Typed parts of messages, read from the formats of several providers. Pure functions.

The supported formats are chat messages and Responses items of OpenAI, content blocks of Anthropic,
and plain text. `read_message` and `read_content` yield typed parts. A part of an unknown format
becomes an `UnknownPart` with the original value, so that no content is lost. Functions of this
module accept messages with any fields and values, and never raise.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeGuard

import msgspec
from msgspec import Struct

from stenolog.records import Message

Body = dict[str, Any]
CallPosition = tuple[int, int]
"""Index of a message, and index of a tool call or result in that message."""

ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
REASONING_FIELDS: Final = (
    "reasoning_content",
    "reasoning",
    "thinking",
    "reasoning_details",
    "thinking_blocks",
)
"""Message fields in which providers return the model's thinking."""
THINKING_TYPES: Final = frozenset({"thinking", "redacted_thinking", "reasoning"})
TEXT_TYPES: Final = ("text", "input_text", "output_text")
"""Types of parts that contain only text."""
UNNAMED: Final = "unknown"
"""Tool name that is used for a call without a name."""


class TextPart(Struct, frozen=True):
    """Text of a message; the text of a refusal is a TextPart, too."""

    text: str
    value: Any
    """The original part of the message."""
    field: str = ""
    """Field of `value` that contains the text; empty if `value` is the text."""


class ThinkingPart(Struct, frozen=True):
    """Thinking of the model. Encrypted thinking has an empty text."""

    text: str
    value: Any
    field: str
    """Field with the text: a field of the part, or of the message if `in_content` is False."""
    in_content: bool = True


class ImagePart(Struct, frozen=True):
    """An image."""

    url: str
    """Address of the image, or a `data:` URL for an embedded image; may be empty."""
    value: Any
    detail: str = ""


class FilePart(Struct, frozen=True):
    """A file, a document, audio or video."""

    kind: Literal["file", "audio", "video"]
    name: str
    """File name or title; may be empty."""
    value: Any
    content: Any = None
    """Text or parts of a document, or transcript of audio; None if the file has neither."""
    field: str = ""
    """Field of `value` that has the content."""


class ToolCall(Struct, frozen=True, kw_only=True):
    """A tool call."""

    id: str | None
    name: str
    arguments: Any
    value: Mapping[str, Any]
    """The original call in the message."""
    field: str = ""
    """Field of `value` that contains name and arguments; empty if they are fields of `value`."""
    in_content: bool
    """Whether the call is a part of the content, not an item of `tool_calls`."""


class ToolResult(Struct, frozen=True, kw_only=True):
    """The result of a tool call."""

    id: str | None
    content: Any
    value: Mapping[str, Any]
    """The message, or the part of its content, that is the result."""
    in_content: bool

    @property
    def is_error(self) -> bool:
        """Whether the tool reported an error."""
        return self.value.get("is_error") is True


class UnknownPart(Struct, frozen=True):
    """A part or field of a message whose format this module does not know."""

    type: str
    """Type of the part, or name of the field; empty for a part without a type."""
    value: Any
    field: str = "content"
    """Name of the message field that contains the part."""

    @property
    def text(self) -> str | None:
        """The field `text` of the part; None if the field is not a string."""
        text = self.value.get("text") if isinstance(self.value, Mapping) else None
        return text if isinstance(text, str) else None


Part = TextPart | ThinkingPart | ImagePart | FilePart | ToolCall | ToolResult | UnknownPart


# --- reading ---------------------------------------------------------------------------------


def read_message(body: Mapping[str, Any]) -> Iterator[Part]:
    """Yield all parts of a message: first the thinking, then the content, then the tool calls."""
    if (item := _read_item(body)) is not None:
        yield from _with_result(item)
        return
    yield from _read_thinking_fields(body)
    content = body.get("content")
    if body.get("role") in ("tool", "function"):
        id = _nonempty_text(body.get("tool_call_id"))
        yield ToolResult(id=id, content=content, value=body, in_content=False)
    else:
        yield from read_content(content)
    if (refusal := body.get("refusal")) is not None:
        is_text = isinstance(refusal, str)
        yield TextPart(refusal, refusal) if is_text else UnknownPart("refusal", refusal, "refusal")
    if _is_mapping(audio := body.get("audio")):
        yield FilePart("audio", "", audio, audio.get("transcript"), "transcript")
    elif audio is not None:
        yield UnknownPart("audio", audio, "audio")
    for name in ("tool_calls", "function_call"):
        if (calls := body.get(name)) is not None:
            for call in calls if name == "tool_calls" and isinstance(calls, list) else [calls]:
                is_object = _is_mapping(call)
                yield read_listed_call(call) if is_object else UnknownPart(name, call, name)


def read_content(content: Any) -> Iterator[Part]:
    """Yield the typed parts of a message's content: a text, a list of parts, or one part."""
    if isinstance(content, str):
        yield TextPart(content, content)
    elif isinstance(content, list):
        for part in content:
            yield from _with_result(read_part(part))
    elif content is not None:
        yield from _with_result(read_part(content))


def read_part(part: Any) -> Part:
    """Return a part of a message's content, or a Responses item, as a typed part."""
    if isinstance(part, str):
        return TextPart(part, part)
    if not _is_mapping(part):
        return UnknownPart("", part)
    kind = part.get("type")
    if kind is None:
        return _read_text(part) or UnknownPart("", part)
    if not isinstance(kind, str):
        return UnknownPart("", part)
    reader = _READERS.get(kind)
    if reader is None:
        reader = next((read for suffix, read in _READERS_BY_SUFFIX if kind.endswith(suffix)), None)
    typed_part = None if reader is None else reader(part)
    return UnknownPart(kind, part) if typed_part is None else typed_part


def read_listed_call(call: Mapping[str, Any]) -> ToolCall:
    """Return an item of `tool_calls`, or the older `function_call`, as a tool call."""
    call_fields, field = call.get("function"), "function"
    if not _is_mapping(call_fields):
        call_fields, field = call.get("custom"), "custom"
    if not _is_mapping(call_fields):
        call_fields, field = call, ""
    return ToolCall(
        id=_nonempty_text(call.get("id")),
        name=_nonempty_text(call_fields.get("name")) or UNNAMED,
        arguments=call_fields.get("arguments", call_fields.get("input")),
        value=call,
        field=field,
        in_content=False,
    )


def unread_fields(body: Mapping[str, Any]) -> Body:
    """Return the fields of a message that `read_message` does not read."""
    item = _read_item(body)
    if item is None or isinstance(item, UnknownPart):
        return {name: value for name, value in body.items() if name not in _READ_FIELDS}
    if isinstance(item, ToolCall) and not any(name in body for name in _ARGUMENT_FIELDS):
        return {}
    return {name: value for name, value in body.items() if name not in _ITEM_FIELDS}


def encoded_data(part: Mapping[str, Any]) -> tuple[str, str]:
    """Return the media type and the longest encoded data in a part; empty strings if none."""
    longest = "", ""
    for holder in (part, *(value for value in part.values() if _is_mapping(value))):
        for name in ("data", "file_data"):
            if isinstance(data := holder.get(name), str) and len(data) > len(longest[1]):
                types = (holder.get(name) for name in ("media_type", "mime_type", "mimeType"))
                longest = next((kind for kind in types if isinstance(kind, str) and kind), ""), data
    return longest


_READ_FIELDS: Final = frozenset(
    {
        *("role", "content", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"),
        *REASONING_FIELDS,
    }
)
_ARGUMENT_FIELDS: Final = ("arguments", "input", "args")
_RESULT_FIELDS: Final = ("output", "outputs", "results", "result")
"""Fields of a Responses item that may contain the result of its call."""
_ITEM_FIELDS: Final = frozenset(
    {
        *("type", "id", "call_id", "tool_use_id", "status", "name", *_ARGUMENT_FIELDS),
        *("content", "summary", *_RESULT_FIELDS),
    }
)


def _read_item(body: Mapping[str, Any]) -> Part | None:
    """Return the typed part of a Responses item; None if `body` is a message."""
    if "role" in body or not isinstance(body.get("type"), str):
        return None
    item = read_part(body)
    if isinstance(item, UnknownPart):
        return None if "content" in body else item
    return item


def _with_result(part: Part) -> Iterator[Part]:
    """Yield a part, then the result of its call if the same Responses item contains it."""
    yield part
    if isinstance(part, ToolCall) and part.in_content:
        for name in _RESULT_FIELDS:
            if (content := part.value.get(name)) is not None:
                if part.value["type"] == "image_generation_call" and isinstance(content, str):
                    content = {"type": "image", "data": content, "mimeType": "image/png"}
                yield ToolResult(id=part.id, content=content, value=part.value, in_content=True)


def _read_thinking_fields(body: Mapping[str, Any]) -> Iterator[Part]:
    for name in REASONING_FIELDS:
        value = body.get(name)
        if isinstance(value, str | list):
            if value:
                yield ThinkingPart(_join_thinking(value), value, name, in_content=False)
        elif value is not None:
            yield UnknownPart(name, value, name)


def _read_text(part: Mapping[str, Any], field: str = "text") -> TextPart | None:
    text = part.get(field)
    return TextPart(text, part, field) if isinstance(text, str) else None


def _read_thinking(part: Mapping[str, Any]) -> ThinkingPart:
    for field in _THINKING_TEXT_FIELDS:
        if text := _join_thinking(part.get(field)):
            return ThinkingPart(text, part, field)
    # Providers may omit the text and send only its signature.
    name = next((field for field in _THINKING_TEXT_FIELDS if isinstance(part.get(field), str)), "")
    return ThinkingPart("", part, name)


def _join_thinking(value: Any) -> str:
    """Return thinking as one text; `value` is a string or a list of blocks."""
    if isinstance(value, str):
        return value
    blocks = value if isinstance(value, list) else []
    return "\n\n".join(filter(None, map(_block_text, blocks)))


def _block_text(block: Any) -> str:
    if isinstance(block, str):
        return block
    texts = (block.get(name) for name in _THINKING_TEXT_FIELDS) if _is_mapping(block) else ()
    return next((text for text in texts if isinstance(text, str)), "")


_THINKING_TEXT_FIELDS: Final = ("thinking", "text", "reasoning", "summary", "content")


def _read_image(part: Mapping[str, Any]) -> ImagePart:
    image = part.get("image_url")
    detail = image.get("detail") if _is_mapping(image) else part.get("detail")
    url = image.get("url") if _is_mapping(image) else image
    if url is None:
        source = part.get("source")
        media_type, data = encoded_data(part)
        url = f"data:{media_type};base64,{data}" if data else None
        if url is None and _is_mapping(source):
            url = source.get("url")
    return ImagePart(_nonempty_text(url) or "", part, _nonempty_text(detail) or "")


def _read_file(part: Mapping[str, Any]) -> FilePart:
    part_type: str = part["type"]
    sources = (part.get(name) for name in (part_type, "source"))
    inner: Mapping[str, Any] = next((source for source in sources if _is_mapping(source)), {})
    names = (inner.get("filename"), part.get("filename"), part.get("title"), part.get("name"))
    name = next((name for name in names if isinstance(name, str)), "")
    kind: Any = next((kind for kind in ("audio", "video") if kind in part_type), "file")
    if inner.get("type") == "text":
        return FilePart(kind, name, part, inner.get("data"), "source")
    field = "source" if "content" in inner else "content"
    return FilePart(kind, name, part, inner.get("content", part.get("content")), field)


def _read_tool_use(part: Mapping[str, Any]) -> ToolCall:
    return ToolCall(
        id=_nonempty_text(part.get("id")),
        name=_nonempty_text(part.get("name")) or UNNAMED,
        arguments=part.get("input"),
        value=part,
        in_content=True,
    )


def _read_call_item(part: Mapping[str, Any]) -> ToolCall:
    """Return a Responses item as a tool call.

    A call to a built-in tool may have no argument field: the tool's own fields are the arguments.
    """
    field = next((name for name in _ARGUMENT_FIELDS if name in part), None)
    kind = part["type"].removesuffix("_call")
    default_name = UNNAMED if kind in ("function", "custom_tool") else kind
    tool_fields = {name: value for name, value in part.items() if name not in _ITEM_FIELDS}
    return ToolCall(
        id=_nonempty_text(part.get("call_id")) or _nonempty_text(part.get("id")),
        name=_nonempty_text(part.get("name")) or default_name,
        arguments=tool_fields if field is None else part[field],
        value=part,
        in_content=True,
    )


def _read_tool_result(part: Mapping[str, Any]) -> ToolResult:
    content = part.get("content")
    return ToolResult(
        id=_nonempty_text(part.get("tool_use_id")) or _nonempty_text(part.get("call_id")),
        content=part.get("output") if content is None else content,
        value=part,
        in_content=True,
    )


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Part | None]]] = {
    **dict.fromkeys((*TEXT_TYPES, "summary_text"), _read_text),
    "refusal": partial(_read_text, field="refusal"),
    **dict.fromkeys((*THINKING_TYPES, "reasoning_text"), _read_thinking),
    **dict.fromkeys(("image_url", "input_image", "image", "computer_screenshot"), _read_image),
    **dict.fromkeys(
        (
            *("file", "input_file", "document", "container_upload", "search_result"),
            *("input_audio", "audio", "audio_url", "video", "video_url", "input_video"),
        ),
        _read_file,
    ),
}
_READERS_BY_SUFFIX: Final[Sequence[tuple[str, Callable[[Mapping[str, Any]], Part]]]] = (
    ("tool_use", _read_tool_use),
    ("tool_result", _read_tool_result),
    ("_call_output", _read_tool_result),
    ("_call", _read_call_item),
)


# --- roles, calls and results ----------------------------------------------------------------


def body_of(message: Message | Mapping[str, Any]) -> Body:
    """Return the fields of a message as a new dictionary."""
    return message.to_dict() if isinstance(message, Message) else dict(message)


def seq_of(message: Message | Mapping[str, Any]) -> int | None:
    """Return the seq of a message, or None if it is not stored."""
    return message.seq if isinstance(message, Message) else None


def role_of(body: Mapping[str, Any]) -> str:
    """Return the role of a message; empty if the role is not in `ROLES`."""
    role = body.get("role")
    return role if isinstance(role, str) and role in ROLES else ""


def calls_of(body: Mapping[str, Any]) -> list[ToolCall]:
    """Return the tool calls of an assistant message, in order; none for other messages."""
    if body.get("role") != "assistant":
        return []
    if isinstance(body.get("content"), str) and not body.get("tool_calls"):
        return []  # most messages
    if listed_calls := _list_objects(body.get("tool_calls")):
        return [read_listed_call(call) for call in listed_calls]
    return [_read_tool_use(part) for part in _parts_of_type(body, "tool_use")]


def results_of(body: Mapping[str, Any]) -> list[ToolResult]:
    """Return the tool results in a message, in order."""
    role = body.get("role")
    if role == "tool":
        id = _nonempty_text(body.get("tool_call_id"))
        return [ToolResult(id=id, content=body.get("content"), value=body, in_content=False)]
    if role != "user":
        return []
    return [_read_tool_result(part) for part in _parts_of_type(body, "tool_result")]


def has_text(body: Mapping[str, Any]) -> bool:
    """Return whether a message is a user message that does not consist only of tool results."""
    if body.get("role") != "user":
        return False
    content = body.get("content")
    if not isinstance(content, list):
        return True
    results = len(_parts_of_type(body, "tool_result"))
    return results == 0 or len(content) > results


def pair_calls(bodies: Sequence[Mapping[str, Any]]) -> dict[CallPosition, CallPosition]:
    """Return the position of the result of each answered call, by the position of the call.

    A result with an id answers the newest call with that id. A result without an id answers the
    first open call of the newest message with calls. A call that reuses an id replaces earlier open
    calls with that id.
    """
    pairs: dict[CallPosition, CallPosition] = {}
    open_calls: dict[str, list[CallPosition]] = {}
    newest_positions: list[CallPosition] = []
    for index, body in enumerate(bodies):
        calls = calls_of(body)
        if calls:
            newest_positions = [(index, part_index) for part_index in range(len(calls))]
            positions_by_id: dict[str, list[CallPosition]] = {}
            for position, call in zip(newest_positions, calls, strict=True):
                if call.id is not None:
                    positions_by_id.setdefault(call.id, []).append(position)
            open_calls |= positions_by_id
        for part_index, result in enumerate(results_of(body)):
            candidates = newest_positions if result.id is None else open_calls.get(result.id, [])
            unanswered_position = next(
                (position for position in candidates if position not in pairs), None
            )
            if unanswered_position is not None:
                pairs[unanswered_position] = (index, part_index)
    return pairs


# --- text ------------------------------------------------------------------------------------


def text_of(content: Any) -> str:
    """Return the text of a message's content. A part without text becomes its type in brackets."""
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
        content = [part for part in content if type_of(part) not in _NON_TEXT_TYPES]
    return text_of(content)


def type_of(part: Any) -> str:
    """Return the type of a part; empty for a part without a type."""
    kind = part.get("type") if _is_mapping(part) else None
    return kind if isinstance(kind, str) else ""


def as_json(value: Any) -> str:
    """Return the value as JSON text, or as `repr` if JSON cannot represent it."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        pass
    # The fast codec rejects lone surrogates and integers beyond 64 bits.
    try:
        return json.dumps(value, default=repr)
    except (TypeError, ValueError):
        return repr(value)
    except RecursionError:
        return "[nested too deeply]"


_NON_TEXT_TYPES: Final = THINKING_TYPES | {"tool_use", "tool_result"}


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not _is_mapping(part):
        return as_json(part)
    for field in ("text", "content", "refusal"):
        value = part.get(field)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return text_of(value)
    return f"[{type_of(part) or 'part'}]"


def _parts_of_type(body: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """Return the parts of a message's content that have this type."""
    return [part for part in _list_objects(body.get("content")) if part.get("type") == kind]


def _list_objects(value: Any) -> list[Mapping[str, Any]]:
    """Return the JSON objects in a list; an empty list for any other value."""
    return [item for item in value if _is_mapping(item)] if isinstance(value, list) else []


def _nonempty_text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _is_mapping(value: Any) -> TypeGuard[Mapping[str, Any]]:
    # Check for `dict` first: a check for an abstract class is several times slower.
    return type(value) is dict or isinstance(value, Mapping)
