"""The OpenAI-compatible endpoints `POST /v1/chat/completions` and `GET /v1/models`.

A turn runs to its end even if its client disconnects. The answer is stored, and a retry of the
request returns the stored answer.
"""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from stenolog.agent.commands import new_key
from stenolog.agent.instance import AgentInstance
from stenolog.agent.loop import AgentLoop
from stenolog.agent.threads import cancel_and_wait
from stenolog.agent.turn_events import (
    Answer,
    Event,
    EventHandler,
    ModelCalled,
    Notice,
    TextDelta,
    ThinkingDelta,
    TurnOptions,
    UsageReported,
)
from stenolog.codec import MAX_TOKEN_BYTES, check_key, encode_object
from stenolog.context.window import build_window
from stenolog.errors import ContextTooSmall, ModelRefused, StenologError, UsageError
from stenolog.gateway.api_types import error_response, sse_data
from stenolog.gateway.chat_turns import ChatTurnRequest, answer_chat, note_response, text_for_client
from stenolog.gateway.error_responses import INTERNAL_ERROR, response_for, without_secrets
from stenolog.gateway.history_matching import SEPARATOR
from stenolog.gateway.limits import Slot, SlotResponse
from stenolog.gateway.live_stream import StreamEvent, event_stream
from stenolog.gateway.openai_types import (
    ChatRequest,
    ResponseHead,
    Usage,
    calls_delta,
    check_request,
    chunk,
    completion,
    conversation_of,
    finish_of,
    ignored_fields,
    options_of,
    response_head,
    session_of,
    usage_chunk,
    wants_new_session,
)
from stenolog.gateway.openapi import Endpoint
from stenolog.gateway.requests import body_of
from stenolog.gateway.shared_state import Gateway, gateway_of
from stenolog.providers.chat_model import StreamedAnswer

# --- proxying -------------------------------------------------------------------------------------
# A chat request without a session is answered, but nothing is stored or remembered.


async def answer_without_session(
    loop: AgentLoop,
    instance: AgentInstance,
    messages: Sequence[Mapping[str, Any]],
    options: TurnOptions,
    on_event: EventHandler,
) -> Answer:
    """Return the model's answer to the newest messages that fit its context.

    The agent's tools are not offered to the model.

    Errors of the model's server are in the returned Answer. Raises UsageError.
    """
    model = await loop.run(instance.model_for, options.model)
    context = await loop.run(instance.context, model)
    reply = StreamedAnswer()
    try:
        window = await loop.run(
            build_window,
            messages,
            "",
            system=options.system if options.system is not None else "",
            tools=options.tools,
            limits=context.limits,
            needs=instance.spec.needs,
            tokens=context.tokens,
        )
        stream = model.stream(
            window.messages,
            tools=options.tools,
            schema=options.schema,
            max_tokens=options.max_tokens,
        )
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                reply.add(delta)
                if delta.notice:
                    on_event(Notice(text=delta.notice))
                if delta.reasoning:
                    on_event(ThinkingDelta(text=delta.reasoning))
                if delta.text:
                    on_event(TextDelta(text=delta.text))
    except StenologError as error:
        return Answer(key="", text=str(error), outcome="failed", error=error)
    if reply.usage is not None:
        on_event(UsageReported(usage=reply.usage))
    calls = tuple(reply.calls)
    return Answer(
        key="",
        text=reply.text,
        outcome="calls" if calls else "answered",
        calls=calls,
        finish=reply.finish,
        saved=False,
    )


# --- chat -----------------------------------------------------------------------------------------


MAIN_AGENT: Final = "main"
_CHANNEL: Final = "api"
_EARLY_FAILURE_SECONDS: Final = 5.0
"""Maximum seconds before a streamed response starts. Earlier failures get an error status."""
_PLAIN_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_IGNORED: Final = 20
_DONE_DATA: Final = "[DONE]"
_RETRY_HEADER: Final = "x-stainless-retry-count"

_logger = logging.getLogger("stenolog")


class _Chat(Struct, frozen=True, kw_only=True):
    """A chat request, parsed and checked."""

    request: ChatRequest
    agent: AgentInstance
    answer: Callable[[EventHandler], Awaitable[Answer]]
    head: ResponseHead
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
        self._unread: list[dict[str, str]] = []
        self._news = asyncio.Event()
        self._new_text = False

    def on_event(self, event: Event) -> None:
        """Add the text of an event to the buffer."""
        match event:
            case ModelCalled():
                self._new_text = bool(self.text)
            case TextDelta(text=text):
                # The client sees all texts of a turn as one message.
                piece = f"{SEPARATOR}{text}" if self._new_text else text
                self._new_text = False
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
        if self._unread and field in self._unread[-1]:
            self._unread[-1][field] += piece
        else:
            self._unread.append({field: piece})
        self._news.set()

    def take_pieces(self) -> list[dict[str, str]]:
        """Return and remove the pieces that the reader has not received yet."""
        pieces, self._unread = self._unread, []
        self._news.clear()
        return pieces

    async def wait(self, turn: "asyncio.Task[Answer]", *, seconds: float | None = None) -> None:
        """Wait for a piece of text or the end of the turn, for at most `seconds`."""
        news_task = asyncio.create_task(self._news.wait())
        tasks: set[asyncio.Task[Any]] = {news_task, turn}
        try:
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if await cancel_and_wait([news_task]):
                raise asyncio.CancelledError


async def chat_completions(request: Request) -> Response:
    """Answer a chat request."""
    gateway = gateway_of(request)
    with contextlib.ExitStack() as on_error:
        # A slot is taken before the request is read, so that a rejected request costs nothing.
        turn_slot = gateway.turns.admit()
        on_error.callback(turn_slot.release)
        chat = await _parse_chat(gateway, request)
        stream_slot = gateway.streams.admit() if chat.request.stream else None
        on_error.pop_all()
        if stream_slot is not None:
            on_error.callback(stream_slot.release)
        buffer = _TurnBuffer()
        turn_task = gateway.start_task(_run_turn(gateway, chat, buffer, turn_slot))
        if stream_slot is not None:
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
    body = completion(chat.head, answer, text, buffer.usage)
    headers = _response_headers(chat, answer.key)
    if chat.key and not answer.saved:
        headers["X-Steno-Not-Saved"] = "true"
    encoded = encode_object(msgspec.to_builtins(body))
    # A client that has disconnected has not received the answer and may repeat the request.
    was_received = chat.marks_retries and not await request.is_disconnected()
    receipt = BackgroundTask(_record_receipt, gateway, chat, answer) if was_received else None
    return Response(encoded, headers=headers, media_type="application/json", background=receipt)


async def _record_receipt(gateway: Gateway, chat: _Chat, answer: Answer) -> None:
    """Store that the client received this answer, so its next request is no retry."""
    if chat.marks_retries and answer.seq is not None:
        await gateway.loop.run(note_response, chat.agent.sessions, answer.key, answer.seq)


async def _run_turn(gateway: Gateway, chat: _Chat, buffer: _TurnBuffer, slot: Slot) -> Answer:
    with slot:
        try:
            return await chat.answer(buffer.on_event)
        except StenologError as error:
            return Answer(key="", text=str(error), outcome="failed", error=error)
        except Exception as error:
            if not gateway.closing.is_set():
                _logger.exception("a chat request failed")
            return Answer(
                key="", text=f"{INTERNAL_ERROR} ({type(error).__name__})", outcome="failed"
            )


async def _parse_chat(gateway: Gateway, request: Request) -> _Chat:
    """Parse and check a request. Raise UsageError and HTTPException."""
    body = await body_of(request, ChatRequest)
    check_request(body)
    fields = _field_names(await request.body())
    agent, model = agent_for(gateway, body.model)
    options = options_of(body, model=model)
    messages = conversation_of(body)
    key = session_of(body, _session_key(request))
    if key is None and gateway.settings.gateway.store_anonymous:
        key = new_key(_CHANNEL, "anonymous")
    headers = {}
    if ignored := ignored_fields(body, fields):
        # A header accepts only some of the characters that a field name may contain.
        names = [name for name in ignored if _PLAIN_NAME.fullmatch(name)][:_MAX_IGNORED]
        headers["X-Steno-Without-Effect"] = ", ".join(names) or "unknown fields"
    marks_retries = _RETRY_HEADER in request.headers
    answer: Callable[[EventHandler], Awaitable[Answer]]
    if key is None:
        answer = partial(answer_without_session, gateway.loop, agent, messages, options)
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
        answer = partial(answer_chat, gateway.loop, turn_request)
    return _Chat(
        request=body,
        agent=agent,
        answer=answer,
        head=response_head(body.model or MAIN_AGENT),
        headers=headers,
        marks_retries=marks_retries and key is not None,
        key=key or "",
    )


def agent_for(gateway: Gateway, name: str) -> tuple[AgentInstance, str]:
    """Return the agent and the model that a model name selects. Raise HTTPException.

    `name` is the name of an agent, or of a model that users of the main agent may choose.
    """
    for agent in gateway.loop.registry:
        if name == (agent.id or MAIN_AGENT):
            return agent, ""
    main_agent = gateway.agent(None)
    if name in ("", "default", main_agent.model.name, main_agent.spec.model):
        return main_agent, ""
    if name in main_agent.spec.models:
        return main_agent, name
    model_names = ", ".join(_model_names(gateway))
    raise HTTPException(404, f"there is no model {name!r}; available: {model_names}")


def _field_names(body: bytes) -> set[str]:
    """Return the names of the fields of a valid request body that are not null."""
    try:
        raw_fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        # Only the standard library decodes lone surrogates.
        return {name for name, value in json.loads(body).items() if value is not None}
    return {name for name, value in raw_fields.items() if bytes(value) != b"null"}


def _model_names(gateway: Gateway) -> list[str]:
    agent_names = [agent.id or MAIN_AGENT for agent in gateway.loop.registry]
    return list(dict.fromkeys([*agent_names, *gateway.agent(None).spec.models]))


def _session_key(request: Request) -> str | None:
    """Return the session key in the header; None if the header is missing."""
    header = request.headers.get("x-session-key")
    if not header:
        return None
    try:
        return header.encode("latin-1").decode()
    except UnicodeError:
        return header


def _idempotency_key(request: Request) -> str:
    key = request.headers.get("idempotency-key", "")
    if len(key.encode("latin-1")) > MAX_TOKEN_BYTES:
        raise UsageError(f"Idempotency-Key must have at most {MAX_TOKEN_BYTES} bytes")
    return key


# --- the response ----------------------------------------------------------------------------


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
    return await gateway.loop.run(text_for_client, chat.agent.sessions, answer)


def _response_headers(chat: _Chat, key: str) -> dict[str, str]:
    # Not every key can be sent in a header. The body always contains the key.
    can_be_header = bool(key) and key.isascii() and key.isprintable() and key == key.strip()
    return {**chat.headers, **({"X-Session-Key": key} if can_be_header else {})}


async def _stream_chunks(
    gateway: Gateway, chat: _Chat, buffer: _TurnBuffer, turn_task: "asyncio.Task[Answer]"
) -> AsyncIterator[StreamEvent]:
    head = chat.head
    yield _chunk_event(chunk(head, {"role": "assistant", "content": ""}))
    while True:
        for piece in buffer.take_pieces():
            yield _chunk_event(chunk(head, piece))
        if turn_task.done():
            break
        await buffer.wait(turn_task)
    answer = turn_task.result()
    if answer.outcome == "failed":
        text = without_secrets(answer.text, gateway.settings)
        error = {"message": text, "type": "server_error", "code": "not_answered"}
        yield _chunk_event({"error": error})
        return
    if not buffer.text and (text := await _answer_text(gateway, chat, answer)):
        yield _chunk_event(chunk(head, {"content": text}))
    if answer.calls:
        yield _chunk_event(chunk(head, calls_delta(answer.calls)))
    last = chunk(head, {}, finish=finish_of(answer))
    yield _chunk_event({**last, "session": answer.key, "seq": answer.seq, "saved": answer.saved})
    options = chat.request.stream_options
    if options is not None and options.include_usage:
        yield _chunk_event(usage_chunk(head, buffer.usage))
    yield StreamEvent(data=_DONE_DATA)
    await _record_receipt(gateway, chat, answer)


def _chunk_event(body: dict[str, Any]) -> StreamEvent:
    return StreamEvent(data=sse_data(encode_object(msgspec.to_builtins(body))))


# --- the models ------------------------------------------------------------------------------


async def models(request: Request) -> Response:
    """List the agents and the models that clients may choose."""
    gateway = gateway_of(request)
    models_json = [
        {"id": name, "object": "model", "created": 0, "owned_by": "stenolog"}
        for name in _model_names(gateway)
    ]
    return JSONResponse({"object": "list", "data": models_json})


_OBJECT_SCHEMA: Final = {"type": "object"}
CHAT: Final[tuple[Endpoint, ...]] = (
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
        statuses=(409, 410, 502),
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
