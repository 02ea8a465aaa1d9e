"""ChatGPT's data export: a zip, its unpacked folder, or one `conversations*.json` file.

A conversation is a tree of nodes. The path to `current_node` is the current branch; the nodes of
other branches are imported too, and hidden. The export has no token counts.
"""

import base64
import mimetypes
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stenolog.transfer.transcripts.transcript import (
    ExportFile,
    Kind,
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
    time_from,
    tool_call,
    without,
)

PROGRAM: Final = "chatgpt"
FIELD: Final = "chatgpt"
"""Field of a stored message that holds the rest of its node."""
MAX_PICTURE_BYTES: Final = 1024 * 1024
"""Maximum size of a picture that is stored in its message; larger ones stay in the export."""


class ChatGPT:
    """Reader of ChatGPT's exports."""

    program = PROGRAM

    def __init__(self) -> None:
        self._export = ExportFile("conversation_id", "id")

    def default_folder(self) -> Path | None:
        """Return None: an export is wherever the user saved it."""
        return None

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the conversations of an export. Raises OSError."""
        if path.is_dir():
            for found in sorted(path.iterdir()):
                if self._export.is_member(found.name):
                    yield from self.find(found)
            return
        for item in self._export.conversations(path):
            yield file_at(PROGRAM, f"{PROGRAM}:{item}", path, item=item)

    def read(self, file: TranscriptFile, *, is_complete: bool = True) -> Transcript:  # noqa: ARG002
        """Read a conversation. Raises OSError."""
        return _read(self._export.read(file), file.key, file.paths[0])


def _read(conversation: dict[str, Any], key: str, path: Path) -> Transcript:
    transcript = Transcript(program=PROGRAM, key=key)
    mapping = {
        name: node
        for name, node in as_dict(conversation.get("mapping")).items()
        if isinstance(node, dict)
    }
    current = _path(mapping, conversation.get("current_node"))
    pictures = _Pictures(path)
    models: dict[str, None] = {}
    first = ""
    for name in _in_order(mapping, current):
        node = mapping[name]
        made = message_of(node, call_id=_call_above(mapping, name), picture=pictures.find)
        if made is None:
            if isinstance(node.get("message"), dict):
                transcript.leave_out("empty message", 0)
            continue
        body, notes = made
        if model := notes.get("model"):
            models[model] = None
        if body["role"] == "user" and "kind" not in notes and not first:
            first = body["content"] if isinstance(body["content"], str) else ""
        transcript.messages.append(
            TranscriptMessage(
                identity=name,
                message=annotated(body, name, **notes),
                at=time_from(as_dict(node["message"]).get("create_time")),
                hidden=name not in current,
            )
        )
    transcript.title = one_line(as_text(conversation.get("title")) or first)
    transcript.source = filled(
        {
            "program": PROGRAM,
            "path": str(path),
            "models": list(models),
            "archived": conversation.get("is_archived"),
            "starred": conversation.get("is_starred"),
            "gizmo": conversation.get("gizmo_id"),
        }
    )
    return transcript


def _path(mapping: Mapping[str, Any], current: Any) -> list[str]:
    """Return the nodes from the root to the current one; to the newest leaf if it is missing."""
    if current not in mapping:
        parents = {as_dict(node).get("parent") for node in mapping.values()}
        leaves = [name for name in mapping if name not in parents]
        current = max(leaves, key=lambda name: _time(mapping[name]), default=None)
    path: list[str] = []
    while isinstance(current, str) and current in mapping and current not in path:
        path.append(current)
        current = mapping[current].get("parent")
    return path[::-1]


def _in_order(mapping: Mapping[str, Any], current: Sequence[str]) -> list[str]:
    """Return all nodes: each branch follows the node at which it leaves the current path."""
    children: dict[Any, list[str]] = {}
    for name, node in mapping.items():
        children.setdefault(node.get("parent"), []).append(name)
    on_path = set(current)
    found: list[str] = []
    seen: set[str] = set()

    def add_branch(name: str) -> None:
        stack = [name]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                found.append(node)
                stack += reversed(children.get(node, []))

    for name in current:
        if name in seen:
            continue
        seen.add(name)
        found.append(name)
        for child in children.get(name, []):
            if child not in on_path:
                add_branch(child)
    for name in mapping:
        if name not in seen:
            add_branch(name)
    return found


def _call_above(mapping: Mapping[str, Any], name: str) -> str:
    """Return the nearest tool call above a tool's result, which does not name it."""
    place = mapping[name].get("parent")
    for _ in range(len(mapping)):
        node = as_dict(mapping.get(place)) if isinstance(place, str) else {}
        message = as_dict(node.get("message"))
        if not node or as_dict(message.get("author")).get("role") == "user":
            return ""
        if _is_call(message):
            return str(place)
        place = node.get("parent")
    return ""


def _is_call(message: Mapping[str, Any]) -> bool:
    is_answer = as_dict(message.get("author")).get("role") == "assistant"
    return is_answer and message.get("recipient") not in (None, "all")


def message_of(
    node: Mapping[str, Any], *, call_id: str = "", picture: Any = None
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the message of a node and its annotations; None for a node without content."""
    message = as_dict(node.get("message"))
    content = as_dict(message.get("content"))
    author = as_dict(message.get("author"))
    metadata = as_dict(message.get("metadata"))
    role = as_text(author.get("role"))
    rest = dict(content)
    body: dict[str, Any] = {"role": role, "content": None}
    kind: Kind | None = None
    content_type = content.get("content_type")
    if _is_call(message):
        text, rest = _take_text(rest)
        is_object = isinstance(parse_json(text), dict)
        arguments = text if is_object else {"input": text}
        body["tool_calls"] = [tool_call(node.get("id"), message["recipient"], arguments)]
    elif content_type == "thoughts":
        thoughts = [one for one in content.get("thoughts") or [] if isinstance(one, dict)]
        texts = [as_text(one.get("content")) for one in thoughts]
        body["reasoning_content"] = "\n\n".join(texts)
        rest["thoughts"] = [
            {**without(one, "content"), "length": len(text)}
            for one, text in zip(thoughts, texts, strict=True)
        ]
    elif content_type == "reasoning_recap":
        body["reasoning_content"] = as_text(rest.pop("content", None))
    elif content_type == "user_editable_context":
        texts = [as_text(content.get(name)) for name in ("user_profile", "user_instructions")]
        body = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    elif content_type == "multimodal_text":
        body["content"], rest["parts"] = _parts(content.get("parts"), picture)
    else:
        text, rest = _take_text(rest)
        body["content"] = text
    if role == "tool":
        body["tool_call_id"] = call_id
    if not _has_content(body):
        return None
    if metadata.get("is_visually_hidden_from_conversation") or metadata.get(
        "is_user_system_message"
    ):
        kind = "injected"
    body[FIELD] = {
        **without(node, "message"),
        "message": {**without(message, "content"), "content": rest},
    }
    notes: dict[str, Any] = {} if kind is None else {"kind": kind}
    if role == "assistant" and isinstance(metadata.get("model_slug"), str):
        notes["model"] = metadata["model_slug"]
    result = as_dict(metadata.get("aggregate_result"))
    if result.get("status") not in (None, "success") or content_type == "system_error":
        notes["failed"] = True
    return body, notes


def node_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the node that a message was made of."""
    rest = dict(body[FIELD])
    message = dict(rest["message"])
    content = dict(message["content"])
    content_type = content.get("content_type")
    if "tool_calls" in body:
        arguments = body["tool_calls"][0]["function"]["arguments"]
        content = _put_text(content, arguments, wrapped=True)
    elif content_type == "thoughts":
        text = body["reasoning_content"]
        thoughts = []
        for one in content["thoughts"]:
            thoughts.append({**without(one, "length"), "content": text[: one["length"]]})
            text = text[one["length"] + 2 :]
        content["thoughts"] = thoughts
    elif content_type == "reasoning_recap":
        content["content"] = body["reasoning_content"]
    elif content_type == "multimodal_text":
        parts = body["content"] if isinstance(body["content"], list) else [body["content"]]
        content["parts"] = [
            part["text"] if shape is None else shape
            for part, shape in zip(parts, content["parts"], strict=True)
        ]
    elif content_type != "user_editable_context":
        content = _put_text(content, body["content"], wrapped=False)
    return {**rest, "message": {**message, "content": content}}


def _take_text(content: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the text of a content, and the content without it."""
    for name in ("text", "result"):
        if isinstance(content.get(name), str):
            return content[name], {**without(content, name), "text_in": name}
    parts = content.get("parts")
    if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], str):
        return parts[0], {**without(content, "parts"), "text_in": "parts"}
    if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
        return "\n".join(parts), content
    return "", content


def _put_text(content: dict[str, Any], text: Any, *, wrapped: bool) -> dict[str, Any]:
    place = content.get("text_in")
    if place is None:
        return content
    given = as_dict(parse_json(text)) if wrapped else {}
    if given.keys() == {"input"}:
        text = given["input"]
    content = without(content, "text_in")
    return {**content, place: [text] if place == "parts" else text}


def _parts(parts: Any, picture: Any) -> tuple[Any, list[Any]]:
    """Return parts in the chat format, and the original parts that they do not contain."""
    made: list[Any] = []
    shapes: list[Any] = []
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, str):
            made.append({"type": "text", "text": part})
            shapes.append(None)
            continue
        fields = as_dict(part)
        shapes.append(part)
        if fields.get("content_type") == "audio_transcription":
            made.append({"type": "text", "text": as_text(fields.get("text"))})
            continue
        url = picture(as_text(fields.get("asset_pointer"))) if picture is not None else ""
        if url:
            made.append({"type": "image_url", "image_url": {"url": url}})
        else:
            name = as_text(fields.get("content_type")) or "part"
            pointer = as_text(fields.get("asset_pointer"))
            made.append({"type": "text", "text": f"[{name} {pointer}]".replace(" ]", "]")})
    return made, shapes


def _has_content(body: Mapping[str, Any]) -> bool:
    return any(body.get(name) for name in ("content", "tool_calls", "reasoning_content"))


def _time(node: Any) -> float:
    at = as_dict(as_dict(node).get("message")).get("create_time")
    return at if isinstance(at, int | float) else 0.0


class _Pictures:
    """The pictures of an export, which its messages refer to by id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, str] | None = None

    def find(self, pointer: str) -> str:
        """Return a picture as a data URI; an empty text if it is missing or large."""
        name = pointer.rpartition("//")[2]
        if not name:
            return ""
        found = next((one for one in self._listed() if name in one), None)
        if found is None:
            return ""
        data = self._content(found)
        kind = mimetypes.guess_type(found)[0] or "image/png"
        return f"data:{kind};base64,{base64.b64encode(data).decode()}" if data else ""

    def _listed(self) -> list[str]:
        if self._names is None:
            if zipfile.is_zipfile(self._path):
                with zipfile.ZipFile(self._path) as archive:
                    names = archive.namelist()
            else:
                folder = self._path.parent
                names = [str(one.relative_to(folder)) for one in folder.rglob("file*")]
            self._names = dict.fromkeys(names, "")
        return list(self._names)

    def _content(self, name: str) -> bytes:
        if zipfile.is_zipfile(self._path):
            with zipfile.ZipFile(self._path) as archive:
                info = archive.getinfo(name)
                return archive.read(name) if info.file_size <= MAX_PICTURE_BYTES else b""
        path = self._path.parent / name
        return path.read_bytes() if path.stat().st_size <= MAX_PICTURE_BYTES else b""
