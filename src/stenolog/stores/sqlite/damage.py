"""Messages that are not as they were stored: found by their crc, left out, and reported.

SQLite checks how its pages hang together and not what stands in them: a letter that changed on the
disk comes back as if somebody had said it.
"""

from collections.abc import Iterable
from zlib import crc32

from stenolog.records import Message, Span
from stenolog.stores import reports, spans
from stenolog.stores.locks import ThreadLock

checksum = crc32
"""`checksum(body, seq)` is stored beside a message. The function itself, because every message that
is read is checked, and a call of ours would take as long again; so the time is not covered."""


class Damage:
    """The damaged messages that one process has met in a database, as far as it has read."""

    def __init__(self) -> None:
        self._mutex = ThreadLock()
        self._met: dict[str, set[int]] = {}

    def note(self, uid: str, damaged: Iterable[int], intact: Iterable[Message]) -> None:
        """What was read of a life of a session; somebody may have put the file back since."""
        bad = set(damaged)
        if not bad and uid not in self._met:
            return
        with self._mutex:
            known = self._met.pop(uid, set())
            met = (known - {message.seq for message in intact}) | bad
            if met:
                self._met[uid] = met
        for seq in sorted(bad - known):
            reports.warning(
                "message %d of session %s is damaged and left out; `steno doctor` says more",
                seq,
                uid,
            )

    def of(self, uid: str) -> list[Span]:
        """The seqs of a life of a session that were met damaged."""
        return spans.union((seq, seq) for seq in self._met.get(uid, ()))
