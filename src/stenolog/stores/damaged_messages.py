"""Damaged or missing messages that this process found in a database."""

from collections.abc import Iterable, Sequence

from stenolog.records import Message, Span
from stenolog.stores import log_reports, spans
from stenolog.stores.locks import ThreadLock


class DamageReports:
    """Damaged messages that this process found in a database, as far as it has read it."""

    def __init__(self) -> None:
        self._mutex = ThreadLock()
        self._reported: set[str] = set()
        self._lost: dict[str, list[Span]] = {}

    def record_read(self, uid: str, lost: Sequence[Span], intact: Iterable[Message]) -> None:
        """Record the outcome of a read of one session: lost seqs, and intact messages.

        Seqs that are intact now are removed: the database file may have been replaced by a backup.
        """
        if not lost and uid not in self._lost:
            return
        with self._mutex:
            known = self._lost.pop(uid, [])
            read = spans.union((message.seq, message.seq) for message in intact)
            missing = spans.union(spans.minus(known, read), lost)
            if missing:
                self._lost[uid] = missing
        for first, last in spans.minus(lost, known):
            seqs = f"message {first}" if first == last else f"messages {first} to {last}"
            log_reports.warning(
                "session %s: skipped %s, damaged; run `steno doctor` for details", uid, seqs
            )

    def report_once(self, what: str, *, done: str = "skipped") -> None:
        """Report once that something other than a message is damaged, and what was done."""
        with self._mutex:
            known = what in self._reported
            self._reported.add(what)
        if not known:
            log_reports.warning("%s cannot be read: %s; run `steno doctor` for details", what, done)

    def lost_seqs(self, uid: str) -> list[Span]:
        """Return the known damaged or missing seqs of the session with this uid."""
        return list(self._lost.get(uid, ()))
