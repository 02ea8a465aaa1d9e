"""The messages to send to the model: always valid, always within the budget."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.context.request_messages import (
    CONTINUATION,
    ProviderRequirements,
    RequestMessage,
    finish_messages,
    to_request_messages,
)
from stenolog.context.shortening import cut_middle, minimum_tokens, shorten_turn
from stenolog.errors import ContextTooSmall, UsageError
from stenolog.messages import Body, seq_of
from stenolog.records import Message
from stenolog.tokens import Tokens


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a request, and thresholds for summarizing. Raises UsageError."""

    max_context_tokens: int = 32_000
    """Maximum tokens of system prompt, tools, memory, history and answer together."""
    max_history_messages: int = 50
    """Number of messages above which the oldest are summarized, however short they are."""
    reserve: int | None = None
    """Tokens reserved for the answer. None means a quarter of the context, at most 4,096."""

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "max_history_messages", "reserve"):
            value = getattr(self, name)
            if name == "reserve" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
        if self.answer >= self.max_context_tokens:
            raise UsageError(
                f"reserve must be less than max_context_tokens ({self.max_context_tokens:,}), "
                f"not {self.answer:,}"
            )

    @property
    def answer(self) -> int:
        """Tokens reserved for the answer."""
        if self.reserve is not None:
            return self.reserve
        return max(min(4_096, self.max_context_tokens // 4), 1)

    @property
    def room(self) -> int:
        """Tokens available for the whole request."""
        return self.max_context_tokens - self.answer

    def history(self, fixed: int) -> int:
        """Return the tokens left for summary and history if the other parts take `fixed` tokens."""
        return max(self.room - fixed, 0)

    def summary(self, fixed: int = 0) -> int:
        """Return the maximum tokens of a summary, so that a summary never displaces messages."""
        return max(self.history(fixed) // 8, self.room // 32)

    def enough_for(self, sent: int) -> int:
        """Return the smallest max_context_tokens with which `sent` tokens can be sent."""
        if self.reserve is not None:
            return sent + self.reserve
        # A quarter of the total is a third of the remaining tokens.
        return sent + max(min(4_096, -(-sent // 3)), 1)

    def at_most(self, max_context_tokens: int) -> "Limits":
        """Return these limits, reduced for a model with a smaller context."""
        if max_context_tokens >= self.max_context_tokens:
            return self
        smaller = max(max_context_tokens, 2)
        reserve = None if self.reserve is None else min(self.reserve, max(smaller // 4, 1))
        return Limits(
            max_context_tokens=smaller,
            max_history_messages=self.max_history_messages,
            reserve=reserve,
        )


class RequiredTokens(Struct, frozen=True, kw_only=True):
    """Tokens of the parts that every request must contain."""

    system: int
    tools: int
    newest: int
    """Tokens of the newest user message."""
    skeleton: int
    """Minimum tokens of the rest of the newest turn, after all possible elisions."""

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.system + self.tools + self.newest + self.skeleton


def context_too_small(parts: RequiredTokens, limits: Limits) -> ContextTooSmall:
    """Return an error that says which setting to change."""
    needed = limits.enough_for(parts.total)
    least = f"raise max_context_tokens to at least {needed:,}"
    named = {
        "the system prompt": parts.system,
        "the tools": parts.tools,
        "the newest user message": parts.newest,
        "the rest of its turn": parts.skeleton,
    }
    largest = max(named, key=lambda name: named[name])
    listed = ", ".join(f"{name} {tokens:,}" for name, tokens in named.items() if tokens)
    advice = f"or shorten {largest}"
    if limits.answer > parts.total:
        advice = f"or lower reserve, which keeps {limits.answer:,} free for the answer"
    return ContextTooSmall(
        f"max_context_tokens={limits.max_context_tokens:,} is too small: {listed}, "
        f"and {limits.answer:,} for the answer; {least}, {advice}",
        needed=needed,
        limit=limits.max_context_tokens,
    )


SUMMARY_BEGINS: Final = "[Summary of the earlier conversation]"
SUMMARY_ENDS: Final = "[End of the summary]"
# A marker is changed, not removed: removing a marker could join the text around it into a new
# marker.
_SUMMARY_MARKER: Final = re.compile(r"\[(?=\s*(?:summary of|end of the)\b)", re.IGNORECASE)

_TRIES: Final = 4

_Messages = Sequence[Message | Mapping[str, Any]]


class Window(Struct, frozen=True, kw_only=True):
    """The messages to send, and how much was shortened or left out to make them fit."""

    messages: list[Body]
    """Messages in OpenAI's chat format, the system prompt first."""
    tokens: int
    """Estimated tokens of the messages and the tools."""
    budget: int
    """Maximum tokens of the messages and the tools."""
    elided: int = 0
    """Number of shortened messages of the newest turn."""
    left_out: int = 0
    """Number of history messages that are not included."""
    memory_left_out: bool = False
    """Whether the recalled memory did not fit."""
    upto: int = 0
    """Seq of the newest stored message that was considered."""


def build_window(
    history: _Messages,
    summary: str = "",
    *,
    system: str = "",
    tools: Sequence[Mapping[str, Any]] = (),
    memory: str = "",
    limits: Limits | None = None,
    needs: ProviderRequirements | None = None,
    tokens: Tokens | None = None,
) -> Window:
    """Return the window for this history: its newest turn, and as many older turns as fit.

    Raises ContextTooSmall if the system prompt, the tools, the newest user message and the parts of
    its turn that cannot be elided do not fit.
    """
    request = _Request(
        system=system,
        summary=summary,
        memory=memory,
        tools=tools,
        limits=limits or Limits(),
        needs=needs or ProviderRequirements(),
        tokens=tokens or Tokens(),
    )
    return request.window(history)


class _Selection(Struct, frozen=True, kw_only=True):
    entries: list[RequestMessage]
    elided: int = 0
    left_out: int = 0


class _Request(Struct, frozen=True, kw_only=True):
    system: str
    summary: str
    memory: str
    tools: Sequence[Mapping[str, Any]]
    limits: Limits
    needs: ProviderRequirements
    tokens: Tokens

    def window(self, history: _Messages) -> Window:
        entries = to_request_messages(history, self.needs)
        tools = self.tokens.tools(self.tools)
        budget = self.limits.room - tools
        for summary, memory in self._headings():
            # Joined texts may take more tokens than separate texts; then try again with fewer
            # messages.
            slack = 0
            for _ in range(_TRIES):
                attempt = self._try(entries, summary, memory, budget - slack)
                if attempt is None:
                    break
                messages, chosen = attempt
                cost = sum(self.tokens.message(message) for message in messages)
                if cost <= budget:
                    return Window(
                        messages=messages,
                        tokens=cost + tools,
                        budget=self.limits.room,
                        elided=chosen.elided,
                        left_out=chosen.left_out,
                        memory_left_out=bool(self.memory) and not memory,
                        upto=max((seq_of(message) or 0 for message in history), default=0),
                    )
                slack += cost - budget
        raise context_too_small(self._parts(entries, tools), self.limits)

    def _headings(self) -> list[tuple[str, str]]:
        """Return the combinations of summary and memory to try, best first.

        Summary and memory are left out before messages are.
        """
        limit = self.limits.summary()
        summary = self.summary
        if self.tokens.text(summary) > limit:
            summary = cut_middle(summary, limit, self.tokens, mark="[… cut]")
        short = cut_middle(summary, limit // 4, self.tokens, mark="[… cut]") if summary else ""
        attempts = [(summary, self.memory), (summary, ""), (short, ""), ("", "")]
        return list(dict.fromkeys(attempts))

    def _try(
        self, entries: Sequence[RequestMessage], summary: str, memory: str, budget: int
    ) -> tuple[list[Body], _Selection] | None:
        head = self._head(summary, memory, left_out=0)
        opened = finish_messages([entry.body for entry in entries], self.needs)
        if self._cost([*head, *opened], ()) <= budget:
            chosen = _Selection(entries=list(entries))
        else:
            # The note about left-out messages is measured with the largest possible number.
            noted = self._head(summary, memory, left_out=len(entries))
            if self.needs.user_first:
                noted.append({"role": "user", "content": CONTINUATION})
            selection = self._choose(entries, budget - self._cost(noted, ()))
            if selection is None:
                return None
            chosen = selection
            head = self._head(summary, memory, left_out=chosen.left_out)
        return finish_messages(
            [*head, *(entry.body for entry in chosen.entries)], self.needs
        ), chosen

    def _choose(self, entries: Sequence[RequestMessage], budget: int) -> _Selection | None:
        """Return the newest turns that fit; a newest turn that does not fit is shortened."""
        if not entries:
            return _Selection(entries=[]) if budget >= 0 else None
        turns: dict[int, list[RequestMessage]] = {}
        for entry in entries:
            turns.setdefault(entry.turn, []).append(entry)
        older = list(turns.values())
        newest = older.pop()
        remaining = budget - self._cost((), newest)
        if remaining < 0:
            short = shorten_turn(newest, budget, self.tokens)
            if short is None:
                return None
            dropped = sum(map(len, older)) + len(short.left_out)
            return _Selection(entries=short.entries, elided=short.elided, left_out=dropped)
        chosen = [newest]
        while older and (cost := self._cost((), older[-1])) <= remaining:
            remaining -= cost
            chosen.insert(0, older.pop())
        entries_kept = [entry for turn in chosen for entry in turn]
        return _Selection(entries=entries_kept, left_out=sum(map(len, older)))

    def _cost(self, head: Sequence[Body], entries: Sequence[RequestMessage]) -> int:
        bodies = [*head, *(entry.body for entry in entries)]
        return sum(self.tokens.message(body) for body in bodies)

    def _head(self, summary: str, memory: str, *, left_out: int) -> list[Body]:
        """Return a list with the system message; empty if the message has no text."""
        texts = [self.system]
        if summary:
            # A summary quotes messages. A quoted message must not be able to end the summary or
            # start another.
            escaped = _SUMMARY_MARKER.sub("(", summary)
            texts.append(f"{SUMMARY_BEGINS}\n{escaped}\n{SUMMARY_ENDS}")
        if left_out:
            texts.append(f"[{left_out:,} earlier messages are left out here; the log has them]")
        texts.append(memory)
        content = "\n\n".join(text for text in texts if text.strip())
        return [{"role": "system", "content": content}] if content else []

    def _parts(self, entries: Sequence[RequestMessage], tools: int) -> RequiredTokens:
        last = [entry for entry in entries if entry.turn == entries[-1].turn]
        newest, rest = minimum_tokens(last, self.tokens)
        if self.needs.user_first:
            rest += self._cost([{"role": "user", "content": CONTINUATION}], ())
        note = len(entries) if entries else 0
        system = self._cost(self._head("", "", left_out=note), ())
        return RequiredTokens(system=system, tools=tools, newest=newest, skeleton=rest)
