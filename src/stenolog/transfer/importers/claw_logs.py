"""Logs of picoclaw and zeroclaw: one message per line.

picoclaw has a `.meta.json` file next to each log, with the key, the summary, and `skip`, the number
of hidden lines. A line of zeroclaw has only `role` and `content`; tool calls are JSON in `content`.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from json import dumps, loads
from typing import Any, Final

from msgspec import Struct

from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage, UsageError
from stenolog.sessions import keys
from stenolog.stores.json_file import JSONMessage, NotASession, parse_go_time
from stenolog.transfer.importers.legacy_session import Layout, LegacySession, make_session

PICOCLAW_FIELDS: Final = frozenset(
    {
        *("role", "content", "model_name", "created_at", "reasoning_content", "tool_calls"),
        *("tool_call_id", "media", "attachments", "system_parts"),
    }
)
"""Fields of picoclaw's messages, which identify a log without a `.meta.json` file."""
DIMENSIONS: Final = ("space", "chat", "topic", "sender")
"""Dimensions by which picoclaw separates conversations."""

_NEGATIVE_ID: Final = re.compile(r"-[0-9]+")


class Line(Struct, frozen=True):
    """One line of a log."""

    line_number: int
    fields: dict[str, Any] | None
    """The message; None if the line is not a message."""
    problem: str = ""


def read_lines(text: bytes) -> Iterator[Line]:
    """Yield every line that is not empty, with its message or its problem."""
    for line_number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip(b"\r"):
            continue
        preview = line[:40].decode(errors="replace")
        try:
            fields = loads(line.decode())
        except (ValueError, RecursionError):
            yield Line(line_number, None, f"line {line_number} is not JSON: {preview!r}")
            continue
        if isinstance(fields, dict) and isinstance(fields.get("role"), str):
            yield Line(line_number, fields)
        else:
            yield Line(line_number, None, f"line {line_number} is not a message: {preview!r}")


def messages_in(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return the messages in these lines."""
    return [line.fields for line in lines if line.fields is not None]


def _read_log(
    layout: Layout,
    lines: Sequence[Line],
    convert: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    hidden_count: int = 0,
    problems: Sequence[str] = (),
    **more: Any,
) -> LegacySession:
    """Return the session in a log with one message per line.

    `hidden_count` is the number of lines at the start whose messages are hidden. `more` are
    arguments of `make_session`. Raises NotASession if the log has lines, but none of them can be
    read and there is no summary.
    """
    all_problems = list(problems)
    messages = []
    # `hidden_count` counts all lines, even lines that cannot be read.
    for index, line in enumerate(lines):
        if line.fields is None:
            all_problems.append(line.problem)
            continue
        try:
            payload = encode_object(convert(line.fields))
        except RefusedMessage as error:
            all_problems.append(f"line {line.line_number}: {error}")
            continue
        at = parse_go_time(line.fields.get("created_at"))
        messages.append(JSONMessage(payload, at, hidden=index < hidden_count))
    if lines and not messages and not more.get("summary"):
        raise NotASession("; ".join(["it contains no messages", *all_problems]))
    dropped = len(lines) - len(messages)
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
    stem = name.removesuffix(".jsonl")
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
    stem = name.removesuffix(".jsonl")
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
