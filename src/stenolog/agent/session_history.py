"""Functions that read and change the messages of a session, for turns and commands.

Another process may change the session at any moment: add or hide messages, or delete the session.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Any, Literal

from stenolog.agent.stored_answers import end_of
from stenolog.catalog.message_metadata import is_received, model_of, without_marks
from stenolog.codec import encode_message
from stenolog.errors import (
    Conflict,
    MaybeStored,
    NoSuchSession,
    OnceConflict,
    SessionDeleted,
    StenologError,
    StoreUnavailable,
)
from stenolog.messages import Body, body_of, calls_of, has_text
from stenolog.records import Message
from stenolog.stores.base import SessionView, Store, find_info, find_view, fork_seq_of

NewHistory = Sequence[Message | Mapping[str, Any]]
ReplaceResult = Literal["done", "unchanged", "message arrived"]
"""Outcome of `replace_history`. Only "done" means that the visible messages were replaced."""


def replace_history(
    store: Store,
    key: str,
    make_history: Callable[[Sequence[Message]], NewHistory | None],
    view: SessionView | None = None,
) -> ReplaceResult:
    """Replace the visible messages of a session, in one operation of the store.

    `make_history` receives the visible messages and returns the new messages, or None for no
    change. If a message arrives before the operation is stored, nothing changes. Messages that
    another process hides at the same time stay hidden. After a crash, either the old or the new
    messages are visible. `view`: a view of the session that the caller has just read. This call
    blocks. Only the lease holder may call this function. Raises NoSuchSession if the session is
    gone.
    """
    if view is None:
        view = find_view(store, key)
    history = make_history(() if view is None else view.messages)
    if history is None:
        return "unchanged"
    # `last_seq` would be wrong: it includes a message that another process is still writing.
    upto = 0 if view is None else end_of(view)
    try:
        store.set_history(key, history, expect_last=upto)
    except Conflict:
        if view is not None:
            store.info(key)  # raises NoSuchSession if the session is gone
        return "message arrived"
    if view is not None:
        _hide_copies(store, view, history)
    return "done"


def _hide_copies(store: Store, view: SessionView, history: NewHistory) -> None:
    """Hide copies of messages that another process hid after `view` was read.

    The messages in the common prefix of `view` and `history` normally keep their seqs.
    `set_history` stores copies of messages in the prefix only if another process has hidden some of
    the originals, for example with `clear`.
    """
    pairs = zip(view.messages, history, strict=False)
    prefix_length = sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))
    new_count = len(history) - prefix_length
    info = store.info(view.key)
    if info.uid != view.uid or info.last_seq <= view.upto + new_count:
        return
    bodies = list(map(body_of, history))
    stored_bodies = list(map(body_of, store.get_history(view.key, after=view.upto, full=True)))
    for start in range(prefix_length):
        copied_count = len(bodies) - start
        if stored_bodies[:copied_count] == bodies[start:]:
            last_copy_seq = view.upto + copied_count - new_count
            store.admin.hide(view.key, view.upto + 1, last_copy_seq)
            return


def append_once(store: Store, key: str, body: Mapping[str, Any], *, once: str = "") -> int:
    """Append a message and return its seq. This call blocks. Raises the errors of the store.

    `once`: the idempotency key; without a key, one is generated.
    """
    append = partial(store.add_full_message, key, body, once=once or secrets.token_hex(12))
    try:
        return _repeat_if_unknown(append)
    except OnceConflict as conflict:
        # Another program may have stored the same message with this id and other metadata.
        stored = store.get_history(key, after=conflict.seq - 1, full=True)[:1]
        contents = [without_marks(message.to_dict()) for message in stored]
        if contents == [without_marks(body)] and stored[0].seq == conflict.seq:
            return conflict.seq
        raise


def _repeat_if_unknown(append: Callable[[], int]) -> int:
    """Append a message that has an idempotency key; if the outcome is unknown, try again once."""
    try:
        return append()
    except MaybeStored as error:
        try:
            return append()
        except StoreUnavailable:
            raise error from None  # the outcome of the first attempt is still unknown


def read_last_seq(store: Store, key: str) -> int:
    """Return the last seq of a session, including hidden messages; 0 if there is no session."""
    info = find_info(store, key)
    return 0 if info is None else info.last_seq


# --- unfinished turns -----------------------------------------------------------------------------
# Only unfinished turns that a stenolog agent started are resumed.
#
# A stenolog agent marks every user message that it receives (docs/decisions/0012).
# Messages stored by another program and imported messages have no mark.
# A turn that a fork copied is resumed only in the source session.


def is_own_turn(history: Sequence[Message], *, after: int) -> bool:
    """Return whether a stenolog agent received the last user message.

    Returns False if the seq of that message is not above `after`.
    """
    return is_received(next(filter(has_text, _bodies_after(history, after)), {}))


def has_own_last_calls(history: Sequence[Message], *, after: int) -> bool:
    """Return whether a stenolog agent stored the last tool calls.

    Returns False if the seq of the message with these calls is not above `after`.
    """
    return model_of(next(filter(calls_of, _bodies_after(history, after)), {})) is not None


def _bodies_after(history: Sequence[Message], seq: int) -> Iterator[Body]:
    """Yield the bodies of the messages after this seq, newest first."""
    return (message.to_dict() for message in reversed(history) if message.seq > seq)


def read_fork_seq(store: Store, key: str) -> int:
    """Return the seq up to which a session was copied from another session, or 0."""
    info = find_info(store, key)
    return 0 if info is None else fork_seq_of(info)


def last_user_message(history: Sequence[Message]) -> Message | None:
    """Return the newest user message with text, or None."""
    return next((message for message in reversed(history) if has_text(message.to_dict())), None)


# --- deleted sessions -----------------------------------------------------------------------------


def refresh_view(store: Store, key: str, old_view: SessionView | None) -> SessionView:
    """Return a view of a session; read only messages that `old_view` does not have."""
    return (
        store.view(key)
        if old_view is None
        else old_view.merged(store.view(old_view.key, since=old_view))
    )


def missing_session_error(store: Store, key: str) -> NoSuchSession:
    """Return the error for a deleted or purged session."""
    with suppress(StenologError):
        if any(entry.key == key for entry in store.admin.list_trash()):
            return SessionDeleted(key)
    return NoSuchSession(key)


def withdraw_message(
    store: Store, old_view: SessionView, seq: int, body: Mapping[str, Any]
) -> None:
    """Withdraw a message that this process wrote into a new session with the key of `old_view`.

    No message is destroyed. A new session with only this message goes into the trash; in any other
    session the message is hidden.
    """
    key = old_view.key
    with suppress(StenologError):
        new_view = store.view(key)
        messages_at_seq = [message for message in new_view.messages if message.seq == seq]
        bodies_at_seq = [encode_message(message.to_dict()) for message in messages_at_seq]
        if new_view.uid == old_view.uid or encode_message(body) not in bodies_at_seq:
            return  # the new session was deleted as well, or the old session was restored
        if new_view.info.count == 1:
            with suppress(StoreUnavailable):  # a fallback store refuses to delete
                if store.admin.delete_unchanged(new_view.info) is not None:
                    return
        if store.info(key).uid == new_view.uid:
            store.admin.hide(key, seq, seq)
