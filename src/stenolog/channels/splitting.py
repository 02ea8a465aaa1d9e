"""A long answer as messages that an app takes: cut where a reader would pause. Pure.

At a paragraph, else at a line, a sentence, a word, else anywhere. A block of code that is cut is
closed in one message and opened again in the next.
"""

import re
from typing import Final

from msgspec import Struct

from stenolog.errors import UsageError

LEAST: Final = 64
_FENCE: Final = "```"
_CLOSE: Final = f"\n{_FENCE}"
_MOST_OPENING: Final = 24
"""A longer first line of a block is not said again."""
_CLOSING: Final = re.compile(r"\s*```+[ \t]*(\n|\Z)")
_BREAKS: Final = (
    re.compile(r"\n[ \t]*\n"),
    re.compile(r"\n"),
    re.compile(r"(?<=[.!?…。！？])[\"'”’)\]]*\s+"),  # noqa: RUF001 - these end sentences, too
    re.compile(r"\s+"),
)
_SENTENCE: Final = 2
_FULL: Final = 3
"""A message is at least one third full, where a better place to cut would leave it emptier."""


class Piece(Struct, frozen=True, kw_only=True):
    """One message: a part of the text, and what makes its code a block."""

    opens: str = ""
    body: str
    closes: str = ""

    @property
    def text(self) -> str:
        """All of it."""
        return f"{self.opens}{self.body}{self.closes}"


def units(text: str) -> int:
    """How long a text is in UTF-16 code units, as Telegram and others count."""
    return len(text) + sum(character > "\uffff" for character in text)


def split(text: str, limit: int) -> list[str]:
    """The messages, none of them blank or longer than the limit. Raises UsageError for a tiny one.

    Only white space is left out, where it was cut.
    """
    return [piece.text for piece in pieces(text, limit)]


def pieces(text: str, limit: int) -> list[Piece]:
    """The same, with what was added kept apart."""
    if limit < LEAST:
        raise UsageError(f"limit={limit}: a message has at least {LEAST} characters")
    found: list[Piece] = []
    rest, fence = text.strip("\n"), ""
    while rest.strip():
        if fence and (closing := _CLOSING.match(rest)):
            # The message before has closed the block.
            rest, fence = rest[closing.end() :].lstrip(), ""
            continue
        opens = f"{fence}\n" if fence else ""
        if units(opens) + units(rest) <= limit:
            found.append(Piece(opens=opens, body=rest.rstrip()))
            break
        cut, skipped = _place_to_cut(rest, limit - units(opens) - len(_CLOSE), in_code=bool(fence))
        body, between, rest = rest[:cut].rstrip(), rest[cut : cut + skipped], rest[cut + skipped :]
        before, fence = fence, _open_fence(body, fence)
        if fence and not before and "\n" in between and body.endswith(f"\n{fence}"):
            # A block begins with its code: its first line goes along.
            body, rest, fence = body.removesuffix(fence).rstrip(), f"{fence}\n{rest}", ""
        if body.strip():
            found.append(Piece(opens=opens, body=body, closes=_CLOSE if fence else ""))
        # What leads a line of code says what belongs to what.
        rest = rest.lstrip("\n") if fence else rest.lstrip()
    return found


def _place_to_cut(text: str, room: int, *, in_code: bool) -> tuple[int, int]:
    """How many characters go into this message, and how many of white space are left out."""
    window = _within(text, room)
    for number, pattern in enumerate(_BREAKS):
        if in_code and number == _SENTENCE:
            continue
        found = [*pattern.finditer(text, 0, window + 1)][-1:]
        if found and found[0].start() >= max(1, window // _FULL):
            return found[0].start(), found[0].end() - found[0].start()
    return window, 0


def _within(text: str, room: int) -> int:
    """So many characters have no more units than this."""
    count = min(len(text), room)
    while (over := units(text[:count]) - room) > 0:
        count -= (over + 1) // 2
    return count


def _open_fence(body: str, fence: str) -> str:
    """The line that opened the block of code in which a text ends; empty outside of any."""
    for line in body.split("\n"):
        bare = line.strip()
        if not bare.startswith(_FENCE):
            continue
        if not fence:
            # A line such as ```x``` is code in itself.
            if _FENCE not in bare.lstrip("`"):
                fence = bare if units(bare) <= _MOST_OPENING else _FENCE
        elif not bare.strip("`"):
            fence = ""
    return fence
