"""Key ↔ file name of a live log: reversible (stores/names.py), and the names of other programs."""

import re

from stenolog.stores.names import escaped, unescaped

SUFFIX = ".jsonl"


def file_name(key: str) -> str:
    """The name of a session's live log."""
    return escaped(key) + SUFFIX


def key_of(name: str) -> str | None:
    """The key that a file name spells out; None for any other file.

    A key too long to be spelled out stands inside its file.
    """
    stem = name.removesuffix(SUFFIX)
    return unescaped(stem) if stem != name else None


def is_long(name: str) -> bool:
    """Whether this is the name of a log whose key must be looked up inside."""
    return bool(re.fullmatch(r"[a-z0-9_.%A-F-]{120}~[0-9a-f]{64}\.jsonl", name))


def reference_names(key: str) -> set[str]:
    """The names under which the reference systems would keep the same session."""
    return {
        re.sub(r"[:/\\]", "_", key) + SUFFIX,
        re.sub(r"[^\w-]", "_", key) + SUFFIX,
    } - {file_name(key)}
