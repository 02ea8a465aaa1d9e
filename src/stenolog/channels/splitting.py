"""Splits a long answer into messages of an app. Pure functions.

A text is cut at a paragraph, else at a line, a sentence, a word, else anywhere. A code block that
is cut is closed in one message and opened again in the next.
"""

import re
from typing import Final

from msgspec import Struct

from stenolog.errors import UsageError

MIN_LIMIT: Final = 64
_FENCE: Final = "```"
_CLOSE: Final = f"\n{_FENCE}"
_MOST_OPENING: Final = 24
"""Maximum length of a block's first line to be repeated in the next message."""
_CLOSING: Final = re.compile(r"\s*```+[ \t]*(\n|\Z)")
_BREAKS: Final = (
    re.compile(r"\n[ \t]*\n"),
    re.compile(r"\n"),
    re.compile(r"(?<=[.!?…。！？])[\"'”’)\]]*\s+"),  # noqa: RUF001 - these end sentences, too
    re.compile(r"\s+"),
)
_SENTENCE: Final = 2
_FULL: Final = 3
"""Minimum length of a message, as 1/N of the limit. No cut makes a message shorter."""


class Piece(Struct, frozen=True, kw_only=True):
    """One message: a part of the text, and the fences added around its code."""

    opens: str = ""
    body: str
    closes: str = ""

    @property
    def text(self) -> str:
        """The complete message, with the added fences."""
        return f"{self.opens}{self.body}{self.closes}"


def units(text: str) -> int:
    """Return the length of a text in UTF-16 code units, as Telegram and others count."""
    return len(text) + sum(character > "\uffff" for character in text)


def split(text: str, limit: int) -> list[str]:
    """Split a text into messages, none blank or longer than `limit`.

    Raises UsageError for a tiny limit.

    Only white space is dropped, at the cuts.
    """
    return [piece.text for piece in pieces(text, limit)]


def pieces(text: str, limit: int) -> list[Piece]:
    """Return the messages, with added fences separate from the text."""
    if limit < MIN_LIMIT:
        raise UsageError(f"limit must be {MIN_LIMIT} or more, not {limit}")
    messages: list[Piece] = []
    rest, fence = text.strip("\n"), ""
    while rest.strip():
        if fence and (closing := _CLOSING.match(rest)):
            # The previous message has closed the block.
            rest, fence = rest[closing.end() :].lstrip(), ""
            continue
        opens = f"{fence}\n" if fence else ""
        if units(opens) + units(rest) <= limit:
            messages.append(Piece(opens=opens, body=rest.rstrip()))
            break
        cut, skipped = _place_to_cut(rest, limit - units(opens) - len(_CLOSE), in_code=bool(fence))
        body, between, rest = rest[:cut].rstrip(), rest[cut : cut + skipped], rest[cut + skipped :]
        before, fence = fence, _open_fence(body, fence)
        if fence and not before and "\n" in between and body.endswith(f"\n{fence}"):
            # A block's first line moves to the next message with its code.
            body, rest, fence = body.removesuffix(fence).rstrip(), f"{fence}\n{rest}", ""
        if body.strip():
            messages.append(Piece(opens=opens, body=body, closes=_CLOSE if fence else ""))
        # The indentation of code must be kept.
        rest = rest.lstrip("\n") if fence else rest.lstrip()
    return messages


def _place_to_cut(text: str, room: int, *, in_code: bool) -> tuple[int, int]:
    """Return the length of the next message, and of the white space to drop after it."""
    window = _within(text, room)
    for number, pattern in enumerate(_BREAKS):
        if in_code and number == _SENTENCE:
            continue
        cuts = [*pattern.finditer(text, 0, window + 1)][-1:]
        if cuts and cuts[0].start() >= max(1, window // _FULL):
            return cuts[0].start(), cuts[0].end() - cuts[0].start()
    return window, 0


def _within(text: str, room: int) -> int:
    """Return the maximum number of characters with at most `room` units."""
    count = min(len(text), room)
    while (over := units(text[:count]) - room) > 0:
        count -= (over + 1) // 2
    return count


def _open_fence(body: str, fence: str) -> str:
    """Return the first line of the code block in which a text ends; empty outside of a block."""
    for line in body.split("\n"):
        bare = line.strip()
        if not bare.startswith(_FENCE):
            continue
        if not fence:
            # A line such as ```x``` is inline code.
            if _FENCE not in bare.lstrip("`"):
                fence = bare if units(bare) <= _MOST_OPENING else _FENCE
        elif not bare.strip("`"):
            fence = ""
    return fence
