"""Reads and checks logs and archives for the doctor, locked against writers."""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from stenolog.errors import StenologError
from stenolog.maintenance.log_damage import Finding, Kind, LogReport, describe_lost, examine_log
from stenolog.records import Span, State
from stenolog.stores import file_names, spans
from stenolog.stores.disk import lock_until
from stenolog.stores.jsonl import archive, trash
from stenolog.stores.jsonl.directory import Directory

BUSY_TIMEOUT: Final = 5.0


def examine_log_file(
    directory: Directory, namespace: str, name: str, *, deleted: bool = False
) -> LogReport | None:
    """Examine a log. A log that looks incomplete is read again under its lock."""
    descriptor = directory.open(name)
    if descriptor is None:
        return None
    try:
        log_report = examine_log(read_whole(descriptor), name, folder=namespace, deleted=deleted)
    finally:
        descriptor.close()
    if not log_report.may_be_growing:
        return log_report
    with locked_log(directory, name) as locked:
        if locked is None:
            return None
        return examine_log(read_whole(locked), name, folder=namespace, deleted=deleted)


@contextmanager
def locked_log(directory: Directory, name: str) -> Iterator[int | None]:
    """Yield a descriptor of a log that is locked against writers; None without a log.

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
            status = directory.stat(name)
            # The log was replaced during the wait: the locked file no longer has this name.
            if status is not None and os.path.samestat(status, os.fstat(descriptor)):
                yield descriptor
                return
        finally:
            descriptor.release()


def read_whole(descriptor: int) -> bytes:
    """Return all bytes of an open file. Raises OSError."""
    with open(descriptor, "rb", closefd=False) as file:
        return file.read()


@contextmanager
def opened_trash(directory: Directory) -> Iterator[Directory | None]:
    """Yield the folder of deleted logs; None if it cannot be opened."""
    try:
        folder = Directory(directory.path / trash.FOLDER, read_only=True)
    except StenologError:
        yield None
        return
    try:
        yield folder
    finally:
        folder.close()


@contextmanager
def opened_subfolder(directory: Directory, *below: str) -> Iterator[int | None]:
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
    """Return the sorted names in a folder; an empty list if `folder` is None."""
    if folder is None:
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


@contextmanager
def locked_archives(directory: Directory, uid: str) -> Iterator[int | None]:
    """Yield a descriptor of a folder of archives, locked against compaction. Raises StoreBusy."""
    with opened_subfolder(directory, archive.FOLDER, uid) as folder:
        if folder is not None:
            folder_name = f"the folder {directory.path / archive.FOLDER / uid}"
            lock_until(folder, time.monotonic() + BUSY_TIMEOUT, folder_name)
        try:
            yield folder
        finally:
            if folder is not None:
                fcntl.flock(folder, fcntl.LOCK_UN)


def examine_archives(
    directory: Directory, namespace: str, state: State, referenced: set[str]
) -> Iterator[Finding]:
    """Yield findings about the archives of a session, and add their names to `referenced`."""
    archive_ref = state.archive
    while archive_ref is not None:
        referenced.add(archive_ref.name)
        path = f"{namespace}/{archive.FOLDER}/{state.uid}/{archive_ref.name}"
        whole_span = [(archive_ref.first, archive_ref.last)]
        known_missing = [*state.void, *state.purged]
        try:
            opened = archive.read(directory, state.uid, archive_ref)
        except StenologError as error:
            yield _damaged_archive(state.key, path, f"It could not be read: {error}.", whole_span)
            return
        present = spans.union(((m.seq, m.seq) for m in opened.messages), known_missing)
        lost = spans.minus(whole_span, present)
        if not os.path.lexists(directory.path / opened.path):
            yield Finding(
                kind=Kind.MISSING_ARCHIVE,
                key=state.key,
                path=path,
                meaning="The archive with the first messages of the session is missing. "
                + describe_lost(lost),
                advice="Restore the file from a backup.",
                lost=tuple(lost),
            )
            return
        if any(not piece.known for piece in opened.bad) or lost:
            meaning = f"A part of the archive cannot be decompressed or read. {describe_lost(lost)}"
            yield _damaged_archive(state.key, path, meaning, lost)
        archive_ref = opened.before if archive.is_before(opened.before, archive_ref) else None


def _damaged_archive(key: str, path: str, meaning: str, lost: Sequence[Span]) -> Finding:
    return Finding(
        kind=Kind.DAMAGED_ARCHIVE,
        key=key,
        path=path,
        meaning=meaning,
        advice="Restore the file from a backup.",
        lost=tuple(lost),
    )


def list_archives(directory: Directory) -> dict[str, list[str]]:
    """Return the archive files by uid."""
    archives = {}
    with opened_subfolder(directory, archive.FOLDER) as top:
        for uid in names_in(top):
            with opened_subfolder(directory, archive.FOLDER, uid) as below:
                if below is not None:
                    archives[uid] = names_in(below)
    return archives


def unreferenced_archives(
    directory: Directory, folder: int | None, uid: str, key: str | None
) -> list[str]:
    """Return the archive files that the session of this key does not refer to.

    The result is empty if the session cannot be read. The caller has locked the folder.
    """
    referenced: set[str] = set()
    if key is not None:
        state = _state_of(directory, uid, key)
        if state is None or list(examine_archives(directory, "", state, referenced)):
            return []
    return [file for file in names_in(folder) if file not in referenced]


def _state_of(directory: Directory, uid: str, key: str) -> State | None:
    """Return the state of the session with this uid, live or deleted; None if unreadable."""
    log_report = examine_log_file(directory, "", file_names.log_name(key))
    if log_report is not None and log_report.state is not None and log_report.state.uid == uid:
        return log_report.state
    with opened_trash(directory) as folder:
        for entry in trash.entries(directory) if folder is not None else []:
            if entry.uid == uid and folder is not None:
                log_report = examine_log_file(folder, "", entry.name, deleted=True)
                return log_report.state if log_report is not None else None
    return None
