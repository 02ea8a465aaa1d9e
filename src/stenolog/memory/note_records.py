"""Notes as values, and their conversion to and from the messages of a store. Pure."""

import os
from base64 import b32encode
from collections.abc import Sequence
from datetime import datetime
from hashlib import sha256
from typing import Any, Final, Literal, cast, get_args

import msgspec
from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.memory.scopes import Scope
from stenolog.records import Message

Kind = Literal["daily", "core"]
"""Kind of a note. `daily`: an event. `core`: a fact about the user."""

ROLE: Final = "note"
PURGED_KIND: Final = "purged"
"""Kind of the record that replaces a purged note."""
_BATCH_NAME_BYTES: Final = 7
"""Length of a batch name in bytes, enough for unique names in a scope."""


class Draft(Struct, frozen=True, kw_only=True):
    """A note that is not stored yet."""

    kind: Kind
    text: str
    about: str = ""
    """Subject of a core fact, such as `diet`."""
    quote: str = ""
    """The user's exact words."""
    session: str = ""
    """Key of the session that the note comes from; empty for a note written by hand."""
    uid: str = ""
    """Uid of the session that the note comes from."""
    seqs: tuple[int, ...] = ()
    """Seqs of the messages that the note comes from."""
    confidence: float = 1.0
    supersedes: tuple[str, ...] = ()
    """Ids of the notes that this note replaces."""
    at: datetime | None = None
    """Time of the statement. [default: now]"""


class Note(Struct, frozen=True, kw_only=True):
    """A stored note with its origin, and whether the note is still in force."""

    id: str
    scope: Scope
    at: datetime
    """Time of the note, in UTC."""
    kind: Kind
    text: str
    about: str = ""
    quote: str = ""
    session: str = ""
    """Key of the session that the note comes from; empty for a note written by hand."""
    uid: str = ""
    seqs: tuple[int, ...] = ()
    confidence: float = 1.0
    supersedes: tuple[str, ...] = ()
    superseded: datetime | None = None
    """Time of the note that replaced this note, or None."""
    superseded_by: str = ""
    forgotten: bool = False
    mixed: bool = False
    """Whether several sessions wrote to the scope (decision 0012). Mixed notes are not recalled."""

    @property
    def in_force(self) -> bool:
        """Whether the note is in force: not superseded, forgotten or mixed."""
        return self.superseded is None and not self.forgotten and not self.mixed


_COPIED_FIELDS: Final = ("about", "quote", "session", "uid", "seqs", "supersedes")
"""Fields with the same name in a draft, in the stored message and in a note."""


class _StoredNote(Struct):
    """A note in its stored form.

    `kind` may be any string, because later versions may add kinds.
    """

    id: str
    kind: str
    content: str = ""
    about: str = ""
    quote: str = ""
    session: str = ""
    uid: str = ""
    seqs: tuple[int, ...] = ()
    confidence: float = 1.0
    supersedes: tuple[str, ...] = ()
    forgotten: bool = False
    was: str = ""
    """Former kind of a purged note."""


# --- from drafts to messages -----------------------------------------------------------------


def check_drafts(drafts: Sequence[Draft]) -> None:
    """Raise UsageError unless every draft can be stored as a note."""
    for draft in drafts:
        if draft.kind not in get_args(Kind):
            raise UsageError(f"kind must be one of {', '.join(get_args(Kind))}, not {draft.kind!r}")
        if not draft.text.strip():
            raise UsageError("the text of a note must not be empty")


def batch_name(once: str | None) -> str:
    """Return the prefix of the ids of a batch: derived from the idempotency key, or random."""
    random = os.urandom(_BATCH_NAME_BYTES)
    raw = random if once is None else sha256(once.encode("utf-8", "surrogatepass")).digest()
    return b32encode(raw[:_BATCH_NAME_BYTES]).decode().rstrip("=").lower()


def ids_in_batch(batch: str, count: int) -> list[str]:
    """Return the ids of the notes of one batch."""
    return [batch] if count == 1 else [f"{batch}-{number}" for number in range(1, count + 1)]


def batch_of(id: str) -> str:
    """Return the name of the batch that a note was added in."""
    return id.partition("-")[0]


def message_of(draft: Draft, id: str) -> dict[str, Any]:
    """Return the message that stores a note. Empty fields are omitted."""
    message: dict[str, Any] = {"role": ROLE, "kind": draft.kind, "id": id, "content": draft.text}
    for name in _COPIED_FIELDS:
        if value := getattr(draft, name):
            message[name] = list(value) if isinstance(value, tuple) else value
    return message if draft.confidence == 1.0 else {**message, "confidence": draft.confidence}


# --- from messages to notes ------------------------------------------------------------------


class NoteRecord(Struct, frozen=True):
    """A note as it is stored in one message."""

    seq: int
    note: Note
    """The note itself, regardless of notes that supersede it."""
    purged: bool
    listed: bool
    """Whether to list the note: not purged, and of a kind that this version knows."""


def record_of(scope: Scope, message: Message) -> NoteRecord | None:
    """Return the note that a message stores, or None if the message is not a note."""
    stored = _parse_stored(message)
    if stored is None:
        return None
    is_forgotten = message.hidden or stored.forgotten
    return NoteRecord(
        seq=message.seq,
        note=_make_note(scope, message, stored, forgotten=is_forgotten),
        purged=stored.kind == PURGED_KIND,
        listed=stored.kind in get_args(Kind),
    )


def sort_key(note: Note) -> tuple[datetime, str, int]:
    """Return the sort key of notes: time, then position in the batch."""
    batch, _, number = note.id.partition("-")
    return note.at, batch, int(number) if number.isdecimal() else 0


def _make_note(scope: Scope, message: Message, stored: _StoredNote, *, forgotten: bool) -> Note:
    copied_fields: dict[str, Any] = {name: getattr(stored, name) for name in _COPIED_FIELDS}
    return Note(
        id=stored.id,
        scope=scope,
        at=message.at,
        kind=cast(Kind, stored.was or stored.kind),
        text=stored.content,
        confidence=stored.confidence,
        forgotten=forgotten,
        **copied_fields,
    )


def _parse_stored(message: Message) -> _StoredNote | None:
    """Return the stored note of a message, or None if this version cannot read it as a note."""
    fields = message.to_dict()
    if fields.get("role") != ROLE:
        return None
    try:
        return msgspec.convert(fields, _StoredNote)
    except msgspec.ValidationError:
        return None


# --- purging a note --------------------------------------------------------------------------


class PurgePlan(Struct, frozen=True):
    """Steps that purge one note, though a store can purge only the first messages of a session."""

    append: Sequence[dict[str, Any]]
    """Messages to append first: copies of the earlier messages, and the record of the purge."""
    at: Sequence[datetime]
    """Times of the messages to append."""
    before: int
    """Purge all messages below this seq; 0 if no message is left to purge."""
    note: Note
    """The note before the purge; without text if the note was purged already."""


def plan_purge(
    scope: Scope, messages: Sequence[Message], id: str, *, now: datetime
) -> PurgePlan | None:
    """Plan the purge of a note, or the rest of an interrupted purge.

    Return None if the scope has no such note.
    """
    stored = [(message, _parse_stored(message)) for message in messages]
    records_of_note = [
        (message, record) for message, record in stored if record is not None and record.id == id
    ]
    texts = [(message, record) for message, record in records_of_note if record.kind != PURGED_KIND]
    if not records_of_note:
        return None
    message, record = (texts or records_of_note)[-1]
    note = _make_note(scope, message, record, forgotten=True)
    if not texts:
        return PurgePlan((), (), 0, note)
    if records_of_note[-1][1].kind == PURGED_KIND:
        return PurgePlan((), (), message.seq + 1, note)
    kept_messages = _messages_to_keep(stored, id, upto=message.seq)
    return PurgePlan(
        [*map(_copy_message, kept_messages), _purge_record(record)],
        [*(message.at for message in kept_messages), now],
        message.seq + 1,
        note,
    )


def _purge_record(purged: _StoredNote) -> dict[str, Any]:
    """Return the record that replaces a purged note.

    The record keeps `supersedes`, so that the notes that the purged note replaced do not come into
    force again.
    """
    record = {"role": ROLE, "kind": PURGED_KIND, "id": purged.id, "was": purged.kind}
    return {**record, "supersedes": list(purged.supersedes)} if purged.supersedes else record


def _messages_to_keep(
    stored: Sequence[tuple[Message, _StoredNote | None]], id: str, *, upto: int
) -> list[Message]:
    """Return the messages up to the seq `upto` that a purge must keep.

    Leaves out the purged note, and each message whose note is stored again in a later message.
    """
    last_seq_by_id = {note.id: message.seq for message, note in stored if note is not None}
    return [
        message
        for message, note in stored
        if message.seq <= upto
        and (note is None or (note.id != id and last_seq_by_id[note.id] == message.seq))
    ]


def _copy_message(message: Message) -> dict[str, Any]:
    """Return a copy of a message. A hidden message becomes a forgotten note."""
    fields = message.to_dict()
    return {**fields, "forgotten": True} if message.hidden else fields
