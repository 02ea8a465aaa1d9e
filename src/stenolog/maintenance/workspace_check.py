"""The doctor: finds problems in a workspace of logs.

`log_damage.py` examines the bytes of a log. This module examines the folders and the archives, and
locks a file against writers where necessary. Only `repair.py` writes.
"""

import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from stenolog.errors import DamagedStore, StenologError, UsageError
from stenolog.maintenance.log_damage import (
    ASIDE_FOLDER,
    Kind,
    LogReport,
    describe_lost,
    examine_log,
    unreadable_log_finding,
)
from stenolog.records import Span, State
from stenolog.sessions.folders import NAMESPACE, check_stenolog_folder, check_workspace, log_folders
from stenolog.stores import file_names, spans
from stenolog.stores.admin import Finding, Report
from stenolog.stores.disk import (
    lock_until,
    release_lock,
    wait_for_lock,
)
from stenolog.stores.jsonl import archive, leases, trash
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.open_store import Address, open_store, parse_address
from stenolog.stores.sql.store import SQLStore
from stenolog.stores.sql.verification import examine_database, opening_error_finding

_STENOLOG_FOLDERS: Final = (archive.FOLDER, trash.FOLDER, leases.FOLDER)
BUSY_TIMEOUT_SECONDS: Final = 5.0
"""Maximum time that the doctor waits for the lock of a log or an archive folder."""


def examine(workspace: str | os.PathLike[str]) -> Report:
    """Return the problems of a workspace or a database, without writing anything.

    Every named agent and every namespace is checked. Raises UsageError if `workspace` is not a
    workspace, and StoreUnavailable or DamagedStore if it cannot be read.
    """
    address = parse_address(workspace)
    if address.engine in ("sqlite", "postgresql"):
        return _examine_database(workspace, address)
    if address.engine != "jsonl":
        raise UsageError(f"{workspace}: only a folder or a database can be examined")
    workspace_path = Path(address.path)
    check_workspace(workspace_path)
    check_stenolog_folder(workspace_path)
    reports = [examine_folder(workspace_path, folder) for folder in log_folders(workspace_path)]
    permission_problems = dict.fromkeys(
        problem for report in reports for problem in report.permission_problems
    )
    findings = [finding for report in reports for finding in report.findings]
    findings += map(_wide_permissions_finding, permission_problems)
    return Report(
        workspace=str(workspace_path),
        sessions=sum(report.logs for report in reports),
        findings=tuple(findings),
    )


def _examine_database(where: str | os.PathLike[str], address: Address) -> Report:
    file = Path(address.path)
    is_file = address.engine == "sqlite"
    try:
        with open_store(where, read_only=True) as store:
            assert isinstance(store, SQLStore), "the address names a database"
            place = store.database.address
            sessions, findings = examine_database(store.database)
    except DamagedStore as error:
        if not is_file:
            raise
        place, sessions, findings = str(file), 0, [opening_error_finding(error)]
    path = file.name if is_file else place
    located_findings = tuple(replace(finding, path=path) for finding in findings)
    return Report(workspace=place, sessions=sessions, findings=located_findings)


@dataclass(slots=True)
class FolderReport:
    """Results that are collected while a folder is examined."""

    namespace: str
    """Path of the folder below the workspace."""
    logs: int = 0
    findings: list[Finding] = field(default_factory=list)
    archives_by_uid: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    """The key of the session and the names of its archives, by uid."""
    purged_uids: set[str] = field(default_factory=set)
    """Uids of sessions that are being purged: their missing files are no problem."""
    logs_without_record: list[Finding] = field(default_factory=list)
    """Findings about live logs without an intact record."""
    foreign_logs: list[Finding] = field(default_factory=list)
    """Logs of other programs, reported together because there are often many."""
    may_hide_sessions: bool = False
    """Whether a file may belong to a session that this version of stenolog cannot read."""
    permission_problems: tuple[str, ...] = ()
    """Texts about folders with logs that other users may read."""


def examine_folder(workspace: Path, folder: str) -> FolderReport:
    """Examine one folder of logs, given as a path below the workspace.

    Raises StoreUnavailable or DamagedStore if the folder `sessions` itself cannot be read.
    """
    report = FolderReport(namespace=folder)
    try:
        directory = Directory(workspace / folder, read_only=True)
    except StenologError as error:
        if folder == NAMESPACE:
            raise
        report.findings.append(_unreadable_finding(folder, None, error))
        return report
    with closing(directory):
        _check_folder(directory, report)
    return report


def _check_folder(directory: Directory, report: FolderReport) -> None:
    # List the archives before reading the logs.
    # Otherwise, an archive that is created in between would be reported as unreferenced.
    archives_by_uid = list_archives(directory)
    for name in sorted(directory.list_names()):
        status = directory.file_status(name)
        if status is not None:
            _check_entry(directory, name, status, report)
    _check_trash(directory, report)
    # A log without a record may have lost the session that the remaining archives belong to.
    has_lost_session = not archives_by_uid.keys() <= report.archives_by_uid.keys()
    for finding in report.logs_without_record:
        lost_log_finding = unreadable_log_finding(finding.key, finding.path)
        report.findings.append(lost_log_finding if has_lost_session else finding)
    # A folder without logs of stenolog may belong to another program.
    if report.logs > len(report.foreign_logs):
        report.permission_problems = directory.problems
    if report.foreign_logs:
        report.findings.append(_foreign_logs_finding(directory, report.foreign_logs))
    for uid, files in archives_by_uid.items():
        _check_archives(directory, uid, files, report)


def _check_entry(
    directory: Directory, name: str, status: os.stat_result, report: FolderReport
) -> None:
    path = f"{report.namespace}/{name}"
    has_log_name = name.endswith(file_names.LOG_SUFFIX)
    if stat.S_ISDIR(status.st_mode) and name in _STENOLOG_FOLDERS:
        return
    if name in _STENOLOG_FOLDERS or (has_log_name and not stat.S_ISREG(status.st_mode)):
        report.findings.append(_wrong_file_type_finding(path, name, status))
        report.may_hide_sessions = True
    elif has_log_name:
        _check_log(directory, name, report)
    elif stat.S_ISDIR(status.st_mode) and name != ASIDE_FOLDER:
        report.may_hide_sessions = True


def _check_log(
    directory: Directory, name: str, report: FolderReport, *, parent: Directory | None = None
) -> None:
    """Examine a log. For a log in the trash, `parent` is the folder that contains the trash."""
    namespace = report.namespace if parent is None else f"{report.namespace}/{trash.FOLDER}"
    try:
        log_report = examine_log_file(directory, namespace, name, deleted=parent is not None)
    except (StenologError, OSError) as error:
        report.may_hide_sessions = True
        key = file_names.key_of_log(name) if parent is None else None
        report.findings.append(_unreadable_finding(f"{namespace}/{name}", key, error))
        return
    if log_report is None:
        return
    report.logs += 1
    for finding in log_report.findings:
        if finding.kind is Kind.FOREIGN_LOG:
            report.foreign_logs.append(finding)
        elif log_report.has_no_record:
            report.logs_without_record.append(finding)
        else:
            report.findings.append(finding)
    state = log_report.state
    if state is None:
        report.may_hide_sessions |= any(f.kind is Kind.NEWER_FORMAT for f in log_report.findings)
        return
    referenced_names: set[str] = set()
    report.findings += examine_archives(
        parent or directory, report.namespace, state, referenced_names
    )
    report.archives_by_uid[state.uid] = (state.key, referenced_names)


def examine_log_file(
    directory: Directory, namespace: str, name: str, *, deleted: bool = False
) -> LogReport | None:
    """Examine a log; None if it is missing. A log that may be growing is locked and read again."""
    descriptor = directory.open_log(name)
    if descriptor is None:
        return None
    with closing(descriptor):
        log_report = examine_log(read_file(descriptor), name, folder=namespace, deleted=deleted)
    if not log_report.may_be_growing:
        return log_report
    with lock_log(directory, name) as locked_descriptor:
        if locked_descriptor is None:
            return None
        return examine_log(read_file(locked_descriptor), name, folder=namespace, deleted=deleted)


# --- the trash -----------------------------------------------------------------


def _check_trash(directory: Directory, report: FolderReport) -> None:
    with open_trash(directory) as folder:
        if folder is None:
            return
        for name in sorted(folder.list_names()):
            path = f"{report.namespace}/{trash.FOLDER}/{name}"
            if (status := folder.file_status(name)) is None:
                continue
            if (entry := trash.parse_entry(name)) is not None and entry.purged:
                report.purged_uids.add(entry.uid)
                report.findings.append(_unfinished_purge_finding(folder, path, name))
            elif entry is not None and stat.S_ISREG(status.st_mode):
                _check_log(folder, name, report, parent=directory)
            elif name.endswith(file_names.LOG_SUFFIX):
                report.may_hide_sessions = True


# --- archives --------------------------------------------------------------------------------


def _check_archives(
    directory: Directory, uid: str, files: Sequence[str], report: FolderReport
) -> None:
    archive_folder = f"{report.namespace}/{archive.FOLDER}/{uid}"
    key, referenced_names = report.archives_by_uid.get(uid, (None, set[str]()))
    if (key is None and report.may_hide_sessions) or uid in report.purged_uids:
        return
    if set(files) <= referenced_names:
        return
    with lock_archives(directory, uid) as folder:
        for file in unreferenced_archives(directory, folder, uid, key):
            if file in files:
                report.findings.append(_unused_archive_finding(f"{archive_folder}/{file}", key))


def list_archives(directory: Directory) -> dict[str, list[str]]:
    """Return the names of the archive files of each session, by the uid of the session.

    Temporary files, whose names start with a dot, are left out: the next write replaces them.
    """
    archives = {}
    with open_subfolder(directory, archive.FOLDER) as all_archives_folder:
        for uid in list_folder(all_archives_folder):
            with open_subfolder(directory, archive.FOLDER, uid) as session_folder:
                if session_folder is not None:
                    names = list_folder(session_folder)
                    archives[uid] = [name for name in names if not name.startswith(".")]
    return archives


def unreferenced_archives(
    directory: Directory, folder: int | None, uid: str, key: str | None
) -> list[str]:
    """Return the archive files to which the session with this key does not refer.

    If `key` is None, no session owns the folder, and all its files are returned. The result is
    empty if the session or one of its archives cannot be read. The caller must lock the folder.
    """
    referenced_names: set[str] = set()
    if key is not None:
        state = _find_state(directory, uid, key)
        if state is None or list(examine_archives(directory, "", state, referenced_names)):
            return []
    return [file for file in list_folder(folder) if file not in referenced_names]


def _find_state(directory: Directory, uid: str, key: str) -> State | None:
    """Return the state of the live or deleted session with this uid; None if it is unreadable."""
    log_report = examine_log_file(directory, "", file_names.log_name(key))
    if log_report is not None and log_report.state is not None and log_report.state.uid == uid:
        return log_report.state
    with open_trash(directory) as folder:
        if folder is not None:
            for entry in trash.list_entries(directory):
                if entry.uid == uid:
                    log_report = examine_log_file(folder, "", entry.name, deleted=True)
                    return log_report.state if log_report is not None else None
    return None


def examine_archives(
    directory: Directory, namespace: str, state: State, referenced_names: set[str]
) -> Iterator[Finding]:
    """Yield findings about the archives of a session, and add their names to `referenced_names`."""
    archive_ref = state.archive
    while archive_ref is not None:
        referenced_names.add(archive_ref.name)
        path = f"{namespace}/{archive.FOLDER}/{state.uid}/{archive_ref.name}"
        all_seqs = [(archive_ref.first, archive_ref.last)]
        known_missing = [*state.void, *state.purged]
        try:
            content = archive.read_archive(directory, state.uid, archive_ref)
        except StenologError as error:
            yield _archive_finding(state.key, path, f"Unreadable archive: {error}.", all_seqs)
            return
        accounted_seqs = spans.union(((m.seq, m.seq) for m in content.messages), known_missing)
        lost = spans.minus(all_seqs, accounted_seqs)
        if not os.path.lexists(directory.path / content.path):
            missing_text = "The archive with the first messages of the session is missing."
            meaning = f"{missing_text} {describe_lost(lost)}"
            yield _archive_finding(state.key, path, meaning, lost, Kind.MISSING_ARCHIVE)
            return
        if any(not damaged_bytes.is_void for damaged_bytes in content.damaged) or lost:
            meaning = f"A part of the archive cannot be decompressed or read. {describe_lost(lost)}"
            yield _archive_finding(state.key, path, meaning, lost)
        archive_ref = content.previous if archive.is_before(content.previous, archive_ref) else None


def _archive_finding(
    key: str, path: str, meaning: str, lost: Sequence[Span], kind: Kind = Kind.DAMAGED_ARCHIVE
) -> Finding:
    advice = "Restore the file from a backup."
    return Finding(kind=kind, key=key, path=path, meaning=meaning, advice=advice, lost=tuple(lost))


# --- findings --------------------------------------------------------------------------------


def _wrong_file_type_finding(path: str, name: str, status: os.stat_result) -> Finding:
    """Return the finding for a path that is neither the expected log nor the expected folder."""
    expected = "a folder" if name in _STENOLOG_FOLDERS else "a log"
    is_link = stat.S_ISLNK(status.st_mode)
    found = "a symbolic link, which is not followed" if is_link else "something else"
    meaning = f"Expected {expected} of stenolog, but found {found}."
    advice = "Move it elsewhere and restore the expected file or folder."
    key = file_names.key_of_log(name)
    return Finding(kind=Kind.NOT_A_FILE, key=key, path=path, meaning=meaning, advice=advice)


def _unreadable_finding(path: str, key: str | None, error: Exception) -> Finding:
    """Return the finding for a log or a folder that could not be read."""
    meaning = f"The file or folder could not be read: {error}."
    advice = "Run `steno doctor` as the user who owns the file, and check the disk."
    return Finding(kind=Kind.UNREADABLE, key=key, path=path, meaning=meaning, advice=advice)


def _foreign_logs_finding(directory: Directory, findings: Sequence[Finding]) -> Finding:
    """Return one finding for all logs of other programs in a folder."""
    first_finding, *other_findings = findings
    if not other_findings:
        name = first_finding.path.rpartition("/")[2]
        return replace(first_finding, advice=f"Move it elsewhere; {directory.import_advice(name)}.")
    return replace(
        first_finding,
        key=None,
        where=f"and {len(other_findings):,} more",
        meaning="Another program wrote these files; stenolog neither reads nor changes them.",
        advice=f"Move them elsewhere; {directory.import_advice()}.",
    )


def _unused_archive_finding(path: str, key: str | None) -> Finding:
    """Return the finding for a file among archives to which the session does not refer.

    `key`: key of the session; None if the log of the session is missing or unreadable.
    """
    if key is None:
        # Not repairable: the archive may be the only copy of its messages.
        return Finding(
            kind=Kind.UNREFERENCED_ARCHIVE,
            path=path,
            meaning="No session refers to this archive: the log of its session is missing or "
            "damaged. The messages in the archive may exist nowhere else.",
            advice="Restore the log from a backup, or move the archive elsewhere.",
        )
    return Finding(
        kind=Kind.UNREFERENCED_ARCHIVE,
        key=key,
        path=path,
        meaning="The session does not refer to this archive: a compaction or a purge was "
        "interrupted.",
        advice="If a purge was interrupted, repeat it. If not, "
        f"--repair moves the archive into {ASIDE_FOLDER}/.",
        repairable=True,
    )


def _unfinished_purge_finding(folder: Directory, path: str, name: str) -> Finding:
    """Return the finding for a file that an interrupted purge left."""
    key, advice = None, "Delete the file."
    with suppress(StenologError):
        state = trash.read_head_state(folder, name)
        if state is not None:
            key, advice = state.key, "Purge the session again."
    meaning = "A purge was interrupted: the session is deleted, but its file is still there."
    return Finding(kind=Kind.LEFTOVER, key=key, path=path, meaning=meaning, advice=advice)


def _wide_permissions_finding(problem: str) -> Finding:
    meaning, _, advice = problem.partition("; ")
    return Finding(kind=Kind.WIDE_PERMISSIONS, path=".", meaning=f"{meaning}.", advice=advice)


# --- files and locks -------------------------------------------------------------------------


@contextmanager
def lock_log(directory: Directory, name: str) -> Iterator[int | None]:
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
def open_trash(directory: Directory) -> Iterator[Directory | None]:
    """Yield the folder of deleted logs; None if it cannot be opened."""
    try:
        folder = Directory(directory.path / trash.FOLDER, read_only=True)
    except StenologError:
        yield None
        return
    with closing(folder):
        yield folder


@contextmanager
def open_subfolder(directory: Directory, *path_parts: str) -> Iterator[int | None]:
    """Yield a descriptor of a subfolder; None if it cannot be opened."""
    descriptor = None
    with suppress(OSError):
        descriptor = directory.subfolder(*path_parts, create=False)
    with closing(descriptor) if descriptor is not None else nullcontext():
        yield descriptor


def list_folder(folder: int | None) -> list[str]:
    """Return the sorted names in a folder; an empty list if `folder` is None."""
    if folder is None:
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


@contextmanager
def lock_archives(directory: Directory, uid: str) -> Iterator[int | None]:
    """Yield a descriptor of a session's archive folder, locked against compaction.

    Yields None if the folder cannot be opened. Raises StoreBusy.
    """
    with open_subfolder(directory, archive.FOLDER, uid) as folder:
        if folder is None:
            yield None
            return
        folder_name = f"the folder {directory.path / archive.FOLDER / uid}"
        wait_for_lock(folder, seconds=BUSY_TIMEOUT_SECONDS, name=folder_name)
        try:
            yield folder
        finally:
            release_lock(folder)
