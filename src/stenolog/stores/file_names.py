"""File names of sessions: a reversible mapping from keys, and names that other programs use.

The mapping is reversible even on file systems that ignore case or normalise Unicode. Only a very
long key cannot be read from its file name.
"""

import re
from typing import Final

_MAX_STEM_LENGTH: Final = 200
"""Maximum number of characters of an escaped key; a longer key is cut."""
_LONG_KEY_PREFIX_LENGTH: Final = 120
_UNSAFE_BYTES: Final = re.compile(rb"[^a-z0-9_.-]|^\.")  # guard: key-escaped
_ESCAPED_STEM: Final = re.compile(r"(?:[a-z0-9_.-]|%[0-9A-F]{2})+")


def escape_key(key: str) -> str:
    """Return the key as part of a file name. A long key is cut, and its sha256 is added."""
    stem = _UNSAFE_BYTES.sub(lambda byte: b"%%%02X" % byte.group()[0], key.encode()).decode()
    if len(stem) > _MAX_STEM_LENGTH:
        # `hashlib` is rarely needed and slow to import.
        from hashlib import sha256

        return f"{stem[:_LONG_KEY_PREFIX_LENGTH]}~{sha256(key.encode()).hexdigest()}"
    return stem


def unescape_key(stem: str) -> str | None:
    """Return the session key that a file stem encodes; None if the stem is not an encoded key."""
    if not _ESCAPED_STEM.fullmatch(stem):
        return None
    raw_key = re.sub(rb"%(..)", lambda code: bytes([int(code[1], 16)]), stem.encode())
    try:
        key = raw_key.decode()
    except UnicodeDecodeError:
        return None
    return key if key and escape_key(key) == stem else None


# --- live logs -------------------------------------------------------------------------------

LOG_SUFFIX = ".jsonl"


def log_name(key: str) -> str:
    """Return the name of a session's live log."""
    return escape_key(key) + LOG_SUFFIX


def key_of_log(name: str) -> str | None:
    """Return the key that a file name encodes; None for any other name.

    The result is also None for a very long key (see `has_long_key`), which only the file contains.
    """
    stem = name.removesuffix(LOG_SUFFIX)
    return unescape_key(stem) if stem != name else None


def has_long_key(name: str) -> bool:
    """Return whether a log name has a cut key and its hash; only the file has the whole key."""
    return bool(re.fullmatch(r"[a-z0-9_.%A-F-]{120}~[0-9a-f]{64}\.jsonl", name))


def foreign_names(key: str) -> set[str]:
    """Return the file names that other programs with JSONL sessions would use for this key."""
    return {re.sub(r"[:/\\]", "_", key) + LOG_SUFFIX, re.sub(r"[^\w-]", "_", key) + LOG_SUFFIX} - {
        log_name(key)
    }
