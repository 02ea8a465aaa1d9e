"""Which notes share words with a question: the words of each note are looked for once."""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Final

from stenolog.catalog.stemming import stems
from stenolog.memory.note_records import Note
from stenolog.stores.locks import ThreadLock

MOST_EACH: Final = 2_000
"""So many notes with a word are looked at; of a commoner one, those that came last."""


class WordIndex:
    """The words of the notes of one scope, in their common form. It grows as it is asked."""

    def __init__(self) -> None:
        self._mutex = ThreadLock()
        self._known: set[str] = set()
        self._having: dict[str, list[str]] = {}
        """By word, the ids of the notes that have it."""

    def shared(self, wanted: Iterable[str], notes: Mapping[str, Note]) -> dict[str, float]:
        """How much the words tell that a note shares with the wanted ones, by id.

        The rarer a word, the more. Notes that it knows from before are among them.
        """
        worth: dict[str, float] = {}
        with self._mutex:
            for id in notes.keys() - self._known:
                self._take_in(notes[id])
            for word in wanted:
                having = self._having.get(word, [])
                weight = math.log(1 + len(self._known) / (len(having) + 0.5))
                for id in having[-MOST_EACH:]:
                    worth[id] = worth.get(id, 0.0) + weight
        return worth

    def _take_in(self, note: Note) -> None:
        for word in set(stems(f"{note.text}\n{note.about}\n{note.quote}")):
            self._having.setdefault(sys.intern(word), []).append(note.id)
        self._known.add(note.id)
