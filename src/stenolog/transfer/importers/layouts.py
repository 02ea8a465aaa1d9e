"""Layouts of session files with one JSON value per message: picoclaw, zeroclaw, plain messages.

picoclaw has a `.meta.json` file next to each log, with the key, the summary, and `skip`, the number
of hidden lines. A line of zeroclaw has only `role` and `content`; tool calls are JSON in `content`.
Plain messages are chat messages of any program, one per line or in one JSON array.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from json import dumps, loads
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage, UsageError
from stenolog.sessions import keys
from stenolog.stores.json_file import NO_TIME, JSONMessage, NotASession, parse_go_time
from stenolog.transfer.importers.legacy_session import (
    LOG_SUFFIX,
    Layout,
    LegacySession,
    make_session,
)

PICOCLAW_FIELDS: Final = frozenset(
    {
        *("role", "content", "model_name", "created_at", "reasoning_content", "tool_calls"),
        *("tool_call_id", "media", "attachments", "system_parts"),
    }
)
"""Fields of picoclaw's messages, which identify a log without a `.meta.json` file."""
DIMENSIONS: Final = ("space", "chat", "topic", "sender")
"""Dimensions by which picoclaw separates conversations."""

MAX_PROBLEMS: Final = 20
"""Maximum number of problems of one session that are reported individually."""
MAX_PROBLEM_CHARS: Final = 400
"""Maximum number of characters of a reported problem."""

_NEGATIVE_ID: Final = re.compile(r"-[0-9]+")


class NotAMessage(ValueError):
    """Raised for a value that is not a message."""


class Line(Struct, frozen=True):
    """One line of a log, or one item of an array of messages."""

    label: str
    """Name of the line in reports."""
    fields: dict[str, Any] | None
    """The message; None if the line is not a message."""
    problem: str = ""


def read_lines(text: bytes) -> Iterator[Line]:
    """Yield every line that is not empty, with its message or its problem."""
    for line_number, line in enumerate(text.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip(b"\r"):
            continue
        label, preview = f"line {line_number}", line[:40].decode(errors="replace")
        if not line.strip():
            yield Line(label, None)  # blank, but picoclaw counts it
            continue
        try:
            value = loads(line.decode())
        except (ValueError, RecursionError):
            yield Line(label, None, f"{label} is not JSON: {preview!r}")
            continue
        if _is_message(value):
            yield Line(label, value)
        else:
            yield Line(label, None, f"{label} is not a message: {preview!r}")


def read_array(values: Sequence[Any]) -> Iterator[Line]:
    """Yield every item of an array of messages, with its message or its problem."""
    for number, value in enumerate(values, 1):
        label = f"message {number}"
        is_message = _is_message(value)
        yield Line(label, value) if is_message else Line(label, None, f"{label} is not a message")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str)


def messages_in(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the messages in these lines."""
    return [line.fields for line in lines if line.fields is not None]


def _created_at(fields: dict[str, Any]) -> datetime | None:
    return parse_go_time(fields.get("created_at"))


def _read_log(
    layout: Layout,
    lines: Sequence[Line],
    convert: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    find_time: Callable[[dict[str, Any]], datetime | None] = _created_at,
    hidden_count: int = 0,
    problems: Sequence[str] = (),
    **more: Any,
) -> LegacySession:
    """Return the session in these lines.

    `convert` returns the message to store, or raises NotAMessage. `hidden_count` is the number of
    lines at the start whose messages are hidden. `more` are arguments of `make_session`. Raises
    NotASession if there are lines, but none of them can be read and there is no summary.
    """
    all_problems = list(problems)
    messages = []
    # `hidden_count` counts all lines, even lines that cannot be read.
    for index, line in enumerate(lines):
        if line.fields is None:
            all_problems += filter(None, [line.problem])
            continue
        try:
            payload = encode_object(convert(line.fields))
        except (RefusedMessage, NotAMessage) as error:
            all_problems.append(f"{line.label}: {error}"[:MAX_PROBLEM_CHARS])
            continue
        messages.append(JSONMessage(payload, find_time(line.fields), hidden=index < hidden_count))
    dropped = len(all_problems) - len(problems)
    more_count = len(all_problems) - MAX_PROBLEMS
    if more_count > 0:
        all_problems[MAX_PROBLEMS:] = [f"and {more_count:,} more like these"]
    if lines and not messages and not more.get("summary"):
        raise NotASession("; ".join(["it contains no messages", *all_problems]))
    return make_session(
        messages, layout=layout, dropped=dropped, problems=tuple(all_problems), **more
    )


# --- picoclaw -------------------------------------------------------------------------------------


def read_picoclaw(
    lines: Sequence[Line], meta: bytes | None, *, name: str, mtime: datetime
) -> LegacySession:
    """Return the session in a log with this name and modification time.

    The session is empty if picoclaw cleared it. Raises NotASession if the log has lines, but none
    of them can be read and there is no summary.
    """
    stem = name.removesuffix(LOG_SUFFIX)
    meta_fields = read_meta(b"{}" if meta is None else meta)
    key = meta_fields.pop("key") or stem
    names = dict.fromkeys((*meta_fields.pop("aliases"), stem))
    aliases = tuple(name for name in names if name != key)
    return _read_log("picoclaw", lines, dict, key=key, aliases=aliases, mtime=mtime, **meta_fields)


def read_meta(text: bytes) -> dict[str, Any]:
    """Return the readable content of a `.meta.json` file as arguments of `_read_log`.

    For an unreadable file, return the problem and default values.
    """
    problems = []
    try:
        fields = loads(text.decode())
    except (ValueError, RecursionError) as error:
        problems.append(f"its .meta.json is not JSON, so key and summary are unknown: {error}")
        fields = {}
    if not isinstance(fields, dict):
        problems.append("its .meta.json is not a JSON object")
        fields = {}
    skip, aliases = fields.get("skip", 0), fields.get("aliases")
    if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:
        problems.append(f"skip is {skip!r}: nothing is hidden")
        skip = 0
    scope = fields["scope"] if isinstance(fields.get("scope"), dict) else {}
    named_aliases = map(_text_or_none, aliases if isinstance(aliases, list) else [])
    return {
        "key": _text_or_none(fields.get("key")),
        "summary": _text_or_none(fields.get("summary")) or "",
        "hidden_count": skip,
        "created": parse_go_time(fields.get("created_at")),
        "updated": parse_go_time(fields.get("updated_at")),
        "aliases": tuple(filter(None, [*named_aliases, key_of_scope(scope)])),
        "agent": _text_or_none(scope.get("agent_id")),
        "channel": _text_or_none(scope.get("channel")),
        "problems": tuple(problems),
    }


def key_of_scope(scope: dict[str, Any]) -> str | None:
    """Return a readable session key for a scope; None if the scope is incomplete.

    picoclaw stores a scope with each of its unreadable keys `sk_v1_…`.

    `{"channel": "telegram", "dimensions": ["chat"], "values": {"chat": "direct:123"}}` becomes
    `telegram:123`. The key of a group contains the word `group`, as in `irc:group%3A123`, so that
    it differs from the key of a sender with the same id. The exception is a group with a negative
    id, because no sender has a negative id.
    """
    channel, values = _text_or_none(scope.get("channel")), scope.get("values")
    if channel is None or not isinstance(values, dict):
        return None
    dimensions = {
        name: value for name in DIMENSIONS if (value := _text_or_none(values.get(name))) is not None
    }
    sender, chat = dimensions.get("sender"), dimensions.get("chat", "")
    kind, _, id_ = chat.partition(":")
    match tuple(dimensions):
        case ("sender",):
            peer, thread = sender, None
        case ("topic", "sender"):
            peer, thread = sender, dimensions["topic"]
        case ("chat", "sender") if id_:
            peer, thread = sender, chat
        case ("chat",) if id_:
            # guard: group-key-differs-from-sender
            peer, thread = (id_ if kind == "direct" or _NEGATIVE_ID.fullmatch(id_) else chat), None
        case _:
            return None
    try:
        return keys.join_key(keys.KeyParts(channel, peer or "", thread))
    except UsageError:
        return None


def is_picoclaw_log(lines: Sequence[Line]) -> bool:
    """Return whether picoclaw wrote these lines, judged by the fields of their messages."""
    messages = messages_in(lines)
    return (
        bool(messages)
        and all(fields.keys() <= PICOCLAW_FIELDS for fields in messages)
        and any(fields.keys() - {"role", "content"} for fields in messages)
    )


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


# --- zeroclaw -------------------------------------------------------------------------------------


def read_zeroclaw(lines: Sequence[Line], *, name: str, mtime: datetime) -> LegacySession:
    """Return the session in a log with this name and modification time. Raises NotASession.

    The log has no key and no times. The key comes from `name`, and all times come from `mtime`.
    """
    stem = name.removesuffix(LOG_SUFFIX)
    alias = keys.key_from_zeroclaw_name(stem)
    aliases = () if alias is None else (alias,)
    return _read_log("zeroclaw", lines, unpack_content, key=stem, aliases=aliases, mtime=mtime)


def is_zeroclaw_log(lines: Sequence[Line]) -> bool:
    """Return whether zeroclaw wrote these lines, judged by the fields of their messages."""
    messages = messages_in(lines)
    return bool(messages) and all(fields.keys() <= {"role", "content"} for fields in messages)


def unpack_content(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the message with tool calls, or the id of the answered call, in separate fields.

    Content in any other form stays unchanged, because it may be the text of a message.
    """
    try:
        packed_fields = loads(fields["content"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return fields
    if not isinstance(packed_fields, dict):
        return fields
    role = fields["role"]
    if role == "assistant":
        calls = _read_calls(packed_fields.get("tool_calls"))
        if calls is None:
            return fields
        packed_fields["tool_calls"] = calls
    elif role != "tool" or not isinstance(packed_fields.get("tool_call_id"), str):
        return fields
    return {**fields, "content": None, **packed_fields, "role": role}


def _read_calls(packed_calls: object) -> list[dict[str, Any]] | None:
    """Return tool calls in OpenAI's format; None if the value is not a list of tool calls."""
    if not isinstance(packed_calls, list) or not packed_calls:
        return None
    calls = []
    for call in packed_calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if not isinstance(call.get("id"), str) or "arguments" not in call:
            return None
        other_fields = {k: v for k, v in call.items() if k not in ("id", "name", "arguments")}
        arguments = call["arguments"]
        text = arguments if isinstance(arguments, str) else dumps(arguments, ensure_ascii=False)
        function = {"name": call["name"], "arguments": text}
        calls.append({"id": call["id"], "type": "function", "function": function, **other_fields})
    return calls


# --- plain messages -------------------------------------------------------------------------------

CHAT_FIELDS: Final = frozenset(
    {"role", "content", "name", "refusal", "tool_calls", "tool_call_id", "function_call"}
)
"""Fields of a message in the format of chat APIs."""
TIME_FIELDS: Final = ("created_at", "timestamp", "at", "time")
"""Fields that may contain the time of a message."""
ROLE_ALIASES: Final = {"human": "user", "ai": "assistant", "bot": "assistant", "model": "assistant"}
"""Roles of other programs, with the role of the chat format."""
CONTENT_FIELDS: Final = CHAT_FIELDS - {"role", "name", "tool_call_id"} | {
    "audio",
    "reasoning",
    "reasoning_content",
    "thinking",
}
"""A message with none of these fields is empty, unless it has a `text` or `parts` of texts."""
_MIN_MILLIS: Final = 1e11
"""Smallest number that is read as milliseconds since 1970. Smaller numbers are seconds."""


def read_plain(lines: Sequence[Line], *, name: str, mtime: datetime) -> LegacySession:
    """Return the session in a file with this name and modification time. Raises NotASession."""
    key = Path(name).stem
    return _read_log("plain", lines, _as_chat_message, find_time=_find_time, key=key, mtime=mtime)


def are_plain_messages(lines: Sequence[Line], name: str) -> bool:
    """Return whether these messages have no field that identifies a particular program."""
    messages = messages_in(lines)
    if not is_zeroclaw_log(lines):
        return all(fields.keys() <= CHAT_FIELDS for fields in messages)
    is_packed = any(unpack_content(fields) != fields for fields in messages)
    return not is_packed and keys.key_from_zeroclaw_name(name.removesuffix(LOG_SUFFIX)) is None


def _as_chat_message(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the message in the chat format. Raises NotAMessage for an empty message.

    The original values of converted fields are kept in the field `plain`, so that nothing is lost.
    This field is not sent to providers.
    """
    original_values: dict[str, Any] = {}
    message = dict(fields)
    role = ROLE_ALIASES.get(fields["role"].lower())
    if role is not None:
        original_values["role"], message["role"] = fields["role"], role
    if CONTENT_FIELDS.isdisjoint(message):
        if isinstance(message.get("text"), str):
            message["content"] = message.pop("text")
            original_values["content"] = "text"
        elif (text := _text_of_parts(message.get("parts"))) is not None:
            original_values["parts"] = message.pop("parts")
            message["content"] = text
        else:
            names = ", ".join(sorted(fields))
            raise NotAMessage(f"it has neither content nor tool calls, only the fields {names}")
    return {**message, "plain": original_values} if original_values else message


def _text_of_parts(parts: Any) -> str | None:
    """Return the joined texts of parts in the format of Gemini's API; None for other parts."""
    values = parts if isinstance(parts, list) else []
    texts: list[Any] = [p.get("text") if isinstance(p, dict) else p for p in values]
    are_texts = all(isinstance(text, str) for text in texts)
    return "\n\n".join(texts) if texts and are_texts else None


def _find_time(fields: dict[str, Any]) -> datetime | None:
    """Return the first readable time in the fields of a message."""
    times = (_parse_any_time(fields.get(name)) for name in TIME_FIELDS)
    return next((time for time in times if time is not None), None)


def _parse_any_time(value: Any) -> datetime | None:
    """Return a time: ISO 8601, or seconds or milliseconds since 1970 as a number or as text."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return parse_go_time(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        seconds = value / 1000 if value >= _MIN_MILLIS else value
        time = datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)
    except (OverflowError, ValueError):
        return None
    return time if time > NO_TIME else None
