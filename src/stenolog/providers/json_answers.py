"""A tolerant parser for the JSON object in a model's answer.

Small models wrap JSON in code fences, write text before it, use Python's `True`, add a trailing
comma, or are cut off at their limit. Complete values are kept, and an unfinished value is dropped:
half a sentence could be wrong.
"""

import json
import re
from contextlib import suppress
from typing import Any, Final

_MAX_ANSWER_CHARACTERS: Final = 1_000_000
"""Maximum number of characters that are read. The rest of a longer answer is ignored."""

# The next two constants limit the work for a text full of broken objects.
_MAX_TRIES: Final = 64
"""Maximum number of opening braces at which parsing starts."""
_MAX_WASTED_CHARACTERS: Final = 1_000_000
"""Number of characters parsed without result after which the search stops."""

_MAX_DEPTH: Final = 60
"""Maximum depth of nested values in an object that needs repair."""

_THINKING_TAGS: Final = re.compile(r"<(think|thinking|reasoning)>.*?(</\1>|\Z)", re.DOTALL | re.I)
_SPACE_PATTERN: Final = re.compile(r"(?:\s|//[^\n]*(?=\n)|/\*.*?\*/)*", re.DOTALL)
_WORD_PATTERN: Final = re.compile(r"[A-Za-z_$][\w$-]*")
_NUMBER_PATTERN: Final = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_UNFINISHED_NUMBER_PATTERN: Final = re.compile(r"[-+.\d][-+.\deE]*\Z")
_LITERALS: Final = {"true": True, "false": False} | dict.fromkeys(
    ("null", "none", "undefined", "nan", "infinity")
)
_QUOTED_PATTERNS: Final = {
    opening: re.compile(rf"{opening}((?:[^{closing}\\]++|\\.)*+){closing}", re.DOTALL)
    for opening, closing in (
        '""',
        "''",
        "\N{LEFT DOUBLE QUOTATION MARK}\N{RIGHT DOUBLE QUOTATION MARK}",
    )
}
"""Pattern of a complete quoted text, by its opening quote."""
_ESCAPE_PATTERN: Final = re.compile(r"((?:\\u[0-9a-fA-F]{4})+)|\\(.)", re.DOTALL)
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "u": "\\u"}


def read_object(answer: object) -> dict[str, Any] | None:
    """Return the JSON object in an answer, the longest if there are several, or None.

    Text around the object is ignored, common mistakes are repaired, and the unfinished last value
    of a truncated answer is dropped. NaN and Infinity become None. An answer that is not text, such
    as a refusal, has no object.
    """
    if not isinstance(answer, str):
        return None
    limited_text = answer[:_MAX_ANSWER_CHARACTERS]
    answer_object = _find_longest_object(_THINKING_TAGS.sub("", limited_text))
    if answer_object is not None or "<" not in limited_text:
        return answer_object
    # A model that never closes its thinking tag may have put the answer after the tag.
    return _find_longest_object(limited_text)


def _find_longest_object(text: str) -> dict[str, Any] | None:
    longest_object: dict[str, Any] | None = None
    longest_length = wasted_characters = 0
    position = text.find("{")
    for _ in range(_MAX_TRIES):
        if position < 0 or wasted_characters > _MAX_WASTED_CHARACTERS:
            break
        value, end = _parse_object(text, position)
        if value is None:
            wasted_characters += end - position
            end = position + 1
        elif end - position > longest_length:
            longest_object, longest_length = value, end - position
        position = text.find("{", end)
    return longest_object


def _parse_object(text: str, position: int) -> tuple[dict[str, Any] | None, int]:
    """Parse the object that starts at `position`; return the object and the end of the parsed text.

    The object is None if the text cannot be repaired.
    """
    with suppress(ValueError, RecursionError):
        return _DECODER.raw_decode(text, position)
    parser = _TolerantParser(text, position)
    with suppress(_NotRepairable):
        return parser.parse_object(0), parser.position
    return None, parser.position


_DECODER: Final = json.JSONDecoder(strict=False, parse_constant=lambda _: None)


class _NotRepairable(Exception):
    """The text cannot be repaired to JSON."""


class _CutOff(Exception):
    """The text ends within a value."""


class _TolerantParser:
    """A parser of one object that accepts the common mistakes of models."""

    def __init__(self, text: str, position: int) -> None:
        self.text = text
        self.position = position

    def parse_object(self, depth: int) -> dict[str, Any]:
        self.position += 1
        values: dict[str, Any] = {}
        try:
            while self._has_next_item("}"):
                is_quoted = self._peek() in _QUOTED_PATTERNS
                name = self._parse_quoted() if is_quoted else self._parse_unquoted_word()
                if self._peek() != ":":
                    raise _NotRepairable
                self.position += 1
                values[name] = self._parse_value(depth + 1)
        except _CutOff:
            self.position = len(self.text)
        return values

    def _parse_list(self, depth: int) -> list[Any]:
        self.position += 1
        values: list[Any] = []
        try:
            while self._has_next_item("]"):
                values.append(self._parse_value(depth + 1))
        except _CutOff:
            self.position = len(self.text)
        return values

    def _has_next_item(self, closing: str) -> bool:
        """Whether another item follows. Missing and extra commas are accepted."""
        while (char := self._peek()) == ",":
            self.position += 1
        if char == closing:
            self.position += 1
            return False
        # A closing bracket of an outer level means that the bracket of this level was omitted.
        return char not in "]}"

    def _peek(self) -> str:
        """Return the next character that is not space or comment. Raises _CutOff at the end."""
        match = _SPACE_PATTERN.match(self.text, self.position)
        self.position = match.end() if match else self.position
        if self.position >= len(self.text):
            raise _CutOff
        return self.text[self.position]

    def _parse_unquoted_word(self) -> str:
        match = _WORD_PATTERN.match(self.text, self.position)
        if match is None:
            raise _NotRepairable
        self.position = match.end()
        return match[0]

    def _parse_value(self, depth: int) -> Any:
        char = self._peek()
        if depth > _MAX_DEPTH:
            raise _NotRepairable
        if char == "{":
            return self.parse_object(depth)
        if char == "[":
            return self._parse_list(depth)
        if char in _QUOTED_PATTERNS:
            return self._parse_quoted()
        if _UNFINISHED_NUMBER_PATTERN.match(self.text, self.position):
            raise _CutOff
        if match := _NUMBER_PATTERN.match(self.text, self.position):
            self.position = match.end()
            return _parse_number(match[0])
        word = self._parse_unquoted_word().lower()
        if self.position >= len(self.text):
            raise _CutOff
        if word not in _LITERALS:
            raise _NotRepairable
        return _LITERALS[word]

    def _parse_quoted(self) -> str:
        match = _QUOTED_PATTERNS[self.text[self.position]].match(self.text, self.position)
        if match is None:
            raise _CutOff
        self.position = match.end()
        return _ESCAPE_PATTERN.sub(_unescape, match[1])


def _unescape(escape: re.Match[str]) -> str:
    if escape[1] is None:
        return _ESCAPES.get(escape[2], escape[2])
    # A surrogate pair becomes one character; a lone surrogate is replaced.
    return re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", json.loads(f'"{escape[1]}"'))


def _parse_number(text: str) -> int | float | None:
    try:
        return int(text)
    except ValueError:
        value = float(text) if len(text) < 400 else float("inf")
        return value if abs(value) < float("inf") else None
