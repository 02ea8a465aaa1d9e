"""Copying of complete sessions from one store to another while the source is in use.

The first pass copies every session, further passes the sessions that changed since. The last pass
copies the remaining changes under the lock of each session. A repeated copy finds the results of an
interrupted one in the destination: by uid, seqs and content. Anything that is not a copy is never
overwritten. At the end everything is read back and compared by digest.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import (
    DamagedStore,
    NoSuchSession,
    ReadOnly,
    SessionExists,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.records import Message, Span
from stenolog.stores import spans
from stenolog.stores.snapshots import (
    Snapshot,
    SnapshotMark,
    SnapshotReading,
    SnapshotStore,
    SnapshotWriter,
)
from stenolog.transfer.comparison import (
    MessagesDigest,
    UnknownDamage,
    combined_digest,
    compare,
    digest_of,
    missing_seqs,
)

GROUP_SNAPSHOTS: Final = 256
GROUP_MESSAGES: Final = 20_000
GROUP_BYTES: Final = 32 * 1024 * 1024
"""`GROUP_*` limit one group: what it wrote is made durable before more is written."""
MAX_PASSES: Final = 3
"""Maximum number of passes before the last one; most copies need two."""
MAX_ATTEMPTS: Final = 5
"""Maximum number of attempts of the last pass, if sessions are deleted and restored during it."""

_KEY_EXISTS: Final = (
    "The destination was not changed: delete or rename that session there, or copy to another place"
)
_ALWAYS_CHANGING: Final = (
    "other processes lock, delete, restore or rename it all the time; copy it again later"
)
_BUSY: Final = "The destination has an older copy: copy again when no other process writes there"
_TOO_DAMAGED: Final = "it is too damaged to be read; run `steno doctor`"
_NOT_EQUAL: Final = (
    "the copy differs from the source: the disk is faulty, or another process wrote to the copy; "
    "check the disk, purge the session in the destination, and copy again"
)

Phase = Literal["copying", "last pass", "comparing"]


class CopyStep(Struct, frozen=True, kw_only=True):
    """Progress of a copy."""

    phase: Phase
    number: int
    """Number of the pass, starting with 1."""
    done: int
    """Number of sessions that this pass has finished."""
    total: int
    messages: int
    """Number of messages copied in all passes."""


Progress = Callable[[CopyStep], None]


class CopyProblem(Struct, frozen=True, kw_only=True):
    """A session that could not be copied, or, without a key, a whole namespace."""

    key: str
    uid: str
    reason: str
    """The reason as text, with advice."""
    newer: bool = False
    """Nothing is missing in the destination: it has all messages of the source, and more."""


class EarlierCopy(Struct, frozen=True, kw_only=True):
    """Result of an earlier copy, from the caller's record."""

    stamp: str
    """Stamp in the source when it was copied."""
    digest: str
    last_seq: int
    messages: int


class CopiedSession(Struct, frozen=True, kw_only=True):
    """A session that is equal in the source and the destination."""

    key: str
    uid: str
    deleted: str | None
    last_seq: int
    messages: int
    stamp: str
    """Stamp in the source when it was read; empty if it may have changed since."""
    digest: str
    written: bool
    """Whether data had to be written."""
    lost: int = 0
    """Number of messages lost to damage; neither side has them."""
    compared: bool = True
    """Whether both sides were read; False if the source's stamp shows that it is unchanged."""


class CopyTotals(Struct, frozen=True, kw_only=True):
    """Result of copying one namespace."""

    copied: tuple[CopiedSession, ...]
    problems: tuple[CopyProblem, ...] = ()
    only_in_target: tuple[str, ...] = ()
    """Keys of sessions that only the destination has."""
    messages: int = 0
    """Number of messages written."""
    bytes: int = 0
    """Total length of these messages, in bytes."""
    passes: int = 0
    """Number of passes, including the last one."""
    unlocked: bool = False
    """The source could not be locked.

    The last pass read some sessions while others may have written to them; each session is still
    consistent.
    """

    def digest(self, namespace: str) -> str:
        """Return one digest of all copied sessions."""
        return combined_digest((namespace, one.uid, one.digest) for one in self.copied)


class _CopyState(Struct, frozen=True):
    """A session that is equal in the destination and the source."""

    snapshot: Snapshot
    """Snapshot in the destination."""
    digest: MessagesDigest
    """Digest of its messages."""
    stamp: str
    """Stamp in the source when it was copied; empty if it may have changed since."""
    checked: bool = False
    """Whether the destination's content was read and compared."""
    written: bool = False


def copy_snapshots(
    source: SnapshotStore,
    target: SnapshotStore,
    *,
    known: Mapping[str, EarlierCopy] | None = None,
    exclude_uids: Collection[str] = (),
    progress: Progress | None = None,
) -> CopyTotals:
    """Copy every session of one store to another; existing sessions stay unchanged.

    `known`: sessions by uid that an earlier copy left there; they are not read again if the source
    is unchanged. `exclude_uids`: uids that are not copied. Raises what writing raises (for example
    NotStored if the disk is full); a repeated call continues the copy. Sessions that could not be
    copied are in `problems`.
    """
    copy = _Copy(source, target, known or {}, progress or _ignore_progress)
    copy.exclude_uids = frozenset(exclude_uids)
    return copy.run()


def preview_copy(source: SnapshotStore, target: SnapshotStore) -> CopyTotals:
    """Return what `copy_snapshots` would do, as far as that is known without writing."""
    return _Copy(source, target, {}, _ignore_progress).preview()


def _ignore_progress(_: CopyStep) -> None:
    """Ignore the progress."""


class _Copy:
    """One call of `copy_snapshots`."""

    def __init__(
        self,
        source: SnapshotStore,
        target: SnapshotStore,
        known: Mapping[str, EarlierCopy],
        progress: Progress,
    ) -> None:
        self._source = source
        self._target = target
        self._known = known
        self._progress = progress
        self._done: dict[str, _CopyState] = {}
        self._unchanged: dict[str, CopiedSession] = {}
        """Sessions that are known to be equal and need not be read."""
        self._problems: dict[str, CopyProblem] = {}
        self._failure_reasons: dict[str, str] = {}
        """The reason why the last attempt to write a session failed."""
        self._damaged_seqs: dict[str, list[Span]] = {}
        """Messages found to be damaged during the copy."""
        self._outdated_copies: dict[str, MessagesDigest] = {}
        """Unchanged earlier copies by uid, which are replaced.

        The digest covers the source's messages that they have.
        """
        self._source_uids: set[str] = set()
        self._unreadable_keys: set[str] = set()
        """Keys of sessions in the source whose uid cannot be read."""
        self._target_marks: dict[str, SnapshotMark] = {}
        self._messages = self._bytes = self._passes = 0
        self._unlocked = False
        self.exclude_uids: frozenset[str] = frozenset()

    def run(self) -> CopyTotals:
        """Run all passes and the comparison."""
        with self._target.snapshot_writer():
            pass  # removes what a killed copy left
        for _ in range(MAX_PASSES):
            marks = self._changed_sessions()
            if self._passes and not marks:
                break
            self._passes += 1
            self._pass(marks)
        self._last_pass()
        self._compare()
        return self._totals()

    def preview(self) -> CopyTotals:
        """Return what would be copied."""
        for mark in self._changed_sessions():
            if mark.uid in self._target_marks:
                self._compare_with_target(mark)
            if mark.uid in self._problems or self._is_done(mark):
                continue
            with self._reading(mark) as reading:
                if reading is not None:
                    copied = self._outdated_copies.get(mark.uid, MessagesDigest()).messages
                    self._messages += max(0, _message_count(reading.snapshot) - copied)
                    self._done[mark.uid] = _CopyState(
                        reading.snapshot, MessagesDigest(), reading.stamp, written=True
                    )
        return self._totals()

    # --- passes ------------------------------------------------------------------------------

    def _changed_sessions(self) -> list[SnapshotMark]:
        """Return the sessions of the source that are missing or different in the destination."""
        self._target_marks = {}
        unreadable: dict[str, str] = {}
        for mark in self._target.list_snapshots():
            if mark.uid or not mark.problem:
                self._target_marks[mark.uid] = mark
            else:
                unreadable[mark.key] = mark.problem
        for uid in self._done.keys() - self._target_marks.keys():
            del self._done[uid]
        marks = self._source.list_snapshots()
        self._source_uids = {mark.uid for mark in marks}
        for mark in marks:
            if not mark.uid:
                self._unreadable_keys.add(mark.key)
                self._add_problem(mark, mark.problem or _TOO_DAMAGED)
            elif mark.key in unreadable and mark.deleted is None:
                self._add_problem(mark, unreadable[mark.key])
        return [
            mark
            for mark in marks
            if mark.uid
            and mark.uid not in self.exclude_uids
            and mark.uid not in self._problems
            and not self._is_done(mark)
        ]

    def _is_done(self, mark: SnapshotMark) -> bool:
        done, known = self._done.get(mark.uid), self._known.get(mark.uid)
        if done is not None:
            copied_as = done.stamp, done.snapshot.key, done.snapshot.deleted
            return bool(done.stamp) and copied_as == (mark.stamp, mark.key, mark.deleted)
        if known is None or known.stamp != mark.stamp or mark.uid not in self._target_marks:
            return False
        if mark.last_seq not in (None, known.last_seq):
            return False  # the stamp alone does not decide
        self._unchanged[mark.uid] = CopiedSession(
            key=mark.key,
            uid=mark.uid,
            deleted=mark.deleted,
            last_seq=known.last_seq,
            messages=known.messages,
            stamp=mark.stamp,
            digest=known.digest,
            written=False,
            compared=False,
        )
        return True

    def _pass(self, marks: Sequence[SnapshotMark]) -> None:
        """Copy these sessions in groups while the source is in use."""
        pending = iter(marks)
        left = len(marks)
        self._report_progress("copying", 0, len(marks))
        while group := self._next_group(pending):
            self._write_group(group)
            left -= len(group)
            self._report_progress("copying", len(marks) - left, len(marks))

    def _next_group(self, marks: Iterator[SnapshotMark]) -> list[SnapshotMark]:
        """Return the next group of sessions for which data must be written."""
        group: list[SnapshotMark] = []
        for mark in marks:
            if self._needs_write(mark):
                group.append(mark)
            if len(group) >= GROUP_SNAPSHOTS:
                break
        return group

    def _needs_write(self, mark: SnapshotMark) -> bool:
        """Compare with the destination and return whether data must be written."""
        self._unchanged.pop(mark.uid, None)
        self._outdated_copies.pop(mark.uid, None)
        done = self._done.pop(mark.uid, None)
        if mark.uid in self._target_marks:
            if done is not None and self._is_unchanged_copy(mark):
                self._outdated_copies[mark.uid] = done.digest
            else:
                self._compare_with_target(mark)
        return mark.uid not in self._problems and not self._is_done(mark)

    def _is_unchanged_copy(self, mark: SnapshotMark) -> bool:
        """Return whether the copy is unchanged since it was written."""
        with self._reading_target(mark) as found:
            return found is not None and found.untouched

    def _write_group(self, group: Sequence[SnapshotMark]) -> None:
        """Write these sessions, in several batches if they are large."""
        pending = list(reversed(group))
        while pending:
            written_states: list[_CopyState] = []
            left = len(pending)
            try:
                with self._target.snapshot_writer() as writer:
                    while pending and not _is_full(written_states):
                        mark = pending.pop()
                        with self._reading(mark) as reading:
                            if reading is not None:
                                written_states += self._write(writer, mark, reading)
            except (SessionExists, StoreBusy):
                if len(pending) == left:
                    raise
                continue  # another process wrote first; the next pass checks again
            for done in written_states:
                self._done[done.snapshot.uid] = done

    def _last_pass(self) -> None:
        """Copy the sessions that still change, one by one, under their locks."""
        self._passes += 1
        left: list[SnapshotMark] = []
        for _ in range(MAX_ATTEMPTS):
            marks = self._changed_sessions()
            self._report_progress("last pass", 0, len(marks))
            left = []
            for number, mark in enumerate(marks, 1):
                # Changes after the lock is released make the copy older, but it stays consistent.
                if not self._copy_locked(mark):
                    left.append(mark)
                self._report_progress("last pass", number, len(marks))
            if not left:
                return
        for mark in left:
            self._add_problem(mark, self._failure_reasons.get(mark.uid, _ALWAYS_CHANGING))

    def _copy_locked(self, mark: SnapshotMark) -> bool:
        """Copy the remaining changes; return False if another attempt is needed."""
        if not self._needs_write(mark):
            return True
        with self._reading(mark, hold=True) as reading:
            if reading is None:
                return mark.uid in self._problems
            try:
                with self._target.snapshot_writer() as writer:
                    written_states = self._write(writer, mark, reading)
            except (SessionExists, StoreBusy) as error:
                self._failure_reasons[mark.uid] = f"{error}. {_BUSY}"
                return False
        for done in written_states:
            self._done[mark.uid] = done
        return bool(written_states) or mark.uid in self._problems

    # --- one session -------------------------------------------------------------------------

    @contextmanager
    def _reading(
        self, mark: SnapshotMark, *, hold: bool = False
    ) -> Iterator[SnapshotReading | None]:
        """Yield a snapshot of the source; None if it cannot be read now."""
        with ExitStack() as stack:
            reading = None
            try:
                if hold:
                    reading = self._read_locked(stack, mark)
                if reading is None:
                    reading = stack.enter_context(self._source.read_snapshot(mark))
            except (NoSuchSession, StoreBusy):
                pass  # the next pass checks it again
            except (DamagedStore, StoreUnavailable) as error:
                self._add_problem(mark, str(error))
            if reading is not None:
                reading = replace(reading, messages=_readable(reading.messages))
            yield reading

    def _read_locked(self, stack: ExitStack, mark: SnapshotMark) -> SnapshotReading | None:
        """Read under the lock; None if the source refuses its lock, as a read-only store does."""
        try:
            return stack.enter_context(self._source.hold_snapshot(mark))
        except StoreBusy:
            raise
        except (ReadOnly, StoreUnavailable):
            self._unlocked = True
            return None

    @contextmanager
    def _reading_target(self, mark: SnapshotMark) -> Iterator[SnapshotReading | None]:
        with ExitStack() as stack:
            reading = None
            try:
                target = self._target_marks[mark.uid]
                reading = stack.enter_context(self._target.read_snapshot(target))
            except (NoSuchSession, StoreBusy):
                pass  # the next pass checks it again
            except (DamagedStore, StoreUnavailable) as error:
                self._add_problem(mark, str(error))
            yield reading

    def _write(
        self, writer: SnapshotWriter, mark: SnapshotMark, reading: SnapshotReading
    ) -> list[_CopyState]:
        """Write a snapshot to the destination; return nothing if another attempt is needed."""
        target = self._target_marks.get(mark.uid)
        self._failure_reasons.pop(mark.uid, None)
        if target is not None and mark.uid not in self._outdated_copies:
            return []  # it is not known yet whether it is a copy
        snapshot = self._with_known_damage(reading.snapshot)
        digest = MessagesDigest()
        try:
            writer.write(
                snapshot,
                digest.digesting(snapshot, reading.messages),
                instead_of="" if target is None else target.stamp,
            )
        except UnknownDamage as damage:
            self._damaged_seqs[mark.uid] = spans.union(
                self._damaged_seqs.get(mark.uid, []), damage.seqs
            )
            return []
        except SessionExists as error:
            # The session with this key may be a copy from here that was renamed or deleted here
            # since.
            self._failure_reasons[mark.uid] = f"{error}. {_KEY_EXISTS}"
            return []
        except StoreBusy:
            return []
        except DamagedStore as error:
            self._add_problem(mark, str(error))
            return []
        known = self._outdated_copies.pop(mark.uid, MessagesDigest())
        self._messages += max(0, digest.messages - known.messages)
        self._bytes += max(0, digest.bytes - known.bytes)
        return [_CopyState(snapshot, digest, reading.stamp, written=True)]

    def _with_known_damage(self, snapshot: Snapshot) -> Snapshot:
        lost = spans.union(snapshot.lost, self._damaged_seqs.get(snapshot.uid, []))
        return replace(
            snapshot, lost=spans.minus(lost, spans.union(snapshot.void, snapshot.purged))
        )

    # --- existing sessions -------------------------------------------------------------------

    def _compare_with_target(self, mark: SnapshotMark) -> None:
        """Compare a session with the destination; a session that is no copy is a problem."""
        for _ in range(MAX_ATTEMPTS):
            with self._reading(mark) as source, self._reading_target(mark) as target:
                if source is None or target is None:
                    return
                snapshot = self._with_known_damage(source.snapshot)
                try:
                    found = compare(replace(source, snapshot=snapshot), target)
                except UnknownDamage as damage:
                    self._damaged_seqs[mark.uid] = spans.union(
                        self._damaged_seqs.get(mark.uid, []), damage.seqs
                    )
                    continue
                except StoreBusy:
                    return
                except DamagedStore as error:
                    self._add_problem(mark, str(error))
                    return
            if found.reason:
                self._add_problem(mark, found.reason, newer=found.is_newer)
            elif found.equal:
                self._done[mark.uid] = _CopyState(
                    snapshot, found.digest, source.stamp, checked=True
                )
            else:
                self._outdated_copies[mark.uid] = found.digest
            return

    def _compare(self) -> None:
        """Read back and compare the written sessions."""
        self._target_marks = {mark.uid: mark for mark in self._target.list_snapshots()}
        pending = [uid for uid, done in self._done.items() if not done.checked]
        for number, uid in enumerate(pending):
            self._report_progress("comparing", number, len(pending))
            done = self._done[uid]
            mark = SnapshotMark(
                key=done.snapshot.key, uid=uid, deleted=done.snapshot.deleted, stamp=""
            )
            if uid in self._problems:
                continue
            if uid not in self._target_marks or self._target_digest(
                mark
            ) != done.digest.with_snapshot(done.snapshot):
                self._add_problem(mark, _NOT_EQUAL)
        self._report_progress("comparing", len(pending), len(pending))

    def _target_digest(self, mark: SnapshotMark) -> str:
        with self._reading_target(mark) as found:
            return "" if found is None else digest_of(found)

    # --- results -----------------------------------------------------------------------------

    def _add_problem(self, mark: SnapshotMark, reason: str, *, newer: bool = False) -> None:
        self._done.pop(mark.uid, None)
        self._unchanged.pop(mark.uid, None)
        problem = CopyProblem(key=mark.key, uid=mark.uid, reason=reason, newer=newer)
        self._problems[mark.uid or mark.key] = problem

    def _report_progress(self, phase: Phase, done: int, total: int) -> None:
        self._progress(
            CopyStep(
                phase=phase, number=self._passes, done=done, total=total, messages=self._messages
            )
        )

    def _totals(self) -> CopyTotals:
        copied = [
            CopiedSession(
                key=done.snapshot.key,
                uid=uid,
                deleted=done.snapshot.deleted,
                last_seq=done.snapshot.last_seq,
                messages=_message_count(done.snapshot),
                stamp=done.stamp,
                digest=done.digest.with_snapshot(done.snapshot),
                written=done.written,
                lost=spans.size(done.snapshot.lost),
            )
            for uid, done in self._done.items()
        ]
        copied += [one for one in self._unchanged.values() if one.uid not in self._done]
        only_in_target = [
            mark.key
            for uid, mark in self._target_marks.items()
            if uid not in self._source_uids
            and (mark.deleted or mark.key not in self._unreadable_keys)
        ]
        return CopyTotals(
            copied=tuple(sorted(copied, key=lambda one: (one.key, one.uid))),
            problems=tuple(self._problems.values()),
            only_in_target=tuple(only_in_target),
            messages=self._messages,
            bytes=self._bytes,
            passes=self._passes,
            unlocked=self._unlocked,
        )


def _readable(messages: Iterator[Message]) -> Iterator[Message]:
    """Yield the messages of the source; raise DamagedStore if some of them cannot be read.

    The error is then not mistaken for one of the destination, which ends the copy.
    """
    try:
        yield from messages
    except StoreBusy:
        raise
    except StoreUnavailable as error:
        raise DamagedStore(str(error)) from error


def _is_full(written: Sequence[_CopyState]) -> bool:
    """Return whether a group reached a limit and must be made durable."""
    return (
        sum(done.digest.messages for done in written) >= GROUP_MESSAGES
        or sum(done.digest.bytes for done in written) >= GROUP_BYTES
    )


def _message_count(snapshot: Snapshot) -> int:
    """Return the number of messages in a snapshot."""
    return (
        spans.size(spans.minus([(1, snapshot.last_seq)], missing_seqs(snapshot)))
        if snapshot.last_seq
        else 0
    )
