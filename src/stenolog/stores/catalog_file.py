"""The catalog file of a store: its name, and its deletion by a purge.

The package `catalog` reads and writes the file. A process that writes the catalog holds the flock
of the catalog's lock file. The catalog quotes messages, so a store deletes the catalog with every
purge. The next reader builds the catalog again.
"""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from stenolog.stores.disk import open_descriptor, sync_folder, wait_for_lock

CATALOG_NAME: Final = "catalog.db"
"""File name of the catalog in a folder of logs."""

_CATALOG_SUFFIX: Final = ".catalog"
_PLAIN_NAMESPACE: Final = re.compile(r"[a-z0-9_-]{1,64}")
"""Namespaces that a file name can contain unchanged, even on a file system that ignores case."""


def journal_name(name: str) -> str:
    """Return the name of SQLite's journal for a catalog."""
    return f"{name}-journal"


def lock_name(name: str) -> str:
    """Return the name of the lock file of a catalog."""
    return f"{name}.lock"


def catalog_path(file: Path, namespace: str) -> Path:
    """Return the path of the catalog of a namespace in this database file."""
    name = namespace
    if not _PLAIN_NAMESPACE.fullmatch(namespace):
        # `hashlib` is slow to import and rarely needed.
        from hashlib import blake2b

        name = f"~{blake2b(namespace.encode(), digest_size=16).hexdigest()}"
    return file.with_name(f"{file.name}-{name}{_CATALOG_SUFFIX}")


def find_catalogs(file: Path) -> list[Path]:
    """Return the paths of all catalogs of a database, even those with only a journal left.

    Raises OSError.
    """
    names = {path.name.removesuffix("-journal") for path in file.parent.iterdir()}
    prefix = f"{file.name}-"
    return [
        file.with_name(name)
        for name in sorted(names)
        if name.startswith(prefix) and name.endswith(_CATALOG_SUFFIX)
    ]


def delete_catalogs(file: Path, *, seconds: float) -> None:
    """Delete the catalogs of all namespaces of a database. Raises OSError, StoreBusy."""
    catalogs = find_catalogs(file)
    if not catalogs:
        return
    with open_descriptor(file.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as folder:
        for path in catalogs:
            delete_catalog(folder, path, seconds=seconds)


def delete_catalog(folder: int, path: Path, *, seconds: float) -> None:
    """Delete this catalog in the open folder durably, if it exists.

    Waits up to `seconds` for a program that writes the catalog. Raises OSError, StoreBusy.
    """
    names = (path.name, journal_name(path.name))
    if not any(_is_file(folder, name) for name in names):
        return
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    lock_file = open_descriptor(lock_name(path.name), flags, dir_fd=folder)
    try:
        wait_for_lock(lock_file, seconds=seconds, name=f"the catalog {path}")
        # Delete the journal last: a database without its journal may be incomplete.
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)  # guard: purge-drops-catalog
        sync_folder(folder)
    finally:
        lock_file.release()


def _is_file(folder: int, name: str) -> bool:
    """Return whether `name` exists and is not a folder."""
    try:
        return not stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
