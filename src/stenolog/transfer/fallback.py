"""The fallback store: a JSONL folder that keeps the sessions while the regular store is unusable.

The fallback store is an ordinary JSONL store, so every call works. Opening the fallback store
copies legacy sessions into it. The next successful start merges the fallback store into the regular
store, session by session, as it imports old sessions. The merge recognizes messages of legacy files
by their content. Messages that were added to the fallback store are recognized by their idempotency
key, or by seq and the uid of the session. After the merge, the folder is renamed. The merge also
repeats deletions and purges in the regular store. Each purge is noted in a file next to the folder.

Each process that uses the fallback store holds a shared lock. While any process holds the lock, a
merge copies the current content and the folder keeps its name. For each merged session, a merge
record is kept next to the folder. The merge record prevents later merges from adding messages that
were purged in the regular store.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from stenolog.errors import DamagedStore, NoSuchSession, StenologError, StoreBusy, StoreUnavailable
from stenolog.records import Health, Message, PurgeResult, SessionInfo, timestamp
from stenolog.sessions.folders import NAMESPACE, SessionsLocation, log_folders
from stenolog.stores import disk, spans, withdrawn_messages
from stenolog.stores.base import (
    FORKED_AT,
    NOT_FORKED,
    DeletedSession,
    PurgingStore,
    Store,
    find_info,
)
from stenolog.stores.file_names import LOG_SUFFIX, escape_key
from stenolog.stores.json_file import JSONMessage, NotASession, parse_go_time
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.snapshots import Snapshot, SnapshotMark, SnapshotStore, token_of
from stenolog.transfer import merge
from stenolog.transfer.importers.chat_format import omit
from stenolog.transfer.importers.legacy_session import LegacySession, Source, SourceContent
from stenolog.transfer.migration import (
    ImportedSession,
    ImportReport,
    import_folder,
    log_report,
    merge_source,
)

LOCK_TIMEOUT: Final = 60.0
"""Seconds that opening the fallback store waits for a process that merges it."""
LOCK_FILE: Final = "fallback.lock"
PURGES_FOLDER: Final = "purges"
MERGED_FOLDER: Final = "merged"
"""Name of the folder with a merge record for each merged session."""
_LOCK_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
_POLL_SECONDS: Final = 0.05
_UNMERGED_FIELDS: Final = NOT_FORKED | {
    *("aliases", "compacted", "imported", "importing", FORKED_AT, withdrawn_messages.META_FIELD)
}
"""Meta fields that are not merged, because they describe seqs or imports of the fallback store."""

_logger = logging.getLogger("stenolog")


class FallbackStore(JSONLStore):
    """The open fallback store. `health` is never ok, and says why this store is used."""

    def __init__(self, workspace: Path, lock: disk.Descriptor, *, because: str) -> None:
        super().__init__(workspace, namespace=NAMESPACE)
        self.because = because
        self._fallback_lock = lock
        self._notes_folder = workspace / PURGES_FOLDER

    def purge(self, key: str, *, before: int | None = None) -> PurgeResult:
        """Purge a session in the fallback store.

        The merge repeats the purge in the regular store.
        """
        trash = self.list_trash() if before is None else []
        uids = [trashed.uid for trashed in trash if trashed.key == key]
        with suppress(NoSuchSession, DamagedStore):
            uids.append(self.info(key).uid)
        with self._note_purge(key, uids, before=before):
            return super().purge(key, before=before)

    def purge_trash(self, key: str, entries: Collection[DeletedSession]) -> PurgeResult:
        """Purge these deleted sessions in the fallback store.

        The merge also purges the session with this key in the regular store, unless that session
        has messages that the purged sessions did not have.
        """
        with self._note_purge(key, [uid for uid, _ in entries], is_trash=True):
            return super().purge_trash(key, entries)

    def health(self) -> Health:
        """Return the health: never ok, because the sessions belong in the regular store."""
        health = super().health()
        reason = (
            f"sessions are kept in {self.folder} for this run, and merged when the store can be "
            f"used again: {self.because}"
        )
        return Health(ok=False, free_bytes=health.free_bytes, problems=(reason, *health.problems))

    def close(self) -> None:
        """Close the store and release the lock."""
        super().close()
        self._fallback_lock.release()

    @contextmanager
    def _note_purge(
        self, key: str, uids: Sequence[str], *, before: int | None = None, is_trash: bool = False
    ) -> Iterator[None]:
        """Write a note of the purge before the purge runs, and complete the note afterwards.

        The note of a failed purge stays, and the merge checks whether the purge took effect.
        """
        last_seq_by_digest: dict[str, int] = {}
        for uid in uids:
            with (
                suppress(NoSuchSession, DamagedStore),
                self.read_snapshot(SnapshotMark(key=key, uid=uid, stamp="")) as reading,
            ):
                last_seq_by_digest |= _last_seq_by_digest(
                    merge.receipts_of_imports(reading.snapshot.meta)
                )
        note = _PurgeNote(
            key=key,
            at=datetime.now(UTC),
            before=before,
            uids=tuple(uids),
            is_trash=is_trash,
            read_in=tuple(last_seq_by_digest.items()),
        )
        file_name = f"{timestamp(note.at).replace(':', '')}-{os.urandom(4).hex()}.json"
        self._write_note(file_name, note)
        try:
            yield
        except NoSuchSession:
            (self._notes_folder / file_name).unlink(missing_ok=True)
            raise
        self._write_note(file_name, replace(note, made=datetime.now(UTC)))

    def _write_note(self, file_name: str, note: "_PurgeNote") -> None:
        try:
            _write_json(self._notes_folder, file_name, note)
        except OSError as error:
            reason = f"noting a purge in {self._notes_folder}: {error.strerror}"
            raise StoreUnavailable(reason) from error


def open_fallback(place: SessionsLocation, *, because: str) -> FallbackStore:
    """Open the fallback store. If no process uses it, first copy the legacy sessions into it.

    Raises StenologError or OSError if the fallback store cannot be written.
    """
    assert place.fallback is not None, "this store has a fallback"
    workspace = place.fallback
    disk.create_private_folder(workspace)
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
    """Take the shared lock as soon as no process merges the fallback store. Raises StoreBusy."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    while not _try_lock(lock, fcntl.LOCK_SH):
        if time.monotonic() > deadline:
            raise StoreBusy(f"{workspace}: another process is merging it")
        time.sleep(_POLL_SECONDS)


def _import_legacy_sessions(place: SessionsLocation, workspace: Path) -> None:
    """Copy the legacy sessions into the fallback store. The legacy files stay unchanged."""
    purged_keys = {purge.key for _, purge in _pending_purges(workspace)}
    with JSONLStore(workspace, namespace=NAMESPACE) as store:
        for folder, with_fallbacks in place.legacy_folders():
            report = import_folder(
                folder,
                store,
                thorough=False,
                rename_files=False,
                with_fallbacks=with_fallbacks,
                is_own=True,
                exclude_keys=purged_keys,
            )
            log_report(report, store)


# --- merging the fallback store into the regular store ---------------------------------------


def merge_fallback(place: SessionsLocation, store: Store) -> None:
    """Merge the fallback store into the regular store.

    Then rename the fallback's folder, unless a process uses it or a session could not be merged.
    Raises the errors of the regular store.
    """
    workspace = place.fallback
    if workspace is None:
        return
    try:
        lock = _open_lock(workspace, _LOCK_FLAGS)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            _logger.warning("%s cannot be merged: %s", workspace, error.strerror)
        return
    try:
        is_unused = False
        # On a file system without locks, `is_unused` stays False and the folder keeps its name.
        with suppress(OSError):
            is_unused = _try_lock(lock, fcntl.LOCK_EX)
        if not (workspace / NAMESPACE).is_dir():
            _repeat_purges(workspace, None, store, is_unused=False)
            return  # the fallback store was merged before
        try:
            fallback = JSONLStore(workspace, namespace=NAMESPACE, read_only=True)
        except StenologError as error:
            _logger.warning("%s cannot be merged: %s", workspace, error)
            return
        with fallback:
            _repeat_purges(workspace, fallback, store, is_unused=is_unused)
            folder = _FallbackFolder(fallback, store, workspace)
            report = merge_source(folder, store, folder.record_merge)
            _repeat_deletions(workspace, fallback, store)
        log_report(report, store)
        if is_unused and not report.skipped:
            _rename_merged_folder(workspace, report)
    finally:
        lock.release()


def _repeat_deletions(workspace: Path, fallback: JSONLStore, store: Store) -> None:
    """Repeat the deletions of the fallback store in the regular store.

    A deletion is not repeated if the session was changed later in the regular store, or if the
    fallback store has a new session with the same key.
    """
    live_keys = set(fallback.list_sessions())
    for deletion in fallback.list_trash():
        try:
            record = _read_merge_record(workspace, deletion.uid)
            if record.deleted == deletion.deleted:
                continue
            with suppress(NoSuchSession):
                key, deleted_at = deletion.key, deletion.deleted
                if key not in live_keys and store.info(key).updated <= deleted_at:
                    store.delete(key)
        except (StenologError, NotASession) as error:
            _logger.warning("the deletion of %r cannot be repeated: %s", deletion.key, error)
        else:
            _write_merge_record(workspace, deletion.key, replace(record, deleted=deletion.deleted))


def _rename_merged_folder(workspace: Path, report: ImportReport) -> None:
    time_text = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
    merged_folder = workspace / f"{NAMESPACE}.merged-{time_text}"
    try:
        (workspace / NAMESPACE).rename(merged_folder)
        disk.sync_entries(workspace)
    except OSError as error:
        _logger.warning("%s was merged, but cannot be renamed: %s", workspace, error.strerror)
        return
    shutil.rmtree(workspace / MERGED_FOLDER, ignore_errors=True)
    text = "%d messages of the fallback were merged; its files are in %s"
    _logger.info(text, report.messages, merged_folder)


def list_fallback_sessions(place: SessionsLocation) -> Iterator[tuple[str, str]]:
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
                keys = {mark.key for mark in fallback.list_snapshots()}
                yield from ((namespace, key) for key in keys)


def keys_purged_since_merge(place: SessionsLocation, store: Store) -> list[str]:
    """Return the keys of merged sessions that were purged in the regular store after the merge."""
    workspace = place.fallback
    if workspace is None or workspace.is_symlink() or not isinstance(store, SnapshotStore):
        return []
    records = []
    for path in (workspace / MERGED_FOLDER).glob("[!.]*.json"):
        with suppress(OSError, ValueError):
            records.append(convert(json.loads(path.read_bytes()), _MergeRecord))
    stored_uids = {mark.uid for mark in store.list_snapshots()} if records else set()
    purged_uids = {record.uid for record in records if not stored_uids.issuperset(record.stored)}
    if not purged_uids or not (workspace / NAMESPACE).is_dir():
        return []
    with JSONLStore(workspace, namespace=NAMESPACE, read_only=True) as fallback:
        return sorted({mark.key for mark in fallback.list_snapshots() if mark.uid in purged_uids})


class _FallbackFolder:
    """The fallback store as a `SourceFolder` of an import."""

    def __init__(self, fallback: JSONLStore, store: Store, workspace: Path) -> None:
        self._fallback = fallback
        self._store = store
        self._workspace = workspace
        self._records: dict[str, _MergeRecord] = {}
        """Merge record of each session, by the name of its source; written after the merge."""
        self.path = fallback.folder
        self.name = str(self.path)

    def sources(self) -> list[Source]:
        """Return every session that is not in the trash."""
        return [
            Source(name=escape_key(key) + LOG_SUFFIX, body=None, identifier=(key,))
            for key in self._fallback.list_sessions()
        ]

    def read(self, source: Source) -> SourceContent:
        """Return a session, without messages if it is unchanged since its last merge.

        Messages are also left out if they were merged into a session that the regular store no
        longer has. Raises NotASession for an unreadable session.
        """
        [key] = source.identifier
        try:
            mark = SnapshotMark(key=key, uid=self._fallback.info(key).uid, stamp="")
            with self._fallback.read_snapshot(mark) as reading:
                snapshot, messages = reading.snapshot, list(reading.messages)
        except StenologError as error:
            raise NotASession(str(error)) from error
        record = _read_merge_record(self._workspace, snapshot.uid)
        stored_uid = _session_uid(self._store, record.key) if record.stored else ""
        # If the regular store no longer has the session of an earlier merge, the messages of that
        # merge are not merged again into another session.
        after = record.after if record.stored[-1:] == (stored_uid,) else record.last_seq
        content = _to_source_content(snapshot, messages, after=after)
        self._records[source.name] = replace(
            record, after=after, last_seq=snapshot.last_seq, digest=content.digest
        )
        if content.digest == record.digest:
            empty_session = replace(content.session, messages=(), summary="", problems=())
            return replace(content, session=empty_session)
        return content

    def record_merge(self, source: Source, imported: ImportedSession) -> None:
        """Record that a session was merged, and into which session of the regular store."""
        record, uid = self._records[source.name], _session_uid(self._store, imported.key)
        earlier_uids = [stored_uid for stored_uid in record.stored if stored_uid != uid]
        stored_uids = (*earlier_uids, uid) if uid else tuple(earlier_uids)
        record = replace(record, key=imported.key, stored=stored_uids)
        if record != _read_merge_record(self._workspace, record.uid):
            _write_merge_record(self._workspace, source.identifier[0], record)


def _to_source_content(
    snapshot: Snapshot, messages: Sequence[Message], *, after: int
) -> SourceContent:
    """Return the session as a legacy session, with the messages whose seq is above `after`."""
    receipts = merge.receipts_of_imports(snapshot.meta)
    hidden_spans = spans.union([(1, snapshot.floor)] if snapshot.floor else [], snapshot.hidden)
    tokens = _message_tokens(snapshot, messages)
    unmerged_messages = tuple(
        JSONMessage(
            message.to_json(),
            message.at,
            tokens.get(message.seq),
            spans.contains(hidden_spans, message.seq),
        )
        for message in messages
        if message.seq > after
    )
    updated = datetime.fromisoformat(snapshot.updated)
    lost_count = spans.size(snapshot.lost)
    has_new_messages = any(message.once is not None for message in unmerged_messages)
    session = LegacySession(
        layout="stenolog-json",
        key=snapshot.key,
        messages=unmerged_messages,
        summary="" if after else snapshot.summary,
        meta={} if after else omit(snapshot.meta, *_UNMERGED_FIELDS),
        created=datetime.fromisoformat(snapshot.created),
        updated=updated,
        problems=(f"{lost_count} messages of the fallback cannot be read",) if lost_count else (),
    )
    # A legacy session without new messages in the fallback store is as old as its file.
    times = [at for receipt in receipts if (at := parse_go_time(receipt.get("updated")))]
    mtime = updated if has_new_messages else max(times, default=updated)
    return SourceContent(session, _session_digest(snapshot, session), mtime, ())


def _message_tokens(snapshot: Snapshot, messages: Sequence[Message]) -> dict[int, str]:
    """Return the token of each message that was added to the fallback store, by seq.

    Messages from legacy files have no token.
    """
    receipts = merge.receipts_of_imports(snapshot.meta)
    import_mark = snapshot.meta.get("importing")
    import_marks = [*receipts, import_mark] if isinstance(import_mark, dict) else receipts
    prefixes = tuple(f"import:{mark.get('sha256')}:" for mark in import_marks)
    last_imported_seq = max(_last_seq_by_digest(receipts).values(), default=0)
    given_tokens: dict[int, str] = {}
    for message in messages:
        token_and_count = token_of(message)
        if token_and_count is not None:
            token, count = token_and_count
            given_tokens |= dict.fromkeys(range(message.seq, message.seq + count), token)
    tokens = {}
    for seq in (message.seq for message in messages):
        if seq in given_tokens:
            if not given_tokens[seq].startswith(prefixes):
                tokens[seq] = given_tokens[seq]
        elif seq > last_imported_seq:
            tokens[seq] = f"fallback:{snapshot.uid}:{seq}"  # guard: fallback-merged-by-uid-and-seq
    return tokens


def _last_seq_by_digest(receipts: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the last seq of the session after each import, by the digest of the imported file."""
    return {
        receipt["sha256"]: receipt["last_seq"]
        for receipt in receipts
        if isinstance(receipt.get("sha256"), str) and isinstance(receipt.get("last_seq"), int)
    }


def _session_digest(snapshot: Snapshot, session: LegacySession) -> str:
    """Return a digest that differs after every change of the session."""
    *_, messages_digest = ["", *merge.prefix_digests(session.messages)]
    hidden_flags = [message.hidden for message in session.messages]
    digested_values = [snapshot.uid, snapshot.last_seq, messages_digest, hidden_flags]
    digested_values += [session.summary, session.meta]
    return sha256(json.dumps(digested_values, sort_keys=True).encode()).hexdigest()


# --- records of merges -----------------------------------------------------------------------


class _MergeRecord(Struct, frozen=True, kw_only=True):
    """Record of the merges of one session of the fallback store."""

    uid: str
    after: int = 0
    """Messages up to this seq were merged into a session that the regular store no longer has."""
    last_seq: int = 0
    """Seq of the last merged message."""
    digest: str = ""
    """Digest of the merged content."""
    key: str = ""
    """Key of the session in the regular store into which this session was merged."""
    stored: tuple[str, ...] = ()
    """Uids of all sessions in the regular store into which this session was merged, newest last."""
    deleted: datetime | None = None
    """Time of the last deletion in the fallback store that a merge has processed."""


def _read_merge_record(workspace: Path, uid: str) -> _MergeRecord:
    """Return the merge record of a session, or a new empty record. Raises NotASession."""
    try:
        text = (workspace / MERGED_FOLDER / f"{escape_key(uid)}.json").read_bytes()
        return convert(json.loads(text), _MergeRecord)
    except (FileNotFoundError, NotADirectoryError):
        return _MergeRecord(uid=uid)
    except (OSError, ValueError) as error:
        raise NotASession(f"the record of its merge cannot be read: {error}") from error


def _write_merge_record(workspace: Path, key: str, record: _MergeRecord) -> None:
    try:
        _write_json(workspace / MERGED_FOLDER, f"{escape_key(record.uid)}.json", record)
    except OSError as error:
        text = "the merge of %r cannot be recorded, so the next start repeats it: %s"
        _logger.warning(text, key, error.strerror)


def _write_json(folder: Path, file_name: str, fields: Struct) -> None:
    """Write the fields to a JSON file durably. Raises OSError."""
    disk.create_private_folder(folder)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    with closing(disk.open_descriptor(folder, flags)) as descriptor:
        disk.replace_file(descriptor, file_name, json.dumps(to_builtins(fields)).encode())


def _session_uid(store: Store, key: str) -> str:
    """Return the uid of a session; empty if the session is missing. Raises the store's errors."""
    info = find_info(store, key) if key else None
    return "" if info is None else info.uid


# --- purges ----------------------------------------------------------------------------------


class _PurgeNote(Struct, frozen=True, kw_only=True):
    """Note of a purge in the fallback store."""

    key: str
    at: datetime
    """Time at which the purge started. The merge keeps newer messages."""
    made: datetime | None = None
    """Time at which the purge ended; None if it is unknown whether the purge took effect."""
    before: int | None = None
    """Only messages with a lower seq were purged; None if whole sessions were purged."""
    uids: tuple[str, ...] = ()
    """Uids of the purged sessions."""
    is_trash: bool = False
    """Whether only some deleted sessions are purged, not every session with this key."""
    read_in: tuple[tuple[str, int], ...] = ()
    """For each imported legacy file: its digest, and the session's last seq after the import."""


def _pending_purges(workspace: Path) -> list[tuple[Path, _PurgeNote]]:
    """Return the purges that are not yet repeated, oldest first, each with the file of its note."""
    purges = []
    for path in sorted((workspace / PURGES_FOLDER).glob("[!.]*.json")):
        try:
            purges.append((path, convert(json.loads(path.read_bytes()), _PurgeNote)))
        except (OSError, ValueError) as error:
            _logger.warning(
                "%s: a purge made in the fallback cannot be repeated in the store: %s", path, error
            )
    return purges


def _repeat_purges(
    workspace: Path, fallback: JSONLStore | None, store: Store, *, is_unused: bool
) -> None:
    """Repeat the noted purges in the regular store.

    If a purge cannot be repeated, its note stays and a warning is logged. If messages or sessions
    remain, the note is renamed to `.left`. If no process uses the fallback store (`is_unused`), the
    note of a purge that did not take effect is deleted.
    """
    for path, purge in _pending_purges(workspace):
        try:
            if not _has_taken_effect(purge, fallback):
                if is_unused:
                    path.unlink()
                continue
            reason = _repeat_purge(purge, store)
            for uid in purge.uids if purge.before is None else ():
                (workspace / MERGED_FOLDER / f"{escape_key(uid)}.json").unlink(missing_ok=True)
            if reason:
                text = "a purge in the fallback is not fully repeated for %r: %s"
                _logger.warning(text, purge.key, reason)
                path.rename(path.with_suffix(".left"))
            else:
                path.unlink()
        except StenologError as error:
            _logger.warning(
                "%r was purged in the fallback, but cannot be purged in the store yet: %s",
                purge.key,
                error,
            )
        except OSError as error:
            _logger.warning("%s: cannot be changed: %s", path, error.strerror)


def _has_taken_effect(purge: _PurgeNote, fallback: JSONLStore | None) -> bool:
    """Return whether the purge has deleted the messages from the fallback store."""
    if purge.made is not None:
        return True
    if fallback is None or not purge.uids:
        return False
    if purge.before is None:
        return {mark.uid for mark in fallback.list_snapshots()}.isdisjoint(purge.uids)
    try:
        is_same_session = fallback.info(purge.key).uid in purge.uids
        first_seqs = [message.seq for message in fallback.get_history(purge.key, full=True)][:1]
    except (NoSuchSession, DamagedStore):
        return False
    return is_same_session and bool(first_seqs) and first_seqs[0] >= purge.before


def _repeat_purge(purge: _PurgeNote, store: Store) -> str:
    """Repeat a purge in the regular store. Return why messages remain; empty if none remain.

    Only messages that are older than the purge are deleted. Raises StenologError.
    """
    if purge.before is None and not purge.is_trash:
        return _purge_sessions(purge, store)
    info = find_info(store, purge.key)
    if info is None:
        return ""
    seq_by_digest = _last_seq_by_digest(merge.receipts_of_imports(info.meta))
    # Up to this seq, both stores have the same messages, imported from the same file.
    common_seq = max(
        (seq for digest, seq in purge.read_in if seq_by_digest.get(digest) == seq), default=0
    )
    if not common_seq:
        return ""  # the store has no message of these sessions
    if purge.before is not None:
        store.purge(purge.key, before=min(purge.before, common_seq + 1))
        return ""
    if info.last_seq > common_seq:
        return "the session was also used in the store"
    return _purge_sessions(purge, store)


def _purge_sessions(purge: _PurgeNote, store: Store) -> str:
    """Purge the sessions of a key that are older than the purge in the fallback store.

    If a session also has newer messages, the newer messages stay. Return why sessions remain; empty
    if none remain.
    """
    key = purge.key
    trash = [trashed for trashed in store.list_trash() if trashed.key == key]
    old_sessions: list[DeletedSession] = []
    if not purge.is_trash:
        old_sessions = [(t.uid, t.deleted) for t in trash if t.deleted <= purge.at]
    purges_all_trash = len(old_sessions) == len(trash)
    is_older = True
    with suppress(NoSuchSession):
        info = store.info(key)
        is_older = _is_older_than_purge(purge, info)
        if is_older:
            history = store.get_history(key, full=True)
            newer_seqs = [message.seq for message in history if message.at > purge.at]
            if newer_seqs:
                store.purge(key, before=newer_seqs[0])
            elif purges_all_trash:
                store.purge(key)
                return ""
            else:
                old_sessions.append(_delete_unchanged(info, store))
    if old_sessions and isinstance(store, PurgingStore):
        store.purge_trash(key, old_sessions)
    if not is_older:
        return "the session was created or imported after the purge"
    return "" if purges_all_trash or purge.is_trash else "the trash has newer sessions"


def _is_older_than_purge(purge: _PurgeNote, info: SessionInfo) -> bool:
    """Return whether a session is older than the purge, or was imported from a purged file."""
    if info.lost and info.updated > purge.at:
        raise DamagedStore(f"{info.key!r} has messages that cannot be read, and may be newer")
    purge_end = purge.made or purge.at
    purged_digests = {digest for digest, _ in purge.read_in}
    receipts = merge.receipts_of_imports(info.meta)
    for receipt in receipts:
        # Messages of a fallback store have the time at which they were added. Messages of other
        # files may have any time, so the time of the import counts.
        import_time = parse_go_time(receipt.get(merge.IMPORT_TIME))
        is_foreign = (
            receipt.get("sha256") not in purged_digests and receipt.get("from") != "stenolog-json"
        )
        if is_foreign and (import_time is None or import_time > purge_end):
            return False
    return info.created <= purge_end or not purged_digests.isdisjoint(_last_seq_by_digest(receipts))


def _delete_unchanged(info: SessionInfo, store: Store) -> DeletedSession:
    """Move a session to the trash. If it differs from `info`, restore it and raise StoreBusy."""
    trashed = store.delete(info.key)
    if (trashed.uid, trashed.count) != (info.uid, info.count):
        store.restore(info.key, uid=trashed.uid)
        raise StoreBusy(f"{info.key!r} is in use")
    return trashed.uid, trashed.deleted


# --- the lock --------------------------------------------------------------------------------


def _open_lock(workspace: Path, flags: int) -> disk.Descriptor:
    if workspace.is_symlink():  # guard: fallback-no-link
        raise OSError(errno.ELOOP, "the folder is a symbolic link, which is not followed")
    return disk.open_descriptor(workspace / LOCK_FILE, flags)


def _try_lock(lock: disk.Descriptor, lock_mode: int) -> bool:
    """Try to take the lock without waiting. Raises OSError if the file system has no locks."""
    try:
        fcntl.flock(lock, lock_mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
