"""Redaction: removes secrets from texts and JSON data that are stored as notes or shared.

Control sequences are removed from texts that are shown or exported, too. They change colours, the
window title or the position of the cursor, and invisible characters change the direction of
writing. In a terminal they could forge what a program prints, and in a text they can hide a secret.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from string import ascii_letters, digits
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from stenolog.lazy_loading import lazy_pattern
from stenolog.redaction.patterns import (
    PRIVATE_KEY,
    SECRET_PATTERNS,
    SecretKind,
    SecretPattern,
    SecretSpan,
    find_secret_fields,
    is_schema,
    is_secret_number,
    is_secret_value,
    kind_of_nested_field,
    secret_kind,
    stub_of,
)

# --- control sequences ----------------------------------------------------------------------------


_C1_REGEX: Final = r"(?<![\x80-\xff])"
"""Pattern of the place before a control character from U+0080 to U+009F.

After a character from U+0080 to U+00FF, it is a byte of UTF-8 that was decoded as Latin-1: a
closing quote becomes U+00E2, U+0080 and U+009D.
"""
_PARAMETERS_REGEX: Final = r"[0-?]*+[ -/]*+[@-~]"
_INTRODUCER_REGEX: Final = rf"(?:\x1b[\]PX^_]|{_C1_REGEX}[\x90\x98\x9d-\x9f])"
_CONTENT_REGEX: Final = r"(?P<content>[^\n\r\x07\x1b\x90\x98\x9c-\x9f]{0,8192}+)"
# guard: unterminated-kept
_STRING_REGEX: Final = rf"{_INTRODUCER_REGEX}{_CONTENT_REGEX}(?:\x07|\x1b\\|{_C1_REGEX}\x9c)"
"""Pattern of sequences that contain a text, such as a window title or the address of a link.

Without its end in the same line, a sequence was cut or is none, and its text is kept.
"""
# Control characters, and characters that change the writing direction.
UNPRINTABLE_RANGES: Final = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
)
# Match whole control sequences. Otherwise their visible part, such as "[31m", would remain.
_UNPRINTABLE: Final = lazy_pattern(
    rf"(?:\x1b\[|{_C1_REGEX}\x9b){_PARAMETERS_REGEX}|{_STRING_REGEX}"
    rf"|\x1b[ -/]*+[0-~]|[{UNPRINTABLE_RANGES}]"
)
_STRING_CONTENT: Final = lazy_pattern(_INTRODUCER_REGEX + _CONTENT_REGEX)
"""Pattern of the text in a sequence, with or without the end of the sequence."""
# A letter after ESC is kept: it may be the first letter of a secret.
# In programs and in JSON, ESC is written as an escape. A carriage return separates two texts.
_HIDDEN_REGEX: Final = (
    rf"(?:\x1b\[|\x9b){_PARAMETERS_REGEX}|{_STRING_REGEX}|\x1b(?:[ -/]++[0-~]|[\]^_])"
    r"|[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]"
    rf"|(?<!\\)\\++(?:(?:(?:u001|x1)[bB]|033|e)(?:\[{_PARAMETERS_REGEX}|[ -/]++[0-~])"
    rf"|(?:u009|x9)[bB]{_PARAMETERS_REGEX})"
)
"""Pattern of the control sequences that can hide a secret from a pattern."""


def printable(text: str) -> str:
    """Return the text without control sequences; line ends and tabs are kept."""
    return text if text.isprintable() else _UNPRINTABLE.sub("", text)


def printable_data(value: Any) -> Any:
    """Return JSON data whose texts have no control sequences. Raises RecursionError."""
    match value:
        case str():
            return printable(value)
        case list():
            return [printable_data(item) for item in value]
        case Mapping():
            return {
                printable(name) if isinstance(name, str) else name: printable_data(item)
                for name, item in value.items()
            }
    return value


# --- secrets --------------------------------------------------------------------------------------


STUB: Final = lazy_pattern(r"\[redacted: [a-z ]{1,20}\]")
"""Pattern of the text that replaces a secret."""
_NON_SPACES: Final = lazy_pattern(r"\S*")
_KEY_CHARACTERS: Final = f"{ascii_letters}{digits}_-.~+/=%:;@!?#$&*|^\\()[\x1b"
"""Characters of a key, or of a control sequence inside a key."""
_LONGEST_KEY: Final = 4_096
_SECRET_MARGIN: Final = 10_000
"""Number of characters beyond a cut that are searched, too, for a secret across the cut."""


_MIN_SEARCHED_NAME_LENGTH: Final = 16
"""Minimum length of a field name that is searched for secrets, in characters."""
_INVISIBLE_REGEX: Final = (
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    "\U000e0000-\U000e0fff]++"
    # This part matches invisible characters that are written as JSON escapes.
    r"|(?<!\\)\\++u(?i:00ad|034f|061c|180e|200[b-f]|202[a-e]|206[0-f]|fe0[0-f]|feff)"
)
_INVISIBLE_CHARACTERS: Final = lazy_pattern(_INVISIBLE_REGEX)
"""Invisible characters, which can hide a secret from a pattern."""
_TOO_SHORT_TEXT: Final = lazy_pattern(r"[A-Za-z0-9_.]{0,13}+|[A-Za-z0-9_. ]{0,9}+")
"""Pattern of texts that are too short to contain a secret."""
_HIDDEN_CHARACTERS: Final = lazy_pattern(
    rf"{_HIDDEN_REGEX}|{_INVISIBLE_REGEX}"
    r"|(?<!\\)\\++u(?P<letter>00(?i:2d|3[0-9]|4[1-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9a]))"
)
"""Invisible characters and control sequences, and letters that are written as JSON escapes."""
_ESCAPES: Final = ("\\u", "\\x1b", "\\x1B", "\\x9b", "\\x9B", "\\033", "\\e")
"""Starts of the escapes that programs and JSON use for hidden characters."""
_SEQUENCE_STARTS: Final = ("\x1b", "\x9b")
_CONTROL_CHARACTER: Final = lazy_pattern(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")


class RedactedText(Struct, frozen=True):
    """A text without its secrets."""

    text: str
    count: int
    """Number of redacted secrets."""


class RedactedData(Struct, frozen=True):
    """Data without its secrets."""

    value: Any
    count: int


def redact(text: str) -> RedactedText:
    """Replace each secret by a stub, such as `[redacted: api key]`.

    Returns the same text and count 0 if the text has no secret. Only secrets with a known
    form, field name or introduction (such as `password is`) are found; any other secret stays.
    Invisible characters do not hide a secret.
    """
    return _redact_with(text, SECRET_PATTERNS)


def _redact_with(text: str, patterns: Iterable[SecretPattern]) -> RedactedText:
    secrets = find_secrets(text, patterns)
    return RedactedText(_replace_spans(text, secrets) if secrets else text, len(secrets))


def find_secrets(
    text: str, patterns: Iterable[SecretPattern] = SECRET_PATTERNS
) -> list[SecretSpan]:
    """Return the secrets that `redact` replaces, in order, with their positions and stubs."""
    secrets = _find_visible_secrets(text, patterns)
    for sequence in _STRING_CONTENT.finditer(text):
        first = sequence.start("content")
        secrets += (
            SecretSpan(first + secret.start, first + secret.end, secret.stub)
            for secret in _find_visible_secrets(sequence["content"], patterns)
        )
    # A secret may be interrupted by a sequence that contains a secret: return only the outer one.
    outer_secrets = _without_inner(sorted(secrets, key=attrgetter("start")))
    # ESC and the start of a stub would form a control sequence.
    return [
        replace(secret, start=secret.start - 1)
        if text[secret.start - 1 : secret.start] in _SEQUENCE_STARTS
        else secret
        for secret in outer_secrets
    ]


def _find_visible_secrets(text: str, patterns: Iterable[SecretPattern]) -> list[SecretSpan]:
    """Return the secrets outside window titles and similar control sequences."""
    if _TOO_SHORT_TEXT.fullmatch(text):
        return []
    draft = _StepwiseRedaction(text, _hidden_characters(text))  # guard: hidden-characters-redacted
    draft.replace_and_record(list(find_secret_fields(draft.text)))
    for pattern in _possible_patterns(draft.text, patterns):
        draft.replace_and_record(_find_matches(draft.text, pattern))
    return draft.original_spans()


def _hidden_characters(text: str) -> list[SecretSpan]:
    """Return the spans of invisible characters and of letters written as JSON escapes.

    Invisible characters and control sequences are replaced by nothing, and a JSON escape by its
    letter.
    """
    has_escapes = any(escape in text for escape in _ESCAPES)
    if text.isascii() and not has_escapes and _CONTROL_CHARACTER.search(text) is None:
        return []
    return [
        SecretSpan(*match.span(), chr(int(match["letter"], 16)) if match["letter"] else "")
        for match in _HIDDEN_CHARACTERS.finditer(text)
    ]


class _StepwiseRedaction:
    """A text whose secrets are replaced step by step, with the original position of each secret.

    Each step searches the result of the previous step, so that no secret is found twice.
    """

    def __init__(self, text: str, hidden: list[SecretSpan]) -> None:
        self.text = text
        self._position_maps: list[_PositionMap] = []
        self._stubs: list[tuple[int, int, int, str]] = []
        """Start and end of each secret in the original text, number of earlier steps, and stub."""
        if hidden:
            self._replace_secrets(hidden)

    def replace_and_record(self, secrets: list[SecretSpan]) -> None:
        """Replace these secrets (sorted by position) by their stubs, and record their positions."""
        if not secrets:
            return
        for secret in secrets:
            start, end = secret.start, secret.end
            for step_map in reversed(self._position_maps):
                last = max(start, end - 1)
                start, end = step_map.original_span(start)[0], step_map.original_span(last)[1]
            self._stubs.append((start, end, len(self._position_maps), secret.stub))
        self._replace_secrets(secrets)

    def original_spans(self) -> list[SecretSpan]:
        """Return the secrets with their positions in the original text."""
        # If a secret contains a secret of an earlier step, only the outer secret is returned.
        rows = sorted(self._stubs, key=lambda row: (row[0], -row[2]))
        return _without_inner([SecretSpan(start, end, stub) for start, end, _, stub in rows])

    def _replace_secrets(self, secrets: list[SecretSpan]) -> None:
        self._position_maps.append(_PositionMap(secrets))
        self.text = _replace_spans(self.text, secrets)


def _without_inner(secrets: Iterable[SecretSpan]) -> list[SecretSpan]:
    """Return the secrets, sorted by position, without those that begin inside another one."""
    outer_secrets, last_end = list[SecretSpan](), 0
    for secret in secrets:
        if secret.start >= last_end:
            outer_secrets.append(secret)
            last_end = secret.end
    return outer_secrets


class _PositionMap:
    """A mapping of positions in a text to positions before one replacement step."""

    def __init__(self, secrets: list[SecretSpan]) -> None:
        self._secrets = secrets
        self._starts: list[int] = []
        removed_length = 0
        for secret in secrets:
            self._starts.append(secret.start - removed_length)
            removed_length += secret.end - secret.start - len(secret.stub)

    def original_span(self, position: int) -> tuple[int, int]:
        """Return the span, in the text before the step, that became the character at `position`."""
        index = bisect_right(self._starts, position) - 1
        if index < 0:
            return position, position + 1
        span = self._secrets[index]
        offset = position - self._starts[index] - len(span.stub)
        return (span.start, span.end) if offset < 0 else (span.end + offset, span.end + offset + 1)


def redact_data(value: Any) -> RedactedData:
    """Redact every text in JSON data, and every value whose field name shows a secret.

    In a text that is JSON, only the values with secrets change; the rest keeps its formatting.
    """
    redactor = _DataRedactor()
    return RedactedData(redactor.redact(value), redactor.count)


_PRIVATE_KEY_STUB: Final = f"[redacted: {PRIVATE_KEY.name}]"


class _NumberText(str):
    """The text of a JSON number, exactly as it was written."""


class _ObjectFields(list[tuple[str, Any]]):
    """A JSON object that may have duplicate names."""


_JSON_DECODER: Final = json.JSONDecoder(
    parse_float=_NumberText,
    parse_int=_NumberText,
    parse_constant=_NumberText,
    object_pairs_hook=_ObjectFields,
)
_JSON_SCALAR: Final = lazy_pattern(r"\"[^\"\\]*+(?:\\.[^\"\\]*+)*\"|[^\s\[\]{},:\"]++")


class _DataRedactor:
    """Redacts and counts the secrets in nested data."""

    def __init__(self, patterns: Iterable[SecretPattern] = SECRET_PATTERNS) -> None:
        self.count = 0
        self._patterns = patterns
        """Kinds of secrets to search for in texts."""
        self._scalar_count = 0
        self.redacted_scalars: dict[int, str] = {}
        """Each redacted scalar or field name, by its index among all scalars and field names."""

    def redact(self, value: Any, kind: SecretKind | None = None, *, is_named: bool = False) -> Any:
        """Return the value without secrets.

        `kind`: kind of the secrets in the field, if any. `is_named`: the field's own name shows the
        kind, and not only the name of an outer field.
        """
        match value:
            case list() if not isinstance(value, _ObjectFields):
                return list(self._redact_list(value, kind))
            case Mapping():
                return dict(self._redact_object(list(value.items()), kind))
            case _ObjectFields():
                return _ObjectFields(self._redact_object(value, kind))
        redacted_value = self._redact_scalar(value, kind, is_named=is_named)
        if redacted_value is not value:
            self.redacted_scalars[self._scalar_count] = redacted_value
        self._scalar_count += 1
        return redacted_value

    def _redact_list(self, values: list[Any], kind: SecretKind | None) -> Iterator[Any]:
        """Redact a list. A private key may span several items, as in a cell of a notebook."""
        key_kind: SecretKind | None = None
        for value in values:
            redacted_value = self.redact(value, key_kind or kind)
            if isinstance(value, str):
                is_in_key = key_kind is not None or redacted_value.endswith(_PRIVATE_KEY_STUB)
                is_unfinished = is_in_key and "-----END" not in value
                key_kind = secret_kind("private_key") if is_unfinished else None
            yield redacted_value

    def _redact_object(
        self, fields: list[tuple[Any, Any]], outer_kind: SecretKind | None
    ) -> Iterator[Any]:
        has_schema = outer_kind is not None and any(
            is_schema(str(name), value) for name, value in fields
        )
        sibling_kind = self._kind_from_sibling(fields)
        is_model_token = any(name == "logprob" for name, _ in fields)
        for name, value in fields:
            field_name = _INVISIBLE_CHARACTERS.sub("", name) if isinstance(name, str) else ""
            field_kind = secret_kind(field_name)
            if field_name == "token" and is_model_token:
                field_kind = None  # this token is a piece of a model's answer
            if field_name.lower() == "value":
                field_kind = field_kind or sibling_kind
            kind = field_kind or kind_of_nested_field(outer_kind, field_name, has_schema=has_schema)
            yield self._redact_name(name), self.redact(value, kind, is_named=field_kind is not None)

    def _redact_name(self, name: Any) -> Any:
        if isinstance(name, str) and len(name) >= _MIN_SEARCHED_NAME_LENGTH:
            return self.redact(name)
        self._scalar_count += 1
        return name

    def _kind_from_sibling(self, fields: list[tuple[Any, Any]]) -> SecretKind | None:
        """Return the kind of secret in an object such as `{"name": "token", "value": …}`."""
        for name, value in fields:
            if isinstance(name, str) and name.lower() in ("name", "key") and isinstance(value, str):
                return secret_kind(_INVISIBLE_CHARACTERS.sub("", value))
        return None

    def _redact_scalar(self, value: Any, kind: SecretKind | None, *, is_named: bool) -> Any:
        if isinstance(value, str) and not isinstance(value, _NumberText):
            if kind is None or not is_secret_value(kind, _INVISIBLE_CHARACTERS.sub("", value)):
                return self._redact_text(value)
        elif (
            kind is None
            or not is_named
            or not isinstance(value, int | _NumberText)
            or not is_secret_number(kind, str(value))
        ):
            return value
        self.count += 1
        return stub_of(kind)

    def _redact_text(self, text: str) -> str:
        if text.lstrip()[:1] in ("{", "[", '"'):
            patterns = self._patterns
            if _has_no_hidden_characters(text):
                patterns = _possible_patterns(text, patterns)
            nested_redactor = _DataRedactor(patterns)
            try:
                nested_redactor.redact(_JSON_DECODER.decode(text))
            except (ValueError, RecursionError):
                pass  # the text is not JSON: redact it as ordinary text
            else:
                self.count += nested_redactor.count
                return nested_redactor.redacted_json(text)
        redacted = _redact_with(text, self._patterns)
        self.count += redacted.count
        return redacted.text

    def redacted_json(self, text: str) -> str:
        """Return a JSON text without the secrets that `redact` found in its decoded value."""
        if not self.redacted_scalars:
            return text
        secrets = list[SecretSpan]()
        for index, match in enumerate(_JSON_SCALAR.finditer(text)):
            if index in self.redacted_scalars:
                # Keep ASCII escapes: a lone surrogate can only be written as an escape.
                encoded = json.dumps(self.redacted_scalars[index], ensure_ascii=match[0].isascii())
                secrets.append(SecretSpan(*match.span(), encoded))
        return _replace_spans(text, secrets)


def redact_ends(text: str, *, max_end_length: int) -> RedactedText:
    """Redact a text, and keep about `max_end_length` characters at each end.

    The middle of a longer text is left out. A secret that the cut divides is removed.
    """
    # Replace private keys (PEM) before the cut: their end may be far from their recognizable start.
    private_keys = _find_matches(text, PRIVATE_KEY)  # guard: private-key-redacted
    text = _replace_spans(text, private_keys)
    if len(text) <= 2 * max_end_length:
        redacted = redact(text)
        return RedactedText(redacted.text, len(private_keys) + redacted.count)
    # Drop the word at the cut: if it is a secret, its recognizable part may be cut off.
    head_parts = text[: max_end_length + _SECRET_MARGIN].rsplit(None, 1)
    head = redact(head_parts[0] if len(head_parts) == 2 else "")
    tail = redact(_NON_SPACES.sub("", text[-max_end_length - _SECRET_MARGIN :], count=1))
    count = len(private_keys) + head.count + tail.count
    return RedactedText(f"{head.text[:-_SECRET_MARGIN]}\n…\n{tail.text[_SECRET_MARGIN:]}", count)


def cut_start(text: str, max_length: int) -> str:
    """Return the start of a text, without a word that the cut divides.

    A part of a secret is not recognized. So a text that is redacted or covered later must not be
    cut in any other way.
    """
    if len(text) <= max_length:
        return text
    start = text[:max_length]
    word_start = len(start.rstrip(_KEY_CHARACTERS))  # guard: cut-between-words
    return start[: max(word_start, max_length - _LONGEST_KEY)]


def line_start(text: str, max_length: int) -> str:
    """Return the start of a text in one line, cut like `cut_start`."""
    # These words have at least `max_length` characters, unless the text has fewer words.
    line = " ".join(text.split(None, max_length)[:max_length])
    return line if len(line) <= max_length else cut_start(line, max_length) + "…"


def _possible_patterns(text: str, patterns: Iterable[SecretPattern]) -> list[SecretPattern]:
    """Return the patterns that may match in the text, so that most searches are skipped."""
    lower_case = text.lower()
    return [pattern for pattern in patterns if pattern.may_occur_in(lower_case)]


def _has_no_hidden_characters(text: str) -> bool:
    """Return whether a JSON text has no escaped or invisible characters that can hide a secret."""
    has_escapes = any(escape in text for escape in ("\\u", "\\/", "\\b"))
    return not has_escapes and not _hidden_characters(text)


def _find_matches(text: str, pattern: SecretPattern) -> list[SecretSpan]:
    """Return the secrets of one kind in a text, in order."""
    position, secrets = 0, list[SecretSpan]()
    while (match := pattern.pattern.search(text, position)) is not None:
        if pattern.check(match):
            start, position = _secret_span(match)
            secrets.append(SecretSpan(start, position, f"[redacted: {pattern.name}]"))
        else:
            # The rejected match may contain the start of a real secret.
            position = match.start() + 1
    return secrets


def _secret_span(match: re.Match[str]) -> tuple[int, int]:
    """Return start and end of the secret within a match.

    A value without quotes extends to the next space, without punctuation that ends the sentence or
    closes a bracket. `!` and `?` count as part of the value, because passwords often end with them.
    """
    groups = match.groupdict()
    if groups.get("bare"):
        value_match = _NON_SPACES.match(match.string, match.start("bare"))
        start, end = value_match.span() if value_match else match.span("bare")
        return start, start + len(match.string[start:end].rstrip(".,;:)]}"))
    return match.span(next((name for name in ("quoted", "value") if groups.get(name)), 0))


def _replace_spans(text: str, secrets: list[SecretSpan]) -> str:
    text_parts = []
    copied_upto = 0
    for secret in secrets:
        text_parts += [text[copied_upto : secret.start], secret.stub]
        copied_upto = secret.end
    return "".join([*text_parts, text[copied_upto:]])


# --- sharing --------------------------------------------------------------------------------------
# SharingRedactor redacts data that a user shares, and counts the secrets.


class SharingRedactor:
    """A redactor of shared texts and data that counts secrets; changes nothing unless `enabled`."""

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


TextCleaner = Callable[[str], str]
"""Function that removes from a text everything that must not be shared."""


def _redacted(text: str) -> str:
    return redact(text).text


def redact_text(text: str, clean: TextCleaner = _redacted) -> str:
    """Return the text without control sequences and secrets.

    Call this with the whole text before cutting it: half a secret may not be recognized.
    """
    redacted = clean(text)
    shown = printable(redacted)
    # Where a control sequence was removed, two parts of a secret may have become one.
    return shown if shown == redacted else clean(shown)


def redact_fields(body: Mapping[str, Any], clean: SharingRedactor) -> dict[str, Any]:
    """Return the fields of a message without control sequences and secrets."""
    redacted = clean.data(body)
    shown: dict[str, Any] = printable_data(redacted)
    return shown if shown == redacted else clean.data(shown)
