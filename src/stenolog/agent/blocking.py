"""A model of the event loop, asked from a thread: summaries and notes are made in one."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from stenolog.providers.base import Ask, ChatModel, Reply


class Closing(BaseException):
    """The agent closes and no answer will come: no error of the model, which a summary survives."""


class Threadwise:
    """A model, and for who says so another one in their own thread."""

    def __init__(self, model: ChatModel) -> None:
        self._model = model
        self._own = threading.local()

    def __call__(self) -> ChatModel:
        """The model of this thread."""
        found: ChatModel = getattr(self._own, "model", self._model)
        return found

    @contextmanager
    def using(self, model: ChatModel) -> Iterator[None]:
        """Have this thread use another model for a while."""
        self._own.model = model
        try:
            yield
        finally:
            del self._own.model


class BlockingAsk:
    """An `Ask` by a ChatModel, whose event loop runs in another thread."""

    def __init__(self, model: Callable[[], ChatModel]) -> None:
        self._model = model
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mutex = threading.Lock()
        self._asked: set[concurrent.futures.Future[str]] = set()
        self._closed = False

    def bind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Say in which event loop the model lives."""
        self._loop = loop

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """The answer. Raises what the model raises, and Closing when it is cut off by `close`."""
        return self._answer(self._model(), messages, schema, max_tokens)

    def by(self, model: ChatModel) -> Ask:
        """The same by one model, closed with this one."""

        def ask(
            messages: Sequence[Mapping[str, Any]],
            *,
            schema: Mapping[str, Any] | None = None,
            max_tokens: int | None = None,
        ) -> str:
            return self._answer(model, messages, schema, max_tokens)

        return ask

    def close(self) -> None:
        """Cut off what is being asked, and answer nothing more."""
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
                raise Closing
            asked = asyncio.run_coroutine_threadsafe(
                _text(model, messages, schema, max_tokens), self._loop
            )
            self._asked.add(asked)
        try:
            return asked.result()
        except concurrent.futures.CancelledError:
            raise Closing from None
        finally:
            with self._mutex:
                self._asked.discard(asked)


async def _text(
    model: ChatModel,
    messages: Sequence[Mapping[str, Any]],
    schema: Mapping[str, Any] | None,
    max_tokens: int | None,
) -> str:
    reply = Reply()
    stream = model.stream(messages, schema=schema, max_tokens=max_tokens)
    async with aclosing(stream) as deltas:
        async for delta in deltas:
            reply.add(delta)
    return reply.text
