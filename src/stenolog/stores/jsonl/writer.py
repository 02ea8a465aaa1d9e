"""Putting records at the end of a log: one write, one sync, and the truth about what happened.

Everything here runs with the log's lock held and with what others wrote taken in.
"""

import os
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from msgspec import Raw, Struct

from stenolog.codec import control_line, message_line
from stenolog.errors import MaybeStored, NotStored, StenologError
from stenolog.records import (
    Change,
    ChangeRecord,
    Message,
    Record,
    StateRecord,
    timestamp,
)
from stenolog.stores import reports
from stenolog.stores.batches import Batch
from stenolog.stores.disk import sync_file, write_all
from stenolog.stores.jsonl.directory import explained
from stenolog.stores.jsonl.log import STATE_EVERY_LINES, Log, Phase
from stenolog.stores.jsonl.rewrite import renew
from stenolog.stores.jsonl.scan import Tail, void_line
from stenolog.stores.state import apply_void, blank, copy

STATE_EVERY_BYTES: Final = 1024 * 1024
"""After so many bytes a state is due, unless it would be much of what is written."""

_second = (0, "")  # when the second that was spelled out last began, and how it is written


def now() -> str:
    """The present moment, as it is written."""
    global _second
    micros = time.time_ns() // 1000
    began, text = _second
    micros -= began
    if not 0 <= micros < 1_000_000:
        seconds, micros = divmod(micros + began, 1_000_000)
        text = timestamp(datetime.fromtimestamp(seconds, UTC))[:-7]
        _second = (seconds * 1_000_000, text)
    return f"{text}{micros:06d}Z"


# Made once per append.


class Opening(Struct, frozen=True, gc=False):
    """What a write begins with, before the records it is made for."""

    offset: int
    """Where the write goes: the end of the file."""
    text: bytes
    next_seq: int
    joined: bool
    """Whether the line after it is joined."""
    records: Sequence[Record] | None = None
    """What the text holds; None: it changes more than can be told so."""

    def followed_by(self, records: list[Record]) -> list[Record] | None:
        """All records of the write."""
        return None if self.records is None else [*self.records, *records]


def begin(log: Log, at: str) -> Opening:
    """Return what has to be written before the next record.

    The caller holds the lock of the log. Raises ReadOnly, OSError, and as `Log.load`.
    """
    with log.mutex:
        log.check_known()
        new = log.phase is Phase.NEW
        offset, seq, tail = log.size, log.next_seq, log.tail
        joined = log.synced < log.end
        terminated = log.terminated
        due = copy(log.known_state()) if not new and _state_is_due(log) else None
    if tail is not None:  # guard: torn-tail-set-aside
        # The void proves all that stands before it, so that must be on the disk first.
        sync(log)
        reports.warning(
            "%s: %d bytes of an interrupted write are set aside; they stay in the file and do not "
            "count",
            log.directory.path / log.name,
            tail.bytes,
        )
        text = void_line(tail, at) + (_first_states(log.key, at, tail) if new else b"")
        return Opening(offset, text, tail.next_seq, joined=True)
    if new:
        return Opening(offset, _first_states(log.key, at), 1, joined=True)
    if not terminated:
        return Opening(offset, b"\n", seq, joined=True)
    if due is None:
        return Opening(offset, b"", seq, joined, ())
    if joined:
        sync(log)
    text = control_line("state", seq, at, due)
    with log.mutex:
        log.state_bytes = len(text)
    return Opening(offset, text, seq, True, [StateRecord(seq=seq, at=at, body=due)])


def sync(log: Log) -> None:
    """Sync what others wrote. Raises OSError, and then the log is suspect.

    A sync that failed is not tried again: it would succeed although data was lost.
    """
    with log.mutex:
        # A log that is not loaded may have any end; syncing once more does no harm.
        end = log.end if log.is_loaded else -1
        if log.is_loaded and log.synced >= end and log.tail is None:
            return
    try:
        sync_file(log.descriptor)
    except OSError:
        with log.mutex:
            log.suspect = True
        raise
    with log.mutex:
        log.synced = max(log.synced, end)


def _first_states(key: str, at: str, tail: Tail | None = None) -> bytes:
    """A new log begins with its state twice, so that one damaged line loses nothing."""
    state = blank(key, os.urandom(8).hex(), 1, at)
    seq = 1
    if tail is not None:
        apply_void(state, tail.as_void())
        seq = tail.next_seq
    return control_line("state", seq, at, state) + control_line(
        "state", seq, at, state, joined=True
    )


def _state_is_due(log: Log) -> bool:
    return log.lines_since_state >= STATE_EVERY_LINES or (
        log.bytes_since_state >= STATE_EVERY_BYTES and log.bytes_since_state >= 4 * log.state_bytes
    )


class Outcome(Struct, frozen=True):
    """What became of a write.

    Tracked by the garbage collector: the traceback of the error refers to frames that refer to the
    outcome, and to the log with its descriptor.
    """

    stored: int
    """How many of its bytes are in the log for good."""
    error: BaseException | None = None
    """What went wrong, if only afterwards; then the log must be read anew."""
    unknown: bool = False
    """The rest may be there or not; else it is surely absent."""

    def holds(self, end: int) -> bool:
        """Whether the lines that end here are stored; the last newline does not matter."""
        return self.stored >= end - 1

    def failure(self, doing: str) -> NotStored | MaybeStored:
        """What to tell a caller whose records are not among those stored: one object each."""
        reason = str(explained(self.error, doing)) if isinstance(self.error, OSError) else doing
        if self.unknown:
            failure: NotStored | MaybeStored = MaybeStored(
                f"{reason}. Whether it was stored is unknown: retry with the same once token"
            )
        else:
            failure = NotStored(f"{reason}. Nothing of it was stored")
        failure.__cause__ = self.error
        return failure


STORED: Final = Outcome(sys.maxsize)
"""All of it, and nothing went wrong."""


def put(log: Log, before: int, text: bytes) -> Outcome:
    """Append these bytes, which begin at the offset `before`, and sync them.

    An interruption (Ctrl-C) is settled before it is told.
    """
    error: BaseException | None = None
    try:
        written = os.write(log.descriptor, text)
        if written != len(text):
            write_all(log.descriptor, text[written:])
    except BaseException as caught:  # noqa: BLE001  settled below, then raised by the caller
        error = caught
    stored = len(text)
    while True:  # guard: acknowledge-after-sync
        try:
            if error is not None:
                stored = min(len(text), os.fstat(log.descriptor).st_size - before)
                if stored <= 0:
                    return Outcome(0, error)
            sync_file(log.descriptor)
        except OSError as failed:
            return _rescue(log, before, error or failed)  # guard: failed-sync-not-retried
        except BaseException as interruption:  # noqa: BLE001
            error = interruption
        else:
            return STORED if error is None else Outcome(stored, error)


def _rescue(log: Log, before: int, error: BaseException) -> Outcome:
    """Put all that came before a failed sync into a fresh file, where the write surely is not.

    What the old file holds on the disk nobody can say, and syncing it again would lie.
    """
    with log.mutex:
        log.suspect = True  # guard: failed-sync-marks-log
    try:
        renew(log, before, now())
    except (OSError, StenologError):
        return Outcome(0, error, unknown=True)
    with log.mutex:
        log.suspect = False
    return Outcome(0, error)


def append(log: Log, batches: Sequence[Batch]) -> tuple[list[int], Outcome]:
    """Append batches in one write. Raises ReadOnly, OSError where nothing was tried.

    The first seq of each batch that is there for good, 0 for each that is not, and what became
    of the write.
    """
    at = now()
    opening = begin(log, at)
    joined = opening.joined
    lines = [opening.text]
    records: list[Record] = []
    firsts = []
    ends = []
    seq, length = opening.next_seq, len(opening.text)
    for batch in batches:
        firsts.append(seq)
        count = len(batch.payloads)
        for index, payload in enumerate(batch.payloads, 1):
            part = (index, count) if count > 1 else None
            once = batch.once if index == 1 else None
            said = at if batch.times is None else batch.times[index - 1]
            line = message_line(seq, said, payload, joined=joined, part=part, once=once)
            lines.append(line)
            records.append(
                Message(
                    seq=seq, _at=said, _body=Raw(payload), _joined=joined, _part=part, _once=once
                )
            )
            joined = True
            length += len(line)
            seq += 1
        ends.append(length)
    outcome = put(log, opening.offset, b"".join(lines))
    if outcome.error is None:
        return firsts, _taken_in(log, opening, records, length)
    whole = [first if outcome.holds(end) else 0 for first, end in zip(firsts, ends, strict=True)]
    return whole, outcome


def _taken_in(log: Log, opening: Opening, records: list[Record], length: int) -> Outcome:
    """What was just stored, in memory too. Whatever goes wrong with that, it is stored."""
    try:
        with log.mutex:
            log.grew(opening.offset, opening.followed_by(records), length)
    except BaseException as error:  # noqa: BLE001  raised by the caller when all are told
        return Outcome(length, error)
    return STORED


def change(log: Log, decided: Change, payloads: Sequence[bytes] = ()) -> tuple[bool, Outcome]:
    """Append one change, together with the messages that belong to it. Raises as append.

    Whether it is there for good, and what became of the write.
    """
    at = now()
    opening = begin(log, at)
    seq = opening.next_seq
    count = 1 + len(payloads)
    part = (1, count) if count > 1 else None
    record = ChangeRecord(seq=seq, at=at, joined=opening.joined, part=part, body=decided)
    lines = [
        opening.text,
        control_line("change", seq, at, decided, joined=opening.joined, part=part),
    ]
    records: list[Record] = [record]
    for index, payload in enumerate(payloads):
        place = (index + 2, count)
        lines.append(message_line(seq + index, at, payload, joined=True, part=place))
        records.append(
            Message(seq=seq + index, _at=at, _body=Raw(payload), _joined=True, _part=place)
        )
    text = b"".join(lines)
    outcome = put(log, opening.offset, text)
    if outcome.error is None:
        return True, _taken_in(log, opening, records, len(text))
    return outcome.holds(len(text)), outcome
