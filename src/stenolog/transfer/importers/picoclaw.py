"""picoclaw's logs: one message per line, and a `.meta.json` file with key, summary and skip."""

import re
from collections.abc import Sequence
from datetime import datetime
from json import loads
from typing import Any, Final

from msgspec import Struct

from stenolog.errors import InvalidKey
from stenolog.sessions import keys
from stenolog.stores.json_file import JSONMessage, NotASession, time_of
from stenolog.transfer.importers.legacy_session import (
    LegacySession,
    Line,
    encode_message,
    read_lines,
    with_times,
)

FIELDS: Final = frozenset(
    {
        "role",
        "content",
        "model_name",
        "created_at",
        "reasoning_content",
        "tool_calls",
        "tool_call_id",
        "media",
        "attachments",
        "system_parts",
    }
)
"""Fields of its messages, which identify a log without a `.meta.json` file."""
DIMENSIONS: Final = ("space", "chat", "topic", "sender")
"""Dimensions by which picoclaw separates conversations."""

_GROUP: Final = re.compile(r"-[0-9]+")


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


def read(log: bytes, meta: bytes | None, *, name: str, changed: datetime) -> LegacySession:
    """Return the session in a log of this name and modification time; empty if it was cleared.

    Raises NotASession if there are lines, but none of them can be read.
    """
    stem = name.removesuffix(".jsonl")
    meta_fields = Meta() if meta is None else read_meta(meta)
    problems = list(meta_fields.problems)
    found = list(read_lines(log))
    messages = _messages(found, meta_fields.skip, problems)
    if found and not messages and not meta_fields.summary:
        raise NotASession("it contains no messages" + "".join(f"; {p}" for p in problems))
    times = [message.at for message in messages if message.at is not None]
    created = meta_fields.created or min(times, default=changed)
    updated = meta_fields.updated or max(times, default=changed)
    key = meta_fields.key or stem
    return LegacySession(
        layout="picoclaw",
        key=key,
        messages=with_times(messages, created, updated),
        summary=meta_fields.summary,
        aliases=tuple(dict.fromkeys(a for a in (*meta_fields.aliases, stem) if a != key)),
        agent=meta_fields.agent,
        channel=meta_fields.channel,
        created=created,
        updated=updated,
        dropped=len(found) - len(messages),
        problems=tuple(problems),
    )


def read_meta(text: bytes) -> Meta:
    """Return the content of a `.meta.json` file; if it cannot be read, that is only a problem."""
    try:
        fields = loads(text.decode())
    except (ValueError, RecursionError) as error:
        fields, problem = {}, f"its .meta.json is not JSON, so key and summary are unknown: {error}"
    else:
        problem = "" if isinstance(fields, dict) else "its .meta.json is not a JSON object"
        fields = fields if isinstance(fields, dict) else {}
    key, skip, aliases = fields.get("key"), fields.get("skip", 0), fields.get("aliases")
    is_valid_skip = isinstance(skip, int) and not isinstance(skip, bool) and skip >= 0
    scope = fields["scope"] if isinstance(fields.get("scope"), dict) else {}
    scoped = key_of_scope(scope)
    given = aliases if isinstance(aliases, list) else []
    named = [name for name in given if isinstance(name, str) and name]
    return Meta(
        key=key if isinstance(key, str) and key else None,
        summary=fields["summary"] if isinstance(fields.get("summary"), str) else "",
        skip=skip if is_valid_skip else 0,
        created=time_of(fields.get("created_at")),
        updated=time_of(fields.get("updated_at")),
        aliases=tuple(named) + (() if scoped is None else (scoped,)),
        agent=_text(scope.get("agent_id")),
        channel=_text(scope.get("channel")),
        problems=tuple(
            text
            for text in (problem, "" if is_valid_skip else f"skip is {skip!r}: nothing is hidden")
            if text
        ),
    )


def key_of_scope(scope: dict[str, Any]) -> str | None:
    """Return our key for the scope of an opaque `sk_v1_…`; None if there is none.

    `{"channel": "telegram", "dimensions": ["chat"], "values": {"chat": "direct:123"}}` becomes
    `telegram:123`. A group keeps its kind, `irc:group%3A123`, so that it never gets the key of a
    sender with the same id. Negative numbers are the exception, because no sender has one.
    """
    channel, values = _text(scope.get("channel")), scope.get("values")
    if channel is None or not isinstance(values, dict):
        return None
    given = {name: value for name in DIMENSIONS if (value := _text(values.get(name))) is not None}
    sender, chat = given.get("sender"), given.get("chat", "")
    kind, _, id_ = chat.partition(":")
    match tuple(given):
        case ("sender",):
            who, thread = sender, None
        case ("topic", "sender"):
            who, thread = sender, given["topic"]
        case ("chat", "sender") if id_:
            who, thread = sender, chat
        case ("chat",) if id_:
            # guard: group-key-differs-from-sender
            who, thread = (id_ if kind == "direct" or _GROUP.fullmatch(id_) else chat), None
        case _:
            return None
    try:
        return keys.join_key(keys.KeyParts(channel, who or "", thread))
    except InvalidKey:
        return None


def looks_like(found: Sequence[Line]) -> bool:
    """Return whether these lines are picoclaw's, for a log without a `.meta.json` file."""
    messages = [line.fields for line in found if line.fields is not None]
    return (
        bool(messages)
        and all(fields.keys() <= FIELDS for fields in messages)
        and any(fields.keys() - {"role", "content"} for fields in messages)
    )


def _messages(found: Sequence[Line], skip: int, problems: list[str]) -> list[JSONMessage]:
    messages = []
    # `skip` counts lines, including those that cannot be read.
    for index, line in enumerate(found):
        if line.fields is None:
            problems.append(line.problem)
            continue
        body = encode_message(line.fields, f"line {line.number}", problems)
        if body is not None:
            at = time_of(line.fields.get("created_at"))
            messages.append(JSONMessage(body, at, hidden=index < skip))
    return messages


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
