"""Secrets out of a text, before it is kept as a note, or shared."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from stenolog.memory.named_secrets import PRIVATE_KEY, SECRETS, Secret
from stenolog.memory.secret_fields import (
    Found,
    Kind,
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
"""Characters; no secret with a space in it is as long, but for a private key."""


_LONG_NAME: Final = 16
"""Characters; no secret that is known by its form is shorter."""
_UNSEEN: Final = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    "\U000e0000-\U000e0fff]++"
    # And as JSON in a text may have them.
    r"|(?<!\\)\\++u(?i:00ad|034f|061c|180e|200[b-f]|202[a-e]|206[0-f]|fe0[0-f]|feff)"
)
"""Characters that nobody sees, and that hide a secret from a pattern."""
_HARMLESS: Final = re.compile(r"[A-Za-z0-9_.]{0,13}+|[A-Za-z0-9_. ]{0,9}+")
"""Too short for any secret that nothing but itself tells."""
_HIDING: Final = re.compile(
    _UNSEEN.pattern
    + r"|(?<!\\)\\++u(?P<letter>00(?i:2d|3[0-9]|4[1-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9a]))"
)
"""Those, and letters that are written as escapes."""


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
    nobody sees hide none.
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


def _hiding(text: str) -> list[Found]:
    """What hides a secret in a text, and the letter that it stands for, if any."""
    if text.isascii() and "\\u" not in text:
        return []
    return [
        Found(*one.span(), chr(int(one["letter"], 16)) if one["letter"] else "")
        for one in _HIDING.finditer(text)
    ]


class _Finding:
    """A text out of which more and more is taken, and where all of that stood at the beginning.

    What is found is looked for in what is left, so that no secret is found twice.
    """

    def __init__(self, text: str, hiding: list[Found]) -> None:
        self.text = text
        self._first = text
        self._steps: list[_Step] = []
        self._stubs: list[tuple[int, int, int, str]] = []
        if hiding:
            self._replace(hiding)

    def take_out(self, found: list[Found]) -> None:
        """A stub for each of them; they are in their order."""
        if not found:
            return
        for one in found:
            start, end = one.start, one.end
            for step in reversed(self._steps):
                start, end = step.before(start)[0], step.before(max(start, end - 1))[1]
            self._stubs.append((start, end, len(self._steps), one.stub))
        self._replace(found)

    def redacted(self) -> Redacted:
        """The text as it was at the beginning, but for the stubs."""
        if not self._stubs:
            return Redacted(self._first, 0)
        pieces, at, count = list[str](), 0, 0
        # One that was found later may have an earlier one in it: then it goes at least as far.
        for start, end, _, stub in sorted(self._stubs, key=lambda one: (one[0], -one[2])):
            if start >= at:
                pieces += [self._first[at:start], stub]
                at, count = end, count + 1
        return Redacted("".join([*pieces, self._first[at:]]), count)

    def _replace(self, found: list[Found]) -> None:
        self._steps.append(_Step(found))
        self.text = _without(self.text, found)


class _Step:
    """Where each character stood before some parts of a text were replaced."""

    def __init__(self, found: list[Found]) -> None:
        self._found = found
        self._starts: list[int] = []
        shorter = 0
        for one in found:
            self._starts.append(one.start - shorter)
            shorter += one.end - one.start - len(one.stub)

    def before(self, place: int) -> tuple[int, int]:
        """From where to where that went which the character at this place is, or is a part of."""
        at = bisect_right(self._starts, place) - 1
        if at < 0:
            return place, place + 1
        one = self._found[at]
        behind = place - self._starts[at] - len(one.stub)
        return (one.start, one.end) if behind < 0 else (one.end + behind, one.end + behind + 1)


def redact_data(value: Any) -> RedactedData:
    """The same for what JSON can hold: each text of it, and each value whose name says enough.

    A text that is JSON is looked at as such, and is the same but for its secrets.
    """
    walk = _Walk()
    return RedactedData(walk.value(value), walk.count)


_CUT_OFF_KEY: Final = f"[redacted: {PRIVATE_KEY.name}]"


class _Number(str):
    """A number, as it is written."""


class _Fields(list[tuple[str, Any]]):
    """An object, whose names may be there twice."""


_JSON: Final = json.JSONDecoder(
    parse_float=_Number, parse_int=_Number, parse_constant=_Number, object_pairs_hook=_Fields
)
_SCALAR: Final = re.compile(r"\"[^\"\\]*+(?:\\.[^\"\\]*+)*\"|[^\s\[\]{},:\"]++")


class _Walk:
    """One way through data, which counts the secrets in it."""

    def __init__(self, secrets: Iterable[Secret] = SECRETS) -> None:
        self.count = 0
        self._secrets = secrets
        """What texts may have in them."""
        self._scalars = 0
        self.changed: dict[int, str] = {}
        """What is to stand in the place of the texts and numbers that hold a secret; they are
        counted in their order, with the names."""

    def value(self, value: Any, kind: Kind | None = None, *, directly: bool = False) -> Any:
        """It without secrets; all of it is one where it has a kind."""
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
        """Each of a list; a private key may go over several lines, as in a notebook's cell."""
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
                own = None  # a piece of an answer
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
        """What `{"name": "Authorization", "value": …}` says of its value."""
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
                pass  # then it is a text as any other
            else:
                self.count += inner.count
                return inner.in_place(text)
        found = _out_of(text, self._secrets)
        self.count += found.count
        return found.text

    def in_place(self, text: str) -> str:
        """The JSON that was walked, but for what is to stand elsewhere in it."""
        if not self.changed:
            return text
        pieces, at = list[str](), 0
        for number, one in enumerate(_SCALAR.finditer(text)):
            if number in self.changed:
                # Escaped where it was: half a character could not stand there otherwise.
                told = json.dumps(self.changed[number], ensure_ascii=one[0].isascii())
                pieces += [text[at : one.start()], told]
                at = one.end()
        return "".join([*pieces, text[at:]])


def redact_ends(text: str, *, most: int) -> Redacted:
    """The same for a text of which about so many characters of each end are wanted.

    A longer one is cut in its middle, and what a cut went through is not shown as a half.
    """
    # Only these are so long that one end may tell nothing of how they began.
    keys = _redacted(text, [PRIVATE_KEY])  # guard: private-key-redacted
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
    found = _Finding(text, [])
    for secret in _possible(text, secrets):
        found.take_out(_found(found.text, secret))
    return found.redacted()


def _possible(text: str, secrets: Iterable[Secret]) -> list[Secret]:
    """Those that may be in the text, so that most of them are not looked for."""
    small = text.lower()
    return [secret for secret in secrets if secret.is_hinted(small)]


def _is_open(text: str) -> bool:
    """Whether each letter of what a JSON text holds can be seen in it as it is."""
    escapes = "\\u" in text or "\\/" in text
    return not escapes and (text.isascii() or _UNSEEN.search(text) is None)


def _found(text: str, secret: Secret) -> list[Found]:
    """Each secret of a kind, in their order."""
    at, found = 0, list[Found]()
    while (match := secret.pattern.search(text, at)) is not None:
        if secret.check(match):
            start, at = _span(match)
            found.append(Found(start, at, f"[redacted: {secret.name}]"))
        else:
            # What looked like one may have hidden the beginning of another.
            at = match.start() + 1
    return found


def _span(match: re.Match[str]) -> tuple[int, int]:
    """Return the part of a match that is the secret.

    A value without quotes goes up to the next space, but for punctuation that ends the sentence or
    closes a bracket. `!` and `?` count as part of it: passwords often end with them.
    """
    told = match.groupdict()
    if told.get("bare"):
        run = _RUN.match(match.string, match.start("bare"))
        start, end = run.span() if run else match.span("bare")
        return start, start + len(match.string[start:end].rstrip(".,;:)]}"))
    name = next((name for name in ("quoted", "value") if told.get(name)), None)
    return match.span() if name is None else match.span(name)


def _without(text: str, found: list[Found]) -> str:
    pieces = []
    at = 0
    for one in found:
        pieces += [text[at : one.start], one.stub]
        at = one.end
    return "".join([*pieces, text[at:]])


# --- sharing --------------------------------------------------------------------------------------
# Secrets out of what is given away, and how many there were.


class Sharing:
    """Takes secrets out of texts and of data, and counts them; where `wanted` is not set, none."""

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.count = 0
        """How many were taken out so far."""

    def __call__(self, text: str) -> str:
        """The text as it may be shared; where it is JSON, by the names of its fields, too."""
        return str(self.data(text))

    def data(self, value: Any) -> Any:
        """What is made of texts, lists and objects, as it may be shared."""
        if not self.wanted:
            return value
        found = redact_data(value)
        self.count += found.count
        return found.value

    def again(self, text: str) -> str:
        """The same for a text that is counted elsewhere."""
        return str(redact_data(text).value) if self.wanted else text
