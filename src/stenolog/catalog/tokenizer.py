"""The tokenizer of the catalog, for indexed texts and for queries.

A *word* is a text between spaces. A word is split into *parts* of letters, digits, marks and
pictographs. `getUserName`, `get_user_name` and `get-user-name` become get, user, name;
`HTTPServer2` becomes http, server, 2. Scripts without spaces (Chinese, Japanese, Korean, Thai …)
are split into overlapping pairs of characters. Case, width and the accents of Latin and Greek
letters are ignored; other accents are not, because they make another letter.

Each message has two lines of tokens. The first line has the parts in order, so that a compound word
(`a.b/c-d`, 東京都) is found as a run of parts. The second line has additional tokens: each word
with its parts joined, so that `getusername` finds `getUserName`, and each single character of a
script without spaces.

Tokens consist of letters, digits and marks only. Additional tokens of the catalog, such as the
session of a message, start with `=`, which no word contains. If a change gives any text other
tokens, change `catalog_database.VERSION`.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final, Literal

from msgspec import Struct

from stenolog.lazy_loading import lazy_pattern

MAX_TOKEN_LENGTH: Final = 64
"""Maximum number of characters of a token; longer words are truncated."""

_MAX_PARTS: Final = 12
_MAX_DIGIT_RUNS: Final = 4
"""A name with more parts or more runs of digits is taken as encoded data, and is not split."""

_MAX_NAME_LENGTH: Final = 256

_CACHE_SIZE: Final = 100_000
_MAX_CACHED_LENGTH: Final = 32

# These scripts have no spaces: Han, kana, bopomofo, hangul, Yi, Thai, Lao, Tibetan, Myanmar, Khmer.
_UNSPACED_RANGES: Final = (
    "\u0e00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029"
    "\u3031-\u3035\u3038-\u303c\u3041-\u31ff\u3400-\u4dbf\u4e00-\u9fff\ua000-\ua4cf\ua960-\ua97f"
    "\uac00-\ud7ff\uf900-\ufaff\U0001b000-\U0001b2ff\U00020000-\U0003ffff"
)
_CYRILLIC_IO: Final = "\u0435\u0308"  # Cyrillic io, mostly written as ie
_LATIN_OR_GREEK: Final = lazy_pattern("[A-Za-z\u00c0-\u024f\u0370-\u03ff\u1e00-\u1fff]")
_DIGIT_RUNS: Final = lazy_pattern(r"\d+|\D+")
_UNSPACED_CHARACTER: Final = lazy_pattern(f"[{_UNSPACED_RANGES}]")
_LONG_MARKS: Final = lazy_pattern("[\\W\uff9e\uff9f]{32,}+")
"""At least 32 characters that may be combining marks, including U+FF9E and U+FF9F."""


class Word(Struct, frozen=True):
    """The tokens of one word."""

    parts: tuple[str, ...]
    """Tokens of the word, in order."""
    joined: tuple[str, ...]
    """Tokens of the word in lower case and without underscores; empty if equal to `parts`."""
    chars: tuple[str, ...]
    """The single characters of scripts without spaces."""
    line: str
    """`parts`, separated by spaces."""
    joined_line: str
    """`joined`, separated by spaces."""
    has_more_tokens: bool
    """Whether the word has tokens besides its parts."""


class TokenLines(Struct, frozen=True):
    """The tokens of a text in indexed form, separated by spaces."""

    parts: str
    extra: str


class _CharacterReplacements(dict[int, str]):
    """Cache of the replacement of each character: itself, a space, or a tab for signs."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        result = char if char == "_" or _is_word_char(char) else " " if char.isspace() else "\t"
        self[code] = result
        return result


class _UnspacedCharacters(dict[str, bool]):
    """Cache of whether a character is a pictograph or belongs to a script without spaces."""

    def __missing__(self, char: str) -> bool:
        is_unspaced = bool(_UNSPACED_CHARACTER.match(char)) or unicodedata.category(char) == "So"
        self[char] = is_unspaced
        return is_unspaced


class _WordCache(dict[str, Word]):
    """Cache of words without signs."""

    def __missing__(self, text: str) -> Word:
        word = _tokenize_word(text)
        if len(text) <= _MAX_CACHED_LENGTH:
            if len(self) >= _CACHE_SIZE:
                self.clear()
            self[text] = word
        return word


_replacements: Final = _CharacterReplacements()
_unspaced_characters: Final = _UnspacedCharacters()
_word_cache: Final = _WordCache()


def token_lines(text: str) -> TokenLines:
    """Return the tokens of a text for the index."""
    spaced_text = text.translate(_replacements)
    names = spaced_text.split()
    words = [_word_cache[name] for name in names]
    parts = " ".join([word.line for word in words if word.line])
    extra_tokens: dict[str, None] = {}
    rich_names = {name for name, word in zip(names, words, strict=True) if word.has_more_tokens}
    if rich_names:
        for run in spaced_text.split(" "):
            run_names = run.split() if run else ()
            if not rich_names.isdisjoint(run_names):
                run_words = [_word_cache[name] for name in run_names]
                if any(word.joined_line for word in run_words):
                    joined_lines = [word.joined_line or word.line for word in run_words]
                    extra_tokens[" ".join(filter(None, joined_lines))] = None
                for word in run_words:
                    extra_tokens.update(dict.fromkeys(word.chars))
    return TokenLines(parts, " ".join(extra_tokens))


def split_words(text: str) -> list[Word]:
    """Return the words of a text or a query."""
    runs = [run.split() for run in text.translate(_replacements).split(" ")]
    return [_join_words([_word_cache[name] for name in run]) for run in runs if run]


def split_names(text: str) -> list[str]:
    """Split a text at spaces and signs, without splitting the names into tokens."""
    return text.translate(_replacements).split()


def name_tokens(name: str) -> tuple[str, ...]:
    """Return the tokens of one name."""
    return _word_cache[name].parts


def word_positions(text: str) -> Iterator[tuple[int, int, Word]]:
    """Yield start, end and content of each word of a text.

    Runs of characters of a script without spaces are yielded separately.
    """
    for match in re.finditer("[^ \t]+", text.translate(_replacements)):
        at = match.start()
        for _, piece in _split_runs(match[0]):
            yield at, at + len(piece), _word_cache[piece]
            at += len(piece)


def _tokenize_word(text: str) -> Word:
    """Split a word into its tokens (see the module docstring)."""
    if text.isascii() and text.isalpha() and text.islower():
        return _make_word([text[:MAX_TOKEN_LENGTH]], [], [])
    parts: list[str] = []
    joined: list[str] = []
    chars: list[str] = []
    # Normalization can introduce separators: ½ becomes 1/2.
    plain = text if text.isascii() else normalize("NFKC", text)
    for name in plain.translate(_replacements).split():
        for unspaced, piece in _split_runs(name):
            if unspaced:
                pairs = [piece[at : at + 2] for at in range(len(piece) - 1)] or [piece]
                parts += pairs
                joined += pairs
                chars += piece
            else:
                parts += _split_name(piece)
                joined += _split_name(_fold_case(piece).replace("_", ""))
    return _make_word(parts, joined if joined != parts else [], chars)


def _join_words(names: Sequence[Word]) -> Word:
    """Join names with signs between them into one word: `a.b/c-d`."""
    if len(names) == 1:
        return names[0]
    parts = [part for name in names for part in name.parts]
    joined = [part for name in names for part in name.joined or name.parts]
    chars = [single for name in names for single in name.chars]
    return _make_word(parts, joined if joined != parts else [], chars)


def _split_runs(name: str) -> Iterable[tuple[bool, str]]:
    """Split a name into runs of characters, of scripts with spaces or of scripts without spaces."""
    if name.isascii():
        return [(False, name)]
    runs = groupby(name, _unspaced_characters.__getitem__)
    return [(is_unspaced, "".join(run)) for is_unspaced, run in runs]


def _make_word(parts: list[str], joined: list[str], chars: list[str]) -> Word:
    return Word(
        parts=tuple(parts),
        joined=tuple(joined),
        chars=tuple(dict.fromkeys(chars)),
        line=" ".join(parts),
        joined_line=" ".join(joined),
        has_more_tokens=bool(joined or chars),
    )


def _split_name(piece: str) -> list[str]:
    """Split a name at underscores, changes of case, and digits."""
    piece = piece[:_MAX_NAME_LENGTH]
    runs_of_name: list[str] = []
    for name in piece.split("_"):
        runs = [name] if name.isalpha() else _DIGIT_RUNS.findall(name)
        runs_of_name += [name] if len(runs) > _MAX_DIGIT_RUNS else runs
    parts = [part for run in runs_of_name for part in _split_case(run)]
    if len(parts) > _MAX_PARTS:
        parts = [piece.replace("_", "")]
    return [folded[:MAX_TOKEN_LENGTH] for part in parts if (folded := _fold_case(part))]


def _split_case(run: str) -> list[str]:
    """Split a name where capital letters start a word: `HTTPServer` gives HTTP, Server."""
    if run.islower() or run.isupper():
        return [run]
    starts = [0]
    for at in range(1, len(run)):
        if run[at].isupper():
            after = run[at + 1 :]
            ends_capitals = run[at - 1].isupper() and after[:1].islower() and after != "s"
            if ends_capitals or not run[at - 1].isupper():
                starts.append(at)
    return [run[start:end] for start, end in zip(starts, [*starts[1:], len(run)], strict=True)]


def _fold_case(text: str) -> str:
    """Fold case, and remove the accents of Latin and Greek letters."""
    if text.isascii():
        return text.lower()
    folded = normalize("NFKD", normalize("NFKC", text.casefold()))
    kept_characters: list[str] = []
    base = ""
    for char in folded:
        if "\u0300" <= char <= "\u036f":
            if _LATIN_OR_GREEK.match(base) or base + char == _CYRILLIC_IO:
                continue
        else:
            base = char
        kept_characters.append(char)
    plain = normalize("NFKC", "".join(kept_characters))
    return "".join(plain.translate(_replacements).split())


def normalize(form: Literal["NFKC", "NFKD"], text: str) -> str:
    """Normalize a text in linear time, with the result of `unicodedata.normalize`.

    Python sorts the combining marks after a letter by insertion. Sorting 100,000 marks takes half a
    minute, and blocks all other threads. Long runs of marks are therefore sorted first.
    """
    sorted_text = _LONG_MARKS.sub(_sort_marks, text)  # guard: linear-normalization
    return unicodedata.normalize(form, sorted_text)


def _sort_marks(match: re.Match[str]) -> str:
    decomposed = "".join([unicodedata.normalize("NFKD", char) for char in match[0]])
    runs = groupby(decomposed, lambda char: unicodedata.combining(char) > 0)
    return "".join(["".join(sorted(run, key=unicodedata.combining)) for _, run in runs])


def _is_word_char(char: str) -> bool:
    """Return whether a character is part of words: letters, digits, marks, pictographs."""
    if "\ufe00" <= char <= "\ufe0f":  # variation selectors
        return False
    category = unicodedata.category(char)
    return category[0] in "LNM" or category == "So"
