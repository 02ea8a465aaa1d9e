"""Copying of complete sessions from one store to another while the source is in use.

A copy writes the sessions that the destination lacks, each in one step and as a consistent
snapshot. Sessions are recognized by uid. Sessions that the destination has are never changed. At
the end, all copied sessions are read from the destination and compared with the source by digest.

A workspace has the sessions of a named agent in the folder `agents/NAME/sessions`. A database has
these sessions in the namespace `agents.NAME`. This module uses the name of the namespace for both.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from stenolog.errors import (
    DamagedStore,
    NoSuchSession,
    SessionExists,
    StoreBusy,
    StoreUnavailable,
    UsageError,
)
from stenolog.records import Message, Span
from stenolog.sessions.aliases import NO_ALIASES, alias_mark, change_alias_mark, prepare_alias_mark
from stenolog.sessions.folders import (
    NAMESPACE,
    agent_in_namespace,
    agent_namespace,
    check_workspace,
    locate_sessions,
    log_folders,
)
from stenolog.stores import spans
from stenolog.stores.admin import StoreAdmin
from stenolog.stores.base import Store
from stenolog.stores.file_names import unescape_key
from stenolog.stores.open_store import Address, open_store, parse_address
from stenolog.stores.postgres import PostgresStore
from stenolog.stores.snapshots import (
    Snapshot,
    SnapshotMark,
    SnapshotReading,
    SnapshotWriter,
    token_of,
)
from stenolog.stores.sql.store import SQLStore

if TYPE_CHECKING:
    from hashlib import _Hash

GROUP_SNAPSHOTS: Final = 256
GROUP_MESSAGES: Final = 20_000
GROUP_BYTES: Final = 32 * 1024 * 1024
"""Numbers of sessions, messages and bytes after which written sessions are made durable."""
MAX_ATTEMPTS: Final = 5
"""Maximum number of reads of a session that changes, or is found to be damaged, during a read."""

_KEY_EXISTS_ADVICE: Final = (
    "The destination was not changed: delete or rename that session there, or copy to another place"
)
_TOO_DAMAGED_REASON: Final = "the session is too damaged to be read; run `steno doctor`"
_RENAMED_REASON: Final = "the session was renamed during the copy; copy again"
_DIFFERENT_REASON: Final = (
    "the destination has this session with different content: one of the two was changed or is "
    "damaged. The destination was not changed: purge the session there and copy again, or copy to "
    "an empty place"
)
_NOT_EQUAL_REASON: Final = (
    "the copy differs from the source: the disk is faulty, or another process wrote to the copy; "
    "check the disk, purge the session in the destination, and copy again"
)

Phase = Literal["copying", "comparing"]


class CopyStep(Struct, frozen=True, kw_only=True):
    """Progress of a copy."""

    phase: Phase
    done: int
    """Number of sessions for which this phase has finished."""
    total: int
    messages: int
    """Number of messages written so far."""


Progress = Callable[[CopyStep], None]
OnProgress = Callable[[str, CopyStep], None]
"""Progress callback: called with the namespace and each step."""


class CopyProblem(Struct, frozen=True, kw_only=True):
    """A session that could not be copied. If the key is empty, a whole namespace was not copied."""

    key: str
    uid: str
    reason: str
    """The reason as text, with advice."""


class CopiedSession(Struct, frozen=True, kw_only=True):
    """A session that is equal in the source and the destination."""

    key: str
    uid: str
    deleted: str | None
    messages: int
    digest: str
    written: bool
    """Whether this copy wrote the session."""
    lost: int
    """Number of messages that damage destroyed in both source and destination."""


class CopyTotals(Struct, frozen=True, kw_only=True):
    """Result of copying one namespace."""

    copied: tuple[CopiedSession, ...]
    problems: tuple[CopyProblem, ...] = ()

    @property
    def messages(self) -> int:
        """Number of messages written."""
        return sum(session.messages for session in self.copied if session.written)


class CopyReport(Struct, frozen=True, kw_only=True):
    """Result of copying all namespaces of a workspace or database."""

    namespaces: dict[str, CopyTotals]

    @property
    def sessions(self) -> int:
        """Number of live sessions that are equal in the source and the destination."""
        return sum(session.deleted is None for session in self.copied_sessions())

    @property
    def deleted(self) -> int:
        """Number of sessions in the trash that are equal in the source and the destination."""
        return sum(session.deleted is not None for session in self.copied_sessions())

    @property
    def written(self) -> int:
        """Number of sessions for which data was written."""
        return sum(session.written for session in self.copied_sessions())

    @property
    def messages(self) -> int:
        """Number of messages that were written."""
        return sum(totals.messages for totals in self.namespaces.values())

    @property
    def problems(self) -> int:
        """Number of sessions and namespaces that could not be copied."""
        return sum(len(totals.problems) for totals in self.namespaces.values())

    def copied_sessions(self) -> Iterator[CopiedSession]:
        """Yield the sessions of all namespaces that are equal in both places."""
        for totals in self.namespaces.values():
            yield from totals.copied


def copy_place(source: str, target: str, *, on_progress: OnProgress | None = None) -> CopyReport:
    """Copy all namespaces of one workspace or database to another one.

    A namespace that cannot be opened in the destination is reported as a problem. If no namespace
    can be opened, the first error is raised. Raises UsageError and the errors of `copy_snapshots`.
    """
    check_different_places(source, target)
    copied_totals: dict[str, CopyTotals] = {}
    errors: dict[str, UsageError | StoreUnavailable] = {}
    for name in list_namespaces(source):
        with _open_namespace(source, name, read_only=True) as source_store, ExitStack() as stack:
            try:
                target_store = stack.enter_context(_open_namespace(target, name))
            except (UsageError, StoreUnavailable) as error:
                errors[name] = error
                continue
            if alias_mark(source_store) != NO_ALIASES:
                # The new mark makes processes that use the destination reload the aliases.
                prepare_alias_mark(target_store)
                stack.callback(change_alias_mark, target_store)
            progress = None if on_progress is None else partial(on_progress, name)
            copied_totals[name] = copy_snapshots(source_store, target_store, progress=progress)
    if errors and not copied_totals:
        raise next(iter(errors.values()))
    failed_totals = {
        name: CopyTotals(copied=(), problems=(CopyProblem(key="", uid="", reason=str(error)),))
        for name, error in errors.items()
    }
    return CopyReport(namespaces=copied_totals | failed_totals)


def copy_snapshots(source: Store, target: Store, *, progress: Progress | None = None) -> CopyTotals:
    """Copy the sessions that the destination lacks, and compare the other sessions.

    The result lists in `problems` the sessions that could not be copied or are different in the
    destination. Raises the errors of the destination, for example NotStored if the disk is full.
    After an error, a repeated call continues the copy.
    """
    return _CopyRun(source.admin, target.admin, progress).run()


class _CopyRun:
    """One call of `copy_snapshots`."""

    def __init__(self, source: StoreAdmin, target: StoreAdmin, progress: Progress | None) -> None:
        self._source = source
        self._target = target
        self._progress = progress
        self._phase: Phase = "copying"
        self._done = self._total = self._messages = 0
        self._target_marks: dict[str, SnapshotMark] = {}
        self._copied: dict[str, CopiedSession] = {}
        self._problems: list[CopyProblem] = []

    def run(self) -> CopyTotals:
        """Copy the sessions that the destination lacks, and compare all copied sessions."""
        source_marks, target_marks = self._source.list_snapshots(), self._target.list_snapshots()
        self._target_marks = {mark.uid: mark for mark in target_marks}
        existing, missing = self._divide(source_marks, target_marks)
        self._start_phase("copying", len(existing) + len(missing))
        for mark in existing:
            self._copy(mark)
        self._write_groups(deque(missing))
        self._start_phase("comparing", len(self._copied))
        for session in list(self._copied.values()):
            self._compare(session)
        copied = sorted(self._copied.values(), key=lambda session: (session.key, session.uid))
        return CopyTotals(copied=tuple(copied), problems=tuple(self._problems))

    def _divide(
        self, source_marks: Sequence[SnapshotMark], target_marks: Sequence[SnapshotMark]
    ) -> tuple[list[SnapshotMark], list[SnapshotMark]]:
        """Return the sessions that the destination has, and those that can be written to it."""
        live_marks = {mark.key: mark for mark in target_marks if mark.deleted is None}
        existing, missing = [], []
        # A session that was restored during the listing may be listed twice.
        for mark in {mark.uid or mark.key: mark for mark in source_marks}.values():
            if not mark.uid:
                self._add_problem(mark, mark.problem or _TOO_DAMAGED_REASON)
            elif mark.uid in self._target_marks:
                existing.append(mark)
            elif mark.deleted is None and (other := live_marks.get(mark.key)) is not None:
                error = SessionExists(mark.key)
                self._add_problem(mark, other.problem or f"{error}. {_KEY_EXISTS_ADVICE}")
            else:
                missing.append(mark)
        return existing, missing

    def _write_groups(self, missing: deque[SnapshotMark]) -> None:
        """Write these sessions, in groups that are made durable together."""
        while True:
            # Opening a writer also removes the files that a killed copy left.
            with self._target.snapshot_writer() as writer:
                sessions = messages = size = 0
                while missing and (
                    sessions < GROUP_SNAPSHOTS and messages < GROUP_MESSAGES and size < GROUP_BYTES
                ):
                    digest = self._copy(missing.popleft(), writer)
                    sessions += 1
                    messages += digest.messages
                    size += digest.bytes
            if not missing:
                return

    # --- one session -------------------------------------------------------------------------

    def _copy(self, mark: SnapshotMark, writer: SnapshotWriter | None = None) -> "MessagesDigest":
        """Read a session of the source, write it with `writer`, and record the result.

        Without `writer`, the session is only read. Return the digest of the copied messages.
        """
        digest = MessagesDigest()
        try:
            snapshot, digest = self._read(mark, writer)
        except (DamagedStore, StoreBusy) as error:
            self._add_problem(mark, str(error))
        except SessionExists as error:
            self._add_problem(mark, f"{error}. {_KEY_EXISTS_ADVICE}")
        except NoSuchSession:
            if any(other.uid == mark.uid for other in self._source.list_snapshots()):
                self._add_problem(mark, _RENAMED_REASON)
        else:
            self._copied[mark.uid] = CopiedSession(
                key=snapshot.key,
                uid=snapshot.uid,
                deleted=snapshot.deleted,
                messages=digest.messages,
                digest=digest.session_digest(snapshot),
                written=mark.uid not in self._target_marks,
                lost=spans.size(snapshot.lost),
            )
            self._messages += digest.messages if writer is not None else 0
        self._advance()
        return digest

    def _read(
        self, mark: SnapshotMark, writer: SnapshotWriter | None
    ) -> tuple[Snapshot, "MessagesDigest"]:
        """Read a session of the source, and write it with `writer`, if given.

        Raises NoSuchSession, SessionExists, StoreBusy, DamagedStore, and errors of the destination.
        """
        lost: list[Span] = []
        for attempts_left in reversed(range(MAX_ATTEMPTS)):
            digest = MessagesDigest()
            try:
                with self._open_source(mark) as reading:
                    snapshot = _with_lost(reading.snapshot, lost)
                    messages = digest.add_and_yield(snapshot, reading.messages)
                    if writer is None:
                        deque(messages, maxlen=0)
                    else:
                        writer.write(snapshot, messages)
                    return snapshot, digest
            except UnknownDamage as damage:
                lost = spans.union(lost, damage.seqs)
            except StoreBusy:
                if not attempts_left:
                    raise
        raise DamagedStore(_TOO_DAMAGED_REASON)

    @contextmanager
    def _open_source(self, mark: SnapshotMark) -> Iterator[SnapshotReading]:
        """Open a session of the source. Raises NoSuchSession, StoreBusy, DamagedStore."""
        with ExitStack() as stack:
            with _convert_source_errors():
                reading = stack.enter_context(self._source.read_snapshot(mark))
            yield replace(reading, messages=_messages_of_source(reading))

    def _compare(self, copied: CopiedSession) -> None:
        """Read a session from the destination, and compare it with the source."""
        mark = SnapshotMark(key=copied.key, uid=copied.uid, deleted=copied.deleted)
        reason = ""
        try:
            with self._target.read_snapshot(self._target_marks.get(copied.uid, mark)) as reading:
                if digest_of(reading) != copied.digest:
                    reason = _NOT_EQUAL_REASON if copied.written else _DIFFERENT_REASON
        except (DamagedStore, NoSuchSession, StoreUnavailable) as error:
            reason = str(error)
        if reason:
            del self._copied[copied.uid]
            self._add_problem(mark, reason)
        self._advance()

    # --- results -----------------------------------------------------------------------------

    def _add_problem(self, mark: SnapshotMark, reason: str) -> None:
        self._problems.append(CopyProblem(key=mark.key, uid=mark.uid, reason=reason))

    def _start_phase(self, phase: Phase, total: int) -> None:
        self._phase, self._done, self._total = phase, 0, total
        self._report_progress()

    def _advance(self) -> None:
        self._done += 1
        self._report_progress()

    def _report_progress(self) -> None:
        if self._progress is not None:
            step = CopyStep(
                phase=self._phase, done=self._done, total=self._total, messages=self._messages
            )
            self._progress(step)


def _messages_of_source(reading: SnapshotReading) -> Iterator[Message]:
    with _convert_source_errors():
        yield from reading.messages


@contextmanager
def _convert_source_errors() -> Iterator[None]:
    """Raise DamagedStore instead of StoreUnavailable.

    StoreUnavailable would look like an error of the destination and end the whole copy.
    """
    try:
        yield
    except StoreBusy:
        raise
    except StoreUnavailable as error:
        raise DamagedStore(str(error)) from error


def _with_lost(snapshot: Snapshot, lost: Sequence[Span]) -> Snapshot:
    """Return the snapshot with these additional lost seqs."""
    lost = spans.minus(
        spans.union(snapshot.lost, lost), spans.union(snapshot.void, snapshot.purged)
    )
    return replace(snapshot, lost=lost)


# --- comparison ------------------------------------------------------------------------------
# Two sessions have the same digest if all messages are equal, including seqs, times and idempotency
# keys, and if all other fields are equal, for example key, deletion time and summary. Digests do
# not depend on the storage engine.


class UnknownDamage(Exception):
    """Raised if messages are missing because of damage that the store did not know of."""

    def __init__(self, seqs: list[Span]) -> None:
        self.seqs = seqs
        super().__init__(f"damaged: {seqs}")


class MessagesDigest:
    """Incremental digest of the messages of a session, in the order of their seqs."""

    __slots__ = ("_hash", "bytes", "messages")

    def __init__(self) -> None:
        self._hash: _Hash = sha256()
        self.messages = 0
        """Number of messages added."""
        self.bytes = 0
        """Total length of the bodies of all added messages, in bytes."""

    def add(self, message: Message) -> None:
        """Add a message to the digest."""
        body = message.to_json()
        token = b""
        if message._once is not None and (token_and_count := token_of(message)) is not None:
            token = json.dumps(token_and_count).encode()
        self._hash.update(b"%d %b %b %d\n" % (message.seq, message._at.encode(), token, len(body)))
        self._hash.update(body)
        self.messages += 1
        self.bytes += len(body)

    def session_digest(self, snapshot: Snapshot) -> str:
        """Return the digest of a complete session: the added messages and this snapshot.

        The digests of idempotency keys are left out, because some engines do not keep them.
        """
        fields: dict[str, Any] = to_builtins(snapshot)
        fields["tokens"] = [(token.token, token.first, token.count) for token in snapshot.tokens]
        digest = self._hash.copy()
        # `dumps` writes lone surrogates as ASCII escapes, so `encode` accepts every text.
        digest.update(json.dumps(fields, separators=(",", ":")).encode())
        return digest.hexdigest()

    def add_and_yield(self, snapshot: Snapshot, messages: Iterable[Message]) -> Iterator[Message]:
        """Add each message to the digest, and yield it.

        Raises UnknownDamage at the end if messages are missing without a known reason.
        """
        expected_seq, gaps, add = 1, list[Span](), self.add
        missing = spans.union(snapshot.lost, snapshot.void, snapshot.purged)
        for message in messages:
            if message.seq != expected_seq:
                gaps.append((expected_seq, message.seq - 1))
            expected_seq = message.seq + 1
            add(message)
            yield message
        if expected_seq <= snapshot.last_seq:
            gaps.append((expected_seq, snapshot.last_seq))
        if gaps and (new_gaps := spans.minus(gaps, missing)):
            raise UnknownDamage(new_gaps)


def digest_of(reading: SnapshotReading) -> str:
    """Return the digest of a session. `reading` must start at the first message.

    Damaged messages count as lost in the digest, even if the store did not know of the damage.
    """
    digest = MessagesDigest()
    snapshot = reading.snapshot
    try:
        for _ in digest.add_and_yield(snapshot, reading.messages):
            pass
    except UnknownDamage as damage:
        snapshot = replace(snapshot, lost=spans.union(snapshot.lost, damage.seqs))
    return digest.session_digest(snapshot)


# --- namespaces ------------------------------------------------------------------------------


def list_namespaces(where: str) -> list[str]:
    """Return the namespaces of a place that have sessions. Raises UsageError, StoreUnavailable."""
    address = parse_address(where)
    if address.engine == "jsonl":
        check_workspace(Path(address.path))
        return [_folder_to_namespace(where, folder) for folder in log_folders(Path(address.path))]
    with open_store(where, read_only=address.engine != "memory") as store:
        return store.namespaces() if isinstance(store, SQLStore) else [NAMESPACE]


def _folder_to_namespace(where: str, folder: str) -> str:
    *parent, name = folder.split("/")
    if not parent:
        return name
    agent = unescape_key(parent[-1])
    if agent is None or name != NAMESPACE:
        raise UsageError(
            f"{where}: {folder} has no equivalent in a database; move it to a separate folder"
        )
    return agent_namespace(agent)


def check_different_places(source: str, target: str) -> None:
    """Raise UsageError if source and target are the same place, or one is a temporary store."""
    if "memory:" in (source, target):
        raise UsageError("'memory:' is a temporary store; give another place")
    source_address, target_address = parse_address(source), parse_address(target)
    if source_address.engine != target_address.engine:
        return
    if source == target or _is_same_place(source_address, target_address):
        # The message does not contain the address, because a URL may contain a password.
        raise UsageError("source and destination are the same place; give another one")


def _is_same_place(source: Address, target: Address) -> bool:
    """Return whether two addresses of one engine refer to the same place."""
    if source.engine == "postgresql":
        return _is_same_database(str(source.path), str(target.path))
    try:
        # Inodes are compared: one inode can have several paths (symlinks, hard links, bind mounts).
        return Path(source.path).samefile(target.path)
    except OSError:
        return Path(source.path).resolve() == Path(target.path).resolve()


def _is_same_database(source: str, target: str) -> bool:
    try:
        with (
            open_store(source, read_only=True) as source_store,
            open_store(target, read_only=True) as target_store,
        ):
            assert isinstance(source_store, PostgresStore), (
                "the address names a PostgreSQL database"
            )
            assert isinstance(target_store, PostgresStore), (
                "the address names a PostgreSQL database"
            )
            # Different URLs may lead to the same server, for example through a socket or a pooler.
            return source_store.is_same_place(target_store)
    except StoreUnavailable:
        return False  # the database is missing, or the copy will report the problem


# --- opening ---------------------------------------------------------------------------------


def _open_namespace(where: str, namespace: str, *, read_only: bool = False) -> Store:
    if parse_address(where).engine != "jsonl":
        return open_store(where, namespace=namespace, read_only=read_only)
    agent = agent_in_namespace(namespace)
    folder = namespace if agent is None else NAMESPACE
    return open_store(locate_sessions(where, agent).where, namespace=folder, read_only=read_only)
