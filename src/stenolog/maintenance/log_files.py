"""Reading and checking of logs and archives for the doctor, locked against writers."""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from stenolog.errors import StenologError
from stenolog.maintenance.log_damage import Finding, Judged, Kind, judge, lost_in_words
from stenolog.records import Span, State
from stenolog.stores import file_names, spans
from stenolog.stores.disk import lock_until
from stenolog.stores.jsonl import archive, trash
from stenolog.stores.jsonl.directory import Directory

BUSY_TIMEOUT: Final = 5.0


def judge_file(
    directory: Directory, namespace: str, name: str, *, deleted: bool = False
) -> Judged | None:
    """Judge a log; one that looks incomplete is read again under its lock."""
    descriptor = directory.open(name)
    if descriptor is None:
        return None
    try:
        judged = judge(read_whole(descriptor), name, folder=namespace, deleted=deleted)
    finally:
        descriptor.close()
    if not judged.unsettled:
        return judged
    with standing_still(directory, name) as still:
        if still is None:
            return None
        return judge(read_whole(still), name, folder=namespace, deleted=deleted)


@contextmanager
def standing_still(directory: Directory, name: str) -> Iterator[int | None]:
    """Yield a descriptor of a log that is locked against writers; None if there is no log.

    Raises StoreBusy.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT
    while True:
        descriptor = directory.open(name)
        if descriptor is None:
            yield None
            return
        try:
            lock_until(descriptor, deadline, f"the log {directory.path / name}")
            found = directory.stat(name)
            # Replaced while waiting: the locked file no longer has this name.
            if found is not None and os.path.samestat(found, os.fstat(descriptor)):
                yield descriptor
                return
        finally:
            descriptor.release()


def read_whole(descriptor: int) -> bytes:
    """Return all bytes of an open file. Raises OSError."""
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


@contextmanager
def trash_of(directory: Directory) -> Iterator[Directory | None]:
    """Yield the folder of deleted logs; None if it cannot be opened."""
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
    """Yield a descriptor of a subfolder; None if it cannot be opened."""
    try:
        descriptor = directory.subfolder(*below, create=False)
    except OSError:
        descriptor = None
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            descriptor.close()


def names_in(folder: int | None) -> list[str]:
    """Return the sorted names in a folder; none for None."""
    if folder is None:
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


@contextmanager
def archives_standing_still(directory: Directory, uid: str) -> Iterator[int | None]:
    """Yield a descriptor of a folder of archives, locked against compaction. Raises StoreBusy."""
    with folder_below(directory, archive.FOLDER, uid) as folder:
        if folder is not None:
            what = f"the folder {directory.path / archive.FOLDER / uid}"
            lock_until(folder, time.monotonic() + BUSY_TIMEOUT, what)
        try:
            yield folder
        finally:
            if folder is not None:
                fcntl.flock(folder, fcntl.LOCK_UN)


def archives_of(
    directory: Directory, namespace: str, state: State, reached: set[str]
) -> Iterator[Finding]:
    """Yield findings about the archives of a session, and add their names to `reached`."""
    named = state.archive
    while named is not None:
        reached.add(named.name)
        path = f"{namespace}/{archive.FOLDER}/{state.uid}/{named.name}"
        whole = [(named.first, named.last)]
        gone = [*state.void, *state.purged]
        try:
            opened = archive.read(directory, state.uid, named)
        except StenologError as error:
            yield _damaged_archive(state.key, path, f"It could not be read: {error}.", whole)
            return
        held = spans.union(((m.seq, m.seq) for m in opened.messages), gone)
        lost = spans.minus(whole, held)
        if not os.path.lexists(directory.path / opened.path):
            yield Finding(
                kind=Kind.MISSING_ARCHIVE,
                key=state.key,
                path=path,
                meaning=f"The session's beginning was here. {lost_in_words(lost)}",
                advice="Put the file back from a backup.",
                lost=tuple(lost),
            )
            return
        if any(not piece.known for piece in opened.bad) or lost:
            meaning = f"Part of it cannot be unpacked or read. {lost_in_words(lost)}"
            yield _damaged_archive(state.key, path, meaning, lost)
        named = opened.before if archive.is_before(opened.before, named) else None


def _damaged_archive(key: str, path: str, meaning: str, lost: Sequence[Span]) -> Finding:
    return Finding(
        kind=Kind.DAMAGED_ARCHIVE,
        key=key,
        path=path,
        meaning=meaning,
        advice="Put the file back from a backup.",
        lost=tuple(lost),
    )


def listed_archives(directory: Directory) -> dict[str, list[str]]:
    """Return the archive files by uid."""
    found = {}
    with folder_below(directory, archive.FOLDER) as top:
        for uid in names_in(top):
            with folder_below(directory, archive.FOLDER, uid) as below:
                if below is not None:
                    found[uid] = names_in(below)
    return found


def spare_archives(
    directory: Directory, folder: int | None, uid: str, key: str | None
) -> list[str]:
    """Return the files in a folder of archives that the session of this key does not refer to.

    Returns none if the session cannot be read. The folder must be locked.
    """
    reached: set[str] = set()
    if key is not None:
        state = _state_of(directory, uid, key)
        if state is None or list(archives_of(directory, "", state, reached)):
            return []
    return [file for file in names_in(folder) if file not in reached]


def _state_of(directory: Directory, uid: str, key: str) -> State | None:
    """Return the state of the session with this uid, live or deleted; None if unreadable."""
    judged = judge_file(directory, "", file_names.log_name(key))
    if judged is not None and judged.state is not None and judged.state.uid == uid:
        return judged.state
    with trash_of(directory) as folder:
        for entry in trash.entries(directory) if folder is not None else []:
            if entry.uid == uid and folder is not None:
                judged = judge_file(folder, "", entry.name, deleted=True)
                return judged.state if judged is not None else None
    return None
