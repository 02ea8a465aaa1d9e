"""Sessions of Strands' FileSessionManager: its folders, and its messages in the chat format.

A session is a folder with a folder per agent and a file per message. The messages consist of
Bedrock's content blocks. Tool results in a user message become messages before it.
"""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from stenolog.stores.json_file import JSONMessage, NotASession, time_of
from stenolog.transfer.importers.chat_format import (
    ImportProblems,
    NotAMessage,
    Part,
    as_id,
    as_object,
    as_text,
    build_messages,
    image_part,
    make_call,
    make_content,
    non_empty,
    parse_json,
    text_part,
    with_extra,
)
from stenolog.transfer.importers.legacy_session import (
    Source,
    SourceContent,
    drop_oversized_state,
    drop_oversized_summary,
)

FIELD: Final = "strands"
"""Field of a message with the data that the chat format does not have."""

_BLOCKS_WITHOUT_CONTENT: Final = ("cachePoint",)
"""Blocks without content for a model."""
SESSION_PREFIX: Final = "session_"
AGENT_PREFIX: Final = "agent_"
DEFAULT_AGENT: Final = "default"
"""Name of an agent without a name."""

_MESSAGE: Final = re.compile(r"message_(\d{1,18})\.json")
_KNOWN_FIELDS: Final = ("agent_id", "created_at", "updated_at")
# guard: import-no-symlinks
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_session_folder(folder: Path) -> bool:
    """Return whether this is the folder of a session of Strands."""
    named = folder.name.startswith(SESSION_PREFIX)
    return named and (folder / "session.json").is_file() and (folder / "agents").is_dir()


class StrandsFolder:
    """Folders of sessions of Strands."""

    def __init__(self, sessions: list[Path]) -> None:
        self.path = sessions[0].parent
        self.name = str(self.path)
        self._sessions = sessions

    def sources(self, *, thorough: bool) -> list[Source]:  # noqa: ARG002
        """Return each agent of each session. Raises OSError."""
        found = []
        for session in self._sessions:
            for agent in sorted(_folders(session / "agents", AGENT_PREFIX)):
                name = str(agent.relative_to(self.path))
                sizes = [
                    path.stat().st_size for path in _message_files(agent / "messages").values()
                ]
                found.append(Source(name=name, body=None, identifier=(name,), bytes=sum(sizes)))
        return found

    def read(self, source: Source) -> SourceContent:
        """Return the messages of one agent. Raises NotASession, OSError."""
        agent = self.path / source.identifier[0]
        session = agent.parent.parent
        report = ImportProblems()
        digest = sha256()
        agent_fields = _read_object(_read(agent / "agent.json"), "its agent.json", report)
        session_fields = _read_object(_read(session / "session.json"), "its session.json", report)
        digest.update(repr(sorted(agent_fields.items(), key=str)).encode("utf-8", "replace"))
        files = _message_files(agent / "messages")
        messages: list[JSONMessage] = []
        file_numbers: list[int] = []
        for number, path in files.items():
            text = _read(path)
            digest.update(b"%d:%d:" % (number, len(text)) + text)
            converted = list(_messages(text, path.name, report))
            messages += converted
            file_numbers += [number] * len(converted)
        _report_gaps(list(files), report)
        if (session / "multi_agents").is_dir() and any((session / "multi_agents").iterdir()):
            report.report_loss("multi_agents was skipped: it contains no conversation")
        report.check_not_empty(messages)
        state = agent_fields.get("conversation_manager_state")
        manager = state if isinstance(state, dict) else {}
        hidden = _hidden_count(manager, report)
        changed = _modification_time(files)
        times = [message.at for message in messages if message.at is not None]
        kept = [
            JSONMessage(message.payload, message.at, hidden=file_number < hidden)
            for message, file_number in zip(messages, file_numbers, strict=True)
        ]
        old = report.session(
            "strands",
            _key(session, agent, session_fields, agent_fields),
            kept,
            changed=changed,
            created=time_of(agent_fields.get("created_at")),
            updated=max([*times, time_of(agent_fields.get("updated_at")) or changed]),
            summary=text_of(manager.get("summary_message")),
            agent=agent.name.removeprefix(AGENT_PREFIX),
            state=_state(agent_fields, session_fields),
        )
        fits = drop_oversized_state(drop_oversized_summary(old))
        return SourceContent(fits, digest.hexdigest(), changed, ())


def _messages(text: bytes, name: str, report: ImportProblems) -> Iterator[JSONMessage]:
    try:
        fields = as_object(parse_json(text, name), name)
        at = time_of(fields.get("created_at"))
        redacted = fields.get("redact_message")
        if redacted is not None:
            report.report_loss(f"{name} was redacted: the replacement text is imported")
        given = as_object(fields.get("message") if redacted is None else redacted, f"{name}")
        converted = messages_of(given, report)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        report.report_dropped(
            reason if reason.startswith(name) else f"{name} cannot be read: {reason}"
        )
        return
    for message in converted:
        yield from report.encode(message, at, name)


def _read_object(text: bytes, label: str, report: ImportProblems) -> dict[str, Any]:
    try:
        return as_object(parse_json(text, label), label)
    except NotAMessage as error:
        report.report_loss(str(error))
        return {}


def _key(
    session: Path, agent: Path, session_fields: dict[str, Any], agent_fields: dict[str, Any]
) -> str:
    """Return the key: the session's id, and the agent's if it has a name."""
    found = session_fields.get("session_id"), agent_fields.get("agent_id")
    named = session.name.removeprefix(SESSION_PREFIX), agent.name.removeprefix(AGENT_PREFIX)
    one, two = (
        given if isinstance(given, str) and given else name
        for given, name in zip(found, named, strict=True)
    )
    return one if two == DEFAULT_AGENT else f"{one}:{two}"


def _state(agent_fields: dict[str, Any], session_fields: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in agent_fields.items() if name not in _KNOWN_FIELDS}
    kind = session_fields.get("session_type")
    return non_empty(rest | {"session_type": None if kind == "AGENT" else kind})


def _hidden_count(manager: dict[str, Any], report: ImportProblems) -> int:
    """Return the number of messages, from the first on, that its model no longer sees."""
    given = manager.get("removed_message_count", 0)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    report.report_loss(f"removed_message_count is {given!r}: nothing is hidden")
    return 0


def _report_gaps(numbers: list[int], report: ImportProblems) -> None:
    missing = (numbers[-1] + 1 - len(numbers)) if numbers else 0
    if missing:
        of = f"message_0.json … message_{numbers[-1]}.json"
        are = "1 is" if missing == 1 else f"{missing:,} are"
        report.report_dropped(f"of {of}, {are} missing", missing)


def _modification_time(files: dict[int, Path]) -> datetime:
    newest = max((path.stat().st_mtime_ns for path in files.values()), default=0)
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=newest // 1000)


def _folders(file_number: Path, start: str) -> list[Path]:
    with os.scandir(file_number) as entries:
        return [
            file_number / entry.name
            for entry in entries
            if entry.name.startswith(start) and entry.is_dir(follow_symlinks=False)
        ]


def _message_files(file_number: Path) -> dict[int, Path]:
    """Return the files with messages, by their numbers."""
    try:
        names = [path.name for path in file_number.iterdir()]
    except FileNotFoundError:
        return {}
    found = {
        int(match[1]): file_number / name for name in names if (match := _MESSAGE.fullmatch(name))
    }
    return dict(sorted(found.items()))


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, _READ)
    except FileNotFoundError:
        return b""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotASession(f"{path.name} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


class _ConvertedBlocks:
    """The converted blocks of one message."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.calls: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        self.thoughts: list[str] = []
        self.session_fields = True
        """Whether the conversion is lossless."""


def messages_of(message: dict[str, Any], report: ImportProblems) -> list[dict[str, Any]]:
    """Return the messages in a message of Strands.

    Raises NotAMessage, ValueError, RecursionError.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise NotAMessage("it has no role")
    blocks: Sequence[Any] = [{"text": content}] if isinstance(content, str) else content or ()
    if not isinstance(blocks, list):
        raise NotAMessage("its content is not a list of blocks")
    converted = _ConvertedBlocks()
    for block in blocks:
        _add_block(converted, as_object(block, "a block of its content"), report)
    rest = non_empty({name: message[name] for name in message if name not in ("role", "content")})
    if not converted.session_fields:
        rest["content"] = content
    found = build_messages(
        role, converted.parts, converted.calls, converted.results, converted.thoughts
    )
    if rest:
        found[-1] = {**found[-1], FIELD: {**found[-1].get(FIELD, {}), **rest}}
    return found


def text_of(message: Any) -> str:
    """Return the texts of a message, without its other content."""
    content = message.get("content") if isinstance(message, dict) else None
    blocks = content if isinstance(content, list) else []
    texts = [block.get("text") for block in blocks if isinstance(block, dict)]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _add_block(converted: _ConvertedBlocks, block: dict[str, Any], report: ImportProblems) -> None:
    for kind, value in block.items():
        match kind, value:
            case "text", str():
                converted.parts.append(text_part(value))
            case "toolUse", dict():
                call = make_call(value.get("toolUseId"), value.get("name"), value.get("input"))
                converted.calls.append(call)
                converted.session_fields = converted.session_fields and value.keys() <= {
                    "toolUseId",
                    "name",
                    "input",
                }
            case "toolResult", dict():
                converted.results.append(_tool_result(value, report))
            case "image", {"format": str(), "source": {"bytes": {"data": str()}}}:
                data = value["source"]["bytes"]["data"]
                converted.parts.append(image_part(f"data:image/{value['format']};base64,{data}"))
            case "reasoningContent", {"reasoningText": {"text": str()}}:
                converted.thoughts.append(value["reasoningText"]["text"])
                converted.session_fields = converted.session_fields and value[
                    "reasoningText"
                ].keys() <= {"text"}
            case "guardContent", {"text": {"text": str()}}:
                converted.parts.append(text_part(value["text"]["text"]))
                converted.session_fields = False
            case "citationsContent", {"content": list()}:
                converted.parts += map(text_part, _texts(value["content"]))
                converted.session_fields = False
            case _:
                converted.session_fields = False
                if kind not in _BLOCKS_WITHOUT_CONTENT:
                    report.count_unseen(kind)


def _tool_result(value: dict[str, Any], report: ImportProblems) -> dict[str, Any]:
    content = value.get("content")
    parts: list[Part] = []
    session_fields = True
    for block in content if isinstance(content, list) else []:
        match block:
            case {"text": str(text), **more} if not more:
                parts.append(text_part(text))
            case {"json": inside, **more} if not more:
                # As text it cannot be distinguished from a text with the same characters.
                parts.append(text_part(as_text(inside)))
                session_fields = False
            case _:
                session_fields = False
                kinds = " and ".join(block) if isinstance(block, dict) else ""
                report.count_unseen(f"{kinds or 'unknown part'} in a result")
    rest = {n: value[n] for n in value if n not in ("toolUseId", "content")}
    rest |= {} if session_fields else {"result": content}
    message = {
        "role": "tool",
        "tool_call_id": as_id(value.get("toolUseId")),
        "content": make_content(parts) or "",
    }
    return with_extra(message, FIELD, non_empty(rest))


def _texts(blocks: list[Any]) -> list[str]:
    found = (block.get("text") for block in blocks if isinstance(block, dict))
    return [text for text in found if isinstance(text, str)]
