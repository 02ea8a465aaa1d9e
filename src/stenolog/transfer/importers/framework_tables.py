"""Import from SQLite files of agent frameworks. Each framework has its own tables.

If a file changes while a session is read, the session is read again. `find_sources` also finds
sources that are not SQLite files.
"""

import re
import sqlite3
from collections.abc import Mapping, Set
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import InvalidKey
from stenolog.sessions import keys
from stenolog.stores.json_file import JSONMessage, NotASession
from stenolog.transfer.importers import adk, langchain, openai_agents
from stenolog.transfer.importers.chat_format import (
    ConversationLines,
    ImportProblems,
    NotAMessage,
    as_object,
    has_conversation_lines,
    non_empty,
    parse_json,
    parse_local_time,
    parse_time,
    with_labels,
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
    time_of_nanoseconds,
    without_oversized_parts,
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
"""Maximum number of attempts to read a session while its file changes. The last one is used."""

TableColumns = Mapping[str, frozenset[str]]
SessionIdentifier = tuple[str, ...]
"""Values that together identify a session in a file."""

_BRANCH_COLUMNS: Final = frozenset({"session_id", "message_id", "branch_id", "sequence_number"})
MAIN_BRANCH: Final = "main"
"""Name of the first branch of a session of the OpenAI Agents SDK."""


class Query:
    """Callable that runs SQL queries on a connection and adds their rows to a digest."""

    def __init__(self, connection: sqlite3.Connection, file_size: int) -> None:
        self._connection = connection
        self._file_size = file_size
        self.digest = sha256()
        """Digest of all rows that were read with `in_digest`."""

    def __call__(self, sql: str, *values: str, in_digest: bool = True) -> list[Row]:
        """Return all rows, with texts as bytes.

        With `in_digest`, the rows are added to the session's digest.
        """
        rows = fetch_rows(self._connection.execute(sql, values), self._file_size)
        if in_digest:
            for row in rows:
                self.digest.update(repr(row).encode())
        return rows


# --- the OpenAI Agents SDK -------------------------------------------------------------------


class AgentTables(Struct, frozen=True):
    """Items of the OpenAI Agents SDK: SQLiteSession, and SQLAlchemySession in a SQLite file."""

    layout: ClassVar[Layout] = "openai-agents"
    messages_table: str
    times_table: str | None
    """Name of the table with the times of the sessions."""
    has_branches: bool
    """Whether AdvancedSQLiteSession assigned the items to branches."""

    def sessions(self, query: Query) -> list[SessionIdentifier]:
        """Return each session and each of its branches."""
        session_ids = _list_session_ids(query, self.messages_table)
        identifiers: list[SessionIdentifier] = [(id, MAIN_BRANCH) for id in session_ids]
        if self.has_branches:
            rows = query(
                "SELECT session_id, branch_id, min(id) FROM message_structure "
                "GROUP BY session_id, branch_id ORDER BY 3"
            )
            branches = [(_to_text(row[0]), _to_text(row[1])) for row in rows if None not in row]
            identifiers += [branch for branch in branches if branch[1] != MAIN_BRANCH]
        return identifiers

    def read(self, query: Query, identifier: SessionIdentifier, mtime: datetime) -> LegacySession:
        """Return one session. Raises NotASession."""
        session_id, branch = identifier
        report = ImportProblems()
        messages: list[JSONMessage] = []
        encrypted_count = 0
        for label, (text, at) in with_labels(self._read_rows(query, session_id, branch)):
            with report.skip_unreadable(label):
                item = as_object(parse_json(_to_bytes(text), label), label)
                if openai_agents.is_encrypted(item):
                    encrypted_count += 1
                    continue
                try:
                    message = openai_agents.message_of(item, report)
                except NotAMessage as error:
                    raise NotAMessage(f"{label}: {error}") from error
                messages += report.encode(message, _to_time(at), label)
        if encrypted_count:
            amount = "1 message is" if encrypted_count == 1 else f"{encrypted_count:,} messages are"
            report.report_dropped(f"{amount} encrypted and cannot be imported", encrypted_count)
        created, updated = self._read_times(query, session_id)
        key = session_id if branch == MAIN_BRANCH else f"{session_id}:{branch}"
        return report.build_session(
            self.layout, key, messages, mtime=mtime, created=created, updated=updated
        )

    def _read_rows(self, query: Query, session_id: str, branch: str) -> list[Row]:
        table = quote_name(self.messages_table)
        if not self.has_branches:
            rows_sql = f"{table} WHERE session_id = ? ORDER BY id"
            return query(f"SELECT message_data, created_at FROM {rows_sql}", session_id)  # noqa: S608
        # A plain SQLiteSession writes no branches, so its items belong to the first branch.
        return query(
            f"SELECT message_data, created_at FROM {table} m LEFT JOIN message_structure s "  # noqa: S608
            "ON s.message_id = m.id AND s.session_id = m.session_id "
            "WHERE m.session_id = ? AND coalesce(s.branch_id, 'main') = ? "
            "ORDER BY coalesce(s.sequence_number, m.id), m.id",
            session_id,
            branch,
        )

    def _read_times(self, query: Query, session_id: str) -> tuple[datetime | None, datetime | None]:
        if self.times_table is None:
            return None, None
        table = quote_name(self.times_table)
        rows = query(f"SELECT created_at, updated_at FROM {table} WHERE session_id = ?", session_id)  # noqa: S608
        for created, updated in rows:
            return _to_time(created), _to_time(updated)
        return None, None


def _list_session_ids(query: Query, table: str) -> list[str]:
    """Return the ids of the sessions in a table of messages, the oldest session first."""
    table = quote_name(table)
    rows = query(f"SELECT session_id, min(id) FROM {table} GROUP BY session_id ORDER BY 2")  # noqa: S608
    return [_to_text(session_id) for session_id, _ in rows if session_id is not None]


def _find_times_table(columns_by_table: TableColumns) -> str | None:
    """Return the name of the table with the times of the sessions."""
    times_columns = {"session_id", "created_at", "updated_at"}
    names = [name for name, columns in columns_by_table.items() if columns == times_columns]
    return "agent_sessions" if "agent_sessions" in names else next(iter(names), None)


# --- LangChain -------------------------------------------------------------------------------


class LangChainTable(Struct, frozen=True):
    """Messages of LangChain's SQLChatMessageHistory."""

    layout: ClassVar[Layout] = "langchain"
    table: str

    def sessions(self, query: Query) -> list[SessionIdentifier]:
        """Return each session."""
        return [(session_id,) for session_id in _list_session_ids(query, self.table)]

    def read(self, query: Query, identifier: SessionIdentifier, mtime: datetime) -> LegacySession:
        """Return one session. Raises NotASession."""
        table = quote_name(self.table)
        rows = query(f"SELECT message FROM {table} WHERE session_id = ? ORDER BY id", *identifier)  # noqa: S608
        report = ImportProblems()
        labelled_messages: list[tuple[str, Any]] = []
        for label, (text,) in with_labels(rows):
            with report.skip_unreadable(label):
                labelled_messages.append((label, parse_json(_to_bytes(text), label)))
        return langchain.session_of(labelled_messages, report, key=identifier[0], mtime=mtime)


# --- ADK -------------------------------------------------------------------------------------

_ADK_COLUMNS: Final = frozenset({"id", "app_name", "user_id", "session_id", "timestamp"})
_PICKLED_COLUMN: Final = "actions"
"""Column in which older versions keep pickled Python. Unpickling could run any code."""
_JSON_COLUMNS: Final = (
    *("content", "grounding_metadata", "custom_metadata", "usage_metadata", "citation_metadata"),
    *("input_transcription", "output_transcription", "long_running_tool_ids_json"),
)
_SKIPPED_COLUMNS: Final = (_PICKLED_COLUMN, "event_data", "app_name", "user_id", "session_id")


class AdkTables(Struct, frozen=True):
    """Events of ADK: SqliteSessionService, and DatabaseSessionService in a SQLite file."""

    layout: ClassVar[Layout] = "adk"
    event_columns: list[str]
    """Columns of the table of events."""
    tables: Set[str]

    def sessions(self, query: Query) -> list[SessionIdentifier]:
        """Return each session."""
        rows = query(
            "SELECT app_name, user_id, session_id, min(rowid) FROM events GROUP BY 1, 2, 3 "
            "ORDER BY 4"
        )
        return [tuple(map(_to_text, row[:3])) for row in rows if None not in row]

    def read(self, query: Query, identifier: SessionIdentifier, mtime: datetime) -> LegacySession:
        """Return one session. Raises NotASession."""
        app, user, session_id = identifier
        report = ImportProblems()
        events = self._read_events(query, identifier, report)
        messages, summary = adk.read_events(events, report)
        state, created, updated = self._read_state(query, identifier, report)
        return report.build_session(
            self.layout,
            keys.join_key(keys.KeyParts(app, session_id, user)),
            messages,
            mtime=mtime,
            created=created,
            updated=updated,
            summary=summary,
            agent=app,
            state=state,
        )

    def _read_events(
        self, query: Query, identifier: SessionIdentifier, report: ImportProblems
    ) -> list[adk.Event]:
        has_event_data = "event_data" in self.event_columns
        names = ["event_data", "timestamp"] if has_event_data else self.event_columns
        # The pickled column is not read, so that its value can never be unpickled.
        columns = [name for name in names if name != _PICKLED_COLUMN]
        rows = query(
            f"SELECT {', '.join(map(quote_name, columns))} FROM events "  # noqa: S608
            "WHERE app_name = ? AND user_id = ? AND session_id = ? ORDER BY timestamp, rowid",
            *identifier,
        )
        if _PICKLED_COLUMN in names:  # guard: no-pickle
            report.report_loss(
                "the actions of its events are pickled and were not read: state changes, rewinds "
                "and compactions are not imported"
            )
        events = []
        for number, row in enumerate(rows, 1):
            label = f"event {number}"
            with report.skip_unreadable(label):
                fields = _event_fields(dict(zip(columns, row, strict=True)), label)
                events.append(adk.Event(label, fields))
        return events

    def _read_state(
        self, query: Query, identifier: SessionIdentifier, report: ImportProblems
    ) -> tuple[dict[str, Any], datetime | None, datetime | None]:
        """Return the state of the session, its user and its app, and the session's times."""
        app, user, session_id = identifier
        state: dict[str, Any] = {"app_name": app, "user_id": user, "id": session_id}
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
        for name, state_rows in states:
            for row in state_rows[:1]:
                try:
                    state[name] = parse_json(_to_bytes(row[0]), f"its {name.replace('_', ' ')}")
                except NotAMessage as error:
                    report.report_loss(str(error))
        return non_empty(state), *times[0]


def _event_fields(row: dict[str, Any], label: str) -> dict[str, Any]:
    """Return the fields of an event of any version of ADK. Raises NotAMessage."""
    if "event_data" in row:
        fields = as_object(parse_json(_to_bytes(row["event_data"]), label), label)
        return {"timestamp": _decode_bytes(row["timestamp"]), **fields}
    fields = {}
    for name, value in row.items():
        if name in _SKIPPED_COLUMNS or value is None:
            continue
        if name in _JSON_COLUMNS:
            fields[name] = parse_json(_to_bytes(value), f"{label}: its {name}")
        else:
            fields[name] = _to_text(value) if isinstance(value, bytes) else value
    # A time stored as text is local time.
    time_value = _decode_bytes(row["timestamp"])
    local_time = parse_local_time(time_value)
    return {**fields, "timestamp": time_value if local_time is None else local_time.isoformat()}


# --- all known tables ------------------------------------------------------------------------

Tables = AgentTables | LangChainTable | AdkTables
"""A set of tables that contain sessions."""


def find_tables(columns_by_table: TableColumns) -> list[Tables]:
    """Return the sets of tables that have a supported layout."""
    supported_tables: list[Tables] = []
    branch_columns = columns_by_table.get("message_structure", frozenset())
    for table, columns in columns_by_table.items():
        if columns >= {"id", "session_id", "message_data", "created_at"}:
            times_table = _find_times_table(columns_by_table)
            has_branches = branch_columns >= _BRANCH_COLUMNS
            supported_tables.append(AgentTables(table, times_table, has_branches))
        elif columns == {"id", "session_id", "message"}:
            supported_tables.append(LangChainTable(table))
    event_columns = columns_by_table.get("events", frozenset())
    if event_columns >= _ADK_COLUMNS and "app_name" in columns_by_table.get("sessions", ()):
        supported_tables.append(AdkTables(sorted(event_columns), columns_by_table.keys()))
    return supported_tables


# --- values ----------------------------------------------------------------------------------


def _to_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def _to_text(value: Any) -> str:
    """Return a value as text. Invalid UTF-8 becomes escapes, so that names stay distinct."""
    return _to_bytes(value).decode(errors="backslashreplace")


def _to_time(value: Any) -> datetime | None:
    return parse_time(_decode_bytes(value))


def _decode_bytes(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class Database(SQLiteFile):
    """A SQLite file with old sessions. A context manager."""

    def __init__(self, file: Path, *, layouts: frozenset[Layout]) -> None:
        super().__init__(file)
        self.path = file.parent
        self.name = str(file)
        self._file = file
        self._layouts = layouts
        self._damage = ""

    def sources(self) -> list[Source]:
        """Return the sessions in the file. Raises NotASession if no table contains sessions."""
        if is_stenolog_database(self._file):
            raise NotASession("it is a stenolog database: open it with -w sqlite:FILE")
        with self.connect() as connection:
            self._damage = check_integrity(connection)
            tables = self._find_tables(connection)
            identifiers = [
                (str(table_number), *identifier)
                for table_number, table in enumerate(tables)
                for identifier in table.sessions(self._make_query(connection))
            ]
        if not tables:
            raise NotASession("it is a SQLite file without tables of a known program")
        size = self._file.stat().st_size // max(1, len(identifiers))
        name = self._file.name
        return [Source(name=name, body=None, identifier=i, bytes=size) for i in identifiers]

    def read(self, source: Source) -> SourceContent:
        """Return one session. Raises NotASession, OSError."""
        table_number, *identifier = source.identifier
        mtime = time_of_nanoseconds(self._file.stat().st_mtime_ns)
        try:
            for _ in range(MAX_READ_ATTEMPTS):
                old_versions = self.file_versions()
                with self.connect() as connection:
                    query = self._make_query(connection)
                    tables = self._find_tables(connection)[int(table_number)]
                    session = tables.read(query, tuple(identifier), mtime)
                # The file is read without locks, so it may have changed during the read.
                if self.file_versions() == old_versions:
                    break
        except (NotASession, InvalidKey) as error:
            raise NotASession(f"{' '.join(identifier)!r}: {error}") from error
        session = without_oversized_parts(session)
        problems = tuple(f"{session.key!r}: {text}" for text in session.problems)
        if self._damage:
            text = f"the file is damaged, and messages may be missing: {self._damage}"
            problems = (text, *problems)
        digest = query.digest.hexdigest()
        return SourceContent(replace(session, problems=problems), digest, mtime, ())

    def _make_query(self, connection: sqlite3.Connection) -> Query:
        return Query(connection, self._file.stat().st_size)

    def _find_tables(self, connection: sqlite3.Connection) -> list[Tables]:
        known_tables = find_tables(table_columns(connection))
        return [tables for tables in known_tables if tables.layout in self._layouts]


# --- all sources of a folder ---------------------------------------------------------------------
# Sources in the folder or file that the user names: files, databases, and trees of folders.

DATABASE_LAYOUTS: Final[frozenset[Layout]] = frozenset({"openai-agents", "langchain", "adk"})
FILE_LAYOUTS: Final[frozenset[Layout]] = REFERENCE_LAYOUTS | {"nanobot", "langchain", "plain"}
DATABASE_SUFFIXES: Final = (".db", ".sqlite", ".sqlite3", ".db3")
"""Suffixes of databases in a folder. A file that the user names may have any suffix."""

_NANOBOT_WORKSPACE: Final = re.compile(r"[0-9a-f]{32}")
"""Name of a workspace folder of nanobot."""


def find_sources(
    path: Path,
    *,
    only: str | None = None,
    layouts: frozenset[Layout] = ALL_LAYOUTS,
    time_field: str = "",
) -> list[SourceFolder]:
    """Return the sources in a folder, or the source in its single file `only`. Raises OSError."""
    if only is not None:
        return [_source_of_file(path, only, layouts, time_field)]
    if "strands" in layouts and is_session_folder(path):
        return [StrandsFolder([path])]
    entries = sorted(path.iterdir())
    sources: list[SourceFolder] = []
    if not layouts.isdisjoint(FILE_LAYOUTS):
        line_files = [entry for entry in entries if _has_conversations(entry, layouts)]
        names = [entry.name for entry in line_files]
        sources.append(
            Folder(path, follow_links=True, layouts=layouts, exclude=names, time_field=time_field)
        )
        sources += [ConversationLines(entry, time_field=time_field) for entry in line_files]
    folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
    if "nanobot" in layouts:
        workspaces = [folder for folder in folders if _NANOBOT_WORKSPACE.fullmatch(folder.name)]
        sources += [Folder(folder, layouts=layouts) for folder in workspaces]
    session_folders = [folder for folder in folders if is_session_folder(folder)]
    if "strands" in layouts and session_folders:
        sources.append(StrandsFolder(session_folders))
    if not layouts.isdisjoint(DATABASE_LAYOUTS):
        named_files = [entry for entry in entries if entry.suffix.lower() in DATABASE_SUFFIXES]
        files = [entry for entry in named_files if not entry.is_symlink() and is_sqlite_file(entry)]
        foreign_files = [file for file in files if not is_stenolog_database(file)]
        sources += [Database(file, layouts=layouts) for file in foreign_files]
    return sources


def is_source_folder(folder: Path) -> bool:
    """Return whether `find_sources` also looks for sessions in this subfolder."""
    return _NANOBOT_WORKSPACE.fullmatch(folder.name) is not None or is_session_folder(folder)


def _has_conversations(file: Path, layouts: frozenset[Layout]) -> bool:
    return (
        "plain" in layouts
        and file.suffix.lower() in (".jsonl", ".ndjson", ".json")
        and file.is_file()
        and not file.is_symlink()
        and has_conversation_lines(file)
    )


def _source_of_file(
    folder: Path, name: str, layouts: frozenset[Layout], time_field: str
) -> SourceFolder:
    file = folder / name
    if is_sqlite_file(file):
        return Database(file, layouts=layouts)
    if name == "session.json" and "strands" in layouts and is_session_folder(folder):
        return StrandsFolder([folder])
    if "plain" in layouts and has_conversation_lines(file):
        return ConversationLines(file, time_field=time_field)
    return Folder(folder, only=name, follow_links=True, layouts=layouts, time_field=time_field)
