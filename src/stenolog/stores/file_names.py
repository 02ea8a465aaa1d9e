"""Conversion between keys and stems of file names.

It is reversible, also on file systems that ignore case or normalise Unicode.
"""

import re
from typing import Final

_LONGEST: Final = 200
_KEPT_OF_LONG: Final = 120
_ESCAPED: Final = re.compile(rb"[^a-z0-9_.-]|^\.")  # guard: key-escaped
_SAFE: Final = re.compile(r"(?:[a-z0-9_.-]|%[0-9A-F]{2})+")


def escaped(key: str) -> str:
    """Return the key as part of a file name. A key that is too long ends in its sha256."""
    text = _ESCAPED.sub(lambda byte: b"%%%02X" % byte.group()[0], key.encode()).decode()
    if len(text) > _LONGEST:
        # Rarely needed, and slow to import.
        from hashlib import sha256

        return f"{text[:_KEPT_OF_LONG]}~{sha256(key.encode()).hexdigest()}"
    return text


def unescaped(stem: str) -> str | None:
    """Return the key that a stem encodes; None if it encodes none."""
    if not _SAFE.fullmatch(stem):
        return None
    raw = re.sub(rb"%(..)", lambda code: bytes([int(code[1], 16)]), stem.encode())
    try:
        key = raw.decode()
    except UnicodeDecodeError:
        return None
    return key if key and escaped(key) == stem else None
