"""Sessions of Strands' FileSessionManager: its folders, and its messages in the chat format.

A session is a folder with a folder per agent and a file per message. The messages consist of
Bedrock's content blocks. Tool results in a user message become separate, earlier messages.
"""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from stenolog.stores.json_file import JSONMessage, NotASession, parse_go_time
from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    MessagePieces,
    NotAMessage,
    Part,
    as_id,
    as_object,
    as_objects,
    image_part,
    join_texts,
    make_call,
    make_content,
    non_empty,
    omit,
    parse_json,
    text_part,
    to_text,
    with_extra,
)
from stenolog.transfer.importers.legacy_session import Source, SourceContent, time_of_nanoseconds

EXTRA_FIELD: Final = "strands"
"""Field of a message with the data that the chat format does not have."""

SESSION_PREFIX: Final = "session_"
AGENT_PREFIX: Final = "agent_"
DEFAULT_AGENT: Final = "default"
"""Id that Strands gives an agent without a name."""

_MESSAGE_FILE_NAME: Final = re.compile(r"message_(\d{1,18})\.json")
# guard: import-no-symlinks
_READ_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_session_folder(folder: Path) -> bool:
    """Return whether this is the folder of one session of Strands."""
    has_prefix = folder.name.startswith(SESSION_PREFIX)
    return has_prefix and (folder / "session.json").is_file() and (folder / "agents").is_dir()


class StrandsFolder:
    """Session folders of Strands that are in the same folder."""

    def __init__(self, session_folders: list[Path]) -> None:
        self.path = session_folders[0].parent
        self.name = str(self.path)
        self._session_folders = session_folders

    def sources(self) -> list[Source]:
        """Return each agent of each session. Raises OSError."""
        sources = []
        for session_folder in self._session_folders:
            for agent_folder in _list_agent_folders(session_folder):
                name = str(agent_folder.relative_to(self.path))
                files = _list_message_files(agent_folder / "messages").values()
                size = sum(path.stat().st_size for path in files)
                sources.append(Source(name=name, body=None, identifier=(name,), bytes=size))
        return sources

    def read(self, source: Source) -> SourceContent:
        """Return the messages of one agent. Raises NotASession, OSError."""
        agent_folder = self.path / source.identifier[0]
        session_folder = agent_folder.parent.parent
        report = ImportProblems()
        digest = sha256()
        agent_fields = _read_object(agent_folder / "agent.json", report)
        session_fields = _read_object(session_folder / "session.json", report)
        digest.update(repr(sorted(agent_fields.items(), key=str)).encode("utf-8", "replace"))
        files = _list_message_files(agent_folder / "messages")
        state = agent_fields.get("conversation_manager_state")
        manager_state = state if isinstance(state, dict) else {}
        summary = manager_state.get("summary_message")
        hidden_count = report.check_hidden_count(
            "removed_message_count", manager_state.get("removed_message_count", 0)
        )
        messages: list[JSONMessage] = []
        for message_number, path in files.items():
            text = _read_file(path)
            digest.update(b"%d:%d:" % (message_number, len(text)) + text)
            is_hidden = message_number < hidden_count
            messages += _messages_of_file(text, path.name, report, hidden=is_hidden)
        _report_missing_files(list(files), report)
        multi_agents = session_folder / "multi_agents"
        if multi_agents.is_dir() and any(multi_agents.iterdir()):
            report.report_loss("multi_agents was skipped: it contains no conversation")
        file_times = (path.stat().st_mtime_ns for path in files.values())
        mtime = time_of_nanoseconds(max(file_times, default=0))
        times = [message.at for message in messages if message.at is not None]
        session = report.build_session(
            "strands",
            _make_key(session_folder, agent_folder, session_fields, agent_fields),
            messages,
            mtime=mtime,
            created=parse_go_time(agent_fields.get("created_at")),
            updated=max([*times, parse_go_time(agent_fields.get("updated_at")) or mtime]),
            summary=join_texts(summary.get("content")) if isinstance(summary, dict) else "",
            agent=agent_folder.name.removeprefix(AGENT_PREFIX),
            state=_make_state(agent_fields, session_fields),
        )
        return SourceContent(session, digest.hexdigest(), mtime, ())


def _messages_of_file(
    text: bytes, file_name: str, report: ImportProblems, *, hidden: bool
) -> Iterator[JSONMessage]:
    with report.skip_unreadable(file_name):
        fields = as_object(parse_json(text, file_name), file_name)
        at = parse_go_time(fields.get("created_at"))
        redacted = fields.get("redact_message")
        if redacted is not None:
            report.report_loss(f"{file_name} was redacted: the replacement text is imported")
        message = as_object(fields.get("message") if redacted is None else redacted, file_name)
        for converted_message in messages_of(message, report):
            yield from report.encode(converted_message, at, file_name, hidden=hidden)


def _read_object(path: Path, report: ImportProblems) -> dict[str, Any]:
    label = f"its {path.name}"
    try:
        return as_object(parse_json(_read_file(path), label), label)
    except NotAMessage as error:
        report.report_loss(str(error))
        return {}


def _make_key(
    session: Path, agent: Path, session_fields: dict[str, Any], agent_fields: dict[str, Any]
) -> str:
    """Return the key: the id of the session, and the id of the agent if the agent has a name."""
    ids = session_fields.get("session_id"), agent_fields.get("agent_id")
    names = session.name.removeprefix(SESSION_PREFIX), agent.name.removeprefix(AGENT_PREFIX)
    session_id, agent_id = (
        id if isinstance(id, str) and id else name for id, name in zip(ids, names, strict=True)
    )
    return session_id if agent_id == DEFAULT_AGENT else f"{session_id}:{agent_id}"


def _make_state(agent_fields: dict[str, Any], session_fields: dict[str, Any]) -> dict[str, Any]:
    state = omit(agent_fields, "agent_id", "created_at", "updated_at")
    session_type = session_fields.get("session_type")
    state["session_type"] = None if session_type == "AGENT" else session_type
    return non_empty(state)


def _report_missing_files(message_numbers: list[int], report: ImportProblems) -> None:
    missing_count = (message_numbers[-1] + 1 - len(message_numbers)) if message_numbers else 0
    if missing_count:
        files_text = f"message_0.json … message_{message_numbers[-1]}.json"
        missing_text = "1 is" if missing_count == 1 else f"{missing_count:,} are"
        report.report_dropped(f"of {files_text}, {missing_text} missing", missing_count)


def _list_agent_folders(session_folder: Path) -> list[Path]:
    agents_folder = session_folder / "agents"
    with os.scandir(agents_folder) as entries:
        return sorted(
            agents_folder / entry.name
            for entry in entries
            if entry.name.startswith(AGENT_PREFIX) and entry.is_dir(follow_symlinks=False)
        )


def _list_message_files(folder: Path) -> dict[int, Path]:
    """Return the message files of a folder, by message number."""
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return {}
    matches = filter(None, map(_MESSAGE_FILE_NAME.fullmatch, names))
    return dict(sorted((int(match[1]), folder / match[0]) for match in matches))


def _read_file(path: Path) -> bytes:
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except FileNotFoundError:
        return b""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotASession(f"{path.name} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def messages_of(message: dict[str, Any], report: ImportProblems) -> list[dict[str, Any]]:
    """Convert a message of Strands to messages in the chat format.

    Raises NotAMessage, ValueError, RecursionError.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise NotAMessage("it has no role")
    blocks: Sequence[Any] = [{"text": content}] if isinstance(content, str) else content or ()
    if not isinstance(blocks, list):
        raise NotAMessage("its content is not a list of blocks")
    pieces = MessagePieces()
    for block in blocks:
        _add_block(pieces, as_object(block, "a block of its content"), report)
    other_fields = non_empty(omit(message, "role", "content"))
    if not pieces.is_lossless:
        other_fields["content"] = content
    messages = pieces.messages(role)
    if other_fields:
        messages[-1].setdefault(EXTRA_FIELD, {}).update(other_fields)
    return messages


def _add_block(pieces: MessagePieces, block: dict[str, Any], report: ImportProblems) -> None:
    for kind, value in block.items():
        match kind, value:
            case "text", str():
                pieces.parts.append(text_part(value))
            case "toolUse", dict():
                call = make_call(value.get("toolUseId"), value.get("name"), value.get("input"))
                pieces.calls.append(call)
                pieces.is_lossless &= value.keys() <= {"toolUseId", "name", "input"}
            case "toolResult", dict():
                pieces.results.append(_tool_result(value, report))
            case "image", {"format": str(), "source": {"bytes": {"data": str()}}}:
                data = value["source"]["bytes"]["data"]
                pieces.parts.append(image_part(f"data:image/{value['format']};base64,{data}"))
            case "reasoningContent", {"reasoningText": {"text": str()}}:
                pieces.thoughts.append(value["reasoningText"]["text"])
                pieces.is_lossless &= value["reasoningText"].keys() <= {"text"}
            case "guardContent", {"text": {"text": str()}}:
                pieces.parts.append(text_part(value["text"]["text"]))
                pieces.is_lossless = False
            case "citationsContent", {"content": list()}:
                texts = (inner.get("text") for inner in as_objects(value["content"]))
                pieces.parts += [text_part(text) for text in texts if isinstance(text, str)]
                pieces.is_lossless = False
            case _:
                pieces.is_lossless = False
                if kind != "cachePoint":  # this block has no content for a model
                    report.count_unseen(kind)


def _tool_result(value: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    content = value.get("content")
    parts: list[Part] = []
    is_lossless = True
    for block in content if isinstance(content, list) else []:
        match block:
            case {"text": str(text), **other_keys} if not other_keys:
                parts.append(text_part(text))
            case {"json": json_value, **other_keys} if not other_keys:
                # JSON as text cannot be distinguished from a text with the same characters.
                parts.append(text_part(to_text(json_value)))
                is_lossless = False
            case _:
                is_lossless = False
                kinds = " and ".join(block) if isinstance(block, dict) else ""
                report.count_unseen(f"{kinds or 'unknown part'} in a result")
    other_fields = omit(value, "toolUseId", "content")
    if not is_lossless:
        other_fields["result"] = content
    call_id = as_id(value.get("toolUseId"))
    message = {"role": "tool", "tool_call_id": call_id, "content": make_content(parts) or ""}
    return with_extra(message, EXTRA_FIELD, non_empty(other_fields))
