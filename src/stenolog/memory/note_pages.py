r"""Convert notes to a Markdown page that a person can edit, and parse an edited page. Pure.

Each note is a list item with its id in a comment. Continuation lines are indented by two spaces.
Characters that Markdown or an editor would change are escaped as `\<`, `\&`, `\*` and `\\`, and
invisible ones as `&#x20;`. Parsing returns exactly the text that was written.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from sys import maxunicode
from typing import Final
from urllib.parse import quote, unquote

from msgspec import Struct

from stenolog.errors import InvalidKey, UsageError
from stenolog.memory.note_records import Kind, Note
from stenolog.memory.scopes import Scope, scope_from_key

_HEADINGS: Final[dict[Kind, str]] = {"core": "Core facts", "daily": "Daily entries"}
_KIND_BY_HEADING: Final = {heading.casefold(): kind for kind, heading in _HEADINGS.items()}
_HELP: Final = """\
Change a text, delete an item to forget it, or add one ("- like this"). Lines that go on
are indented by two spaces. Then: steno memory import FILE
"""

_EXPORT_LINE: Final = re.compile(r"<!-- steno notes of (\S+), export (\S+)$")
_ID_LIST_START: Final = re.compile(r"<!-- steno exported ids:$")
_ITEM_LINE: Final = re.compile(r"[-*+](?: <!-- (?P<id>\S+) -->)?(?: (?P<text>.*))?$")
_SUBJECT: Final = re.compile(r"\*\*(?P<about>(?:[^*\\]|\\.)+?):\*\*(?: (?P<text>.*))?$", re.DOTALL)


class Item(Struct, frozen=True, kw_only=True):
    """A note on a page."""

    kind: Kind
    text: str
    about: str = ""
    id: str = ""
    """Id of the note; empty for an item that a person added."""
    line: int = 0


class Page(Struct, frozen=True, kw_only=True):
    """A parsed page of notes."""

    scope: Scope | None
    """The scope that the page names, if any."""
    export: str
    """Name of the export; empty if the page is not an export."""
    exported: frozenset[str]
    """Ids of the notes that were exported."""
    items: Sequence[Item]


# --- writing ---------------------------------------------------------------------------------


def to_markdown(scope: Scope, notes: Iterable[Note], *, export: str) -> str:
    """Return a page with these notes. `export` is the name of the page, without spaces."""
    all_notes = list(notes)
    core_notes = [note for note in all_notes if note.kind == "core"]
    daily_notes = [note for note in all_notes if note.kind == "daily"]
    pieces = [
        f"<!-- steno notes of {quote(scope.key, safe=':._@+')}, export {export}\n{_HELP}-->\n",
        f"# Notes on {_escape_inline(scope.name)} (agent {_escape_inline(scope.agent)})\n",
        f"## {_HEADINGS['core']}\n",
        *(["".join(map(_format_item, core_notes))] if core_notes else []),
        f"## {_HEADINGS['daily']}\n",
    ]
    for day, entries in groupby(daily_notes, lambda note: note.at.date()):
        pieces += [f"### {day.isoformat()}\n", "".join(map(_format_item, entries))]
    ids = "".join(f"{note.id}\n" for note in all_notes)
    return "\n".join([*pieces, f"<!-- steno exported ids:\n{ids}-->\n"])


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
_SPECIAL_IN_LINE: Final = re.compile(r"[\\*<&]")
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
    return _escape_line(_SPECIAL_IN_LINE.sub(r"\\\g<0>", text))


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


def from_markdown(text: str) -> Page:
    """Parse an edited page. Raises UsageError, which names the wrong line."""
    parser = _PageParser()
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        parser.add_line(number, line.rstrip(" \t\r"))
    return parser.parsed_page()


class _PageParser:
    """A line-by-line parser of a page."""

    def __init__(self) -> None:
        self._scope: Scope | None = None
        self._export = ""
        self._exported_ids: list[str] = []
        self._items: list[tuple[Kind, str, int, list[str]]] = []
        self._kind: Kind | None = None
        self._comment: list[str] | None = None
        self._blank_line_count = 0
        self._is_item_open = False
        """Whether an indented line continues the last item."""

    def add_line(self, number: int, line: str) -> None:
        if self._comment is not None or line.startswith("<!--"):
            self._add_comment(number, line)
        elif not line:
            self._blank_line_count += 1
        elif line.startswith("#"):
            self._add_heading(line)
        elif line.startswith(("  ", "\t")) and self._is_item_open:
            lines = self._items[-1][3]
            lines += [""] * self._blank_line_count
            lines.append(line[2:] if line.startswith("  ") else line[1:])
            self._blank_line_count = 0
        elif (item := _ITEM_LINE.match(line)) is not None:
            self._add_item(number, item)
        else:
            raise UsageError(
                f"line {number} belongs to no note: start it with `- ` for a new note, or with two "
                "spaces to continue the note above; nothing was changed"
            )

    def _add_comment(self, number: int, line: str) -> None:
        if self._comment is None:
            self._comment = []
        self._comment.append(line)
        self._is_item_open = False
        _, end_mark, trailing = line.partition("-->")
        if not end_mark:
            return
        if trailing:
            raise UsageError(
                f"line {number}: text after the end of a comment, `-->`, belongs to no note; put "
                "it on a separate line; nothing was changed"
            )
        first, *rest = self._comment
        if head := _EXPORT_LINE.match(first):
            self._scope, self._export = _parse_scope(head[1]), head[2]
        elif _ID_LIST_START.match(first):
            self._exported_ids += [name for name in rest if name != "-->"]
        self._comment = None

    def _add_heading(self, line: str) -> None:
        self._is_item_open = False
        if line.startswith("## "):
            self._kind = _KIND_BY_HEADING.get(line[3:].strip().casefold())

    def _add_item(self, number: int, item: re.Match[str]) -> None:
        if self._kind is None:
            headings = " or ".join(f"`## {heading}`" for heading in _HEADINGS.values())
            raise UsageError(f"line {number}: a note must be below {headings}; nothing was changed")
        self._items.append((self._kind, item["id"] or "", number, [item["text"] or ""]))
        self._blank_line_count = 0
        self._is_item_open = True

    def parsed_page(self) -> Page:
        """Return the parsed page. Raises UsageError."""
        if self._comment is not None:
            raise UsageError("a comment, `<!--`, has no end; nothing was changed")
        items = [_parse_item(*item) for item in self._items]
        line_by_id: dict[str, int] = {}
        for item in items:
            if item.id and line_by_id.setdefault(item.id, item.line) != item.line:
                raise UsageError(
                    f"line {item.line} has the same id as line {line_by_id[item.id]}; delete the "
                    "comment with the id to make it a new note. Nothing was changed"
                )
        exported = frozenset(self._exported_ids)
        return Page(scope=self._scope, export=self._export, exported=exported, items=items)


def _parse_item(kind: Kind, id: str, line: int, lines: Sequence[str]) -> Item:
    text = "\n".join(lines)
    about = _SUBJECT.match(text)
    if about is not None:
        text = about["text"] or ""
    plain_text = _unescape(text)
    if not plain_text.strip():
        raise UsageError(
            f"line {line}: a note without text; delete the whole item to forget it; "
            "nothing was changed"
        )
    subject = "" if about is None else _unescape(about["about"])
    return Item(kind=kind, id=id, line=line, text=plain_text, about=subject)


def _parse_scope(name: str) -> Scope:
    try:
        return scope_from_key(unquote(name))
    except InvalidKey as error:
        raise UsageError(f"the first comment of the page has an invalid scope: {error}") from error
