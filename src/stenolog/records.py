"""The values everything else speaks of: the message, and the records of ours in a log.

`Message` is at once the public value and the decoded envelope of its line, so that reading a
thousand of them makes a thousand objects and not two thousand; the envelope's own fields have
private names, because the caller's object may use any name.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct

_decode = msgspec.json.Decoder().decode

FORMAT: Final = 1
"""The version of the log that this code writes."""

Span = tuple[int, int]
"""A run of seqs, both ends included."""


class _Role(Struct, gc=False):
    role: Any = UNSET


class _Content(Struct, gc=False):
    content: Any = UNSET


# The decoder skips all other fields, which takes a fraction of the time of decoding them.
_decode_role = msgspec.json.Decoder(_Role).decode
_decode_content = msgspec.json.Decoder(_Content).decode


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
    """One message as a store returns it: immutable, with its place in the session.

    Fields of the caller's object are attributes (`role`, `content`, …); `to_dict()` is a fresh
    copy of exactly what was given.
    """

    seq: int
    """Position in the session: 1, 2, 3 …, never reused."""
    _at: str
    _body: Raw
    _joined: bool = False
    _part: Span | None = None
    _once: str | None = None
    hidden: bool = False
    """Whether it was out of sight, as of the read that returned it."""

    @property
    def at(self) -> datetime:
        """When it was stored (UTC, to the microsecond)."""
        return datetime.fromisoformat(self._at)

    @property
    def role(self) -> str:
        """The caller's `role`."""
        try:
            role: Any = _decode_role(self._body).role
        except (msgspec.DecodeError, UnicodeDecodeError):
            role = UNSET
        found: str = self._field("role") if role is UNSET else role
        return found

    @property
    def content(self) -> Any:
        """The caller's `content`."""
        try:
            content = _decode_content(self._body).content
        except (msgspec.DecodeError, UnicodeDecodeError):
            content = UNSET
        return self._field("content") if content is UNSET else content

    def to_dict(self) -> dict[str, Any]:
        """The caller's object, as a fresh copy."""
        try:
            found: dict[str, Any] = _decode(self._body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return decode_object(self._body)
        return found

    def to_json(self) -> bytes:
        """The caller's object as it stands in the store: compact JSON."""
        return bytes(self._body)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._field(name)

    def _field(self, name: str) -> Any:
        # Decoded for each access: what the caller does with a list must not reach the next reader.
        try:
            return self.to_dict()[name]
        except KeyError:
            raise AttributeError(f"message {self.seq} has no field {name!r}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Message):
            return NotImplemented
        return self.seq == other.seq and bytes(self._body) == bytes(other._body)

    def __hash__(self) -> int:
        return hash((self.seq, bytes(self._body)))

    def __repr__(self) -> str:
        text = bytes(self._body).decode("utf-8", "replace")
        shown = text if len(text) <= 80 else text[:79] + "…"
        return f"Message({self.seq}{', hidden' if self.hidden else ''}, {shown})"


class Undo(Struct, frozen=True, omit_defaults=True):
    """What taking back one operation needs."""

    number: int
    op: str
    newly: list[Span] = []
    """The seqs that the operation hid and that were in sight before."""
    added: Span | None = None
    """The seqs that a replace appended."""
    was: str | None = None
    """The summary before, where the operation changed it."""
    elsewhere: bool = False
    """The rest is too long to be carried in each state: the change of this number has it."""


class Change(Struct, frozen=True, omit_defaults=True):
    """One operation on what is in sight, numbered, with the state that results from it."""

    op: str
    number: int
    floor: int
    hidden: list[Span]
    newly: list[Span] = []
    added: Span | None = None
    summary: str | None = None
    was: str | None = None
    undoes: int | None = None
    meta: dict[str, Any] | None = None


class Archive(Struct, frozen=True):
    """Where the start of a log went; the first line of that file names the one before it."""

    name: str
    first: int
    last: int


class Token(Struct, frozen=True, array_like=True):
    """A remembered `once` token: which messages it stands for, and a digest of their bytes."""

    token: str
    first: int
    count: int
    digest: str


class DeletedAs(Struct, frozen=True):
    """The key that a session has in the trash, which is not the one it will have outside."""

    key: str
    name: str
    """Of its file there: under any other name this means nothing."""


class State(Struct, omit_defaults=True):
    """A session as of one point of its log: opening starts from the last one."""

    format: int
    key: str
    uid: str
    generation: int
    created: str
    floor: int = 0
    hidden: list[Span] = []
    number: int = 0
    """The number of the newest change."""
    summary: str = ""
    meta: dict[str, Any] = {}
    undo: list[Undo] = []
    lost: list[Span] = []
    """Seqs whose message is damaged."""
    void: list[Span] = []
    """Seqs that stood in a write that was never finished, nor acknowledged."""
    void_bytes: int = 0
    purged: list[Span] = []
    """Seqs that are not here and are no damage: purged, or left out of a fork."""
    archive: Archive | None = None
    forked_from: str | None = None
    tokens: list[Token] = []
    deleted_as: DeletedAs | None = None
    """Only while it is restored under another key."""


class Void(Struct, frozen=True, omit_defaults=True):
    """Says which bytes and records before it do not count."""

    bytes: int
    """How many bytes directly before this line are not a record."""
    seqs: list[Span] = []
    """Seqs of an unfinished write: they were never acknowledged."""
    lost: list[Span] = []
    """Seqs that may have been acknowledged and cannot be read any more."""
    changes: list[int] = []
    """Numbers of changes in such a write."""


class _Control(Struct, frozen=True, gc=False, kw_only=True, tag_field="kind"):
    seq: int
    at: str
    joined: bool = False
    part: Span | None = None


class StateRecord(_Control, frozen=True, gc=False, kw_only=True, tag="state"):
    """A line that carries a State."""

    body: State


class ChangeRecord(_Control, frozen=True, gc=False, kw_only=True, tag="change"):
    """A line that carries a Change."""

    body: Change


class VoidRecord(_Control, frozen=True, gc=False, kw_only=True, tag="void"):
    """A line that carries a Void."""

    body: Void


class UnknownRecord(Struct, frozen=True):
    """An intact line of a kind that this version does not know."""

    kind: str
    seq: int
    at: str
    joined: bool = False
    part: Span | None = None

    @property
    def optional(self) -> bool:
        """Whether a reader that does not know the kind may pass over it."""
        return self.kind.startswith("x-")


Record = Message | StateRecord | ChangeRecord | VoidRecord | UnknownRecord


def decode_object(payload: bytes | Raw) -> dict[str, Any]:
    """The JSON object in a payload that was checked when it was written."""
    try:
        found: dict[str, Any] = _decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # A lone surrogate is written as an escape, which only the slower decoder takes; almost
        # nobody meets one, so nobody else waits for its import.
        from json import loads

        found = loads(bytes(payload))
    return found


def timestamp(moment: datetime) -> str:
    """The one way a time is written: UTC, microseconds, `Z`."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class SessionInfo(Struct, frozen=True, kw_only=True):
    """What is known of a session without reading all of it."""

    key: str
    uid: str
    """Which life of the key this is: deleted and created again, it has another."""
    created: datetime
    updated: datetime
    last_seq: int
    """The newest seq given out; 0 where there is no message yet."""
    floor: int
    visible: int
    """How many messages are in sight."""
    count: int
    """How many messages there are, hidden and archived ones included."""
    lost: int
    """How many messages damage has taken, as far as it was met."""
    damaged: int
    """How many damaged lines were met in what was read so far."""
    void_bytes: int
    """How many bytes of interrupted writes stand in the log; none of them was acknowledged."""
    archived: int
    """The last seq that lies in an archive; 0 where there is none."""
    generation: int
    bytes: int
    """The size of the live log."""
    undoable: int
    """How many operations `undo` could take back now."""
    summary: str
    meta: Mapping[str, Any]
    forked_from: str | None
    in_sight: tuple[Span, ...] = ()
    """The runs of seqs that `visible` counts, by seq: first and last of each."""
    change: int = 0
    """Number of the newest change to visibility, summary or meta; appends do not count.

    It only grows while the uid stays the same.
    """


class Undone(Struct, frozen=True, kw_only=True):
    """What `undo` took back."""

    op: str
    """truncate, clear, hide, replace, checkpoint or summary."""
    shown: int
    """How many messages came back into sight."""
    hid: int
    """How many messages that a replace had added went out of sight."""
    summary_restored: bool


class Compacted(Struct, frozen=True, kw_only=True):
    """What `compact` moved out of the live log."""

    archived: int
    """How many messages went into the archive; 0 where there was nothing to do."""
    bytes_before: int
    bytes_after: int


class Trashed(Struct, frozen=True, kw_only=True):
    """A deleted session: `restore` brings it back, `purge` does not."""

    key: str
    uid: str
    """Which life of the key it was."""
    deleted: datetime
    count: int
    """How many messages there are, hidden and archived ones included."""


class Purged(Struct, frozen=True, kw_only=True):
    """What `purge` deleted for good."""

    messages: int
    """How many messages are gone; 0 where there was nothing to do."""
    first: int
    """The lowest seq that is gone; 0 where there is none."""
    last: int
    """The highest seq that is gone; 0 where there is none."""
    not_reached: tuple[str, ...]
    """What may still tell of it, each as a sentence: forks, the summary, copies."""


class Health(Struct, frozen=True, kw_only=True):
    """Whether a store can be relied on right now."""

    ok: bool
    free_bytes: int | None
    """Room left where the store lives; None where that has no meaning."""
    problems: tuple[str, ...]
    """What is wrong or soon will be, each with what to do."""
