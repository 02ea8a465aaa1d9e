"""Following a session: each message once, by seq, as it arrives. The same on every engine."""

import time
from collections.abc import Callable, Iterator

from stenolog.errors import SessionDeleted, StoreClosed
from stenolog.records import Message

News = tuple[str, int, list[Message]]
"""The uid of a session, its last seq, and the messages that are new."""


def arrivals(
    ask: Callable[[int], News | None],
    wait: Callable[[float], object],
    key: str,
    *,
    after: int,
    timeout: float | None,
    poll: float,
) -> Iterator[Message]:
    """Ask again and again what came after a seq, until the store is closed or it took too long.

    `ask` answers None where there is no session; `wait` returns after so many seconds, or earlier.
    """
    uid: str | None = None
    idle_since = time.monotonic()
    while True:
        try:
            found = ask(after)
        except StoreClosed:
            return
        if uid is not None and (found is None or found[0] != uid):
            raise SessionDeleted(key)
        if found is not None:
            uid, end, messages = found
            yield from messages
            if end > after:
                after = end
                idle_since = time.monotonic()
                continue
        left = poll
        if timeout is not None:
            left = min(poll, idle_since + timeout - time.monotonic())
            if left <= 0:
                return
        wait(left)
