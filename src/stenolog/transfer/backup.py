"""Backups: a copy of all sessions as plain text in a folder, with a manifest that detects damage.

The folder is an ordinary workspace, even if the sessions came from a database. The manifest holds a
digest and a change stamp of each session. The source store gives a session a new change stamp after
every change, so sessions with an unchanged stamp are not read again. The manifest is written twice:
before the first session without an end time, so that an interrupted backup is recognized, and after
the last session.
"""

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import DamagedStore, StenologError, UsageError
from stenolog.records import timestamp
from stenolog.sessions.folders import AGENTS, NAMESPACE, NOTES, log_folders
from stenolog.stores.disk import create_private_folder, open_descriptor, replace_file, wait_for_lock
from stenolog.stores.jsonl.directory import system_errors
from stenolog.stores.open_store import parse_address
from stenolog.transfer.comparison import digest_of
from stenolog.transfer.copy import CopyStep, CopyTotals, EarlierCopy, Progress
from stenolog.transfer.copy_all import (
    CopyReport,
    OnProgress,
    check_different_places,
    copy_namespaces,
    list_namespaces,
    namespace_progress,
    opened_read_only,
)

MANIFEST: Final = "backup.json"
_LOCK_FILE: Final = ".backup.lock"
_TEMPORARY_FILES: Final = (_LOCK_FILE, f".{MANIFEST}.new")
"""Files that a first backup leaves if it is killed before it writes the manifest."""
_MANIFEST_FORMAT: Final = 1
_LOCK_TIMEOUT: Final = 5.0
"""Seconds to wait for another backup into the same folder."""


class BackupEntry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One session in a backup."""

    key: str
    last_seq: int
    messages: int
    digest: str
    stamp: str = ""
    """Change stamp: a value of the source store that differs after every change of the session."""
    deleted: str | None = None
    taken: str
    """Time at which the current content of the session was first backed up."""


class Manifest(Struct, frozen=True, kw_only=True):
    """The expected content of a backup."""

    format: int = _MANIFEST_FORMAT
    source: str
    """Digest of the source's address. The address is not stored: it may contain a password."""
    begun: str
    finished: str | None = None
    """Time at which the backup ended; None while it runs and after an interruption.

    After an interruption, sessions in the folder may be newer than their entries in the manifest.
    """
    namespaces: dict[str, dict[str, BackupEntry]] = {}
    """Backed-up sessions by namespace and uid."""
    digest: str = ""
    """Digest of the other fields of the manifest."""


class DamagedBackupSession(Struct, frozen=True, kw_only=True):
    """A damaged or missing session of a backup."""

    namespace: str
    key: str
    uid: str
    reason: str


class BackupCheck(Struct, frozen=True, kw_only=True):
    """Result of a complete check of a backup."""

    sessions: int
    messages: int
    taken: str
    """Time at which the backup finished; empty if it did not finish."""
    findings: tuple[DamagedBackupSession, ...]


class BackupReport(CopyReport, frozen=True, kw_only=True):
    """Result of a backup."""

    kept: int
    """Number of sessions in the backup that the source store no longer has."""


def back_up(where: str, folder: str, *, on_progress: OnProgress | None = None) -> BackupReport:
    """Back up all sessions of a workspace or database, or update an earlier backup.

    Raises UsageError if the folder contains anything but a backup, or if the folder is inside the
    workspace. Also raises the errors of `copy_snapshots`. A namespace that cannot be opened in the
    folder is reported as a problem. If no namespace can be opened, the first error is raised.
    """
    target, started_at = _folder_address(folder), time.monotonic()
    check_different_places(where, target)
    _check_outside_workspace(where, Path(folder))
    if os.path.lexists(folder):
        # Reject a folder that is not a backup before the lock file is created in it.
        _read_or_make_manifest(Path(folder), where)
    with _hold_lock(Path(folder)):
        old_manifest = _read_or_make_manifest(Path(folder), where)
        namespaces, begun = list_namespaces(where), _now()
        _write_manifest(Path(folder), replace(old_manifest, begun=begun, finished=None))
        entries = dict(old_manifest.namespaces)
        copied_totals, failed_totals = copy_namespaces(
            where,
            target,
            namespaces,
            earlier_copies={name: _earlier_copies(entries[name]) for name in entries},
            on_progress=on_progress,
        )
        for name, totals in copied_totals.items():
            old_entries = entries.get(name, {})
            entries[name] = old_entries | _make_entries(totals, old_entries)
        _write_manifest(
            Path(folder), replace(old_manifest, begun=begun, finished=_now(), namespaces=entries)
        )
    problems = [
        (name, problem) for name, totals in copied_totals.items() for problem in totals.problems
    ]
    source_uids = {problem.uid for _, problem in problems} | {
        session.uid for totals in copied_totals.values() for session in totals.copied
    }
    # A session that cannot be opened has no uid, so its entry is recognized by the key.
    unread_keys = {(name, problem.key) for name, problem in problems if not problem.uid}
    kept_count = sum(
        uid not in source_uids
        and (entry.deleted is not None or (name, entry.key) not in unread_keys)
        for name, entries_by_uid in entries.items()
        if name not in failed_totals
        for uid, entry in entries_by_uid.items()
    )
    seconds = time.monotonic() - started_at
    return BackupReport(namespaces=copied_totals | failed_totals, seconds=seconds, kept=kept_count)


def verify(folder: str, *, on_progress: OnProgress | None = None) -> BackupCheck:
    """Read a whole backup and compare it with its manifest. Raises UsageError, DamagedStore."""
    manifest = read_manifest(Path(folder))
    findings: list[DamagedBackupSession] = []
    sessions = messages = 0
    for name, entries in manifest.namespaces.items():
        if not entries:
            continue
        progress = namespace_progress(on_progress, name)
        digests, read_problems = _read_digests(folder, name, progress)
        for uid, entry in entries.items():
            if digests.get(uid) == entry.digest:
                sessions += 1
                messages += entry.messages
                continue
            uid_or_key = uid if entry.deleted or uid in read_problems else entry.key
            if uid_or_key in read_problems:
                reason = read_problems[uid_or_key]
            elif uid not in digests:
                reason = "the session is missing"
            elif manifest.finished is None:
                reason = "the session is damaged or newer: the backup was interrupted; repeat it"
            else:
                reason = "the session is damaged: its content differs from the backed-up content"
            findings.append(
                DamagedBackupSession(namespace=name, key=entry.key, uid=uid, reason=reason)
            )
    return BackupCheck(
        sessions=sessions,
        messages=messages,
        taken=manifest.finished or "",
        findings=tuple(findings),
    )


def restore(
    folder: str, where: str, *, on_progress: OnProgress | None = None
) -> tuple[CopyReport, BackupCheck]:
    """Copy the sessions of a backup into a store, except sessions that are newer there.

    Sessions that are damaged in the backup are skipped, and the returned check lists them. Raises
    UsageError, DamagedStore, and the errors of copy_snapshots.
    """
    source, started_at = _folder_address(folder), time.monotonic()
    check_different_places(source, where)
    check = verify(folder, on_progress=on_progress)
    damaged_uids = {finding.uid for finding in check.findings}
    entries, existing_names = read_manifest(Path(folder)).namespaces, list_namespaces(source)
    copied_totals, failed_totals = copy_namespaces(
        source,
        where,
        [name for name in entries if entries[name] and name in existing_names],
        read_only=True,
        exclude_uids=damaged_uids,
        on_progress=on_progress,
    )
    return CopyReport(
        namespaces=copied_totals | failed_totals, seconds=time.monotonic() - started_at
    ), check


def _read_digests(
    folder: str, namespace: str, progress: Progress | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return two dicts by uid: the digest of each session, and the problem of each damaged one.

    The digest of an unreadable session is empty. A problem is listed by key if the uid is unknown.
    """
    if namespace not in list_namespaces(_folder_address(folder)):
        return {}, {}
    digests: dict[str, str] = {}
    read_problems: dict[str, str] = {}
    with opened_read_only(_folder_address(folder), namespace) as store:
        marks = store.list_snapshots()
        for done_count, mark in enumerate(marks, 1):
            try:
                with store.read_snapshot(mark) as reading:
                    digests[mark.uid] = digest_of(reading)
            except StenologError:
                digests[mark.uid] = ""
            if mark.problem:
                read_problems[mark.uid or mark.key] = mark.problem
            if progress is not None:
                step = CopyStep(
                    phase="comparing", number=1, done=done_count, total=len(marks), messages=0
                )
                progress(step)
    return digests, read_problems


# --- the manifest ----------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a backup. Raises UsageError if the manifest is missing.

    Raises DamagedStore if the manifest is damaged or was written by a newer stenolog.
    """
    path = folder / MANIFEST
    with system_errors(f"reading {path}"):
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            raise UsageError(f"there is no backup in {folder}: it has no {MANIFEST}") from None
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _manifest_error(path, str(error)) from error
    if manifest.format > _MANIFEST_FORMAT:
        raise DamagedStore(f"{path} was written by a newer stenolog; upgrade this one")
    if manifest.digest != _manifest_digest(manifest):
        raise _manifest_error(path, "its digest does not match")
    return manifest


def _manifest_error(path: Path, reason: str) -> DamagedStore:
    return DamagedStore(
        f"{path} is damaged ({reason}); if `steno doctor` finds no problem in the sessions next to "
        "it, delete the file, copy the sessions with `steno copy`, and make a new backup"
    )


def _manifest_digest(manifest: Manifest) -> str:
    return sha256(msgspec.json.encode(replace(manifest, digest=""))).hexdigest()


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    manifest_with_digest = replace(manifest, digest=_manifest_digest(manifest))
    text = msgspec.json.format(msgspec.json.encode(manifest_with_digest), indent=1)
    with (
        system_errors(f"writing {folder / MANIFEST}"),
        closing(open_descriptor(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as descriptor,
    ):
        replace_file(descriptor, MANIFEST, text + b"\n")


def _read_or_make_manifest(folder: Path, where: str) -> Manifest:
    """Return the existing manifest, or a new manifest if the folder has none.

    Raises UsageError if the folder contains anything but a backup.
    """
    source = _source_digest(where)
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        # Earlier versions hashed the URL with its password. Their digest is accepted too.
        is_same_source = manifest.source in (source, _digest_of_text(where))
        manifest = replace(manifest, source=source)
        # Change stamps of different stores cannot be compared.
        return manifest if is_same_source else _without_stamps(manifest)
    with system_errors(f"looking into {folder}"):
        has_other_files = any(entry.name not in _TEMPORARY_FILES for entry in folder.iterdir())
    if has_other_files:
        content = "a workspace" if log_folders(folder) else "something else"
        raise UsageError(
            f"{folder} contains {content}, not a backup; give an empty folder or the folder of "
            "an earlier backup"
        )
    return Manifest(source=source, begun=_now())


def _check_outside_workspace(where: str, folder: Path) -> None:
    """Raise UsageError if the backup folder is a part of the workspace."""
    address = parse_address(where)
    if address.engine != "jsonl":
        return
    workspace, resolved_folder = Path(address.path), folder.resolve()
    folder_names = log_folders(workspace) if workspace.is_dir() else []
    for name in (NAMESPACE, NOTES, AGENTS, *folder_names):
        if resolved_folder.is_relative_to((workspace / name).resolve()):
            raise UsageError(
                f"{folder} is inside the workspace ({workspace / name}); "
                "give a folder outside of it"
            )


def _without_stamps(manifest: Manifest) -> Manifest:
    namespaces = {
        name: {uid: replace(entry, stamp="") for uid, entry in entries.items()}
        for name, entries in manifest.namespaces.items()
    }
    return replace(manifest, namespaces=namespaces)


def _source_digest(where: str) -> str:
    address = parse_address(where)
    if address.engine in ("jsonl", "sqlite"):
        where = f"{address.engine}:{Path(address.path).resolve()}"
    elif address.engine == "postgresql":
        where = _without_password(where)  # guard: backup-hash-without-password
    return _digest_of_text(where)


def _without_password(url: str) -> str:
    """Return the URL of a database without its password."""
    address, _, query = url.partition("?")
    user_part, at_sign, host = address.rpartition("@")
    scheme, slashes, user = user_part.partition("://")
    if at_sign:
        address = f"{scheme}{slashes}{user.partition(':')[0]}@{host}"
    kept_options = [part for part in query.split("&") if "password" not in part.partition("=")[0]]
    return f"{address}?{'&'.join(kept_options)}"


def _digest_of_text(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _earlier_copies(entries: dict[str, BackupEntry]) -> dict[str, EarlierCopy]:
    return {
        uid: msgspec.convert(entry, EarlierCopy, from_attributes=True)
        for uid, entry in entries.items()
        if entry.stamp
    }


def _make_entries(
    totals: CopyTotals, old_entries: dict[str, BackupEntry]
) -> dict[str, BackupEntry]:
    now = _now()
    entries = {}
    for session in totals.copied:
        old_entry = old_entries.get(session.uid)
        entries[session.uid] = BackupEntry(
            key=session.key,
            last_seq=session.last_seq,
            messages=session.messages,
            digest=session.digest,
            stamp=session.stamp,
            deleted=session.deleted,
            taken=old_entry.taken if old_entry and old_entry.digest == session.digest else now,
        )
    return entries


def _folder_address(folder: str) -> str:
    return f"jsonl:{folder}"


def _now() -> str:
    return timestamp(datetime.now(UTC))


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Hold the backup lock of a folder. Raises StoreBusy if another backup holds the lock."""
    with system_errors(f"opening {folder}"):
        create_private_folder(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = open_descriptor(folder / _LOCK_FILE, flags)
    try:
        wait_for_lock(descriptor, seconds=_LOCK_TIMEOUT, name=f"another backup into {folder}")
        yield
    finally:
        descriptor.release()
