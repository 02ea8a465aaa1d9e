"""The doctor: what is wrong in a workspace of logs.

sessions/damage.py judges the bytes of each log; here is what only the folder shows. Nothing is
written; sessions/repair.py does that.
"""

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from stenolog.errors import StenologError, UsageError
from stenolog.records import Span, State
from stenolog.sessions.damage import ASIDE, Finding, Judged, Kind, judge, lost_in_words
from stenolog.stores import spans
from stenolog.stores.jsonl import archive, leases, names, trash
from stenolog.stores.jsonl.directory import Directory, explained
from stenolog.stores.jsonl.purging import CATALOG
from stenolog.stores.jsonl.table import flock

BUSY_TIMEOUT: Final = 5.0
_FOLDERS: Final = (archive.FOLDER, trash.FOLDER, leases.FOLDER)
_DATABASE: Final = "sqlite:"
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


def examine(workspace: str | os.PathLike[str], *, namespace: str = "sessions") -> Report:
    """What is wrong with the logs of a workspace, or with `sqlite:FILE`; nothing is written.

    Raises UsageError where this is no workspace, StoreUnavailable or DamagedStore where it cannot
    be entered.
    """
    if isinstance(workspace, str) and workspace.startswith(_DATABASE):
        return _examine_database(workspace)
    place = Path(workspace)
    if not holds_sessions(place, namespace=namespace):
        return Report(workspace=str(place), sessions=0, findings=())
    directory = Directory(place / namespace, read_only=True)
    try:
        return _examine(directory, place, namespace)
    finally:
        directory.close()


def _examine_database(where: str) -> Report:
    # The driver is an extra, and takes a while to import.
    try:
        from stenolog.stores.sqlite import verify as database
    except ImportError as error:
        raise UsageError(f"{where}: pip install 'stenolog[sqlite]' first") from error
    file = Path(where.removeprefix(_DATABASE).partition("?")[0]).expanduser()
    if not file.exists():
        raise UsageError(f"there is no database at {file}; is the name right?")
    found = database.examine(file)
    return Report(
        workspace=str(file),
        sessions=found.sessions,
        findings=tuple(
            Finding(
                kind=one.kind,
                key=one.key,
                path=file.name,
                where=one.where,
                meaning=one.meaning,
                advice=one.advice,
                lost=one.lost,
            )
            for one in found.findings
        ),
    )


def holds_sessions(workspace: str | os.PathLike[str], *, namespace: str = "sessions") -> bool:
    """Whether anything was ever stored there.

    Raises UsageError where this is no workspace, StoreUnavailable where it may not be entered.
    """
    place = Path(workspace)
    try:
        if not place.is_dir():
            raise UsageError(f"there is no workspace at {place}; is the name right?")
        here = [entry.name for entry in place.iterdir()]
    except OSError as error:
        raise explained(error, f"looking into {place}") from error
    if namespace not in here and any(name.endswith(names.SUFFIX) for name in here):
        raise UsageError(
            f"{place} holds logs itself; name the workspace, which is the folder above it"
        )
    return namespace in here


@dataclass(slots=True)
class _Seen:
    """What has been seen of a folder so far."""

    logs: int = 0
    findings: list[Finding] = field(default_factory=list)
    chains: dict[str, tuple[str, set[str]]] = field(default_factory=dict)
    """For each uid the key of its session, and the names of its archives."""
    purged: set[str] = field(default_factory=set)
    """The uids of sessions that are being deleted for good: what there is of them is not missed."""
    obscure: bool = False
    """Something here may belong to a session that this version cannot read."""
    open_to_others: list[tuple[str, int]] = field(default_factory=list)


def _examine(directory: Directory, place: Path, namespace: str) -> Report:
    # First the archives, then the logs that name them: one that is made meanwhile is not missed.
    listed = _listed_archives(directory)
    seen = _Seen()
    for path, shown in ((place, "."), (directory.path, namespace)):
        _look_at_mode(seen, shown, path.stat())
    for name in sorted(directory.names()):
        found = directory.stat(name)
        if found is not None:
            _look_at_entry(directory, namespace, name, found, seen)
    _look_at_trash(directory, namespace, seen)
    _look_at_locks(directory, namespace, seen)
    for uid, files in listed.items():
        _look_at_archives(directory, namespace, uid, files, seen)
    _report_modes(seen)
    return Report(workspace=str(place), sessions=seen.logs, findings=tuple(seen.findings))


def _look_at_entry(
    directory: Directory, namespace: str, name: str, found: os.stat_result, seen: _Seen
) -> None:
    path = f"{namespace}/{name}"
    leftover = LEFTOVER.fullmatch(name)
    if (stat.S_ISDIR(found.st_mode) and name in _FOLDERS) or name in _INDEX:
        _look_at_mode(seen, path, found)
    elif name in _FOLDERS or (name.endswith(names.SUFFIX) and not stat.S_ISREG(found.st_mode)):
        seen.findings.append(_not_a_file(path, name, found))
        seen.obscure = True
    elif leftover is not None:
        with standing_still(directory, leftover[1]):
            if directory.stat(name) is not None:
                seen.findings.append(_leftover(path, names.key_of(leftover[1])))
    elif name.endswith(names.SUFFIX):
        _look_at_mode(seen, path, found)
        _look_at_log(directory, namespace, name, seen)
    elif stat.S_ISDIR(found.st_mode) and name != ASIDE:
        seen.obscure = True


def _look_at_log(
    directory: Directory, namespace: str, name: str, seen: _Seen, *, above: Directory | None = None
) -> None:
    """A log, live or, with the folder above the trash, deleted."""
    try:
        judged = _judge_file(directory, namespace, name, deleted=above is not None)
    except (StenologError, OSError) as error:
        seen.obscure = True
        seen.findings.append(
            Finding(
                kind=Kind.UNREADABLE,
                key=names.key_of(name) if above is None else None,
                path=f"{namespace}/{name}",
                where="",
                meaning=f"It could not be read: {error}.",
                advice="Run the doctor as the user who owns the file, and look at the disk.",
            )
        )
        return
    if judged is None:
        return
    seen.logs += 1
    seen.findings += judged.findings
    state = judged.state
    if state is None:
        seen.obscure |= bool(judged.findings) and judged.findings[0].kind is Kind.NEWER_FORMAT
        return
    reached: set[str] = set()
    found = archives_of(above or directory, namespace.partition("/")[0], state, reached)
    seen.findings += found
    seen.chains[state.uid] = (state.key, reached)


def _judge_file(
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


# --- the trash and the locks -----------------------------------------------------------------


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


def _look_at_trash(directory: Directory, namespace: str, seen: _Seen) -> None:
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
                        seen.findings.append(_leftover(path, None))
            elif (entry := trash.entry_of(name)) is not None and entry.purged:
                seen.purged.add(entry.uid)
                seen.findings.append(_unfinished_purge(folder, path, name))
            elif entry is not None and stat.S_ISREG(found.st_mode):
                _look_at_mode(seen, path, found)
                above = f"{namespace}/{trash.FOLDER}"
                _look_at_log(folder, above, name, seen, above=directory)
            elif name.endswith(names.SUFFIX):
                seen.obscure = True


def _look_at_locks(directory: Directory, namespace: str, seen: _Seen) -> None:
    with _folder(directory, leases.FOLDER) as folder:
        for name in _names(folder):
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


def archives_of(
    directory: Directory, namespace: str, state: State, reached: set[str]
) -> Iterator[Finding]:
    """What is wrong with the archives that a state leads to; their names go into `reached`."""
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
                where="",
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
        where="",
        meaning=meaning,
        advice="Put the file back from a backup.",
        lost=tuple(lost),
    )


def _listed_archives(directory: Directory) -> dict[str, list[str]]:
    """The files of each uid."""
    found = {}
    with _folder(directory, archive.FOLDER) as top:
        for uid in _names(top):
            with _folder(directory, archive.FOLDER, uid) as below:
                if below is not None:
                    found[uid] = _names(below)
    return found


def _names(folder: int | None) -> list[str]:
    if folder is None:
        return []
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries)


@contextmanager
def _folder(directory: Directory, *below: str) -> Iterator[int | None]:
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


@contextmanager
def archives_standing_still(directory: Directory, uid: str) -> Iterator[int | None]:
    """A descriptor of a folder of archives while nobody compacts. Raises StoreBusy."""
    with _folder(directory, archive.FOLDER, uid) as folder:
        if folder is not None:
            what = f"the folder {directory.path / archive.FOLDER / uid}"
            flock(folder, time.monotonic() + BUSY_TIMEOUT, what)
        try:
            yield folder
        finally:
            if folder is not None:
                fcntl.flock(folder, fcntl.LOCK_UN)


def _look_at_archives(
    directory: Directory, namespace: str, uid: str, files: Sequence[str], seen: _Seen
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
                finding = _leftover if LEFTOVER.fullmatch(file) else _unreferenced
                seen.findings.append(finding(f"{above}/{file}", key))


def spare_archives(
    directory: Directory, folder: int | None, uid: str, key: str | None
) -> list[str]:
    """The files in a folder of archives that the session of this key does not lead to.

    None of them where that cannot be told. The folder must stand still.
    """
    reached: set[str] = set()
    if key is not None:
        state = _state_of(directory, uid, key)
        if state is None or list(archives_of(directory, "", state, reached)):
            return []
    return [file for file in _names(folder) if file not in reached]


def _state_of(directory: Directory, uid: str, key: str) -> State | None:
    """The state of one life of a key, live or deleted; None where it cannot be told."""
    judged = _judge_file(directory, "", names.file_name(key))
    if judged is not None and judged.state is not None and judged.state.uid == uid:
        return judged.state
    with trash_of(directory) as folder:
        for entry in trash.entries(directory) if folder is not None else []:
            if entry.uid == uid and folder is not None:
                judged = _judge_file(folder, "", entry.name, deleted=True)
                return judged.state if judged is not None else None
    return None


# --- findings of a folder --------------------------------------------------------------------


def _not_a_file(path: str, name: str, found: os.stat_result) -> Finding:
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
        key=names.key_of(name),
        path=path,
        where="",
        meaning=f"Where {place} should be stands {what}.",
        advice="Move it elsewhere, and put back what belongs here.",
    )


def _leftover(path: str, key: str | None) -> Finding:
    return Finding(
        kind=Kind.LEFTOVER,
        key=key,
        path=path,
        where="",
        meaning="Something that makes a log or an archive anew was interrupted before this file "
        "counted. Nothing is missing.",
        advice=f"--repair moves it into {ASIDE}/.",
        repairable=True,
    )


def _unreferenced(path: str, key: str | None) -> Finding:
    return Finding(
        kind=Kind.UNREFERENCED_ARCHIVE,
        key=key,
        path=path,
        where="",
        meaning="No session leads to this archive: a compaction or a purge was interrupted, or the "
        "log that did was removed by hand.",
        advice="If you were purging, purge again, and it is gone. "
        f"--repair moves it into {ASIDE}/; look whether a log is missing first.",
        repairable=True,
    )


def _unfinished_purge(folder: Directory, path: str, name: str) -> Finding:
    state = None
    with suppress(StenologError):
        state = trash.head_at(folder, folder.descriptor, name, name)
    return Finding(
        kind=Kind.LEFTOVER,
        key=state.key if state is not None else None,
        path=path,
        where="",
        meaning="A purge was interrupted: the session is gone for good, but not yet from the disk.",
        advice="Purge it again." if state is not None else "Delete the file.",
    )


def _stalled_lease(path: str, name: str, holder: leases.Holder) -> Finding:
    return Finding(
        kind=Kind.STALLED_LEASE,
        key=names.key_of(name.removesuffix(leases.SUFFIX)),
        path=path,
        where="",
        meaning=f"{holder.words()}, has the turn in this session and should have ended it by "
        f"{holder.until}. Nobody else gets it.".replace("process", "Process", 1),
        advice="Look what that process does; when it ends, the turn is free.",
    )


def _look_at_mode(seen: _Seen, path: str, found: os.stat_result) -> None:
    if found.st_mode & 0o077 and not stat.S_ISLNK(found.st_mode):
        seen.open_to_others.append((path, stat.S_IMODE(found.st_mode)))


def _report_modes(seen: _Seen) -> None:
    """One finding for all: a copied workspace has them everywhere."""
    if not seen.open_to_others:
        return
    (path, mode), *others = seen.open_to_others
    seen.findings.append(
        Finding(
            kind=Kind.WIDE_PERMISSIONS,
            key=None,
            path=path,
            where=f"mode {mode:04o}" + (f", and {len(others):,} more" if others else ""),
            meaning="Other users of this machine may read these conversations.",
            advice="chmod -R go= WORKSPACE",
        )
    )
