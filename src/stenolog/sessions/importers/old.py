"""What an old session is, whichever program kept it, and the lines of the logs among them."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from json import loads
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.codec import encode_object
from stenolog.errors import RefusedMessage
from stenolog.stores.json_file import KeptMessage

Layout = Literal["picoclaw", "picoclaw-legacy", "zeroclaw", "stenolog-json"]
"""Who wrote it: picoclaw's logs, its older whole files, zeroclaw's logs, our own stand-in."""


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
