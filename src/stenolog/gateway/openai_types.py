"""Requests and responses of OpenAI's chat API, as pure functions and values."""

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.agent.turn_events import Answer, TurnOptions, tool_name
from stenolog.catalog.message_metadata import mark_client_calls, without_marks
from stenolog.errors import UsageError
from stenolog.gateway.history_matching import is_system_message
from stenolog.messages import calls_of, text_of

MAX_CHAT_MESSAGES: Final = 10_000
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_SUPPORTED_FIELDS: Final = frozenset(
    {
        "model", "messages", "stream", "stream_options", "tools", "tool_choice", "metadata",
        "max_tokens", "max_completion_tokens", "response_format", "n", "modalities",
    }
)  # fmt: skip


class StreamOptions(Struct, frozen=True, kw_only=True):
    """Options of a streamed response."""

    include_usage: bool = False


class ChatRequest(Struct, frozen=True, kw_only=True):
    """The body of a chat request. Fields that are not listed are accepted and have no effect."""

    messages: list[dict[str, Any]]
    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    n: int | None = None
    modalities: list[str] | None = None


class Usage(Struct, kw_only=True):
    """Token counts of the provider, summed over all requests of a turn."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


def check_request(request: ChatRequest) -> None:
    """Raise UsageError if the request cannot be answered."""
    if request.n not in (None, 1):
        raise UsageError("n must be 1: each request gets one answer")
    if request.modalities is not None and request.modalities != ["text"]:
        raise UsageError('modalities must be ["text"]')
    if len(request.messages) > MAX_CHAT_MESSAGES:
        raise UsageError(f"more than {MAX_CHAT_MESSAGES:,} messages; send only the new ones")
    conversation = conversation_of(request)
    if not conversation:
        raise UsageError("messages must contain at least one user message")
    for index, body in enumerate(request.messages):
        if body.get("role") not in _ROLES:
            roles = ", ".join(_ROLES)
            raise UsageError(f"messages[{index}].role must be one of {roles}")
        if body.get("role") == "tool" and not isinstance(body.get("tool_call_id"), str):
            raise UsageError(f"messages[{index}].tool_call_id must be the id of a tool call")
        if body.get("role") in ("user", "tool") and not _is_valid_content(body.get("content")):
            raise UsageError(f"messages[{index}].content must be text or a list of parts")
    if conversation[-1].get("role") == "assistant":
        raise UsageError("the last message must be a user message or a tool result")
    for index, tool in enumerate(request.tools or ()):
        if not tool_name(tool):
            raise UsageError(f"tools[{index}].function.name is missing")


def _is_valid_content(content: Any) -> bool:
    if isinstance(content, list):
        return bool(content) and all(isinstance(part, dict) for part in content)
    return isinstance(content, str)


def conversation_of(request: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages without system messages."""
    return [_client_body(body) for body in request.messages if not is_system_message(body)]


def _client_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client's message without stenolog's own field, which only agents may set.

    Tool calls in the message are marked as calls of the client. Otherwise they would count as calls
    of the agent.
    """
    plain = without_marks(body)  # guard: client-field-dropped
    return mark_client_calls(plain, [call.id for call in calls_of(plain) if call.id])


def options_of(request: ChatRequest, *, model: str) -> TurnOptions:
    """Return the turn options of a request. If `model` is empty, the default model is used."""
    instructions = [
        text
        for body in request.messages
        if is_system_message(body) and (text := text_of(body.get("content")).strip())
    ]
    are_tools_off = request.tool_choice == "none"
    return TurnOptions(
        system="\n\n".join(instructions) or None,
        tools=() if are_tools_off else tuple(request.tools or ()),
        own_tools=not are_tools_off,
        model=model,
        schema=_response_schema(request.response_format),
        max_tokens=request.max_completion_tokens or request.max_tokens,
    )


def _response_schema(response_format: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    match response_format:
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return schema
        case {"type": "json_object"}:
            return {"type": "object"}
    return None


def ignored_fields(request: ChatRequest, fields: Iterable[str]) -> list[str]:
    """Return the fields of a request that are ignored, to be reported to the client."""
    ignored = set(fields) - _SUPPORTED_FIELDS
    if request.tool_choice not in (None, "none", "auto"):
        ignored.add("tool_choice")
    output = request.response_format
    if output is not None and output.get("type") != "text" and _response_schema(output) is None:
        ignored.add("response_format")
    return sorted(ignored)


def session_of(request: ChatRequest, header: str | None) -> str | None:
    """Return the session key of a request, or None. Raise UsageError if two keys differ."""
    field = (request.metadata or {}).get("session")
    if field is not None and not isinstance(field, str):
        raise UsageError("metadata.session must be text: the key of a session")
    if field and header and field != header:
        raise UsageError("X-Session-Key and metadata.session name different sessions; send one")
    return field or header or None


def wants_new_session(request: ChatRequest, header: str | None) -> bool:
    """Return whether to start a new session if the session with this key was deleted.

    Raises UsageError for a value that is neither true nor false.
    """
    field = (request.metadata or {}).get("new_session")
    for name, value in {"metadata.new_session": field, "X-Session-New": header}.items():
        if value not in (None, True, False, "true", "false"):
            raise UsageError(f"{name} must be true or false, not {value!r}")
    return "true" in (field, header) or field is True


# --- the response ----------------------------------------------------------------------------


class ResponseHead(Struct, frozen=True, kw_only=True):
    """Fields that all chunks of one response share."""

    id: str
    created: int
    model: str


def response_head(model: str) -> ResponseHead:
    """Return the shared fields of a new response."""
    id = f"chatcmpl-{secrets.token_hex(12)}"
    return ResponseHead(id=id, created=int(time.time()), model=model)


def finish_of(answer: Answer) -> str:
    """Return OpenAI's finish reason for an answer."""
    if answer.calls:
        return "tool_calls"
    return "length" if answer.finish == "length" else "stop"


def completion(head: ResponseHead, answer: Answer, text: str, usage: Usage) -> dict[str, Any]:
    """Return a complete response body."""
    message: dict[str, Any] = {"role": "assistant", "content": text or None, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [dict(call) for call in answer.calls]
    elif not text:
        message["content"] = ""
    body = _response_body(head, "chat.completion", {"message": message}, finish_of(answer))
    session_fields = {"session": answer.key, "seq": answer.seq, "saved": answer.saved}
    return {**body, "usage": usage, **session_fields}


def chunk(
    head: ResponseHead, delta: Mapping[str, Any], *, finish: str | None = None
) -> dict[str, Any]:
    """Return one chunk of a streamed response."""
    return _response_body(head, "chat.completion.chunk", {"delta": delta}, finish)


def _response_body(
    head: ResponseHead, kind: str, content: Mapping[str, Any], finish: str | None
) -> dict[str, Any]:
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish}
    fields = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return {**fields, "choices": [choice]}


def calls_delta(calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return tool calls for the client as the delta of a chunk."""
    return {"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}


def usage_chunk(head: ResponseHead, usage: Usage) -> dict[str, Any]:
    """Return the last chunk, with the token counts."""
    return {**chunk(head, {}), "choices": [], "usage": usage}
