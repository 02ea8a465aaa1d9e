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
    NewlyLost,
    compare,
    digest_of,
    missing,
    of_many,
)

GROUP_SNAPSHOTS: Final = 256
GROUP_MESSAGES: Final = 20_000
GROUP_BYTES: Final = 32 * 1024 * 1024
"""`GROUP_*` limit one group: what it wrote is made durable before more is written."""
PASSES: Final = 3
"""Maximum number of passes before the last one; most copies need two."""
ROUNDS: Final = 5
"""Maximum number of attempts of the last pass, if sessions are deleted and restored during it."""

_KEY_TAKEN: Final = (
    "The destination is left as it is: delete or rename that session there, or copy to another "
    "place"
)
_NO_REST: Final = (
    "others hold it, or delete, restore or rename it all the time; copy again when they do not"
)
_BUSY: Final = "The destination has it as it was: copy again when nobody else writes there"
_TOO_DAMAGED: Final = "it is too damaged to be read; `steno doctor` says more"
_NOT_EQUAL: Final = (
    "what was written is not what was read, or somebody wrote to it since; look at the disk, "
    "purge the session there, and copy again"
)

Phase = Literal["copying", "last pass", "comparing"]


class Step(Struct, frozen=True, kw_only=True):
    """Progress of a copy."""

    phase: Phase
    number: int
    """Number of the pass, starting with 1."""
    done: int
    """Number of sessions that this pass has finished."""
    total: int
    messages: int
    """Number of messages copied in all passes."""


Progress = Callable[[Step], None]


class Problem(Struct, frozen=True, kw_only=True):
    """A session that could not be copied, or, without a key, a whole namespace."""

    key: str
    uid: str
    reason: str
    """The reason as text, with advice."""
    newer: bool = False
    """Nothing is missing in the destination: it has all messages of the source, and more."""


class Known(Struct, frozen=True, kw_only=True):
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

    carried: tuple[CopiedSession, ...]
    problems: tuple[Problem, ...] = ()
    only_there: tuple[str, ...] = ()
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
        return of_many((namespace, one.uid, one.digest) for one in self.carried)


class _Done(Struct, frozen=True):
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
    known: Mapping[str, Known] | None = None,
    left_out: Collection[str] = (),
    progress: Progress | None = None,
) -> CopyTotals:
    """Copy every session of one store to another; existing sessions stay unchanged.

    `known`: sessions by uid that an earlier copy left there; they are not read again if the source
    is unchanged. `left_out`: uids that are not copied. Raises what writing raises (for example
    NotStored if the disk is full); a repeated call continues the copy. Sessions that could not be
    copied are in `problems`.
    """
    copy = _Copy(source, target, known or {}, progress or _nobody)
    copy.left_out = frozenset(left_out)
    return copy.run()


def preview_copy(source: SnapshotStore, target: SnapshotStore) -> CopyTotals:
    """Return what `copy_snapshots` would do, as far as that is known without writing."""
    return _Copy(source, target, {}, _nobody).preview()


def _nobody(_: Step) -> None:
    """Ignore the progress."""


class _Copy:
    """One call of `copy_snapshots`."""

    def __init__(
        self,
        source: SnapshotStore,
        target: SnapshotStore,
        known: Mapping[str, Known],
        progress: Progress,
    ) -> None:
        self._source = source
        self._target = target
        self._known = known
        self._progress = progress
        self._done: dict[str, _Done] = {}
        self._taken: dict[str, CopiedSession] = {}
        """Sessions that are known to be equal and need not be read."""
        self._problems: dict[str, Problem] = {}
        self._reasons: dict[str, str] = {}
        """The reason why the last attempt to write a session failed."""
        self._lost: dict[str, list[Span]] = {}
        """Messages found to be damaged during the copy."""
        self._outdated: dict[str, MessagesDigest] = {}
        """Unchanged earlier copies by uid, which are replaced.

        The digest covers the source's messages that they have.
        """
        self._here: set[str] = set()
        self._unread: set[str] = set()
        """Keys of sessions in the source whose uid cannot be read."""
        self._there: dict[str, SnapshotMark] = {}
        self._messages = self._bytes = self._passes = 0
        self._unlocked = False
        self.left_out: frozenset[str] = frozenset()

    def run(self) -> CopyTotals:
        """Run all passes and the comparison."""
        with self._target.snapshot_writer():
            pass  # removes what a killed copy left
        for _ in range(PASSES):
            marks = self._changed()
            if self._passes and not marks:
                break
            self._passes += 1
            self._pass(marks)
        self._last_pass()
        self._compare()
        return self._transferred()

    def preview(self) -> CopyTotals:
        """Return what would be copied."""
        for mark in self._changed():
            if mark.uid in self._there:
                self._recognise(mark)
            if mark.uid in self._problems or self._is_done(mark):
                continue
            with self._reading(mark) as reading:
                if reading is not None:
                    there = self._outdated.get(mark.uid, MessagesDigest()).messages
                    self._messages += max(0, _count(reading.snapshot) - there)
                    self._done[mark.uid] = _Done(
                        reading.snapshot, MessagesDigest(), reading.stamp, written=True
                    )
        return self._transferred()

    # --- passes ------------------------------------------------------------------------------

    def _changed(self) -> list[SnapshotMark]:
        """Return the sessions of the source that are missing or different in the destination."""
        self._there = {}
        shut: dict[str, str] = {}
        for mark in self._target.list_snapshots():
            if mark.uid or not mark.problem:
                self._there[mark.uid] = mark
            else:
                shut[mark.key] = mark.problem
        for uid in self._done.keys() - self._there.keys():
            del self._done[uid]
        marks = self._source.list_snapshots()
        self._here = {mark.uid for mark in marks}
        for mark in marks:
            if not mark.uid:
                self._unread.add(mark.key)
                self._fail(mark, mark.problem or _TOO_DAMAGED)
            elif mark.key in shut and mark.deleted is None:
                self._fail(mark, shut[mark.key])
        return [
            mark
            for mark in marks
            if mark.uid
            and mark.uid not in self.left_out
            and mark.uid not in self._problems
            and not self._is_done(mark)
        ]

    def _is_done(self, mark: SnapshotMark) -> bool:
        done, known = self._done.get(mark.uid), self._known.get(mark.uid)
        if done is not None:
            stood = done.stamp, done.snapshot.key, done.snapshot.deleted
            return bool(done.stamp) and stood == (mark.stamp, mark.key, mark.deleted)
        if known is None or known.stamp != mark.stamp or mark.uid not in self._there:
            return False
        if mark.last_seq not in (None, known.last_seq):
            return False  # the stamp alone does not decide
        self._taken[mark.uid] = CopiedSession(
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
        waiting = iter(marks)
        left = len(marks)
        self._tell("copying", 0, len(marks))
        while group := self._recognised(waiting):
            self._write_group(group)
            left -= len(group)
            self._tell("copying", len(marks) - left, len(marks))

    def _recognised(self, marks: Iterator[SnapshotMark]) -> list[SnapshotMark]:
        """Return the next group of sessions for which data must be written."""
        group: list[SnapshotMark] = []
        for mark in marks:
            if self._is_wanting(mark):
                group.append(mark)
            if len(group) >= GROUP_SNAPSHOTS:
                break
        return group

    def _is_wanting(self, mark: SnapshotMark) -> bool:
        """Compare with the destination and return whether data must be written."""
        self._taken.pop(mark.uid, None)
        self._outdated.pop(mark.uid, None)
        done = self._done.pop(mark.uid, None)
        if mark.uid in self._there:
            if done is not None and self._is_untouched(mark):
                self._outdated[mark.uid] = done.digest
            else:
                self._recognise(mark)
        return mark.uid not in self._problems and not self._is_done(mark)

    def _is_untouched(self, mark: SnapshotMark) -> bool:
        """Return whether the copy is unchanged since it was written."""
        with self._reading_target(mark) as found:
            return found is not None and found.untouched

    def _write_group(self, group: Sequence[SnapshotMark]) -> None:
        """Write these sessions, in several batches if they are large."""
        waiting = list(reversed(group))
        while waiting:
            pending: list[_Done] = []
            left = len(waiting)
            try:
                with self._target.snapshot_writer() as writer:
                    while waiting and not _is_much(pending):
                        mark = waiting.pop()
                        with self._reading(mark) as reading:
                            if reading is not None:
                                pending += self._write(writer, mark, reading)
            except (SessionExists, StoreBusy):
                if len(waiting) == left:
                    raise
                continue  # another process wrote first; the next pass checks again
            for done in pending:
                self._done[done.snapshot.uid] = done

    def _last_pass(self) -> None:
        """Copy the sessions that still change, one by one, under their locks."""
        self._passes += 1
        left: list[SnapshotMark] = []
        for _ in range(ROUNDS):
            marks = self._changed()
            self._tell("last pass", 0, len(marks))
            left = []
            for number, mark in enumerate(marks, 1):
                # Changes after the lock is released make the copy older, but it stays consistent.
                if not self._copy_held(mark):
                    left.append(mark)
                self._tell("last pass", number, len(marks))
            if not left:
                return
        for mark in left:
            self._fail(mark, self._reasons.get(mark.uid, _NO_REST))

    def _copy_held(self, mark: SnapshotMark) -> bool:
        """Copy the remaining changes; return False if another attempt is needed."""
        if not self._is_wanting(mark):
            return True
        with self._reading(mark, hold=True) as reading:
            if reading is None:
                return mark.uid in self._problems
            try:
                with self._target.snapshot_writer() as writer:
                    pending = self._write(writer, mark, reading)
            except (SessionExists, StoreBusy) as error:
                self._reasons[mark.uid] = f"{error}. {_BUSY}"
                return False
        for done in pending:
            self._done[mark.uid] = done
        return bool(pending) or mark.uid in self._problems

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
                    reading = self._held(stack, mark)
                if reading is None:
                    reading = stack.enter_context(self._source.read_snapshot(mark))
            except (NoSuchSession, StoreBusy):
                pass  # the next pass checks it again
            except (DamagedStore, StoreUnavailable) as error:
                self._fail(mark, str(error))
            if reading is not None:
                reading = replace(reading, messages=_readable(reading.messages))
            yield reading

    def _held(self, stack: ExitStack, mark: SnapshotMark) -> SnapshotReading | None:
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
                there = self._there[mark.uid]
                reading = stack.enter_context(self._target.read_snapshot(there))
            except (NoSuchSession, StoreBusy):
                pass  # the next pass checks it again
            except (DamagedStore, StoreUnavailable) as error:
                self._fail(mark, str(error))
            yield reading

    def _write(
        self, writer: SnapshotWriter, mark: SnapshotMark, reading: SnapshotReading
    ) -> list[_Done]:
        """Write a snapshot to the destination; return nothing if another attempt is needed."""
        there = self._there.get(mark.uid)
        self._reasons.pop(mark.uid, None)
        if there is not None and mark.uid not in self._outdated:
            return []  # it is not known yet whether it is a copy
        snapshot = self._with_all_lost(reading.snapshot)
        digest = MessagesDigest()
        try:
            writer.write(
                snapshot,
                digest.passing(snapshot, reading.messages),
                instead_of="" if there is None else there.stamp,
            )
        except NewlyLost as met:
            self._lost[mark.uid] = spans.union(self._lost.get(mark.uid, []), met.seqs)
            return []
        except SessionExists as error:
            # The session with this key may be a copy from here that was renamed or deleted here
            # since.
            self._reasons[mark.uid] = f"{error}. {_KEY_TAKEN}"
            return []
        except StoreBusy:
            return []
        except DamagedStore as error:
            self._fail(mark, str(error))
            return []
        known = self._outdated.pop(mark.uid, MessagesDigest())
        self._messages += max(0, digest.messages - known.messages)
        self._bytes += max(0, digest.bytes - known.bytes)
        return [_Done(snapshot, digest, reading.stamp, written=True)]

    def _with_all_lost(self, snapshot: Snapshot) -> Snapshot:
        lost = spans.union(snapshot.lost, self._lost.get(snapshot.uid, []))
        return replace(
            snapshot, lost=spans.minus(lost, spans.union(snapshot.void, snapshot.purged))
        )

    # --- existing sessions -------------------------------------------------------------------

    def _recognise(self, mark: SnapshotMark) -> None:
        """Compare a session with the destination; a session that is no copy is a problem."""
        for _ in range(ROUNDS):
            with self._reading(mark) as here, self._reading_target(mark) as there:
                if here is None or there is None:
                    return
                snapshot = self._with_all_lost(here.snapshot)
                try:
                    found = compare(replace(here, snapshot=snapshot), there)
                except NewlyLost as met:
                    self._lost[mark.uid] = spans.union(self._lost.get(mark.uid, []), met.seqs)
                    continue
                except StoreBusy:
                    return
                except DamagedStore as error:
                    self._fail(mark, str(error))
                    return
            if found.reason:
                self._fail(mark, found.reason, newer=found.newer)
            elif found.equal:
                self._done[mark.uid] = _Done(snapshot, found.digest, here.stamp, checked=True)
            else:
                self._outdated[mark.uid] = found.digest
            return

    def _compare(self) -> None:
        """Read back and compare the written sessions."""
        self._there = {mark.uid: mark for mark in self._target.list_snapshots()}
        waiting = [uid for uid, done in self._done.items() if not done.checked]
        for number, uid in enumerate(waiting):
            self._tell("comparing", number, len(waiting))
            done = self._done[uid]
            mark = SnapshotMark(
                key=done.snapshot.key, uid=uid, deleted=done.snapshot.deleted, stamp=""
            )
            if uid in self._problems:
                continue
            if uid not in self._there or self._digest_there(mark) != done.digest.with_snapshot(
                done.snapshot
            ):
                self._fail(mark, _NOT_EQUAL)
        self._tell("comparing", len(waiting), len(waiting))

    def _digest_there(self, mark: SnapshotMark) -> str:
        with self._reading_target(mark) as found:
            return "" if found is None else digest_of(found)

    # --- results -----------------------------------------------------------------------------

    def _fail(self, mark: SnapshotMark, reason: str, *, newer: bool = False) -> None:
        self._done.pop(mark.uid, None)
        self._taken.pop(mark.uid, None)
        problem = Problem(key=mark.key, uid=mark.uid, reason=reason, newer=newer)
        self._problems[mark.uid or mark.key] = problem

    def _tell(self, phase: Phase, done: int, total: int) -> None:
        self._progress(
            Step(phase=phase, number=self._passes, done=done, total=total, messages=self._messages)
        )

    def _transferred(self) -> CopyTotals:
        carried = [
            CopiedSession(
                key=done.snapshot.key,
                uid=uid,
                deleted=done.snapshot.deleted,
                last_seq=done.snapshot.last_seq,
                messages=_count(done.snapshot),
                stamp=done.stamp,
                digest=done.digest.with_snapshot(done.snapshot),
                written=done.written,
                lost=spans.size(done.snapshot.lost),
            )
            for uid, done in self._done.items()
        ]
        carried += [one for one in self._taken.values() if one.uid not in self._done]
        only_there = [
            mark.key
            for uid, mark in self._there.items()
            if uid not in self._here and (mark.deleted or mark.key not in self._unread)
        ]
        return CopyTotals(
            carried=tuple(sorted(carried, key=lambda one: (one.key, one.uid))),
            problems=tuple(self._problems.values()),
            only_there=tuple(only_there),
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


def _is_much(written: Sequence[_Done]) -> bool:
    """Return whether a group reached a limit and must be made durable."""
    return (
        sum(done.digest.messages for done in written) >= GROUP_MESSAGES
        or sum(done.digest.bytes for done in written) >= GROUP_BYTES
    )


def _count(snapshot: Snapshot) -> int:
    """Return the number of messages in a snapshot."""
    return (
        spans.size(spans.minus([(1, snapshot.last_seq)], missing(snapshot)))
        if snapshot.last_seq
        else 0
    )
