"""Token estimates for texts, messages and tools, without a tokenizer.

A text is split into pieces much as tokenizers do before they merge bytes: a word with the
character before it, up to three digits, a run of punctuation, a run of spaces. The price of a
piece depends on its script, length and shape; runs that are neither words nor paths (keys, hashes,
base64) are priced as noise. The prices are fitted to o200k; a `Calibration` adjusts them to the
model in use. The time is linear in the length of the text.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence, Set
from functools import cache, lru_cache
from typing import Any, Final

import msgspec
from msgspec import Struct

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
    encoded_data,
    read_listed_call,
    read_part,
)
from stenolog.records import Message

__all__ = [
    "Calibration",
    "Tokens",
]

MESSAGE: Final = 4
"""Tokens that every message costs in addition to its text: start, role, end."""
CALL: Final = 6
"""Tokens that every tool call costs in addition to its name, arguments and id."""
TOOLS: Final = 12
"""Tokens that a request with at least one tool costs in addition to the tools."""
TOOL: Final = 4
"""Tokens that every tool costs in addition to its definition."""
IMAGE: Final = 1_445
"""Maximum tokens of an image, counted in tiles of 512 pixels."""
IMAGE_LOW: Final = 85
"""Tokens of an image with `detail: low`."""
AUDIO: Final = 1_000
"""Characters of encoded audio per token."""
FILE: Final = 40
"""Characters of an encoded file (PDF) per token."""


def estimate(text: str) -> int:
    """Return the estimated tokens of a text; 0 only for the empty text."""
    # Keyed by hash, so that the cache holds no texts. A collision only costs accuracy.
    known = (hash(text), len(text))
    tokens = _known.get(known)
    if tokens is None:
        tokens = _counted(text)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[known] = tokens
    return tokens


def message_tokens(
    message: Message | Mapping[str, Any], *, count: Callable[[str], int] = estimate
) -> int:
    """Return the estimated tokens of a message in a request.

    All fields count; unknown fields count as JSON. A caller removes unsent fields first, as
    `prepare_messages` does.
    """
    fields = message.to_dict() if isinstance(message, Message) else message
    total = MESSAGE
    for name, value in fields.items():
        if name not in _FREE:
            total += _field(name, value, count)
    return total


def tools_tokens(
    tools: Sequence[Mapping[str, Any]], *, count: Callable[[str], int] = estimate
) -> int:
    """Return the estimated tokens of tool definitions; 0 without tools."""
    return TOOLS + sum(TOOL + count(_json(tool)) for tool in tools) if tools else 0


class Calibration(Struct, frozen=True, kw_only=True):
    """Moving average of reported / estimated tokens of a model."""

    ratio: float = 1.0
    """Factor for estimates."""
    weight: float = 0.0
    """Number of reports in the average, at most eight."""

    def after(self, *, estimated: int, reported: int) -> "Calibration":
        """Return the calibration after one more report, for a request estimated at ratio 1.

        A report without tokens is ignored. One report moves the ratio to at most twice and at least
        half of its value. So a single wrong report changes little, and a few reports are enough to
        adjust to another model.
        """
        if estimated <= 0 or reported <= 0:
            return self
        # Limit the value before the division: the quotient of two integers may be too large for a
        # float.
        measured = min(reported, _HIGHEST * estimated) / estimated
        ratio = min(max(self.ratio, _LOWEST), _HIGHEST)
        measured = min(max(measured, ratio / 2, _LOWEST), ratio * 2)
        weight = min(max(self.weight, 0.0) + 1, _REMEMBERED)
        return Calibration(ratio=ratio + (measured - ratio) / weight, weight=weight)


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


_REMEMBERED: Final = 8.0
_LOWEST: Final = 0.25
_HIGHEST: Final = 4

# --- the pieces of a text --------------------------------------------------------------------

_ACCENTED: Final = "\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u036f\u1e00-\u1eff"
_HAN: Final = "\u2e80-\u2fdf\u3005-\u3007\u3021-\u3029\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_HAN_RARE: Final = "\U00020000-\U0003ffff"
_KANA: Final = "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"
_SPACED: Final = (
    "\u0370-\u1dff\u2c00-\u2dff\u3130-\u318f\ua000-\ud7ff\ufb00-\ufdff\ufe70-\ufeff"
    "\U00010000-\U0001efff"
)
"""Scripts that mostly separate words by spaces: Greek, Cyrillic, Arabic, Hangul …"""
_LETTERS: Final = f"A-Za-z{_ACCENTED}{_HAN}{_HAN_RARE}{_KANA}{_SPACED}"

# Every repetition is bounded, so that no text makes a piece long or matching slow.
_OPAQUE: Final = "[A-Za-z0-9+/=_-]{20,72}"
_PIECES: Final = "|".join(
    (
        f"[^\r\n0-9{_LETTERS}]?[A-Z]{{0,16}}[a-z{_ACCENTED}]{{1,24}}(?:'(?:s|t|re|ve|m|ll|d)\\b)?",
        f"[^\r\n0-9{_LETTERS}]?[A-Z]{{1,16}}",
        "[0-9]{1,3}",
        f"[^\r\n0-9{_LETTERS}]?[{_SPACED}]{{1,24}}",
        f"[{_HAN}{_HAN_RARE}]{{1,16}}",
        f"[{_KANA}]{{1,16}}",
        f" ?[^\\s0-9{_LETTERS}]{{1,64}}[\r\n/]{{0,16}}",
        "\\s{0,64}[\r\n]{1,16}",
        "\\s{1,64}(?!\\S)",
        "\\s{1,64}",
    )
)
_PART: Final = re.compile(
    "[+/=_-]?[A-Z]{0,16}[a-z]{1,24}|[+/=_-]?[A-Z]{1,16}|[0-9]{1,3}|[ +/=_-]{1,64}"
)
"""Pieces of a run that is neither a word nor a path."""
_IS_OPAQUE: Final = re.compile(f" ?{_OPAQUE}")
# These changes are rare in names and paths. In keys, hashes and base64, about every fourth
# character is one.
_ODD: Final = re.compile("[A-Z][A-Z](?=[a-z])|[0-9](?=[A-Za-z])|[A-Z](?=[0-9])")
_SIGN: Final = re.compile(f"[^0-9{_LETTERS}]")
_ACCENT: Final = re.compile(f"[{_ACCENTED}]")
_LONGER_WORD: Final = re.compile("[A-Za-z]{5,24}")


@cache
def _pieces() -> re.Pattern[str]:
    """Compile the pattern on first use: it takes longer than importing everything else."""
    return re.compile(f" ?{_OPAQUE}|{_PIECES}")


_MOST_KNOWN: Final = 65_536
_known: dict[tuple[int, int], int] = {}


def _counted(text: str) -> int:
    total = sum(map(_price, _pieces().findall(text)))
    if not text.isascii():
        total += _foreign(text)
    return max(round(total), 1) if text else 0


def _foreign(text: str) -> float:
    """Return the extra tokens of long words in a text whose accents show that it is not English."""
    long_words = len(_LONGER_WORD.findall(text))
    return 0.35 * long_words if len(_ACCENT.findall(text)) * 8 > long_words else 0.0


@lru_cache(maxsize=16_384)
def _price(piece: str) -> float:
    if len(piece) >= 20 and _IS_OPAQUE.fullmatch(piece):
        noisy = len(_ODD.findall(piece)) * 8 >= len(piece)
        return sum(map(_noise if noisy else _plain, _PART.findall(piece.lstrip())))
    return _plain(piece)


def _plain(piece: str) -> float:
    """Price a word, a number, or a run of punctuation or spaces."""
    last = piece[-1]
    if piece.isspace() or "0" <= last <= "9":
        return 1.0
    if last.isspace() or _SIGN.match(last):
        return _signs(piece.strip())
    if _ACCENT.search(piece):
        return 1.0 + 0.22 * max(0, _letters(piece) - 2)
    return _word(piece) if last.isascii() else _other(piece)


def _letters(piece: str) -> int:
    return len(piece) - bool(_SIGN.match(piece))


def _word(piece: str) -> float:
    """Price a word: one token, more if it is long, in capitals, or next to punctuation."""
    letters = _letters(piece)
    price = 1.0 + 0.03 * max(0, letters - 3) + 0.15 * max(0, letters - 12)
    if letters > 4 and piece.isupper():
        price += 0.08 * (letters - 4)
    if letters == len(piece) or piece[0] == " ":
        return price
    return price + 0.05 * min(letters - 1, 8)


def _signs(signs: str) -> float:
    """Price punctuation: about three ASCII characters per token, others one by one."""
    if len(signs) > 3 and signs.count(signs[0]) == len(signs) and signs[0] < "\u2600":
        return 1.0 + len(signs) / (64 if signs.isascii() else 16)
    if signs.isascii():
        return 1.0 + 0.25 * max(0, len(signs) - 3)
    return sum(map(_sign, signs))


def _sign(sign: str) -> float:
    if sign >= "\U00010000":
        return 2.1
    if sign in "\u200d\ufe0f":
        return 0.5
    if "\u3000" <= sign < "\u3040" or sign >= "\uff00":
        # Such punctuation often forms one token with the next Han character.
        return 0.8
    return 0.3 if sign < "\x80" else 1.6 if "\u2600" <= sign < "\u2c00" else 1.0


def _noise(part: str) -> float:
    """Price a part of a key, a hash or base64, which tokenizers split into short pieces."""
    return 1.0 if len(part) <= 2 or part.isdigit() else 0.6 * len(part)


_SCRIPTS: Final = (
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
"""First character of a script, price per word, price per letter."""
_STARTS: Final = [start for start, _, _ in _SCRIPTS]


def _other(piece: str) -> float:
    """Price a word of a non-Latin script, or non-ASCII punctuation."""
    _, once, each = _SCRIPTS[bisect_right(_STARTS, piece[-1]) - 1]
    return max(1.0, once + each * _letters(piece))


# --- the parts of a message ------------------------------------------------------------------

_FREE: Final = frozenset({"role", "type", "signature", "cache_control"})
"""Message fields without a price: part of the overhead, or not shown to the model."""
_PLAIN: Final = frozenset(
    {"name", "tool_call_id", "call_id", "arguments", "refusal", *REASONING_FIELDS[:3]}
)
"""Fields of a message that count as their text, without their name."""
_OF_CALL: Final = _FREE | {"id", "name", "arguments", "input"}
_OF_RESULT: Final = _FREE | {"tool_use_id", "content"}
_DEEPEST: Final = 8


def _field(name: str, value: Any, count: Callable[[str], int]) -> int:
    if name in ("content", "output"):
        return _content(value, count)
    if name in _PLAIN:
        return _plain_value(value, count)
    if name == "tool_calls":
        calls = value if isinstance(value, list | tuple) else [value]
        return sum(_call(call, count) for call in calls if call)
    if name == "function_call":
        return _call(value, count) if value else 0
    if name == "audio" and isinstance(value, Mapping) and (attached := _attached(value, "audio")):
        return attached + _plain_value(value.get("transcript"), count)
    return count(_json({name: value}))


def _further(
    fields: Mapping[str, Any], known: Set[str], count: Callable[[str], int], field: str = ""
) -> int:
    """Return the tokens of all fields except `field` and those in `known`."""
    total = 0
    for name in fields:
        if name not in known and name != field:
            total += count(_json({name: fields[name]}))
    return total


def _plain_value(value: Any, count: Callable[[str], int]) -> int:
    if value is None or value == "":
        return 0
    return count(value if isinstance(value, str) else _json(value))


def _call(call: Any, count: Callable[[str], int]) -> int:
    """Return the tokens of an item of `tool_calls`."""
    if not isinstance(call, Mapping):
        return CALL + _plain_value(call, count)
    return _priced_call(read_listed_call(call), count)


def _priced_call(call: ToolCall, count: Callable[[str], int]) -> int:
    """Return the tokens of a tool call: name, arguments, id and other fields."""
    inner = call.value[call.field] if call.field else call.value
    texts = (inner.get("name"), call.arguments, call.value.get("id"))
    extra = _further(inner, _OF_CALL, count)
    if call.field:
        extra += _further(call.value, _OF_CALL, count, call.field)
    return CALL + sum(_plain_value(value, count) for value in texts) + extra


def _content(content: Any, count: Callable[[str], int], *, depth: int = 0) -> int:
    if isinstance(content, str):
        return count(content) if content else 0
    if depth < _DEEPEST:
        if isinstance(content, list | tuple):
            return sum([_content(part, count, depth=depth + 1) for part in content])
        if isinstance(content, Mapping):
            return _part(read_part(content), count, depth=depth)
    return _plain_value(content, count)


def _part(part: Part, count: Callable[[str], int], *, depth: int) -> int:
    value = part.value
    match part:
        case TextPart():
            return count(part.text) + _further(value, _FREE, count, part.field)
        case ThinkingPart() if isinstance(value.get(part.field), str):
            return count(part.text) + _further(value, _FREE, count, part.field)
        case ImagePart():
            return IMAGE_LOW if part.detail == "low" else IMAGE
        case ToolCall() if "input" in value or value.get("type") == "tool_use":
            return _priced_call(part, count)
        case ToolResult() if "output" not in value or value.get("content") is not None:
            total = _content(part.content, count, depth=depth)
            total += _plain_value(value.get("tool_use_id"), count)
            return CALL + total + _further(value, _OF_RESULT, count)
        case FilePart() if part.content is not None:
            total = _content(part.content, count, depth=depth)
            if encoded_data(value)[1] != part.content and (encoded := _attached(value, part.kind)):
                return total + encoded
            return total + _further(value, _FREE, count, part.field)
        case FilePart():
            return _attached(value, part.kind) or count(_json(value))
        case UnknownPart() if part.text is not None:
            return count(part.text) + _further(value, _FREE, count, "text")
        case UnknownPart():
            return _attached(value, "file") or count(_json(value))
    return count(_json(value))


def _attached(part: Mapping[str, Any], kind: str) -> int:
    """Return the tokens of a part's encoded data, based on its size; 0 without such data."""
    media_type, data = encoded_data(part)
    if len(data) < _ENCODED:
        return 0
    if media_type.startswith("image/"):
        return IMAGE
    is_audio = kind == "audio" or media_type.startswith("audio/")
    return len(data) // (AUDIO if is_audio else FILE) + 1


_ENCODED: Final = 1_000
"""Minimum length of encoded data; shorter data counts as text."""
_TOO_DEEP: Final = 1_000
"""Number of bracket pairs counted for a value that is nested too deeply to be encoded."""


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        pass
    # The fast codec rejects lone surrogates and integers beyond 64 bits.
    try:
        return json.dumps(value, ensure_ascii=False, default=repr)
    except RecursionError:
        return "[]" * _TOO_DEEP
