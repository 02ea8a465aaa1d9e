"""Masks secrets in addresses: passwords, and keys in query parameters."""

import re
from typing import Final

HIDDEN: Final = "***"
"""Text that replaces a secret."""

_PATH_PREFIXES: Final = ("jsonl:", "local:", "memory:", "sqlite:")
"""Prefixes of addresses that are paths, so that @ and : in them have no special meaning."""
_HOST_PATTERN: Final = re.compile(r"(?:\[[^\]@/?#]*\]|[^:@/?#]*)(?::\d*)?(?=[/?#]|$)")
"""Pattern of a host with an optional port and without a user, up to the path."""
# The pattern is anchored at the start of a name, so that each name is read only once.
_PARAMETER_NAME_PATTERN: Final = re.compile(r"(?<![^\s/?&#=])[^\s/?&#=]++(?==)")
_SECRET_NAME_PATTERN: Final = re.compile("pass|pwd|key|token|secret|auth|cred", re.IGNORECASE)
_WEB_VALUE_PATTERN: Final = re.compile("[^&#]*+")
# Outside of web addresses, # may be part of a password and does not end a value.
_OTHER_VALUE_PATTERN: Final = re.compile("[^&]*+")


def mask_secrets(address: str) -> str:
    """Return an address with masked secrets, such as `scheme://user:***@host/db?password=***`."""
    scheme, slashes, text_after_scheme = address.partition("://")
    if not slashes:
        scheme, text_after_scheme = "", address
    is_web = scheme.strip().lower() in ("http", "https")
    has_colon = ":" in text_after_scheme.partition("@")[0]
    if slashes or (has_colon and not address.startswith(_PATH_PREFIXES)):
        text_after_scheme = _mask_password(text_after_scheme, "?#" if is_web else "?")
    value_pattern = _WEB_VALUE_PATTERN if is_web else _OTHER_VALUE_PATTERN
    return f"{scheme}{slashes}{_mask_values(text_after_scheme, value_pattern)}"


def has_secret(address: str) -> bool:
    """Whether an address contains a secret."""
    return mask_secrets(address) != address


def has_user(address: str) -> bool:
    """Whether an address contains a user or a password before the host."""
    _, slashes, text_after_scheme = address.partition("://")
    return bool(slashes) and "@" in text_after_scheme and not _HOST_PATTERN.match(text_after_scheme)


def _mask_values(text: str, value_pattern: re.Pattern[str]) -> str:
    """Mask the value after each `name=` whose name suggests a secret, in linear time."""
    pieces, position = list[str](), 0
    for name in _PARAMETER_NAME_PATTERN.finditer(text):
        value_start = name.end() + 1
        if name.start() >= position and _SECRET_NAME_PATTERN.search(name[0]):
            pieces += [text[position:value_start], HIDDEN]
            match = value_pattern.match(text, value_start)
            position = match.end() if match else value_start
    return "".join([*pieces, text[position:]])


def _mask_password(text_after_scheme: str, end_characters: str) -> str:
    """Mask the password, or a user without a password, in the text after the scheme."""
    ends = (end for end, character in enumerate(text_after_scheme) if character in end_characters)
    end = next(ends, len(text_after_scheme))
    if "@" not in text_after_scheme[:end]:
        if "@" not in text_after_scheme or _HOST_PATTERN.match(text_after_scheme):
            return text_after_scheme
        # The text before the ? or # is not a host, so the ? or # is part of the password.
        end = len(text_after_scheme)
    credentials, _, host = text_after_scheme[:end].rpartition("@")
    user, colon, _ = credentials.partition(":")
    return f"{user if colon else ''}{colon}{HIDDEN}@{host}{text_after_scheme[end:]}"
