"""When a conversation is compacted and how far: a decision made of values alone."""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from stenolog.context.budget import Limits
from stenolog.context.shapes import body_of
from stenolog.context.turns import find_turns
from stenolog.records import Message
from stenolog.tokens import Tokens

Asked = Literal["auto", "manual", "overflow"]
"""Who wants it: the limits, a person, or a provider that found a request too long."""
Why = Literal["tokens", "count", "manual", "overflow"]


class Plan(Struct, frozen=True, kw_only=True):
    """What to summarise and hide; nothing was done yet."""

    why: Why
    messages: tuple[Message, ...]
    """The messages to summarise, the oldest first."""
    upto: int
    """The seq of the last of them."""
    expect_floor: int
    """Where the floor must still be when the summary is ready."""
    uid: str = ""
    """Of the life of the session that was looked at; empty where that is not known."""
    summary: str
    """The summary so far, which the new one carries."""
    summary_tokens: int
    """How long the new one may be."""
    kept: int
    """How many messages stay in sight."""
    tokens_before: int
    """Of all that would be sent."""
    tokens_after: int
    """The same without the messages to summarise, and without any summary."""


def plan_compaction(
    history: Sequence[Message],
    *,
    summary: str = "",
    floor: int = 0,
    uid: str = "",
    fixed: int = 0,
    limits: Limits | None = None,
    tokens: Tokens | None = None,
    asked: Asked = "auto",
    undone: bool = False,
    overfull: bool = False,
) -> Plan | None:
    """What to compact now; None where nothing is due, or nothing would be hidden.

    `fixed`: tokens of system prompt, tools and memory. `undone`: a compaction was taken back, so
    that the number of messages alone is no reason for another. `overfull`: the window had to leave
    something out, so that tokens are a reason whatever their sum.
    """
    limits, tokens = limits or Limits(), tokens or Tokens()
    bodies = [body_of(message) for message in history]
    costs = [tokens.message(body) for body in bodies]
    told = tokens.text(summary)
    room = limits.history(fixed)
    over = overfull or sum(costs) + told > room
    many = len(history) > limits.max_history_messages and not undone
    why = _reason(asked, over=over, many=many)
    if why is None:
        return None

    goal_tokens, goal_count = room // 2, limits.max_history_messages // 2
    if asked != "auto":
        goal_tokens = min(goal_tokens, (sum(costs) + told) // 2)
        goal_count = min(goal_count, len(history) // 2)
    begins = [turn.first for turn in find_turns(bodies)]
    # The new summary may grow up to its limit; the half holds with it, too.
    cut = _cut(begins, costs, goal_tokens - limits.summary(fixed), goal_count)
    if cut == 0:
        return None
    return Plan(
        why=why,
        messages=tuple(history[:cut]),
        upto=history[cut - 1].seq,
        expect_floor=floor,
        uid=uid,
        summary=summary,
        summary_tokens=limits.summary(fixed),
        kept=len(history) - cut,
        tokens_before=fixed + told + sum(costs),
        tokens_after=fixed + sum(costs[cut:]),
    )


def _reason(asked: Asked, *, over: bool, many: bool) -> Why | None:
    if asked != "auto":
        return asked
    if over:
        return "tokens"
    return "count" if many else None


def _cut(begins: Sequence[int], costs: Sequence[int], tokens: int, count: int) -> int:
    """How many messages go: up to the first turn from which the rest is small enough."""
    left = sum(costs)
    before = 0
    for begin in begins:
        left -= sum(costs[before:begin])
        before = begin
        if len(costs) - begin <= count and left <= tokens:
            return begin
    # The newest turn stays, however long it is: the window shortens it from inside.
    return begins[-1] if begins else 0
