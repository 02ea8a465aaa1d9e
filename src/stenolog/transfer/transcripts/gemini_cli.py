"""Transcripts of the Gemini CLI: `~/.gemini/tmp/<project>/chats/session-<time>-<id>.jsonl`.

The file is a log of changes: a record with a known id replaces the earlier one, `$set` replaces
fields or all messages, `$rewindTo` removes messages. A resume writes poorer copies of the earlier
messages; the richest version of each is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stenolog.transfer.transcripts.transcript import (
    COPY,
    Kind,
    Transcript,
    TranscriptFile,
    TranscriptMessage,
    annotated,
    as_dict,
    as_text,
    file_at,
    files_below,
    filled,
    hidden,
    json_lines,
    one_line,
    parse_json,
    reversible,
    shared,
    split_text,
    time_from,
    tool_call,
    unshared,
    usage_counts,
    without,
)

PROGRAM: Final = "gemini-cli"
FIELD: Final = "gemini_cli"
"""Field of a stored message that holds the rest of its record."""


class GeminiCLI:
    """Reader of the Gemini CLI's transcripts."""

    program = PROGRAM

    def default_folder(self) -> Path | None:
        """Return `~/.gemini/tmp`, if it exists."""
        folder = Path.home() / ".gemini" / "tmp"
        return folder if folder.is_dir() else None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the sessions below a folder, or the session in one file."""
        files = [path] if path.is_file() else files_below(path, "session-*.json*")
        for found in files:
            if session := _session_id(found):
                yield file_at(PROGRAM, f"{PROGRAM}:{session}", found)

    def read(self, file: TranscriptFile, *, is_complete: bool = True) -> Transcript:  # noqa: ARG002
        """Read a session. Raises OSError."""
        path = file.paths[0]
        transcript = Transcript(program=PROGRAM, key=file.key)
        log = _Log()
        for _, record in _records(path):
            log.add(as_dict(record))
        called = {
            call.get("id")
            for record in log.records.values()
            for call in record.get("toolCalls") or []
            if isinstance(call, dict)
        }
        first = ""
        models: dict[str, None] = {}
        for name, record in log.records.items():
            for message in messages_of(record, called):
                transcript.messages.append(message if log.is_visible(name) else hidden(message))
                body = message.message
                if not first and body["role"] == "user" and "kind" not in body["stenolog"]:
                    first = as_text(body["content"])
            if isinstance(model := record.get("model"), str):
                models[model] = None
        transcript.title = one_line(as_text(log.facts.get("summary")) or first)
        transcript.source = filled(
            {
                "program": PROGRAM,
                "path": str(path),
                "folders": _project_folder(path),
                "models": list(models),
            }
        )
        return transcript


def _records(path: Path) -> Iterator[tuple[bytes, Any]]:
    if path.suffix != ".json":
        yield from json_lines(path)
        return
    # Older versions wrote one JSON object with all messages.
    session = as_dict(parse_json(path.read_bytes()))
    yield b"", without(session, "messages")
    for record in session.get("messages") or []:
        yield b"", record


def _session_id(path: Path) -> str:
    try:
        head = next((record for _, record in _records(path)), None)
    except OSError:
        return ""
    return as_text(as_dict(head).get("sessionId"))


def _project_folder(path: Path) -> list[str]:
    root = path.parent.parent / ".project_root"
    try:
        return [root.read_text(encoding="utf-8").strip()]
    except OSError:
        return []


class _Log:
    """The messages after all changes: every version's id, and which are current."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.records: dict[str, dict[str, Any]] = {}
        self.current: dict[str, None] = {}
        self._resuming: dict[str, None] = {}
        """Messages from before a resume, until the program has written all of them again."""

    def is_visible(self, name: str) -> bool:
        """Return whether the model sees the message of this id."""
        return name in self.current or name in self._resuming

    def add(self, record: dict[str, Any]) -> None:
        """Apply one line of the file."""
        if isinstance(changes := record.get("$set"), dict):
            self.facts |= without(changes, "messages")
            if isinstance(messages := changes.get("messages"), list):
                self.current = {}
                for message in messages:
                    self._keep(as_dict(message))
        elif isinstance(place := record.get("$rewindTo"), str):
            self._resuming = {}
            names = list(self.current)
            if place in names:
                self.current = dict.fromkeys(names[: names.index(place)])
        elif "sessionId" in record:
            self.facts |= record
            self._resuming = dict(self.current)
        else:
            self._resuming = {}
            self._keep(record)

    def _keep(self, record: dict[str, Any]) -> None:
        name = record.get("id")
        if not isinstance(name, str):
            return
        self.current[name] = None
        known = self.records.get(name)
        if known is None or _richness(record) >= _richness(known):
            self.records[name] = record


def _richness(record: Mapping[str, Any]) -> int:
    """Return how many of the fields that a resume drops are present."""
    return sum(bool(record.get(name)) for name in ("tokens", "toolCalls", "thoughts", "model"))


def messages_of(record: Mapping[str, Any], called: set[Any]) -> list[TranscriptMessage]:
    """Return the messages of a record. `called`: ids of calls whose results are known."""
    content = record.get("content")
    parts = content if isinstance(content, list) else []
    responses = [as_dict(as_dict(part).get("functionResponse")) for part in parts]
    if responses and all(one.get("id") in called for one in responses):
        return []  # the record with the call has the same results
    return reversible(_messages(record), FIELD, dict(record), record_of)


def _messages(record: Mapping[str, Any]) -> list[TranscriptMessage]:
    kind: Kind | None = None
    content = record.get("content")
    text = content if isinstance(content, str) else _text(content)
    rest = without(record, "content", "toolCalls", "thoughts")
    if isinstance(content, list):
        rest["content"] = [_length_for(part, "text") for part in content]
    if record.get("type") == "user":
        if text.lstrip().startswith("<session_context>"):
            kind = "injected"
        body: dict[str, Any] = {"role": "user", "content": text, FIELD: rest}
        return [_message(record, body, kind=kind)]
    if record.get("type") != "gemini":
        body = {"role": "system", "content": text, FIELD: rest}
        return [hidden(_message(record, body))] if text else []
    body = {"role": "assistant", "content": text or None}
    thoughts = [as_dict(one) for one in record.get("thoughts") or []]
    if "thoughts" in record:
        rest["thoughts"] = [_length_for(one, "subject", "description") for one in thoughts]
    if thoughts:
        body["reasoning_content"] = "\n\n".join(map(_thought, thoughts))
    calls = [as_dict(call) for call in record.get("toolCalls") or []]
    if calls:
        body["tool_calls"] = [
            tool_call(call.get("id"), call.get("name"), call.get("args", {})) for call in calls
        ]
    tokens = as_dict(record.get("tokens"))
    found = [
        _message(
            record,
            {**body, FIELD: rest},
            model=as_text(record.get("model")),
            usage=usage_counts(
                prompt=tokens.get("input"),
                answer=_sum(tokens.get("output"), tokens.get("thoughts")),
                cached=tokens.get("cached", 0),
            ),
            response=as_text(record.get("id")),
        )
    ]
    for number, call in enumerate(calls, 1):
        text = _result(call.get("result"))
        result = {
            "role": "tool",
            "tool_call_id": as_text(call.get("id")),
            "content": text,
            FIELD: shared(without(call, "id", "name", "args"), text),
        }
        failed = call.get("status") in ("error", "cancelled")
        found.append(_message(record, result, number=number, failed=failed))
    return found


def record_of(messages: Sequence[Mapping[str, Any]]) -> Any:
    """Return the record that these messages were made of."""
    first, *results = messages
    rest = dict(first[FIELD])
    if COPY in rest:
        return rest[COPY]
    text = first["content"] or ""
    if isinstance(shape := rest.get("content"), list):
        lengths = [part["$text"] for part in shape if "$text" in as_dict(part)]
        texts = iter(split_text(text, lengths, "\n"))
        rest["content"] = [
            {**without(part, "$text"), "text": next(texts)} if "$text" in as_dict(part) else part
            for part in shape
        ]
    else:
        rest["content"] = text
    if shape := rest.get("thoughts"):
        rest["thoughts"] = _thoughts(shape, first["reasoning_content"])
    if results:
        rest["toolCalls"] = [
            {
                "id": call["id"],
                "name": call["function"]["name"],
                "args": parse_json(call["function"]["arguments"]),
                **unshared(result[FIELD], result["content"]),
            }
            for call, result in zip(first["tool_calls"], results, strict=True)
        ]
    return rest


def _length_for(fields: Any, *names: str) -> Any:
    """Return the fields with the lengths of texts instead of the texts."""
    found = dict(fields) if isinstance(fields, dict) else fields
    for name in names:
        if isinstance(as_dict(fields).get(name), str):
            found[f"${name}"] = len(found.pop(name))
    return found


def _thought(fields: Mapping[str, Any]) -> str:
    texts = as_text(fields.get("subject")), as_text(fields.get("description"))
    return ": ".join(filter(None, texts))


def _thoughts(shape: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    made, start = [], 0
    for one in shape:
        lengths = [one.get("$subject", 0), one.get("$description", 0)]
        size = sum(lengths) + (2 if all(lengths) else 0)
        piece = text[start : start + size]
        start += size + 2
        fields = without(one, "$subject", "$description")
        if "$subject" in one:
            fields["subject"] = piece[: lengths[0]]
        if "$description" in one:
            fields["description"] = piece[size - lengths[1] :]
        made.append(fields)
    return made


def _message(
    record: Mapping[str, Any],
    body: dict[str, Any],
    *,
    number: int = 0,
    kind: Kind | None = None,
    **notes: Any,
) -> TranscriptMessage:
    name = as_text(record.get("id"))
    identity = name if number == 0 else f"{name}#{number}"
    return TranscriptMessage(
        identity=identity,
        message=annotated(body, identity, kind=kind, **notes),
        at=time_from(record.get("timestamp")),
    )


def _text(parts: Any) -> str:
    listed = parts if isinstance(parts, list) else []
    texts = (as_dict(part).get("text") for part in listed)
    return "\n".join(text for text in texts if isinstance(text, str))


def _result(result: Any) -> str:
    """Return the text of a tool's result, or all of it as JSON."""
    texts = []
    for part in result if isinstance(result, list) else []:
        response = as_dict(as_dict(as_dict(part).get("functionResponse")).get("response"))
        texts.append(as_text(response.get("output")) or as_text(response.get("error")))
    return "\n".join(filter(None, texts))


def _sum(*counts: Any) -> Any:
    numbers = [one for one in counts if isinstance(one, int)]
    return sum(numbers) if numbers else None
