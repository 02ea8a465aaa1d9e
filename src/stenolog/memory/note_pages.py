r"""Convert notes to a Markdown page that a person can edit, and parse such a page. Pure.

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
_KINDS: Final = {heading.casefold(): kind for kind, heading in _HEADINGS.items()}
_HELP: Final = """\
Change a text, delete an item to forget it, or add one ("- like this"). Lines that go on
are indented by two spaces. Then: steno memory import FILE
"""

_HEAD: Final = re.compile(r"<!-- steno notes of (\S+), export (\S+)$")
_LISTED: Final = re.compile(r"<!-- steno exported ids:$")
_ITEM: Final = re.compile(r"[-*+](?: <!-- (?P<id>\S+) -->)?(?: (?P<text>.*))?$")
_ABOUT: Final = re.compile(r"\*\*(?P<about>(?:[^*\\]|\\.)+?):\*\*(?: (?P<text>.*))?$", re.DOTALL)


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
    listed = list(notes)
    core = [note for note in listed if note.kind == "core"]
    daily = [note for note in listed if note.kind == "daily"]
    pieces = [
        f"<!-- steno notes of {quote(scope.key, safe=':._@+')}, export {export}\n{_HELP}-->\n",
        f"# Notes on {_escaped_in_line(scope.name)} (agent {_escaped_in_line(scope.agent)})\n",
        f"## {_HEADINGS['core']}\n",
        *(["".join(map(_item, core))] if core else []),
        f"## {_HEADINGS['daily']}\n",
    ]
    for day, entries in groupby(daily, lambda note: note.at.date()):
        pieces += [f"### {day.isoformat()}\n", "".join(map(_item, entries))]
    ids = "".join(f"{note.id}\n" for note in listed)
    return "\n".join([*pieces, f"<!-- steno exported ids:\n{ids}-->\n"])


def _item(note: Note) -> str:
    about = f"**{_escaped_in_line(note.about)}:** " if note.about else ""
    text = _escaped(note.text)
    # Without the escape, this text would be parsed as the subject of the note.
    text = f"\\{text}" if text.startswith("**") else text
    first, *rest = text.split("\n")
    lines = [f"- <!-- {note.id} --> {about}{first}"]
    lines += [f"  {line}" if line else "" for line in rest]
    return "\n".join(lines) + "\n"


_TO_ESCAPE: Final = re.compile(r"\\(?![A-Za-z0-9])|<(?=!--)|&(?=#)")
_IN_LINE: Final = re.compile(r"[\\*<&]")
_INVISIBLE: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")
_ESCAPED: Final = re.compile(r"\\([\\*<&])|&#x([0-9A-Fa-f]{1,6});")


def _escaped(text: str) -> str:
    """Escape a text so that it survives an editor that strips invisible characters."""
    body = text.strip("\n")
    before, _, after = text.partition(body)
    lines = _TO_ESCAPE.sub(r"\\\g<0>", body).split("\n")
    return _as_entities(before) + "\n".join(map(_escaped_line, lines)) + _as_entities(after)


def _escaped_line(line: str) -> str:
    line_by_id = line.rstrip()
    return _INVISIBLE.sub(lambda match: _as_entities(match[0]), line_by_id) + _as_entities(
        line[len(line_by_id) :]
    )


def _escaped_in_line(text: str) -> str:
    return _escaped_line(_IN_LINE.sub(r"\\\g<0>", text))


def _as_entities(text: str) -> str:
    return "".join(f"&#x{ord(char):X};" for char in text)


def _plain(text: str) -> str:
    """Return the text without escapes."""
    return _ESCAPED.sub(lambda match: match[1] or _char(match), text)


def _char(match: re.Match[str]) -> str:
    code = int(match[2], 16)
    return chr(code) if code <= maxunicode else match[0]


# --- reading ---------------------------------------------------------------------------------


def from_markdown(text: str) -> Page:
    """Parse an edited page. Raises UsageError, which names the wrong line."""
    reader = _PageParser()
    for number, line in enumerate(text.removeprefix("\ufeff").split("\n"), 1):
        reader.add_line(number, line.rstrip(" \t\r"))
    return reader.page()


class _PageParser:
    """A line-by-line parser of a page."""

    def __init__(self) -> None:
        self._scope: Scope | None = None
        self._export = ""
        self._exported: list[str] = []
        self._items: list[tuple[Kind, str, int, list[str]]] = []
        self._kind: Kind | None = None
        self._comment: list[str] | None = None
        self._blank = 0
        self._open = False
        """Whether an indented line continues the last item."""

    def add_line(self, number: int, line: str) -> None:
        if self._comment is not None or line.startswith("<!--"):
            self._add_comment(number, line)
        elif not line:
            self._blank += 1
        elif line.startswith("#"):
            self._add_heading(line)
        elif line.startswith(("  ", "\t")) and self._open:
            lines = self._items[-1][3]
            lines += [""] * self._blank
            lines.append(line[2:] if line.startswith("  ") else line[1:])
            self._blank = 0
        elif (item := _ITEM.match(line)) is not None:
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
        self._open = False
        _, end_mark, trailing = line.partition("-->")
        if not end_mark:
            return
        if trailing:
            raise UsageError(
                f"line {number}: text after the end of a comment, `-->`, belongs to no note; put "
                "it on a separate line; nothing was changed"
            )
        first, *rest = self._comment
        if head := _HEAD.match(first):
            self._scope, self._export = _scope_named(head[1]), head[2]
        elif _LISTED.match(first):
            self._exported += [name for name in rest if name != "-->"]
        self._comment = None

    def _add_heading(self, line: str) -> None:
        self._open = False
        if line.startswith("## "):
            self._kind = _KINDS.get(line[3:].strip().casefold())

    def _add_item(self, number: int, item: re.Match[str]) -> None:
        if self._kind is None:
            headings = " or ".join(f"`## {heading}`" for heading in _HEADINGS.values())
            raise UsageError(f"line {number}: a note must be below {headings}; nothing was changed")
        self._items.append((self._kind, item["id"] or "", number, [item["text"] or ""]))
        self._blank = 0
        self._open = True

    def page(self) -> Page:
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
        return Page(
            scope=self._scope,
            export=self._export,
            exported=frozenset(self._exported),
            items=items,
        )


def _parse_item(kind: Kind, id: str, line: int, lines: Sequence[str]) -> Item:
    text = "\n".join(lines)
    about = _ABOUT.match(text)
    if about is not None:
        text = about["text"] or ""
    plain = _plain(text)
    if not plain.strip():
        raise UsageError(
            f"line {line}: a note without text; delete the whole item to forget it; "
            "nothing was changed"
        )
    return Item(
        kind=kind,
        id=id,
        line=line,
        text=plain,
        about="" if about is None else _plain(about["about"]),
    )


def _scope_named(name: str) -> Scope:
    try:
        return scope_from_key(unquote(name))
    except InvalidKey as error:
        raise UsageError(f"the first comment of the page has an invalid scope: {error}") from error
