"""`open_store`: from a place to the store that lives there.

An engine is imported when it is asked for: nobody waits for the others.
"""

import os

from stenolog.errors import UsageError
from stenolog.stores.base import Store


def open_store(
    where: str | os.PathLike[str], *, namespace: str = "sessions", read_only: bool = False
) -> Store:
    """The store at a folder, or at `jsonl:FOLDER` or `memory:`. Nothing is migrated.

    Raises StoreUnavailable where it cannot be opened, UsageError where no engine takes it.
    """
    if not isinstance(where, str):
        return _folder(where, namespace, read_only=read_only)
    scheme, colon, rest = where.partition(":")
    if colon and scheme == "memory":
        if rest or read_only:
            raise UsageError("memory: is empty at first; it takes no name and is not read-only")
        from stenolog.stores.in_memory import InMemoryStore

        return InMemoryStore()
    if colon and scheme == "jsonl":
        return _folder(rest, namespace, read_only=read_only)
    if colon and scheme in ("sqlite", "postgresql", "postgres"):
        raise UsageError(f"{scheme}: this version has no such engine yet; use a folder")
    if not where or "://" in where:
        raise UsageError(f"{where!r}: no engine takes that; name a folder")
    if where.startswith("~"):
        where = os.path.expanduser(where)  # noqa: PTH111  pathlib takes a while to import
    return _folder(where, namespace, read_only=read_only)


def _folder(place: str | os.PathLike[str], namespace: str, *, read_only: bool) -> Store:
    from stenolog.stores.jsonl import JSONLStore

    return JSONLStore(place, namespace=namespace, read_only=read_only)
