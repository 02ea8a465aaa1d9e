"""Secrets that only the name of their field gives away, as `"password": "hunter2"`.

In a text the names are looked for as JSON and programs quote them, at any depth of escapes: what a
tool was given or answered is JSON in a text, and often once more. Each takes linear time on any
text: what was read as a value is not read again.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final
from unicodedata import normalize

from msgspec import Struct


class Kind(Struct, frozen=True):
    """What the fields of some names hold."""

    name: str
    fields: re.Pattern[str]
    """Their names: small letters, with `_` between the words."""
    words: re.Pattern[str] = re.compile(r"(?!)")
    """Values that are none of it."""
    numbers: bool = False
    """Whether a number may be one."""
    deep: bool = True
    """Whether all that is below such a field is one."""


def _kind(name: str, fields: str, words: str = "(?!)", **rest: bool) -> Kind:
    return Kind(name, re.compile(fields), re.compile(words), **rest)


_OWNERS: Final = """
    account admin api app auth basic bind client current db email ftp http imap key keystore ldap
    login mail mongo mqtt my mysql new old pg postgres proxy rabbitmq redis remote root server
    service smtp ssh sudo truststore user vpn wifi
"""
"""Whose `pass` is a password, and not one of the mountains or for boarding."""
_PAGES: Final = (
    r"(?:.*_)?(?:next|prev|previous|page|paging|pagination|continuation|cursor|sync|start|end|stop"
    r"|resume|cancellation|eos|bos|pad|unk|mask|sep|cls)_?token"
)
"""Where a list goes on, or a word of a model: nothing to be kept secret."""
_FLAGS: Final = (
    r"(?:has|had|is|was|needs?|requires?|uses?|supports?|shows?|hides?|forgot|allows?|enables?)_.*"
)
_KINDS: Final = (
    _kind(
        "password",
        r".*(?:password|passwd|passphrase|passcode|passwort|kennwort)s?(_hash)?|(?:.*_)?pwd",
        numbers=True,
    ),
    _kind("password", rf"(?:(?:.*_)?(?:{'|'.join(_OWNERS.split())})_?)?pass|(?:.*_)?pw|passkey"),
    _kind("password", r".*credentials?", "same-origin|include|omit"),
    _kind("private key", r".*private_?keys?"),
    _kind(
        "api key",
        r".*(?:api|access|signing|encryption|master|account|subscription|fernet|hmac)_?keys?",
    ),
    _kind("secret", r".*secrets?|.*secret_?(?:access_?)?keys?(?:_?base)?"),
    _kind("token", r".*token(?:_?value)?|(?:.*_)?(?:jwt|bearer|set_cookie|.+_cookies?)"),
    _kind("token", r"(?:x_)?auth_key|(?:php|j)?sess(?:ion)?id"),
    _kind("token", r"cookies?", r"[a-z]{1,12}(?: [a-z]{1,12}){0,3}"),
    _kind("token", r".*authorization", r"[a-z]{4,15}"),
    _kind("token", r"(?:x_)?auth", r"[a-z]{2,12}[0-9]?", deep=False),
    _kind("pin", r"(?:.*_)?(?:pin|pin_code|cvv|cvc|otp)", numbers=True),
)
_NONE: Final = re.compile(f"{_PAGES}|{_FLAGS}")
_LONGEST: Final = 64
"""Characters of the end of a name that are looked at."""
_WHERE: Final = re.compile(r"\s*+(?:\([^()]{0,60}\)|@[\w.-]{1,60})\s*+\Z")
"""Of whom it is, as in `password (prod)`."""
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_APART: Final = re.compile(r"[^a-z0-9]+")

_NO_VALUE: Final = re.compile(
    r"(?i)\s*+(?:\[redacted: [a-z ]{1,20}\]|\*++|•++|x{3,}+|\.\.\.|…|<[^<>\s]{1,40}>"
    r"|\$\{[^{}\s]{1,60}\}|string|null|none|nil|true|false|undefined|optional|required|yes|no)?\s*+"
)
"""That it is left out, where it comes from or of what type it is, and not what it is."""
_DIGITS: Final = re.compile(r"\s*+[0-9]{3,8}\s*+")
_LONG_NUMBER: Final = re.compile(r"-?[0-9]{4,}+")
_TYPES: Final = ("string", "number", "integer", "boolean", "object", "array", "null")
_OF_A_SCHEMA: Final = ("properties", "$ref", "enum", "anyOf", "oneOf", "allOf")
_GIVEN: Final = ("value", "default", "const", "example")
"""What of a schema is not about its values."""
_ABOUT: Final = ("description", "title", "label", "placeholder")

_NAME: Final = re.compile(
    # From the first of several backslashes on: each run of them is looked at once.
    r"(?<!\\)(?P<quote>\\{0,31}[\"'])(?P<name>[^\"'\\\n]{1,160})(?P=quote)\s*+(?:=>|[:=])\s*+"
)
_QUOTE: Final = re.compile(r"(?P<escapes>\\{0,31})(?P<mark>[\"'])")
_BARE: Final = re.compile(r"-?[0-9]{4,40}+(?![\w.\"'\\])")
_PUNCTUATION: Final = re.compile(r"[\[\]{}]|(?<!\\)\\{0,31}[\"']")
_COLON: Final = re.compile(r"\s*+:")
_IS_A_WORD: Final = re.compile(r"\s{0,8},\s{0,8}\\{0,31}[\"']logprob")
"""Behind a token of a model, which is a piece of its answer."""

Span = tuple[int, int]


class Found(Struct, frozen=True):
    """A secret in a text, from where to where it goes, and what is to stand there instead."""

    start: int
    end: int
    stub: str


@lru_cache(maxsize=4096)
def kind_of(name: str) -> Kind | None:
    """What a field of this name holds; None where that is no secret."""
    own = _WHERE.sub("", name[-2 * _LONGEST :])
    plain = own if own.isascii() else normalize("NFKC", own)
    words = _APART.sub("_", _HUMP.sub("_", plain[-_LONGEST:]).lower())
    words = words.strip("_").rstrip("0123456789_")
    if _NONE.fullmatch(words):
        return None
    return next((kind for kind in _KINDS if kind.fields.fullmatch(words)), None)


def is_value(kind: Kind, value: str) -> bool:
    """Whether a field of this kind tells its secret, and not that it has none."""
    if kind.name == "pin":
        return _DIGITS.fullmatch(value) is not None
    return _NO_VALUE.fullmatch(value) is None and kind.words.fullmatch(value) is None


def is_number(kind: Kind, value: str) -> bool:
    """Whether a number that stands in a field of this kind is its secret."""
    return kind.numbers and _LONG_NUMBER.fullmatch(value) is not None and is_value(kind, value)


def below(kind: Kind | None, name: str, *, schema: bool) -> Kind | None:
    """What is in a field of an object that is a secret as a whole."""
    if kind is None or not kind.deep or name in _ABOUT:
        return None
    return kind if not schema or name in _GIVEN else None


def is_schema(name: str, value: Any) -> bool:
    """Whether an object with such a field tells of what type a value is, and not the value."""
    if name == "type":
        return isinstance(value, str) and value.lower() in _TYPES
    return name in _OF_A_SCHEMA


def stub_of(kind: Kind) -> str:
    """What stands in the place of a secret."""
    return f"[redacted: {kind.name}]"


def found_in(text: str) -> Iterator[Found]:
    """Each secret of a text that stands behind its name, in their order."""
    at = 0
    while (match := _NAME.search(text, at)) is not None:
        at = match.end()
        kind = kind_of(match["name"])
        if kind is None:
            continue
        number = _BARE.match(text, at)
        if number is not None and is_number(kind, number[0]):
            # Quoted as its name is: what was JSON is to stay so.
            stub = f"{match['quote']}{stub_of(kind)}{match['quote']}"
            yield Found(number.start(), number.end(), stub)
        spans, at = _values(text, at, kind)
        for start, end in spans:
            if is_value(kind, text[start:end]):
                yield Found(start, end, stub_of(kind))


def _values(text: str, at: int, kind: Kind) -> tuple[list[Span], int]:
    """The texts that begin here, one or all of a list or an object; and where that ends."""
    if text[at : at + 1] in ("[", "{"):
        return _inside(text, at, kind) if kind.deep else ([], at)
    quote = _QUOTE.match(text, at)
    if quote is None:
        return [], at
    end, behind = _end(text, quote)
    return [] if _IS_A_WORD.match(text, behind) else [(quote.end(), end)], behind


def _inside(text: str, at: int, kind: Kind) -> tuple[list[Span], int]:
    """The texts within a list or an object that begins here, but for the names in it."""
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
            end, at = _end(text, quote)
            said = text[quote.end() : end]
            if _COLON.match(text, at):
                name = said
                schema = schema or (name != "type" and is_schema(name, None))
            else:
                spans.append((name, (quote.end(), end)))
                schema = schema or is_schema(name, said)
    else:
        at = len(text)
    return [span for name, span in spans if below(kind, name, schema=schema)], at


def _end(text: str, quote: re.Match[str]) -> Span:
    """Where a quoted text ends, and where its closing quote does; a line ends it, too.

    Each level of escapes doubles the backslashes before a quote and adds one. So one that has as
    many as the opening one closes; one with more may be a part of what is quoted; and one with
    fewer closes what stands around it.
    """
    escapes, at = len(quote["escapes"]), quote.end()
    ends = _ENDS[quote["mark"]]
    while (match := ends.search(text, at)) is not None:
        run = match.start()
        while run > at and text[run - 1] == "\\":
            run -= 1
        before = match.start() - run
        if match[0] == "\n" or before < escapes:
            return run, run
        if (before - escapes) % (2 * (escapes + 1)) == 0:
            return match.start() - escapes, match.end()
        at = match.end()
    return len(text), len(text)


_ENDS: Final = {mark: re.compile(rf"[{mark}\n]") for mark in "\"'"}
