"""Exports the notes of a scope as a page, and imports the changes that a person made to the page.

A changed text becomes a new note that supersedes the old note. A deleted item is forgotten. An
added item becomes a new note. Notes that changed since the export are never overwritten, but
reported.
"""

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256

from msgspec import Struct

from stenolog.errors import UsageError
from stenolog.memory.note_pages import Item, Page, from_markdown, to_markdown
from stenolog.memory.note_records import Draft, Note, batch_name
from stenolog.memory.notes import Notes
from stenolog.memory.scopes import Scope


class NoteChanges(Struct, frozen=True, kw_only=True):
    """The changes of an edited page."""

    scope: Scope
    added: tuple[Draft, ...] = ()
    changed: tuple[Draft, ...] = ()
    """Drafts of changed notes; each draft names the note that it supersedes."""
    forgotten: tuple[Note, ...] = ()
    conflicts: tuple[str, ...] = ()
    """Edits that were not imported because the note changed since the export, one sentence each."""

    @property
    def count(self) -> int:
        """Number of notes that are added, changed or forgotten."""
        return len(self.added) + len(self.changed) + len(self.forgotten)


def export_notes(notes: Notes, scope: Scope) -> str:
    """Return the notes in force of a scope as a page for reading and editing."""
    return to_markdown(scope, notes.list(scope), export=os.urandom(6).hex())


def import_notes(
    notes: Notes, text: str, *, scope: Scope | None = None, dry_run: bool = False
) -> NoteChanges:
    """Import an edited page and return its changes. A second import changes nothing.

    A page that does not name its scope needs `scope`. Raises UsageError, and changes nothing, if
    the page cannot be parsed or belongs to another scope.
    """
    page = from_markdown(text)
    owner = _scope_of_page(page, scope)
    edits = plan_edits(page, owner, notes.list(owner, full=True))
    if dry_run:
        return edits
    for draft in (*edits.changed, *edits.added):
        notes.add(owner, [draft], once=_edit_token(page, draft))
    notes.forget_all(owner, [note.id for note in edits.forgotten])
    return edits


def plan_edits(page: Page, scope: Scope, notes: Sequence[Note]) -> NoteChanges:
    """Return the changes that a user made to a page. `notes`: all notes of the scope. Pure."""
    notes_by_id = {note.id: note for note in notes}
    contents_in_force = {_content_of(note) for note in notes if note.in_force}
    drafts_by_content: dict[_NoteContent, Draft] = {}
    changed_drafts: list[Draft] = []
    conflicts: list[str] = []
    for item in page.items:
        draft, content, note = _draft_of_item(item), _content_of(item), notes_by_id.get(item.id)
        if _is_imported(page, draft, notes_by_id) or content == _current_content(note, notes_by_id):
            continue
        if not item.id:
            if content not in contents_in_force:
                drafts_by_content[content] = draft
        elif note is not None and note.in_force:
            changed_drafts.append(draft)
        elif note is None or content != _content_of(note):
            conflicts.append(
                f"line {item.line}: {_why_not_in_force(item.id, note)}; the change is left out"
            )
    ids_on_page = {item.id for item in page.items}
    deleted = [note for note in notes if note.id in page.exported and note.id not in ids_on_page]
    conflicts += [
        f"{note.id} was deleted from the page, but {_why_not_in_force(note.id, note)}; "
        "the newer note stays"
        for note in deleted
        if note.superseded is not None and not note.forgotten
    ]
    return NoteChanges(
        scope=scope,
        added=tuple(drafts_by_content.values()),
        changed=tuple(changed_drafts),
        forgotten=tuple(note for note in deleted if note.in_force),
        conflicts=tuple(conflicts),
    )


_NoteContent = tuple[str, str, str]


def _content_of(note: Item | Note) -> _NoteContent:
    return note.kind, note.about, note.text


def _current_content(note: Note | None, notes_by_id: Mapping[str, Note]) -> _NoteContent | None:
    """Return the content of a note or its last successor; None if that note is not in force."""
    while note is not None and note.superseded_by:
        note = notes_by_id.get(note.superseded_by)
    return _content_of(note) if note is not None and note.in_force else None


def _draft_of_item(item: Item) -> Draft:
    superseded_ids = (item.id,) if item.id else ()
    return Draft(kind=item.kind, text=item.text, about=item.about, supersedes=superseded_ids)


def _is_imported(page: Page, draft: Draft, notes_by_id: Mapping[str, Note]) -> bool:
    """Whether this edit of this page was imported before, even if the note has changed since."""
    token = _edit_token(page, draft)
    return token is not None and batch_name(token) in notes_by_id


def _edit_token(page: Page, draft: Draft) -> str | None:
    """Return the idempotency key of an edit, or None if the page is not an export."""
    if not page.export:
        return None
    content = repr((draft.kind, draft.about, draft.text, draft.supersedes))
    return f"{page.export}:{sha256(content.encode()).hexdigest()}"


def _why_not_in_force(id: str, note: Note | None) -> str:
    """Return the reason why a note is not in force."""
    if note is None:
        return f"there is no note {id}"
    if note.forgotten:
        return f"the note {id} was forgotten since the export"
    return f"the note {id} was superseded by {note.superseded_by} since the export"


def _scope_of_page(page: Page, scope: Scope | None) -> Scope:
    owner = page.scope or scope
    if owner is None:
        raise UsageError("the page does not name its scope; give one")
    if scope is not None and scope != owner:
        raise UsageError(
            f"the page has the notes of {owner.who!r} (agent {owner.agent!r}), and not those of "
            f"{scope.who!r} (agent {scope.agent!r}); nothing was changed"
        )
    return owner
