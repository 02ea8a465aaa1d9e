"""Parse the bytes of a log into valid records and a description of any damage.

Nearly always every line is intact and in order; `read_intact` verifies that in a few passes over
the buffer. Otherwise `scan_log` inspects each line: it finds the undamaged records, uses later
records to decide whether an incomplete batch is valid, and returns the tail that the next writer
must mark as void. docs/format.md, "Reading", lists the rules by number. This module does no I/O.
"""

import re
from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate
from operator import attrgetter

import msgspec
from msgspec import Struct

from stenolog.codec import LINE_START, control_line, count_intact, decode_lines, parse_line, salvage
from stenolog.records import (
    ChangeRecord,
    Message,
    Record,
    Span,
    StateRecord,
    UnknownRecord,
    Void,
    VoidRecord,
)
from stenolog.stores import spans

_seq_of = attrgetter("seq")
_MIN_LINE_BYTES = 100
"""Assumed minimum size of a message line, to count the messages in a block of NULs."""
_CRC_FIELD = b',"crc":"'
_CONTROL_RECORD = re.compile(rb'\{"kind":"(?:state|change|void)"[^\0]*\Z')
"""Pattern of a damaged line that held a control record (state, change or void), not a message."""


class DamagedBytes(Struct, frozen=True):
    """A range of bytes in a log that is not a valid record."""

    offset: int
    length: int
    is_void: bool
    """Whether a void record already covers these bytes."""
    text: bytes


class Tail(Struct, frozen=True):
    """End of a log that the next writer must mark as void before it appends."""

    bytes: int
    """Number of bytes after `ScanResult.consumed` that belong to no record."""
    ends_line: bool
    """Whether the file ends with a newline."""
    next_seq: int
    """Next seq, higher than every seq that may have been acknowledged."""
    seqs: list[Span]
    """Seqs of the messages to mark as void."""
    lost: list[Span]
    """Seqs to mark as lost."""
    changes: list[int]
    """Numbers of the changes to mark as void."""
    has_damaged_lines: bool
    """Whether the bytes include complete damaged lines, which may have been acknowledged."""

    def as_void(self) -> Void:
        """Return the body of the void record for this tail."""
        return Void(
            bytes=self.bytes if self.ends_line else self.bytes + 1,
            seqs=self.seqs,
            lost=self.lost,
            changes=self.changes,
        )


def void_line(tail: Tail, written_at: str) -> bytes:
    """Return the line of the void record for a tail, with a newline before it if needed."""
    line = control_line("void", tail.next_seq, written_at, tail.as_void())
    return line if tail.ends_line else b"\n" + line


class ScanResult(Struct, frozen=True):
    """Records and damage that `scan_log` found in a part of a log."""

    records: list[Record]
    """Valid records in order, without records that are void or belong to an incomplete batch."""
    consumed: int
    """Number of completely parsed bytes; the bytes after them may still become a record."""
    ends_line: bool
    """Whether the consumed bytes end with a newline."""
    next_seq: int
    lost: list[Span] = []
    damaged: list[DamagedBytes] = []
    tail: Tail | None = None


def read_intact(buffer: bytes, next_seq: int) -> list[Record] | None:
    """Return the records at the end of a log; None if `scan_log` must inspect each line.

    That is the case if a line is damaged, void or out of order, or the last batch is incomplete.
    """
    records = _read_in_order(buffer, next_seq)
    if not records:
        return records
    position = batch_position(records[-1])
    return records if position is None or position[0] == position[1] else None


def _read_in_order(buffer: bytes, next_seq: int | None) -> list[Record] | None:
    """Return the records of complete lines; None if a line is damaged, void or out of order.

    `next_seq` is the expected seq of the first record; None accepts any seq.
    """
    line_count = count_intact(buffer)
    if not line_count:
        return None if line_count is None else []
    try:
        records: list[Record] = decode_lines(buffer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if len(records) != line_count:
        return None
    # Compare all seqs at once: a message increases the seq by one, and any other record has the
    # seq of the next message.
    kinds = list(map(type, records))
    first_seq = records[0].seq if next_seq is None else next_seq
    expected_seqs = list(accumulate([kind is Message for kind in kinds], initial=first_seq))
    expected_seqs.pop()
    if VoidRecord in kinds or list(map(_seq_of, records)) != expected_seqs:
        return None
    return records


def read_records(buffer: bytes, *, offset: int) -> tuple[list[Record], list[DamagedBytes]]:
    """Return the intact records of any part of a log, and the damaged bytes.

    The caller decides which records are valid, with the state of the log after this part.
    """
    # A batch may extend beyond either end of the buffer, so incomplete batches are accepted.
    intact_records = _read_in_order(buffer, None)
    if intact_records is not None:
        return intact_records, []
    lines, rest_start = _split_lines(buffer)
    records = [record for line in lines for record in line.records]
    damaged = _find_damaged_bytes(lines, lines, offset)
    if rest_start < len(buffer):
        damaged.append(
            DamagedBytes(offset + rest_start, len(buffer) - rest_start, False, buffer[rest_start:])
        )
    return records, damaged


def can_parse_from(buffer: bytes, start: int) -> bool:
    """Return whether parsing may begin with the line at `start`.

    A void record and the bytes that it covers must be parsed together, so parsing must not begin
    between them.
    """
    record = parse_line(buffer[start : buffer.find(b"\n", start)])
    return record is not None and not isinstance(record, VoidRecord)


def batch_position(record: Record) -> Span | None:
    """Return the position of the record in its batch and the size of the batch, or None."""
    return record._part if isinstance(record, Message) else record.part


def is_joined(record: Record) -> bool:
    """Return whether the record was written together with the bytes before it.

    A joined record does not prove that earlier bytes were synced.
    """
    # guard: batch-line-is-no-proof
    return record._joined if isinstance(record, Message) else record.joined


class _Line(Struct):
    """The bytes between two newlines: one record, several records, or no record."""

    start: int
    stop: int
    records: list[Record]
    damaged_text: bytes
    """Text of the line, if the line is not exactly one intact record; otherwise empty."""


def scan_log(buffer: bytes, *, offset: int, next_seq: int, proven: bool = False) -> ScanResult:
    """Parse a part of a log that begins at the start of a line.

    `offset` is the position of the part, `next_seq` the next expected seq. Normally the part ends
    where the log ends. `proven` means that more records follow in the log, so the whole part was
    synced.
    """
    lines, _ = _split_lines(buffer)
    voids = [r.body for line in lines for r in line.records if isinstance(r, VoidRecord)]
    void_seqs = spans.union(*(void.seqs + void.lost for void in voids)) if voids else []
    void_changes = {number for void in voids for number in void.changes}
    last_intact_line = max((i for i, line in enumerate(lines) if line.records), default=-1)
    unjoined_lines = [i for i, line in enumerate(lines) if not all(map(is_joined, line.records))]
    first_unproven_line = len(lines) if proven else max(unjoined_lines, default=-1)
    batches = _BatchSorter(void_seqs, void_changes)
    for index, line in enumerate(lines[: last_intact_line + 1]):
        if line.damaged_text and not line.records:
            batches.add_damaged_line()
        for record in line.records:
            batches.add_record(record, index, proven=index < first_unproven_line)
    batches.close_batch(ended=last_intact_line + 1 < len(lines), proven=proven)

    kept, dropped = batches.kept_records, batches.dropped_records
    if batches.open_batch_start is not None:
        last_intact_line = batches.open_batch_start - 1
    next_seq_at_end, lost, duplicate_ids = _find_gaps(kept + dropped, next_seq, void_seqs)
    duplicate_lines = {index for index, record in kept if id(record) in duplicate_ids}
    kept = [(index, record) for index, record in kept if id(record) not in duplicate_ids]
    kept.sort(key=lambda pair: pair[0])
    tail_lines = lines[last_intact_line + 1 :]
    consumed = lines[last_intact_line].stop if last_intact_line >= 0 else 0
    damaged = _find_damaged_bytes(lines[: last_intact_line + 1], lines, offset)
    # A duplicated message counts once, and the second copy is reported as damage.
    for line in (lines[index] for index in sorted(duplicate_lines)):
        text = buffer[line.start : line.stop]
        damaged.append(DamagedBytes(offset + line.start, len(text), False, text))
    tail = _find_tail(buffer, tail_lines, consumed, next_seq_at_end, batches)
    if tail is not None:
        damaged += _find_damaged_bytes(tail_lines, [], offset)
    return ScanResult(
        records=[record for _, record in kept],
        consumed=consumed,
        ends_line=consumed == 0 or buffer[consumed - 1 : consumed] == b"\n",
        next_seq=next_seq_at_end,
        lost=lost,
        damaged=damaged,
        tail=tail,
    )


def _split_lines(buffer: bytes) -> tuple[list[_Line], int]:
    """Split the buffer at newlines; return the lines and the start of the unterminated rest.

    An unterminated rest that holds an intact record counts as a line that lacks only its newline.
    """
    lines: list[_Line] = []
    start = 0
    while start < len(buffer):
        newline = buffer.find(b"\n", start)
        stop = len(buffer) if newline < 0 else newline + 1
        text = buffer[start:newline] if newline >= 0 else buffer[start:]
        if text:
            record = parse_line(text)
            records = [record] if record is not None else salvage(text)
            if newline < 0 and not records:
                return lines, start
            lines.append(_Line(start, stop, records, b"" if record is not None else text))
        start = stop
    return lines, len(buffer)


class _BatchSorter:
    """Sorter that decides, batch by batch, which records are valid."""

    def __init__(self, void_seqs: Sequence[Span], void_changes: set[int]) -> None:
        self.kept_records: list[tuple[int, Record]] = []
        self.dropped_records: list[tuple[int, Record]] = []
        self.unproven: list[Record] = []
        """Intact records of incomplete batches, which the next void record must name."""
        self.open_batch_start: int | None = None
        """Index of the first line of a batch that a writer may still be writing."""
        self._void_seqs = void_seqs
        self._void_changes = void_changes
        self._open_batch: list[tuple[int, Record]] = []
        self._has_damage = False
        """Whether a damaged line follows a line of the open batch."""

    def add_damaged_line(self) -> None:
        """Record a damaged line, which may have belonged to the open batch."""
        self._has_damage = bool(self._open_batch)

    def add_record(self, record: Record, line_index: int, *, proven: bool) -> None:
        """Add the next intact record. `proven` means that its line was synced."""
        part = batch_position(record)
        if self._open_batch and not self._continues_batch(record, part):
            self.close_batch(ended=True, proven=proven or not is_joined(record))
        if part is None:
            target = self.dropped_records if self._is_void(record) else self.kept_records
            target.append((line_index, record))
            return
        self._open_batch.append((line_index, record))
        if part[0] == part[1]:
            self.close_batch(ended=True, proven=proven)

    def close_batch(self, *, ended: bool, proven: bool) -> None:
        """Decide which records of the open batch are valid.

        `ended` means that no writer is still writing the batch. `proven` means that the batch was
        synced.
        """
        batch, self._open_batch = self._open_batch, []
        has_damage, self._has_damage = self._has_damage, False
        if not batch:
            return
        first_part = batch_position(batch[0][1]) or (1, 1)
        if len(batch) == first_part[1]:
            self.kept_records += [pair for pair in batch if not self._is_void(pair[1])]
            self.dropped_records += [pair for pair in batch if self._is_void(pair[1])]
        elif all(self._is_void(record) for _, record in batch):
            self.dropped_records += batch
        elif proven:
            self.kept_records += batch
        elif ended or has_damage or first_part[0] > 1:
            self.dropped_records += batch
            self.unproven += [record for _, record in batch]
        else:
            self.open_batch_start = batch[0][0]  # guard: open-batch-hidden

    def _continues_batch(self, record: Record, part: Span | None) -> bool:
        previous = self._open_batch[-1][1]
        previous_part = batch_position(previous)
        if (
            part is None
            or previous_part is None
            or part[1] != previous_part[1]
            or part[0] <= previous_part[0]
        ):
            return False
        distance = part[0] - previous_part[0]
        # A change counts as a line of the batch but uses no seq.
        return record.seq - previous.seq == (
            distance if isinstance(previous, Message) else distance - 1
        )

    def _is_void(self, record: Record) -> bool:
        if isinstance(record, Message):
            return spans.contains(self._void_seqs, record.seq)
        return isinstance(record, ChangeRecord) and record.body.number in self._void_changes


def _find_gaps(
    records: list[tuple[int, Record]], next_seq: int, void_seqs: Sequence[Span]
) -> tuple[int, list[Span], set[int]]:
    """Return the next seq, the missing seqs, and the `id()` of each duplicate record."""
    expected_seq = next_seq
    gaps: list[Span] = []
    duplicate_ids: set[int] = set()
    for _, record in sorted(records, key=lambda pair: pair[0]):
        if record.seq > expected_seq:
            gaps.append((expected_seq, record.seq - 1))
            expected_seq = record.seq
        if isinstance(record, Message):
            if record.seq < expected_seq:
                duplicate_ids.add(id(record))
            else:
                expected_seq = record.seq + 1
    return expected_seq, spans.minus(spans.union(gaps), void_seqs), duplicate_ids


def _find_damaged_bytes(
    lines: list[_Line], lines_with_voids: list[_Line], offset: int
) -> list[DamagedBytes]:
    """Return the damaged lines. A void record in `lines_with_voids` may cover a damaged line."""
    void_spans = spans.union(
        (line.start - record.body.bytes, line.start - 1)
        for line in lines_with_voids
        for record in line.records
        if isinstance(record, VoidRecord) and record.body.bytes
    )
    return [
        DamagedBytes(offset + line.start, len(text), spans.contains(void_spans, line.start), text)
        for line in lines
        if (text := line.damaged_text)
    ]


def _find_tail(
    buffer: bytes, lines: list[_Line], consumed: int, expected_seq: int, batches: _BatchSorter
) -> Tail | None:
    """Return the tail that must be marked as void; None if the log ends properly."""
    # An open batch lacks its last lines and was never acknowledged: its seqs are void, not lost.
    open_records = [record for line in lines for record in line.records]
    seqs = spans.from_seqs(r.seq for r in open_records if isinstance(r, Message))
    lost = spans.from_seqs(r.seq for r in batches.unproven if isinstance(r, Message))
    if open_records and open_records[0].seq > expected_seq:
        lost = spans.union(lost, [(expected_seq, open_records[0].seq - 1)])
    changes = [
        r.body.number for r in [*batches.unproven, *open_records] if isinstance(r, ChangeRecord)
    ]
    next_seq = max([expected_seq, *(last + 1 for _, last in seqs)])  # guard: seq-never-reused
    lost_count = _max_lost_messages([line.damaged_text for line in lines if not line.records])
    if lost_count:
        lost = spans.union(lost, [(next_seq, next_seq + lost_count - 1)])
        next_seq += lost_count
    remaining_bytes = len(buffer) - consumed
    if not remaining_bytes and not lost and not seqs and not changes:
        return None
    return Tail(
        bytes=remaining_bytes,
        ends_line=buffer.endswith(b"\n"),
        next_seq=next_seq,
        seqs=seqs,
        lost=lost,
        changes=changes,
        has_damaged_lines=any(line.damaged_text and not line.records for line in lines),
    )


def _max_lost_messages(damaged_lines: list[bytes]) -> int:
    """Return the maximum number of messages that damaged lines may have held.

    The number of lines is not reliable: a byte that turned into a newline splits a line, and a
    block that reads as NUL joins lines.
    """
    possible_messages = [line for line in damaged_lines if not _CONTROL_RECORD.match(line)]
    if not possible_messages:
        return 0
    text = b"\n".join(possible_messages)
    return max(1, text.count(_CRC_FIELD), text.count(0) // _MIN_LINE_BYTES)


def has_void_control_record(buffer: bytes) -> bool:
    """Return whether a state or a change in a log is marked as void, but may have been stored.

    A writer marks a damaged last line as void, like an interrupted write. A lost message is
    recorded with its seq, but a lost change leaves no other trace.
    """
    _, damaged = read_records(buffer, offset=0)
    return any(part.is_void and _CONTROL_RECORD.match(part.text) for part in damaged)


def lines_with_newlines(text: bytes) -> list[bytes]:
    """Return the lines with their newlines; the last line may lack its newline."""
    return BytesIO(text).readlines()


def may_be_torn_log(buffer: bytes) -> bool:
    """Return whether a file without intact records may be the start of a stenolog log."""
    state_start = b'{"kind":"state",'
    text = buffer.strip(b"\n")  # guard: foreign-log-refused
    # A block that never reached the disk reads as NUL, and any part of a line may follow.
    return text[:1] in (b"", b"\0") or text.startswith(state_start) or state_start.startswith(text)


def find_state(buffer: bytes, *, at_start: bool) -> tuple[int, StateRecord | UnknownRecord] | None:
    """Return the offset of the last intact state in a buffer, and its record.

    `at_start` means that the buffer begins at the start of a line.
    """
    needle = LINE_START + b'state"'
    position = buffer.rfind(needle)
    while position >= 0:
        if (position == 0 and at_start) or buffer[position - 1 : position] == b"\n":
            newline = buffer.find(b"\n", position)
            record = parse_line(buffer[position : newline if newline >= 0 else len(buffer)])
            if isinstance(record, StateRecord | UnknownRecord):
                return position, record
        position = buffer.rfind(needle, 0, position)
    return None
