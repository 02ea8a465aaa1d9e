"""The folder of the legacy JSON store: the calls to the system that its files need."""

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

from stenolog.stores import disk, json_file

READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

Mark = tuple[int, int, int]
"""Tells one version of a file from another: inode, size, time of change."""


def session_names(folder: int) -> list[str]:
    """The files that may hold a session, by name."""
    with os.scandir(folder) as entries:
        return sorted(filter(json_file.is_session_name, (entry.name for entry in entries)))


def read(folder: int, name: str) -> bytes:
    """All of a file that is one, and no link. Raises OSError."""
    descriptor = os.open(name, READ, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def mark(folder: int, name: str) -> Mark | None:
    """That of a file as it is now; None where there is none."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def copy_apart(folder: int, name: str, end: str) -> None:
    """Have what a file holds under another name too, one that was free, before it is replaced.

    The name has this ending; with that of a session's file the copy is one, too. Raises OSError.
    """
    text = read(folder, name)
    for other in _names_apart(name, end):
        if mark(folder, other) is None:
            disk.replace_file(folder, other, text)
            return
        with suppress(OSError):
            if read(folder, other) == text:
                return  # who copied it was killed before the file was replaced


def _names_apart(name: str, end: str) -> Iterator[str]:
    if end != json_file.SUFFIX:
        yield name + end
    for number in count(2):
        stem = name.removesuffix(end)
        yield f"{stem}-{number}{end}" if stem != name else f"{name}{end}-{number}"


def refusal(directory: Path) -> str | None:
    """Why no file can be written to a folder, in words; None where one can. Makes the folder."""
    files = f"JSON files in {directory}"
    try:
        disk.make_private(directory)
    except OSError as error:
        return f"{files} ({error.strerror})"
    may = os.access(directory, os.W_OK | os.X_OK)
    return None if may else f"{files} (it may not be written)"
