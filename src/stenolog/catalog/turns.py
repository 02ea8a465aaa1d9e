"""In which sessions somebody has the turn right now, as far as a store can tell."""

import fcntl
import os
import time
from collections.abc import Collection
from contextlib import suppress

from stenolog.catalog.statements import statements
from stenolog.catalog.tables import HasDatabase, schema_of
from stenolog.stores.base import Store
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.jsonl.leases import FOLDER, lock_name


def held(store: Store, keys: Collection[str]) -> set[str]:
    """Those of the keys whose lease somebody holds; none where the store does not tell."""
    if not keys:
        return set()
    if isinstance(store, JSONLStore):
        return _locked(store, keys)
    # Who has one kind of store does not wait for the others.
    if isinstance(store, HasDatabase) and (schema := schema_of(store)) is not None:
        from stenolog.catalog.postgres.statements import statements as of_schema

        with store.database.read() as transaction:
            names = transaction.execute(of_schema(schema)["held"], (store.namespace,))
            return {name.decode() for (name,) in names}.intersection(keys)
    if isinstance(store, HasDatabase):
        from stenolog.stores.sqlite.lease import is_held

        wanted = set(keys)
        with store.database.read() as transaction:
            found = transaction.execute(statements()["held"], (store.namespace, time.time()))
            return {key for key, *lease in found if key in wanted and is_held(*lease)}
    from stenolog.stores.in_memory import InMemoryStore

    if isinstance(store, InMemoryStore):
        return {key for key, lease in store._leases.items() if key in keys and not lease.lost}
    return set()


def _locked(store: JSONLStore, keys: Collection[str]) -> set[str]:
    try:
        folder = os.open(
            store.folder / FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except OSError:
        return set()  # nobody ever had a turn here
    try:
        with os.scandir(folder) as entries:
            names = {entry.name for entry in entries}
        return {
            key for key in keys if (name := lock_name(key)) in names and _is_locked(folder, name)
        }
    finally:
        os.close(folder)


def _is_locked(folder: int, name: str) -> bool:
    """Whether somebody has the lock; for as long as this looks, nobody can take it."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        return False
    finally:
        os.close(descriptor)
