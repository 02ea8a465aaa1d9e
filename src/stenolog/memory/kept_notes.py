"""The notes of the scopes that were read last, kept so that only what is new is read again.

Messages never change, so what was read stays true until something is hidden, brought back or
purged. What the store tells of the session shows each of these, whichever process did it; then all
of it is read again. Nothing is believed without a look at the store.
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
from stenolog.memory.noted import Noted
from stenolog.memory.scopes import Scope
from stenolog.records import Message, SessionInfo, Span
from stenolog.stores import spans
from stenolog.stores.base import Store
from stenolog.stores.locks import ThreadLock

# --- word index -----------------------------------------------------------------------------------
# Which notes share words with a question: the words of each note are looked for once.


MOST_EACH: Final = 2_000
"""So many notes with a word are looked at; of a commoner one, those that came last."""


class WordIndex:
    """The words of the notes of one scope, in their common form. It grows as it is asked."""

    def __init__(self) -> None:
        self._mutex = ThreadLock()
        self._known: set[str] = set()
        self._having: dict[str, list[str]] = {}
        """By word, the ids of the notes that have it."""
        self._unfinished: Note | None = None
        """A note that Ctrl-C may have left without some of its words."""

    def shared(self, wanted: Iterable[str], notes: Mapping[str, Note]) -> dict[str, float]:
        """How much the words tell that a note shares with the wanted ones, by id.

        The rarer a word, the more. Notes that it knows from before are among them.
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


# --- kept notes -----------------------------------------------------------------------------------


MOST_SCOPES: Final = 32
MOST_NOTES: Final = 100_000
"""How much is kept, in all scopes together; what was read last always is."""


class Kept(Struct, frozen=True, kw_only=True):
    """The notes of a scope, and what they were read from."""

    noted: Noted
    words: WordIndex
    uid: str = ""
    generation: int = 0
    count: int = 0
    """How many messages were read."""
    last: int = 0
    """The seq of the last of them."""
    sight: Sequence[Span] = ()
    """Which of them were visible."""

    def after(self, messages: Sequence[Message]) -> "Kept":
        """The same with the messages that follow."""
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
        """Whether a session is still as it was read, but for what was added since."""
        return (
            (info.uid, info.generation) == (self.uid, self.generation)
            and info.count == self.count + info.last_seq - self.last
            and spans.clipped(info.in_sight, 1, self.last) == list(self.sight)
            # Not every store has to tell what is in sight.
            and spans.size(info.in_sight) == info.visible
        )


class KeptNotes:
    """The notes of each scope of a store, as they are now. May be used by several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._mutex = ThreadLock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def read(self, scope: Scope) -> Kept:
        """The notes of a scope; none where it never had any. Raises what the store raises."""
        key = scope.key
        with self._mutex:
            kept = self._kept.get(key)
        if kept is not None:
            # What is new first, and then how all of it stands: so neither is older than the call.
            now = kept.after(self._store.get_history(key, after=kept.last, full=True))
            info = self._info(key)
            if info is not None and now.is_of(info):
                self._keep(key, now)
                return now
        return self._read_anew(scope, kept)

    def _read_anew(self, scope: Scope, known: Kept | None) -> Kept:
        key = scope.key
        before = self._info(key)
        if before is None:
            self._drop(key)
            return Kept(noted=Noted(scope), words=WordIndex())
        uid, generation = before.uid, before.generation
        # Where nothing can have been purged, the words of the notes are the same.
        same = known is not None and (known.uid, known.generation) == (uid, generation)
        words = known.words if known is not None and same else WordIndex()
        empty = Kept(noted=Noted(scope), words=words, uid=uid, generation=generation)
        now = empty.after(self._store.get_history(key, full=True))
        info = self._info(key)
        if info is not None and now.is_of(info):
            self._keep(key, now)
        else:
            # Changed while it was read: true of that moment, and nothing to go on from.
            self._drop(key)
        return now

    def _info(self, key: str) -> SessionInfo | None:
        try:
            return self._store.info(key)
        except NoSuchSession:
            return None

    def _keep(self, key: str, now: Kept) -> None:
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
