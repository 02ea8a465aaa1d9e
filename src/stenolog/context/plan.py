"""When a conversation is compacted and how far: a decision made of values alone."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from stenolog.context.arranging import Needs, entries_of
from stenolog.context.budget import Limits
from stenolog.context.shapes import body_of
from stenolog.context.turns import Turn, find_turns
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
    needs: Needs | None = None,
    tokens: Tokens | None = None,
    asked: Asked = "auto",
    undone: bool = False,
    overfull: bool = False,
    keep_from: int | None = None,
) -> Plan | None:
    """What to compact now; None where nothing is due, or nothing would be hidden.

    Messages count as they would be sent. `fixed`: tokens of system prompt, tools and memory.
    `undone`: a compaction was taken back, so that the number of messages alone is no reason for
    another. `overfull`: the window had to leave something out, so that tokens are a reason
    whatever their sum. `keep_from`: from this seq on nothing is hidden, because it is unanswered.
    """
    limits, tokens = limits or Limits(), tokens or Tokens()
    costs: Counter[int] = Counter()
    for entry in entries_of(history, needs or Needs()):
        costs[entry.turn] += tokens.message(entry.body)
    taken, told = costs.total(), tokens.text(summary)
    room = limits.history(fixed)
    over = overfull or taken + told > room
    many = len(history) > limits.max_history_messages and not undone
    why = _reason(asked, over=over, many=many)
    if why is None:
        return None

    goal_tokens, goal_count = room // 2, limits.max_history_messages // 2
    if asked != "auto":
        goal_tokens = min(goal_tokens, (taken + told) // 2)
        goal_count = min(goal_count, len(history) // 2)
    turns = find_turns([body_of(message) for message in history])
    # The new summary may grow up to its limit; the half holds with it, too.
    gone = _gone(turns, costs, goal_tokens - limits.summary(fixed), goal_count)
    while gone and keep_from is not None and history[turns[gone].first - 1].seq >= keep_from:
        gone -= 1
    if gone == 0:
        return None
    cut = turns[gone].first
    return Plan(
        why=why,
        messages=tuple(history[:cut]),
        upto=history[cut - 1].seq,
        expect_floor=floor,
        uid=uid,
        summary=summary,
        summary_tokens=limits.summary(fixed),
        kept=len(history) - cut,
        tokens_before=fixed + told + taken,
        tokens_after=fixed + sum(costs[number] for number in range(gone, len(turns))),
    )


def _reason(asked: Asked, *, over: bool, many: bool) -> Why | None:
    if asked != "auto":
        return asked
    if over:
        return "tokens"
    return "count" if many else None


def _gone(turns: Sequence[Turn], costs: Counter[int], tokens: int, count: int) -> int:
    """How many turns go: up to the first from which the rest is small enough."""
    left = costs.total()
    for number, turn in enumerate(turns):
        if turns[-1].end - turn.first <= count and left <= tokens:
            return number
        left -= costs[number]
    # The newest turn stays, however long it is: the window shortens it from inside.
    return max(len(turns) - 1, 0)
