"""Which sessions a folder holds: by file name, and by a look inside."""

import os
from typing import Final

from stenolog.codec import parse_line
from stenolog.errors import StenologError
from stenolog.records import Record, StateRecord
from stenolog.stores.jsonl import names
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.jsonl.scan import gather

_HEAD: Final = 4 * 1024


def keys(directory: Directory, *, prefix: str, limit: int | None, after: str | None) -> list[str]:
    """Keys in the order of their bytes. Only files that come into question are opened."""
    candidates = []
    for name in directory.names():
        key = names.key_of(name)
        if key is None and names.is_long(name):
            key = _key_inside(directory, name)
        if key is not None and key.startswith(prefix):
            candidates.append((key.encode(), name))
    candidates.sort()
    start = b"" if after is None else after.encode("utf-8", "surrogatepass")
    found: list[str] = []
    for raw, name in candidates:
        if limit is not None and len(found) >= limit:
            break
        if raw > start and _key_inside(directory, name) == raw.decode():
            found.append(raw.decode())
    return found


def _key_inside(directory: Directory, name: str) -> str | None:
    """The key of a file that holds a session of ours; None for any other."""
    try:
        descriptor = directory.open(name)
    except StenologError:
        return None
    if descriptor is None:
        return None
    try:
        return _read_key(descriptor, name)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _read_key(descriptor: int, name: str) -> str | None:
    length = _HEAD
    while True:
        text = os.pread(descriptor, length, 0)
        whole = len(text) < length
        first = parse_line(text[: text.find(b"\n")]) if not whole else None
        if isinstance(first, StateRecord):
            return first.body.key
        records, _ = gather(text, offset=0)
        if whole and all(_is_first_state(record) for record in records):
            return None
        for record in records:
            if isinstance(record, StateRecord):
                return record.body.key
        if whole:
            return names.key_of(name)
        length *= 16


def _is_first_state(record: Record) -> bool:
    """Whether it is what a creator that was killed may have left, and nothing more."""
    if not isinstance(record, StateRecord):
        return False
    return record.seq == 1 and record.body.number == 0 and record.body.generation == 1
