"""What a scope has noted, as its messages tell: which notes there are, and which are in force.

A note is superseded by a later one that names its id. Nothing of the older one is touched, so that
it is in force again as soon as the later one is out of sight. The same holds for two facts about
the same that were learnt in two turns. All of it is pure.
"""

from bisect import insort
from collections.abc import Iterable
from functools import cached_property
from typing import Self

from msgspec.structs import replace

from stenolog.memory.note_records import Note, Standing, batch_of, in_order, standing_of
from stenolog.memory.scopes import Scope
from stenolog.records import Message


class Noted:
    """The notes of one scope after some of its messages. It never changes: `after` makes another.

    To take in one more message costs next to nothing, however many there were before.
    """

    def __init__(self, scope: Scope) -> None:
        """A scope without notes."""
        self._scope = scope
        self._standing: dict[str, Standing] = {}
        self._newer: dict[str, tuple[str, ...]] = {}
        """By id, the notes that name it as one whose place they take."""
        self._ordered: list[Note] = []
        """Those to be listed, as if none had taken the place of another."""

    def __len__(self) -> int:
        return len(self._standing)

    def after(self, messages: Iterable[Message]) -> Self:
        """What there is after some more messages."""
        found = [one for message in messages if (one := standing_of(self._scope, message))]
        if not found:
            return self
        grown = type(self)(self._scope)
        grown._standing = self._standing.copy()
        grown._newer = self._newer.copy()
        new = [one for one in found if grown._take(one)]
        if self._ordered and len(new) == len(found):
            grown._ordered = self._ordered.copy()
            for one in new:
                if one.listed:
                    insort(grown._ordered, one.note, key=in_order)
        else:
            listed = (one.note for one in grown._standing.values() if one.listed)
            grown._ordered = sorted(listed, key=in_order)
        return grown

    def _take(self, one: Standing) -> bool:
        """Whether it is the first of its id; else the later one stands, but a purge for good."""
        id = one.note.id
        before = self._standing.get(id)
        if before is not None and before.purged and not one.purged:
            return False
        self._standing[id] = one
        for older in dict.fromkeys(one.note.supersedes):
            if id not in (known := self._newer.get(older, ())):
                self._newer[older] = (*known, id)
        return before is None

    def standing(self, id: str) -> Standing | None:
        """What stands for this id."""
        return self._standing.get(id)

    def ids(self) -> Iterable[str]:
        """Every id, those of purged notes too."""
        return self._standing.keys()

    @cached_property
    def notes(self) -> list[Note]:
        """Every note that is not purged, by the time it was made, with what became of it."""
        upto = self._mixed_upto
        found = [self._seen(note) if note.id in self._newer else note for note in self._ordered]
        if upto:
            found = [
                replace(note, mixed=True) if self._standing[note.id].seq <= upto else note
                for note in found
            ]
        return _agreed(found)

    @property
    def _mixed_upto(self) -> int:
        """The seq of the last note that another session wrote into the scope of this one, or 0.

        Who wrote the notes before it, and what they were told of each other's, is not known.
        """
        if self._scope.of == "sender":
            return 0
        own = ("", self._scope.who)
        others = (
            one.seq
            for one in self._standing.values()
            # Consolidation names the life of the session; notes written by hand do not.
            if one.note.uid and one.note.session not in own
        )
        return max(others, default=0)

    @cached_property
    def in_force(self) -> dict[str, Note]:
        """Those that are neither superseded nor forgotten nor mixed, in the same order."""
        return {
            # As `Note.in_force`, without a call for each of thousands.
            note.id: note
            for note in self.notes
            if note.superseded is None and not note.forgotten and not note.mixed
        }

    def _seen(self, note: Note) -> Note:
        """The note with the one that has taken its place."""
        newest = self._successor(note.id)
        if newest is None:
            return note
        return replace(note, superseded=newest.at, superseded_by=newest.id)

    def _successor(self, id: str) -> Note | None:
        """The first note in sight that took the place of this one, or of one that did."""
        seen = {id}
        level: Iterable[str] = self._newer.get(id, ())
        while level:
            here = [self._standing[name] for name in level if name not in seen]
            alive = [one.note for one in here if not one.note.forgotten and not one.purged]
            if alive:
                return min(alive, key=lambda note: (note.at, note.id))
            seen.update(level)
            # What took the place of a forgotten one has taken that of all before it.
            level = [name for up in level for name in self._newer.get(up, ()) if name not in seen]
        return None


def _agreed(notes: list[Note]) -> list[Note]:
    """The same, where of all that was learnt about one thing only the newest turn's holds.

    A fact names those whose place it takes; two sessions at once do not know of each other's.
    """
    newest = {note.about: note for note in notes if _is_learnt(note)}
    return [
        replace(note, superseded=newest[note.about].at, superseded_by=newest[note.about].id)
        if _is_learnt(note) and batch_of(newest[note.about].id) != batch_of(note.id)
        else note
        for note in notes
    ]


def _is_learnt(note: Note) -> bool:
    return bool(note.about and note.session) and note.kind == "core" and note.in_force
