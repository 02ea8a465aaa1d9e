"""Copying of complete sessions from one store to another while the source is in use.

The first pass copies every session. Each further pass copies the sessions that changed during the
previous pass. The last pass copies the remaining changes under the lock of each session. If a copy
is repeated after an interruption, sessions that were already copied are recognized by uid, seqs and
content. In the destination, only earlier copies are overwritten. At the end, all written sessions
are read back and compared by digest.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import islice
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
"""Numbers of sessions, messages and bytes after which written sessions are made durable."""
MAX_PASSES: Final = 3
"""Maximum number of passes before the last pass, which locks the sessions."""
MAX_ATTEMPTS: Final = 5
"""Maximum number of rounds of the last pass, and of comparisons that each find new damage."""

_KEY_EXISTS_ADVICE: Final = (
    "The destination was not changed: delete or rename that session there, or copy to another place"
)
_ALWAYS_CHANGING_REASON: Final = (
    "other processes lock, delete, restore or rename the session all the time; copy again later"
)
_BUSY_ADVICE: Final = (
    "The destination has an older copy: copy again when no other process writes there"
)
_TOO_DAMAGED_REASON: Final = "the session is too damaged to be read; run `steno doctor`"
_NOT_EQUAL_REASON: Final = (
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
    """A session that could not be copied. If the key is empty, a whole namespace was not copied."""

    key: str
    uid: str
    reason: str
    """The reason as text, with advice."""
    newer: bool = False
    """Whether the destination has all messages of the source, and more."""


class EarlierCopy(Struct, frozen=True, kw_only=True):
    """Result of an earlier copy of a session, as the caller recorded it."""

    stamp: str
    """Change stamp of the session in the source store at the time of the copy."""
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
    """Change stamp of the session when the source was read; empty if it may be outdated."""
    digest: str
    written: bool
    """Whether this copy wrote data of the session."""
    lost: int = 0
    """Number of messages that damage destroyed in both source and destination."""
    compared: bool = True
    """Whether the session was read and compared; False if its stamp shows that it is unchanged."""


class CopyTotals(Struct, frozen=True, kw_only=True):
    """Result of copying one namespace."""

    copied: tuple[CopiedSession, ...]
    problems: tuple[CopyProblem, ...] = ()
    only_in_target: tuple[str, ...] = ()
    """Keys of sessions that only the destination has."""
    messages: int = 0
    """Number of messages written."""
    passes: int = 0
    """Number of passes, including the last pass."""
    unlocked: bool = False
    """Whether the source could not be locked. If True, the copy may lack the newest changes."""

    def digest(self, namespace: str) -> str:
        """Return one digest of all copied sessions."""
        return combined_digest((namespace, session.uid, session.digest) for session in self.copied)


class _CopyState(Struct, frozen=True):
    """A session that is equal in source and destination, with the digest of its messages."""

    session: CopiedSession
    digest: MessagesDigest | None
    """Digest of the messages; None if the session is unchanged since an earlier copy."""


def copy_snapshots(
    source: SnapshotStore,
    target: SnapshotStore,
    *,
    known: Mapping[str, EarlierCopy] | None = None,
    exclude_uids: Collection[str] = (),
    progress: Progress | None = None,
) -> CopyTotals:
    """Copy every session of one store to another. Only earlier copies are overwritten.

    `known` are the results of an earlier copy to this destination, by uid. A session in `known` is
    not read again if its change stamp is unchanged. Sessions with uids in `exclude_uids` are not
    copied. The result lists sessions that could not be copied in `problems`. Raises the errors of
    the destination, for example NotStored if the disk is full. After an error, a repeated call
    continues the copy.
    """
    return _CopyRun(source, target, known, exclude_uids, progress).run()


def preview_copy(source: SnapshotStore, target: SnapshotStore) -> CopyTotals:
    """Return the totals of `copy_snapshots`, as far as they are known without writing."""
    return _CopyRun(source, target).preview()


class _CopyRun:
    """One call of `copy_snapshots` or `preview_copy`."""

    def __init__(
        self,
        source: SnapshotStore,
        target: SnapshotStore,
        earlier_copies: Mapping[str, EarlierCopy] | None = None,
        exclude_uids: Collection[str] = (),
        progress: Progress | None = None,
    ) -> None:
        self._source = source
        self._target = target
        self._earlier_copies = earlier_copies or {}
        self._exclude_uids = frozenset(exclude_uids)
        self._progress = progress
        self._copy_states: dict[str, _CopyState] = {}
        self._problems: dict[str, CopyProblem] = {}
        self._failure_reasons: dict[str, str] = {}
        """Reason why the last attempt to write a session failed, by uid."""
        self._damaged_seqs: dict[str, list[Span]] = {}
        """Seqs of messages that turned out to be damaged during the copy, by uid."""
        self._outdated_copies: dict[str, MessagesDigest] = {}
        """Digest of the messages in each earlier copy that must be replaced, by uid."""
        self._source_uids: set[str] = set()
        self._unreadable_keys: set[str] = set()
        """Keys of sessions in the source whose uid cannot be read."""
        self._target_marks: dict[str, SnapshotMark] = {}
        self._messages = self._passes = 0
        self._unlocked = False

    def run(self) -> CopyTotals:
        """Run all passes and the comparison."""
        with self._target.snapshot_writer():
            pass  # opening a writer removes the files that a killed copy left
        for _ in range(MAX_PASSES):
            marks = self._find_changed_sessions()
            if self._passes and not marks:
                break
            self._passes += 1
            self._copy_pass(marks)
        self._copy_last_changes()
        self._compare_written()
        return self._make_totals()

    def preview(self) -> CopyTotals:
        """Return the totals that a copy would have, without writing."""
        for mark in self._find_changed_sessions():
            if mark.uid in self._target_marks:
                self._compare_with_target(mark)
            if mark.uid in self._problems or self._is_copied(mark):
                continue
            with self._open_source(mark) as reading:
                if reading is not None:
                    copied_count = self._outdated_copies.get(mark.uid, MessagesDigest()).messages
                    self._messages += max(0, _message_count(reading.snapshot) - copied_count)
                    state = _make_copy_state(reading, reading.snapshot, MessagesDigest())
                    self._copy_states[mark.uid] = state
        return self._make_totals()

    # --- passes ------------------------------------------------------------------------------

    def _find_changed_sessions(self) -> list[SnapshotMark]:
        """List both stores. Return the sessions of the source that still have to be copied.

        Adds a problem for each session that cannot be opened in the source or the destination.
        """
        self._target_marks = {}
        problem_by_key: dict[str, str] = {}
        for mark in self._target.list_snapshots():
            if mark.uid or not mark.problem:
                self._target_marks[mark.uid] = mark
            else:
                problem_by_key[mark.key] = mark.problem
        for uid in self._copy_states.keys() - self._target_marks.keys():
            del self._copy_states[uid]
        marks = self._source.list_snapshots()
        self._source_uids = {mark.uid for mark in marks}
        for mark in marks:
            if not mark.uid:
                self._unreadable_keys.add(mark.key)
                self._add_problem(mark, mark.problem or _TOO_DAMAGED_REASON)
            elif mark.key in problem_by_key and mark.deleted is None:
                self._add_problem(mark, problem_by_key[mark.key])
        return [
            mark
            for mark in marks
            if mark.uid
            and mark.uid not in self._exclude_uids
            and mark.uid not in self._problems
            and not self._is_copied(mark)
        ]

    def _is_copied(self, mark: SnapshotMark) -> bool:
        """Return whether a session is copied. Record an unchanged earlier copy as copied."""
        state, earlier = self._copy_states.get(mark.uid), self._earlier_copies.get(mark.uid)
        if state is not None:
            copied = state.session
            copied_version = copied.stamp, copied.key, copied.deleted
            return bool(copied.stamp) and copied_version == (mark.stamp, mark.key, mark.deleted)
        if earlier is None or earlier.stamp != mark.stamp or mark.uid not in self._target_marks:
            return False
        if mark.last_seq not in (None, earlier.last_seq):
            return False  # the last seqs differ, so the equal stamps prove nothing
        session = CopiedSession(
            key=mark.key,
            uid=mark.uid,
            deleted=mark.deleted,
            last_seq=earlier.last_seq,
            messages=earlier.messages,
            stamp=mark.stamp,
            digest=earlier.digest,
            written=False,
            compared=False,
        )
        self._copy_states[mark.uid] = _CopyState(session, None)
        return True

    def _copy_pass(self, marks: Sequence[SnapshotMark]) -> None:
        """Copy these sessions in groups while the source is in use."""
        pending = filter(self._needs_write, marks)
        done_count = 0
        self._report_progress("copying", done_count, len(marks))
        while group := list(islice(pending, GROUP_SNAPSHOTS)):
            self._write_group(group)
            done_count += len(group)
            self._report_progress("copying", done_count, len(marks))

    def _needs_write(self, mark: SnapshotMark) -> bool:
        """Compare a session with the destination. Return whether the session must be written."""
        self._outdated_copies.pop(mark.uid, None)
        state = self._copy_states.pop(mark.uid, None)
        if mark.uid in self._target_marks:
            digest = None if state is None else state.digest
            if digest is not None and self._is_unchanged_copy(mark):
                self._outdated_copies[mark.uid] = digest
            else:
                self._compare_with_target(mark)
        return mark.uid not in self._problems and not self._is_copied(mark)

    def _is_unchanged_copy(self, mark: SnapshotMark) -> bool:
        """Return whether the copy in the destination is unchanged since it was written."""
        with self._open_target(mark) as reading:
            return reading is not None and reading.untouched

    def _write_group(self, group: Sequence[SnapshotMark]) -> None:
        """Write these sessions, in several batches if they are large."""
        pending = list(reversed(group))
        while pending:
            written_states: list[_CopyState] = []
            count_before = len(pending)
            try:
                with self._target.snapshot_writer() as writer:
                    while pending and not _is_group_full(written_states):
                        mark = pending.pop()
                        with self._open_source(mark) as reading:
                            if reading is not None:
                                written_states += self._write_snapshot(writer, mark, reading)
            except (SessionExists, StoreBusy):
                if len(pending) == count_before:
                    raise
                continue  # another process wrote first; the next pass checks again
            for state in written_states:
                self._copy_states[state.session.uid] = state

    def _copy_last_changes(self) -> None:
        """Copy the sessions that have changed again, one by one, each under its lock."""
        self._passes += 1
        for _ in range(MAX_ATTEMPTS):
            marks = self._find_changed_sessions()
            self._report_progress("last pass", 0, len(marks))
            remaining_marks: list[SnapshotMark] = []
            for done_count, mark in enumerate(marks, 1):
                # Changes after the lock is released are not copied, but the copy stays consistent.
                if not self._copy_locked(mark):
                    remaining_marks.append(mark)
                self._report_progress("last pass", done_count, len(marks))
            if not remaining_marks:
                return
        for mark in remaining_marks:
            self._add_problem(mark, self._failure_reasons.get(mark.uid, _ALWAYS_CHANGING_REASON))

    def _copy_locked(self, mark: SnapshotMark) -> bool:
        """Copy a session under its lock. Return False if another attempt is needed."""
        if not self._needs_write(mark):
            return True
        with self._open_source(mark, locked=True) as reading:
            if reading is None:
                return mark.uid in self._problems
            try:
                with self._target.snapshot_writer() as writer:
                    written_states = self._write_snapshot(writer, mark, reading)
            except (SessionExists, StoreBusy) as error:
                self._failure_reasons[mark.uid] = f"{error}. {_BUSY_ADVICE}"
                return False
        for state in written_states:
            self._copy_states[mark.uid] = state
        return bool(written_states) or mark.uid in self._problems

    # --- one session -------------------------------------------------------------------------

    @contextmanager
    def _open_source(
        self, mark: SnapshotMark, *, locked: bool = False
    ) -> Iterator[SnapshotReading | None]:
        """Yield a snapshot of a session in the source; None if the session cannot be read now."""
        read = self._hold_source if locked else self._source.read_snapshot
        with self._open_reading(mark, partial(read, mark)) as reading:
            if reading is not None:
                reading = replace(reading, messages=_convert_read_errors(reading.messages))
            yield reading

    @contextmanager
    def _hold_source(self, mark: SnapshotMark) -> Iterator[SnapshotReading]:
        with ExitStack() as stack:
            try:
                reading = stack.enter_context(self._source.hold_snapshot(mark))
            except StoreBusy:
                raise
            except (ReadOnly, StoreUnavailable):
                # A store that cannot be locked, such as a read-only store, is read without a lock.
                self._unlocked = True
                reading = stack.enter_context(self._source.read_snapshot(mark))
            yield reading

    def _open_target(self, mark: SnapshotMark) -> AbstractContextManager[SnapshotReading | None]:
        """Yield the destination's snapshot of the same session; None if it cannot be read now."""
        read = partial(self._target.read_snapshot, self._target_marks[mark.uid])
        return self._open_reading(mark, read)

    @contextmanager
    def _open_reading(
        self, mark: SnapshotMark, read: Callable[[], AbstractContextManager[SnapshotReading]]
    ) -> Iterator[SnapshotReading | None]:
        with ExitStack() as stack:
            reading = None
            try:
                reading = stack.enter_context(read())
            except (NoSuchSession, StoreBusy):
                pass  # the next pass checks the session again
            except (DamagedStore, StoreUnavailable) as error:
                self._add_problem(mark, str(error))
            yield reading

    def _write_snapshot(
        self, writer: SnapshotWriter, mark: SnapshotMark, reading: SnapshotReading
    ) -> list[_CopyState]:
        """Write a snapshot. Return a list with its copy state; empty if nothing was written."""
        target_mark = self._target_marks.get(mark.uid)
        self._failure_reasons.pop(mark.uid, None)
        if target_mark is not None and mark.uid not in self._outdated_copies:
            return []  # the session in the destination has not been compared yet
        snapshot = self._with_known_damage(reading.snapshot)
        digest = MessagesDigest()
        try:
            writer.write(
                snapshot,
                digest.add_and_yield(snapshot, reading.messages),
                instead_of="" if target_mark is None else target_mark.stamp,
            )
        except UnknownDamage as damage:
            self._add_damaged_seqs(mark, damage)
            return []
        except SessionExists as error:
            # Another session in the destination has this key, maybe the copy of a session that was
            # later renamed or deleted in the source.
            self._failure_reasons[mark.uid] = f"{error}. {_KEY_EXISTS_ADVICE}"
            return []
        except StoreBusy:
            return []
        except DamagedStore as error:
            self._add_problem(mark, str(error))
            return []
        old_digest = self._outdated_copies.pop(mark.uid, MessagesDigest())
        self._messages += max(0, digest.messages - old_digest.messages)
        return [_make_copy_state(reading, snapshot, digest)]

    def _add_damaged_seqs(self, mark: SnapshotMark, damage: UnknownDamage) -> None:
        known_seqs = self._damaged_seqs.get(mark.uid, [])
        self._damaged_seqs[mark.uid] = spans.union(known_seqs, damage.seqs)

    def _with_known_damage(self, snapshot: Snapshot) -> Snapshot:
        lost_seqs = spans.union(snapshot.lost, self._damaged_seqs.get(snapshot.uid, []))
        return replace(
            snapshot, lost=spans.minus(lost_seqs, spans.union(snapshot.void, snapshot.purged))
        )

    # --- existing sessions -------------------------------------------------------------------

    def _compare_with_target(self, mark: SnapshotMark) -> None:
        """Compare a session with its copy in the destination, and record the result."""
        for _ in range(MAX_ATTEMPTS):
            with self._open_source(mark) as source, self._open_target(mark) as target:
                if source is None or target is None:
                    return
                snapshot = self._with_known_damage(source.snapshot)
                try:
                    comparison = compare(replace(source, snapshot=snapshot), target)
                except UnknownDamage as damage:
                    self._add_damaged_seqs(mark, damage)
                    continue
                except StoreBusy:
                    return
                except DamagedStore as error:
                    self._add_problem(mark, str(error))
                    return
            if comparison.reason:
                self._add_problem(mark, comparison.reason, newer=comparison.is_target_newer)
            elif comparison.equal:
                state = _make_copy_state(source, snapshot, comparison.digest, written=False)
                self._copy_states[mark.uid] = state
            else:
                self._outdated_copies[mark.uid] = comparison.digest
            return

    def _compare_written(self) -> None:
        """Read back and compare the written sessions."""
        self._target_marks = {mark.uid: mark for mark in self._target.list_snapshots()}
        pending = [uid for uid, state in self._copy_states.items() if state.session.written]
        for done_count, uid in enumerate(pending):
            self._report_progress("comparing", done_count, len(pending))
            copied = self._copy_states[uid].session
            mark = SnapshotMark(key=copied.key, uid=uid, deleted=copied.deleted, stamp="")
            if uid in self._problems:
                continue
            digest = ""
            if uid in self._target_marks:
                with self._open_target(mark) as target_reading:
                    digest = "" if target_reading is None else digest_of(target_reading)
            if digest != copied.digest:
                self._add_problem(mark, _NOT_EQUAL_REASON)
        self._report_progress("comparing", len(pending), len(pending))

    # --- results -----------------------------------------------------------------------------

    def _add_problem(self, mark: SnapshotMark, reason: str, *, newer: bool = False) -> None:
        self._copy_states.pop(mark.uid, None)
        problem = CopyProblem(key=mark.key, uid=mark.uid, reason=reason, newer=newer)
        self._problems[mark.uid or mark.key] = problem

    def _report_progress(self, phase: Phase, done: int, total: int) -> None:
        if self._progress is not None:
            step = CopyStep(
                phase=phase, number=self._passes, done=done, total=total, messages=self._messages
            )
            self._progress(step)

    def _make_totals(self) -> CopyTotals:
        copied = [state.session for state in self._copy_states.values()]
        only_in_target = [
            mark.key
            for uid, mark in self._target_marks.items()
            if uid not in self._source_uids
            and (mark.deleted or mark.key not in self._unreadable_keys)
        ]
        return CopyTotals(
            copied=tuple(sorted(copied, key=lambda session: (session.key, session.uid))),
            problems=tuple(self._problems.values()),
            only_in_target=tuple(only_in_target),
            messages=self._messages,
            passes=self._passes,
            unlocked=self._unlocked,
        )


def _convert_read_errors(messages: Iterator[Message]) -> Iterator[Message]:
    """Yield the messages of the source. Raises DamagedStore if a message cannot be read.

    DamagedStore replaces StoreUnavailable, which would look like an error of the destination and
    end the whole copy.
    """
    try:
        yield from messages
    except StoreBusy:
        raise
    except StoreUnavailable as error:
        raise DamagedStore(str(error)) from error


def _is_group_full(written_states: Sequence[_CopyState]) -> bool:
    """Return whether the written sessions reached a limit and must be made durable."""
    digests = [state.digest for state in written_states if state.digest is not None]
    return (
        sum(digest.messages for digest in digests) >= GROUP_MESSAGES
        or sum(digest.bytes for digest in digests) >= GROUP_BYTES
    )


def _make_copy_state(
    reading: SnapshotReading, snapshot: Snapshot, digest: MessagesDigest, *, written: bool = True
) -> _CopyState:
    """Return the state of a session that was just written, or found equal in the destination."""
    session = CopiedSession(
        key=snapshot.key,
        uid=snapshot.uid,
        deleted=snapshot.deleted,
        last_seq=snapshot.last_seq,
        messages=_message_count(snapshot),
        stamp=reading.stamp,
        digest=digest.session_digest(snapshot),
        written=written,
        lost=spans.size(snapshot.lost),
    )
    return _CopyState(session, digest)


def _message_count(snapshot: Snapshot) -> int:
    """Return the number of messages in a snapshot."""
    all_seqs = [(1, snapshot.last_seq)] if snapshot.last_seq else []
    return spans.size(spans.minus(all_seqs, missing_seqs(snapshot)))
