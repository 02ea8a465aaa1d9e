"""Finds notes that older versions made in scopes shared by several sessions.

These mixed notes are never recalled.
"""

from collections.abc import Iterator

from msgspec import Struct

from stenolog.errors import StenologError
from stenolog.memory.notes import Notes
from stenolog.memory.scopes import Scope
from stenolog.sessions.folders import NOTES
from stenolog.stores.base import Store
from stenolog.transfer.copy_all import namespaces_of, opened_read_only


class MixedScope(Struct, frozen=True, kw_only=True):
    """A scope with notes of several sessions."""

    scope: Scope
    notes: int
    sessions: tuple[str, ...]
    """Keys of the sessions that the notes were made from."""


def mixed_scopes(workspace: str) -> list[MixedScope]:
    """Return the scopes of a workspace that have notes of several sessions."""
    try:
        if NOTES not in namespaces_of(workspace):
            return []
        with opened_read_only(workspace, NOTES) as store:
            return list(_mixed_scopes_of(Notes(store))) if isinstance(store, Store) else []
    except StenologError:
        return []  # the doctor reports the reason


def _mixed_scopes_of(notes: Notes) -> Iterator[MixedScope]:
    for scope in notes.scopes():
        mixed_notes = [note for note in notes.list(scope, full=True) if note.mixed]
        if mixed_notes:
            keys = dict.fromkeys(note.session for note in mixed_notes if note.session)
            yield MixedScope(scope=scope, notes=len(mixed_notes), sessions=tuple(keys))
