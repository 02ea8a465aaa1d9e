"""Fork, delete and restore sessions as files.

Lock order: gate → flock of the live file → flock of a file in the trash → mutex.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from stenolog.codec import message_line
from stenolog.errors import NoSuchSession, SessionExists, StenologError, StoreBusy, StoreUnavailable
from stenolog.records import Message, SessionInfo, TrashedSession
from stenolog.stores import file_names, spans
from stenolog.stores.disk import lock_until
from stenolog.stores.jsonl import trash, writer
from stenolog.stores.jsonl.log import LiveMessages, Log
from stenolog.stores.jsonl.open_logs import OpenLogCache, T
from stenolog.stores.jsonl.rewrite import LogStates, compose_log, replace_log
from stenolog.stores.jsonl.scan import read_records
from stenolog.stores.jsonl.write_queue import WriteQueue, delete_if_empty
from stenolog.stores.jsonl.writer import Outcome
from stenolog.stores.state import Fork, copy_state, decide_fork


class _LogReplaced(Exception):
    """The log was replaced or removed after it was read."""


_ForkSource = tuple[Log, tuple[str, int], Fork]
"""Log of the session that is forked, its uid and generation, and the planned fork."""


class Lifecycle:
    """Fork, delete and restore operations of one store."""

    def __init__(self, logs: OpenLogCache, queue: WriteQueue) -> None:
        self._logs = logs
        self._queue = queue
        self._directory = logs.directory

    # --- fork --------------------------------------------------------------------------------

    def fork(self, key: str, new_key: str, at: int | None) -> None:
        """Fork a session, as `Store.fork` describes."""
        deadline = self._logs.deadline()
        while True:
            (log, version, fork), messages = self._read_source(key, new_key, at)
            # Sync first: the fork must not keep messages that a power cut removes from the source.
            self._logs.sync_log(log)
            text = compose_forked_log(fork, messages)
            with suppress(_LogReplaced):
                write_log = partial(
                    self._write_fork, text=text, key=key, version=version, deadline=deadline
                )
                self.create_session(new_key, write_log, f"forking {key!r} to {new_key!r}")
                return
            if time.monotonic() > deadline:
                raise StoreBusy(f"{key!r}: other processes keep replacing its log; try again")

    def _write_fork(
        self, log: Log, *, text: bytes, key: str, version: tuple[str, int], deadline: float
    ) -> None:
        """Create the fork while its source `key` is locked. Raises _LogReplaced.

        Purged messages must not remain in a fork that the purge does not report. So a purge of the
        source either finds and reports the fork, or runs earlier and this method raises.
        """
        descriptor = self._directory.open_log(file_names.log_name(key))
        if descriptor is None:
            raise _LogReplaced
        try:
            lock_until(descriptor, deadline, f"the log of {key!r}")
            # guard: fork-sees-purge
            if self._logs.read_log(key, _read_version) != version:
                raise _LogReplaced
            replace_log(log, text)
        finally:
            descriptor.release()

    def _read_source(
        self, key: str, new_key: str, at: int | None
    ) -> tuple[_ForkSource, list[Message]]:
        """Return the source (see `_ForkSource`), and the visible messages of the session."""
        if self._logs.read_log(key, lambda _: True) is None:
            trash.sync_renames(self._directory)
            raise NoSuchSession(key)
        self._check_key_unused(new_key)
        uid, now = os.urandom(8).hex(), writer.now()

        def read_source(log: Log) -> tuple[_ForkSource, LiveMessages]:
            state, last_seq = log.settled_state()
            fork = decide_fork(state, last_seq, new_key=new_key, at=at, uid=uid, now=now)
            live_part = log.visible_messages(last=None, after=None)
            return (log, _read_version(log), fork), live_part

        source = self._logs.read_with_archives(key, read_source)
        if source is None:
            raise NoSuchSession(key)
        return source

    # --- creating a live log -----------------------------------------------------------------

    def _check_key_unused(self, key: str) -> None:
        if self._logs.read_log(key, lambda _: True) is not None:
            trash.sync_renames(self._directory)
            raise SessionExists(key)

    def create_session(self, key: str, write_log: Callable[[Log], None], action: str) -> None:
        """Create a session by calling `write_log` on a locked file without a session.

        No other writer can start a session in the locked file. `action` describes the call in error
        messages. Raises SessionExists; `write_log` may raise OSError.
        """

        def write_new_log() -> None:
            log = self._logs.lock(key, create=True)
            if log is None:
                raise NoSuchSession(key)
            try:
                check_no_session(log)  # guard: fork-needs-free-key
                write_log(log)
            except OSError as error:
                raise error_after_rename(error, log, action) from error
            finally:
                delete_if_empty(log)
                self._logs.drop_log(log)

        self._queue.run_exclusive(key, write_new_log)

    # --- trash -------------------------------------------------------------------------------

    def delete(self, key: str) -> TrashedSession:
        """Delete a session, as `Store.delete` describes."""

        def move_log(log: Log) -> TrashedSession:
            return trash.trashed_session(log, trash.move_to_trash(log, writer.now()))

        return self.change_file(key, move_log, f"deleting {key!r}")

    def delete_unchanged(self, info: SessionInfo) -> TrashedSession | None:
        """Delete a session, as `StoreAdmin.delete_unchanged` describes."""

        def move_unchanged_log(log: Log) -> TrashedSession | None:
            with log.mutex:
                current = log.info()
            version = current.uid, current.last_seq, current.change
            if version != (info.uid, info.last_seq, info.change):
                return None
            return trash.trashed_session(log, trash.move_to_trash(log, writer.now()))

        return self.change_file(info.key, move_unchanged_log, f"deleting {info.key!r}")

    def change_file(self, key: str, change: Callable[[Log], T], action: str) -> T:
        """Lock the log of a session, call `change` to rename or replace it, and return the result.

        `action` describes the call in error messages. Raises NoSuchSession; `change` may raise
        OSError.
        """

        def change_locked_log() -> T:
            log = lock_session(self._logs, key)
            try:
                return change(log)
            except OSError as error:
                raise error_after_rename(error, log, action) from error
            finally:
                self._logs.drop_log(log)

        return self._queue.run_exclusive(key, change_locked_log)

    def restore(self, key: str, uid: str | None, as_key: str | None) -> None:
        """Restore a session, as `StoreAdmin.restore` describes."""
        target_key = key if as_key is None else as_key
        for entry, deleted_key in trash.entries_with_keys(self._directory):
            if deleted_key == key and uid in (None, entry.uid):
                break
        else:
            trash.sync_renames(self._directory)
            raise NoSuchSession(key, "it is not in the trash")
        self._check_key_unused(target_key)

        def move_log(live_log: Log) -> None:
            with trash.open_deleted_log(self._directory, entry, until=self._logs.deadline()) as log:
                if log is None:
                    raise NoSuchSession(key, "another process restored or purged it")
                trash.move_from_trash(log, entry, target_key, live_log)

        self.create_session(target_key, move_log, f"restoring {key!r}")


def _read_version(log: Log) -> tuple[str, int]:
    """Return uid and generation; a purge changes at least one. The caller holds the log's mutex."""
    state = log.known_state()
    return state.uid, state.generation


def compose_forked_log(fork: Fork, messages: Sequence[Message]) -> bytes:
    """Return the content of the log of a fork; `messages` are those of the source session."""
    copied_messages = [message for message in messages if spans.contains(fork.copied, message.seq)]
    state = copy_state(fork.state)
    copied_spans = spans.from_seqs(message.seq for message in copied_messages)
    state.purged = spans.minus([(1, fork.next_seq - 1)], copied_spans)
    # A new log has generation 1, and `compose_log` adds 1.
    state.generation = 0
    # Lines of a fork need no idempotency keys and no batches: the whole file appears in one step.
    lines = b"".join(message_line(m.seq, m._at, m.to_json()) for m in copied_messages)
    first_seq = copied_messages[0].seq if copied_messages else fork.next_seq
    return compose_log(LogStates(state, first_seq, state, fork.next_seq), lines, state.created)


def lock_session(logs: OpenLogCache, key: str) -> Log:
    """Lock the log of a session and return the log.

    Raises NoSuchSession and the errors of `OpenLogCache.lock`.
    """
    log = logs.lock(key, create=False)
    if log is None or not has_session(log):
        trash.sync_renames(logs.directory)
        raise NoSuchSession(key)
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
    text = log.read_bytes(0, log.file_size())
    # A single line, or NULs, may be an interrupted first write.
    # Several damaged lines are the remains of a session.
    has_only_damaged_lines = not read_records(text, offset=0)[0] and b"\n" in text.strip(b"\0\n")
    if has_only_damaged_lines or (tail is not None and tail.lost):
        raise SessionExists(log.key, "the key has a damaged session; run `steno doctor`")


def error_after_rename(error: OSError, log: Log, action: str) -> StoreUnavailable:
    """Return NotStored if the path still names the same file, otherwise MaybeStored."""
    try:
        is_renamed = not log.is_same_file(log.directory.file_status(log.name))
    except StenologError:
        is_renamed = True
    return Outcome(0, error, is_unknown=is_renamed).failure(action)  # guard: unknown-rename
