"""Shared values: messages, log records, and the results of store calls.

`Message` is both the public value and the decoded envelope of a log line: reading a thousand
messages creates a thousand objects, not two thousand. The fields of the envelope have private
names, because the stored object may use any field name.
"""

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

__all__ = ["Message", "SessionInfo"]

_decode = msgspec.json.Decoder().decode

FORMAT: Final = 1
"""Version of the log format that this code writes."""

Span = tuple[int, int]
"""First and last seq of a range, both included."""


class _RoleField(Struct, gc=False):
    role: Any = ""


class _ContentField(Struct, gc=False):
    content: Any = None


# Decoding only some fields is several times faster than decoding the whole object.
_decode_role = msgspec.json.Decoder(_RoleField).decode
_decode_content = msgspec.json.Decoder(_ContentField).decode


class Message(
    Struct,
    frozen=True,
    gc=False,
    eq=False,
    repr_omit_defaults=True,
    tag_field="kind",
    tag="message",
    rename={
        "_at": "at",
        "_joined": "joined",
        "_part": "part",
        "_once": "once",
        "_body": "body",
        "hidden": "-hidden",
    },
):
    """An immutable message, as returned by a store.

    A Message reads like the stored object: `m["role"]`, `m.get("tool_calls")`, `dict(m)`. Each
    stored field is an attribute, too, unless `Message` has an attribute of the same name. `role`
    and `content` always exist: a message without them has the role "" and the content None.

    Each access decodes the stored JSON. Call `to_dict()` once to read many fields.
    """

    seq: int
    """Position in the session: 1, 2, 3 …, never reused."""
    _at: str
    _body: Raw
    _joined: bool = False
    _part: Span | None = None
    _once: str | None = None
    hidden: bool = False
    """Whether the message was hidden when it was read."""

    @property
    def at(self) -> datetime:
        """Time at which the message was stored, in UTC."""
        return datetime.fromisoformat(self._at)

    @property
    def role(self) -> str:
        """The field `role` of the stored object; empty if the object has no role."""
        try:
            role: str = _decode_role(self._body).role
        except (msgspec.DecodeError, UnicodeDecodeError):
            role = decode_object(self._body).get("role", "")
        return role

    @property
    def content(self) -> Any:
        """The field `content` of the stored object; None if the object has no content."""
        try:
            return _decode_content(self._body).content
        except (msgspec.DecodeError, UnicodeDecodeError):
            return decode_object(self._body).get("content")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the stored object."""
        try:
            body: dict[str, Any] = _decode(self._body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return decode_object(self._body)
        return body

    def to_json(self) -> bytes:
        """Return the stored object as compact JSON, byte for byte as stored."""
        return bytes(self._body)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"message {self.seq} has no field {name!r}") from None

    def __getitem__(self, name: str) -> Any:
        # Decode the message at each access: callers must not see each other's changes to a list.
        return self.to_dict()[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field of the stored object, or `default` if the object lacks the field."""
        return self.to_dict().get(name, default)

    def keys(self) -> KeysView[str]:
        """Return the names of the stored fields."""
        return self.to_dict().keys()

    def values(self) -> ValuesView[Any]:
        """Return the values of the stored fields."""
        return self.to_dict().values()

    def items(self) -> ItemsView[str, Any]:
        """Return the names and values of the stored fields."""
        return self.to_dict().items()

    def __contains__(self, name: object) -> bool:
        return name in self.to_dict()

    def __iter__(self) -> Iterator[str]:
        return iter(self.to_dict())

    def __len__(self) -> int:
        return len(self.to_dict())

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self.seq == other.seq and bytes(self._body) == bytes(other._body)

    def __hash__(self) -> int:
        return hash((self.seq, bytes(self._body)))

    def __repr__(self) -> str:
        text = bytes(self._body).decode("utf-8", "replace")
        excerpt = text if len(text) <= 80 else text[:79] + "…"
        return f"Message({self.seq}{', hidden' if self.hidden else ''}, {excerpt})"


# A Struct cannot inherit from an abstract class.
Mapping.register(Message)


class Undo(Struct, frozen=True, omit_defaults=True):
    """The data needed to undo one operation."""

    number: int
    op: str
    newly_hidden: list[Span] = []
    """Seqs that were visible before the operation hid them."""
    appended: Span | None = None
    """Seqs that the operation appended, if it replaced messages."""
    shown: list[Span] = []
    """Seqs that were hidden before the operation showed them."""
    old_summary: str | None = None
    """The previous summary, if the operation changed it."""
    elsewhere: bool = False
    """Whether the other fields are stored only in the change record, to keep a State short."""


class Change(Struct, frozen=True, omit_defaults=True):
    """A numbered operation on visibility, summary or meta, with the values after the operation."""

    op: str
    number: int
    floor: int
    hidden: list[Span]
    newly_hidden: list[Span] = []
    appended: Span | None = None
    shown: list[Span] = []
    summary: str | None = None
    old_summary: str | None = None
    undoes: int | None = None
    meta: dict[str, Any] | None = None


class Archive(Struct, frozen=True):
    """An archive file with the start of a log.

    The first line of the file names the previous archive.
    """

    name: str
    first: int
    last: int


class Token(Struct, frozen=True, array_like=True):
    """A remembered idempotency key (`once`): seqs of its messages and a digest of their bytes."""

    token: str
    first: int
    count: int
    digest: str


class State(Struct, omit_defaults=True):
    """The state of a session at one point of its log. A log is read from its last State on."""

    format: int
    key: str
    uid: str
    generation: int
    created: str
    floor: int = 0
    hidden: list[Span] = []
    number: int = 0
    """Number of the newest change."""
    summary: str = ""
    meta: dict[str, Any] = {}
    undo: list[Undo] = []
    lost: list[Span] = []
    """Seqs of damaged messages."""
    void: list[Span] = []
    """Seqs of interrupted writes that were never acknowledged."""
    void_bytes: int = 0
    purged: list[Span] = []
    """Seqs that are missing without damage: purged, or not copied to a fork."""
    archive: Archive | None = None
    forked_from: str | None = None
    tokens: list[Token] = []


class Void(Struct, frozen=True, omit_defaults=True):
    """The statement that the preceding bytes and records of a log are invalid."""

    bytes: int
    """Number of bytes directly before this line that belong to no record."""
    seqs: list[Span] = []
    """Seqs of an interrupted write that was never acknowledged."""
    lost: list[Span] = []
    """Seqs that may have been acknowledged and are no longer readable."""
    changes: list[int] = []
    """Numbers of the changes in an interrupted write."""


class _ControlRecord(Struct, frozen=True, gc=False, kw_only=True, tag_field="kind"):
    seq: int
    at: str
    joined: bool = False
    part: Span | None = None


class StateRecord(_ControlRecord, frozen=True, gc=False, kw_only=True, tag="state"):
    """A log line with a State."""

    body: State


class ChangeRecord(_ControlRecord, frozen=True, gc=False, kw_only=True, tag="change"):
    """A log line with a Change."""

    body: Change


class VoidRecord(_ControlRecord, frozen=True, gc=False, kw_only=True, tag="void"):
    """A log line with a Void."""

    body: Void


class UnknownRecord(Struct, frozen=True):
    """An intact log line of a kind that this version does not know."""

    kind: str
    seq: int
    at: str
    joined: bool = False
    part: Span | None = None

    @property
    def optional(self) -> bool:
        """Whether a reader that does not know the kind may skip the record."""
        return self.kind.startswith("x-")


Record = Message | StateRecord | ChangeRecord | VoidRecord | UnknownRecord


def decode_object(payload: bytes | Raw) -> dict[str, Any]:
    """Return the JSON object in a stored payload."""
    try:
        body: dict[str, Any] = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Lone surrogates are stored as escapes, which only the standard library decodes.
        # Lone surrogates are rare, so `json` is imported here and not at start-up.
        from json import loads

        body = loads(bytes(payload))
    return body


def timestamp(moment: datetime) -> str:
    """Return a time in stored form: UTC with microseconds and `Z`."""
    # Use isoformat, because strftime omits the leading zeros of early years.
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class SessionInfo(Struct, frozen=True, kw_only=True):
    """Facts about a session that a store knows without reading all messages."""

    key: str
    uid: str
    """Identifies the session. A session created again under the same key has another uid."""
    created: datetime
    updated: datetime
    last_seq: int
    """Seq of the newest message; 0 for an empty session."""
    floor: int
    """Seq up to which all messages are hidden."""
    visible: int
    """Number of visible messages."""
    count: int
    """Number of all messages, including hidden and archived ones."""
    lost_spans: tuple[Span, ...] = ()
    """Ranges of the seqs of messages known to be lost to damage, in order."""
    damaged: int
    """Number of damaged lines found so far."""
    void_bytes: int
    """Number of bytes of interrupted writes in the log, none of them acknowledged."""
    archived: int
    """Seq of the last archived message; 0 if no message is archived."""
    generation: int
    """Grows when messages are moved or destroyed, for example by `compact` or `purge(before=)`."""
    bytes: int
    """Size of the live log, in bytes."""
    undoable: int
    """Number of operations that `undo` can undo."""
    summary: str
    meta: Mapping[str, Any]
    forked_from: str | None
    visible_spans: tuple[Span, ...] = ()
    """Ranges of the visible seqs, in order."""
    change: int = 0
    """Number of the newest change to visibility, summary or meta; never decreases for one uid."""

    @property
    def lost(self) -> int:
        """Number of messages known to be lost to damage."""
        return sum(last - first + 1 for first, last in self.lost_spans)


class UndoResult(Struct, frozen=True, kw_only=True):
    """Result of `undo`."""

    op: str
    """The undone operation: truncate, clear, hide, show, replace, checkpoint or summary."""
    shown: int
    """Number of messages that became visible."""
    hid: int
    """Number of messages that became hidden because the undone operation added or showed them."""
    summary_restored: bool


class CompactionResult(Struct, frozen=True, kw_only=True):
    """Result of `compact`."""

    archived: int
    """Number of messages moved into the archive."""
    bytes_before: int
    bytes_after: int


class TrashedSession(Struct, frozen=True, kw_only=True):
    """A deleted session in the trash, until it is restored or purged."""

    key: str
    uid: str
    """Identifies the session among all sessions that had the same key."""
    deleted: datetime
    count: int
    """Number of all messages, including hidden and archived ones."""


class PurgeResult(Struct, frozen=True, kw_only=True):
    """Result of `purge`."""

    messages: int
    """Number of purged messages."""
    first: int
    """Lowest purged seq; 0 if no message was purged."""
    last: int
    """Highest purged seq; 0 if no message was purged."""
    not_reached: tuple[str, ...]
    """Places that may still contain purged text, one sentence each: forks, the summary, copies."""


class Health(Struct, frozen=True, kw_only=True):
    """Health of a store."""

    ok: bool
    free_bytes: int | None
    """Free space on the disk of the store; None if unknown."""
    problems: tuple[str, ...]
    """One text per problem, with the steps that solve the problem."""
