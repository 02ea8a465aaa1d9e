"""Masks secrets in addresses: passwords, and keys in query parameters."""

import re
from typing import Final

HIDDEN: Final = "***"
"""Text that replaces a secret."""

_PATHS: Final = ("jsonl:", "local:", "memory:", "sqlite:")
"""Prefixes of paths, in which @ and : have no special meaning."""
_HOST: Final = re.compile(r"(?:\[[^\]@/?#]*\]|[^:@/?#]*)(?::\d*)?(?=[/?#]|$)")
"""Pattern of a host with an optional port and without a user, up to the path."""
# The pattern is anchored at the start of a name, so that each name is read once, whatever its
# length.
_NAME: Final = re.compile(r"(?<![^\s/?&#=])[^\s/?&#=]++(?==)")
_SECRET: Final = re.compile("pass|pwd|key|token|secret|auth|cred", re.IGNORECASE)
_VALUE_IN_WEB: Final = re.compile("[^&#]*+")
# In other addresses # does not end a value: it may be part of a password.
_VALUE_ELSEWHERE: Final = re.compile("[^&]*+")


def without_password(text: str) -> str:
    """Return an address without secrets: `scheme://user:***@host/db?password=***`."""
    head, slashes, rest = text.partition("://")
    if not slashes:
        head, rest = "", text
    web = head.strip().lower() in ("http", "https")
    if slashes or (":" in rest.partition("@")[0] and not text.startswith(_PATHS)):
        rest = _without_user(rest, ends="?#" if web else "?")
    masked = _without_values(rest, _VALUE_IN_WEB if web else _VALUE_ELSEWHERE)
    return f"{head}{slashes}{masked}"


def has_password(text: str) -> bool:
    """Whether an address contains a secret."""
    return without_password(text) != text


def has_user(text: str) -> bool:
    """Whether an address contains a user or a password before the host."""
    _, slashes, rest = text.partition("://")
    return bool(slashes) and "@" in rest and not _HOST.match(rest)


def _without_values(text: str, value: re.Pattern[str]) -> str:
    """Hide the value after each `name=` whose name suggests a secret, in linear time."""
    pieces, at = list[str](), 0
    for name in _NAME.finditer(text):
        begin = name.end() + 1
        if name.start() >= at and _SECRET.search(name[0]):
            pieces += [text[at:begin], HIDDEN]
            match = value.match(text, begin)
            at = match.end() if match else begin
    return "".join([*pieces, text[at:]])


def _without_user(rest: str, *, ends: str) -> str:
    """Return the text after the scheme, without the part before the last @ of host and path."""
    size = next((at for at, letter in enumerate(rest) if letter in ends), len(rest))
    if "@" not in rest[:size]:
        if "@" not in rest or _HOST.match(rest):
            return rest
        # The text before the ? or # is not a host, so that character is part of the password.
        size = len(rest)
    named, _, host = rest[:size].rpartition("@")
    user, colon, _ = named.partition(":")
    return f"{user if colon else ''}{colon}{HIDDEN}@{host}{rest[size:]}"
