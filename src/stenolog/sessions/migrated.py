"""What became of old sessions that were to be taken in, and telling it in the log."""

import hashlib
import logging

from msgspec import Struct

from stenolog.errors import StenologError
from stenolog.stores.base import MarkedStore, Store

_logger = logging.getLogger("stenolog")


class Taken(Struct, frozen=True, kw_only=True):
    """An old session that is in the store now."""

    file: str
    layout: str
    key: str
    """The session that has it."""
    messages: int
    """How many there are in the file."""
    added: int
    """How many of them were not in the store before."""
    known: bool
    """Whether this very file had been taken in before."""
    dropped: int
    """How many lines or messages of the file could not be carried."""
    problems: tuple[str, ...]
    """What could not be carried, and why, each as a sentence."""
    aliases: tuple[str, ...] = ()
    """Other keys that open the session from now on."""
    aliases_left: tuple[str, ...] = ()
    """Other keys that the file names for the session, and that the user has not accepted."""


class Left(Struct, frozen=True):
    """A file that was left alone."""

    file: str
    reason: str


class Migrated(Struct, frozen=True, kw_only=True):
    """What became of the old sessions."""

    taken: tuple[Taken, ...] = ()
    left: tuple[Left, ...] = ()
    migrated: int = 0
    """How many files there have the ending of those that were taken in, now or before."""

    def and_then(self, more: "Migrated") -> "Migrated":
        """Both together."""
        return Migrated(
            taken=self.taken + more.taken,
            left=self.left + more.left,
            migrated=self.migrated + more.migrated,
        )

    @property
    def sessions(self) -> int:
        """How many old sessions were taken in now, and not before."""
        return sum(not one.known for one in self.taken)

    @property
    def messages(self) -> int:
        """How many messages were added to the store."""
        return sum(one.added for one in self.taken)

    @property
    def dropped(self) -> int:
        """How many lines or messages could not be carried."""
        return sum(one.dropped for one in self.taken)


def report(migrated: Migrated, store: Store) -> None:
    """Log what became of old sessions. A file that cannot be imported is a warning only once."""
    if migrated.sessions:
        _logger.info("%d old sessions taken in, %d messages", migrated.sessions, migrated.messages)
    for one in migrated.taken:
        for words in one.problems:
            _logger.warning("%s: %s", one.file, words)
    for file in migrated.left:
        level = logging.WARNING if _is_new(file, store) else logging.DEBUG
        _logger.log(level, "%s is left as it is: %s", file.file, file.reason)


def _is_new(file: Left, store: Store) -> bool:
    """Whether the store was not told before that this file cannot be imported for this reason."""
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
