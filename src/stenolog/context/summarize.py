"""Plans and writes a summary: one checkpoint, and one event that reports the summary.

An undone summary is recognized by the session's meta field `compacted`. Before each checkpoint, the
field is set to the seq up to which the checkpoint will hide messages. The checkpoint raises the
session's floor to that seq. `undo` lowers the floor, but does not change `compacted`. A floor below
`compacted` therefore means that the summary was undone, or that the process crashed before the
checkpoint. After an undo or a crash, the number of messages alone triggers no summary until a
summary is made for another reason. The token budget is respected in any case. A checkpoint that
fails resets the field.

The write of the field `compacted` also records which messages were withdrawn before
(`stores/withdrawn_messages.py`), because withdrawn messages below the floor would look summarized.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Literal

from msgspec import Struct

from stenolog.context.request_messages import ProviderRequirements, to_request_messages
from stenolog.context.summary import SummaryResult, write_summary
from stenolog.context.turn_state import TurnRange, find_turns, turn_state
from stenolog.context.window import Limits
from stenolog.errors import NoSuchSession, StaleCheckpoint, StenologError
from stenolog.messages import body_of
from stenolog.providers.chat_model import CompletionFunction
from stenolog.records import Message, SessionInfo, Span
from stenolog.sessions import side_usage
from stenolog.stores import spans, withdrawn_messages
from stenolog.stores.base import SessionView, Store, find_info, find_view
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
    """Floor of the session, which must be unchanged when the summary is ready."""
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
    trigger another summary. `overfull`: the window left messages out, so a summary is due whatever
    the token count. `keep_from`: first unanswered seq; messages from this seq on are not hidden.
    """
    limits, tokens = limits or Limits(), tokens or Tokens()
    turn_tokens: Counter[int] = Counter()
    for entry in to_request_messages(history, needs or ProviderRequirements()):
        turn_tokens[entry.turn] += tokens.message(entry.body)
    history_tokens, summary_tokens = turn_tokens.total(), tokens.text(summary)
    room = limits.history(fixed)
    is_over_tokens = overfull or history_tokens + summary_tokens > room
    is_over_count = len(history) > limits.max_history_messages and not undone
    reason = _summary_reason(trigger, over_tokens=is_over_tokens, over_count=is_over_count)
    if reason is None:
        return None

    goal_tokens, goal_count = room // 2, limits.max_history_messages // 2
    if trigger != "auto":
        goal_tokens = min(goal_tokens, (history_tokens + summary_tokens) // 2)
        goal_count = min(goal_count, len(history) // 2)
    turns = find_turns([body_of(message) for message in history])
    # Leave room for a new summary of maximum length, so that half of the space is free in any case.
    to_hide = _turns_to_hide(turns, turn_tokens, goal_tokens - limits.summary(fixed), goal_count)
    while to_hide and keep_from is not None and history[turns[to_hide].first - 1].seq >= keep_from:
        to_hide -= 1
    if to_hide == 0:
        return None
    first_kept_index = turns[to_hide].first
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
        tokens_after=fixed + sum(turn_tokens[number] for number in range(to_hide, len(turns))),
    )


def _summary_reason(trigger: Trigger, *, over_tokens: bool, over_count: bool) -> Reason | None:
    if trigger != "auto":
        return trigger
    if over_tokens:
        return "tokens"
    return "count" if over_count else None


def _turns_to_hide(turns: Sequence[TurnRange], costs: Counter[int], tokens: int, count: int) -> int:
    """Return the smallest number of turns to hide so that the rest fits `tokens` and `count`."""
    remaining = costs.total()
    for number, turn in enumerate(turns):
        if turns[-1].end - turn.first <= count and remaining <= tokens:
            return number
        remaining -= costs[number]
    # The newest turn stays, whatever its length: the window shortens it.
    return max(len(turns) - 1, 0)


COMPACTED_UPTO: Final = "compacted"
"""Meta field of a session: the seq up to which the last summary was to hide messages."""


class SessionState(Struct, frozen=True, kw_only=True):
    """The state of a session at the moment of reading."""

    history: Sequence[Message]
    summary: str = ""
    floor: int = 0
    uid: str = ""
    undone: bool = False
    """Whether the last summary is not in effect, for example because it was undone."""

    @property
    def unanswered_from(self) -> int | None:
        """Seq of the first user message that no finished answer has seen, or None."""
        return min(turn_state(self.history).unanswered, default=None)


UNDO_HINT: Final = "; undo shows them again"
"""End of a report's text, which front ends replace by their own command."""


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
    """Estimated tokens of the next request without the summary."""
    tokens_after: int
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


def session_state(store: Store, key: str) -> SessionState:
    """Return the current state of a session; an empty state if the session does not exist."""
    return state_of_view(find_view(store, key))


def state_of_view(view: SessionView | None) -> SessionState:
    """Return the state of a session's view; an empty state for None."""
    if view is None:
        return SessionState(history=())
    info = view.info
    return SessionState(
        history=view.messages,
        summary=info.summary,
        floor=info.floor,
        uid=info.uid,
        undone=info.floor < _compacted_upto(info),
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
    """Summarize and hide the planned messages. Return None if the session has changed.

    Exactly the planned messages are hidden, however long the model takes. Raises errors of the
    store. After an error of the model, the summary is written without the model.
    """
    summary_result = write_summary(
        plan.messages,
        plan.summary,
        complete=complete,
        max_tokens=plan.summary_tokens,
        limits=limits,
        tokens=tokens,
    )
    if not _make_checkpoint(store, key, plan, summary_result):
        return None
    return SummaryReport(
        key=key,
        reason=plan.reason,
        first=plan.messages[0].seq,
        last=plan.upto,
        count=len(plan.messages),
        tokens_before=plan.tokens_before,
        tokens_after=plan.tokens_after + tokens.text(summary_result.text),
        fallback=summary_result.fallback,
        dropped_lines=summary_result.dropped_lines,
    )


def _make_checkpoint(store: Store, key: str, plan: SummaryPlan, result: SummaryResult) -> bool:
    """Make the checkpoint and return True; return False if the session differs from the plan."""
    view = find_view(store, key)
    if view is None:
        return False
    info, visible = view.info, [(message.seq, message.seq) for message in view.messages]
    if not _is_as_planned(info, visible, plan):
        return False
    summary = result.text
    # Store the token counts even if the checkpoint fails, because the calls were paid.
    usage_field = side_usage.updated_field(info.meta, info.uid, result.usage)
    store.set_meta(key, **_meta_fields(info, visible, plan.upto), **usage_field)
    try:
        if store.info(key).uid == info.uid:
            # guard: summary-hides-only-covered
            store.checkpoint(key, summary=summary, upto=plan.upto, expect_floor=plan.expect_floor)
            return True
    except (StaleCheckpoint, NoSuchSession):
        pass
    except StenologError:
        if _restore_meta(store, key, info, visible):
            raise
        return False
    _restore_meta(store, key, info, visible)
    return False


def _is_as_planned(info: SessionInfo, visible: Sequence[Span], plan: SummaryPlan) -> bool:
    """Whether the messages to be hidden are exactly those that the summary covers."""
    if (info.floor, info.summary) != (plan.expect_floor, plan.summary):
        return False
    if plan.uid and info.uid != plan.uid:
        return False
    planned_seqs = [message.seq for message in plan.messages]
    return [seq for seq, _ in visible if seq <= plan.upto] == planned_seqs


def _meta_fields(info: SessionInfo, visible: Sequence[Span], upto: int) -> dict[str, Any]:
    """Return the meta fields for a summary up to this seq."""
    visible_spans = spans.union(visible)
    first = _summarized_upto(info) + 1
    withdrawn_spans = spans.minus([(first, upto)] if first <= upto else [], visible_spans)
    return {
        COMPACTED_UPTO: upto,
        withdrawn_messages.META_FIELD: withdrawn_messages.updated_field(
            info.meta, withdrawn_spans, visible=visible_spans
        ),
    }


def _summarized_upto(info: SessionInfo) -> int:
    """Return the last seq that is known to be summarized."""
    if not info.summary:
        return 0
    upto = _compacted_upto(info)
    return upto if 0 < upto < info.floor else info.floor


def _restore_meta(store: Store, key: str, info: SessionInfo, visible: Sequence[Span]) -> bool:
    """Try to restore the meta after a failed summary; False if the session is gone or replaced."""
    with suppress(StenologError):
        now = find_info(store, key)
        if now is None:
            return False
        if now.uid != info.uid:
            _remove_meta(store, key, now)
            return False
        upto = _compacted_upto(info)
        fields = {
            COMPACTED_UPTO: upto or None,
            withdrawn_messages.META_FIELD: withdrawn_messages.updated_field(info.meta),
        }
        if now.floor > info.floor and now.summary != info.summary:
            # Another process wrote a summary, or this summary succeeded after all: keep the fields.
            fields = _meta_fields(info, visible, now.floor) | {COMPACTED_UPTO: max(upto, now.floor)}
        store.set_meta(key, **fields)
    return True


def _remove_meta(store: Store, key: str, now: SessionInfo) -> None:
    """Remove the meta fields of a summary from a session that was created again."""
    summary_fields = {COMPACTED_UPTO, withdrawn_messages.META_FIELD, side_usage.META}
    if now.last_seq == 0 and not now.summary and set(now.meta) <= summary_fields:
        # The session was just deleted, and setting these fields created it again.
        store.delete(key)
    else:
        store.set_meta(key, **dict.fromkeys(summary_fields))


def _compacted_upto(info: SessionInfo) -> int:
    upto = info.meta.get(COMPACTED_UPTO)
    return upto if isinstance(upto, int) and not isinstance(upto, bool) else 0
