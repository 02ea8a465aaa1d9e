"""Tests which model is selected: by configuration, API keys, or local servers and packages."""

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from stenolog.errors import UsageError, install_command
from stenolog.providers.chat_model import ChatModel, HasContextWindow
from stenolog.providers.openai_chat import OpenAIChat
from stenolog.settings.model_selection import (
    PROVIDERS,
    ModelChoice,
    NoModel,
    find_model,
    ollama_address,
    open_model,
    probe_ollama,
)
from stenolog.testing.model_server import ModelServer
from stenolog.testing.scripted_model import ScriptedModel
from support.model_requests import asked_once, tool

KEYS = {"OPENAI_API_KEY": "sk-1", "GROQ_API_KEY": "gsk-2"}


def has_ollama() -> Sequence[str]:
    return ["qwen3:4b", "llama3.2"]


def has_weights() -> Path | None:
    return Path("/models/small.gguf")


def never() -> Any:
    raise AssertionError("it was asked though it was not needed")


def chosen(configured: str = "", **given: Any) -> ModelChoice:
    found = find_model(configured, **{"environment": {}, **given})
    assert isinstance(found, ModelChoice)
    return found


# --- without configuration -------------------------------------------------------------------


def test_model_is_chosen_from_config_then_keys_then_ollama_then_weights() -> None:
    everything: dict[str, Any] = {"environment": KEYS, "ollama": has_ollama, "weights": has_weights}
    assert chosen("scripted", **everything).provider == "scripted"
    assert chosen(**everything).provider == "openai"
    assert chosen(**{**everything, "environment": {}}).provider == "ollama"
    assert chosen(weights=has_weights).provider == "local"


def test_sources_are_checked_only_when_needed() -> None:
    assert chosen(environment=KEYS, ollama=never, weights=never).provider == "openai"
    assert chosen("scripted", ollama=never, weights=never).provider == "scripted"
    assert chosen(ollama=has_ollama, weights=never).model == "qwen3:4b"


@pytest.mark.parametrize("provider", PROVIDERS, ids=lambda provider: provider.name)
def test_each_known_key_selects_its_provider_and_a_model(provider: Any) -> None:
    for key_name in provider.key_names:
        found = chosen(environment={key_name: "k"})
        assert (found.provider, found.base_url) == (provider.name, provider.base_url)
        assert (found.key_name, found.model) == (key_name, provider.model)


def test_blank_key_is_ignored() -> None:
    assert find_model(environment={"OPENAI_API_KEY": " "}) == NoModel()


def test_error_without_a_model_has_three_lines_of_advice() -> None:
    found = find_model(environment={})
    assert isinstance(found, NoModel)
    assert len(found.text.splitlines()) == 3
    for word in ("OPENAI_API_KEY", "Ollama", install_command("local"), "--model scripted"):
        assert word in found.text


# --- configured ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configured", "provider", "model", "base_url", "key_name"),
    [
        ("openai/gpt-x", "openai", "gpt-x", "https://api.openai.com/v1", "OPENAI_API_KEY"),
        ("openai", "openai", "gpt-5-mini", "https://api.openai.com/v1", "OPENAI_API_KEY"),
        (
            "openrouter/meta/llama",
            "openrouter",
            "meta/llama",
            "https://openrouter.ai/api/v1",
            "OPENROUTER_API_KEY",
        ),
        ("ollama/llama3:8b", "ollama", "llama3:8b", "http://127.0.0.1:11434/v1", ""),
        ("http://box:8000/v1#org/model", "server", "org/model", "http://box:8000/v1", ""),
        ("scripted", "scripted", "scripted", "", ""),
        ("local:/models/x.gguf", "local", "/models/x.gguf", "", ""),
        (" local ", "local", "/models/small.gguf", "", ""),
    ],
)
def test_configured_model_name_is_parsed(
    configured: str, provider: str, model: str, base_url: str, key_name: str
) -> None:
    found = chosen(configured, weights=has_weights)
    assert (found.provider, found.model) == (provider, model)
    assert (found.base_url, found.key_name) == (base_url, key_name)


def test_base_url_accepts_any_model_and_gets_no_key_by_default() -> None:
    found = chosen("openai/gpt-oss", base_url="http://box/v1", environment=KEYS)
    assert (found.provider, found.model, found.key_name) == ("server", "openai/gpt-oss", "")
    assert chosen("m", base_url="http://box/v1", key_name="BOX_KEY").key_name == "BOX_KEY"
    assert chosen("http://box/v1#m", environment=KEYS).key_name == ""


def test_name_of_a_choice_selects_the_same_model() -> None:
    for configured in ("openai/gpt-x", "ollama/llama3", "http://box/v1#m", "scripted", "local:/x"):
        found = chosen(configured)
        assert chosen(found.name) == found


def test_openai_base_url_is_used_for_openai_only() -> None:
    elsewhere = {**KEYS, "OPENAI_BASE_URL": "http://proxy/v1"}
    assert chosen(environment=elsewhere).base_url == "http://proxy/v1"
    assert chosen("groq", environment=elsewhere).base_url == "https://api.groq.com/openai/v1"


@pytest.mark.parametrize(
    ("configured", "words"),
    [
        ("gpt-x", "unknown model 'gpt-x'"),
        ("unknown/gpt", "http://HOST/v1#NAME"),
        ("http://box/v1", "http://box/v1#NAME"),
        ("local", "no local weights"),
        ("ollama", "ollama pull"),
    ],
)
def test_invalid_model_name_is_rejected_with_advice(configured: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_model(configured, environment={})
    assert words in str(caught.value)


def test_repr_of_a_choice_does_not_contain_the_key() -> None:
    assert "sk-1" not in repr(chosen(environment=KEYS))


# --- opening ---------------------------------------------------------------------------------


def test_open_model_returns_the_class_of_the_provider() -> None:
    assert isinstance(open_model(chosen("scripted"), environment={}), ScriptedModel)
    model = open_model(chosen("openai/gpt-x"), environment=KEYS)
    assert isinstance(model, ChatModel)
    assert isinstance(model, OpenAIChat)
    assert model.name == "openai/gpt-x"
    assert "sk-1" not in repr(model)


def test_ollama_model_has_its_context_window() -> None:
    with ModelServer() as server:
        here = {"OLLAMA_HOST": server.url.removesuffix("/v1"), "OLLAMA_CONTEXT_LENGTH": "9000"}
        model = open_model(chosen("ollama/qwen3", environment=here), environment=here)
        assert isinstance(model, ChatModel)
        assert isinstance(model, HasContextWindow)
        assert (model.name, model.context) == ("ollama/qwen3", 9_000)
        reply, error = asked_once(model, "hello", tools=[tool("look")], max_tokens=5)
        assert (reply.text, error) == ("You said: hello", None)
        assert server.requests[0]["model"] == "qwen3"
        assert server.requests[0]["tools"] == [tool("look")]
        assert server.requests[0]["max_tokens"] == 5
    assert not isinstance(open_model(chosen("openai/x"), environment=KEYS), HasContextWindow)


def test_configured_key_is_sent_and_a_missing_key_is_named() -> None:
    with ModelServer(key="sk-1") as server:
        at = {"base_url": server.url, "key_name": "BOX_KEY"}
        box = chosen("m", **at)
        for opened in (
            open_model(box, environment={"BOX_KEY": "sk-1"}),
            open_model(box, environment={}, key="sk-1"),
            open_model(chosen("m", base_url=server.url), environment={}, key="sk-1"),
        ):
            assert asked_once(opened, "hello")[1] is None
        wrong = open_model(box, environment={"BOX_KEY": "wrong"}, headers={"X-A": "b"})
        assert "Check the key in BOX_KEY" in str(asked_once(wrong, "hello")[1])
    with pytest.raises(UsageError, match="set BOX_KEY"):
        open_model(box, environment=KEYS)


# --- Ollama ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("", "http://127.0.0.1:11434"),
        ("0.0.0.0", "http://127.0.0.1:11434"),
        (":9000", "http://127.0.0.1:9000"),
        ("box", "http://box:11434"),
        ("box:9000", "http://box:9000"),
        ("https://box/", "https://box:11434"),
        ("http://0.0.0.0:9000", "http://127.0.0.1:9000"),
    ],
)
def test_ollama_host_is_parsed(host: str, address: str) -> None:
    assert ollama_address({"OLLAMA_HOST": host}) == address
    assert chosen("ollama/m", environment={"OLLAMA_HOST": host}).base_url == f"{address}/v1"


class _Tags(BaseHTTPRequestHandler):
    body = b""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/tags" else 404)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def ollama() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), _Tags)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_only_chat_models_of_ollama_are_listed(ollama: HTTPServer) -> None:
    models = [
        {"name": "nomic-embed-text:latest", "details": {"family": "nomic-bert"}},
        {"name": "qwen3:4b", "details": {"family": "qwen3"}},
        {"name": "all-minilm"},
        {"name": "llama3.2", "details": None},
        {"name": ""},
        "x",
    ]
    address = f"http://127.0.0.1:{ollama.server_port}"
    _Tags.body = json.dumps({"models": models}).encode()
    assert probe_ollama(address) == ["qwen3:4b", "llama3.2"]
    for strange in (b"", b"[]", b'{"models": {}}', b"<html>", b"[" * 100_000):
        _Tags.body = strange
        assert probe_ollama(address) == []


def test_unreachable_ollama_has_no_models(ollama: HTTPServer) -> None:
    assert probe_ollama(f"http://127.0.0.1:{ollama.server_port}/elsewhere") == []
    assert probe_ollama("http://127.0.0.1:1") == []
    assert probe_ollama("http://[wrong") == []


def test_every_provider_is_documented() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text()
    for provider in PROVIDERS:
        for words in (f"`{provider.name}/NAME`", *provider.key_names):
            assert words in page


@pytest.mark.parametrize("name", ["scripted", "local"])
def test_reserved_names_are_model_names_with_a_base_url(name: str) -> None:
    found = find_model(name, environment={}, base_url="http://localhost:1/v1")
    assert isinstance(found, ModelChoice)
    assert (found.model, found.base_url) == (name, "http://localhost:1/v1")
