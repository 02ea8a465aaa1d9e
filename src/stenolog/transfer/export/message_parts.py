"""The readable parts of a message. Secrets are removed from every text in this module."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.message_metadata import (
    FIELD,
    PROGRAM_FIELDS,
    has_failed,
    interruption,
    model_of,
    seconds_of,
)
from stenolog.messages import (
    UNNAMED,
    FilePart,
    ImagePart,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolResult,
    UnknownPart,
    read_content,
    read_message,
    unread_fields,
)
from stenolog.messages import Part as AnyPart
from stenolog.records import Message
from stenolog.transfer.export.tool_views import summary_of

TextCleaner = Callable[[str], str]
"""Function that removes from a text everything that must not be shared."""
Kind = Literal["text", "thought", "call", "result", "image", "field"]

# Control characters, characters that change the direction of writing, and lone surrogates.
_UNPRINTABLE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_IMAGE: Final = re.compile(r"data:image/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]+")


class Part(Struct, frozen=True, kw_only=True):
    """One readable part of a message."""

    kind: Kind
    text: str
    """Text of the part; for an image its `data:` URL."""
    name: str = ""
    """Name of the called tool, of the tool that answered, or of an additional field."""

    @property
    def head(self) -> str:
        """Heading of the part when it is folded."""
        match self.kind:
            case "call":
                return " ".join(filter(None, (self.name, summary_of(self.text))))
            case "result":
                return f"{self.name} · result" if self.name else "Result"
            case "thought":
                return "Thinking"
        return self.name


class ReadableMessage(Struct, frozen=True, kw_only=True):
    """A message, prepared for reading."""

    seq: int
    at: datetime
    role: str
    hidden: bool
    parts: tuple[Part, ...]
    model: str = ""
    seconds: float | None = None
    failed: bool = False
    interrupted: str = ""


class Conversation(Struct, frozen=True, kw_only=True):
    """A session, prepared for reading."""

    key: str
    title: str
    summary: str
    created: datetime
    updated: datetime
    messages: tuple[ReadableMessage, ...]
    hidden: int
    """Number of hidden messages, whether `messages` contains them or not."""


def format_minute(at: datetime) -> str:
    """Return a time as text, without seconds. Years before 1000 have four digits too."""
    return f"{at.date()} {at:%H:%M}"


def printable_text(text: str) -> str:
    """Return the text without invisible characters; line ends and tabs stay."""
    return _UNPRINTABLE.sub("", text.replace("\r\n", "\n"))


def redact_text(text: str, clean: TextCleaner) -> str:
    """Return the text without invisible characters and secrets."""
    # Remove invisible characters first, because they could hide a secret from `clean`.
    return clean(printable_text(text))


def readable_messages(messages: Iterable[Message], clean: TextCleaner) -> Iterator[ReadableMessage]:
    """Yield the messages in readable form, in order; tool results get the name of their tool."""
    tool_names: dict[str | None, str] = {}
    for message in messages:
        body = message.to_dict()
        role = body.get("role")
        read_parts = list(read_message(body))
        calls = (part for part in read_parts if isinstance(part, ToolCall) and part.name != UNNAMED)
        tool_names.update({part.id: part.name for part in calls if part.id is not None})
        parts = [
            view for part in read_parts for view in _readable_parts(part, body, tool_names, clean)
        ]
        yield ReadableMessage(
            seq=message.seq,
            at=message.at,
            role=redact_text(role if isinstance(role, str) else _format_json(role), clean),
            hidden=message.hidden,
            parts=(*parts, *_field_parts(unread_fields(body), clean)),
            model=redact_text(model_of(body) or "", clean),
            seconds=seconds_of(body),
            failed=has_failed(body)
            or any(isinstance(part, ToolResult) and part.is_error for part in read_parts),
            interrupted=redact_text(interruption(body), clean),
        )


def _readable_parts(
    part: AnyPart, body: Mapping[str, Any], tool_names: Mapping[str | None, str], clean: TextCleaner
) -> Iterator[Part]:
    """Yield the readable form of a part; parts without a readable form become JSON."""
    match part:
        case TextPart():
            yield Part(kind="text", text=redact_text(part.text, clean))
        case ThinkingPart() if part.in_content or isinstance(part.value, str):
            if text := redact_text(part.text, clean).strip():
                yield Part(kind="thought", text=text)
            elif part.in_content:
                yield _field_part("content", part.value, clean)
        case ThinkingPart():
            yield from _field_parts({part.field: part.value}, clean)
        case ToolCall() if part.name != UNNAMED:
            args = part.arguments
            text = args if isinstance(args, str) else "" if args is None else _format_json(args)
            name = redact_text(part.name, clean)
            yield Part(kind="call", name=name, text=redact_text(text, clean))
        case ToolCall():
            yield Part(kind="call", name="tool", text=redact_text(_format_json(part.value), clean))
        case ToolResult():
            name = redact_text(tool_names.get(part.id, ""), clean)
            content_parts = list(read_content(part.content))
            for content_part in content_parts:
                for view in _readable_parts(content_part, body, tool_names, clean):
                    yield replace(view, kind="result", name=name) if view.kind == "text" else view
            if part.in_content and not content_parts:
                yield Part(kind="result", name=name, text="")
        case FilePart() if part.value is body.get("audio"):
            if isinstance(part.content, str):
                yield Part(kind="text", text=redact_text(part.content, clean))
            yield from _field_parts({"audio": part.value}, clean)
        # Only embedded images are shown, because showing other images would cause a request.
        case ImagePart() if _IMAGE.fullmatch(part.url):
            yield Part(kind="image", text=part.url)
        case UnknownPart() if part.field in ("tool_calls", "function_call"):
            yield Part(kind="call", name="tool", text=redact_text(_format_json(part.value), clean))
        case UnknownPart() if part.field != "content":
            yield from _field_parts({part.field: part.value}, clean)
        case UnknownPart() if part.text is not None:
            yield Part(kind="text", text=redact_text(part.text, clean))
        case _ if part.value is not body:
            yield _field_part("content", part.value, clean)


def _field_parts(fields: Mapping[str, Any], clean: TextCleaner) -> Iterator[Part]:
    for name, value in fields.items():
        if name != FIELD and name not in PROGRAM_FIELDS and value is not None:
            # Clean name and value together, because the name may reveal that the value is a secret.
            yield _field_part(redact_text(name, clean), {name: value}, clean)


def _field_part(name: str, value: Any, clean: TextCleaner) -> Part:
    return Part(kind="field", name=name, text=redact_text(_format_json(value), clean))


def _format_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
