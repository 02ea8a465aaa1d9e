"""Whose turn it is to write to a session, and what becomes of each caller's append.

One thread of this process at a time holds the gate of a session and the lock of its log; what
waits behind it goes into the same write where it can.
"""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from stenolog.codec import digest
from stenolog.errors import (
    MaybeStored,
    NotStored,
    OnceConflict,
    StenologError,
    StoreUnavailable,
)
from stenolog.stores.jsonl import writer
from stenolog.stores.jsonl.group import GATES, Gate, Pending
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.table import Logs
from stenolog.stores.jsonl.usual import append_at_once
from stenolog.stores.jsonl.writer import STORED, Batch, Outcome

_TOUCH_EVERY: Final = 63  # a mask

Check = Callable[[], None]
"""Raises StenologError where something may not be written any more."""


class Turns:
    """The writers of one store in this process."""

    def __init__(self, logs: Logs, *, busy_timeout: float) -> None:
        self._logs = logs
        self._busy_timeout = busy_timeout
        self._gates: dict[int, Gate] = {}

    def append_at_once(self, key: str, payload: bytes, check: Check | None = None) -> int:
        """The usual append: the log is open and nobody is in the way; its seq.

        0: it is not that simple, and nothing was done. Raises NotStored, MaybeStored, and what
        `check` raises.
        """
        log, gate = self._logs.opened(key), self._gates.get(hash(key) % GATES)
        if log is None or gate is None or gate.lock.locked() or gate.waiting:
            return 0
        with gate.lock:
            seq, outcome = append_at_once(self._logs, log, payload, check)
            if outcome is not STORED and outcome is not None:
                self.settle(log, outcome)
                if not seq:
                    raise outcome.failure(f"writing {key!r}")
            elif log.warm:
                self._logs.trim(log)
            if not seq & _TOUCH_EVERY:
                self._logs.touch(log)
        if gate.waiting:
            gate.call_next()
        return seq

    def append(self, key: str, batch: Batch, check: Check | None = None) -> int:
        """Append messages of one caller; the first seq. Raises whatever became of it."""
        mine = Pending(key, batch, check)
        self._gate(key).enter(mine, self._lead, time.monotonic() + self._busy_timeout)
        if mine.error is not None:
            raise mine.error
        return mine.first

    def append_group(
        self, key: str, batches: Sequence[Batch], check: Check | None = None
    ) -> list[int | StenologError]:
        """Append messages of several callers; for each the first seq, or what became of it."""
        group = [Pending(key, batch, check) for batch in batches]
        if group:
            self.alone(key, lambda: self._lead(group))
        return [
            pending.error if isinstance(pending.error, StenologError) else pending.first
            for pending in group
        ]

    def alone(self, key: str, work: Callable[[], None]) -> None:
        """Run something while no other writer of this process touches the session."""

        def lead(group: list[Pending]) -> None:
            try:
                self._work(key, work)
            finally:
                group[0].finish()

        gate = self._gate(key)
        if gate.waiting or gate.lock.locked():
            gate.enter(Pending(key), lead, time.monotonic() + self._busy_timeout)
            return
        try:
            with gate.lock:
                self._work(key, work)
        finally:
            gate.call_next()

    def _work(self, key: str, work: Callable[[], None]) -> None:
        try:
            work()
        except StoreUnavailable as error:
            raise _not_stored(error) from error
        except OSError as error:
            raise Outcome(0, error).failure(f"writing {key!r}") from error
        finally:
            # Twice, because Ctrl-C may strike within the first.
            try:
                self._logs.unlock(key)
            finally:
                self._logs.unlock(key)

    def _gate(self, key: str) -> Gate:
        place = hash(key) % GATES
        return self._gates.get(place) or self._gates.setdefault(place, Gate())

    def _lead(self, group: list[Pending]) -> None:
        """Write appends to one session in one go; each is finished, whatever happens."""
        key = group[0].key
        log = None
        try:
            log = self._logs.lock(key, create=True)
            if log is not None:
                allowed = [pending for pending in group if not _is_refused(pending)]
                if allowed:
                    self._write(log, allowed)
                else:
                    clear_away(log)
        except StenologError as error:
            for pending in group:
                if not pending.done:
                    pending.finish(error=_not_stored(error))
        except OSError as error:
            for pending in group:
                if not pending.done:
                    pending.finish(error=Outcome(0, error).failure(f"writing {key!r}"))
        finally:
            try:
                self._logs.unlock(key)
            finally:
                self._logs.unlock(key)
            for pending in group:
                if not pending.done:
                    # Only an interruption leads here, and what it left behind is not known.
                    pending.finish(error=MaybeStored(f"{key!r}: the write was interrupted"))
        if log is not None:
            self._logs.trim(log)

    def _write(self, log: Log, group: list[Pending]) -> None:
        tokens: set[str] = set()
        chosen: list[Pending] = []
        batches: list[Batch] = []
        later: list[Pending] = []
        for pending in group:
            batch = pending.batch
            if batch is None:
                continue
            if batch.once is not None:
                if batch.once in tokens:
                    # The same token twice in one group: the second waits for the first.
                    later.append(pending)
                    continue
                tokens.add(batch.once)
                if self._known(log, pending, batch, batch.once):
                    continue
            chosen.append(pending)
            batches.append(batch)
        if batches:
            firsts, outcome = writer.append(log, batches)
            for pending, first in zip(chosen, firsts, strict=True):
                if first:
                    pending.finish(first=first)
                else:
                    pending.finish(error=outcome.failure(f"writing {log.key!r}"))
            self.settle(log, outcome)
            if outcome.error is not None:
                for pending in later:
                    pending.finish(error=outcome.failure(f"writing {log.key!r}"))
                return
        if later:
            self._write(log, later)

    def _known(self, log: Log, pending: Pending, batch: Batch, once: str) -> bool:
        """Whether the session has the token; then the append is finished."""
        with log.mutex:
            token = log.token(once) if log.state is not None else None
        if token is None:
            return False
        other = token.digest not in ("", digest(batch.payloads))
        if other or token.count != len(batch.payloads):
            pending.finish(error=OnceConflict(log.key, once, token.first))
            return True
        # Somebody else may have written it; it counts as stored when it is on the disk.
        try:
            writer.sync(log)
        except OSError as error:
            # Nothing more goes into a log whose sync has failed.
            pending.finish(error=Outcome(0, error, unknown=True).failure(f"syncing {log.key!r}"))
            raise
        pending.finish(first=token.first)
        return True

    def settle(self, log: Log, outcome: Outcome) -> None:
        """After any error the file is read anew; an interruption goes on its way."""
        if outcome.error is None:
            return
        self._logs.discard(log)
        if not isinstance(outcome.error, OSError | StenologError):
            raise outcome.error


def _is_refused(pending: Pending) -> bool:
    """Whether it may not be carried out any more; then it is finished."""
    try:
        if pending.check is not None:
            pending.check()
    except StenologError as error:
        pending.finish(error=error)
    return pending.done


def clear_away(log: Log) -> None:
    """Leave no empty file behind where nothing took its place. The caller holds its lock."""
    if log.size == 0:
        with suppress(OSError, StenologError):
            if log.is_at(log.directory.stat(log.name)):
                os.unlink(log.name, dir_fd=log.directory.descriptor)


def _not_stored(error: StenologError) -> StenologError:
    """The same error for one more caller, because an object is not raised in two threads.

    Nothing was written: where the store could not even be opened, that is what it comes to.
    """
    plain = type(error) is StoreUnavailable
    twin = NotStored(*error.args) if plain else type(error)(*error.args)
    twin.__cause__ = error
    return twin
