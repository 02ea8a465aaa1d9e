"""Messages, tokens and costs by day, model and channel. Pure.

If a message has token counts of its provider, they are used. Otherwise the tokens of its text are
estimated and counted separately, because the number of times that a model read it is unknown.

Prices come from the installed package genai-prices; newer ones are not fetched. Each answer is
priced separately, because many models charge more per token for a long prompt.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Any

from msgspec import Struct

from stenolog.catalog.message_metadata import FIELD, model_of, usage_of
from stenolog.catalog.searchable_text import channel_of
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import forked_at
from stenolog.tokens import message_tokens

Price = Callable[[str, Mapping[str, int]], float | None]
"""Function that prices an answer in US dollars from its provider's token counts; None: unknown."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Sums over some messages."""

    messages: int = 0
    answers: int = 0
    """Number of answers with token counts of their provider."""
    prompt: int = 0
    """Tokens that models read, as counted by their providers. Includes `cached`."""
    answer: int = 0
    """Tokens that models wrote, as counted by their providers."""
    cached: int = 0
    estimated: int = 0
    """Estimated tokens of texts that no provider counted, each text once."""

    priced: int = 0
    """Number of answers that have a price."""
    dollars: float = 0.0
    """Sum of these prices, in US dollars."""

    @property
    def tokens(self) -> int:
        """Counted and estimated tokens."""
        return self.prompt + self.answer + self.estimated

    def add_answer(self, usage: Mapping[str, int], cost: float | None) -> None:
        """Count an answer by its provider's token counts."""
        self.answers += 1
        self.prompt += usage.get("prompt", 0)
        self.answer += usage.get("answer", 0)
        self.cached += usage.get("cached", 0)
        if cost is not None:
            self.priced += 1
            self.dollars += cost


@dataclass(slots=True, kw_only=True)
class Totals:
    """Running totals over all sessions added so far."""

    price: Price | None = None
    sessions: int = 0
    """Number of sessions with at least one message in the given time range."""
    total: Counts = field(default_factory=Counts)
    days: dict[date, Counts] = field(default_factory=dict)
    """By the day on which the message was stored, in UTC."""
    models: dict[str, Counts] = field(default_factory=dict)
    """By the model that answered; empty: unknown."""
    channels: dict[str, Counts] = field(default_factory=dict)
    """By the part of the key before the first colon; empty: the key has no colon."""

    def add(
        self,
        info: SessionInfo,
        messages: Iterable[Message],
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> None:
        """Add a session: all its messages by seq. Hidden ones count too, because they used tokens.

        Counts messages stored at `since` or later and before `until`.
        """
        channel = self.channels.setdefault(channel_of(info.key) or "", Counts())
        before = self.total.messages
        copied = forked_at(info)
        uncounted: list[tuple[Message, int]] = []
        for message in messages:
            if message.seq <= copied:
                continue  # copied from the session it was forked from, and counted there
            body = message.to_dict()
            in_range = (since is None or message.at >= since) and (
                until is None or message.at < until
            )
            is_answer = body.get("role") == "assistant"
            usage = usage_of(body) if is_answer else None
            name = model_of(body) or _foreign_model(body)
            # Only answers have a model; other messages count by day and channel.
            sums = [self.total, channel, self.days.setdefault(message.at.date(), Counts())]
            sums += [self.models.setdefault(name, Counts())] if is_answer and in_range else []
            if in_range:
                for counts in sums:
                    counts.messages += 1
            if usage is not None:
                uncounted.clear()  # included in the provider's prompt tokens
                if in_range:
                    cost = self.price(name, usage) if self.price is not None else None
                    for counts in sums:
                        counts.add_answer(usage, cost)
            elif is_answer:
                if in_range:
                    estimate = _tokens(body)
                    for counts in sums:
                        counts.estimated += estimate
                self._count_estimates(uncounted, channel)
            elif in_range:
                uncounted.append((message, _tokens(body)))
        self._count_estimates(uncounted, channel)
        self.sessions += self.total.messages > before
        self._drop_empty()

    def _count_estimates(self, uncounted: list[tuple[Message, int]], channel: Counts) -> None:
        """Count the estimated tokens of messages that no provider counted."""
        for message, tokens in uncounted:
            for counts in (self.total, channel, self.days[message.at.date()]):
                counts.estimated += tokens
        uncounted.clear()

    def _drop_empty(self) -> None:
        self.days = {day: counts for day, counts in self.days.items() if counts.messages}
        self.channels = {name: counts for name, counts in self.channels.items() if counts.messages}


def _tokens(body: Mapping[str, Any]) -> int:
    return message_tokens({name: value for name, value in body.items() if name != FIELD})


class Cost(Struct, frozen=True, kw_only=True):
    """Costs in US dollars."""

    total: float
    """Sum over the models that have a price."""
    models: Mapping[str, float]
    unknown: tuple[str, ...]
    """Models without a price."""


def prices() -> Price | None:
    """Return the function that prices an answer; None if genai-prices is not installed."""
    try:
        # Optional dependency, only needed for costs.
        import genai_prices  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None

    def price(model: str, usage: Mapping[str, int]) -> float | None:
        return _price(genai_prices, model, usage)

    return price


def cost_of(models: Mapping[str, Counts]) -> Cost:
    """Return the costs of counts by model."""
    answered = {name: counts for name, counts in models.items() if counts.answers}
    known = {name: counts.dollars for name, counts in answered.items() if counts.priced}
    return Cost(
        total=sum(known.values()),
        models=known,
        unknown=tuple(name for name in answered if name not in known),
    )


def _price(package: Any, name: str, counted: Mapping[str, int]) -> float | None:
    usage = package.Usage(
        input_tokens=counted.get("prompt", 0),
        output_tokens=counted.get("answer", 0),
        cache_read_tokens=counted.get("cached", 0),
    )
    provider, slash, rest = name.partition("/")
    attempts: list[tuple[str, str | None]] = [(rest, provider), (rest, None)] if slash else []
    for reference, provider_id in [*attempts, (name, None)]:
        try:
            found = package.calc_price(usage, model_ref=reference, provider_id=provider_id)
        except (LookupError, ValueError):
            continue
        return float(found.total_price)
    return None


def _foreign_model(body: Mapping[str, Any]) -> str:
    """Return the model that a message of another program names; empty if none."""
    name = body.get("model")
    return name if isinstance(name, str) else ""
