"""`open_store`: from a place to the store that lives there.

An engine is imported when it is asked for: nobody waits for the others.
"""

import os
from typing import Any, Final

from stenolog.errors import StenologError, UsageError
from stenolog.stores.base import Store

_DATABASE: Final = b"SQLite format 3\0"
"""How a file begins that SQLite made."""


def open_store(
    where: str | os.PathLike[str], *, namespace: str = "sessions", read_only: bool = False
) -> Store:
    """The store at a folder, or at `jsonl:FOLDER`, `sqlite:FILE` or `memory:`.

    `sqlite:FILE?synchronous=normal&cache_kb=512` sets what SQLiteStore takes. Nothing is migrated.
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
    if colon and scheme == "sqlite":
        return _open_sqlite(rest, namespace=namespace, read_only=read_only)
    if colon and scheme in ("postgresql", "postgres"):
        raise UsageError(f"{scheme}: this version has no such engine yet; use a folder")
    if not where or "://" in where:
        raise UsageError(f"{where!r}: no engine takes that; name a folder")
    return _folder(_at_home(where), namespace, read_only=read_only)


def _folder(place: str | os.PathLike[str], namespace: str, *, read_only: bool) -> Store:
    from stenolog.stores.jsonl import JSONLStore

    try:
        return JSONLStore(place, namespace=namespace, read_only=read_only)
    except StenologError:
        check_no_database(place)
        raise


def check_no_database(place: str | os.PathLike[str]) -> None:
    """Raise UsageError where a file of SQLite's was named as if it were a folder."""
    try:
        with open(place, "rb") as file:  # noqa: PTH123 - pathlib takes a while to import
            found = file.read(len(_DATABASE))
    except OSError:
        return
    if found == _DATABASE:
        name = os.fspath(place)
        raise UsageError(f"{name} is a database, and no folder; name it as sqlite:{name}")


def _at_home(place: str) -> str:
    # pathlib takes a while to import.
    return os.path.expanduser(place) if place.startswith("~") else place  # noqa: PTH111


def _open_sqlite(rest: str, *, namespace: str, read_only: bool) -> Store:
    from stenolog.stores.sqlite import SQLiteStore

    file, _, parameters = rest.partition("?")
    if not file:
        raise UsageError("sqlite: names a file, as in sqlite:./workspace/sessions.db")
    if file == ":memory:":
        raise UsageError("sqlite: keeps sessions in a file; memory: keeps them in this process")
    return SQLiteStore(
        _at_home(file),
        namespace=namespace,
        read_only=read_only,
        **_sqlite_parameters(parameters),
    )


def _sqlite_parameters(text: str) -> dict[str, Any]:
    """What stands behind the question mark. Raises UsageError."""
    found: dict[str, Any] = {}
    for part in text.split("&") if text else ():
        name, _, value = part.partition("=")
        if name == "synchronous" and value in ("full", "normal"):
            found[name] = value
        elif name == "cache_kb" and value.isascii() and value.isdigit() and int(value) > 0:
            found[name] = int(value)
        else:
            raise UsageError(
                f"sqlite: {part!r} is not accepted; synchronous=full, synchronous=normal and "
                "cache_kb=NUMBER are, joined by &"
            )
    return found
