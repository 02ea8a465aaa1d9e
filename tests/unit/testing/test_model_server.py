"""Tests the scripted model over HTTP: its answers, its records, and its cleanup."""

import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from stenolog.providers.openai_chat import OpenAIChat
from stenolog.providers.request_errors import read_overflow
from stenolog.testing.model_server import ModelServer, ScriptedResponse
from stenolog.testing.scripted_model import answer_by_rule, parse_calls
from support.model_requests import asked_once, messages, tool


def post(server: ModelServer, body: Any, *, path: str = "/chat/completions") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return get(server.url + path, data)


def get(url: str, data: bytes | None = None) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=10) as answered:
            return answered.status, json.load(answered)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_server_answers_without_streaming() -> None:
    with ModelServer() as server:
        status, answer = post(server, {"model": "m", "messages": messages("hello")})
        assert status == 200
        assert answer["choices"][0]["message"]["content"] == "You said: hello"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens"] > 0
        assert get(f"{server.url}/models")[1]["data"][0]["id"] == "scripted"


def test_invalid_request_is_rejected_counted_and_recorded() -> None:
    with ModelServer(max_requests=3) as server:
        for body in (b"{", {"model": "m", "messages": [{"role": "bot"}]}):
            status, answer = post(server, body)
            assert status == 400
            assert answer["error"]["type"] == "invalid_request_error"
        assert (server.request_count, server.rejected_count) == (2, 2)
        assert "Invalid value 'bot'" in server.request_faults[1]
        for number in range(4):
            post(server, {"model": "m", "messages": messages(str(number))})
        assert (server.request_count, server.rejected_count) == (6, 2)
        kept = [sent["messages"][0]["content"] for sent in server.requests]
        assert kept == ["1", "2", "3"]


def test_scripted_fault_does_not_hide_an_invalid_request() -> None:
    with ModelServer(responses=[ScriptedResponse(status=500)]) as server:
        assert post(server, {"messages": []})[0] == 400
        assert server.rejected_count == 1


def test_unknown_paths_and_methods_are_rejected() -> None:
    with ModelServer() as server:
        assert post(server, {}, path="/embeddings")[0] == 404
        assert get(f"{server.url}/nothing")[0] == 404


def test_conversation_with_tools_is_predictable() -> None:
    with ModelServer() as server:
        model = OpenAIChat("scripted", base_url=server.url)
        asked = messages('call look {"at": "x"} and now')
        reply, _ = asked_once(model, asked, tools=[tool("look"), tool("now")])
        assert [call["function"]["name"] for call in reply.calls] == ["look", "now"]
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {number}"}
            for number, call in enumerate(reply.calls)
        ]
        asked += [reply.message(), *results]
        again, error = asked_once(model, asked)
        assert error is None
        assert again.text == "The tools said: result 0 | result 1"
        asked += [again.message(), *messages("call now")]
        third, _ = asked_once(model, asked)
        # A new id: a strict provider would reject a repeated one.
        assert third.calls[0]["id"] not in {call["id"] for call in reply.calls}
        assert server.rejected_count == 0


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("call now", [("now", "{}")]),
        ('Call look {"a": {"b": [1]}}', [("look", '{"a": {"b": [1]}}')]),
        ("call a {} and b {}", [("a", "{}"), ("b", "{}")]),
        ("call a, b and c", [("a", "{}"), ("b", "{}"), ("c", "{}")]),
        ("call a {broken", []),
        ("recall something", []),
        ("please call me", []),
        ("", []),
    ],
)
def test_calls_are_parsed_from_user_text(text: str, calls: list[tuple[str, str]]) -> None:
    assert parse_calls(text) == calls


def test_script_answers_every_request() -> None:
    assert answer_by_rule({}) == "You said: "
    parts = [{"type": "text", "text": "this"}, {"type": "image_url"}]
    assert answer_by_rule({"messages": [{"role": "user", "content": parts}]}) == "You said: this "


def test_request_above_the_context_is_rejected_as_overflow() -> None:
    with ModelServer(context=100) as server:
        model = OpenAIChat("scripted", base_url=server.url)
        assert asked_once(model, "short")[1] is None
        _, error = asked_once(model, "long " * 200)
        assert error is not None
        found = read_overflow(error)
        assert found is not None
        assert found.limit == 100
        # Tools are counted too.
        assert asked_once(model, "short", tools=[tool(f"tool_{n}") for n in range(10)])[1]
        assert server.rejected_count == 0


def test_close_ends_answers_and_threads() -> None:
    before = threading.active_count()
    server = ModelServer(
        responses=[ScriptedResponse(stall_after=2), ScriptedResponse(first_byte=60)]
    )
    errors = []

    def talk() -> None:
        model = OpenAIChat("scripted", base_url=server.url, retries=0)
        errors.append(asked_once(model, "hello there")[1])

    talking = [threading.Thread(target=talk) for _ in range(2)]
    for thread in talking:
        thread.start()
    assert server.wait_until(lambda: server.request_count == 2)
    server.close()
    server.close()
    for thread in talking:
        thread.join()
    assert all(errors)
    assert threading.active_count() == before


def test_server_runs_as_a_child_process_until_sigterm() -> None:
    response = '{"answer": "as scripted"}'
    command = [sys.executable, "-m", "stenolog.testing.model_server", "--response", response]
    with subprocess.Popen(
        [*command, "--context", "50"], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        model = OpenAIChat("scripted", base_url=url)
        assert asked_once(model, "hello")[0].text == "as scripted"
        assert asked_once(model, "hello")[0].text == "You said: hello"
        assert read_overflow(asked_once(model, "long " * 200)[1] or ValueError())
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0


def test_invalid_play_is_reported_in_one_line() -> None:
    command = [sys.executable, "-m", "stenolog.testing.model_server", "--response", "nonsense"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "--response takes a JSON object" in ended.stderr
    assert "Traceback" not in ended.stderr
