"""What a model must be: for a conversation it streams, for the work behind it it answers once.

The values here are those of every provider. A provider turns what its server says into deltas; a
`Reply` puts them together again, and can do so at any moment, so that what was said before a
cancellation is never lost.
"""

import inspect
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from stenolog.errors import UsageError

ROLE = "assistant"
_WORDS_OF_DETAILS = {"reasoning.text": "text", "reasoning.summary": "summary"}
"""By the type of a detail of thoughts: the field that comes in pieces."""


class Usage(Struct, frozen=True, kw_only=True):
    """What a provider counted for one request, in tokens."""

    prompt: int = 0
    """What was sent."""
    answer: int = 0
    """What was answered."""
    cached: int = 0
    """How much of what was sent the provider had seen before."""


class CallPart(Struct, frozen=True, kw_only=True):
    """A part of one tool call; parts with the same index belong together."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    """The next piece of its JSON."""
    extra: Mapping[str, Any] = {}
    """Further fields of the call, which some servers want back with it: Gemini signs its calls."""


class Delta(Struct, frozen=True, kw_only=True):
    """What came next of an answer; each field may be empty."""

    text: str = ""
    reasoning: str = ""
    details: tuple[Mapping[str, Any], ...] = ()
    """The next pieces of its thoughts as OpenRouter tells them, signed or sealed."""
    calls: tuple[CallPart, ...] = ()
    finish: str = ""
    """Why it ended, in the provider's word: `stop`, `length`, `tool_calls` …; once, at the end."""
    usage: Usage | None = None
    """At most once, where the provider tells; a count that cannot be true is 0 in it."""
    notice: str = ""
    """What a person should know of how the model is asked; no part of the answer."""


@runtime_checkable
class ChatModel(Protocol):
    """A model that holds a conversation.

    Who stops reading, or cancels the task that reads, ends the request. Raises ModelRefused where
    the request must change, and ModelUnavailable where trying later may help; what the server said
    stands in their text. It is used inside of one event loop at a time.
    """

    @property
    def name(self) -> str:
        """What to call it, in a status line, and to keep apart what was learnt of it."""
        ...

    def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """The answer to these messages, in OpenAI chat shape, as it comes.

        `tools`: as in OpenAI's `tools`. `schema`: a JSON schema that the answer should follow,
        where the model can be held to one. `max_tokens`: how long the answer may be.
        """
        ...

    async def close(self) -> None:
        """Let go of connections; a second call does nothing."""
        ...


@runtime_checkable
class KnowsItsContext(Protocol):
    """A model that says how much it takes, before it refuses more."""

    @property
    def context(self) -> int:
        """How many tokens it sees, its answer included."""
        ...


class Pieces:
    """A text that comes in pieces; they are joined when it is asked for, not at each of them."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        """Take in what came next."""
        if piece:
            self._pieces.append(piece)

    @property
    def text(self) -> str:
        """All of it."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""


class Reply:
    """An answer as far as it has come."""

    def __init__(self) -> None:
        self.finish = ""
        self.usage: Usage | None = None
        self._text = Pieces()
        self._reasoning = Pieces()
        self._details: list[dict[str, Any]] = []
        self._words = Pieces()
        """Those of the last detail."""
        self._calls: dict[int, CallPart] = {}
        self._arguments: dict[int, Pieces] = {}

    @property
    def text(self) -> str:
        """What it says."""
        return self._text.text

    @property
    def reasoning(self) -> str:
        """Its thoughts, where they are told as text."""
        return self._reasoning.text

    @property
    def details(self) -> list[dict[str, Any]]:
        """Its thoughts as OpenRouter tells them."""
        self._join_words()
        return self._details

    def add(self, delta: Delta) -> None:
        """Take in what came next."""
        self._text.add(delta.text)
        self._reasoning.add(delta.reasoning)
        self.finish = delta.finish or self.finish
        self.usage = delta.usage or self.usage
        for detail in delta.details:
            self._add_detail(detail)
        for part in delta.calls:
            known = self._calls.get(part.index, CallPart(index=part.index))
            self._calls[part.index] = CallPart(
                index=part.index,
                id=known.id or part.id,
                name=known.name or part.name,
                extra={**known.extra, **part.extra},
            )
            self._arguments.setdefault(part.index, Pieces()).add(part.arguments)

    def _add_detail(self, piece: Mapping[str, Any]) -> None:
        """Thoughts come word by word, and are taken back only as the one detail that they are."""
        last = self._details[-1] if self._details else {}
        name = _WORDS_OF_DETAILS.get(str(piece.get("type")))
        if name is None or any(last.get(one) != piece.get(one) for one in ("type", "index")):
            self._join_words()
            self._details.append(dict(piece))
            return
        self._words.add(str(piece.get(name) or ""))
        given = {field: value for field, value in piece.items() if value is not None}
        last.update({**given, name: last.get(name) or ""})

    def _join_words(self) -> None:
        """Put the words that came since into the last detail."""
        if self._words.text:
            last = self._details[-1]
            name = _WORDS_OF_DETAILS[str(last["type"])]
            last[name] = f"{last.get(name) or ''}{self._words.text}"
            self._words = Pieces()

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls, in OpenAI chat shape, in their order; those without a name are none.

        Each has an id of its own, which not every server gives.
        """
        made: dict[str, dict[str, Any]] = {}
        for _, part in sorted(self._calls.items()):
            if part.name:
                id = part.id if part.id and part.id not in made else f"call_{part.index}"
                arguments = self._arguments[part.index].text
                function = {"name": part.name, "arguments": arguments}
                made[id] = {**part.extra, "id": id, "type": "function", "function": function}
        return list(made.values())

    def message(self) -> dict[str, Any]:
        """It as a message in OpenAI chat shape, to be stored."""
        message: dict[str, Any] = {"role": ROLE, "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.details:
            message["reasoning_details"] = [dict(detail) for detail in self.details]
        if calls := self.calls:
            message["tool_calls"] = calls
        return message


@runtime_checkable
class Ask(Protocol):
    """A model that is asked once and answers in text; a plain function will do.

    It is synchronous: who has an async client runs it in a thread. Whatever its client raises is
    let through. It may be called from several threads at once.
    """

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        schema: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
    ) -> str:
        """The answer to these messages, in OpenAI chat shape.

        `schema`: a JSON schema that the answer should follow, where the model can be held to one;
        the caller checks the answer anyhow. `max_tokens`: how long the answer may be.
        """
        ...


# --- checks ---------------------------------------------------------------------------------------
# Checks of models that callers hand over: a wrong one is refused at once, with a clear error.
#
# Notes and summaries are made without a model that fails, so one that could never be called must
# not be mistaken for it. Models are called synchronously: an async function would return a
# coroutine that nobody awaits.


_T = TypeVar("_T")

ASKED_AS: Final = "ask is called as ask(messages, schema=…, max_tokens=…)"


def check_not_async(model: object, called: str) -> None:
    """Raise UsageError for an async function; `called` says how the model is called."""
    # For an object that can be called, its method may be the async one.
    for function in (model, getattr(model, "__call__", None)):  # noqa: B004 - not whether it has one
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise UsageError(f"{called} and not awaited; have it wait for the async client")


def check_answer(answer: _T, called: str) -> _T:
    """Return the answer of a model. Raises UsageError if it is to be awaited."""
    if inspect.isawaitable(answer) or inspect.isasyncgen(answer):
        if inspect.iscoroutine(answer):
            answer.close()
        raise UsageError(
            f"{called} and not awaited, but it returned a {type(answer).__name__}; "
            "have it wait for the async client"
        )
    return answer


def check_ask(ask: object) -> None:
    """Raise UsageError unless it can be called as `ask(messages, schema=…, max_tokens=…)`."""
    called = ASKED_AS
    if not callable(ask):
        raise UsageError(f"{called}; {type(ask).__name__} cannot be called")
    check_not_async(ask, called)
    try:
        inspect.signature(ask).bind([], schema=None, max_tokens=None)
    except ValueError:
        return  # it is not written in Python, and does not tell
    except TypeError as error:
        raise UsageError(f"{called}; add **how") from error
