"""The protocol of OpenAI-compatible servers: requests, and parsing of streamed answers. No I/O.

Servers differ in the fields that they accept, and in how they send tool calls, reasoning and usage.
All known differences are handled here, so that other modules see one format.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final, TypeVar

from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.providers.chat_model import Delta, TextBuffer, ToolCallDelta, Usage
from stenolog.providers.request_errors import Failure, find_failure

# --- requests -------------------------------------------------------------------------------------


Body = dict[str, Any]
_T = TypeVar("_T")


def make_request_body(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]],
    schema: Mapping[str, Any] | None,
    max_tokens: int | None,
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
    key_phrase = f"the key in {key_name}" if key_name else "the API key"
    match failure.status:
        case 401:
            return f"Check {key_phrase}."
        case 402:
            return "The account behind the key has no credit left."
        case 403:
            return f"Check whether {key_phrase} may use this model."
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


# --- quirks ---------------------------------------------------------------------------------------
# Some servers reject fields that other servers require.
# Once a server has rejected a request with a message that names the cause, all later requests are
# changed.


NO_TOOLS_NOTICE: Final = "this model does not support tools; it answers without them"
_REJECTION_STATUSES: Final = frozenset({400, 404, 415, 422, 501})
_SENT_CALL_FIELDS: Final = ("id", "type", "function", "custom")


class ServerQuirks:
    """The request changes that a server needs, learned from its errors."""

    def __init__(self) -> None:
        self._learned_quirks: dict[str, _Quirk] = {}

    def apply_changes(self, body: Mapping[str, Any]) -> Body:
        """Return the request with all learned changes."""
        changed_body = dict(body)
        for quirk in self._learned_quirks.values():
            changed_body = quirk.change(changed_body)
        return changed_body

    def learn_from(self, request: Mapping[str, Any], failure: Failure) -> str | None:
        """Learn a change from a failure; return the note about it for the user, which may be empty.

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
    """Replace `max_tokens` with the field that OpenAI's newer models require."""
    if "max_tokens" not in body:
        return body
    return _without_field("max_tokens", body) | {"max_completion_tokens": body["max_tokens"]}


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
                # Many chat templates require alternating roles, so join consecutive results.
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
        return {name: value for name, value in call.items() if name in _SENT_CALL_FIELDS}

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


# --- answers --------------------------------------------------------------------------------------


# The excerpt is short, so that a part of an answer is not mistaken for a server's message.
_MAX_EXCERPT_LENGTH: Final = 12
"""Maximum number of characters of malformed data that an error shows."""
_REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
_PARSED_CALL_FIELDS: Final = ("index", "id", "type", "function")


class ChunkReader:
    """The parser of one streamed answer.

    `new_id` makes an id for each tool call without an id. The methods raise Failure for a malformed
    chunk, and for an error that the server sends instead of a chunk.
    """

    def __init__(self, *, new_id: Callable[[], str]) -> None:
        self.done = False
        """Whether the server sent `[DONE]` or a complete answer."""
        self.finished = False
        """Whether the server sent a finish reason."""
        self._usage: Usage | None = None
        self._calls = _CallParser(new_id)

    def read_event(self, data: str) -> Delta | None:
        """Parse one event; return None if it adds nothing to the answer."""
        if data.strip() == "[DONE]":
            self.done = True
            return None
        if not data.strip():
            return None
        return self._parse_chunk(_decode_json(data, "chunk"), "delta", data)

    def read_complete(self, body: str) -> Delta | None:
        """Parse a complete answer that a server sent although a stream was requested."""
        answer = _decode_json(body, "answer")
        if not isinstance(answer, dict) or not answer.get("choices"):
            raise _make_malformed_error("answer", body)
        self.done = True
        return self._parse_chunk(answer, "message", body)

    def read_rest(self) -> Delta | None:
        """Return what is known only at the end: the usage."""
        return Delta(usage=self._usage) if self._usage else None

    def _parse_chunk(self, chunk: Any, field: str, data: str) -> Delta | None:
        fields = _check_type(chunk, dict, data)
        # Some servers send running totals in every chunk; the last total is valid.
        self._usage = _parse_usage(fields.get("usage")) or self._usage
        for choice in _check_type(fields.get("choices") or [], list, data):
            if _check_type(choice, dict, data).get("index") in (0, None):
                return self._parse_choice(choice, field, data)
        return None

    def _parse_choice(self, choice: Mapping[str, Any], field: str, data: str) -> Delta | None:
        message = _check_type(choice.get(field) or {}, dict, data)
        call_parts = _check_type(message.get("tool_calls") or [], list, data)
        for call in call_parts:
            _check_type(call, dict, data)
        text, thinking = _split_content(message.get("content"))
        text += _text_or_empty(message.get("refusal"))
        reasonings = filter(None, (_text_or_empty(message.get(name)) for name in _REASONING_FIELDS))
        finish = "" if self.finished else _text_or_empty(choice.get("finish_reason"))
        self.finished = self.finished or bool(finish)
        delta = Delta(
            text=_fix_surrogates(text),
            reasoning=_fix_surrogates(next(reasonings, thinking)),
            details=_parse_reasoning_details(message.get("reasoning_details")),
            calls=tuple(self._calls.parse_part(call) for call in call_parts),
            finish=finish,
        )
        return delta if delta != _EMPTY_DELTA else None


_EMPTY_DELTA: Final = Delta()


class _CallParser:
    """Parser of parts of tool calls. Servers identify a call by an index, an id, or not at all."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._ids: list[str] = []
        """The server's id of each call, in the order of our indexes; empty if it sent none."""
        self._arguments: list[TextBuffer] = []
        self._index_by_id: dict[str, int] = {}
        """Our index by the server's id."""
        self._index_by_server_index: dict[int, int] = {}
        """Our index by the server's index."""

    def parse_part(self, part: Mapping[str, Any]) -> ToolCallDelta:
        function = part.get("function")
        function = function if isinstance(function, dict) else {}
        id, name = _text_or_empty(part.get("id")), _text_or_empty(function.get("name"))
        value = function.get("arguments")
        arguments = value if isinstance(value, str) else "" if value is None else json.dumps(value)
        index_value = part.get("index")
        server_index = index_value if type(index_value) is int else None
        index = self._find_index(server_index, id=id, name=name, arguments=arguments)
        if index is None:
            index = len(self._ids)
            self._ids.append(id)
            self._index_by_id.setdefault(id, index)
            self._arguments.append(TextBuffer())
            if server_index is not None:
                self._index_by_server_index[server_index] = index
            id = id or self._new_id()
        self._arguments[index].add(arguments)
        extra = {
            field: value
            for field, value in part.items()
            if field not in _PARSED_CALL_FIELDS and value is not None
        }
        return ToolCallDelta(
            index=index,
            id=id,
            name=name,
            arguments=_fix_surrogates(arguments),
            extra=_make_storable(extra),
        )

    def _find_index(
        self, server_index: int | None, *, id: str, name: str, arguments: str
    ) -> int | None:
        """Return our index of the call that a part belongs to; None if the part starts a call."""
        if server_index is None:
            if id:
                return self._index_by_id.get(id)
            return None if name or not self._ids else len(self._ids) - 1
        index = self._index_by_server_index.get(server_index)
        if index is None or not id or not self._ids[index]:
            # Some servers send all calls with index 0 and without an id.
            # A new call starts when the arguments of the previous call are complete JSON.
            is_second_call = index is not None and name and not id and arguments.startswith("{")
            return None if is_second_call and _is_json(self._arguments[index or 0].text) else index
        # Some servers use index 0 for every call, so another id starts a new call.
        return index if self._ids[index] == id else None


def _decode_json(data: str, source: str) -> Any:
    """Decode the JSON of a chunk or an answer.

    Raises Failure with the start of a malformed text, or with an error that the server sent.
    """
    try:
        decoded = json.loads(data)
    except (ValueError, RecursionError):
        raise _make_malformed_error(source, data) from None
    if (failure := find_failure(decoded)) is not None:
        raise failure
    return decoded


def _make_malformed_error(source: str, data: str) -> Failure:
    excerpt = data if len(data) <= _MAX_EXCERPT_LENGTH else f"{data[:_MAX_EXCERPT_LENGTH]}…"
    return Failure(f"sent a malformed {source} of {len(data):,} characters: {excerpt!r}")


def _check_type(value: Any, expected: type[_T], data: str) -> _T:
    """Return `value`, a part of the chunk `data`. Raises Failure if its type is wrong."""
    if not isinstance(value, expected):
        raise _make_malformed_error("chunk", data)
    return value


def _split_content(content: Any) -> tuple[str, str]:
    """Return the text and the reasoning of a message's content: a text or a list of parts."""
    if isinstance(content, str):
        return content, ""
    text = thinking = ""
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        if part.get("type") == "thinking":
            thinking += _split_content(part.get("thinking"))[0]
        else:
            text += _text_or_empty(part.get("text"))
    return text, thinking


def _parse_reasoning_details(field: Any) -> tuple[dict[str, Any], ...]:
    details = field if isinstance(field, list) else ()
    return tuple(_make_storable(detail) for detail in details if isinstance(detail, dict))


def _parse_usage(value: Any) -> Usage | None:
    if not isinstance(value, dict):
        return None
    details = value.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    usage = Usage(
        prompt=_plausible_count(value.get("prompt_tokens")),
        answer=_plausible_count(value.get("completion_tokens")),
        cached=_plausible_count(cached) or _plausible_count(value.get("prompt_cache_hit_tokens")),
    )
    return usage if usage != Usage() else None


def _plausible_count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0


def _text_or_empty(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _is_json(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True


def _fix_surrogates(text: str) -> str:
    """Join surrogate pairs, which stores reject as two characters, and replace lone surrogates."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _make_storable(value: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and fix surrogates, so that stores accept the value; return {} if impossible."""
    try:
        encoded = json.dumps(value, ensure_ascii=False)
        decoded = json.loads(_fix_surrogates(encoded), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}
