"""Rewrite a log to a new file of the next generation: after a failed sync, and for compaction.

The old file stays complete until the new file, synced and locked, is renamed to its name.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from msgspec import Struct

from stenolog.codec import LINE_START, control_line, intact, parse_line
from stenolog.records import ChangeRecord, State, StateRecord, VoidRecord
from stenolog.stores import spans
from stenolog.stores.disk import sync_file, write_all
from stenolog.stores.jsonl.directory import create_private_file
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.scan import Tail, lines_of, read_records, scan_log, void_line
from stenolog.stores.state import apply_record, apply_void, blank, copy

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
    """Return the state at the end of these bytes, which begin at the start of the log.

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
    """Copy all bytes before this offset to a new file. Raises OSError, and as `Log.load`."""
    with log.mutex:
        known = log.state_if_any()
    text = log.read(0, upto)
    if known is None or not read_records(text, offset=0)[0]:
        replace_log(log, text)
        return
    found = replay(text, known)
    text = compose_log(
        found.head,
        found.state,
        text,
        at,
        first_seq=found.first_seq,
        next_seq=found.next_seq,
        tail=found.tail,
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
    """Replace the log's file by a new one with this content, durably.

    The caller holds the lock of the old file and releases it afterwards. Raises OSError.
    """
    folder = log.directory.descriptor
    temporary = f".{log.name}.new"
    descriptor = create_private_file(folder, temporary)
    try:
        write_all(descriptor, text)
        sync_file(descriptor)
        # Locked before the rename: no process appends to it before the rename is on the disk.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(temporary, log.name, src_dir_fd=folder, dst_dir_fd=folder)
        log.directory.sync()
    except BaseException:
        # The temporary file must not outlive a purge. After the rename it does not exist.
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        descriptor.release()
