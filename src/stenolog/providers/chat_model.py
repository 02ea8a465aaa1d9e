"""The protocols and values that all model clients share.

`ChatModel` streams the answers of a conversation; a `CompletionFunction` answers once, for work
such as summaries. A client converts its server's output into deltas. `StreamedAnswer` joins the
deltas and can be read at any moment, so text that arrived before a cancellation is not lost.
"""

import inspect
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Protocol, Self, TypeVar, runtime_checkable

from msgspec import Struct

from stenolog.errors import UsageError

_DETAIL_TEXT_FIELDS = {"reasoning.text": "text", "reasoning.summary": "summary"}
"""Name of the text field that is streamed in pieces, by type of the reasoning detail."""


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts that a provider reported for a request."""

    prompt: int = 0
    """Tokens of the request."""
    answer: int = 0
    """Tokens of the answer."""
    cached: int = 0
    """Tokens of the request that the provider had cached."""


class ToolCallDelta(Struct, frozen=True, kw_only=True):
    """A part of a tool call. Parts with the same index belong to the same call."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    """The next piece of the arguments, as JSON text."""
    extra: Mapping[str, Any] = {}
    """Other fields of the call that servers need back, such as Gemini's signatures."""


class Delta(Struct, frozen=True, kw_only=True):
    """The next piece of an answer. Each field may be empty."""

    text: str = ""
    reasoning: str = ""
    details: tuple[Mapping[str, Any], ...] = ()
    """The next pieces of reasoning in OpenRouter's format, which may be signed or encrypted."""
    calls: tuple[ToolCallDelta, ...] = ()
    finish: str = ""
    """Reason why the answer ended, such as `stop`, `length` or `tool_calls`; sent once."""
    usage: Usage | None = None
    """Token counts, if the provider reports them; sent once. An implausible count is 0."""
    notice: str = ""
    """A note for the user about how the model is called; not part of the answer."""


@runtime_checkable
class ChatModel(Protocol):
    """A model for conversations.

    Closing the iterator of `stream`, or cancelling the task that reads it, ends the request.
    `stream` raises ModelRefused if the request must change, and ModelUnavailable if a later attempt
    may succeed. Both errors contain the server's message. Only one event loop at a time may use a
    model.
    """

    @property
    def name(self) -> str:
        """Name for status lines, and the key under which data about the model is stored."""

    def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Stream the answer to messages in OpenAI's chat format.

        `tools`: definitions in OpenAI's `tools` format. `schema`: JSON schema for the answer, if
        the model supports one. `max_tokens`: maximum length of the answer.
        """

    async def close(self) -> None:
        """Close connections. A second call does nothing."""


@runtime_checkable
class HasContextWindow(Protocol):
    """A model that knows its context size."""

    @property
    def context(self) -> int:
        """Context size in tokens, including the answer."""


class TextBuffer:
    """A text that arrives in pieces. The pieces are joined when the text is read."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        """Append a piece."""
        if piece:
            self._pieces.append(piece)

    @property
    def text(self) -> str:
        """The complete text so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


class StreamedAnswer:
    """The part of an answer that has arrived so far."""

    def __init__(self) -> None:
        self.finish = ""
        self.usage: Usage | None = None
        self._text = TextBuffer()
        self._reasoning = TextBuffer()
        self.details: list[dict[str, Any]] = []
        """The reasoning in OpenRouter's format."""
        self._calls: dict[int, ToolCallDelta] = {}
        self._arguments: dict[int, TextBuffer] = {}

    @property
    def text(self) -> str:
        """The text of the answer."""
        return self._text.text

    @property
    def reasoning(self) -> str:
        """The reasoning, if the provider sends it as text."""
        return self._reasoning.text

    def add(self, delta: Delta) -> None:
        """Append a delta."""
        self._text.add(delta.text)
        self._reasoning.add(delta.reasoning)
        self.finish = delta.finish or self.finish
        self.usage = delta.usage or self.usage
        for detail in delta.details:
            self._add_detail(detail)
        for part in delta.calls:
            call = self._calls.get(part.index, ToolCallDelta(index=part.index))
            self._calls[part.index] = ToolCallDelta(
                index=part.index,
                id=call.id or part.id,
                name=call.name or part.name,
                extra={**call.extra, **part.extra},
            )
            self._arguments.setdefault(part.index, TextBuffer()).add(part.arguments)

    def _add_detail(self, piece: Mapping[str, Any]) -> None:
        """Add a piece to its reasoning detail, because providers accept only whole details."""
        last_detail = self.details[-1] if self.details else {}
        text_field = _DETAIL_TEXT_FIELDS.get(str(piece.get("type")))
        if text_field is None or any(
            last_detail.get(field) != piece.get(field) for field in ("type", "index")
        ):
            self.details.append(dict(piece))
            return
        text = f"{last_detail.get(text_field) or ''}{piece.get(text_field) or ''}"
        fields = {field: value for field, value in piece.items() if value is not None}
        last_detail.update({**fields, text_field: text})

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls in OpenAI's chat format, in order. Calls without a name are left out.

        Each call has a unique id, even if the server sent no id.
        """
        calls: dict[str, dict[str, Any]] = {}
        for _, call in sorted(self._calls.items()):
            if call.name:
                id = call.id or f"call_{call.index}"
                while id in calls:
                    id = f"{id}_{call.index}"
                function = {"name": call.name, "arguments": self._arguments[call.index].text}
                calls[id] = {**call.extra, "id": id, "type": "function", "function": function}
        return list(calls.values())

    def message(self) -> dict[str, Any]:
        """Return the answer as a message in OpenAI's chat format, ready to be stored."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.details:
            message["reasoning_details"] = [dict(detail) for detail in self.details]
        if calls := self.calls:
            message["tool_calls"] = calls
        return message


class CountedAnswer(str):
    """Text of an answer with the provider's token counts.

    The tokens of a `CompletionFunction` are counted only if it returns a CountedAnswer.
    """

    model: str
    usage: Usage

    def __new__(cls, text: str, *, model: str, usage: Usage) -> Self:
        """Create the text with its token counts."""
        answer = super().__new__(cls, text)
        answer.model = model
        answer.usage = usage
        return answer


class CompletionFunction(Protocol):
    """A model that is called once and returns text, for example a plain function.

    The function is synchronous, so an async client must run in a thread. The function may raise
    its client's errors. Several threads may call the function at once.
    """

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """Return the answer to messages in OpenAI's chat format.

        `schema`: JSON schema for the answer, if the model supports one; the caller checks the
        answer in any case. `max_tokens`: maximum length of the answer.
        """


# --- checks ---------------------------------------------------------------------------------------
# An unusable model that a caller passes in is rejected early, with a clear error.
# If a model fails, notes and summaries are written without the model.
# A model that can never be called must therefore not look like a model that failed.
# Models are called synchronously: an async function would return a coroutine that is never awaited.


_T = TypeVar("_T")

COMPLETION_SIGNATURE: Final = "complete is called as complete(messages, schema=…, max_tokens=…)"


def check_not_async(model: object, signature: str) -> None:
    """Raise UsageError for an async function. `signature` describes how the model is called."""
    # A callable object may have an async `__call__`.
    for function in (model, getattr(model, "__call__", None)):  # noqa: B004 - not an existence check
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(
                f"{signature} without await; pass a function that waits for the async client"
            )


def check_answer(answer: _T, signature: str) -> _T:
    """Return a model's answer unchanged. Raises UsageError if the model turns out to be async."""
    if inspect.isawaitable(answer) or inspect.isasyncgen(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise UsageError(
            f"{signature} without await, but it returned a {type(answer).__name__}; "
            "pass a function that waits for the async client"
        )
    return answer


def check_completion_function(complete: object) -> None:
    """Raise UsageError unless `complete` can be called like a CompletionFunction."""
    signature = COMPLETION_SIGNATURE
    if not callable(complete):
        raise UsageError(f"{signature}; {type(complete).__name__} is not callable")
    check_not_async(complete, signature)
    try:
        inspect.signature(complete).bind([], schema=None, max_tokens=None)
    except ValueError:
        return  # a built-in without a signature
    except TypeError as error:
        raise UsageError(f"{signature}; accept these arguments, or add **options") from error
