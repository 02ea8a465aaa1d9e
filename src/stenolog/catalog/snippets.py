"""The snippet of a message that shows why it matches. Pure."""

import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from msgspec import Struct

from stenolog.catalog import tokenizer
from stenolog.catalog.query import Query
from stenolog.catalog.tokenizer import Word

WIDTH: Final = 160
_MAX_BEFORE: Final = 40
"""Maximum number of characters before the first matching word."""
_ELLIPSIS: Final = "…"
_MAX_POSITIONS: Final = 200


class Snippet(Struct, frozen=True):
    """A part of a text in one line, and the positions of the matching words."""

    text: str
    marks: Sequence[tuple[int, int]]


class _WordPosition(Struct, frozen=True):
    start: int
    end: int
    tokens: frozenset[str]


def make_snippet(text: str, query: Query, *, width: int = WIDTH) -> Snippet:
    """Return the part of a text with the most matching words, or else its start."""
    positions = _find_positions(text, query)
    start, end = _window(text, positions, width)
    # One character for another, so that positions do not change.
    line = "".join(" " if char.isspace() else char for char in text[start:end])
    before, after = _ELLIPSIS * (start > 0), _ELLIPSIS * (end < len(text))
    shift = len(before) - start
    marks: list[tuple[int, int]] = []
    for place in positions:
        first, last = max(place.start, start) + shift, min(place.end, end) + shift
        if first < last and marks and first <= marks[-1][1]:
            marks[-1] = (marks[-1][0], max(last, marks[-1][1]))
        elif first < last:
            marks.append((first, last))
    return Snippet(before + line + after, marks)


def _find_positions(text: str, query: Query) -> list[_WordPosition]:
    """Return the positions of the query's words."""
    wanted: set[str] = set()
    prefixes: list[str] = []
    for term in query.terms:
        if not term.is_excluded:
            wanted.update(t for word in term.words for t in (*word.parts, *word.joined))
            if term.is_prefix:
                prefixes.append(term.words[-1].parts[-1])
                prefixes += term.words[-1].joined[-1:]
    found: list[_WordPosition] = []
    for start, end, word in tokenizer.word_positions(text):
        if len(found) >= _MAX_POSITIONS:
            break
        # One character may normalize to several, such as ㌔: then the pairs have other positions.
        plain = unicodedata.is_normalized("NFKC", text[start:end])
        if word.singles and plain and len(word.parts) == max(1, end - start - 1):
            # Such a run may be as long as the text.
            found += islice(_pair_positions(text, start, word, wanted), _MAX_POSITIONS - len(found))
            continue
        tokens = word.parts + word.joined
        matches = wanted.intersection(tokens)
        matches |= {begin for begin in prefixes if any(t.startswith(begin) for t in tokens)}
        if matches:
            found.append(_WordPosition(start, end, frozenset(matches)))
    return found


def _pair_positions(text: str, start: int, word: Word, wanted: set[str]) -> Iterator[_WordPosition]:
    """Yield the matching pairs and characters in a script without spaces."""
    for at, pair in enumerate(word.parts, start):
        if pair in wanted:
            yield _WordPosition(at, at + len(pair), frozenset([pair]))
        for single in range(at, at + len(pair)):
            if text[single] in wanted:
                yield _WordPosition(single, single + 1, frozenset(text[single]))


def _window(text: str, positions: Sequence[_WordPosition], width: int) -> tuple[int, int]:
    """Return start and end of the first window with the most different words."""
    if len(text) <= width:
        return 0, len(text)
    best, start = -1, 0
    starts = [place.start for place in positions]
    for index, place in enumerate(positions):
        reach = bisect_left(starts, place.start + width - _MAX_BEFORE)
        different = len(frozenset().union(*(near.tokens for near in positions[index:reach])))
        if different > best:
            best, start = different, place.start
    start = max(0, min(start - _MAX_BEFORE, len(text) - width))
    return _align_to_words(text, start, min(len(text), start + width))


def _align_to_words(text: str, start: int, end: int) -> tuple[int, int]:
    """Shrink the window at both ends if that avoids cutting a word."""
    if start > 0:
        space = text.find(" ", start, start + _MAX_BEFORE // 2)
        start = space + 1 if space >= 0 else start
    if end < len(text):
        space = text.rfind(" ", end - _MAX_BEFORE // 2, end)
        end = space if space > start else end
    return start, end
