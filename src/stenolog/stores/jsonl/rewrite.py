"""Rewrite a log as a new file of the next generation: after a failed sync, to compact or to purge.

The old file stays complete until the new file is synced, locked and renamed.
"""

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from msgspec import Struct

from stenolog.codec import (
    LINE_START,
    control_line,
    intact,
    message_line,
    parse_line,
    salvage,
)
from stenolog.errors import DamagedStore
from stenolog.records import (
    Archive,
    ChangeRecord,
    Compacted,
    Message,
    Span,
    State,
    StateRecord,
    Undo,
    UnknownRecord,
    VoidRecord,
)
from stenolog.stores import spans
from stenolog.stores.disk import sync_file, write_all
from stenolog.stores.jsonl import archive
from stenolog.stores.jsonl.directory import Directory, create_private_file
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.scan import Tail, lines_of, part_of, read_records, scan_log, void_line
from stenolog.stores.state import (
    apply_record,
    apply_void,
    blank,
    change_of_step,
    copy,
    decide_purge,
    missing,
    present,
)

_STATE: Final = LINE_START + b'state"'


class ReplayResult(Struct, frozen=True):
    """Result of applying the records of a log from its first line on."""

    head: State
    """State at the start of the file."""
    first_seq: int
    """Next seq at the start of the file."""
    state: State
    next_seq: int
    tail: Tail | None


def replay(text: bytes, known: State, *, proven: bool = False) -> ReplayResult:
    """Return the state after the records in `text`, which begins at the start of the log.

    `known` is the current state, for a log whose first states are damaged. `proven` means that a
    later record proves that all these bytes were synced.
    """
    first = next(iter(read_records(text, offset=0)[0]), None)
    head = next(states_in(text), None)
    if head is None or first is None or first.seq < head.seq:
        head = _first_state(known)
    scan = scan_log(text, offset=0, next_seq=head.seq, proven=proven)
    state = copy(head.body)
    for record in scan.records:
        if isinstance(record, StateRecord | ChangeRecord | VoidRecord):
            state = apply_record(state, record)
    lost = spans.union(scan.lost, scan.tail.lost if scan.tail else [])
    state.lost = spans.union(state.lost, spans.minus(lost, state.purged))
    begins = copy(head.body)
    begins.deleted_as = None
    return ReplayResult(begins, head.seq, state, scan.next_seq, scan.tail)


def _first_state(known: State) -> StateRecord:
    """Return the probable first state of a log, derived from its current state."""
    state = blank(known.key, known.uid, known.generation, known.created)
    state.archive, state.purged, state.forked_from = known.archive, known.purged, known.forked_from
    state.floor = known.archive.last if known.archive is not None else 0
    return StateRecord(seq=state.floor + 1, at=known.created, body=state)


def states_in(text: bytes) -> Iterator[StateRecord]:
    """Yield the intact states in order."""
    start = text.find(_STATE)
    while start >= 0:
        newline = text.find(b"\n", start)
        record = parse_line(text[start : newline if newline >= 0 else len(text)])
        if isinstance(record, StateRecord):
            yield record
        start = text.find(_STATE, start + 1)


def without_states(text: bytes) -> bytes:
    """Return the same lines, byte for byte, without the state records."""
    if _STATE not in text:  # guard: compaction-drops-old-states
        return text
    return b"".join(
        line
        for line in lines_of(text)
        if not (line.startswith(_STATE) and intact(line.removesuffix(b"\n")))
    )


def rewrite_log(log: Log, upto: int, at: str) -> None:
    """Copy all bytes before this offset to a new file.

    Raises OSError and the errors of `Log.load`.
    """
    with log.mutex:
        known = log.state_if_any()
    text = log.read(0, upto)
    if known is None or not read_records(text, offset=0)[0]:
        replace_log(log, text)
        return
    replayed = replay(text, known)
    text = compose_log(
        replayed.head,
        replayed.state,
        text,
        at,
        first_seq=replayed.first_seq,
        next_seq=replayed.next_seq,
        tail=replayed.tail,
    )
    replace_log(log, text)


def compose_log(
    head: State,
    end: State,
    lines: bytes,
    at: str,
    *,
    first_seq: int,
    next_seq: int,
    tail: Tail | None,
) -> bytes:
    """Return a complete log of the next generation: head state twice, lines, end state."""
    head, end = copy(head), copy(end)
    head.generation = end.generation = end.generation + 1
    parts = [
        control_line("state", first_seq, at, head),
        control_line("state", first_seq, at, head, joined=True),
        without_states(lines),
    ]
    if tail is not None:
        parts.append(void_line(tail, at))
        apply_void(end, tail.as_void())
        next_seq = tail.next_seq
    elif lines and not lines.endswith(b"\n"):
        parts.append(b"\n")
    parts.append(control_line("state", next_seq, at, end))
    return b"".join(parts)


def replace_log(log: Log, text: bytes) -> None:
    """Replace the log's file by a new file with this content, durably.

    The caller holds the lock of the old file and releases the lock afterwards. Raises OSError.
    """
    folder = log.directory.descriptor
    temporary = f".{log.name}.new"
    descriptor = create_private_file(folder, temporary)
    try:
        write_all(descriptor, text)
        sync_file(descriptor)
        # Lock the new file before the rename, so that no process appends before the rename is on
        # the disk.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(temporary, log.name, src_dir_fd=folder, dst_dir_fd=folder)
        log.directory.sync()
    except BaseException:
        # The temporary file must not outlive a purge. The rename has removed its temporary name.
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        descriptor.release()


# --- compaction ------------------------------------------------------------------------------
#
# Moves the hidden first lines of a log into an archive while writers keep writing. The first step
# writes the archive under a separate lock. The second step replaces the live file under the append
# lock, and only if the log was not replaced since and its floor still covers the archived messages.
# A crash between the two steps leaves the log unchanged, and an archive that no state names.

NOTHING_ARCHIVED = Compacted(archived=0, bytes_before=0, bytes_after=0)


class PreparedArchive(Struct, frozen=True):
    """A finished archive, with the values needed to remove its lines from the live log."""

    uid: str
    generation: int
    cut: int
    """Offset of the first line that stays in the live log."""
    named: Archive
    as_of_cut: ReplayResult
    count: int


def find_cut(text: bytes, floor: int) -> tuple[int, int, int]:
    """Return the end offset of the lines up to the floor, their last seq and number of messages."""
    offset = cut = last = count = seen_count = newest = 0
    for line in lines_of(text):
        offset += len(line)
        record = parse_line(line.removesuffix(b"\n"))
        if not isinstance(record, Message):
            continue
        if record.seq > floor:
            break
        if record.seq <= newest:
            continue  # the line is a second copy of the message
        newest = record.seq
        seen_count += 1
        part = part_of(record)
        if part is None or part[0] == part[1]:
            cut, last, count = offset, record.seq, seen_count
    return cut, last, count


def prepare_archive(log: Log, folder: int) -> PreparedArchive | None:
    """Write the archive; return None if no message is to be moved. Raises OSError."""
    with log.mutex:
        log.check_known()
        state, size = copy(log.known_state()), log.end
        first = log.first_live()
    if state.floor < first:
        return None
    text = log.read(0, size)
    cut, last, count = find_cut(text, state.floor)
    if cut == 0:
        return None
    named = Archive(name=f"{first}-{last}.jsonl.gz", first=first, last=last)
    # The change that hides these lines was written only after the lines were synced.
    as_of_cut = replay(text[:cut], state, proven=True)
    moved = text[:cut]
    # guard: archive-chain-twice
    if not any(record.body.archive == state.archive for record in states_in(moved)):
        # The states that name the previous archive are damaged. Keep the chain of archives
        # connected.
        moved = control_line("state", first, state.created, as_of_cut.head) + moved
    archive.write(folder, named.name, [moved])
    return PreparedArchive(state.uid, state.generation, cut, named, as_of_cut, count)


def finish_compaction(log: Log, prepared: PreparedArchive, at: str) -> Compacted:
    """Replace the live file by a file without the archived lines. Raises OSError.

    The caller holds the append lock and drops the log afterwards.
    """
    with log.mutex:
        log.check_known()
        end = log.state_if_any()
        if end is None:
            return NOTHING_ARCHIVED
        tokens = log.tokens_upto(prepared.named.last)
        next_seq, tail, size = log.next_seq, log.tail, log.size
    moved = (end.uid, end.generation) != (prepared.uid, prepared.generation)
    if moved or end.floor < prepared.named.last:  # guard: floor-checked-before-rename
        return NOTHING_ARCHIVED
    head = copy(prepared.as_of_cut.state)
    head.archive = end.archive = prepared.named
    head.tokens = end.tokens = tokens  # guard: compaction-keeps-tokens
    head.generation = end.generation
    text = compose_log(
        head,
        end,
        log.read(prepared.cut, size),
        at,
        first_seq=prepared.as_of_cut.next_seq,
        next_seq=next_seq,
        tail=tail,
    )
    replace_log(log, text)
    return Compacted(archived=prepared.count, bytes_before=size, bytes_after=len(text))


# --- purge -----------------------------------------------------------------------------------
# Keeps only the messages from one seq on. States and changes are not copied, because they quote
# older summaries and idempotency keys. Bytes that a void record marks as invalid are not copied
# either. A damaged line after a kept message is copied unchanged: such a line is newer than the
# kept message, so the purge does not cover it.


class PreparedPurge(Struct, frozen=True):
    """New archives of a log, written but not yet named by any state."""

    instead_of: Archive | None
    """The newest of the archives that the new archives replace."""
    newest: Archive | None
    names: frozenset[str]


def prepare_purge(directory: Directory, folder: int, state: State, before: int) -> PreparedPurge:
    """Copy the archived messages from this seq on to new archives. Raises OSError, DamagedStore.

    The caller holds the lock of the archive folder, so no other process changes the archives.
    """
    archives: list[Archive] = []
    named = state.archive
    while named is not None and named.last >= before:
        text = archive.read_text(directory, state.uid, named)
        older = next(states_in(text), None)
        below = older.body.archive if older is not None else None
        if below is not None and not archive.is_before(below, named):
            below = None
        _check_chain(directory, state, named, below, before)
        head = blank(state.key, state.uid, state.generation, state.created)
        head.purged = state.purged
        head.archive = _replacement(below, state, before)
        new = _replacement(named, state, before)
        if new is not None:
            first = control_line("state", new.first, state.created, head)
            archive.write(folder, new.name, [first, remaining_lines(text, before, missing(state))])
            archives.append(new)
        named = below
    return PreparedPurge(
        state.archive, archives[0] if archives else None, frozenset(item.name for item in archives)
    )


def _replacement(named: Archive | None, state: State, before: int) -> Archive | None:
    """Return the archive that replaces `named`; None if no message of `named` is kept."""
    if named is None or named.last < before:
        return None
    first = max(named.first, before)
    # Use a new name: the old archive counts until the log names the new archive.
    name = f"{first}-{named.last}.{state.generation + 1}.jsonl.gz"
    return Archive(name=name, first=first, last=named.last)


def _check_chain(
    directory: Directory, state: State, named: Archive, below: Archive | None, before: int
) -> None:
    """Raise DamagedStore if the previous archive holds messages to keep and cannot be found."""
    if below is not None or named.first <= before:
        return
    wanted_spans = spans.minus([(before, named.first - 1)], missing(state))
    if wanted_spans:
        path = directory.path / archive.FOLDER / state.uid / named.name
        raise DamagedStore(
            f"{path} does not name the previous archive, which contains messages to keep; "
            "restore it from a backup, or purge more messages"
        )


def finish_purge(
    log: Log, prepared: PreparedPurge, before: int, look_up: Callable[[Undo], Undo], at: str
) -> list[Span] | None:
    """Replace the live log by its remaining part; return the seqs of the purged messages.

    Returns None if the archives have changed since `prepare_purge`. The caller holds the append
    lock and drops the log afterwards. Raises OSError.
    """
    with log.mutex:
        log.check_known()
        state, end = log.settled_state()
        consumed = log.end
        tokens = log.tokens_upto(prepared.newest.last) if prepared.newest is not None else []
    if state.archive != prepared.instead_of:
        return None
    after = decide_purge(state, end, before, look_up)
    after.archive = prepared.newest
    after.tokens = [token for token in tokens if token.first >= before]  # guard: purge-drops-tokens
    first = 1 + (prepared.newest.last if prepared.newest is not None else min(before - 1, end))
    lines = _changes(after, first, look_up, at)
    lines += remaining_lines(log.read(0, consumed), before, missing(after))
    replace_log(
        log, compose_log(after, after, lines, at, first_seq=first, next_seq=end + 1, tail=None)
    )
    return spans.clipped(present(state, end), 1, before - 1)


def _changes(state: State, seq: int, look_up: Callable[[Undo], Undo], at: str) -> bytes:
    """Return the changes with the undo steps that are too long for the state."""
    lines = []
    for entry in state.undo:
        if entry.elsewhere:
            change = change_of_step(look_up(entry), floor=state.floor, hidden=state.hidden)
            lines.append(control_line("change", seq, at, change, joined=True))
    return b"".join(lines)


def remaining_lines(text: bytes, before: int, gone: Sequence[Span]) -> bytes:
    """Return the lines of the messages from this seq on, except messages that are `gone`."""
    _, bad = read_records(text, offset=0)
    damaged = {piece.offset for piece in bad if not piece.known}
    lines: list[bytes] = []
    batch = _KeptBatch()
    newest = before - 1
    offset = 0
    for line in lines_of(text):
        record = parse_line(line.removesuffix(b"\n"))
        records = [record] if record is not None else salvage(line)
        for item in records:
            if (
                isinstance(item, Message)
                and item.seq > newest
                and not spans.contains(gone, item.seq)
            ):
                newest = item.seq
                lines.append(batch.line(item))
            elif isinstance(item, UnknownRecord) and item is record and lines:
                lines.append(line)
        # guard: purge-drops-void-bytes
        if not records and lines and offset in damaged and line.endswith(b"\n"):
            lines.append(line)
        offset += len(line)
    return b"".join(lines)


class _KeptBatch:
    """The current batch. It decides whether a line keeps its mark as part of a batch."""

    def __init__(self) -> None:
        self._first = 0

    def line(self, message: Message) -> bytes:
        """Return the line of a message.

        The line is marked as part of a batch if the batch's first line is kept.
        """
        part = part_of(message)
        if part is not None and part[0] == 1:
            self._first = message.seq
        if part is not None and message.seq - part[0] + 1 != self._first:
            part = None
        return message_line(
            message.seq,
            message._at,
            message.to_json(),
            joined=message._joined,
            part=part,
            once=message._once,
        )
