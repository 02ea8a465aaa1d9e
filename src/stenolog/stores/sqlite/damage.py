"""Messages that are gone, or not as they were stored: left out, counted and reported.

SQLite checks how its pages hang together and not what stands in them: a letter that changed on the
disk comes back as if somebody had said it. So each message has a crc beside it.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any
from zlib import crc32

from stenolog.records import Message, Span
from stenolog.stores import reports, spans
from stenolog.stores.locks import ThreadLock

checksum = crc32
"""`checksum(body, seq)` is stored beside a message. The function itself, because every message that
is read is checked, and a call of ours would take as long again; so the time is not covered."""

read_time = datetime.fromisoformat
"""`read_time(at).tzinfo`, for the same reason: None or ValueError where a time is damaged."""


def moment(text: str | bytes) -> datetime:
    """The time that was written like this. Raises ValueError, UnicodeDecodeError among them."""
    found = read_time(text if isinstance(text, str) else text.decode())
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return found


def legible(rows: Iterable[tuple[Any, ...]]) -> Iterator[tuple[int, str, bytes, int | None]]:
    """Of messages, with their times as bytes, those whose columns hold what belongs there."""
    for seq, at, body, crc in rows:
        if isinstance(seq, int) and isinstance(body, bytes) and isinstance(crc, int | None):
            with suppress(ValueError, AttributeError):
                moment(at)
                yield seq, at.decode(), body, crc


class Damage:
    """The damaged messages that one process has met in a database, as far as it has read."""

    def __init__(self) -> None:
        self._mutex = ThreadLock()
        self._told: set[str] = set()
        self._met: dict[str, list[Span]] = {}

    def note(self, uid: str, lost: Sequence[Span], intact: Iterable[Message]) -> None:
        """What was read of a life of a session; somebody may have put the file back since."""
        if not lost and uid not in self._met:
            return
        with self._mutex:
            known = self._met.pop(uid, [])
            read = spans.union((message.seq, message.seq) for message in intact)
            met = spans.union(spans.minus(known, read), lost)
            if met:
                self._met[uid] = met
        for first, last in spans.minus(lost, known):
            seqs = f"message {first}" if first == last else f"messages {first} to {last}"
            reports.warning(
                "%s of session %s cannot be read: left out; `steno doctor` says more", seqs, uid
            )

    def tell(self, what: str) -> None:
        """Say once what was left out, that is more than a message."""
        with self._mutex:
            known = what in self._told
            self._told.add(what)
        if not known:
            reports.warning("%s cannot be read: left out; `steno doctor` says more", what)

    def of(self, uid: str) -> list[Span]:
        """The seqs of a life of a session that were met damaged or not at all."""
        return list(self._met.get(uid, ()))
