"""Backups: a copy of all sessions as plain text in a folder, with a manifest that detects damage.

The folder is an ordinary workspace, whatever engine the sessions came from. The manifest holds the
digest of each session and its stamp in the source store, so that unchanged sessions are not read
again. It is written before the first session and after the last one.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from stenolog.stores.disk import make_private, release_lock, replace_file, wait_for_lock
from stenolog.stores.jsonl.directory import store_error
from stenolog.stores.open_store import address
from stenolog.transfer.comparison import digest_of
from stenolog.transfer.copy import (
    CopiedSession,
    CopyStep,
    CopyTotals,
    EarlierCopy,
    Progress,
    copy_snapshots,
)
from stenolog.transfer.copy_all import (
    CopyReport,
    DestinationErrors,
    OnProgress,
    check_different_places,
    namespaces_of,
    opened_read_only,
    opened_store,
    updating_alias_marker,
)

MANIFEST: Final = "backup.json"
_LOCK: Final = ".backup.lock"
_TEMPORARY_FILES: Final = (_LOCK, f".{MANIFEST}.new")
"""Files that a killed first backup may leave before it writes the manifest."""
_FORMAT: Final = 1
_LOCK_TIMEOUT: Final = 5.0


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One session in a backup."""

    key: str
    last_seq: int
    messages: int
    digest: str
    stamp: str = ""
    """Stamp in the source store."""
    deleted: str | None = None
    taken: str
    """Time at which this content was first backed up."""


class Manifest(Struct, frozen=True, kw_only=True):
    """The expected content of a backup."""

    format: int = _FORMAT
    source: str
    """A digest of the source's address, which may contain a password."""
    begun: str
    finished: str | None = None
    """None: the backup was interrupted, and some sessions may be newer than their entries."""
    namespaces: dict[str, dict[str, Entry]] = {}
    """Entries by namespace and uid."""
    digest: str = ""
    """Digest of the manifest itself."""


class DamagedBackupSession(Struct, frozen=True, kw_only=True):
    """A session of a backup that is damaged or missing."""

    namespace: str
    key: str
    uid: str
    reason: str


class BackupCheck(Struct, frozen=True, kw_only=True):
    """Result of a complete check of a backup."""

    sessions: int
    messages: int
    taken: str
    """Time at which the backup finished; empty if it did not."""
    findings: tuple[DamagedBackupSession, ...]


class BackupReport(CopyReport, frozen=True, kw_only=True):
    """Result of a backup."""

    kept: int
    """Number of sessions in the backup that the store no longer has."""


def back_up(where: str, folder: str, *, on_progress: OnProgress | None = None) -> BackupReport:
    """Back up everything in a place, or update an earlier backup.

    Raises UsageError if the folder contains anything else or is inside the workspace; otherwise as
    copy_snapshots. A namespace that cannot be opened in the folder is reported as a problem; if
    none can be opened, that error is raised.
    """
    target, started = _folder_address(folder), time.monotonic()
    check_different_places(where, target)
    _check_outside_workspace(where, Path(folder))
    if os.path.lexists(folder):
        # Check before creating anything in the folder.
        _manifest_to_extend(Path(folder), where)
    with _locked(Path(folder)):
        before = _manifest_to_extend(Path(folder), where)
        names = namespaces_of(where)
        _write_manifest(Path(folder), replace(before, begun=_now(), finished=None))
        found: dict[str, CopyTotals] = {}
        entries = dict(before.namespaces)
        errors = DestinationErrors()
        for name in names:
            known = entries.get(name, {})
            with (
                opened_store(where, name, source=True) as source_store,
                errors.attempt(name, opened_store(target, name)) as target_store,
            ):
                if target_store is None:
                    continue
                with updating_alias_marker(source_store, target_store):
                    found[name] = copy_snapshots(
                        source_store,
                        target_store,
                        known=_known_copies(known),
                        progress=_namespace_progress(on_progress, name),
                    )
            entries[name] = known | _entries(found[name], known)
        problems_by_namespace = errors.problems_by_namespace(any_opened=bool(found))
        _write_manifest(
            Path(folder), replace(before, begun=_now(), finished=_now(), namespaces=entries)
        )
    problems = [(name, problem) for name, one in found.items() for problem in one.problems]
    here_now = {one.uid for one in _copied_sessions(found)} | {
        problem.uid for _, problem in problems
    }
    # For a session that cannot be opened, only the key is known.
    unread = {(name, problem.key) for name, problem in problems if not problem.uid}
    kept = sum(
        uid not in here_now and (entry.deleted is not None or (name, entry.key) not in unread)
        for name, listed in entries.items()
        if name not in problems_by_namespace
        for uid, entry in listed.items()
    )
    return BackupReport(
        namespaces=found | problems_by_namespace, seconds=time.monotonic() - started, kept=kept
    )


def verify(folder: str, *, on_progress: OnProgress | None = None) -> BackupCheck:
    """Read a whole backup and compare it with its manifest. Raises UsageError, DamagedStore."""
    manifest = read_manifest(Path(folder))
    findings: list[DamagedBackupSession] = []
    sessions = messages = 0
    for name, entries in manifest.namespaces.items():
        digests, unread = (
            _digests(folder, name, _namespace_progress(on_progress, name)) if entries else ({}, {})
        )
        for uid, entry in entries.items():
            if digests.get(uid) == entry.digest:
                sessions += 1
                messages += entry.messages
                continue
            known_by = uid if entry.deleted or uid in unread else entry.key
            if known_by in unread:
                reason = unread[known_by]
            elif uid not in digests:
                reason = "it is missing"
            elif manifest.finished is None:
                reason = "it is damaged, or newer: the last backup was interrupted; run it again"
            else:
                reason = "it is damaged: its content differs from the backed-up one"
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
    """Restore the sessions of a backup. Sessions that are newer in the store stay unchanged.

    Sessions that are damaged in the backup are skipped; the second value names them. Raises
    UsageError, DamagedStore, and as copy_snapshots.
    """
    source, started = _folder_address(folder), time.monotonic()
    check_different_places(source, where)
    checked = verify(folder, on_progress=on_progress)
    damaged = {finding.uid for finding in checked.findings}
    found: dict[str, CopyTotals] = {}
    errors = DestinationErrors()
    for name, entries in read_manifest(Path(folder)).namespaces.items():
        if not entries or name not in namespaces_of(source):
            continue
        with (
            opened_read_only(source, name) as source_store,
            errors.attempt(name, opened_store(where, name)) as target_store,
        ):
            if target_store is None:
                continue
            with updating_alias_marker(source_store, target_store):
                found[name] = copy_snapshots(
                    source_store,
                    target_store,
                    exclude_uids=damaged,
                    progress=_namespace_progress(on_progress, name),
                )
    found |= errors.problems_by_namespace(any_opened=bool(found))
    return CopyReport(namespaces=found, seconds=time.monotonic() - started), checked


def _digests(
    folder: str, name: str, progress: Progress | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the digest of each session by uid, empty if the session cannot be read.

    The second value holds the reasons why sessions cannot be opened, by uid, or by key if the uid
    is unknown.
    """
    if name not in namespaces_of(_folder_address(folder)):
        return {}, {}
    found: dict[str, str] = {}
    unread: dict[str, str] = {}
    with opened_read_only(_folder_address(folder), name) as store:
        marks = store.list_snapshots()
        for number, mark in enumerate(marks, 1):
            try:
                with store.read_snapshot(mark) as reading:
                    found[mark.uid] = digest_of(reading)
            except StenologError:
                found[mark.uid] = ""
            if mark.problem:
                unread[mark.uid or mark.key] = mark.problem
            if progress is not None:
                step = CopyStep(
                    phase="comparing", number=1, done=number, total=len(marks), messages=0
                )
                progress(step)
    return found, unread


# --- the manifest ----------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest. Raises UsageError if the folder has none, DamagedStore."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"there is no backup in {folder}: it has no {MANIFEST}") from None
    except OSError as error:
        raise store_error(error, f"reading {path}") from error
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(path, str(error)) from error
    if manifest.format > _FORMAT:
        raise DamagedStore(f"{path} was written by a newer stenolog; upgrade this one")
    if manifest.digest != _digest(manifest):
        raise _damaged(path, "its digest does not match")
    return manifest


def _damaged(path: Path, reason: str) -> DamagedStore:
    return DamagedStore(
        f"{path} is damaged ({reason}); if `steno doctor` finds no problem in the sessions next to "
        "it, delete the file, copy them with `steno copy`, and make a new backup"
    )


def _digest(manifest: Manifest) -> str:
    plain = msgspec.json.encode(replace(manifest, digest=""))
    return sha256(plain).hexdigest()


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    whole = replace(manifest, digest=_digest(manifest))
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            text = msgspec.json.format(msgspec.json.encode(whole), indent=1)
            replace_file(descriptor, MANIFEST, text + b"\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        raise store_error(error, f"writing {folder / MANIFEST}") from error


def _manifest_to_extend(folder: Path, where: str) -> Manifest:
    """Return the existing manifest or a new one.

    Raises UsageError if the folder contains anything but a backup.
    """
    source = _source_digest(where)
    if (folder / MANIFEST).exists():
        found = read_manifest(folder)
        # Earlier versions hashed the URL with its password.
        same = found.source in (source, _digest_of_text(where))
        found = replace(found, source=source)
        # Stamps are only comparable within the store they come from.
        return found if same else _without_stamps(found)
    try:
        others = [entry.name for entry in folder.iterdir() if entry.name not in _TEMPORARY_FILES]
    except OSError as error:
        raise store_error(error, f"looking into {folder}") from error
    if others:
        what = "a workspace" if log_folders(folder) else "something else"
        raise UsageError(
            f"{folder} contains {what}, not a backup; give an empty folder or that of an earlier "
            "backup"
        )
    return Manifest(source=source, begun=_now())


def _check_outside_workspace(where: str, folder: Path) -> None:
    """Raise UsageError if the backup folder is a part of the workspace."""
    found = address(where)
    if found.engine != "jsonl":
        return
    workspace, inside = Path(found.path), folder.resolve()
    logs = log_folders(workspace) if workspace.is_dir() else []
    for name in (NAMESPACE, NOTES, AGENTS, *logs):
        if inside.is_relative_to((workspace / name).resolve()):
            raise UsageError(
                f"{folder} is inside the workspace ({workspace / name}); "
                "give a folder outside of it"
            )


def _without_stamps(manifest: Manifest) -> Manifest:
    plain = {
        name: {uid: replace(entry, stamp="") for uid, entry in entries.items()}
        for name, entries in manifest.namespaces.items()
    }
    return replace(manifest, namespaces=plain)


def _source_digest(where: str) -> str:
    found = address(where)
    if found.engine in ("jsonl", "sqlite"):
        where = f"{found.engine}:{Path(found.path).resolve()}"
    elif found.engine == "postgresql":
        where = _without_password(where)  # guard: backup-hash-without-password
    return _digest_of_text(where)


def _without_password(url: str) -> str:
    """Return the URL of a database without the password in it."""
    base, _, query = url.partition("?")
    before, at, host = base.rpartition("@")
    scheme, slashes, user = before.partition("://")
    if at:
        base = f"{scheme}{slashes}{user.partition(':')[0]}@{host}"
    kept = [part for part in query.split("&") if "password" not in part.partition("=")[0]]
    return f"{base}?{'&'.join(kept)}"


def _digest_of_text(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _known_copies(entries: dict[str, Entry]) -> dict[str, EarlierCopy]:
    return {
        uid: EarlierCopy(
            stamp=entry.stamp,
            digest=entry.digest,
            last_seq=entry.last_seq,
            messages=entry.messages,
        )
        for uid, entry in entries.items()
        if entry.stamp
    }


def _entries(found: CopyTotals, before: dict[str, Entry]) -> dict[str, Entry]:
    now = _now()
    entries = {}
    for one in found.copied:
        old = before.get(one.uid)
        same = old is not None and old.digest == one.digest
        entries[one.uid] = Entry(
            key=one.key,
            last_seq=one.last_seq,
            messages=one.messages,
            digest=one.digest,
            stamp=one.stamp,
            deleted=one.deleted,
            taken=old.taken if old is not None and same else now,
        )
    return entries


def _copied_sessions(found: dict[str, CopyTotals]) -> Iterator[CopiedSession]:
    for one in found.values():
        yield from one.copied


def _folder_address(folder: str) -> str:
    return f"jsonl:{folder}"


def _now() -> str:
    return timestamp(datetime.now(UTC))


def _namespace_progress(on_progress: OnProgress | None, name: str) -> Progress | None:
    return None if on_progress is None else lambda step: on_progress(name, step)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the backup lock of a folder. Raises StoreBusy if another backup holds it."""
    try:
        make_private(folder)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(folder / _LOCK, flags, 0o600)
    except OSError as error:
        raise store_error(error, f"opening {folder}") from error
    try:
        wait_for_lock(descriptor, seconds=_LOCK_TIMEOUT, name=f"another backup into {folder}")
        yield
    finally:
        release_lock(descriptor)
        os.close(descriptor)
