"""Following a session: each message once, by seq, as it arrives from any process."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from stenolog.errors import SessionDeleted, StoreClosed
from stenolog.records import Message
from stenolog.stores.jsonl.directory import explained
from stenolog.stores.jsonl.log import Found, Log
from stenolog.stores.jsonl.table import Logs
from stenolog.stores.jsonl.writer import sync

_POLL: Final = 0.02

News = tuple[str, int, list[Message]]
"""The uid of a session, its last seq, and the messages that are new."""


def news(logs: Logs, key: str, after: int) -> News | None:
    """What came after this seq; None where there is no session.

    It is on the disk before anybody acts on it: else a power cut could take messages back and
    give their seqs to others.
    """

    def look(log: Log) -> tuple[Log, str, int, Found]:
        found = log.everything(after=after) if log.next_seq > after + 1 else Found([])
        return log, log.known_state().uid, log.next_seq - 1, found

    seen = logs.read(key, look)
    if seen is None:
        return None
    log, uid, end, found = seen
    messages = logs.completed(log, found)
    if messages:
        try:
            sync(log)
        except OSError as error:
            logs.discard(log)
            raise explained(error, f"syncing the log of {key!r}") from error
    return uid, end, messages


def follow(
    ask: Callable[[int], News | None],
    closed: threading.Event,
    key: str,
    *,
    after: int,
    timeout: float | None,
) -> Iterator[Message]:
    """Ask again and again what is new, until the store is closed or nothing came for long."""
    uid: str | None = None
    idle_since = time.monotonic()
    while not closed.is_set():
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
        if timeout is not None and time.monotonic() - idle_since >= timeout:
            return
        closed.wait(_POLL)
