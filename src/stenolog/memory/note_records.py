"""Notes as values, their stored form in messages, and the current notes of a scope. Pure.

A note is superseded by a later note that names its id. The older note is not changed, so it is in
force again when the later note is hidden. A fact is also superseded by a fact with the same subject
from a later turn.
"""

import os
from base64 import b32encode
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property
from hashlib import sha256
from typing import Any, Final, Literal, Self, cast, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

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


class NoteContent(Struct, frozen=True, kw_only=True):
    """The fields that a draft and a stored note share."""

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
    supersedes: tuple[str, ...] = ()
    """Ids of the notes that this note replaces."""


class Draft(NoteContent, frozen=True, kw_only=True):
    """A note that is not stored yet."""

    at: datetime | None = None
    """Time of the statement. [default: now]"""


class Note(NoteContent, frozen=True, kw_only=True):
    """A stored note with its origin, and whether the note is still in force."""

    id: str
    scope: Scope
    at: datetime
    """Time of the note, in UTC."""
    superseded: datetime | None = None
    """Time of the note that replaced this note, or None."""
    superseded_by: str = ""
    forgotten: bool = False

    @property
    def in_force(self) -> bool:
        """Whether the note is in force: neither superseded nor forgotten."""
        return self.superseded is None and not self.forgotten


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


def make_batch_name(once: str | None) -> str:
    """Return the prefix of the ids of a batch: derived from the idempotency key, or random."""
    seed = os.urandom(16) if once is None else once.encode("utf-8", "surrogatepass")
    name_bytes = sha256(seed).digest()[:_BATCH_NAME_BYTES]
    return b32encode(name_bytes).decode().rstrip("=").lower()


def make_batch_ids(batch: str, count: int) -> list[str]:
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
    return message


# --- from messages to notes ------------------------------------------------------------------


class NoteRecord(Struct, frozen=True):
    """A note as it is stored in one message."""

    seq: int
    note: Note
    """The note itself, regardless of notes that supersede it."""
    is_purged: bool
    is_listed: bool
    """Whether to list the note: not purged, and of a kind that this version knows."""


def record_of(scope: Scope, message: Message) -> NoteRecord | None:
    """Return the note that a message stores, or None if this version cannot read it as a note."""
    fields = message.to_dict()
    if fields.get("role") != ROLE:
        return None
    try:
        stored = msgspec.convert(fields, _StoredNote)
    except msgspec.ValidationError:
        return None
    copied_fields: dict[str, Any] = {name: getattr(stored, name) for name in _COPIED_FIELDS}
    note = Note(
        id=stored.id,
        scope=scope,
        at=message.at,
        kind=cast(Kind, stored.was or stored.kind),
        text=stored.content,
        forgotten=message.hidden or stored.forgotten,
        **copied_fields,
    )
    return NoteRecord(
        seq=message.seq,
        note=note,
        is_purged=stored.kind == PURGED_KIND,
        is_listed=stored.kind in get_args(Kind),
    )


def sort_key(note: Note) -> tuple[datetime, str, int]:
    """Return the sort key of notes: time, then position in the batch."""
    batch, _, number = note.id.partition("-")
    return note.at, batch, int(number) if number.isdecimal() else 0


# --- current notes --------------------------------------------------------------------------------


class NoteState:
    """The notes of one scope, from the messages read so far. Immutable; see `with_messages`."""

    def __init__(self, scope: Scope) -> None:
        """Create the NoteState of a scope that has no notes."""
        self._scope = scope
        self.records: dict[str, NoteRecord] = {}
        """The records of all notes by id, including purged notes."""
        self._superseding_ids: dict[str, tuple[str, ...]] = {}
        """Ids of the notes that supersede a note, by the id of the superseded note."""

    def with_messages(self, messages: Iterable[Message]) -> Self:
        """Return the state after these additional messages."""
        records = [record for message in messages if (record := record_of(self._scope, message))]
        if not records:
            return self
        new_state = type(self)(self._scope)
        new_state.records = self.records.copy()
        new_state._superseding_ids = self._superseding_ids.copy()
        for record in records:
            new_state._add_record(record)
        return new_state

    def _add_record(self, record: NoteRecord) -> None:
        """Add one record.

        A later message replaces an earlier message of the same id, but not the record of a purge.
        """
        id = record.note.id
        known_record = self.records.get(id)
        if known_record is not None and known_record.is_purged and not record.is_purged:
            return
        self.records[id] = record
        for older_id in dict.fromkeys(record.note.supersedes):
            if id not in (newer_ids := self._superseding_ids.get(older_id, ())):
                self._superseding_ids[older_id] = (*newer_ids, id)

    @cached_property
    def notes(self) -> list[Note]:
        """All notes that are not purged, oldest first. Superseded notes name their successor."""
        listed_notes = (record.note for record in self.records.values() if record.is_listed)
        notes = [
            replace(note, superseded=successor.at, superseded_by=successor.id)
            if note.id in self._superseding_ids
            and (successor := self._find_successor(note.id)) is not None
            else note
            for note in sorted(listed_notes, key=sort_key)
        ]
        return _supersede_same_subject(notes)

    @cached_property
    def in_force(self) -> dict[str, Note]:
        """The notes in force (see `Note.in_force`), by id, oldest first."""
        return {
            # This condition equals `Note.in_force`, without a call for each note.
            note.id: note
            for note in self.notes
            if note.superseded is None and not note.forgotten
        }

    def _find_successor(self, id: str) -> Note | None:
        """Return the first visible note that supersedes a note, directly or indirectly."""
        newer_ids: Iterable[str] = self._superseding_ids.get(id, ())
        seen_ids = {id}
        while newer_ids:
            records = [self.records[newer] for newer in newer_ids if newer not in seen_ids]
            visible_notes = [
                record.note
                for record in records
                if not record.note.forgotten and not record.is_purged
            ]
            if visible_notes:
                return min(visible_notes, key=lambda note: (note.at, note.id))
            seen_ids.update(newer_ids)
            # A successor of a forgotten note also supersedes what the forgotten note replaced.
            newer_ids = [
                newer
                for forgotten_id in newer_ids
                for newer in self._superseding_ids.get(forgotten_id, ())
                if newer not in seen_ids
            ]
        return None


def _supersede_same_subject(notes: list[Note]) -> list[Note]:
    """Mark all facts with the same subject as superseded, except the facts of the newest turn.

    A fact names the notes that it supersedes, but two concurrent sessions do not know each other's
    facts.
    """
    newest = {note.about: note for note in notes if _is_learned_fact(note)}
    return [
        replace(note, superseded=newest[note.about].at, superseded_by=newest[note.about].id)
        if _is_learned_fact(note) and batch_of(newest[note.about].id) != batch_of(note.id)
        else note
        for note in notes
    ]


def _is_learned_fact(note: Note) -> bool:
    return bool(note.about and note.session) and note.kind == "core" and note.in_force


# --- purging a note --------------------------------------------------------------------------


class PurgePlan(Struct, frozen=True):
    """The steps to purge one note. A store can purge only the first messages of a session."""

    new_messages: Sequence[dict[str, Any]]
    """Messages to append first: copies of the earlier messages, and the record of the purge."""
    times: Sequence[datetime]
    """Times of the messages to append."""
    before_seq: int
    """Purge all messages below this seq; 0 if no message is left to purge."""
    note: Note
    """The note before the purge; without text if the note was purged already."""


def plan_purge(
    scope: Scope, messages: Sequence[Message], id: str, *, now: datetime
) -> PurgePlan | None:
    """Plan the purge of a note, or the rest of an interrupted purge.

    Returns None if the scope has no such note.
    """
    records = [record_of(scope, message) for message in messages]
    records_of_note = [record for record in records if record is not None and record.note.id == id]
    if not records_of_note:
        return None
    records_with_text = [record for record in records_of_note if not record.is_purged]
    record = (records_with_text or records_of_note)[-1]
    note = replace(record.note, forgotten=True)
    if not records_with_text:
        return PurgePlan((), (), 0, note)
    if records_of_note[-1].is_purged:
        return PurgePlan((), (), record.seq + 1, note)
    # Keep earlier messages, except those whose note is purged or stored again in a later message.
    last_seq_by_id = {other.note.id: other.seq for other in records if other is not None}
    del last_seq_by_id[id]
    kept_messages = [
        message
        for message, other in zip(messages, records, strict=True)
        if message.seq < record.seq
        and (other is None or last_seq_by_id.get(other.note.id) == message.seq)
    ]
    # A hidden message becomes a forgotten note.
    copies = [
        message.to_dict() | ({"forgotten": True} if message.hidden else {})
        for message in kept_messages
    ]
    purge_record: dict[str, Any] = {"role": ROLE, "kind": PURGED_KIND, "id": id, "was": note.kind}
    if note.supersedes:
        # The notes that the purged note replaced must not come into force again.
        purge_record["supersedes"] = list(note.supersedes)
    times = [*(message.at for message in kept_messages), now]
    return PurgePlan([*copies, purge_record], times, record.seq + 1, note)
