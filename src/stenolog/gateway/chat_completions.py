"""The OpenAI-compatible endpoints `POST /v1/chat/completions` and `GET /v1/models`.

A turn runs to its end even if its client disconnects. Its answer is stored, and a retry of the
request returns it.
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
# A chat without a session: it is answered, but nothing is stored or remembered.


async def answer_without_session(
    loop: AgentLoop,
    instance: AgentInstance,
    talk: Sequence[Mapping[str, Any]],
    options: TurnOptions,
    on_event: EventHandler,
) -> Answer:
    """Return the model's answer to as many of the messages as fit, without the agent's tools.

    Errors of the model's server are in the returned Answer. Raises UsageError.
    """
    model = await loop.run(instance.model_for, options.model)
    context = await loop.run(instance.context, model)
    reply = StreamedAnswer()
    try:
        window = await loop.run(
            build_window,
            talk,
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


MAIN: Final = "main"
_CHANNEL: Final = "api"
_EARLY_FAILURE: Final = 5.0
"""Seconds to wait for an early failure, which can still be reported with the HTTP status."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_NAMED: Final = 20
_DONE: Final = "[DONE]"
_RETRY_COUNT: Final = "x-stainless-retry-count"

_logger = logging.getLogger("stenolog")


class _Chat(Struct, frozen=True, kw_only=True):
    """One request, parsed and checked."""

    request: ChatRequest
    agent: AgentInstance
    answer: Callable[[EventHandler], Awaitable[Answer]]
    head: ResponseHead
    headers: dict[str, str]
    kept: bool
    """Whether the request belongs to a session."""
    retries: bool
    """Whether the client marks its retries."""
    key: str
    """Key of the session, given by the client or generated; empty if there is none."""


class _TurnBuffer:
    """Buffer for the text of a turn: read in pieces by a stream, or at the end."""

    def __init__(self) -> None:
        self.text = ""
        self.usage = Usage()
        self._unread: list[dict[str, str]] = []
        self._news = asyncio.Event()
        self._asked = False

    def on_event(self, event: Event) -> None:
        """Add an event."""
        match event:
            case ModelCalled():
                self._asked = bool(self.text)
            case TextDelta(text=text):
                # The client sees all texts of a turn as one message.
                piece = f"{SEPARATOR}{text}" if self._asked else text
                self._asked = False
                self.text += piece
                self._put("content", piece)
            case ThinkingDelta(text=text):
                self._put("reasoning_content", text)
            case UsageReported(usage=usage):
                self.usage.prompt_tokens += usage.prompt
                self.usage.completion_tokens += usage.answer
                self.usage.total_tokens += usage.prompt + usage.answer

    def _put(self, field: str, piece: str) -> None:
        # For a slow reader, pieces grow instead of accumulating.
        if self._unread and field in self._unread[-1]:
            self._unread[-1][field] += piece
        else:
            self._unread.append({field: piece})
        self._news.set()

    def unread(self) -> list[dict[str, str]]:
        """Return and remove the pieces that are not read yet."""
        pieces, self._unread = self._unread, []
        self._news.clear()
        return pieces

    async def news(self, running: "asyncio.Task[Answer]", *, within: float | None = None) -> None:
        """Wait for a piece or the end of the turn, for at most `within` seconds."""
        heard = asyncio.create_task(self._news.wait())
        both: set[asyncio.Task[Any]] = {heard, running}
        try:
            await asyncio.wait(both, timeout=within, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if await cancel_and_wait([heard]):
                raise asyncio.CancelledError


async def chat_completions(request: Request) -> Response:
    """Answer a chat request."""
    gateway = gateway_of(request)
    with contextlib.ExitStack() as places:
        # Before the request is read, so that a rejected request costs nothing.
        turn = gateway.turns.admit()
        places.callback(turn.release)
        chat = await _read(gateway, request)
        stream = gateway.streams.admit() if chat.request.stream else None
        places.pop_all()
        if stream is not None:
            places.callback(stream.release)
        heard = _TurnBuffer()
        running = gateway.keep_task(asyncio.create_task(_run(gateway, chat, heard, turn)))
        if stream is not None:
            await heard.news(running, within=_EARLY_FAILURE)
            if not running.done() or running.result().outcome != "failed":
                places.pop_all()
                return SlotResponse(_streamed(gateway, chat, heard, running), stream)
    # If the client disconnects, only this wait is cancelled, not the turn.
    answer = await asyncio.shield(running)
    if answer.outcome == "failed":
        return await _error_response_for(request, gateway, answer)
    text = heard.text or await _text(gateway, chat, answer)
    body = completion(chat.head, answer, text, heard.usage)
    headers = _headers(chat, answer.key)
    if chat.kept and not answer.saved:
        headers["X-Steno-Not-Saved"] = "true"
    encoded = encode_object(msgspec.to_builtins(body))
    # A client that has disconnected has not received the answer and may ask for it again.
    gone = await request.is_disconnected()
    sent = None if gone else BackgroundTask(_note_received, gateway, chat, answer)
    return Response(encoded, headers=headers, media_type="application/json", background=sent)


async def _note_received(gateway: Gateway, chat: _Chat, answer: Answer) -> None:
    """Store that the client has received this answer: its next request is a new message."""
    if chat.retries and answer.seq is not None:
        await gateway.loop.run(note_response, chat.agent.sessions, answer.key, answer.seq)


async def _run(gateway: Gateway, chat: _Chat, heard: _TurnBuffer, place: Slot) -> Answer:
    with place:
        try:
            return await chat.answer(heard.on_event)
        except StenologError as error:
            return Answer(key="", text=str(error), outcome="failed", error=error)
        except Exception as error:
            if not gateway.closing.is_set():
                _logger.exception("a chat request failed")
            return Answer(
                key="", text=f"{INTERNAL_ERROR} ({type(error).__name__})", outcome="failed"
            )


async def _read(gateway: Gateway, request: Request) -> _Chat:
    """Parse and check a request. Raise UsageError and HTTPException."""
    wanted = await body_of(request, ChatRequest)
    check_request(wanted)
    fields = _fields(await request.body())
    agent, model = agent_for(gateway, wanted.model)
    options = options_of(wanted, model=model)
    talk = conversation_of(wanted)
    key = session_of(wanted, _key(request))
    if key is None and gateway.settings.gateway.store_anonymous:
        key = new_key(_CHANNEL, "anonymous")
    headers = {}
    if ignored := ignored_fields(wanted, fields):
        # A field can have any name, but a header accepts only some characters.
        told = [name for name in ignored if _NAME.fullmatch(name)][:_MAX_NAMED]
        headers["X-Steno-Without-Effect"] = ", ".join(told) or "unknown fields"
    retries = _RETRY_COUNT in request.headers
    answer: Callable[[EventHandler], Awaitable[Answer]]
    if key is None:
        answer = partial(answer_without_session, gateway.loop, agent, talk, options)
    else:
        check_key(key)
        said = ChatTurnRequest(
            key=key,
            talk=talk,
            agent=agent.id,
            options=options,
            once=_idempotency_key(request),
            asked_again=_is_marked_retry(request),
            retries=retries,
            new_session=wants_new_session(wanted, request.headers.get("x-session-new")),
        )
        answer = partial(answer_chat, gateway.loop, said)
    return _Chat(
        request=wanted,
        agent=agent,
        answer=answer,
        head=response_head(wanted.model or MAIN),
        headers=headers,
        kept=key is not None,
        retries=retries and key is not None,
        key=key or "",
    )


def agent_for(gateway: Gateway, name: str) -> tuple[AgentInstance, str]:
    """Return the agent and the model that a model name selects. Raise HTTPException.

    A name is an agent's, or that of a model that users of the main agent may choose.
    """
    for agent in gateway.loop.registry:
        if name == (agent.id or MAIN):
            return agent, ""
    main = gateway.agent(None)
    if name in ("", "default", main.model.name, main.spec.model):
        return main, ""
    if name in main.spec.models:
        return main, name
    known = ", ".join(_names(gateway))
    raise HTTPException(404, f"there is no model {name!r}; available: {known}")


def _fields(body: bytes) -> set[str]:
    """Return the names of the non-null fields of a request that was decoded before."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError:
        # Only the standard library decodes lone surrogates.
        return {name for name, value in json.loads(body).items() if value is not None}
    return {name for name, value in raw.items() if bytes(value) != b"null"}


def _names(gateway: Gateway) -> list[str]:
    agents = [agent.id or MAIN for agent in gateway.loop.registry]
    return list(dict.fromkeys([*agents, *gateway.agent(None).spec.models]))


def _key(request: Request) -> str | None:
    """Return the session key in the header; None if there is none."""
    given = request.headers.get("x-session-key")
    if not given:
        return None
    try:
        return given.encode("latin-1").decode()
    except UnicodeError:
        return given


def _idempotency_key(request: Request) -> str:
    token = request.headers.get("idempotency-key", "")
    if len(token.encode("latin-1")) > MAX_TOKEN_BYTES:
        raise UsageError(f"Idempotency-Key must have at most {MAX_TOKEN_BYTES} bytes")
    return token


def _is_marked_retry(request: Request) -> bool:
    """Return whether the client marks this request as a retry, as OpenAI's libraries do."""
    return request.headers.get(_RETRY_COUNT, "0") not in ("0", "")


# --- the response ----------------------------------------------------------------------------


async def _error_response_for(request: Request, gateway: Gateway, answer: Answer) -> Response:
    """Return the response to a failed turn: the user's message is stored but not answered."""
    if isinstance(answer.error, ModelRefused | ContextTooSmall):
        words = without_secrets(answer.text, gateway.settings)
        return error_response(400, words, code="model_refused")
    if answer.error is not None:
        return await response_for(request, answer.error)
    return error_response(503, without_secrets(answer.text, gateway.settings), code="not_answered")


async def _text(gateway: Gateway, chat: _Chat, answer: Answer) -> str:
    """Return the text for the client of an answer that it has not received in pieces."""
    if not chat.kept:
        return answer.text
    return await gateway.loop.run(text_for_client, chat.agent.sessions, answer)


def _headers(chat: _Chat, key: str) -> dict[str, str]:
    return {**chat.headers, **({"X-Session-Key": key} if _fits_a_header(key) else {})}


def _fits_a_header(key: str) -> bool:
    """Return whether a key can be sent in a header; the body contains it anyway."""
    return bool(key) and key.isascii() and key.isprintable() and key == key.strip()


def _streamed(
    gateway: Gateway, chat: _Chat, heard: _TurnBuffer, running: "asyncio.Task[Answer]"
) -> Response:
    pieces = _pieces(gateway, chat, heard, running)
    return event_stream(pieces, headers=_headers(chat, chat.key))


async def _pieces(
    gateway: Gateway, chat: _Chat, heard: _TurnBuffer, running: "asyncio.Task[Answer]"
) -> AsyncIterator[StreamEvent]:
    top = chat.head
    yield _event(chunk(top, {"role": "assistant", "content": ""}))
    while True:
        for piece in heard.unread():
            yield _event(chunk(top, piece))
        if running.done():
            break
        await heard.news(running)
    answer = running.result()
    if answer.outcome == "failed":
        words = without_secrets(answer.text, gateway.settings)
        error = {"message": words, "type": "server_error", "code": "not_answered"}
        yield _event({"error": error})
        return
    if not heard.text and (text := await _text(gateway, chat, answer)):
        yield _event(chunk(top, {"content": text}))
    if answer.calls:
        yield _event(chunk(top, calls_delta(answer.calls)))
    last = chunk(top, {}, finish=finish_of(answer))
    yield _event({**last, "session": answer.key, "seq": answer.seq, "saved": answer.saved})
    options = chat.request.stream_options
    if options is not None and options.include_usage:
        yield _event(usage_chunk(top, heard.usage))
    yield StreamEvent(data=_DONE)
    await _note_received(gateway, chat, answer)


def _event(body: dict[str, Any]) -> StreamEvent:
    return StreamEvent(data=sse_data(encode_object(msgspec.to_builtins(body))))


# --- the models ------------------------------------------------------------------------------


async def models(request: Request) -> Response:
    """List the agents and the models that clients may choose."""
    gateway = gateway_of(request)
    listed = [
        {"id": name, "object": "model", "created": 0, "owned_by": "stenolog"}
        for name in _names(gateway)
    ]
    return JSONResponse({"object": "list", "data": listed})


_OBJECT: Final = {"type": "object"}
CHAT: Final[tuple[Endpoint, ...]] = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        name="chat",
        summary="Answer a chat in OpenAI's format. With a session, messages and answer are stored.",
        raw=chat_completions,
        query=None,
        body_schema={
            "type": "object",
            "required": ["messages"],
            "properties": {
                "messages": {"type": "array", "minItems": 1, "items": _OBJECT},
                "model": {"type": "string"},
                "stream": {"type": "boolean"},
                "metadata": {
                    "type": "object",
                    "properties": {
                        "session": {"type": "string", "minLength": 1},
                        "new_session": {
                            "enum": [True, False, "true", "false"],
                            "description": "Start a new session if the one with this key was "
                            "deleted. The header X-Session-New: true does the same.",
                        },
                    },
                },
            },
        },
        response_schema=_OBJECT,
        media=("application/json", "text/event-stream"),
        statuses=(409, 410, 502),
    ),
    Endpoint(
        method="GET",
        path="/v1/models",
        name="models",
        summary="List the agents and the models that can be chosen, in OpenAI's format.",
        raw=models,
        query=None,
        response_schema=_OBJECT,
    ),
)
"""The OpenAI-compatible endpoints."""
