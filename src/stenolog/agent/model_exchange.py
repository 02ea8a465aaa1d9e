"""The exchanges of a turn with the model: a request, and the message that the model streams."""

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from msgspec import Struct, field
from msgspec.structs import asdict

from stenolog.agent.instance import AgentInstance
from stenolog.agent.threads import Threads
from stenolog.agent.turn_events import (
    EventHandler,
    ModelCalled,
    Notice,
    TextDelta,
    ThinkingDelta,
    TurnOptions,
    UsageReported,
)
from stenolog.catalog.message_metadata import mark_model
from stenolog.context.context import Attempt
from stenolog.errors import ModelRefused, ModelUnavailable
from stenolog.providers.chat_model import ChatModel, StreamedAnswer


class ModelRequest(NamedTuple):
    """A request to the model."""

    model: ChatModel
    attempt: Attempt
    recalled_count: int
    """Number of recalled notes and messages."""
    answers: tuple[int, ...]
    """Seqs of the messages that the model is to answer."""


class ModelExchange(Struct, eq=False):
    """The newest exchange of a turn with the model."""

    instance: AgentInstance
    threads: Threads
    on_event: EventHandler
    options: TurnOptions
    streamed: StreamedAnswer = field(default_factory=StreamedAnswer)
    """The message of the model, as far as it has arrived."""
    seen_upto: int = 0
    """Seq of the last message that the model received; 0 before the first request."""
    answers: tuple[int, ...] = ()
    """Seqs of the messages that the model had to answer."""
    model_name: str = ""
    seconds: float = 0.0
    """Duration of the model's answer."""
    unstored_usage: tuple[Attempt, int | None] | None = None
    """Last answered request and the provider's count of its tokens, until they are stored."""

    async def ask(self, request: ModelRequest) -> StreamedAnswer:
        """Send a request to the model and return its message. Raises the errors of the model."""
        model, attempt = request.model, request.attempt
        while True:
            window = attempt.window
            hit_count = 0 if window.memory_left_out else request.recalled_count
            self.on_event(
                ModelCalled(
                    model=model.name, tokens=window.tokens, budget=window.budget, recalled=hit_count
                )
            )
            self.seen_upto, self.answers = window.upto, request.answers
            start_time = time.monotonic()
            try:
                await self._stream(model, window.messages)
            except (ModelUnavailable, ModelRefused) as error:
                if self.streamed.text or not await self.threads.run_model(attempt.shorten, error):
                    raise
            else:
                break
        self.model_name, self.seconds = model.name, time.monotonic() - start_time
        usage = self.streamed.usage
        if usage is not None:
            self.on_event(UsageReported(usage=usage))
        self.unstored_usage = (attempt, None if usage is None else usage.prompt)
        return self.streamed

    async def _stream(self, model: ChatModel, messages: Sequence[Mapping[str, Any]]) -> None:
        self.streamed = StreamedAnswer()
        stream = model.stream(
            messages,
            tools=self.instance.offered_tools(self.options),
            schema=self.options.schema,
            max_tokens=self.options.max_tokens,
        )
        async with aclosing(stream) as deltas:
            async for delta in deltas:
                self.streamed.add(delta)
                if delta.notice:
                    self.on_event(Notice(text=delta.notice))
                if delta.reasoning:
                    self.on_event(ThinkingDelta(text=delta.reasoning))
                if delta.text:
                    self.on_event(TextDelta(text=delta.text))

    def make_body(self) -> dict[str, Any]:
        """Return the model's message with its model, duration and token counts."""
        usage = None if self.streamed.usage is None else asdict(self.streamed.usage)
        return mark_model(
            self.streamed.message(), model=self.model_name, seconds=self.seconds, usage=usage
        )

    def store_usage(self) -> None:
        """Store the provider's token count of the last request. Blocks; raises nothing."""
        if self.unstored_usage is not None:
            (attempt, prompt_tokens), self.unstored_usage = self.unstored_usage, None
            attempt.record_answer(lambda: prompt_tokens)
