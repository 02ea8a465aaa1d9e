"""Transcripts of the Gemini CLI: `~/.gemini/tmp/<project>/chats/session-<time>-<id>.jsonl`.

The file is a log of changes. A record with a known id replaces the earlier record, `$set` replaces
fields or all messages, and `$rewindTo` removes messages. When the program resumes a session, it
writes copies of the earlier messages, without some of their fields. Of each message, the version
with the most fields is kept.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stenolog.transfer.transcripts.transcript import (
    Draft,
    Transcript,
    TranscriptFile,
    TranscriptReader,
    as_dict,
    as_text,
    find_files_below,
    first_failure,
    list_or_empty,
    make_message,
    make_tool_call,
    make_tool_result,
    omit,
    read_json_lines,
    read_json_object,
    read_side_file,
    sum_counts,
    usage_counts,
)


class GeminiCLI(TranscriptReader):
    """Reader of the Gemini CLI's transcripts."""

    program = "gemini-cli"

    def default_folder(self) -> Path | None:
        """Return `~/.gemini/tmp`, if it exists."""
        folder = Path.home() / ".gemini" / "tmp"
        return folder if folder.is_dir() else None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the sessions below a folder, or the session in one file."""
        failures: list[tuple[Path, OSError]] = []
        for file in [path] if path.is_file() else find_files_below(path, "session-*.json*"):
            try:
                session_id = as_text(next(_read_records(file), {}).get("sessionId"))
            except OSError as error:
                failures.append((file, error))
                continue
            if session_id:
                yield self.file_at(session_id, file)
        if failures:
            raise first_failure(failures)

    def fill(self, transcript: Transcript, file: TranscriptFile) -> None:
        """Read a session. Raises OSError."""
        path = file.paths[0]
        log = _ChangeLog()
        for record in _read_records(path):
            log.apply(record)
        known_call_ids = {
            as_dict(call).get("id")
            for record in log.records.values()
            for call in list_or_empty(record.get("toolCalls"))
        }
        for message_id, record in log.records.items():
            if drafts := messages_of(record, known_call_ids):
                # The model does not see messages of the program itself.
                is_visible = log.is_visible(message_id) and drafts[0][0]["role"] != "system"
                at = log.times[message_id]
                transcript.add_record(message_id, drafts, record, at=at, hidden=not is_visible)
        summary = as_text(log.facts.get("summary"))
        transcript.finish(summary or None, folders=_read_project_folders(path))


def _read_records(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix != ".json":
        for _, record in read_json_lines(path):
            yield as_dict(record)
        return
    # Older versions wrote one JSON object with all messages.
    session = read_json_object(path)
    yield omit(session, "messages")
    yield from map(as_dict, list_or_empty(session.get("messages")))


def _read_project_folders(path: Path) -> list[str]:
    if path.parent.name != "chats":
        return []
    root = read_side_file(path.parent.parent, ".project_root").decode(errors="replace").strip()
    return [root] if root else []


class _ChangeLog:
    """State of the messages after the changes so far: records by id, and visible ids."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.times: dict[str, Any] = {}
        """Time of the first record of each message. A copy may have a later time."""
        self.current_ids: dict[str, None] = {}
        self._ids_before_resume: dict[str, None] = {}
        """Ids of the messages before a resume; empty after the next message or `$rewindTo`."""

    def is_visible(self, message_id: str) -> bool:
        """Return whether the model sees the message of this id."""
        return message_id in self.current_ids or message_id in self._ids_before_resume

    def apply(self, record: dict[str, Any]) -> None:
        """Apply the change in one line of the file."""
        if isinstance(changes := record.get("$set"), dict):
            self.facts |= omit(changes, "messages")
            if isinstance(messages := changes.get("messages"), list):
                self.current_ids = {}
                for message in messages:
                    self._keep_fuller_record(as_dict(message))
        elif isinstance(message_id := record.get("$rewindTo"), str):
            self._ids_before_resume = {}
            message_ids = list(self.current_ids)
            if message_id in message_ids:
                self.current_ids = dict.fromkeys(message_ids[: message_ids.index(message_id)])
        elif "sessionId" in record:
            self.facts |= record
            self._ids_before_resume = dict(self.current_ids)
        else:
            self._ids_before_resume = {}
            self._keep_fuller_record(record)

    def _keep_fuller_record(self, record: dict[str, Any]) -> None:
        message_id = record.get("id")
        if not isinstance(message_id, str):
            return
        self.current_ids[message_id] = None
        self.times.setdefault(message_id, record.get("timestamp"))
        known_count = _count_droppable_fields(self.records.get(message_id, {}))
        if _count_droppable_fields(record) >= known_count:
            self.records[message_id] = record


def _count_droppable_fields(record: Mapping[str, Any]) -> int:
    """Return how many fields a copy of this record would lack after a resume."""
    return sum(bool(record.get(name)) for name in ("tokens", "toolCalls", "thoughts", "model"))


def messages_of(record: Mapping[str, Any], known_call_ids: set[Any]) -> list[Draft]:
    """Return the messages of a record.

    A record that only repeats the results of `known_call_ids` has no messages.
    """
    content = record.get("content")
    parts = [as_dict(part) for part in list_or_empty(content)]
    responses = [as_dict(part.get("functionResponse")) for part in parts]
    if responses and all(response.get("id") in known_call_ids for response in responses):
        return []  # the record with the call has the same results
    texts = (part["text"] for part in parts if isinstance(part.get("text"), str))
    text = content if isinstance(content, str) else "\n".join(texts)
    if record.get("type") == "user":
        is_injected = text.lstrip().startswith("<session_context>")
        return [({"role": "user", "content": text}, {"kind": "injected" if is_injected else None})]
    if record.get("type") != "gemini":
        return [({"role": "system", "content": text}, {})] if text else []
    thoughts = [_thought_text(as_dict(t)) for t in list_or_empty(record.get("thoughts"))]
    calls, results = list[dict[str, Any]](), list[Draft]()
    for call in map(as_dict, list_or_empty(record.get("toolCalls"))):
        calls.append(make_tool_call(call.get("id"), call.get("name"), call.get("args", {})))
        result = make_tool_result(call.get("id"), _result_text(call.get("result")))
        results.append((result, {"failed": call.get("status") in ("error", "cancelled")}))
    notes = {
        "model": as_text(record.get("model")),
        "usage": _read_usage(as_dict(record.get("tokens"))),
        "response": as_text(record.get("id")),
    }
    return [(make_message("assistant", text or None, thoughts, calls), notes), *results]


def _read_usage(tokens: Mapping[str, Any]) -> dict[str, int]:
    if not tokens:
        return {}
    output = sum_counts(tokens.get("output"), tokens.get("thoughts"))
    return usage_counts(prompt=tokens.get("input"), answer=output, cached=tokens.get("cached", 0))


def _thought_text(fields: Mapping[str, Any]) -> str:
    texts = as_text(fields.get("subject")), as_text(fields.get("description"))
    return ": ".join(filter(None, texts))


def _result_text(result: Any) -> str:
    """Return the text of a tool's result."""
    texts = []
    for part in list_or_empty(result):
        response = as_dict(as_dict(as_dict(part).get("functionResponse")).get("response"))
        texts.append(as_text(response.get("output")) or as_text(response.get("error")))
    return "\n".join(filter(None, texts))
