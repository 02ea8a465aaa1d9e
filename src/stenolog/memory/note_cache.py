"""Cache of the notes of recently used scopes, so that only new messages are read.

Messages never change, so cached notes are valid until a message is hidden, restored or purged. The
session info of the store shows each of these, in any process; then the scope is read again. The
cache is never used without checking the store.
"""

import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.stemming import stems
from stenolog.errors import NoSuchSession
from stenolog.memory.note_records import Note
from stenolog.memory.note_state import NoteState
from stenolog.memory.scopes import Scope
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import spans
from stenolog.stores.base import Store
from stenolog.stores.locks import ThreadLock

# --- word index -----------------------------------------------------------------------------------
# Finds the notes that share words with a question. Each note is tokenized once.


MOST_EACH: Final = 2_000
"""Maximum number of notes per word that are used; of more notes, the last ones."""


class WordIndex:
    """The stems of the notes of one scope. Notes are added on demand."""

    def __init__(self) -> None:
        self._mutex = ThreadLock()
        self._known: set[str] = set()
        self._having: dict[str, list[str]] = {}
        """By stem: ids of the notes that have it."""
        self._unfinished: Note | None = None
        """A note that KeyboardInterrupt may have left with a part of its stems."""

    def shared(self, wanted: Iterable[str], notes: Mapping[str, Note]) -> dict[str, float]:
        """Return the total weight of the wanted stems in each note, by id.

        Rare stems weigh more. The result may include notes from earlier calls.
        """
        worth: dict[str, float] = {}
        with self._mutex:
            if self._unfinished is not None:
                self._take_in(self._unfinished)
            for id in notes.keys() - self._known:
                self._take_in(notes[id])
            for word in wanted:
                having = self._having.get(word, [])
                weight = math.log(1 + len(self._known) / (len(having) + 0.5))
                for id in having[-MOST_EACH:]:
                    worth[id] = worth.get(id, 0.0) + weight
        return worth

    def _take_in(self, note: Note) -> None:
        """Add a note. After an interruption this is repeated before another note is added."""
        self._unfinished = note
        for word in set(stems(f"{note.text}\n{note.about}\n{note.quote}")):
            having = self._having.setdefault(sys.intern(word), [])
            if having[-1:] != [note.id]:  # the interrupted attempt did not get here
                having.append(note.id)
        self._known.add(note.id)
        self._unfinished = None


# --- cache ----------------------------------------------------------------------------------------


MOST_SCOPES: Final = 32
MOST_NOTES: Final = 100_000
"""Limits of the cache over all scopes. The scope read last is always kept."""


class CachedNotes(Struct, frozen=True, kw_only=True):
    """The notes of a scope, and the state of the session that they were read from."""

    noted: NoteState
    words: WordIndex
    uid: str = ""
    generation: int = 0
    count: int = 0
    """Number of messages read."""
    last: int = 0
    """Last seq read."""
    sight: Sequence[Span] = ()
    """Seqs of the visible messages among them."""

    def after(self, messages: Sequence[Message]) -> "CachedNotes":
        """Return the state after additional messages."""
        if not messages:
            return self
        seen = ((message.seq, message.seq) for message in messages if not message.hidden)
        return replace(
            self,
            noted=self.noted.after(messages),
            count=self.count + len(messages),
            last=messages[-1].seq,
            sight=spans.union(self.sight, seen),
        )

    def is_of(self, info: SessionInfo) -> bool:
        """Whether a session has not changed since it was read, except for new messages."""
        return (
            (info.uid, info.generation) == (self.uid, self.generation)
            and info.count == self.count + info.last_seq - self.last
            and spans.clipped(info.in_sight, 1, self.last) == list(self.sight)
            # A store may omit `in_sight`.
            and spans.size(info.in_sight) == info.visible
        )


class NoteCache:
    """The current notes of each scope of a store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = ThreadLock()
        self._kept: OrderedDict[str, CachedNotes] = OrderedDict()

    def read(self, scope: Scope) -> CachedNotes:
        """Return the notes of a scope, which may be empty. Raises the errors of the store."""
        key = scope.key
        with self._mutex:
            kept = self._kept.get(key)
        if kept is not None:
            # First new messages, then the session info, so that both are newer than the call.
            now = kept.after(self._store.get_history(key, after=kept.last, full=True))
            info = self._info(key)
            if info is not None and now.is_of(info):
                self._keep(key, now)
                return now
        return self._read_anew(scope, kept)

    def _read_anew(self, scope: Scope, known: CachedNotes | None) -> CachedNotes:
        key = scope.key
        before = self._info(key)
        if before is None:
            self._drop(key)
            return CachedNotes(noted=NoteState(scope), words=WordIndex())
        uid, generation = before.uid, before.generation
        # Without a purge, the stems of the notes are the same.
        same = known is not None and (known.uid, known.generation) == (uid, generation)
        words = known.words if known is not None and same else WordIndex()
        empty = CachedNotes(noted=NoteState(scope), words=words, uid=uid, generation=generation)
        now = empty.after(self._store.get_history(key, full=True))
        info = self._info(key)
        if info is not None and now.is_of(info):
            self._keep(key, now)
        else:
            # Changed during the read: valid for that moment, but not as a base for later reads.
            self._drop(key)
        return now

    def _info(self, key: str) -> SessionInfo | None:
        try:
            return self._store.info(key)
        except NoSuchSession:
            return None

    def _keep(self, key: str, now: CachedNotes) -> None:
        with self._mutex:
            self._kept[key] = now
            self._kept.move_to_end(key)
            most = sum(len(one.noted) for one in self._kept.values())
            while len(self._kept) > 1 and (len(self._kept) > MOST_SCOPES or most > MOST_NOTES):
                _, gone = self._kept.popitem(last=False)
                most -= len(gone.noted)

    def _drop(self, key: str) -> None:
        with self._mutex:
            self._kept.pop(key, None)
