"""Conversations of simonw/llm in its database `logs.db`, in its old and its new tables.

In the new tables, threads share messages, and messages have no time. A message gets the time of the
turn that added it. A thread that continues an old conversation also has the old messages.

Each imported message keeps the row from which it was made, without columns that are NULL, and the
rows of its parts, calls or turn.
"""

import os
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from stenolog.transfer.transcripts.sqlite_file import DatabaseReader, fetch_dicts
from stenolog.transfer.transcripts.transcript import (
    Transcript,
    as_dict,
    as_text,
    image_part,
    keep_record,
    list_or_empty,
    make_content,
    make_message,
    make_tool_call,
    make_tool_result,
    omit,
    parse_json,
    session_key,
    text_part,
    usage_counts,
)

_Row = dict[str, Any]


class LLMLogs(DatabaseReader):
    """Reader of llm's `logs.db`."""

    program = "llm"
    file_name = "logs.db"

    def default_folder(self) -> Path | None:
        """Return llm's database, if it exists."""
        is_mac = sys.platform == "darwin"
        config = Path.home() / ("Library/Application Support" if is_mac else ".config")
        folder = Path(os.environ.get("LLM_USER_PATH") or config / "io.datasette.llm")
        path = folder / self.file_name
        return path if path.is_file() else None

    def list_ids(self, connection: Connection) -> list[str]:
        """Return the ids of the threads and conversations."""
        database = _Database(connection)
        rows = (*database.find("threads"), *database.find("conversations"))
        return list(dict.fromkeys(row["id"] for row in rows))

    def convert(self, connection: Connection, conversation_id: str, transcript: Transcript) -> None:
        """Add the thread or conversation with this id to an empty transcript."""
        database = _Database(connection)
        conversations = database.find("conversations", "id", conversation_id)
        threads = database.find("threads", "id", conversation_id)
        parent_id = ""
        if threads:
            _read_thread(database, threads[0], transcript)
            parent_id = as_text(threads[0].get("forked_from"))
        else:
            _read_conversation(database, conversation_id, transcript)
        # The name of an old conversation is better than the name of the thread.
        names = (as_text(row["name"]) for row in (*conversations, *threads))
        forked_from = session_key(self.program, parent_id) if parent_id else ""
        transcript.finish(next(filter(None, names), ""), forked_from=forked_from)


class _Database:
    """The tables of a `logs.db`. A table that llm has not created yet has no rows."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        tables = fetch_dicts(connection, "SELECT name FROM sqlite_master WHERE type='table'")
        self._tables = {row["name"] for row in tables}

    def find(self, table: str, column: str = "1", value: Any = 1, order: str = "id") -> list[_Row]:
        """Return the rows of a table that have this value in a column; by default all rows.

        Raises NotASession.
        """
        if table not in self._tables:
            return []
        sql = f"SELECT * FROM {table} WHERE {column}=? ORDER BY {order}"  # noqa: S608
        return fetch_dicts(self._connection, sql, value)

    def find_linked(self, link_table: str, column: str, value: Any) -> list[_Row]:
        """Return the rows to which the rows of `link_table` with this value link.

        The name of a link table ends with the name of the table that its rows link to.
        """
        table = link_table.partition("_")[2]
        links = self.find(link_table, column, value, '"order"')
        ids = [link[f"{table.removesuffix('s')}_id"] for link in links]
        return [row for id_ in ids for row in self.find(table, "id", id_)]

    def make_attachment_part(self, row: _Row) -> dict[str, Any]:
        """Return an attachment as a part of a message."""
        sql = "SELECT content FROM attachments WHERE id=?"
        [content] = self._connection.execute(sql, (row["id"],)).fetchone()
        mime_type, url = as_text(row["type"]), as_text(row["url"])
        if content:
            url = f"data:{mime_type};base64,{b64encode(content).decode()}"
        if url and mime_type.startswith("image/"):
            return image_part(url)
        if content:
            return {"type": "file", "file": {"file_data": url, "filename": row["id"]}}
        return text_part(f"[file {url or as_text(row['path'])}]")


# --- the new tables ------------------------------------------------------------------------------


def _read_thread(database: _Database, thread: _Row, transcript: Transcript) -> None:
    message_by_hash: dict[str, _Row] = {}
    message_hash = thread["tip_message_hash"]
    while isinstance(message_hash, str) and message_hash not in message_by_hash:
        message_rows = database.find("messages", "hash", message_hash, "hash")
        if not message_rows:
            break
        message_by_hash[message_hash] = message_rows[0]
        message_hash = message_rows[0]["parent_hash"]
    messages = list(message_by_hash.values())[::-1]
    turns = database.find("turns", "thread_id", thread["id"], "datetime_utc, id")
    turn_by_tip = {turn["tip_message_hash"]: turn for turn in turns}
    times: dict[str, Any] = {}
    at: Any = None
    for message in reversed(messages):
        # A turn is stored with the hash of its last message, so times are assigned from the end.
        at = turn_by_tip.get(message["hash"], {}).get("datetime_utc", at)
        times[message["hash"]] = at
    for position, message in enumerate(messages):
        turn = turn_by_tip.get(message["hash"], {})
        identity = f"{message['hash']}:{position}"
        for number, (body, parts) in enumerate(_make_messages(database, message)):
            is_answer = turn and message["role"] == "assistant"
            notes = _answer_notes(turn) if is_answer else {}
            if body["role"] == "tool" and as_dict(parts[0].get("payload")).get("exception"):
                notes["failed"] = True
            message_identity = f"{identity}#{number}" if number else identity
            record = {"message": _filled(message), "turn": _filled(turn), "parts": parts}
            _add_message(transcript, message_identity, body, times[message["hash"]], notes, record)


def _make_messages(
    database: _Database, message: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], list[_Row]]]:
    """Yield each tool result as a message, then the rest as a message, each with its parts."""
    contents: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    parts: list[_Row] = []
    for part in database.find("parts", "message_hash", message["hash"], "position"):
        payload = as_dict(parse_json(as_text(part["payload"]) or "null"))
        decoded = {"payload": payload} if payload else {}
        if part["type"] == "tool_result":
            result = make_tool_result(payload.get("tool_call_id"), payload.get("output", ""))
            yield {**result, "name": as_text(payload.get("name"))}, [{**_filled(part), **decoded}]
            continue
        parts.append({**_filled(part), **decoded})
        match part["type"]:
            case "tool_call":
                call_id, name = payload.get("tool_call_id"), payload.get("name")
                calls.append(make_tool_call(call_id, name, payload.get("arguments", {})))
            case "reasoning":
                thoughts.append(as_text(part["text"]))
            case "text":
                text = part["text"]
                text = _text_of_pieces(database, payload) if text is None else text
                contents.append(text_part(text))
            case kind:
                attachment = as_dict(payload.get("attachment")).get("id")
                rows = database.find("attachments", "id", attachment)
                attached = [database.make_attachment_part(row) for row in rows]
                contents += attached or [{"type": kind, **payload}]
    if contents or thoughts or calls:
        yield make_message(message["role"], make_content(contents), thoughts, calls), parts


def _text_of_pieces(database: _Database, payload: Mapping[str, Any]) -> str:
    """Return a text that is stored as a sequence of fragments and literal texts."""
    pieces = []
    for fields in map(as_dict, list_or_empty(payload.get("text_ref"))):
        if "literal" in fields:
            pieces.append(as_text(fields["literal"]))
        else:
            fragments = database.find("fragments", "id", fields.get("fragment"))
            pieces += [as_text(row["content"]) for row in fragments]
    return "".join(pieces)


# --- the old tables ------------------------------------------------------------------------------


def _read_conversation(database: _Database, conversation_id: str, transcript: Transcript) -> None:
    system_prompt = ""
    call_ids: list[str] = []
    responses = database.find("responses", "conversation_id", conversation_id, "datetime_utc, id")
    for response in responses:
        id_, at = response["id"], response["datetime_utc"]
        fragments = database.find_linked("system_fragments", "response_id", id_)
        text = _join_fragments("\n\n", fragments, response["system"])
        if text and text != system_prompt:
            system_prompt = text
            body: dict[str, Any] = {"role": "system", "content": system_prompt}
            _add_message(transcript, f"{id_}:system", body, at, {}, {"response": {"id": id_}})
        results = database.find("tool_results", "response_id", id_)
        for number, result in enumerate(results):
            # Results without an id belong to the calls of the previous answer, in order.
            call_id = call_ids[number] if number < len(call_ids) else f"{id_}:{number}"
            call_id = as_text(result["tool_call_id"]) or call_id
            body = make_tool_result(call_id, as_text(result["output"]))
            body["name"] = as_text(result["name"])
            notes = {"failed": bool(as_text(result.get("exception")))}
            record: dict[str, Any] = {"tool_result": _filled(result)}
            _add_message(transcript, f"{id_}:result{number}", body, at, notes, record)
        fragments = database.find_linked("prompt_fragments", "response_id", id_)
        text = _join_fragments("\n", fragments, response["prompt"])
        attachments = database.find_linked("prompt_attachments", "response_id", id_)
        parts = [database.make_attachment_part(row) for row in attachments]
        if text or parts or not results:
            content = [text_part(text), *parts] if parts else text
            body = {"role": "user", "content": content}
            _add_message(transcript, f"{id_}:prompt", body, at, {}, {"response": {"id": id_}})
        calls = database.find("tool_calls", "response_id", id_)
        call_ids = [
            as_text(call["tool_call_id"]) or f"{id_}:{number}" for number, call in enumerate(calls)
        ]
        thoughts = list(filter(None, [as_text(response.get("reasoning"))]))
        tool_calls = [
            make_tool_call(call_id, call["name"], as_text(call["arguments"]) or "{}")
            for call_id, call in zip(call_ids, calls, strict=True)
        ]
        body = make_message("assistant", as_text(response["response"]), thoughts, tool_calls)
        response_row = omit(_filled(response), "system", "prompt")
        record = {"response": response_row, "tool_calls": [*map(_filled, calls)]}
        _add_message(transcript, f"{id_}:response", body, at, _answer_notes(response), record)


def _join_fragments(separator: str, fragments: Iterable[_Row], text: Any) -> str:
    """Return the texts of fragments and the text after them, as llm sent them to the model."""
    texts = [as_text(row["content"]) for row in fragments]
    return separator.join(filter(None, [*texts, as_text(text)]))


# --- the new and the old tables ------------------------------------------------------------------


def _answer_notes(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the annotations of an answer from the row of its turn or response."""
    notes: dict[str, Any] = {
        "model": as_text(row.get("resolved_model")) or as_text(row["model"]),
        "usage": usage_counts(prompt=row["input_tokens"], answer=row["output_tokens"]),
        "response": row["id"],
    }
    if isinstance(row["duration_ms"], int):
        notes["seconds"] = row["duration_ms"] / 1000
    return notes


def _add_message(
    transcript: Transcript,
    identity: str,
    body: dict[str, Any],
    at: Any,
    notes: dict[str, Any],
    record: Mapping[str, Any],
) -> None:
    """Add a message with the record from which it was made."""
    keep_record([body], transcript.program, record)
    transcript.add(identity, body, at=at, **notes)


def _filled(row: _Row) -> _Row:
    """Return the columns of a row that are not NULL."""
    return {name: value for name, value in row.items() if value is not None}
