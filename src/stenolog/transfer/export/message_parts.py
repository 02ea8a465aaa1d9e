"""The readable parts of a message; every text is cleaned in one place."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.message_metadata import FIELD, has_failed, interruption, model_of, seconds_of
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

Clean = Callable[[str], str]
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


class Said(Struct, frozen=True, kw_only=True):
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
    said: tuple[Said, ...]
    hidden: int
    """Number of hidden messages, whether `said` contains them or not."""


def minute(at: datetime) -> str:
    """Return a time to the minute; years before 1000 have four digits too."""
    return f"{at.date()} {at:%H:%M}"


def plain(text: str) -> str:
    """Return the text without invisible characters; line ends and tabs stay."""
    return _UNPRINTABLE.sub("", text.replace("\r\n", "\n"))


def cleaned(text: str, clean: Clean) -> str:
    """Return the text as it may be shown."""
    # In this order: an invisible character inside a secret would hide it from `clean`.
    return clean(plain(text))


def read_all(messages: Iterable[Message], clean: Clean) -> Iterator[Said]:
    """Yield the messages for reading, in order; tool results get the name of their tool."""
    tools: dict[str | None, str] = {}
    for message in messages:
        body = message.to_dict()
        role = body.get("role")
        read = list(read_message(body))
        calls = (part for part in read if isinstance(part, ToolCall) and part.name != UNNAMED)
        tools.update({part.id: part.name for part in calls if part.id is not None})
        parts = [made for part in read for made in _readable(part, body, tools, clean)]
        yield Said(
            seq=message.seq,
            at=message.at,
            role=cleaned(role if isinstance(role, str) else _as_json(role), clean),
            hidden=message.hidden,
            parts=(*parts, *_fields(unread_fields(body), clean)),
            model=cleaned(model_of(body) or "", clean),
            seconds=seconds_of(body),
            failed=has_failed(body)
            or any(isinstance(part, ToolResult) and part.is_error for part in read),
            interrupted=cleaned(interruption(body), clean),
        )


def _readable(
    part: AnyPart, body: Mapping[str, Any], tools: Mapping[str | None, str], clean: Clean
) -> Iterator[Part]:
    """Yield what a reader sees of a part; parts without readable form are shown as JSON."""
    match part:
        case TextPart():
            yield Part(kind="text", text=cleaned(part.text, clean))
        case ThinkingPart() if part.in_content or isinstance(part.value, str):
            if text := cleaned(part.text, clean).strip():
                yield Part(kind="thought", text=text)
            elif part.in_content:
                yield _as_field("content", part.value, clean)
        case ThinkingPart():
            yield from _fields({part.field: part.value}, clean)
        case ToolCall() if part.name != UNNAMED:
            given = part.arguments
            text = given if isinstance(given, str) else "" if given is None else _as_json(given)
            name = cleaned(part.name, clean)
            yield Part(kind="call", name=name, text=cleaned(text, clean))
        case ToolCall():
            yield Part(kind="call", name="tool", text=cleaned(_as_json(part.value), clean))
        case ToolResult():
            name = cleaned(tools.get(part.id, ""), clean)
            inner = list(read_content(part.content))
            for one in inner:
                for made in _readable(one, body, tools, clean):
                    yield replace(made, kind="result", name=name) if made.kind == "text" else made
            if part.in_content and not inner:
                yield Part(kind="result", name=name, text="")
        case FilePart() if part.value is body.get("audio"):
            if isinstance(part.content, str):
                yield Part(kind="text", text=cleaned(part.content, clean))
            yield from _fields({"audio": part.value}, clean)
        # Only embedded images: showing others would cause a request.
        case ImagePart() if _IMAGE.fullmatch(part.url):
            yield Part(kind="image", text=part.url)
        case UnknownPart() if part.field in ("tool_calls", "function_call"):
            yield Part(kind="call", name="tool", text=cleaned(_as_json(part.value), clean))
        case UnknownPart() if part.field != "content":
            yield from _fields({part.field: part.value}, clean)
        case UnknownPart() if part.text is not None:
            yield Part(kind="text", text=cleaned(part.text, clean))
        case _ if part.value is not body:
            yield _as_field("content", part.value, clean)


def _fields(fields: Mapping[str, Any], clean: Clean) -> Iterator[Part]:
    for name, value in fields.items():
        if name != FIELD and value is not None:
            # Clean name and value together: only the name may reveal that the value is a secret.
            yield _as_field(cleaned(name, clean), {name: value}, clean)


def _as_field(name: str, value: Any, clean: Clean) -> Part:
    return Part(kind="field", name=name, text=cleaned(_as_json(value), clean))


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
