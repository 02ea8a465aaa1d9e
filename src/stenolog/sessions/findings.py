"""What the doctor says of files and folders; sessions/damage.py says it of the bytes of a log."""

import os
import shlex
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from stenolog.errors import StenologError
from stenolog.sessions.damage import ASIDE, Finding, Kind
from stenolog.stores.jsonl import archive, leases, names, trash
from stenolog.stores.jsonl.directory import Directory


def not_a_file(path: str, name: str, found: os.stat_result) -> Finding:
    """Something else stands where a log or a folder of ours should be."""
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


def unreadable(path: str, key: str | None, error: Exception) -> Finding:
    """A log, or a whole folder of them, that could not be looked at."""
    return Finding(
        kind=Kind.UNREADABLE,
        key=key,
        path=path,
        where="",
        meaning=f"It could not be read: {error}.",
        advice="Run the doctor as the user who owns the file, and look at the disk.",
    )


def foreign_logs(directory: Directory, found: Sequence[Finding]) -> Finding:
    """The logs of other programs in one folder, told as one."""
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


def leftover(path: str, key: str | None) -> Finding:
    """A file that was being made anew when somebody was interrupted."""
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


def unreferenced(path: str, key: str | None) -> Finding:
    """An archive of nobody."""
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


def unfinished_purge(folder: Directory, path: str, name: str) -> Finding:
    """A deleted session of which a purge left something."""
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


def stalled_lease(path: str, name: str, holder: leases.Holder) -> Finding:
    """A turn that should have ended by now."""
    return Finding(
        kind=Kind.STALLED_LEASE,
        key=names.key_of(name.removesuffix(leases.SUFFIX)),
        path=path,
        where="",
        meaning=f"{holder.words()}, has the turn in this session and should have ended it by "
        f"{holder.until}. Nobody else gets it.".replace("process", "Process", 1),
        advice="Look what that process does; when it ends, the turn is free.",
    )


def not_writable(folders: Sequence[str], why: str) -> Finding:
    """Folders of logs to which nothing can be written. One for all: they mostly share a disk."""
    return Finding(
        kind=Kind.NOT_WRITABLE,
        key=None,
        path=folders[0],
        where=f"and {len(folders) - 1:,} more" if len(folders) > 1 else "",
        meaning="What is there can be read, but every message from now on is lost.",
        advice=f"{why}.",
    )


def wide_permissions(workspace: str, open_to_others: Sequence[tuple[str, int]]) -> Finding:
    """Paths, with their modes, that others may read. One for all: a copy has them everywhere."""
    (path, mode), *others = open_to_others
    return Finding(
        kind=Kind.WIDE_PERMISSIONS,
        key=None,
        path=path,
        where=f"mode {mode:04o}" + (f", and {len(others):,} more" if others else ""),
        meaning="Other users of this machine may read these conversations.",
        advice=f"chmod -R go= {shlex.quote(workspace)}",
    )
