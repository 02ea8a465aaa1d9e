"""A SQLite file with the sessions of a framework: each is read as it is in that moment."""

import sqlite3
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Final, Self

from msgspec.structs import replace

from stenolog.errors import InvalidKey
from stenolog.sessions.importers.old import (
    EVERY_LAYOUT,
    Layout,
    with_state_that_fits,
    with_summary_that_fits,
)
from stenolog.sessions.importers.shelf import Found, Source
from stenolog.sessions.importers.sqlite_file import Row, SQLiteFile, columns, damage, is_ours
from stenolog.sessions.importers.tables import Tables, known
from stenolog.stores.json_file import NotASession

TRIES: Final = 3
"""How often a session is read again that changed meanwhile."""


class Database:
    """A SQLite file with old sessions. A context manager."""

    def __init__(self, file: Path, *, layouts: frozenset[Layout] = EVERY_LAYOUT) -> None:
        self.path = file.parent
        self._file = file
        self._database = SQLiteFile(file)
        self._layouts = layouts
        self._damage = ""

    @property
    def name(self) -> str:
        """What it is called in a report."""
        return str(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._database.__exit__(*error)

    def sources(self, *, thorough: bool) -> list[Source]:  # noqa: ARG002
        """The sessions in it. Raises NotASession where there is no table of any."""
        if is_ours(self._file):
            raise NotASession("it is a database of stenolog: -w sqlite:FILE opens it as it is")
        found: list[Source] = []
        with self._database.opened() as connection:
            self._damage = damage(connection)
            tables = self._tables(connection)
            for number, one in enumerate(tables):
                for inside in one.sessions(_Query(connection)):
                    place = (str(number), *inside)
                    found.append(Source(name=self._file.name, body=None, inside=place))
        if not tables:
            raise NotASession("it is a SQLite file without tables of sessions that are known here")
        size = self._file.stat().st_size // max(1, len(found))
        return [replace(source, bytes=size) for source in found]

    def read(self, source: Source) -> Found:
        """One session. Raises NotASession, OSError."""
        number, *inside = source.inside
        moment = datetime.fromtimestamp(0, UTC)
        moment += timedelta(microseconds=self._file.stat().st_mtime_ns // 1000)
        try:
            for _ in range(TRIES):
                before = self._database.marks()
                with self._database.opened() as connection:
                    query = _Query(connection)
                    tables = self._tables(connection)[int(number)]
                    session = tables.read(query, tuple(inside), changed=moment)
                # Read without locks, it may have changed under our eyes.
                if self._database.marks() == before:
                    break
        except (NotASession, InvalidKey) as error:
            raise NotASession(f"{' '.join(inside)!r}: {error}") from error
        session = with_state_that_fits(with_summary_that_fits(session))
        problems = tuple(f"{session.key!r}: {words}" for words in session.problems)
        if self._damage:
            words = f"the file is damaged, and messages may be missing: {self._damage}"
            problems = (words, *problems)
        return Found(replace(session, problems=problems), query.digest(), moment, ())

    def aliases(self, source: Source) -> tuple[str, ...]:  # noqa: ARG002
        """None: it has no other names."""
        return ()

    def taken_in(self) -> int:
        """None: it is never renamed."""
        return 0

    def _tables(self, connection: sqlite3.Connection) -> list[Tables]:
        found = known(columns(connection))
        return [tables for tables in found if tables.layout in self._layouts]


class _Query:
    """Runs statements, and sums up what was read."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._digest = sha256()

    def __call__(self, sql: str, *values: str, counts: bool = True) -> list[Row]:
        rows = self._connection.execute(sql, values).fetchall()
        if counts:
            for row in rows:
                self._digest.update(repr(row).encode())
        return rows

    def digest(self) -> str:
        """Of all that counted."""
        return self._digest.hexdigest()
