"""The folders of Strands' FileSessionManager: sessions, their agents, a file for each message."""

import os
import re
import stat
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

from stenolog.sessions.importers.chat import as_object, filled, parsed
from stenolog.sessions.importers.old import (
    OldSession,
    dated,
    with_state_that_fits,
    with_summary_that_fits,
)
from stenolog.sessions.importers.report import NotAMessage, Report
from stenolog.sessions.importers.shelf import Found, Source
from stenolog.sessions.importers.strands import messages_of, text_of
from stenolog.stores.json_file import KeptMessage, NotASession, time_of

SESSION: Final = "session_"
AGENT: Final = "agent_"
DEFAULT: Final = "default"
"""What an agent is called that was given no name."""

_MESSAGE: Final = re.compile(r"message_(\d{1,18})\.json")
_KNOWN: Final = ("agent_id", "created_at", "updated_at")
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def is_session(folder: Path) -> bool:
    """Whether this is the folder of one of its sessions."""
    named = folder.name.startswith(SESSION)
    return named and (folder / "session.json").is_file() and (folder / "agents").is_dir()


class StrandsFolder:
    """Sessions of Strands. A context manager."""

    def __init__(self, sessions: list[Path]) -> None:
        self.path = sessions[0].parent
        self._sessions = sessions

    @property
    def name(self) -> str:
        """What it is called in a report."""
        return str(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def sources(self, *, thorough: bool) -> list[Source]:  # noqa: ARG002
        """Each agent of each session. Raises OSError."""
        found = []
        for session in self._sessions:
            for agent in sorted(_folders(session / "agents", AGENT)):
                name = str(agent.relative_to(self.path))
                sizes = [path.stat().st_size for path in _files(agent / "messages").values()]
                found.append(Source(name=name, body=None, inside=(name,), bytes=sum(sizes)))
        return found

    def read(self, source: Source) -> Found:
        """The messages of one agent. Raises NotASession, OSError."""
        agent = self.path / source.inside[0]
        session = agent.parent.parent
        report = Report()
        digest = sha256()
        about = _about(_read(agent / "agent.json"), "its agent.json", report)
        whole = _about(_read(session / "session.json"), "its session.json", report)
        digest.update(repr(sorted(about.items(), key=str)).encode("utf-8", "replace"))
        files = _files(agent / "messages")
        messages: list[KeptMessage] = []
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
        created = time_of(about.get("created_at")) or min(said, default=changed)
        updated = max([*said, time_of(about.get("updated_at")) or changed])
        kept = [
            KeptMessage(message.payload, message.at, hidden=place < hidden)
            for message, place in zip(messages, places, strict=True)
        ]
        old = OldSession(
            layout="strands",
            key=_key(session, agent, whole, about),
            messages=dated(kept, created, updated),
            summary=text_of(manager.get("summary_message")),
            agent=agent.name.removeprefix(AGENT),
            state=_state(about, whole),
            created=created,
            updated=updated,
            dropped=report.dropped,
            problems=report.problems(),
        )
        fits = with_state_that_fits(with_summary_that_fits(old))
        return Found(fits, digest.hexdigest(), changed, ())

    def aliases(self, source: Source) -> tuple[str, ...]:  # noqa: ARG002
        """None: it has no other names."""
        return ()

    def taken_in(self) -> int:
        """None: nothing is ever renamed."""
        return 0


def _messages(text: bytes, name: str, report: Report) -> Iterator[KeptMessage]:
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
    """Of the session, and of the agent where that was given a name."""
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
    """Up to which number its model is not shown messages any more."""
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
    """The files with messages, by their numbers."""
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
