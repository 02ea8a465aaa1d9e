"""Code blocks in Markdown: finds them in a text and chooses the lexer for syntax colouring."""

import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_BACKTICKS: Final = re.compile(r"`+")


MAX_COLOURED: Final = 2_000
"""Maximum number of characters of one code block that is coloured."""
MAX_COLOURED_IN_MESSAGE: Final = 20_000
"""Maximum number of characters of code that are coloured in one message."""
LANGUAGES: Final = {
    **dict.fromkeys(("bash", "sh", "shell", "zsh"), "bash"),
    "css": "css",
    "diff": "diff",
    "go": "go",
    "html": "html",
    "ini": "ini",
    **dict.fromkeys(("javascript", "js", "jsx"), "javascript"),
    **dict.fromkeys(("json", "jsonl"), "json"),
    **dict.fromkeys(("python", "py", "python3"), "python"),
    **dict.fromkeys(("rust", "rs"), "rust"),
    "sql": "sql",
    "toml": "toml",
    "xml": "xml",
    **dict.fromkeys(("yaml", "yml"), "yaml"),
}
"""Coloured languages: names used in Markdown, and the Pygments lexer of each.

Pygments has lexers whose regular expressions need hours for a few thousand characters and hold the
GIL all the time. Only lexers that pass the attacks in tests/unit/test_colouring.py are used.
"""


def find_lexer(info: str, code: str) -> str:
    """Return the name of the lexer for this code; empty if the code must not be coloured.

    `info` is the text after the opening fence; its first word names the language.
    """
    language, _, _ = info.strip().partition(" ")
    if len(code) > MAX_COLOURED:  # guard: colour-length
        return ""
    return LANGUAGES.get(language.lower(), "")  # guard: colour-languages


class ColourBudget:
    """Number of characters of code that may still be coloured, on one page or in one message."""

    def __init__(self, left: int = MAX_COLOURED_IN_MESSAGE) -> None:
        self.left = left

    def take(self, code: str) -> bool:
        """Return whether the budget allows this code. If yes, reduce the budget by its length."""
        if len(code) > self.left:  # guard: colour-total
            return False
        self.left -= len(code)
        return True

    def copy(self) -> "ColourBudget":
        """Return a budget with the same number of characters left."""
        return ColourBudget(self.left)


class Block(Struct, frozen=True):
    """Consecutive lines of a text: prose, or a code block without its fences."""

    text: str
    is_code: bool = False
    language: str = ""


def split_blocks(text: str) -> Iterator[Block]:
    """Split a text into prose and code. Code without a closing fence extends to the end."""
    lines: list[str] = []
    fence, language = "", ""
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line)
        if fence and match and match[1].startswith(fence) and not match[2].strip():
            yield Block("\n".join(lines), is_code=True, language=language)
            lines, fence = [], ""
        elif not fence and match and not (match[1][0] == "`" and "`" in match[2]):
            if lines:
                yield Block("\n".join(lines))
            lines, fence, language = [], match[1], match[2].strip()
        else:
            lines.append(line)
    if lines or fence:
        yield Block("\n".join(lines), is_code=bool(fence), language=language if fence else "")


def fence_for(text: str) -> str:
    """Return a fence that no line of this text closes."""
    longest_run = max((len(run) for run in _BACKTICKS.findall(text)), default=0)
    return "`" * max(3, longest_run + 1)
