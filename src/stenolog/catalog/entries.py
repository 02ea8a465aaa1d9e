"""The values that a catalog returns."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final, Literal

from msgspec import Struct

State = Literal["idle", "running", "interrupted"]
"""State of a session. running: a turn is in progress. interrupted: the last turn has no answer."""


# `changed` sorts by the last change, even of tags only. `newest` and `oldest` sort by the time of
# the last message. `length` is the number of messages. Every order except `oldest` starts with the
# highest value.
Sort = Literal["changed", "newest", "oldest", "cost", "tokens", "length"]
"""Order of a list of sessions."""
NANODOLLARS: Final = 1e9
"""Nanodollars per US dollar."""


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
    """Number of damaged lines or message rows, as far as known."""
    problem: str | None
    """Why the session cannot be read, or None. If set, all numbers are 0 and all times None."""
    sender: str = ""
    """The verified sender of all user messages, such as `telegram:123`, or empty."""
    last_message: datetime | None = None
    """Time of the newest message; creation time of a session without messages."""
    program: str = ""
    """The program that an imported session came from, such as `claude-code`, or empty."""
    project: str = ""
    """Working directory of the session, or empty."""
    model: str = ""
    """The model of the last answer, or empty."""
    input_tokens: int = 0
    """Input tokens of all answers, as counted by the providers, including cached ones."""
    output_tokens: int = 0
    cost: float | None = None
    """Cost in US dollars of the answers with a known price, except copied ones; None: unknown."""
    unpriced: int = 0
    """Number of answers with token counts, but without a known price."""
    failed: int = 0
    """Number of failed tool calls."""
    forked_from: str | None = None
    """Key of the session from which this session was forked."""
    forked_at: int = 0
    """Last seq that was copied from `forked_from`; 0 if unknown."""

    @property
    def is_indexed(self) -> bool:
        """Whether the messages were read; otherwise all numbers are 0 because they are unknown."""
        return bool(self.uid) or self.problem is not None


class SessionFilter(Struct, frozen=True, kw_only=True):
    """Conditions of a list of sessions. None means any value."""

    prefix: str = ""
    tag: str | None = None
    state: State | None = None
    channel: str | None = None
    agent: str | None = None
    program: str | None = None
    """Name of a program; an empty name selects sessions without a program."""
    project: str | None = None
    model: str | None = None
    failed: bool | None = None
    """Whether a tool call of the session failed."""
    since: datetime | None = None
    """Earliest time of the last message."""
    until: datetime | None = None
    """Time before which the last message must have been stored."""


class Page(Struct, frozen=True, kw_only=True):
    """A page of the list of sessions."""

    entries: Sequence[Entry]
    after: str | None
    """Start of the next page; None on the last page."""


class Group(Struct, frozen=True, kw_only=True):
    """Sessions that have the same value, such as the same project."""

    value: str
    count: int
    cost: float | None
    """Sum of the known costs; None if no session has a known cost."""


class Overview(Struct, frozen=True, kw_only=True):
    """A page of the list of sessions, and facts about all matching sessions."""

    page: Page
    count: int
    """Number of all matching sessions."""
    cost: float | None
    failed: int
    """Number of matching sessions with a failed tool call."""
    facets: Mapping[str, Sequence[Group]]
    """Most frequent values by facet, such as `model`. Each facet ignores the filter on itself."""


class ProjectGroup(Struct, frozen=True, kw_only=True):
    """A project with its newest sessions."""

    group: Group
    entries: Sequence[Entry]


class ProjectPage(Struct, frozen=True, kw_only=True):
    """A page of projects, the most recently used first."""

    projects: Sequence[ProjectGroup]
    after: int | None
    """Start of the next page; None on the last page."""


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
    """The part of the text around the matching words, in one line, with secrets redacted."""
    marks: Sequence[tuple[int, int]]
    """Start and end of each matching word in the snippet."""


class Hits(Struct, frozen=True, kw_only=True):
    """A page of search results."""

    hits: Sequence[Hit]
    count: int
    """Number of matching messages; a lower bound unless `exact`."""
    exact: bool
    after: str | None
    """Start of the next page; None on the last page."""
    unreadable: Mapping[str, str] = {}
    """Reasons why sessions could not be searched, by key."""


class SessionHits(Struct, frozen=True, kw_only=True):
    """The matching messages of one session."""

    entry: Entry
    hits: Sequence[Hit]
    """The best matches."""
    count: int
    """Number of matches in the session; a lower bound unless the search was exact."""


class GroupedHits(Struct, frozen=True, kw_only=True):
    """A page of search results by session, the session with the best match first."""

    sessions: Sequence[SessionHits]
    count: int
    """Number of matching messages in all sessions; a lower bound unless `exact`."""
    session_count: int
    """Number of sessions with matches; a lower bound unless `exact`."""
    exact: bool
    after: int | None
    """Start of the next page; None on the last page."""


class Candidate(Struct, frozen=True, kw_only=True):
    """A candidate for recall: a message with words of the question, or a neighbour of a match."""

    key: str
    uid: str
    seq: int
    role: str
    at: datetime
    text: str
    """The start of the message's text."""


class Candidates(Struct, frozen=True, kw_only=True):
    """Candidates for recall, and the frequencies of the question's words."""

    messages: Sequence[Candidate]
    count: int
    """Number of all messages in the searched sessions."""
    containing: Mapping[str, int]
    """Number of messages that contain each stem, counted up to a few hundred."""
