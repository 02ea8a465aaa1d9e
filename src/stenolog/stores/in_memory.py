"""A store in the memory of this process: sessions as sets and dicts.

Tests compare every other store with this store. So this store implements each operation in the
simplest way and shares only basic modules with the other stores. The content is lost when the
process ends.
"""

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import count
from math import inf
from operator import attrgetter
from time import monotonic
from typing import Any, Final, Self

from msgspec import Raw, Struct, field
from msgspec.structs import replace

from stenolog import codec, errors, records
from stenolog.records import (
    CompactionResult,
    Health,
    Message,
    PurgeResult,
    SessionInfo,
    Span,
    Token,
    TrashedSession,
    Undo,
    UndoResult,
)
from stenolog.stores import spans
from stenolog.stores.admin import DeletedSession, Place
from stenolog.stores.arguments import (
    check_count,
    check_int,
    check_lease_times,
    check_optional_int,
    check_purge_options,
    check_range,
    check_text,
    encode_messages,
)
from stenolog.stores.base import SessionView, conversation_times, forked_meta
from stenolog.stores.locks import ThreadLock
from stenolog.stores.snapshots import (
    Snapshot,
    SnapshotMark,
    SnapshotReading,
    SnapshotWriter,
    token_of,
)

BUSY_TIMEOUT_SECONDS: Final = 5.0
"""Seconds to wait for a lease if the caller sets no limit."""
UNDO_DEPTH: Final = 8
MAX_HIDDEN_RANGES: Final = 1_000
MAX_META_BYTES: Final = 64 * 1024


def _now() -> datetime:
    return datetime.fromtimestamp(time.time_ns() // 1000 / 1e6, UTC)


def _stored_time(moment: datetime | None) -> str | None:
    return None if moment is None else records.timestamp(moment)


class _Session(Struct, eq=False):
    """A session in memory, live or in the trash."""

    key: str
    deleted: datetime | None = None
    """Time of the deletion; None if the session is not in the trash."""
    uid: str = field(default_factory=lambda: os.urandom(8).hex())
    created: datetime = field(default_factory=_now)
    updated: datetime | None = None
    messages: dict[int, Message] = {}
    last_seq: int = 0
    hidden: set[int] = set()
    summary: str = ""
    meta: bytes = b"{}"
    undo_steps: deque[Undo] = field(default_factory=lambda: deque(maxlen=UNDO_DEPTH))
    tokens: dict[str, tuple[list[int], list[bytes]]] = {}
    archived_upto: int = 0
    generation: int = 1
    forked_from: str | None = None
    version: int = 0
    """Number of calls that may have changed the session, for its stamp."""
    change_number: int = 0
    """Number of the newest change to visibility, summary or meta."""
    lost_spans: list[Span] = []
    """Seqs of messages that were already lost in the copied session."""
    void_spans: list[Span] = []
    """Seqs of messages that were void in the copied session."""

    def visible_seqs(self) -> list[int]:
        return [seq for seq in self.messages if seq not in self.hidden]

    def floor(self) -> int:
        """Return the floor: the seq up to which every message is hidden."""
        return next(seq for seq in count() if seq + 1 not in self.hidden)

    def message(self, seq: int) -> Message:
        """Return a copy of the message, with the current `hidden` flag."""
        return replace(self.messages[seq], hidden=seq in self.hidden)

    def live_bytes(self) -> int:
        return sum(len(m.to_json()) for seq, m in self.messages.items() if seq > self.archived_upto)

    def append(self, payloads: Sequence[bytes], times: Sequence[str] | None = None) -> list[int]:
        self.updated = _now()
        times = times or [records.timestamp(self.updated)] * len(payloads)
        seqs = list(range(self.last_seq + 1, self.last_seq + 1 + len(payloads)))
        for seq, payload, at in zip(seqs, payloads, times, strict=True):
            self.messages[seq] = Message(seq=seq, _at=at, _body=Raw(payload))
            self.last_seq = seq
        return seqs

    def change(
        self,
        op: str,
        *,
        hide: Iterable[int] = (),
        append: Sequence[bytes] = (),
        summary: str | None = None,
    ) -> None:
        """Apply an undoable operation. Record no undo step if nothing changes."""
        newly_hidden = set(self.visible_seqs()).intersection(hide)
        old_summary = None if summary is None or summary == self.summary else self.summary
        if not newly_hidden and old_summary is None and not append:
            return
        hidden = self.hidden.union(hide) if newly_hidden else self.hidden
        _check_hidden_ranges(hidden)
        self.hidden = hidden
        self.summary = self.summary if summary is None else summary
        self.change_number += 1
        added_seqs = self.append(append)
        self.undo_steps.append(
            Undo(
                number=self.change_number,
                op=op,
                newly_hidden=spans.from_seqs(newly_hidden),
                appended=(added_seqs[0], added_seqs[-1]) if added_seqs else None,
                old_summary=old_summary,
            )
        )

    def show(self, first: int, last: int) -> None:
        """Show hidden messages, as an undoable operation."""
        shown_seqs = {s for s in self.hidden if first <= s <= last and s in self.messages}
        if not shown_seqs:
            return
        hidden = self.hidden - shown_seqs
        _check_hidden_ranges(hidden)
        self.hidden = hidden
        self.change_number += 1
        step = Undo(number=self.change_number, op="show", shown=spans.from_seqs(shown_seqs))
        self.undo_steps.append(step)

    def fork(self, new_key: str, upto: int) -> "_Session":
        """Return a fork with the visible messages up to a seq; the two share no mutable data."""
        if not self.floor() <= upto <= self.last_seq:
            raise errors.UsageError(
                f"at must be from {self.floor()} to {self.last_seq}, not {upto}"
            )
        now = _now()
        return _Session(
            key=new_key,
            created=now,
            updated=now,
            messages={seq: self.messages[seq] for seq in self.visible_seqs() if seq <= upto},
            last_seq=upto,
            hidden=set(range(1, self.floor() + 1)),
            summary=self.summary,
            meta=codec.encode_object(forked_meta(records.decode_object(self.meta), upto)),
            forked_from=self.key,
            change_number=self.change_number + 1,
        )

    def purge(self, before: int) -> list[int]:
        """Remove the messages below a seq with all their data; return the removed seqs."""
        purged_seqs = {seq for seq in range(1, self.last_seq + 1) if seq < before}
        if not purged_seqs:
            return []
        removed_seqs = sorted(purged_seqs.intersection(self.messages))
        self.messages = {seq: m for seq, m in self.messages.items() if seq not in purged_seqs}
        self.hidden = self.hidden | purged_seqs
        old_steps, self.undo_steps = self.undo_steps, deque(maxlen=UNDO_DEPTH)
        for step in old_steps:
            self.undo_steps.append(step)
            if step.old_summary or purged_seqs & _affected_seqs(step):
                # Drop earlier steps, too: without this step, they would restore no former state.
                self.undo_steps.clear()
        self.tokens = {
            once: (seqs, payloads)
            for once, (seqs, payloads) in self.tokens.items()
            if seqs[0] not in purged_seqs
        }
        self.archived_upto = 0 if self.archived_upto < before else self.archived_upto
        self.lost_spans = spans.clipped(self.lost_spans, before, self.last_seq)
        self.void_spans = spans.clipped(self.void_spans, before, self.last_seq)
        self.generation += 1
        self.updated = _now()
        return removed_seqs

    def trashed(self) -> TrashedSession:
        """Return the entry of this session in the list of deleted sessions."""
        assert self.deleted is not None, "only a session in the trash has an entry"
        count = len(self.messages)
        return TrashedSession(key=self.key, uid=self.uid, deleted=self.deleted, count=count)

    def mark(self) -> SnapshotMark:
        deleted = _stored_time(self.deleted)
        return SnapshotMark(key=self.key, uid=self.uid, deleted=deleted)


class InMemoryStore:
    """A Store in memory. The promises of Store hold as long as the process runs."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._trash: list[_Session] = []
        """Deleted sessions, the last deleted first."""
        self._leases: dict[str, InMemoryLease] = {}
        self._epochs = count(1)
        self._markers: dict[str, int] = {}
        self._closed = threading.Event()
        self._changed = threading.Condition(ThreadLock())
        self._lease: InMemoryLease | None = None

    @property
    def admin(self) -> "InMemoryAdmin":
        """The calls that administer the store."""
        return InMemoryAdmin(self)

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        """Append `{"role": role, "content": content}` and return its seq."""
        return self.add_full_message(key, {"role": role, "content": content}, once=once)

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append one message and return its seq."""
        return self.add_messages(key, [message], once=once)[0]

    def add_messages(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        once: str | None = None,
        at: Sequence[datetime] | None = None,
    ) -> list[int]:
        """Append a batch and return its seqs."""
        codec.check_once(once)
        payloads = encode_messages(messages)
        times = None if at is None else codec.check_times(at, len(payloads))
        with self._session_to_change(key) as session:
            if not payloads:
                return []
            if once is not None and once in session.tokens:
                seqs, stored_payloads = session.tokens[once]
                if stored_payloads != payloads:
                    raise errors.OnceConflict(key, once, seqs[0])
                return list(seqs)
            seqs = session.append(payloads, times)
            if once is not None:
                session.tokens[once] = (list(seqs), payloads)
            return seqs

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages by seq; with `full` every message."""
        check_count(last=last)
        check_optional_int(after=after)
        with self._locked_session(key) as session:
            seqs = list(session.messages) if full else session.visible_seqs()
            seqs = [seq for seq in seqs if after is None or seq > after]
            skipped_count = 0 if last is None else max(len(seqs) - last, 0)
            return [session.message(seq) for seq in seqs[skipped_count:]]

    def get_summary(self, key: str) -> str:
        """Return the summary; may be empty."""
        with self._locked_session(key) as session:
            return session.summary

    def set_summary(self, key: str, text: str) -> None:
        """Replace the summary and nothing else."""
        with self._session_to_change(key) as session:
            session.change("summary", summary=_check_summary(text))

    def truncate_history(self, key: str, keep_last: int) -> None:
        """Hide all visible messages except the last `keep_last`."""
        check_int(keep_last=keep_last)
        with self._session_to_change(key) as session:
            visible_seqs = session.visible_seqs()
            kept_seqs = visible_seqs[max(len(visible_seqs) - max(keep_last, 0), 0) :]
            session.change(
                "truncate", hide=range(1, kept_seqs[0] if kept_seqs else session.last_seq + 1)
            )

    def clear(self, key: str, *, upto: int | None = None) -> None:
        """Hide all messages, or all messages up to a seq, and empty the summary."""
        check_optional_int(upto=upto)
        with self._session_to_change(key) as session:
            hide_upto = session.last_seq if upto is None else min(upto, session.last_seq)
            session.change("clear", hide=range(1, hide_upto + 1), summary="")

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> None:
        """Make exactly these messages visible; the summary stays."""
        check_optional_int(expect_last=expect_last)
        payloads = encode_messages(messages)
        with self._session_to_change(key) as session:
            if expect_last is not None and expect_last != session.last_seq:
                raise errors.Conflict(key, "last seq", expect_last, session.last_seq)
            visible_seqs = session.visible_seqs()
            prefix_length = 0
            for seq, payload in zip(visible_seqs, payloads, strict=False):
                # Compare encoded bytes: in Python, the different values 1, 1.0 and True are equal.
                if session.messages[seq].to_json() != payload:
                    break
                prefix_length += 1
            session.change(
                "replace", hide=visible_seqs[prefix_length:], append=payloads[prefix_length:]
            )

    def pop(self, key: str) -> Message | None:
        """Hide the last visible message and return it, or None if no message is visible."""
        with self._session_to_change(key) as session:
            newest_seqs = session.visible_seqs()[-1:]
            session.change("hide", hide=newest_seqs)
            return session.message(newest_seqs[0]) if newest_seqs else None

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """Replace the summary and hide all messages up to the seq `upto`, in one step."""
        check_int(upto=upto)
        check_optional_int(expect_floor=expect_floor)
        with self._session_to_change(key) as session:
            if upto > session.last_seq:
                raise errors.UsageError(f"upto must be at most {session.last_seq}, not {upto}")
            if expect_floor is not None and expect_floor != session.floor():
                raise errors.Conflict(key, "floor", expect_floor, session.floor())
            session.change("checkpoint", hide=range(1, upto + 1), summary=_check_summary(summary))

    def undo(self, key: str, *, answered: Span | None = None) -> UndoResult:
        """Undo the newest operation: show messages that it hid, hide messages that it appended."""
        with self._session_to_change(key) as session:
            if not session.undo_steps:
                raise errors.NothingToUndo(f"{key!r}: there is nothing to undo")
            step = session.undo_steps.pop()
            shown_seqs = _expand_spans(step.newly_hidden)
            seqs_to_hide = _affected_seqs(step) - shown_seqs
            if step.op == "replace" and answered is not None:
                last_replaced = max(_affected_seqs(step), default=answered[1])
                answer_seqs = range(max(answered[0], last_replaced + 1), answered[1] + 1)
                seqs_to_hide |= session.messages.keys() & set(answer_seqs)
            newly_hidden = seqs_to_hide - session.hidden
            session.hidden = (session.hidden - shown_seqs) | newly_hidden
            if step.old_summary is not None:
                session.summary = step.old_summary
            session.change_number += 1
            session.updated = _now()
            return UndoResult(
                op=step.op,
                shown=len(shown_seqs),
                hid=len(newly_hidden),
                summary_restored=step.old_summary is not None,
            )

    def compact(self, key: str) -> CompactionResult:
        """Mark the hidden messages at the start as archived, without moving them."""
        with self._session_to_change(key) as session:
            old_upto, bytes_before = session.archived_upto, session.live_bytes()
            session.archived_upto = max(old_upto, session.floor())
            count = sum(old_upto < seq <= session.archived_upto for seq in session.messages)
            session.generation += count > 0
            return CompactionResult(
                archived=count, bytes_before=bytes_before, bytes_after=session.live_bytes()
            )

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Create a session from the visible messages up to the seq `at`."""
        codec.check_key(new_key)
        check_optional_int(at=at)
        with self._session_to_change(key, must_exist=True) as session:
            self._check_key_unused(new_key)
            self._sessions[new_key] = session.fork(new_key, session.last_seq if at is None else at)

    def delete(self, key: str) -> TrashedSession:
        """Move the session into the trash."""
        with self._session_to_change(key, must_exist=True):
            return self._move_to_trash(key)

    def _move_to_trash(self, key: str) -> TrashedSession:
        session = self._sessions.pop(key)
        # Use a time after all other deletions, even if the clock was set back.
        later_times = [e.trashed().deleted + timedelta(microseconds=1) for e in self._trash]
        session.deleted = max([_now(), *later_times])
        self._trash.insert(0, session)
        return session.trashed()

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> "InMemoryLease":
        """Acquire the lease for a turn in this session: one holder at a time."""
        check_lease_times(ttl, wait)
        deadline = monotonic() + (BUSY_TIMEOUT_SECONDS if wait is None else wait)
        with self._session_to_change(key, must_exist=True):
            while (current_lease := self._leases.get(key)) is not None and not current_lease.lost:
                if (remaining := deadline - monotonic()) <= 0:
                    raise errors.StoreBusy(
                        f"{key!r}: the lease is held by {current_lease.holder}; try again"
                    )
                self._changed.wait(
                    min(remaining, current_lease.expires - monotonic(), threading.TIMEOUT_MAX)
                )
                self._check_open()
                if key not in self._sessions:
                    raise errors.NoSuchSession(key)
            self._leases[key] = InMemoryLease(self, key, next(self._epochs), ttl)
            return self._leases[key]

    def info(self, key: str) -> SessionInfo:
        """Return the info of the session. Raises NoSuchSession."""
        with self._locked_session(key) as session:
            if key not in self._sessions:
                raise errors.NoSuchSession(key)
            meta = records.decode_object(session.meta)
            created, updated = conversation_times(
                session.created,
                session.updated or session.created,
                meta={} if session.forked_from is not None else meta,
                last_seq=session.last_seq,
            )
            visible_seqs = session.visible_seqs()
            return SessionInfo(
                key=key,
                uid=session.uid,
                created=created,
                updated=updated,
                last_seq=session.last_seq,
                floor=session.floor(),
                visible=len(visible_seqs),
                count=len(session.messages),
                lost_spans=tuple(session.lost_spans),
                damaged=0,
                void_bytes=0,
                archived=session.archived_upto,
                generation=session.generation,
                bytes=session.live_bytes(),
                undoable=len(session.undo_steps),
                summary=session.summary,
                meta=meta,
                forked_from=session.forked_from,
                visible_spans=tuple(spans.from_seqs(visible_seqs)),
                change=session.change_number,
            )

    def view(
        self, key: str, last: int | None = None, *, since: SessionView | None = None
    ) -> SessionView:
        """Return info, summary and visible messages as of one moment.

        With `since`, return only the messages after `since`, or a full view if more has changed.
        """
        last = last if since is None else since.last
        with self._locked_store():
            info = self.info(key)
            messages = tuple(self.get_history(key, last=last))
            view = SessionView(info=info, messages=messages, upto=info.last_seq, last=last)
        if since is None or not since.matches(view.uid, view.generation, view.change):
            return view
        tail = tuple(message for message in view.messages if message.seq > since.upto)
        return replace(view, messages=tail, after=since.upto)

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return the session keys in byte order, which is the order of their code points."""
        check_count(limit=limit)
        check_text(prefix=prefix, after=after)
        with self._locked_store():
            keys = sorted(key for key in self._sessions if key.startswith(prefix))
            return [key for key in keys if after is None or key > after][:limit]

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields of the session's meta; None removes a field."""
        with self._session_to_change(key) as session:
            new_fields = records.decode_object(session.meta) | fields
            meta = codec.encode_object({name: v for name, v in new_fields.items() if v is not None})
            if len(meta) > MAX_META_BYTES:
                raise errors.UsageError(f"meta must have at most {MAX_META_BYTES:,} bytes")
            if meta != session.meta:
                session.meta = meta
                session.change_number += 1
                session.updated = _now()

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message after seq `after` once, in order, and wait for new messages."""
        check_int(after=after)
        with self._locked_session(key):
            return self._new_messages(key, after, uid, timeout)

    def _new_messages(
        self, key: str, last_seq: int, uid: str | None, timeout: float | None
    ) -> Iterator[Message]:
        while True:
            deadline = inf if timeout is None else monotonic() + timeout
            with self._changed:
                new_messages: list[Message] = []
                while not self._closed.is_set() and not new_messages:
                    session = self._sessions.get(key)
                    if uid is not None and (session is None or session.uid != uid):
                        raise errors.SessionDeleted(key, recreated=session is not None)
                    if session is not None:
                        uid = session.uid
                        new_messages = [
                            session.message(seq) for seq in session.messages if seq > last_seq
                        ]
                    if not new_messages and (remaining := deadline - monotonic()) <= 0:
                        return
                    if not new_messages:
                        self._changed.wait(min(remaining, threading.TIMEOUT_MAX))
                if self._closed.is_set():
                    return
            yield from new_messages
            last_seq = new_messages[-1].seq

    def _find_by_uid(self, uid: str) -> _Session | None:
        sessions = [*self._sessions.values(), *self._trash]
        return next((session for session in sessions if session.uid == uid), None)

    def close(self) -> None:
        """Close the store and end every `follow`. Later calls raise StoreClosed."""
        with self._changed:
            self._closed.set()
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _locked_store(self) -> Iterator[None]:
        with self._changed:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise errors.StoreClosed("the store is closed")

    def _check_key_unused(self, key: str) -> None:
        if key in self._sessions:
            raise errors.SessionExists(key)

    @contextmanager
    def _locked_session(self, key: str) -> Iterator[_Session]:
        """Hold the lock, and yield the session with this key, or a new one that is not stored."""
        codec.check_key(key)
        with self._locked_store():
            yield self._sessions.get(key) or _Session(key)

    @contextmanager
    def _session_to_change(self, key: str, *, must_exist: bool = False) -> Iterator[_Session]:
        """Yield the session with this key, or a new session, and let the caller change it.

        A new session is kept only if the change stored something. The store of SessionManager
        overrides this method to write the session's file.
        """
        with self._locked_session(key) as session:
            is_new = key not in self._sessions
            if self._lease is not None and self._lease.taken_over:
                raise errors.LeaseLost(self._lease.key, self._lease.epoch)
            if must_exist and is_new:
                raise errors.NoSuchSession(key)
            yield session
            session.version += 1
            if is_new and session.updated is not None:
                self._sessions[key] = session
            self._changed.notify_all()

    def _fenced_by(self, lease: "InMemoryLease") -> "InMemoryStore":
        """Return a copy of this store that rejects writes once `lease.taken_over` is true."""
        fenced = copy.copy(self)
        fenced._lease = lease
        return fenced


class InMemoryAdmin:
    """Administration of an InMemoryStore."""

    def __init__(self, store: InMemoryStore) -> None:
        self._store = store

    def hide(self, key: str, first: int, last: int) -> None:
        """Hide the messages from seq `first` to seq `last`, both included."""
        check_range(first, last)
        with self._store._session_to_change(key) as session:
            seqs = range(max(first, 1), min(last, session.last_seq) + 1)
            session.change("hide", hide=seqs)

    def show(self, key: str, first: int, last: int) -> None:
        """Show the hidden messages from seq `first` to seq `last`, both included."""
        check_range(first, last)
        with self._store._session_to_change(key) as session:
            session.show(first, last)

    def list_trash(self, *, unfinished: bool = False) -> list[TrashedSession]:
        """Return the deleted sessions; a purge in memory cannot be interrupted."""
        with self._store._locked_store():
            return [] if unfinished else [session.trashed() for session in self._store._trash]

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Restore the last deleted session of this key, or the session with this uid."""
        target_key = key if as_key is None else as_key
        with self._store._locked_session(key), self._store._session_to_change(target_key):
            for session in self._store._trash:
                if session.key == key and uid in (None, session.uid):
                    self._store._check_key_unused(target_key)
                    self._store._trash.remove(session)
                    session.key, session.deleted = target_key, None
                    self._store._sessions[target_key] = session
                    return
            raise errors.NoSuchSession(key, "it is not in the trash")

    def delete_unchanged(self, info: SessionInfo) -> TrashedSession | None:
        """Move a session into the trash, unless it changed since `info` was read."""
        with self._store._session_to_change(info.key, must_exist=True) as session:
            version = session.uid, session.last_seq, session.change_number
            if version != (info.uid, info.last_seq, info.change):
                return None
            return self._store._move_to_trash(info.key)

    def purge(
        self,
        key: str,
        *,
        before: int | None = None,
        trash: Collection[DeletedSession] | None = None,
    ) -> PurgeResult:
        """Delete sessions of the key, or its messages below a seq, permanently."""
        check_purge_options(before, trash)
        if trash is not None:
            return self._purge_trash(key, trash)
        with self._store._session_to_change(key) as live:
            trashed_sessions = [session for session in self._store._trash if session.key == key]
            if key not in self._store._sessions and (before is not None or not trashed_sessions):
                raise errors.NoSuchSession(key)
            sentences = []
            if before is None:
                purged_seqs = [
                    seq for session in [live, *trashed_sessions] for seq in session.messages
                ]
                self._store._sessions.pop(key, None)
                self._store._leases.pop(key, None)
                self._store._trash[:] = [
                    session for session in self._store._trash if session.key != key
                ]
            else:
                purged_seqs = live.purge(before)
                sentences += [f"the summary of {key!r} stays"] * bool(live.summary)
                sentences += [f"deleted sessions of {key!r} stay in the trash"] * bool(
                    trashed_sessions
                )
            return self._purge_result(key, purged_seqs, sentences)

    def _purge_result(
        self, key: str, purged_seqs: Collection[int], sentences: Iterable[str] = ()
    ) -> PurgeResult:
        sessions = [*self._store._sessions.values(), *self._store._trash]
        forks = [session.key for session in sessions if session.forked_from == key]
        return PurgeResult(
            messages=len(purged_seqs),
            first=min(purged_seqs, default=0),
            last=max(purged_seqs, default=0),
            not_reached=(*sentences, *(f"the fork {fork!r} stays" for fork in forks)),
        )

    def _purge_trash(self, key: str, entries: Collection[DeletedSession]) -> PurgeResult:
        with self._store._session_to_change(key):
            selected = [
                session
                for session in self._store._trash
                if session.key == key and (session.uid, session.deleted) in entries
            ]
            if not selected or len(selected) != len(set(entries)):
                raise errors.NoSuchSession(
                    key, "it is not in the trash; it may have been restored or deleted again"
                )
            self._store._trash[:] = [
                session for session in self._store._trash if session not in selected
            ]
            if key not in self._store._sessions:
                self._store._leases.pop(key, None)
            purged_seqs = [seq for session in selected for seq in session.messages]
            return self._purge_result(key, purged_seqs)

    def finish_purge(self, uid: str) -> PurgeResult:
        """Raise NoSuchSession, because a purge in memory cannot be interrupted."""
        raise errors.NoSuchSession(uid, "it has no interrupted purge")

    def leased(self, keys: Collection[str]) -> set[str]:
        """Return the subset of `keys` whose sessions are leased now."""
        return {key for key, lease in self._store._leases.items() if key in keys and not lease.lost}

    def stamps(self) -> dict[str, str]:
        """Return a stamp for each session: a text that differs after every change."""
        with self._store._locked_store():
            return {
                key: f"{session.uid}:{session.version}"
                for key, session in self._store._sessions.items()
            }

    def read_marker(self, name: str) -> str:
        """Return the value of the change marker `name`; empty for a marker without a value."""
        with self._store._locked_store():
            return str(self._store._markers.get(name, ""))

    def update_marker(self, name: str) -> None:
        """Give the change marker `name` a new value."""
        with self._store._locked_store():
            self._store._markers[name] = self._store._markers.get(name, 0) + 1

    def list_snapshots(self) -> list[SnapshotMark]:
        """Return the SnapshotMark of every session, deleted sessions first."""
        with self._store._locked_store():
            return [
                session.mark()
                for sessions in (self._store._trash, self._store._sessions.values())
                for session in sorted(sessions, key=attrgetter("key", "uid"))
            ]

    @contextmanager
    def read_snapshot(self, mark: SnapshotMark, *, after: int = 0) -> Iterator[SnapshotReading]:
        """Read the current content of a session."""
        with self._store._locked_store():
            session = self._store._find_by_uid(mark.uid)
            if session is None:
                raise errors.NoSuchSession(mark.key, "it was purged")
            snapshot, messages = _snapshot_of(session), _messages_after(session, after)
        yield SnapshotReading(snapshot=snapshot, messages=iter(messages))

    @contextmanager
    def snapshot_writer(self) -> Iterator[SnapshotWriter]:
        """Yield a writer for several sessions."""
        with self._store._locked_store():
            yield _SnapshotWriter(self._store)
            self._store._changed.notify_all()

    def health(self) -> Health:
        """Return a Health without problems, because memory has no disk that could fail."""
        with self._store._locked_store():
            return Health(ok=True, free_bytes=None, problems=())

    @property
    def place(self) -> Place:
        """The place of a store without files."""
        return Place(namespace="sessions", busy_timeout=BUSY_TIMEOUT_SECONDS)


class InMemoryLease:
    """A lease in memory.

    The lease ends when it is released, when its session is purged, or when another holder takes
    over after the lease has expired.
    """

    def __init__(self, store: InMemoryStore, key: str, epoch: int, ttl: float) -> None:
        self.key = key
        self.epoch = epoch
        self.holder = f"process {os.getpid()}, {threading.current_thread().name}"
        self.expires = monotonic() + ttl
        self.store: InMemoryStore = store._fenced_by(self)
        self._ttl = ttl

    @property
    def taken_over(self) -> bool:
        """Whether the lease was released or taken over, or its session was purged."""
        return self.store._leases.get(self.key) is not self

    @property
    def lost(self) -> bool:
        """Whether the lease ended or expired, its session was purged, or the store was closed."""
        is_over = self.store._closed.is_set() or self.expires <= monotonic()
        return is_over or self.taken_over

    def renew(self) -> None:
        """Extend the lease to ttl seconds from now."""
        with self.store._session_to_change(self.key):
            self.expires = monotonic() + self._ttl

    def release(self) -> None:
        """Release the lease."""
        with self.store._changed:
            if not self.taken_over:
                del self.store._leases[self.key]
            self.store._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _check_summary(summary: str) -> str:
    if not isinstance(summary, str):
        raise errors.UsageError(f"summary must be text, not {type(summary).__name__}")
    codec.encode_object({"summary": summary})
    return summary


# --- copies between stores -------------------------------------------------------------------


class _SnapshotWriter:
    """Writer of snapshots into the store; the caller holds the lock of the store."""

    def __init__(self, store: InMemoryStore) -> None:
        self._store = store

    def write(self, snapshot: Snapshot, messages: Iterable[Message]) -> None:
        """Write this session with all of its messages."""
        store = self._store
        if store._find_by_uid(snapshot.uid) is not None:
            raise errors.SessionExists(snapshot.key)
        if snapshot.deleted is None:
            store._check_key_unused(snapshot.key)
        session = _session_from_snapshot(snapshot, list(messages))
        if session.deleted is None:
            store._sessions[session.key] = session
        else:
            store._trash.append(session)
            store._trash.sort(key=lambda entry: entry.trashed().deleted, reverse=True)


def _snapshot_of(session: _Session) -> Snapshot:
    floor, last_seq = session.floor(), session.last_seq
    known_spans = spans.union(
        session.lost_spans, session.void_spans, spans.from_seqs(session.messages)
    )
    return Snapshot(
        key=session.key,
        uid=session.uid,
        created=records.timestamp(session.created),
        updated=records.timestamp(session.updated or session.created),
        deleted=_stored_time(session.deleted),
        last_seq=last_seq,
        floor=floor,
        hidden=spans.from_seqs(seq for seq in session.hidden if seq > floor),
        number=session.change_number,
        summary=session.summary,
        meta=records.decode_object(session.meta),
        undo=list(session.undo_steps),
        lost=session.lost_spans,
        void=session.void_spans,
        purged=spans.minus([(1, last_seq)], known_spans) if last_seq else [],
        archived=session.archived_upto,
        forked_from=session.forked_from,
        tokens=[
            Token(once, seqs[0], len(seqs), "")
            for once, (seqs, _) in sorted(session.tokens.items(), key=lambda item: item[1][0][0])
            if seqs[0] not in session.messages
        ],
    )


def _messages_after(session: _Session, after: int) -> list[Message]:
    """Return the messages after a seq, with their idempotency keys."""
    token_starts = {seqs[0]: (once, len(seqs)) for once, (seqs, _) in session.tokens.items()}
    messages = []
    for seq, message in session.messages.items():
        once, count = token_starts.get(seq, (None, 1))
        part = (1, count) if count > 1 else None
        if seq > after:
            messages.append(replace(message, _once=once, _part=part, hidden=False))
    return messages


def _session_from_snapshot(snapshot: Snapshot, messages: Sequence[Message]) -> _Session:
    by_seq = {m.seq: Message(seq=m.seq, _at=m._at, _body=Raw(m.to_json())) for m in messages}
    token_starts = [(*start, m.seq) for m in messages if (start := token_of(m)) is not None]
    token_starts += [(token.token, token.count, token.first) for token in snapshot.tokens]
    tokens = {}
    for once, length, first in token_starts:
        seqs = list(range(first, first + length))
        tokens[once] = (seqs, [by_seq[seq].to_json() for seq in seqs if seq in by_seq])
    return _Session(
        key=snapshot.key,
        deleted=None if snapshot.deleted is None else datetime.fromisoformat(snapshot.deleted),
        uid=snapshot.uid,
        created=datetime.fromisoformat(snapshot.created),
        updated=datetime.fromisoformat(snapshot.updated),
        messages=by_seq,
        last_seq=snapshot.last_seq,
        hidden=_expand_spans([(1, snapshot.floor), *snapshot.hidden]),
        summary=snapshot.summary,
        meta=codec.encode_object(snapshot.meta),
        undo_steps=deque(snapshot.undo, maxlen=UNDO_DEPTH),
        tokens=tokens,
        archived_upto=snapshot.archived,
        forked_from=snapshot.forked_from,
        change_number=snapshot.number,
        lost_spans=snapshot.lost,
        void_spans=snapshot.void,
    )


def _affected_seqs(step: Undo) -> set[int]:
    """Return the seqs that the operation of this undo step hid, showed or appended."""
    added_spans = [] if step.appended is None else [step.appended]
    return _expand_spans([*step.newly_hidden, *step.shown, *added_spans])


def _check_hidden_ranges(hidden: Collection[int]) -> None:
    # The span that starts at 1 is the floor and does not count as a hidden range.
    if sum(seq > 1 and seq - 1 not in hidden for seq in hidden) > MAX_HIDDEN_RANGES:
        raise errors.UsageError(f"more than {MAX_HIDDEN_RANGES:,} ranges would be hidden")


def _expand_spans(seq_spans: Iterable[Span]) -> set[int]:
    return {seq for first, last in seq_spans for seq in range(first, last + 1)}
