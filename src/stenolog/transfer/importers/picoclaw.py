"""picoclaw's logs: one message per line, and a `.meta.json` file.

The `.meta.json` file has the key, the summary, and `skip`, the number of hidden lines.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from json import loads
from typing import Any, Final

from msgspec import Struct

from stenolog.errors import InvalidKey
from stenolog.sessions import keys
from stenolog.stores.json_file import JSONMessage, NotASession, parse_go_time
from stenolog.transfer.importers.legacy_session import (
    LegacySession,
    Line,
    encode_message,
    read_lines,
    with_times,
)

MESSAGE_FIELDS: Final = frozenset(
    {
        *("role", "content", "model_name", "created_at", "reasoning_content", "tool_calls"),
        *("tool_call_id", "media", "attachments", "system_parts"),
    }
)
"""Fields of picoclaw's messages, which identify a log without a `.meta.json` file."""
DIMENSIONS: Final = ("space", "chat", "topic", "sender")
"""Dimensions by which picoclaw separates conversations."""

_NEGATIVE_ID: Final = re.compile(r"-[0-9]+")


class Meta(Struct, frozen=True, kw_only=True):
    """The readable content of a `.meta.json` file."""

    key: str | None = None
    summary: str = ""
    skip: int = 0
    created: datetime | None = None
    updated: datetime | None = None
    aliases: tuple[str, ...] = ()
    agent: str | None = None
    channel: str | None = None
    problems: tuple[str, ...] = ()


def read(log: bytes, meta: bytes | None, *, name: str, mtime: datetime) -> LegacySession:
    """Return the session in a log with this name and modification time.

    The session is empty if picoclaw cleared it. Raises NotASession if the log has lines, but none
    of them can be read.
    """
    stem = name.removesuffix(".jsonl")
    meta_fields = Meta() if meta is None else read_meta(meta)
    problems = list(meta_fields.problems)
    lines = list(read_lines(log))
    messages = _read_messages(lines, meta_fields.skip, problems)
    if lines and not messages and not meta_fields.summary:
        raise NotASession("; ".join(["it contains no messages", *problems]))
    times = [message.at for message in messages if message.at is not None]
    created = meta_fields.created or min(times, default=mtime)
    updated = meta_fields.updated or max(times, default=mtime)
    key = meta_fields.key or stem
    return LegacySession(
        layout="picoclaw",
        key=key,
        messages=with_times(messages, created, updated),
        summary=meta_fields.summary,
        aliases=tuple(dict.fromkeys(name for name in (*meta_fields.aliases, stem) if name != key)),
        agent=meta_fields.agent,
        channel=meta_fields.channel,
        created=created,
        updated=updated,
        dropped=len(lines) - len(messages),
        problems=tuple(problems),
    )


def read_meta(text: bytes) -> Meta:
    """Return the content of a `.meta.json` file, or only the problem of an unreadable file."""
    problems = []
    try:
        fields = loads(text.decode())
    except (ValueError, RecursionError) as error:
        problems.append(f"its .meta.json is not JSON, so key and summary are unknown: {error}")
        fields = {}
    if not isinstance(fields, dict):
        problems.append("its .meta.json is not a JSON object")
        fields = {}
    key, skip, aliases = fields.get("key"), fields.get("skip", 0), fields.get("aliases")
    if not isinstance(skip, int) or isinstance(skip, bool) or skip < 0:
        problems.append(f"skip is {skip!r}: nothing is hidden")
        skip = 0
    scope = fields["scope"] if isinstance(fields.get("scope"), dict) else {}
    scope_key = key_of_scope(scope)
    names = aliases if isinstance(aliases, list) else []
    named_aliases = [name for name in names if isinstance(name, str) and name]
    return Meta(
        key=key if isinstance(key, str) and key else None,
        summary=fields["summary"] if isinstance(fields.get("summary"), str) else "",
        skip=skip,
        created=parse_go_time(fields.get("created_at")),
        updated=parse_go_time(fields.get("updated_at")),
        aliases=tuple(named_aliases) + (() if scope_key is None else (scope_key,)),
        agent=_text_or_none(scope.get("agent_id")),
        channel=_text_or_none(scope.get("channel")),
        problems=tuple(problems),
    )


def key_of_scope(scope: dict[str, Any]) -> str | None:
    """Return a readable session key for a scope, which picoclaw stores with its keys `sk_v1_…`.

    Return None if the scope is incomplete.

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
    except InvalidKey:
        return None


def is_log(lines: Sequence[Line]) -> bool:
    """Return whether these lines are picoclaw's, for a log without a `.meta.json` file."""
    messages = [line.fields for line in lines if line.fields is not None]
    return (
        bool(messages)
        and all(fields.keys() <= MESSAGE_FIELDS for fields in messages)
        and any(fields.keys() - {"role", "content"} for fields in messages)
    )


def _read_messages(lines: Sequence[Line], skip: int, problems: list[str]) -> list[JSONMessage]:
    messages = []
    # `skip` counts all lines, even lines that cannot be read.
    for index, line in enumerate(lines):
        if line.fields is None:
            problems.append(line.problem)
            continue
        body = encode_message(line.fields, f"line {line.number}", problems)
        if body is not None:
            at = parse_go_time(line.fields.get("created_at"))
            messages.append(JSONMessage(body, at, hidden=index < skip))
    return messages


def _text_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
