"""Secrets out of a text, before it is kept as a note."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

from stenolog.memory.named_secrets import PRIVATE_KEY, SECRETS, Secret

_RUN: Final = re.compile(r"\S*")
_MARGIN: Final = 1_000
"""Characters; no secret with a space in it is as long, but for a private key."""


class Redacted(Struct, frozen=True):
    """A text without its secrets."""

    text: str
    count: int
    """How many were taken out."""


def redact(text: str) -> Redacted:
    """The text with a stub in the place of each secret, as `[redacted: api key]`.

    Where there is none it is the same text, and count is 0. Only what is known to be secret by
    its form is found: a secret in plain words stays.
    """
    return _redacted(text, SECRETS)


def redact_ends(text: str, *, most: int) -> Redacted:
    """The same for a text of which about so many characters of each end are wanted.

    A longer one is cut in its middle, and what a cut went through is not shown as a half.
    """
    # Only these are so long that one end may tell nothing of how they began.
    keys = _redacted(text, [PRIVATE_KEY])
    if len(keys.text) <= 2 * most:
        rest = redact(keys.text)
        return Redacted(rest.text, keys.count + rest.count)
    # What is long and has no space in it may have lost what it would be known by.
    words = keys.text[: most + _MARGIN].rsplit(None, 1)
    head = redact(words[0] if len(words) == 2 else "")
    tail = redact(_RUN.sub("", keys.text[-most - _MARGIN :], count=1))
    return Redacted(
        f"{head.text[:-_MARGIN]}\n…\n{tail.text[_MARGIN:]}", keys.count + head.count + tail.count
    )


def _redacted(text: str, secrets: Iterable[Secret]) -> Redacted:
    count = 0
    small = text.lower()
    for secret in secrets:
        if secret.hint in small:
            found = list(_found(text, secret))
            text = _without(text, found, f"[redacted: {secret.name}]")
            count += len(found)
    return Redacted(text, count)


def _found(text: str, secret: Secret) -> Iterator[tuple[int, int]]:
    """From where to where each secret of a kind goes, in their order."""
    at = 0
    while (match := secret.pattern.search(text, at)) is not None:
        if secret.check(match):
            start, end = _span(match)
            yield start, end
            at = end
        else:
            # What looked like one may have hidden the beginning of another.
            at = match.start() + 1


def _span(match: re.Match[str]) -> tuple[int, int]:
    """The part of a match that is the secret, to the end of what it is the beginning of."""
    told = match.groupdict()
    if told.get("bare"):
        end = _RUN.match(match.string, match.end("bare"))
        return match.start("bare"), end.end() if end else match.end("bare")
    name = next((name for name in ("quoted", "value") if told.get(name)), None)
    return match.span() if name is None else match.span(name)


def _without(text: str, found: list[tuple[int, int]], stub: str) -> str:
    pieces = []
    at = 0
    for start, end in found:
        pieces += [text[at:start], stub]
        at = end
    return "".join([*pieces, text[at:]])
