"""What a model must be: for a conversation it streams, for the work behind it it answers once.

The values here are those of every provider. A provider turns what its server says into deltas; a
`Reply` puts them together again, and can do so at any moment, so that what was said before a
cancellation is never lost.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

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


class Reply:
    """An answer as far as it has come."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.details: list[dict[str, Any]] = []
        self.finish = ""
        self.usage: Usage | None = None
        self._calls: dict[int, CallPart] = {}

    def add(self, delta: Delta) -> None:
        """Take in what came next."""
        self.text += delta.text
        self.reasoning += delta.reasoning
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
                arguments=known.arguments + part.arguments,
                extra={**known.extra, **part.extra},
            )

    def _add_detail(self, piece: Mapping[str, Any]) -> None:
        """Thoughts come word by word, and are taken back only as the one detail that they are."""
        last = self.details[-1] if self.details else {}
        name = _WORDS_OF_DETAILS.get(str(piece.get("type")))
        if name is None or any(last.get(one) != piece.get(one) for one in ("type", "index")):
            self.details.append(dict(piece))
            return
        said = f"{last.get(name) or ''}{piece.get(name) or ''}"
        given = {field: value for field, value in piece.items() if value is not None}
        self.details[-1] = {**last, **given, name: said}

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The tool calls, in OpenAI chat shape, in their order; those without a name are none.

        Each has an id of its own, which not every server gives.
        """
        made: dict[str, dict[str, Any]] = {}
        for _, part in sorted(self._calls.items()):
            if part.name:
                id = part.id if part.id and part.id not in made else f"call_{part.index}"
                function = {"name": part.name, "arguments": part.arguments}
                made[id] = {**part.extra, "id": id, "type": "function", "function": function}
        return list(made.values())

    def message(self) -> dict[str, Any]:
        """It as a message in OpenAI chat shape, to be stored."""
        message: dict[str, Any] = {"role": ROLE, "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.details:
            message["reasoning_details"] = list(self.details)
        if self.calls:
            message["tool_calls"] = self.calls
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
