"""Sessions of opencode, in its database `opencode.db`.

The database also holds accounts and credentials: only the tables `session`, `message` and `part`
are read, and the file is never copied.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from sqlite3 import Connection
from typing import Any, Final

from stenolog.stores.json_file import NotASession
from stenolog.transfer.importers.sqlite_file import SQLiteFile, fetch_dicts
from stenolog.transfer.transcripts.transcript import (
    COPY,
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
    shared,
    time_from,
    tool_call,
    unshared,
    usage_counts,
    without,
)

PROGRAM: Final = "opencode"
FIELD: Final = "opencode"
"""Field of a stored message that holds the rest of its part."""
_UNNAMED: Final = "New session - "


class OpenCode:
    """Reader of opencode's database."""

    program = PROGRAM

    def default_folder(self) -> Path | None:
        """Return the database, if it exists."""
        data = os.environ.get("XDG_DATA_HOME")
        folder = Path(data) if data else Path.home() / ".local" / "share"
        path = folder / "opencode" / "opencode.db"
        return path if path.is_file() else None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the sessions of a database, or of `opencode.db` in a folder. Raises NotASession."""
        path = path / "opencode.db" if path.is_dir() else path
        if not path.is_file():
            return
        with SQLiteFile(path, may_copy=False) as file, file.connect() as connection:
            ids = [
                row["id"] for row in fetch_dicts(connection, "SELECT id FROM session ORDER BY id")
            ]
        for item in ids:
            yield file_at(PROGRAM, f"{PROGRAM}:{item}", path, item=item)

    def read(self, file: TranscriptFile, *, is_complete: bool = True) -> Transcript:  # noqa: ARG002
        """Read a session. Raises NotASession, OSError."""
        path = file.paths[0]
        transcript = Transcript(program=PROGRAM, key=file.key)
        with SQLiteFile(path, may_copy=False) as opened, opened.connect() as connection:
            found = fetch_dicts(connection, "SELECT * FROM session WHERE id=?", file.item)
            if not found:
                raise NotASession(f"it no longer has the session {file.item}")
            session = found[0]
            _read(connection, session, transcript)
        transcript.source = filled(
            {
                "program": PROGRAM,
                "path": str(path),
                "folders": [session["directory"]] if session.get("directory") else [],
                "versions": [session["version"]] if session.get("version") else [],
                "models": _models(transcript),
                "reported_cost": session.get("cost"),
                "archived": bool(session.get("time_archived")),
                "parent": _parent(session),
            }
        )
        return transcript


def _parent(session: Mapping[str, Any]) -> dict[str, str] | None:
    parent = as_text(session.get("parent_id"))
    return {"key": f"{PROGRAM}:{parent}"} if parent else None


def _models(transcript: Transcript) -> list[str]:
    found = (one.message["stenolog"].get("model") for one in transcript.messages)
    return list(dict.fromkeys(name for name in found if name))


def _read(connection: Connection, session: Mapping[str, Any], transcript: Transcript) -> None:
    revert = as_dict(parse_json(as_text(session.get("revert")) or "null"))
    reverted = as_text(revert.get("messageID"))
    sql = "SELECT * FROM message WHERE session_id=? ORDER BY time_created, id"
    first = ""
    for row in fetch_dicts(connection, sql, session["id"]):
        data = as_dict(parse_json(as_text(row["data"])))
        parts = fetch_dicts(
            connection, "SELECT * FROM part WHERE message_id=? ORDER BY id", row["id"]
        )
        is_hidden = bool(reverted) and row["id"] >= reverted
        made = list(_messages(data, parts, transcript))
        _add_usage(data, row["id"], made)
        if made:
            # The message of which these are the parts.
            first_body = made[0][1]
            first_body[FIELD] = {**first_body[FIELD], "message": data}
        for identity, body, notes, at in made:
            message = annotated(body, identity, **notes)
            transcript.messages.append(
                TranscriptMessage(identity=identity, message=message, at=at, hidden=is_hidden)
            )
            if body["role"] == "user" and not first:
                first = as_text(body["content"])
    title = as_text(session.get("title"))
    transcript.title = one_line(first if title.startswith(_UNNAMED) else title or first)


_Made = tuple[str, dict[str, Any], dict[str, Any], Any]


def _messages(
    data: Mapping[str, Any], parts: list[dict[str, Any]], transcript: Transcript
) -> Iterator[_Made]:
    """Yield identity, message, annotations and time of each part that says something."""
    role = as_text(data.get("role")) or "assistant"
    model = as_text(data.get("modelID")) if role == "assistant" else ""
    notes: dict[str, Any] = {"model": model} if model else {}
    for row in parts:
        part = as_dict(parse_json(as_text(row["data"])))
        at = time_from(row["time_created"])
        pieces = list(_part_messages(row["id"], role, part, notes, at))
        if not pieces:
            transcript.leave_out(as_text(part.get("type")), len(as_text(row["data"])))
        elif _restored([body for _, body, _, _ in pieces]) != part:
            pieces[0][1][FIELD] = {COPY: part}
        yield from pieces


def _part_messages(
    name: str, role: str, part: dict[str, Any], notes: dict[str, Any], at: Any
) -> Iterator[_Made]:
    match part.get("type"):
        case "text":
            rest = without(part, "text")
            body: dict[str, Any] = {"role": role, "content": as_text(part.get("text")), FIELD: rest}
            yield name, body, dict(notes), at
        case "reasoning":
            body = {
                "role": role,
                "content": None,
                "reasoning_content": as_text(part.get("text")),
                FIELD: without(part, "text"),
            }
            yield name, body, dict(notes), at
        case "tool":
            yield from _tool_messages(name, part, notes, at)
        case "file":
            content = _file_part(part)
            rest = without(part, "url") if content["type"] == "image_url" else dict(part)
            yield name, {"role": role, "content": [content], FIELD: rest}, dict(notes), at


def part_of(messages: Sequence[Mapping[str, Any]]) -> Any:
    """Return the part that these messages were made of: one message, or a call and its result."""
    first, *results = messages
    rest = without(first[FIELD], "message")
    if COPY in rest:
        return rest[COPY]
    match rest.get("type"):
        case "text":
            return {**rest, "text": first["content"]}
        case "reasoning":
            return {**rest, "text": first["reasoning_content"]}
        case "file":
            content = first["content"][0]
            more = {"url": content["image_url"]["url"]} if "image_url" in content else {}
            return {**rest, **more}
    call = first["tool_calls"][0]
    state = {**rest.get("state", {}), "input": parse_json(call["function"]["arguments"])}
    for result in results:
        name = "output" if result[FIELD].get("status") == "completed" else "error"
        state |= unshared(result[FIELD], result["content"])
        state[name] = result["content"]
    return {**rest, "tool": call["function"]["name"], "callID": call["id"], "state": state}


def _restored(messages: Sequence[Mapping[str, Any]]) -> Any:
    try:
        return part_of(messages)
    except (LookupError, TypeError):
        return None


def _tool_messages(
    name: str, part: dict[str, Any], notes: dict[str, Any], at: Any
) -> Iterator[_Made]:
    """Yield the call of a tool and, once it is finished, its result."""
    state = as_dict(part.get("state"))
    call = tool_call(part.get("callID"), part.get("tool"), state.get("input", {}))
    body: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [call]}
    rest = without(part, "state", "tool", "callID")
    if state.get("status") not in ("completed", "error"):
        rest["state"] = without(state, "input")
    yield f"{name}:call", {**body, FIELD: rest}, dict(notes), at
    if state.get("status") not in ("completed", "error"):
        return
    time = as_dict(state.get("time"))
    ended: dict[str, Any] = {}
    if isinstance(time.get("start"), int) and isinstance(time.get("end"), int):
        ended["seconds"] = (time["end"] - time["start"]) / 1000
    code = as_dict(state.get("metadata")).get("exit")
    if state["status"] == "error" or (isinstance(code, int) and code != 0):
        ended["failed"] = True
    output = state.get("output") if state["status"] == "completed" else state.get("error")
    result = {
        "role": "tool",
        "tool_call_id": as_text(part.get("callID")),
        "content": as_text(output),
        FIELD: shared(without(state, "input", "output", "error"), as_text(output)),
    }
    yield f"{name}:result", result, ended, time_from(time.get("end")) or at


def _file_part(part: Mapping[str, Any]) -> dict[str, Any]:
    url = as_text(part.get("url"))
    if as_text(part.get("mime")).startswith("image/") and url.startswith("data:"):
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": f"[file {as_text(part.get('filename'))}]"}


def _add_usage(data: Mapping[str, Any], response: str, made: list[_Made]) -> None:
    """Put the usage of a response on its last message by the model."""
    tokens = as_dict(data.get("tokens"))
    cache = as_dict(tokens.get("cache"))
    answers = [one for one in made if one[1]["role"] == "assistant"]
    if tokens and answers:
        read = cache.get("read") if isinstance(cache.get("read"), int) else 0
        write = cache.get("write") if isinstance(cache.get("write"), int) else 0
        # The input excludes tokens from the cache.
        fresh = tokens.get("input") if isinstance(tokens.get("input"), int) else 0
        answers[-1][2]["usage"] = usage_counts(
            prompt=(fresh or 0) + (read or 0) + (write or 0),
            answer=tokens.get("output"),
            cached=read,
        )
        answers[-1][2]["response"] = response
