"""Secrets that are recognized by the name of their field, such as `"password": "hunter2"`.

In text, field names in quotes are found, as in JSON and programs. The quotes may be escaped several
times, because arguments and results of tools are often JSON inside JSON. Every search takes linear
time: no value is scanned twice.
"""

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, Final
from unicodedata import normalize

from msgspec import Struct

from stenolog.lazy_loading import lazy_pattern


class SecretKind(Struct, frozen=True):
    """A kind of secret with the names of its fields."""

    name: str
    fields: str
    """Pattern of field names in lower case, with `_` between words."""
    safe_values: str = "(?!)"
    """Pattern of values that are not secrets."""
    has_numbers: bool = False
    """Whether a number can be a secret of this kind."""
    includes_nested: bool = True
    """Whether all values inside an object or list in a field of this kind are secrets."""


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    """Compile a pattern on first use: compiling is slow, and most texts have no field names."""
    return re.compile(pattern)


_PASS_PREFIXES: Final = """
    account admin api app auth basic bind client current db email ftp http imap key keystore ldap
    login mail mongo mqtt my mysql new old pg postgres proxy rabbitmq redis remote root server
    service smtp ssh sudo truststore user vpn wifi
"""
"""Words before `pass` that make it a password, unlike in `mountain_pass` or `boarding_pass`."""
_NON_SECRET_TOKENS: Final = (
    r"(?:.*_)?(?:next|prev|previous|page|paging|pagination|continuation|cursor|sync|start|end|stop"
    r"|resume|cancellation|eos|bos|pad|unk|mask|sep|cls)_?token"
)
"""Pattern of pagination tokens and special tokens of models, which are not secret."""
_FLAG_NAMES: Final = (
    r"(?:has|had|is|was|needs?|requires?|uses?|supports?|shows?|hides?|forgot|allows?|enables?)_.*"
)
_KINDS: Final = (
    SecretKind(
        "password",
        r".*(?:password|passwd|passphrase|passcode|passwort|kennwort)s?(_hash)?|(?:.*_)?pwd",
        has_numbers=True,
    ),
    SecretKind(
        "password", rf"(?:(?:.*_)?(?:{'|'.join(_PASS_PREFIXES.split())})_?)?pass|(?:.*_)?pw|passkey"
    ),
    SecretKind("password", r".*credentials?", "same-origin|include|omit"),
    SecretKind("private key", r".*private_?keys?"),
    SecretKind(
        "api key",
        r".*(?:api|access|signing|encryption|master|account|subscription|fernet|hmac)_?keys?",
    ),
    SecretKind("secret", r".*secrets?|.*secret_?(?:access_?)?keys?(?:_?base)?"),
    SecretKind("token", r".*token(?:_?value)?|(?:.*_)?(?:jwt|bearer|set_cookie|.+_cookies?)"),
    SecretKind("token", r"(?:x_)?auth_key|(?:php|j)?sess(?:ion)?id"),
    SecretKind("token", r"cookies?", r"[a-z]{1,12}(?: [a-z]{1,12}){0,3}"),
    SecretKind("token", r".*authorization", r"[a-z]{4,15}"),
    SecretKind("token", r"(?:x_)?auth", r"[a-z]{2,12}[0-9]?", includes_nested=False),
    SecretKind("pin", r"(?:.*_)?(?:pin|pin_code|cvv|cvc|otp)", has_numbers=True),
)
_NON_SECRET_NAME: Final = lazy_pattern(f"{_NON_SECRET_TOKENS}|{_FLAG_NAMES}")
_MAX_NAME_LENGTH: Final = 64
"""Number of characters at the end of a field name that are checked."""
_NAME_SUFFIX: Final = lazy_pattern(r"\s*+(?:\([^()]{0,60}\)|@[\w.-]{1,60})\s*+\Z")
"""Pattern of a suffix in a field name, such as in `password (prod)`."""
_CAMEL_CASE: Final = lazy_pattern(r"(?<=[a-z0-9])(?=[A-Z])")
_SEPARATORS: Final = lazy_pattern(r"[^a-z0-9]+")

_PLACEHOLDER: Final = lazy_pattern(
    r"(?i)\s*+(?:\[redacted: [a-z ]{1,20}\]|\*++|•++|x{3,}+|\.\.\.|…|<[^<>\s]{1,40}>"
    r"|\$\{[^{}\s]{1,60}\}|string|null|none|nil|true|false|undefined|optional|required|yes|no)?\s*+"
)
"""Pattern of placeholders, references and types that stand instead of a secret."""
_DIGITS: Final = lazy_pattern(r"\s*+[0-9]{3,8}\s*+")
_LONG_NUMBER: Final = lazy_pattern(r"-?[0-9]{4,}+")
_SCHEMA_TYPES: Final = ("string", "number", "integer", "boolean", "object", "array", "null")
_SCHEMA_FIELDS: Final = ("properties", "$ref", "enum", "anyOf", "oneOf", "allOf")
_SCHEMA_VALUES: Final = ("value", "default", "const", "example")
"""Names of schema fields that contain values."""
_DESCRIPTION_FIELDS: Final = ("description", "title", "label", "placeholder")

_FIELD_NAME: Final = lazy_pattern(
    # A match starts at the first of several backslashes, so that each run is scanned once.
    r"(?<!\\)(?P<quote>\\{0,31}[\"'])(?P<name>[^\"'\\\n]{1,160})(?P=quote)\s*+(?:=>|[:=])\s*+"
)
_QUOTE: Final = lazy_pattern(r"(?P<escapes>\\{0,31})(?P<mark>[\"'])")
_BARE_NUMBER: Final = lazy_pattern(r"-?[0-9]{4,40}+(?![\w.\"'\\])")
_PUNCTUATION: Final = lazy_pattern(r"[\[\]{}]|(?<!\\)\\{0,31}[\"']")
_COLON: Final = lazy_pattern(r"\s*+:")
_LOGPROB_FIELD: Final = lazy_pattern(r"\s{0,8},\s{0,8}\\{0,31}[\"']logprob")
"""Pattern of the text after a model's output token, which is not a secret."""

Span = tuple[int, int]


class SecretSpan(Struct, frozen=True):
    """The span of a secret in a text, and its replacement."""

    start: int
    end: int
    stub: str


@lru_cache(maxsize=4096)
def kind_of(name: str) -> SecretKind | None:
    """Return the kind of secret that a field of this name contains, or None."""
    without_suffix = _NAME_SUFFIX.sub("", name[-2 * _MAX_NAME_LENGTH :])
    compatible = without_suffix if without_suffix.isascii() else normalize("NFKC", without_suffix)
    normalized = _SEPARATORS.sub("_", _CAMEL_CASE.sub("_", compatible[-_MAX_NAME_LENGTH:]).lower())
    normalized = normalized.strip("_").rstrip("0123456789_")
    if _NON_SECRET_NAME.fullmatch(normalized):
        return None
    return next((kind for kind in _KINDS if _compile(kind.fields).fullmatch(normalized)), None)


def is_secret_value(kind: SecretKind, value: str) -> bool:
    """Whether the value of a field of this kind is a secret and not a placeholder."""
    if kind.name == "pin":
        return _DIGITS.fullmatch(value) is not None
    return not (_PLACEHOLDER.fullmatch(value) or _compile(kind.safe_values).fullmatch(value))


def is_secret_number(kind: SecretKind, value: str) -> bool:
    """Whether a number in a field of this kind is a secret."""
    return kind.has_numbers and bool(_LONG_NUMBER.fullmatch(value)) and is_secret_value(kind, value)


def kind_of_nested_field(kind: SecretKind | None, name: str, *, schema: bool) -> SecretKind | None:
    """Return the kind of a field inside an object whose values are all secrets, or None."""
    if kind is None or not kind.includes_nested or name in _DESCRIPTION_FIELDS:
        return None
    return kind if not schema or name in _SCHEMA_VALUES else None


def is_schema(name: str, value: Any) -> bool:
    """Whether an object with this field is a schema, which describes a type and has no value."""
    if name == "type":
        return isinstance(value, str) and value.lower() in _SCHEMA_TYPES
    return name in _SCHEMA_FIELDS


def stub_of(kind: SecretKind) -> str:
    """Return the replacement of a secret."""
    return f"[redacted: {kind.name}]"


def find_secret_fields(text: str) -> Iterator[SecretSpan]:
    """Yield the secrets of a text that follow the name of their field, in order."""
    at = 0
    while (match := _FIELD_NAME.search(text, at)) is not None:
        at = match.end()
        kind = kind_of(match["name"])
        if kind is None:
            continue
        number = _BARE_NUMBER.match(text, at)
        if number is not None and is_secret_number(kind, number[0]):
            # Use the quotes of the name, so that JSON stays valid.
            stub = f"{match['quote']}{stub_of(kind)}{match['quote']}"
            yield SecretSpan(number.start(), number.end(), stub)
        spans, at = _value_spans(text, at, kind)
        for start, end in spans:
            if is_secret_value(kind, text[start:end]):
                yield SecretSpan(start, end, stub_of(kind))


def _value_spans(text: str, at: int, kind: SecretKind) -> tuple[list[Span], int]:
    """Return the spans of all texts in the value at a position, and the end of the value."""
    if text[at : at + 1] in ("[", "{"):
        return _spans_inside(text, at, kind) if kind.includes_nested else ([], at)
    quote = _QUOTE.match(text, at)
    if quote is None:
        return [], at
    end, after = _find_quote_end(text, quote)
    return [] if _LOGPROB_FIELD.match(text, after) else [(quote.end(), end)], after


def _spans_inside(text: str, at: int, kind: SecretKind) -> tuple[list[Span], int]:
    """Return the spans of all texts except names in a list or object, and the end of the value."""
    depth, name, schema = 0, "", False
    spans = list[tuple[str, Span]]()
    while (match := _PUNCTUATION.search(text, at)) is not None:
        at = match.end()
        if match[0] in ("[", "{"):
            depth += 1
        elif match[0] in ("]", "}"):
            depth -= 1
            if depth <= 0:
                break
        elif (quote := _QUOTE.match(text, match.start())) is not None:
            end, at = _find_quote_end(text, quote)
            quoted_text = text[quote.end() : end]
            if _COLON.match(text, at):
                name = quoted_text
                schema = schema or (name != "type" and is_schema(name, None))
            else:
                spans.append((name, (quote.end(), end)))
                schema = schema or is_schema(name, quoted_text)
    else:
        at = len(text)
    return [span for name, span in spans if kind_of_nested_field(kind, name, schema=schema)], at


def _find_quote_end(text: str, quote: re.Match[str]) -> Span:
    """Return the end of a quoted text, and the end of its closing quote.

    A newline also ends the text. Each level of escapes doubles the backslashes before a quote and
    adds one. A quote with as many backslashes as the opening quote closes the text. A quote with
    more backslashes may be part of the text, and a quote with fewer backslashes closes an outer
    text.
    """
    escapes, at = len(quote["escapes"]), quote.end()
    end_pattern = _QUOTE_OR_NEWLINE[quote["mark"]]
    while (match := end_pattern.search(text, at)) is not None:
        backslash_start = match.start()
        while backslash_start > at and text[backslash_start - 1] == "\\":
            backslash_start -= 1
        backslash_count = match.start() - backslash_start
        if match[0] == "\n" or backslash_count < escapes:
            return backslash_start, backslash_start
        if (backslash_count - escapes) % (2 * (escapes + 1)) == 0:
            return match.start() - escapes, match.end()
        at = match.end()
    return len(text), len(text)


_QUOTE_OR_NEWLINE: Final = {mark: lazy_pattern(rf"[{mark}\n]") for mark in "\"'"}
