"""Tests the context size of a model, as reported by Ollama's API."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from stenolog.settings.model_selection import DEFAULT_CONTEXT_TOKENS, context_size

LLAMA = {"general.architecture": "llama", "llama.context_length": 131_072}


class _Api(BaseHTTPRequestHandler):
    """An Ollama server with these models, some of them loaded."""

    shown: Any = None
    running: Any = None

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = self.path == "/api/show" and asked == {"model": "llama"}
        self._answer(self.shown if known else None)

    def do_GET(self) -> None:
        self._answer(self.running if self.path == "/api/ps" else None)

    def _answer(self, told: Any) -> None:
        self.send_response(404 if told is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Api)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def context(address: str, shown: Any, running: Any = None, *, said: str = "") -> int:
    _Api.shown, _Api.running = shown, running
    return context_size(address, "llama", environment={"OLLAMA_CONTEXT_LENGTH": said})


def loaded(length: Any, *, name: str = "llama:latest") -> Any:
    return {"models": [{"name": "other", "context_length": 7}, {"name": name} | length]}


def test_default_context_without_an_answer(address: str) -> None:
    assert context_size("http://127.0.0.1:1", "llama", environment={}) == DEFAULT_CONTEXT_TOKENS
    assert context_size("http://[wrong", "llama", environment={}) == DEFAULT_CONTEXT_TOKENS
    assert context(address, None) == DEFAULT_CONTEXT_TOKENS
    # The size that the model was trained for is not the size in use.
    assert context(address, {"model_info": LLAMA}) == DEFAULT_CONTEXT_TOKENS


def test_model_setting_precedes_the_loaded_context(address: str) -> None:
    now = loaded({"context_length": 32_768})
    assert context(address, {}, now) == 32_768
    assert context(address, {"parameters": 'stop "x"\nnum_ctx    16384\ntop_k 1'}, now) == 16_384
    assert context(address, {"parameters": 'stop "num_ctx 5"'}, now) == 32_768
    assert context(address, {}, loaded({"context_length": 8_192}, name="llama")) == 8_192
    assert context(address, {}, loaded({})) == DEFAULT_CONTEXT_TOKENS


def test_environment_is_used_if_ollama_reports_nothing(address: str) -> None:
    assert context(address, {}, said=" 64000 ") == 64_000
    assert context(address, {}, loaded({"context_length": 8_192}), said="64000") == 8_192
    for strange in ("much", "-5", "²", "0", "9" * 5_000):
        assert context(address, {}, said=strange) == DEFAULT_CONTEXT_TOKENS


def test_context_is_limited_to_the_model_maximum(address: str) -> None:
    small = {"model_info": {"small.context_length": 2_048}, "parameters": "num_ctx 8192"}
    assert context(address, small) == 2_048


@pytest.mark.parametrize("strange", [[], "x", 7, {"parameters": 7, "model_info": []}])
def test_malformed_answers_are_ignored(address: str, strange: Any) -> None:
    assert context(address, strange, strange) == DEFAULT_CONTEXT_TOKENS
    assert context(address, {}, {"models": strange}) == DEFAULT_CONTEXT_TOKENS
    odd = {"model_info": {"x.context_length": strange}}
    assert context(address, odd, loaded({"context_length": str(strange)})) in (
        DEFAULT_CONTEXT_TOKENS,
        7,
    )
