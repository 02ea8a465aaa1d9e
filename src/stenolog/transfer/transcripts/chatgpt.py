"""ChatGPT's data export: a zip, its unpacked folder, or one `conversations*.json` file.

A conversation is a tree of nodes. The path to `current_node` is the current branch. The nodes of
other branches are imported as hidden messages. The export has no token counts.
"""

import base64
import mimetypes
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stenolog.transfer.transcripts.transcript import (
    Draft,
    ExportReader,
    Transcript,
    as_dict,
    as_list,
    as_text,
    branch_to,
    image_part,
    make_tool_call,
    parse_json,
    text_part,
)

MAX_PICTURE_BYTES: Final = 1024 * 1024
"""Maximum size in bytes of a picture that is stored in its message."""


class ChatGPT(ExportReader):
    """Reader of ChatGPT's exports."""

    program = "chatgpt"
    id_fields = ("conversation_id", "id")

    def convert(self, conversation: dict[str, Any], path: Path, transcript: Transcript) -> None:
        """Add a conversation of the export at this path to an empty transcript."""
        nodes = as_dict(conversation.get("mapping")).items()
        mapping = {name: node for name, node in nodes if isinstance(node, dict)}
        current_branch = _current_branch(mapping, conversation.get("current_node"))
        pictures = _Pictures(path)
        for name in _nodes_in_order(mapping, current_branch):
            node = mapping[name]
            draft = message_of(node, call_id=_call_id_of(mapping, name), find_picture=pictures.find)
            if draft is not None:
                at, is_hidden = node["message"].get("create_time"), name not in current_branch
                transcript.add_record(name, [draft], node, at=at, hidden=is_hidden)
            elif isinstance(node.get("message"), dict):
                transcript.leave_out("empty message", 0)
        transcript.finish(
            as_text(conversation.get("title")) or None,
            archived=conversation.get("is_archived"),
            starred=conversation.get("is_starred"),
            gizmo=conversation.get("gizmo_id"),
        )


def _current_branch(mapping: Mapping[str, Any], leaf: Any) -> list[str]:
    """Return the nodes from the root to `leaf`, or to the newest leaf if `leaf` is unknown."""
    parents = {name: as_text(node.get("parent")) or None for name, node in mapping.items()}
    if leaf not in mapping:
        parent_names = set(parents.values())
        leaves = [name for name in mapping if name not in parent_names]
        leaf = max(leaves, key=lambda name: _node_time(mapping[name]), default=None)
    return branch_to(leaf, parents)[::-1]


def _nodes_in_order(mapping: Mapping[str, Any], current_branch: Sequence[str]) -> list[str]:
    """Return all nodes. Another branch follows the node at which it leaves the current branch."""
    children: dict[Any, list[str]] = {}
    for name, node in mapping.items():
        children.setdefault(node.get("parent"), []).append(name)
    current_nodes = set(current_branch)
    ordered_names: dict[str, None] = {}
    for root in (*current_branch[:1], *mapping):
        stack = [root]
        while stack:
            name = stack.pop()
            if name not in ordered_names:
                ordered_names[name] = None
                # The child on the current branch comes last, so it is pushed first.
                child_names = reversed(children.get(name, []))
                stack += sorted(child_names, key=lambda child: child not in current_nodes)
    return list(ordered_names)


def _call_id_of(mapping: Mapping[str, Any], name: str) -> str:
    """Return the id of the nearest tool call above a tool's result; empty if there is none."""
    node_name = mapping[name].get("parent")
    for _ in range(len(mapping)):
        node = as_dict(mapping.get(node_name)) if isinstance(node_name, str) else {}
        message = as_dict(node.get("message"))
        if not node or as_dict(message.get("author")).get("role") == "user":
            return ""
        if _is_tool_call(message):
            return str(node_name)
        node_name = node.get("parent")
    return ""


def _is_tool_call(message: Mapping[str, Any]) -> bool:
    is_answer = as_dict(message.get("author")).get("role") == "assistant"
    return is_answer and message.get("recipient") not in (None, "all")


def message_of(
    node: Mapping[str, Any], *, call_id: str, find_picture: Callable[[str], str]
) -> Draft | None:
    """Return the message of a node and its annotations; None for a node without content."""
    message = as_dict(node.get("message"))
    content = as_dict(message.get("content"))
    metadata = as_dict(message.get("metadata"))
    role = as_text(as_dict(message.get("author")).get("role"))
    body: dict[str, Any] = {"role": role, "content": None}
    content_type = content.get("content_type")
    if _is_tool_call(message):
        text = _text_of_content(content)
        arguments = text if isinstance(parse_json(text), dict) else {"input": text}
        body["tool_calls"] = [make_tool_call(node.get("id"), message["recipient"], arguments)]
    elif content_type == "thoughts":
        thoughts = (t for t in as_list(content.get("thoughts")) if isinstance(t, dict))
        body["reasoning_content"] = "\n\n".join(as_text(t.get("content")) for t in thoughts)
    elif content_type == "reasoning_recap":
        body["reasoning_content"] = as_text(content.get("content"))
    elif content_type == "user_editable_context":
        texts = [as_text(content.get(name)) for name in ("user_profile", "user_instructions")]
        body = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    elif content_type == "multimodal_text":
        parts = as_list(content.get("parts"))
        body["content"] = [_convert_part(part, find_picture) for part in parts]
    else:
        body["content"] = _text_of_content(content)
    if role == "tool":
        body["tool_call_id"] = call_id
    if not any(body.get(name) for name in ("content", "tool_calls", "reasoning_content")):
        return None
    notes: dict[str, Any] = {}
    if metadata.get("is_visually_hidden_from_conversation") or metadata.get(
        "is_user_system_message"
    ):
        notes["kind"] = "injected"
    if role == "assistant":
        notes["model"] = as_text(metadata.get("model_slug"))
    status = as_dict(metadata.get("aggregate_result")).get("status")
    notes["failed"] = status not in (None, "success") or content_type == "system_error"
    return body, notes


def _text_of_content(content: Mapping[str, Any]) -> str:
    """Return the text of a content; empty if the content has parts other than text."""
    for name in ("text", "result"):
        if isinstance(content.get(name), str):
            return str(content[name])
    parts = as_list(content.get("parts"))
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else ""


def _convert_part(part: Any, find_picture: Callable[[str], str]) -> dict[str, Any]:
    """Return a part in the chat format."""
    if isinstance(part, str):
        return text_part(part)
    fields = as_dict(part)
    if fields.get("content_type") == "audio_transcription":
        return text_part(as_text(fields.get("text")))
    pointer = as_text(fields.get("asset_pointer"))
    if url := find_picture(pointer):
        return image_part(url)
    name = as_text(fields.get("content_type")) or "part"
    return text_part(f"[{name} {pointer}]".replace(" ]", "]"))


def _node_time(node: Any) -> float:
    created_at = as_dict(as_dict(node).get("message")).get("create_time")
    return created_at if isinstance(created_at, int | float) else 0.0


class _Pictures:
    """The pictures of an export, which its messages refer to by id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: list[str] | None = None

    def find(self, pointer: str) -> str:
        """Return a picture as a data URI; empty if the picture is missing or too large."""
        picture_id = pointer.rpartition("//")[2]
        if not picture_id:
            return ""
        name = next((name for name in self._list_names() if picture_id in name), None)
        data = b"" if name is None else self._read_picture(name)
        if name is None or not data:
            return ""
        kind = mimetypes.guess_type(name)[0] or "image/png"
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"

    def _list_names(self) -> list[str]:
        if self._names is None:
            if zipfile.is_zipfile(self._path):
                with zipfile.ZipFile(self._path) as archive:
                    self._names = archive.namelist()
            else:
                folder = self._path.parent
                self._names = [str(path.relative_to(folder)) for path in folder.rglob("file*")]
        return self._names

    def _read_picture(self, name: str) -> bytes:
        if zipfile.is_zipfile(self._path):
            with zipfile.ZipFile(self._path) as archive:
                info = archive.getinfo(name)
                return archive.read(name) if info.file_size <= MAX_PICTURE_BYTES else b""
        path = self._path.parent / name
        return path.read_bytes() if path.stat().st_size <= MAX_PICTURE_BYTES else b""
