"""Lines of a terminal for the blocks of tool calls and results."""

from collections.abc import Iterable, Iterator
from typing import Final

from stenolog.cli.output import printable
from stenolog.transfer.export.tool_views import ToolBlock

MAX_TOOL_LINES: Final = 12
"""Maximum number of lines of a block in a terminal."""
_STYLES: Final = {"added": "green", "removed": "red", "same": "dim", "head": "dim cyan"}
_TICKS: Final = {"done": "☑", "active": "◐", "open": "☐"}
_TICK_STYLES: Final = {"done": "dim", "active": "bold", "open": ""}

Styled = tuple[str, str]
"""A line and its rich style."""


def block_lines(block: ToolBlock, *, whole: bool, style: str = "dim") -> Iterator[Styled]:
    """Yield the lines of a block, shortened unless `whole`. `style` is the style of text."""
    lines = list(_lines(block, style))
    most = len(lines) if whole or len(lines) <= MAX_TOOL_LINES else MAX_TOOL_LINES - 1
    yield from lines[:most]
    left = len(lines) - most + block.omitted
    if left:
        hint = "" if whole else "; use --tools to show them"
        yield f"… {left:,} more lines{hint}", "dim italic"


def is_shaped(blocks: Iterable[ToolBlock]) -> bool:
    """Return whether blocks show more than the arguments in one line would."""
    return any(block.kind not in ("json", "text") for block in blocks)


def _lines(block: ToolBlock, style: str) -> Iterator[Styled]:
    match block.kind:
        case "diff":
            for line in block.lines:
                yield f"{line.sign}{line.text}", _STYLES[line.kind]
        case "checklist":
            for item in block.items:
                text = " ".join(item.text.split())
                yield f"{_TICKS[item.state]} {text}", _TICK_STYLES[item.state]
        case "shell":
            if block.label:
                yield printable(block.label), style
            for number, text in enumerate(printable(block.text).rstrip("\n").split("\n")):
                yield f"{'  ' if number else '$ '}{text}", "bold"
        case "code" | "text" | "json":
            for text in printable(block.text).rstrip("\n").split("\n"):
                yield text, style
