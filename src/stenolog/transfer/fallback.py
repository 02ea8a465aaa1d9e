"""The fallback store: a JSONL folder that keeps the sessions while the regular store is unusable.

The fallback store is an ordinary JSONL store, except that it refuses to delete or purge. Opening
the fallback store copies legacy sessions into it, so that the agent can read them. The next
successful start adds the messages that the fallback store acknowledged to the regular store. Then
it renames the folder.

Each process that uses the fallback store holds a shared lock, and a merge holds an exclusive lock.
So only one process merges, and nobody changes the fallback store meanwhile. Other processes may use
the regular store, and delete the sessions that the merge writes to. The merge is a small protocol,
so that each message is added exactly once, even if a merge is killed (docs/decisions/0015):

1. A merge record, next to the folder, says which messages the merge will add.
2. The messages are added, each with its idempotency key, or with a key made of uid and seq.
3. Summary, hidden messages and meta are merged.
4. The merge record says that these messages were added.

If a merge record has step 1 and not step 4, the next merge looks for the keys of these messages in
all sessions that the killed merge may have written to, deleted or not.
"""

import errno
import fcntl
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Never

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from stenolog.catalog.message_metadata import AnsweredMessages, answered_seqs, is_received
from stenolog.errors import (
    Conflict,
    DamagedStore,
    NoSuchSession,
    OnceConflict,
    StenologError,
    StoreBusy,
    StoreUnavailable,
    UsageError,
)
from stenolog.messages import calls_of
from stenolog.records import (
    Health,
    Message,
    PurgeResult,
    SessionInfo,
    Span,
    TrashedSession,
    timestamp,
)
from stenolog.sessions.aliases import Aliases
from stenolog.sessions.chat_marks import DELIVERY_FIELD, MOVE_FIELD, merge_marks, read_mark
from stenolog.sessions.folders import NAMESPACE, SessionsLocation, log_folders
from stenolog.stores import disk, spans, withdrawn_messages
from stenolog.stores.admin import DeletedSession
from stenolog.stores.base import Store, find_info
from stenolog.stores.file_names import escape_key, key_of_log, log_name
from stenolog.stores.jsonl import JSONLStore
from stenolog.stores.jsonl.admin import JSONLAdmin
from stenolog.stores.jsonl.directory import log_files
from stenolog.stores.snapshots import Snapshot, SnapshotMark, token_of
from stenolog.transfer import merge
from stenolog.transfer.importers.legacy_session import UNMERGED_FIELDS
from stenolog.transfer.merge import (
    AnswerSeqs,
    find_equal_messages,
    message_of,
    without_answer_seqs,
)
from stenolog.transfer.migration import import_folder, log_report

LOCK_TIMEOUT: Final = 60.0
"""Seconds that opening a store waits for another process that merges the fallback store."""
LOCK_FILE: Final = "fallback.lock"
MERGED_FOLDER: Final = "merged"
"""Name of the folder with a merge record for each session."""
_POLL_SECONDS: Final = 0.05
_MARK_FIELDS: Final = (DELIVERY_FIELD, MOVE_FIELD)
"""Meta fields that are merged with the seqs of the store's session."""
_MOVED_TEXT: Final = "another process has just moved the session in the store"

_logger = logging.getLogger("stenolog")


class _CannotMerge(StenologError):
    """A session cannot be merged now. The next start tries again."""


class FallbackStore(JSONLStore):
    """The open fallback store. `health` is never ok, and says why this store is used."""

    def __init__(self, workspace: Path, lock: disk.Descriptor, *, reason: str) -> None:
        super().__init__(workspace, namespace=NAMESPACE)
        self.reason = reason
        self._fallback_lock = lock

    def delete(self, key: str) -> TrashedSession:
        """Always raises StoreUnavailable."""
        _refuse("delete", key)

    @property
    def admin(self) -> "FallbackAdmin":
        """The calls that administer the store."""
        return FallbackAdmin(self)

    def close(self) -> None:
        """Close the store and give up the lock.

        A forked child that still uses the store keeps the lock until it ends.
        """
        super().close()
        self._fallback_lock.close()


class FallbackAdmin(JSONLAdmin):
    """Administration of the fallback store, which purges nothing."""

    _store: FallbackStore

    def delete_unchanged(self, info: SessionInfo) -> TrashedSession | None:
        """Always raises StoreUnavailable."""
        _refuse("delete", info.key)

    def purge(
        self,
        key: str,
        *,
        before: int | None = None,
        trash: Collection[DeletedSession] | None = None,
    ) -> PurgeResult:
        """Always raises StoreUnavailable."""
        del before, trash
        _refuse("purge", key)

    def finish_purge(self, uid: str) -> PurgeResult:
        """Always raises StoreUnavailable."""
        _refuse("purge", uid)

    def health(self) -> Health:
        """Return the health: never ok, because the sessions belong in the regular store."""
        health = super().health()
        reason = (
            f"sessions are kept in {self._store.folder} for this run, and merged when the store "
            f"can be used again: {self._store.reason}"
        )
        return Health(ok=False, free_bytes=health.free_bytes, problems=(reason, *health.problems))


def _refuse(action: str, name: str) -> Never:
    """Raise the error of a call that destroys messages or moves them to the trash."""
    reason = (
        f"cannot {action} {name!r}: this is a fallback store, and the regular store, which "
        "cannot be used, may have the same session; make the regular store usable, restart "
        f"the program, and then {action} the session"
    )
    raise StoreUnavailable(reason)


def open_fallback(place: SessionsLocation, *, reason: str) -> FallbackStore:
    """Open the fallback store. If no process uses it, first copy the legacy sessions into it.

    Raises StenologError or OSError if the fallback store cannot be written.
    """
    assert place.fallback is not None, "this store has a fallback"
    workspace = place.fallback
    disk.create_private_folder(workspace)
    lock = _open_lock(workspace)
    try:
        if _try_lock(lock, fcntl.LOCK_EX):
            _import_legacy_sessions(place, workspace)
        _wait_for_merge(workspace, lock)
        return FallbackStore(workspace, lock, reason=reason)
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
    with JSONLStore(workspace, namespace=NAMESPACE) as store:
        for folder, with_fallbacks in place.legacy_folders():
            report = import_folder(
                folder,
                store,
                thorough=False,
                rename_files=False,
                with_fallbacks=with_fallbacks,
                is_own=True,
            )
            log_report(report, store)


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
                keys = {mark.key for mark in fallback.admin.list_snapshots()}
                yield from ((namespace, key) for key in keys)


# --- merging the fallback store into the regular store ---------------------------------------


def merge_fallback(place: SessionsLocation, store: Store) -> None:
    """Merge the fallback store into the regular store, and rename the fallback's folder.

    Does nothing while a process uses the fallback store. If another process merges it, this call
    waits for that process. The folder keeps its name if a message could not be merged.
    Raises the errors of the regular store.
    """
    workspace = place.fallback
    if workspace is None or not (workspace / NAMESPACE).is_dir():
        return
    try:
        lock = _open_lock(workspace)
    except OSError as error:
        _logger.warning("%s cannot be merged: %s", workspace, error.strerror)
        return
    try:
        if _lock_for_merge(workspace, lock) and (workspace / NAMESPACE).is_dir():
            _merge_folder(workspace, store)
    finally:
        lock.release()


def _lock_for_merge(workspace: Path, lock: disk.Descriptor) -> bool:
    """Take the exclusive lock, and return whether this process may merge the fallback store."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    try:
        while not _try_lock(lock, fcntl.LOCK_EX):  # guard: fallback-one-merger
            if _try_lock(lock, fcntl.LOCK_SH):
                text = "%s is used by another process; a start after its end merges the messages"
                _logger.warning(text, workspace)
                return False
            if time.monotonic() > deadline:
                _logger.warning("%s: another process is still merging it", workspace)
                return False
            time.sleep(_POLL_SECONDS)
    except OSError as error:
        _logger.warning("%s cannot be merged: %s", workspace / LOCK_FILE, error.strerror)
        return False
    return True


def _merge_folder(workspace: Path, store: Store) -> None:
    """Merge every session of the fallback store. Then rename the folder if nothing was left out."""
    try:
        fallback = JSONLStore(workspace, namespace=NAMESPACE, read_only=True)
    except StenologError as error:
        _logger.warning("%s cannot be merged: %s", workspace, error)
        return
    with fallback:
        merger = _Merger(workspace, fallback, store)
        # An empty log is left by a first write that was interrupted.
        paths = [Path(path) for path in log_files(fallback.folder)]
        log_names = {path.name for path in paths if path.stat().st_size}
        keys = {key_of_log(name) for name in log_names} | set(fallback.list_sessions())
        unknown_names = log_names - {log_name(key) for key in keys if key is not None}
        problems = dict.fromkeys(unknown_names, "it is not a log of stenolog, or it is damaged")
        for key in sorted(key for key in keys if key is not None):
            try:
                problem = merger.merge_session(key)
            except (_CannotMerge, DamagedStore, UsageError) as error:
                problem = str(error)
            if problem:
                problems[log_name(key)] = problem
    for name, problem in problems.items():
        text = "%s was not merged completely, so the folder is kept: %s"
        _logger.warning(text, fallback.folder / name, problem)
    if not problems:
        _rename_merged_folder(workspace, merger.added_count)


def _rename_merged_folder(workspace: Path, added_count: int) -> None:
    merged_folder = workspace / f"{NAMESPACE}.merged-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
    try:
        (workspace / NAMESPACE).rename(merged_folder)
        disk.sync_entries(workspace)
    except OSError as error:
        _logger.warning("%s was merged, but cannot be renamed: %s", workspace, error.strerror)
        return
    shutil.rmtree(workspace / MERGED_FOLDER, ignore_errors=True)
    text = "%d messages of the fallback were merged; its files are in %s"
    _logger.info(text, added_count, merged_folder)


class _Batch(Struct, frozen=True, kw_only=True):
    """Messages that the fallback store acknowledged together."""

    uid: str
    """Uid of the session in the fallback store."""
    first: int
    """Seq of the first message in the fallback store."""
    token: str
    """Idempotency key in the regular store."""
    own_token: str
    """Key made of uid and seq; used if the session has other messages with the key `token`."""
    messages: list[Message]

    def part(self, included: Sequence[Span]) -> "_Batch | None":
        """Return a batch of those messages whose seqs are in `included`; None if there are none."""
        messages = [m for m in self.messages if spans.contains(included, m.seq)]
        if not messages or len(messages) == len(self.messages):
            return self if messages else None
        first = messages[0].seq
        own_token = _own_token(self.uid, first)
        token = self.token if first == self.first else own_token
        return replace(self, first=first, token=token, own_token=own_token, messages=messages)

    def singles(self) -> "list[_Batch]":
        """Return a batch for each message."""
        parts = (self.part([(message.seq, message.seq)]) for message in self.messages)
        return [part for part in parts if part is not None]


class _StoredSession(Struct, frozen=True, kw_only=True):
    """A session of the regular store."""

    snapshot: Snapshot
    payloads: dict[int, bytes]
    """Readable messages by seq, without the seqs that they name."""
    tokens: dict[str, int]
    """First seq of each idempotency key."""
    answers: list[int]
    """Seqs of the answers that name the messages that they answer."""

    def find(self, batch: _Batch) -> int | None:
        """Return the seq of the first message of the batch; None if the batch is not stored."""
        for token in (batch.token, batch.own_token):
            first = self.tokens.get(token)
            if first is not None and all(
                self.payloads.get(first + number) == without_answer_seqs(message.to_json())
                for number, message in enumerate(batch.messages)
            ):
                return first
        return None

    def find_seqs(self, batch: _Batch) -> dict[int, int]:
        """Return the seqs of the stored messages of the batch, by their seqs in the fallback."""
        first = self.find(batch)
        if first is not None:
            return {message.seq: first + number for number, message in enumerate(batch.messages)}
        # A message that was damaged for a time is stored alone.
        found = {single.first: self.find(single) for single in batch.singles()}
        return {seq: stored_seq for seq, stored_seq in found.items() if stored_seq is not None}


class _Merger:
    """Merges sessions of the fallback store into the regular store."""

    def __init__(self, workspace: Path, fallback: JSONLStore, store: Store) -> None:
        self._workspace = workspace
        self._fallback = fallback
        self._store: Store = store
        self._snapshots = store.admin
        self.added_count = 0

    def merge_session(self, key: str) -> str:
        """Merge one session. Return why it is incomplete; empty if every message is merged.

        Raises _CannotMerge, DamagedStore or UsageError if this session cannot be merged, and any
        other error of the regular store.
        """
        try:
            mark = SnapshotMark(key=key, uid=self._fallback.info(key).uid)
            with self._fallback.admin.read_snapshot(mark) as reading:
                snapshot, messages = reading.snapshot, list(reading.messages)
        except NoSuchSession:
            return ""  # its first write was interrupted, so no message was acknowledged
        except StenologError as error:
            raise _CannotMerge(str(error)) from error
        batches = _acknowledged_batches(snapshot, messages)
        record = stored_record = self._read_record(snapshot.uid)
        if record.begun:  # a merge was killed  # guard: fallback-merge-begun
            sessions = self._read_possible_targets(record)
            old_batches = _parts(batches, record.begun)
            missing = [batch for old in old_batches for batch in _missing_parts(old, sessions)]
            record = self._add(missing, snapshot, batches, record)
            merged = spans.union(record.merged, _spans_of(old_batches))
            record = replace(record, merged=tuple(merged), begun=())
        readable = spans.from_seqs(message.seq for message in messages)
        new_batches = _parts(batches, spans.minus(readable, record.merged))
        if new_batches:
            record = self._begin(record, key, _spans_of(new_batches))
            record = self._add(new_batches, snapshot, batches, record)
        lost = _find_lost(snapshot, messages)
        digest = _state_digest(snapshot, lost)
        if record.state != digest:
            self._merge_move(snapshot, record)  # guard: fallback-move-merged
            self._merge_state(snapshot, messages, batches, record)
        marks = {name: snapshot.meta[name] for name in _MARK_FIELDS if name in snapshot.meta}
        merged = spans.union(record.merged, readable)
        record = replace(record, merged=tuple(merged), begun=(), state=digest, marks=marks)
        if record != stored_record:
            self._write_record(record)
        return _describe_lost(lost)

    def _target_key(self, key: str) -> str:
        """Return `key` if a session has this key, else the key of the session with this alias."""
        return key if find_info(self._store, key) is not None else self._aliases.get(key, key)

    @cached_property
    def _aliases(self) -> Mapping[str, str]:
        return dict(Aliases(self._store).owners())

    @cached_property
    def _trash(self) -> list[TrashedSession]:
        # Read before the first message is added, so that no session of this merge is in the list.
        return self._store.admin.list_trash()

    # --- messages ----------------------------------------------------------------------------

    def _begin(self, record: "_MergeRecord", key: str, begun: Sequence[Span]) -> "_MergeRecord":
        """Record durably that the messages with these seqs will be added."""
        target_key = self._target_key(key)
        info = find_info(self._store, target_key)
        record = replace(
            record,
            begun=tuple(begun),
            keys=tuple(dict.fromkeys((key, target_key))),
            target="" if info is None else info.uid,
            old_trash=tuple(
                (trashed.uid, timestamp(trashed.deleted))
                for trashed in self._trash
                if trashed.key in (key, target_key)
            ),
        )
        self._write_record(record)
        return record

    def _add(
        self,
        batches: Iterable[_Batch],
        snapshot: Snapshot,
        all_batches: Sequence[_Batch],
        record: "_MergeRecord",
    ) -> "_MergeRecord":
        """Add the batches to the session with this key or alias, or to a new session.

        Return the record, which names a new session as soon as it exists.
        """
        uid: str | None = None
        answer_seqs = AnswerSeqs()
        for batch in batches:
            target_key = self._target_key(snapshot.key)
            info = find_info(self._store, target_key)
            if uid is None or uid != ("" if info is None else info.uid):
                # The first batch, or another process has deleted or restored a session.
                answer_seqs = self._read_answer_seqs(info, snapshot, all_batches)
            answer_seqs.add(
                [message.seq for message in batch.messages],
                self._add_batch(target_key, batch, answer_seqs),
            )
            if info is None:
                info = find_info(self._store, target_key)
            uid = "" if info is None else info.uid
            if not record.target and uid:
                record = replace(record, target=uid)
                self._write_record(record)
        return record

    def _read_answer_seqs(
        self, info: SessionInfo | None, snapshot: Snapshot, batches: Sequence[_Batch]
    ) -> AnswerSeqs:
        """Return which messages of the fallback a session of the store has. Raises _CannotMerge."""
        if info is None:
            return AnswerSeqs()
        try:
            stored = self._read_stored(SnapshotMark(key=info.key, uid=info.uid))
            view = self._store.view(info.key)
        except NoSuchSession as error:
            raise _CannotMerge(_MOVED_TEXT) from error
        if view.uid != info.uid:
            raise _CannotMerge(_MOVED_TEXT)
        return AnswerSeqs.in_view(view, _stored_seqs(snapshot, batches, stored))

    def _add_batch(self, key: str, batch: _Batch, answer_seqs: AnswerSeqs) -> list[int]:
        """Add the messages of a batch, and return their seqs. Raises _CannotMerge."""
        payloads = [message.to_json() for message in batch.messages]
        messages = [
            message_of(answer_seqs.payload_for(payload, message.seq))
            for payload, message in zip(payloads, batch.messages, strict=True)
        ]
        times = [message.at for message in batch.messages]
        for token in (batch.token, batch.own_token):
            try:
                seqs = self._store.add_messages(key, messages, once=token, at=times)
            except OnceConflict as conflict:
                # The store has these messages with other seqs, or other messages.
                if seqs := find_equal_messages(self._store, key, conflict.seq, payloads):
                    return seqs
            else:
                self.added_count += len(messages)
                return seqs
        raise _CannotMerge(f"another message has the idempotency key of message {batch.first}")

    def _read_possible_targets(self, record: "_MergeRecord") -> list[_StoredSession]:
        """Return the sessions to which an interrupted merge may have added messages.

        These are all sessions with the key of the session, deleted or not. Sessions that were
        already in the trash before that merge are left out: they may have the same idempotency
        keys, but not these messages. Raises _CannotMerge if one of the sessions cannot be read.
        """
        marks = [
            mark
            for mark in self._snapshots.list_snapshots()
            if (mark.key in record.keys or mark.uid == record.target != "")
            and (mark.uid, mark.deleted) not in record.old_trash
        ]
        for mark in marks:
            if not mark.uid or mark.problem:
                reason = mark.problem or "its log is damaged"
                raise _CannotMerge(f"{mark.key!r} in the store cannot be read: {reason}")
        try:
            return [self._read_stored(mark) for mark in marks]
        except NoSuchSession as error:
            raise _CannotMerge(_MOVED_TEXT) from error

    def _read_stored(self, mark: SnapshotMark) -> _StoredSession:
        payloads, tokens, answers = {}, {}, []
        with self._snapshots.read_snapshot(mark) as reading:
            for message in reading.messages:
                # guard: fallback-found-without-seqs
                payloads[message.seq] = without_answer_seqs(message.to_json())
                token_and_count = token_of(message)
                if token_and_count is not None:
                    tokens[token_and_count[0]] = message.seq
                if answered_seqs(message.to_dict()) is not None:
                    answers.append(message.seq)
            return _StoredSession(
                snapshot=reading.snapshot, payloads=payloads, tokens=tokens, answers=answers
            )

    # --- summary, hidden messages and meta ---------------------------------------------------

    def _merge_move(self, snapshot: Snapshot, record: "_MergeRecord") -> None:
        """Merge the move of a chat to another session, which is the newest one."""
        move = snapshot.meta.get(MOVE_FIELD)
        if move is not None and move != record.marks.get(MOVE_FIELD):
            # The chat's first session may have no message.
            self._store.set_meta(self._target_key(snapshot.key), **{MOVE_FIELD: move})

    def _merge_state(
        self,
        snapshot: Snapshot,
        messages: Sequence[Message],
        batches: Sequence[_Batch],
        record: "_MergeRecord",
    ) -> None:
        """Merge summary, hidden messages and meta into the live session, if it still exists."""
        key = self._target_key(snapshot.key)
        info = find_info(self._store, key)
        if info is None:
            return
        with suppress(NoSuchSession):
            stored = self._read_stored(SnapshotMark(key=key, uid=info.uid))
            seqs = _stored_seqs(snapshot, batches, stored)
            if self._store.info(key).uid != info.uid:
                return  # another session has the key now
            # Summary and meta may describe messages that were deleted in the store.
            if all(message.seq in seqs for message in messages):
                if snapshot.summary and stored.payloads.keys() <= set(seqs.values()):
                    self._merge_summary(key, snapshot, stored.snapshot, seqs)
                self._merge_meta(key, snapshot.meta, stored.snapshot.meta)
            # guard: fallback-delivery-merged
            self._merge_delivery(key, snapshot, stored, seqs, record)
            hidden = spans.union(snapshot.hidden, withdrawn_messages.withdrawn_seqs(snapshot.meta))
            if snapshot.floor and not snapshot.summary:
                hidden = spans.union(hidden, [(1, snapshot.floor)])
            settled = _find_settled(messages, _find_lost(snapshot, messages), seqs)
            hidden_seqs = [seqs[n] for n in seqs if n in settled or spans.contains(hidden, n)]
            for first, last in spans.from_seqs(hidden_seqs):
                self._store.admin.hide(key, first, last)

    def _merge_summary(
        self, key: str, snapshot: Snapshot, stored: Snapshot, seqs: Mapping[int, int]
    ) -> None:
        """Set the summary and hide the messages that it describes, unless there is a newer one."""
        digests = [
            receipt.get(merge.SUMMARY_DIGEST) for receipt in merge.receipts_of_imports(stored.meta)
        ]
        is_untouched = not stored.summary or merge.summary_digest(stored.summary) in digests
        floor = max((seqs[seq] for seq in seqs if seq <= snapshot.floor), default=0)
        if not is_untouched or floor < stored.floor:
            return
        if (snapshot.summary, floor) != (stored.summary, stored.floor):
            with suppress(Conflict):  # another process has just written a summary
                self._store.checkpoint(
                    key, summary=snapshot.summary, upto=floor, expect_floor=stored.floor
                )

    def _merge_meta(self, key: str, meta: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
        """Set the fields that the session in the store lacks."""
        new_names = meta.keys() - stored.keys() - UNMERGED_FIELDS
        try:
            if new_names:
                self._store.set_meta(key, **{name: meta[name] for name in new_names})
        except UsageError as error:
            _logger.warning("the meta of %r was not merged: %s", key, error)

    def _merge_delivery(
        self,
        key: str,
        snapshot: Snapshot,
        stored: _StoredSession,
        seqs: Mapping[int, int],
        record: "_MergeRecord",
    ) -> None:
        """Merge which answers were delivered, so that no answer is delivered twice."""
        added, merged_before = read_mark(snapshot.meta), read_mark(record.marks)
        if added is None:
            return
        mark = read_mark(stored.snapshot.meta)
        new_mark = merge_marks(
            mark, added, merged_before=merged_before, seqs=seqs, answers=stored.answers
        )
        if new_mark.seq and new_mark != mark:
            self._store.set_meta(key, **{DELIVERY_FIELD: to_builtins(new_mark)})

    # --- merge records -----------------------------------------------------------------------

    def _read_record(self, uid: str) -> "_MergeRecord":
        """Return the merge record of a session, or a new empty record. Raises _CannotMerge."""
        try:
            text = (self._workspace / MERGED_FOLDER / f"{escape_key(uid)}.json").read_bytes()
            return convert(json.loads(text), _MergeRecord)
        except FileNotFoundError:
            return _MergeRecord(uid=uid)
        except (OSError, ValueError) as error:
            raise _CannotMerge(f"the record of its merge cannot be read: {error}") from error

    def _write_record(self, record: "_MergeRecord") -> None:
        """Write the merge record durably. Raises _CannotMerge."""
        folder, name = self._workspace / MERGED_FOLDER, f"{escape_key(record.uid)}.json"
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        try:
            disk.create_private_folder(folder)
            with closing(disk.open_descriptor(folder, flags)) as descriptor:
                disk.replace_file(descriptor, name, json.dumps(to_builtins(record)).encode())
        except OSError as error:
            reason = f"the record of its merge cannot be written: {error.strerror}"
            raise _CannotMerge(reason) from error


class _MergeRecord(Struct, frozen=True, kw_only=True):
    """Record of the merges of one session of the fallback store."""

    uid: str
    merged: tuple[Span, ...] = ()
    """Seqs of the messages that were added to the regular store, and are never added again."""
    begun: tuple[Span, ...] = ()
    """Seqs of further messages that may have been added."""
    marks: dict[str, Any] = {}
    """Merged delivery mark and move of the session, with the seqs of the fallback store."""
    state: str = ""
    """Digest of the merged summary, hidden messages and meta."""
    keys: tuple[str, ...] = ()
    """Keys of the sessions to which the messages in `begun` may have been added."""
    target: str = ""
    """Uid of the session to which messages in `begun` were added; empty if it is not known."""
    old_trash: tuple[tuple[str, str], ...] = ()
    """Uid and time of each deletion of a session with such a key before the merge began."""


def _acknowledged_batches(snapshot: Snapshot, messages: Sequence[Message]) -> list[_Batch]:
    """Return the messages that were added to the fallback store, without copies of legacy files.

    The regular store imports the legacy files itself.
    """
    receipts: list[Any] = merge.receipts_of_imports(snapshot.meta)
    import_mark = snapshot.meta.get("importing")
    import_marks = [*receipts, import_mark] if isinstance(import_mark, dict) else receipts
    import_prefixes = tuple(f"import:{mark.get('sha256')}:" for mark in import_marks)
    # A JSON file of SessionManager has idempotency keys of its own.
    copied_upto = max(
        (
            receipt["last_seq"]
            for receipt in receipts
            if receipt.get("from") == "stenolog-json" and _is_whole_session(receipt)
        ),
        default=0,
    )
    batches: list[_Batch] = []
    batch_end = 0
    token = ""
    for message in messages:
        token_and_count = token_of(message)
        own_token = _own_token(snapshot.uid, message.seq)
        if token_and_count is not None:
            token, batch_end = token_and_count[0], message.seq + token_and_count[1]
        elif message.seq >= batch_end:
            token = own_token
        if message.seq <= copied_upto or token.startswith(import_prefixes):
            continue
        if token_and_count is None and message.seq < batch_end and batches:
            batches[-1].messages.append(message)
        else:
            batch = _Batch(
                uid=snapshot.uid,
                first=message.seq,
                token=token,
                own_token=own_token,
                messages=[message],
            )
            batches.append(batch)
    return batches


def _own_token(uid: str, seq: int) -> str:
    """Return the idempotency key of a message without a key of its own."""
    return f"fallback:{uid}:{seq}"  # guard: fallback-merged-by-uid-and-seq


def _parts(batches: Iterable[_Batch], included: Sequence[Span]) -> list[_Batch]:
    """Return the batches with only those messages whose seqs are in `included`."""
    parts = (batch.part(included) for batch in batches)
    return [part for part in parts if part is not None]


def _missing_parts(batch: _Batch, sessions: Sequence[_StoredSession]) -> list[_Batch]:
    """Return the part of a batch that is in none of these sessions."""

    def is_missing(part: _Batch) -> bool:
        return all(session.find(part) is None for session in sessions)

    if not is_missing(batch):
        return []
    missing = [single for single in batch.singles() if is_missing(single)]
    return [batch] if len(missing) == len(batch.messages) else missing


def _spans_of(batches: Iterable[_Batch]) -> list[Span]:
    return spans.from_seqs(message.seq for batch in batches for message in batch.messages)


def _stored_seqs(
    snapshot: Snapshot, batches: Sequence[_Batch], stored: _StoredSession
) -> dict[int, int]:
    """Return the seq in the regular store of each message of the fallback store, if it is there.

    If both sessions begin with the same legacy file, these messages have the same seqs in both.
    """
    file_lengths, stored_file_lengths = (
        {
            receipt.get("sha256"): receipt["last_seq"]
            for receipt in merge.receipts_of_imports(meta)
            if _is_whole_session(receipt)
        }
        for meta in (snapshot.meta, stored.snapshot.meta)
    )
    common_files = file_lengths.items() & stored_file_lengths.items()
    common_length = max((length for _, length in common_files), default=0)
    seqs = {seq: seq for seq in range(1, common_length + 1)}
    for batch in batches:
        seqs.update(stored.find_seqs(batch))
    return seqs


def _find_settled(
    messages: Sequence[Message], lost: Sequence[Span], seqs: Mapping[int, int]
) -> set[int]:
    """Return the seqs of the messages that would wrongly start a turn in the store.

    Their answer may be lost. Or it was merged first, while they could not be read, and so does not
    name them in the store (docs/decisions/0023).
    """
    last_lost = lost[-1][1] if lost else 0
    answered, answer_seqs, next_answer_seq = AnsweredMessages(), dict[int, int](), 0
    settled, unknown, asks = set(), set(), False
    for message in reversed(messages):
        body, seq = message.to_dict(), message.seq
        named_seqs = answered_seqs(body)
        if named_seqs is not None:
            answered.add(body, seq)
            answer_seqs.update(dict.fromkeys(named_seqs, seq))
            next_answer_seq = seq
        elif is_received(body) or body.get("role") == "tool" or calls_of(body):
            answer_seq = answer_seqs.get(seq, 0) if is_received(body) else next_answer_seq
            if seqs.get(seq, 0) > seqs.get(answer_seq, sys.maxsize):
                settled.add(seq)
            elif not answer_seq and seq < last_lost and seq not in answered:
                unknown.add(seq)
                asks = asks or is_received(body)
    return settled | unknown if asks else settled  # guard: fallback-lost-answer-is-unknown


def _is_whole_session(receipt: Mapping[str, Any]) -> bool:
    """Return whether the imported file had all messages that the session had after the import."""
    last_seq = receipt.get("last_seq")
    return isinstance(last_seq, int) and receipt.get("messages") == last_seq


def _find_lost(snapshot: Snapshot, messages: Iterable[Message]) -> list[Span]:
    """Return the seqs of the messages that cannot be read."""
    readable = spans.from_seqs(message.seq for message in messages)
    present = [(1, snapshot.last_seq)] if snapshot.last_seq else []
    return spans.minus(present, spans.union(readable, snapshot.void, snapshot.purged))


def _describe_lost(lost: Sequence[Span]) -> str:
    """Return a sentence about messages that cannot be read; empty if there are none."""
    if not lost:
        return ""
    return (
        f"{spans.size(lost)} of its messages cannot be read, and the others were merged; "
        "run `steno doctor` on the folder, and move the folder away if they cannot be repaired"
    )


def _state_digest(snapshot: Snapshot, lost: Sequence[Span]) -> str:
    """Return a digest of summary, meta, and the seqs of hidden and of lost messages."""
    values = [snapshot.floor, snapshot.hidden, snapshot.summary, snapshot.meta, lost]
    return sha256(json.dumps(to_builtins(values), sort_keys=True).encode()).hexdigest()


# --- the lock --------------------------------------------------------------------------------


def _open_lock(workspace: Path) -> disk.Descriptor:
    if workspace.is_symlink():  # guard: fallback-no-link
        raise OSError(errno.ELOOP, "the folder is a symbolic link, which is not followed")
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return disk.open_descriptor(workspace / LOCK_FILE, flags)


def _try_lock(lock: disk.Descriptor, lock_mode: int) -> bool:
    """Try to take the lock without waiting. Raises OSError if the file system has no locks."""
    try:
        fcntl.flock(lock, lock_mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
