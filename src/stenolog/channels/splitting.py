"""Splits a long answer into messages of an app. Pure functions.

A text is cut at the end of a paragraph if possible, else of a line, sentence or word, else
anywhere. A code block that is cut is closed in one message and opened again in the next.
"""

import re
from typing import Final

from msgspec import Struct

from stenolog.errors import UsageError

MIN_LIMIT: Final = 64
_FENCE: Final = "```"
_CLOSE: Final = f"\n{_FENCE}"
_MAX_OPENING_LENGTH: Final = 24
"""Maximum length of a first line that is repeated when a code block is opened again.

If the first line is longer, only the fence is repeated.
"""
_CLOSING_FENCE_PATTERN: Final = re.compile(r"\s*```+[ \t]*(\n|\Z)")
_BREAK_PATTERNS: Final = (
    re.compile(r"\n[ \t]*\n"),
    re.compile(r"\n"),
    re.compile(r"(?<=[.!?…。！？])[\"'”’)\]]*\s+"),  # noqa: RUF001 - these end sentences, too
    re.compile(r"\s+"),
)
_SENTENCE_BREAK_INDEX: Final = 2
_MIN_LENGTH_DIVISOR: Final = 3
"""A message that is cut at a break has at least the maximum length divided by this number."""


class Piece(Struct, frozen=True, kw_only=True):
    """One message: a part of the text, and the fences added around its code."""

    opening: str = ""
    body: str
    closing: str = ""

    @property
    def text(self) -> str:
        """The complete message, with the added fences."""
        return f"{self.opening}{self.body}{self.closing}"


def utf16_len(text: str) -> int:
    """Return the length of a text in UTF-16 code units, as Telegram and others count."""
    return len(text) + sum(character > "\uffff" for character in text)


def split_text(text: str, limit: int) -> list[str]:
    """Split a text into messages, none blank or longer than `limit`.

    Only white space at the cuts is dropped. Raises UsageError if `limit` is below MIN_LIMIT.
    """
    return [piece.text for piece in split_pieces(text, limit)]


def split_pieces(text: str, limit: int) -> list[Piece]:
    """Split a text like `split_text`, but keep the added fences separate from the text."""
    if limit < MIN_LIMIT:
        raise UsageError(f"limit must be {MIN_LIMIT} or more, not {limit}")
    pieces: list[Piece] = []
    rest, fence = text.strip("\n"), ""
    while rest.strip():
        if fence and (closing := _CLOSING_FENCE_PATTERN.match(rest)):
            # The previous message has already closed the code block.
            rest, fence = rest[closing.end() :].lstrip(), ""
            continue
        prefix = f"{fence}\n" if fence else ""
        if utf16_len(prefix) + utf16_len(rest) <= limit:
            pieces.append(Piece(opening=prefix, body=rest.rstrip()))
            break
        cut, skipped = _find_cut(rest, limit - utf16_len(prefix) - len(_CLOSE), in_code=bool(fence))
        body, between, rest = rest[:cut].rstrip(), rest[cut : cut + skipped], rest[cut + skipped :]
        fence_before, fence = fence, _find_open_fence(body, fence)
        if fence and not fence_before and "\n" in between and body.endswith(f"\n{fence}"):
            # The first line of a code block moves to the next message, together with its code.
            body, rest, fence = body.removesuffix(fence).rstrip(), f"{fence}\n{rest}", ""
        if body.strip():
            pieces.append(Piece(opening=prefix, body=body, closing=_CLOSE if fence else ""))
        # The indentation of code must be kept.
        rest = rest.lstrip("\n") if fence else rest.lstrip()
    return pieces


def _find_cut(text: str, max_units: int, *, in_code: bool) -> tuple[int, int]:
    """Return the length of the next message, and of the white space to drop after it."""
    max_length = _fitting_length(text, max_units)
    for number, pattern in enumerate(_BREAK_PATTERNS):
        if in_code and number == _SENTENCE_BREAK_INDEX:
            continue
        matches = [*pattern.finditer(text, 0, max_length + 1)][-1:]
        if matches and matches[0].start() >= max(1, max_length // _MIN_LENGTH_DIVISOR):
            return matches[0].start(), matches[0].end() - matches[0].start()
    return max_length, 0


def _fitting_length(text: str, max_units: int) -> int:
    """Return how many characters of the text fit into `max_units` UTF-16 code units."""
    count = min(len(text), max_units)
    while (over := utf16_len(text[:count]) - max_units) > 0:
        count -= (over + 1) // 2
    return count


def _find_open_fence(body: str, fence: str) -> str:
    """Return the first line of the code block in which a text ends; empty outside of a block."""
    for line in body.split("\n"):
        stripped_line = line.strip()
        if not stripped_line.startswith(_FENCE):
            continue
        if not fence:
            # A line such as ```x``` is inline code.
            if _FENCE not in stripped_line.lstrip("`"):
                fence = stripped_line if utf16_len(stripped_line) <= _MAX_OPENING_LENGTH else _FENCE
        elif not stripped_line.strip("`"):
            fence = ""
    return fence
