"""The OpenAI-compatible endpoints `POST /v1/chat/completions` and `GET /v1/models`.

A turn runs to its end even if its client disconnects. The answer is stored, and a retry of the
request returns the stored answer.
"""

import asyncio
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from stenolog.agent.commands import new_key
from stenolog.agent.instance import AgentInstance
from stenolog.agent.threads import cancel_and_wait
from stenolog.agent.turn_events import (
    Answer,
    Event,
    EventHandler,
    ModelCalled,
    TextDelta,
    ThinkingDelta,
    TurnOptions,
    UsageReported,
    tool_name,
)
from stenolog.catalog.message_metadata import mark_client_calls, without_marks
from stenolog.codec import MAX_TOKEN_BYTES, check_key, encode_object
from stenolog.errors import ContextTooSmall, ModelRefused, StenologError, UsageError
from stenolog.gateway.chat_turns import (
    ChatTurnRequest,
    answer_chat,
    answer_without_session,
    store_receipt,
    text_for_client,
)
from stenolog.gateway.history_matching import SEPARATOR, is_system_message
from stenolog.gateway.live_stream import StreamEvent, event_stream
from stenolog.gateway.openapi import Endpoint
from stenolog.gateway.requests import body_of
from stenolog.gateway.responses import (
    INTERNAL_ERROR,
    error_response,
    response_for,
    sse_data,
    without_secrets,
)
from stenolog.gateway.shared_state import Gateway, Slot, SlotResponse, gateway_of
from stenolog.messages import calls_of, text_of

MAIN_AGENT: Final = "main"
_EARLY_FAILURE_SECONDS: Final = 5.0
"""Maximum seconds until a streamed response starts. A failure before that gets an error status."""
_HEADER_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_IGNORED_FIELDS: Final = 20
"""Maximum number of ignored fields that a response header names."""
_RETRY_HEADER: Final = "x-stainless-retry-count"
MAX_CHAT_MESSAGES: Final = 10_000
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")

_logger = logging.getLogger("stenolog")


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
    """Token counts that the provider reported, summed over all model calls of a turn."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


class _Chat(Struct, frozen=True, kw_only=True):
    """A chat request, parsed and checked."""

    request: ChatRequest
    agent: AgentInstance
    run_turn: Callable[[EventHandler], Awaitable[Answer]]
    id: str
    """Id of the response, the same in all its chunks."""
    created: int
    headers: dict[str, str]
    marks_retries: bool
    """Whether the client sends the header that marks retries."""
    key: str
    """Key of the session, given by the client or generated; empty for a chat without a session."""


class _TurnBuffer:
    """Buffer for the text of a turn. Streamed responses read pieces; others read the whole text."""

    def __init__(self) -> None:
        self.text = ""
        self.usage = Usage()
        self._unread_pieces: list[dict[str, str]] = []
        self._has_pieces = asyncio.Event()
        self._starts_new_text = False

    def on_event(self, event: Event) -> None:
        """Add the text or the token counts of an event to the buffer."""
        match event:
            case ModelCalled():
                self._starts_new_text = bool(self.text)
            case TextDelta(text=text):
                # The client sees all texts of a turn as one message, so they need a separator.
                piece = f"{SEPARATOR}{text}" if self._starts_new_text else text
                self._starts_new_text = False
                self.text += piece
                self._put_piece("content", piece)
            case ThinkingDelta(text=text):
                self._put_piece("reasoning_content", text)
            case UsageReported(usage=usage):
                self.usage.prompt_tokens += usage.prompt
                self.usage.completion_tokens += usage.answer
                self.usage.total_tokens += usage.prompt + usage.answer

    def _put_piece(self, field: str, piece: str) -> None:
        # If the reader is slow, the text is added to the last piece instead of a new piece.
        if self._unread_pieces and field in self._unread_pieces[-1]:
            self._unread_pieces[-1][field] += piece
        else:
            self._unread_pieces.append({field: piece})
        self._has_pieces.set()

    def take_pieces(self) -> list[dict[str, str]]:
        """Return and remove the pieces that the reader has not received yet."""
        pieces, self._unread_pieces = self._unread_pieces, []
        self._has_pieces.clear()
        return pieces

    async def wait(
        self, turn_task: "asyncio.Task[Answer]", *, seconds: float | None = None
    ) -> None:
        """Wait for a piece of text or the end of the turn, for at most `seconds`."""
        piece_task = asyncio.create_task(self._has_pieces.wait())
        tasks: set[asyncio.Task[Any]] = {piece_task, turn_task}
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if await cancel_and_wait([piece_task]):
                raise asyncio.CancelledError


async def chat_completions(request: Request) -> Response:
    """Answer a chat request."""
    gateway = gateway_of(request)
    with ExitStack() as on_error:
        # A slot is taken before the request is read, so that a rejected request costs nothing.
        turn_slot = on_error.enter_context(gateway.turns.admit())
        chat = await _parse_chat(gateway, request)
        stream_slot = gateway.streams.admit() if chat.request.stream else Slot()
        on_error.pop_all()
        on_error.enter_context(stream_slot)
        buffer = _TurnBuffer()
        turn_task = gateway.start_task(_run_turn(gateway, chat, buffer, turn_slot))
        if chat.request.stream:
            await buffer.wait(turn_task, seconds=_EARLY_FAILURE_SECONDS)
            if not turn_task.done() or turn_task.result().outcome != "failed":
                on_error.pop_all()
                chunks = _stream_chunks(gateway, chat, buffer, turn_task)
                headers = _response_headers(chat, chat.key)
                return SlotResponse(event_stream(chunks, headers=headers), stream_slot)
    # If the client disconnects, only this wait is cancelled, not the turn.
    answer = await asyncio.shield(turn_task)
    if answer.outcome == "failed":
        return await _error_response_for(request, gateway, answer)
    text = buffer.text or await _answer_text(gateway, chat, answer)
    body = make_completion(chat, answer, text, buffer.usage)
    headers = _response_headers(chat, answer.key)
    if chat.key and not answer.saved:
        headers["X-Steno-Not-Saved"] = "true"
    encoded = encode_object(msgspec.to_builtins(body))
    # A client that has disconnected may repeat the request, so no receipt is recorded for it.
    was_received = chat.marks_retries and not await request.is_disconnected()
    receipt_task = BackgroundTask(_record_receipt, gateway, chat, answer) if was_received else None
    return Response(
        encoded, headers=headers, media_type="application/json", background=receipt_task
    )


async def _record_receipt(gateway: Gateway, chat: _Chat, answer: Answer) -> None:
    """Store that the client received this answer, so that its next request is not a retry."""
    if chat.marks_retries and answer.seq is not None:
        await gateway.loop.run(store_receipt, chat.agent.store, answer.key, answer.seq)


async def _run_turn(gateway: Gateway, chat: _Chat, buffer: _TurnBuffer, slot: Slot) -> Answer:
    with slot:
        try:
            return await chat.run_turn(buffer.on_event)
        except StenologError as error:
            return Answer(key="", text=str(error), outcome="failed", error=error)
        except Exception as error:
            if not gateway.closing.is_set():
                _logger.exception("a chat request failed")
            text = f"{INTERNAL_ERROR} ({type(error).__name__})"
            return Answer(key="", text=text, outcome="failed")


# --- the request ------------------------------------------------------------------------------


async def _parse_chat(gateway: Gateway, request: Request) -> _Chat:
    """Parse and check a request. Raises UsageError and HTTPException."""
    body = await body_of(request, ChatRequest)
    messages = checked_conversation(body)
    field_names = _field_names(await request.body())
    agent, model = agent_for(gateway, body.model)
    options = options_of(body, model=model)
    key = session_key_of(body, _session_key_header(request))
    if key is None and gateway.settings.gateway.store_anonymous:
        key = new_key("api", "anonymous")
    headers = {}
    if ignored := ignored_fields(body, field_names):
        # A header accepts only some of the characters that a field name may contain.
        names = filter(_HEADER_SAFE_NAME.fullmatch, ignored)
        header = ", ".join(islice(names, _MAX_IGNORED_FIELDS))
        headers["X-Steno-Without-Effect"] = header or "unknown fields"
    marks_retries = _RETRY_HEADER in request.headers
    run_turn: Callable[[EventHandler], Awaitable[Answer]]
    if key is None:
        run_turn = partial(answer_without_session, gateway.loop, agent, messages, options)
    else:
        check_key(key)
        turn_request = ChatTurnRequest(
            key=key,
            messages=messages,
            agent=agent.id,
            options=options,
            once=_idempotency_key(request),
            # OpenAI's client libraries send the number of retries in a header.
            is_retry=request.headers.get(_RETRY_HEADER, "0") not in ("0", ""),
            marks_retries=marks_retries,
            new_session=wants_new_session(body, request.headers.get("x-session-new")),
        )
        run_turn = partial(answer_chat, gateway.loop, turn_request)
    return _Chat(
        request=body,
        agent=agent,
        run_turn=run_turn,
        id=f"chatcmpl-{secrets.token_hex(12)}",
        created=int(time.time()),
        headers=headers,
        marks_retries=marks_retries and key is not None,
        key=key or "",
    )


def checked_conversation(request: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages without system messages. Raises UsageError for an invalid request."""
    if request.n not in (None, 1):
        raise UsageError("n must be 1: each request gets one answer")
    if request.modalities is not None and request.modalities != ["text"]:
        raise UsageError('modalities must be ["text"]')
    if len(request.messages) > MAX_CHAT_MESSAGES:
        raise UsageError(f"more than {MAX_CHAT_MESSAGES:,} messages; send only the new ones")
    conversation = [_clean_body(body) for body in request.messages if not is_system_message(body)]
    if not conversation:
        raise UsageError("messages must contain at least one user message")
    for index, body in enumerate(request.messages):
        if body.get("role") not in _ROLES:
            raise UsageError(f"messages[{index}].role must be one of {', '.join(_ROLES)}")
        if body.get("role") == "tool" and not isinstance(body.get("tool_call_id"), str):
            raise UsageError(f"messages[{index}].tool_call_id must be the id of a tool call")
        if body.get("role") in ("user", "tool") and not _is_valid_content(body.get("content")):
            raise UsageError(f"messages[{index}].content must be text or a list of parts")
    if conversation[-1].get("role") == "assistant":
        raise UsageError("the last message must be a user message or a tool result")
    for index, tool in enumerate(request.tools or ()):
        if not tool_name(tool):
            raise UsageError(f"tools[{index}].function.name is missing")
    return conversation


def _is_valid_content(content: Any) -> bool:
    if isinstance(content, list):
        return bool(content) and all(isinstance(part, dict) for part in content)
    return isinstance(content, str)


def _clean_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client's message without stenolog's own field, which only agents may set.

    Tool calls in the message are marked as calls of the client, because unmarked calls count as
    calls of the agent.
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
    ignored = set(fields).difference(ChatRequest.__struct_fields__)
    if request.tool_choice not in (None, "none", "auto"):
        ignored.add("tool_choice")
    output = request.response_format
    if output is not None and output.get("type") != "text" and _response_schema(output) is None:
        ignored.add("response_format")
    return sorted(ignored)


def session_key_of(request: ChatRequest, header_key: str) -> str | None:
    """Return the session key of a request, or None. Raises UsageError if two keys differ."""
    metadata_key = (request.metadata or {}).get("session")
    if metadata_key is not None and not isinstance(metadata_key, str):
        raise UsageError("metadata.session must be text: the key of a session")
    if metadata_key and header_key and metadata_key != header_key:
        raise UsageError("X-Session-Key and metadata.session name different sessions; send one")
    return metadata_key or header_key or None


def wants_new_session(request: ChatRequest, header: str | None) -> bool:
    """Return whether to start a new session if the session with this key was deleted.

    Raises UsageError for a value that is neither true nor false.
    """
    field = (request.metadata or {}).get("new_session")
    for name, value in {"metadata.new_session": field, "X-Session-New": header}.items():
        if value not in (None, True, False, "true", "false"):
            raise UsageError(f"{name} must be true or false, not {value!r}")
    return "true" in (field, header) or field is True


def agent_for(gateway: Gateway, model_name: str) -> tuple[AgentInstance, str]:
    """Return the agent and the model that a model name selects. Raises HTTPException.

    `model_name` is the name of an agent, or of a model that users of the main agent may choose. For
    the agent's default model, the returned model is empty.
    """
    for agent in gateway.loop.registry:
        if model_name == (agent.id or MAIN_AGENT):
            return agent, ""
    main_agent = gateway.agent(None)
    if model_name in ("", "default", main_agent.model.name, main_agent.spec.model):
        return main_agent, ""
    if model_name in main_agent.spec.models:
        return main_agent, model_name
    model_names = ", ".join(_model_names(gateway))
    raise HTTPException(404, f"there is no model {model_name!r}; available: {model_names}")


def _field_names(body: bytes) -> set[str]:
    """Return the names of the fields that are not null in a valid request body."""
    try:
        raw_fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        # msgspec rejects escaped lone surrogates; the standard library decodes them.
        return {name for name, value in json.loads(body).items() if value is not None}
    return {name for name, value in raw_fields.items() if bytes(value) != b"null"}


def _model_names(gateway: Gateway) -> list[str]:
    agent_names = [agent.id or MAIN_AGENT for agent in gateway.loop.registry]
    return list(dict.fromkeys([*agent_names, *gateway.agent(None).spec.models]))


def _session_key_header(request: Request) -> str:
    """Return the session key in the header; empty if the header is missing."""
    header = request.headers.get("x-session-key", "")
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        return header


def _idempotency_key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key.encode("latin-1")) > MAX_TOKEN_BYTES:
        raise UsageError(f"Idempotency-Key must have at most {MAX_TOKEN_BYTES} bytes")
    return key


# --- the response -----------------------------------------------------------------------------


async def _error_response_for(request: Request, gateway: Gateway, answer: Answer) -> Response:
    """Return the error response for a turn that failed."""
    if isinstance(answer.error, ModelRefused | ContextTooSmall):
        text = without_secrets(answer.text, gateway.settings)
        return error_response(400, text, code="model_refused")
    if answer.error is not None:
        return await response_for(request, answer.error)
    return error_response(503, without_secrets(answer.text, gateway.settings), code="not_answered")


async def _answer_text(gateway: Gateway, chat: _Chat, answer: Answer) -> str:
    """Return the text of an answer for a client that has not received the text in pieces."""
    if not chat.key:
        return answer.text
    return await gateway.loop.run(text_for_client, chat.agent.store, answer)


def _response_headers(chat: _Chat, key: str) -> dict[str, str]:
    # Not every key can be sent in a header. The body always contains the key.
    can_be_header = bool(key) and key.isascii() and key.isprintable() and key == key.strip()
    return {**chat.headers, **({"X-Session-Key": key} if can_be_header else {})}


async def _stream_chunks(
    gateway: Gateway, chat: _Chat, buffer: _TurnBuffer, turn_task: "asyncio.Task[Answer]"
) -> AsyncIterator[StreamEvent]:
    yield _chunk_event(make_chunk(chat, {"role": "assistant", "content": ""}))
    while True:
        for piece in buffer.take_pieces():
            yield _chunk_event(make_chunk(chat, piece))
        if turn_task.done():
            break
        await buffer.wait(turn_task)
    answer, answer_text = turn_task.result(), ""
    if answer.outcome != "failed" and not buffer.text:
        try:
            answer_text = await _answer_text(gateway, chat, answer)
        except StenologError as read_error:
            answer = replace(answer, outcome="failed", text=str(read_error))
    if answer.outcome == "failed":
        text = without_secrets(answer.text, gateway.settings)
        error = {"message": text, "type": "server_error", "code": "not_answered"}
        yield _chunk_event({"error": error})
        return
    if answer_text:
        yield _chunk_event(make_chunk(chat, {"content": answer_text}))
    if answer.calls:
        calls = [{"index": index, **call} for index, call in enumerate(answer.calls)]
        yield _chunk_event(make_chunk(chat, {"tool_calls": calls}))
    last_chunk = make_chunk(chat, {}, finish_reason=finish_reason_of(answer))
    yield _chunk_event({**last_chunk, **session_fields(answer)})
    options = chat.request.stream_options
    if options is not None and options.include_usage:
        yield _chunk_event({**make_chunk(chat, {}), "choices": [], "usage": buffer.usage})
    yield StreamEvent(data="[DONE]")
    await _record_receipt(gateway, chat, answer)


def _chunk_event(body: dict[str, Any]) -> StreamEvent:
    return StreamEvent(data=sse_data(encode_object(msgspec.to_builtins(body))))


def finish_reason_of(answer: Answer) -> str:
    """Return OpenAI's finish reason for an answer."""
    if answer.calls:
        return "tool_calls"
    return "length" if answer.finish == "length" else "stop"


def make_completion(chat: _Chat, answer: Answer, text: str, usage: Usage) -> dict[str, Any]:
    """Return a complete response body."""
    content = text or (None if answer.calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.calls:
        message["tool_calls"] = [dict(call) for call in answer.calls]
    body = _response_body(chat, "chat.completion", {"message": message}, finish_reason_of(answer))
    return {**body, "usage": usage, **session_fields(answer)}


def session_fields(answer: Answer) -> dict[str, Any]:
    """Return the fields about the session, which OpenAI's API does not have."""
    return {"session": answer.key, "seq": answer.seq, "saved": answer.saved}


def make_chunk(
    chat: _Chat, delta: Mapping[str, Any], *, finish_reason: str | None = None
) -> dict[str, Any]:
    """Return one chunk of a streamed response."""
    return _response_body(chat, "chat.completion.chunk", {"delta": delta}, finish_reason)


def _response_body(
    chat: _Chat, kind: str, content: Mapping[str, Any], finish_reason: str | None
) -> dict[str, Any]:
    model = chat.request.model or MAIN_AGENT
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}
    fields = {"id": chat.id, "object": kind, "created": chat.created, "model": model}
    return {**fields, "choices": [choice]}


# --- the models -------------------------------------------------------------------------------


async def models(request: Request) -> Response:
    """List the agents and the models that clients may choose."""
    gateway = gateway_of(request)
    models_json = [
        {"id": name, "object": "model", "created": 0, "owned_by": "stenolog"}
        for name in _model_names(gateway)
    ]
    return JSONResponse({"object": "list", "data": models_json})


_OBJECT_SCHEMA: Final = {"type": "object"}
CHAT_ENDPOINTS: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        name="chat",
        summary="Answer a chat in OpenAI's format. With a session, messages and answer are stored.",
        handler=chat_completions,
        body_schema={
            "type": "object",
            "required": ["messages"],
            "properties": {
                "messages": {"type": "array", "minItems": 1, "items": _OBJECT_SCHEMA},
                "model": {"type": "string"},
                "stream": {"type": "boolean"},
                "metadata": {
                    "type": "object",
                    "properties": {
                        "session": {"type": "string", "minLength": 1},
                        "new_session": {
                            "enum": [True, False, "true", "false"],
                            "description": "Start a new session if the session with this key was "
                            "deleted. The header X-Session-New: true does the same.",
                        },
                    },
                },
            },
        },
        response_schema=_OBJECT_SCHEMA,
        media_types=("application/json", "text/event-stream"),
        error_statuses=(409, 410, 502),
    ),
    Endpoint(
        method="GET",
        path="/v1/models",
        name="models",
        summary="List the agents and the models that can be chosen, in OpenAI's format.",
        handler=models,
        response_schema=_OBJECT_SCHEMA,
    ),
)
