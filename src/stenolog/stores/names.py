"""Key ↔ the stem of a file name: reversible, also where case is folded or text normalised."""

import re
from typing import Final

_LONGEST: Final = 200
_KEPT_OF_LONG: Final = 120
_ESCAPED: Final = re.compile(rb"[^a-z0-9_.-]|^\.")  # guard: key-escaped
_SAFE: Final = re.compile(r"(?:[a-z0-9_.-]|%[0-9A-F]{2})+")


def escaped(key: str) -> str:
    """The key as it can stand in a file name; one that is too long ends in its sha256."""
    text = _ESCAPED.sub(lambda byte: b"%%%02X" % byte.group()[0], key.encode()).decode()
    if len(text) > _LONGEST:
        # Hardly ever met, and slow to import.
        from hashlib import sha256

        return f"{text[:_KEPT_OF_LONG]}~{sha256(key.encode()).hexdigest()}"
    return text


def unescaped(stem: str) -> str | None:
    """The key that a stem spells out; None for any other text."""
    if not _SAFE.fullmatch(stem):
        return None
    raw = re.sub(rb"%(..)", lambda code: bytes([int(code[1], 16)]), stem.encode())
    try:
        key = raw.decode()
    except UnicodeDecodeError:
        return None
    return key if key and escaped(key) == stem else None
