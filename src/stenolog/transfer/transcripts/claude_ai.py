"""Claude.ai's data export: a zip, its unpacked folder, or its `conversations.json`.

Messages form a tree; the branch that ends at the newest leaf is the current one. The export does
not name the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stenolog.transfer.transcripts.transcript import (
    COPY,
    SAME,
    ExportFile,
    Transcript,
    TranscriptFile,
    TranscriptMessage,
    annotated,
    as_dict,
    as_text,
    branch_to,
    file_at,
    filled,
    one_line,
    parse_json,
    reversible,
    time_from,
    tool_call,
    without,
)

PROGRAM: Final = "claude-ai"
FIELD: Final = "claude_ai"
"""Field of a stored message that holds the rest of the export's message."""


class ClaudeAI:
    """Reader of Claude.ai's exports."""

    program = PROGRAM

    def __init__(self) -> None:
        self._export = ExportFile("uuid")

    def default_folder(self) -> Path | None:
        """Return None: an export is wherever the user saved it."""
        return None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the conversations of an export. Raises OSError."""
        path = path / "conversations.json" if path.is_dir() else path
        if path.is_file():
            for item in self._export.conversations(path):
                yield file_at(PROGRAM, f"{PROGRAM}:{item}", path, item=item)

    def read(self, file: TranscriptFile, *, is_complete: bool = True) -> Transcript:  # noqa: ARG002
        """Read a conversation. Raises OSError."""
        return _read(self._export.read(file), file)


def _read(conversation: dict[str, Any], file: TranscriptFile) -> Transcript:
    transcript = Transcript(program=PROGRAM, key=file.key)
    messages = [as_dict(one) for one in conversation.get("chat_messages") or []]
    parents = {
        as_text(one.get("uuid")): as_text(one.get("parent_message_uuid")) or None
        for one in messages
    }
    has_tree = any(parent in parents for parent in parents.values())
    inner = set(parents.values())
    leaves = [one for one in messages if as_text(one.get("uuid")) not in inner]
    newest = max(leaves, key=lambda one: as_text(one.get("created_at")), default={})
    current = branch_to(parents, as_text(newest.get("uuid")))
    first = ""
    for one in messages:
        name = as_text(one.get("uuid"))
        made = []
        for number, (body, notes) in enumerate(_bodies(one)):
            identity = name if number == 0 else f"{name}#{number}"
            made.append(
                TranscriptMessage(
                    identity=identity,
                    message=annotated(body, identity, **notes),
                    at=time_from(one.get("created_at")),
                    hidden=has_tree and name not in current,
                )
            )
            if not first and body["role"] == "user":
                first = body["content"] if isinstance(body["content"], str) else ""
        transcript.messages += reversible(made, FIELD, one, record_of)
    transcript.title = one_line(as_text(conversation.get("name")) or first)
    transcript.summary = as_text(conversation.get("summary"))
    transcript.source = filled({"program": PROGRAM, "path": str(file.paths[0])})
    return transcript


def _bodies(message: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the messages of one message of the export: answer, calls and results in order.

    The first one has the rest of the export's message, with the form of each block.
    """
    role = "user" if message.get("sender") == "human" else "assistant"
    blocks = [as_dict(block) for block in message.get("content") or []]
    rest = without(message, "text", "content", "attachments")
    if "content" in message:
        rest["content"] = [_form(block) for block in blocks]
    if "attachments" in message:
        rest["attachments"] = [
            without(as_dict(one), "file_name", "extracted_content")
            for one in message.get("attachments") or []
        ]
    body: dict[str, Any] = {"role": role, "content": None}
    texts: list[dict[str, Any]] = []
    if not any(block.get("type") == "text" for block in blocks) and as_text(message.get("text")):
        blocks = [*blocks, {"type": "text", "text": message["text"]}]
    elif message.get("text") == _joined(blocks):
        rest["text"] = SAME
    elif "text" in message:
        rest["text"] = message["text"]
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append({"type": "text", "text": as_text(block.get("text"))})
            case "thinking":
                thoughts = body.get("reasoning_content", "")
                body["reasoning_content"] = "\n\n".join(
                    filter(None, (thoughts, as_text(block.get("thinking"))))
                )
            case "tool_use":
                call = tool_call(block.get("id"), block.get("name"), block.get("input", {}))
                body.setdefault("tool_calls", []).append(call)
            case "tool_result":
                # The blocks before the result are one message, the blocks after it the next.
                yield _finished(body, texts, rest), {}
                body, texts, rest = {"role": role, "content": None}, [], {}
                result = {
                    "role": "tool",
                    "tool_call_id": as_text(block.get("tool_use_id")),
                    "content": block.get("content", ""),
                    FIELD: without(block, "type", "tool_use_id", "content"),
                }
                yield result, {"failed": True} if block.get("is_error") is True else {}
            case _:
                texts.append(dict(block))
    for attachment in message.get("attachments") or []:
        fields = as_dict(attachment)
        name, text = as_text(fields.get("file_name")), as_text(fields.get("extracted_content"))
        texts.append({"type": "text", "text": f"[file {name}]\n{text}"})
    if texts or body.keys() > {"role", "content"}:
        yield _finished(body, texts, rest), {}


def _form(block: dict[str, Any]) -> dict[str, Any]:
    """Return what the messages do not have of a block."""
    match block.get("type"):
        case "text":
            return without(block, "text")
        case "thinking":
            length = len(as_text(block.get("thinking")))
            return {**without(block, "thinking"), "length": length}
        case "tool_use":
            # An older export has no id.
            names = [name for name in ("id", "name", "input") if name in block]
            return {**without(block, *names), "fields": names}
        case "tool_result":
            given = [name for name in ("tool_use_id", "content") if name in block]
            return {"type": "tool_result", "fields": given}
        case _:
            return {"type": SAME}


def record_of(messages: Sequence[Mapping[str, Any]]) -> Any:
    """Return the export's message that these messages were made of."""
    rest = dict(messages[0][FIELD])
    if COPY in rest:
        return rest[COPY]
    answers = [one for one in messages if one["role"] != "tool"]
    parts = iter([part for one in answers for part in _content_parts(one["content"])])
    calls = iter([call for one in answers for call in one.get("tool_calls", ())])
    results = iter([one for one in messages if one["role"] == "tool"])
    thoughts = [one["reasoning_content"] for one in answers if "reasoning_content" in one]
    thinking = "\n\n".join(thoughts)
    blocks = []
    for form in rest.get("content", []):
        match form["type"]:
            case "text":
                blocks.append({**form, "text": next(parts)["text"]})
            case "thinking":
                length = form["length"]
                blocks.append({**without(form, "length"), "thinking": thinking[:length]})
                thinking = thinking[length + 2 :]
            case "tool_use":
                call = next(calls)
                values = {
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": parse_json(call["function"]["arguments"]),
                }
                kept = {name: values[name] for name in form["fields"]}
                blocks.append({**without(form, "fields"), **kept})
            case "tool_result":
                result = next(results)
                values = {"tool_use_id": result["tool_call_id"], "content": result["content"]}
                kept = {name: values[name] for name in form["fields"]}
                blocks.append({"type": "tool_result", **kept, **result[FIELD]})
            case _:
                blocks.append(next(parts))
    made = {**rest, "content": blocks} if "content" in rest else rest
    if "text" not in rest:
        made["text"] = next(parts)["text"]
    elif rest["text"] == SAME:
        made["text"] = _joined(blocks)
    if "attachments" in rest:
        made["attachments"] = [
            _attachment(form, next(parts)["text"]) for form in rest["attachments"]
        ]
    return made


def _attachment(form: Mapping[str, Any], text: str) -> dict[str, Any]:
    name, _, content = text.removeprefix("[file ").partition("]\n")
    return {**form, "file_name": name, "extracted_content": content}


def _content_parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, list) else []


def _joined(blocks: Sequence[Mapping[str, Any]]) -> str:
    texts = (block.get("text") for block in blocks if block.get("type") == "text")
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _finished(
    body: dict[str, Any], texts: list[dict[str, Any]], rest: dict[str, Any]
) -> dict[str, Any]:
    only = len(texts) == 1 and texts[0].keys() == {"type", "text"}
    content = texts[0]["text"] if only else texts or None
    return {**body, "content": content, FIELD: rest}
