"""Secrets that only the name of their field gives away, as `"password": "hunter2"`.

In a text the names are looked for as JSON and programs quote them, at any depth of escapes: what a
tool was given or answered is JSON in a text, and often once more. Each takes linear time on any
text: what was read as a value is not read again.
"""

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from msgspec import Struct

_NAMED: Final = (
    ("password", r".*(?:password|passwd|passphrase|passcode|passwort|kennwort)s?(_hash)?"),
    ("password", r"(?:.*_)?pwd|.+_pass|.*credentials?"),
    ("private key", r".*private_?keys?"),
    ("api key", r".*(?:api|access|signing|encryption|master|account|subscription)_?keys?"),
    ("secret", r".*secrets?|.*secret_?(?:access_?)?keys?"),
    ("token", r".*token|.*authorization|(?:.*_)?(?:jwt|bearer|cookies?)"),
    ("pin", r"(?:.*_)?(?:pin|pin_code|cvv|cvc|otp)"),
)
_KINDS: Final = tuple((kind, re.compile(names)) for kind, names in _NAMED)
_LONGEST: Final = 64
"""Characters of a name; longer ones are sentences."""
_HUMP: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_APART: Final = re.compile(r"[^a-z0-9]+")

_NO_VALUE: Final = re.compile(
    r"(?i)\s*+(?:\[redacted: [a-z ]{1,20}\]|\*++|•++|x{3,}+|\.\.\.|…|<[^<>\s]{1,40}>"
    r"|\$\{[^{}\s]{1,60}\}|string|null|none|nil|true|false|undefined|optional)?\s*+"
)
"""That it is left out, where it comes from or of what type it is, and not what it is."""
_DIGITS: Final = re.compile(r"\s*+[0-9]{3,8}\s*+")

_NAME: Final = re.compile(
    # From the first of several backslashes on: each run of them is looked at once.
    r"(?<!\\)(?P<quote>\\{0,31}[\"'])(?P<name>[\w .-]{1,64})(?P=quote)\s{0,8}(?:=>|[:=])\s{0,8}"
)
_QUOTE: Final = re.compile(r"(?P<escapes>\\{0,31})(?P<mark>[\"'])")
_BARE: Final = re.compile(r"[0-9][0-9.]{2,40}+(?![\w\"'\\])")
_PUNCTUATION: Final = re.compile(r"[\[\]{}]|(?<!\\)\\{0,31}[\"']")
_COLON: Final = re.compile(r"\s{0,8}:")
_IS_A_WORD: Final = re.compile(r"\s{0,8},\s{0,8}\\{0,31}[\"']logprob")
"""Behind a token of a model, which is a piece of its answer."""

Span = tuple[int, int]


class Found(Struct, frozen=True):
    """A secret in a text, from where to where it goes, and what is to stand there instead."""

    start: int
    end: int
    stub: str


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str | None:
    """What a field of this name holds, as `password`; None where that is no secret."""
    if len(name) > _LONGEST:
        return None
    words = _APART.sub("_", _HUMP.sub("_", name).lower()).strip("_").rstrip("0123456789_")
    return next((kind for kind, names in _KINDS if names.fullmatch(words)), None)


def is_value(kind: str, value: str) -> bool:
    """Whether a field of this kind tells its secret, and not that it has none."""
    if kind == "pin":
        return _DIGITS.fullmatch(value) is not None
    return _NO_VALUE.fullmatch(value) is None


def stub_of(kind: str) -> str:
    """What stands in the place of a secret."""
    return f"[redacted: {kind}]"


def found_in(text: str) -> Iterator[Found]:
    """Each secret of a text that stands behind its name, in their order."""
    at = 0
    while (match := _NAME.search(text, at)) is not None:
        at = match.end()
        kind = kind_of(match["name"])
        if kind is None:
            continue
        number = _BARE.match(text, at)
        if number is not None and is_value(kind, number[0]):
            # Quoted as its name is: what was JSON is to stay so.
            stub = f"{match['quote']}{stub_of(kind)}{match['quote']}"
            yield Found(number.start(), number.end(), stub)
        spans, at = _values(text, at)
        for start, end in spans:
            if is_value(kind, text[start:end]):
                yield Found(start, end, stub_of(kind))


def _values(text: str, at: int) -> tuple[list[Span], int]:
    """The texts that begin here, one or all of a list or an object; and where that ends."""
    if text[at : at + 1] in ("[", "{"):
        return _inside(text, at)
    quote = _QUOTE.match(text, at)
    if quote is None:
        return [], at
    end, behind = _end(text, quote)
    return [] if _IS_A_WORD.match(text, behind) else [(quote.end(), end)], behind


def _inside(text: str, at: int) -> tuple[list[Span], int]:
    """The texts within a list or an object that begins here, but for the names in it."""
    depth, spans = 0, list[Span]()
    while (match := _PUNCTUATION.search(text, at)) is not None:
        at = match.end()
        if match[0] in ("[", "{"):
            depth += 1
        elif match[0] in ("]", "}"):
            depth -= 1
            if depth <= 0:
                return spans, at
        elif (quote := _QUOTE.match(text, match.start())) is not None:
            end, at = _end(text, quote)
            if not _COLON.match(text, at):
                spans.append((quote.end(), end))
    return spans, len(text)


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
