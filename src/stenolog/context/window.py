"""The messages to send to the model: always valid, always within the budget."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from stenolog.context.request_messages import (
    FIRST_USER_CONTENT,
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
        """Return the maximum tokens of a summary. A longer summary could displace messages."""
        return max(self.history(fixed) // 8, self.room // 32)

    def enough_for(self, sent: int) -> int:
        """Return the smallest max_context_tokens with which `sent` tokens can be sent."""
        if self.reserve is not None:
            return sent + self.reserve
        # The answer gets a quarter of the context, which is a third of the tokens that are sent.
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


SUMMARY_BEGINS: Final = "[Summary of the earlier conversation]"
SUMMARY_ENDS: Final = "[End of the summary]"
# A marker is changed, not removed: the text around a removed marker could form a new marker.
_SUMMARY_MARKER: Final = re.compile(r"\[(?=\s*(?:summary of|end of the)\b)", re.IGNORECASE)

_MAX_ATTEMPTS: Final = 4

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
    summary_cut: bool = False
    """Whether the summary was cut or left out."""
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

    Raises ContextTooSmall if even the minimum does not fit: the system prompt, the tools, the
    newest user message, and the parts of its turn that cannot be elided.
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
    return request.build_window(history)


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

    def build_window(self, history: _Messages) -> Window:
        entries = to_request_messages(history, self.needs)
        tools_tokens = self.tokens.tools(self.tools)
        budget = self.limits.room - tools_tokens
        for summary, memory in self._head_choices():
            # Joined texts may take more tokens than separate texts: retry with fewer messages.
            slack = 0
            for _ in range(_MAX_ATTEMPTS):
                attempt = self._try_selection(entries, summary, memory, budget - slack)
                if attempt is None:
                    break
                messages, chosen, cost = attempt
                if cost <= budget:
                    return Window(
                        messages=messages,
                        tokens=cost + tools_tokens,
                        budget=self.limits.room,
                        elided=chosen.elided,
                        left_out=chosen.left_out,
                        memory_left_out=bool(self.memory) and not memory,
                        summary_cut=summary != self.summary,
                        upto=max([seq_of(message) or 0 for message in history], default=0),
                    )
                slack += cost - budget
        raise self._too_small_error(entries, tools_tokens)

    def _head_choices(self) -> list[tuple[str, str]]:
        """Return the combinations of summary and memory to try, best first.

        Memory and summary are left out before any message is left out.
        """
        limit = self.limits.summary()
        summary = self.summary
        if self.tokens.text(summary) > limit:
            summary = cut_middle(summary, limit, self.tokens, mark="[… cut]")
        short = cut_middle(summary, limit // 4, self.tokens, mark="[… cut]") if summary else ""
        choices = [(summary, self.memory), (summary, ""), (short, ""), ("", "")]
        return list(dict.fromkeys(choices))

    def _try_selection(
        self, entries: Sequence[RequestMessage], summary: str, memory: str, budget: int
    ) -> tuple[list[Body], _Selection, int] | None:
        """Return the messages, the chosen part of the history, and the tokens of the messages."""
        head = self._system_messages(summary, memory, left_out=0)
        messages = finish_messages([*head, *(entry.body for entry in entries)], self.needs)
        cost = self._cost(messages)
        if cost <= budget:
            return messages, _Selection(entries=list(entries)), cost
        # The note about left-out messages is measured with the largest possible number.
        largest_head = self._system_messages(summary, memory, left_out=len(entries))
        if self.needs.user_first:
            largest_head.append({"role": "user", "content": FIRST_USER_CONTENT})
        chosen = self._choose_turns(entries, budget - self._cost(largest_head))
        if chosen is None:
            return None
        head = self._system_messages(summary, memory, left_out=chosen.left_out)
        messages = finish_messages([*head, *(entry.body for entry in chosen.entries)], self.needs)
        return messages, chosen, self._cost(messages)

    def _choose_turns(self, entries: Sequence[RequestMessage], budget: int) -> _Selection | None:
        """Return the newest turns that fit; a newest turn that does not fit is shortened."""
        if not entries:
            return _Selection(entries=[]) if budget >= 0 else None
        turns: dict[int, list[RequestMessage]] = {}
        for entry in entries:
            turns.setdefault(entry.turn, []).append(entry)
        older = list(turns.values())
        newest_turn = older.pop()
        tokens_left = budget - self._cost(entry.body for entry in newest_turn)
        if tokens_left < 0:
            shortened = shorten_turn(newest_turn, budget, self.tokens)
            if shortened is None:
                return None
            dropped = sum(map(len, older)) + len(shortened.left_out)
            return _Selection(entries=shortened.entries, elided=shortened.elided, left_out=dropped)
        chosen_turns = [newest_turn]
        while older and (cost := self._cost(entry.body for entry in older[-1])) <= tokens_left:
            tokens_left -= cost
            chosen_turns.insert(0, older.pop())
        entries_kept = [entry for turn in chosen_turns for entry in turn]
        return _Selection(entries=entries_kept, left_out=sum(map(len, older)))

    def _cost(self, bodies: Iterable[Body]) -> int:
        return sum(map(self.tokens.message, bodies))

    def _system_messages(self, summary: str, memory: str, *, left_out: int) -> list[Body]:
        """Return a list with the system message; empty if the message has no text."""
        texts = [self.system]
        if summary:
            # A message quoted in the summary must not be able to end or start a summary.
            escaped_summary = _SUMMARY_MARKER.sub("(", summary)
            texts.append(f"{SUMMARY_BEGINS}\n{escaped_summary}\n{SUMMARY_ENDS}")
        if left_out:
            texts.append(f"[{left_out:,} earlier messages are left out here; the log has them]")
        texts.append(memory)
        content = "\n\n".join(text for text in texts if text.strip())
        return [{"role": "system", "content": content}] if content else []

    def _too_small_error(self, entries: Sequence[RequestMessage], tools: int) -> ContextTooSmall:
        """Return an error that lists the required tokens and says which setting to change."""
        newest_turn = [entry for entry in entries if entry.turn == entries[-1].turn]
        message_tokens, rest_tokens = minimum_tokens(newest_turn, self.tokens)
        if self.needs.user_first:
            rest_tokens += self._cost([{"role": "user", "content": FIRST_USER_CONTENT}])
        required = {
            "the system prompt": self._cost(self._system_messages("", "", left_out=len(entries))),
            "the tools": tools,
            "the newest user message": message_tokens,
            "the rest of its turn": rest_tokens,
        }
        limits, total = self.limits, sum(required.values())
        needed = limits.enough_for(total)
        details = ", ".join(f"{name} {tokens:,}" for name, tokens in required.items() if tokens)
        advice = f"or shorten {max(required, key=lambda name: required[name])}"
        if limits.answer > total:
            advice = f"or lower reserve, which keeps {limits.answer:,} free for the answer"
        return ContextTooSmall(
            f"max_context_tokens={limits.max_context_tokens:,} is too small: {details}, "
            f"and {limits.answer:,} for the answer; raise max_context_tokens to at least "
            f"{needed:,}, {advice}",
            needed=needed,
            limit=limits.max_context_tokens,
        )
