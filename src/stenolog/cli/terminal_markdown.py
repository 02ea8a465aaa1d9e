"""Streaming Markdown for the terminal: finished blocks are printed once.

A long answer is split at block ends, so that only the unfinished block is painted again. A list is
split between its items, and a very long block between two of its lines.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.cli.output import printable, render_lines
from stenolog.transfer.export.code_blocks import ColourBudget, find_lexer

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
"""Number of lines after which the start of an unfinished code block may be printed."""
_MAX_BLOCK_LINES: Final = 200
"""Maximum number of lines of a block. A longer block is split at a line end."""
_REPARSE_DIVISOR: Final = 8
"""A block is parsed again only after it has grown by 1/8. Parsing after every line is slow."""
_MAX_NESTING: Final = 19
"""Maximum nesting depth. Deeper text is shown as Markdown source, because the parser drops it."""
_QUOTE_INDENT: Final = 4
"""Number of columns by which a quote is indented."""
_BULLET: Final = re.compile(r"(•|\d+)(?=\s|$)")
_CODE_THEME: Final = "ansi_dark"
"""Theme with the terminal's own colours and no background, for light and dark terminals."""


class Block(Struct, frozen=True, kw_only=True):
    """A block of Markdown text, such as a paragraph, which is rendered separately."""

    source: str
    gap: int = 1
    """Number of empty lines before the block."""
    is_continuation: bool = False
    """Whether the block is the rest of a list item whose bullet was already printed."""
    line: int = 0
    """Line of the text at which the block starts."""
    item_number: int | None = None
    closing_fence: str | None = None
    """The missing closing fence of an unfinished code block; None for other blocks."""
    kind: str = ""
    """Token type of the Markdown parser."""


class MarkdownStream:
    """Streamed Markdown, split into blocks."""

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
        new_lines = self._source.count("\n") - self._parsed_lines
        if new_lines < max(1, self._parsed_lines // _REPARSE_DIVISOR):
            return []
        parsed_blocks = self._parse_complete_lines()
        blocks: list[Block] = []
        if len(parsed_blocks) > 1:
            blocks = self._adjust_first_block(parsed_blocks[:-1])
            self._drop_text_before(parsed_blocks[-1])
            parsed_blocks = self._parse_complete_lines()
        if parsed_blocks:
            blocks += self._split_block(parsed_blocks[0])
        self._parsed_lines = self._source.count("\n")
        return blocks

    def end(self) -> list[Block]:
        """Return the remaining blocks and reset the stream."""
        blocks = self.unfinished
        self._source, self._gap, self._is_continuation, self._parsed_lines = "", 0, False, 0
        return blocks

    @property
    def unfinished(self) -> list[Block]:
        """Return the unfinished blocks, parsed as if the text ended here."""
        return self._adjust_first_block(_parse_blocks(self._source))

    def _parse_complete_lines(self) -> list[Block]:
        # Parse only complete lines: an incomplete `-` may become a list item, a rule or a heading.
        return _parse_blocks(self._source[: self._source.rfind("\n") + 1])

    def _adjust_first_block(self, parsed_blocks: Sequence[Block]) -> list[Block]:
        if not parsed_blocks:
            return []
        first_block, *other_blocks = parsed_blocks
        first_block = replace(first_block, gap=self._gap, is_continuation=self._is_continuation)
        return [first_block, *other_blocks]

    def _drop_text_before(self, parsed_block: Block) -> None:
        lines = self._source.split("\n")[parsed_block.line :]
        if parsed_block.item_number is not None:
            # Many models number all items 1, and the rest is parsed as a new list, so it must
            # start with the right number.
            lines[0] = _ITEM_NUMBER.sub(rf"\g<1>{parsed_block.item_number}", lines[0], count=1)
        self._source, self._gap, self._is_continuation = "\n".join(lines), parsed_block.gap, False

    def _split_block(self, parsed_block: Block) -> Iterator[Block]:
        """Yield the first lines of a very long block, and drop them from the unfinished text."""
        if parsed_block.kind == "fence":
            if parsed_block.closing_fence is not None:
                yield from self._split_code(parsed_block, parsed_block.closing_fence)
            return
        lines = self._source.split("\n")[parsed_block.line :]
        # Keep the last line: text that arrives later may continue this line.
        split = max((index for index, line in enumerate(lines[:-1]) if line.strip()), default=0)
        if split < _MAX_BLOCK_LINES:
            return
        yield from self._adjust_first_block([Block(source="\n".join(lines[:split]))])
        kind = parsed_block.kind
        self._source = "\n".join(_continue_block(kind, lines[:split], lines[split:]))
        self._gap = int(kind == "table_open")
        self._is_continuation = kind == "list_item_open"

    def _split_code(self, parsed_block: Block, closing_fence: str) -> Iterator[Block]:
        opening_line, *lines = self._source.split("\n")[parsed_block.line :]
        split_index = _find_code_split(lines[:-1])
        if split_index is None:
            return
        first_lines, other_lines = lines[:split_index], lines[split_index:]
        gap = next((index for index, line in enumerate(reversed(first_lines)) if line.strip()), 0)
        first_lines = first_lines[: len(first_lines) - gap]
        source = "\n".join([opening_line, *first_lines, closing_fence])
        yield from self._adjust_first_block([Block(source=source)])
        self._source, self._gap = "\n".join([opening_line, *other_lines]), gap


def _parse_blocks(source: str) -> list[Block]:
    lines = source.split("\n")
    tokens = _markdown_parser().parse(source)
    parsed_blocks: list[Block] = []
    for index, token in enumerate(tokens):
        if token.level or token.map is None or token.nesting < 0:
            continue
        if token.type in _LIST_TOKENS:
            parsed_blocks += _split_list(tokens, index, lines)
        else:
            start, end = token.map
            text = "\n".join(lines[start:end])
            fence = _missing_fence(token, lines)
            parsed_blocks.append(
                Block(source=text, line=start, closing_fence=fence, kind=token.type)
            )
    return parsed_blocks


def _split_list(
    tokens: "Sequence[Token]", list_index: int, lines: Sequence[str]
) -> Iterator[Block]:
    """Yield the items of the list that begins at this token."""
    is_numbered = tokens[list_index].type == "ordered_list_open"
    number = int(tokens[list_index].attrs.get("start", 1)) if is_numbered else None
    for index in range(list_index + 1, len(tokens)):
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
        yield Block(source=text, gap=gap, line=start, item_number=number, kind=token.type)
        number = None if number is None else number + 1


def _missing_fence(token: "Token", lines: Sequence[str]) -> str | None:
    """Return the missing closing fence of an unfinished code block; None for other tokens."""
    if token.type != "fence" or token.map is None:
        return None
    (start, end), fence = token.map, token.markup
    last_line = lines[end - 1].strip()
    is_fence = last_line.startswith(fence) and not last_line.strip(fence[0])
    return None if end - start > 1 and is_fence else fence


def _continue_block(
    kind: str, printed_lines: Sequence[str], remaining_lines: Sequence[str]
) -> list[str]:
    """Return the remaining lines, changed so that the parser sees a block of the same kind."""
    if kind == "table_open":
        return [*printed_lines[:2], *remaining_lines]
    opening_line = _opening_code_line(printed_lines)
    opening_lines = [] if opening_line is None else [opening_line]
    line, *other_lines = [*opening_lines, *remaining_lines]
    if kind == "blockquote_open" and not line.lstrip().startswith(">"):
        line = f"> {line}"
    elif kind == "paragraph_open":
        line = line.lstrip()
    elif kind == "list_item_open":
        match = _LIST_MARKER.match(printed_lines[0])
        marker = match[0] if match is not None else ""
        # A line with less indentation is a lazy continuation line of a paragraph.
        is_indented = line.startswith(marker) or not line[: len(marker)].strip()
        line = marker + (line[len(marker) :] if is_indented else line.lstrip())
    return [line, *other_lines]


def _opening_code_line(lines: Sequence[str]) -> str | None:
    """Return the opening line of an unclosed code block in a quote or list item, or None."""
    for token in _markdown_parser().parse("\n".join(lines)):
        if token.type == "fence" and token.map is not None and token.map[1] >= len(lines):
            unquoted = [line.lstrip("> ") for line in lines]
            return lines[token.map[0]] if _missing_fence(token, unquoted) is not None else None
    return None


def _find_code_split(lines: Sequence[str]) -> int | None:
    """Return the number of lines of code to print now, or None to wait for more lines.

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
    lines = _render_text_lines(markdown, console, style)
    levels = [token.level for token in markdown.parsed if token.type in _NESTING_TOKENS]
    is_too_deep = max(levels, default=-1) >= min(_MAX_NESTING, console.width // _QUOTE_INDENT - 1)
    if is_too_deep or (not lines and block.source.strip()):
        lines = _render_text_lines(Text(printable(block.source)), console, style)
    elif block.is_continuation and markdown.parsed[0].type in _LIST_TOKENS:
        lines[0] = _BULLET.sub(lambda bullet: " " * len(bullet[0]), lines[0], count=1)
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
