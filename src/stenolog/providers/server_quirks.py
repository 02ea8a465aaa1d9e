"""Requests to OpenAI-compatible servers, and changes that some servers need.

Some servers reject fields that other servers require. For each known difference, this module can
change the request. A change is applied after the server has rejected a request with a message that
names the cause.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final

from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.providers.request_errors import Failure

# --- requests -------------------------------------------------------------------------------------
# The request as a value, and advice for rejected requests.


Body = dict[str, Any]


def request_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    schema: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> Body:
    """Return the request for a streamed answer with token counts at the end."""
    body: Body = {
        "model": model,
        "messages": [dict(message) for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    if schema is not None:
        json_schema = {"name": "answer", "schema": dict(schema), "strict": _is_strict(schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    return body


def encode_request(body: Mapping[str, Any]) -> bytes:
    """Encode the request. Raises UsageError if JSON cannot represent the request."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the request cannot be written as JSON: {error}") from error
    # A lone surrogate cannot be sent in a request, so `?` replaces the surrogate.
    return text.encode("utf-8", "replace")


def advice_for(failure: Failure, *, model: str, base_url: str, key_name: str) -> str:
    """Return advice for a known failure, or empty text."""
    if "request too large" in failure.description.lower():
        return "Set agent.max_context_tokens below the account's limit per minute."
    key = f"the key in {key_name}" if key_name else "the API key"
    match failure.status:
        case 401:
            return f"Check {key}."
        case 402:
            return "The account behind the key has no credit left."
        case 403:
            return f"Check whether {key} may use this model."
        case 404:
            return f"Check the name of the model ({model}) and base_url ({base_url})."
    return ""


def _is_strict(schema: Any) -> bool:
    """Whether the schema suits strict mode: all properties required, no others allowed."""
    if isinstance(schema, Sequence) and not isinstance(schema, str):
        return all(map(_is_strict, schema))
    if not isinstance(schema, Mapping):
        return True
    if isinstance(properties := schema.get("properties"), Mapping):
        required = schema.get("required")
        if schema.get("additionalProperties") is not False or not isinstance(required, Sequence):
            return False
        if set(required) != set(properties):
            return False
    return all(map(_is_strict, schema.values()))


# --- fallbacks ------------------------------------------------------------------------------------


NO_TOOLS_NOTICE: Final = "this model does not support tools; it answers without them"
_REJECTION_STATUSES: Final = frozenset({400, 404, 415, 422, 501})
_CALL_FIELDS: Final = ("id", "type", "function", "custom")


class ServerQuirks:
    """The changes of requests that a server needs, learned from its errors."""

    def __init__(self) -> None:
        self._learned_quirks: dict[str, _Quirk] = {}

    def apply_changes(self, body: Mapping[str, Any]) -> Body:
        """Return the request with all learned changes."""
        changed_body = dict(body)
        for quirk in self._learned_quirks.values():
            changed_body = quirk.change(changed_body)
        return changed_body

    def learn_from(self, request: Mapping[str, Any], failure: Failure) -> str | None:
        """Learn a change from a failure, and return its note for the user, which may be empty.

        Return None if no known change matches the failure, or if the change would have no effect.
        """
        for name, quirk in _QUIRKS.items():
            if (
                name not in self._learned_quirks
                and failure.status in quirk.statuses
                and quirk.pattern.search(failure.description)
                and quirk.change(dict(request)) != request
            ):
                self._learned_quirks[name] = quirk
                return quirk.notice
        return None


class _Quirk(Struct, frozen=True, kw_only=True):
    pattern: re.Pattern[str]
    """Pattern of the server messages for this rejection."""
    change: Callable[[Body], Body]
    statuses: frozenset[int] = _REJECTION_STATUSES
    notice: str = ""


def _without_field(name: str, body: Body) -> Body:
    return {other: value for other, value in body.items() if other != name}


def _with_newer_limit(body: Body) -> Body:
    """Replace `max_tokens` by the field that newer models of OpenAI require."""
    if "max_tokens" not in body:
        return body
    changed_body = _without_field("max_tokens", body)
    return {**changed_body, "max_completion_tokens": body["max_tokens"]}


def _without_tools(body: Body) -> Body:
    """Remove tools, and rewrite earlier calls and results as text, which any model can read."""
    tool_fields = ("tools", "tool_choice", "parallel_tool_calls")
    changed_body = {name: value for name, value in body.items() if name not in tool_fields}
    messages: list[Mapping[str, Any]] = []
    last_role = ""
    for message in body["messages"]:
        role = message.get("role")
        if role == "tool":
            text = f"[the tool answered: {_content_text(message.get('content'))}]"
            if last_role == "tool":
                # Many chat templates require user and assistant messages to alternate.
                text = f"{messages.pop()['content']}\n{text}"
            messages.append({"role": "user", "content": text})
        elif calls := _calls_of(message):
            texts = [_content_text(message.get("content")), *map(_call_as_text, calls)]
            messages.append({"role": role, "content": "\n".join(filter(None, texts))})
        else:
            messages.append(message)
        last_role = role
    return {**changed_body, "messages": messages}


def _call_as_text(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    return f"[called the tool {function.get('name')} with {function.get('arguments')}]"


def _with_plain_calls(body: Body) -> Body:
    """Remove the fields of tool calls that only some servers know."""

    def keep_known_fields(call: Mapping[str, Any]) -> Body:
        return {name: value for name, value in call.items() if name in _CALL_FIELDS}

    return _map_calls(body, keep_known_fields)


def _with_short_ids(body: Body) -> Body:
    """Replace the ids of tool calls by nine letters and digits.

    The same id gives the same result in every request.
    """

    def shorten_id(call: Mapping[str, Any]) -> Body:
        return {**call, "id": _short_id(call.get("id"))}

    changed_body = _map_calls(body, shorten_id)
    messages = [
        {**message, "tool_call_id": _short_id(message["tool_call_id"])}
        if "tool_call_id" in message
        else message
        for message in changed_body["messages"]
    ]
    return {**changed_body, "messages": messages}


def _short_id(id: Any) -> str:
    text = str(id)
    if re.fullmatch(r"[A-Za-z0-9]{9}", text):
        return text
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _map_calls(body: Body, change: Callable[[Mapping[str, Any]], Body]) -> Body:
    messages = [
        {**message, "tool_calls": [change(call) for call in calls]}
        if (calls := _calls_of(message))
        else message
        for message in body["messages"]
    ]
    return {**body, "messages": messages}


def _calls_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list) and all(isinstance(c, Mapping) for c in calls) else ()


def _content_text(content: Any) -> str:
    if not isinstance(content, list):
        return "" if content is None else str(content)
    texts = [part for part in content if isinstance(part, Mapping) and "text" in part]
    return "\n".join(str(part["text"]) for part in texts)


_UNKNOWN_FIELD_PATTERN: Final = (
    r"(?:unknown|unrecogni|unexpected|unsupported|additional|extra|not permitted)"
)
_QUIRKS: Final = {
    "stream_options": _Quirk(
        pattern=re.compile(r"stream.?options|include_usage", re.I),
        change=partial(_without_field, "stream_options"),
    ),
    "response_format": _Quirk(
        pattern=re.compile(r"response.?format|json.?schema|structured.?output", re.I),
        change=partial(_without_field, "response_format"),
    ),
    "max_tokens": _Quirk(
        pattern=re.compile(r"max_tokens.{0,20} (?:is|are) not supported", re.I),
        change=_with_newer_limit,
    ),
    "tools": _Quirk(
        pattern=re.compile(
            r"(?:not|n't) support (?:\w+ ){0,2}(?:tools\b|tool.?(?:use|call)|function.?call)"
            r"|no endpoints found that support tool"
            r"|tool choice requires --enable-auto-tool-choice"
            r"|tools param requires --jinja"
            r"|(?:tools|tool.?(?:use|call)\w*|function.?call\w*)\W{0,3}(?:is|are) not "
            r"(?:supported|enabled)"
            r"|argument supplied: tools\b",
            re.I,
        ),
        change=_without_tools,
        # llama.cpp reports this rejection with status 500. Other errors with 500 are retried.
        statuses=_REJECTION_STATUSES | {500},
        notice=NO_TOOLS_NOTICE,
    ),
    "call fields": _Quirk(
        pattern=re.compile(
            rf"extra_content|{_UNKNOWN_FIELD_PATTERN}.{{0,80}}tool_calls|tool_calls.{{0,80}}{_UNKNOWN_FIELD_PATTERN}",
            re.I | re.S,
        ),
        change=_with_plain_calls,
    ),
    "call ids": _Quirk(
        pattern=re.compile(r"tool.?call.?id.{0,100}length of 9", re.I | re.S),
        change=_with_short_ids,
    ),
}
"""Known quirks, by the rejected part of the request."""
