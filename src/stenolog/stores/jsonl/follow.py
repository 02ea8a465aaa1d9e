"""What is new in a session, for who follows it."""

from typing import Final

from stenolog.stores.following import News
from stenolog.stores.jsonl.directory import explained
from stenolog.stores.jsonl.log import Found, Log
from stenolog.stores.jsonl.table import Logs
from stenolog.stores.jsonl.writer import sync

POLL: Final = 0.02
"""How often the file is looked at."""


def news(logs: Logs, key: str, after: int) -> News | None:
    """What came after this seq; None where there is no session.

    It is on the disk before anybody acts on it: else a power cut could take messages back and
    give their seqs to others.
    """

    def look(log: Log) -> tuple[tuple[Log, str, int], Found]:
        found = log.everything(after=after) if log.next_seq > after + 1 else Found([])
        return (log, log.known_state().uid, log.next_seq - 1), found

    seen = logs.gathered(key, look)
    if seen is None:
        return None
    (log, uid, end), messages = seen
    if messages:
        try:
            sync(log)
        except OSError as error:
            logs.discard(log)
            raise explained(error, f"syncing the log of {key!r}") from error
    return uid, end, messages
