"""Addresses without what is secret in them: passwords, and keys behind a question mark."""

import re
from typing import Final

HIDDEN: Final = "***"
"""What is shown in the place of a secret."""

_PATHS: Final = ("jsonl:", "local:", "memory:", "sqlite:")
"""What begins so names a path, in which @ and : are letters like others."""
_HOST: Final = re.compile(r"(?:\[[^\]@/?#]*\]|[^:@/?#]*)(?::\d*)?(?=[/?#]|$)")
"""A host, with its port and without a user, up to where the path begins."""
# From where a name begins, so that each is read once, however long it is.
_NAME: Final = re.compile(r"(?<![^\s/?&#=])[^\s/?&#=]++(?==)")
_SECRET: Final = re.compile("pass|pwd|key|token|secret|auth|cred", re.IGNORECASE)
_VALUE_IN_WEB: Final = re.compile("[^&#]*+")
# Elsewhere a # ends nothing: it may stand in a password.
_VALUE_ELSEWHERE: Final = re.compile("[^&]*+")


def without_password(text: str) -> str:
    """An address as it can be shown: `scheme://user:***@host/db?password=***`."""
    head, slashes, rest = text.partition("://")
    if not slashes:
        head, rest = "", text
    web = head.strip().lower() in ("http", "https")
    if slashes or (":" in rest.partition("@")[0] and not text.startswith(_PATHS)):
        rest = _without_user(rest, ends="?#" if web else "?")
    shown = _without_values(rest, _VALUE_IN_WEB if web else _VALUE_ELSEWHERE)
    return f"{head}{slashes}{shown}"


def has_password(text: str) -> bool:
    """Whether there is something in an address that must not be shown."""
    return without_password(text) != text


def has_user(text: str) -> bool:
    """Whether a user or a password stands before the host of an address."""
    _, slashes, rest = text.partition("://")
    return bool(slashes) and "@" in rest and not _HOST.match(rest)


def _without_values(text: str, value: re.Pattern[str]) -> str:
    """Hide the value after each `name=` whose name says that it is secret; linear in time."""
    pieces, at = list[str](), 0
    for name in _NAME.finditer(text):
        begin = name.end() + 1
        if name.start() >= at and _SECRET.search(name[0]):
            pieces += [text[at:begin], HIDDEN]
            found = value.match(text, begin)
            at = found.end() if found else begin
    return "".join([*pieces, text[at:]])


def _without_user(rest: str, *, ends: str) -> str:
    """What stands behind the scheme, without what stands before the last @ of host and path."""
    size = next((at for at, letter in enumerate(rest) if letter in ends), len(rest))
    if "@" not in rest[:size]:
        if "@" not in rest or _HOST.match(rest):
            return rest
        # What stands before the ? or # is no host, so that is in the password itself.
        size = len(rest)
    named, _, host = rest[:size].rpartition("@")
    user, colon, _ = named.partition(":")
    return f"{user if colon else ''}{colon}{HIDDEN}@{host}{rest[size:]}"
