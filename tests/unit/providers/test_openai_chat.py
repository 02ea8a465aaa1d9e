"""Tests a model over real HTTP, against a server that plays every fault by name."""

import asyncio
import gzip
import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import aclosing
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from stenolog.context.request_messages import ProviderRequirements, prepare_messages
from stenolog.errors import ModelRefused, ModelUnavailable, UsageError
from stenolog.providers import openai_chat
from stenolog.providers.chat_model import ChatModel, StreamedAnswer, Usage
from stenolog.providers.openai_chat import OpenAIChat
from stenolog.providers.openai_protocol import NO_TOOLS_NOTICE
from stenolog.providers.request_errors import read_overflow
from stenolog.testing.model_server import ModelServer, ScriptedResponse
from stenolog.testing.scripted_model import tool_call
from support.model_requests import ask, asked_once, messages, tool

SAID = "You said: how tall is the mountain?"
ASKED = SAID.removeprefix("You said: ")
SCHEMA = {
    "type": "object",
    "properties": {"height": {"type": "integer"}},
    "required": ["height"],
    "additionalProperties": False,
}


@pytest.fixture
def server() -> Iterator[ModelServer]:
    with ModelServer() as started:
        yield started


def model_of(server: ModelServer, **changed: Any) -> OpenAIChat:
    return OpenAIChat("scripted", base_url=server.url, **{"backoff": 0.001, **changed})


def test_client_is_a_chat_model_with_the_name_of_its_model() -> None:
    model = OpenAIChat("gpt-x")
    assert isinstance(model, ChatModel)
    assert model.name == "gpt-x"
    assert OpenAIChat("gpt-x", name="mine/gpt-x").name == "mine/gpt-x"


def test_answer_is_streamed_with_finish_reason_and_usage(server: ModelServer) -> None:
    async def pieces() -> list[str]:
        model = model_of(server)
        found = [delta.text async for delta in model.stream(messages(ASKED))]
        await model.close()
        await model.close()
        return found

    found = asyncio.run(pieces())
    assert len([piece for piece in found if piece]) > 2
    assert "".join(found) == SAID

    reply, error = asked_once(model_of(server), ASKED)
    assert error is None
    assert (reply.text, reply.finish) == (SAID, "stop")
    assert reply.usage is not None
    assert reply.usage.prompt > 0
    assert reply.usage.answer > 0
    assert server.requests[-1]["stream_options"] == {"include_usage": True}
    assert server.rejected_count == 0


def test_request_is_sent_unchanged(server: ModelServer) -> None:
    model = model_of(server, extra={"temperature": 0, "max_tokens": 9})
    asked_once(model, "ölig 😀", tools=[tool("look")], schema=SCHEMA, max_tokens=50)
    sent = server.requests[0]
    assert sent["messages"] == messages("ölig 😀")
    assert sent["tools"] == [tool("look")]
    assert (sent["temperature"], sent["max_tokens"]) == (0, 50)
    shape = sent["response_format"]
    assert shape["type"] == "json_schema"
    assert shape["json_schema"] == {"name": "answer", "schema": SCHEMA, "strict": True}


def test_value_without_json_is_rejected_before_sending(server: ModelServer) -> None:
    _, error = asked_once(model_of(server), [{"role": "user", "content": {1, 2}}])
    assert isinstance(error, UsageError)
    assert "JSON" in str(error)
    assert server.request_count == 0


def test_connections_are_reused(server: ModelServer) -> None:
    async def twice() -> int:
        model = model_of(server)
        for _ in range(3):
            async for _ in model.stream(messages("hello")):
                pass
        threads = [one for one in threading.enumerate() if "process_request" in one.name]
        await model.close()
        return len(threads)

    assert asyncio.run(twice()) == 1


def test_client_works_in_another_event_loop(server: ModelServer) -> None:
    model = model_of(server)
    for _ in range(2):
        reply, error = asked_once(model, ASKED)
        assert (reply.text, error) == (SAID, None)


# --- tool calls and thinking -----------------------------------------------------------------


def test_extra_fields_of_calls_are_sent_back(server: ModelServer) -> None:
    signed = {"google": {"thought_signature": "c2lnbmVk"}}
    first = {**tool_call("look", id="a"), "extra_content": signed}
    server.respond(ScriptedResponse(answer={"tool_calls": [first, tool_call("now", id="b")]}))
    model = model_of(server)
    reply, _ = asked_once(model, ASKED)
    assert [call.get("extra_content") for call in reply.calls] == [signed, None]

    results = [{"role": "tool", "tool_call_id": id, "content": "x"} for id in ("a", "b")]
    history = prepare_messages(
        [*messages(ASKED), reply.message(), *results], ProviderRequirements()
    )
    _, error = asked_once(model, history)
    assert server.requests[1]["messages"][1]["tool_calls"][0]["extra_content"] == signed
    # This server rejects the field, so the request is repeated without it.
    assert error is None
    assert server.requests[2]["messages"][1]["tool_calls"][0] == tool_call("look", id="a")
    assert server.request_count == 3


def test_signed_reasoning_is_sent_back_complete(server: ModelServer) -> None:
    pieces: list[dict[str, Any]] = [
        {"type": "reasoning.text", "text": "It is ", "index": 0, "signature": None},
        {"type": "reasoning.text", "text": "Everest.", "index": 0},
        {"type": "reasoning.text", "signature": "c2ln", "index": 0},
        {"type": "reasoning.encrypted", "data": "c2Vh", "index": 1},
        {"type": "reasoning.encrypted", "data": "bGVk", "index": 1},
    ]
    server.respond(ScriptedResponse(answer={"content": "8,849 m.", "reasoning_details": pieces}))
    reply, _ = asked_once(model_of(server), ASKED)
    whole = {"type": "reasoning.text", "text": "It is Everest.", "index": 0, "signature": "c2ln"}
    assert reply.message()["reasoning_details"] == [whole, *pieces[3:]]
    needs = ProviderRequirements(reasoning="all")
    assert prepare_messages([reply.message()], needs)[0]["reasoning_details"] == [
        whole,
        *pieces[3:],
    ]


# --- faults ----------------------------------------------------------------------------------


def stream_of(*events: str) -> ScriptedResponse:
    """Return the response with these events of a stream."""
    body = "".join(f"data: {event}\n\n" for event in events)
    return ScriptedResponse(body=body, content_type="text/event-stream")


def words_event(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})


FINISH = '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'


@pytest.mark.parametrize(
    "play", [ScriptedResponse(cut_after=3), stream_of(words_event(SAID[:24]))], ids=["cut", "end"]
)
def test_broken_stream_raises_after_the_received_text(
    server: ModelServer, play: ScriptedResponse
) -> None:
    server.respond(play)
    reply, error = asked_once(model_of(server), ASKED)
    assert isinstance(error, ModelUnavailable)
    assert "broke off" in str(error)
    assert "is incomplete" in str(error)
    assert reply.text == SAID[:24]
    # Text that was already passed on cannot be withdrawn, so there was no retry.
    assert server.request_count == 1


def test_stream_broken_before_its_first_text_is_retried(server: ModelServer) -> None:
    server.respond(ScriptedResponse(cut_after=0), stream_of())
    reply, error = asked_once(model_of(server), ASKED)
    assert (reply.text, error) == (SAID, None)
    assert server.request_count == 3


def test_disconnect_after_the_finish_reason_is_ignored(server: ModelServer) -> None:
    server.respond(
        ScriptedResponse(cut_after=5),
        stream_of(words_event(SAID), FINISH),
        stream_of(words_event(SAID), "[DONE]"),
    )
    for _ in range(3):
        reply, error = asked_once(model_of(server), ASKED)
        assert (reply.text, error) == (SAID, None)
    assert server.request_count == 3


def test_429_waits_for_retry_after(server: ModelServer, caplog: pytest.LogCaptureFixture) -> None:
    server.respond(ScriptedResponse(status=429, retry_after="0.01"))
    # The client's own back-off would take minutes.
    with caplog.at_level(logging.INFO, logger="stenolog"):
        reply, error = asked_once(model_of(server, backoff=100), ASKED)
    assert (reply.text, error) == (SAID, None)
    assert server.request_count == 2
    assert "retrying in 0.0 s" in caplog.text


def test_too_long_retry_after_raises(server: ModelServer) -> None:
    server.respond(ScriptedResponse(status=429, retry_after="86400"))
    _, error = asked_once(model_of(server), ASKED)
    assert isinstance(error, ModelUnavailable)
    assert "Retry-After: 86400" in str(error)
    assert server.request_count == 1


def test_500_is_retried_and_finally_raised(server: ModelServer) -> None:
    server.respond(
        ScriptedResponse(status=500), ScriptedResponse(status=503), ScriptedResponse(status=502)
    )
    reply, error = asked_once(model_of(server), ASKED)
    assert (reply.text, error) == (SAID, None)

    server.respond(*[ScriptedResponse(status=500)] * 3)
    _, error = asked_once(model_of(server, retries=2), ASKED)
    assert isinstance(error, ModelUnavailable)
    assert "answered 500: The server had an error" in str(error)
    assert "after 3 tries" in str(error)


def test_unreachable_server_raises(server: ModelServer) -> None:
    server.close()
    _, error = asked_once(model_of(server, retries=1), ASKED)
    assert isinstance(error, ModelUnavailable)
    assert "cannot be reached" in str(error)
    assert server.url in str(error)


@pytest.mark.parametrize(
    "malformed",
    [
        '{"choices":[{"delta":{"content":"half',
        "[1, 2]",
        '{"choices":"x"}',
        '{"choices":[{"delta":"x"}]}',
        '{"choices":[{"delta":{"tool_calls":["x"]}}]}',
        "hello",
        "[" * 100_000,
    ],
    ids=range(7),
)
def test_malformed_chunk_raises_with_its_start(server: ModelServer, malformed: str) -> None:
    server.respond(stream_of(words_event(SAID[:12]), malformed))
    reply, error = asked_once(model_of(server), ASKED)
    assert isinstance(error, ModelUnavailable)
    assert f"malformed chunk of {len(malformed):,} characters" in str(error)
    assert f": {malformed[:12]!r}"[:-1] in str(error)
    assert len(str(error)) < 500
    assert reply.text == SAID[:12]


@pytest.mark.parametrize("place", ["chunk", "field", "text"])
def test_conversation_text_is_not_mistaken_for_a_server_message(
    server: ModelServer, place: str
) -> None:
    words = "maximum context length is 8192 tokens"
    wrong = {"loc": ["body", "x"], "msg": "Extra inputs are not permitted", "input": {"x": words}}
    told = f"[{{'msg': 'Extra inputs are not permitted', 'input': '{words}'}}]"
    server.respond(
        {
            "chunk": stream_of(f'{words}"}}]}}'),
            "field": ScriptedResponse(status=422, body=json.dumps({"detail": [wrong]})),
            "text": ScriptedResponse(status=400, body=json.dumps({"message": told})),
        }[place]
    )
    _, error = asked_once(model_of(server, retries=0), ASKED)
    assert isinstance(error, ModelUnavailable if place == "chunk" else ModelRefused)
    assert ("malformed" if place == "chunk" else "not permitted") in str(error)
    assert read_overflow(error) is None


def test_error_inside_a_stream_has_the_message_of_the_server(server: ModelServer) -> None:
    server_error = '{"message":"The server had an error","type":"server_error","code":500}'
    server.respond(stream_of(words_event(SAID[:24]), f'{{"error":{server_error}}}'))
    reply, error = asked_once(model_of(server), ASKED)
    assert isinstance(error, ModelUnavailable)
    assert "The server had an error" in str(error)
    assert reply.text == SAID[:24]

    too_long = server_error.replace("The server had an error", "Context size has been exceeded.")
    server.respond(stream_of(f'{{"error":{too_long}}}'))
    _, error = asked_once(model_of(server), ASKED)
    assert isinstance(error, ModelRefused)
    assert read_overflow(error)
    assert server.request_count == 2

    server.respond(stream_of('{"error":"overloaded"}'))
    reply, error = asked_once(model_of(server), ASKED)
    assert (reply.text, error) == (SAID, None)


def test_slow_first_byte_is_accepted_and_silence_is_not(server: ModelServer) -> None:
    server.respond(ScriptedResponse(first_byte=0.1), ScriptedResponse(first_piece=1.5))
    # The timeout between two chunks does not apply yet.
    for timeout in (120.0, 1.0):
        reply, error = asked_once(model_of(server, timeout=timeout), ASKED)
        assert (reply.text, error) == (SAID, None)
    assert server.request_count == 2

    for slow in (ScriptedResponse(first_byte=30), ScriptedResponse(first_piece=30)):
        server.respond(slow)
        _, error = asked_once(model_of(server, first_byte_timeout=0.1, retries=0), ASKED)
        assert isinstance(error, ModelUnavailable)
        assert "silent for 0.1 s" in str(error)


@pytest.mark.slow
def test_silence_is_retried_at_most_once(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.respond(ScriptedResponse(first_byte=30))
    _, error = asked_once(model_of(server, first_byte_timeout=0.1), ASKED)
    assert isinstance(error, ModelUnavailable)
    assert "tries" not in str(error)
    _wait_for_requests(server, 1)

    # The same server under a name that does not look local.
    monkeypatch.setenv("NO_PROXY", "*")
    far = server.url.replace("127.0.0.1", "127.1")
    for slow in (ScriptedResponse(first_byte=30), ScriptedResponse(first_piece=30)):
        asked = server.request_count
        server.respond(slow, slow)
        model = OpenAIChat("scripted", base_url=far, backoff=0.001, first_byte_timeout=0.5)
        _, error = asked_once(model, ASKED)
        assert "silent for 0.5 s" in str(error)
        assert "after 2 tries" in str(error)
        _wait_for_requests(server, asked + 2)


def _wait_for_requests(server: ModelServer, count: int) -> None:
    """Wait until the server has read this many requests: a client may give up faster."""
    deadline = time.monotonic() + 60
    while server.request_count < count and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.request_count == count


def test_silence_inside_a_stream_raises(server: ModelServer) -> None:
    server.respond(ScriptedResponse(stall_after=3))
    # Long enough for a busy machine to pass the first words on.
    reply, error = asked_once(model_of(server, timeout=1.0), ASKED)
    assert isinstance(error, ModelUnavailable)
    assert "silent for 1 s: the answer is incomplete" in str(error)
    assert reply.text == SAID[:24]
    assert server.request_count == 1


@pytest.mark.parametrize(
    ("words", "told", "believed"),
    [(3_000, 1_000, 0), (3_000, 1_600, 1_600), (3_000, 9_000, 9_000), (900, 10, 10)],
)
def test_implausibly_low_prompt_count_is_ignored(
    server: ModelServer, words: int, told: int, believed: int
) -> None:
    usage = {"prompt_tokens": told, "completion_tokens": 7}
    choice = {"index": 0, "message": {"content": "Yes."}, "finish_reason": "stop"}
    server.respond(ScriptedResponse(body=json.dumps({"choices": [choice], "usage": usage})))
    reply, _ = asked_once(model_of(server), "word " * words)
    assert reply.usage == Usage(prompt=believed, answer=7)


def test_answer_without_streaming_is_accepted(server: ModelServer) -> None:
    calls = [tool_call("look", id="a"), tool_call("now", id="b")]
    message = {"role": "assistant", "content": SAID, "tool_calls": calls}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    usage = {"prompt_tokens": 3, "completion_tokens": 7}
    server.respond(ScriptedResponse(body=json.dumps({"choices": [choice], "usage": usage})))
    reply, error = asked_once(model_of(server), ASKED)
    assert (reply.text, reply.finish, error) == (SAID, "tool_calls", None)
    assert reply.usage == Usage(prompt=3, answer=7)
    assert [call["function"]["name"] for call in reply.calls] == ["look", "now"]


# --- rejections ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        (401, "Check the key in SOME_KEY."),
        (403, "Check whether the key in SOME_KEY may use this model."),
        (404, "Check the name of the model (scripted) and base_url (http://127.0.0.1"),
        (402, "no credit left"),
    ],
)
def test_rejected_request_error_has_the_server_message_and_advice(
    server: ModelServer, status: int, advice: str
) -> None:
    body = '{"error":{"message":"These are its words.","code":"some_code"}}'
    server.respond(ScriptedResponse(status=status, body=body))
    _, error = asked_once(model_of(server, key_name="SOME_KEY"), ASKED)
    assert isinstance(error, ModelRefused)
    assert f"answered {status}: These are its words. (code: some_code)" in str(error)
    assert advice in str(error)
    assert server.request_count == 1


def test_request_above_the_account_limit_is_not_retried(server: ModelServer) -> None:
    words = (
        "Request too large for gpt-4o in organization org-1 on tokens per min (TPM): Limit 30000, "
        "Requested 45000. The input or output tokens must be reduced in order to run successfully."
    )
    error_body = {"message": words, "type": "tokens", "code": "rate_limit_exceeded"}
    server.respond(ScriptedResponse(status=429, body=json.dumps({"error": error_body})))
    _, error = asked_once(model_of(server), ASKED)
    assert isinstance(error, ModelRefused)
    assert "Set agent.max_context_tokens below" in str(error)
    assert read_overflow(error) is None
    assert server.request_count == 1


def test_web_page_and_redirect_raise(server: ModelServer) -> None:
    server.respond(
        ScriptedResponse(body="<html>Welcome</html>", content_type="text/html"),
        ScriptedResponse(status=308),
    )
    for word in ("web page", "answered 308"):
        _, error = asked_once(model_of(server), ASKED)
        assert isinstance(error, ModelRefused)
        assert word in str(error)
    server.respond(ScriptedResponse(body='{"hello": "there"}'))
    _, error = asked_once(model_of(server, retries=0), ASKED)
    assert isinstance(error, ModelUnavailable)
    assert "malformed answer" in str(error)


@pytest.mark.parametrize("field", ["stream_options", "response_format"])
def test_rejected_field_is_omitted_afterwards(field: str) -> None:
    with ModelServer(rejected_fields=[field]) as server:
        model = model_of(server, retries=0)
        for _ in range(2):
            reply, error = asked_once(model, ASKED, schema=SCHEMA)
            assert (reply.text, error) == (SAID, None)
        assert [field in sent for sent in server.requests] == [True, False, False]
        assert server.rejected_count == 1


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, "registry.ollama.ai/library/gemma:2b does not support tools"),
        (400, '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser'),
        (404, "No endpoints found that support tool use. To learn more about it, see here."),
        (500, "tools param requires --jinja flag"),
        (400, "Function calling is not enabled for models/gemma-3"),
        (400, "`tool calling` is not supported with this model"),
    ],
)
def test_model_without_tools_answers_without_them_with_one_notice(
    server: ModelServer, status: int, words: str
) -> None:
    server.respond(ScriptedResponse(status=status, body=json.dumps({"error": {"message": words}})))
    model = model_of(server, retries=0, extra={"tool_choice": "auto"})

    async def notices() -> list[str]:
        found = [delta.notice async for delta in model.stream(messages("x"), tools=[tool("look")])]
        await model.close()
        return [notice for notice in found if notice]

    assert asyncio.run(notices()) == [NO_TOOLS_NOTICE]
    assert asyncio.run(notices()) == []
    assert ["tools" in sent for sent in server.requests] == [True, False, False]
    assert "tool_choice" not in server.requests[1]


def test_invalid_tool_does_not_disable_tools(server: ModelServer) -> None:
    words = "Invalid schema for function 'look': In context=(), tools[0] is not valid"
    server.respond(ScriptedResponse(status=400, body=json.dumps({"error": {"message": words}})))
    _, error = asked_once(model_of(server), ASKED, tools=[tool("look")])
    assert isinstance(error, ModelRefused)
    assert server.request_count == 1


def test_max_completion_tokens_is_learned(server: ModelServer) -> None:
    words = "Unsupported parameter: 'max_tokens' is not supported with this model."
    server.respond(ScriptedResponse(status=400, body=json.dumps({"error": {"message": words}})))
    _, error = asked_once(model_of(server, retries=0), ASKED, max_tokens=70)
    assert error is None
    assert "max_tokens" not in server.requests[1]
    assert server.requests[1]["max_completion_tokens"] == 70


# --- keys ------------------------------------------------------------------------------------


def test_key_is_in_no_error_log_or_repr(caplog: pytest.LogCaptureFixture) -> None:
    key, other = "sk-very-secret-1234", "another-secret-5678"
    with ModelServer(key=key) as server, caplog.at_level(logging.DEBUG):
        model = model_of(server, key=f" {key}\n", headers={"X-Key": other}, retries=1)
        assert asked_once(model, ASKED)[1] is None
        told = f"Incorrect API key provided: {key}, {other}"
        server.respond(
            ScriptedResponse(status=500, body=told), ScriptedResponse(status=401, body=told)
        )
        _, error = asked_once(model, ASKED)
        assert isinstance(error, ModelRefused)
        assert "Incorrect API key provided: [key], [key]" in str(error)
        shown = f"{error} {error!r} {error.__cause__!r} {model!r} {caplog.text}"
        assert key not in shown
        assert other not in shown
        # The key was sent anyway.
        _, error = asked_once(model_of(server, key="wrong"), ASKED)
        assert "answered 401" in str(error)


def test_short_header_does_not_redact_other_text(server: ModelServer) -> None:
    headers = {"X-Version": "1", "X-Auth": "2", "Cookie": "s=4", "Authorization": "Bearer abc1"}
    server.respond(
        ScriptedResponse(status=400, body="maximum context length is 8192 tokens"),
        ScriptedResponse(status=400, body="bad: abc1, s=4, but 1 and abc12"),
    )
    model = model_of(server, key="x", headers=headers)
    found = read_overflow(asked_once(model, ASKED)[1] or ValueError())
    assert found is not None
    assert found.limit == 8_192
    assert "bad: [key], [key], but 1 and abc12" in str(asked_once(model, ASKED)[1])


@pytest.mark.parametrize("key", ["sk-secret\nHeader: x", "sk-secret\N{EM DASH}"])
def test_key_with_invalid_characters_is_rejected_without_showing_it(key: str) -> None:
    with pytest.raises(UsageError, match="the key contains characters") as caught:
        OpenAIChat("x", key=key)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "address", ["localhost:8080/v1", "ftp://host/v1", "http:///v1", "http://me:secret@host/v1", ""]
)
def test_invalid_base_url_is_rejected(address: str) -> None:
    with pytest.raises(UsageError, match="base_url"):
        OpenAIChat("x", base_url=address)


# --- cancelled readers -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "play",
    [ScriptedResponse(stall_after=3), ScriptedResponse(first_byte=60)],
    ids=["words", "none"],
)
def test_cancelled_reader_closes_the_connection(
    server: ModelServer, play: ScriptedResponse
) -> None:
    server.respond(play)
    reply = StreamedAnswer()

    async def cancelled() -> None:
        model = model_of(server)
        begun = asyncio.Event()

        async def read() -> None:
            async for delta in model.stream(messages(ASKED)):
                reply.add(delta)
                if reply.text == SAID[:24]:
                    begun.set()

        task = asyncio.create_task(read())
        if play.first_byte:
            await asyncio.to_thread(server.wait_until, lambda: server.request_count == 1)
        else:
            await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The model is still open; the received text is kept.
        assert await asyncio.to_thread(server.wait_until, lambda: server.disconnect_count == 1)
        await model.close()

    asyncio.run(cancelled())
    assert reply.text == ("" if play.first_byte else SAID[:24])


def test_closing_the_iterator_ends_the_request(server: ModelServer) -> None:
    server.respond(ScriptedResponse(pause=0.2))

    async def stopped() -> None:
        model = model_of(server)
        async with aclosing(model.stream(messages(ASKED))) as deltas:
            async for _ in deltas:
                break
        assert await asyncio.to_thread(server.wait_until, lambda: server.disconnect_count == 1)
        reply, error = await ask(model, "again")
        assert (reply.text, error) == ("You said: again", None)

    asyncio.run(stopped())


def test_wait_before_a_retry_can_be_cancelled(server: ModelServer) -> None:
    server.respond(ScriptedResponse(status=503, retry_after="50"))

    async def cancelled() -> None:
        model = model_of(server)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await anext(model.stream(messages(ASKED)))
        await model.close()

    asyncio.run(cancelled())
    assert server.request_count == 1


# --- hostile bodies --------------------------------------------------------------------------


class _Hostile(BaseHTTPRequestHandler):
    """Answers endlessly until the client disconnects."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        way = self.path.split("/")[1]
        self.send_response(500 if way == "error" else 200)
        kind = (
            "text/event-stream"
            if way in ("line", "events", "empty", "nothing")
            else "application/json"
        )
        self.send_header("Content-Type", kind)
        if way == "bomb":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        piece = {
            "line": b"data: " + b"x" * 2**20,
            "events": b"data: " + json.dumps({"x": "y" * 2**20}).encode() + b"\n\n",
            "bomb": gzip.compress(b" " * (70 * 2**20)),
            "empty": b"data:\n\n" * 1_000,
            "nothing": b"data: {}\n\n",
        }.get(way, b"x" * 2**20)
        try:
            if way == "nothing":
                said = {"choices": [{"index": 0, "delta": {"content": "It is"}}]}
                self.wfile.write(b"data: " + json.dumps(said).encode() + b"\n\n")
            for _ in range(200):
                self.wfile.write(piece)
                time.sleep(0.01 if way == "nothing" else 0)
        except OSError:
            return

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


def asked_hostile(way: str, **changed: Any) -> tuple[StreamedAnswer, BaseException | None]:
    server = HTTPServer(("127.0.0.1", 0), _Hostile)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/{way}"
        return asked_once(OpenAIChat("x", base_url=url, retries=0, **changed), ASKED)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("way", ["line", "events", "error", "body", "bomb"])
@pytest.mark.slow
def test_endless_body_is_not_read_completely(way: str) -> None:
    _, error = asked_hostile(way)
    assert isinstance(error, ModelUnavailable if way in ("error", "line") else ModelRefused)
    assert len(str(error)) < 3_000


@pytest.mark.slow
def test_endless_empty_events_are_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openai_chat, "_MAX_ANSWER_SIZE", 1_000_000)
    _, error = asked_hostile("empty")
    assert isinstance(error, ModelRefused)
    assert "sent more data than an answer can have" in str(error)


@pytest.mark.slow
def test_empty_events_count_as_silence() -> None:
    # Long enough for a busy machine to pass the first words on.
    for given in ({"timeout": 1.5}, {"timeout": 1.5, "first_byte_timeout": 5.0}):
        reply, error = asked_hostile("nothing", **given)
        assert reply.text == "It is"
        assert isinstance(error, ModelUnavailable)
        assert "was silent for 1.5 s" in str(error)
