"""Open-log cache: the logs that this process has open, limited in number and in memory.

If the path of a log names another file, the cache drops the log.
"""

import errno
import fcntl
import gc
import os
import resource
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, TypeVar

from stenolog.errors import DamagedStore, ForeignLog, StenologError, StoreBusy, StoreUnavailable
from stenolog.records import Message
from stenolog.stores import file_names
from stenolog.stores.disk import LOCK_POLL_SECONDS, Descriptor, lock_until
from stenolog.stores.jsonl.directory import Directory, store_error, system_errors
from stenolog.stores.jsonl.log import LiveMessages, LoadPhase, Log
from stenolog.stores.jsonl.rewrite import rewrite_log
from stenolog.stores.jsonl.writer import now, sync_log

_DESCRIPTOR_WAIT_SECONDS: Final = 0.25
"""Seconds to wait for another thread to release a descriptor when the limit is reached."""
_MAX_OPEN_LOGS: Final = 512
"""Maximum number of open logs; lower if the process may open fewer files."""
_MAX_SYNCED_ENTRIES: Final = 8192
"""Maximum number of files in `synced_entries`; the folder is synced again for other files."""

T = TypeVar("T")


class OpenLogCache:
    """The open logs of one folder."""

    def __init__(self, directory: Directory, *, busy_timeout: float, cache_bytes: int) -> None:
        self.directory = directory
        self.suspect_names: set[str] = set()
        """Names of logs whose sync failed and that were not rewritten since."""
        self.busy_timeout = busy_timeout
        self._max_cached_bytes = cache_bytes
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        log_limit = _MAX_OPEN_LOGS if soft_limit == resource.RLIM_INFINITY else soft_limit // 4
        self._max_open = max(4, min(_MAX_OPEN_LOGS, log_limit))
        self._mutex = threading.Lock()
        self._open_logs: OrderedDict[str, Log] = OrderedDict()
        self.get_open_log = self._open_logs.get
        """Function that returns the open log of a key, or None."""
        self._existing_logs: weakref.WeakSet[Log] = weakref.WeakSet()
        self._locked_logs: dict[str, Log] = {}
        self.synced_entries: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Inode and device, by name, of files whose folder entry is known to be on the disk."""
        self._cached_bytes = 0

    def deadline(self) -> float:
        """Return the time of the monotonic clock up to which a call that starts now may wait."""
        return time.monotonic() + self.busy_timeout

    # --- opening -----------------------------------------------------------------------------

    def _get_log(self, key: str, *, create: bool) -> Log | None:
        with self._mutex:
            log = self._open_logs.get(key)
            if log is not None:
                self._open_logs.move_to_end(key)
                return log
        name = file_names.log_name(key)
        if create and self.directory.file_status(name) is None:
            self.check_no_foreign_log(key)
            self.directory.sync_renames()  # guard: free-name-settled
        descriptor = self._open_descriptor(name, create=create)
        if descriptor is None:
            return None
        log = Log(self.directory, name, key, descriptor)
        with self._mutex:
            self._existing_logs.add(log)
            # If another thread added its log first, the new log is dropped and its file closed.
            log = self._open_logs.setdefault(key, log)
            while len(self._open_logs) > self._max_open:
                self._open_logs.popitem(last=False)
        return log

    def _open_descriptor(self, name: str, *, create: bool) -> Descriptor | None:
        deadline = time.monotonic() + min(self.busy_timeout, _DESCRIPTOR_WAIT_SECONDS)
        while True:
            try:
                return self.directory.open_log(name, create=create)
            except StoreUnavailable as error:
                cause = error.__cause__
                limit_codes = (errno.EMFILE, errno.ENFILE)
                limit_reached = isinstance(cause, OSError) and cause.errno in limit_codes
                if not limit_reached or time.monotonic() > deadline:
                    raise
            # Close the cached logs; another thread may take or free descriptors at the same time.
            with self._mutex:
                self._open_logs.clear()
            gc.collect()  # a log that only an old traceback refers to still holds a descriptor
            time.sleep(LOCK_POLL_SECONDS)

    def check_no_foreign_log(self, key: str) -> None:
        """Raise ForeignLog if another program has a log for the key.

        A new log of stenolog would hide the log of the other program.
        """
        for name in file_names.foreign_names(key):
            try:
                descriptor = self.directory.open_log(name) if len(os.fsencode(name)) < 256 else None
            except (StenologError, ValueError):
                continue
            if descriptor is None:
                continue
            other_log = Log(self.directory, name, key, descriptor)
            try:
                with other_log.mutex:
                    other_log.load(other_log.file_size())
            except ForeignLog as error:
                raise ForeignLog(
                    f"{key!r}: another program stores this session in {other_log.path}; "
                    f"{self.directory.import_advice(name)}"
                ) from error
            except DamagedStore:
                continue  # a damaged log of stenolog, or a log of a newer version

    def mark_used(self, log: Log) -> None:
        """Mark the log as recently used, so that other logs are dropped first."""
        with self._mutex:
            if self._open_logs.get(log.key) is log:
                self._open_logs.move_to_end(log.key)

    def drop_log(self, log: Log) -> None:
        """Drop a log from the cache; its file is read again at the next use."""
        with log.mutex:
            is_suspect = log.is_suspect
        with self._mutex:
            if is_suspect:
                self.suspect_names.add(log.name)
            if self._open_logs.get(log.key) is log:
                del self._open_logs[log.key]

    # --- reading -----------------------------------------------------------------------------

    def read_log(self, key: str, work: Callable[[Log], T]) -> T | None:
        """Return the result of `work` on the up-to-date log; None if the session does not exist."""
        deadline = self.deadline()
        while True:
            try:
                log = self._get_log(key, create=False)
            except OSError as error:
                raise store_error(error, f"opening {key!r}") from error
            if log is None:
                return None
            try:
                with log.mutex:
                    if log.refresh():
                        return work(log) if log.exists else None
            except OSError as error:
                self.drop_log(log)
                raise store_error(error, f"reading {key!r}") from error
            except BaseException:
                self.drop_log(log)
                raise
            self.drop_log(log)
            if self.directory.file_status(log.name) is None:
                return None
            _check_deadline(deadline, key)

    def read_with_archives(
        self, key: str, work: Callable[[Log], tuple[T, LiveMessages]]
    ) -> tuple[T, list[Message]] | None:
        """Return the result of `work`, and the messages: the archived, then the live ones.

        Return None if the session does not exist. Archives are read without holding the mutex. If a
        purge deletes an archive during the read, the whole read is repeated. Raises StoreBusy after
        the timeout.
        """
        deadline = self.deadline()
        while True:
            read_result = self.read_log(key, lambda log: (log, *work(log)))
            if read_result is None:
                return None
            log, result, live_part = read_result
            messages = self._add_archived_messages(log, live_part)
            if messages is not None:
                return result, messages
            self.drop_log(log)
            _check_deadline(deadline, key)

    def _add_archived_messages(self, log: Log, live_part: LiveMessages) -> list[Message] | None:
        """Return the archived messages, then the live messages.

        Return None if the log was replaced or is no longer loaded. The caller reads the log again.
        """
        messages = live_part.messages
        if live_part.archived_from:
            archives = log.read_archives(live_part)
            is_incomplete = any(content.damaged for content in archives)
            # A purge replaces the log before it deletes archives, so a replaced log is read again.
            # guard: missing-archive-reported
            if is_incomplete and not log.is_same_file(self.directory.file_status(log.name)):
                return None
            with log.mutex:
                if not log.is_loaded:
                    return None  # another thread failed to read the log
                messages = log.add_archived_messages(live_part, archives)
        self.trim_memory(log)
        return messages

    def sync_log(self, log: Log) -> None:
        """Sync records of other processes before a caller depends on them.

        Raises StoreUnavailable, DamagedStore.
        """
        try:
            sync_log(log)
        except OSError as error:
            self.drop_log(log)
            raise store_error(error, f"syncing the log of {log.key!r}") from error

    # --- locking -----------------------------------------------------------------------------

    def lock(self, key: str, *, create: bool) -> Log | None:
        """Return the log, locked and up to date; None if the file does not exist.

        With `create`, a missing file is created. The log may hold no session. The caller must call
        `unlock` afterwards, also after an error. Raises StoreBusy, OSError and the errors of
        `Log.load`.
        """
        deadline = self.deadline()
        while True:
            log = self._get_log(key, create=create)
            if log is None:
                return None
            if not log.is_writable:
                self.drop_log(log)
                self.directory.check_writable(log.name)
                continue  # the permissions have changed since
            self._locked_logs[key] = log
            lock_until(log.descriptor, deadline, f"the log of {key!r}")
            status = self.directory.file_status(log.name)
            if status is None or not log.is_same_file(status):  # guard: inode-after-lock
                # The log was replaced during the wait: the locked file is no longer the log.
                self.drop_log(log)
                self.unlock(key)
                _check_deadline(deadline, key)
                continue
            try:
                with log.mutex:
                    log.catch_up(status.st_size)
                    is_new, is_suspect = log.phase is LoadPhase.NEW, log.is_suspect
            except BaseException:
                self.drop_log(log)
                raise
            if is_suspect or log.name in self.suspect_names:
                self._rewrite_suspect_log(log)
                self.unlock(key)
                continue
            # An empty file may be new and reuse a known inode number, so sync its entry again.
            if is_new or self.synced_entries.get(log.name) != (log.inode, log.device):
                self.directory.sync_entries()
                self.synced_entries[log.name] = (log.inode, log.device)
                while len(self.synced_entries) > _MAX_SYNCED_ENTRIES:  # guard: open-logs-bounded
                    self.synced_entries.popitem(last=False)
            return log

    def unlock(self, key: str) -> None:
        """Release the lock of a session's log. Does nothing if the log is not locked."""
        log = self._locked_logs.get(key)
        if log is not None:
            try:
                if log.descriptor >= 0:
                    fcntl.flock(log.descriptor, fcntl.LOCK_UN)
            except OSError:
                # The lock ends with the descriptor, which closes after the last use of the log.
                self.drop_log(log)
            self._locked_logs.pop(key, None)

    def _rewrite_suspect_log(self, log: Log) -> None:
        """Copy a log whose sync failed to a new file, before anything is appended to it."""
        with log.mutex:
            log.is_suspect = True
        try:
            with system_errors(f"{log.key!r}: rewriting the log after a failed sync"):
                rewrite_log(log, log.file_size(), now())
        finally:
            self.drop_log(log)
        self.suspect_names.discard(log.name)

    # --- memory ------------------------------------------------------------------------------

    def trim_memory(self, log: Log) -> None:
        """Limit the memory for messages; the least recently used logs drop their messages first."""
        with log.mutex:
            new_bytes, old_bytes = log.memory_bytes, log.last_memory_bytes
            log.last_memory_bytes = new_bytes
        if new_bytes == old_bytes:
            return
        # The running sum is inexact if threads race or a log was dropped; the sum below is exact.
        self._cached_bytes += new_bytes - old_bytes
        if self._cached_bytes <= self._max_cached_bytes:
            return
        with self._mutex:
            logs = list(self._open_logs.values())
        self._cached_bytes = sum(_memory_bytes(other) for other in logs)
        for other in logs:
            if self._cached_bytes <= self._max_cached_bytes:
                break
            with other.mutex:
                self._cached_bytes -= other.memory_bytes
                other.drop_cache()
                other.last_memory_bytes = 0

    def close(self) -> None:
        """Close every file, including files of logs that only an old traceback refers to.

        No other thread may use the store. Closing in a forked child does not release the parent's
        locks.
        """
        for log in list(self._existing_logs):
            log.close()
        self._open_logs.clear()


def _memory_bytes(log: Log) -> int:
    with log.mutex:
        return log.memory_bytes


def _check_deadline(deadline: float, key: str) -> None:
    """Raise StoreBusy if the deadline has passed. Only for retries after the file was replaced."""
    if time.monotonic() > deadline:
        raise StoreBusy(f"other processes keep replacing the log of {key!r}; try again")
