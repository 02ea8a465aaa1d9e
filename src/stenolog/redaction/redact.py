"""Redaction: remove secrets from text and data before they are stored as notes or shared."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from stenolog.redaction.patterns import PRIVATE_KEY, SECRETS, Secret
from stenolog.redaction.secret_fields import (
    Kind,
    SecretField,
    below,
    found_in,
    is_number,
    is_schema,
    is_value,
    kind_of,
    stub_of,
)

_RUN: Final = re.compile(r"\S*")
_MARGIN: Final = 1_000
"""In characters. No secret with a space is longer, except a private key."""


_LONG_NAME: Final = 16
"""In characters. No secret that is recognized by its form is shorter."""
_UNSEEN: Final = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    "\U000e0000-\U000e0fff]++"
    # The same characters as JSON escapes.
    r"|(?<!\\)\\++u(?i:00ad|034f|061c|180e|200[b-f]|202[a-e]|206[0-f]|fe0[0-f]|feff)"
)
"""Invisible characters, which can hide a secret from a pattern."""
_HARMLESS: Final = re.compile(r"[A-Za-z0-9_.]{0,13}+|[A-Za-z0-9_. ]{0,9}+")
"""Texts that are too short for a secret that is recognized by its form."""
_HIDING: Final = re.compile(
    _UNSEEN.pattern
    + r"|(?<!\\)\\++u(?P<letter>00(?i:2d|3[0-9]|4[1-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9a]))"
)
"""Invisible characters, and letters written as escapes."""


class Redacted(Struct, frozen=True):
    """A text without its secrets."""

    text: str
    count: int
    """Number of redacted secrets."""


class RedactedData(Struct, frozen=True):
    """Data without its secrets."""

    value: Any
    count: int


def redact(text: str) -> Redacted:
    """Replace each secret by a stub, such as `[redacted: api key]`.

    Returns the same text and count 0 if there is none. Only secrets with a known form or field name
    are found; a secret in plain words stays. Invisible characters do not hide a secret.
    """
    return _out_of(text, SECRETS)


def _out_of(text: str, secrets: Iterable[Secret]) -> Redacted:
    if _HARMLESS.fullmatch(text):
        return Redacted(text, 0)
    found = _Finding(text, _hiding(text))  # guard: hidden-characters-redacted
    found.take_out(list(found_in(found.text)))  # guard: secret-fields-redacted
    for secret in _possible(found.text, secrets):
        found.take_out(_found(found.text, secret))
    return found.redacted()


def _hiding(text: str) -> list[SecretField]:
    """Return invisible characters and escaped letters, with the letters as replacements."""
    if text.isascii() and "\\u" not in text:
        return []
    return [
        SecretField(*one.span(), chr(int(one["letter"], 16)) if one["letter"] else "")
        for one in _HIDING.finditer(text)
    ]


class _Finding:
    """A text in which secrets are replaced step by step, with positions in the original text.

    Each step searches the result of the previous one, so that no secret is found twice.
    """

    def __init__(self, text: str, hiding: list[SecretField]) -> None:
        self.text = text
        self._first = text
        self._steps: list[_Step] = []
        self._stubs: list[tuple[int, int, int, str]] = []
        if hiding:
            self._replace(hiding)

    def take_out(self, found: list[SecretField]) -> None:
        """Replace these secrets (sorted by position) by their stubs."""
        if not found:
            return
        for one in found:
            start, end = one.start, one.end
            for step in reversed(self._steps):
                start, end = step.before(start)[0], step.before(max(start, end - 1))[1]
            self._stubs.append((start, end, len(self._steps), one.stub))
        self._replace(found)

    def redacted(self) -> Redacted:
        """Return the original text with the stubs."""
        if not self._stubs:
            return Redacted(self._first, 0)
        pieces, at, count = list[str](), 0, 0
        # A later secret may contain an earlier one; then it ends at or after it.
        for start, end, _, stub in sorted(self._stubs, key=lambda one: (one[0], -one[2])):
            if start >= at:
                pieces += [self._first[at:start], stub]
                at, count = end, count + 1
        return Redacted("".join([*pieces, self._first[at:]]), count)

    def _replace(self, found: list[SecretField]) -> None:
        self._steps.append(_Step(found))
        self.text = _without(self.text, found)


class _Step:
    """A mapping of positions in a text to positions before one replacement step."""

    def __init__(self, found: list[SecretField]) -> None:
        self._found = found
        self._starts: list[int] = []
        shorter = 0
        for one in found:
            self._starts.append(one.start - shorter)
            shorter += one.end - one.start - len(one.stub)

    def before(self, place: int) -> tuple[int, int]:
        """Return the span before the step that this character came from."""
        at = bisect_right(self._starts, place) - 1
        if at < 0:
            return place, place + 1
        one = self._found[at]
        behind = place - self._starts[at] - len(one.stub)
        return (one.start, one.end) if behind < 0 else (one.end + behind, one.end + behind + 1)


def redact_data(value: Any) -> RedactedData:
    """Redact JSON data: every text in it, and every value whose field name shows a secret.

    A text that contains JSON is redacted as JSON, and is otherwise unchanged.
    """
    walk = _Walk()
    return RedactedData(walk.value(value), walk.count)


_CUT_OFF_KEY: Final = f"[redacted: {PRIVATE_KEY.name}]"


class _Number(str):
    """A number in its original spelling."""


class _Fields(list[tuple[str, Any]]):
    """A JSON object that may have duplicate names."""


_JSON: Final = json.JSONDecoder(
    parse_float=_Number, parse_int=_Number, parse_constant=_Number, object_pairs_hook=_Fields
)
_SCALAR: Final = re.compile(r"\"[^\"\\]*+(?:\\.[^\"\\]*+)*\"|[^\s\[\]{},:\"]++")


class _Walk:
    """A traversal of data that counts its secrets."""

    def __init__(self, secrets: Iterable[Secret] = SECRETS) -> None:
        self.count = 0
        self._secrets = secrets
        """Kinds of secrets to search for in texts."""
        self._scalars = 0
        self.changed: dict[int, str] = {}
        """Replacements of texts and numbers with secrets, by position among all scalars.

        Names count as scalars too.
        """

    def value(self, value: Any, kind: Kind | None = None, *, directly: bool = False) -> Any:
        """Return the value without secrets. With a kind, the whole value is a secret."""
        match value:
            case list() if not isinstance(value, _Fields):
                return list(self._list(value, kind))
            case Mapping():
                return dict(self._object(list(value.items()), kind))
            case _Fields():
                return _Fields(self._object(value, kind))
        told = self._scalar(value, kind, directly=directly)
        if told is not value:
            self.changed[self._scalars] = told
        self._scalars += 1
        return told

    def _list(self, values: list[Any], kind: Kind | None) -> Iterator[Any]:
        """Redact a list. A private key may span several items, as in a cell of a notebook."""
        key: Kind | None = None
        for value in values:
            told = self.value(value, key or kind)
            if isinstance(value, str):
                within = key is not None or told.endswith(_CUT_OFF_KEY)
                key = kind_of("private_key") if within and "-----END" not in value else None
            yield told

    def _object(self, fields: list[tuple[Any, Any]], above: Kind | None) -> Iterator[Any]:
        schema = above is not None and any(is_schema(str(name), one) for name, one in fields)
        beside = self._told_beside(fields)
        is_a_word = any(name == "logprob" for name, _ in fields)
        for name, value in fields:
            said = _UNSEEN.sub("", name) if isinstance(name, str) else ""
            own = kind_of(said)
            if said == "token" and is_a_word:
                own = None  # a piece of a model's answer
            if said.lower() == "value":
                own = own or beside
            kind = own or below(above, said, schema=schema)
            yield self._name(name), self.value(value, kind, directly=own is not None)

    def _name(self, name: Any) -> Any:
        if isinstance(name, str) and len(name) >= _LONG_NAME:
            return self.value(name)
        self._scalars += 1
        return name

    def _told_beside(self, fields: list[tuple[Any, Any]]) -> Kind | None:
        """Return the kind of the value in `{"name": "Authorization", "value": …}`."""
        for name, value in fields:
            if isinstance(name, str) and name.lower() in ("name", "key") and isinstance(value, str):
                return kind_of(_UNSEEN.sub("", value))
        return None

    def _scalar(self, value: Any, kind: Kind | None, *, directly: bool) -> Any:
        if isinstance(value, str) and not isinstance(value, _Number):
            if kind is None or not is_value(kind, _UNSEEN.sub("", value)):
                return self._text(value)
        elif (
            kind is None
            or not directly
            or not isinstance(value, int | _Number)
            or not is_number(kind, str(value))
        ):
            return value
        self.count += 1
        return stub_of(kind)

    def _text(self, text: str) -> str:
        if text.lstrip()[:1] in ("{", "[", '"'):
            try:
                inner = _Walk(_possible(text, self._secrets) if _is_open(text) else self._secrets)
                inner.value(_JSON.decode(text))
            except (ValueError, RecursionError):
                pass  # not JSON: redact it as ordinary text
            else:
                self.count += inner.count
                return inner.in_place(text)
        found = _out_of(text, self._secrets)
        self.count += found.count
        return found.text

    def in_place(self, text: str) -> str:
        """Return the JSON text that was walked, with the replacements."""
        if not self.changed:
            return text
        pieces, at = list[str](), 0
        for number, one in enumerate(_SCALAR.finditer(text)):
            if number in self.changed:
                # Keep ASCII escapes: a lone surrogate has no other form.
                told = json.dumps(self.changed[number], ensure_ascii=one[0].isascii())
                pieces += [text[at : one.start()], told]
                at = one.end()
        return "".join([*pieces, text[at:]])


def redact_ends(text: str, *, most: int) -> Redacted:
    """Redact a text of which about `most` characters at each end are needed.

    A longer text is cut in the middle. A secret that the cut divides is removed.
    """
    # Only a private key is so long that its end may be far from its recognizable start.
    keys = _redacted(text, [PRIVATE_KEY])  # guard: private-key-redacted
    if len(keys.text) <= 2 * most:
        rest = redact(keys.text)
        return Redacted(rest.text, keys.count + rest.count)
    # Drop the run without spaces at the cut: it may have lost its recognizable part.
    words = keys.text[: most + _MARGIN].rsplit(None, 1)
    head = redact(words[0] if len(words) == 2 else "")
    tail = redact(_RUN.sub("", keys.text[-most - _MARGIN :], count=1))
    return Redacted(
        f"{head.text[:-_MARGIN]}\n…\n{tail.text[_MARGIN:]}", keys.count + head.count + tail.count
    )


def _redacted(text: str, secrets: Iterable[Secret]) -> Redacted:
    found = _Finding(text, [])
    for secret in _possible(text, secrets):
        found.take_out(_found(found.text, secret))
    return found.redacted()


def _possible(text: str, secrets: Iterable[Secret]) -> list[Secret]:
    """Return the kinds that may occur in the text, to skip the search for most of them."""
    small = text.lower()
    return [secret for secret in secrets if secret.is_hinted(small)]


def _is_open(text: str) -> bool:
    """Whether a JSON text has no escaped or invisible characters that could hide a secret."""
    escapes = "\\u" in text or "\\/" in text
    return not escapes and (text.isascii() or _UNSEEN.search(text) is None)


def _found(text: str, secret: Secret) -> list[SecretField]:
    """Return the secrets of one kind, in order."""
    at, found = 0, list[SecretField]()
    while (match := secret.pattern.search(text, at)) is not None:
        if secret.check(match):
            start, at = _span(match)
            found.append(SecretField(start, at, f"[redacted: {secret.name}]"))
        else:
            # The rejected match may contain the start of a real secret.
            at = match.start() + 1
    return found


def _span(match: re.Match[str]) -> tuple[int, int]:
    """Return the part of a match that is the secret.

    A value without quotes extends to the next space, without punctuation that ends the sentence or
    closes a bracket. `!` and `?` count as part of it: passwords often end with them.
    """
    told = match.groupdict()
    if told.get("bare"):
        run = _RUN.match(match.string, match.start("bare"))
        start, end = run.span() if run else match.span("bare")
        return start, start + len(match.string[start:end].rstrip(".,;:)]}"))
    name = next((name for name in ("quoted", "value") if told.get(name)), None)
    return match.span() if name is None else match.span(name)


def _without(text: str, found: list[SecretField]) -> str:
    pieces = []
    at = 0
    for one in found:
        pieces += [text[at : one.start], one.stub]
        at = one.end
    return "".join([*pieces, text[at:]])


# --- sharing --------------------------------------------------------------------------------------
# Redaction of shared data, with a count.


class SharingRedactor:
    """A redactor of shared texts and data that counts secrets. Inactive unless `wanted`."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.count = 0
        """Number of secrets redacted so far."""

    def __call__(self, text: str) -> str:
        """Return the redacted text. A JSON text is also redacted by field names."""
        return str(self.data(text))

    def data(self, value: Any) -> Any:
        """Return the redacted data: texts, lists and objects."""
        if not self.wanted:
            return value
        found = redact_data(value)
        self.count += found.count
        return found.value

    def again(self, text: str) -> str:
        """Return the redacted text without counting its secrets."""
        return str(redact_data(text).value) if self.wanted else text
