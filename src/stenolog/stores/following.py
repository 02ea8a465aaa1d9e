"""Reading new messages of a session as they arrive, shared by the engines."""

from collections.abc import Callable, Iterator
from time import monotonic

from stenolog.errors import SessionDeleted, StoreClosed
from stenolog.records import Message

NewMessages = tuple[str, int, list[Message]]
"""Uid of the session, its last seq, and the new messages."""


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
