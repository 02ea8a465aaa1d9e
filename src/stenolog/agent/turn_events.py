"""Values that front ends exchange with the agent: message, options, events, answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct

from stenolog.context.summarize import SummaryReport
from stenolog.errors import MaybeStored, StenologError
from stenolog.providers.chat_model import Usage


class TurnOptions(Struct, frozen=True, kw_only=True):
    """Options of one turn, given by a client. The defaults leave the agent's behaviour unchanged.

    A turn stops at a call to a client tool, and resumes after the client has stored the result.
    """

    system: str | None = None
    """System prompt that replaces the agent's system prompt."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the client runs itself, in OpenAI's `tools` format."""
    own_tools: bool = True
    """Whether to offer the agent's tools, too, except those with the name of a client tool."""
    model: str = ""
    """Name of one of the agent's models. An empty name means the session's current model."""
    schema: Mapping[str, Any] | None = None
    """JSON schema for the answer."""
    max_tokens: int | None = None
    """Maximum length of the answer in tokens."""
    sender: str | None = ""
    """Verified sender, whose memory the model sees. None means the owner of the session."""

    @property
    def client_tool_names(self) -> frozenset[str]:
        """Names of the tools that the client runs."""
        return frozenset(map(tool_name, self.tools))

    @property
    def is_default(self) -> bool:
        """Whether the options keep the system prompt and the tools of the agent."""
        return self.system is None and not self.tools and self.own_tools


DEFAULT_OPTIONS: Final = TurnOptions()


def tool_name(definition: Mapping[str, Any]) -> str:
    """Return the name in a tool definition; empty for a definition without a name."""
    function = definition.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


class InboundMessage(Struct, frozen=True, kw_only=True):
    """A message from a user.

    Sessions with messages of only one sender share the memory of that sender. The sender must be
    empty if it is not verified, for example if it comes from a session key.
    """

    key: str
    content: str | Sequence[Mapping[str, Any]]
    """Text, or content parts in OpenAI's chat format."""
    id: str = ""
    """Id from the source of the message. A second message with this id is not stored."""
    origin: Mapping[str, Any] | None = None
    """Address for the answer, in the format of the channel; stored with the message."""
    request_digest: str = ""
    """Digest of the HTTP request with this message; stored with the message."""
    sender: str = ""
    """The user or group chat that the front end has verified, such as `telegram:123`."""


class MessageStored(Struct, frozen=True, kw_only=True):
    """The user's message is stored, with this seq."""

    seq: int


class ModelCalled(Struct, frozen=True, kw_only=True):
    """A request to the model starts."""

    model: str
    tokens: int
    """Estimated number of tokens of the request."""
    budget: int
    """Maximum number of tokens of the request."""
    recalled: int = 0
    """Number of recalled notes and past messages in the request."""


class TextDelta(Struct, frozen=True, kw_only=True):
    """The next piece of the model's answer."""

    text: str


class ThinkingDelta(Struct, frozen=True, kw_only=True):
    """The next piece of the model's reasoning, if the provider returns it."""

    text: str


class ToolStarted(Struct, frozen=True, kw_only=True):
    """A tool call starts."""

    id: str
    name: str
    arguments: str
    """JSON, as written by the model."""


class ToolFinished(Struct, frozen=True, kw_only=True):
    """A tool call ended. `text` is the result for the model."""

    id: str
    name: str
    text: str
    failed: bool
    seconds: float


class UsageReported(Struct, frozen=True, kw_only=True):
    """Token counts that the provider reported for the last request."""

    usage: Usage


class SummaryCreated(Struct, frozen=True, kw_only=True):
    """The oldest turns were summarized."""

    report: SummaryReport


TEXT_KEPT: Final = "the text so far is kept"
"""Clause in the notice about an interrupted answer. Front ends recognize the notice by it."""
RETRY_HINT: Final = ", /retry asks again"
"""Last clause of that notice. Front ends without commands remove the clause."""


class Notice(Struct, frozen=True, kw_only=True):
    """A notice for the user, one sentence."""

    text: str


Event = (
    MessageStored
    | ModelCalled
    | TextDelta
    | ThinkingDelta
    | ToolStarted
    | ToolFinished
    | UsageReported
    | SummaryCreated
    | Notice
)
"""An event of a turn, in the order in which it happened."""
EventHandler = Callable[[Event], None]
"""Callback for events, called in the event loop.

The callback must not block, and its errors are logged.
"""

Outcome = Literal["answered", "calls", "interrupted", "failed", "again", "elsewhere", "command"]
"""Outcome of a message, as described in `Answer`."""


class Answer(Struct, frozen=True, kw_only=True):
    """The answer to a message or command.

    The outcome `answered` means that the turn has ended with this text, which is in the log if
    `seq` is set. `calls` means that the client has to run tools first. `interrupted` means that the
    answer was stopped, and its text so far is kept. `failed` means that the user's message stays
    unanswered, and the text tells the reason; if a write failed, the error is StoreUnavailable.
    With the error OnceConflict, the id of the message belongs to another message; with
    AnswerUnknown, the message was sent before, and its answer may be damaged. `again` means that
    the message was answered before. `elsewhere` means that another process, or another turn of this
    process, answered the message. `command` means that the message was a command.
    """

    key: str
    """Key of the session for the next message; another key after /new, /fork and /resume."""
    text: str
    outcome: Outcome
    seq: int | None = None
    """Seq of the answer; None if the answer is not stored."""
    saved: bool = True
    """Whether the messages of the turn are stored; if it failed, whether the user's message is."""
    calls: tuple[Mapping[str, Any], ...] = ()
    """Tool calls that the client has to run, in OpenAI's chat format."""
    error: StenologError | None = None
    """The error, if the turn or command failed; None for a mistake in a command."""
    finish: str = ""
    """The model's finish reason; `length` if the answer was cut off at the model's limit."""


def may_run_again(answer: Answer) -> bool:
    """Return whether a command failed, so that it must run if it is sent again."""
    return answer.error is not None and not isinstance(answer.error, MaybeStored)


def ignore_event(event: Event) -> None:
    """Ignore the event."""
    del event
