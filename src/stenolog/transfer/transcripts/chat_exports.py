"""Exports of chat services: ChatGPT, Claude.ai and Open WebUI.

An export is a JSON array of conversations in one or more files, or a zip with these files.
"""

import base64
import json
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self
from zipfile import ZipFile, is_zipfile

import msgspec
from msgspec import Raw

from stenolog.transfer.transcripts.transcript import (
    MAX_RECORD_BYTES,
    Draft,
    Transcript,
    TranscriptFile,
    TranscriptReader,
    as_dict,
    as_text,
    branch_to,
    first_failure,
    image_part,
    list_or_empty,
    make_content,
    make_tool_call,
    make_tool_result,
    open_transcript,
    parse_json,
    read_side_file,
    text_part,
    unpacked_limit,
    usage_counts,
)

EXPORT_FILE_NAME: Final = r"conversations(-\d+)?\.json"
MAX_EXPORT_BYTES: Final = 2 * 1024**3
"""Maximum size in bytes of a file that is not compressed."""
MAX_ZIP_ENTRIES: Final = 100_000
"""Maximum number of files in a zip."""
MAX_PICTURE_BYTES: Final = 1024 * 1024
"""Maximum size in bytes of a picture that is stored. A note replaces a larger picture."""
MAX_PICTURES_BYTES: Final = 64 * 1024 * 1024
"""Maximum size in bytes of all pictures of a conversation, which may show one many times."""
_PICTURE_NAME: Final = re.compile(
    r"(?P<id>file[-_][0-9A-Za-z]+)(-[^/]*)?\.(png|jpe?g|gif|webp|dat)", re.IGNORECASE
)
_PICTURE_FOLDER: Final = re.compile(r"dalle-generations|user-[^/]+")
_PICTURE_STARTS: Final = {
    "image/png": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8[79]a"),
    "image/webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
}
"""Pattern of the first bytes of a picture, by its type."""
_RECORDING_TYPES: Final = ("audio_asset_pointer", "real_time_user_audio_video_asset_pointer")
"""Types of the parts of a ChatGPT message that refer to recorded speech."""


class ExportReader(TranscriptReader):
    """Reader of a program's exports: JSON arrays of conversations, in files or in a zip.

    The file that was read last is kept in memory, so that its conversations are parsed only once.
    """

    id_fields: tuple[str, ...]
    """Fields that may hold the id of a conversation."""
    file_name_pattern: str = EXPORT_FILE_NAME
    """Pattern for the names of an export's files in a folder."""
    required_bytes: bytes = b""
    """Bytes that every conversation of the program contains."""

    def __init__(self) -> None:
        self._last_read: tuple[Path, int, dict[str, Raw]] | None = None

    @abstractmethod
    def convert(self, conversation: dict[str, Any], path: Path, transcript: Transcript) -> None:
        """Add a conversation of the export at this path to an empty transcript."""

    def find(self, path: Path) -> Iterator[TranscriptFile]:
        """Yield the conversations of an export. Raises OSError at the end."""
        files = [path]
        if path.is_dir():
            files = [p for p in path.iterdir() if re.fullmatch(self.file_name_pattern, p.name)]
        failures: list[tuple[Path, OSError]] = []
        for file in filter(os.path.isfile, sorted(files)):
            # A file that cannot be read must not hide the other files.
            try:
                conversations = self._read_conversations(file)
            except OSError as error:
                failures.append((file, error))
                continue
            for id_, raw in conversations.items():
                if len(raw) > MAX_RECORD_BYTES:  # guard: conversation-size
                    text = f"its conversation {id_} has {len(raw):,} bytes"
                    failures.append((file, OSError(text)))
                elif self.required_bytes in bytes(raw):
                    yield self.file_at(id_, file, conversation_id=id_)
        if failures:
            raise first_failure(failures)

    def fill(self, transcript: Transcript, file: TranscriptFile) -> None:
        """Add the messages of a conversation, if it is still in the file. Raises OSError."""
        path = file.paths[0]
        raw = self._read_conversations(path).get(file.conversation_id, Raw(b"{}"))
        self.convert(as_dict(parse_json(bytes(raw))), path, transcript)

    def _read_conversations(self, path: Path) -> dict[str, Raw]:
        """Return the conversations of a file as JSON, by id. Raises OSError."""
        modified = path.stat().st_mtime_ns
        if self._last_read is None or self._last_read[:2] != (path, modified):
            raw_by_id: dict[str, Raw] = {}
            for content in _read_export(path):
                for number, raw in enumerate(_split_conversations(content), start=1):
                    if len(raw) > MAX_RECORD_BYTES:
                        raw_by_id[f"number {number}"] = raw  # `find` reports it
                        continue
                    fields = as_dict(parse_json(bytes(raw)))
                    ids = (as_text(fields.get(name)) for name in self.id_fields)
                    if conversation_id := next(filter(None, ids), ""):
                        raw_by_id[conversation_id] = raw
            self._last_read = path, modified, raw_by_id
        return self._last_read[2]


@contextmanager
def _report_damage() -> Iterator[None]:
    """Raise OSError if the zip that is opened or read in the `with` block is damaged."""
    try:
        yield
    except (OSError, MemoryError):
        raise
    except Exception as error:  # zipfile and its decompressors raise many types
        raise OSError(f"the zip is damaged or encrypted: {error}") from error


def _read_export(path: Path) -> Iterator[bytes]:
    """Yield the content of a file, or of the files with conversations in a zip."""
    with ExitStack() as opened:
        file = opened.enter_context(open_transcript(path))
        size = os.fstat(file.fileno()).st_size
        if not is_zipfile(file):
            if size > MAX_EXPORT_BYTES:
                raise OSError(f"{path.name} has {size:,} bytes; the limit is {MAX_EXPORT_BYTES:,}")
            file.seek(0)
            yield file.read()
            return
        opened.enter_context(_report_damage())
        archive = opened.enter_context(ZipFile(file))
        files = archive.infolist()
        if len(files) > MAX_ZIP_ENTRIES:  # guard: zip-entries
            raise OSError(f"{path.name} has more than {MAX_ZIP_ENTRIES:,} files")
        files = [info for info in files if _is_export_file(info.filename)]
        unpacked, limit = sum(info.file_size for info in files), unpacked_limit(size)
        if unpacked > limit:  # guard: zip-size
            raise OSError(f"{path.name} has {unpacked:,} bytes unpacked; the limit is {limit:,}")
        for info in sorted(files, key=lambda info_: info_.filename):
            yield archive.read(info)


def _is_export_file(path: str) -> bool:
    name = path.rpartition("/")[2]
    return re.fullmatch(EXPORT_FILE_NAME, name) is not None and not path.startswith("__MACOSX")


def _split_conversations(content: bytes) -> list[Raw]:
    """Return the items of a JSON array; an empty list if the content is something else."""
    try:
        return msgspec.json.decode(content, type=list[Raw])
    except msgspec.ValidationError:
        return []
    except msgspec.DecodeError:
        # One lone surrogate, such as half an emoji in a title, must not cost all conversations.
        return [Raw(json.dumps(item).encode()) for item in list_or_empty(parse_json(content))]


def _as_number(value: Any) -> float:
    """Return the value if it is a number, else 0."""
    return value if isinstance(value, int | float) else 0.0


# --- ChatGPT --------------------------------------------------------------------------------------


class ChatGPT(ExportReader):
    """Reader of ChatGPT's exports.

    A conversation is a tree of nodes. The path to `current_node` is the current branch. The nodes
    of other branches are imported as hidden messages. The export has no token counts.
    """

    program = "chatgpt"
    id_fields = ("conversation_id", "id")

    def convert(self, conversation: dict[str, Any], path: Path, transcript: Transcript) -> None:
        """Add a conversation of the export at this path to an empty transcript."""
        nodes = as_dict(conversation.get("mapping")).items()
        mapping = {node_id: node for node_id, node in nodes if isinstance(node, dict)}
        current_branch = _current_branch(mapping, conversation.get("current_node"))
        current_ids, call_ids = set(current_branch), _CallIds(mapping)
        with _Pictures(path) as pictures:
            for node_id in _sort_nodes(mapping, current_branch):
                node = mapping[node_id]
                draft = _convert_node(node, find_call=call_ids.find, find_picture=pictures.find)
                if draft is not None:
                    at, is_hidden = node["message"].get("create_time"), node_id not in current_ids
                    transcript.add_record(node_id, [draft], node, at=at, hidden=is_hidden)
        transcript.finish(
            as_text(conversation.get("title")) or None,
            archived=conversation.get("is_archived"),
            starred=conversation.get("is_starred"),
            gizmo=conversation.get("gizmo_id"),
        )


def _current_branch(mapping: Mapping[str, Any], leaf: Any) -> list[str]:
    """Return the ids from the root to `leaf`, or to the newest leaf if `leaf` is unknown."""
    parents = {node_id: as_text(node.get("parent")) or None for node_id, node in mapping.items()}
    if leaf not in mapping:
        parent_ids = set(parents.values())
        leaves = [node_id for node_id in mapping if node_id not in parent_ids]
        leaf = max(leaves, key=lambda node_id: _node_time(mapping[node_id]), default=None)
    return branch_to(leaf, parents)[::-1]


def _sort_nodes(mapping: Mapping[str, Any], current_branch: Sequence[str]) -> list[str]:
    """Return the ids of all nodes. Each other branch follows the node where it splits off."""
    children: dict[Any, list[str]] = {}
    for node_id, node in mapping.items():
        children.setdefault(node.get("parent"), []).append(node_id)
    current_nodes = set(current_branch)
    ordered_ids: dict[str, None] = {}
    for root in (*current_branch[:1], *mapping):
        stack = [root]
        while stack:
            node_id = stack.pop()
            if node_id not in ordered_ids:
                ordered_ids[node_id] = None
                # The child on the current branch comes last, so it is pushed first.
                child_ids = reversed(children.get(node_id, []))
                stack += sorted(child_ids, key=lambda child: child not in current_nodes)
    return list(ordered_ids)


class _CallIds:
    """The nearest tool call above each node. Each node is visited once, also in a long chain."""

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._mapping = mapping
        self._known: dict[str, str] = {}
        """Id of the nearest tool call by node; the node itself may be the call."""

    def find(self, ancestor_id: Any) -> str:
        """Return the id of this node or of the nearest node above it that is a tool call.

        Empty if there is none after the last message of the user.
        """
        path: list[str] = []
        call_id = ""
        while isinstance(ancestor_id, str) and ancestor_id in self._mapping:
            if ancestor_id in self._known:
                call_id = self._known[ancestor_id]
                break
            self._known[ancestor_id] = ""  # ends the search if the nodes form a ring
            path.append(ancestor_id)
            node = self._mapping[ancestor_id]
            message = as_dict(node.get("message"))
            if as_dict(message.get("author")).get("role") == "user":
                break
            if _is_tool_call(message):
                call_id = ancestor_id
                break
            ancestor_id = node.get("parent")
        self._known.update(dict.fromkeys(path, call_id))
        return call_id


def _is_tool_call(message: Mapping[str, Any]) -> bool:
    is_answer = as_dict(message.get("author")).get("role") == "assistant"
    return is_answer and message.get("recipient") not in (None, "all")


def _convert_node(
    node: Mapping[str, Any], *, find_call: Callable[[Any], str], find_picture: Callable[[str], str]
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
        thoughts = (t for t in list_or_empty(content.get("thoughts")) if isinstance(t, dict))
        body["reasoning_content"] = "\n\n".join(as_text(t.get("content")) for t in thoughts)
    elif content_type == "reasoning_recap":
        body["reasoning_content"] = as_text(content.get("content"))
    elif content_type == "user_editable_context":
        texts = [as_text(content.get(name)) for name in ("user_profile", "user_instructions")]
        body = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    elif content_type == "multimodal_text":
        parts = list_or_empty(content.get("parts"))
        body["content"] = [_convert_part(part, find_picture) for part in _without_recordings(parts)]
    else:
        body["content"] = _text_of_content(content)
    if role == "tool":
        body["tool_call_id"] = find_call(node.get("parent"))
    if not any(body.get(name) for name in ("content", "tool_calls", "reasoning_content")):
        return None
    hidden_fields = ("is_visually_hidden_from_conversation", "is_user_system_message")
    status = as_dict(metadata.get("aggregate_result")).get("status")
    return body, {
        "kind": "injected" if any(map(metadata.get, hidden_fields)) else None,
        "model": as_text(metadata.get("model_slug")) if role == "assistant" else "",
        "failed": status not in (None, "success") or content_type == "system_error",
    }


def _text_of_content(content: Mapping[str, Any]) -> str:
    """Return the text of a content; empty if the content has parts other than text."""
    for name in ("text", "result"):
        if isinstance(content.get(name), str):
            return str(content[name])
    parts = list_or_empty(content.get("parts"))
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else ""


def _without_recordings(parts: Sequence[Any]) -> list[Any]:
    """Return the parts without recordings of speech, if its text is among the parts."""
    types = [as_text(as_dict(part).get("content_type")) for part in parts]
    if "audio_transcription" not in types:
        return list(parts)
    return [p for p, type_ in zip(parts, types, strict=True) if type_ not in _RECORDING_TYPES]


def _convert_part(part: Any, find_picture: Callable[[str], str]) -> dict[str, Any]:
    """Return a part in the chat format."""
    if isinstance(part, str):
        return text_part(part)
    fields = as_dict(part)
    if fields.get("content_type") == "audio_transcription":
        return text_part(as_text(fields.get("text")))
    if fields.get("content_type") in _RECORDING_TYPES:
        return text_part("[recording]")
    pointer = as_text(fields.get("asset_pointer"))
    if url := find_picture(pointer):
        return image_part(url)
    name = as_text(fields.get("content_type")) or "part"
    return text_part(f"[{name} {pointer}]".replace(" ]", "]"))


def _node_time(node: Mapping[str, Any]) -> float:
    return _as_number(as_dict(node.get("message")).get("create_time"))


class _Pictures:
    """The pictures of an export, to which messages refer by id. A context manager.

    In a folder, only the export's own folder and the folders of ChatGPT's pictures are searched,
    for the exact id. The export may be in a folder with other files of the user.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._archive: ZipFile | None = None
        self._opened = ExitStack()
        self._bytes_left = MAX_PICTURES_BYTES

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def find(self, pointer: str) -> str:
        """Return a picture as a data URI; empty if it is missing, damaged or too large."""
        name = self._names.get(pointer.rpartition("//")[2], "")
        data = self._read(name) if name else b""
        starts = _PICTURE_STARTS.items()
        mime_type = next((type_ for type_, start in starts if start.match(data)), "")
        if not mime_type or len(data) > self._bytes_left:  # guard: picture-content
            return ""
        self._bytes_left -= len(data)
        return f"data:{mime_type};base64,{base64.b64encode(data).decode()}"

    @cached_property
    def _names(self) -> dict[str, str]:
        """Paths of the pictures in the zip, or below the folder of the export, by id."""
        names: dict[str, str] = {}
        for name in sorted(self._list_names()):
            if match := _PICTURE_NAME.fullmatch(name.rpartition("/")[2]):  # guard: picture-name
                names.setdefault(match["id"], name)
        return names

    def _list_names(self) -> list[str]:
        with suppress(OSError):
            file = self._opened.enter_context(open_transcript(self._path))
            if not is_zipfile(file):
                return list(_list_picture_folders(self._path.parent))
            with _report_damage():
                self._archive = self._opened.enter_context(ZipFile(file))
                return self._archive.namelist()
        return []

    def _read(self, name: str) -> bytes:
        if self._archive is None:
            folder, names = self._path.parent, name.split("/")
            return read_side_file(folder, *names, max_bytes=MAX_PICTURE_BYTES)
        with suppress(OSError), _report_damage():
            if self._archive.getinfo(name).file_size <= MAX_PICTURE_BYTES:
                return self._archive.read(name)
        return b""


def _list_picture_folders(folder: Path) -> Iterator[str]:
    """Yield the names in the folder of an export, and the paths in its folders of pictures."""
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry.name
            is_folder = entry.is_dir(follow_symlinks=False)
            if is_folder and _PICTURE_FOLDER.fullmatch(entry.name):  # guard: picture-folders
                with suppress(OSError):
                    yield from (f"{entry.name}/{name}" for name in os.listdir(entry))  # noqa: PTH208


# --- Claude.ai ------------------------------------------------------------------------------------


class ClaudeAI(ExportReader):
    """Reader of Claude.ai's exports.

    Messages form a tree. The branch that ends at the newest leaf is the current branch. The export
    does not name the model.
    """

    program = "claude-ai"
    id_fields = ("uuid",)

    def convert(self, conversation: dict[str, Any], path: Path, transcript: Transcript) -> None:  # noqa: ARG002
        """Add a conversation of the export to an empty transcript."""
        records = [as_dict(record) for record in list_or_empty(conversation.get("chat_messages"))]
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
            if drafts := list(_convert_claude_message(record)):
                is_hidden = has_tree and record_id not in current_ids
                transcript.add_record(record_id, drafts, record, at=at, hidden=is_hidden)
        transcript.summary = as_text(conversation.get("summary"))
        transcript.finish(as_text(conversation.get("name")) or None)


def _convert_claude_message(message: Mapping[str, Any]) -> Iterator[Draft]:
    """Yield the messages in a message of the export: answers with calls, and results."""
    role = "user" if message.get("sender") == "human" else "assistant"
    blocks = [as_dict(block) for block in list_or_empty(message.get("content"))]
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
    for attachment in map(as_dict, list_or_empty(message.get("attachments"))):
        name, text = as_text(attachment.get("file_name")), attachment.get("extracted_content")
        parts.append(text_part(f"[file {name}]\n{as_text(text)}"))
    if parts or len(body) > 1:
        yield {**body, "content": make_content(parts)}, {}


# --- Open WebUI -----------------------------------------------------------------------------------


class OpenWebUI(ExportReader):
    """Reader of Open WebUI's "Export chats": one JSON file with an array of chats.

    `history` holds every message, including answers that were replaced by a regenerated answer. The
    message with the id `currentId` is the end of the current branch. Reasoning and tool calls are
    `<details>` elements in the text, and stay in the text.
    """

    program = "open-webui"
    id_fields = ("id",)
    file_name_pattern = r".*\.json"
    required_bytes = b'"history"'

    def convert(self, conversation: dict[str, Any], path: Path, transcript: Transcript) -> None:  # noqa: ARG002
        """Add a chat of the export to an empty transcript."""
        history = as_dict(as_dict(conversation.get("chat")).get("history"))
        records = as_dict(history.get("messages")).items()
        messages = {id_: as_dict(record) for id_, record in records if record}
        parents = {id_: as_text(m.get("parentId")) or None for id_, m in messages.items()}
        current_ids = set(branch_to(as_text(history.get("currentId")), parents))
        for id_ in sorted(messages, key=lambda id_: _as_number(messages[id_].get("timestamp"))):
            record = messages[id_]
            draft, at = _convert_webui_message(id_, record), record.get("timestamp")
            transcript.add_record(id_, [draft], record, at=at, hidden=id_ not in current_ids)
        transcript.finish(
            as_text(conversation.get("title")) or None,
            archived=conversation.get("archived"),
            pinned=conversation.get("pinned"),
            tags=as_dict(conversation.get("meta")).get("tags"),
        )


def _webui_error(error: Any) -> str:
    """Return the text of the error with which an answer ended; empty if there is none."""
    fields = as_dict(error)
    text = error if isinstance(error, str) else fields.get("content", fields.get("message"))
    return f"Error: {text}" if isinstance(text, str) and text else ""


def _convert_webui_message(message_id: str, record: dict[str, Any]) -> Draft:
    role = as_text(record.get("role")) or "user"
    content: Any = record.get("content")
    if isinstance(content, str) and (error := _webui_error(record.get("error"))):
        content = "\n\n".join(filter(None, (content, error)))
    files = [as_dict(file) for file in list_or_empty(record.get("files"))]
    urls = [file.get("url") for file in files if file.get("type") == "image"]
    if pictures := [image_part(url) for url in urls if isinstance(url, str)]:
        content = [text_part(as_text(content)), *pictures]
    usage, info = as_dict(record.get("usage")), as_dict(record.get("info"))
    return {"role": role, "content": content}, {
        "model": as_text(record.get("model")) if role == "assistant" else "",
        "usage": usage_counts(
            prompt=usage.get("prompt_tokens", info.get("prompt_eval_count")),
            answer=usage.get("completion_tokens", info.get("eval_count")),
        ),
        "response": message_id,
        "failed": bool(record.get("error")),
    }
