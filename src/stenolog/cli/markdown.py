"""Markdown as it arrives: finished blocks are shown for good, the last one again and again.

A long answer is cut where a block ends, so that only the block being written is ever painted anew.
A list is cut between its items, and a block that grows long between two of its lines.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from stenolog.cli.text import printable
from stenolog.sessions.exporting.fences import ColourBudget, colour_language

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
"""So many lines of code are long enough to show the first of them for good."""
_TOO_LONG: Final = 200
"""So many lines of any block are cut wherever they end."""
_SHARE: Final = 8
"""A block is read again when it grew by this part of it; at each line would be too often."""
_DEEPEST: Final = 19
"""What is nested deeper is shown as it was written: the parser leaves it out."""
_INDENT: Final = 4
"""So many columns one more quote takes."""
_BULLET: Final = re.compile(r"(•|\d+)(?=\s|$)")
_THEME: Final = "ansi_dark"
"""Colours of the terminal's own, and no background: it may be light or dark."""


class Block(Struct, frozen=True, kw_only=True):
    """A part of a text that is shown by itself."""

    source: str
    gap: int = 1
    """How many empty lines stand before it."""
    goes_on: bool = False
    """Whether it is the rest of an item, whose mark was shown before."""


class Stream:
    """A text that is still being written, in blocks."""

    def __init__(self) -> None:
        self._source = ""
        self._gap = 0
        self._goes_on = False
        self._read = 0
        """How many lines of it were whole when it was last read."""

    def add(self, text: str) -> list[Block]:
        """Take in what came next; the blocks that it finished."""
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
        """All that is left; the next text is one of its own."""
        left = self.unfinished
        self._source, self._gap, self._goes_on, self._read = "", 0, False, 0
        return left

    @property
    def unfinished(self) -> list[Block]:
        """What was not finished yet, as it would be shown if no more came."""
        return self._blocks(_parts(self._source))

    def _whole_parts(self) -> "list[_Part]":
        # What a line is, its end decides: `-` may become an item, a rule or a heading.
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
            # Many models number all items 1, which counts only from where the list begins.
            lines[0] = _NUMBER.sub(rf"\g<1>{part.number}", lines[0], count=1)
        self._source, self._gap, self._goes_on = "\n".join(lines), part.gap, False

    def _first_lines(self, part: "_Part") -> Iterator[Block]:
        """The first lines of a block that grows long; they will not look different later."""
        if part.kind == "fence":
            if part.fence is not None:
                yield from self._some_code(part, part.fence)
            return
        lines = self._source.split("\n")[part.line :]
        # The last line stays, as what the next ones go on from.
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
    """A block, and where it stands in the text."""

    source: str
    gap: int
    line: int = 0
    number: int | None = None
    """Which number it has, as an item of a list that has numbers."""
    fence: str | None = None
    """What would close it, as code whose end has not come yet."""
    kind: str = ""
    """What it is, in the parser's words."""


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
    """The rest of a block that was cut, so that it is read as the same kind of block."""
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
        # What is not indented that far is the next line of a paragraph.
        inside = line.startswith(mark) or not line[: len(mark)].strip()
        line = mark + (line[len(mark) :] if inside else line.lstrip())
    return [line, *further]


def _code_left_open(lines: Sequence[str]) -> str | None:
    """The line that begins the code in which a quote or an item was cut."""
    for token in _parser().parse("\n".join(lines)):
        if token.type == "fence" and token.map is not None and token.map[1] >= len(lines):
            bare = [line.lstrip("> ") for line in lines]
            return lines[token.map[0]] if _open_fence(token, bare) is not None else None
    return None


def _place_to_cut(lines: Sequence[str]) -> int | None:
    """How many of these lines of code to show for good; None: it is not that long yet.

    Where something new begins after an empty line, for there no text of several lines is open.
    """
    if len(lines) < _LONG:
        return None
    for at in range(len(lines) - 1, 0, -1):
        if lines[at][:1].strip() and not lines[at - 1].strip():
            return at
    return len(lines) if len(lines) >= _TOO_LONG else None


@cache
def _parser() -> "MarkdownIt":
    # Slow to import, and only a terminal needs it.
    from markdown_it import MarkdownIt

    # Tags and the targets of links are text that somebody wrote: shown, not swallowed.
    plain = MarkdownIt("commonmark", {"html": False}).disable("reference")
    return plain.enable("strikethrough").enable("table")


def painted(
    block: Block, console: "Console", *, style: str = "", budget: ColourBudget | None = None
) -> list[str]:
    """Return the lines of a block for this console, with the empty ones before it.

    `budget` is shared by the blocks of one message.
    """
    from rich.markdown import Markdown
    from rich.text import Text

    budget = ColourBudget() if budget is None else budget
    # Links are written out: where one leads is for the reader to see.
    shown = Markdown("", code_theme=_THEME, hyperlinks=False)
    shown.parsed = _parser().parse(printable(block.source))  # guard: answer-printable
    for token in shown.parsed:
        if token.type == "fence":
            lexer = colour_language(token.info, token.content)
            token.info = lexer if lexer and budget.take(token.content) else ""
        # A title in the middle of the line looks lost between paragraphs.
        token.tag = "h2" if token.tag == "h1" else token.tag
        for part in token.children or ():
            if part.type == "softbreak":
                # Verse, addresses, logs: whoever wrote the line end meant it.
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
