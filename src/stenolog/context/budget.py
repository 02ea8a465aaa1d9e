"""Limits for tokens and messages of a request, and the error for a limit that is too small."""

from msgspec import Struct

from stenolog.errors import ContextTooSmall, UsageError


class Limits(Struct, frozen=True, kw_only=True):
    """Limits of a request, and thresholds for summarizing. Raises UsageError."""

    max_context_tokens: int = 32_000
    """Maximum tokens of system prompt, tools, memory, history and answer together."""
    max_history_messages: int = 50
    """Number of messages above which the oldest are summarized, however short they are."""
    reserve: int | None = None
    """Tokens reserved for the answer. None: a quarter of the context, at most 4,096."""

    def __post_init__(self) -> None:
        for name in ("max_context_tokens", "max_history_messages", "reserve"):
            value = getattr(self, name)
            if name == "reserve" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name}={value!r}: a whole number of at least 1 is wanted")
        if self.answer >= self.max_context_tokens:
            raise UsageError(
                f"reserve={self.answer:,} leaves nothing of "
                f"max_context_tokens={self.max_context_tokens:,}; make it smaller"
            )

    @property
    def answer(self) -> int:
        """Tokens reserved for the answer."""
        if self.reserve is not None:
            return self.reserve
        return max(min(4_096, self.max_context_tokens // 4), 1)

    @property
    def room(self) -> int:
        """Tokens available for everything that is sent."""
        return self.max_context_tokens - self.answer

    def history(self, fixed: int) -> int:
        """Return the tokens for summary and history if everything else takes `fixed` tokens."""
        return max(self.room - fixed, 0)

    def summary(self, fixed: int = 0) -> int:
        """Return the maximum tokens of a summary, so that it never displaces the messages."""
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
    """Tokens of the rest of its turn after eliding everything that can be elided."""

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
    taken = ", ".join(f"{name} {tokens:,}" for name, tokens in named.items() if tokens)
    advice = f"or shorten {largest}"
    if limits.answer > parts.total:
        advice = f"or lower reserve, which keeps {limits.answer:,} free for the answer"
    return ContextTooSmall(
        f"max_context_tokens={limits.max_context_tokens:,} is too small: {taken}, "
        f"and {limits.answer:,} for the answer; {least}, {advice}",
        needed=needed,
        limit=limits.max_context_tokens,
    )
