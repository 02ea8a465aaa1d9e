"""What only Ollama's own API tells: how much a model sees of what it is sent.

Ollama cuts off silently what is beyond that, so it must be known before the first request.
"""

import json
import re
import urllib.request
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from http.client import HTTPException
from typing import Any, Final

from stenolog.providers.base import ChatModel, Delta

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
