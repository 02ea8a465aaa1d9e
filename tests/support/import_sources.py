"""Small hand-written sessions in the format of each program, which can grow turn by turn."""

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

DAY: Final = "2026-11-15"
EPOCH: Final = 1794734171.5


def words(count: int) -> list[str]:
    """Return the texts of a session, alternating between user and assistant."""
    return [f"word {number}" for number in range(count)]


def role(number: int) -> str:
    return "user" if number % 2 == 0 else "assistant"


def stamp(number: int) -> str:
    return f"{DAY}T09:16:{number:02d}.000001"


def nanobot(place: Path, count: int) -> Path:
    folder = place / "6531641df9d3376dead82361b8a5458c"
    folder.mkdir(parents=True, exist_ok=True)
    head = {"_type": "metadata", "key": "k", "created_at": stamp(0), "updated_at": stamp(count)}
    lines = [head | {"metadata": {}, "last_consolidated": 0}]
    lines += [
        {"role": role(n), "content": word, "timestamp": stamp(n)}
        for n, word in enumerate(words(count))
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "aw.jsonl").write_text(text)
    return place


def langchain(place: Path, count: int) -> Path:
    kinds = {"user": "human", "assistant": "ai"}
    found = [
        {"type": kinds[role(n)], "data": {"content": word}} for n, word in enumerate(words(count))
    ]
    place.mkdir(parents=True, exist_ok=True)
    (place / "k.json").write_text(json.dumps(found))
    return place / "k.json"


def plain(place: Path, count: int) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    found = [{"role": role(n), "content": word} for n, word in enumerate(words(count))]
    (place / "k.json").write_text(json.dumps(found))
    return place / "k.json"


def plain_lines(place: Path, count: int) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    found = [
        {"role": role(n), "content": word, "at": stamp(n)} for n, word in enumerate(words(count))
    ]
    (place / "k.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    return place / "k.jsonl"


def strands(place: Path, count: int) -> Path:
    agent = place / "session_k" / "agents" / "agent_default"
    (agent / "messages").mkdir(parents=True, exist_ok=True)
    about = {"session_id": "k", "session_type": "AGENT"}
    (place / "session_k" / "session.json").write_text(json.dumps(about))
    (agent / "agent.json").write_text(json.dumps({"agent_id": "default", "state": {"n": count}}))
    for n, word in enumerate(words(count)):
        message = {"role": role(n), "content": [{"text": word}]}
        fields = {"message": message, "message_id": n, "redact_message": None}
        text = json.dumps(fields | {"created_at": stamp(n) + "+00:00"})
        (agent / "messages" / f"message_{n}.json").write_text(text)
    return place


def database(
    place: Path, name: str, script: str, rows: Sequence[tuple[str, Sequence[Any]]]
) -> Path:
    """Write a SQLite file with these tables and rows."""
    place.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(place / name)) as connection, connection:
        connection.executescript(script)
        for sql, values in rows:
            connection.execute(sql, values)
    return place / name


AGENT_TABLES: Final = """
    CREATE TABLE IF NOT EXISTS agent_sessions (session_id TEXT PRIMARY KEY,
        created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP,
        updated_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP);
    CREATE TABLE IF NOT EXISTS agent_messages (id INTEGER PRIMARY KEY AUTOINCREMENT,
        session_id TEXT NOT NULL, message_data TEXT NOT NULL,
        created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP);
    DELETE FROM agent_messages;
"""
INSERT_ITEM: Final = (
    "INSERT INTO agent_messages (session_id, message_data, created_at) VALUES (?, ?, ?)"
)


def items(place: Path, given: Sequence[Any], *, name: str = "agents.db") -> Path:
    """Write a file of SQLiteSession with these items; others than column values become JSON."""
    texts = [one if _fits_a_column(one) else json.dumps(one) for one in given]
    rows: list[tuple[str, Sequence[Any]]] = [
        (INSERT_ITEM, ("k", text, f"{DAY} 09:16:{n % 60:02d}")) for n, text in enumerate(texts)
    ]
    return database(place, name, AGENT_TABLES, rows)


def _fits_a_column(value: Any) -> bool:
    """Return whether SQLite stores the value unchanged; its integers have 64 bits."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**63
    return isinstance(value, str | bytes)


def openai_agents(place: Path, count: int) -> Path:
    return items(place, [{"role": role(n), "content": word} for n, word in enumerate(words(count))])


def message_store(place: Path, count: int) -> Path:
    kinds = {"user": "human", "assistant": "ai"}
    script = """
        CREATE TABLE IF NOT EXISTS message_store (id INTEGER PRIMARY KEY, session_id TEXT,
            message TEXT);
        DELETE FROM message_store;
    """
    rows: list[tuple[str, Sequence[Any]]] = [
        (
            "INSERT INTO message_store (session_id, message) VALUES ('k', ?)",
            (json.dumps({"type": kinds[role(n)], "data": {"content": word}}),),
        )
        for n, word in enumerate(words(count))
    ]
    return database(place, "history.db", script, rows)


ADK_TABLES: Final = """
    CREATE TABLE IF NOT EXISTS sessions (app_name TEXT, user_id TEXT, id TEXT, state TEXT,
        create_time REAL, update_time REAL, PRIMARY KEY (app_name, user_id, id));
    CREATE TABLE IF NOT EXISTS events (id TEXT, app_name TEXT, user_id TEXT, session_id TEXT,
        invocation_id TEXT, timestamp REAL, event_data TEXT);
    DELETE FROM events; DELETE FROM sessions;
    INSERT INTO sessions VALUES ('a', 'u', 's', '{"n": 1}', 1794734171.5, 1794734171.5);
"""


def events(place: Path, given: Sequence[Any]) -> Path:
    """Write a file of SqliteSessionService with these events; others than text become JSON."""
    insert = "INSERT INTO events VALUES (?, 'a', 'u', 's', 'i', ?, ?)"
    rows: list[tuple[str, Sequence[Any]]] = [
        (insert, (str(n), EPOCH + n, one if isinstance(one, str | bytes) else json.dumps(one)))
        for n, one in enumerate(given)
    ]
    return database(place, "adk.db", ADK_TABLES, rows)


def said(number: int, *parts: dict[str, Any], author: str = "user", **more: Any) -> dict[str, Any]:
    """Return an event of ADK."""
    content = {"parts": list(parts), "role": "user" if author == "user" else "model"}
    fields = {"id": str(number), "author": author, "invocation_id": f"i{number // 2}"}
    return {**fields, "timestamp": EPOCH + number, "content": content, **more}


def adk(place: Path, count: int) -> Path:
    authors = {"user": "user", "assistant": "agent"}
    found = [
        said(n, {"text": word}, author=authors[role(n)]) for n, word in enumerate(words(count))
    ]
    return events(place, found)


LAYOUTS: Final[dict[str, tuple[Callable[[Path, int], Path], str]]] = {
    "nanobot": (nanobot, "k"),
    "langchain": (langchain, "k"),
    "langchain-sql": (message_store, "k"),
    "plain": (plain, "k"),
    "plain-lines": (plain_lines, "k"),
    "strands": (strands, "k"),
    "openai-agents": (openai_agents, "k"),
    "adk": (adk, "a:u:s"),
}
"""Functions that write a session with a number of messages and return SOURCE; and the new key."""
