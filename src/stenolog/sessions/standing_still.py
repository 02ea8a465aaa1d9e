"""Looking at logs and archives while nobody writes to them."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from stenolog.errors import StenologError
from stenolog.sessions.damage import Judged, judge
from stenolog.stores.jsonl import archive, trash
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.jsonl.table import flock

BUSY_TIMEOUT: Final = 5.0


def judge_file(
    directory: Directory, namespace: str, name: str, *, deleted: bool = False
) -> Judged | None:
    """What a log says; what looks unfinished is read again while nobody writes."""
    descriptor = directory.open(name)
    if descriptor is None:
        return None
    try:
        judged = judge(read_whole(descriptor), name, folder=namespace, deleted=deleted)
    finally:
        os.close(descriptor)
    if not judged.unsettled:
        return judged
    with standing_still(directory, name) as still:
        if still is None:
            return None
        return judge(read_whole(still), name, folder=namespace, deleted=deleted)


@contextmanager
def standing_still(directory: Directory, name: str) -> Iterator[int | None]:
    """A descriptor of a log while no writer touches it; None where there is none.

    Raises StoreBusy.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        descriptor = directory.open(name)
        if descriptor is None:
            yield None
            return
        try:
            flock(descriptor, deadline, f"the log {directory.path / name}")
            found = directory.stat(name)
            # Replaced while we waited: what is locked is not what the name stands for.
            if found is not None and os.path.samestat(found, os.fstat(descriptor)):
                yield descriptor
                return
        finally:
            # By name, because a child forked meanwhile has the same descriptor, and would keep it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def read_whole(descriptor: int) -> bytes:
    """All bytes of an open file. Raises OSError."""
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


@contextmanager
def trash_of(directory: Directory) -> Iterator[Directory | None]:
    """The folder of deleted logs; None where there is none that can be entered."""
    try:
        found = Directory(directory.path / trash.FOLDER, read_only=True)
    except StenologError:
        yield None
        return
    try:
        yield found
    finally:
        found.close()


@contextmanager
def folder_below(directory: Directory, *below: str) -> Iterator[int | None]:
    """A descriptor of a folder below; None where there is none that can be entered."""
    try:
        descriptor = directory.subfolder(*below, create=False)
    except OSError:
        descriptor = None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def names_in(folder: int | None) -> list[str]:
    """What is in a folder, sorted; nothing where there is none."""
    if folder is None:
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


@contextmanager
def archives_standing_still(directory: Directory, uid: str) -> Iterator[int | None]:
    """A descriptor of a folder of archives while nobody compacts. Raises StoreBusy."""
    with folder_below(directory, archive.FOLDER, uid) as folder:
        if folder is not None:
            what = f"the folder {directory.path / archive.FOLDER / uid}"
            flock(folder, time.monotonic() + BUSY_TIMEOUT, what)
        try:
            yield folder
        finally:
            if folder is not None:
                fcntl.flock(folder, fcntl.LOCK_UN)
