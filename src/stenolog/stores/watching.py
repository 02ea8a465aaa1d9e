"""Following a session with all that happens to it: messages, and changes of what is in sight.

Made of what every store has, so that it is the same on every engine: between messages it is looked
what has become of the session. A message arrives at once, a change within half a second.
"""

from collections.abc import Iterator
from time import monotonic
from typing import Final, Literal

from msgspec import Struct

from stenolog.errors import NoSuchSession, SessionDeleted, StoreClosed
from stenolog.records import Message, SessionInfo
from stenolog.stores import spans
from stenolog.stores.base import Store

LOOK_SECONDS: Final = 0.5

Kind = Literal["checkpoint", "undo", "hide", "summary", "meta"]
"""checkpoint: the oldest messages went out of sight. undo: messages came back. hide: others went.
summary, meta: nothing but that changed."""


class Changed(Struct, frozen=True, kw_only=True):
    """Something happened to a session that is no message."""

    kind: Kind
    info: SessionInfo
    """What is known of the session since then."""


def follow_changes(
    store: Store, key: str, *, after: int = 0, timeout: float | None = None
) -> Iterator[Message | Changed]:
    """As `store.follow`, and each change of floor, sight, summary and meta as it is seen.

    Changes that were made and taken back between two looks are not told. Raises SessionDeleted.
    """
    known = info_of(store, key)
    heard = looked = monotonic()
    while True:
        left = LOOK_SECONDS if timeout is None else min(LOOK_SECONDS, heard + timeout - monotonic())
        if left <= 0:
            return
        for message in store.follow(key, after=after, timeout=left):
            yield message
            after, heard = message.seq, monotonic()
            if heard - looked > LOOK_SECONDS:
                break  # where somebody talks all the time, it is looked, too
        try:
            found = info_of(store, key)
        except StoreClosed:
            return
        looked = monotonic()
        if known is not None and (found is None or found.uid != known.uid):
            raise SessionDeleted(key)
        for change in changed_between(known, found):
            heard = monotonic()
            yield change
        known = found


def changed_between(before: SessionInfo | None, now: SessionInfo | None) -> list[Changed]:
    """What has happened between two looks, messages aside; None: there was no session. Pure."""
    if before is None or now is None or before.uid != now.uid:
        return []
    # What was said since is news of its own.
    old, new = before.in_sight, spans.clipped(now.in_sight, 1, before.last_seq)
    found: list[Kind] = []
    if spans.minus(new, old):
        found.append("undo")
    elif now.floor > before.floor:
        found.append("checkpoint")
    elif spans.minus(old, new):
        found.append("hide")
    elif now.summary != before.summary:
        found.append("summary")
    if now.meta != before.meta:
        found.append("meta")
    return [Changed(kind=kind, info=now) for kind in found]


def info_of(store: Store, key: str) -> SessionInfo | None:
    """What is known of a session; None where there is none."""
    try:
        return store.info(key)
    except NoSuchSession:
        return None
