"""The contract in its shortest form: sessions as sets and dicts in this process.

It is the model that every other store is compared with, so it says what an operation means in
the plainest way and shares nothing with them but the ground. Nothing outlives the process.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import count
from math import inf
from time import monotonic
from typing import Any, Final, Self

from msgspec import Raw, Struct, field
from msgspec.structs import replace

from stenolog import codec, errors, records
from stenolog.records import Compacted, Health, Message, SessionInfo, Undone

UNDO_DEPTH: Final = 8
MAX_HIDDEN_RANGES: Final = 1_000
MAX_META_BYTES: Final = 64 * 1024


class _Step(Struct, frozen=True):
    """What taking back one operation needs."""

    op: str
    newly: set[int]
    added: set[int]
    was: str | None


class _Session(Struct):
    uid: str = field(default_factory=lambda: os.urandom(8).hex())
    created: datetime = field(default_factory=lambda: datetime.now(UTC))
    updated: datetime | None = None
    messages: dict[int, Message] = {}
    last_seq: int = 0
    hidden: set[int] = set()
    summary: str = ""
    meta: bytes = b"{}"
    steps: deque[_Step] = field(default_factory=lambda: deque(maxlen=UNDO_DEPTH))
    tokens: dict[str, tuple[list[int], list[bytes]]] = {}
    archived: int = 0
    generation: int = 1

    def visible(self) -> list[int]:
        return [seq for seq in self.messages if seq not in self.hidden]

    def floor(self) -> int:
        """The seq up to which everything is hidden: a range that touches it becomes floor."""
        return next(seq for seq in count() if seq + 1 not in self.hidden)

    def read(self, seq: int) -> Message:
        """A value of its own for each reader, marked as of now."""
        return replace(self.messages[seq], hidden=seq in self.hidden)

    def live_bytes(self) -> int:
        return sum(len(m.to_json()) for seq, m in self.messages.items() if seq > self.archived)

    def append(self, payloads: Sequence[bytes]) -> list[int]:
        self.updated = datetime.now(UTC)
        seqs = list(range(self.last_seq + 1, self.last_seq + 1 + len(payloads)))
        for seq, payload in zip(seqs, payloads, strict=True):
            at = records.timestamp(self.updated)
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
        """Carry out one operation that can be taken back; one that changes nothing is none."""
        newly = set(self.visible()).intersection(hide)
        was = None if summary is None or summary == self.summary else self.summary
        if not newly and was is None and not append:
            return
        hidden = self.hidden.union(hide) if newly else self.hidden
        # The run that begins at 1 is the floor, and no range.
        if sum(seq - 1 not in hidden for seq in hidden - {1}) > MAX_HIDDEN_RANGES:
            raise errors.UsageError(f"more than {MAX_HIDDEN_RANGES:,} ranges would be hidden")
        self.hidden = hidden
        self.summary = self.summary if summary is None else summary
        self.steps.append(_Step(op, newly, set(self.append(append)), was))


class InMemoryStore:
    """A Store that keeps its promises for as long as the process lives."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._closed = False
        self._changed = threading.Condition()

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        """Append `{"role": role, "content": content}`; its seq."""
        return self.add_full_message(key, {"role": role, "content": content}, once=once)

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append one message; its seq."""
        return self.add_messages(key, [message], once=once)[0]

    def add_messages(
        self, key: str, messages: Sequence[Message | Mapping[str, Any]], *, once: str | None = None
    ) -> list[int]:
        """Append a batch; its seqs."""
        codec.check_once(once)
        payloads = [codec.encode_message(message) for message in messages]
        with self._using(key) as session:
            if not payloads:
                return []
            if once is not None and once in session.tokens:
                seqs, stored = session.tokens[once]
                if stored != payloads:
                    raise errors.OnceConflict(key, once, seqs[0])
                return list(seqs)
            seqs = session.append(payloads)
            if once is not None:
                session.tokens[once] = (list(seqs), payloads)
            return seqs

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """The visible messages by seq; with `full` every message, marked."""
        if last is not None and last < 0:
            raise errors.UsageError(f"last={last}: a number of messages is not negative")
        with self._using(key) as session:
            seqs = list(session.messages) if full else session.visible()
            seqs = [seq for seq in seqs if after is None or seq > after]
            skipped = 0 if last is None else max(len(seqs) - last, 0)
            return [session.read(seq) for seq in seqs[skipped:]]

    def get_summary(self, key: str) -> str:
        """The summary; empty where there is none."""
        with self._using(key) as session:
            return session.summary

    def set_summary(self, key: str, text: str) -> None:
        """Replace the summary and nothing else."""
        with self._using(key) as session:
            session.change("summary", summary=_text(text))

    def truncate_history(self, key: str, keep_last: int) -> None:
        """Hide all but the last visible ones."""
        with self._using(key) as session:
            visible = session.visible()
            kept = visible[max(len(visible) - max(keep_last, 0), 0) :]
            session.change("truncate", hide=range(1, kept[0] if kept else session.last_seq + 1))

    def clear(self, key: str) -> None:
        """Hide all messages and empty the summary."""
        with self._using(key) as session:
            everything = range(1, session.last_seq + 1)
            session.change("clear", hide=everything, summary="")

    def set_history(self, key: str, messages: Sequence[Message | Mapping[str, Any]]) -> None:
        """Make exactly these messages visible; the summary stays."""
        payloads = [codec.encode_message(message) for message in messages]
        with self._using(key) as session:
            visible = session.visible()
            same = 0
            for seq, payload in zip(visible, payloads, strict=False):
                # Bytes, because objects that compare equal may differ: 1, 1.0 and True.
                if session.messages[seq].to_json() != payload:
                    break
                same += 1
            session.change("replace", hide=visible[same:], append=payloads[same:])

    def hide(self, key: str, first: int, last: int) -> None:
        """Hide the messages with these seqs, both included."""
        if first > last:
            raise errors.UsageError(f"hide {first} to {last}: the first comes after the last")
        with self._using(key) as session:
            wanted = range(max(first, 1), min(last, session.last_seq) + 1)
            session.change("hide", hide=wanted)

    def pop(self, key: str) -> Message | None:
        """Hide the last visible message and return it; None where there is none."""
        with self._using(key) as session:
            newest = session.visible()[-1:]
            session.change("hide", hide=newest)
            return session.read(newest[0]) if newest else None

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """Replace the summary and hide everything up to this seq, in one step."""
        with self._using(key) as session:
            if upto > session.last_seq:
                raise errors.UsageError(f"upto={upto} is beyond the end, {session.last_seq}")
            if expect_floor is not None and expect_floor != session.floor():
                raise errors.StaleCheckpoint(key, expect_floor, session.floor())
            session.change("checkpoint", hide=range(1, upto + 1), summary=_text(summary))

    def undo(self, key: str) -> Undone:
        """Take back the newest step: show what it newly hid, hide what it appended."""
        with self._using(key) as session:
            if not session.steps:
                raise errors.NothingToUndo(f"{key!r}: there is nothing to undo")
            step = session.steps.pop()
            withdrawn = step.added - session.hidden
            session.hidden = (session.hidden - step.newly) | withdrawn
            if step.was is not None:
                session.summary = step.was
            session.updated = datetime.now(UTC)
            return Undone(
                op=step.op,
                shown=len(step.newly),
                hid=len(withdrawn),
                summary_restored=step.was is not None,
            )

    def compact(self, key: str) -> Compacted:
        """Mark what lies below the floor as archived; it stays where it is."""
        with self._using(key) as session:
            before, live = session.archived, session.live_bytes()
            session.archived = max(before, session.floor())
            moved = sum(before < seq <= session.archived for seq in session.messages)
            session.generation += moved > 0
            return Compacted(archived=moved, bytes_before=live, bytes_after=session.live_bytes())

    def info(self, key: str) -> SessionInfo:
        """What is known of the session. Raises NoSuchSession."""
        with self._using(key) as session:
            if key not in self._sessions:
                raise errors.NoSuchSession(key)
            return SessionInfo(
                key=key,
                uid=session.uid,
                created=session.created,
                updated=session.updated or session.created,
                last_seq=session.last_seq,
                floor=session.floor(),
                visible=len(session.visible()),
                count=len(session.messages),
                lost=0,
                damaged=0,
                void_bytes=0,
                archived=session.archived,
                generation=session.generation,
                bytes=session.live_bytes(),
                undoable=len(session.steps),
                summary=session.summary,
                meta=records.decode_object(session.meta),
                forked_from=None,
            )

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Keys in the order of their bytes, which is that of their characters."""
        if limit is not None and limit < 0:
            raise errors.UsageError(f"limit={limit}: a number of sessions is not negative")
        with self._open():
            keys = sorted(key for key in self._sessions if key.startswith(prefix))
            return [key for key in keys if after is None or key > after][:limit]

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields of the session's own data; None removes one."""
        with self._using(key) as session:
            merged = records.decode_object(session.meta) | fields
            meta = codec.encode_object({name: v for name, v in merged.items() if v is not None})
            if len(meta) > MAX_META_BYTES:
                raise errors.UsageError(f"more than {MAX_META_BYTES:,} bytes of meta")
            if meta != session.meta:
                session.meta = meta
                session.updated = datetime.now(UTC)

    def follow(
        self, key: str, *, after: int = 0, timeout: float | None = None
    ) -> Iterator[Message]:
        """Each message past `after` once, by seq, as it arrives."""
        with self._using(key):
            return self._arrivals(key, after, timeout)

    def _arrivals(self, key: str, seen: int, timeout: float | None) -> Iterator[Message]:
        while True:
            deadline = inf if timeout is None else monotonic() + timeout
            with self._changed:
                while not self._closed and not (new := self._past(key, seen)):
                    if (left := deadline - monotonic()) <= 0:
                        return
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                if self._closed:
                    return
            yield from new
            seen = new[-1].seq

    def _past(self, key: str, seen: int) -> list[Message]:
        session = self._sessions.get(key, _Session())
        return [session.read(seq) for seq in session.messages if seq > seen]

    def health(self) -> Health:
        """Always well: there is nothing here that could fail."""
        with self._open():
            return Health(ok=True, free_bytes=None, problems=())

    def close(self) -> None:
        """End every follow; later calls raise StoreClosed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _open(self) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise errors.StoreClosed("the store was closed")
            yield

    @contextmanager
    def _using(self, key: str) -> Iterator[_Session]:
        """The session under the lock; a new one is kept once something was stored in it."""
        codec.check_key(key)
        with self._open():
            session = self._sessions.get(key, _Session())
            yield session
            if session.updated is not None:
                self._sessions[key] = session
                self._changed.notify_all()


def _text(summary: str) -> str:
    if not isinstance(summary, str):
        raise errors.UsageError(f"a summary is text, not {type(summary).__name__}")
    codec.encode_object({"summary": summary})
    return summary
