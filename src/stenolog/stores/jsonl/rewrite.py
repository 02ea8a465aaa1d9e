"""Rewrite a log as a new file of the next generation: after a failed sync, to compact or to purge.

The old file stays complete until the new file is synced, locked and renamed.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import Struct

from stenolog.codec import LINE_START, control_line, is_intact, message_line, parse_line, salvage
from stenolog.errors import DamagedStore
from stenolog.records import (
    Archive,
    ChangeRecord,
    CompactionResult,
    Message,
    Span,
    State,
    StateRecord,
    Undo,
    UnknownRecord,
    VoidRecord,
)
from stenolog.stores import spans
from stenolog.stores import state as states
from stenolog.stores.disk import sync_file, temporary_file, write_all
from stenolog.stores.jsonl import archive
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.scan import (
    Tail,
    batch_position,
    lines_with_newlines,
    read_records,
    scan_log,
    void_line,
)

_STATE_START: Final = LINE_START + b'state"'


class LogStates(Struct, frozen=True):
    """State and next seq at the start of a log, and at its end."""

    head: State
    first_seq: int
    end: State
    next_seq: int
    tail: Tail | None = None
    """Incomplete write after the last record."""


def replay(text: bytes, current: State, *, proven: bool = False) -> LogStates:
    """Return the states before and after the records in `text`, the first bytes of a log.

    `current` is the current state, which is used if the first states of the log are damaged.
    `proven` means that a later record proves that all bytes of `text` were synced.
    """
    first_record = next(iter(read_records(text, offset=0)[0]), None)
    head_record = next(intact_states(text), None)
    if head_record is None or first_record is None or first_record.seq < head_record.seq:
        head_record = _derive_first_state(current)
    scan = scan_log(text, offset=0, next_seq=head_record.seq, proven=proven)
    end_state = states.copy_state(head_record.body)
    for record in scan.records:
        if isinstance(record, StateRecord | ChangeRecord | VoidRecord):
            end_state = states.apply_record(end_state, record)
    lost_spans = spans.union(scan.lost, scan.tail.lost if scan.tail else [])
    end_state.lost = spans.union(end_state.lost, spans.minus(lost_spans, end_state.purged))
    head_state = states.copy_state(head_record.body)
    return LogStates(head_state, head_record.seq, end_state, scan.next_seq, scan.tail)


def _derive_first_state(current: State) -> StateRecord:
    """Return the probable first state of a log, derived from its current state."""
    state = states.blank_state(current.key, current.uid, current.generation, current.created)
    state.archive, state.purged = current.archive, current.purged
    state.forked_from = current.forked_from
    state.floor = states.archived_upto(current)
    return StateRecord(seq=state.floor + 1, at=current.created, body=state)


def intact_states(text: bytes) -> Iterator[StateRecord]:
    """Yield the intact state records in these bytes, in order."""
    start = text.find(_STATE_START)
    while start >= 0:
        newline = text.find(b"\n", start)
        record = parse_line(text[start : newline if newline >= 0 else len(text)])
        if isinstance(record, StateRecord):
            yield record
        start = text.find(_STATE_START, start + 1)


def remove_states(text: bytes) -> bytes:
    """Return the lines of `text`, byte for byte, without the intact state records."""
    if _STATE_START not in text:  # guard: compaction-drops-old-states
        return text
    return b"".join(
        line
        for line in lines_with_newlines(text)
        if not (line.startswith(_STATE_START) and is_intact(line.removesuffix(b"\n")))
    )


def rewrite_log(log: Log, end_offset: int, written_at: str) -> None:
    """Replace the file of a log by a new file with the lines before `end_offset`.

    Raises OSError and the errors of `Log.load`.
    """
    with log.mutex:
        state = log.state_if_any()
    text = log.read_bytes(0, end_offset)
    if state is not None and read_records(text, offset=0)[0]:
        text = compose_log(replay(text, state), text, written_at)
    replace_log(log, text)


def compose_log(log_states: LogStates, lines: bytes, written_at: str) -> bytes:
    """Return a complete log of the next generation: head state twice, lines, end state."""
    head, end = states.copy_state(log_states.head), states.copy_state(log_states.end)
    first_seq, next_seq, tail = log_states.first_seq, log_states.next_seq, log_states.tail
    head.generation = end.generation = end.generation + 1
    parts = [
        control_line("state", first_seq, written_at, head),
        control_line("state", first_seq, written_at, head, joined=True),
        remove_states(lines),
    ]
    if tail is not None:
        parts.append(void_line(tail, written_at))
        states.apply_void(end, tail.as_void())
        next_seq = tail.next_seq
    elif lines and not lines.endswith(b"\n"):
        parts.append(b"\n")
    parts.append(control_line("state", next_seq, written_at, end))
    return b"".join(parts)


def replace_log(log: Log, text: bytes) -> None:
    """Replace the log's file by a new file with this content, durably.

    The caller holds the lock of the old file and releases the lock afterwards. Raises OSError.
    """
    folder = log.directory.descriptor
    temporary_name = f".{log.name}.new"
    with temporary_file(folder, temporary_name) as descriptor:
        write_all(descriptor, text)
        sync_file(descriptor)
        # Lock the new file first: no process may append before the rename is on the disk.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(temporary_name, log.name, src_dir_fd=folder, dst_dir_fd=folder)
        log.directory.sync_entries()
        descriptor.release()  # released here too: Ctrl-C may interrupt the end of the `with`


# --- compaction ------------------------------------------------------------------------------
# A compaction moves the hidden first lines of a log into an archive while writers keep writing.
# The first step of a compaction writes the archive under a separate lock.
# The second step of a compaction replaces the live file under the append lock.
# The second step does nothing if the log was replaced after the first step.
# The second step also does nothing if the floor no longer covers the archived messages.
# A crash between the two steps leaves the log unchanged, and an archive that no state names.

NOTHING_ARCHIVED = CompactionResult(archived=0, bytes_before=0, bytes_after=0)


class PreparedArchive(Struct, frozen=True):
    """A finished archive, with the values needed to remove its lines from the live log."""

    uid: str
    generation: int
    live_offset: int
    """Offset of the first line that stays in the live log."""
    archive: Archive
    states: LogStates
    """States before and after the archived lines."""
    message_count: int


def find_archive_end(text: bytes, floor: int) -> tuple[int, int, int]:
    """Return end offset, last seq and message count of the complete batches up to the floor."""
    offset = archive_end = archived_seq = archived_count = seen_count = newest_seq = 0
    for line in lines_with_newlines(text):
        offset += len(line)
        record = parse_line(line.removesuffix(b"\n"))
        if not isinstance(record, Message):
            continue
        if record.seq > floor:
            break
        if record.seq <= newest_seq:
            continue  # the line is a second copy of the message
        newest_seq = record.seq
        seen_count += 1
        position = batch_position(record)
        if position is None or position[0] == position[1]:
            archive_end, archived_seq, archived_count = offset, record.seq, seen_count
    return archive_end, archived_seq, archived_count


def prepare_archive(log: Log, folder: int) -> PreparedArchive | None:
    """Write the hidden first lines of a log to an archive; return None if there are none.

    Raises OSError.
    """
    with log.mutex:
        state, end_offset = states.copy_state(log.known_state()), log.end_offset
        first = log.first_live_seq()
    if state.floor < first:
        return None
    text = log.read_bytes(0, end_offset)
    archive_end, last, count = find_archive_end(text, state.floor)
    if archive_end == 0:
        return None
    reference = Archive(name=f"{first}-{last}.jsonl.gz", first=first, last=last)
    # Hidden lines are `proven`: they were synced before the change that hides them was written.
    lines = text[:archive_end]
    log_states = replay(lines, state, proven=True)
    # guard: archive-chain-twice
    if not any(record.body.archive == state.archive for record in intact_states(lines)):
        # All states that name the previous archive are damaged: add a state, to keep the chain.
        lines = control_line("state", first, state.created, log_states.head) + lines
    archive.write_archive(folder, reference.name, [lines])
    return PreparedArchive(state.uid, state.generation, archive_end, reference, log_states, count)


def finish_compaction(log: Log, prepared: PreparedArchive, now: str) -> CompactionResult:
    """Replace the live file by a file without the archived lines. Raises OSError.

    The caller holds the append lock and drops the log afterwards.
    """
    with log.mutex:
        end_state = log.state_if_any()
        if end_state is None:
            return NOTHING_ARCHIVED
        tokens = log.tokens_upto(prepared.archive.last)
        next_seq, tail, size = log.next_seq, log.tail, log.size
    is_replaced = (end_state.uid, end_state.generation) != (prepared.uid, prepared.generation)
    if is_replaced or end_state.floor < prepared.archive.last:  # guard: floor-checked-before-rename
        return NOTHING_ARCHIVED
    head_state = states.copy_state(prepared.states.end)
    head_state.archive = end_state.archive = prepared.archive
    head_state.tokens = end_state.tokens = tokens  # guard: compaction-keeps-tokens
    head_state.generation = end_state.generation
    log_states = LogStates(head_state, prepared.states.next_seq, end_state, next_seq, tail)
    text = compose_log(log_states, log.read_bytes(prepared.live_offset, size), now)
    replace_log(log, text)
    return CompactionResult(
        archived=prepared.message_count, bytes_before=size, bytes_after=len(text)
    )


# --- purge -----------------------------------------------------------------------------------
# A purge of the first messages keeps only messages with the seq `before` or a later one.
# States and changes are not copied: they quote older summaries and idempotency keys.
# Bytes that a void record marks as invalid are not copied either.
# A damaged line after a kept message is newer than this message, so the line is copied unchanged.


def prepare_purge(directory: Directory, folder: int, state: State, before: int) -> list[Archive]:
    """Copy archived messages with the seq `before` or a later one into new archives.

    Return the new archives, the newest first. No state names these archives yet. The caller holds
    the lock of the archive folder, so no other process changes the archives. Raises OSError,
    DamagedStore.
    """
    new_archives: list[Archive] = []
    reference = state.archive
    while reference is not None and reference.last >= before:
        text = archive.read_archive_text(directory, state.uid, reference)
        first_state = next(intact_states(text), None)
        previous = first_state.body.archive if first_state is not None else None
        previous = previous if archive.is_before(previous, reference) else None
        _check_archive_chain(directory, state, reference, previous, before)
        head = states.blank_state(state.key, state.uid, state.generation, state.created)
        head.purged = state.purged
        head.archive = _replacement_archive(previous, state, before)
        new_archive = _replacement_archive(reference, state, before)
        if new_archive is not None:
            state_line = control_line("state", new_archive.first, state.created, head)
            archive.write_archive(
                folder,
                new_archive.name,
                [state_line, remaining_lines(text, before, states.missing_seqs(state))],
            )
            new_archives.append(new_archive)
        reference = previous
    return new_archives


def _replacement_archive(reference: Archive | None, state: State, before: int) -> Archive | None:
    """Return the archive that replaces `reference`; None if no message of `reference` is kept."""
    if reference is None or reference.last < before:
        return None
    first = max(reference.first, before)
    # Use a new name: the old archive stays valid until the log names the new archive.
    name = f"{first}-{reference.last}.{state.generation + 1}.jsonl.gz"
    return Archive(name=name, first=first, last=reference.last)


def _check_archive_chain(
    directory: Directory, state: State, reference: Archive, previous: Archive | None, before: int
) -> None:
    """Raise DamagedStore if the previous archive holds messages to keep and cannot be found."""
    if previous is not None or reference.first <= before:
        return
    wanted_spans = spans.minus([(before, reference.first - 1)], states.missing_seqs(state))
    if wanted_spans:
        path = directory.path / archive.FOLDER / state.uid / reference.name
        raise DamagedStore(
            f"{path} does not name the previous archive, which contains messages to keep; "
            "restore it from a backup, or purge more messages"
        )


def finish_purge(
    log: Log, old_archive: Archive | None, new_archives: Sequence[Archive], before: int, now: str
) -> list[Span] | None:
    """Rewrite the live log without the purged messages; return the seqs of these messages.

    `old_archive` is the newest archive before `prepare_purge`, which returned `new_archives`.
    Returns None if the archives have changed since. The caller holds the append lock and drops the
    log afterwards. Raises OSError.
    """
    newest = new_archives[0] if new_archives else None
    with log.mutex:
        state, last_seq = log.settled_state()
        end_offset = log.end_offset
        tokens = log.tokens_upto(newest.last) if newest is not None else []
    if state.archive != old_archive:
        return None

    def complete_step(step: Undo) -> Undo:
        """Return the complete undo step; for a damaged step, a step that the purge drops."""
        try:
            with log.mutex:
                return log.complete_undo_step(step)
        except DamagedStore:
            return Undo(number=step.number, op=step.op, newly_hidden=[(1, 1)])

    purged_state = states.decide_purge(state, last_seq, before, complete_step)
    purged_state.archive = newest
    purged_state.tokens = [token for token in tokens if token.first >= before]
    first_seq = 1 + (newest.last if newest is not None else min(before - 1, last_seq))
    # Undo steps that are too long for the state are in change records: write these again.
    changes = [
        states.rebuild_change(
            complete_step(step), floor=purged_state.floor, hidden=purged_state.hidden
        )
        for step in purged_state.undo
        if step.elsewhere
    ]
    undo_lines = [control_line("change", first_seq, now, c, joined=True) for c in changes]
    lines = b"".join(undo_lines) + remaining_lines(
        log.read_bytes(0, end_offset), before, states.missing_seqs(purged_state)
    )
    log_states = LogStates(purged_state, first_seq, purged_state, last_seq + 1)
    replace_log(log, compose_log(log_states, lines, now))
    return spans.clipped(states.present_seqs(state, last_seq), 1, before - 1)


def remaining_lines(text: bytes, before: int, excluded: Sequence[Span]) -> bytes:
    """Return the lines of messages with the seq `before` or a later one, unless in `excluded`.

    Unknown records and damaged lines after the first of these messages are kept, too.
    """
    _, damaged = read_records(text, offset=0)
    damaged_offsets = {part.offset for part in damaged if not part.is_void}
    lines: list[bytes] = []
    batch_start = 0
    newest_seq = before - 1
    offset = 0
    for line in lines_with_newlines(text):
        record = parse_line(line.removesuffix(b"\n"))
        records = [record] if record is not None else salvage(line)
        for item in records:
            if (
                isinstance(item, Message)
                and item.seq > newest_seq
                and not spans.contains(excluded, item.seq)
            ):
                newest_seq = item.seq
                part = item._part
                if part is not None and part[0] == 1:
                    batch_start = item.seq
                # If the first line of a batch is dropped, the others are not marked as a batch.
                if part is not None and item.seq - part[0] + 1 != batch_start:
                    part = None
                line_of_item = message_line(
                    item.seq,
                    item._at,
                    item.to_json(),
                    joined=item._joined,
                    part=part,
                    once=item._once,
                )
                lines.append(line_of_item)
            elif isinstance(item, UnknownRecord) and item is record and lines:
                lines.append(line)
        if not records and lines and offset in damaged_offsets and line.endswith(b"\n"):
            lines.append(line)
        offset += len(line)
    return b"".join(lines)
