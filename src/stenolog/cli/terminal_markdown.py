"""Streaming Markdown for the terminal: finished blocks are printed once, the last is repainted.

A long answer is split at block ends, so that only the unfinished block is painted again. A list is
split between its items, and a very long block between two of its lines.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from stenolog.cli.output import printable, render_lines
from stenolog.transfer.export.code_blocks import ColourBudget, colour_language

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.text import Text

_LIST_TOKENS: Final = ("bullet_list_open", "ordered_list_open")
_NESTING_TOKENS: Final = ("blockquote_open", "list_item_open")
_LIST_MARKER: Final = re.compile(r" *(?:[-+*]|\d+[.)]) {1,4}")
_ITEM_NUMBER: Final = re.compile(r"( *)\d+")
_EARLY_CODE_LINES: Final = 40
"""The first lines of a code block with this many lines are printed before the block ends."""
_MAX_BLOCK_LINES: Final = 200
"""A block with this many lines is split at a line end."""
_REPARSE_SHARE: Final = 8
"""A block is parsed again after it has grown by an eighth; once per line would be slow."""
_MAX_NESTING: Final = 19
"""Maximum nesting that is rendered. Deeper text is shown as source: the parser drops it."""
_QUOTE_INDENT: Final = 4
"""Number of columns by which a quote is indented."""
_BULLET: Final = re.compile(r"(•|\d+)(?=\s|$)")
_CODE_THEME: Final = "ansi_dark"
"""Theme with the terminal's own colours and no background, for light and dark terminals."""


class Block(Struct, frozen=True, kw_only=True):
    """A part of a text that is rendered separately."""

    source: str
    gap: int = 1
    """Number of empty lines before the block."""
    is_continuation: bool = False
    """Whether the block is the rest of a list item whose bullet was already printed."""


class MarkdownStream:
    """Streamed text, split into blocks."""

    def __init__(self) -> None:
        self._source = ""
        self._gap = 0
        self._is_continuation = False
        self._parsed_lines = 0
        """Number of complete lines when the text was last parsed."""

    def add(self, text: str) -> list[Block]:
        """Add streamed text and return the blocks that it completes."""
        self._source += text
        if "\n" not in text:
            return []
        if self._source.count("\n") - self._parsed_lines < max(
            1, self._parsed_lines // _REPARSE_SHARE
        ):
            return []
        parts = self._complete_blocks()
        blocks: list[Block] = []
        if len(parts) > 1:
            blocks = self._make_blocks(parts[:-1])
            self._start_after(parts[-1])
            parts = self._complete_blocks()
        if parts:
            blocks += self._split_block(parts[0])
        self._parsed_lines = self._source.count("\n")
        return blocks

    def end(self) -> list[Block]:
        """Return the remaining blocks and reset the stream."""
        blocks = self.unfinished
        self._source, self._gap, self._is_continuation, self._parsed_lines = "", 0, False, 0
        return blocks

    @property
    def unfinished(self) -> list[Block]:
        """Return the unfinished blocks, rendered as if the text ended here."""
        return self._make_blocks(_parse_blocks(self._source))

    def _complete_blocks(self) -> "list[_ParsedBlock]":
        # Parse only complete lines: an incomplete `-` may become a list item, a rule or a heading.
        return _parse_blocks(self._source[: self._source.rfind("\n") + 1])

    def _make_blocks(self, parts: "Sequence[_ParsedBlock]") -> list[Block]:
        return [
            Block(
                source=block.source,
                gap=block.gap if index else self._gap,
                is_continuation=self._is_continuation and not index,
            )
            for index, block in enumerate(parts)
        ]

    def _start_after(self, part: "_ParsedBlock") -> None:
        lines = self._source.split("\n")[part.line :]
        if part.number is not None:
            # Many models number all items 1. Markdown uses only the first number of a list.
            lines[0] = _ITEM_NUMBER.sub(rf"\g<1>{part.number}", lines[0], count=1)
        self._source, self._gap, self._is_continuation = "\n".join(lines), part.gap, False

    def _split_block(self, part: "_ParsedBlock") -> Iterator[Block]:
        """Yield the first lines of a very long block. Later text does not change these lines."""
        if part.kind == "fence":
            if part.fence is not None:
                yield from self._split_code(part, part.fence)
            return
        lines = self._source.split("\n")[part.line :]
        # Keep the last line: text that arrives later may continue this line.
        split = max((index for index, line in enumerate(lines[:-1]) if line.strip()), default=0)
        if split < _MAX_BLOCK_LINES:
            return
        first_part = _ParsedBlock(source="\n".join(lines[:split]), gap=part.gap)
        yield from self._make_blocks([first_part])
        self._source = "\n".join(_continue_block(part.kind, lines[:split], lines[split:]))
        self._gap = int(part.kind == "table_open")
        self._is_continuation = part.kind == "list_item_open"

    def _split_code(self, part: "_ParsedBlock", fence: str) -> Iterator[Block]:
        opening, *lines = self._source.split("\n")[part.line :]
        split = _find_split(lines[:-1])
        if split is None:
            return
        first_lines, other_lines = lines[:split], lines[split:]
        gap = next((index for index, line in enumerate(reversed(first_lines)) if line.strip()), 0)
        first_lines = first_lines[: len(first_lines) - gap]
        yield from self._make_blocks(
            [_ParsedBlock(source="\n".join([opening, *first_lines, fence]), gap=part.gap)]
        )
        self._source, self._gap = "\n".join([opening, *other_lines]), gap


class _ParsedBlock(Struct, frozen=True, kw_only=True):
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


def _parse_blocks(source: str) -> list[_ParsedBlock]:
    lines = source.split("\n")
    tokens = _parser().parse(source)
    parts: list[_ParsedBlock] = []
    for index, token in enumerate(tokens):
        if token.level or token.map is None or token.nesting < 0:
            continue
        if token.type in _LIST_TOKENS:
            parts += _list_items(tokens, index, lines)
        else:
            start, end = token.map
            text = "\n".join(lines[start:end])
            fence = _unclosed_fence(token, lines)
            parts.append(_ParsedBlock(source=text, gap=1, line=start, fence=fence, kind=token.type))
    return parts


def _list_items(tokens: "Sequence[Token]", at: int, lines: Sequence[str]) -> Iterator[_ParsedBlock]:
    """Yield the items of the list that begins at this token."""
    is_numbered = tokens[at].type == "ordered_list_open"
    number = int(tokens[at].attrs.get("start", 1)) if is_numbered else None
    for index in range(at + 1, len(tokens)):
        token = tokens[index]
        if token.level == 0:
            return
        if token.level != 1 or token.type != "list_item_open" or token.map is None:
            continue
        start, end = token.map
        text = "\n".join(lines[start:end])
        if number is not None:
            text = _ITEM_NUMBER.sub(rf"\g<1>{number}", text, count=1)
        gap = int(bool(start) and not lines[start - 1].strip())
        yield _ParsedBlock(source=text, gap=gap, line=start, number=number, kind=token.type)
        number = None if number is None else number + 1


def _unclosed_fence(token: "Token", lines: Sequence[str]) -> str | None:
    if token.type != "fence" or token.map is None:
        return None
    first, end = token.map
    last = lines[end - 1].strip()
    closed = end - first > 1 and last.startswith(token.markup) and not last.strip(token.markup[0])
    return None if closed else token.markup


def _continue_block(kind: str, first: Sequence[str], rest: Sequence[str]) -> list[str]:
    """Return the rest of a split block, changed so that it is parsed as the same kind."""
    if kind == "table_open":
        return [*first[:2], *rest]
    code = _opening_code_line(first)
    line, *other_lines = rest if code is None else (code, *rest)
    if kind == "blockquote_open" and not line.lstrip().startswith(">"):
        line = f"> {line}"
    elif kind == "paragraph_open":
        line = line.lstrip()
    elif kind == "list_item_open":
        match = _LIST_MARKER.match(first[0])
        marker = match[0] if match is not None else ""
        # A line with less indentation continues a paragraph.
        is_indented = line.startswith(marker) or not line[: len(marker)].strip()
        line = marker + (line[len(marker) :] if is_indented else line.lstrip())
    return [line, *other_lines]


def _opening_code_line(lines: Sequence[str]) -> str | None:
    """Return the opening line of the code block in which a quote or item was split."""
    for token in _parser().parse("\n".join(lines)):
        if token.type == "fence" and token.map is not None and token.map[1] >= len(lines):
            unquoted = [line.lstrip("> ") for line in lines]
            return lines[token.map[0]] if _unclosed_fence(token, unquoted) is not None else None
    return None


def _find_split(lines: Sequence[str]) -> int | None:
    """Return the number of lines of code to print now, or None if there are too few.

    Code is split between an empty line and an unindented line, because multi-line strings rarely
    continue there.
    """
    if len(lines) < _EARLY_CODE_LINES:
        return None
    for index in range(len(lines) - 1, 0, -1):
        if lines[index][:1].strip() and not lines[index - 1].strip():
            return index
    return len(lines) if len(lines) >= _MAX_BLOCK_LINES else None


@cache
def _parser() -> "MarkdownIt":
    # This import is slow and only needed in a terminal.
    from markdown_it import MarkdownIt

    # HTML tags and link definitions are shown as text, not dropped.
    parser = MarkdownIt("commonmark", {"html": False}).disable("reference")
    return parser.enable("strikethrough").enable("table")


def render_block(
    block: Block, console: "Console", *, style: str = "", budget: ColourBudget | None = None
) -> list[str]:
    """Return the lines of a block for this console, with the empty lines before the block.

    `budget` is shared by the blocks of one message.
    """
    from rich.markdown import Markdown
    from rich.text import Text

    budget = ColourBudget() if budget is None else budget
    # Link targets are written out, so that the reader sees them.
    markdown = Markdown("", code_theme=_CODE_THEME, hyperlinks=False)
    markdown.parsed = _parser().parse(printable(block.source))  # guard: answer-printable
    for token in markdown.parsed:
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
    lines = _render_text_lines(markdown, console, style)
    levels = [token.level for token in markdown.parsed if token.type in _NESTING_TOKENS]
    is_too_deep = max(levels, default=-1) >= min(_MAX_NESTING, console.width // _QUOTE_INDENT - 1)
    if is_too_deep or (not lines and block.source.strip()):
        lines = _render_text_lines(Text(printable(block.source)), console, style)
    elif block.is_continuation and markdown.parsed[0].type in _LIST_TOKENS:
        lines[0] = _BULLET.sub(lambda mark: " " * len(mark[0]), lines[0], count=1)
        lines = _strip_empty_lines(lines)
    return [""] * block.gap + lines


_STYLE_CODE: Final = re.compile(r"\x1b\[[0-9;]*m")


def _render_text_lines(content: "Markdown | Text", console: "Console", style: str) -> list[str]:
    """Return the rendered lines without empty lines at the beginning and the end."""
    rendered = render_lines(console, content, style=style or None)
    return _strip_empty_lines([line.rstrip() for line in rendered])


def _strip_empty_lines(lines: list[str]) -> list[str]:
    filled = [index for index, line in enumerate(lines) if _STYLE_CODE.sub("", line).strip()]
    return lines[filled[0] : filled[-1] + 1] if filled else []
