"""The fallback store: a JSONL folder that keeps the sessions while their store is unusable.

It uses the ordinary JSONL engine, so every call works. Legacy sessions are copied into it first.
The next successful start merges it into the store, session by session, like other old sessions:
messages from legacy files are recognized by their content, messages added here by their token, or
else by the uid of the session and their seq. Then the folder is renamed. The merge also repeats
deletions and purges in the store; purges are noted next to the folder.

Each process that uses the fallback store holds a shared lock. While any process holds it, a merge
copies the current content and the folder keeps its name. A record of each merged session, also next
to the folder, prevents later merges from adding messages that were purged in the store.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from stenolog.errors import DamagedStore, NoSuchSession, StenologError, StoreBusy, StoreUnavailable
from stenolog.records import Health, Message, Purged, SessionInfo, timestamp
from stenolog.sessions.folders import NAMESPACE, SessionsLocation, log_folders
from stenolog.stores import disk, spans, withdrawn_messages
from stenolog.stores.base import FORKED_AT, NOT_FORKED, Deleted, PurgingStore, Store
from stenolog.stores.file_names import LOG_SUFFIX, escape_key
from stenolog.stores.json_file import JSONMessage, NotASession, time_of
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.snapshots import Snapshot, SnapshotMark, SnapshotStore, token_of
from stenolog.transfer import merge
from stenolog.transfer.importers.legacy_session import LegacySession, Source, SourceContent
from stenolog.transfer.migration import (
    ImportedSession,
    ImportReport,
    import_folder,
    log_report,
    merge_source,
)

LOCK_TIMEOUT: Final = 60.0
"""Seconds to wait for a process that merges the fallback store."""
LOCK: Final = "fallback.lock"
PURGES: Final = "purges"
MERGED: Final = "merged"
"""Folder of the records of merged sessions."""
_LOCK_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_POLL: Final = 0.05
_NOT_MERGED: Final = NOT_FORKED | {
    *("aliases", "compacted", "imported", "importing", FORKED_AT, withdrawn_messages.META)
}
"""Meta fields that refer to seqs of the fallback store, or belong to its import."""

_logger = logging.getLogger("stenolog")


class FallbackStore(JSONLStore):
    """The open fallback store. Its health is never ok and gives the reason for its use."""

    def __init__(self, workspace: Path, lock: disk.Descriptor, *, because: str) -> None:
        super().__init__(workspace, namespace=NAMESPACE)
        self.because = because
        self._fallback_lock = lock
        self._purge_notes = workspace / PURGES

    def purge(self, key: str, *, before: int | None = None) -> Purged:
        """Purge here, and in the store at the merge."""
        uids = [one.uid for one in self.list_trash() if one.key == key] if before is None else []
        with suppress(NoSuchSession, DamagedStore):
            uids.append(self.info(key).uid)
        with self._noting(
            self._describe_purge(key, uids, before=before)
        ):  # guard: fallback-purge-noted
            return super().purge(key, before=before)

    def purge_trash(self, key: str, entries: Collection[Deleted]) -> Purged:
        """Purge these deleted sessions here, and at the merge messages imported from their files.

        The store's session of this key has other messages too, and was not deleted here.
        """
        with self._noting(self._describe_purge(key, [uid for uid, _ in entries], is_trash=True)):
            return super().purge_trash(key, entries)

    def health(self) -> Health:
        """Return the health of the folder: never ok, because the sessions belong in the store."""
        found = super().health()
        reason = (
            f"sessions are kept in {self.folder} for this run, and merged when the store can be "
            f"used again: {self.because}"
        )
        return Health(ok=False, free_bytes=found.free_bytes, problems=(reason, *found.problems))

    def close(self) -> None:
        """Close the store and release the lock."""
        super().close()
        self._fallback_lock.release()

    def _describe_purge(
        self, key: str, uids: Sequence[str], *, before: int | None = None, is_trash: bool = False
    ) -> "_PurgeNote":
        read_in: dict[str, int] = {}
        for uid in uids:
            with (
                suppress(NoSuchSession, DamagedStore),
                self.read_snapshot(SnapshotMark(key=key, uid=uid, stamp="")) as reading,
            ):
                read_in |= _last_seq_by_digest(merge.import_receipts(reading.snapshot.meta))
        return _PurgeNote(
            key=key,
            at=datetime.now(UTC),
            before=before,
            uids=tuple(uids),
            is_trash=is_trash,
            read_in=tuple(read_in.items()),
        )

    @contextmanager
    def _noting(self, purge: "_PurgeNote") -> Iterator[None]:
        """Note the purge before it runs, and after it that it completed.

        The note of a failed purge stays: the merge finds out whether the purge took effect.
        """
        name = f"{timestamp(purge.at).replace(':', '')}-{os.urandom(4).hex()}.json"
        self._write_note(name, purge)
        try:
            yield
        except NoSuchSession:
            (self._purge_notes / name).unlink(missing_ok=True)
            raise
        self._write_note(name, replace(purge, made=datetime.now(UTC)))

    def _write_note(self, name: str, purge: "_PurgeNote") -> None:
        try:
            _write_json(self._purge_notes, name, purge)
        except OSError as error:
            reason = f"noting a purge in {self._purge_notes}: {error.strerror}"
            raise StoreUnavailable(reason) from error


def open_fallback(place: SessionsLocation, *, because: str) -> FallbackStore:
    """Open the fallback store of a store, with the legacy sessions in it.

    Raises StenologError or OSError if it cannot be written.
    """
    assert place.fallback is not None, "this store has a fallback"
    workspace = place.fallback
    disk.make_private(workspace)
    lock = _open_lock(workspace, _LOCK_FLAGS | os.O_CREAT)
    try:
        if _try_lock(lock, fcntl.LOCK_EX):
            _import_legacy_sessions(place, workspace)
        _wait_for_merge(workspace, lock)
        return FallbackStore(workspace, lock, because=because)
    except BaseException:
        lock.close()
        raise


def _wait_for_merge(workspace: Path, lock: disk.Descriptor) -> None:
    """Take the shared lock once no process merges the fallback store. Raises StoreBusy."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while not _try_lock(lock, fcntl.LOCK_SH):
        if time.monotonic() > deadline:
            raise StoreBusy(f"{workspace}: another process merges it")
        time.sleep(_POLL)


def _import_legacy_sessions(place: SessionsLocation, workspace: Path) -> None:
    """Copy the legacy sessions; their files stay unchanged."""
    purged = {purge.key for _, purge in _pending_purges(workspace)}
    with JSONLStore(workspace, namespace=NAMESPACE) as store:
        for folder, fallbacks in place.legacy_folders():
            found = import_folder(
                folder,
                store,
                thorough=False,
                rename_files=False,
                fallbacks=fallbacks,
                is_own=True,
                exclude_keys=purged,
            )
            log_report(found, store)


# --- merging it into the store ---------------------------------------------------------------


def merge_fallback(place: SessionsLocation, store: Store) -> None:
    """Merge the fallback store and rename its folder. Raises what the store raises."""
    workspace = place.fallback
    if workspace is None:
        return
    try:
        lock = _open_lock(workspace, _LOCK_FLAGS)
    except FileNotFoundError:
        return
    except OSError as error:
        _logger.warning("%s cannot be merged: %s", workspace, error.strerror)
        return
    try:
        is_alone = False
        with suppress(OSError):  # without locks, no process can use the fallback store
            is_alone = _try_lock(lock, fcntl.LOCK_EX)
        if not (workspace / NAMESPACE).is_dir():
            _repeat_purges(workspace, None, store, is_alone=False)
            return  # it was merged before
        try:
            fallback = JSONLStore(workspace, namespace=NAMESPACE, read_only=True)
        except StenologError as error:
            _logger.warning("%s cannot be merged: %s", workspace, error)
            return
        with fallback:
            _repeat_purges(workspace, fallback, store, is_alone=is_alone)
            entries = _FallbackSnapshots(fallback, store, workspace)
            merged = merge_source(entries, store, entries.record)
            _repeat_deletions(workspace, fallback, store)
        log_report(merged, store)
        if is_alone and not merged.skipped:
            _rename_merged_folder(workspace, merged)
    finally:
        lock.release()


def _repeat_deletions(workspace: Path, fallback: JSONLStore, store: Store) -> None:
    """Repeat deletions of the fallback store, unless the session was used since in either store."""
    used = set(fallback.list_sessions())
    for one in fallback.list_trash():
        try:
            record = _read_record(workspace, one.uid)
            if record.deleted == one.deleted:  # guard: fallback-deletion-repeated-once
                continue
            with suppress(NoSuchSession):
                if one.key not in used and store.info(one.key).updated <= one.deleted:
                    store.delete(one.key)
        except (StenologError, NotASession) as error:
            _logger.warning("the deletion of %r cannot be repeated: %s", one.key, error)
        else:
            _write_record(workspace, one.key, replace(record, deleted=one.deleted))


def _rename_merged_folder(workspace: Path, merged: ImportReport) -> None:
    now = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
    target = workspace / f"{NAMESPACE}.merged-{now}"
    try:
        (workspace / NAMESPACE).rename(target)
        disk.sync_entries(workspace)
    except OSError as error:
        _logger.warning("%s was merged, but cannot be renamed: %s", workspace, error.strerror)
        return
    shutil.rmtree(workspace / MERGED, ignore_errors=True)
    count = sum(one.added for one in merged.imported)
    _logger.info("%d messages of the fallback were merged; its files are in %s", count, target)


def copies_in_fallback(place: SessionsLocation) -> Iterator[tuple[str, str]]:
    """Yield namespace and key of each session in the fallback store, merged or not.

    Sessions that cannot be read are skipped. Nothing is written.
    """
    workspace = place.fallback
    if workspace is None or workspace.is_symlink() or not workspace.is_dir():
        return
    with suppress(StenologError):
        for namespace in log_folders(workspace):
            with (
                suppress(StenologError),
                JSONLStore(workspace, namespace=namespace, read_only=True) as fallback,
            ):
                yield from (
                    (namespace, key) for key in {mark.key for mark in fallback.list_snapshots()}
                )


def purged_since(place: SessionsLocation, store: Store) -> list[str]:
    """Return the keys of the fallback store that were merged, and then purged in the store."""
    workspace = place.fallback
    if workspace is None or workspace.is_symlink() or not isinstance(store, SnapshotStore):
        return []
    records = []
    for path in (workspace / MERGED).glob("[!.]*.json"):
        with suppress(OSError, ValueError):
            records.append(convert(json.loads(path.read_bytes()), _MergeRecord))
    there = {mark.uid for mark in store.list_snapshots()} if records else set()
    gone = {one.uid for one in records if not there.issuperset(one.stored)}
    if not gone or not (workspace / NAMESPACE).is_dir():
        return []
    with JSONLStore(workspace, namespace=NAMESPACE, read_only=True) as fallback:
        return sorted({mark.key for mark in fallback.list_snapshots() if mark.uid in gone})


class _FallbackSnapshots:
    """The sessions of the fallback store as sources of an import."""

    def __init__(self, fallback: JSONLStore, store: Store, workspace: Path) -> None:
        self._fallback = fallback
        self._store = store
        self._workspace = workspace
        self._keys: dict[str, str] = {}
        self._records: dict[str, _MergeRecord] = {}
        """The record that each session gets once it is merged."""
        self.path = fallback.folder
        self.name = str(self.path)

    def sources(self, *, thorough: bool) -> list[Source]:
        """Return every session that is not in the trash."""
        del thorough
        self._keys = {escape_key(key) + LOG_SUFFIX: key for key in self._fallback.list_sessions()}
        return [Source(name=name, body=None) for name in self._keys]

    def read(self, source: Source) -> SourceContent:
        """Return the unmerged part of a session. Raises NotASession if it cannot be read."""
        try:
            info = self._fallback.info(self._keys[source.name])
        except StenologError as error:
            raise NotASession(str(error)) from error
        record = _read_record(self._workspace, info.uid)
        is_same = bool(record.stored) and record.stored[-1] == _uid(self._store, record.key)
        # Merged messages are never merged into another session: they were purged or deleted.
        after = record.after if is_same else record.last_seq  # guard: fallback-purged-stays-purged
        try:
            mark = SnapshotMark(key=info.key, uid=info.uid, stamp="")
            with self._fallback.read_snapshot(mark) as reading:
                messages = list(reading.messages)
                found = _to_source_files(reading.snapshot, messages, after=after)
                last = reading.snapshot.last_seq
        except StenologError as error:
            raise NotASession(str(error)) from error
        self._records[source.name] = replace(
            record, after=after, last_seq=last, digest=found.digest
        )
        if found.digest == record.digest:
            nothing = replace(found.session, messages=(), summary="", problems=())
            return replace(found, session=nothing)
        return found

    def record(self, source: Source, imported: ImportedSession) -> None:
        """Record that a session was merged, and into which session of the store."""
        record, uid = self._records[source.name], _uid(self._store, imported.key)
        stored = (*(one for one in record.stored if one != uid), *([uid] if uid else []))
        record = replace(record, key=imported.key, stored=stored)
        if record != _read_record(self._workspace, record.uid):
            _write_record(self._workspace, self._keys[source.name], record)


def _to_source_files(
    snapshot: Snapshot, messages: Sequence[Message], *, after: int
) -> SourceContent:
    """Return a session as an old one: all of it, or only its messages after a seq."""
    receipts = merge.import_receipts(snapshot.meta)
    hidden = spans.union([(1, snapshot.floor)] if snapshot.floor else [], snapshot.hidden)
    tokens = _tokens(snapshot, messages)
    kept = tuple(
        JSONMessage(
            message.to_json(),
            message.at,
            tokens.get(message.seq),
            any(first <= message.seq <= last for first, last in hidden),
        )
        for message in messages
        if message.seq > after
    )
    updated = datetime.fromisoformat(snapshot.updated)
    lost = spans.size(snapshot.lost)
    has_new = any(message.once is not None for message in kept)
    session = LegacySession(
        layout="stenolog-json",
        key=snapshot.key,
        messages=kept,
        summary="" if after else snapshot.summary,
        meta={n: one for n, one in snapshot.meta.items() if n not in _NOT_MERGED and not after},
        created=datetime.fromisoformat(snapshot.created),
        updated=updated,
        problems=(f"{lost} messages of the fallback cannot be read",) if lost else (),
    )
    # A legacy session without new messages here is as old as its file.
    imported_times = [
        moment for one in receipts if (moment := time_of(one.get("updated"))) is not None
    ]
    changed = updated if has_new or not imported_times else max(imported_times)
    return SourceContent(session, _digest(snapshot, session), changed, ())


def _tokens(snapshot: Snapshot, messages: Sequence[Message]) -> dict[int, str]:
    """Return the token of each message that was added here; legacy messages have none."""
    receipts = merge.import_receipts(snapshot.meta)
    import_mark = snapshot.meta.get("importing")
    imports = [*receipts, import_mark] if isinstance(import_mark, dict) else receipts
    prefixes = tuple(f"import:{one.get('sha256')}:" for one in imports)
    read_in = max(_last_seq_by_digest(receipts).values(), default=0)
    found: dict[int, str] = {}
    for message in messages:
        token = token_of(message)
        if token is not None:
            found |= dict.fromkeys(range(message.seq, message.seq + token[1]), token[0])
    given = {
        message.seq: found.get(message.seq, "" if message.seq <= read_in else None)
        for message in messages
    }
    return {
        # guard: fallback-merged-by-uid-and-seq
        seq: f"fallback:{snapshot.uid}:{seq}" if token is None else token
        for seq, token in given.items()
        if token is None or (token and not token.startswith(prefixes or ("\0",)))
    }


def _last_seq_by_digest(receipts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return for each imported file, by its digest, the last seq after its import."""
    return {
        one["sha256"]: one["last_seq"]
        for one in receipts
        if isinstance(one.get("sha256"), str) and isinstance(one.get("last_seq"), int)
    }


def _digest(snapshot: Snapshot, session: LegacySession) -> str:
    """Return a digest that differs for each state of a session."""
    *_, last = ["", *merge.prefix_digests(session.messages)]
    shown = [message.hidden for message in session.messages]
    state = [snapshot.uid, snapshot.last_seq, last, shown, session.summary, session.meta]
    return sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


# --- records of merges -----------------------------------------------------------------------


class _MergeRecord(Struct, frozen=True, kw_only=True):
    """Record of the merges of one session of the fallback store."""

    uid: str
    after: int = 0
    """Messages up to this seq were merged into a session that the store no longer has."""
    last_seq: int = 0
    """Seq of the last merged message."""
    digest: str = ""
    """Digest of the merged content."""
    key: str = ""
    """Key of the store's session that it was merged into."""
    stored: tuple[str, ...] = ()
    """Uids of earlier sessions with that key, then the uid of the current one."""
    deleted: datetime | None = None
    """Time of the deletion in the fallback store that was repeated."""


def _read_record(workspace: Path, uid: str) -> _MergeRecord:
    """Return the record of a session, an empty one if there is none. Raises NotASession."""
    try:
        text = (workspace / MERGED / f"{escape_key(uid)}.json").read_bytes()
        return convert(json.loads(text), _MergeRecord)
    except (FileNotFoundError, NotADirectoryError):
        return _MergeRecord(uid=uid)
    except (OSError, ValueError) as error:
        raise NotASession(f"the record of its merge cannot be read: {error}") from error


def _write_record(workspace: Path, key: str, record: _MergeRecord) -> None:
    try:
        _write_json(workspace / MERGED, f"{escape_key(record.uid)}.json", record)
    except OSError as error:
        reason = "the merge of %r cannot be recorded, so the next start repeats it: %s"
        _logger.warning(reason, key, error.strerror)


def _write_json(folder: Path, name: str, fields: Struct) -> None:
    """Write a small file durably. Raises OSError."""
    disk.make_private(folder)
    descriptor = disk.open_descriptor(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        disk.replace_file(descriptor, name, json.dumps(to_builtins(fields)).encode())
    finally:
        descriptor.close()


def _uid(store: Store, key: str) -> str:
    """Return the uid of a session, or an empty string. Raises what the store raises."""
    try:
        return store.info(key).uid if key else ""
    except NoSuchSession:
        return ""


# --- purges ----------------------------------------------------------------------------------


class _PurgeNote(Struct, frozen=True, kw_only=True):
    """Note of a purge in the fallback store."""

    key: str
    at: datetime
    """Start of the purge: newer messages stay."""
    made: datetime | None = None
    """End of the purge; None if it is unknown whether the purge took effect."""
    before: int | None = None
    uids: tuple[str, ...] = ()
    """Uids of the sessions that the purge deletes; with `before`, of the session it shortens."""
    is_trash: bool = False
    """Whether only some sessions in the trash are purged, not the whole key."""
    read_in: tuple[tuple[str, int], ...] = ()
    """Digest and last seq of each legacy file that the sessions were imported from."""


def _pending_purges(workspace: Path) -> list[tuple[Path, _PurgeNote]]:
    """Return the purges that are not yet repeated, oldest first."""
    found = []
    for path in sorted((workspace / PURGES).glob("[!.]*.json")):
        try:
            found.append((path, convert(json.loads(path.read_bytes()), _PurgeNote)))
        except (OSError, ValueError) as error:
            _logger.warning("%s: a purge in the fallback cannot be repeated: %s", path, error)
    return found


def _repeat_purges(
    workspace: Path, fallback: JSONLStore | None, store: Store, *, is_alone: bool
) -> None:
    """Repeat the noted purges in the store.

    A note that cannot be followed stays, with a warning.
    """
    for path, purge in _pending_purges(workspace):
        try:
            if not _took_effect(purge, fallback):  # guard: fallback-refused-purge-not-repeated
                if is_alone:
                    path.unlink()
                continue
            remaining = _repeat_purge(purge, store)
            for uid in purge.uids if purge.before is None else ():
                (workspace / MERGED / f"{escape_key(uid)}.json").unlink(missing_ok=True)
            if remaining:
                _logger.warning(
                    "a purge in the fallback is not fully repeated for %r: %s", *remaining
                )
                path.rename(path.with_suffix(".left"))
            else:
                path.unlink()
        except StenologError as error:  # guard: fallback-note-keeps-no-store-closed
            _logger.warning(
                "a purge of %r in the fallback cannot be repeated now: %s", purge.key, error
            )
        except OSError as error:
            _logger.warning("%s: cannot be changed: %s", path, error.strerror)


def _took_effect(purge: _PurgeNote, fallback: JSONLStore | None) -> bool:
    """Return whether the fallback store no longer has the messages to purge."""
    if purge.made is not None:
        return True
    if fallback is None or not purge.uids:
        return False
    if purge.before is None:
        return {one.uid for one in fallback.list_snapshots()}.isdisjoint(purge.uids)
    try:
        is_same = fallback.info(purge.key).uid in purge.uids
        first = [one.seq for one in fallback.get_history(purge.key, full=True)][:1]
    except (NoSuchSession, DamagedStore):
        return False
    return is_same and bool(first) and first[0] >= purge.before


def _repeat_purge(purge: _PurgeNote, store: Store) -> tuple[str, str] | None:
    """Repeat a purge in the store; return the key and a reason if messages are left.

    Deletes only messages that are older than the purge. Raises StenologError.
    """
    if purge.before is None and not purge.is_trash:
        return _purge_all(purge, store)
    try:
        info = store.info(purge.key)
    except NoSuchSession:
        return None
    ends = _last_seq_by_digest(merge.import_receipts(info.meta))
    # Up to this seq both stores agree: the messages come from the same file.
    same = max((end for digest, end in purge.read_in if ends.get(digest) == end), default=0)
    if purge.before is not None:
        if same:
            store.purge(purge.key, before=min(purge.before, same + 1))
        return None
    if not same:
        return None  # the store has no message of these sessions
    if info.last_seq > same:  # guard: fallback-purge-trash-is-narrow
        return purge.key, "the session was also used in the store"
    return _purge_all(purge, store)


def _purge_all(purge: _PurgeNote, store: Store) -> tuple[str, str] | None:
    """Purge the sessions of a key that are older than the purge.

    If a session has newer messages, only its older messages are purged.
    """
    key = purge.key
    trashed = [one for one in store.list_trash() if one.key == key]
    old = [
        (one.uid, one.deleted) for one in trashed if one.deleted <= purge.at and not purge.is_trash
    ]
    is_only = len(old) == len(trashed)
    is_older = True
    with suppress(NoSuchSession):
        info = store.info(key)
        is_older = _is_older(purge, info)
        if is_older:
            history = store.get_history(key, full=True)
            newer = [message.seq for message in history if message.at > purge.at]
            if newer:
                store.purge(key, before=newer[0])
            elif is_only:  # guard: fallback-purge-spares-newer-trash
                store.purge(key)
                return None
            else:
                old.append(_delete_unchanged(info, store))
    if old and isinstance(store, PurgingStore):
        store.purge_trash(key, old)
    if not is_older:
        return key, "the session was created or imported since"
    return None if is_only or purge.is_trash else (key, "the trash has sessions deleted since")


def _is_older(purge: _PurgeNote, info: SessionInfo) -> bool:
    """Return whether a session of the store is older than the purge or comes from the same file."""
    if info.lost and info.updated > purge.at:
        raise DamagedStore(f"{info.key!r} has messages that cannot be read, and may be newer")
    made = purge.made or purge.at
    own = {digest for digest, _ in purge.read_in}
    receipts = merge.import_receipts(info.meta)
    for one in receipts:
        # Messages of a fallback store carry the time of their addition, those of other files any
        # time.
        imported = time_of(one.get(merge.IMPORT_TIME))
        is_foreign = one.get("sha256") not in own and one.get("from") != "stenolog-json"
        if is_foreign and (imported is None or imported > made):
            return False
    return info.created <= made or not own.isdisjoint(_last_seq_by_digest(receipts))


def _delete_unchanged(info: SessionInfo, store: Store) -> Deleted:
    """Move a session into the trash, unless it was changed since. Raises StoreBusy."""
    gone = store.delete(info.key)
    if (gone.uid, gone.count) != (info.uid, info.count):
        store.restore(info.key, uid=gone.uid)
        raise StoreBusy(f"{info.key!r} is in use")
    return gone.uid, gone.deleted


# --- the lock --------------------------------------------------------------------------------


def _open_lock(workspace: Path, flags: int) -> disk.Descriptor:
    if workspace.is_symlink():  # guard: fallback-no-link
        raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed")
    return disk.open_descriptor(workspace / LOCK, flags)


def _try_lock(lock: disk.Descriptor, how: int) -> bool:
    """Try to take the lock without waiting. Raises OSError if the file system has no locks."""
    try:
        fcntl.flock(lock, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
