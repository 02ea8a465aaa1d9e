"""zeroclaw's logs: `role` and `content` alone, tool calls packed as JSON text inside `content`."""

from collections.abc import Sequence
from datetime import datetime
from json import dumps, loads
from typing import Any

from stenolog.sessions import keys
from stenolog.sessions.importers.old import Line, OldSession, dated, lines, payload
from stenolog.stores.json_file import KeptMessage, NotASession


def read(log: bytes, *, name: str, changed: datetime) -> OldSession:
    """The session in a log of this name, last changed then. Raises NotASession.

    The name is all that is left of the key, and the file's time all that is left of when.
    """
    stem = name.removesuffix(".jsonl")
    problems: list[str] = []
    messages = []
    found = list(lines(log))
    for line in found:
        if line.fields is None:
            problems.append(line.problem)
            continue
        body = payload(unpacked(line.fields), f"line {line.number}", problems)
        if body is not None:
            messages.append(KeptMessage(body))
    if not messages:
        raise NotASession("there is no message in it" + "".join(f"; {p}" for p in problems))
    key = keys.from_reference_name(stem)
    return OldSession(
        layout="zeroclaw",
        key=stem,
        messages=dated(messages, changed, changed),
        aliases=() if key is None else (key,),
        created=changed,
        updated=changed,
        dropped=len(found) - len(messages),
        problems=tuple(problems),
    )


def looks_like(found: Sequence[Line]) -> bool:
    """Whether these lines are its own."""
    messages = [line.fields for line in found if line.fields is not None]
    return bool(messages) and all(fields.keys() <= {"role", "content"} for fields in messages)


def unpacked(fields: dict[str, Any]) -> dict[str, Any]:
    """The message with its tool calls, or the id of the call it answers, as fields of their own.

    What is not packed in exactly that way stays as it is: it may be what somebody said.
    """
    try:
        inside = loads(fields["content"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return fields
    if not isinstance(inside, dict):
        return fields
    if fields["role"] == "assistant":
        calls = _calls(inside.get("tool_calls"))
        return fields if calls is None else _merged(fields, inside, {"tool_calls": calls})
    if fields["role"] == "tool" and isinstance(inside.get("tool_call_id"), str):
        return _merged(fields, inside, {})
    return fields


def _merged(
    fields: dict[str, Any], inside: dict[str, Any], instead: dict[str, Any]
) -> dict[str, Any]:
    return {**fields, "content": None, **inside, **instead, "role": fields["role"]}


def _calls(packed: object) -> list[dict[str, Any]] | None:
    """Tool calls as an OpenAI message has them; None where these are none."""
    if not isinstance(packed, list) or not packed:
        return None
    calls = []
    for call in packed:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        if not isinstance(call.get("id"), str) or "arguments" not in call:
            return None
        rest = {k: v for k, v in call.items() if k not in ("id", "name", "arguments")}
        given = call["arguments"]
        text = given if isinstance(given, str) else dumps(given, ensure_ascii=False)
        function = {"name": call["name"], "arguments": text}
        calls.append({"id": call["id"], "type": "function", "function": function, **rest})
    return calls
