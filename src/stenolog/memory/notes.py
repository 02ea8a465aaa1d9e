"""Notes in a store, per scope: add, list, search, forget, restore and purge notes.

Each scope is a session of the store, and each note is a message. Forgetting a note hides its
message. Purging a note copies the notes before it to the end and purges everything up to the note.
"""

import builtins
import copy
import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final, get_args

from msgspec import Struct
from msgspec.structs import replace

from stenolog.catalog import tokenizer
from stenolog.catalog.query import Query, parse_query, term_forms
from stenolog.catalog.tokenizer import stems as stems_of
from stenolog.errors import (
    NoSuchSession,
    NothingToUndo,
    OnceConflict,
    UsageError,
)
from stenolog.memory.note_records import (
    Draft,
    Kind,
    Note,
    NoteState,
    batch_of,
    check_drafts,
    make_batch_ids,
    make_batch_name,
    message_of,
    plan_purge,
)
from stenolog.memory.scopes import Scope, ScopeKind, scope_from_key, scope_prefix
from stenolog.memory.time_words import Period
from stenolog.records import Message, SessionInfo, Span, UndoResult
from stenolog.stores import spans
from stenolog.stores.arguments import check_store
from stenolog.stores.base import Lease, Store
from stenolog.stores.locks import ThreadLock

# --- searching ------------------------------------------------------------------------------------
# The search uses the tokens of the catalog. It scans every text, because a scope has few notes.


def matches_query(query: Query, text: str) -> bool:
    """Whether a text contains all required terms of a query and no excluded term."""
    lines = tokenizer.token_lines(text)
    tokens = f" {lines.parts}  {lines.extra_tokens} "
    return all(
        # A term may occur as spelled, or with its words joined.
        any(all(run.text in tokens for run in form) for form in term_forms(term))
        != term.is_excluded
        for term in query.terms
    )


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
        for stem in set(stems_of(f"{note.text}\n{note.about}\n{note.quote}")):
            self._ids_by_stem.setdefault(sys.intern(stem), {})[note.id] = None
        # The last step: if Ctrl-C interrupts this method, the next `weigh` adds the note again.
        self._indexed_ids.add(note.id)


# --- cache ----------------------------------------------------------------------------------------
# Messages never change, so cached notes are valid until a message is hidden, restored or purged.
# The session info of the store shows each of these changes, by any process. After such a change,
# the whole scope is read again. The cache is never used without checking the store.


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


# --- notes ----------------------------------------------------------------------------------------


__all__ = ["Draft", "Kind", "Note", "Notes", "PurgedNote"]

_LEASE_SECONDS: Final = 10.0
"""Lifetime of a lease in seconds; on SQLite, a killed process blocks the others this long."""


class PurgedNote(Struct, frozen=True, kw_only=True):
    """The result of purging a note."""

    note: Note
    """The note without its text."""
    not_reached: tuple[str, ...]
    """Places that may still contain the text of the note, one sentence each."""


class Notes:
    """The notes of all scopes in one store. Each call reads and writes only its own scope.

    Recently used scopes are cached. Of a cached scope, only new messages are read, unless a note
    was forgotten or restored. Thread-safe.
    """

    def __init__(self, store: Store) -> None:
        """Use a store that the caller has opened in the namespace `notes`, and will close.

        Raises UsageError if `store` is not a Store.
        """
        check_store(store, "Notes")
        self._store = store
        self._cache = NoteCache(store)

    @property
    def store(self) -> Store:
        """The store of the notes."""
        return self._store

    def add(
        self, scope: Scope, drafts: Sequence[Draft], *, once: str | None = None
    ) -> builtins.list[Note]:
        """Add the drafts in one atomic batch, and return the notes.

        If the scope knows the idempotency key `once`, nothing is added, even if the drafts differ.
        In that case, the notes of the first call are returned, except purged notes. Raises
        UsageError for a draft without text, and the errors of the store.
        """
        check_drafts(drafts)
        if not drafts:
            return []
        batch = make_batch_name(once)
        known_notes = None if once is None else self._find_remaining_notes(scope, batch)
        if known_notes is not None:
            return known_notes
        ids = make_batch_ids(batch, len(drafts))
        messages = [message_of(draft, id) for draft, id in zip(drafts, ids, strict=True)]
        has_times = any(draft.at is not None for draft in drafts)
        times = [draft.at or datetime.now(UTC) for draft in drafts] if has_times else None
        try:
            first_seq = self._store.add_messages(scope.key, messages, once=once, at=times)[0]
        except OnceConflict as conflict:
            first_seq = conflict.seq
        added_messages = self._store.get_history(scope.key, after=first_seq - 1, full=True)
        return _notes_of_batch(batch, NoteState(scope).with_messages(added_messages))

    @contextmanager
    def guarded(self, scope: Scope) -> Iterator["Notes"]:
        """Yield these notes with a lease that a purge of the scope invalidates.

        Inside the `with` block, the caller must check that the source session of the notes still
        exists. A purge deletes the session first and its notes second. If a writer still sees the
        session, it either writes before the notes are purged, or gets LeaseLost. A missing scope is
        created, and `discard_empty` removes it again. Raises NoSuchSession if the scope is purged
        at the same time, StoreBusy if another process writes to the scope for too long.
        """
        try:
            lease = self._store.lease(scope.key, ttl=_LEASE_SECONDS)
        except NoSuchSession:
            self._store.set_meta(scope.key, notes=True)
            lease = self._store.lease(scope.key, ttl=_LEASE_SECONDS)
        with lease:
            leased_notes = copy.copy(self)
            leased_notes._store = lease.store  # guard: notes-lose-to-a-purge
            yield leased_notes

    def discard_empty(self, scope: Scope) -> None:
        """Purge a scope that never had a note. Do nothing for any other scope."""
        try:
            if self._store.info(scope.key).last_seq:
                return
            trashed = self._store.delete(scope.key)
        except NoSuchSession:
            return
        # Another process may have added a note between the two calls; then restore the scope.
        if trashed.count:
            self._store.admin.restore(scope.key, uid=trashed.uid)
        else:
            self._store.admin.purge(scope.key, trash=[(trashed.uid, trashed.deleted)])

    def list(
        self, scope: Scope, *, kind: Kind | None = None, full: bool = False
    ) -> builtins.list[Note]:
        """Return the notes in force, oldest first.

        `full`: include superseded and forgotten notes.
        """
        state = self._cache.read_notes(scope).state
        notes = state.notes if full else state.in_force.values()
        return [note for note in notes if kind is None or note.kind == kind]

    def get(self, scope: Scope, id: str) -> Note:
        """Return the note with this id, even a forgotten note. Raises UsageError."""
        for note in self._cache.read_notes(scope).state.notes:
            if note.id == id:
                return note
        raise _no_note_error(id)

    def search(self, query: str, *, scope: Scope) -> builtins.list[Note]:
        """Return the notes in force that have all words of a query, newest first.

        The query syntax is the same as in the catalog: `"two words"`, `-word`, `wor*`. Searches the
        text, the subject and the quote.
        """
        parsed_query = parse_query(query)
        if parsed_query.is_empty:
            return []
        return [
            note
            for note in reversed(self.list(scope))
            if matches_query(parsed_query, f"{note.about}\n{note.text}\n{note.quote}")
        ]

    def candidates(
        self, stems: Sequence[str], *, scope: Scope, period: Period | None = None, limit: int = 200
    ) -> builtins.list[Note]:
        """Return notes in force that share words with a question, as candidates for recall.

        Notes of the period come first, then notes with the most and the rarest words, then the
        newest notes. `stems`: words as returned by tokenizer.stem. Without stems, only notes of the
        period are returned.
        """
        cached = self._cache.read_notes(scope)
        notes_by_id = cached.state.in_force
        ids = list(reversed(notes_by_id))
        if stems:
            weights = cached.word_index.weigh(dict.fromkeys(stems), notes_by_id)
            ids = [id for id in ids if id in weights]
            ids.sort(key=weights.__getitem__, reverse=True)
        if period is not None and stems:
            ids.sort(key=lambda id: not period.contains(notes_by_id[id].at))
        elif period is not None:
            ids = [id for id in ids if period.contains(notes_by_id[id].at)]
        return [notes_by_id[id] for id in ids[:limit]]

    def scopes(self, *, agent: str | None = None) -> builtins.list[Scope]:
        """Return every scope that ever had notes, of one agent or of all agents."""
        scopes = []
        kinds = get_args(ScopeKind)
        prefixes = [""] if agent is None else [scope_prefix(agent, of) for of in kinds]
        for prefix in prefixes:
            for key in self._store.list_sessions(prefix=prefix):
                with suppress(UsageError):  # progress marks have other keys
                    scopes.append(scope_from_key(key))
        return scopes

    def forget(self, scope: Scope, id: str) -> Note:
        """Hide the note; notes that it superseded are in force again.

        Raises UsageError if there is no such note, or if the store already hides a thousand ranges
        of notes.
        """
        with self._take_lease(scope, missing_error=_no_note_error(id)) as lease:
            record = self._cache.read_notes(scope).state.records.get(id)
            if record is None or record.is_purged:
                raise _no_note_error(id)
            if not record.note.forgotten:
                lease.store.admin.hide(scope.key, record.seq, record.seq)
        return self.get(scope, id)

    def undo(self, scope: Scope) -> UndoResult:
        """Undo the last `forget`; the last eight can be undone. Raises NothingToUndo.

        After a purge, some forgotten notes can no longer be restored; see `purge`.
        """
        undo_error = NothingToUndo(f"there is no forgotten note of {scope.who!r} to restore")
        with self._take_lease(scope, missing_error=undo_error) as lease:
            try:
                return lease.store.undo(scope.key)
            except NothingToUndo:
                raise undo_error from None

    def purge(self, scope: Scope, id: str) -> PurgedNote:
        """Delete the text of a note permanently. An interrupted call can be repeated.

        Each note is a message, and a store can purge only the first messages of a session.
        The notes before the purged note are therefore first appended again, with their ids and
        times. Followers of the store see these notes again. After a purge, `undo` cannot restore a
        forgotten note that was appended again, nor notes that were forgotten before that note.
        Notes that were forgotten later can be restored. Raises UsageError if there is no such note.
        """
        with self._take_lease(scope, missing_error=_no_note_error(id)) as lease:
            store = lease.store
            messages = store.get_history(scope.key, full=True)
            plan = plan_purge(scope, messages, id, now=datetime.now(UTC))
            if plan is None:
                raise _no_note_error(id)
            lease.renew()
            if plan.new_messages:
                store.add_messages(scope.key, plan.new_messages, at=plan.times)
                lease.renew()
            not_reached: tuple[str, ...] = ()
            if plan.before_seq:
                not_reached = store.admin.purge(scope.key, before=plan.before_seq).not_reached
        other_places = _list_places_with_text(plan.note, self.list(scope, full=True))
        purged_note = replace(plan.note, text="", about="", quote="")
        return PurgedNote(note=purged_note, not_reached=(*not_reached, *other_places))

    def _take_lease(self, scope: Scope, *, missing_error: UsageError) -> Lease:
        """Take the lease of the scope, so that no other process forgets notes of the scope.

        Raises `missing_error` if the scope does not exist.
        """
        try:
            return self._store.lease(scope.key, ttl=_LEASE_SECONDS)
        except NoSuchSession:
            raise missing_error from None

    def _find_remaining_notes(self, scope: Scope, batch: str) -> builtins.list[Note] | None:
        """Return the remaining notes of a batch that was added before a purge, or None.

        A purge removes the idempotency keys, but the ids of the remaining notes identify the batch.
        """
        try:
            info = self._store.info(scope.key)
        except NoSuchSession:
            return None
        if info.count >= info.last_seq:
            return None
        state = self._cache.read_notes(scope).state
        if not any(batch_of(id) == batch for id in state.records):
            return None
        return _notes_of_batch(batch, state)


def _no_note_error(id: str) -> UsageError:
    return UsageError(f"there is no note {id!r}; list the notes to see their ids")


def _notes_of_batch(batch: str, state: NoteState) -> list[Note]:
    return [note for note in state.notes if batch_of(note.id) == batch]


def _list_places_with_text(purged: Note, remaining_notes: Sequence[Note]) -> Iterator[str]:
    """Yield the places that may still contain the text of a purged note, one sentence each."""
    if purged.session:
        seqs = ", ".join(map(str, purged.seqs))
        location = f" (seq {seqs})" if seqs else ""
        yield f"the session {purged.session!r} still contains the original messages{location}"
    for note in remaining_notes:
        if note.session == purged.session and set(note.seqs) & set(purged.seqs):
            yield f"the note {note.id} was made of the same messages"
