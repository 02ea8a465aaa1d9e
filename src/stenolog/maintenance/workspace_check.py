"""The doctor: finds problems in a workspace of logs.

`log_damage.py` examines the bytes of a log, and `log_files.py` examines the archives of a session.
This module examines the folders. Only `repair.py` writes.
"""

import fcntl
import os
import re
import shlex
import stat
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Final

from msgspec.structs import replace

from stenolog.errors import StenologError, UsageError
from stenolog.maintenance.log_damage import ASIDE_FOLDER, Kind
from stenolog.maintenance.log_files import (
    examine_archives,
    examine_log_file,
    list_archives,
    locked_archives,
    locked_log,
    names_in,
    opened_subfolder,
    opened_trash,
    unreferenced_archives,
)
from stenolog.sessions.folders import NAMESPACE, check_stenolog_folder, check_workspace, log_folders
from stenolog.stores import file_names
from stenolog.stores.catalog_file import CATALOG_NAME as CATALOG
from stenolog.stores.catalog_file import journal_name, lock_name
from stenolog.stores.disk import write_problem
from stenolog.stores.findings import Finding, Report
from stenolog.stores.jsonl import archive, leases, trash
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.open_store import open_store, parse_address

_STENOLOG_FOLDERS: Final = (archive.FOLDER, trash.FOLDER, leases.FOLDER)
_CATALOG_FILES: Final = (CATALOG, journal_name(CATALOG), lock_name(CATALOG))
TEMP_NAME: Final = re.compile(r"\.(.+\.jsonl(?:\.gz)?)\.new")
"""Pattern of the name of a temporary file that an interrupted write left."""


def examine(workspace: str | os.PathLike[str]) -> Report:
    """Return the problems of a workspace or a database, without writing anything.

    Every named agent and every namespace is checked. Raises UsageError if `workspace` is not a
    workspace, and StoreUnavailable or DamagedStore if it cannot be read.
    """
    parsed = parse_address(workspace)
    if parsed.engine == "sqlite":
        sqlite_doctor, file = sqlite_checks(), Path(parsed.path)
        if not file.exists():
            raise UsageError(f"there is no database at {file}; check the path")
        return _with_location(sqlite_doctor.examine(file), str(file), path=file.name)
    if parsed.engine == "postgresql":
        return _examine_postgres(workspace)
    if parsed.engine != "jsonl":
        raise UsageError(f"{workspace}: only a folder or a database can be examined")
    workspace_path = Path(parsed.path)
    check_workspace(workspace_path)
    check_stenolog_folder(workspace_path)
    folders = log_folders(workspace_path)
    reports = [examine_folder(workspace_path, folder) for folder in folders]
    # Without logs or a catalog of stenolog, a folder may belong to another program.
    stenolog_reports = [
        report
        for folder, report in zip(folders, reports, strict=True)
        if report.logs > len(report.foreign_logs) or (workspace_path / folder / CATALOG).exists()
    ]
    wide_modes = dict.fromkeys(mode for report in stenolog_reports for mode in report.wide_modes)
    findings = [finding for report in reports for finding in report.findings]
    if wide_modes:
        findings.append(_wide_permissions_finding(str(workspace_path), list(wide_modes)))
    problems: dict[str, str] = {}
    for folder in folders:
        with suppress(OSError):  # `examine_folder` has already reported this problem
            if (reason := write_problem(workspace_path / folder)) is not None:
                problems[folder] = reason
    if problems:
        findings.append(_not_writable_finding(list(problems), next(iter(problems.values()))))
    return Report(
        workspace=str(workspace_path),
        sessions=sum(report.logs for report in reports),
        findings=tuple(findings),
    )


def sqlite_checks() -> ModuleType:
    """Return the module that examines SQLite files. Raises UsageError without the driver."""
    # The driver is optional and slow to import.
    from stenolog.stores.sqlite.store import missing_driver

    try:
        from stenolog.stores.sqlite import file_check
    except ImportError as error:
        raise missing_driver(error) from error
    return file_check


def _examine_postgres(where: str | os.PathLike[str]) -> Report:
    with open_store(where, read_only=True) as store:
        # The driver is optional. If a store of this engine was opened, the driver is installed.
        from stenolog.stores.postgres import PostgresStore, database

        assert isinstance(store, PostgresStore), "the address names a PostgreSQL database"
        report = database.examine(store.database)
        return _with_location(report, store.database.address, path=store.database.address)


def _with_location(report: Report, workspace: str, *, path: str) -> Report:
    findings = tuple(replace(finding, path=path) for finding in report.findings)
    return replace(report, workspace=workspace, findings=findings)


@dataclass(slots=True)
class FolderReport:
    """Results that are collected while a folder is examined."""

    logs: int = 0
    findings: list[Finding] = field(default_factory=list)
    archives_by_uid: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    """The key of the session and the names of its archives, by uid."""
    purged_uids: set[str] = field(default_factory=set)
    """Uids of sessions that are being purged: their missing files are no problem."""
    foreign_logs: list[Finding] = field(default_factory=list)
    """Logs of other programs, reported together because there are often many."""
    may_hide_sessions: bool = False
    """Whether a file may belong to a session that this version of stenolog cannot read."""
    wide_modes: list[tuple[str, int]] = field(default_factory=list)


def examine_folder(workspace: Path, folder: str) -> FolderReport:
    """Examine one folder of logs, given as a path below the workspace.

    Raises StoreUnavailable, DamagedStore if the folder `sessions` itself cannot be read.
    """
    report = FolderReport()
    try:
        directory = Directory(workspace / folder, read_only=True)
    except StenologError as error:
        if folder == NAMESPACE:
            raise
        report.findings.append(_unreadable_finding(folder, None, error))
        return report
    with closing(directory):
        _check_folder(directory, workspace, folder, report)
    return report


def _check_folder(
    directory: Directory, workspace: Path, namespace: str, report: FolderReport
) -> None:
    # List the archives before reading the logs.
    # Otherwise, an archive that is created in between would be reported as unreferenced.
    archives_by_uid = list_archives(directory)
    path = Path(namespace)
    for parent_path in reversed((path, *path.parents)):
        _check_mode(report, str(parent_path), (workspace / parent_path).stat())
    for name in sorted(directory.list_names()):
        status = directory.file_status(name)
        if status is not None:
            _check_entry(directory, namespace, name, status, report)
    _check_trash(directory, namespace, report)
    _check_leases(directory, namespace, report)
    if report.foreign_logs:
        report.findings.append(_foreign_logs_finding(directory, report.foreign_logs))
    for uid, files in archives_by_uid.items():
        _check_archives(directory, namespace, uid, files, report)


def _check_entry(
    directory: Directory, namespace: str, name: str, status: os.stat_result, report: FolderReport
) -> None:
    path = f"{namespace}/{name}"
    leftover = TEMP_NAME.fullmatch(name)
    if (stat.S_ISDIR(status.st_mode) and name in _STENOLOG_FOLDERS) or name in _CATALOG_FILES:
        _check_mode(report, path, status)
    elif name in _STENOLOG_FOLDERS or (
        name.endswith(file_names.LOG_SUFFIX) and not stat.S_ISREG(status.st_mode)
    ):
        report.findings.append(_not_a_file_finding(path, name, status))
        report.may_hide_sessions = True
    elif leftover is not None:
        with locked_log(directory, leftover[1]):
            if directory.file_status(name) is not None:
                report.findings.append(_leftover_finding(path, file_names.key_of_log(leftover[1])))
    elif name.endswith(file_names.LOG_SUFFIX):
        _check_mode(report, path, status)
        _check_log(directory, namespace, name, report)
    elif stat.S_ISDIR(status.st_mode) and name != ASIDE_FOLDER:
        report.may_hide_sessions = True


def _check_log(
    directory: Directory,
    namespace: str,
    name: str,
    report: FolderReport,
    *,
    parent: Directory | None = None,
) -> None:
    """Examine a log. For a log in the trash, `parent` is the folder that contains the trash."""
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
        is_foreign = finding.kind is Kind.FOREIGN_LOG
        (report.foreign_logs if is_foreign else report.findings).append(finding)
    state = log_report.state
    if state is None:
        report.may_hide_sessions |= (
            bool(log_report.findings) and log_report.findings[0].kind is Kind.NEWER_FORMAT
        )
        return
    referenced: set[str] = set()
    root = namespace.removesuffix(f"/{trash.FOLDER}") if parent is not None else namespace
    report.findings += examine_archives(parent or directory, root, state, referenced)
    report.archives_by_uid[state.uid] = (state.key, referenced)


# --- the trash and the locks -----------------------------------------------------------------


def _check_trash(directory: Directory, namespace: str, report: FolderReport) -> None:
    with opened_trash(directory) as folder:
        if folder is None:
            return
        for name in sorted(folder.list_names()):
            path = f"{namespace}/{trash.FOLDER}/{name}"
            leftover = TEMP_NAME.fullmatch(name)
            if (status := folder.file_status(name)) is None:
                continue
            if leftover is not None:
                with locked_log(folder, leftover[1]):
                    if folder.file_status(name) is not None:
                        report.findings.append(_leftover_finding(path, None))
            elif (entry := trash.parse_entry(name)) is not None and entry.purged:
                report.purged_uids.add(entry.uid)
                report.findings.append(_unfinished_purge_finding(folder, path, name))
            elif entry is not None and stat.S_ISREG(status.st_mode):
                _check_mode(report, path, status)
                _check_log(folder, f"{namespace}/{trash.FOLDER}", name, report, parent=directory)
            elif name.endswith(file_names.LOG_SUFFIX):
                report.may_hide_sessions = True


def _check_leases(directory: Directory, namespace: str, report: FolderReport) -> None:
    with opened_subfolder(directory, leases.FOLDER) as folder:
        for name in names_in(folder):
            path = f"{namespace}/{leases.FOLDER}/{name}"
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with suppress(OSError):
                descriptor = os.open(name, flags, dir_fd=folder)
                try:
                    _check_mode(report, path, os.fstat(descriptor))
                    holder = _expired_holder(descriptor)
                finally:
                    os.close(descriptor)
                if holder is not None:
                    report.findings.append(_stalled_lease_finding(path, name, holder))


def _expired_holder(descriptor: int) -> leases.Holder | None:
    """Return the holder of a lease that has expired but is still locked; otherwise None."""
    holder = leases.read_holder(descriptor)
    if holder is None or datetime.fromisoformat(holder.until) >= datetime.now(UTC):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return None


# --- archives --------------------------------------------------------------------------------


def _check_archives(
    directory: Directory, namespace: str, uid: str, files: Sequence[str], report: FolderReport
) -> None:
    archive_folder = f"{namespace}/{archive.FOLDER}/{uid}"
    key, referenced = report.archives_by_uid.get(uid, (None, set[str]()))
    if (key is None and report.may_hide_sessions) or uid in report.purged_uids:
        return
    for file in files:
        # A temporary file may have been renamed since it was listed.
        with suppress(FileNotFoundError):
            status = (directory.path / archive.FOLDER / uid / file).lstat()
            _check_mode(report, f"{archive_folder}/{file}", status)
    if set(files) <= referenced:
        return
    with locked_archives(directory, uid) as folder:
        for file in unreferenced_archives(directory, folder, uid, key):
            if file in files:
                is_leftover = TEMP_NAME.fullmatch(file) is not None
                make_finding = _leftover_finding if is_leftover else _unreferenced_archive_finding
                report.findings.append(make_finding(f"{archive_folder}/{file}", key))


def _check_mode(report: FolderReport, path: str, status: os.stat_result) -> None:
    if status.st_mode & 0o077 and not stat.S_ISLNK(status.st_mode):
        report.wide_modes.append((path, stat.S_IMODE(status.st_mode)))


def _not_a_file_finding(path: str, name: str, status: os.stat_result) -> Finding:
    """Return the finding for a path that should be a log or a folder of stenolog but is not."""
    actual_kind = "something that is not a file"
    if stat.S_ISLNK(status.st_mode):
        actual_kind = "a symbolic link, which is not followed"
    elif stat.S_ISDIR(status.st_mode):
        actual_kind = "a folder"
    folders = {
        archive.FOLDER: "the folder of the archives",
        trash.FOLDER: "the folder of the deleted sessions",
        leases.FOLDER: "the folder of the lock files",
    }
    meaning = f"Expected {folders.get(name, 'a log')}, but found {actual_kind}."
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


def _leftover_finding(path: str, key: str | None) -> Finding:
    """Return the finding for a temporary file of an interrupted rewrite."""
    return Finding(
        kind=Kind.LEFTOVER,
        key=key,
        path=path,
        meaning="Temporary file of an interrupted rewrite of a log or an archive. No message is "
        "missing.",
        advice=f"--repair moves it into {ASIDE_FOLDER}/.",
        repairable=True,
    )


def _unreferenced_archive_finding(path: str, key: str | None) -> Finding:
    """Return the finding for an archive that no session refers to."""
    return Finding(
        kind=Kind.UNREFERENCED_ARCHIVE,
        key=key,
        path=path,
        meaning="No session refers to this archive: a compaction or a purge was interrupted, or "
        "the log of the session was deleted by hand.",
        advice="If a purge was interrupted, repeat it. If not, check whether a log is missing; "
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


def _stalled_lease_finding(path: str, name: str, holder: leases.Holder) -> Finding:
    """Return the finding for a lease that is held longer than it should be."""
    return Finding(
        kind=Kind.STALLED_LEASE,
        key=file_names.key_of_log(name.removesuffix(leases.SUFFIX)),
        path=path,
        meaning=f"{holder.describe()}, holds the lease of this session, which expired at "
        f"{holder.until}. No other process can start a turn.".replace("process", "Process", 1),
        advice="Check that process; the lease ends when the process ends.",
    )


def _not_writable_finding(folders: Sequence[str], reason: str) -> Finding:
    """Return one finding for all read-only folders, which usually share a disk."""
    return Finding(
        kind=Kind.NOT_WRITABLE,
        path=folders[0],
        where=f"and {len(folders) - 1:,} more" if len(folders) > 1 else "",
        meaning="The sessions can be read, but new messages cannot be stored.",
        advice=f"{reason}.",
    )


def _wide_permissions_finding(workspace: str, wide_modes: Sequence[tuple[str, int]]) -> Finding:
    """Return one finding for all paths that other users may read, with their modes."""
    (path, mode), *other_modes = wide_modes
    return Finding(
        kind=Kind.WIDE_PERMISSIONS,
        path=path,
        where=f"mode {mode:04o}" + (f", and {len(other_modes):,} more" if other_modes else ""),
        meaning="Other users of this machine may read these conversations.",
        advice=f"chmod -R go= {shlex.quote(workspace)}",
    )
