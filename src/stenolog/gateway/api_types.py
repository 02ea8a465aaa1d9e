"""Types of requests and responses, and their encoding as JSON."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from starlette.responses import Response

from stenolog.catalog.entries import Sort, State
from stenolog.codec import MAX_KEY_BYTES, MAX_TOKEN_BYTES, encode_object
from stenolog.records import Message, Trashed, decode_object

T = TypeVar("T")

MAX_SESSIONS_PER_PAGE: Final = 500
_MAX_MESSAGES_PER_PAGE: Final = 1_000
_MAX_HITS_PER_PAGE: Final = 100

_ERROR_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}

_LINE_ENDS: Final = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}

MAX_SEQ: Final = 2**53 - 1
"""Highest integer that all JSON parsers read exactly."""

Seq = Annotated[int, Meta(ge=0, le=MAX_SEQ)]
Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Moment = Annotated[datetime, Meta(tz=True)]


# --- queries ---------------------------------------------------------------------------------
# The docstring of a field is its description in the OpenAPI document.


class AgentQuery(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameter of all requests: the agent."""

    agent: str = "main"
    """Name of the agent. `main` is the agent in the section `[agent]` of the settings."""


class PageQuery(AgentQuery, frozen=True, kw_only=True):
    """Query parameters of the list of sessions and of the search."""

    after: str | UnsetType = UNSET
    """Start of this page: the value of `after` in the response with the previous page."""
    prefix: str = ""
    """Only sessions whose key starts with this text."""
    tag: str | UnsetType = UNSET
    """Only sessions with this tag."""
    since: Moment | UnsetType = UNSET
    """Start of the period, with a time zone, such as `2026-01-31T08:00:00Z`."""
    until: Moment | UnsetType = UNSET
    """End of the period, not included, with a time zone, such as `2026-01-31T08:00:00Z`."""


class ListQuery(PageQuery, frozen=True, kw_only=True):
    """Query parameters of the list of sessions."""

    limit: Annotated[int, Meta(ge=1, le=MAX_SESSIONS_PER_PAGE)] = 50
    """Maximum number of sessions."""
    channel: str | UnsetType = UNSET
    """Only sessions of this channel: the part of a key before `:`."""
    state: State | UnsetType = UNSET
    """Only sessions in this state. `interrupted`: the last turn was not fully answered."""
    program: str | UnsetType = UNSET
    """Only sessions imported from this program, for example `claude-code`. An empty value selects
    sessions without a program. `project` and `model` work in the same way."""
    project: str | UnsetType = UNSET
    """Only sessions with this working directory."""
    model: str | UnsetType = UNSET
    """Only sessions whose last answer is of this model."""
    failed: bool | UnsetType = UNSET
    """true: only sessions with a failed tool call. false: only sessions without one."""
    sort: Sort = "changed"
    """changed: last change first. newest, oldest: by the last message. cost, tokens, length:
    highest first."""


class MessagesQuery(AgentQuery, frozen=True, kw_only=True):
    """Query parameters of the messages of a session."""

    last: Annotated[int, Meta(ge=1, le=MAX_SEQ)] | UnsetType = UNSET
    """Only the newest messages, at most this many."""
    after: Seq = 0
    """Only messages with a seq greater than this."""
    full: bool = False
    """Include hidden, replaced and archived messages."""
    limit: Annotated[int, Meta(ge=1, le=_MAX_MESSAGES_PER_PAGE)] = 100
    """Maximum number of messages."""


class SearchQuery(PageQuery, frozen=True, kw_only=True):
    """Query parameters of a search."""

    q: str
    """Words that a message must contain. `"in quotes"`: a phrase; `-word`: no message with
    `word`; `wor*`: words that start with `wor`."""
    role: str | UnsetType = UNSET
    """Only messages with this role."""
    limit: Annotated[int, Meta(ge=1, le=_MAX_HITS_PER_PAGE)] = 20
    """Maximum number of hits."""
    newest: bool = False
    """Sort by time, newest first, instead of by relevance."""


# --- bodies ----------------------------------------------------------------------------------


class EmptyBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An empty body, which may be omitted."""


class SessionPatch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """New title and tags of a session. Omitted fields stay unchanged."""

    title: Annotated[str, Meta(max_length=1_000)] | UnsetType | None = UNSET
    tags: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=100)]
        | UnsetType
    ) = UNSET


class RestoreRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The deleted session to restore, and its new key."""

    uid: (
        Annotated[
            str, Meta(min_length=1, max_length=200, description="Default: the last one deleted.")
        ]
        | UnsetType
    ) = UNSET
    as_key: Key | UnsetType = UNSET


class MessageRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of the user."""

    content: (
        Annotated[str, Meta(min_length=1)] | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    )
    id: Annotated[
        str,
        Meta(
            max_length=MAX_TOKEN_BYTES,
            description="Id of the message. A message with a known id is not stored again.",
        ),
    ] = ""
    new_session: Annotated[
        bool, Meta(description="Start a new session if the session with this key was deleted.")
    ] = False


class ForkRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Key of the copy of a session, and the last message to copy."""

    new_key: Key
    at: Annotated[Seq, Meta(description="Seq of the last message to copy.")] | UnsetType = UNSET


# --- responses -------------------------------------------------------------------------------


class SessionDetails(Struct, frozen=True, kw_only=True):
    """One session."""

    key: str
    uid: str
    """Unique id of the session. A session created again under the same key has another uid."""
    title: str
    """The title that was set, or else the start of the first prompt, as in the list."""
    tags: tuple[str, ...]
    state: State
    summary: str
    """Summary of the hidden messages."""
    forked_from: str | None
    created: datetime
    updated: datetime
    last_seq: int
    floor: int
    visible: int
    count: int
    lost: int
    damaged: int
    archived: int
    undoable: int
    meta: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
    """All fields of the session's meta, including title and tags."""


class MessageItem(Struct, frozen=True, kw_only=True):
    """One message with its seq and time."""

    seq: int
    at: datetime
    hidden: bool
    message: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
    """The stored object, unchanged."""


def message_item(message: Message) -> MessageItem:
    """Return a stored message for a response."""
    body = Raw(message.to_json())
    return MessageItem(seq=message.seq, at=message.at, hidden=message.hidden, message=body)


class MessagePage(Struct, frozen=True, kw_only=True):
    """A page of messages, sorted by seq."""

    messages: Sequence[MessageItem]
    after: int | None
    """Seq after which the next page starts; None for the last page."""


class MessageResponse(Struct, frozen=True, kw_only=True):
    """The answer to a message."""

    answer: str
    outcome: str
    """Outcome of the turn: answered, interrupted, again, elsewhere or command."""
    seq: int | None
    """Seq of the answer; None if it is not stored."""
    saved: bool
    """Whether all messages of the turn are stored."""
    session: str
    """Key for the next message. The commands /new, /fork and /resume change the session."""


class SummaryResponse(Struct, frozen=True, kw_only=True):
    """Result of summarizing a session. The endpoint `undo` can undo the summary."""

    compacted: int
    """Number of summarized messages; 0 if there was nothing to summarize."""
    first: int | None = None
    last: int | None = None
    tokens_before: int | None = None
    tokens_after: int | None = None
    words: str


class TrashResponse(Struct, frozen=True, kw_only=True):
    """Deleted sessions."""

    sessions: Sequence[Trashed]
    count: int
    """Number of all deleted sessions."""


class StopResponse(Struct, frozen=True, kw_only=True):
    """Whether an answer was in progress."""

    stopped: bool


class GroupStats(Struct, kw_only=True):
    """Counts for a group of sessions."""

    sessions: int = 0
    messages: int = 0
    tokens: int = 0


class Stats(Struct, frozen=True, kw_only=True):
    """Counts for all sessions, and for each channel and state."""

    sessions: int
    messages: int
    """Number of messages, including hidden and archived messages."""
    tokens: int
    """Estimated tokens of the visible messages."""
    channels: Mapping[str, GroupStats]
    """Counts by channel: the part of a key before the first `:`, empty for a key without `:`."""
    states: Mapping[str, GroupStats]
    complete: bool
    """False if there are more sessions than were counted."""


class Health(Struct, frozen=True, kw_only=True):
    """Status of the gateway."""

    status: str
    version: str


class ErrorDetails(Struct, frozen=True, kw_only=True):
    """Description of an error, for people and for programs."""

    message: str
    type: str
    code: str


class ErrorResponse(Struct, frozen=True, kw_only=True):
    """An error in OpenAI's format."""

    error: ErrorDetails


# --- encoding --------------------------------------------------------------------------------


def given_parameters(query: AgentQuery) -> dict[str, Any]:
    """Return the query parameters that are set, without the agent."""
    fields = msgspec.structs.asdict(query)
    return {name: value for name, value in fields.items() if name != "agent" and value is not UNSET}


def value_or_none(value: T | UnsetType) -> T | None:
    """Return the value; None if it is unset."""
    return None if isinstance(value, UnsetType) else value


def encode_json(value: Struct) -> bytes:
    """Encode a value as JSON. Lone surrogates become escape sequences, as in the store."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return encode_object(msgspec.to_builtins(value, enc_hook=_decode_raw))


def sse_data(json: bytes) -> str:
    """Return JSON as event data; escape line ends that only some clients recognise."""
    return json.decode().translate(_LINE_ENDS)


def json_response(
    value: Struct, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response with this value."""
    return Response(
        encode_json(value),
        status_code=status,
        # Stored text may look like HTML; browsers must not guess the type.
        headers={"X-Content-Type-Options": "nosniff", **(headers or {})},
        media_type="application/json",
    )


def error_response(
    status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error response; the message must not contain secrets."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    details = ErrorDetails(message=message, type=kind, code=code)
    return json_response(ErrorResponse(error=details), status=status, headers=headers)


def _decode_raw(value: Any) -> Any:
    """Decode raw JSON for an encoder that does not support raw JSON."""
    if isinstance(value, Raw):
        return decode_object(value)
    raise NotImplementedError(f"{type(value).__name__} is not JSON")
