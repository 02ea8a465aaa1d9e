"""Following a session: each message once, by seq, as it arrives from any process.

What is visible to a reader was committed, and by default a commit is on the disk before it is
visible, so nothing that was shown can be taken back by a power cut.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from stenolog.errors import SessionDeleted, StoreClosed
from stenolog.records import Message

if TYPE_CHECKING:
    from stenolog.stores.sqlite.database import Database

_POLL: Final = 0.03
"""How often other processes are looked for; who writes in this one rings."""

News = tuple[str, int, list[Message]]
"""The uid of a session, its last seq, and the messages that are new."""


def follow(
    database: "Database",
    ask: Callable[[int], News | None],
    key: str,
    *,
    after: int,
    timeout: float | None,
) -> Iterator[Message]:
    """Ask again and again what is new, until the store is closed or nothing came for long."""
    bell = threading.Event()
    bells = database.bells
    bells.append(bell)
    try:
        yield from _arrivals(bell, ask, key, after=after, timeout=timeout)
    finally:
        bells.remove(bell)


def _arrivals(
    bell: threading.Event,
    ask: Callable[[int], News | None],
    key: str,
    *,
    after: int,
    timeout: float | None,
) -> Iterator[Message]:
    uid: str | None = None
    idle_since = time.monotonic()
    while True:
        bell.clear()
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
        left = _POLL
        if timeout is not None:
            left = min(_POLL, idle_since + timeout - time.monotonic())
            if left <= 0:
                return
        bell.wait(left)
