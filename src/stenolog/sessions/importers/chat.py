"""The OpenAI chat shape, which old messages of another shape get: contents, tool calls, the rest.

What of a message has no place in it is kept in a field named after the program, so that nothing is
lost; providers are not sent such fields.
"""

from collections.abc import Mapping, Sequence
from json import dumps, loads
from typing import Any, Final

from stenolog.sessions.importers.report import NotAMessage

Part = dict[str, Any]

_EMPTY: Final[tuple[Any, ...]] = (None, "", [], {})


def parsed(text: bytes, what: str) -> Any:
    """The JSON value in a text. Raises NotAMessage."""
    try:
        return loads(text.decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        shown = text[:40].decode(errors="replace")
        reason = f" ({error})" if isinstance(error, NotAMessage) else ""
        raise NotAMessage(f"{what} is not JSON{reason}: {shown!r}") from error


def as_object(value: Any, what: str) -> dict[str, Any]:
    """The value, which is to be an object. Raises NotAMessage."""
    if not isinstance(value, dict):
        raise NotAMessage(f"{what} is no object")
    return value


def as_message(value: Any, what: str) -> dict[str, Any]:
    """The value, which is to be an object with a role. Raises NotAMessage."""
    fields = as_object(value, what)
    if not isinstance(fields.get("role"), str):
        raise NotAMessage(f"{what} is no message: it has no role")
    return fields


def as_text(value: Any) -> str:
    """Text as it is, anything else as JSON. Raises ValueError, RecursionError."""
    if isinstance(value, str):
        return value
    return dumps(value, ensure_ascii=False, allow_nan=False)


def text_part(text: str) -> Part:
    """A part of a content that is a text."""
    return {"type": "text", "text": text}


def image_part(url: str, **more: Any) -> Part:
    """A part of a content that is an image."""
    return {"type": "image_url", "image_url": {"url": url, **filled(more)}}


def content_of(parts: Sequence[Part]) -> str | list[Part] | None:
    """The content of these parts: one text as it is, None for no part."""
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        text: str = parts[0]["text"]
        return text
    return list(parts) or None


def call_of(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    """A tool call. Raises ValueError, RecursionError."""
    text = "{}" if arguments is None else as_text(arguments)
    function = {"name": name if isinstance(name, str) else "unknown", "arguments": text}
    return {"id": as_id(id), "type": "function", "function": function}


def as_id(id: Any) -> str | None:
    """The id of a tool call; None where it has none."""
    return None if id is None else as_text(id)


def filled(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say something."""
    return {name: value for name, value in fields.items() if value not in _EMPTY}


def beside(message: dict[str, Any], name: str, rest: Mapping[str, Any]) -> dict[str, Any]:
    """The message with what has no place in it, in a field of this name, if there is any."""
    return {**message, name: dict(rest)} if rest else message


def _refuse(constant: str) -> Any:
    raise NotAMessage(f"{constant} has no place in it")
