"""Secrets out of a text, before it is kept as a note, or shared."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from stenolog.memory.named_secrets import PRIVATE_KEY, SECRETS, Secret
from stenolog.memory.secret_fields import found_in, is_value, kind_of, stub_of

_RUN: Final = re.compile(r"\S*")
_MARGIN: Final = 1_000
"""Characters; no secret with a space in it is as long, but for a private key."""


_LONG_NAME: Final = 16
"""Characters; no secret that is known by its form is shorter."""
_UNSEEN: Final = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    "\U000e0000-\U000e0fff]"
    # And as JSON in a text may have them.
    r"|(?<!\\)\\++u(?i:00ad|034f|061c|180e|200[b-f]|202[a-e]|206[0-f]|fe0[0-f]|feff)"
)
"""Characters that nobody sees, and that hide a secret from a pattern."""


class Redacted(Struct, frozen=True):
    """A text without its secrets."""

    text: str
    count: int
    """How many were taken out."""


class RedactedData(Struct, frozen=True):
    """Data without its secrets."""

    value: Any
    count: int


def redact(text: str) -> Redacted:
    """The text with a stub in the place of each secret, as `[redacted: api key]`.

    Where there is none it is the same text, and count is 0. Only what is known to be secret by
    its form, or by the name of its field, is found: a secret in plain words stays. Characters that
    nobody sees hide none; where there is one, the text comes back without them.
    """
    seen = _UNSEEN.sub("", text)
    found = _in_fields(seen)
    rest = _redacted(found.text, SECRETS)
    count = found.count + rest.count
    return Redacted(rest.text if count else text, count)


def _in_fields(text: str) -> Redacted:
    pieces, at, count = [], 0, 0
    for one in found_in(text):
        pieces += [text[at : one.start], one.stub]
        at, count = one.end, count + 1
    return Redacted("".join([*pieces, text[at:]]), count)


def redact_data(value: Any) -> RedactedData:
    """The same for what JSON can hold: each text of it, and each value whose name says enough.

    A text that is JSON stays JSON.
    """
    walk = _Walk()
    return RedactedData(walk.value(value), walk.count)


class _Walk:
    """One way through data, which counts the secrets in it."""

    def __init__(self) -> None:
        self.count = 0

    def value(self, value: Any, kind: str | None = None) -> Any:
        """It without secrets; all of it is one where it has a kind."""
        match value:
            case str():
                return self._text(value) if kind is None else self._stub(value, kind)
            case list():
                return [self.value(one, kind) for one in value]
            case Mapping():
                return {self._name(name): self._field(name, value, kind) for name in value}
            case int() | float() if kind is not None and not isinstance(value, bool):
                return self._stub(value, kind) if len(str(value)) > 2 else value
        return value

    def _field(self, name: Any, data: Mapping[Any, Any], kind: str | None) -> Any:
        """One field of an object; `{"name": "Authorization", "value": …}` says it beside."""
        said = name if isinstance(name, str) else ""
        own = kind_of(_UNSEEN.sub("", said))
        if said == "token" and "logprob" in data:
            own = None  # a piece of an answer
        if said == "value" and own is None:
            beside = data.get("name", data.get("key"))
            own = kind_of(_UNSEEN.sub("", beside)) if isinstance(beside, str) else None
        return self.value(data[name], own or kind)

    def _name(self, name: Any) -> Any:
        return self._text(name) if isinstance(name, str) and len(name) >= _LONG_NAME else name

    def _stub(self, value: Any, kind: str) -> Any:
        if not is_value(kind, _UNSEEN.sub("", str(value))):
            return self._text(value) if isinstance(value, str) else value
        self.count += 1
        return stub_of(kind)

    def _text(self, text: str) -> str:
        if text.lstrip()[:1] in ("{", "["):
            try:
                data = json.loads(text)
                inner = redact_data(data)
                if not inner.count:
                    return text
                # As loose or tight as it was.
                apart = (", ", ": ") if '": ' in text else (",", ":")
                told = json.dumps(
                    inner.value, ensure_ascii=False, allow_nan=False, separators=apart
                )
            except (ValueError, RecursionError):
                pass  # then it is a text as any other
            else:
                self.count += inner.count
                return told
        found = redact(text)
        self.count += found.count
        return found.text


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
