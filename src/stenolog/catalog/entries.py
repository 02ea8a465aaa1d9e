"""The values that a catalog gives out."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from msgspec import Struct

State = Literal["idle", "running", "interrupted"]
"""running: somebody has the turn. interrupted: the last word is not the agent's."""


class Entry(Struct, frozen=True, kw_only=True):
    """One session as a list shows it."""

    key: str
    uid: str
    """Which life of the key this is; empty where it cannot be read."""
    title: str
    """What a person called it (meta `title`), else the beginning of the first prompt."""
    prompt: str
    """The beginning of the first user message."""
    state: State
    visible: int
    """How many messages are in sight."""
    count: int
    """How many there are, hidden and archived ones included."""
    tokens: int
    """What is in sight, in tokens, estimated."""
    created: datetime | None
    updated: datetime | None
    tags: tuple[str, ...]
    agent: str | None
    channel: str | None
    """The part of the key before the first `:`."""
    lost: int
    """How many messages damage has taken, as far as it was met."""
    damaged: int
    """How many damaged lines were met."""
    problem: str | None
    """Why it cannot be read; then the numbers are 0, and the times None."""
    sender: str = ""
    """The verified sender of all its user messages, as `telegram:123`; empty if there is none."""


class Page(Struct, frozen=True, kw_only=True):
    """A part of the list."""

    entries: Sequence[Entry]
    after: str | None
    """Where the next page begins; None where this is the last."""


class Hit(Struct, frozen=True, kw_only=True):
    """One message in which a search found what was asked for."""

    key: str
    uid: str
    title: str
    seq: int
    role: str
    at: datetime
    hidden: bool
    snippet: str
    """A part of what was said, in one line, around the words that were found."""
    marks: Sequence[tuple[int, int]]
    """Where in the snippet these words begin and end."""


class Hits(Struct, frozen=True, kw_only=True):
    """A part of what a search found."""

    hits: Sequence[Hit]
    count: int
    """How many messages match; where `exact` is false, there are more."""
    exact: bool
    after: str | None
    """Where the next page begins; None where this is the last."""
    unreadable: Mapping[str, str] = {}
    """Sessions that could not be searched, by key: the reason for each."""


class Candidate(Struct, frozen=True, kw_only=True):
    """One message that recall may choose: it shares words with a question, or stands beside one."""

    key: str
    uid: str
    seq: int
    role: str
    at: datetime
    text: str
    """The beginning of what was said."""


class Candidates(Struct, frozen=True, kw_only=True):
    """What recall may choose from, and how common the words of the question are."""

    messages: Sequence[Candidate]
    count: int
    """How many messages the owner has in all."""
    containing: Mapping[str, int]
    """In how many of them each word stands, in its common form; counted up to some hundreds."""
