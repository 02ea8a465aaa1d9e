"""File names of live logs: a reversible mapping from keys, and the names other programs use."""

import re

from stenolog.stores.file_names import escaped, unescaped

SUFFIX = ".jsonl"


def file_name(key: str) -> str:
    """Return the name of a session's live log."""
    return escaped(key) + SUFFIX


def key_of(name: str) -> str | None:
    """Return the key that a file name encodes; None for any other file.

    The name of a very long key does not contain it: the key is read from the file.
    """
    stem = name.removesuffix(SUFFIX)
    return unescaped(stem) if stem != name else None


def is_long(name: str) -> bool:
    """Return whether this is the name of a log whose key must be read from the file."""
    return bool(re.fullmatch(r"[a-z0-9_.%A-F-]{120}~[0-9a-f]{64}\.jsonl", name))


def reference_names(key: str) -> set[str]:
    """Return the file names that the reference systems would use for the same session."""
    return {
        re.sub(r"[:/\\]", "_", key) + SUFFIX,
        re.sub(r"[^\w-]", "_", key) + SUFFIX,
    } - {file_name(key)}
