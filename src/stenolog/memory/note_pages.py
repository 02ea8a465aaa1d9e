r"""Export the notes of a scope as a Markdown page, and import the edits that a person made to it.

A changed text becomes a new note that supersedes the old note. A deleted item is forgotten. An
added item becomes a new note. Notes that changed since the export are never overwritten, but
reported.

Each note is a list item with its id in a comment. Continuation lines are indented by two spaces.
Characters that Markdown or an editor would change are escaped as `\<`, `\&`, `\*` and `\\`, and
invisible ones as `&#x20;`. Parsing returns exactly the text that was written.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from sys import maxunicode
from typing import Final
from urllib.parse import quote, unquote

from msgspec import Struct

from stenolog.errors import InvalidKey, UsageError
from stenolog.memory.note_records import Draft, Kind, Note, make_batch_name
from stenolog.memory.notes import Notes
from stenolog.memory.scopes import Scope, scope_from_key


class Item(Struct, frozen=True, kw_only=True):
    """A note on a page."""

    kind: Kind
    text: str
    about: str = ""
    id: str = ""
    """Id of the note; empty for an item that a person added."""
    line_number: int = 0


class Page(Struct, frozen=True, kw_only=True):
    """A parsed page of notes."""

    scope: Scope | None
    """The scope that the page names, if any."""
    export_name: str
    """Name of the export; empty if the page is not an export."""
    exported_ids: frozenset[str]
    """Ids of the notes that were exported."""
    items: Sequence[Item]


class NoteChanges(Struct, frozen=True, kw_only=True):
    """The changes that a person made to a page."""

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
    return format_page(scope, notes.list(scope), export_name=os.urandom(6).hex())


def import_notes(
    notes: Notes, text: str, *, scope: Scope | None = None, dry_run: bool = False
) -> NoteChanges:
    """Import an edited page and return its changes. A second import changes nothing.

    A page that does not name its scope needs `scope`. Raises UsageError, and changes nothing, if
    the page cannot be parsed or belongs to another scope.
    """
    page = parse_page(text)
    owner = page.scope or scope
    if owner is None:
        raise UsageError("the page does not name its scope; give the scope")
    if scope is not None and scope != owner:
        raise UsageError(
            f"the page has the notes of {owner.who!r} (agent {owner.agent!r}), and not those of "
            f"{scope.who!r} (agent {scope.agent!r}); nothing was changed"
        )
    changes = plan_edits(page, owner, notes.list(owner, full=True))
    if dry_run:
        return changes
    for draft in (*changes.changed, *changes.added):
        notes.add(owner, [draft], once=_idempotency_key(page, draft))
    notes.forget_all(owner, [note.id for note in changes.forgotten])
    return changes


def plan_edits(page: Page, scope: Scope, notes: Sequence[Note]) -> NoteChanges:
    """Return the changes that a person made to a page. `notes`: all notes of the scope. Pure."""
    notes_by_id = {note.id: note for note in notes}
    contents_in_force = {_content_of(note) for note in notes if note.in_force}
    drafts_by_content: dict[_NoteContent, Draft] = {}
    changed_drafts: list[Draft] = []
    conflicts: list[str] = []
    for item in page.items:
        superseded_ids = (item.id,) if item.id else ()
        draft = Draft(kind=item.kind, text=item.text, about=item.about, supersedes=superseded_ids)
        content, note = _content_of(item), notes_by_id.get(item.id)
        idempotency_key = _idempotency_key(page, draft)
        # An edit that was imported before is skipped, even if the note has changed since.
        is_imported = (
            idempotency_key is not None and make_batch_name(idempotency_key) in notes_by_id
        )
        if is_imported or content == _current_content(note, notes_by_id):
            continue
        if not item.id:
            if content not in contents_in_force:
                drafts_by_content[content] = draft
        elif note is not None and note.in_force:
            changed_drafts.append(draft)
        elif note is None or content != _content_of(note):
            conflicts.append(
                f"line {item.line_number}: {_reason_not_in_force(item.id, note)}; "
                "the change is left out"
            )
    ids_on_page = {item.id for item in page.items}
    deleted_notes = [
        note for note in notes if note.id in page.exported_ids and note.id not in ids_on_page
    ]
    conflicts += [
        f"{note.id} was deleted from the page, but {_reason_not_in_force(note.id, note)}; "
        "the newer note stays"
        for note in deleted_notes
        if note.superseded is not None and not note.forgotten
    ]
    return NoteChanges(
        scope=scope,
        added=tuple(drafts_by_content.values()),
        changed=tuple(changed_drafts),
        forgotten=tuple(note for note in deleted_notes if note.in_force),
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


def _idempotency_key(page: Page, draft: Draft) -> str | None:
    """Return the idempotency key of an edit, or None if the page is not an export."""
    if not page.export_name:
        return None
    content = repr((draft.kind, draft.about, draft.text, draft.supersedes))
    return f"{page.export_name}:{sha256(content.encode()).hexdigest()}"


def _reason_not_in_force(id: str, note: Note | None) -> str:
    """Return the reason why a note is not in force."""
    if note is None:
        return f"there is no note {id}"
    if note.forgotten:
        return f"the note {id} was forgotten since the export"
    return f"the note {id} was superseded by {note.superseded_by} since the export"


# --- writing ---------------------------------------------------------------------------------


_HEADINGS: Final[dict[Kind, str]] = {"core": "Core facts", "daily": "Daily entries"}
_KIND_BY_HEADING: Final = {heading.casefold(): kind for kind, heading in _HEADINGS.items()}
_HELP: Final = """\
Change a text, delete an item to forget it, or add one ("- like this"). Continuation
lines are indented by two spaces. Then: steno memory import FILE
"""

_EXPORT_LINE: Final = re.compile(r"<!-- steno notes of (\S+), export (\S+)$")
_ID_LIST_START: Final = "<!-- steno exported ids:"
_ITEM_LINE: Final = re.compile(r"[-*+](?: <!-- (?P<id>\S+) -->)?(?: (?P<text>.*))?$")
_SUBJECT: Final = re.compile(r"\*\*(?P<about>(?:[^*\\]|\\.)+?):\*\*(?: (?P<text>.*))?$", re.DOTALL)


def format_page(scope: Scope, notes: Iterable[Note], *, export_name: str) -> str:
    """Return a page with these notes. `export_name`: name of the export, without spaces."""
    all_notes = list(notes)
    core_notes = [note for note in all_notes if note.kind == "core"]
    daily_notes = [note for note in all_notes if note.kind == "daily"]
    sections = [
        f"<!-- steno notes of {quote(scope.key, safe=':._@+')}, export {export_name}\n{_HELP}-->\n",
        f"# Notes on {_escape_inline(scope.name)} (agent {_escape_inline(scope.agent)})\n",
        f"## {_HEADINGS['core']}\n",
        *(["".join(map(_format_item, core_notes))] if core_notes else []),
        f"## {_HEADINGS['daily']}\n",
    ]
    for day, entries in groupby(daily_notes, lambda note: note.at.date()):
        sections += [f"### {day.isoformat()}\n", "".join(map(_format_item, entries))]
    id_lines = "".join(f"{note.id}\n" for note in all_notes)
    return "\n".join([*sections, f"{_ID_LIST_START}\n{id_lines}-->\n"])


def _format_item(note: Note) -> str:
    about = f"**{_escape_inline(note.about)}:** " if note.about else ""
    text = _escape_text(note.text)
    # Without the escape, this text would be parsed as the subject of the note.
    text = f"\\{text}" if text.startswith("**") else text
    first, *rest = text.split("\n")
    lines = [f"- <!-- {note.id} --> {about}{first}"]
    lines += [f"  {line}" if line else "" for line in rest]
    return "\n".join(lines) + "\n"


_TEXT_TO_ESCAPE: Final = re.compile(r"\\(?![A-Za-z0-9])|<(?=!--)|&(?=#)")
_INLINE_SPECIAL_CHARS: Final = re.compile(r"[\\*<&]")
_INVISIBLE_CHARS: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_ESCAPE_SEQUENCE: Final = re.compile(r"\\([\\*<&])|&#x([0-9A-Fa-f]{1,6});")


def _escape_text(text: str) -> str:
    """Escape a text so that it survives an editor that strips invisible characters."""
    inner_text = text.strip("\n")
    before, _, after = text.partition(inner_text)
    lines = _TEXT_TO_ESCAPE.sub(r"\\\g<0>", inner_text).split("\n")
    return _as_entities(before) + "\n".join(map(_escape_line, lines)) + _as_entities(after)


def _escape_line(line: str) -> str:
    text = line.rstrip()
    trailing_spaces = line[len(text) :]
    escaped = _INVISIBLE_CHARS.sub(lambda match: _as_entities(match[0]), text)
    return escaped + _as_entities(trailing_spaces)


def _escape_inline(text: str) -> str:
    return _escape_line(_INLINE_SPECIAL_CHARS.sub(r"\\\g<0>", text))


def _as_entities(text: str) -> str:
    return "".join(f"&#x{ord(char):X};" for char in text)


def _unescape(text: str) -> str:
    """Return the text without escapes."""

    def unescape_match(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        code = int(match[2], 16)
        return chr(code) if code <= maxunicode else match[0]

    return _ESCAPE_SEQUENCE.sub(unescape_match, text)


# --- reading ---------------------------------------------------------------------------------


def parse_page(text: str) -> Page:
    """Parse an edited page. Raises a UsageError that names the wrong line."""
    parser = _PageParser()
    for line_number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        parser.add_line(line_number, line.rstrip(" \t\r"))
    return parser.build_page()


class _PageParser:
    """A line-by-line parser of a page."""

    def __init__(self) -> None:
        self._scope: Scope | None = None
        self._export_name = ""
        self._exported_ids: list[str] = []
        self._items: list[tuple[Kind, str, int, list[str]]] = []
        self._kind: Kind | None = None
        self._comment: list[str] = []
        """Lines of the comment that is not closed yet."""
        self._blank_line_count = 0
        self._is_item_open = False
        """Whether an indented line continues the last item."""

    def add_line(self, line_number: int, line: str) -> None:
        if self._comment or line.startswith("<!--"):
            self._add_comment_line(line_number, line)
        elif not line:
            self._blank_line_count += 1
        elif line.startswith("#"):
            self._is_item_open = False
            if line.startswith("## "):
                self._kind = _KIND_BY_HEADING.get(line[3:].strip().casefold())
        elif line.startswith(("  ", "\t")) and self._is_item_open:
            lines = self._items[-1][3]
            lines += [""] * self._blank_line_count
            lines.append(line[2:] if line.startswith("  ") else line[1:])
            self._blank_line_count = 0
        elif (match := _ITEM_LINE.match(line)) is not None:
            self._add_item(line_number, match)
        else:
            raise UsageError(
                f"line {line_number} belongs to no note: start it with `- ` for a new note, or "
                "with two spaces to continue the note above; nothing was changed"
            )

    def _add_comment_line(self, line_number: int, line: str) -> None:
        self._comment.append(line)
        self._is_item_open = False
        _, end_mark, trailing = line.partition("-->")
        if not end_mark:
            return
        if trailing:
            raise UsageError(
                f"line {line_number}: text after the end of a comment, `-->`, belongs to no note; "
                "put it on a separate line; nothing was changed"
            )
        first, *rest = self._comment
        if export_match := _EXPORT_LINE.match(first):
            self._export_name = export_match[2]
            try:
                self._scope = scope_from_key(unquote(export_match[1]))
            except InvalidKey as error:
                raise UsageError(
                    f"the first comment of the page has an invalid scope: {error}"
                ) from error
        elif first == _ID_LIST_START:
            self._exported_ids += [id for id in rest if id != "-->"]
        self._comment = []

    def _add_item(self, line_number: int, match: re.Match[str]) -> None:
        if self._kind is None:
            headings = " or ".join(f"`## {heading}`" for heading in _HEADINGS.values())
            raise UsageError(
                f"line {line_number}: a note must be below {headings}; nothing was changed"
            )
        self._items.append((self._kind, match["id"] or "", line_number, [match["text"] or ""]))
        self._blank_line_count = 0
        self._is_item_open = True

    def build_page(self) -> Page:
        """Return the page. Raises UsageError for an unclosed comment or a repeated id."""
        if self._comment:
            raise UsageError("a comment, `<!--`, has no end; nothing was changed")
        items = [_parse_item(*item) for item in self._items]
        line_by_id: dict[str, int] = {}
        for item in items:
            if item.id and line_by_id.setdefault(item.id, item.line_number) != item.line_number:
                raise UsageError(
                    f"line {item.line_number} has the same id as line {line_by_id[item.id]}; "
                    "delete the comment with the id to make it a new note. Nothing was changed"
                )
        return Page(
            scope=self._scope,
            export_name=self._export_name,
            exported_ids=frozenset(self._exported_ids),
            items=items,
        )


def _parse_item(kind: Kind, id: str, line_number: int, lines: Sequence[str]) -> Item:
    text, about = "\n".join(lines), ""
    if subject_match := _SUBJECT.match(text):
        text, about = subject_match["text"] or "", _unescape(subject_match["about"])
    plain_text = _unescape(text)
    if not plain_text.strip():
        raise UsageError(
            f"line {line_number}: a note without text; delete the whole item to forget it; "
            "nothing was changed"
        )
    return Item(kind=kind, id=id, line_number=line_number, text=plain_text, about=about)
