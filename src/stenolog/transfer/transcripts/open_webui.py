"""Open WebUI's "Export chats": one JSON file with an array of chats.

`history` holds every message, including answers that were replaced by a regenerated answer. The
message with the id `currentId` is the end of the current branch. Reasoning and tool calls are
`<details>` elements in the text, and stay in the text.
"""

from pathlib import Path
from typing import Any

from stenolog.transfer.transcripts.transcript import (
    Draft,
    ExportReader,
    Transcript,
    as_dict,
    as_list,
    as_text,
    branch_to,
    image_part,
    text_part,
    usage_counts,
)


class OpenWebUI(ExportReader):
    """Reader of Open WebUI's exports."""

    program = "open-webui"
    id_fields = ("id",)
    folder_files = r".*\.json"
    required_bytes = b'"history"'

    def convert(self, conversation: dict[str, Any], path: Path, transcript: Transcript) -> None:  # noqa: ARG002
        """Add a chat of the export to an empty transcript."""
        history = as_dict(as_dict(conversation.get("chat")).get("history"))
        records = as_dict(history.get("messages")).items()
        messages = {name: as_dict(record) for name, record in records if record}
        parents = {name: as_text(m.get("parentId")) or None for name, m in messages.items()}
        current_ids = set(branch_to(as_text(history.get("currentId")), parents))
        for name, record in sorted(messages.items(), key=lambda item: _message_time(item[1])):
            draft, at = _make_message(name, record), record.get("timestamp")
            transcript.add_record(name, [draft], record, at=at, hidden=name not in current_ids)
        transcript.finish(
            as_text(conversation.get("title")) or None,
            archived=conversation.get("archived"),
            pinned=conversation.get("pinned"),
            tags=as_dict(conversation.get("meta")).get("tags"),
        )


def _make_message(name: str, record: dict[str, Any]) -> Draft:
    role = as_text(record.get("role")) or "user"
    content: Any = record.get("content")
    files = [as_dict(file) for file in as_list(record.get("files"))]
    pictures = [
        image_part(file["url"])
        for file in files
        if file.get("type") == "image" and isinstance(file.get("url"), str)
    ]
    if pictures:
        content = [text_part(as_text(content)), *pictures]
    usage, info = as_dict(record.get("usage")), as_dict(record.get("info"))
    return {"role": role, "content": content}, {
        "model": as_text(record.get("model")) if role == "assistant" else "",
        "usage": usage_counts(
            prompt=usage.get("prompt_tokens", info.get("prompt_eval_count")),
            answer=usage.get("completion_tokens", info.get("eval_count")),
        ),
        "response": name,
        "failed": bool(record.get("error")),
    }


def _message_time(message: dict[str, Any]) -> float:
    created_at = message.get("timestamp")
    return created_at if isinstance(created_at, int | float) else 0.0
