"""Cache of the notes of recently used scopes, so that only new messages are read.

Messages never change, so cached notes are valid until a message is hidden, restored or purged. The
session info of the store shows each of these changes, by any process. If a message was hidden,
restored or purged, the whole scope is read again. The cache is never used without checking the
store.
"""

import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.tokenizer import stems
from stenolog.errors import NoSuchSession
from stenolog.memory.note_records import Note, NoteState
from stenolog.memory.scopes import Scope
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import spans
from stenolog.stores.base import Store
from stenolog.stores.locks import ThreadLock

# --- word index -----------------------------------------------------------------------------------
# This index finds the notes that share words with a question. Each note is tokenized once.


MAX_NOTES_PER_WORD: Final = 2_000
"""Maximum number of notes per word. If more notes have the word, the newest are used."""


class WordIndex:
    """The stems of the notes of one scope. Notes are added on demand."""

    def __init__(self) -> None:
        self._mutex = ThreadLock()
        self._indexed_ids: set[str] = set()
        self._ids_by_stem: dict[str, dict[str, None]] = {}
        """Ids of the notes that contain a stem, by stem."""

    def weigh(self, question_stems: Iterable[str], notes: Mapping[str, Note]) -> dict[str, float]:
        """Return the total weight of the question's stems in each note, by note id.

        Rare stems weigh more. The result may include notes from earlier calls, not only `notes`.
        """
        weights: dict[str, float] = {}
        with self._mutex:
            for id in notes.keys() - self._indexed_ids:
                self._add_note(notes[id])
            for stem in question_stems:
                ids = list(self._ids_by_stem.get(stem, ()))
                weight = math.log(1 + len(self._indexed_ids) / (len(ids) + 0.5))
                for id in ids[-MAX_NOTES_PER_WORD:]:
                    weights[id] = weights.get(id, 0.0) + weight
        return weights

    def _add_note(self, note: Note) -> None:
        for stem in set(stems(f"{note.text}\n{note.about}\n{note.quote}")):
            self._ids_by_stem.setdefault(sys.intern(stem), {})[note.id] = None
        # The last step: if Ctrl-C interrupts this method, the next `weigh` adds the note again.
        self._indexed_ids.add(note.id)


# --- cache ----------------------------------------------------------------------------------------


MAX_SCOPES: Final = 32
MAX_NOTES: Final = 100_000
"""Limits of the cache over all scopes. The scope read last is always kept."""


class CachedNotes(Struct, frozen=True, kw_only=True):
    """The notes of a scope, and how much of its session in the notes store was read."""

    state: NoteState
    word_index: WordIndex
    uid: str = ""
    generation: int = 0
    message_count: int = 0
    """Number of messages read from the scope."""
    last_seq: int = 0
    """Last seq read from the scope."""
    visible_spans: Sequence[Span] = ()
    """Ranges of the visible seqs that were read."""

    def with_messages(self, messages: Sequence[Message]) -> "CachedNotes":
        """Return the notes after these additional messages."""
        if not messages:
            return self
        new_spans = ((message.seq, message.seq) for message in messages if not message.hidden)
        return replace(
            self,
            state=self.state.with_messages(messages),
            message_count=self.message_count + len(messages),
            last_seq=messages[-1].seq,
            visible_spans=spans.union(self.visible_spans, new_spans),
        )

    def is_current(self, info: SessionInfo) -> bool:
        """Whether new messages are the only change of the session since it was read."""
        return (
            (info.uid, info.generation) == (self.uid, self.generation)
            and info.count == self.message_count + info.last_seq - self.last_seq
            and spans.clipped(info.visible_spans, 1, self.last_seq) == list(self.visible_spans)
            # If a store omits `visible_spans`, a change cannot be ruled out.
            and spans.size(info.visible_spans) == info.visible
        )


class NoteCache:
    """The current notes of each scope of a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = ThreadLock()
        self._cached: OrderedDict[str, CachedNotes] = OrderedDict()

    def read_notes(self, scope: Scope) -> CachedNotes:
        """Return the notes of a scope, which may be empty. Raises the errors of the store."""
        key = scope.key
        with self._mutex:
            cached = self._cached.get(key)
        if cached is not None:
            refreshed, is_current = self._add_new_messages(cached, key)
            if is_current:
                return refreshed
        # Read the whole scope. If it changes during the read, the notes are not cached.
        with self._mutex:
            self._cached.pop(key, None)
        empty_notes = CachedNotes(state=NoteState(scope), word_index=WordIndex())
        try:
            info = self._store.info(key)
        except NoSuchSession:
            return empty_notes
        initial_notes = replace(empty_notes, uid=info.uid, generation=info.generation)
        if cached is not None and (cached.uid, cached.generation) == (info.uid, info.generation):
            # No message was purged, so the word index is still valid.
            initial_notes = replace(initial_notes, word_index=cached.word_index)
        return self._add_new_messages(initial_notes, key)[0]

    def _add_new_messages(self, cached: CachedNotes, key: str) -> tuple[CachedNotes, bool]:
        """Return `cached` with all newer messages, and whether the result is current.

        A current result is cached.
        """
        # Read the info after the messages: `is_current` allows for messages that arrive in between.
        notes = cached.with_messages(self._store.get_history(key, after=cached.last_seq, full=True))
        try:
            is_current = notes.is_current(self._store.info(key))
        except NoSuchSession:
            is_current = False
        if not is_current:
            return notes, False
        with self._mutex:
            self._cached[key] = notes
            self._cached.move_to_end(key)
            total = sum(len(other.state.records) for other in self._cached.values())
            while len(self._cached) > 1 and (len(self._cached) > MAX_SCOPES or total > MAX_NOTES):
                _, removed = self._cached.popitem(last=False)
                total -= len(removed.state.records)
        return notes, True
