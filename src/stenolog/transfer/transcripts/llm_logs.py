"""Conversations of simonw/llm in its database `logs.db`, in its old and its new tables.

In the new tables, threads share messages, and messages have no time. A message gets the time of the
turn that added it. A thread that continues an old conversation also has the old messages.

Each imported message keeps the rows from which it was made, by table. The rows leave out:

- columns that are NULL, and the spaces of JSON in `payload`
- definitions of tools and schemas; the rows have their ids and names
- aliases of fragments, and the tables of llm's search
- rows of `responses` that repeat messages of a thread, if the thread continues an old
  conversation
"""

import os
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    parse_json,
    session_key,
    text_part,
    usage_counts,
)

_Row = dict[str, Any]
_TableRow = tuple[str, _Row]
"""Name of a table, and a row of this table."""


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
        conversation_rows = [("conversations", row) for row in conversations]
        parent_id = ""
        if threads:
            _read_thread(database, threads[0], conversation_rows, transcript)
            parent_id = as_text(threads[0].get("forked_from"))
        else:
            _read_conversation(database, conversation_id, conversation_rows, transcript)
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

    def find_linked(self, link_table: str, column: str, value: Any) -> list[_TableRow]:
        """Return the rows of `link_table` with this value, each followed by its linked row.

        The name of a link table ends with the name of the table that its rows link to.
        """
        table = link_table.partition("_")[2]
        all_rows: list[_TableRow] = []
        for link in self.find(link_table, column, value, '"order"'):
            all_rows.append((link_table, link))
            target_id = link[f"{table.removesuffix('s')}_id"]
            all_rows += [(table, row) for row in self.find(table, "id", target_id)]
        return all_rows

    def make_attachment_part(self, row: _Row) -> dict[str, Any]:
        """Return an attachment as a part of a message, and put its data URL into `row`."""
        sql = "SELECT content FROM attachments WHERE id=?"
        [content] = self._connection.execute(sql, (row["id"],)).fetchone()
        mime_type, url = as_text(row["type"]), as_text(row["url"])
        if content:
            row["content"] = url = f"data:{mime_type};base64,{b64encode(content).decode()}"
        if url and mime_type.startswith("image/"):
            return image_part(url)
        if content:
            return {"type": "file", "file": {"file_data": url, "filename": row["id"]}}
        return text_part(f"[file {url or as_text(row['path'])}]")


# --- the new tables ------------------------------------------------------------------------------


def _read_thread(
    database: _Database,
    thread: _Row,
    conversation_rows: Sequence[_TableRow],
    transcript: Transcript,
) -> None:
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
        shared_rows: list[_TableRow] = [("messages", message)]
        if turn:
            shared_rows.append(("turns", turn))
            shared_rows += database.find_linked("turn_fragments", "turn_id", turn["id"])
        if position == len(messages) - 1:
            shared_rows += [*conversation_rows, ("threads", thread)]
        identity = f"{message['hash']}:{position}"
        for number, (body, rows) in enumerate(_make_messages(database, message)):
            is_answer = turn and message["role"] == "assistant"
            notes = _answer_notes(turn) if is_answer else {}
            if body["role"] == "tool" and _parse_payload(rows[0][1]).get("exception"):
                notes["failed"] = True
            message_identity = f"{identity}#{number}" if number else identity
            rows = [*shared_rows, *rows]
            _add_message(transcript, message_identity, body, times[message["hash"]], notes, rows)
            shared_rows = []


def _make_messages(
    database: _Database, message: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], list[_TableRow]]]:
    """Yield each tool result as a message, then the rest as a message, each with its rows."""
    contents: list[dict[str, Any]] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    rows: list[_TableRow] = []
    for part in database.find("parts", "message_hash", message["hash"], "position"):
        payload = _parse_payload(part)
        if part["type"] == "tool_result":
            result = make_tool_result(payload.get("tool_call_id"), payload.get("output", ""))
            yield {**result, "name": as_text(payload.get("name"))}, [("parts", part)]
            continue
        rows.append(("parts", part))
        rows += database.find_linked("part_fragments", "part_id", part["id"])
        rows += database.find_linked("part_attachments", "part_id", part["id"])
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
                attachments = database.find("attachments", "id", attachment)
                rows += [("attachments", row) for row in attachments]
                parts = [database.make_attachment_part(row) for row in attachments]
                contents += parts or [{"type": kind, **payload}]
    if contents or thoughts or calls:
        yield make_message(message["role"], make_content(contents), thoughts, calls), rows


def _parse_payload(part: Mapping[str, Any]) -> dict[str, Any]:
    return as_dict(parse_json(as_text(part["payload"]) or "null"))


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


def _read_conversation(
    database: _Database,
    conversation_id: str,
    conversation_rows: Sequence[_TableRow],
    transcript: Transcript,
) -> None:
    system_prompt = ""
    call_ids: list[str] = []
    responses = database.find("responses", "conversation_id", conversation_id, "datetime_utc, id")
    for response in responses:
        id_, at = response["id"], response["datetime_utc"]
        response_row = dict(response)
        rows: list[_TableRow] = [("responses", response_row)]
        fragments = database.find_linked("system_fragments", "response_id", id_)
        text = _join_fragments("\n\n", fragments, response["system"])
        if text and text != system_prompt:
            system_prompt = text
            fragments.append(("responses", {"id": id_, "system": response_row.pop("system")}))
            body: dict[str, Any] = {"role": "system", "content": system_prompt}
            _add_message(transcript, f"{id_}:system", body, at, {}, fragments)
        else:
            rows += fragments
        results = database.find("tool_results", "response_id", id_)
        for number, result in enumerate(results):
            # Results without an id belong to the calls of the previous answer, in order.
            call_id = call_ids[number] if number < len(call_ids) else f"{id_}:{number}"
            call_id = as_text(result["tool_call_id"]) or call_id
            body = make_tool_result(call_id, as_text(result["output"]))
            body["name"] = as_text(result["name"])
            notes = {"failed": bool(as_text(result.get("exception")))}
            result_rows = [("tool_results", result)]
            _add_message(transcript, f"{id_}:result{number}", body, at, notes, result_rows)
        prompt_rows = database.find_linked("prompt_fragments", "response_id", id_)
        text = _join_fragments("\n", prompt_rows, response["prompt"])
        prompt_rows += database.find_linked("prompt_attachments", "response_id", id_)
        attachments = [row for table, row in prompt_rows if table == "attachments"]
        parts = [database.make_attachment_part(row) for row in attachments]
        if text or parts or not results:
            prompt_rows.append(("responses", {"id": id_, "prompt": response_row.pop("prompt")}))
            content = [text_part(text), *parts] if parts else text
            body = {"role": "user", "content": content}
            _add_message(transcript, f"{id_}:prompt", body, at, {}, prompt_rows)
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
        rows += [("tool_calls", call) for call in calls]
        if response is responses[-1]:
            rows += conversation_rows
        _add_message(transcript, f"{id_}:response", body, at, _answer_notes(response), rows)


def _join_fragments(separator: str, fragments: Iterable[_TableRow], text: Any) -> str:
    """Return the texts of fragments and the text after them, as llm sent them to the model."""
    texts = [as_text(row["content"]) for table, row in fragments if table == "fragments"]
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
    rows: Iterable[_TableRow],
) -> None:
    """Add a message with the rows from which it was made."""
    record: dict[str, list[_Row]] = {}
    for table, row in rows:
        columns = {name: value for name, value in row.items() if value is not None}
        if table == "parts" and (payload := _parse_payload(row)):
            columns["payload"] = payload
        record.setdefault(table, []).append(columns)
    keep_record([body], transcript.program, record)
    transcript.add(identity, body, at=at, **notes)
