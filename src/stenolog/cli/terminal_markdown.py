"""Streaming Markdown for the terminal: finished blocks are printed once.

An answer is split at block ends, so that only the unfinished block is painted again. A list is
split between its items, and long code between two of its lines.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.cli.output import printable, render_lines
from stenolog.transfer.export.code_blocks import ColourBudget, find_lexer

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from rich.console import Console
    from rich.markdown import Markdown
    from rich.text import Text

_LIST_TOKENS: Final = ("bullet_list_open", "ordered_list_open")
_NESTING_TOKENS: Final = ("blockquote_open", "list_item_open")
_ITEM_NUMBER: Final = re.compile(r"( *)\d+")
_EARLY_CODE_LINES: Final = 40
"""Number of lines after which the start of an unfinished code block may be printed."""
_MAX_PREVIEW_LINES: Final = 200
"""Maximum number of lines of an unfinished block that are laid out at each repaint."""
_REPARSE_DIVISOR: Final = 8
"""A block is parsed again only after it has grown by 1/8. Parsing after every line is slow."""
_MAX_NESTING: Final = 19
"""Maximum nesting depth. Deeper text is shown as Markdown source, because the parser drops it."""
_QUOTE_INDENT: Final = 4
"""Number of columns by which a quote is indented."""
_CODE_THEME: Final = "ansi_dark"
"""Theme with the terminal's own colours and no background, for light and dark terminals."""


class Block(Struct, frozen=True, kw_only=True):
    """A block of Markdown text, such as a paragraph, which is rendered separately."""

    source: str
    gap: int = 1
    """Number of empty lines before the block."""
    end: int = 0
    """Line of the parsed text at which the block ends."""
    fence: str = ""
    """The missing closing fence of an unfinished code block."""


class MarkdownStream:
    """Streamed Markdown, split into blocks."""

    def __init__(self) -> None:
        self._source = ""
        self._gap = 0
        self._parsed_lines = 0
        """Number of complete lines when the text was last parsed."""

    def add(self, text: str) -> list[Block]:
        """Add streamed text and return the blocks that it completes."""
        # The parser takes a carriage return for a line end.
        self._source += text.replace("\r", "")
        new_lines = self._source.count("\n") - self._parsed_lines
        if "\n" not in text or new_lines < max(1, self._parsed_lines // _REPARSE_DIVISOR):
            return []
        # Parse only complete lines: an incomplete `-` may become a list item, a rule or a heading.
        blocks = _parse_blocks(self._source[: self._source.rfind("\n") + 1], self._gap)
        if blocks:
            last_block = blocks.pop()
            other_lines = self._source.split("\n")[last_block.end :]
            lines = last_block.source.split("\n")
            self._gap = last_block.gap
            if last_block.fence and (split := _find_code_split(lines)):
                code = "\n".join(lines[:split]).rstrip("\n")
                blocks.append(Block(source=f"{code}\n{last_block.fence}", gap=self._gap))
                self._gap = split - 1 - code.count("\n")
                lines = [lines[0], *lines[split:]]
            self._source = "\n".join([*lines, *other_lines])
        self._parsed_lines = self._source.count("\n")
        return blocks

    def end(self) -> list[Block]:
        """Return the remaining blocks and reset the stream."""
        blocks = _parse_blocks(self._source, self._gap)
        self._source, self._gap, self._parsed_lines = "", 0, 0
        return blocks

    @property
    def unfinished(self) -> list[Block]:
        """Return the unfinished blocks, parsed as if the text ended here; only their last lines."""
        lines = self._source.split("\n")
        return _parse_blocks("\n".join(lines[-_MAX_PREVIEW_LINES:]), self._gap)


def _parse_blocks(source: str, first_gap: int) -> list[Block]:
    """Return the blocks of a text. `first_gap` is the gap before the first block."""
    lines = source.split("\n")
    blocks: list[Block] = []
    number: int | None = None
    for token in _markdown_parser().parse(source):
        is_item = token.type == "list_item_open" and token.level == 1
        if token.map is None or (token.level and not is_item):
            continue
        if token.type in _LIST_TOKENS:
            is_numbered = token.type == "ordered_list_open"
            number = int(token.attrs.get("start", 1)) if is_numbered else None
            continue
        start, end = token.map
        text = "\n".join(lines[start:end])
        if is_item and number is not None:
            # Many models number all items 1.
            text = _ITEM_NUMBER.sub(rf"\g<1>{number}", text, count=1)
            number += 1
        gap = int(not is_item or not lines[start - 1].strip())
        # The content of a closed code block has two lines less than the block.
        is_open = token.type == "fence" and token.content.count("\n") == end - start - 1
        fence = token.markup if is_open else ""
        blocks.append(Block(source=text, gap=gap, end=end, fence=fence))
    if blocks:
        blocks[0] = replace(blocks[0], gap=first_gap)
    return blocks


def _find_code_split(lines: Sequence[str]) -> int | None:
    """Return the number of lines of an unfinished code block to print now, or None to wait.

    Code is split between an empty line and an unindented line, because multi-line strings rarely
    continue there.
    """
    if len(lines) > _EARLY_CODE_LINES:
        for index in range(len(lines) - 1, 1, -1):
            if lines[index][:1].strip() and not lines[index - 1].strip():
                return index
    return len(lines) if len(lines) > _MAX_PREVIEW_LINES else None


@cache
def _markdown_parser() -> "MarkdownIt":
    # This import is slow and only needed in a terminal.
    from markdown_it import MarkdownIt

    # HTML tags and link definitions are shown as text, not dropped.
    parser = MarkdownIt("commonmark", {"html": False}).disable("reference")
    return parser.enable("strikethrough").enable("table")


def render_block(
    block: Block, console: "Console", *, style: str = "", colour_budget: ColourBudget | None = None
) -> list[str]:
    """Return the lines of a block for this console, with the empty lines before the block.

    `colour_budget` limits the coloured code of a message: pass the same one for all its blocks.
    """
    from rich.markdown import Markdown
    from rich.text import Text

    colour_budget = ColourBudget() if colour_budget is None else colour_budget
    # Link targets are written out, so that the reader sees them.
    markdown = Markdown("", code_theme=_CODE_THEME, hyperlinks=False)
    markdown.parsed = _markdown_parser().parse(printable(block.source))  # guard: answer-printable
    for token in markdown.parsed:
        if token.type == "fence":
            lexer = find_lexer(token.info, token.content)
            token.info = lexer if lexer and colour_budget.take(token.content) else ""
        # Rich centres h1 headings, which looks misplaced between paragraphs.
        token.tag = "h2" if token.tag == "h1" else token.tag
        for child in token.children or ():
            if child.type == "softbreak":
                # Keep line ends: they matter in verse, addresses and logs.
                child.type = "hardbreak"
            elif child.type == "image":
                child.content = f"[image: {child.content}] ({child.attrs.get('src', '')})"
                child.type, child.tag, child.children = "text", "", None
    lines = _render_lines(markdown, console, style)
    levels = [token.level for token in markdown.parsed if token.type in _NESTING_TOKENS]
    is_too_deep = max(levels, default=-1) >= min(_MAX_NESTING, console.width // _QUOTE_INDENT - 1)
    if is_too_deep or (not lines and block.source.strip()):
        lines = _render_lines(Text(printable(block.source)), console, style)
    return [""] * block.gap + lines


_STYLE_CODE: Final = re.compile(r"\x1b\[[0-9;]*m")


def _render_lines(content: "Markdown | Text", console: "Console", style: str) -> list[str]:
    """Return the rendered lines without empty lines at the beginning and the end."""
    lines = [line.rstrip() for line in render_lines(console, content, style=style or None)]
    filled = [index for index, line in enumerate(lines) if _STYLE_CODE.sub("", line).strip()]
    return lines[filled[0] : filled[-1] + 1] if filled else []
