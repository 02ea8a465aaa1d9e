"""Following a session: each message once, by seq, as it arrives from any process.

What is visible to a reader was committed, and by default a commit is on the disk before it is
visible, so nothing that was shown can be taken back by a power cut.
"""

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from stenolog.records import Message
from stenolog.stores.following import News, arrivals

if TYPE_CHECKING:
    from stenolog.stores.sqlite.database import Database

_POLL: Final = 0.03
"""How often other processes are looked for; who writes in this one rings."""


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

    def wait(seconds: float) -> None:
        bell.wait(seconds)
        # Whatever rang until now is seen by the look that follows.
        bell.clear()

    try:
        yield from arrivals(ask, wait, key, after=after, timeout=timeout, poll=_POLL)
    finally:
        bells.remove(bell)
