"""Messages that are gone, or not as they were stored: left out, counted and reported.

SQLite checks how its pages hang together and not what stands in them: a letter that changed on the
disk comes back as if somebody had said it. So each message has a crc beside it.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any
from zlib import crc32

from stenolog.stores.rows import moment

checksum = crc32
"""`checksum(body, seq)` is stored beside a message. The function itself, because every message that
is read is checked, and a call of ours would take as long again; so the time is not covered."""


def legible(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, str, bytes, int | None]]:
    """Of messages, with their times as bytes, those whose columns hold what belongs there."""
    for seq, at, body, crc in rows:
        if isinstance(seq, int) and isinstance(body, bytes) and isinstance(crc, int | None):
            with suppress(ValueError, AttributeError):
                moment(at)
                yield seq, at.decode(), body, crc
