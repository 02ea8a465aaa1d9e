"""Secrets on a page are covered until they are clicked, so that a shared screen does not show them.

A cover is no access control: the page contains the secrets. Exports are redacted instead.
"""

import re
from functools import lru_cache
from secrets import token_hex
from typing import Final

from markupsafe import Markup

from stenolog.gateway.viewer.markdown_html import to_html
from stenolog.redaction.redact import find_secrets
from stenolog.redaction.secret_fields import SecretSpan

_MAX_SEARCHED: Final = 1_000_000
"""Maximum number of characters on one page that are searched for secrets."""
_MAX_CACHED_LENGTH: Final = 20_000
_NONCE: Final = f"x{token_hex(8)}x"
"""Random text in placeholders, so that no message can contain a placeholder."""
_TAG_OR_PLACEHOLDER: Final = re.compile(
    rf'<(?:[^<>"]|"[^"]*")*+>|{_NONCE}(?P<number>\d+)x', re.ASCII
)
_PLACEHOLDER: Final = re.compile(rf"{_NONCE}\d+x", re.ASCII)
_CUT_WORD: Final = re.compile(r"\A…([\w+=-]{8,})|([\w+=-]{8,})…\Z")
"""A long word at a cut end of a snippet, which may be a part of a secret."""
COVER_TEXT: Final = "••••••"
_SECRET_BUTTON: Final = Markup(
    '<button type="button" class="secret" data-secret="{}" data-kind="{}" aria-pressed="false" '
    'title="Show this {}">{} {}</button>'
)


class SecretMask:
    """The secrets of one page. A disabled mask returns texts unchanged."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._secrets: list[tuple[str, str]] = []
        """Text and kind of each secret."""
        self._searchable = _MAX_SEARCHED if enabled else 0

    def hide(self, text: str) -> str:
        """Return the text with a placeholder for each secret. Rendering keeps placeholders."""
        if len(text) > self._searchable:
            return text
        self._searchable -= len(text)
        pieces, end = list[str](), 0
        for secret in (_find_cached if len(text) <= _MAX_CACHED_LENGTH else find_secrets)(text):
            kind = secret.stub.strip("\"'").removeprefix("[redacted: ").removesuffix("]")
            pieces += [text[end : secret.start], f"{_NONCE}{len(self._secrets)}x"]
            self._secrets.append((text[secret.start : secret.end], kind))
            end = secret.end
        return "".join([*pieces, text[end:]]) if pieces else text

    def end_before(self, text: str, end: int) -> int:
        """Return where to cut the text: at `end`, or before a placeholder that `end` splits."""
        start = text.rfind(_NONCE, 0, end + len(_NONCE))
        match = _PLACEHOLDER.match(text, start) if start >= 0 else None
        return end if match is None or match.end() <= end else start

    def cover(self, text: str) -> str:
        """Return the text with secrets covered, for places that cannot have a button."""
        return _PLACEHOLDER.sub(COVER_TEXT, self.hide(text))

    def buttons(self, html: Markup) -> Markup:
        """Replace placeholders in HTML by buttons that show the secret, and in attributes by dots.

        `html` is well-formed: attributes are quoted, and `<` in text is escaped.
        """
        if _NONCE not in html:
            return html
        return Markup(_TAG_OR_PLACEHOLDER.sub(self._replacement, str(html)))

    def _replacement(self, match: re.Match[str]) -> str:
        if match["number"] is None:
            return _PLACEHOLDER.sub(COVER_TEXT, match[0])
        secret, kind = self._secrets[int(match["number"])]
        return str(_SECRET_BUTTON.format(secret, kind, kind, kind, COVER_TEXT))


def secret_spans(snippet: str) -> list[tuple[int, int]]:
    """Return start and end of each secret in a snippet, which may start or end inside a secret."""
    secrets = [(secret.start, secret.end) for secret in _find_cached(snippet)]
    for word in _CUT_WORD.finditer(snippet):
        first, last = word.span(word.lastindex or 0)
        is_apart = all(last <= start or end <= first for start, end in secrets)
        if is_apart and any(map(str.isdigit, word[0])):
            secrets.append((first, last))
    return sorted(secrets)


def cover_secrets(text: str) -> str:
    """Return one line, such as a title, with its secrets covered."""
    return SecretMask().cover(text)


def masked_html(text: str) -> Markup:
    """Return Markdown as safe HTML with its secrets covered."""
    mask = SecretMask()
    return mask.buttons(to_html(mask.hide(text)))


@lru_cache(maxsize=1_024)
def _find_cached(text: str) -> list[SecretSpan]:
    return find_secrets(text)
