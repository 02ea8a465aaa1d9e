"""What happens during a turn, for whoever shows it; and what comes out of it. Values only."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from stenolog.context.compaction import Compaction
from stenolog.errors import StenologError
from stenolog.providers.base import Usage


class Inbound(Struct, frozen=True, kw_only=True):
    """A message of a user, on its way in."""

    key: str
    """The session it belongs to."""
    content: str | Sequence[Mapping[str, Any]]
    """Text, or parts in OpenAI chat shape."""
    id: str = ""
    """Its id where it comes from: delivered twice, it is stored and answered once."""
    origin: Mapping[str, Any] | None = None
    """Where an answer belongs, in the words of its channel; kept with the message."""
    request_digest: str = ""
    """Digest of the HTTP request that brought it; kept with the message."""
    sender: str = ""
    """The user or group chat, as `telegram:123`, if the front end has verified who wrote this.

    Sessions in which every user message has the same sender share one memory. Leave it empty for
    anything that a client can choose, such as a session key.
    """


class Heard(Struct, frozen=True, kw_only=True):
    """The user's message is stored, at this seq."""

    seq: int


class Asked(Struct, frozen=True, kw_only=True):
    """The model is asked now."""

    model: str
    tokens: int
    """About how many are sent."""
    budget: int
    """How many may be."""
    recalled: int = 0
    """How many notes and past messages were recalled into it."""


class Said(Struct, frozen=True, kw_only=True):
    """The next piece of what the model says."""

    text: str


class Thought(Struct, frozen=True, kw_only=True):
    """The next piece of what it thinks, where it tells."""

    text: str


class ToolBegan(Struct, frozen=True, kw_only=True):
    """A tool runs."""

    id: str
    name: str
    arguments: str
    """As the model wrote them, in JSON."""


class ToolEnded(Struct, frozen=True, kw_only=True):
    """A tool has ended, and the model will see this."""

    id: str
    name: str
    text: str
    failed: bool
    seconds: float


class Counted(Struct, frozen=True, kw_only=True):
    """What the provider counted for the request that has just ended."""

    usage: Usage


class Compacted(Struct, frozen=True, kw_only=True):
    """The oldest turns became a summary."""

    compaction: Compaction


class NotSaved(Struct, frozen=True, kw_only=True):
    """So many messages are in hand and not in the store; the words say why, and what to do."""

    count: int
    words: str


class SavedAfterAll(Struct, frozen=True, kw_only=True):
    """All that was in hand is in the store now."""

    count: int


class Noticed(Struct, frozen=True, kw_only=True):
    """Something that the user should know: in one sentence."""

    words: str


Event = (
    Heard
    | Asked
    | Said
    | Thought
    | ToolBegan
    | ToolEnded
    | Counted
    | Compacted
    | NotSaved
    | SavedAfterAll
    | Noticed
)
Tell = Callable[[Event], None]
"""Is called in the event loop as things happen; it must not block. What it raises is logged."""

Outcome = Literal["answered", "calls", "interrupted", "failed", "again", "elsewhere", "command"]
"""answered: the answer is in the log. calls: the client has tools to carry out first. interrupted:
it was stopped, what was said is kept. failed: the words say why, the user's message is kept and
unanswered. again: it had been answered before. elsewhere: another process has the turn, or somebody
else's turn here has answered it. command: it was a command."""


class Answer(Struct, frozen=True, kw_only=True):
    """What came of a message."""

    key: str
    """The session to go on in: another one after /new, /fork and /resume."""
    text: str
    outcome: Outcome
    seq: int | None = None
    """Where the answer stands in the log; None where it is not there."""
    saved: bool = True
    """Whether everything that was said is in the store."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """The calls that the client is to carry out, in OpenAI chat shape."""
    error: StenologError | None = None
    """What was raised, where it failed."""
    finish: str = ""
    """Why the model stopped, in its own word; `length`: at its limit."""


def nobody(event: Event) -> None:
    """Tell nobody."""
    del event
