"""Sessions of opencode, in its database `opencode.db`.

Only the tables `session`, `message` and `part` are read, because the database also holds accounts
and credentials.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Final

from stenolog.stores.json_file import NotASession
from stenolog.transfer.transcripts.sqlite_file import DatabaseReader, fetch_dicts
from stenolog.transfer.transcripts.transcript import (
    Draft,
    Transcript,
    as_dict,
    as_text,
    image_part,
    keep_record,
    make_message,
    make_tool_call,
    make_tool_result,
    parse_json,
    session_key,
    sum_counts,
    text_part,
    usage_counts,
)

_DEFAULT_TITLE: Final = "New session - "
_MESSAGES_SQL: Final = "SELECT * FROM message WHERE session_id=? ORDER BY time_created, id"
_PARTS_SQL: Final = "SELECT * FROM part WHERE message_id=? ORDER BY id"

_PartDraft = tuple[str, dict[str, Any], dict[str, Any], Any]
"""Identity of a message, the message, its annotations and its time."""


class OpenCode(DatabaseReader):
    """Reader of opencode's database."""

    program = "opencode"
    file_name = "opencode.db"

    def default_folder(self) -> Path | None:
        """Return the database, if it exists."""
        data_home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
        path = data_home / "opencode" / self.file_name
        return path if path.is_file() else None

    def list_ids(self, connection: Connection) -> list[str]:
        """Return the ids of the sessions."""
        return [row["id"] for row in fetch_dicts(connection, "SELECT id FROM session ORDER BY id")]

    def convert(self, connection: Connection, conversation_id: str, transcript: Transcript) -> None:
        """Add the session with this id to an empty transcript. Raises NotASession."""
        rows = fetch_dicts(connection, "SELECT * FROM session WHERE id=?", conversation_id)
        if not rows:
            raise NotASession(f"it no longer has the session {conversation_id}")
        session = rows[0]
        reverted_from = as_text(_parse_object(session.get("revert")).get("messageID"))
        for row in fetch_dicts(connection, _MESSAGES_SQL, conversation_id):
            parts = fetch_dicts(connection, _PARTS_SQL, row["id"])
            is_hidden = bool(reverted_from) and row["id"] >= reverted_from
            for identity, body, notes, at in self._convert_message(row, parts):
                transcript.add(identity, body, at=at, hidden=is_hidden, **notes)
        title = as_text(session.get("title"))
        parent = as_text(session.get("parent_id"))
        transcript.finish(
            None if not title or title.startswith(_DEFAULT_TITLE) else title,
            folders=[session["directory"]] if session.get("directory") else [],
            versions=[session["version"]] if session.get("version") else [],
            reported_cost=session.get("cost"),
            archived=bool(session.get("time_archived")),
            parent={"key": session_key(self.program, parent)} if parent else None,
        )

    def _convert_message(
        self, row: dict[str, Any], parts: list[dict[str, Any]]
    ) -> list[_PartDraft]:
        """Return the drafts of all parts of a message. A part without content has no draft."""
        message = _parse_object(row["data"])
        role = as_text(message.get("role")) or "assistant"
        answer_notes = {"model": as_text(message.get("modelID")), "response": row["id"]}
        drafts: list[_PartDraft] = []
        for part_row in parts:
            part = _parse_object(part_row["data"])
            notes = dict(answer_notes) if role == "assistant" else {}
            part_drafts = list(_convert_part(part_row, role, part, notes))
            if not part_drafts:
                continue
            # The first part also keeps the record of the message to which all parts belong.
            record = {"part": part} if drafts else {"part": part, "message": message}
            keep_record([body for _, body, _, _ in part_drafts], self.program, record)
            drafts += part_drafts
        answers = [notes for _, body, notes, _ in drafts if body["role"] == "assistant"]
        tokens = as_dict(message.get("tokens"))
        if tokens and answers:
            answers[-1]["usage"] = _read_usage(tokens)
        return drafts


def _parse_object(text: Any) -> dict[str, Any]:
    return as_dict(parse_json(as_text(text) or "null"))


def _convert_part(
    row: dict[str, Any], role: str, part: dict[str, Any], notes: dict[str, Any]
) -> Iterator[_PartDraft]:
    part_id, at, text = row["id"], row["time_created"], as_text(part.get("text"))
    match part.get("type"):
        case "text":
            yield part_id, {"role": role, "content": text}, notes, at
        case "reasoning":
            body = {"role": role, "content": None, "reasoning_content": text}
            yield part_id, body, notes, at
        case "file":
            yield part_id, {"role": role, "content": [_file_part(part)]}, notes, at
        case "tool":
            state = as_dict(part.get("state"))
            call = make_tool_call(part.get("callID"), part.get("tool"), state.get("input", {}))
            yield f"{part_id}:call", make_message("assistant", None, calls=[call]), notes, at
            if state.get("status") in ("completed", "error"):
                time = as_dict(state.get("time"))
                result, result_notes = _tool_result(part.get("callID"), state, time)
                yield f"{part_id}:result", result, result_notes, time.get("end") or at


def _tool_result(call_id: Any, state: Mapping[str, Any], time: Mapping[str, Any]) -> Draft:
    """Return the result of a finished call, and its annotations."""
    is_error = state["status"] == "error"
    exit_code = as_dict(state.get("metadata")).get("exit")
    notes: dict[str, Any] = {"failed": is_error or (isinstance(exit_code, int) and exit_code != 0)}
    if isinstance(time.get("start"), int) and isinstance(time.get("end"), int):
        notes["seconds"] = (time["end"] - time["start"]) / 1000
    output = as_text(state.get("error" if is_error else "output"))
    return make_tool_result(call_id, output), notes


def _file_part(part: Mapping[str, Any]) -> dict[str, Any]:
    url = as_text(part.get("url"))
    if as_text(part.get("mime")).startswith("image/") and url.startswith("data:"):
        return image_part(url)
    return text_part(f"[file {as_text(part.get('filename'))}]")


def _read_usage(tokens: Mapping[str, Any]) -> dict[str, int]:
    cache = as_dict(tokens.get("cache"))
    # The count of input tokens excludes tokens from the cache.
    return usage_counts(
        prompt=sum_counts(tokens.get("input"), cache.get("read"), cache.get("write")),
        answer=tokens.get("output"),
        cached=cache.get("read", 0),
    )
