"""Types of requests and responses, and their encoding as JSON."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from starlette.responses import Response

from stenolog.catalog.entries import State
from stenolog.codec import MAX_KEY_BYTES, MAX_TOKEN_BYTES, encode_object
from stenolog.records import decode_object

T = TypeVar("T")

MOST_SESSIONS: Final = 500
"""Maximum number of sessions on one page of the list."""
MOST_MESSAGES: Final = 1_000
"""Maximum number of messages on one page."""
MOST_HITS: Final = 100
"""Maximum number of hits on one page of a search."""

_KINDS: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}

_LINE_ENDS: Final = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}

HIGHEST: Final = 2**53 - 1
"""Highest integer that all JSON parsers read exactly."""

Seq = Annotated[int, Meta(ge=0, le=HIGHEST)]
Key = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Moment = Annotated[
    datetime, Meta(tz=True, description="A time with its zone, as in `2026-01-31T08:00:00Z`.")
]
After = Annotated[
    str,
    Meta(description="Where this page begins: the `after` of the page before, as it was given."),
]
Prefix = Annotated[str, Meta(description="Only sessions whose key begins so.")]
Tag = Annotated[str, Meta(description="Only sessions with this tag.")]


# --- requests --------------------------------------------------------------------------------


class OfAgent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Query parameter of all requests: the agent."""

    agent: Annotated[
        str, Meta(description="The agent; `main` is the one that `[agent]` describes.")
    ] = "main"


class ListQuery(OfAgent, frozen=True, kw_only=True):
    """Query parameters of the list of sessions."""

    limit: Annotated[
        int, Meta(ge=1, le=MOST_SESSIONS, description="How many sessions a page has.")
    ] = 50
    after: After | UnsetType = UNSET
    prefix: Prefix = ""
    tag: Tag | UnsetType = UNSET
    channel: (
        Annotated[
            str, Meta(description="Only sessions of this channel: what a key has before its `:`.")
        ]
        | UnsetType
    ) = UNSET
    state: (
        Annotated[
            State,
            Meta(description="Only sessions in this state; interrupted: not answered to the end."),
        ]
        | UnsetType
    ) = UNSET


class MessagesQuery(OfAgent, frozen=True, kw_only=True):
    """Query parameters of the messages of a session."""

    last: (
        Annotated[int, Meta(ge=1, le=HIGHEST, description="Only so many of the last ones.")]
        | UnsetType
    ) = UNSET
    after: Annotated[
        int, Meta(ge=0, le=HIGHEST, description="Only messages behind the one of this seq.")
    ] = 0
    full: Annotated[
        bool, Meta(description="Hidden, replaced and archived messages too, marked as hidden.")
    ] = False
    limit: Annotated[
        int, Meta(ge=1, le=MOST_MESSAGES, description="How many messages a page has at most.")
    ] = 100


class SearchQuery(OfAgent, frozen=True, kw_only=True):
    """Query parameters of a search."""

    q: Annotated[
        str,
        Meta(
            description='All these words; `"in quotes"`: in this order; `-word`: without it; '
            "`wor*`: words that begin so."
        ),
    ]
    role: Annotated[str, Meta(description="Only what was said in this role.")] | UnsetType = UNSET
    prefix: Prefix = ""
    tag: Tag | UnsetType = UNSET
    since: Moment | UnsetType = UNSET
    until: Moment | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=MOST_HITS, description="How many hits a page has.")] = 20
    newest: Annotated[bool, Meta(description="The newest first, instead of the best.")] = False
    after: After | UnsetType = UNSET


class Nothing(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing is to be said; the body may be left out."""


class Changed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a session is called from now on; what is left out stays as it is."""

    title: Annotated[str, Meta(max_length=1_000)] | UnsetType | None = UNSET
    tags: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=200)]], Meta(max_length=100)]
        | UnsetType
    ) = UNSET


class Restoring(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of the deleted sessions of a key comes back, and as what."""

    uid: (
        Annotated[
            str, Meta(min_length=1, max_length=200, description="Which one; else the last deleted.")
        ]
        | UnsetType
    ) = UNSET
    as_key: Key | UnsetType = UNSET


class Said(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of the user."""

    content: (
        Annotated[str, Meta(min_length=1)] | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    )
    id: Annotated[
        str,
        Meta(
            max_length=MAX_TOKEN_BYTES,
            description="An id of your own: sent again, the message is stored and answered once.",
        ),
    ] = ""
    new_session: Annotated[
        bool, Meta(description="Start a new session if the one with this key was deleted.")
    ] = False


class Forking(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a copy of a session is called, and up to where it goes."""

    new_key: Key
    at: Annotated[Seq, Meta(description="The seq of the last message of it.")] | UnsetType = UNSET


# --- responses -------------------------------------------------------------------------------


class SessionShown(Struct, frozen=True, kw_only=True):
    """One session."""

    key: str
    uid: str
    """Identifies the session. A session created again under the same key has another uid."""
    title: str | None
    """Title set by a user; None if there is none."""
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


class MessageShown(Struct, frozen=True, kw_only=True):
    """One message, and where it stands."""

    seq: int
    at: datetime
    hidden: bool
    message: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]
    """The stored object, unchanged."""


class MessagePage(Struct, frozen=True, kw_only=True):
    """Some of the messages of a session, by seq."""

    messages: Sequence[MessageShown]
    after: int | None
    """Seq after which the next page starts; None for the last page."""


class Events(Struct, frozen=True, kw_only=True):
    """What came of a message."""

    answer: str
    outcome: str
    """answered, interrupted, again, elsewhere or command."""
    seq: int | None
    """Seq of the answer; None if it is not stored."""
    saved: bool
    """Whether all messages of the turn are stored."""
    session: str
    """Session for the next message: a different one after /new, /fork and /resume."""


class CompactionShown(Struct, frozen=True, kw_only=True):
    """What a compaction did; `undo` takes it back."""

    compacted: int
    """Number of summarized messages; 0 if there was nothing to summarize."""
    first: int | None = None
    last: int | None = None
    tokens_before: int | None = None
    tokens_after: int | None = None
    words: str


class Stopped(Struct, frozen=True, kw_only=True):
    """Whether an answer was being made."""

    stopped: bool


class Counted(Struct, frozen=True, kw_only=True):
    """How much there is of something."""

    sessions: int = 0
    messages: int = 0
    tokens: int = 0


class Stats(Struct, frozen=True, kw_only=True):
    """How much there is in all."""

    sessions: int
    messages: int
    """Including hidden and archived messages."""
    tokens: int
    """Estimated tokens of the visible messages."""
    channels: Mapping[str, Counted]
    """By channel, the part of the key before the first `:`; empty for keys without one."""
    states: Mapping[str, Counted]
    complete: bool
    """False if there are more sessions than were counted."""


class Health(Struct, frozen=True, kw_only=True):
    """That the gateway lives, or can be used."""

    status: str
    version: str


class Words(Struct, frozen=True, kw_only=True):
    """What went wrong: in words, and for programs."""

    message: str
    type: str
    code: str


class Failure(Struct, frozen=True, kw_only=True):
    """An error, in the shape that clients of OpenAI know."""

    error: Words


# --- encoding --------------------------------------------------------------------------------


def given(value: T | UnsetType) -> T | None:
    """Return the value; None if it is unset."""
    return None if isinstance(value, UnsetType) else value


def encoded(value: Struct) -> bytes:
    """Encode a value as JSON; lone surrogates become escapes, as in the store."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return encode_object(msgspec.to_builtins(value, enc_hook=_raw))


def sse_data(json: bytes) -> str:
    """Return JSON as event data; escape line ends that only some clients recognise."""
    return json.decode().translate(_LINE_ENDS)


def answered(
    value: Struct, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a JSON response with this value."""
    return Response(
        encoded(value),
        status_code=status,
        # Stored text may look like HTML; browsers must not guess the type.
        headers={"X-Content-Type-Options": "nosniff", **(headers or {})},
        media_type="application/json",
    )


def failure(
    status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error response; the message must not contain secrets."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    words = Words(message=message, type=kind, code=code)
    return answered(Failure(error=words), status=status, headers=headers)


def _raw(value: Any) -> Any:
    """Decode raw JSON for an encoder that does not support it."""
    if isinstance(value, Raw):
        return decode_object(value)
    raise NotImplementedError(f"{type(value).__name__} is not JSON")
