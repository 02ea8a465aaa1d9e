"""Notes in a store: added, listed, searched, forgotten and brought back, scope by scope.

Each scope is a session of the store, each note a message of it. To forget a note is to hide its
message; to purge it is to carry the notes before it forward, and to purge what lies below.
"""

import builtins
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog.query import parse
from stenolog.errors import (
    InvalidKey,
    NoSuchNote,
    NoSuchSession,
    NothingToUndo,
    OnceConflict,
    UsageError,
)
from stenolog.memory.note_records import (
    Draft,
    Kind,
    Note,
    batch_name,
    batch_of,
    check_drafts,
    ids_in,
    message_of,
    notes_of,
    plan_purge,
    standings,
)
from stenolog.memory.scopes import Scope, agent_prefix, scope_of_key
from stenolog.memory.searching import has_all
from stenolog.records import Undone
from stenolog.stores.base import Store

__all__ = ["Draft", "Kind", "Note", "Notes", "PurgedNote"]

_TTL: Final = 60.0
"""How long one who forgets may take before another one is let in."""


class PurgedNote(Struct, frozen=True, kw_only=True):
    """What the purge of a note deleted for good."""

    note: Note
    """The note without its text."""
    not_reached: tuple[str, ...]
    """What may still tell of it, each as a sentence."""


class Notes:
    """The notes of all scopes in one store. Every call names its scope and sees no other.

    A list costs what the scope has ever noted, and so do get, search and forget.
    """

    def __init__(self, store: Store) -> None:
        """Keep them in this store, opened in the namespace `notes`; who opened it closes it."""
        self._store = store

    @property
    def store(self) -> Store:
        """Where they are."""
        return self._store

    def add(
        self, scope: Scope, drafts: Sequence[Draft], *, once: str | None = None
    ) -> builtins.list[Note]:
        """Add them in one batch, whole or not at all; the notes that they are now.

        With a token that the scope has, nothing is added, whatever the drafts say: what was added
        the first time is returned, but for what was purged since. Raises UsageError for a draft
        without text, and what the store raises.
        """
        check_drafts(drafts)
        if not drafts:
            return []
        batch = batch_name(once)
        if once is not None and (known := self._carried(scope, batch)) is not None:
            return known
        ids = ids_in(batch, len(drafts))
        messages = [message_of(draft, id) for draft, id in zip(drafts, ids, strict=True)]
        given = any(draft.at is not None for draft in drafts)
        at = [draft.at or datetime.now(UTC) for draft in drafts] if given else None
        try:
            first = self._store.add_messages(scope.key, messages, once=once, at=at)[0]
        except OnceConflict as known_token:
            first = known_token.seq
        return _of_batch(batch, self._read(scope, after=first - 1))

    def list(
        self, scope: Scope, *, kind: Kind | None = None, full: bool = False
    ) -> builtins.list[Note]:
        """The notes in force, the oldest first; `full`: superseded and forgotten ones too."""
        return [
            note
            for note in self._read(scope)
            if kind in (None, note.kind) and (full or note.in_force)
        ]

    def get(self, scope: Scope, id: str) -> Note:
        """The note of this id, forgotten or not. Raises NoSuchNote."""
        for note in self._read(scope):
            if note.id == id:
                return note
        raise NoSuchNote(id)

    def search(self, query: str, *, scope: Scope) -> builtins.list[Note]:
        """The notes in force that have all the words of a query, the newest first.

        A query is written as for the catalog: `"two words"`, `-word`, `wor*`. Words count in the
        text, in what it is about, and in the quote.
        """
        asked = parse(query)
        if asked.empty:
            return []
        found = [
            note
            for note in self.list(scope)
            if has_all(asked, f"{note.about}\n{note.text}\n{note.quote}")
        ]
        return found[::-1]

    def scopes(self, *, agent: str | None = None) -> builtins.list[Scope]:
        """Every scope that ever had notes, of one agent or of all."""
        prefix = "" if agent is None else agent_prefix(agent)
        found = []
        for key in self._store.list_sessions(prefix=prefix):
            try:
                found.append(scope_of_key(key))
            except InvalidKey:
                continue  # no session of ours
        return found

    def forget(self, scope: Scope, id: str, *, purge: bool = False) -> Note:
        """Take the note out of sight; what it superseded is in force again. Raises NoSuchNote.

        `purge`: delete its text for good, as the method of that name does.
        """
        if purge:
            return self.purge(scope, id).note
        with self._alone(scope, otherwise=NoSuchNote(id)) as store:
            standing = standings(store.get_history(scope.key, full=True)).get(id)
            if standing is None or standing.purged:
                raise NoSuchNote(id)
            if not standing.forgotten:
                store.hide(scope.key, standing.message.seq, standing.message.seq)
        return self.get(scope, id)

    def undo(self, scope: Scope) -> Undone:
        """Take back the last forget. Eight deep, and none before a purge. Raises NothingToUndo."""
        nothing = NothingToUndo(f"no note of {scope.who!r} was forgotten that could come back")
        with self._alone(scope, otherwise=nothing) as store:
            try:
                return store.undo(scope.key)
            except NothingToUndo:
                raise nothing from None

    def purge(self, scope: Scope, id: str) -> PurgedNote:
        """Delete the text of a note for good. Raises NoSuchNote; a call cut off is made again.

        A store only purges from its beginning, so that the notes before it are carried forward
        first, under their own ids and times: who follows the store sees them again. What was
        forgotten before stays forgotten, and no undo brings it back any more.
        """
        with self._alone(scope, otherwise=NoSuchNote(id)) as store:
            messages = store.get_history(scope.key, full=True)
            plan = plan_purge(scope, messages, id, now=datetime.now(UTC))
            if plan is None:
                raise NoSuchNote(id)
            if plan.append:
                store.add_messages(scope.key, plan.append, at=plan.at)
            left = store.purge(scope.key, before=plan.before).not_reached if plan.before else ()
        told = _also_told(plan.note, self.list(scope, full=True))
        gone = replace(plan.note, text="", about="", quote="")
        return PurgedNote(note=gone, not_reached=(*left, *told))

    @contextmanager
    def _alone(self, scope: Scope, *, otherwise: UsageError) -> Iterator[Store]:
        """The store, while nobody else forgets in this scope; raises `otherwise` without one."""
        try:
            lease = self._store.lease(scope.key, ttl=_TTL)
        except NoSuchSession:
            raise otherwise from None
        with lease:
            yield lease.store

    def _carried(self, scope: Scope, batch: str) -> builtins.list[Note] | None:
        """What is left of a batch that was here before a purge; None where it was not.

        A purge takes the tokens with it, but the ids it carried forward tell the batch as well.
        """
        try:
            info = self._store.info(scope.key)
        except NoSuchSession:
            return None
        if info.count >= info.last_seq:
            return None
        found = standings(self._store.get_history(scope.key, full=True))
        if not any(batch_of(id) == batch for id in found):
            return None
        return _of_batch(batch, notes_of(scope, found))

    def _read(self, scope: Scope, *, after: int = 0) -> builtins.list[Note]:
        """Every note in the messages past a seq, in order, with what became of it."""
        messages = self._store.get_history(scope.key, after=after, full=True)
        return notes_of(scope, standings(messages))


def _of_batch(batch: str, notes: Sequence[Note]) -> list[Note]:
    return [note for note in notes if batch_of(note.id) == batch]


def _also_told(purged: Note, left: Sequence[Note]) -> Iterator[str]:
    """Where else the text of a purged note may be found, each as a sentence."""
    if purged.session:
        seqs = ", ".join(map(str, purged.seqs))
        yield (
            f"the session {purged.session!r} still holds what was said"
            + (f" (seq {seqs})" if seqs else "")
        )
    for note in left:
        if note.session == purged.session and set(note.seqs) & set(purged.seqs):
            yield f"the note {note.id} was made of the same messages"
