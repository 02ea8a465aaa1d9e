"""Streaming Markdown for the terminal: finished blocks are printed once, the last is repainted.

A long answer is split at block ends, so that only the unfinished block is painted again. A list is
split between its items, and a very long block between two of its lines.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from stenolog.cli.output import printable
from stenolog.transfer.export.code_blocks import ColourBudget, colour_language

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.text import Text

_LISTS: Final = ("bullet_list_open", "ordered_list_open")
_NESTING: Final = ("blockquote_open", "list_item_open")
_MARK: Final = re.compile(r" *(?:[-+*]|\d+[.)]) {1,4}")
_NUMBER: Final = re.compile(r"( *)\d+")
_LONG: Final = 40
"""Number of lines of code from which the first ones are printed before the block ends."""
_TOO_LONG: Final = 200
"""Number of lines from which any block is split at a line end."""
_SHARE: Final = 8
"""A block is parsed again when it has grown by 1/_SHARE; parsing it at each line would be slow."""
_DEEPEST: Final = 19
"""Maximum nesting that is rendered. Deeper text is shown as source: the parser drops it."""
_INDENT: Final = 4
"""Columns that one level of quoting takes."""
_BULLET: Final = re.compile(r"(•|\d+)(?=\s|$)")
_THEME: Final = "ansi_dark"
"""Colours of the terminal's palette without a background: it may be light or dark."""


class Block(Struct, frozen=True, kw_only=True):
    """A part of a text that is rendered separately."""

    source: str
    gap: int = 1
    """Number of empty lines before it."""
    goes_on: bool = False
    """Whether it is the rest of a list item whose bullet was already printed."""


class MarkdownStream:
    """Streamed text, split into blocks."""

    def __init__(self) -> None:
        self._source = ""
        self._gap = 0
        self._goes_on = False
        self._read = 0
        """Number of complete lines when the text was last parsed."""

    def add(self, text: str) -> list[Block]:
        """Add streamed text and return the blocks that it completes."""
        self._source += text
        if "\n" not in text:
            return []
        if self._source.count("\n") - self._read < max(1, self._read // _SHARE):
            return []
        found = self._whole_parts()
        done: list[Block] = []
        if len(found) > 1:
            done = self._blocks(found[:-1])
            self._begin_at(found[-1])
            found = self._whole_parts()
        if found:
            done += self._first_lines(found[0])
        self._read = self._source.count("\n")
        return done

    def end(self) -> list[Block]:
        """Return the remaining blocks and reset the stream."""
        left = self.unfinished
        self._source, self._gap, self._goes_on, self._read = "", 0, False, 0
        return left

    @property
    def unfinished(self) -> list[Block]:
        """Return the unfinished blocks, rendered as if the text ended here."""
        return self._blocks(_parts(self._source))

    def _whole_parts(self) -> "list[_Part]":
        # Parse only complete lines: a `-` may become an item, a rule or a heading.
        return _parts(self._source[: self._source.rfind("\n") + 1])

    def _blocks(self, parts: "Sequence[_Part]") -> list[Block]:
        return [
            Block(
                source=part.source,
                gap=part.gap if at else self._gap,
                goes_on=self._goes_on and not at,
            )
            for at, part in enumerate(parts)
        ]

    def _begin_at(self, part: "_Part") -> None:
        lines = self._source.split("\n")[part.line :]
        if part.number is not None:
            # Many models number all items 1. Markdown uses only the first number of a list.
            lines[0] = _NUMBER.sub(rf"\g<1>{part.number}", lines[0], count=1)
        self._source, self._gap, self._goes_on = "\n".join(lines), part.gap, False

    def _first_lines(self, part: "_Part") -> Iterator[Block]:
        """Yield the first lines of a very long block. Later text does not change how they look."""
        if part.kind == "fence":
            if part.fence is not None:
                yield from self._some_code(part, part.fence)
            return
        lines = self._source.split("\n")[part.line :]
        # Keep the last line: the next lines may continue it.
        cut = max((at for at, line in enumerate(lines[:-1]) if line.strip()), default=0)
        if cut < _TOO_LONG:
            return
        first = _Part(source="\n".join(lines[:cut]), gap=part.gap)
        yield from self._blocks([first])
        self._source = "\n".join(_going_on(part.kind, lines[:cut], lines[cut:]))
        self._gap = int(part.kind == "table_open")
        self._goes_on = part.kind == "list_item_open"

    def _some_code(self, part: "_Part", fence: str) -> Iterator[Block]:
        opening, *lines = self._source.split("\n")[part.line :]
        cut = _place_to_cut(lines[:-1])
        if cut is None:
            return
        first, rest = lines[:cut], lines[cut:]
        gap = next((at for at, line in enumerate(reversed(first)) if line.strip()), 0)
        first = first[: len(first) - gap]
        yield from self._blocks([_Part(source="\n".join([opening, *first, fence]), gap=part.gap)])
        self._source, self._gap = "\n".join([opening, *rest]), gap


class _Part(Struct, frozen=True, kw_only=True):
    """A block and its position in the text."""

    source: str
    gap: int
    line: int = 0
    number: int | None = None
    """Number of an item in a numbered list."""
    fence: str | None = None
    """The closing fence of a code block that is still open."""
    kind: str = ""
    """Token type of the Markdown parser."""


def _parts(source: str) -> list[_Part]:
    lines = source.split("\n")
    tokens = _parser().parse(source)
    found: list[_Part] = []
    for at, token in enumerate(tokens):
        if token.level or token.map is None or token.nesting < 0:
            continue
        if token.type in _LISTS:
            found += _items(tokens, at, lines)
        else:
            first, end = token.map
            text = "\n".join(lines[first:end])
            fence = _open_fence(token, lines)
            found.append(_Part(source=text, gap=1, line=first, fence=fence, kind=token.type))
    return found


def _items(tokens: "Sequence[Token]", at: int, lines: Sequence[str]) -> Iterator[_Part]:
    """Yield the items of the list that begins at this token."""
    numbered = tokens[at].type == "ordered_list_open"
    number = int(tokens[at].attrs.get("start", 1)) if numbered else None
    for place in range(at + 1, len(tokens)):
        token = tokens[place]
        if token.level == 0:
            return
        if token.level != 1 or token.type != "list_item_open" or token.map is None:
            continue
        first, end = token.map
        text = "\n".join(lines[first:end])
        if number is not None:
            text = _NUMBER.sub(rf"\g<1>{number}", text, count=1)
        apart = bool(first) and not lines[first - 1].strip()
        gap = int(apart)
        yield _Part(source=text, gap=gap, line=first, number=number, kind=token.type)
        number = None if number is None else number + 1


def _open_fence(token: "Token", lines: Sequence[str]) -> str | None:
    if token.type != "fence" or token.map is None:
        return None
    first, end = token.map
    last = lines[end - 1].strip()
    closed = end - first > 1 and last.startswith(token.markup) and not last.strip(token.markup[0])
    return None if closed else token.markup


def _going_on(kind: str, first: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Return the rest of a split block, changed so that it is parsed as the same kind."""
    if kind == "table_open":
        return [*first[:2], *rest]
    code = _code_left_open(first)
    line, *further = rest if code is None else (code, *rest)
    if kind == "blockquote_open" and not line.lstrip().startswith(">"):
        line = f"> {line}"
    elif kind == "paragraph_open":
        line = line.lstrip()
    elif kind == "list_item_open":
        found = _MARK.match(first[0])
        mark = found[0] if found is not None else ""
        # A line with less indentation continues a paragraph.
        inside = line.startswith(mark) or not line[: len(mark)].strip()
        line = mark + (line[len(mark) :] if inside else line.lstrip())
    return [line, *further]


def _code_left_open(lines: Sequence[str]) -> str | None:
    """Return the opening line of the code block in which a quote or item was split."""
    for token in _parser().parse("\n".join(lines)):
        if token.type == "fence" and token.map is not None and token.map[1] >= len(lines):
            bare = [line.lstrip("> ") for line in lines]
            return lines[token.map[0]] if _open_fence(token, bare) is not None else None
    return None


def _place_to_cut(lines: Sequence[str]) -> int | None:
    """Return the number of lines of code to print now, or None if there are too few.

    It splits after an empty line where an unindented line starts, because multi-line strings rarely
    continue there.
    """
    if len(lines) < _LONG:
        return None
    for at in range(len(lines) - 1, 0, -1):
        if lines[at][:1].strip() and not lines[at - 1].strip():
            return at
    return len(lines) if len(lines) >= _TOO_LONG else None


@cache
def _parser() -> "MarkdownIt":
    # Imported late: slow, and only needed in a terminal.
    from markdown_it import MarkdownIt

    # HTML tags and link definitions are shown as text, not dropped.
    plain = MarkdownIt("commonmark", {"html": False}).disable("reference")
    return plain.enable("strikethrough").enable("table")


def render_block(
    block: Block, console: "Console", *, style: str = "", budget: ColourBudget | None = None
) -> list[str]:
    """Return the lines of a block for this console, with the empty ones before it.

    `budget` is shared by the blocks of one message.
    """
    from rich.markdown import Markdown
    from rich.text import Text

    budget = ColourBudget() if budget is None else budget
    # Link targets are written out, so that the reader sees them.
    shown = Markdown("", code_theme=_THEME, hyperlinks=False)
    shown.parsed = _parser().parse(printable(block.source))  # guard: answer-printable
    for token in shown.parsed:
        if token.type == "fence":
            lexer = colour_language(token.info, token.content)
            token.info = lexer if lexer and budget.take(token.content) else ""
        # A centred title looks misplaced between paragraphs.
        token.tag = "h2" if token.tag == "h1" else token.tag
        for part in token.children or ():
            if part.type == "softbreak":
                # Keep line ends: they matter in verse, addresses and logs.
                part.type = "hardbreak"
            elif part.type == "image":
                part.content = f"[image: {part.content}] ({part.attrs.get('src', '')})"
                part.type, part.tag, part.children = "text", "", None
    lines = _without_empty_ends(_printed(shown, console, style))
    nested = [token.level for token in shown.parsed if token.type in _NESTING]
    too_deep = max(nested, default=-1) >= min(_DEEPEST, console.width // _INDENT - 1)
    if too_deep or (not lines and block.source.strip()):
        lines = _without_empty_ends(_printed(Text(printable(block.source)), console, style))
    elif block.goes_on and shown.parsed[0].type in _LISTS:
        lines[0] = _BULLET.sub(lambda mark: " " * len(mark[0]), lines[0], count=1)
        lines = _without_empty_ends(lines)
    return [""] * block.gap + lines


def _printed(shown: "Markdown | Text", console: "Console", style: str) -> list[str]:
    with console.capture() as captured:
        console.print(shown, highlight=False, style=style or None)
    return [line.rstrip() for line in captured.get().split("\n")]


_STYLE: Final = re.compile(r"\x1b\[[0-9;]*m")


def _without_empty_ends(lines: list[str]) -> list[str]:
    written = [at for at, line in enumerate(lines) if _STYLE.sub("", line).strip()]
    return lines[written[0] : written[-1] + 1] if written else []
