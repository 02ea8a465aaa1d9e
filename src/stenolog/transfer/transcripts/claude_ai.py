"""Claude.ai's data export: a zip, its unpacked folder, or its `conversations.json`.

Messages form a tree. The branch that ends at the newest leaf is the current branch. The export does
not name the model.
"""

from collections.abc import Iterator, Mapping
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
    make_content,
    make_tool_call,
    make_tool_result,
    text_part,
)


class ClaudeAI(ExportReader):
    """Reader of Claude.ai's exports."""

    program = "claude-ai"
    id_fields = ("uuid",)

    def convert(self, conversation: dict[str, Any], path: Path, transcript: Transcript) -> None:  # noqa: ARG002
        """Add a conversation of the export to an empty transcript."""
        records = [as_dict(record) for record in as_list(conversation.get("chat_messages"))]
        parents = {
            as_text(record.get("uuid")): as_text(record.get("parent_message_uuid")) or None
            for record in records
        }
        has_tree = any(parent in parents for parent in parents.values())
        parent_ids = set(parents.values())
        leaves = [record for record in records if as_text(record.get("uuid")) not in parent_ids]
        newest_leaf = max(leaves, key=lambda leaf: as_text(leaf.get("created_at")), default={})
        current_ids = set(branch_to(as_text(newest_leaf.get("uuid")), parents))
        for record in records:
            record_id, at = as_text(record.get("uuid")), record.get("created_at")
            if drafts := list(_make_messages(record)):
                is_hidden = has_tree and record_id not in current_ids
                transcript.add_record(record_id, drafts, record, at=at, hidden=is_hidden)
        transcript.summary = as_text(conversation.get("summary"))
        transcript.finish(as_text(conversation.get("name")) or None)


def _make_messages(message: Mapping[str, Any]) -> Iterator[Draft]:
    """Yield the messages of one message of the export: answer, calls and results in order."""
    role = "user" if message.get("sender") == "human" else "assistant"
    blocks = [as_dict(block) for block in as_list(message.get("content"))]
    if not any(block.get("type") == "text" for block in blocks) and as_text(message.get("text")):
        blocks.append(text_part(message["text"]))
    body: dict[str, Any] = {"role": role}
    parts: list[dict[str, Any]] = []
    for block in blocks:
        match block.get("type"):
            case "text":
                parts.append(text_part(as_text(block.get("text"))))
            case "thinking":
                thoughts = body.get("reasoning_content"), as_text(block.get("thinking"))
                body["reasoning_content"] = "\n\n".join(filter(None, thoughts))
            case "tool_use":
                call = make_tool_call(block.get("id"), block.get("name"), block.get("input", {}))
                body.setdefault("tool_calls", []).append(call)
            case "tool_result":
                # The blocks before and after a tool result become separate messages.
                yield {**body, "content": make_content(parts)}, {}
                body, parts = {"role": role}, []
                result = make_tool_result(block.get("tool_use_id"), block.get("content", ""))
                yield result, {"failed": block.get("is_error") is True}
            case _:
                parts.append(dict(block))
    for attachment in map(as_dict, as_list(message.get("attachments"))):
        name, text = as_text(attachment.get("file_name")), attachment.get("extracted_content")
        parts.append(text_part(f"[file {name}]\n{as_text(text)}"))
    if parts or len(body) > 1:
        yield {**body, "content": make_content(parts)}, {}
