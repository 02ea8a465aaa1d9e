"""Plans a summary, stores it as a checkpoint, and reports it.

An undone summary is recognized by the session's meta field `compacted`. Before each checkpoint,
`compacted` is set to the seq up to which the checkpoint will hide messages. The checkpoint raises
the session's floor (messages up to it are hidden) to `compacted`. `undo` lowers the floor, but does
not change `compacted`. A floor below `compacted` therefore means that the summary was undone, or
that the process crashed before the checkpoint. After an undo or a crash, the number of messages
alone triggers no summary until a summary is made for another reason. The token budget is respected
in any case. If a checkpoint fails, `compacted` is reset.

The write of `compacted` also records which messages were withdrawn before
(`stores/withdrawn_messages.py`), because withdrawn messages below the floor would look summarized.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.context.request_messages import ProviderRequirements, to_request_messages
from stenolog.context.summary import SummaryWriter
from stenolog.context.turn_state import TurnRange, find_turns
from stenolog.context.window import Limits
from stenolog.errors import Conflict, NoSuchSession, StenologError
from stenolog.messages import body_of
from stenolog.providers.chat_model import CompletionFunction
from stenolog.records import Message, SessionInfo, Span
from stenolog.sessions.usage import SIDE_USAGE_FIELD, SideUsage, updated_side_usage
from stenolog.stores import spans, withdrawn_messages
from stenolog.stores.base import Store, find_info, find_view
from stenolog.tokens import Tokens

Trigger = Literal["auto", "manual", "overflow"]
"""Cause of a summary: the limits, a user, or a provider that rejected a long request."""
Reason = Literal["tokens", "count", "manual", "overflow"]


class SummaryPlan(Struct, frozen=True, kw_only=True):
    """The messages to summarize and hide. Making a plan changes nothing."""

    reason: Reason
    messages: tuple[Message, ...]
    """The messages to summarize, oldest first."""
    upto: int
    """Seq of the last message to summarize."""
    expect_floor: int
    """Floor (messages up to it are hidden), which must be unchanged when the summary is ready."""
    uid: str = ""
    """Uid of the session for which the plan was made; empty if unknown."""
    summary: str
    """The current summary, which the new summary extends."""
    summary_tokens: int
    """Maximum tokens of the new summary."""
    kept: int
    """Number of messages that stay visible."""
    tokens_before: int
    """Tokens of the next request if no message is summarized."""
    tokens_after: int
    """Tokens of the next request without the summarized messages and without a summary."""


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
    trigger: Trigger = "auto",
    undone: bool = False,
    overfull: bool = False,
    keep_from: int | None = None,
) -> SummaryPlan | None:
    """Return the plan for a summary; None if no summary is due or no message can be hidden.

    Messages are counted in the form in which they are sent. `fixed`: tokens of system prompt, tools
    and memory. `undone`: the last summary was undone, so the number of messages alone does not
    trigger another summary. `overfull`: the window left messages out, so a summary is due,
    regardless of the token count. `keep_from`: first unanswered seq; the message with this seq and
    later messages stay visible. Raises UnsupportedFormat for a message that cannot be summarized.
    """
    limits, tokens = limits or Limits(), tokens or Tokens()
    # Summaries also read the formats that the model of the session does not accept.
    needs = replace(needs or ProviderRequirements(), chat_only=False)
    turn_tokens: Counter[int] = Counter()
    for entry in to_request_messages(history, needs):
        turn_tokens[entry.turn] += tokens.message(entry.body)
    history_tokens, summary_tokens = turn_tokens.total(), tokens.text(summary)
    room = limits.history(fixed)
    reason: Reason
    if trigger != "auto":
        reason = trigger
    elif overfull or history_tokens + summary_tokens > room:
        reason = "tokens"
    elif len(history) > limits.max_history_messages and not undone:
        reason = "count"
    else:
        return None

    goal_tokens, goal_count = room // 2, limits.max_history_messages // 2
    if trigger != "auto":
        goal_tokens = min(goal_tokens, (history_tokens + summary_tokens) // 2)
        goal_count = min(goal_count, len(history) // 2)
    turns = find_turns([body_of(message) for message in history])
    # Count the new summary at its maximum length, so that half of `room` is free in any case.
    hidden_turn_count = _count_turns_to_hide(
        turns, turn_tokens, goal_tokens - limits.summary(fixed), goal_count
    )
    while (
        hidden_turn_count
        and keep_from is not None
        and history[turns[hidden_turn_count].first - 1].seq >= keep_from
    ):
        hidden_turn_count -= 1
    if hidden_turn_count == 0:
        return None
    first_kept_index = turns[hidden_turn_count].first
    return SummaryPlan(
        reason=reason,
        messages=tuple(history[:first_kept_index]),
        upto=history[first_kept_index - 1].seq,
        expect_floor=floor,
        uid=uid,
        summary=summary,
        summary_tokens=limits.summary(fixed),
        kept=len(history) - first_kept_index,
        tokens_before=fixed + summary_tokens + history_tokens,
        tokens_after=fixed
        + sum(turn_tokens[turn_index] for turn_index in range(hidden_turn_count, len(turns))),
    )


def _count_turns_to_hide(
    turns: Sequence[TurnRange], turn_tokens: Counter[int], max_tokens: int, max_messages: int
) -> int:
    """Return how many turns to hide so that the rest fits `max_tokens` and `max_messages`."""
    remaining_tokens = turn_tokens.total()
    for turn_index, turn in enumerate(turns):
        if turns[-1].end - turn.first <= max_messages and remaining_tokens <= max_tokens:
            return turn_index
        remaining_tokens -= turn_tokens[turn_index]
    # The newest turn stays visible; if it is too long, the window shortens it.
    return max(len(turns) - 1, 0)


COMPACTED_UPTO: Final = "compacted"
"""Meta field of a session: last seq that the newest summary covers, even after an undo."""
_SUMMARY_FIELDS: Final = (COMPACTED_UPTO, withdrawn_messages.META_FIELD, SIDE_USAGE_FIELD)
"""Meta fields that a summary writes."""


UNDO_HINT: Final = "; undo shows them again"
"""End of the text of a SummaryReport; front ends replace it by the name of their command."""


class SummaryReport(Struct, frozen=True, kw_only=True):
    """Report of a summary. `store.undo(key)` makes the summarized messages visible again."""

    key: str
    reason: Reason
    first: int
    """Seq of the first hidden message."""
    last: int
    """Seq of the last hidden message."""
    count: int
    """Number of hidden messages."""
    tokens_before: int
    """Estimated tokens of the next request if no summary had been made."""
    tokens_after: int
    """Estimated tokens of the next request with the new summary."""
    fallback: str = ""
    """Reason why the summary, or a part of it, was written without a model; empty otherwise."""
    dropped_lines: int = 0
    """Number of lines that did not fit into the summary. The log still has the full messages."""

    def __str__(self) -> str:
        method = " without a model" if self.fallback else ""
        noun = "line" if self.dropped_lines == 1 else "lines"
        dropped = f"; {self.dropped_lines:,} {noun} did not fit" if self.dropped_lines else ""
        return (
            f"{self.count:,} messages (seq {self.first}–{self.last}) were summarized{method}: "
            f"about {self.tokens_before:,} → {self.tokens_after:,} tokens{dropped}{UNDO_HINT}"
        )


def apply_plan(
    store: Store,
    key: str,
    plan: SummaryPlan,
    *,
    complete: CompletionFunction | None,
    limits: Limits,
    tokens: Tokens,
) -> SummaryReport | None:
    """Summarize and hide the planned messages. Returns None if the session has changed.

    Only the planned messages are hidden, even if others arrive while the model writes. Raises the
    errors of the store. After an error of the model, the summary is written without the model.
    """
    writer = SummaryWriter(complete, plan.summary_tokens, limits, tokens)
    summary = writer.write_summary(plan.messages, plan.summary)
    if not _make_checkpoint(store, key, plan, summary, writer.usage):
        return None
    return SummaryReport(
        key=key,
        reason=plan.reason,
        first=plan.messages[0].seq,
        last=plan.upto,
        count=len(plan.messages),
        tokens_before=plan.tokens_before,
        tokens_after=plan.tokens_after + tokens.text(summary),
        fallback=writer.fallback,
        dropped_lines=writer.dropped_lines,
    )


def _make_checkpoint(
    store: Store, key: str, plan: SummaryPlan, summary: str, usage: SideUsage
) -> bool:
    """Make the checkpoint and return True; return False if the session differs from the plan."""
    view = find_view(store, key)
    if view is None:
        return False
    info, visible_spans = view.info, [(message.seq, message.seq) for message in view.messages]
    if not _is_as_planned(info, visible_spans, plan):
        return False
    # Store the token counts even if the checkpoint fails: the provider charges for the calls.
    usage_field = updated_side_usage(info.meta, info.uid, usage)
    store.set_meta(key, **_summary_fields(info, visible_spans, plan.upto), **usage_field)
    try:
        if store.info(key).uid == info.uid:
            # guard: summary-hides-only-covered
            store.checkpoint(key, summary=summary, upto=plan.upto, expect_floor=plan.expect_floor)
            return True
    except (Conflict, NoSuchSession):
        pass
    except StenologError:
        if _reset_meta(store, key, info, visible_spans):
            raise
        return False
    _reset_meta(store, key, info, visible_spans)
    return False


def _is_as_planned(info: SessionInfo, visible_spans: Sequence[Span], plan: SummaryPlan) -> bool:
    """Return whether the session still has the floor, summary and messages of the plan."""
    planned_seqs = [message.seq for message in plan.messages]
    return (
        (info.floor, info.summary) == (plan.expect_floor, plan.summary)
        and plan.uid in ("", info.uid)
        and [seq for seq, _ in visible_spans if seq <= plan.upto] == planned_seqs
    )


def _summary_fields(info: SessionInfo, visible_spans: Sequence[Span], upto: int) -> dict[str, Any]:
    """Return the meta fields for a summary up to this seq."""
    merged_spans = spans.union(visible_spans)
    first_seq = _last_summarized_seq(info) + 1
    withdrawn_spans = spans.minus([(first_seq, upto)] if first_seq <= upto else [], merged_spans)
    return {
        COMPACTED_UPTO: upto,
        withdrawn_messages.META_FIELD: withdrawn_messages.updated_field(
            info.meta, withdrawn_spans, visible=merged_spans
        ),
    }


def _last_summarized_seq(info: SessionInfo) -> int:
    """Return the last seq that is known to be summarized."""
    if not info.summary:
        return 0
    upto = _read_compacted_upto(info)
    return upto if 0 < upto < info.floor else info.floor


def _reset_meta(store: Store, key: str, info: SessionInfo, visible_spans: Sequence[Span]) -> bool:
    """Try to reset the meta after a failed checkpoint; False if the session is gone or replaced.

    `info` and `visible_spans`: as they were before the summary.
    """
    with suppress(StenologError):
        current_info = find_info(store, key)
        if current_info is None:
            return False
        if current_info.uid != info.uid:
            # The session was created again, perhaps by setting the meta fields.
            store.set_meta(key, **dict.fromkeys(_SUMMARY_FIELDS))
            new_info = store.info(key)
            if new_info.last_seq == 0 and not (new_info.meta or new_info.summary):
                store.admin.delete_unchanged(new_info)
            return False
        upto = _read_compacted_upto(info)
        fields: dict[str, Any] = {COMPACTED_UPTO: upto or None}
        if current_info.summary != info.summary:
            # Another process wrote a summary, or this summary succeeded after all. The withdrawn
            # messages that the other process recorded may have been overwritten.
            fields = _summary_fields(info, visible_spans, current_info.floor) | {
                COMPACTED_UPTO: max(upto, current_info.floor)
            }
        store.set_meta(key, **fields)
    return True


def is_undone(info: SessionInfo) -> bool:
    """Return whether the last summary is not in effect, for example because it was undone."""
    return info.floor < _read_compacted_upto(info)


def _read_compacted_upto(info: SessionInfo) -> int:
    upto = info.meta.get(COMPACTED_UPTO)
    return upto if isinstance(upto, int) and not isinstance(upto, bool) else 0
