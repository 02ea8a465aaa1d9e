"""Sums of messages, tokens and costs by day, model, channel, session and project. No I/O.

If a message has token counts of the provider, these counts are used. The tokens of other messages
are estimated and counted separately, because it is unknown how often a model read a message.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import date, datetime
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from stenolog.catalog.answer_prices import Price, load_prices
from stenolog.catalog.message_metadata import FIELD, PROGRAM_FIELDS, model_of, response_of, usage_of
from stenolog.catalog.searchable_text import channel_of, project_from
from stenolog.providers.chat_model import CountedAnswer
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import fork_seq_of
from stenolog.tokens import message_tokens

__all__ = ["Cost", "Counts", "Price", "Totals", "cost_of", "load_prices"]


@dataclass(slots=True, kw_only=True)
class Counts:
    """Numbers of messages, answers and tokens of a group of messages, and their costs."""

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
    """Sum of the known prices, in US dollars."""

    @property
    def tokens(self) -> int:
        """Counted and estimated tokens."""
        return self.prompt + self.answer + self.estimated

    def add(self, added: "Counts") -> None:
        """Add the sums in `added`."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(added, count.name))

    def add_answer(self, usage: Mapping[str, int], cost: float | None) -> None:
        """Add an answer with the token counts of its provider, and its cost if known."""
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
    """Counts by the day on which the message was stored, in UTC."""
    models: dict[str, Counts] = field(default_factory=dict)
    """Counts by the model that answered; an empty name means an unknown model."""
    channels: dict[str, Counts] = field(default_factory=dict)
    """Counts by the part of the key before the first colon; empty for a key without a colon."""
    side: dict[str, Counts] = field(default_factory=dict)
    """Calls that made notes and summaries, by model; not included in `days` and `projects`."""
    by_session: dict[str, Counts] = field(default_factory=dict)
    projects: dict[str, Counts] = field(default_factory=dict)
    """Counts by the working directory of the session; empty for an unknown directory."""

    def add(
        self,
        info: SessionInfo,
        messages: Iterable[Message],
        *,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> None:
        """Add a session with all its messages, hidden messages included.

        Counts messages stored at `since` or later and before `until`.
        """
        groups = (
            (self.channels, channel_of(info.key) or ""),
            (self.by_session, info.key),
            (self.projects, project_from(info.meta)),
        )
        session_sums = [self.total, *(group.get(name, Counts()) for group, name in groups)]
        messages_before = self.total.messages
        last_copied_seq = fork_seq_of(info)
        uncounted_estimates: list[_Estimate] = []
        response_parts: list[tuple[str, _Estimate]] = []
        counted_responses: set[str] = set()
        for message in messages:
            if message.seq <= last_copied_seq:
                continue  # a fork copied this message; it counts in the source session
            body = message.to_dict()
            is_answer = body.get("role") == "assistant"
            usage = usage_of(body) if is_answer else None
            response = response_of(body) if is_answer else ""
            if usage is not None:
                uncounted_estimates.clear()  # the provider's prompt tokens include these messages
                counted_responses.add(response)
            elif is_answer and not response:
                _count_estimates(uncounted_estimates)
            if (since and message.at < since) or (until and message.at >= until):
                continue
            sums = [*session_sums, self.days.setdefault(message.at.date(), Counts())]
            if is_answer:  # other messages have no model
                model = model_of(body) or ""
                sums.append(self.models.setdefault(model, Counts()))
            for counts in sums:
                counts.messages += 1
            if usage is not None:
                cost = None if self.price is None else self.price(model, usage)
                for counts in sums:
                    counts.add_answer(usage, cost)
            elif response:
                # The usage of the response may be in a later message.
                response_parts.append((response, (sums, _estimate_tokens(body))))
            elif is_answer:
                _count_estimates([(sums, _estimate_tokens(body))])
            else:
                uncounted_estimates.append((sums, _estimate_tokens(body)))
        remaining_estimates = (
            estimate for response, estimate in response_parts if response not in counted_responses
        )
        _count_estimates([*uncounted_estimates, *remaining_estimates])
        if self.total.messages > messages_before:
            self.sessions += 1
            for (group, name), counts in zip(groups, session_sums[1:], strict=True):
                group[name] = counts

    def add_side_calls(self, key: str, models: Mapping[str, Counts]) -> None:
        """Add the model calls that made notes and summaries of a session."""
        groups = [self.total, self.channels.get(channel_of(key) or ""), self.by_session.get(key)]
        for name, side_counts in models.items():
            sums = [self.side.setdefault(name, Counts()), self.models.setdefault(name, Counts())]
            for counts in (*sums, *groups):
                if counts is not None:
                    counts.add(side_counts)


_Estimate = tuple[list[Counts], int]
"""The sums that include a message without token counts, and the message's estimated tokens."""


def _count_estimates(estimates: list[_Estimate]) -> None:
    """Add the estimates to their sums, and empty the list."""
    for sums, tokens in estimates:
        for counts in sums:
            counts.estimated += tokens
    estimates.clear()


def _estimate_tokens(body: Mapping[str, Any]) -> int:
    unsent_fields = {FIELD, *PROGRAM_FIELDS}
    return message_tokens({name: body[name] for name in body if name not in unsent_fields})


class Cost(Struct, frozen=True, kw_only=True):
    """Costs in US dollars."""

    total: float
    """Sum over the models that have a price."""
    models: Mapping[str, float]
    unknown: tuple[str, ...]
    """Models without a price."""


def cost_of(models: Mapping[str, Counts]) -> Cost:
    """Return the total cost, and the cost of each model."""
    answered_models = {name: counts for name, counts in models.items() if counts.answers}
    costs = {name: counts.dollars for name, counts in answered_models.items() if counts.priced}
    return Cost(
        total=sum(costs.values()),
        models=costs,
        unknown=tuple(name for name in answered_models if name not in costs),
    )


# --- side usage -----------------------------------------------------------------------------------
# Token counts of model calls outside of turns: calls that write notes and summaries.
#
# The counts are one field of meta, which is written together with the result of the calls.
# For summaries, the field is in the meta of the session.
# For notes, it is in the meta of the progress mark (memory/consolidation.py).
# If a process is killed between a model call and the write, the counts of the call are lost.


SIDE_USAGE_FIELD: Final = "side_usage"
"""Meta field with the counts by model, and the uid of the session they belong to."""
_COUNT_NAMES: Final = ("calls", "prompt", "answer", "cached")
_MAX_MODELS: Final = 64
"""Maximum number of models in one field. Calls to further models count under an empty name."""

SideUsage = dict[str, dict[str, int]]
"""Number of calls and their token counts, by name of the model."""


def count_answer(usage: SideUsage, answer: object) -> None:
    """Add the token counts of an answer, if its provider reported them."""
    if isinstance(answer, CountedAnswer):
        add_usage(usage, {answer.model: {"calls": 1, **asdict(answer.usage)}})


def add_usage(usage: SideUsage, added_usage: Mapping[str, Mapping[str, int]]) -> None:
    """Add the counts in `added_usage` to `usage`."""
    for model, counts in added_usage.items():
        name = model if model in usage or len(usage) < _MAX_MODELS else ""
        sums = usage.setdefault(name, dict.fromkeys(_COUNT_NAMES, 0))
        for count in _COUNT_NAMES:
            sums[count] += counts.get(count, 0)


def updated_side_usage(meta: Mapping[str, Any], uid: str, added_usage: SideUsage) -> dict[str, Any]:
    """Return the field of meta with `added_usage` included, as arguments of `set_meta`."""
    if not added_usage:
        return {}
    usage = read_side_usage(meta, uid)
    add_usage(usage, added_usage)
    return {SIDE_USAGE_FIELD: {"uid": uid, "models": usage}}


def read_side_usage(meta: Mapping[str, Any], uid: str) -> SideUsage:
    """Return the stored counts; empty for a fork, whose field is a copy from its source."""
    field = meta.get(SIDE_USAGE_FIELD)
    if not isinstance(field, Mapping) or field.get("uid") != uid:
        return {}
    usage: SideUsage = {}
    with suppress(msgspec.ValidationError):  # a damaged field counts nothing
        add_usage(usage, msgspec.convert(field.get("models"), SideUsage))
    return usage


def side_counts(usage: SideUsage, price: Price | None) -> dict[str, Counts]:
    """Return the counts by model. Only sums are stored, so each call has the average price."""
    counts: dict[str, Counts] = {}
    for name, sums in usage.items():
        calls = max(sums["calls"], 1)
        average_usage = {count: sums[count] // calls for count in ("prompt", "answer", "cached")}
        cost = price(name, average_usage) if price is not None else None
        counts[name] = Counts(
            answers=calls,
            prompt=sums["prompt"],
            answer=sums["answer"],
            cached=sums["cached"],
            priced=0 if cost is None else calls,
            dollars=0.0 if cost is None else cost * calls,
        )
    return counts
