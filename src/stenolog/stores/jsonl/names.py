"""Key ↔ file name: reversible, the same on file systems that fold case or normalise text."""

import re
from hashlib import sha256

SUFFIX = ".jsonl"

_LONGEST = 200
_KEPT_OF_LONG = 120
_ESCAPED = re.compile(rb"[^a-z0-9_.-]|^\.")
_SAFE = re.compile(r"(?:[a-z0-9_.-]|%[0-9A-F]{2})+")


def file_name(key: str) -> str:
    """The name of a session's live log."""
    escaped = _ESCAPED.sub(lambda byte: b"%%%02X" % byte.group()[0], key.encode()).decode()
    if len(escaped) > _LONGEST:
        escaped = f"{escaped[:_KEPT_OF_LONG]}~{sha256(key.encode()).hexdigest()}"
    return escaped + SUFFIX


def key_of(name: str) -> str | None:
    """The key that a file name spells out; None for any other file.

    A key too long to be spelled out stands inside its file.
    """
    stem = name.removesuffix(SUFFIX)
    if stem == name or not _SAFE.fullmatch(stem):
        return None
    raw = re.sub(rb"%(..)", lambda code: bytes([int(code[1], 16)]), stem.encode())
    try:
        key = raw.decode()
    except UnicodeDecodeError:
        return None
    return key if key and file_name(key) == name else None


def is_long(name: str) -> bool:
    """Whether this is the name of a log whose key must be looked up inside."""
    return bool(re.fullmatch(r"[a-z0-9_.%A-F-]{120}~[0-9a-f]{64}\.jsonl", name))


def reference_names(key: str) -> set[str]:
    """The names under which the reference systems would keep the same session."""
    return {
        re.sub(r"[:/\\]", "_", key) + SUFFIX,
        re.sub(r"[^\w-]", "_", key) + SUFFIX,
    } - {file_name(key)}
