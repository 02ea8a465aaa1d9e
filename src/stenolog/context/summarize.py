"""Execution of a plan: one summary, one checkpoint, one event that reports it.

How an undone summary is recognized: before each checkpoint, the session's meta field `compacted` is
set to the seq up to which the checkpoint will hide messages; `undo` does not change meta. A floor
below that seq means that the last summary is not in effect. A crash between the two writes looks
the same; then the number of messages alone triggers no summary until one is made for another
reason, and the token budget still holds. A checkpoint that fails resets the field. The same write
records which messages were withdrawn before (`stores/withdrawn_messages.py`): below the floor they
would look summarized.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from stenolog.context.budget import Limits
from stenolog.context.plan import Reason, SummaryPlan
from stenolog.context.summary_writer import write_summary
from stenolog.context.turn_state import turn_state
from stenolog.errors import NoSuchSession, StaleCheckpoint, StenologError
from stenolog.providers.chat_model import CompletionFunction
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import spans, withdrawn_messages
from stenolog.stores.base import SessionView, Store
from stenolog.tokens import Tokens

COMPACTED: Final = "compacted"
"""Meta field of a session: the seq up to which the last summary was to hide messages."""


class SessionState(Struct, frozen=True, kw_only=True):
    """A session as read at one moment."""

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


class SummaryReport(Struct, frozen=True, kw_only=True):
    """Report of messages that became a summary. `store.undo(key)` reverts it."""

    key: str
    why: Reason
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
    """Why the summary, or a part of it, was made without a model. Empty: a model made all of it."""
    given_up: int = 0
    """Number of lines that did not fit into the summary. Their messages are still in the log."""

    def __str__(self) -> str:
        made = " (without a model)" if self.fallback else ""
        lines = "line" if self.given_up == 1 else "lines"
        lost = f"; {self.given_up:,} {lines} had no room in it" if self.given_up else ""
        return (
            f"{self.count:,} messages (seq {self.first}–{self.last}) are now a summary{made}: "
            f"about {self.tokens_before:,} → {self.tokens_after:,} tokens{lost}; "
            "undo brings them back"
        )


def session_state(store: Store, key: str) -> SessionState:
    """Return the current state of the session; an empty one if it does not exist."""
    try:
        return state_of_view(store.view(key))
    except NoSuchSession:
        return state_of_view(None)


def state_of_view(view: SessionView | None) -> SessionState:
    """Return the state in a view; an empty one for None, which means no session."""
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
    ask: CompletionFunction | None,
    limits: Limits,
    tokens: Tokens,
) -> SummaryReport | None:
    """Summarize and hide the planned messages. Return None if the session has changed.

    Exactly the planned messages are hidden, however long the model takes. Raises errors of the
    store; an error of the model leads to a summary without the model.
    """
    made = write_summary(
        plan.messages,
        plan.summary,
        ask=ask,
        most=plan.summary_tokens,
        limits=limits,
        tokens=tokens,
    )
    if not _apply(store, key, plan, made.text):
        return None
    return SummaryReport(
        key=key,
        why=plan.why,
        first=plan.messages[0].seq,
        last=plan.upto,
        count=len(plan.messages),
        tokens_before=plan.tokens_before,
        tokens_after=plan.tokens_after + tokens.text(made.text),
        fallback=made.fallback,
        given_up=made.given_up,
    )


def _apply(store: Store, key: str, plan: SummaryPlan, summary: str) -> bool:
    """Make the checkpoint and return True; return False if the session differs from the plan."""
    try:
        view = store.view(key)
    except NoSuchSession:
        return False
    found, shown = view.info, [(message.seq, message.seq) for message in view.messages]
    if not _is_as_planned(found, shown, plan):
        return False
    store.set_meta(key, **_meta_fields(found, shown, plan.upto))
    try:
        if store.info(key).uid == found.uid:
            # guard: summary-hides-only-covered
            store.checkpoint(key, summary=summary, upto=plan.upto, expect_floor=plan.expect_floor)
            return True
    except (StaleCheckpoint, NoSuchSession):
        pass
    except StenologError:
        if _restore_meta(store, key, found, shown):
            raise
        return False
    _restore_meta(store, key, found, shown)
    return False


def _is_as_planned(found: SessionInfo, shown: Sequence[Span], plan: SummaryPlan) -> bool:
    """Whether the messages to be hidden are exactly those that the summary covers."""
    if (found.floor, found.summary) != (plan.expect_floor, plan.summary):
        return False
    if plan.uid and found.uid != plan.uid:
        return False
    planned = [message.seq for message in plan.messages]
    return [seq for seq, _ in shown if seq <= plan.upto] == planned


def _meta_fields(found: SessionInfo, shown: Sequence[Span], upto: int) -> dict[str, Any]:
    """Return the meta fields for a summary up to this seq."""
    seen = spans.union(shown)
    begin = _summarized_upto(found) + 1
    taken = spans.minus([(begin, upto)] if begin <= upto else [], seen)
    return {
        COMPACTED: upto,
        withdrawn_messages.META: withdrawn_messages.updated_field(found.meta, taken, shown=seen),
    }


def _summarized_upto(found: SessionInfo) -> int:
    """Return the seq up to which hidden messages were summarized, as far as known."""
    if not found.summary:
        return 0
    upto = _compacted_upto(found)
    return upto if 0 < upto < found.floor else found.floor


def _restore_meta(store: Store, key: str, found: SessionInfo, shown: Sequence[Span]) -> bool:
    """Restore meta after a failed summary; return whether the session is the same. Best effort."""
    with suppress(StenologError):
        try:
            now = store.info(key)
        except NoSuchSession:
            return False
        if now.uid != found.uid:
            _remove_meta(store, key, now)
            return False
        known = _compacted_upto(found)
        fields = {
            COMPACTED: known or None,
            withdrawn_messages.META: withdrawn_messages.updated_field(found.meta),
        }
        if now.floor > found.floor and now.summary != found.summary:
            # Another process made a summary, or this one succeeded after all: keep its fields.
            fields = _meta_fields(found, shown, now.floor) | {COMPACTED: max(known, now.floor)}
        store.set_meta(key, **fields)
    return True


def _remove_meta(store: Store, key: str, now: SessionInfo) -> None:
    """Remove these fields from a recreated session for which they were not meant."""
    ours = {COMPACTED, withdrawn_messages.META}
    if now.last_seq == 0 and not now.summary and set(now.meta) <= ours:
        # The session was just deleted, and only these fields recreated it.
        store.delete(key)
    else:
        store.set_meta(key, **dict.fromkeys(ours))


def _compacted_upto(info: SessionInfo) -> int:
    upto = info.meta.get(COMPACTED)
    return upto if isinstance(upto, int) and not isinstance(upto, bool) else 0
