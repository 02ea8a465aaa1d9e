"""The readable parts of a message; every text is cleaned in one place."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, Final, Literal

from msgspec import Struct

from stenolog.catalog.message_metadata import FIELD, has_failed, interruption, model_of, seconds_of
from stenolog.records import Message

Clean = Callable[[str], str]
"""Function that removes from a text everything that must not be shared."""
Kind = Literal["text", "thought", "call", "result", "image", "field"]

_THOUGHTS: Final = ("reasoning_content", "reasoning", "thinking")
_SHOWN_ELSEWHERE: Final = ("role", "content", "tool_calls", "tool_call_id", FIELD, *_THOUGHTS)
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
                return f"calls {self.name}"
            case "result":
                return f"{self.name or 'the tool'} answers"
            case "thought":
                return "thinks"
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
    tools: dict[str, str] = {}
    for message in messages:
        body = message.to_dict()
        role = body.get("role")
        seconds = seconds_of(body)
        called = body.get("tool_call_id")
        tool = tools.get(called, "") if isinstance(called, str) else ""
        tools.update(_names(body.get("tool_calls")))
        yield Said(
            seq=message.seq,
            at=message.at,
            role=cleaned(role if isinstance(role, str) else _as_json(role), clean),
            hidden=message.hidden,
            parts=tuple(_parts(body, cleaned(tool, clean), clean)),
            model=cleaned(model_of(body) or "", clean),
            seconds=seconds,
            failed=has_failed(body),
            interrupted=cleaned(interruption(body), clean),
        )


def _parts(body: Mapping[str, Any], tool: str, clean: Clean) -> Iterator[Part]:
    for name in _THOUGHTS:
        thought = body.get(name)
        if isinstance(thought, str) and thought.strip():
            yield Part(kind="thought", text=cleaned(thought, clean).strip())
    kind: Kind = "result" if body.get("role") == "tool" else "text"
    yield from _of_content(body.get("content"), kind, tool, clean)
    calls = body.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        yield _of_call(call, clean)
    for name, value in body.items():
        if name not in _SHOWN_ELSEWHERE and value is not None:
            # Clean name and value together: only the name may reveal that the value is a secret.
            text = cleaned(_as_json({name: value}), clean)
            yield Part(kind="field", name=cleaned(name, clean), text=text)


def _of_content(content: Any, kind: Kind, tool: str, clean: Clean) -> Iterator[Part]:
    if content is None:
        return
    for one in content if isinstance(content, list) else [content]:
        image = _image(one)
        text = one.get("text") if isinstance(one, Mapping) else one
        if image is not None:
            yield Part(kind="image", text=image)
        elif isinstance(text, str):
            yield Part(kind=kind, name=tool, text=cleaned(text, clean))
        else:
            yield Part(kind="field", name="content", text=cleaned(_as_json(one), clean))


def _image(part: Any) -> str | None:
    """Return the `data:` URL of an embedded image.

    None for remote images: showing them would cause a request.
    """
    found = part.get("image_url") if isinstance(part, Mapping) else None
    address = found.get("url") if isinstance(found, Mapping) else found
    if isinstance(address, str) and _IMAGE.fullmatch(address):
        return address
    return None


def _of_call(call: Any, clean: Clean) -> Part:
    asked = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(asked, Mapping) or not isinstance(asked.get("name"), str):
        return Part(kind="call", name="tool", text=cleaned(_as_json(call), clean))
    given = asked.get("arguments", "")
    given = given if isinstance(given, str) else _as_json(given)
    return Part(kind="call", name=cleaned(asked["name"], clean), text=cleaned(given, clean))


def _names(calls: Any) -> Iterator[tuple[str, str]]:
    """Yield the id of each call and the name of its tool."""
    for call in calls if isinstance(calls, list) else ():
        asked = call.get("function") if isinstance(call, Mapping) else None
        name = asked.get("name") if isinstance(asked, Mapping) else None
        if isinstance(name, str) and isinstance(call.get("id"), str):
            yield call["id"], name


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
