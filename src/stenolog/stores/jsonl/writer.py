"""Append records to a log: one write, one sync, and an exact report of the result.

Every function here expects that the caller holds the log's lock and has read all earlier records.
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
from stenolog.records import Change, ChangeRecord, Message, Record, StateRecord, timestamp
from stenolog.stores import log_reports
from stenolog.stores.arguments import Batch
from stenolog.stores.disk import sync_file, write_all
from stenolog.stores.jsonl.directory import store_error
from stenolog.stores.jsonl.log import STATE_EVERY_LINES, LoadPhase, Log
from stenolog.stores.jsonl.rewrite import rewrite_log
from stenolog.stores.jsonl.scan import Tail, void_line
from stenolog.stores.state import apply_void, blank_state, copy_state

STATE_EVERY_BYTES: Final = 1024 * 1024
"""Bytes after which a state record is written, unless states would fill much of the file."""

_last_second = (0, "")  # start in microseconds and text of the last formatted second


def now() -> str:
    """Return the current time in the stored format."""
    global _last_second
    micros = time.time_ns() // 1000
    second_start, prefix = _last_second
    micros -= second_start
    if not 0 <= micros < 1_000_000:
        seconds, micros = divmod(micros + second_start, 1_000_000)
        prefix = timestamp(datetime.fromtimestamp(seconds, UTC))[:-7]
        _last_second = (seconds * 1_000_000, prefix)
    return f"{prefix}{micros:06d}Z"


class WritePrefix(Struct, frozen=True, gc=False):
    """Bytes that a write begins with, before the records of the caller.

    Each append creates a WritePrefix, so the garbage collector does not track these objects.
    """

    offset: int
    """Offset of the write: the end of the file."""
    text: bytes
    next_seq: int
    joined: bool
    """Whether the next line is joined: it does not prove that the bytes before it are synced."""
    records: Sequence[Record] | None = None
    """Records in `text`; None if the log must read them from the file."""


def prepare_write(log: Log, written_at: str) -> WritePrefix:
    """Return the bytes that must be written before the next record.

    The caller holds the lock of the log. Raises OSError and the errors of `Log.load`.
    """
    with log.mutex:
        log.ensure_loaded()
        is_new = log.phase is LoadPhase.NEW
        offset, seq, tail = log.size, log.next_seq, log.tail
        has_unsynced_bytes = log.synced_offset < log.end_offset
        ends_line = log.ends_line
        new_state = copy_state(log.known_state()) if not is_new and _state_is_due(log) else None
    if tail is not None:  # guard: torn-tail-set-aside
        # The void record proves that all bytes before it are on the disk, so sync them first.
        sync_log(log)
        log_reports.warning(
            "%s: %d bytes of an interrupted write are marked as void; they stay in the file but "
            "are ignored",
            log.path,
            tail.bytes,
        )
        first_states = _compose_first_states(log.key, written_at, tail) if is_new else b""
        text = void_line(tail, written_at) + first_states
        return WritePrefix(offset, text, tail.next_seq, joined=True)
    if is_new:
        return WritePrefix(offset, _compose_first_states(log.key, written_at), 1, joined=True)
    if not ends_line:
        return WritePrefix(offset, b"\n", seq, joined=True)
    if new_state is None:
        return WritePrefix(offset, b"", seq, has_unsynced_bytes, ())
    if has_unsynced_bytes:
        sync_log(log)
    text = control_line("state", seq, written_at, new_state)
    with log.mutex:
        log.state_bytes = len(text)
    record = StateRecord(seq=seq, at=written_at, body=new_state)
    return WritePrefix(offset, text, seq, True, [record])


def sync_log(log: Log) -> None:
    """Sync the bytes that other processes wrote. After an OSError the log is marked as suspect.

    A failed sync is not retried: the second sync would succeed although data was lost.
    """
    with log.mutex:
        # The end of a log that is not loaded is unknown, so such a log is always synced.
        end_offset = log.end_offset if log.is_loaded else -1
        if log.is_loaded and log.synced_offset >= end_offset and log.tail is None:
            return
    try:
        sync_file(log.descriptor)
    except OSError:
        with log.mutex:
            log.is_suspect = True
        raise
    with log.mutex:
        log.synced_offset = max(log.synced_offset, end_offset)


def _compose_first_states(key: str, created: str, tail: Tail | None = None) -> bytes:
    """Return the start of a new log: its state twice, so that one damaged line loses nothing."""
    state = blank_state(key, os.urandom(8).hex(), 1, created)
    seq = 1
    if tail is not None:
        apply_void(state, tail.as_void())
        seq = tail.next_seq
    first_line = control_line("state", seq, created, state)
    return first_line + control_line("state", seq, created, state, joined=True)


def _state_is_due(log: Log) -> bool:
    return log.lines_since_state >= STATE_EVERY_LINES or (
        log.bytes_since_state >= STATE_EVERY_BYTES and log.bytes_since_state >= 4 * log.state_bytes
    )


class Outcome(Struct, frozen=True):
    """Result of a write.

    The garbage collector tracks an Outcome, because its error forms a cycle: the traceback refers
    to frames, which refer to the outcome and to the log with its descriptor.
    """

    stored_bytes: int
    """Number of bytes that are durably in the log."""
    error: BaseException | None = None
    """Error of the write or of a later step; after an error the log must be read again."""
    is_unknown: bool = False
    """Whether more than `stored_bytes` bytes may be in the log."""

    def covers(self, end: int) -> bool:
        """Return whether the first `end` bytes are stored; the last newline is optional."""
        return self.stored_bytes >= end - 1

    def failure(self, action: str) -> NotStored | MaybeStored:
        """Return a new error for a caller whose records are not stored."""
        error: NotStored | MaybeStored
        reason = action
        if isinstance(self.error, OSError):
            reason = str(store_error(self.error, action))
        if self.is_unknown:
            error = MaybeStored(
                f"{reason}. Whether it was stored is unknown: retry with the same idempotency key "
                "(once=)"
            )
        else:
            error = NotStored(f"{reason}. Nothing of it was stored")
        error.__cause__ = self.error
        return error


STORED: Final = Outcome(sys.maxsize)
"""Outcome of a write that succeeded completely."""


def write_and_sync(log: Log, offset: int, text: bytes) -> Outcome:
    """Append `text` to the file, whose size is `offset`, and sync the file.

    After an interruption (Ctrl-C) this function first determines how many bytes are stored,
    then returns the interruption in the outcome.
    """
    error: BaseException | None = None
    try:
        written_bytes = os.write(log.descriptor, text)
        if written_bytes != len(text):
            write_all(log.descriptor, text[written_bytes:])
    except BaseException as caught:  # noqa: BLE001  handled below, then raised by the caller
        error = caught
    stored_bytes = len(text)
    while True:  # guard: acknowledge-after-sync
        try:
            if error is not None:
                stored_bytes = min(len(text), os.fstat(log.descriptor).st_size - offset)
                if stored_bytes <= 0:
                    return Outcome(0, error)
            sync_file(log.descriptor)
        except OSError as os_error:
            return _rewrite_without_write(log, offset, error or os_error)
        except BaseException as interruption:  # noqa: BLE001
            error = interruption
        else:
            return STORED if error is None else Outcome(stored_bytes, error)


def _rewrite_without_write(log: Log, offset: int, error: BaseException) -> Outcome:
    """Copy the log to a new file, without the write whose sync failed.

    The content of the old file on the disk is unknown, and a second sync would wrongly succeed.
    """
    with log.mutex:
        log.is_suspect = True  # guard: failed-sync-marks-log
    try:
        rewrite_log(log, offset, now())
    except (OSError, StenologError):
        return Outcome(0, error, is_unknown=True)
    with log.mutex:
        log.is_suspect = False
    return Outcome(0, error)


def append_batches(log: Log, batches: Sequence[Batch]) -> tuple[list[int], Outcome]:
    """Append batches in one write. Raises OSError only if nothing was written.

    Return the first seq of each batch, or 0 if the batch is not durably stored, and the outcome of
    the write.
    """
    at = now()
    prefix = prepare_write(log, at)
    joined = prefix.joined
    lines = [prefix.text]
    records: list[Record] = []
    first_seqs = []
    end_offsets = []
    seq, length = prefix.next_seq, len(prefix.text)
    for batch in batches:
        first_seqs.append(seq)
        count = len(batch.payloads)
        for index, payload in enumerate(batch.payloads, 1):
            part = (index, count) if count > 1 else None
            once = batch.once if index == 1 else None
            message_at = at if batch.times is None else batch.times[index - 1]
            line = message_line(seq, message_at, payload, joined=joined, part=part, once=once)
            lines.append(line)
            records.append(
                Message(
                    seq=seq,
                    _at=message_at,
                    _body=Raw(payload),
                    _joined=joined,
                    _part=part,
                    _once=once,
                )
            )
            joined = True
            length += len(line)
            seq += 1
        end_offsets.append(length)
    outcome = _write_records(log, prefix, b"".join(lines), records)
    stored_seqs = [
        first if outcome.covers(end) else 0
        for first, end in zip(first_seqs, end_offsets, strict=True)
    ]
    return stored_seqs, outcome


def _write_records(
    log: Log, prefix: WritePrefix, text: bytes, records: Sequence[Record]
) -> Outcome:
    """Write and sync `text`, which starts with the prefix, and record the append in `log`."""
    outcome = write_and_sync(log, prefix.offset, text)
    if outcome.error is None:
        all_records = None if prefix.records is None else [*prefix.records, *records]
        try:
            with log.mutex:
                log.record_append(prefix.offset, all_records, len(text))
        except BaseException as error:  # noqa: BLE001  raised by the caller after all have results
            return Outcome(len(text), error)  # the records stay stored
    return outcome


def append_change(log: Log, change: Change, payloads: Sequence[bytes] = ()) -> tuple[bool, Outcome]:
    """Append one change together with its messages. Raises the errors of `append_batches`.

    Return whether the change is durably stored, and the outcome of the write.
    """
    at = now()
    prefix = prepare_write(log, at)
    seq, joined = prefix.next_seq, prefix.joined
    count = 1 + len(payloads)
    part = (1, count) if count > 1 else None
    lines = [prefix.text, control_line("change", seq, at, change, joined=joined, part=part)]
    records: list[Record] = [ChangeRecord(seq=seq, at=at, joined=joined, part=part, body=change)]
    for index, payload in enumerate(payloads):
        message_part = (index + 2, count)
        lines.append(message_line(seq + index, at, payload, joined=True, part=message_part))
        records.append(
            Message(seq=seq + index, _at=at, _body=Raw(payload), _joined=True, _part=message_part)
        )
    text = b"".join(lines)
    outcome = _write_records(log, prefix, text, records)
    return outcome.covers(len(text)), outcome
