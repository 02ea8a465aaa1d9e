"""Results of an import of old sessions, and how they are logged."""

import hashlib
import logging

from msgspec import Struct

from stenolog.errors import StenologError
from stenolog.stores.base import MarkedStore, Store

_logger = logging.getLogger("stenolog")


class ImportedSession(Struct, frozen=True, kw_only=True):
    """An old session that is now in the store."""

    file: str
    layout: str
    key: str
    """Key of the session that contains it."""
    messages: int
    """Number of messages in the file."""
    added: int
    """Number of messages that were not in the store before."""
    already_imported: bool
    """Whether exactly this file was imported before."""
    dropped: int
    """Number of lines or messages of the file that could not be imported."""
    problems: tuple[str, ...]
    """Content that could not be imported and the reason, each as a sentence."""
    aliases: tuple[str, ...] = ()
    """Other keys that open the session from now on."""
    unaccepted_aliases: tuple[str, ...] = ()
    """Other keys that the file names for the session, and that the user has not accepted."""


class SkippedFile(Struct, frozen=True):
    """A file that was not imported."""

    file: str
    reason: str


class ImportReport(Struct, frozen=True, kw_only=True):
    """Result of an import."""

    imported: tuple[ImportedSession, ...] = ()
    skipped: tuple[SkippedFile, ...] = ()
    migrated: int = 0
    """Number of files with the ending of imported files, from this or an earlier import."""

    def combined_with(self, more: "ImportReport") -> "ImportReport":
        """Return the sum of both results."""
        return ImportReport(
            imported=self.imported + more.imported,
            skipped=self.skipped + more.skipped,
            migrated=self.migrated + more.migrated,
        )

    @property
    def sessions(self) -> int:
        """Number of old sessions that were imported now and not before."""
        return sum(not one.already_imported for one in self.imported)

    @property
    def messages(self) -> int:
        """Number of messages that were added to the store."""
        return sum(one.added for one in self.imported)

    @property
    def dropped(self) -> int:
        """Number of lines or messages that could not be imported."""
        return sum(one.dropped for one in self.imported)


def log_report(migrated: ImportReport, store: Store) -> None:
    """Log the result of an import. A file that cannot be imported is a warning only once."""
    if migrated.sessions:
        _logger.info("%d old sessions taken in, %d messages", migrated.sessions, migrated.messages)
    for one in migrated.imported:
        for problem in one.problems:
            _logger.warning("%s: %s", one.file, problem)
    for file in migrated.skipped:
        level = logging.WARNING if _is_new(file, store) else logging.DEBUG
        _logger.log(level, "%s is left as it is: %s", file.file, file.reason)


def _is_new(file: SkippedFile, store: Store) -> bool:
    """Return whether the store has not yet recorded that this file fails for this reason."""
    if not isinstance(store, MarkedStore):
        return True
    digest = hashlib.sha256(f"{file.file}\0{file.reason}".encode("utf-8", "replace")).hexdigest()
    mark = f"left-{digest[:16]}"
    try:
        if store.mark(mark):
            return False
        store.change_mark(mark)
    except StenologError:
        pass  # then it is a warning again at the next start
    return True
