"""Blocking calls to an async model, for the threads that write summaries and notes."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from stenolog.providers.chat_model import (
    ChatModel,
    CompletionFunction,
    CountedAnswer,
    StreamedAnswer,
)


class ModelClosing(BaseException):
    """The agent closes, so the model will not answer.

    ModelClosing is not a subclass of Exception, because the code that writes summaries catches
    every Exception of a model.
    """


class BlockingModel:
    """A blocking `CompletionFunction` for a ChatModel whose event loop runs in another thread."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._thread = threading.local()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mutex = threading.Lock()
        self._requests: set[concurrent.futures.Future[str]] = set()
        self._closed = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the event loop that runs the model."""
        self._loop = loop

    @contextmanager
    def using(self, model: ChatModel) -> Iterator[None]:
        """Use another model in the current thread, inside the `with` block."""
        self._thread.model = model
        try:
            yield
        finally:
            del self._thread.model

    def completion_with(self, model: ChatModel) -> CompletionFunction:
        """Return a `CompletionFunction` that always uses this model.

        `close` also cancels the calls of this function.
        """
        return partial(self, model=model)

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        model: ChatModel | None = None,
    ) -> str:
        """Return the model's answer. Raise the errors of the model, and ModelClosing after `close`.

        If `model` is None, use the model that `using` set in this thread, else the default model.
        """
        if model is None:
            model = getattr(self._thread, "model", self._model)
        with self._mutex:
            if self._closed or self._loop is None:
                raise ModelClosing
            coroutine = _complete_text(model, messages, schema, max_tokens)
            request = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._requests.add(request)
        try:
            return request.result()
        except concurrent.futures.CancelledError:
            raise ModelClosing from None
        finally:
            with self._mutex:
                self._requests.discard(request)

    def close(self) -> None:
        """Cancel the requests in progress and reject new requests."""
        with self._mutex:
            self._closed = True
            requests = list(self._requests)
        for request in requests:
            request.cancel()


async def _complete_text(
    model: ChatModel,
    messages: Sequence[Mapping[str, Any]],
    schema: Mapping[str, Any] | None,
    max_tokens: int | None,
) -> str:
    answer = StreamedAnswer()
    stream = model.stream(messages, schema=schema, max_tokens=max_tokens)
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            answer.add(delta)
    if answer.usage is None:
        return answer.text
    return CountedAnswer(answer.text, model=model.name, usage=answer.usage)
