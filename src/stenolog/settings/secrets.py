"""Masks secrets in addresses: passwords, and keys in query parameters."""

import re
from typing import Final

HIDDEN: Final = "***"
"""Text that replaces a secret."""

_PATH_PREFIXES: Final = ("jsonl:", "local:", "memory:", "sqlite:")
"""Prefixes of paths, in which @ and : have no special meaning."""
_HOST: Final = re.compile(r"(?:\[[^\]@/?#]*\]|[^:@/?#]*)(?::\d*)?(?=[/?#]|$)")
"""Pattern of a host with an optional port and without a user, up to the path."""
# The pattern is anchored at the start of a name, so that each name is read only once.
_PARAMETER_NAME: Final = re.compile(r"(?<![^\s/?&#=])[^\s/?&#=]++(?==)")
_SECRET_NAME: Final = re.compile("pass|pwd|key|token|secret|auth|cred", re.IGNORECASE)
_WEB_VALUE: Final = re.compile("[^&#]*+")
# Outside of web addresses, # may be part of a password and does not end a value.
_OTHER_VALUE: Final = re.compile("[^&]*+")


def without_password(text: str) -> str:
    """Return an address without secrets, such as `scheme://user:***@host/db?password=***`."""
    scheme, slashes, rest = text.partition("://")
    if not slashes:
        scheme, rest = "", text
    is_web = scheme.strip().lower() in ("http", "https")
    if slashes or (":" in rest.partition("@")[0] and not text.startswith(_PATH_PREFIXES)):
        rest = _mask_password(rest, end_characters="?#" if is_web else "?")
    masked = _mask_values(rest, _WEB_VALUE if is_web else _OTHER_VALUE)
    return f"{scheme}{slashes}{masked}"


def has_password(text: str) -> bool:
    """Whether an address contains a secret."""
    return without_password(text) != text


def has_user(text: str) -> bool:
    """Whether an address contains a user or a password before the host."""
    _, slashes, rest = text.partition("://")
    return bool(slashes) and "@" in rest and not _HOST.match(rest)


def _mask_values(text: str, value_pattern: re.Pattern[str]) -> str:
    """Hide the value after each `name=` whose name suggests a secret, in linear time."""
    pieces, position = list[str](), 0
    for name in _PARAMETER_NAME.finditer(text):
        value_start = name.end() + 1
        if name.start() >= position and _SECRET_NAME.search(name[0]):
            pieces += [text[position:value_start], HIDDEN]
            match = value_pattern.match(text, value_start)
            position = match.end() if match else value_start
    return "".join([*pieces, text[position:]])


def _mask_password(rest: str, *, end_characters: str) -> str:
    """Mask the password, or a user without a password, in the text after the scheme."""
    end = next((index for index, letter in enumerate(rest) if letter in end_characters), len(rest))
    if "@" not in rest[:end]:
        if "@" not in rest or _HOST.match(rest):
            return rest
        # The text before the ? or # is not a host, so the ? or # is part of the password.
        end = len(rest)
    credentials, _, host = rest[:end].rpartition("@")
    user, colon, _ = credentials.partition(":")
    return f"{user if colon else ''}{colon}{HIDDEN}@{host}{rest[end:]}"
