"""Which parts of a text that is meant as Markdown are code, between fences."""

import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_TICKS: Final = re.compile(r"`+")


class Block(Struct, frozen=True):
    """Some lines of a text."""

    text: str
    code: bool = False
    language: str = ""


def blocks(text: str) -> Iterator[Block]:
    """The text in prose and code; code that is never closed goes to the end."""
    lines: list[str] = []
    fence, language = "", ""
    for line in text.split("\n"):
        found = _FENCE.fullmatch(line)
        if fence and found and found[1].startswith(fence) and not found[2].strip():
            yield Block("\n".join(lines), code=True, language=language)
            lines, fence = [], ""
        elif not fence and found and not (found[1][0] == "`" and "`" in found[2]):
            if lines:
                yield Block("\n".join(lines))
            lines, fence, language = [], found[1], found[2].strip()
        else:
            lines.append(line)
    if lines or fence:
        yield Block("\n".join(lines), code=bool(fence), language=language if fence else "")


def fence_for(text: str) -> str:
    """A fence that nothing in this text ends."""
    longest = max((len(run) for run in _TICKS.findall(text)), default=0)
    return "`" * max(3, longest + 1)
