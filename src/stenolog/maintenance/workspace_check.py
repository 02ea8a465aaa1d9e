"""The doctor: finds problems in a workspace of logs.

`log_damage.py` judges the bytes of a log, `log_files.py` its archives; this module checks the
folders. It writes nothing; `repair.py` does.
"""

import fcntl
import os
import re
import shlex
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Final

from msgspec.structs import replace

from stenolog.errors import StenologError, UsageError
from stenolog.maintenance.log_damage import ASIDE, Kind
from stenolog.maintenance.log_files import (
    archives_of,
    archives_standing_still,
    folder_below,
    judge_file,
    listed_archives,
    names_in,
    spare_archives,
    standing_still,
    trash_of,
)
from stenolog.sessions.folders import NAMESPACE, check_is_ours, check_workspace, log_folders
from stenolog.stores import file_names
from stenolog.stores.catalog_file import NAME as CATALOG
from stenolog.stores.catalog_file import journal_name, lock_name
from stenolog.stores.disk import write_problem
from stenolog.stores.findings import Finding, Report
from stenolog.stores.jsonl import archive, leases, trash
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.open_store import address, open_store

_FOLDERS: Final = (archive.FOLDER, trash.FOLDER, leases.FOLDER)
_CATALOG: Final = (CATALOG, journal_name(CATALOG), lock_name(CATALOG))
LEFTOVER: Final = re.compile(r"\.(.+\.jsonl(?:\.gz)?)\.new")
"""Name of a temporary file of an unfinished write."""


def examine(workspace: str | os.PathLike[str]) -> Report:
    """Return the problems of a workspace or a database; nothing is written.

    Covers every named agent and every namespace. Raises UsageError if this is not a workspace,
    StoreUnavailable or DamagedStore if it cannot be read.
    """
    found = address(workspace)
    if found.engine == "sqlite":
        doctor, file = sqlite_doctor(), Path(found.path)
        if not file.exists():
            raise UsageError(f"there is no database at {file}; is the name right?")
        return _report(doctor.examine(file), str(file), path=file.name)
    if found.engine == "postgresql":
        return _examine_server(workspace)
    if found.engine != "jsonl":
        raise UsageError(f"{workspace}: only a folder or a database can be examined")
    place = Path(found.path)
    check_workspace(place)
    check_is_ours(place)
    folders = log_folders(place)
    all_seen = [examine_folder(place, folder) for folder in folders]
    wide = dict.fromkeys(one for seen in all_seen for one in seen.open_to_others)
    told = [finding for seen in all_seen for finding in seen.findings]
    if wide:
        told.append(_wide_permissions(str(place), list(wide)))
    shut = {folder: why for folder in folders if (why := _refusal(place / folder)) is not None}
    if shut:
        told.append(_not_writable(list(shut), next(iter(shut.values()))))
    return Report(
        workspace=str(place),
        sessions=sum(seen.logs for seen in all_seen),
        findings=tuple(told),
    )


def _refusal(folder: Path) -> str | None:
    with suppress(OSError):  # the examination has already reported it
        return write_problem(folder)
    return None


def sqlite_doctor() -> ModuleType:
    """Return the module that examines SQLite files. Raises UsageError without the driver."""
    # The driver is optional and slow to import.
    from stenolog.stores.sqlite.store import missing_driver

    try:
        from stenolog.stores.sqlite import file_check as verify
    except ImportError as error:
        raise missing_driver(error) from error
    return verify


def _examine_server(where: str | os.PathLike[str]) -> Report:
    with open_store(where, read_only=True) as store:
        # The driver is optional, and installed if a store of this engine was opened.
        from stenolog.stores.postgres import PostgresStore
        from stenolog.stores.postgres import database as verify

        assert isinstance(store, PostgresStore), "it is the engine of this place"
        found = verify.examine(store.database)
        return _report(found, store.database.address, path=store.database.address)


def _report(found: Report, workspace: str, *, path: str) -> Report:
    findings = tuple(replace(one, path=path) for one in found.findings)
    return replace(found, workspace=workspace, findings=findings)


@dataclass(slots=True)
class Seen:
    """Running results of examining a folder."""

    logs: int = 0
    findings: list[Finding] = field(default_factory=list)
    chains: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    """The key of the session and the names of its archives, by uid."""
    purged: set[str] = field(default_factory=set)
    """Uids of sessions that are being purged: their missing files are no problem."""
    foreign: list[Finding] = field(default_factory=list)
    """Logs of other programs, reported together because there are often many."""
    obscure: bool = False
    """A file here may belong to a session that this version cannot read."""
    open_to_others: list[tuple[str, int]] = field(default_factory=list)


def examine_folder(workspace: Path, folder: str) -> Seen:
    """Examine one folder of logs, given as a path below the workspace.

    Raises StoreUnavailable, DamagedStore if the folder `sessions` itself cannot be read.
    """
    seen = Seen()
    try:
        directory = Directory(workspace / folder, read_only=True)
    except StenologError as error:
        if folder == NAMESPACE:
            raise
        seen.findings.append(_unreadable(folder, None, error))
        return seen
    try:
        _look_at_folder(directory, workspace, folder, seen)
    finally:
        directory.close()
    return seen


def _look_at_folder(directory: Directory, workspace: Path, namespace: str, seen: Seen) -> None:
    # List the archives before reading the logs that refer to them: then an archive created in
    # between is not reported.
    listed = listed_archives(directory)
    path = Path(namespace)
    for above in reversed((path, *path.parents)):
        _look_at_mode(seen, str(above), (workspace / above).stat())
    for name in sorted(directory.list_names()):
        found = directory.stat(name)
        if found is not None:
            _look_at_entry(directory, namespace, name, found, seen)
    _look_at_trash(directory, namespace, seen)
    _look_at_locks(directory, namespace, seen)
    if seen.foreign:
        seen.findings.append(_foreign_logs(directory, seen.foreign))
    for uid, files in listed.items():
        _look_at_archives(directory, namespace, uid, files, seen)


def _look_at_entry(
    directory: Directory, namespace: str, name: str, found: os.stat_result, seen: Seen
) -> None:
    path = f"{namespace}/{name}"
    leftover = LEFTOVER.fullmatch(name)
    if (stat.S_ISDIR(found.st_mode) and name in _FOLDERS) or name in _CATALOG:
        _look_at_mode(seen, path, found)
    elif name in _FOLDERS or (
        name.endswith(file_names.LOG_SUFFIX) and not stat.S_ISREG(found.st_mode)
    ):
        seen.findings.append(_not_a_file(path, name, found))
        seen.obscure = True
    elif leftover is not None:
        with standing_still(directory, leftover[1]):
            if directory.stat(name) is not None:
                seen.findings.append(_leftover_file(path, file_names.key_of_log(leftover[1])))
    elif name.endswith(file_names.LOG_SUFFIX):
        _look_at_mode(seen, path, found)
        _look_at_log(directory, namespace, name, seen)
    elif stat.S_ISDIR(found.st_mode) and name != ASIDE:
        seen.obscure = True


def _look_at_log(
    directory: Directory, namespace: str, name: str, seen: Seen, *, above: Directory | None = None
) -> None:
    """Examine a log; `above`: the log is deleted, and this is the folder above the trash."""
    try:
        judged = judge_file(directory, namespace, name, deleted=above is not None)
    except (StenologError, OSError) as error:
        seen.obscure = True
        key = file_names.key_of_log(name) if above is None else None
        seen.findings.append(_unreadable(f"{namespace}/{name}", key, error))
        return
    if judged is None:
        return
    seen.logs += 1
    for finding in judged.findings:
        if finding.kind is Kind.FOREIGN_LOG:
            seen.foreign.append(finding)
        else:
            seen.findings.append(finding)
    state = judged.state
    if state is None:
        seen.obscure |= bool(judged.findings) and judged.findings[0].kind is Kind.NEWER_FORMAT
        return
    reached: set[str] = set()
    root = namespace.removesuffix(f"/{trash.FOLDER}") if above is not None else namespace
    found = archives_of(above or directory, root, state, reached)
    seen.findings += found
    seen.chains[state.uid] = (state.key, reached)


# --- the trash and the locks -----------------------------------------------------------------


def _look_at_trash(directory: Directory, namespace: str, seen: Seen) -> None:
    with trash_of(directory) as folder:
        for name in sorted(folder.list_names()) if folder is not None else []:
            found = folder.stat(name) if folder is not None else None
            path = f"{namespace}/{trash.FOLDER}/{name}"
            leftover = LEFTOVER.fullmatch(name)
            if folder is None or found is None:
                continue
            if leftover is not None:
                with standing_still(folder, leftover[1]):
                    if folder.stat(name) is not None:
                        seen.findings.append(_leftover_file(path, None))
            elif (entry := trash.entry_of(name)) is not None and entry.purged:
                seen.purged.add(entry.uid)
                seen.findings.append(_unfinished_purge(folder, path, name))
            elif entry is not None and stat.S_ISREG(found.st_mode):
                _look_at_mode(seen, path, found)
                above = f"{namespace}/{trash.FOLDER}"
                _look_at_log(folder, above, name, seen, above=directory)
            elif name.endswith(file_names.LOG_SUFFIX):
                seen.obscure = True


def _look_at_locks(directory: Directory, namespace: str, seen: Seen) -> None:
    with folder_below(directory, leases.FOLDER) as folder:
        for name in names_in(folder):
            path = f"{namespace}/{leases.FOLDER}/{name}"
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with suppress(OSError):
                descriptor = os.open(name, flags, dir_fd=folder)
                try:
                    _look_at_mode(seen, path, os.fstat(descriptor))
                    holder = _stalled(descriptor)
                finally:
                    os.close(descriptor)
                if holder is not None:
                    seen.findings.append(_stalled_lease(path, name, holder))


def _stalled(descriptor: int) -> leases.Holder | None:
    """Return the holder of an expired lease that is still locked."""
    holder = leases.read_holder(descriptor)
    now = datetime.now(UTC)
    if holder is None or datetime.fromisoformat(holder.until) >= now:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return holder
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return None


# --- archives --------------------------------------------------------------------------------


def _look_at_archives(
    directory: Directory, namespace: str, uid: str, files: Sequence[str], seen: Seen
) -> None:
    above = f"{namespace}/{archive.FOLDER}/{uid}"
    key, reached = seen.chains.get(uid, (None, set[str]()))
    if (key is None and seen.obscure) or uid in seen.purged:
        return
    for file in files:
        # A temporary file may have been renamed since it was listed.
        with suppress(FileNotFoundError):
            found = (directory.path / archive.FOLDER / uid / file).lstat()
            _look_at_mode(seen, f"{above}/{file}", found)
    if set(files) <= reached:
        return
    with archives_standing_still(directory, uid) as folder:
        for file in spare_archives(directory, folder, uid, key):
            if file in files:
                is_leftover = LEFTOVER.fullmatch(file) is not None
                finding = _leftover_file if is_leftover else _unreferenced_archive
                seen.findings.append(finding(f"{above}/{file}", key))


def _look_at_mode(seen: Seen, path: str, found: os.stat_result) -> None:
    if found.st_mode & 0o077 and not stat.S_ISLNK(found.st_mode):
        seen.open_to_others.append((path, stat.S_IMODE(found.st_mode)))


def _not_a_file(path: str, name: str, found: os.stat_result) -> Finding:
    """Return the finding for another kind of file with the name of a log or one of our folders."""
    what = "something that is no file"
    if stat.S_ISLNK(found.st_mode):
        what = "a symbolic link, and none is followed here"
    elif stat.S_ISDIR(found.st_mode):
        what = "a folder"
    places = {
        archive.FOLDER: "the folder of the archives",
        trash.FOLDER: "the folder of the deleted sessions",
        leases.FOLDER: "the folder of the lock files",
    }
    place = places.get(name, "a log")
    return Finding(
        kind=Kind.NOT_A_FILE,
        key=file_names.key_of_log(name),
        path=path,
        meaning=f"Where {place} should be stands {what}.",
        advice="Move it elsewhere, and put back what belongs here.",
    )


def _unreadable(path: str, key: str | None, error: Exception) -> Finding:
    """Return the finding for a log or a folder that could not be read."""
    return Finding(
        kind=Kind.UNREADABLE,
        key=key,
        path=path,
        meaning=f"It could not be read: {error}.",
        advice="Run the doctor as the user who owns the file, and look at the disk.",
    )


def _foreign_logs(directory: Directory, found: Sequence[Finding]) -> Finding:
    """Return one finding for all logs of other programs in a folder."""
    first, *others = found
    if not others:
        name = first.path.rpartition("/")[2]
        return replace(first, advice=f"Move it elsewhere; {directory.how_to_import(name)}.")
    return replace(
        first,
        key=None,
        where=f"and {len(others):,} more",
        meaning="Another program wrote these files; stenolog neither reads nor changes them.",
        advice=f"Move them elsewhere; {directory.how_to_import()}.",
    )


def _leftover_file(path: str, key: str | None) -> Finding:
    """Return the finding for a temporary file of an interrupted rewrite."""
    return Finding(
        kind=Kind.LEFTOVER,
        key=key,
        path=path,
        meaning="Something that makes a log or an archive anew was interrupted before this file "
        "counted. Nothing is missing.",
        advice=f"--repair moves it into {ASIDE}/.",
        repairable=True,
    )


def _unreferenced_archive(path: str, key: str | None) -> Finding:
    """Return the finding for an archive that no session refers to."""
    return Finding(
        kind=Kind.UNREFERENCED_ARCHIVE,
        key=key,
        path=path,
        meaning="No session leads to this archive: a compaction or a purge was interrupted, or the "
        "log that did was removed by hand.",
        advice="If you were purging, purge again, and it is gone. "
        f"--repair moves it into {ASIDE}/; look whether a log is missing first.",
        repairable=True,
    )


def _unfinished_purge(folder: Directory, path: str, name: str) -> Finding:
    """Return the finding for a file that an interrupted purge left."""
    state = None
    with suppress(StenologError):
        state = trash.head_at(folder, folder.descriptor, name, name)
    return Finding(
        kind=Kind.LEFTOVER,
        key=state.key if state is not None else None,
        path=path,
        meaning="A purge was interrupted: the session is gone for good, but not yet from the disk.",
        advice="Purge it again." if state is not None else "Delete the file.",
    )


def _stalled_lease(path: str, name: str, holder: leases.Holder) -> Finding:
    """Return the finding for a lease that is held longer than it should be."""
    return Finding(
        kind=Kind.STALLED_LEASE,
        key=file_names.key_of_log(name.removesuffix(leases.SUFFIX)),
        path=path,
        meaning=f"{holder.describe()}, has the turn in this session and should have ended it by "
        f"{holder.until}. Nobody else gets it.".replace("process", "Process", 1),
        advice="Look what that process does; when it ends, the turn is free.",
    )


def _not_writable(folders: Sequence[str], why: str) -> Finding:
    """Return one finding for all folders that cannot be written: they usually share a disk."""
    return Finding(
        kind=Kind.NOT_WRITABLE,
        path=folders[0],
        where=f"and {len(folders) - 1:,} more" if len(folders) > 1 else "",
        meaning="What is there can be read, but every message from now on is lost.",
        advice=f"{why}.",
    )


def _wide_permissions(workspace: str, open_to_others: Sequence[tuple[str, int]]) -> Finding:
    """Return one finding for all paths that other users may read, with their modes."""
    (path, mode), *others = open_to_others
    return Finding(
        kind=Kind.WIDE_PERMISSIONS,
        path=path,
        where=f"mode {mode:04o}" + (f", and {len(others):,} more" if others else ""),
        meaning="Other users of this machine may read these conversations.",
        advice=f"chmod -R go= {shlex.quote(workspace)}",
    )
