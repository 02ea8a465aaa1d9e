"""Log messages for the logger `stenolog`.

`logging` is imported only with the first log message. Most processes log nothing, so they start
faster.
"""

import sys
from collections.abc import Iterable, Sequence

from stenolog.records import Message, Span
from stenolog.stores import spans
from stenolog.stores.locks import ThreadLock


def warning(text: str, *values: object) -> None:
    """Log a warning."""
    try:
        import logging
    except (ImportError, OSError):
        # A process without free file descriptors cannot import modules: write to stderr instead.
        # This bypasses no handler, because a program with handlers has already imported `logging`.
        sys.stderr.write(f"{text % values}\n")
        return
    logging.getLogger("stenolog").warning(text, *values, stacklevel=2)


def info(text: str, *values: object) -> None:
    """Log an informational message, if the program has imported `logging`."""
    if "logging" in sys.modules:
        sys.modules["logging"].getLogger("stenolog").info(text, *values, stacklevel=2)


class DamageReports:
    """Damage that this process has found and reported so far."""

    def __init__(self) -> None:
        self._mutex = ThreadLock()
        self._reported_subjects: set[str] = set()
        self._lost_by_uid: dict[str, list[Span]] = {}

    def record_read(self, uid: str, lost: Sequence[Span], intact: Iterable[Message]) -> None:
        """Record the lost seqs and the intact messages of one read of a session.

        A seq that is intact now no longer counts as lost: a backup may have replaced the database
        file.
        """
        if not lost and uid not in self._lost_by_uid:
            return
        with self._mutex:
            known_lost = self._lost_by_uid.pop(uid, [])
            intact_seqs = spans.from_seqs(message.seq for message in intact)
            all_lost = spans.union(spans.minus(known_lost, intact_seqs), lost)
            if all_lost:
                self._lost_by_uid[uid] = all_lost
        for first, last in spans.minus(lost, known_lost):
            skipped = f"message {first}" if first == last else f"messages {first} to {last}"
            warning("session %s: skipped %s, damaged; run `steno doctor` for details", uid, skipped)

    def report_once(self, subject: str, *, action_taken: str = "skipped") -> None:
        """Warn once per `subject` that it cannot be read, and name the action that was taken."""
        with self._mutex:
            is_known = subject in self._reported_subjects
            self._reported_subjects.add(subject)
        if not is_known:
            warning("%s cannot be read: %s; run `steno doctor` for details", subject, action_taken)

    def lost_seqs(self, uid: str) -> list[Span]:
        """Return the known damaged or missing seqs of the session with this uid."""
        return list(self._lost_by_uid.get(uid, ()))
