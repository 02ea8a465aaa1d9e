"""Import from SQLite files: the tables of each framework, and how to read them.

Each session is read in one consistent state.
"""

import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Protocol, Self

from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import InvalidKey
from stenolog.sessions import keys
from stenolog.stores.json_file import JSONMessage, NotASession
from stenolog.transfer.importers import adk, langchain, openai_agents
from stenolog.transfer.importers.chat_format import (
    NotAMessage,
    Report,
    as_object,
    filled,
    local_time,
    moment,
    parsed,
)
from stenolog.transfer.importers.legacy_session import (
    EVERY_LAYOUT,
    Layout,
    LegacySession,
    Source,
    SourceFiles,
    with_state_that_fits,
    with_summary_that_fits,
)
from stenolog.transfer.importers.sqlite_file import (
    Row,
    SQLiteFile,
    columns,
    damage,
    is_ours,
    quoted,
    rows_of,
)

TRIES: Final = 3
"""Maximum number of attempts to read a session that changes during the read."""

Columns = Mapping[str, frozenset[str]]
Inside = tuple[str, ...]
"""Identifies one of the sessions in a file."""

_BRANCHES: Final = frozenset({"session_id", "message_id", "branch_id", "sequence_number"})
MAIN: Final = "main"
"""First branch of a session of the OpenAI Agents SDK."""


class Query(Protocol):
    """Function that runs a statement."""

    def __call__(self, sql: str, *values: str, counts: bool = True) -> list[Row]:
        """Return all rows, with texts as bytes.

        `counts`: the rows are part of the session's digest.
        """


class Tables(Protocol):
    """A set of tables that contain sessions."""

    @property
    def layout(self) -> Layout:
        """Layout of such tables."""

    def sessions(self, query: Query) -> list[Inside]:
        """Return the identifier of each session that has messages."""

    def read(self, query: Query, inside: Inside, *, changed: datetime) -> LegacySession:
        """Return one session. Raises NotASession."""


def known(columns: Columns) -> list[Tables]:
    """Return the supported sets of tables among these columns."""
    found: list[Tables] = []
    for table, names in columns.items():
        if names >= {"id", "session_id", "message_data", "created_at"}:
            branches = columns.get("message_structure", frozenset()) >= _BRANCHES
            found.append(AgentTables(table, _sessions_beside(columns), branches))
        elif names == {"id", "session_id", "message"}:
            found.append(MessageStore(table))
    if columns.get("events", frozenset()) >= _ADK and "app_name" in columns.get("sessions", ()):
        found.append(AdkTables(tuple(sorted(columns["events"])), frozenset(columns)))
    return found


# --- the OpenAI Agents SDK -------------------------------------------------------------------


class AgentTables(Struct, frozen=True):
    """Items of the OpenAI Agents SDK: SQLiteSession, and SQLAlchemySession in a SQLite file."""

    messages: str
    about: str | None
    """Name of the table with the times of the sessions."""
    branches: bool
    """Whether AdvancedSQLiteSession assigned the items to branches."""

    @property
    def layout(self) -> Layout:
        """Layout of such tables."""
        return "openai-agents"

    def sessions(self, query: Query) -> list[Inside]:
        """Return each session and each of its branches."""
        table = quoted(self.messages)
        rows = query(f"SELECT session_id, min(id) FROM {table} GROUP BY session_id ORDER BY 2")  # noqa: S608
        found: list[Inside] = [(_name(row[0]), MAIN) for row in rows if row[0] is not None]
        if self.branches:
            rows = query(
                "SELECT session_id, branch_id, min(id) FROM message_structure "
                "GROUP BY session_id, branch_id ORDER BY 3"
            )
            more = [(_name(row[0]), _name(row[1])) for row in rows if None not in row]
            found += [one for one in more if one[1] != MAIN]
        return found

    def read(self, query: Query, inside: Inside, *, changed: datetime) -> LegacySession:
        """Return one session. Raises NotASession."""
        id, branch = inside
        report = Report()
        messages: list[JSONMessage] = []
        encrypted = 0
        for number, (text, at) in enumerate(self._rows(query, id, branch), 1):
            what = f"message {number}"
            try:
                item = as_object(parsed(_bytes(text), what), what)
                if openai_agents.is_encrypted(item):
                    encrypted += 1
                    continue
                message = openai_agents.message_of(item, report)
            except NotAMessage as error:
                words = str(error)
                report.drop(words if words.startswith(what) else f"{what}: {words}")
            except (ValueError, RecursionError) as error:
                report.drop(f"{what} cannot be read: {error}")
            else:
                messages += report.keep(message, _time(at), what)
        if encrypted:
            are = "1 message is" if encrypted == 1 else f"{encrypted:,} messages are"
            report.drop(f"{are} encrypted, and can only be read with the key there", encrypted)
        report.check(messages)
        created, updated = self._times(query, id)
        key = id if branch == MAIN else f"{id}:{branch}"
        return report.session(
            self.layout, key, messages, changed=changed, created=created, updated=updated
        )

    def _rows(self, query: Query, id: str, branch: str) -> list[Row]:
        table = quoted(self.messages)
        if not self.branches:
            of = f"{table} WHERE session_id = ? ORDER BY id"
            return query(f"SELECT message_data, created_at FROM {of}", id)  # noqa: S608
        # Items without a row there were written by a plain SQLiteSession; they are in the first
        # branch.
        return query(
            f"SELECT message_data, created_at FROM {table} m LEFT JOIN message_structure s "  # noqa: S608
            "ON s.message_id = m.id AND s.session_id = m.session_id "
            "WHERE m.session_id = ? AND coalesce(s.branch_id, 'main') = ? "
            "ORDER BY coalesce(s.sequence_number, m.id), m.id",
            id,
            branch,
        )

    def _times(self, query: Query, id: str) -> tuple[datetime | None, datetime | None]:
        if self.about is None:
            return None, None
        table = quoted(self.about)
        rows = query(f"SELECT created_at, updated_at FROM {table} WHERE session_id = ?", id)  # noqa: S608
        for created, updated in rows:
            return _time(created), _time(updated)
        return None, None


def _sessions_beside(columns: Columns) -> str | None:
    """Return the name of the table with the times of the sessions."""
    wanted = {"session_id", "created_at", "updated_at"}
    found = [name for name, has in columns.items() if has == wanted]
    return "agent_sessions" if "agent_sessions" in found else next(iter(found), None)


# --- LangChain -------------------------------------------------------------------------------


class MessageStore(Struct, frozen=True):
    """Messages of LangChain's SQLChatMessageHistory."""

    table: str

    @property
    def layout(self) -> Layout:
        """Layout of such tables."""
        return "langchain"

    def sessions(self, query: Query) -> list[Inside]:
        """Return each session."""
        table = quoted(self.table)
        rows = query(f"SELECT session_id, min(id) FROM {table} GROUP BY session_id ORDER BY 2")  # noqa: S608
        return [(_name(row[0]),) for row in rows if row[0] is not None]

    def read(self, query: Query, inside: Inside, *, changed: datetime) -> LegacySession:
        """Return one session. Raises NotASession."""
        table = quoted(self.table)
        rows = query(f"SELECT message FROM {table} WHERE session_id = ? ORDER BY id", *inside)  # noqa: S608
        report = Report()
        given: list[tuple[str, Any]] = []
        for number, (text,) in enumerate(rows, 1):
            what = f"message {number}"
            try:
                given.append((what, parsed(_bytes(text), what)))
            except NotAMessage as error:
                report.drop(str(error))
        return langchain.session_of(given, report, key=inside[0], changed=changed)


# --- ADK -------------------------------------------------------------------------------------

_ADK: Final = frozenset({"id", "app_name", "user_id", "session_id", "timestamp"})
_PICKLED: Final = "actions"
"""Column in which older versions keep pickled Python. Loading it would run its code."""
_OLD_JSON: Final = (
    "content",
    "grounding_metadata",
    "custom_metadata",
    "usage_metadata",
    "citation_metadata",
    "input_transcription",
    "output_transcription",
    "long_running_tool_ids_json",
)
_NOT_FIELDS: Final = (_PICKLED, "event_data", "app_name", "user_id", "session_id")


class AdkTables(Struct, frozen=True):
    """Events of ADK: SqliteSessionService, and DatabaseSessionService in a SQLite file."""

    columns: tuple[str, ...]
    """Columns of the table of events."""
    tables: frozenset[str]

    @property
    def layout(self) -> Layout:
        """Layout of such tables."""
        return "adk"

    def sessions(self, query: Query) -> list[Inside]:
        """Return each session."""
        rows = query(
            "SELECT app_name, user_id, session_id, min(rowid) FROM events GROUP BY 1, 2, 3 "
            "ORDER BY 4"
        )
        return [tuple(map(_name, row[:3])) for row in rows if None not in row]

    def read(self, query: Query, inside: Inside, *, changed: datetime) -> LegacySession:
        """Return one session. Raises NotASession."""
        app, user, id = inside
        report = Report()
        talk = adk.talk_of(self._events(query, inside, report), report)
        report.check(talk.messages)
        state, created, updated = self._state(query, inside, report)
        return report.session(
            self.layout,
            keys.join(keys.Parts(app, id, user)),
            talk.messages,
            changed=changed,
            created=created,
            updated=updated,
            summary=talk.summary,
            agent=app,
            state=state,
        )

    def _events(self, query: Query, inside: Inside, report: Report) -> list[adk.Event]:
        names = self.columns if "event_data" not in self.columns else ("event_data", "timestamp")
        # The pickled column is not even read, so that no code can load it.
        chosen = [name for name in names if name != _PICKLED]
        rows = query(
            f"SELECT {', '.join(map(quoted, chosen))} FROM events "  # noqa: S608
            "WHERE app_name = ? AND user_id = ? AND session_id = ? ORDER BY timestamp, rowid",
            *inside,
        )
        if "event_data" not in self.columns and _PICKLED in self.columns:  # guard: no-pickle
            report.note(
                "the actions of its events are pickled, and not read: what changed the state, "
                "rewound or compacted is not carried"
            )
        events = []
        for number, row in enumerate(rows, 1):
            what = f"event {number}"
            try:
                events.append(adk.Event(what, _event(dict(zip(chosen, row, strict=True)), what)))
            except NotAMessage as error:
                report.drop(str(error))
        return events

    def _state(
        self, query: Query, inside: Inside, report: Report
    ) -> tuple[dict[str, Any], datetime | None, datetime | None]:
        """Return the state of the session, its user and its app, and the session's times."""
        app, user, id = inside
        state: dict[str, Any] = {"app_name": app, "user_id": user, "id": id}
        rows = query(
            "SELECT state, create_time, update_time FROM sessions "
            "WHERE app_name = ? AND user_id = ? AND id = ?",
            *inside,
        )
        times = [(_time(row[1]), _time(row[2])) for row in rows] or [(None, None)]
        named = [("state", rows)]
        if "user_states" in self.tables:
            sql = "SELECT state FROM user_states WHERE app_name = ? AND user_id = ?"
            named.append(("user_state", query(sql, app, user, counts=False)))
        if "app_states" in self.tables:
            sql = "SELECT state FROM app_states WHERE app_name = ?"
            named.append(("app_state", query(sql, app, counts=False)))
        for name, found in named:
            for row in found[:1]:
                try:
                    state[name] = parsed(_bytes(row[0]), f"its {name.replace('_', ' ')}")
                except NotAMessage as error:
                    report.note(str(error))
        return filled(state), *times[0]


def _event(row: dict[str, Any], what: str) -> dict[str, Any]:
    """Return the fields of an event of any version. Raises NotAMessage."""
    if "event_data" in row:
        fields = as_object(parsed(_bytes(row["event_data"]), what), what)
        return {"timestamp": _stamp(row["timestamp"]), **fields}
    fields = {}
    for name, value in row.items():
        if name in _NOT_FIELDS or value is None:
            continue
        if name in _OLD_JSON:
            fields[name] = parsed(_bytes(value), f"{what}: its {name}")
        else:
            fields[name] = _name(value) if isinstance(value, bytes) else value
    # A time stored as text is local time.
    at = _stamp(row["timestamp"])
    seen = local_time(at)
    return {**fields, "timestamp": at if seen is None else seen.isoformat()}


# --- values ----------------------------------------------------------------------------------


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _name(value: Any) -> str:
    """Return the name of a session; invalid UTF-8 as escapes, so that names stay distinct."""
    return _bytes(value).decode(errors="backslashreplace")


def _time(value: Any) -> datetime | None:
    return moment(_stamp(value))


def _stamp(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class Database:
    """A SQLite file with old sessions. A context manager."""

    def __init__(self, file: Path, *, layouts: frozenset[Layout] = EVERY_LAYOUT) -> None:
        self.path = file.parent
        self._file = file
        self._database = SQLiteFile(file)
        self._layouts = layouts
        self._damage = ""
        self.name = str(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._database.__exit__(*error)

    def sources(self, *, thorough: bool) -> list[Source]:  # noqa: ARG002
        """Return the sessions in the file. Raises NotASession if no table contains sessions."""
        if is_ours(self._file):
            raise NotASession("it is a database of stenolog: -w sqlite:FILE opens it as it is")
        found: list[Source] = []
        with self._database.opened() as connection:
            self._damage = damage(connection)
            tables = self._tables(connection)
            for number, one in enumerate(tables):
                for inside in one.sessions(self._query(connection)):
                    place = (str(number), *inside)
                    found.append(Source(name=self._file.name, body=None, inside=place))
        if not tables:
            raise NotASession("it is a SQLite file without tables of sessions that are known here")
        size = self._file.stat().st_size // max(1, len(found))
        return [replace(source, bytes=size) for source in found]

    def read(self, source: Source) -> SourceFiles:
        """Return one session. Raises NotASession, OSError."""
        number, *inside = source.inside
        moment = datetime.fromtimestamp(0, UTC)
        moment += timedelta(microseconds=self._file.stat().st_mtime_ns // 1000)
        try:
            for _ in range(TRIES):
                before = self._database.marks()
                with self._database.opened() as connection:
                    query = self._query(connection)
                    tables = self._tables(connection)[int(number)]
                    session = tables.read(query, tuple(inside), changed=moment)
                # The file is read without locks, so it may have changed during the read.
                if self._database.marks() == before:
                    break
        except (NotASession, InvalidKey) as error:
            raise NotASession(f"{' '.join(inside)!r}: {error}") from error
        session = with_state_that_fits(with_summary_that_fits(session))
        problems = tuple(f"{session.key!r}: {words}" for words in session.problems)
        if self._damage:
            words = f"the file is damaged, and messages may be missing: {self._damage}"
            problems = (words, *problems)
        return SourceFiles(replace(session, problems=problems), query.digest(), moment, ())

    def _query(self, connection: sqlite3.Connection) -> "_Query":
        return _Query(connection, self._file.stat().st_size)

    def _tables(self, connection: sqlite3.Connection) -> list[Tables]:
        found = known(columns(connection))
        return [tables for tables in found if tables.layout in self._layouts]


class _Query:
    """Function that runs statements and digests the rows."""

    def __init__(self, connection: sqlite3.Connection, size: int) -> None:
        self._connection = connection
        self._size = size
        self._digest = sha256()

    def __call__(self, sql: str, *values: str, counts: bool = True) -> list[Row]:
        rows = rows_of(self._connection, sql, values, size=self._size)
        if counts:
            for row in rows:
                self._digest.update(repr(row).encode())
        return rows

    def digest(self) -> str:
        """Return the digest of all rows that count."""
        return self._digest.hexdigest()
