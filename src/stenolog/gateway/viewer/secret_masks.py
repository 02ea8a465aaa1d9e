"""Secrets on a page are covered until they are clicked, so that a shared screen does not show them.

This is no access control: the page contains the secrets. Exports are redacted instead.
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
_MAX_CACHED: Final = 20_000
_NONCE: Final = f"x{token_hex(8)}x"
"""Random text in placeholders, so that no message can contain one."""
_TAG_OR_PLACEHOLDER: Final = re.compile(
    rf'<(?:[^<>"]|"[^"]*")*+>|{_NONCE}(?P<number>\d+)x', re.ASCII
)
_PLACEHOLDER: Final = re.compile(rf"{_NONCE}\d+x", re.ASCII)
_COVER: Final = "••••••"
_BUTTON: Final = Markup(
    '<button type="button" class="secret" data-secret="{}" data-kind="{}" aria-pressed="false" '
    'title="Show this {}">{} {}</button>'
)


class SecretMask:
    """The secrets of one page. Disabled, it returns texts unchanged."""

    def __init__(self, *, enabled: bool = True) -> None:
        self._secrets: list[tuple[str, str]] = []
        """Text and kind of each secret."""
        self._left = _MAX_SEARCHED if enabled else 0

    def hide(self, text: str) -> str:
        """Return the text with a placeholder for each secret, which survives rendering."""
        if len(text) > self._left:  # guard: secrets-covered
            return text
        self._left -= len(text)
        pieces, at = list[str](), 0
        for one in (_find_cached if len(text) <= _MAX_CACHED else find_secrets)(text):
            kind = one.stub.strip("\"'").removeprefix("[redacted: ").removesuffix("]")
            pieces += [text[at : one.start], f"{_NONCE}{len(self._secrets)}x"]
            self._secrets.append((text[one.start : one.end], kind))
            at = one.end
        return "".join([*pieces, text[at:]]) if pieces else text

    def end_before(self, text: str, end: int) -> int:
        """Return where to cut a text with placeholders: at `end`, or before a placeholder there."""
        start = text.rfind(_NONCE, 0, end + len(_NONCE))
        found = _PLACEHOLDER.match(text, start) if start >= 0 else None
        return end if found is None or found.end() <= end else start

    def cover(self, text: str) -> str:
        """Return the text with secrets covered, for places that cannot have a button."""
        return _PLACEHOLDER.sub(_COVER, self.hide(text))

    def buttons(self, html: Markup) -> Markup:
        """Replace the placeholders in HTML by buttons that show the secret; in attributes by dots.

        `html` is well-formed: attributes are quoted, and `<` in text is escaped.
        """
        if _NONCE not in html:
            return html
        return Markup(_TAG_OR_PLACEHOLDER.sub(self._replacement, str(html)))

    def _replacement(self, found: re.Match[str]) -> str:
        if found["number"] is None:
            return _PLACEHOLDER.sub(_COVER, found[0])
        secret, kind = self._secrets[int(found["number"])]
        return str(_BUTTON.format(secret, kind, kind, kind, _COVER))


def covered(text: str) -> str:
    """Return one line, such as a title, with its secrets covered."""
    return SecretMask().cover(text)


def masked_html(text: str) -> Markup:
    """Return Markdown as safe HTML with its secrets covered."""
    mask = SecretMask()
    return mask.buttons(to_html(mask.hide(text)))


@lru_cache(maxsize=1_024)
def _find_cached(text: str) -> list[SecretSpan]:
    return find_secrets(text)
