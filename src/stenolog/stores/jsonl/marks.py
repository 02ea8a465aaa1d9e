"""Marks beside the logs: a small file for each name, which grows whenever the mark changes."""

import os
from datetime import UTC, datetime

from stenolog.records import timestamp
from stenolog.stores import disk
from stenolog.stores.jsonl.directory import Directory, explained


def current(directory: Directory, name: str) -> str:
    """The mark as it is now; empty where it was never changed. Raises StoreUnavailable."""
    found = directory.stat(f".{name}")
    return "" if found is None else f"{found.st_ino}:{found.st_size}"


def change(directory: Directory, name: str) -> None:
    """Make it another one, durably. Raises StoreUnavailable."""
    # A line more, and no new file: two who do it at once are never in each other's way.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(f".{name}", flags, 0o600, dir_fd=directory.descriptor)
        try:
            disk.write_all(descriptor, f"{timestamp(datetime.now(UTC))} {name}\n".encode())
            disk.sync_file(descriptor)
        finally:
            os.close(descriptor)
        disk.sync_folder(directory.descriptor)
    except OSError as error:
        raise explained(error, f"writing {directory.path / f'.{name}'}") from error
