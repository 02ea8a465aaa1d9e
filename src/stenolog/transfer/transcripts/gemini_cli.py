"""Transcripts of the Gemini CLI: `~/.gemini/tmp/<project>/chats/session-<time>-<id>.jsonl`.

The file is a log of changes. A record with a known id replaces the earlier record, `$set` replaces
fields or all messages, and `$rewindTo` removes messages. When the program resumes a session, it
writes copies of the earlier messages that lack some fields. The version of a message with the most
fields is kept.
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
    as_list,
    as_text,
    find_files_below,
    make_tool_call,
    make_tool_result,
    omit,
    parse_json,
    read_json_lines,
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
        for file in [path] if path.is_file() else find_files_below(path, "session-*.json*"):
            if session := _session_id(file):
                yield self.file_at(session, file)

    def fill(self, transcript: Transcript, file: TranscriptFile, *, is_complete: bool) -> None:  # noqa: ARG002
        """Read a session. Raises OSError."""
        path = file.paths[0]
        log = _ChangeLog()
        for record in _read_records(path):
            log.add(record)
        known_calls = {
            as_dict(call).get("id")
            for record in log.records.values()
            for call in as_list(record.get("toolCalls"))
        }
        for name, record in log.records.items():
            if drafts := messages_of(record, known_calls):
                # The model does not see messages of the program itself.
                is_visible = log.is_visible(name) and drafts[0][0]["role"] != "system"
                at = record.get("timestamp")
                transcript.add_record(name, drafts, record, at=at, hidden=not is_visible)
        summary = as_text(log.facts.get("summary"))
        transcript.finish(summary or None, folders=_project_folder(path))


def _read_records(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix != ".json":
        for _, record in read_json_lines(path):
            yield as_dict(record)
        return
    # Older versions wrote one JSON object with all messages.
    session = as_dict(parse_json(path.read_bytes()))
    yield omit(session, "messages")
    yield from map(as_dict, as_list(session.get("messages")))


def _session_id(path: Path) -> str:
    try:
        return as_text(next(_read_records(path), {}).get("sessionId"))
    except OSError:
        return ""


def _project_folder(path: Path) -> list[str]:
    root_file = path.parent.parent / ".project_root"
    try:
        return [root_file.read_text(encoding="utf-8").strip()]
    except OSError:
        return []


class _ChangeLog:
    """The messages after all changes: the record of each id, and the ids that are visible."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.current_ids: dict[str, None] = {}
        self._ids_before_resume: dict[str, None] = {}
        """Ids of the messages before a resume; empty after the next message or `$rewindTo`."""

    def is_visible(self, message_id: str) -> bool:
        """Return whether the model sees the message of this id."""
        return message_id in self.current_ids or message_id in self._ids_before_resume

    def add(self, record: dict[str, Any]) -> None:
        """Apply one line of the file."""
        if isinstance(changes := record.get("$set"), dict):
            self.facts |= omit(changes, "messages")
            if isinstance(messages := changes.get("messages"), list):
                self.current_ids = {}
                for message in messages:
                    self._keep_richest_record(as_dict(message))
        elif isinstance(message_id := record.get("$rewindTo"), str):
            self._ids_before_resume = {}
            names = list(self.current_ids)
            if message_id in names:
                self.current_ids = dict.fromkeys(names[: names.index(message_id)])
        elif "sessionId" in record:
            self.facts |= record
            self._ids_before_resume = dict(self.current_ids)
        else:
            self._ids_before_resume = {}
            self._keep_richest_record(record)

    def _keep_richest_record(self, record: dict[str, Any]) -> None:
        message_id = record.get("id")
        if not isinstance(message_id, str):
            return
        self.current_ids[message_id] = None
        known_record = self.records.get(message_id)
        if known_record is None or _richness(record) >= _richness(known_record):
            self.records[message_id] = record


def _richness(record: Mapping[str, Any]) -> int:
    """Return how many fields of this record a resume would drop."""
    return sum(bool(record.get(name)) for name in ("tokens", "toolCalls", "thoughts", "model"))


def messages_of(record: Mapping[str, Any], known_calls: set[Any]) -> list[Draft]:
    """Return the messages of a record. `known_calls` are ids of calls whose results are known."""
    content = record.get("content")
    parts = [as_dict(part) for part in as_list(content)]
    responses = [as_dict(part.get("functionResponse")) for part in parts]
    if responses and all(response.get("id") in known_calls for response in responses):
        return []  # the record with the call has the same results
    text = content if isinstance(content, str) else _join_texts(parts)
    if record.get("type") == "user":
        is_injected = text.lstrip().startswith("<session_context>")
        return [({"role": "user", "content": text}, {"kind": "injected" if is_injected else None})]
    if record.get("type") != "gemini":
        return [({"role": "system", "content": text}, {})] if text else []
    body: dict[str, Any] = {"role": "assistant", "content": text or None}
    if thoughts := [as_dict(thought) for thought in as_list(record.get("thoughts"))]:
        body["reasoning_content"] = "\n\n".join(map(_thought_text, thoughts))
    calls = [as_dict(call) for call in as_list(record.get("toolCalls"))]
    if calls:
        body["tool_calls"] = [
            make_tool_call(call.get("id"), call.get("name"), call.get("args", {})) for call in calls
        ]
    notes = {
        "model": as_text(record.get("model")),
        "usage": _read_usage(as_dict(record.get("tokens"))),
        "response": as_text(record.get("id")),
    }
    results = [
        (
            make_tool_result(call.get("id"), _result_text(call.get("result"))),
            {"failed": call.get("status") in ("error", "cancelled")},
        )
        for call in calls
    ]
    return [(body, notes), *results]


def _read_usage(tokens: Mapping[str, Any]) -> dict[str, int]:
    if not tokens:
        return {}
    output = sum_counts(tokens.get("output"), tokens.get("thoughts"))
    return usage_counts(prompt=tokens.get("input"), answer=output, cached=tokens.get("cached", 0))


def _thought_text(fields: Mapping[str, Any]) -> str:
    texts = as_text(fields.get("subject")), as_text(fields.get("description"))
    return ": ".join(filter(None, texts))


def _join_texts(parts: list[dict[str, Any]]) -> str:
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def _result_text(result: Any) -> str:
    """Return the text of a tool's result."""
    texts = []
    for part in as_list(result):
        response = as_dict(as_dict(as_dict(part).get("functionResponse")).get("response"))
        texts.append(as_text(response.get("output")) or as_text(response.get("error")))
    return "\n".join(filter(None, texts))
