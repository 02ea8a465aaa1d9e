"""Notes in a store, per scope: add, list, search, forget, restore and purge notes.

Each scope is a session of the store, and each note is a message. Forgetting a note hides its
message. Purging a note copies the notes before it to the end and purges everything up to the note.
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
from stenolog.memory.note_cache import NoteCache
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
from stenolog.memory.note_state import NoteState
from stenolog.memory.scopes import Scope, ScopeKind, scope_from_key, scope_prefix
from stenolog.memory.time_words import Period
from stenolog.records import Undone
from stenolog.stores.base import Lease, PurgingStore, Store

# --- searching ------------------------------------------------------------------------------------
# The search uses the tokens of the catalog. It scans every text, because a scope has few notes.


def matches_query(query: Query, text: str) -> bool:
    """Whether a text contains all required terms of a query and no excluded term."""
    lines = tokenizer.lines(text)
    tokens = f" {lines.parts}  {lines.more} "
    return all(_has_term(term, tokens) != term.is_excluded for term in query.terms)


def _has_term(term: Term, tokens: str) -> bool:
    """Whether a text contains a term, as spelled or with its words joined."""
    written = [part for word in term.words for part in word.parts]
    joined = [part for word in term.words for part in word.joined or word.parts]
    singles = {single for word in term.words for single in word.singles}
    return any(
        all(run in tokens for run in _runs(form, singles, begins=term.is_prefix))
        for form in (written, joined)
    )


def _runs(form: Sequence[str], singles: set[str], *, begins: bool) -> Iterator[str]:
    """Yield runs of tokens. A single character of a script without spaces is a separate run."""
    for single, run in groupby(form, singles.__contains__):
        if single:
            yield from (f" {token} " for token in run)
        else:
            together = list(run)
            # A pair of characters has no longer forms: a text that starts with the pair has it as a
            # token.
            is_prefix = begins and together[-1] == form[-1] and not set(together[-1]) <= singles
            yield f" {' '.join(together)}{'' if is_prefix else ' '}"


# --- notes ----------------------------------------------------------------------------------------


__all__ = ["Draft", "Kind", "Note", "Notes", "PurgedNote"]

_LEASE_SECONDS: Final = 10.0
"""Lease time of each step in seconds; on SQLite, the longest wait after a killed process."""


class PurgedNote(Struct, frozen=True, kw_only=True):
    """The result of purging a note."""

    note: Note
    """The note without its text."""
    not_reached: tuple[str, ...]
    """Places that may still contain the text of the note, one sentence each."""


class Notes:
    """The notes of all scopes in one store. Each call reads and writes only its own scope.

    Recently used scopes are cached. For these, only new messages are read, unless a note was
    forgotten or restored since. Thread-safe.
    """

    def __init__(self, store: Store) -> None:
        """Use this store, opened in the namespace `notes`. The caller closes the store."""
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
        The call then returns the notes of the first call, except purged notes. Raises UsageError
        for a draft without text, and the errors of the store.
        """
        check_drafts(drafts)
        if not drafts:
            return []
        batch = batch_name(once)
        if once is not None and (known := self._known_batch(scope, batch)) is not None:
            return known
        ids = ids_in(batch, len(drafts))
        messages = [message_of(draft, id) for draft, id in zip(drafts, ids, strict=True)]
        has_times = any(draft.at is not None for draft in drafts)
        at = [draft.at or datetime.now(UTC) for draft in drafts] if has_times else None
        try:
            first = self._store.add_messages(scope.key, messages, once=once, at=at)[0]
        except OnceConflict as known_token:
            first = known_token.seq
        added = self._store.get_history(scope.key, after=first - 1, full=True)
        return _notes_of_batch(batch, NoteState(scope).after(added))

    @contextmanager
    def guarded(self, scope: Scope) -> Iterator["Notes"]:
        """Yield these notes with a lease that a purge of the scope invalidates.

        Enter the `with` before checking that the session of the notes still exists. A purge deletes
        the session first and its notes second. So a writer that has seen the session either writes
        before the notes are purged, or gets LeaseLost. Creates a missing scope, which
        `discard_empty` removes again. Raises NoSuchSession if the scope is purged at the same time,
        StoreBusy if another process writes to the scope for too long.
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
            purged_note = self._store.delete(scope.key)
        except NoSuchSession:
            return
        # Another process may have added a note between the two calls.
        if purged_note.count or not isinstance(self._store, PurgingStore):
            self._store.restore(scope.key, uid=purged_note.uid)
        else:
            self._store.purge_trash(scope.key, [(purged_note.uid, purged_note.deleted)])

    def list(
        self, scope: Scope, *, kind: Kind | None = None, full: bool = False
    ) -> builtins.list[Note]:
        """Return the notes in force, oldest first.

        `full`: include superseded and forgotten notes.
        """
        state = self._cache.read(scope).state
        notes = state.notes if full else state.in_force.values()
        return [note for note in notes if kind is None or note.kind == kind]

    def get(self, scope: Scope, id: str) -> Note:
        """Return the note with this id, even a forgotten note. Raises NoSuchNote."""
        for note in self._cache.read(scope).state.notes:
            if note.id == id:
                return note
        raise NoSuchNote(id)

    def search(self, query: str, *, scope: Scope) -> builtins.list[Note]:
        """Return the notes in force that have all words of a query, newest first.

        The query syntax is the same as in the catalog: `"two words"`, `-word`, `wor*`. Searches the
        text, the subject and the quote.
        """
        parsed = parse(query)
        if parsed.is_empty:
            return []
        matching = [
            note
            for note in self.list(scope)
            if matches_query(parsed, f"{note.about}\n{note.text}\n{note.quote}")
        ]
        return matching[::-1]

    def candidates(
        self,
        stems: Sequence[str],
        *,
        scope: Scope,
        period: Period | None = None,
        limit: int = 200,
    ) -> builtins.list[Note]:
        """Return notes in force that share words with a question, as candidates for recall.

        Notes of the period come first, then notes with the most and the rarest words, then the
        newest notes. `stems`: words as returned by stemming.stem. Without stems, only notes of the
        period are returned.
        """
        cached = self._cache.read(scope)
        known = cached.state.in_force
        ids = list(reversed(known))
        if stems:
            shared = cached.words.shared(dict.fromkeys(stems), known)
            ids = [id for id in ids if id in shared]
            ids.sort(key=shared.__getitem__, reverse=True)
        if period is not None:
            inside = [id for id in ids if period.holds(known[id].at)]
            outside = [id for id in ids if not period.holds(known[id].at)] if stems else []
            ids = inside + outside
        return [known[id] for id in ids[:limit]]

    def scopes(self, *, agent: str | None = None) -> builtins.list[Scope]:
        """Return every scope that ever had notes, of one agent or of all."""
        scopes = []
        kinds = get_args(ScopeKind)
        prefixes = [""] if agent is None else [scope_prefix(agent, of) for of in kinds]
        for prefix in prefixes:
            for key in self._store.list_sessions(prefix=prefix):
                try:
                    scopes.append(scope_from_key(key))
                except InvalidKey:
                    continue  # the key is not the key of a scope
        return scopes

    def forget(self, scope: Scope, id: str) -> Note:
        """Hide the note; notes that it superseded are in force again. Raises NoSuchNote.

        `undo` cannot restore the note if the store already hides a thousand ranges of notes.
        """
        self.forget_all(scope, [id])
        return self.get(scope, id)

    def forget_all(self, scope: Scope, ids: Sequence[str]) -> None:
        """Forget several notes, each as one undo step. If a note does not exist, forget none."""
        if not ids:
            return
        with self._leased(scope, missing_error=NoSuchNote(ids[0])) as lease:
            state = self._cache.read(scope).state
            seqs = []
            for id in ids:
                record = state.record(id)
                if record is None or record.purged:
                    raise NoSuchNote(id)
                seqs += [record.seq] if not record.note.forgotten else []
            for number, seq in enumerate(seqs):
                if number:
                    lease.renew()
                _hide(lease.store, scope, seq)

    def undo(self, scope: Scope) -> Undone:
        """Undo the last forget; up to eight can be undone. Raises NothingToUndo.

        A purge ends some of these steps; see `purge`.
        """
        nothing = NothingToUndo(f"there is no forgotten note of {scope.who!r} to restore")
        with self._leased(scope, missing_error=nothing) as lease:
            try:
                return lease.store.undo(scope.key)
            except NothingToUndo:
                raise nothing from None

    def purge(self, scope: Scope, id: str) -> PurgedNote:
        """Delete the text of a note permanently. Raises NoSuchNote. Repeat an interrupted call.

        A store can only purge from its start. So the notes before the purged note are first
        appended again, with their ids and times, and followers of the store see these notes again.
        Forgotten notes among them, and all notes forgotten earlier, can no longer be restored by
        `undo`. A later note that was forgotten after these notes can still be restored.
        """
        with self._leased(scope, missing_error=NoSuchNote(id)) as lease:
            store = lease.store
            messages = store.get_history(scope.key, full=True)
            plan = plan_purge(scope, messages, id, now=datetime.now(UTC))
            if plan is None:
                raise NoSuchNote(id)
            lease.renew()
            if plan.append:
                store.add_messages(scope.key, plan.append, at=plan.at)
                lease.renew()
            not_reached = (
                store.purge(scope.key, before=plan.before).not_reached if plan.before else ()
            )
        other_places = _other_places(plan.note, self.list(scope, full=True))
        purged_note = replace(plan.note, text="", about="", quote="")
        return PurgedNote(note=purged_note, not_reached=(*not_reached, *other_places))

    @contextmanager
    def _leased(self, scope: Scope, *, missing_error: UsageError) -> Iterator[Lease]:
        """Hold the lease of the scope, so that no other process forgets notes of the scope.

        Raises `missing_error` if the scope does not exist.
        """
        try:
            lease = self._store.lease(scope.key, ttl=_LEASE_SECONDS)
        except NoSuchSession:
            raise missing_error from None
        with lease:
            yield lease

    def _known_batch(self, scope: Scope, batch: str) -> builtins.list[Note] | None:
        """Return the remaining notes of a batch from before a purge, or None.

        A purge removes the idempotency keys, but the ids of the remaining notes identify the batch.
        """
        try:
            info = self._store.info(scope.key)
        except NoSuchSession:
            return None
        if info.count >= info.last_seq:
            return None
        state = self._cache.read(scope).state
        if not any(batch_of(id) == batch for id in state.ids()):
            return None
        return _notes_of_batch(batch, state)


def _hide(store: Store, scope: Scope, seq: int) -> None:
    """Hide the message of a note. At the store's limit, append a forgotten copy instead."""
    try:
        store.hide(scope.key, seq, seq)
    except UsageError as error:
        if type(error) is not UsageError:
            raise
        # The store hides a thousand ranges already. A forgotten copy works, because the last
        # message of an id counts.
        [message, *_] = store.get_history(scope.key, after=seq - 1, full=True)
        store.add_messages(scope.key, [{**message.to_dict(), "forgotten": True}], at=[message.at])


def _notes_of_batch(batch: str, state: NoteState) -> list[Note]:
    return [note for note in state.notes if batch_of(note.id) == batch]


def _other_places(purged: Note, not_reached: Sequence[Note]) -> Iterator[str]:
    """Yield the places that may still contain the text of a purged note, one sentence each."""
    if purged.session:
        seqs = ", ".join(map(str, purged.seqs))
        yield (
            f"the session {purged.session!r} still contains the original messages"
            + (f" (seq {seqs})" if seqs else "")
        )
    for note in not_reached:
        if note.session == purged.session and set(note.seqs) & set(purged.seqs):
            yield f"the note {note.id} was made of the same messages"
