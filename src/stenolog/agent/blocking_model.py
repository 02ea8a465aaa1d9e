"""Blocking calls to an async model, for the threads that write summaries and notes."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from stenolog.providers.chat_model import ChatModel, CompletionFunction, StreamedAnswer


class ModelClosing(BaseException):
    """Signals that the agent closes and no answer will come.

    It is not an Exception, because summarizing continues after errors of the model.
    """


class ModelPerThread:
    """A default model, which a thread can override for itself."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._own = threading.local()

    def __call__(self) -> ChatModel:
        """Return the model of the current thread."""
        found: ChatModel = getattr(self._own, "model", self._model)
        return found

    @contextmanager
    def using(self, model: ChatModel) -> Iterator[None]:
        """Use another model in the current thread, inside the `with` block."""
        self._own.model = model
        try:
            yield
        finally:
            del self._own.model


class BlockingModel:
    """A blocking `CompletionFunction` for a ChatModel whose event loop runs in another thread."""

    def __init__(self, model: Callable[[], ChatModel]) -> None:
        self._model = model
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mutex = threading.Lock()
        self._asked: set[concurrent.futures.Future[str]] = set()
        self._closed = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop that runs the model."""
        self._loop = loop

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """Return the answer. Raise the errors of the model, and ModelClosing after `close`."""
        return self._answer(self._model(), messages, schema, max_tokens)

    def by(self, model: ChatModel) -> CompletionFunction:
        """Return a `CompletionFunction` that always uses this model; `close` cancels it too."""

        def ask(
            messages: Sequence[Mapping[str, Any]],
            *,
            schema: Mapping[str, Any] | None = None,
            max_tokens: int | None = None,
        ) -> str:
            return self._answer(model, messages, schema, max_tokens)

        return ask

    def close(self) -> None:
        """Cancel the requests in progress and reject new ones."""
        with self._mutex:
            self._closed = True
            asked = list(self._asked)
        for one in asked:
            one.cancel()

    def _answer(
        self,
        model: ChatModel,
        messages: Sequence[Mapping[str, Any]],
        schema: Mapping[str, Any] | None,
        max_tokens: int | None,
    ) -> str:
        with self._mutex:
            if self._closed or self._loop is None:
                raise ModelClosing
            asked = asyncio.run_coroutine_threadsafe(
                _complete(model, messages, schema, max_tokens), self._loop
            )
            self._asked.add(asked)
        try:
            return asked.result()
        except concurrent.futures.CancelledError:
            raise ModelClosing from None
        finally:
            with self._mutex:
                self._asked.discard(asked)


async def _complete(
    model: ChatModel,
    messages: Sequence[Mapping[str, Any]],
    schema: Mapping[str, Any] | None,
    max_tokens: int | None,
) -> str:
    reply = StreamedAnswer()
    stream = model.stream(messages, schema=schema, max_tokens=max_tokens)
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            reply.add(delta)
    return reply.text
