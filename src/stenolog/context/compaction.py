"""Carrying a plan out: one summary, one checkpoint, and an event that tells of it.

How it is known that a compaction was taken back: before each checkpoint the session's meta field
`compacted` is set to the seq up to which it will hide, and `undo` leaves meta alone. A floor below
that seq means that the newest compaction is not in force. A crash between the two writes looks the
same; then the number of messages alone starts no compaction until the next one for another reason,
and the token budget is kept as ever.
"""

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from stenolog.context.budget import Limits
from stenolog.context.plan import Plan, Why
from stenolog.context.summarising import summarise
from stenolog.errors import NoSuchSession, StaleCheckpoint
from stenolog.providers.base import Ask
from stenolog.records import Message, SessionInfo
from stenolog.stores.base import Store
from stenolog.tokens import Tokens

COMPACTED: Final = "compacted"
"""The field of a session's meta: the seq up to which the newest compaction was to hide."""

_LOOKS: Final = 5


class Seen(Struct, frozen=True, kw_only=True):
    """A session as of one moment."""

    history: Sequence[Message]
    summary: str = ""
    floor: int = 0
    uid: str = ""
    undone: bool = False
    """Whether the newest compaction is not in force."""


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

    def __str__(self) -> str:
        made = " (without a model)" if self.fallback else ""
        return (
            f"{self.count:,} messages (seq {self.first}–{self.last}) are now a summary{made}: "
            f"about {self.tokens_before:,} → {self.tokens_after:,} tokens; undo brings them back"
        )


def look(store: Store, key: str) -> Seen:
    """Messages, summary and floor that belong together; nothing where there is no session."""
    for _ in range(_LOOKS):
        try:
            before = store.info(key)
            history = store.get_history(key)
            after = store.info(key)
        except NoSuchSession:
            return Seen(history=())
        # A checkpoint between the reads would show messages twice, or not at all.
        if (before.uid, before.floor, before.summary) == (after.uid, after.floor, after.summary):
            break
    return Seen(
        history=history,
        summary=after.summary,
        floor=after.floor,
        uid=after.uid,
        undone=_undone(after),
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
    )


def _apply(store: Store, key: str, plan: Plan, summary: str) -> bool:
    """Whether the checkpoint was made; it is not where floor, summary or life are others by now."""
    try:
        found = store.info(key)
    except NoSuchSession:
        return False
    if (found.floor, found.summary) != (plan.expect_floor, plan.summary):
        return False
    if plan.uid and found.uid != plan.uid:
        return False
    store.set_meta(key, **{COMPACTED: plan.upto})
    try:
        store.checkpoint(key, summary=summary, upto=plan.upto, expect_floor=plan.expect_floor)
    except StaleCheckpoint as stale:
        store.set_meta(key, **{COMPACTED: max(_compacted(found), stale.found) or None})
        return False
    return True


def _undone(info: SessionInfo) -> bool:
    return info.floor < _compacted(info)


def _compacted(info: SessionInfo) -> int:
    upto = info.meta.get(COMPACTED)
    return upto if isinstance(upto, int) and not isinstance(upto, bool) else 0
