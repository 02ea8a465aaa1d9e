"""Replaces the visible messages of a session without hiding messages that arrive concurrently."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from stenolog.errors import StaleHistory
from stenolog.records import Message
from stenolog.sessions.session_store import SessionStore
from stenolog.stores.base import SessionView, Store, find_info, find_view

NewHistory = Sequence[Message | Mapping[str, Any]]
RewriteResult = Literal["done", "unchanged", "message arrived"]
"""Outcome of `replace_history`. Only "done" means that the visible messages were replaced."""


def replace_history(
    sessions: SessionStore,
    key: str,
    make_history: Callable[[Sequence[Message]], NewHistory | None],
    view: SessionView | None = None,
) -> RewriteResult:
    """Replace the visible messages of a session, in one operation of the store.

    `make_history` receives the visible messages and returns the new messages, or None for no
    change. If a message arrives before the operation is stored, nothing changes. Messages that
    another process hides at the same time stay hidden. After a crash, either the old or the new
    messages are visible. `view`: a view of the session that the caller has just read. This call
    blocks. Only the lease holder may call this function. Raises NoSuchSession if the session is
    gone.
    """
    if view is None:
        view = find_view(sessions.store, key)
    visible_messages = () if view is None else view.messages
    history = make_history(visible_messages)
    if history is None:
        return "unchanged"
    # `last_seq` would be wrong: it includes a message that another process is still writing.
    upto = 0 if view is None else view.upto
    try:
        sessions.store.set_history(key, history, expect_last=upto)
    except StaleHistory:
        if view is not None:
            sessions.store.info(key)  # raises NoSuchSession if the session is gone
        return "message arrived"
    if view is not None:
        _hide_copies(sessions.store, view, history)
    return "done"


def _hide_copies(store: Store, view: SessionView, history: NewHistory) -> None:
    """Hide copies of messages that another process hid after `view` was read.

    The messages with which both `view` and `history` start normally keep their seqs. `set_history`
    stores copies of these messages only if another process has hidden some of the originals, for
    example with `clear`.
    """
    pairs = zip(view.messages, history, strict=False)
    common_count = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
    new_count = len(history) - common_count
    info = store.info(view.key)
    if info.uid != view.uid or info.last_seq <= view.upto + new_count:
        return
    bodies = [item.to_dict() if isinstance(item, Message) else dict(item) for item in history]
    stored = [item.to_dict() for item in store.get_history(view.key, after=view.upto, full=True)]
    for position in range(common_count):
        copied_count = len(bodies) - position
        if stored[:copied_count] == bodies[position:]:
            last_copy_seq = view.upto + copied_count - new_count
            store.hide(view.key, view.upto + 1, last_copy_seq)
            return


def last_seq(sessions: SessionStore, key: str) -> int:
    """Return the last seq of a session, including hidden messages; 0 if there is no session."""
    info = find_info(sessions.store, key)
    return 0 if info is None else info.last_seq
