"""The notes of a scope: all existing notes, and the notes in force. Pure.

A note is superseded by a later note that names its id. The older note is not changed, so it is in
force again when the later note is hidden. A fact is also superseded by a fact with the same subject
from a later turn.
"""

from bisect import insort
from collections.abc import Iterable
from functools import cached_property
from typing import Self

from msgspec.structs import replace

from stenolog.memory.note_records import Note, NoteRecord, batch_of, record_of, sort_key
from stenolog.memory.scopes import Scope
from stenolog.records import Message


class NoteState:
    """The notes of one scope, from the messages read so far. Immutable; see `with_messages`.

    Adding one message is cheap, regardless of the number of notes.
    """

    def __init__(self, scope: Scope) -> None:
        """Create the NoteState of a scope that has no notes."""
        self._scope = scope
        self._records: dict[str, NoteRecord] = {}
        self._newer: dict[str, tuple[str, ...]] = {}
        """Ids of the notes that supersede a note, by the id of the superseded note."""
        self._ordered: list[Note] = []
        """Notes to list, including superseded notes."""

    def __len__(self) -> int:
        return len(self._records)

    def with_messages(self, messages: Iterable[Message]) -> Self:
        """Return the notes after these additional messages."""
        records = [record for message in messages if (record := record_of(self._scope, message))]
        if not records:
            return self
        new_state = type(self)(self._scope)
        new_state._records = self._records.copy()
        new_state._newer = self._newer.copy()
        new_records = [record for record in records if new_state._add_record(record)]
        if self._ordered and len(new_records) == len(records):
            new_state._ordered = self._ordered.copy()
            for record in new_records:
                if record.listed:
                    insort(new_state._ordered, record.note, key=sort_key)
        else:
            listed_notes = (record.note for record in new_state._records.values() if record.listed)
            new_state._ordered = sorted(listed_notes, key=sort_key)
        return new_state

    def _add_record(self, record: NoteRecord) -> bool:
        """Add one record, and return whether its id is new.

        A later message replaces an earlier message of the same id, but not the record of a purge.
        """
        id = record.note.id
        known_record = self._records.get(id)
        if known_record is not None and known_record.purged and not record.purged:
            return False
        self._records[id] = record
        for older_id in dict.fromkeys(record.note.supersedes):
            if id not in (newer_ids := self._newer.get(older_id, ())):
                self._newer[older_id] = (*newer_ids, id)
        return known_record is None

    def find_record(self, id: str) -> NoteRecord | None:
        """Return the record of the note with this id, or None."""
        return self._records.get(id)

    def all_ids(self) -> Iterable[str]:
        """Return all ids, including those of purged notes."""
        return self._records.keys()

    @cached_property
    def notes(self) -> list[Note]:
        """All notes that are not purged, oldest first. Superseded notes name their successor."""
        last_mixed = self._last_mixed_seq
        notes = [
            self._with_successor(note) if note.id in self._newer else note for note in self._ordered
        ]
        if last_mixed:
            notes = [
                replace(note, mixed=True) if self._records[note.id].seq <= last_mixed else note
                for note in notes
            ]
        return _supersede_same_subject(notes)

    @property
    def _last_mixed_seq(self) -> int:
        """Last seq in the scope of this session that another session wrote, or 0.

        It is unknown which sessions wrote the notes up to this seq, and which notes these sessions
        were shown.
        """
        if self._scope.of == "sender":
            return 0
        own_sessions = ("", self._scope.who)
        other_seqs = (
            record.seq
            for record in self._records.values()
            # Consolidation stores the uid of the session; notes written by hand have no uid.
            if record.note.uid and record.note.session not in own_sessions
        )
        return max(other_seqs, default=0)

    @cached_property
    def in_force(self) -> dict[str, Note]:
        """Notes that are not superseded, forgotten or mixed, by id, oldest first."""
        return {
            # This condition equals `Note.in_force`, without a call for each note.
            note.id: note
            for note in self.notes
            if note.superseded is None and not note.forgotten and not note.mixed
        }

    def _with_successor(self, note: Note) -> Note:
        """Return the note with the id and time of the note that supersedes it, if any."""
        successor = self._successor(note.id)
        if successor is None:
            return note
        return replace(note, superseded=successor.at, superseded_by=successor.id)

    def _successor(self, id: str) -> Note | None:
        """Return the first visible note that supersedes a note, directly or indirectly."""
        ids = {id}
        level: Iterable[str] = self._newer.get(id, ())
        while level:
            level_records = [self._records[name] for name in level if name not in ids]
            visible_notes = [
                item.note for item in level_records if not item.note.forgotten and not item.purged
            ]
            if visible_notes:
                return min(visible_notes, key=lambda note: (note.at, note.id))
            ids.update(level)
            # A successor of a forgotten note also supersedes what the forgotten note replaced.
            level = [name for up in level for name in self._newer.get(up, ()) if name not in ids]
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
