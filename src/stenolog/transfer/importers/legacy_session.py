"""Values of all importers: a session of another program, its source, and the place of sources."""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from json import loads
from pathlib import Path
from typing import Any, Final, Literal, Protocol, get_args

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.message_metadata import FIELD, without_marks
from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage
from stenolog.records import decode_object
from stenolog.stores.json_file import JSONMessage

Layout = Literal[
    "picoclaw",
    "picoclaw-legacy",
    "zeroclaw",
    "stenolog-json",
    "nanobot",
    "openai-agents",
    "langchain",
    "strands",
    "adk",
    "plain",
]
"""The program that wrote a session.

picoclaw's logs, its older JSON files, zeroclaw's logs, our own JSON fallback; then the frameworks,
and plain chat messages.
"""
REFERENCE_LAYOUTS: Final[frozenset[Layout]] = frozenset(
    {"picoclaw", "picoclaw-legacy", "zeroclaw", "stenolog-json"}
)
"""Layouts that are imported automatically at every start."""
ALL_LAYOUTS: Final[frozenset[Layout]] = frozenset(get_args(Layout))
LOG_SUFFIX: Final = ".jsonl"
MIGRATED: Final = ".migrated"
MAX_STATE_BYTES: Final = 16 * 1024
"""Maximum size of another program's state of a session, in bytes. The meta has room for more."""
IMPORTED_NAME: Final = re.compile(rf"\.json(?:l)?{re.escape(MIGRATED)}(?:-\d+)?$")
"""End of the name of an imported file."""


class LegacySession(Struct, frozen=True, kw_only=True):
    """A session of another program, converted to our terms."""

    layout: Layout
    key: str
    messages: tuple[JSONMessage, ...]
    summary: str = ""
    previous_summary: str = ""
    """The previous summary; only JSON files of our own fallback have it."""
    aliases: tuple[str, ...] = ()
    """Other names that the program or its users gave the session."""
    agent: str | None = None
    channel: str | None = None
    state: dict[str, Any] = {}
    """Other data of that program, kept in the meta under the name of the layout."""
    meta: dict[str, Any] = {}
    """Meta fields; only sessions of stenolog have them."""
    created: datetime
    updated: datetime
    dropped: int = 0
    """Number of lines or messages that could not be read or stored."""
    problems: tuple[str, ...] = ()
    """Content that could not be imported and the reason, each as a sentence."""
    notes: tuple[str, ...] = ()
    """What was converted, each as a sentence."""

    @property
    def hidden(self) -> int:
        """Number of hidden messages."""
        return sum(message.hidden for message in self.messages)


class Line(Struct, frozen=True):
    """One line of a log."""

    number: int
    fields: dict[str, Any] | None
    """The message; None if the line is not a message."""
    problem: str = ""


def read_lines(text: bytes) -> Iterator[Line]:
    """Yield every line that is not empty, with its message or its problem."""
    for number, line in enumerate(text.split(b"\n"), 1):
        if line.strip(b"\r"):
            yield _line(number, line)


def _line(number: int, line: bytes) -> Line:
    preview = line[:40].decode(errors="replace")
    try:
        fields = loads(line.decode())
    except (ValueError, RecursionError):
        return Line(number, None, f"line {number} is not JSON: {preview!r}")
    if not isinstance(fields, dict) or not isinstance(fields.get("role"), str):
        return Line(number, None, f"line {number} is not a message: {preview!r}")
    return Line(number, fields)


def encode_message(fields: dict[str, Any], what: str, problems: list[str]) -> bytes | None:
    """Return the stored form of a message; if it is refused, add a problem and return None."""
    try:
        return encode_object(fields)
    except RefusedMessage as error:
        problems.append(f"{what}: {error}")
        return None


def without_control_fields(session: LegacySession) -> LegacySession:
    """Return the session without fields that stenolog would act on.

    Removes the reserved field of messages, which could name a sender, an address for answers or a
    turn to resume, and idempotency keys, which could make later messages look stored.
    """
    plain = [
        replace(message, payload=without_reserved_field(message.payload), once=None)
        for message in session.messages
    ]
    return replace(session, messages=tuple(plain))


def without_reserved_field(payload: bytes) -> bytes:
    """Return a stored message without the reserved field; the same bytes if it has none."""
    # The name may be written with escapes.
    if FIELD.encode() not in payload and b"\\" not in payload:
        return payload
    fields = decode_object(payload)
    if FIELD not in fields:
        return payload
    return encode_object(without_marks(fields))


def drop_oversized_summary(session: LegacySession) -> LegacySession:
    """Return the session, without its summary if that cannot be stored."""
    try:
        encode_object({"summary": session.summary})
    except RefusedMessage as error:
        problem = f"its summary was skipped: {error.reason}"
        return replace(session, summary="", problems=(*session.problems, problem))
    return session


def drop_oversized_state(session: LegacySession) -> LegacySession:
    """Return the session, without the other program's state if that cannot be stored."""
    try:
        size = len(encode_object(session.state))
        reason = f"{size:,} bytes, and the limit is {MAX_STATE_BYTES:,}"
    except RefusedMessage as error:
        size, reason = MAX_STATE_BYTES + 1, str(error)
    if size <= MAX_STATE_BYTES:
        return session
    problem = f"the state of {session.layout} was skipped: {reason}"
    return replace(session, state={}, problems=(*session.problems, problem))


def with_times(
    messages: Sequence[JSONMessage], created: datetime, updated: datetime
) -> tuple[JSONMessage, ...]:
    """Return the messages, each with a time.

    A message without a time gets the time of the message before it; the last one gets the time of
    the last change.
    """
    found = []
    at = created
    for number, message in enumerate(messages, 1):
        last = 1 < number == len(messages)
        at = message.at or (max(at, updated) if last else at)
        found.append(replace(message, at=at))
    return tuple(found)


class Source(Struct, frozen=True, kw_only=True):
    """The file or files of one old session."""

    name: str
    """Name of the session's own file before it was renamed."""
    body: str | None
    """Current name of the file with the messages; None if there is only a meta file."""
    meta: str | None = None
    """Current name of the `.meta.json` file."""
    identifier: tuple[str, ...] = ()
    """Identifies one of several sessions in that file."""
    layouts: frozenset[Layout] = REFERENCE_LAYOUTS
    """Layouts that are tried."""
    time_field: str = ""
    """Field with the time of a plain message; empty: the usual ones."""
    bytes: int = 0

    @property
    def files(self) -> tuple[str, ...]:
        """Files of this session only, in the order in which they are renamed: the meta first."""
        found = [name for name in (self.meta, self.body) if name is not None]
        return tuple(name for name in found if IMPORTED_NAME.search(name) is None)


class SourceContent(Struct, frozen=True):
    """A session that was read."""

    session: LegacySession
    digest: str
    """Digest of all its bytes, so that the same file is never imported twice."""
    changed: datetime
    file_versions: tuple[tuple[int, int, int], ...]


class SourceFolder(Protocol):
    """Place with sessions of other programs: a folder of files, a database, a tree.

    The sessions are read and never changed.
    """

    path: Path
    """Folder of the files of its sources."""

    name: str
    """Name of the place in reports."""

    def sources(self, *, thorough: bool) -> list[Source]:
        """Return the sessions in the order of import. Raises NotASession."""

    def read(self, source: Source) -> SourceContent:
        """Return the session of a source. Raises NotASession, OSError."""
