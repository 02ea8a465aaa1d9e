"""What an old session is, whichever program kept it, and the lines of the logs among them."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from json import loads
from typing import Any, Final, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage
from stenolog.stores.json_file import KeptMessage

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
"""Who wrote it: picoclaw's logs, its older whole files, zeroclaw's logs, our own stand-in; then the
frameworks, and whoever writes messages down as they are."""
OF_THE_REFERENCE: Final[frozenset[Layout]] = frozenset(
    {"picoclaw", "picoclaw-legacy", "zeroclaw", "stenolog-json"}
)
"""What is taken in at every start, without being asked for."""
EVERY_LAYOUT: Final[frozenset[Layout]] = frozenset(get_args(Layout))
MAX_STATE_BYTES: Final = 16 * 1024
"""What a program knew of a session besides its messages: meta has room for more than it."""


class OldSession(Struct, frozen=True, kw_only=True):
    """A session as another program kept it, in our terms."""

    layout: Layout
    key: str
    messages: tuple[KeptMessage, ...]
    summary: str = ""
    began_with: str = ""
    """The summary before; only our own stand-in knows it."""
    aliases: tuple[str, ...] = ()
    """Other names under which that program, or its users, knew it."""
    agent: str | None = None
    channel: str | None = None
    state: dict[str, Any] = {}
    """What that program knew of it besides, kept in meta under the name of the layout."""
    created: datetime
    updated: datetime
    dropped: int = 0
    """How many lines or messages could not be read or kept."""
    problems: tuple[str, ...] = ()
    """What could not be carried, and why, each as a sentence."""

    @property
    def hidden(self) -> int:
        """How many messages are out of sight."""
        return sum(message.hidden for message in self.messages)


class Line(Struct, frozen=True):
    """One line of a log."""

    number: int
    fields: dict[str, Any] | None
    """The message; None where there is none."""
    problem: str = ""


def lines(text: bytes) -> Iterator[Line]:
    """Every line that is not empty, with its message or what is wrong with it."""
    for number, line in enumerate(text.split(b"\n"), 1):
        if line.strip(b"\r"):
            yield _line(number, line)


def _line(number: int, line: bytes) -> Line:
    shown = line[:40].decode(errors="replace")
    try:
        fields = loads(line.decode())
    except (ValueError, RecursionError):
        return Line(number, None, f"line {number} is not JSON: {shown!r}")
    if not isinstance(fields, dict) or not isinstance(fields.get("role"), str):
        return Line(number, None, f"line {number} is no message: {shown!r}")
    return Line(number, fields)


def payload(fields: dict[str, Any], what: str, problems: list[str]) -> bytes | None:
    """A message as it is stored; None, and a problem more, where it cannot be kept."""
    try:
        return encode_object(fields)
    except RefusedMessage as error:
        problems.append(f"{what}: {error}")
        return None


def with_summary_that_fits(session: OldSession) -> OldSession:
    """The session, without its summary where that cannot be kept: it must not keep it out."""
    try:
        encode_object({"summary": session.summary})
    except RefusedMessage as error:
        words = f"its summary is left out: {error.reason}"
        return replace(session, summary="", problems=(*session.problems, words))
    return session


def with_state_that_fits(session: OldSession) -> OldSession:
    """The session, without the other program's state where that cannot be kept."""
    try:
        size = len(encode_object(session.state))
        reason = f"{size:,} bytes; there is room for {MAX_STATE_BYTES:,}"
    except RefusedMessage as error:
        size, reason = MAX_STATE_BYTES + 1, str(error)
    if size <= MAX_STATE_BYTES:
        return session
    words = f"the state that {session.layout} kept with it is left out: {reason}"
    return replace(session, state={}, problems=(*session.problems, words))


def dated(
    messages: Sequence[KeptMessage], created: datetime, updated: datetime
) -> tuple[KeptMessage, ...]:
    """Each with a time: its own, else that of the one before; the last one that of the change."""
    found = []
    at = created
    for number, message in enumerate(messages, 1):
        last = 1 < number == len(messages)
        at = message.at or (max(at, updated) if last else at)
        found.append(replace(message, at=at))
    return tuple(found)
