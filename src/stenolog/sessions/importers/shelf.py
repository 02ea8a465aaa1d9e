"""Where old sessions stand: a folder of files, a database, a tree; each is a shelf of sources."""

import re
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol, Self

from msgspec import Struct

from stenolog.sessions.importers.old import OF_THE_REFERENCE, Layout, OldSession
from stenolog.sessions.importers.pairs import MIGRATED

TAKEN_IN: Final = re.compile(rf"\.json(?:l)?{re.escape(MIGRATED)}(?:-\d+)?$")
"""How the name of a file ends that was taken in."""


class Source(Struct, frozen=True, kw_only=True):
    """The file or files of one old session."""

    name: str
    """What the session's own file was called before anything was renamed."""
    body: str | None
    """The file with the messages, as it is called now; None where there is only a meta."""
    meta: str | None = None
    """The `.meta.json` beside, as it is called now."""
    inside: tuple[str, ...] = ()
    """Which of the sessions in that file, where it holds several."""
    layouts: frozenset[Layout] = OF_THE_REFERENCE
    """Those it may have; of any other it is no session."""
    bytes: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        """The files that are this session's alone: the meta first, as it is renamed first."""
        found = [name for name in (self.meta, self.body) if name is not None]
        return tuple(name for name in found if TAKEN_IN.search(name) is None)


class Found(Struct, frozen=True):
    """An old session, read."""

    session: OldSession
    digest: str
    """Of all its bytes: the same file is never taken in twice."""
    changed: datetime
    marks: tuple[tuple[int, int, int], ...]


class Shelf(Protocol):
    """A place with old sessions, which are read there and never changed."""

    path: Path
    """The folder that the names of its sources are in."""

    @property
    def name(self) -> str:
        """What it is called in a report."""

    def __enter__(self) -> Self:
        """Look at it as it is now."""

    def __exit__(self, *error: object) -> None:
        """Let go of it."""

    def sources(self, *, thorough: bool) -> list[Source]:
        """The old sessions, in the order in which they are taken in. Raises NotASession."""

    def read(self, source: Source) -> Found:
        """The session of a source. Raises NotASession, OSError."""

    def aliases(self, source: Source) -> tuple[str, ...]:
        """The aliases that a session claims."""

    def taken_in(self) -> int:
        """How many files there have the ending that says so."""
