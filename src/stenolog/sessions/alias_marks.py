"""A mark in each store that is another one whenever a session was given aliases.

So that a new key costs nothing where nobody ever had an alias, and elsewhere no look through all
sessions for each. The aliases themselves stand in the meta of their sessions: the mark is made
before the first of them, and changed after each.
"""

import os
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

from stenolog.stores import disk
from stenolog.stores.base import Store
from stenolog.stores.in_memory import InMemoryStore
from stenolog.stores.jsonl import JSONLStore

FILE: Final = ".aliases"
"""The mark beside logs: a file, of which only the identity counts."""
TABLE: Final = "alias_mark"
"""The mark in a database."""

NONE_YET: Final = "none yet"
"""What stands for a store in which no session was ever given an alias."""

_in_memory: WeakKeyDictionary[InMemoryStore, int] = WeakKeyDictionary()


@runtime_checkable
class _HasDatabase(Protocol):
    @property
    def database(self) -> "_Database": ...

    @property
    def namespace(self) -> str: ...


class _Database(Protocol):
    def read(self) -> AbstractContextManager[Any]: ...

    def write(self) -> AbstractContextManager[Any]: ...


def current(store: Store) -> object:
    """The mark as it is now; None where nobody can tell, and every look must be made."""
    if isinstance(store, JSONLStore):
        try:
            found = (store.folder / FILE).lstat()
        except FileNotFoundError:
            return NONE_YET
        return (found.st_ino, found.st_mtime_ns)
    if isinstance(store, InMemoryStore):
        return _in_memory.get(store, NONE_YET)
    if isinstance(store, _HasDatabase):
        return _in_database(store)
    return None


def prepare(store: Store) -> None:
    """Have a mark before the first alias is given. Raises StoreUnavailable, OSError."""
    if current(store) == NONE_YET:
        change(store)


def change(store: Store) -> None:
    """Make it another one. Raises StoreUnavailable, OSError."""
    if isinstance(store, JSONLStore):
        folder = os.open(store.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            disk.replace_file(folder, FILE, b"Some sessions here have aliases.\n")
        finally:
            os.close(folder)
    elif isinstance(store, InMemoryStore):
        _in_memory[store] = _in_memory.get(store, 0) + 1
    elif isinstance(store, _HasDatabase):
        with store.database.write() as transaction:
            transaction.execute(
                f"CREATE TABLE IF NOT EXISTS {TABLE} (namespace TEXT PRIMARY KEY, given INTEGER)"
            )
            transaction.execute(
                f"INSERT INTO {TABLE} VALUES (?, 1)"  # noqa: S608 - the name is ours
                " ON CONFLICT (namespace) DO UPDATE SET given = given + 1",
                (store.namespace,),
            )


def _in_database(store: _HasDatabase) -> object:
    with store.database.read() as transaction:
        if not list(transaction.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (TABLE,))):
            return NONE_YET
        found = transaction.execute(
            f"SELECT given FROM {TABLE} WHERE namespace = ?",  # noqa: S608 - the name is ours
            (store.namespace,),
        )
        return tuple(found)
