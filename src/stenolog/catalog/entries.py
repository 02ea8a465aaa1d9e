"""The values that a catalog returns."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal

from msgspec import Struct

State = Literal["idle", "running", "interrupted"]
"""running: a turn is in progress. interrupted: the last turn was not answered."""


class Entry(Struct, frozen=True, kw_only=True):
    """One session, as shown in a list."""

    key: str
    uid: str
    """Uid of the session; empty if the session cannot be read."""
    title: str
    """The title that was set (meta `title`), or else the start of the first prompt."""
    prompt: str
    """The start of the first user message."""
    state: State
    visible: int
    """Number of visible messages."""
    count: int
    """Number of all messages, including hidden and archived ones."""
    tokens: int
    """Estimated number of tokens of the visible messages."""
    created: datetime | None
    updated: datetime | None
    tags: tuple[str, ...]
    agent: str | None
    channel: str | None
    """The part of the key before the first `:`."""
    lost: int
    """Number of messages lost by damage, as far as known."""
    damaged: int
    """Number of damaged lines, as far as known."""
    problem: str | None
    """Why the session cannot be read; then the numbers are 0 and the times None."""
    sender: str = ""
    """The verified sender of all its user messages, such as `telegram:123`, or empty."""


class Page(Struct, frozen=True, kw_only=True):
    """A page of the list of sessions."""

    entries: Sequence[Entry]
    after: str | None
    """Start of the next page; None if this is the last one."""


class Hit(Struct, frozen=True, kw_only=True):
    """A message that matches a search."""

    key: str
    uid: str
    title: str
    seq: int
    role: str
    at: datetime
    hidden: bool
    snippet: str
    """The part of the text around the matching words, in one line."""
    marks: Sequence[tuple[int, int]]
    """Start and end of each matching word in the snippet."""


class Hits(Struct, frozen=True, kw_only=True):
    """A page of search results."""

    hits: Sequence[Hit]
    count: int
    """Number of matching messages; a lower bound unless `exact`."""
    exact: bool
    after: str | None
    """Start of the next page; None if this is the last one."""
    unreadable: Mapping[str, str] = {}
    """Reasons why sessions could not be searched, by key."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A candidate for recall: a message that shares words with a question, or its neighbour."""

    key: str
    uid: str
    seq: int
    role: str
    at: datetime
    text: str
    """The start of the text."""


class Candidates(Struct, frozen=True, kw_only=True):
    """Candidates for recall, and the frequencies of the question's words."""

    messages: Sequence[Candidate]
    count: int
    """Number of all messages of the owner."""
    containing: Mapping[str, int]
    """Number of messages with each stem, counted up to some hundreds."""
