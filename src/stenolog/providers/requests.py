"""The request to an OpenAI-compatible server as a value, and what to do where it is refused."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from stenolog.errors import UsageError
from stenolog.providers.failures import Failure

Body = dict[str, Any]


def request_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    schema: Mapping[str, Any] | None = None,
    max_tokens: int | None = None,
) -> Body:
    """The request for a streamed answer, with its usage at the end."""
    body: Body = {
        "model": model,
        "messages": [dict(message) for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    if schema is not None:
        shape = {"name": "answer", "schema": dict(schema), "strict": _is_strict(schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": shape}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    return body


def encoded(body: Mapping[str, Any]) -> bytes:
    """The request as it is sent. Raises UsageError for what JSON cannot carry."""
    try:
        text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the request cannot be written as JSON: {error}") from error
    # Half a surrogate pair is text that no request can carry.
    return text.encode("utf-8", "replace")


def hint(failure: Failure, *, model: str, base_url: str, key_name: str) -> str:
    """What to do about a failure, where it is known; else empty."""
    if "request too large" in failure.what.lower():
        return "Set agent.max_context_tokens below what the account may send in a minute."
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
    """Whether the schema says what strict servers want of one: all properties, and no others."""
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
