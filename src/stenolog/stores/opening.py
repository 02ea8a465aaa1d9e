"""`open_store`: from a place to the store that lives there."""

import os
from pathlib import Path

from stenolog.errors import UsageError
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.jsonl import JSONLStore


def open_store(
    where: str | os.PathLike[str], *, namespace: str = "sessions", read_only: bool = False
) -> Store:
    """The store at a folder, or at `jsonl:FOLDER` or `memory:`. Nothing is migrated.

    Raises StoreUnavailable where it cannot be opened, UsageError where no engine takes it.
    """
    place = os.fspath(where)
    scheme, colon, rest = place.partition(":")
    if colon and scheme == "memory":
        return InMemoryStore()
    if colon and scheme == "jsonl":
        return JSONLStore(Path(rest), namespace=namespace, read_only=read_only)
    if colon and scheme in ("sqlite", "postgresql", "postgres"):
        raise UsageError(f"{scheme}: this version has no such engine yet; use a folder")
    return JSONLStore(Path(place), namespace=namespace, read_only=read_only)
