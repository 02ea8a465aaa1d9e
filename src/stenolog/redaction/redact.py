"""Redaction: remove secrets from text and data before they are stored as notes or shared."""

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from msgspec import Struct

from stenolog.redaction.patterns import PRIVATE_KEY, SECRETS, SecretPattern
from stenolog.redaction.secret_fields import (
    SecretKind,
    SecretSpan,
    find_secret_fields,
    is_number,
    is_schema,
    is_value,
    kind_below,
    kind_of,
    stub_of,
)

_NON_SPACES: Final = re.compile(r"\S*")
_MARGIN: Final = 1_000
"""Maximum length of a secret with a space, in characters, except a private key."""


_MIN_NAME: Final = 16
"""Minimum length of a secret that is recognized by its form, in characters."""
_INVISIBLE: Final = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    "\U000e0000-\U000e0fff]++"
    # Pattern of the same characters as JSON escapes.
    r"|(?<!\\)\\++u(?i:00ad|034f|061c|180e|200[b-f]|202[a-e]|206[0-f]|fe0[0-f]|feff)"
)
"""Invisible characters, which can hide a secret from a pattern."""
_TOO_SHORT: Final = re.compile(r"[A-Za-z0-9_.]{0,13}+|[A-Za-z0-9_. ]{0,9}+")
"""Pattern of texts that are too short for a secret that is recognized by its form."""
_INVISIBLE_OR_ESCAPED: Final = re.compile(
    _INVISIBLE.pattern
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

    Returns the same text and count 0 if the text has no secret. Only secrets with a known form or
    field name are found; a secret in plain words stays. Invisible characters do not hide a secret.
    """
    return _redact_with(text, SECRETS)


def find_secrets(text: str) -> list[SecretSpan]:
    """Return the secrets that `redact` replaces, in order, with their positions and stubs."""
    return [] if _TOO_SHORT.fullmatch(text) else _search(text, SECRETS).spans()


def _redact_with(text: str, secrets: Iterable[SecretPattern]) -> Redacted:
    if _TOO_SHORT.fullmatch(text):
        return Redacted(text, 0)
    return _search(text, secrets).result()


def _search(text: str, secrets: Iterable[SecretPattern]) -> "_Replacement":
    draft = _Replacement(text, _hidden_characters(text))  # guard: hidden-characters-redacted
    draft.replace_secrets(list(find_secret_fields(draft.text)))  # guard: secret-fields-redacted
    for secret in _hinted_patterns(draft.text, secrets):
        draft.replace_secrets(_find_secrets(draft.text, secret))
    return draft


def _hidden_characters(text: str) -> list[SecretSpan]:
    """Return invisible characters and escaped letters, with the letters as replacements."""
    if text.isascii() and "\\u" not in text:
        return []
    return [
        SecretSpan(*match.span(), chr(int(match["letter"], 16)) if match["letter"] else "")
        for match in _INVISIBLE_OR_ESCAPED.finditer(text)
    ]


class _Replacement:
    """A text in which secrets are replaced step by step, with positions in the original text.

    Each step searches the result of the previous step, so that no secret is found twice.
    """

    def __init__(self, text: str, hidden: list[SecretSpan]) -> None:
        self.text = text
        self._original = text
        self._steps: list[_PositionMap] = []
        self._stubs: list[tuple[int, int, int, str]] = []
        if hidden:
            self._replace(hidden)

    def replace_secrets(self, secrets: list[SecretSpan]) -> None:
        """Replace these secrets (sorted by position) by their stubs."""
        if not secrets:
            return
        for secret in secrets:
            start, end = secret.start, secret.end
            for step in reversed(self._steps):
                start, end = step.before(start)[0], step.before(max(start, end - 1))[1]
            self._stubs.append((start, end, len(self._steps), secret.stub))
        self._replace(secrets)

    def result(self) -> Redacted:
        """Return the original text with the stubs."""
        secrets = self.spans()
        return Redacted(_replace_spans(self._original, secrets), len(secrets))

    def spans(self) -> list[SecretSpan]:
        """Return the secrets with their positions in the original text."""
        found, at = list[SecretSpan](), 0
        # A later secret may contain an earlier secret; then the later secret ends at or after the
        # earlier one.
        for start, end, _, stub in sorted(self._stubs, key=lambda row: (row[0], -row[2])):
            if start >= at:
                found.append(SecretSpan(start, end, stub))
                at = end
        return found

    def _replace(self, secrets: list[SecretSpan]) -> None:
        self._steps.append(_PositionMap(secrets))
        self.text = _replace_spans(self.text, secrets)


class _PositionMap:
    """A mapping of positions in a text to positions before one replacement step."""

    def __init__(self, secrets: list[SecretSpan]) -> None:
        self._found = secrets
        self._starts: list[int] = []
        shorter = 0
        for secret in secrets:
            self._starts.append(secret.start - shorter)
            shorter += secret.end - secret.start - len(secret.stub)

    def before(self, place: int) -> tuple[int, int]:
        """Return the span before the step that this character came from."""
        at = bisect_right(self._starts, place) - 1
        if at < 0:
            return place, place + 1
        span = self._found[at]
        offset = place - self._starts[at] - len(span.stub)
        return (span.start, span.end) if offset < 0 else (span.end + offset, span.end + offset + 1)


def redact_data(value: Any) -> RedactedData:
    """Redact every text in JSON data, and every value whose field name shows a secret.

    A text that contains JSON is redacted as JSON, and otherwise unchanged.
    """
    walk = _DataRedactor()
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


class _DataRedactor:
    """A traversal of data that redacts and counts secrets."""

    def __init__(self, secrets: Iterable[SecretPattern] = SECRETS) -> None:
        self.count = 0
        self._secrets = secrets
        """Kinds of secrets to search for in texts."""
        self._scalars = 0
        self.changed: dict[int, str] = {}
        """Replacements of texts and numbers with secrets, by position among all scalars.

        Names count as scalars, too.
        """

    def value(self, value: Any, kind: SecretKind | None = None, *, directly: bool = False) -> Any:
        """Return the value without secrets. If `kind` is given, the whole value is a secret."""
        match value:
            case list() if not isinstance(value, _Fields):
                return list(self._list(value, kind))
            case Mapping():
                return dict(self._object(list(value.items()), kind))
            case _Fields():
                return _Fields(self._object(value, kind))
        redacted_value = self._scalar(value, kind, directly=directly)
        if redacted_value is not value:
            self.changed[self._scalars] = redacted_value
        self._scalars += 1
        return redacted_value

    def _list(self, values: list[Any], kind: SecretKind | None) -> Iterator[Any]:
        """Redact a list. A private key may span several items, as in a cell of a notebook."""
        key: SecretKind | None = None
        for value in values:
            redacted_value = self.value(value, key or kind)
            if isinstance(value, str):
                within = key is not None or redacted_value.endswith(_CUT_OFF_KEY)
                key = kind_of("private_key") if within and "-----END" not in value else None
            yield redacted_value

    def _object(self, fields: list[tuple[Any, Any]], above: SecretKind | None) -> Iterator[Any]:
        schema = above is not None and any(is_schema(str(name), value) for name, value in fields)
        named_kind = self._kind_from_sibling(fields)
        is_model_token = any(name == "logprob" for name, _ in fields)
        for name, value in fields:
            field_name = _INVISIBLE.sub("", name) if isinstance(name, str) else ""
            field_kind = kind_of(field_name)
            if field_name == "token" and is_model_token:
                field_kind = None  # a piece of a model's answer
            if field_name.lower() == "value":
                field_kind = field_kind or named_kind
            kind = field_kind or kind_below(above, field_name, schema=schema)
            yield self._name(name), self.value(value, kind, directly=field_kind is not None)

    def _name(self, name: Any) -> Any:
        if isinstance(name, str) and len(name) >= _MIN_NAME:
            return self.value(name)
        self._scalars += 1
        return name

    def _kind_from_sibling(self, fields: list[tuple[Any, Any]]) -> SecretKind | None:
        """Return the kind of the value in `{"name": "Authorization", "value": …}`."""
        for name, value in fields:
            if isinstance(name, str) and name.lower() in ("name", "key") and isinstance(value, str):
                return kind_of(_INVISIBLE.sub("", value))
        return None

    def _scalar(self, value: Any, kind: SecretKind | None, *, directly: bool) -> Any:
        if isinstance(value, str) and not isinstance(value, _Number):
            if kind is None or not is_value(kind, _INVISIBLE.sub("", value)):
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
                nested = _DataRedactor(
                    _hinted_patterns(text, self._secrets)
                    if _has_no_escapes(text)
                    else self._secrets
                )
                nested.value(_JSON.decode(text))
            except (ValueError, RecursionError):
                pass  # the text is not JSON: redact it as ordinary text
            else:
                self.count += nested.count
                return nested.in_place(text)
        redacted = _redact_with(text, self._secrets)
        self.count += redacted.count
        return redacted.text

    def in_place(self, text: str) -> str:
        """Return the JSON text that was walked, with the replacements."""
        if not self.changed:
            return text
        pieces, at = list[str](), 0
        for number, match in enumerate(_SCALAR.finditer(text)):
            if number in self.changed:
                # Keep ASCII escapes: a lone surrogate has no other form.
                redacted_value = json.dumps(self.changed[number], ensure_ascii=match[0].isascii())
                pieces += [text[at : match.start()], redacted_value]
                at = match.end()
        return "".join([*pieces, text[at:]])


def redact_ends(text: str, *, most: int) -> Redacted:
    """Redact a text, and keep about `most` characters at each end.

    A longer text is cut in the middle. A secret that the cut divides is removed.
    """
    # Only a private key is so long that its end may be far from its recognizable start.
    keys = _redacted(text, [PRIVATE_KEY])  # guard: private-key-redacted
    if len(keys.text) <= 2 * most:
        rest = redact(keys.text)
        return Redacted(rest.text, keys.count + rest.count)
    # Drop the run without spaces at the cut: a secret there may have lost its recognizable part.
    parts = keys.text[: most + _MARGIN].rsplit(None, 1)
    head = redact(parts[0] if len(parts) == 2 else "")
    tail = redact(_NON_SPACES.sub("", keys.text[-most - _MARGIN :], count=1))
    return Redacted(
        f"{head.text[:-_MARGIN]}\n…\n{tail.text[_MARGIN:]}", keys.count + head.count + tail.count
    )


def _redacted(text: str, secrets: Iterable[SecretPattern]) -> Redacted:
    replacement = _Replacement(text, [])
    for secret in _hinted_patterns(text, secrets):
        replacement.replace_secrets(_find_secrets(replacement.text, secret))
    return replacement.result()


def _hinted_patterns(text: str, secrets: Iterable[SecretPattern]) -> list[SecretPattern]:
    """Return the kinds of secrets that may occur in the text, to skip most searches."""
    small = text.lower()
    return [secret for secret in secrets if secret.is_hinted(small)]


def _has_no_escapes(text: str) -> bool:
    """Whether a JSON text has no escaped or invisible characters that could hide a secret."""
    escapes = "\\u" in text or "\\/" in text
    return not escapes and (text.isascii() or _INVISIBLE.search(text) is None)


def _find_secrets(text: str, secret: SecretPattern) -> list[SecretSpan]:
    """Return the secrets of one kind in a text, in order."""
    at, secrets = 0, list[SecretSpan]()
    while (match := secret.pattern.search(text, at)) is not None:
        if secret.check(match):
            start, at = _span(match)
            secrets.append(SecretSpan(start, at, f"[redacted: {secret.name}]"))
        else:
            # The rejected match may contain the start of a real secret.
            at = match.start() + 1
    return secrets


def _span(match: re.Match[str]) -> tuple[int, int]:
    """Return the part of a match that is the secret.

    A value without quotes extends to the next space, without punctuation that ends the sentence or
    closes a bracket. `!` and `?` count as part of the value, because passwords often end with them.
    """
    redacted_value = match.groupdict()
    if redacted_value.get("bare"):
        run = _NON_SPACES.match(match.string, match.start("bare"))
        start, end = run.span() if run else match.span("bare")
        return start, start + len(match.string[start:end].rstrip(".,;:)]}"))
    name = next((name for name in ("quoted", "value") if redacted_value.get(name)), None)
    return match.span() if name is None else match.span(name)


def _replace_spans(text: str, secrets: list[SecretSpan]) -> str:
    pieces = []
    at = 0
    for secret in secrets:
        pieces += [text[at : secret.start], secret.stub]
        at = secret.end
    return "".join([*pieces, text[at:]])


# --- sharing --------------------------------------------------------------------------------------
# SharingRedactor redacts data that a user shares, and counts the secrets.


class SharingRedactor:
    """A redactor of shared texts and data that counts secrets; inactive unless `enabled`."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.count = 0
        """Number of secrets redacted so far."""

    def __call__(self, text: str) -> str:
        """Return the redacted text. A JSON text is also redacted by field names."""
        return str(self.data(text))

    def data(self, value: Any) -> Any:
        """Return the redacted data: texts, lists and objects."""
        if not self.enabled:
            return value
        redacted = redact_data(value)
        self.count += redacted.count
        return redacted.value

    def without_counting(self, text: str) -> str:
        """Return the redacted text without counting its secrets."""
        return str(redact_data(text).value) if self.enabled else text
