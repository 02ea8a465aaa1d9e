"""Live log of one session as this process knows it: descriptor, state, newest messages.

A Log never changes its descriptor. If the path names another file (for example after a compaction),
or if an error occurs, the Log is dropped and the file is read again. So no value computed for one
file is ever used for another file, and no descriptor is closed while another thread uses it.

`mutex` guards every field that is not fixed at construction, for reading and for writing. A thread
holds the mutex while it reads the file, but never while it waits for another process or for a sync.
All methods expect the caller to hold the mutex, unless their docstring says otherwise.

Several threads may share a Log, and each thread may be interrupted or fail during an update.
`phase` records whether the fields can be trusted: every update sets `phase` to UPDATING first and
to NEW or READY last. So after an unfinished update, the next caller loads the Log again. Cleanup
code is not needed; Ctrl-C could interrupt cleanup code as well.
"""

import fcntl
import os
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from datetime import datetime
from enum import Enum, auto
from operator import attrgetter
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from stenolog.codec import payload_digest
from stenolog.errors import DamagedStore, ForeignLog, NewerFormat
from stenolog.records import (
    FORMAT,
    ChangeRecord,
    Message,
    Record,
    SessionInfo,
    Span,
    State,
    StateRecord,
    Token,
    Undo,
    UnknownRecord,
    VoidRecord,
)
from stenolog.stores import log_reports, spans
from stenolog.stores import state as states
from stenolog.stores.disk import CLOSED, Descriptor, read_all
from stenolog.stores.jsonl import archive
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.jsonl.scan import (
    DamagedBytes,
    ScanResult,
    Tail,
    batch_position,
    can_parse_from,
    find_state,
    may_be_torn_log,
    read_intact,
    read_records,
    scan_log,
)

STATE_EVERY_LINES: Final = 256
"""Maximum number of lines between two state records."""

_FIRST_CHUNK_BYTES: Final = 64 * 1024
"""Size of the first read of a backward search; each further read is four times as large."""
_MAX_CHUNK_BYTES: Final = 8 * 1024 * 1024
"""Size up to which the reads grow when messages are loaded."""
_UID: Final = re.compile(r"[0-9a-f]{1,64}")  # used as the name of a folder
_seq_of = attrgetter("seq")
_first_seq = attrgetter("first")


class LoadPhase(Enum):
    """Loading phase of a Log: whether its fields can be trusted."""

    UPDATING = auto()
    """The file has not been read, a thread is changing the fields, or an update has failed."""
    NEW = auto()
    """The log is loaded. The file is empty, or holds parts of an unfinished first write."""
    READY = auto()
    """The log is loaded and has a state."""


class LiveMessages(Struct, frozen=True):
    """Messages that a read found in the live log, and the seqs that it must read from archives."""

    messages: list[Message]
    archived_from: int = 0
    """First seq to read from archives; 0 if no archive is needed."""
    requested_spans: list[Span] | None = None
    """Seqs to return from archives; None for all seqs, with hidden messages marked."""
    state: State | None = None
    """Copy of the state that names the archives, valid even if another thread reloads the log."""


# --- idempotency keys (tokens), for at least the newest thousand messages (P12) ----------------
# The line of a message contains its token. State records contain the tokens of archived messages.
# So a search for a token opens no archive.

TOKEN_WINDOW: Final = 1_000
"""Minimum number of newest messages whose tokens are known."""
_BYTES_PER_TOKEN: Final = 400
"""Approximate bytes per token in memory, with its digest and dictionary entry."""


def _tokens_by_key(records: Sequence[Record]) -> dict[str, Token]:
    """Return the tokens in these records, by idempotency key."""
    tokens = {}
    for index, record in enumerate(records):
        if isinstance(record, Message) and record._once is not None:
            count = (batch_position(record) or (1, 1))[1]
            payloads = [
                member.to_json()
                for position, member in enumerate(records[index : index + count], 1)
                if isinstance(member, Message)
                and (batch_position(member) or (1, 1)) == (position, count)
                and member.seq == record.seq + position - 1
            ]
            # A batch with a damaged message has no digest: only its number of messages is compared.
            digest = payload_digest(payloads) if len(payloads) == count else ""
            tokens[record._once] = Token(record._once, record.seq, count, digest)
    return tokens


# --- the log ---------------------------------------------------------------------------------


class Log:
    """The live log of one session."""

    def __init__(self, directory: Directory, name: str, key: str, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self.directory = directory
        self.name = name
        self.key = key
        self.mutex = threading.Lock()
        status = os.fstat(descriptor)
        self.inode = status.st_ino
        self.device = status.st_dev
        self.is_writable = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_RDWR)

        self.phase = LoadPhase.UPDATING
        self.state: State | None = None
        """State of the session, valid only in the phase READY."""
        self.has_state_record = False
        """Whether an intact state was read or written; False if the state had to be rebuilt."""
        self.next_seq = 1
        self.updated = ""

        self.size = 0
        """Size of the file at the last check."""
        self.end_offset = 0
        """Offset up to which the file was parsed."""
        self.ends_line = True
        self.tail: Tail | None = None
        self.is_suspect = False
        """Whether a sync failed; the content of the disk is unknown until the log is rewritten."""
        self.synced_offset = -1
        """Offset up to which this process has synced the file; -1 before the first sync."""

        self.lines_since_state = 0
        self.bytes_since_state = 0
        self.state_bytes = 0

        self.keeps_messages = False
        """Whether appended messages stay in memory, because a caller has read messages."""
        self.last_memory_bytes = 0
        """Value of `memory_bytes` when the cache size was last checked."""
        self.loaded_offset = 0
        """Offset of the first line whose message is in memory."""
        self.first_loaded_seq = 1
        """Seq of the first message at or after `loaded_offset`."""
        self.messages: list[Message] = []
        self._visible_cache: list[Message] | None = None
        self._archive_gaps: list[Span] = []
        """Seqs that were not found in the archives."""
        self._tokens: dict[str, Token] | None = None
        """Tokens by idempotency key; None until the first token is looked up."""
        self._state_tokens: dict[str, Token] = {}
        """Tokens of archived messages, which only states contain."""
        self._reported_damage: dict[tuple[str, int], DamagedBytes] = {}

    def close(self) -> None:
        """Close the file.

        Without this call, the file is closed when the last reference to the log is dropped.
        """
        descriptor, self.descriptor = self.descriptor, CLOSED
        descriptor.close()

    def release(self) -> None:
        """Release the lock of the file, if this object holds it, and close the file."""
        self.descriptor.release()
        self.close()

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self.directory.path / self.name

    # --- following the file ------------------------------------------------------------------

    @property
    def is_loaded(self) -> bool:
        """Whether the fields describe the file up to `size`."""
        return self.phase is not LoadPhase.UPDATING

    def ensure_loaded(self) -> None:
        """Load the log if it was never loaded, or if the last update did not finish.

        Raises the errors of `load`.
        """
        if self.phase is LoadPhase.UPDATING:
            self.load(self.file_size())

    def file_size(self) -> int:
        """Return the current size of the file. The mutex is not needed."""
        return os.fstat(self.descriptor).st_size

    def refresh(self) -> bool:
        """Read the new bytes of the file. Return False if the log was replaced or removed."""
        status = self.directory.file_status(self.name)
        if status is None or not self.is_same_file(status):
            return False
        self.catch_up(status.st_size)
        return True

    def catch_up(self, size: int) -> None:
        """Read the new bytes of the file, up to the offset `size`. Raises the errors of `load`."""
        if self.phase is not LoadPhase.UPDATING and size == self.size:
            return
        if self.phase is not LoadPhase.READY or size < self.size or self.tail is not None:
            # The log is not loaded, was truncated, or has a tail that new bytes may complete.
            self.load(size)
            return
        self.phase = LoadPhase.UPDATING
        self._parse_next_bytes(self.read_bytes(self.end_offset, size))
        self.size = size
        self.phase = LoadPhase.READY

    def load(self, size: int) -> None:
        """Read the log from its last state up to the offset `size`.

        After an error the log stays in the phase UPDATING, and the next caller loads the log again.
        Raises ForeignLog, NewerFormat, DamagedStore, OSError.
        """
        self.phase = LoadPhase.UPDATING  # guard: unfinished-load
        self._load(size)
        self.phase = LoadPhase.NEW if self.state is None else LoadPhase.READY

    def _load(self, size: int) -> None:
        self.state = None
        self.has_state_record = False
        self.messages, self._visible_cache, self._tokens = [], None, None
        self.tail, self.ends_line = None, True
        self.next_seq, self.loaded_offset, self.first_loaded_seq, self.end_offset = 1, 0, 1, 0
        self.size = size
        if size == 0:
            return
        self.lines_since_state = self.bytes_since_state = 0
        start, buffer, next_seq = self._read_from_last_state(size)
        if next_seq is None:
            self._load_without_state(buffer)
            return
        self.loaded_offset = self.end_offset = start
        self.next_seq = self.first_loaded_seq = next_seq
        self._parse_next_bytes(buffer)
        self.state_bytes = buffer.find(b"\n") + 1
        self.bytes_since_state = len(buffer) - self.state_bytes
        state = self._require_state()
        if not _UID.fullmatch(state.uid):
            raise DamagedStore(f"{self.path}: the uid of the session is malformed")
        if state.key != self.key:
            raise DamagedStore(
                f"{self.path} contains another session ({state.key!r}), not {self.key!r}; was it "
                "renamed by hand?"
            )

    def _read_from_last_state(self, size: int) -> tuple[int, bytes, int | None]:
        """Return the offset of the last intact state, all bytes from there, and the state's seq.

        Without an intact state, return 0, the whole log, and None.
        """
        buffer = b""
        for start in chunk_starts(size):
            buffer = self.read_bytes(start, size)
            found_state = find_state(buffer, at_start=start == 0)
            if found_state is not None:
                return start + found_state[0], buffer[found_state[0] :], found_state[1].seq
        return 0, buffer, None

    def _load_without_state(self, buffer: bytes) -> None:
        """Load a log without an intact state: an incomplete first write, or a damaged log.

        Raises ForeignLog for a log of another program.
        """
        scan = scan_log(buffer, offset=0, next_seq=1)
        if not scan.records:
            has_intact_lines = bool(read_records(buffer, offset=0)[0])
            if not has_intact_lines and not may_be_torn_log(buffer):
                raise ForeignLog(
                    f"{self.path} was not written by stenolog and is not changed; "
                    f"{self.directory.import_advice(self.name)}"
                )
            # Intact lines are an unfinished first write, so the next writer marks them as void.
            next_seq, seqs, changes = 1, list[Span](), list[int]()
            if has_intact_lines and scan.tail is not None:
                next_seq, seqs, changes = scan.tail.next_seq, scan.tail.seqs, scan.tail.changes
            self.tail = Tail(
                bytes=len(buffer),
                ends_line=buffer.endswith(b"\n"),
                next_seq=next_seq,
                seqs=seqs,
                lost=spans.minus([(1, next_seq - 1)], seqs) if next_seq > 1 else [],
                changes=changes,
                has_damaged_lines=False,
            )
            return
        uid = payload_digest([buffer[: scan.consumed]])
        self.state = states.blank_state(self.key, uid, 1, _time_of(scan.records[0]))
        self._apply_scan(scan, len(buffer))
        self.lines_since_state = STATE_EVERY_LINES  # the next writer writes a state

    def _parse_next_bytes(self, buffer: bytes) -> None:
        """Parse and apply the next bytes of the file, which start at `end_offset`."""
        records = read_intact(buffer, self.next_seq)
        if records is not None:
            self._apply_records(records, len(buffer))
            self.end_offset += len(buffer)
            return
        scan = scan_log(buffer, offset=self.end_offset, next_seq=self.next_seq)
        if scan.tail is not None and (scan.tail.has_damaged_lines or scan.tail.lost):
            # The bytes may have been read during a write, so read the bytes a second time.
            second_buffer = self.read_bytes(self.end_offset, self.end_offset + len(buffer))
            scan = scan_log(second_buffer, offset=self.end_offset, next_seq=self.next_seq)
        self._apply_scan(scan, len(buffer))

    def _apply_scan(self, scan: ScanResult, length: int) -> None:
        self._apply_records(scan.records, length)
        self.next_seq = scan.next_seq
        self.end_offset += scan.consumed
        self.ends_line = scan.ends_line
        self.tail = scan.tail
        self._add_lost_seqs(scan.lost)
        if scan.tail is not None:
            self._add_lost_seqs(scan.tail.lost)
        self._report_damage(scan.damaged)

    def _apply_records(self, records: list[Record], length: int) -> None:
        """Apply valid records; `length` is the number of bytes that were read."""
        self.bytes_since_state += length
        self.lines_since_state += len(records)
        if not records:
            return
        last_record = records[-1]
        self.updated = _time_of(last_record)
        self.next_seq = last_record.seq + 1 if type(last_record) is Message else last_record.seq
        messages = [record for record in records if type(record) is Message]
        if len(messages) < len(records):
            for index, record in enumerate(records):
                if type(record) is not Message:
                    self._apply_control_record(record, len(records) - index - 1, length)
            self._visible_cache = None
        elif self._visible_cache is not None:
            self._visible_cache.extend(messages)
        self.messages.extend(messages)
        if self._tokens is not None:
            self._tokens.update(_tokens_by_key(records))

    def _apply_control_record(self, record: Record, lines_after: int, length: int) -> None:
        """Apply a record other than a message, from a read of `length` bytes.

        `lines_after` records follow it in the same read.
        """
        match record:
            case StateRecord():
                if record.body.format > FORMAT:  # guard: newer-format-refused
                    raise self._newer_format_error(f"format {record.body.format}")
                self.state = states.apply_record(self.state or record.body, record)
                self.has_state_record = True
                self._move_tokens(record)
                self.lines_since_state, self.bytes_since_state = lines_after, length
            case ChangeRecord() | VoidRecord():
                self.state = states.apply_record(self._require_state(), record)
            case UnknownRecord() if not record.optional:
                raise self._newer_format_error(f"a record of kind {record.kind!r}")
            case _:
                pass

    def _move_tokens(self, record: StateRecord) -> None:
        """Move the idempotency keys of archived messages from a state to `_state_tokens`.

        A writer appends copies of `state`, and these copies must not contain the keys.
        """
        # Loading reads the newest state first, so tokens of older states do not replace its tokens.
        for token in record.body.tokens:
            self._state_tokens.setdefault(token.token, token)
        if self.state is not None:
            self.state.tokens = []

    def known_state(self) -> State:
        """Return the state.

        Raises DamagedStore if the log has no state, and the errors of `load`.
        """
        self.ensure_loaded()
        return self._require_state()

    def state_if_any(self) -> State | None:
        """Return a copy of the state, or None if the file is new. Raises the errors of `load`."""
        self.ensure_loaded()
        return states.copy_state(self._require_state()) if self.phase is LoadPhase.READY else None

    def _require_state(self) -> State:
        if self.state is None:
            raise DamagedStore(f"{self.path}: the first line is not a state")
        return self.state

    @property
    def exists(self) -> bool:
        """Whether the log holds a session, not only the partial write of a killed process.

        Raises the errors of `load`.
        """
        self.ensure_loaded()
        state = self.state
        return state is not None and (
            self.next_seq > 1 or state.number > 0 or state.generation > 1 or bool(state.lost)
        )

    def record_append(self, offset: int, records: list[Record] | None, length: int) -> None:
        """Record the `length` bytes that this process appended at `offset` and synced.

        The method reads the bytes from the file if `records` is None, or if another thread of this
        process has already read a part of the bytes.
        """
        self.synced_offset = offset + length
        if self.phase is LoadPhase.UPDATING:
            return  # a reader failed; the next caller loads the log
        if records is None or not offset == self.end_offset == self.size or self.tail is not None:
            if self.tail is not None:
                # The tail may be a part of this write that a reader saw, so load the log again.
                self.load(max(self.size, self.synced_offset))
            else:
                self.catch_up(max(self.size, self.synced_offset))
            return
        self.phase = LoadPhase.UPDATING
        self._apply_records(records, length)
        self.end_offset = self.size = self.synced_offset
        if not self.keeps_messages:
            self._drop_messages()
        self.phase = LoadPhase.READY

    def record_uncached_append(self, seq: int, written_at: str, size: int, length: int) -> None:
        """Record one appended message that is not kept in memory.

        `size` is the new size of the file, `length` the size of the line. The log must be in the
        phase READY.
        """
        self.phase = LoadPhase.UPDATING
        self.end_offset = self.size = self.synced_offset = self.loaded_offset = size
        self.next_seq = self.first_loaded_seq = seq + 1
        self.updated = written_at
        self.lines_since_state += 1
        self.bytes_since_state += length
        if self.messages:
            self.messages = []
        self.phase = LoadPhase.READY

    def is_same_file(self, status: os.stat_result | None) -> bool:
        """Return whether `status` is the status of this log's file."""
        return status is not None and status.st_ino == self.inode and status.st_dev == self.device

    def _newer_format_error(self, subject: str) -> NewerFormat:
        return NewerFormat(
            f"{self.path} was written by a newer stenolog ({subject}); upgrade stenolog"
        )

    def read_bytes(self, start: int, stop: int) -> bytes:
        """Read and return the bytes of the live file from `start` to `stop`."""
        return read_all(self.descriptor, start, stop)

    # --- damage ------------------------------------------------------------------------------

    def _add_lost_seqs(self, lost_spans: list[Span]) -> None:
        if not lost_spans or self.state is None:
            return
        new_spans = spans.minus(spans.union(lost_spans), states.missing_seqs(self.state))
        if new_spans:
            self.state.lost = spans.union(self.state.lost, new_spans)
            self._visible_cache = None
            log_reports.warning(
                "%s: skipped damaged messages, seq %s; run `steno doctor` for details",
                self.path,
                ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in new_spans),
            )

    def _report_damage(self, damaged: list[DamagedBytes], source: str = "") -> None:
        """Warn about damage that was not reported yet.

        `source` is the path of the damaged archive; it is empty for the live log.
        """
        for damage in damaged:
            if not damage.is_void and (source, damage.offset) not in self._reported_damage:
                self._reported_damage[source, damage.offset] = damage
                log_reports.warning(
                    "%s: skipped %d bytes at offset %d that are not a record; "
                    "run `steno doctor` for details",
                    self.directory.path / (source or self.name),
                    damage.length,
                    damage.offset,
                )

    # --- messages ----------------------------------------------------------------------------

    def visible_messages(self, *, last: int | None, after: int | None) -> LiveMessages:
        """Select the last `last` visible messages after seq `after`; return those in the live log.

        The result also names the seqs to read from archives.
        """
        self.ensure_loaded()
        self.keeps_messages = True
        if last is None and after is None and self._visible_cache is not None:
            return LiveMessages(self._visible_cache.copy())
        wanted_spans = self._visible_spans(last, after)
        while wanted_spans and self._load_messages_from(wanted_spans[0][0]):
            wanted_spans = self._visible_spans(last, after)
        messages = [message for span in wanted_spans for message in self._messages_between(*span)]
        if wanted_spans and wanted_spans[0][0] < self.first_live_seq():
            return LiveMessages(
                messages, wanted_spans[0][0], wanted_spans, states.copy_state(self.known_state())
            )
        if last is None and after is None:
            self._visible_cache = messages.copy()
        return LiveMessages(messages)

    def all_messages(self, *, after: int) -> LiveMessages:
        """Return every message after seq `after` in the live log, with hidden messages marked."""
        self.ensure_loaded()
        self.keeps_messages = True
        self._load_messages_from(after + 1)
        messages = self._mark_hidden(self._messages_between(after + 1, self.next_seq))
        if after + 1 >= self.first_live_seq():
            return LiveMessages(messages)
        return LiveMessages(messages, after + 1, state=states.copy_state(self.known_state()))

    def read_archives(self, live_part: LiveMessages) -> list[archive.ArchiveContent]:
        """Return the archives with the messages that the live log lacks, newest first.

        Reading can take long. The caller need not hold the mutex, because archives do not change. A
        purge may delete archives during the read, but it replaces the log first, so the caller can
        notice the purge.
        """
        if live_part.state is None:
            return []
        return list(archive.archive_chain(self.directory, live_part.state, live_part.archived_from))

    def add_archived_messages(
        self, live_part: LiveMessages, archives: list[archive.ArchiveContent]
    ) -> list[Message]:
        """Return the messages of the archives, then the messages of the live log."""
        state = self.known_state()
        older_messages: list[Message] = []
        for content in archives:
            self._report_damage(content.damaged, content.path)
            older_messages = content.messages + older_messages
        missing_spans = states.missing_seqs(state)
        by_seq = {m.seq: m for m in older_messages if m.seq >= live_part.archived_from}
        older_messages = [
            by_seq[seq] for seq in sorted(by_seq) if not spans.contains(missing_spans, seq)
        ]
        known_spans = spans.union(spans.from_seqs(m.seq for m in older_messages), missing_spans)
        # Messages of a missing archive do not count as lost: a backup may restore the archive.
        archived_span = (live_part.archived_from, self.first_live_seq() - 1)
        self._archive_gaps = spans.minus([archived_span], known_spans)
        if self._archive_gaps:
            log_reports.warning(
                "%s: %d messages are in missing or damaged archives; run `steno doctor` for "
                "details",
                self.path,
                spans.size(self._archive_gaps),
            )
        requested = live_part.requested_spans
        if requested is None:
            return self._mark_hidden(older_messages) + live_part.messages
        return [m for m in older_messages if spans.contains(requested, m.seq)] + live_part.messages

    def _mark_hidden(self, messages: list[Message]) -> list[Message]:
        visible_spans = states.visible_seqs(self.known_state(), self.next_seq - 1)
        return [
            m if spans.contains(visible_spans, m.seq) else msgspec.structs.replace(m, hidden=True)
            for m in messages
        ]

    def _visible_spans(self, last: int | None, after: int | None) -> list[Span]:
        """Return the seqs of the last `last` visible messages after seq `after`."""
        last_seq = self.next_seq - 1
        visible_spans = states.visible_seqs(self.known_state(), last_seq)
        if after is not None:
            visible_spans = spans.clipped(visible_spans, after + 1, last_seq)
        return visible_spans if last is None else spans.last_seqs(visible_spans, last)

    def _messages_between(self, first_seq: int, last_seq: int) -> list[Message]:
        messages = self.messages
        if messages and messages[-1].seq - messages[0].seq + 1 == len(messages):
            lowest_seq = messages[0].seq
            return messages[max(0, first_seq - lowest_seq) : max(0, last_seq - lowest_seq + 1)]
        start = bisect_left(messages, first_seq, key=_seq_of)
        return messages[start : bisect_right(messages, last_seq, key=_seq_of)]

    def _load_messages_from(self, seq: int) -> bool:
        """Load messages with this seq or a later one into memory, if the live log has them.

        Return whether any bytes were read.
        """
        if seq <= self.first_live_seq():
            seq = 0  # read the whole log, so that damage to its first lines is found as well
        length = _FIRST_CHUNK_BYTES if seq else min(self.loaded_offset, _MAX_CHUNK_BYTES)
        has_read = False
        while self.loaded_offset > 0 and self.first_loaded_seq > seq:
            start = max(0, self.loaded_offset - length)
            buffer = self.read_bytes(start, self.loaded_offset)
            if start > 0:
                line_start = buffer.find(b"\n") + 1
                if line_start in (0, len(buffer)) or not can_parse_from(buffer, line_start):
                    length *= 4
                    continue
                start += line_start
                buffer = buffer[line_start:]
            self._parse_earlier_bytes(buffer, start)
            length = min(length * 4, _MAX_CHUNK_BYTES)
            has_read = True
        return has_read

    def _parse_earlier_bytes(self, buffer: bytes, start: int) -> None:
        """Parse the bytes before the loaded messages, and load the messages in these bytes."""
        missing, first_live_seq = states.missing_seqs(self.known_state()), self.first_live_seq()
        records, damaged = read_records(buffer, offset=start)
        self.phase = LoadPhase.UPDATING
        self._report_damage(damaged)
        self.loaded_offset = start
        messages = [record for record in records if type(record) is Message]
        if len(messages) < len(records):
            for record in records:
                if type(record) is StateRecord:
                    self._move_tokens(record)
        first_seq = self.first_loaded_seq
        if records:
            first_seq = min(record.seq for record in records) if damaged else records[0].seq
        if start == 0:
            first_seq = min(first_seq, first_live_seq)
        # Without damage the seqs are consecutive: the first seq and the count imply all seqs.
        is_gapless = (
            not damaged and not missing and len(messages) == self.first_loaded_seq - first_seq
        )
        if not is_gapless or (messages and messages[0].seq != first_seq):
            by_seq = {m.seq: m for m in messages if m.seq < self.first_loaded_seq}
            messages = [by_seq[seq] for seq in sorted(by_seq) if not spans.contains(missing, seq)]
            known_spans = spans.union(spans.from_seqs(m.seq for m in messages), missing)
            self._add_lost_seqs(spans.minus([(first_seq, self.first_loaded_seq - 1)], known_spans))
        self.first_loaded_seq = min(self.first_loaded_seq, first_seq)
        self.messages = messages + self.messages
        self.phase = LoadPhase.READY

    def first_live_seq(self) -> int:
        """Return the first seq that is not in an archive."""
        return states.archived_upto(self.known_state()) + 1

    @property
    def memory_bytes(self) -> int:
        """Approximate memory use of the messages and idempotency keys, in bytes."""
        message_bytes = self.end_offset - self.loaded_offset if self.messages else 0
        return message_bytes + _BYTES_PER_TOKEN * len(self._tokens or ())

    def drop_cache(self) -> None:
        """Drop the messages and idempotency keys in memory; the file still has them."""
        phase, self.phase = self.phase, LoadPhase.UPDATING
        self._drop_messages()
        self._tokens = None
        self.keeps_messages = False
        self.phase = phase

    def _drop_messages(self) -> None:
        """Drop the messages in memory, but keep the idempotency keys, which are slow to read."""
        self.messages, self._visible_cache = [], None
        self.loaded_offset, self.first_loaded_seq = self.end_offset, self.next_seq

    # --- idempotency keys --------------------------------------------------------------------

    def find_token(self, once: str) -> Token | None:
        """Return the token of the idempotency key `once`; None if it is not found.

        The search covers at least the newest 1,000 messages.
        """
        tokens = self._load_tokens()
        if len(tokens) > 2 * TOKEN_WINDOW:
            newest_tokens = sorted(tokens.values(), key=_first_seq)[-TOKEN_WINDOW:]
            self._tokens = tokens = {token.token: token for token in newest_tokens}
        return tokens.get(once)

    def tokens_upto(self, seq: int) -> list[Token]:
        """Return the newest tokens of messages up to this seq, to be stored in a state."""
        tokens = [token for token in self._load_tokens().values() if token.first <= seq]
        return sorted(tokens, key=_first_seq)[-TOKEN_WINDOW:]

    def _load_tokens(self) -> dict[str, Token]:
        """Return the tokens of the newest messages and of the states, by idempotency key."""
        self.ensure_loaded()
        if self._tokens is None:
            self._load_messages_from(max(self.first_live_seq(), self.next_seq - TOKEN_WINDOW))
            self._tokens = {**self._state_tokens, **_tokens_by_key(self.messages)}
            if not self.keeps_messages:
                self.phase = LoadPhase.UPDATING
                self._drop_messages()
                self.phase = LoadPhase.READY
        return self._tokens

    # --- undo --------------------------------------------------------------------------------

    def complete_undo_step(self, step: Undo) -> Undo:
        """Return an undo step with the fields that the state omits. Raises DamagedStore."""
        if not step.elsewhere:
            return step
        complete_step = self.undo_steps({step.number}).get(step.number)
        if complete_step is None:
            raise DamagedStore(
                f"{self.key!r}: change {step.number} is damaged and cannot be undone; "
                "run `steno doctor`"
            )
        return complete_step

    def undo_steps(self, numbers: Collection[int]) -> dict[int, Undo]:
        """Return the readable undo steps of these changes, by change number."""
        state = self.known_state()
        records, _ = read_records(self.read_bytes(0, self.end_offset), offset=0)
        changes = [record.body for record in records if isinstance(record, ChangeRecord)]
        # Iterate in reverse: of several changes with the same number, the first one counts.
        steps = {c.number: states.undo_step_of(c) for c in reversed(changes) if c.number in numbers}
        archives = archive.archive_chain(self.directory, state, 1)
        while len(steps) < len(numbers) and (content := next(archives, None)) is not None:
            for change in content.changes:
                if change.number in numbers:
                    steps.setdefault(change.number, states.undo_step_of(change))
        return steps

    # --- state of the session ----------------------------------------------------------------

    def settled_state(self) -> tuple[State, int]:
        """Return a copy of the state, and the last seq, both as the next writer will see them."""
        state = states.copy_state(self.known_state())
        if self.tail is None:
            return state, self.next_seq - 1
        states.apply_void(state, self.tail.as_void())
        return state, self.tail.next_seq - 1

    def info(self) -> SessionInfo:
        """Return the info of the session as of the last refresh."""
        state, end = self.settled_state()
        updated = datetime.fromisoformat(max(self.updated, state.created))
        info = states.session_info(
            state,
            end,
            times=(datetime.fromisoformat(state.created), updated),
            lost=spans.union(state.lost, self._archive_gaps),
            count=end - spans.size(spans.union(states.missing_seqs(state), self._archive_gaps)),
            size=self.size,
            damaged=len(self._reported_damage),
            void_bytes=self.known_state().void_bytes + (self.tail.bytes if self.tail else 0),
        )
        # An unfinished write at the end of the log does not count yet.
        return replace(info, meta=deepcopy(info.meta), change=self.known_state().number)


def chunk_starts(end: int) -> Iterator[int]:
    """Yield the start offset of each read of a backward search from `end`; the last is 0."""
    length = _FIRST_CHUNK_BYTES
    while length < end:
        yield end - length
        length *= 4
    yield 0


def _time_of(record: Record) -> str:
    return record._at if isinstance(record, Message) else record.at
