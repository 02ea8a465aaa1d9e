"""The exchanges of a turn with the model: memories, a request, and the message that is streamed."""

import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, NamedTuple

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
from stenolog.agent.turn_log import TurnLog, state_of
from stenolog.catalog.message_metadata import mark_model
from stenolog.context.context import Attempt
from stenolog.context.turn_state import TurnState
from stenolog.errors import ModelRefused, ModelUnavailable, StenologError
from stenolog.memory.recall import RecallResult
from stenolog.messages import text_parts_of
from stenolog.providers.chat_model import ChatModel, StreamedAnswer
from stenolog.stores.base import SessionView

_MAX_SEARCHED_MESSAGES: Final = 50
"""Number of newest messages that are searched for the user's newest text."""


class ModelRequest(NamedTuple):
    """A request to the model."""

    model: ChatModel
    attempt: Attempt
    view: SessionView
    """The view that the request was built from."""
    recalled_count: int
    """Number of recalled notes and messages."""
    answers: tuple[int, ...]
    """Seqs of the messages that the model is to answer."""


class ModelExchange(Struct, eq=False):
    """The newest exchange of a turn with the model."""

    instance: AgentInstance
    threads: Threads
    log: TurnLog
    on_event: EventHandler
    options: TurnOptions
    recalled_text: str = ""
    """User text for which the memory was searched."""
    recalled: RecallResult = RecallResult()
    sources: dict[str, tuple[str, int] | None] = {}
    """Sessions that contain the recalled messages, as returned by `_find_sources`."""
    last_request: ModelRequest | None = None
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

    # --- prepare (in a thread) ---------------------------------------------------------------

    def build_request(self, view: SessionView, state: TurnState) -> ModelRequest:
        """Build the request for this view. Raises HistoryChanged and the errors of Context."""
        if self._search_memory(view):
            view, state = self.log.read_questions()  # it may have changed during the search
        if self.options.model:  # the client names a model
            model = self.instance.model_for(self.options.model)
        else:
            model = self.instance.chosen_model(view.info.meta, self._emit_notice_from_thread)
        context, memory = self.instance.context(model, self.options), self.recalled
        attempt = context.start_request(self.log.key, memory=memory.block, view=view)
        self.last_request = ModelRequest(model, attempt, view, len(memory.found), state.questions)
        return self.last_request

    def _search_memory(self, view: SessionView) -> bool:
        """Update `recalled` if the user's text changed, or a session with recalled messages.

        So no request contains a message that was deleted before the request was built. Returns
        whether the memory was searched.
        """
        bodies = (m.to_dict() for m in reversed(view.messages[-_MAX_SEARCHED_MESSAGES:]))
        texts = (text_parts_of(body).strip() for body in bodies if body.get("role") == "user")
        text = next(filter(None, texts), self.recalled_text)
        if text == self.recalled_text and self.sources == self._find_sources(self.recalled):
            return False
        result = self.instance.recall(
            text, self.log.key, sender=self.options.sender, info=view.info
        )
        sources = self._find_sources(result)
        if None in sources.values():
            # A session was deleted during the search, so the next request searches again.
            text, result, sources = "", RecallResult(), {}
        self.recalled_text, self.recalled, self.sources = text, result, sources
        return self.instance.memory is not None

    def _find_sources(self, result: RecallResult) -> dict[str, tuple[str, int] | None]:
        """Return uid and generation of each session that contains recalled messages, by key.

        The generation increases when messages are purged. The value is None for a session that is
        gone or unreadable.
        """
        sources: dict[str, tuple[str, int] | None] = {}
        for hit in result.found:
            key = hit.source.rpartition(":")[0]
            if hit.kind == "message" and key not in sources:
                sources[key] = None
                with suppress(StenologError):
                    info = self.instance.store.info(key)
                    sources[key] = info.uid, info.generation
        return sources

    def _emit_notice_from_thread(self, text: str) -> None:
        self.threads.event_loop.call_soon_threadsafe(self.on_event, Notice(text=text))

    def store_usage(self) -> None:
        """Store the provider's token count of the last request. Blocks; raises nothing."""
        if self.unstored_usage is not None:
            (attempt, prompt_tokens), self.unstored_usage = self.unstored_usage, None
            attempt.record_answer(lambda: prompt_tokens)

    # --- ask ---------------------------------------------------------------------------------

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
            if attempt.view is not None and attempt.view is not request.view:
                # A summary has read the session again, with new messages.
                self.answers = state_of(attempt.view).questions  # guard: answers-of-the-window
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
