"""Token estimates for texts, messages and tools, without a tokenizer.

A text is split into pieces much as tokenizers do before they merge bytes: a word with the character
before it, up to three digits, a run of punctuation, a run of spaces. The estimate for a piece
depends on its script, length and shape; runs that are neither words nor paths (keys, hashes,
base64) count as random text. The estimates are fitted to o200k; a `Calibration` adjusts the
estimates to the model in use. The time is linear in the length of the text.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any, Final

from msgspec import Struct

from stenolog.lazy_loading import lazy_pattern
from stenolog.messages import (
    REASONING_FIELDS,
    FilePart,
    ImagePart,
    Part,
    TextPart,
    ThinkingPart,
    ToolCall,
    ToolResult,
    UnknownPart,
    as_json,
    encoded_data,
    read_listed_call,
    read_part,
)
from stenolog.records import Message

__all__ = ["Calibration", "Tokens"]

MESSAGE_TOKENS: Final = 4
"""Tokens that every message costs in addition to its text: start, role, end."""
CALL_TOKENS: Final = 6
"""Tokens that every tool call costs in addition to its name, arguments and id."""
TOOLS_TOKENS: Final = 12
"""Tokens that a request with at least one tool costs in addition to the tools."""
TOOL_TOKENS: Final = 4
"""Tokens that every tool costs in addition to its definition."""
IMAGE_TOKENS: Final = 1_445
"""Tokens counted for an image without `detail: low`: the maximum, for tiles of 512 pixels."""
LOW_IMAGE_TOKENS: Final = 85
"""Tokens of an image with `detail: low`."""
AUDIO_CHARACTERS_PER_TOKEN: Final = 1_000
"""Characters of encoded audio per token."""
FILE_CHARACTERS_PER_TOKEN: Final = 40
"""Characters of an encoded file (PDF) per token."""


def estimate(text: str) -> int:
    """Return the estimated tokens of a text; 0 only for the empty text."""
    # The cache key is a hash, so that the cache holds no texts. A collision only costs accuracy.
    cache_key = (hash(text), len(text))
    tokens = _estimates.get(cache_key)
    if tokens is None:
        tokens = _count_tokens(text)
        if len(_estimates) >= _MAX_ESTIMATES:
            _estimates.clear()
        _estimates[cache_key] = tokens
    return tokens


def message_tokens(
    message: Message | Mapping[str, Any], *, count: Callable[[str], int] = estimate
) -> int:
    """Return the estimated tokens of a message in a request.

    All fields except `_SKIP_FIELDS` count; unknown fields count as JSON. The caller must first
    remove fields that are not sent, as `prepare_messages` does.
    """
    fields = message.to_dict() if isinstance(message, Message) else message
    total = MESSAGE_TOKENS
    for name, value in fields.items():
        if name == "content" and isinstance(value, str):
            total += count(value) if value else 0
        elif name not in _SKIP_FIELDS:
            total += _field_tokens(name, value, count)
    return total


def tools_tokens(
    tools: Sequence[Mapping[str, Any]], *, count: Callable[[str], int] = estimate
) -> int:
    """Return the estimated tokens of tool definitions; 0 without tools."""
    return TOOLS_TOKENS + sum(TOOL_TOKENS + count(as_json(tool)) for tool in tools) if tools else 0


class Calibration(Struct, frozen=True, kw_only=True):
    """Moving average of the ratio of reported to estimated tokens, for one model."""

    ratio: float = 1.0
    """Factor for estimates."""
    weight: float = 0.0
    """Number of reports in the average, at most eight."""

    def after(self, *, estimated: int, reported: int) -> "Calibration":
        """Return the calibration after one more report.

        `estimated`: the estimate without calibration. A report without tokens is ignored. One
        report at most doubles or halves the ratio, which limits the effect of a wrong report. A
        few reports are enough to adjust to another model.
        """
        if estimated <= 0 or reported <= 0:
            return self
        # Limit `reported` first: the quotient of two integers may be too large for a float.
        measured_ratio = min(reported, _MAX_RATIO * estimated) / estimated
        ratio = min(max(self.ratio, _MIN_RATIO), _MAX_RATIO)
        measured_ratio = min(max(measured_ratio, ratio / 2, _MIN_RATIO), ratio * 2)
        weight = min(max(self.weight, 0.0) + 1, _MAX_WEIGHT)
        return Calibration(ratio=ratio + (measured_ratio - ratio) / weight, weight=weight)


class Tokens(Struct, frozen=True, kw_only=True):
    """A token counter: the estimate or an exact counter, times the ratio of a calibration."""

    count: Callable[[str], int] = estimate
    ratio: float = 1.0

    def text(self, text: str) -> int:
        """Return the tokens of a text."""
        return round(self.count(text) * self.ratio)

    def message(self, message: Message | Mapping[str, Any]) -> int:
        """Return the tokens of a message in a request."""
        return round(message_tokens(message, count=self.count) * self.ratio)

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> int:
        """Return the tokens of tool definitions."""
        return round(tools_tokens(tools, count=self.count) * self.ratio)


_MAX_WEIGHT: Final = 8.0
_MIN_RATIO: Final = 0.25
_MAX_RATIO: Final = 4

# --- the pieces of a text --------------------------------------------------------------------

_ACCENTED_LETTERS: Final = "\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u036f\u1e00-\u1eff"
_HAN: Final = "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RARE_HAN: Final = "\U00020000-\U0003ffff"
_KANA: Final = "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_SPACED_SCRIPTS: Final = (
    "\u0370-\u1dff\u2c00-\u2dff\u3130-\u318f\ua000-\ud7ff\ufb00-\ufdff\ufe70-\ufeff"
    "\U00010000-\U0001efff"
)
"""Scripts that mostly separate words by spaces: Greek, Cyrillic, Arabic, Hangul …"""
_LETTERS: Final = f"A-Za-z{_ACCENTED_LETTERS}{_HAN}{_RARE_HAN}{_KANA}{_SPACED_SCRIPTS}"

# Every repetition is bounded, so that pieces stay short and matching stays fast.
_LONG_CHARACTER_RUN: Final = "[A-Za-z0-9+/=_-]{20,72}"
_PIECE_PATTERN: Final = lazy_pattern(
    "|".join(
        (
            f" ?{_LONG_CHARACTER_RUN}",
            f"[^\r\n0-9{_LETTERS}]?[A-Z]{{0,16}}[a-z{_ACCENTED_LETTERS}]{{1,24}}(?:'(?:s|t|re|ve|m|ll|d)\\b)?",
            f"[^\r\n0-9{_LETTERS}]?[A-Z]{{1,16}}",
            "[0-9]{1,3}",
            f"[^\r\n0-9{_LETTERS}]?[{_SPACED_SCRIPTS}]{{1,24}}",
            f"[{_HAN}{_RARE_HAN}]{{1,16}}",
            f"[{_KANA}]{{1,16}}",
            f" ?[^\\s0-9{_LETTERS}]{{1,64}}[\r\n/]{{0,16}}",
            "\\s{0,64}[\r\n]{1,16}",
            "\\s{1,64}(?!\\S)",
            "\\s{1,64}",
        )
    )
)
_PIECES_OF_LONG_RUN: Final = lazy_pattern(
    "[+/=_-]?[A-Z]{0,16}[a-z]{1,24}|[+/=_-]?[A-Z]{1,16}|[0-9]{1,3}|[ +/=_-]{1,64}"
)
"""Pieces of a long run of letters, digits and symbols, such as a path, a key or base64."""
_LONG_RUN_WITH_SPACE: Final = lazy_pattern(f" ?{_LONG_CHARACTER_RUN}")
# A change between capitals, small letters and digits is rare in names and paths. In keys, hashes
# and base64, about every fourth character is of another kind than the character before it.
_CHARACTER_KIND_CHANGE: Final = lazy_pattern("[A-Z][A-Z](?=[a-z])|[0-9](?=[A-Za-z])|[A-Z](?=[0-9])")
_NOT_ALPHANUMERIC: Final = lazy_pattern(f"[^0-9{_LETTERS}]")
_ACCENTED_LETTER: Final = lazy_pattern(f"[{_ACCENTED_LETTERS}]")
_LONG_WORD: Final = lazy_pattern("[A-Za-z]{5,24}")

_MAX_ESTIMATES: Final = 65_536
"""Maximum number of cached estimates; a full cache is cleared."""
_estimates: dict[tuple[int, int], int] = {}


def _count_tokens(text: str) -> int:
    total = sum(map(_piece_tokens, _PIECE_PATTERN.findall(text)))
    if not text.isascii():
        total += _foreign_word_tokens(text)
    return max(round(total), 1) if text else 0


def _foreign_word_tokens(text: str) -> float:
    """Return the extra tokens of long words in a text whose accents show that it is not English."""
    long_words = len(_LONG_WORD.findall(text))
    return 0.35 * long_words if len(_ACCENTED_LETTER.findall(text)) * 8 > long_words else 0.0


@lru_cache(maxsize=16_384)
def _piece_tokens(piece: str) -> float:
    if len(piece) >= 20 and _LONG_RUN_WITH_SPACE.fullmatch(piece):
        is_random = len(_CHARACTER_KIND_CHANGE.findall(piece)) * 8 >= len(piece)
        count_tokens = _random_text_tokens if is_random else _plain_piece_tokens
        return sum(map(count_tokens, _PIECES_OF_LONG_RUN.findall(piece.lstrip())))
    return _plain_piece_tokens(piece)


def _plain_piece_tokens(piece: str) -> float:
    """Estimate the tokens of a word, a number, or a run of punctuation or spaces."""
    last_character = piece[-1]
    if piece.isspace() or "0" <= last_character <= "9":
        return 1.0
    if last_character.isspace() or _NOT_ALPHANUMERIC.match(last_character):
        return _punctuation_tokens(piece.strip())
    if _ACCENTED_LETTER.search(piece):
        return 1.0 + 0.22 * max(0, _count_letters(piece) - 2)
    return _word_tokens(piece) if last_character.isascii() else _other_script_tokens(piece)


def _count_letters(piece: str) -> int:
    return len(piece) - bool(_NOT_ALPHANUMERIC.match(piece))


def _word_tokens(word: str) -> float:
    """Estimate the tokens of a word: more than one if long, in capitals, or after punctuation."""
    letter_count = _count_letters(word)
    tokens = 1.0 + 0.03 * max(0, letter_count - 3) + 0.15 * max(0, letter_count - 12)
    if letter_count > 4 and word.isupper():
        tokens += 0.08 * (letter_count - 4)
    if letter_count == len(word) or word[0] == " ":
        return tokens
    return tokens + 0.05 * min(letter_count - 1, 8)


def _punctuation_tokens(symbols: str) -> float:
    """Estimate the tokens of punctuation; repetitions of one character cost less."""
    if len(symbols) > 3 and symbols.count(symbols[0]) == len(symbols) and symbols[0] < "\u2600":
        return 1.0 + len(symbols) / (64 if symbols.isascii() else 16)
    if symbols.isascii():
        return 1.0 + 0.25 * max(0, len(symbols) - 3)
    return sum(map(_symbol_tokens, symbols))


def _symbol_tokens(symbol: str) -> float:
    if symbol >= "\U00010000":
        return 2.1
    if symbol in "\u200d\ufe0f":
        return 0.5
    if "\u3000" <= symbol < "\u3040" or symbol >= "\uff00":
        # CJK punctuation often forms one token with the next Han character.
        return 0.8
    return 0.3 if symbol < "\x80" else 1.6 if "\u2600" <= symbol < "\u2c00" else 1.0


def _random_text_tokens(piece: str) -> float:
    """Estimate the tokens of random-looking text, which tokenizers split into short pieces."""
    return 1.0 if len(piece) <= 2 or piece.isdigit() else 0.6 * len(piece)


_SCRIPT_TOKENS: Final = (
    ("\u0080", 0.0, 1.2),
    ("\u0370", 0.65, 0.31),  # Greek
    ("\u0400", 0.65, 0.18),  # Cyrillic
    ("\u0530", 0.65, 0.18),  # Armenian
    ("\u0590", 0.3, 0.39),  # Hebrew
    ("\u0600", 0.0, 0.40),  # Arabic
    ("\u0900", 0.2, 0.38),  # the scripts of India
    ("\u0d80", 0.0, 1.0),  # Sinhala
    ("\u0e00", 0.0, 0.44),  # Thai
    ("\u0e80", 0.0, 1.7),  # Lao, Tibetan
    ("\u1000", 0.0, 0.67),  # Myanmar
    ("\u10a0", 0.65, 0.18),  # Georgian
    ("\u1100", 0.0, 2.2),  # Ethiopic and rarer scripts
    ("\u1780", 0.0, 0.6),  # Khmer
    ("\u1800", 0.0, 2.2),
    ("\u2e80", 0.34, 0.745),  # Han
    ("\u3041", 0.54, 0.5),  # kana
    ("\u3130", 0.0, 1.0),
    ("\u3400", 0.34, 0.745),  # Han
    ("\ua000", 0.0, 2.2),
    ("\uac00", 0.61, 0.56),  # hangul
    ("\ud800", 0.34, 0.745),
    ("\U00010000", 0.0, 2.2),
)
"""First character of each script, its tokens per word, and its tokens per letter."""
_SCRIPT_STARTS: Final = [start for start, _, _ in _SCRIPT_TOKENS]


def _other_script_tokens(piece: str) -> float:
    """Estimate the tokens of a word in a non-Latin script."""
    _, per_word, per_letter = _SCRIPT_TOKENS[bisect_right(_SCRIPT_STARTS, piece[-1]) - 1]
    return max(1.0, per_word + per_letter * _count_letters(piece))


# --- the parts of a message ------------------------------------------------------------------

_SKIP_FIELDS: Final = frozenset({"role", "type", "signature", "cache_control"})
"""Message fields that are not counted: models do not see them, or MESSAGE_TOKENS covers them."""
_TEXT_FIELDS: Final = frozenset(
    {"name", "tool_call_id", "call_id", "arguments", "refusal", *REASONING_FIELDS[:3]}
)
"""Message fields of which only the value is counted, not the field name."""
_EXCLUDED_CALL_FIELDS: Final = _SKIP_FIELDS | {"id", "name", "arguments", "input"}
_EXCLUDED_RESULT_FIELDS: Final = _SKIP_FIELDS | {"tool_use_id", "content"}
"""Fields of a call or result that are counted separately or not at all."""
_MAX_CONTENT_DEPTH: Final = 8
"""Maximum nesting depth of parts; deeper content counts as JSON."""


def _field_tokens(name: str, value: Any, count: Callable[[str], int]) -> int:
    if name in ("content", "output"):
        return _content_tokens(value, count)
    if name in _TEXT_FIELDS:
        return _value_tokens(value, count)
    if name == "tool_calls":
        calls = value if isinstance(value, list | tuple) else [value]
        return sum(_listed_call_tokens(call, count) for call in calls if call)
    if name == "function_call":
        return _listed_call_tokens(value, count) if value else 0
    if name == "audio" and isinstance(value, Mapping):
        attachment_tokens = _attachment_tokens(value, "audio")
        if attachment_tokens:
            return attachment_tokens + _value_tokens(value.get("transcript"), count)
    return count(as_json({name: value}))


def _other_field_tokens(
    fields: Mapping[str, Any], excluded: Set[str], count: Callable[[str], int], field: str = ""
) -> int:
    """Return the tokens of all fields except `field` and those in `excluded`."""
    other_names = [name for name in fields if name not in excluded and name != field]
    return sum(count(as_json({name: fields[name]})) for name in other_names)


def _value_tokens(value: Any, count: Callable[[str], int]) -> int:
    if value is None or value == "":
        return 0
    return count(value if isinstance(value, str) else as_json(value))


def _listed_call_tokens(call: Any, count: Callable[[str], int]) -> int:
    """Return the tokens of an item of `tool_calls`."""
    if not isinstance(call, Mapping):
        return CALL_TOKENS + _value_tokens(call, count)
    return _tool_call_tokens(read_listed_call(call), count)


def _tool_call_tokens(call: ToolCall, count: Callable[[str], int]) -> int:
    """Return the tokens of a tool call: name, arguments, id and other fields."""
    call_fields = call.value[call.field] if call.field else call.value
    texts = (call_fields.get("name"), call.arguments, call.value.get("id"))
    other_tokens = _other_field_tokens(call_fields, _EXCLUDED_CALL_FIELDS, count)
    if call.field:
        other_tokens += _other_field_tokens(call.value, _EXCLUDED_CALL_FIELDS, count, call.field)
    return CALL_TOKENS + sum(_value_tokens(value, count) for value in texts) + other_tokens


def _content_tokens(content: Any, count: Callable[[str], int], *, depth: int = 0) -> int:
    if isinstance(content, str):
        return count(content) if content else 0
    if depth < _MAX_CONTENT_DEPTH:
        if isinstance(content, list | tuple):
            return sum([_content_tokens(part, count, depth=depth + 1) for part in content])
        if isinstance(content, Mapping):
            return _part_tokens(read_part(content), count, depth=depth)
    return _value_tokens(content, count)


def _part_tokens(part: Part, count: Callable[[str], int], *, depth: int) -> int:
    value = part.value
    match part:
        case TextPart() | ThinkingPart() if isinstance(value.get(part.field), str):
            return count(part.text) + _other_field_tokens(value, _SKIP_FIELDS, count, part.field)
        case ImagePart():
            return LOW_IMAGE_TOKENS if part.detail == "low" else IMAGE_TOKENS
        case ToolCall() if "input" in value or value.get("type") == "tool_use":
            return _tool_call_tokens(part, count)
        case ToolResult() if "output" not in value or value.get("content") is not None:
            total = _content_tokens(part.content, count, depth=depth)
            total += _value_tokens(value.get("tool_use_id"), count)
            return CALL_TOKENS + total + _other_field_tokens(value, _EXCLUDED_RESULT_FIELDS, count)
        case FilePart() if part.content is not None:
            total = _content_tokens(part.content, count, depth=depth)
            encoded_tokens = _attachment_tokens(value, part.kind)
            if encoded_tokens and encoded_data(value)[1] != part.content:
                return total + encoded_tokens
            return total + _other_field_tokens(value, _SKIP_FIELDS, count, part.field)
        case FilePart():
            return _attachment_tokens(value, part.kind) or count(as_json(value))
        case UnknownPart() if part.text is not None:
            return count(part.text) + _other_field_tokens(value, _SKIP_FIELDS, count, "text")
        case UnknownPart():
            return _attachment_tokens(value, "file") or count(as_json(value))
    return count(as_json(value))


def _attachment_tokens(part: Mapping[str, Any], kind: str) -> int:
    """Return the tokens of a part's encoded data, based on its size; 0 for short data or none."""
    media_type, data = encoded_data(part)
    if len(data) < _MIN_ENCODED_LENGTH:
        return 0
    if media_type.startswith("image/"):
        return IMAGE_TOKENS
    is_audio = kind == "audio" or media_type.startswith("audio/")
    return len(data) // (AUDIO_CHARACTERS_PER_TOKEN if is_audio else FILE_CHARACTERS_PER_TOKEN) + 1


_MIN_ENCODED_LENGTH: Final = 1_000
"""Minimum length of encoded data; shorter data counts as text."""
