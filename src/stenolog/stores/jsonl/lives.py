"""How sessions begin and end as files: fork, delete, restore.

The order of locks: gate → flock of the live file → flock of a file in the trash → mutex.
"""

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from stenolog.errors import (
    NoSuchSession,
    SessionExists,
    StenologError,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.records import Message, Trashed
from stenolog.stores.jsonl import forking, trash, writer
from stenolog.stores.jsonl.directory import explained
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.rewrite import swap
from stenolog.stores.jsonl.scan import gather
from stenolog.stores.jsonl.table import Logs, flock
from stenolog.stores.jsonl.turns import Turns, clear_away
from stenolog.stores.jsonl.writer import Outcome


class _Replaced(Exception):
    """The log that was read is not the session any more."""


class Lives:
    """The beginnings and ends of the sessions of one store."""

    def __init__(self, logs: Logs, turns: Turns, *, busy_timeout: float) -> None:
        self._logs = logs
        self._turns = turns
        self._directory = logs.directory
        self._busy_timeout = busy_timeout

    # --- fork --------------------------------------------------------------------------------

    def fork(self, key: str, new_key: str, at: int | None) -> None:
        """As Store.fork."""
        deadline = self._deadline()
        while True:
            seen, messages = self._seen(key, new_key, at)
            try:
                # What another process wrote, and a power cut may take back, is not passed on.
                writer.sync(seen.log)
            except OSError as error:
                self._logs.discard(seen.log)
                raise explained(error, f"syncing the log of {key!r}") from error
            text = forking.whole_log(seen.fork, messages, seen.fork.state.created)
            with suppress(_Replaced):
                make = partial(self._put, text=text, seen=seen, deadline=deadline)
                self._begin(new_key, make, f"forking {key!r} to {new_key!r}")
                return
            if time.monotonic() > deadline:
                raise StoreBusy(f"{key!r} is replaced all the time; try again")

    def _put(self, log: Log, *, text: bytes, seen: forking.Seen, deadline: float) -> None:
        """Begin the fork while its source stands still. Raises _Replaced.

        A purge of the source either sees the fork, and names it, or is seen here: what it deleted
        must not live on in a fork that nobody is told of.
        """
        source = seen.log
        descriptor = self._directory.open(source.name)
        if descriptor is None:
            raise _Replaced
        try:
            flock(descriptor, deadline, f"the log of {source.key!r}")
            if self._life(source.key) != (seen.uid, seen.generation):
                raise _Replaced
            swap(log, text)
        finally:
            # By name, because a child forked meanwhile has the same descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def _seen(self, key: str, new_key: str, at: int | None) -> tuple[forking.Seen, list[Message]]:
        if self._logs.read(key, lambda _: True) is None:
            trash.settle(self._directory)
            raise NoSuchSession(key)
        self._check_free(new_key)
        uid, now = os.urandom(8).hex(), writer.now()
        seen = self._logs.gathered(
            key, lambda log: forking.look(log, new_key=new_key, at=at, uid=uid, now=now)
        )
        if seen is None:
            raise NoSuchSession(key)
        return seen

    def _life(self, key: str) -> tuple[str, int] | None:
        def told(log: Log) -> tuple[str, int]:
            state = log.known_state()
            return state.uid, state.generation

        return self._logs.read(key, told)

    # --- making a log live -------------------------------------------------------------------

    def _check_free(self, key: str) -> None:
        if self._logs.read(key, lambda _: True) is not None:
            trash.settle(self._directory)
            raise SessionExists(key)

    def _begin(self, key: str, make: Callable[[Log], None], doing: str) -> None:
        """Let a whole log take the place of a file that is no session. Raises SessionExists.

        That file is locked meanwhile, so nobody begins a session in it, and nothing is replaced
        that ever counted. `make` may raise OSError.
        """

        def work() -> None:
            log = self._logs.lock(key, create=True)
            if log is None:
                raise NoSuchSession(key)
            try:
                check_vacant(log)
                make(log)
            except OSError as error:
                raise failure(error, log, doing) from error
            finally:
                clear_away(log)
                self._logs.discard(log)

        self._turns.alone(key, work)

    # --- trash -------------------------------------------------------------------------------

    def delete(self, key: str) -> Trashed:
        """As Store.delete."""
        trashed: list[Trashed] = []

        def work() -> None:
            log = locked(self._logs, key)
            try:
                trashed.append(trash.told(log, trash.put(log, writer.now())))
            except OSError as error:
                raise failure(error, log, f"deleting {key!r}") from error
            finally:
                self._logs.discard(log)

        self._turns.alone(key, work)
        return trashed[0]

    def restore(self, key: str, uid: str | None, as_key: str | None) -> None:
        """As Store.restore."""
        target = key if as_key is None else as_key
        entry = self._find(key, uid)
        self._check_free(target)

        def make(live: Log) -> None:
            with trash.opened(self._directory, entry, until=self._deadline()) as log:
                if log is None:
                    raise NoSuchSession(key, "somebody else took it out of the trash")
                trash.take_out(log, entry, target, live)

        self._begin(target, make, f"restoring {key!r}")

    def _find(self, key: str, uid: str | None) -> trash.Entry:
        for entry, found in trash.keys(self._directory):
            if found == key and uid in (None, entry.uid):
                return entry
        trash.settle(self._directory)
        raise NoSuchSession(key, "the trash has no such session")

    def _deadline(self) -> float:
        return time.monotonic() + self._busy_timeout


def locked(logs: Logs, key: str) -> Log:
    """The log of a session, with its lock held. Raises NoSuchSession, ReadOnly and as `lock`."""
    log = logs.lock(key, create=False)
    if log is None or not log.exists:
        trash.settle(logs.directory)
        raise NoSuchSession(key)
    log.check_known()
    return log


def check_vacant(log: Log) -> None:
    """Raise SessionExists unless nothing in the file was ever acknowledged."""
    if log.exists:
        raise SessionExists(log.key)
    text = log.read(0, log.size)
    # One line, or NULs, may be a first write that was cut off; damaged lines were a session.
    unread = not gather(text, offset=0)[0] and b"\n" in text.strip(b"\0\n")
    if unread or (log.tail is not None and log.tail.lost):
        raise SessionExists(log.key, "there is a damaged session; `steno doctor` says more")


def failure(error: OSError, log: Log, doing: str) -> StoreUnavailable:
    """Before its name stands for something else, nothing happened; after, it may not last."""
    try:
        renamed = not log.is_at(log.directory.stat(log.name))
    except StenologError:
        renamed = True
    return Outcome(0, error, unknown=renamed).failure(doing)
