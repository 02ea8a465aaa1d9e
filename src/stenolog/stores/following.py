"""Following a session: new messages as they arrive, and changes of visibility, summary and meta.

`poll_messages` is shared by the engines. `follow_changes` uses only calls that every store has, so
it behaves the same on all stores: it compares `info()` between messages. `follow_changes` reports a
message immediately and a change within half a second.
"""

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Final, Literal

from msgspec import Struct

from stenolog.errors import SessionDeleted, StoreClosed
from stenolog.records import Message, SessionInfo
from stenolog.stores import spans
from stenolog.stores.arguments import check_store
from stenolog.stores.base import Store, find_info

CHECK_SECONDS: Final = 0.5
"""Seconds between two checks for changes other than new messages."""

NewMessages = tuple[str, int, list[Message]]
"""Uid of the session, its last seq, and the new messages."""

# The kind `checkpoint` means that the oldest messages were hidden.
# The kind `hide` means that other messages were hidden.
# The kind `undo` means that hidden messages are visible again.
# The kind `summary` means that the summary changed, but no message was hidden or shown.
# The kind `meta` means that the meta of the session changed.
ChangeKind = Literal["checkpoint", "undo", "hide", "summary", "meta"]


def poll_messages(
    fetch: Callable[[int], NewMessages | None],
    wait: Callable[[float], object],
    key: str,
    *,
    after: int,
    uid: str | None,
    timeout: float | None,
    poll: float,
) -> Iterator[Message]:
    """Yield the messages after a seq; end if none arrives for `timeout` seconds, or on close.

    `fetch` returns None if the session does not exist; `poll` is the time between two fetches, in
    seconds. `wait` returns after the given seconds, or earlier. `uid`: follow only the session with
    this uid; None follows the first session that `fetch` returns. Raises SessionDeleted if the
    followed session no longer has the key.
    """
    idle_since = monotonic()
    while True:
        try:
            result = fetch(after)
        except StoreClosed:
            return
        if uid is not None and (result is None or result[0] != uid):
            raise SessionDeleted(key, recreated=result is not None)
        if result is not None:
            uid, last_seq, messages = result
            yield from messages
            if last_seq > after:
                after = last_seq
                idle_since = monotonic()
                continue
        wait_seconds = poll
        if timeout is not None:
            wait_seconds = min(poll, idle_since + timeout - monotonic())
            if wait_seconds <= 0:
                return
        wait(wait_seconds)


class SessionChange(Struct, frozen=True, kw_only=True):
    """A change of a session other than a new message."""

    kind: ChangeKind
    info: SessionInfo
    """Info of the session after the change."""


def follow_changes(
    store: Store, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
) -> Iterator[Message | SessionChange]:
    """Yield messages like `store.follow`, and each change of floor, visibility, summary and meta.

    Changes that were made and undone between two polls are not reported. Raises SessionDeleted,
    and UsageError if `store` is not a Store.
    """
    check_store(store, "follow_changes")
    last_info = find_info(store, key)
    if uid is not None and (last_info is None or last_info.uid != uid):
        raise SessionDeleted(key, recreated=last_info is not None)
    last_activity = last_check = monotonic()
    while True:
        wait_seconds = (
            CHECK_SECONDS
            if timeout is None
            else min(CHECK_SECONDS, last_activity + timeout - monotonic())
        )
        if wait_seconds <= 0:
            return
        if last_info is None:
            # Wait until the session exists; its messages are read once its uid is known.
            first_message = next(store.follow(key, after=after, timeout=wait_seconds), None)
            try:
                last_info = find_info(store, key)
            except StoreClosed:
                return
            if first_message is not None:
                last_activity = monotonic()
            continue
        for message in store.follow(key, after=after, uid=last_info.uid, timeout=wait_seconds):
            yield message
            after, last_activity = message.seq, monotonic()
            if last_activity - last_check > CHECK_SECONDS:
                break  # check for changes even if messages arrive all the time
        try:
            info = find_info(store, key)
        except StoreClosed:
            return
        last_check = monotonic()
        if info is None or info.uid != last_info.uid:
            raise SessionDeleted(key, recreated=info is not None)
        for change in changes_between(last_info, info):
            last_activity = monotonic()
            yield change
        last_info = info


def changes_between(
    old_info: SessionInfo | None, new_info: SessionInfo | None
) -> list[SessionChange]:
    """Return the changes between two infos, except new messages.

    An info of None means that the session does not exist.
    """
    if old_info is None or new_info is None or old_info.uid != new_info.uid:
        return []
    # Compare only the old messages: new messages are reported separately.
    old_visible, new_visible = (
        old_info.visible_spans,
        spans.clipped(new_info.visible_spans, 1, old_info.last_seq),
    )
    kinds: list[ChangeKind] = []
    if spans.minus(new_visible, old_visible):
        kinds.append("undo")
    elif new_info.floor > old_info.floor:
        kinds.append("checkpoint")
    elif spans.minus(old_visible, new_visible):
        kinds.append("hide")
    elif new_info.summary != old_info.summary:
        kinds.append("summary")
    if new_info.meta != old_info.meta:
        kinds.append("meta")
    return [SessionChange(kind=kind, info=new_info) for kind in kinds]
