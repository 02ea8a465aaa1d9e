"""Reads and checks logs and archives for the doctor, under locks that keep writers away."""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import Final

from stenolog.errors import StenologError
from stenolog.maintenance.log_damage import Finding, Kind, LogReport, describe_lost, examine_log
from stenolog.records import Span, State
from stenolog.stores import file_names, spans
from stenolog.stores.disk import lock_until
from stenolog.stores.jsonl import archive, trash
from stenolog.stores.jsonl.directory import Directory

BUSY_TIMEOUT_SECONDS: Final = 5.0


def examine_log_file(
    directory: Directory, namespace: str, name: str, *, deleted: bool = False
) -> LogReport | None:
    """Examine a log. If the log looks incomplete, read it again under its lock."""
    descriptor = directory.open_log(name)
    if descriptor is None:
        return None
    with closing(descriptor):
        log_report = examine_log(read_file(descriptor), name, folder=namespace, deleted=deleted)
    if not log_report.may_be_growing:
        return log_report
    with locked_log(directory, name) as locked_descriptor:
        if locked_descriptor is None:
            return None
        return examine_log(read_file(locked_descriptor), name, folder=namespace, deleted=deleted)


@contextmanager
def locked_log(directory: Directory, name: str) -> Iterator[int | None]:
    """Yield a descriptor of a log that is locked against writers; None if the log is missing.

    Raises StoreBusy.
    """
    lock_deadline = time.monotonic() + BUSY_TIMEOUT_SECONDS
    while True:
        descriptor = directory.open_log(name)
        if descriptor is None:
            yield None
            return
        try:
            lock_until(descriptor, lock_deadline, f"the log {directory.path / name}")
            status = directory.file_status(name)
            # If the log was replaced during the wait, the locked file no longer has this name.
            if status is not None and os.path.samestat(status, os.fstat(descriptor)):
                yield descriptor
                return
        finally:
            descriptor.release()


def read_file(descriptor: int) -> bytes:
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
    with closing(folder):
        yield folder


@contextmanager
def opened_subfolder(directory: Directory, *path_parts: str) -> Iterator[int | None]:
    """Yield a descriptor of a subfolder; None if it cannot be opened."""
    descriptor = None
    with suppress(OSError):
        descriptor = directory.subfolder(*path_parts, create=False)
    with closing(descriptor) if descriptor is not None else nullcontext():
        yield descriptor


def names_in(folder: int | None) -> list[str]:
    """Return the sorted names in a folder; an empty list if `folder` is None."""
    if folder is None:
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


@contextmanager
def locked_archives(directory: Directory, uid: str) -> Iterator[int | None]:
    """Yield a descriptor of a session's archive folder, locked against compaction.

    Yields None if the folder cannot be opened. Raises StoreBusy.
    """
    with opened_subfolder(directory, archive.FOLDER, uid) as folder:
        if folder is not None:
            folder_name = f"the folder {directory.path / archive.FOLDER / uid}"
            lock_until(folder, time.monotonic() + BUSY_TIMEOUT_SECONDS, folder_name)
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
        all_seqs = [(archive_ref.first, archive_ref.last)]
        known_missing = [*state.void, *state.purged]
        try:
            content = archive.read_archive(directory, state.uid, archive_ref)
        except StenologError as error:
            yield _archive_finding(state.key, path, f"Unreadable archive: {error}.", all_seqs)
            return
        present_seqs = spans.union(((m.seq, m.seq) for m in content.messages), known_missing)
        lost = spans.minus(all_seqs, present_seqs)
        if not os.path.lexists(directory.path / content.path):
            missing_text = "The archive with the first messages of the session is missing."
            meaning = f"{missing_text} {describe_lost(lost)}"
            yield _archive_finding(state.key, path, meaning, lost, Kind.MISSING_ARCHIVE)
            return
        if any(not piece.is_void for piece in content.damaged) or lost:
            meaning = f"A part of the archive cannot be decompressed or read. {describe_lost(lost)}"
            yield _archive_finding(state.key, path, meaning, lost)
        archive_ref = content.previous if archive.is_before(content.previous, archive_ref) else None


def _archive_finding(
    key: str, path: str, meaning: str, lost: Sequence[Span], kind: Kind = Kind.DAMAGED_ARCHIVE
) -> Finding:
    advice = "Restore the file from a backup."
    return Finding(kind=kind, key=key, path=path, meaning=meaning, advice=advice, lost=tuple(lost))


def list_archives(directory: Directory) -> dict[str, list[str]]:
    """Return the names of the archive files of each session, by the uid of the session."""
    archives = {}
    with opened_subfolder(directory, archive.FOLDER) as all_archives_folder:
        for uid in names_in(all_archives_folder):
            with opened_subfolder(directory, archive.FOLDER, uid) as session_folder:
                if session_folder is not None:
                    archives[uid] = names_in(session_folder)
    return archives


def unreferenced_archives(
    directory: Directory, folder: int | None, uid: str, key: str | None
) -> list[str]:
    """Return the archive files that the session of this key does not refer to.

    The result is empty if the session cannot be read. The caller must have locked the folder.
    """
    referenced: set[str] = set()
    if key is not None:
        state = _state_of(directory, uid, key)
        if state is None or list(examine_archives(directory, "", state, referenced)):
            return []
    return [file for file in names_in(folder) if file not in referenced]


def _state_of(directory: Directory, uid: str, key: str) -> State | None:
    """Return the state of the live or deleted session with this uid; None if it is unreadable."""
    log_report = examine_log_file(directory, "", file_names.log_name(key))
    if log_report is not None and log_report.state is not None and log_report.state.uid == uid:
        return log_report.state
    with opened_trash(directory) as folder:
        if folder is not None:
            for entry in trash.list_entries(directory):
                if entry.uid == uid:
                    log_report = examine_log_file(folder, "", entry.name, deleted=True)
                    return log_report.state if log_report is not None else None
    return None
