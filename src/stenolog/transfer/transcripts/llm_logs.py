"""Conversations of simonw/llm in its database `logs.db`, in the tables of both generations.

Threads share messages in the new tables, and messages have no time: a turn gives its time to the
messages that it added. Where an old conversation was continued, its thread has all of
it.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Final

from stenolog.transfer.importers.sqlite_file import SQLiteFile, fetch_dicts
from stenolog.transfer.transcripts.transcript import (
    Transcript,
    TranscriptFile,
    TranscriptMessage,
    annotated,
    as_dict,
    as_text,
    file_at,
    filled,
    one_line,
    parse_json,
    time_from,
    tool_call,
    usage_counts,
)

PROGRAM: Final = "llm"
FIELD: Final = "llm"


class LLMLogs:
    """Reader of llm's `logs.db`."""

    program = PROGRAM

    def default_folder(self) -> Path | None:
        """Return llm's database, if it exists."""
        given = os.environ.get("LLM_USER_PATH")
        home = Path.home()
        folder = home / ".config"
        if sys.platform == "darwin":
            folder = home / "Library" / "Application Support"
        path = (Path(given) if given else folder / "io.datasette.llm") / "logs.db"
        return path if path.is_file() else None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the conversations of a database, or of `logs.db` in a folder.

        Raises NotASession.
        """
        if path.is_dir():
            path = path / "logs.db"
        if not path.is_file():
            return
        with SQLiteFile(path) as file, file.connect() as connection:
            tables = _tables(connection)
            ids = dict.fromkeys(
                row["id"]
                for table in ("threads", "conversations")
                if table in tables
                for row in fetch_dicts(connection, f"SELECT id FROM {table} ORDER BY id")  # noqa: S608
            )
        for item in ids:
            yield file_at(PROGRAM, f"{PROGRAM}:{item}", path, item=item)

    def read(self, file: TranscriptFile, *, is_complete: bool = True) -> Transcript:  # noqa: ARG002
        """Read a conversation. Raises NotASession, OSError."""
        path = file.paths[0]
        transcript = Transcript(program=PROGRAM, key=file.key)
        transcript.source = {"program": PROGRAM, "path": str(path)}
        with SQLiteFile(path) as opened, opened.connect() as connection:
            tables = _tables(connection)
            name = ""
            if "conversations" in tables:
                found = fetch_dicts(
                    connection, "SELECT name FROM conversations WHERE id=?", file.item
                )
                name = as_text(found[0]["name"]) if found else ""
            thread = (
                fetch_dicts(connection, "SELECT * FROM threads WHERE id=?", file.item)
                if "threads" in tables
                else []
            )
            if thread:
                _read_thread(connection, thread[0], transcript)
                name = name or as_text(thread[0]["name"])
                if isinstance(fork := thread[0].get("forked_from"), str) and fork:
                    transcript.source["forked_from"] = f"{PROGRAM}:{fork}"
            else:
                _read_conversation(connection, file.item, transcript)
        models = (one.message["stenolog"].get("model") for one in transcript.messages)
        transcript.source |= filled({"models": list(dict.fromkeys(filter(None, models)))})
        transcript.title = one_line(name)
        return transcript


def _read_thread(connection: Connection, thread: Mapping[str, Any], found: Transcript) -> None:
    chain: list[dict[str, Any]] = []
    seen: set[str] = set()
    place = thread["tip_message_hash"]
    while isinstance(place, str) and place not in seen:
        seen.add(place)
        rows = fetch_dicts(connection, "SELECT * FROM messages WHERE hash=?", place)
        if not rows:
            break
        chain.append(rows[0])
        place = rows[0]["parent_hash"]
    chain.reverse()
    turns = fetch_dicts(
        connection, "SELECT * FROM turns WHERE thread_id=? ORDER BY datetime_utc, id", thread["id"]
    )
    by_tip = {turn["tip_message_hash"]: turn for turn in turns}
    times: dict[str, Any] = {}
    covered = 0
    for position, message in enumerate(chain):
        if turn := by_tip.get(message["hash"]):
            # The turn added every message since the turn before it.
            for earlier in chain[covered : position + 1]:
                times[earlier["hash"]] = turn["datetime_utc"]
            covered = position + 1
    for position, message in enumerate(chain):
        parts = fetch_dicts(
            connection,
            "SELECT * FROM parts WHERE message_hash=? ORDER BY position",
            message["hash"],
        )
        turn = by_tip.get(message["hash"], {})
        identity = f"{message['hash']}:{position}"
        for number, body in enumerate(_bodies(connection, message, parts)):
            notes: dict[str, Any] = {}
            if turn and message["role"] == "assistant":
                notes["model"] = as_text(turn["resolved_model"]) or as_text(turn["model"])
                notes["usage"] = usage_counts(
                    prompt=turn["input_tokens"], answer=turn["output_tokens"]
                )
                notes["response"] = turn["id"]
                if isinstance(turn["duration_ms"], int):
                    notes["seconds"] = turn["duration_ms"] / 1000
            if body["role"] == "tool" and body[FIELD].get("exception"):
                notes["failed"] = True
            name = identity if number == 0 else f"{identity}#{number}"
            _add(found, name, body, times.get(message["hash"]), notes)


def _bodies(
    connection: Connection, message: Mapping[str, Any], parts: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the message of these parts, or one message for each result of a tool."""
    texts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for part in parts:
        payload = as_dict(parse_json(as_text(part["payload"]) or "null"))
        match part["type"]:
            case "tool_result":
                yield {
                    "role": "tool",
                    "tool_call_id": as_text(payload.get("tool_call_id")),
                    "name": as_text(payload.get("name")),
                    "content": payload.get("output", ""),
                    FIELD: filled({"hash": message["hash"], "exception": payload.get("exception")}),
                }
            case "tool_call":
                call_id, name = payload.get("tool_call_id"), payload.get("name")
                calls.append(tool_call(call_id, name, payload.get("arguments", {})))
            case "reasoning":
                thoughts.append(as_text(part["text"]))
            case "text":
                text = part["text"] if part["text"] is not None else _joined(connection, payload)
                texts.append({"type": "text", "text": text})
            case kind:
                texts.append({"type": kind, **payload})
    if texts or thoughts or calls:
        only = texts[0]["text"] if len(texts) == 1 and texts[0]["type"] == "text" else texts or None
        body: dict[str, Any] = {"role": message["role"], "content": only}
        if thoughts:
            body["reasoning_content"] = "\n\n".join(thoughts)
        if calls:
            body["tool_calls"] = calls
        yield {**body, FIELD: {"hash": message["hash"]}}


def _joined(connection: Connection, payload: Mapping[str, Any]) -> str:
    """Return a text that is stored as a sequence of fragments and literal texts."""
    pieces = []
    for piece in payload.get("text_ref") or []:
        fields = as_dict(piece)
        if "literal" in fields:
            pieces.append(as_text(fields["literal"]))
        else:
            rows = fetch_dicts(
                connection, "SELECT content FROM fragments WHERE id=?", fields.get("fragment")
            )
            pieces += [as_text(row["content"]) for row in rows]
    return "".join(pieces)


def _read_conversation(connection: Connection, item: str, found: Transcript) -> None:
    """Read a conversation of the older tables."""
    responses = fetch_dicts(
        connection,
        "SELECT * FROM responses WHERE conversation_id=? ORDER BY datetime_utc, id",
        item,
    )
    system = ""
    for row in responses:
        at = row["datetime_utc"]
        if as_text(row["system"]) and row["system"] != system:
            system = row["system"]
            _add(found, f"{row['id']}:system", {"role": "system", "content": system}, at, {})
        results = fetch_dicts(
            connection, "SELECT * FROM tool_results WHERE response_id=? ORDER BY id", row["id"]
        )
        for number, result in enumerate(results):
            body = {
                "role": "tool",
                "tool_call_id": as_text(result["tool_call_id"]) or f"{row['id']}:{number}",
                "name": as_text(result["name"]),
                "content": as_text(result["output"]),
            }
            failed = {"failed": True} if as_text(result.get("exception")) else {}
            _add(found, f"{row['id']}:result{number}", body, at, failed)
        if as_text(row["prompt"]) or not results:
            body = {"role": "user", "content": as_text(row["prompt"])}
            _add(found, f"{row['id']}:prompt", body, at, {})
        calls = fetch_dicts(
            connection, "SELECT * FROM tool_calls WHERE response_id=? ORDER BY id", row["id"]
        )
        answer: dict[str, Any] = {"role": "assistant", "content": as_text(row["response"])}
        if as_text(row.get("reasoning")):
            answer["reasoning_content"] = row["reasoning"]
        if calls:
            answer["tool_calls"] = [
                tool_call(
                    as_text(call["tool_call_id"]) or f"{row['id']}:{number}",
                    call["name"],
                    as_text(call["arguments"]) or "{}",
                )
                for number, call in enumerate(calls)
            ]
        notes: dict[str, Any] = {
            "model": as_text(row.get("resolved_model")) or as_text(row["model"]),
            "usage": usage_counts(prompt=row["input_tokens"], answer=row["output_tokens"]),
            "response": row["id"],
        }
        if isinstance(row["duration_ms"], int):
            notes["seconds"] = row["duration_ms"] / 1000
        _add(found, f"{row['id']}:response", answer, at, notes)


def _add(
    transcript: Transcript, identity: str, body: dict[str, Any], at: Any, notes: dict[str, Any]
) -> None:
    transcript.messages.append(
        TranscriptMessage(
            identity=identity, message=annotated(body, identity, **notes), at=time_from(at)
        )
    )


def _tables(connection: Connection) -> set[str]:
    rows = fetch_dicts(connection, "SELECT name FROM sqlite_master WHERE type='table'")
    return {row["name"] for row in rows}
