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
    NotAMessage,
    Part,
    Report,
    as_id,
    as_object,
    as_text,
    assembled,
    beside,
    call_of,
    content_of,
    filled,
    image_part,
    parsed,
    text_part,
)
from stenolog.transfer.importers.legacy_session import (
    Source,
    SourceFiles,
    with_state_that_fits,
    with_summary_that_fits,
)

FIELD: Final = "strands"
"""Field of a message with the data that the chat format does not have."""

_SILENT: Final = ("cachePoint",)
"""Blocks without content for a model."""
SESSION: Final = "session_"
AGENT: Final = "agent_"
DEFAULT: Final = "default"
"""Name of an agent without a name."""

_MESSAGE: Final = re.compile(r"message_(\d{1,18})\.json")
_KNOWN: Final = ("agent_id", "created_at", "updated_at")
# guard: import-no-symlinks
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_session(folder: Path) -> bool:
    """Return whether this is the folder of a session of Strands."""
    named = folder.name.startswith(SESSION)
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
            for agent in sorted(_folders(session / "agents", AGENT)):
                name = str(agent.relative_to(self.path))
                sizes = [path.stat().st_size for path in _files(agent / "messages").values()]
                found.append(Source(name=name, body=None, inside=(name,), bytes=sum(sizes)))
        return found

    def read(self, source: Source) -> SourceFiles:
        """Return the messages of one agent. Raises NotASession, OSError."""
        agent = self.path / source.inside[0]
        session = agent.parent.parent
        report = Report()
        digest = sha256()
        about = _about(_read(agent / "agent.json"), "its agent.json", report)
        whole = _about(_read(session / "session.json"), "its session.json", report)
        digest.update(repr(sorted(about.items(), key=str)).encode("utf-8", "replace"))
        files = _files(agent / "messages")
        messages: list[JSONMessage] = []
        places: list[int] = []
        for number, path in files.items():
            text = _read(path)
            digest.update(b"%d:%d:" % (number, len(text)) + text)
            made = list(_messages(text, path.name, report))
            messages += made
            places += [number] * len(made)
        _tell_gaps(list(files), report)
        if (session / "multi_agents").is_dir() and any((session / "multi_agents").iterdir()):
            report.note("what it keeps in multi_agents is left out: it is no talk")
        report.check(messages)
        state = about.get("conversation_manager_state")
        manager = state if isinstance(state, dict) else {}
        hidden = _hidden(manager, report)
        changed = _changed(files)
        said = [message.at for message in messages if message.at is not None]
        kept = [
            JSONMessage(message.payload, message.at, hidden=place < hidden)
            for message, place in zip(messages, places, strict=True)
        ]
        old = report.session(
            "strands",
            _key(session, agent, whole, about),
            kept,
            changed=changed,
            created=time_of(about.get("created_at")),
            updated=max([*said, time_of(about.get("updated_at")) or changed]),
            summary=text_of(manager.get("summary_message")),
            agent=agent.name.removeprefix(AGENT),
            state=_state(about, whole),
        )
        fits = with_state_that_fits(with_summary_that_fits(old))
        return SourceFiles(fits, digest.hexdigest(), changed, ())


def _messages(text: bytes, name: str, report: Report) -> Iterator[JSONMessage]:
    try:
        fields = as_object(parsed(text, name), name)
        at = time_of(fields.get("created_at"))
        redacted = fields.get("redact_message")
        if redacted is not None:
            report.note(f"{name} was redacted: what is shown instead is taken in")
        given = as_object(fields.get("message") if redacted is None else redacted, f"{name}")
        made = messages_of(given, report)
    except (ValueError, RecursionError) as error:
        words = str(error)
        report.drop(words if words.startswith(name) else f"{name} cannot be read: {words}")
        return
    for message in made:
        yield from report.keep(message, at, name)


def _about(text: bytes, what: str, report: Report) -> dict[str, Any]:
    try:
        return as_object(parsed(text, what), what)
    except NotAMessage as error:
        report.note(str(error))
        return {}


def _key(session: Path, agent: Path, whole: dict[str, Any], about: dict[str, Any]) -> str:
    """Return the key: the session's id, and the agent's if it has a name."""
    found = whole.get("session_id"), about.get("agent_id")
    named = session.name.removeprefix(SESSION), agent.name.removeprefix(AGENT)
    one, two = (
        given if isinstance(given, str) and given else name
        for given, name in zip(found, named, strict=True)
    )
    return one if two == DEFAULT else f"{one}:{two}"


def _state(about: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in about.items() if name not in _KNOWN}
    kind = whole.get("session_type")
    return filled(rest | {"session_type": None if kind == "AGENT" else kind})


def _hidden(manager: dict[str, Any], report: Report) -> int:
    """Return the number of messages, from the first on, that its model no longer sees."""
    given = manager.get("removed_message_count", 0)
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    report.note(f"removed_message_count is {given!r}: nothing is hidden")
    return 0


def _tell_gaps(numbers: list[int], report: Report) -> None:
    missing = (numbers[-1] + 1 - len(numbers)) if numbers else 0
    if missing:
        of = f"message_0.json … message_{numbers[-1]}.json"
        are = "1 is" if missing == 1 else f"{missing:,} are"
        report.drop(f"of {of}, {are} missing", missing)


def _changed(files: dict[int, Path]) -> datetime:
    newest = max((path.stat().st_mtime_ns for path in files.values()), default=0)
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=newest // 1000)


def _folders(place: Path, start: str) -> list[Path]:
    with os.scandir(place) as entries:
        return [
            place / entry.name
            for entry in entries
            if entry.name.startswith(start) and entry.is_dir(follow_symlinks=False)
        ]


def _files(place: Path) -> dict[int, Path]:
    """Return the files with messages, by their numbers."""
    try:
        names = [path.name for path in place.iterdir()]
    except FileNotFoundError:
        return {}
    found = {int(match[1]): place / name for name in names if (match := _MESSAGE.fullmatch(name))}
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


class _Said:
    """The converted blocks of one message."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.calls: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        self.thoughts: list[str] = []
        self.whole = True
        """Whether the conversion is lossless."""


def messages_of(message: dict[str, Any], report: Report) -> list[dict[str, Any]]:
    """Return the messages in a message of Strands.

    Raises NotAMessage, ValueError, RecursionError.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise NotAMessage("it has no role")
    blocks: Sequence[Any] = [{"text": content}] if isinstance(content, str) else content or ()
    if not isinstance(blocks, list):
        raise NotAMessage("its content is no list of blocks")
    said = _Said()
    for block in blocks:
        _add(said, as_object(block, "a block of its content"), report)
    rest = filled({name: message[name] for name in message if name not in ("role", "content")})
    if not said.whole:
        rest["content"] = content
    found = assembled(role, said.parts, said.calls, said.results, said.thoughts)
    if rest:
        found[-1] = {**found[-1], FIELD: {**found[-1].get(FIELD, {}), **rest}}
    return found


def text_of(message: Any) -> str:
    """Return the texts of a message, without its other content."""
    content = message.get("content") if isinstance(message, dict) else None
    blocks = content if isinstance(content, list) else []
    texts = [block.get("text") for block in blocks if isinstance(block, dict)]
    return "\n\n".join(text for text in texts if isinstance(text, str))


def _add(said: _Said, block: dict[str, Any], report: Report) -> None:
    for kind, value in block.items():
        match kind, value:
            case "text", str():
                said.parts.append(text_part(value))
            case "toolUse", dict():
                call = call_of(value.get("toolUseId"), value.get("name"), value.get("input"))
                said.calls.append(call)
                said.whole = said.whole and value.keys() <= {"toolUseId", "name", "input"}
            case "toolResult", dict():
                said.results.append(_result(value, report))
            case "image", {"format": str(), "source": {"bytes": {"data": str()}}}:
                data = value["source"]["bytes"]["data"]
                said.parts.append(image_part(f"data:image/{value['format']};base64,{data}"))
            case "reasoningContent", {"reasoningText": {"text": str()}}:
                said.thoughts.append(value["reasoningText"]["text"])
                said.whole = said.whole and value["reasoningText"].keys() <= {"text"}
            case "guardContent", {"text": {"text": str()}}:
                said.parts.append(text_part(value["text"]["text"]))
                said.whole = False
            case "citationsContent", {"content": list()}:
                said.parts += map(text_part, _texts(value["content"]))
                said.whole = False
            case _:
                said.whole = False
                if kind not in _SILENT:
                    report.unseen(kind)


def _result(value: dict[str, Any], report: Report) -> dict[str, Any]:
    content = value.get("content")
    parts: list[Part] = []
    whole = True
    for block in content if isinstance(content, list) else []:
        match block:
            case {"text": str(text), **more} if not more:
                parts.append(text_part(text))
            case {"json": inside, **more} if not more:
                # As text it cannot be distinguished from a text with the same characters.
                parts.append(text_part(as_text(inside)))
                whole = False
            case _:
                whole = False
                kinds = " and ".join(block) if isinstance(block, dict) else ""
                report.unseen(f"{kinds or 'unknown part'} in a result")
    rest = {n: value[n] for n in value if n not in ("toolUseId", "content")}
    rest |= {} if whole else {"result": content}
    message = {
        "role": "tool",
        "tool_call_id": as_id(value.get("toolUseId")),
        "content": content_of(parts) or "",
    }
    return beside(message, FIELD, filled(rest))


def _texts(blocks: list[Any]) -> list[str]:
    found = (block.get("text") for block in blocks if isinstance(block, dict))
    return [text for text in found if isinstance(text, str)]
