"""The decision when to summarize a conversation, and how much of it. Pure functions of values."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from stenolog.context.budget import Limits
from stenolog.context.request_messages import ProviderRequirements, to_request_messages
from stenolog.context.turn_boundaries import TurnRange, find_turns
from stenolog.messages import body_of
from stenolog.records import Message
from stenolog.tokens import Tokens

Trigger = Literal["auto", "manual", "overflow"]
"""What triggered the summary: the limits, a user, or a provider that rejected a long request."""
Reason = Literal["tokens", "count", "manual", "overflow"]


class SummaryPlan(Struct, frozen=True, kw_only=True):
    """The messages to summarize and hide. Making a plan changes nothing."""

    why: Reason
    messages: tuple[Message, ...]
    """The messages to summarize, oldest first."""
    upto: int
    """Seq of the last message to summarize."""
    expect_floor: int
    """Floor that the session must still have when the summary is ready."""
    uid: str = ""
    """Uid of the session for which the plan was made. Empty: unknown."""
    summary: str
    """The current summary, which the new one extends."""
    summary_tokens: int
    """Maximum tokens of the new summary."""
    kept: int
    """Number of messages that stay visible."""
    tokens_before: int
    """Tokens of everything that would be sent."""
    tokens_after: int
    """The same without the messages to summarize, and without any summary."""


def plan_summary(
    history: Sequence[Message],
    *,
    summary: str = "",
    floor: int = 0,
    uid: str = "",
    fixed: int = 0,
    limits: Limits | None = None,
    needs: ProviderRequirements | None = None,
    tokens: Tokens | None = None,
    asked: Trigger = "auto",
    undone: bool = False,
    overfull: bool = False,
    keep_from: int | None = None,
) -> SummaryPlan | None:
    """Return what to summarize now, or None if nothing is due or nothing can be hidden.

    Messages are counted in the form in which they are sent. `fixed`: tokens of system prompt, tools
    and memory. `undone`: the last summary was undone, so the number of messages alone does not
    trigger another. `overfull`: the window left messages out, so tokens are a reason whatever their
    sum. `keep_from`: first unanswered seq; from there on nothing is hidden.
    """
    limits, tokens = limits or Limits(), tokens or Tokens()
    costs: Counter[int] = Counter()
    for entry in to_request_messages(history, needs or ProviderRequirements()):
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
    # Leaves room for a new summary of maximum length, so that half of the space is free in any
    # case.
    gone = _turns_to_hide(turns, costs, goal_tokens - limits.summary(fixed), goal_count)
    while gone and keep_from is not None and history[turns[gone].first - 1].seq >= keep_from:
        gone -= 1
    if gone == 0:
        return None
    cut = turns[gone].first
    return SummaryPlan(
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


def _reason(asked: Trigger, *, over: bool, many: bool) -> Reason | None:
    if asked != "auto":
        return asked
    if over:
        return "tokens"
    return "count" if many else None


def _turns_to_hide(turns: Sequence[TurnRange], costs: Counter[int], tokens: int, count: int) -> int:
    """Return the number of turns to hide: the smallest after which the rest meets both goals."""
    left = costs.total()
    for number, turn in enumerate(turns):
        if turns[-1].end - turn.first <= count and left <= tokens:
            return number
        left -= costs[number]
    # The newest turn stays, whatever its length: the window shortens it.
    return max(len(turns) - 1, 0)
