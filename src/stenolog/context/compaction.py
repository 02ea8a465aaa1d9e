"""Carrying a plan out: one summary, one checkpoint, and an event that tells of it.

How it is known that a compaction was taken back: before each checkpoint the session's meta field
`compacted` is set to the seq up to which it will hide, and `undo` leaves meta alone. A floor below
that seq means that the newest compaction is not in force. A crash between the two writes looks the
same; then the number of messages alone starts no compaction until the next one for another reason,
and the token budget is kept as ever. A checkpoint that fails sets the field back. The same write
notes what somebody took back before (`stores/withdrawn.py`): below the floor it looks compacted.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from msgspec import Struct

from stenolog.context.budget import Limits
from stenolog.context.plan import Plan, Why
from stenolog.context.standing import standing
from stenolog.context.summarising import summarise
from stenolog.errors import NoSuchSession, StaleCheckpoint, StenologError
from stenolog.providers.base import Ask
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import spans, withdrawn
from stenolog.stores.base import SessionView, Store
from stenolog.tokens import Tokens

COMPACTED: Final = "compacted"
"""The field of a session's meta: the seq up to which the newest compaction was to hide."""


class Seen(Struct, frozen=True, kw_only=True):
    """A session as of one moment."""

    history: Sequence[Message]
    summary: str = ""
    floor: int = 0
    uid: str = ""
    undone: bool = False
    """Whether the newest compaction is not in force."""

    @property
    def unanswered_from(self) -> int | None:
        """The first message of a user that no finished answer has seen; None where all are."""
        return min(standing(self.history).unanswered, default=None)


class Compaction(Struct, frozen=True, kw_only=True):
    """What a compaction did, for who is to be told; `store.undo(key)` takes it back."""

    key: str
    why: Why
    first: int
    """The seq of the first message that was hidden."""
    last: int
    """The seq of the last one."""
    count: int
    """How many messages were hidden."""
    tokens_before: int
    """About how many tokens would have been sent before."""
    tokens_after: int
    fallback: str = ""
    """Why the summary was made without a model; empty where a model made all of it."""
    given_up: int = 0
    """How many lines the summary had no room for; the messages behind them are in the log."""

    def __str__(self) -> str:
        made = " (without a model)" if self.fallback else ""
        lines = "line" if self.given_up == 1 else "lines"
        lost = f"; {self.given_up:,} {lines} had no room in it" if self.given_up else ""
        return (
            f"{self.count:,} messages (seq {self.first}–{self.last}) are now a summary{made}: "
            f"about {self.tokens_before:,} → {self.tokens_after:,} tokens{lost}; "
            "undo brings them back"
        )


def look(store: Store, key: str) -> Seen:
    """Return the session as it is now; an empty one if there is none."""
    try:
        return seen_in(store.view(key))
    except NoSuchSession:
        return seen_in(None)


def seen_in(view: SessionView | None) -> Seen:
    """Return what a view shows of a session; None: there is none."""
    if view is None:
        return Seen(history=())
    info = view.info
    return Seen(
        history=view.messages,
        summary=info.summary,
        floor=info.floor,
        uid=info.uid,
        undone=info.floor < _compacted(info),
    )


def compact_context(
    store: Store, key: str, plan: Plan, *, ask: Ask | None, limits: Limits, tokens: Tokens
) -> Compaction | None:
    """Summarise and hide what was planned; None where the session is no longer as it was.

    However long the model takes, exactly the planned messages are hidden. Raises what the store
    raises; what the model raises leads to a summary without it.
    """
    made = summarise(
        plan.messages,
        plan.summary,
        ask=ask,
        most=plan.summary_tokens,
        limits=limits,
        tokens=tokens,
    )
    if not _apply(store, key, plan, made.text):
        return None
    return Compaction(
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


def _apply(store: Store, key: str, plan: Plan, summary: str) -> bool:
    """Whether the checkpoint was made; it is not where the session is another than planned."""
    try:
        view = store.view(key)
    except NoSuchSession:
        return False
    found, shown = view.info, [(message.seq, message.seq) for message in view.messages]
    if not _is_as_planned(found, shown, plan):
        return False
    store.set_meta(key, **_notes(found, shown, plan.upto))
    try:
        if store.info(key).uid == found.uid:
            # guard: summary-hides-only-covered
            store.checkpoint(key, summary=summary, upto=plan.upto, expect_floor=plan.expect_floor)
            return True
    except (StaleCheckpoint, NoSuchSession):
        pass
    except StenologError:
        if _set_back(store, key, found, shown):
            raise
        return False
    _set_back(store, key, found, shown)
    return False


def _is_as_planned(found: SessionInfo, shown: Sequence[Span], plan: Plan) -> bool:
    """Whether all that the summary covers, and nothing else, is still there to be hidden."""
    if (found.floor, found.summary) != (plan.expect_floor, plan.summary):
        return False
    if plan.uid and found.uid != plan.uid:
        return False
    planned = [message.seq for message in plan.messages]
    return [seq for seq, _ in shown if seq <= plan.upto] == planned


def _notes(found: SessionInfo, shown: Sequence[Span], upto: int) -> dict[str, Any]:
    """The fields of meta for a compaction up to there."""
    seen = spans.union(shown)
    begin = _summarised(found) + 1
    taken = spans.minus([(begin, upto)] if begin <= upto else [], seen)
    return {COMPACTED: upto, withdrawn.META: withdrawn.noted(found.meta, taken, shown=seen)}


def _summarised(found: SessionInfo) -> int:
    """Up to where what is hidden was compacted, as far as that is known."""
    if not found.summary:
        return 0
    upto = _compacted(found)
    return upto if 0 < upto < found.floor else found.floor


def _set_back(store: Store, key: str, found: SessionInfo, shown: Sequence[Span]) -> bool:
    """Meta without a compaction that was not made; whether the session is the same. Best effort."""
    with suppress(StenologError):
        try:
            now = store.info(key)
        except NoSuchSession:
            return False
        if now.uid != found.uid:
            _leave(store, key, now)
            return False
        known = _compacted(found)
        fields = {COMPACTED: known or None, withdrawn.META: withdrawn.noted(found.meta)}
        if now.floor > found.floor and now.summary != found.summary:
            # Somebody else's compaction, or ours after all: what it noted is to stand.
            fields = _notes(found, shown, now.floor) | {COMPACTED: max(known, now.floor)}
        store.set_meta(key, **fields)
    return True


def _leave(store: Store, key: str, now: SessionInfo) -> None:
    """Take our fields out of a life of the session that they were not meant for."""
    ours = {COMPACTED, withdrawn.META}
    if now.last_seq == 0 and not now.summary and set(now.meta) <= ours:
        # It was deleted a moment ago, and only our fields brought it back.
        store.delete(key)
    else:
        store.set_meta(key, **dict.fromkeys(ours))


def _compacted(info: SessionInfo) -> int:
    upto = info.meta.get(COMPACTED)
    return upto if isinstance(upto, int) and not isinstance(upto, bool) else 0
