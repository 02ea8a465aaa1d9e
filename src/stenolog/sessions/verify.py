"""The doctor: what is wrong in a workspace of logs.

sessions/damage.py judges the bytes of each log, sessions/chains.py the archives that it leads to;
here is what only the folder shows, and sessions/findings.py has the words for it. Nothing is
written; sessions/repair.py does that.
"""

import fcntl
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stenolog.errors import StenologError, UsageError
from stenolog.sessions import findings
from stenolog.sessions.chains import archives_of, listed_archives, spare_archives
from stenolog.sessions.damage import ASIDE, Finding, Kind
from stenolog.sessions.folders import NAMESPACE, check_is_ours, check_workspace, log_folders
from stenolog.sessions.standing_still import (
    archives_standing_still,
    folder_below,
    judge_file,
    names_in,
    standing_still,
    trash_of,
)
from stenolog.stores import findings as databases
from stenolog.stores.disk import refusal
from stenolog.stores.jsonl import archive, leases, names, trash
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.jsonl.purging import CATALOG
from stenolog.stores.opening import address, open_store

_FOLDERS: Final = (archive.FOLDER, trash.FOLDER, leases.FOLDER)
_INDEX: Final = (CATALOG, f"{CATALOG}-journal", f"{CATALOG}.lock")
LEFTOVER: Final = re.compile(r"\.(.+\.jsonl(?:\.gz)?)\.new")
"""The name of a file that was still being made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the doctor found."""

    workspace: str
    sessions: int
    """How many logs were examined."""
    findings: tuple[Finding, ...]


def examine(workspace: str | os.PathLike[str]) -> Report:
    """What is wrong with the logs of a workspace, or with a database; nothing is written.

    All of them: those of every agent that has a name, and of every namespace. Raises UsageError
    where this is no workspace, StoreUnavailable or DamagedStore where it cannot be entered.
    """
    found = address(workspace)
    if found.engine == "sqlite":
        return _examine_database(Path(found.path))
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
        told.append(findings.wide_permissions(str(place), list(wide)))
    shut = {folder: why for folder in folders if (why := _refusal(place / folder)) is not None}
    if shut:
        told.append(findings.not_writable(list(shut), next(iter(shut.values()))))
    return Report(
        workspace=str(place),
        sessions=sum(seen.logs for seen in all_seen),
        findings=tuple(told),
    )


def _refusal(folder: Path) -> str | None:
    with suppress(OSError):  # what cannot be looked at was told of
        return refusal(folder)
    return None


def _examine_database(file: Path) -> Report:
    # The driver is an extra, and takes a while to import.
    from stenolog.stores.sqlite.opening import missing_driver

    try:
        from stenolog.stores.sqlite import verify as database
    except ImportError as error:
        raise missing_driver(error) from error
    if not file.exists():
        raise UsageError(f"there is no database at {file}; is the name right?")
    return _report(database.examine(file), str(file), path=file.name)


def _examine_server(where: str | os.PathLike[str]) -> Report:
    with open_store(where, read_only=True) as store:
        # The driver is an extra; it is there by now.
        from stenolog.stores.postgres import PostgresStore, verify

        assert isinstance(store, PostgresStore), "it is the engine of this place"
        found = verify.examine(store.database)
        return _report(found, store.database.place, path=store.database.place)


def _report(found: databases.Report, workspace: str, *, path: str) -> Report:
    return Report(
        workspace=workspace,
        sessions=found.sessions,
        findings=tuple(
            Finding(
                kind=one.kind,
                key=one.key,
                path=path,
                where=one.where,
                meaning=one.meaning,
                advice=one.advice,
                lost=one.lost,
            )
            for one in found.findings
        ),
    )


@dataclass(slots=True)
class Seen:
    """What has been seen of a folder so far."""

    logs: int = 0
    findings: list[Finding] = field(default_factory=list)
    chains: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    """For each uid the key of its session, and the names of its archives."""
    purged: set[str] = field(default_factory=set)
    """The uids of sessions that are being deleted for good: what there is of them is not missed."""
    foreign: list[Finding] = field(default_factory=list)
    """Logs of other programs: told together, for they mostly come in a heap."""
    obscure: bool = False
    """Something here may belong to a session that this version cannot read."""
    open_to_others: list[tuple[str, int]] = field(default_factory=list)


def examine_folder(workspace: Path, folder: str) -> Seen:
    """What there is to say of one folder of logs, named by its path below the workspace.

    Raises StoreUnavailable, DamagedStore where the sessions themselves cannot be entered.
    """
    seen = Seen()
    try:
        directory = Directory(workspace / folder, read_only=True)
    except StenologError as error:
        if folder == NAMESPACE:
            raise
        seen.findings.append(findings.unreadable(folder, None, error))
        return seen
    try:
        _look_at_folder(directory, workspace, folder, seen)
    finally:
        directory.close()
    return seen


def _look_at_folder(directory: Directory, workspace: Path, namespace: str, seen: Seen) -> None:
    # First the archives, then the logs that name them: one that is made meanwhile is not missed.
    listed = listed_archives(directory)
    path = Path(namespace)
    for above in reversed((path, *path.parents)):
        _look_at_mode(seen, str(above), (workspace / above).stat())
    for name in sorted(directory.names()):
        found = directory.stat(name)
        if found is not None:
            _look_at_entry(directory, namespace, name, found, seen)
    _look_at_trash(directory, namespace, seen)
    _look_at_locks(directory, namespace, seen)
    if seen.foreign:
        seen.findings.append(findings.foreign_logs(directory, seen.foreign))
    for uid, files in listed.items():
        _look_at_archives(directory, namespace, uid, files, seen)


def _look_at_entry(
    directory: Directory, namespace: str, name: str, found: os.stat_result, seen: Seen
) -> None:
    path = f"{namespace}/{name}"
    leftover = LEFTOVER.fullmatch(name)
    if (stat.S_ISDIR(found.st_mode) and name in _FOLDERS) or name in _INDEX:
        _look_at_mode(seen, path, found)
    elif name in _FOLDERS or (name.endswith(names.SUFFIX) and not stat.S_ISREG(found.st_mode)):
        seen.findings.append(findings.not_a_file(path, name, found))
        seen.obscure = True
    elif leftover is not None:
        with standing_still(directory, leftover[1]):
            if directory.stat(name) is not None:
                seen.findings.append(findings.leftover(path, names.key_of(leftover[1])))
    elif name.endswith(names.SUFFIX):
        _look_at_mode(seen, path, found)
        _look_at_log(directory, namespace, name, seen)
    elif stat.S_ISDIR(found.st_mode) and name != ASIDE:
        seen.obscure = True


def _look_at_log(
    directory: Directory, namespace: str, name: str, seen: Seen, *, above: Directory | None = None
) -> None:
    """A log, live or, with the folder above the trash, deleted."""
    try:
        judged = judge_file(directory, namespace, name, deleted=above is not None)
    except (StenologError, OSError) as error:
        seen.obscure = True
        key = names.key_of(name) if above is None else None
        seen.findings.append(findings.unreadable(f"{namespace}/{name}", key, error))
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
        for name in sorted(folder.names()) if folder is not None else []:
            found = folder.stat(name) if folder is not None else None
            path = f"{namespace}/{trash.FOLDER}/{name}"
            leftover = LEFTOVER.fullmatch(name)
            if folder is None or found is None:
                continue
            if leftover is not None:
                with standing_still(folder, leftover[1]):
                    if folder.stat(name) is not None:
                        seen.findings.append(findings.leftover(path, None))
            elif (entry := trash.entry_of(name)) is not None and entry.purged:
                seen.purged.add(entry.uid)
                seen.findings.append(findings.unfinished_purge(folder, path, name))
            elif entry is not None and stat.S_ISREG(found.st_mode):
                _look_at_mode(seen, path, found)
                above = f"{namespace}/{trash.FOLDER}"
                _look_at_log(folder, above, name, seen, above=directory)
            elif name.endswith(names.SUFFIX):
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
                    seen.findings.append(findings.stalled_lease(path, name, holder))


def _stalled(descriptor: int) -> leases.Holder | None:
    """Who should have ended a turn by now, and holds it all the same."""
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
        # What was being made when it was listed has its final name by now.
        with suppress(FileNotFoundError):
            found = (directory.path / archive.FOLDER / uid / file).lstat()
            _look_at_mode(seen, f"{above}/{file}", found)
    if set(files) <= reached:
        return
    with archives_standing_still(directory, uid) as folder:
        for file in spare_archives(directory, folder, uid, key):
            if file in files:
                is_leftover = LEFTOVER.fullmatch(file) is not None
                finding = findings.leftover if is_leftover else findings.unreferenced
                seen.findings.append(finding(f"{above}/{file}", key))


def _look_at_mode(seen: Seen, path: str, found: os.stat_result) -> None:
    if found.st_mode & 0o077 and not stat.S_ISLNK(found.st_mode):
        seen.open_to_others.append((path, stat.S_IMODE(found.st_mode)))
