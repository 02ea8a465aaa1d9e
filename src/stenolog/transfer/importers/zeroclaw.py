"""zeroclaw's logs: only `role` and `content`, with tool calls as JSON text inside `content`."""

from collections.abc import Sequence
from datetime import datetime
from json import dumps, loads
from typing import Any

from stenolog.sessions import keys
from stenolog.stores.json_file import JSONMessage, NotASession
from stenolog.transfer.importers.legacy_session import (
    LegacySession,
    Line,
    encode_message,
    read_lines,
    with_times,
)


def read(log: bytes, *, name: str, mtime: datetime) -> LegacySession:
    """Return the session in a log with this name and modification time. Raises NotASession.

    The log has no key and no times. The key comes from `name`, and all times come from `mtime`.
    """
    stem = name.removesuffix(".jsonl")
    problems: list[str] = []
    messages = []
    lines = list(read_lines(log))
    for line in lines:
        if line.fields is None:
            problems.append(line.problem)
            continue
        body = encode_message(unpack_content(line.fields), f"line {line.number}", problems)
        if body is not None:
            messages.append(JSONMessage(body))
    if not messages:
        raise NotASession("; ".join(["it contains no messages", *problems]))
    key = keys.key_from_zeroclaw_name(stem)
    return LegacySession(
        layout="zeroclaw",
        key=stem,
        messages=with_times(messages, mtime, mtime),
        aliases=() if key is None else (key,),
        created=mtime,
        updated=mtime,
        dropped=len(lines) - len(messages),
        problems=tuple(problems),
    )


def is_log(lines: Sequence[Line]) -> bool:
    """Return whether these lines are zeroclaw's."""
    messages = [line.fields for line in lines if line.fields is not None]
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
    if fields["role"] == "assistant":
        calls = _read_calls(packed_fields.get("tool_calls"))
        return (
            fields if calls is None else _merge_fields(fields, packed_fields, {"tool_calls": calls})
        )
    if fields["role"] == "tool" and isinstance(packed_fields.get("tool_call_id"), str):
        return _merge_fields(fields, packed_fields, {})
    return fields


def _merge_fields(
    fields: dict[str, Any], packed_fields: dict[str, Any], replacements: dict[str, Any]
) -> dict[str, Any]:
    return {**fields, "content": None, **packed_fields, **replacements, "role": fields["role"]}


def _read_calls(packed_calls: object) -> list[dict[str, Any]] | None:
    """Return tool calls in OpenAI's format; None if the value has no tool calls."""
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
