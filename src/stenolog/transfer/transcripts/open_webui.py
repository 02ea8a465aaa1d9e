"""Open WebUI's "Export chats": one JSON file with an array of chats.

`history` holds every message, also of answers that were regenerated; `currentId` ends the current
branch. Reasoning and tool calls are inside the text, as `<details>` elements, and stay there.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stenolog.transfer.transcripts.transcript import (
    COPY,
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
    reversible,
    time_from,
    usage_counts,
    without,
)

PROGRAM: Final = "open-webui"
FIELD: Final = "open_webui"
"""Field of a stored message that holds the rest of the export's message."""


class OpenWebUI:
    """Reader of Open WebUI's exports."""

    program = PROGRAM

    def __init__(self) -> None:
        self._export = ExportFile("id")

    def default_folder(self) -> Path | None:
        """Return None: an export is wherever the user saved it."""
        return None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the chats of an export. Raises OSError."""
        files = [path] if path.is_file() else sorted(path.glob("*.json"))
        for file in filter(os.path.isfile, files):
            for item, raw in self._export.conversations(file).items():
                if b'"history"' in bytes(raw):
                    yield file_at(PROGRAM, f"{PROGRAM}:{item}", file, item=item)

    def read(self, file: TranscriptFile, *, is_complete: bool = True) -> Transcript:  # noqa: ARG002
        """Read a chat. Raises OSError."""
        return _read(self._export.read(file), file)


def _read(chat: dict[str, Any], file: TranscriptFile) -> Transcript:
    transcript = Transcript(program=PROGRAM, key=file.key)
    inner = as_dict(chat.get("chat"))
    history = as_dict(inner.get("history"))
    messages = {name: as_dict(one) for name, one in as_dict(history.get("messages")).items() if one}
    parents = {name: as_text(one.get("parentId")) or None for name, one in messages.items()}
    current = branch_to(parents, as_text(history.get("currentId")))
    models: dict[str, None] = {}
    first = ""
    for name, one in sorted(messages.items(), key=lambda item: _time(item[1])):
        role = as_text(one.get("role")) or "user"
        content: Any = one.get("content")
        pictures = [as_dict(image) for image in one.get("files") or []]
        parts = [
            {"type": "image_url", "image_url": {"url": image["url"]}}
            for image in pictures
            if image.get("type") == "image" and isinstance(image.get("url"), str)
        ]
        if parts:
            content = [{"type": "text", "text": as_text(content)}, *parts]
        elif role == "user" and not first:
            first = as_text(content)
        usage, info = as_dict(one.get("usage")), as_dict(one.get("info"))
        model = as_text(one.get("model")) if role == "assistant" else ""
        if model:
            models[model] = None
        body = {"role": role, "content": content, FIELD: _rest(one, len(parts))}
        message = [
            TranscriptMessage(
                identity=name,
                message=annotated(
                    body,
                    name,
                    model=model,
                    usage=usage_counts(
                        prompt=usage.get("prompt_tokens", info.get("prompt_eval_count")),
                        answer=usage.get("completion_tokens", info.get("eval_count")),
                    ),
                    response=name,
                    failed=bool(one.get("error")),
                ),
                at=time_from(one.get("timestamp")),
                hidden=name not in current,
            )
        ]
        transcript.messages += reversible(message, FIELD, one, record_of)
    transcript.title = one_line(as_text(chat.get("title")) or first)
    transcript.source = filled(
        {
            "program": PROGRAM,
            "path": str(file.paths[0]),
            "models": list(models),
            "archived": chat.get("archived"),
            "pinned": chat.get("pinned"),
            "tags": as_dict(chat.get("meta")).get("tags"),
        }
    )
    return transcript


def _rest(message: dict[str, Any], pictures: int) -> dict[str, Any]:
    """Return what the message in the chat format does not have."""
    rest = without(message, "role", "content")
    if pictures:
        rest["files"] = [
            without(one, "url") if _is_picture(one) else one for one in message["files"]
        ]
    return rest


def _is_picture(file: Any) -> bool:
    return as_dict(file).get("type") == "image" and isinstance(as_dict(file).get("url"), str)


def record_of(messages: Sequence[Mapping[str, Any]]) -> Any:
    """Return the export's message that a message was made of."""
    body = messages[0]
    rest = dict(body[FIELD])
    if COPY in rest:
        return rest[COPY]
    content = body["content"]
    listed = rest.get("files")
    pictures = [as_dict(one) for one in listed] if isinstance(listed, list) else []
    if any(one.get("type") == "image" and "url" not in one for one in pictures):
        first, *parts = content
        content = first["text"]
        urls = iter(part["image_url"]["url"] for part in parts)
        rest["files"] = [
            {**one, "url": next(urls)} if one.get("type") == "image" else one for one in pictures
        ]
    return {**rest, "role": body["role"], "content": content}


def _time(message: dict[str, Any]) -> float:
    at = message.get("timestamp")
    return at if isinstance(at, int | float) else 0.0
