"""A model of the event loop, asked from a thread: summaries and notes are made in one."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from stenolog.providers.base import ChatModel, Reply


class Closing(BaseException):
    """The agent closes and no answer will come: no error of the model, which a summary survives."""


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
        with self._mutex:
            if self._closed or self._loop is None:
                raise Closing
            asked = asyncio.run_coroutine_threadsafe(
                _text(self._model(), messages, schema, max_tokens), self._loop
            )
            self._asked.add(asked)
        try:
            return asked.result()
        except concurrent.futures.CancelledError:
            raise Closing from None
        finally:
            with self._mutex:
                self._asked.discard(asked)

    def close(self) -> None:
        """Cut off what is being asked, and answer nothing more."""
        with self._mutex:
            self._closed = True
            asked = list(self._asked)
        for one in asked:
            one.cancel()


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
