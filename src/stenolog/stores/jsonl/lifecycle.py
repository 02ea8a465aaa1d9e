"""Fork, delete and restore sessions as files.

Lock order: gate → flock of the live file → flock of a file in the trash → mutex.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct

from stenolog.codec import message_line
from stenolog.errors import (
    NoSuchSession,
    SessionExists,
    StenologError,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.records import Message, Trashed
from stenolog.stores import spans
from stenolog.stores.disk import lock_until
from stenolog.stores.jsonl import trash, writer
from stenolog.stores.jsonl.directory import store_error
from stenolog.stores.jsonl.log import Log, LogLookup
from stenolog.stores.jsonl.open_logs import OpenLogCache
from stenolog.stores.jsonl.rewrite import compose_log, replace_log
from stenolog.stores.jsonl.scan import read_records
from stenolog.stores.jsonl.write_queue import WriteQueue, delete_if_empty
from stenolog.stores.jsonl.writer import Outcome
from stenolog.stores.state import Fork, copy, decide_fork, not_copied


class _Replaced(Exception):
    """The log was replaced or removed after it was read."""


class Lifecycle:
    """Fork, delete and restore operations of one store."""

    def __init__(self, logs: OpenLogCache, queue: WriteQueue, *, busy_timeout: float) -> None:
        self._logs = logs
        self._queue = queue
        self._directory = logs.directory
        self._busy_timeout = busy_timeout

    # --- fork --------------------------------------------------------------------------------

    def fork(self, key: str, new_key: str, at: int | None) -> None:
        """Fork a session, as `Store.fork`."""
        deadline = self._deadline()
        while True:
            source, messages = self._read_source(key, new_key, at)
            try:
                # A fork must not contain messages of another process that a power cut may remove.
                writer.sync(source.log)
            except OSError as error:
                self._logs.discard(source.log)
                raise store_error(error, f"syncing the log of {key!r}") from error
            text = forked_log(source.fork, messages, source.fork.state.created)
            with suppress(_Replaced):
                make = partial(self._write_fork, text=text, fork=source, deadline=deadline)
                self.create(new_key, make, f"forking {key!r} to {new_key!r}")
                return
            if time.monotonic() > deadline:
                raise StoreBusy(f"{key!r}: other processes keep replacing its log; try again")

    def _write_fork(self, log: Log, *, text: bytes, fork: "_ForkSource", deadline: float) -> None:
        """Create the fork while its source is locked. Raises _Replaced.

        Purged messages must not remain in a fork that the purge does not report. So a purge of the
        source either finds and reports the fork, or this method notices the purge.
        """
        source = fork.log
        descriptor = self._directory.open(source.name)
        if descriptor is None:
            raise _Replaced
        try:
            lock_until(descriptor, deadline, f"the log of {source.key!r}")
            if self._version(source.key) != (fork.uid, fork.generation):  # guard: fork-sees-purge
                raise _Replaced
            replace_log(log, text)
        finally:
            descriptor.release()

    def _read_source(
        self, key: str, new_key: str, at: int | None
    ) -> tuple["_ForkSource", list[Message]]:
        if self._logs.read(key, lambda _: True) is None:
            trash.sync_renames(self._directory)
            raise NoSuchSession(key)
        self._check_free(new_key)
        uid, now = os.urandom(8).hex(), writer.now()
        source = self._logs.read_with_archives(
            key, lambda log: _fork_source(log, new_key=new_key, at=at, uid=uid, now=now)
        )
        if source is None:
            raise NoSuchSession(key)
        return source

    def _version(self, key: str) -> tuple[str, int] | None:
        def read(log: Log) -> tuple[str, int]:
            state = log.known_state()
            return state.uid, state.generation

        return self._logs.read(key, read)

    # --- creating a live log -----------------------------------------------------------------

    def _check_free(self, key: str) -> None:
        if self._logs.read(key, lambda _: True) is not None:
            trash.sync_renames(self._directory)
            raise SessionExists(key)

    def create(self, key: str, make: Callable[[Log], None], doing: str) -> None:
        """Create a session by calling `make` on a locked file without a session.

        No other writer can start a session in the locked file. Raises SessionExists; `make` may
        raise OSError.
        """

        def work() -> None:
            log = self._logs.lock(key, create=True)
            if log is None:
                raise NoSuchSession(key)
            try:
                check_no_session(log)  # guard: fork-needs-free-key
                make(log)
            except OSError as error:
                raise rename_error(error, log, doing) from error
            finally:
                delete_if_empty(log)
                self._logs.discard(log)

        self._queue.run_exclusive(key, work)

    # --- trash -------------------------------------------------------------------------------

    def delete(self, key: str) -> Trashed:
        """Delete a session, as `Store.delete`."""
        trashed: list[Trashed] = []

        def work() -> None:
            log = lock_session(self._logs, key)
            try:
                trashed.append(trash.describe(log, trash.move_in(log, writer.now())))
            except OSError as error:
                raise rename_error(error, log, f"deleting {key!r}") from error
            finally:
                self._logs.discard(log)

        self._queue.run_exclusive(key, work)
        return trashed[0]

    def restore(self, key: str, uid: str | None, as_key: str | None) -> None:
        """Restore a session, as `Store.restore`."""
        target = key if as_key is None else as_key
        entry = self._find(key, uid)
        self._check_free(target)

        def make(live: Log) -> None:
            with trash.opened(self._directory, entry, until=self._deadline()) as log:
                if log is None:
                    raise NoSuchSession(key, "another process restored or purged it")
                trash.move_out(log, entry, target, live)

        self.create(target, make, f"restoring {key!r}")

    def _find(self, key: str, uid: str | None) -> trash.Entry:
        for entry, deleted_key in trash.keys(self._directory):
            if deleted_key == key and uid in (None, entry.uid):
                return entry
        trash.sync_renames(self._directory)
        raise NoSuchSession(key, "it is not in the trash")

    def _deadline(self) -> float:
        return time.monotonic() + self._busy_timeout


class _ForkSource(Struct, frozen=True):
    """A session at the time of its fork."""

    log: Log
    fork: Fork
    uid: str
    generation: int


def _fork_source(
    log: Log, *, new_key: str, at: int | None, uid: str, now: str
) -> tuple[_ForkSource, LogLookup]:
    """Return the content that a fork copies. Raises UsageError.

    The caller holds the log's mutex.
    """
    state, end = log.settled_state()
    fork = decide_fork(state, end, new_key=new_key, at=at, uid=uid, now=now)
    return _ForkSource(log, fork, state.uid, state.generation), log.visible_messages(
        last=None, after=None
    )


def forked_log(fork: Fork, messages: Sequence[Message], now: str) -> bytes:
    """Return the log of a fork with these messages of the source."""
    copied = [message for message in messages if spans.contains(fork.taken, message.seq)]
    head = copy(fork.state)
    head.purged = not_copied([(m.seq, m.seq) for m in copied], fork.next_seq - 1)
    # `composed` adds 1, and a new log has generation 1.
    head.generation = 0
    # The lines need no idempotency keys and batches, because the file appears in one step.
    lines = b"".join(message_line(m.seq, m._at, m.to_json()) for m in copied)
    return compose_log(
        head,
        head,
        lines,
        now,
        first_seq=copied[0].seq if copied else fork.next_seq,
        next_seq=fork.next_seq,
        tail=None,
    )


def lock_session(logs: OpenLogCache, key: str) -> Log:
    """Return the log of a session and hold its lock.

    Raises NoSuchSession, ReadOnly and the errors of `lock`.
    """
    log = logs.lock(key, create=False)
    if log is None or not has_session(log):
        trash.sync_renames(logs.directory)
        raise NoSuchSession(key)
    with log.mutex:
        log.check_known()
    return log


def has_session(log: Log) -> bool:
    """Return whether the log holds a session. Raises the errors of `Log.load`."""
    with log.mutex:  # guard: log-fields-under-mutex
        return log.exists


def check_no_session(log: Log) -> None:
    """Raise SessionExists if any content of the file may have been acknowledged."""
    with log.mutex:
        if log.exists:
            raise SessionExists(log.key)
        tail = log.tail
    text = log.read(0, log.file_size())
    # A single line, or NULs, may be an interrupted first write. Several damaged lines were a
    # session.
    unread = not read_records(text, offset=0)[0] and b"\n" in text.strip(b"\0\n")
    if unread or (tail is not None and tail.lost):
        raise SessionExists(log.key, "the key has a damaged session; run `steno doctor`")


def rename_error(error: OSError, log: Log, doing: str) -> StoreUnavailable:
    """Return NotStored if the path still names the same file, otherwise MaybeStored."""
    try:
        renamed = not log.is_same_file(log.directory.stat(log.name))
    except StenologError:
        renamed = True
    return Outcome(0, error, unknown=renamed).failure(doing)  # guard: unknown-rename
