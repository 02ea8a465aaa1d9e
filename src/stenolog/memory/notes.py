"""Notes in a store: added, listed, searched, forgotten and brought back, scope by scope.

Each scope is a session of the store, each note a message of it. To forget a note is to hide its
message; to purge it is to carry the notes before it forward, and to purge what lies below.
"""

import builtins
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby
from typing import Final, get_args

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog import tokenizer
from stenolog.catalog.query import Query, Term, parse
from stenolog.errors import (
    InvalidKey,
    NoSuchNote,
    NoSuchSession,
    NothingToUndo,
    OnceConflict,
    UsageError,
)
from stenolog.memory.kept_notes import KeptNotes
from stenolog.memory.note_records import (
    Draft,
    Kind,
    Note,
    batch_name,
    batch_of,
    check_drafts,
    ids_in,
    message_of,
    plan_purge,
)
from stenolog.memory.noted import Noted
from stenolog.memory.scopes import Of, Scope, scope_of_key, scope_prefix
from stenolog.memory.time_words import Period
from stenolog.records import Undone
from stenolog.stores.base import Lease, PurgingStore, Store

# --- searching ------------------------------------------------------------------------------------
# Which texts have what a query asks for, by the words that the catalog would find.
#
# It reads every text it is given: for the notes of one scope, of which there are not many.


def has_all(query: Query, text: str) -> bool:
    """Whether a text has each term that is wanted, and none that is excluded."""
    lines = tokenizer.lines(text)
    tokens = f" {lines.parts}  {lines.more} "
    return all(_has(term, tokens) != term.excluded for term in query.terms)


def _has(term: Term, tokens: str) -> bool:
    """Whether a term is there as it is written, or as if each word were written in one."""
    written = [part for word in term.words for part in word.parts]
    joined = [part for word in term.words for part in word.joined or word.parts]
    singles = {single for word in term.words for single in word.singles}
    return any(
        all(run in tokens for run in _runs(form, singles, begins=term.begins))
        for form in (written, joined)
    )


def _runs(form: Sequence[str], singles: set[str], *, begins: bool) -> Iterator[str]:
    """Tokens in their order. A single character of a script without spaces stands in none."""
    for single, run in groupby(form, singles.__contains__):
        if single:
            yield from (f" {token} " for token in run)
        else:
            together = list(run)
            # A pair of characters does not go on; what begins so, begins with it anyway.
            goes_on = begins and together[-1] == form[-1] and not set(together[-1]) <= singles
            yield f" {' '.join(together)}{'' if goes_on else ' '}"


# --- notes ----------------------------------------------------------------------------------------


__all__ = ["Draft", "Kind", "Note", "Notes", "PurgedNote"]

_TTL: Final = 10.0
"""Seconds for each step of one who forgets; on SQLite the next waits so long after a kill."""


class PurgedNote(Struct, frozen=True, kw_only=True):
    """What the purge of a note deleted for good."""

    note: Note
    """The note without its text."""
    not_reached: tuple[str, ...]
    """What may still tell of it, each as a sentence."""


class Notes:
    """The notes of all scopes in one store. Every call names its scope and sees no other.

    The scopes that were used last are kept in memory: of these only what is new is read, unless
    something was forgotten or brought back since. May be used by several threads.
    """

    def __init__(self, store: Store) -> None:
        """Keep them in this store, opened in the namespace `notes`; who opened it closes it."""
        self._store = store
        self._kept = KeptNotes(store)

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
        added = self._store.get_history(scope.key, after=first - 1, full=True)
        return _of_batch(batch, Noted(scope).after(added))

    @contextmanager
    def guarded(self, scope: Scope) -> Iterator["Notes"]:
        """Yield these notes with writes that a purge of the scope ends.

        Take it before checking that the session which the notes are about still exists: a purge
        deletes the session first and its notes second. So a writer that has seen the session
        either writes before its notes are purged, or gets LeaseLost. Creates the scope if it does
        not exist; `discard_empty` removes it again. Raises NoSuchSession if the scope is purged
        meanwhile, StoreBusy if another process writes to the scope for too long.
        """
        try:
            lease = self._store.lease(scope.key, ttl=_TTL)
        except NoSuchSession:
            self._store.set_meta(scope.key, notes=True)
            lease = self._store.lease(scope.key, ttl=_TTL)
        with lease:
            fenced = copy.copy(self)
            fenced._store = lease.store  # guard: notes-lose-to-a-purge
            yield fenced

    def discard_empty(self, scope: Scope) -> None:
        """Purge a scope that never had a note; do nothing if it has one, or does not exist."""
        try:
            if self._store.info(scope.key).last_seq:
                return
            gone = self._store.delete(scope.key)
        except NoSuchSession:
            return
        # Another process may have added a note between the two calls.
        if gone.count or not isinstance(self._store, PurgingStore):
            self._store.restore(scope.key, uid=gone.uid)
        else:
            self._store.purge_trash(scope.key, [(gone.uid, gone.deleted)])

    def list(
        self, scope: Scope, *, kind: Kind | None = None, full: bool = False
    ) -> builtins.list[Note]:
        """The notes in force, the oldest first; `full`: superseded and forgotten ones too."""
        noted = self._kept.read(scope).noted
        found = noted.notes if full else noted.in_force.values()
        return [note for note in found if kind is None or note.kind == kind]

    def get(self, scope: Scope, id: str) -> Note:
        """The note of this id, forgotten or not. Raises NoSuchNote."""
        for note in self._kept.read(scope).noted.notes:
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

    def candidates(
        self,
        stems: Sequence[str],
        *,
        scope: Scope,
        period: Period | None = None,
        limit: int = 200,
    ) -> builtins.list[Note]:
        """What recall may choose from: the notes in force that share words with a question.

        Those of the period first, then those with the most and the rarest words, which are given as
        stemming.stem makes them, then the newest. Without any words, only those of the period.
        """
        kept = self._kept.read(scope)
        known = kept.noted.in_force
        found = list(reversed(known))
        if stems:
            shared = kept.words.shared(dict.fromkeys(stems), known)
            found = [id for id in found if id in shared]
            found.sort(key=shared.__getitem__, reverse=True)
        if period is not None:
            inside = [id for id in found if period.holds(known[id].at)]
            outside = [id for id in found if not period.holds(known[id].at)] if stems else []
            found = inside + outside
        return [known[id] for id in found[:limit]]

    def scopes(self, *, agent: str | None = None) -> builtins.list[Scope]:
        """Every scope that ever had notes, of one agent or of all."""
        found = []
        kinds = get_args(Of)
        prefixes = [""] if agent is None else [scope_prefix(agent, of) for of in kinds]
        for prefix in prefixes:
            for key in self._store.list_sessions(prefix=prefix):
                try:
                    found.append(scope_of_key(key))
                except InvalidKey:
                    continue  # no session of ours
        return found

    def forget(self, scope: Scope, id: str) -> Note:
        """Take the note out of sight; what it superseded is in force again. Raises NoSuchNote.

        Where a thousand runs of notes are out of sight, no undo brings back the next one.
        """
        self.forget_all(scope, [id])
        return self.get(scope, id)

    def forget_all(self, scope: Scope, ids: Sequence[str]) -> None:
        """The same for many, each a step of its own for undo; of none where one is not there."""
        if not ids:
            return
        with self._alone(scope, otherwise=NoSuchNote(ids[0])) as lease:
            noted = self._kept.read(scope).noted
            found = []
            for id in ids:
                standing = noted.standing(id)
                if standing is None or standing.purged:
                    raise NoSuchNote(id)
                found += [standing.seq] if not standing.note.forgotten else []
            for number, seq in enumerate(found):
                if number:
                    lease.renew()
                _hide(lease.store, scope, seq)

    def undo(self, scope: Scope) -> Undone:
        """Take back the last forget, eight of them at the most. Raises NothingToUndo.

        A purge ends some of these steps, not all: it says which.
        """
        nothing = NothingToUndo(f"no note of {scope.who!r} was forgotten that could come back")
        with self._alone(scope, otherwise=nothing) as lease:
            try:
                return lease.store.undo(scope.key)
            except NothingToUndo:
                raise nothing from None

    def purge(self, scope: Scope, id: str) -> PurgedNote:
        """Delete the text of a note for good. Raises NoSuchNote; a call cut off is made again.

        A store only purges from its beginning, so that the notes before it are carried forward
        first, under their own ids and times: who follows the store sees them again. What was
        forgotten of these stays forgotten: no undo brings it back, nor what was forgotten earlier
        still. A note behind the purged one that was forgotten after all of these can come back.
        """
        with self._alone(scope, otherwise=NoSuchNote(id)) as lease:
            store = lease.store
            messages = store.get_history(scope.key, full=True)
            plan = plan_purge(scope, messages, id, now=datetime.now(UTC))
            if plan is None:
                raise NoSuchNote(id)
            lease.renew()
            if plan.append:
                store.add_messages(scope.key, plan.append, at=plan.at)
                lease.renew()
            left = store.purge(scope.key, before=plan.before).not_reached if plan.before else ()
        told = _also_told(plan.note, self.list(scope, full=True))
        gone = replace(plan.note, text="", about="", quote="")
        return PurgedNote(note=gone, not_reached=(*left, *told))

    @contextmanager
    def _alone(self, scope: Scope, *, otherwise: UsageError) -> Iterator[Lease]:
        """The turn in which nobody else forgets in this scope; raises `otherwise` without one."""
        try:
            lease = self._store.lease(scope.key, ttl=_TTL)
        except NoSuchSession:
            raise otherwise from None
        with lease:
            yield lease

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
        noted = self._kept.read(scope).noted
        if not any(batch_of(id) == batch for id in noted.ids()):
            return None
        return _of_batch(batch, noted)


def _hide(store: Store, scope: Scope, seq: int) -> None:
    """Take the message of a note out of sight, or where the store hides no more, say that it is."""
    try:
        store.hide(scope.key, seq, seq)
    except UsageError as refused:
        if type(refused) is not UsageError:
            raise
        # A thousand runs of messages are hidden already. The last message of an id counts.
        [message, *_] = store.get_history(scope.key, after=seq - 1, full=True)
        store.add_messages(scope.key, [{**message.to_dict(), "forgotten": True}], at=[message.at])


def _of_batch(batch: str, noted: Noted) -> list[Note]:
    return [note for note in noted.notes if batch_of(note.id) == batch]


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
