"""Import from SQLite files: the tables of each framework, and how to read them.

Each session is read in one consistent state.
"""

import re
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
    ImportProblems,
    NotAMessage,
    as_object,
    non_empty,
    parse_json,
    parse_local_time,
    parse_time,
)
from stenolog.transfer.importers.conversation_lines import (
    ConversationLines,
    is_conversation_lines,
)
from stenolog.transfer.importers.folder import Folder
from stenolog.transfer.importers.legacy_session import (
    ALL_LAYOUTS,
    REFERENCE_LAYOUTS,
    Layout,
    LegacySession,
    Source,
    SourceContent,
    SourceFolder,
    drop_oversized_state,
    drop_oversized_summary,
)
from stenolog.transfer.importers.sqlite_file import (
    Row,
    SQLiteFile,
    check_integrity,
    fetch_rows,
    is_sqlite_file,
    is_stenolog_database,
    quote_name,
    table_columns,
)
from stenolog.transfer.importers.strands import StrandsFolder, is_session_folder

MAX_READ_ATTEMPTS: Final = 3
"""Maximum number of attempts to read a session that changes during the read."""

Columns = Mapping[str, frozenset[str]]
SessionIdentifier = tuple[str, ...]
"""Identifies one of the sessions in a file."""

_BRANCHES: Final = frozenset({"session_id", "message_id", "branch_id", "sequence_number"})
MAIN_BRANCH: Final = "main"
"""First branch of a session of the OpenAI Agents SDK."""


class Query(Protocol):
    """Function that runs a statement."""

    def __call__(self, sql: str, *values: str, in_digest: bool = True) -> list[Row]:
        """Return all rows, with texts as bytes.

        `in_digest`: the rows are part of the session's digest.
        """


class Tables(Protocol):
    """A set of tables that contain sessions."""

    @property
    def layout(self) -> Layout:
        """Layout of such tables."""

    def sessions(self, query: Query) -> list[SessionIdentifier]:
        """Return the identifier of each session that has messages."""

    def read(
        self, query: Query, identifier: SessionIdentifier, *, changed: datetime
    ) -> LegacySession:
        """Return one session. Raises NotASession."""


def find_tables(tables: Columns) -> list[Tables]:
    """Return the supported sets of tables among these columns."""
    found: list[Tables] = []
    for table, names in tables.items():
        if names >= {"id", "session_id", "message_data", "created_at"}:
            branches = tables.get("message_structure", frozenset()) >= _BRANCHES
            found.append(AgentTables(table, _times_table(tables), branches))
        elif names == {"id", "session_id", "message"}:
            found.append(LangChainTable(table))
    if tables.get("events", frozenset()) >= _ADK_COLUMNS and "app_name" in tables.get(
        "sessions", ()
    ):
        found.append(AdkTables(tuple(sorted(tables["events"])), frozenset(tables)))
    return found


# --- the OpenAI Agents SDK -------------------------------------------------------------------


class AgentTables(Struct, frozen=True):
    """Items of the OpenAI Agents SDK: SQLiteSession, and SQLAlchemySession in a SQLite file."""

    messages: str
    times_table: str | None
    """Name of the table with the times of the sessions."""
    branches: bool
    """Whether AdvancedSQLiteSession assigned the items to branches."""

    @property
    def layout(self) -> Layout:
        """Layout of such tables."""
        return "openai-agents"

    def sessions(self, query: Query) -> list[SessionIdentifier]:
        """Return each session and each of its branches."""
        table = quote_name(self.messages)
        rows = query(f"SELECT session_id, min(id) FROM {table} GROUP BY session_id ORDER BY 2")  # noqa: S608
        found: list[SessionIdentifier] = [
            (_to_text(row[0]), MAIN_BRANCH) for row in rows if row[0] is not None
        ]
        if self.branches:
            rows = query(
                "SELECT session_id, branch_id, min(id) FROM message_structure "
                "GROUP BY session_id, branch_id ORDER BY 3"
            )
            more = [(_to_text(row[0]), _to_text(row[1])) for row in rows if None not in row]
            found += [one for one in more if one[1] != MAIN_BRANCH]
        return found

    def read(
        self, query: Query, identifier: SessionIdentifier, *, changed: datetime
    ) -> LegacySession:
        """Return one session. Raises NotASession."""
        id, branch = identifier
        report = ImportProblems()
        messages: list[JSONMessage] = []
        encrypted = 0
        for number, (text, at) in enumerate(self._rows(query, id, branch), 1):
            label = f"message {number}"
            try:
                item = as_object(parse_json(_to_bytes(text), label), label)
                if openai_agents.is_encrypted(item):
                    encrypted += 1
                    continue
                message = openai_agents.message_of(item, report)
            except NotAMessage as error:
                text = str(error)
                report.report_dropped(text if text.startswith(label) else f"{label}: {text}")
            except (ValueError, RecursionError) as error:
                report.report_dropped(f"{label} cannot be read: {error}")
            else:
                messages += report.encode(message, _to_time(at), label)
        if encrypted:
            are = "1 message is" if encrypted == 1 else f"{encrypted:,} messages are"
            report.report_dropped(f"{are} encrypted and cannot be imported", encrypted)
        report.check_not_empty(messages)
        created, updated = self._times(query, id)
        key = id if branch == MAIN_BRANCH else f"{id}:{branch}"
        return report.session(
            self.layout, key, messages, changed=changed, created=created, updated=updated
        )

    def _rows(self, query: Query, id: str, branch: str) -> list[Row]:
        table = quote_name(self.messages)
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
        if self.times_table is None:
            return None, None
        table = quote_name(self.times_table)
        rows = query(f"SELECT created_at, updated_at FROM {table} WHERE session_id = ?", id)  # noqa: S608
        for created, updated in rows:
            return _to_time(created), _to_time(updated)
        return None, None


def _times_table(tables: Columns) -> str | None:
    """Return the name of the table with the times of the sessions."""
    wanted = {"session_id", "created_at", "updated_at"}
    found = [name for name, has in tables.items() if has == wanted]
    return "agent_sessions" if "agent_sessions" in found else next(iter(found), None)


# --- LangChain -------------------------------------------------------------------------------


class LangChainTable(Struct, frozen=True):
    """Messages of LangChain's SQLChatMessageHistory."""

    table: str

    @property
    def layout(self) -> Layout:
        """Layout of such tables."""
        return "langchain"

    def sessions(self, query: Query) -> list[SessionIdentifier]:
        """Return each session."""
        table = quote_name(self.table)
        rows = query(f"SELECT session_id, min(id) FROM {table} GROUP BY session_id ORDER BY 2")  # noqa: S608
        return [(_to_text(row[0]),) for row in rows if row[0] is not None]

    def read(
        self, query: Query, identifier: SessionIdentifier, *, changed: datetime
    ) -> LegacySession:
        """Return one session. Raises NotASession."""
        table = quote_name(self.table)
        rows = query(f"SELECT message FROM {table} WHERE session_id = ? ORDER BY id", *identifier)  # noqa: S608
        report = ImportProblems()
        given: list[tuple[str, Any]] = []
        for number, (text,) in enumerate(rows, 1):
            label = f"message {number}"
            try:
                given.append((label, parse_json(_to_bytes(text), label)))
            except NotAMessage as error:
                report.report_dropped(str(error))
        return langchain.session_of(given, report, key=identifier[0], changed=changed)


# --- ADK -------------------------------------------------------------------------------------

_ADK_COLUMNS: Final = frozenset({"id", "app_name", "user_id", "session_id", "timestamp"})
_PICKLED_COLUMN: Final = "actions"
"""Column in which older versions keep pickled Python. Loading it would run its code."""
_JSON_COLUMNS: Final = (
    "content",
    "grounding_metadata",
    "custom_metadata",
    "usage_metadata",
    "citation_metadata",
    "input_transcription",
    "output_transcription",
    "long_running_tool_ids_json",
)
_OTHER_COLUMNS: Final = (_PICKLED_COLUMN, "event_data", "app_name", "user_id", "session_id")


class AdkTables(Struct, frozen=True):
    """Events of ADK: SqliteSessionService, and DatabaseSessionService in a SQLite file."""

    event_columns: tuple[str, ...]
    """Columns of the table of events."""
    tables: frozenset[str]

    @property
    def layout(self) -> Layout:
        """Layout of such tables."""
        return "adk"

    def sessions(self, query: Query) -> list[SessionIdentifier]:
        """Return each session."""
        rows = query(
            "SELECT app_name, user_id, session_id, min(rowid) FROM events GROUP BY 1, 2, 3 "
            "ORDER BY 4"
        )
        return [tuple(map(_to_text, row[:3])) for row in rows if None not in row]

    def read(
        self, query: Query, identifier: SessionIdentifier, *, changed: datetime
    ) -> LegacySession:
        """Return one session. Raises NotASession."""
        app, user, id = identifier
        report = ImportProblems()
        conversation = adk.read_events(self._events(query, identifier, report), report)
        report.check_not_empty(conversation.messages)
        state, created, updated = self._state(query, identifier, report)
        return report.session(
            self.layout,
            keys.join_key(keys.KeyParts(app, id, user)),
            conversation.messages,
            changed=changed,
            created=created,
            updated=updated,
            summary=conversation.summary,
            agent=app,
            state=state,
        )

    def _events(
        self, query: Query, identifier: SessionIdentifier, report: ImportProblems
    ) -> list[adk.Event]:
        names = (
            self.event_columns
            if "event_data" not in self.event_columns
            else ("event_data", "timestamp")
        )
        # The pickled column is not even read, so that no code can load it.
        chosen = [name for name in names if name != _PICKLED_COLUMN]
        rows = query(
            f"SELECT {', '.join(map(quote_name, chosen))} FROM events "  # noqa: S608
            "WHERE app_name = ? AND user_id = ? AND session_id = ? ORDER BY timestamp, rowid",
            *identifier,
        )
        if (
            "event_data" not in self.event_columns and _PICKLED_COLUMN in self.event_columns
        ):  # guard: no-pickle
            report.report_loss(
                "the actions of its events are pickled and were not read: state changes, rewinds "
                "and compactions are not imported"
            )
        events = []
        for number, row in enumerate(rows, 1):
            label = f"event {number}"
            try:
                events.append(
                    adk.Event(label, _event_fields(dict(zip(chosen, row, strict=True)), label))
                )
            except NotAMessage as error:
                report.report_dropped(str(error))
        return events

    def _state(
        self, query: Query, identifier: SessionIdentifier, report: ImportProblems
    ) -> tuple[dict[str, Any], datetime | None, datetime | None]:
        """Return the state of the session, its user and its app, and the session's times."""
        app, user, id = identifier
        state: dict[str, Any] = {"app_name": app, "user_id": user, "id": id}
        rows = query(
            "SELECT state, create_time, update_time FROM sessions "
            "WHERE app_name = ? AND user_id = ? AND id = ?",
            *identifier,
        )
        times = [(_to_time(row[1]), _to_time(row[2])) for row in rows] or [(None, None)]
        states = [("state", rows)]
        if "user_states" in self.tables:
            sql = "SELECT state FROM user_states WHERE app_name = ? AND user_id = ?"
            states.append(("user_state", query(sql, app, user, in_digest=False)))
        if "app_states" in self.tables:
            sql = "SELECT state FROM app_states WHERE app_name = ?"
            states.append(("app_state", query(sql, app, in_digest=False)))
        for name, found in states:
            for row in found[:1]:
                try:
                    state[name] = parse_json(_to_bytes(row[0]), f"its {name.replace('_', ' ')}")
                except NotAMessage as error:
                    report.report_loss(str(error))
        return non_empty(state), *times[0]


def _event_fields(row: dict[str, Any], label: str) -> dict[str, Any]:
    """Return the fields of an event of any version. Raises NotAMessage."""
    if "event_data" in row:
        fields = as_object(parse_json(_to_bytes(row["event_data"]), label), label)
        return {"timestamp": _decoded(row["timestamp"]), **fields}
    fields = {}
    for name, value in row.items():
        if name in _OTHER_COLUMNS or value is None:
            continue
        if name in _JSON_COLUMNS:
            fields[name] = parse_json(_to_bytes(value), f"{label}: its {name}")
        else:
            fields[name] = _to_text(value) if isinstance(value, bytes) else value
    # A time stored as text is local time.
    at = _decoded(row["timestamp"])
    local = parse_local_time(at)
    return {**fields, "timestamp": at if local is None else local.isoformat()}


# --- values ----------------------------------------------------------------------------------


def _to_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _to_text(value: Any) -> str:
    """Return the name of a session; invalid UTF-8 as escapes, so that names stay distinct."""
    return _to_bytes(value).decode(errors="backslashreplace")


def _to_time(value: Any) -> datetime | None:
    return parse_time(_decoded(value))


def _decoded(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class Database:
    """A SQLite file with old sessions. A context manager."""

    def __init__(self, file: Path, *, layouts: frozenset[Layout] = ALL_LAYOUTS) -> None:
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
        if is_stenolog_database(self._file):
            raise NotASession("it is a stenolog database: open it with -w sqlite:FILE")
        found: list[Source] = []
        with self._database.connect() as connection:
            self._damage = check_integrity(connection)
            tables = self._tables(connection)
            for number, one in enumerate(tables):
                for identifier in one.sessions(self._query(connection)):
                    identifier_in_file = (str(number), *identifier)
                    found.append(
                        Source(name=self._file.name, body=None, identifier=identifier_in_file)
                    )
        if not tables:
            raise NotASession("it is a SQLite file without tables of a known program")
        size = self._file.stat().st_size // max(1, len(found))
        return [replace(source, bytes=size) for source in found]

    def read(self, source: Source) -> SourceContent:
        """Return one session. Raises NotASession, OSError."""
        number, *identifier = source.identifier
        changed = datetime.fromtimestamp(0, UTC)
        changed += timedelta(microseconds=self._file.stat().st_mtime_ns // 1000)
        try:
            for _ in range(MAX_READ_ATTEMPTS):
                before = self._database.file_versions()
                with self._database.connect() as connection:
                    query = self._query(connection)
                    tables = self._tables(connection)[int(number)]
                    session = tables.read(query, tuple(identifier), changed=changed)
                # The file is read without locks, so it may have changed during the read.
                if self._database.file_versions() == before:
                    break
        except (NotASession, InvalidKey) as error:
            raise NotASession(f"{' '.join(identifier)!r}: {error}") from error
        session = drop_oversized_state(drop_oversized_summary(session))
        problems = tuple(f"{session.key!r}: {text}" for text in session.problems)
        if self._damage:
            text = f"the file is damaged, and messages may be missing: {self._damage}"
            problems = (text, *problems)
        return SourceContent(replace(session, problems=problems), query.digest(), changed, ())

    def _query(self, connection: sqlite3.Connection) -> "_Query":
        return _Query(connection, self._file.stat().st_size)

    def _tables(self, connection: sqlite3.Connection) -> list[Tables]:
        found = find_tables(table_columns(connection))
        return [tables for tables in found if tables.layout in self._layouts]


class _Query:
    """Function that runs statements and digests the rows."""

    def __init__(self, connection: sqlite3.Connection, size: int) -> None:
        self._connection = connection
        self._size = size
        self._digest = sha256()

    def __call__(self, sql: str, *values: str, in_digest: bool = True) -> list[Row]:
        rows = fetch_rows(self._connection, sql, values, size=self._size)
        if in_digest:
            for row in rows:
                self._digest.update(repr(row).encode())
        return rows

    def digest(self) -> str:
        """Return the digest of all rows that count."""
        return self._digest.hexdigest()


# --- all sources of a folder ---------------------------------------------------------------------
# The sources of imports in a folder or file that the user names: files, databases, trees.

DATABASE_LAYOUTS: Final[frozenset[Layout]] = frozenset({"openai-agents", "langchain", "adk"})
FILE_LAYOUTS: Final[frozenset[Layout]] = REFERENCE_LAYOUTS | {"nanobot", "langchain", "plain"}
DATABASE_SUFFIXES: Final = (".db", ".sqlite", ".sqlite3", ".db3")
"""Suffixes of files in a folder that are opened as databases; a named file always is."""

_NANOBOT_WORKSPACE: Final = re.compile(r"[0-9a-f]{32}")
"""Name of a workspace folder of nanobot."""


def find_sources(
    path: Path,
    *,
    only: str | None = None,
    layouts: frozenset[Layout] = ALL_LAYOUTS,
    time_field: str = "",
) -> list[SourceFolder]:
    """Return the sources in a folder, or in `only` one file of it. Raises OSError."""
    if only is not None:
        return [_source_of_file(path, only, layouts, time_field)]
    if "strands" in layouts and is_session_folder(path):
        return [StrandsFolder([path])]
    entries = sorted(path.iterdir())
    found: list[SourceFolder] = []
    if not layouts.isdisjoint(FILE_LAYOUTS):
        lines = [entry for entry in entries if _has_conversations(entry, layouts)]
        names = [entry.name for entry in lines]
        found.append(
            Folder(path, follow=True, layouts=layouts, exclude=names, time_field=time_field)
        )
        found += [ConversationLines(entry, time_field=time_field) for entry in lines]
    folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
    if "nanobot" in layouts:
        workspaces = [folder for folder in folders if _NANOBOT_WORKSPACE.fullmatch(folder.name)]
        found += [Folder(folder, layouts=layouts) for folder in workspaces]
    sessions = [folder for folder in folders if is_session_folder(folder)]
    if "strands" in layouts and sessions:
        found.append(StrandsFolder(sessions))
    if not layouts.isdisjoint(DATABASE_LAYOUTS):
        named = [entry for entry in entries if entry.suffix.lower() in DATABASE_SUFFIXES]
        files = [entry for entry in named if not entry.is_symlink() and is_sqlite_file(entry)]
        theirs = [file for file in files if not is_stenolog_database(file)]
        found += [Database(file, layouts=layouts) for file in theirs]
    return found


def is_searched(folder: Path) -> bool:
    """Return whether a subfolder of the named folder is imported too."""
    return _NANOBOT_WORKSPACE.fullmatch(folder.name) is not None or is_session_folder(folder)


def _has_conversations(file: Path, layouts: frozenset[Layout]) -> bool:
    return (
        "plain" in layouts
        and file.suffix.lower() in (".jsonl", ".ndjson", ".json")
        and file.is_file()
        and not file.is_symlink()
        and is_conversation_lines(file)
    )


def _source_of_file(
    folder: Path, name: str, layouts: frozenset[Layout], time_field: str
) -> SourceFolder:
    file = folder / name
    if is_sqlite_file(file):
        return Database(file, layouts=layouts)
    if name == "session.json" and "strands" in layouts and is_session_folder(folder):
        return StrandsFolder([folder])
    if "plain" in layouts and is_conversation_lines(file):
        return ConversationLines(file, time_field=time_field)
    return Folder(folder, only=name, follow=True, layouts=layouts, time_field=time_field)
