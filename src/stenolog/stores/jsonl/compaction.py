"""Compaction: move the hidden first lines of a log into an archive while writers keep writing.

The first step writes the archive under a separate lock. The second step replaces the live file
under the append lock, and only if the log was not replaced since and its floor still covers the
archived messages. A crash between the two steps leaves the log unchanged, and an archive that
no state names.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from stenolog.codec import control_line, parse_line
from stenolog.records import Archive, Compacted, Message
from stenolog.stores.jsonl import archive
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.open_logs import flock
from stenolog.stores.jsonl.rewrite import ReplayResult, compose_log, replace_log, replay, states_in
from stenolog.stores.jsonl.scan import lines_of, part_of
from stenolog.stores.state import copy

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
    offset = cut = last = count = seen = newest = 0
    for line in lines_of(text):
        offset += len(line)
        record = parse_line(line.removesuffix(b"\n"))
        if not isinstance(record, Message):
            continue
        if record.seq > floor:
            break
        if record.seq <= newest:
            continue  # a second copy of the message
        newest = record.seq
        seen += 1
        part = part_of(record)
        if part is None or part[0] == part[1]:
            cut, last, count = offset, record.seq, seen
    return cut, last, count


def prepare(log: Log, folder: int) -> PreparedArchive | None:
    """Write the archive; return None if there is nothing to move. Raises OSError."""
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
    # A change hides these lines, and it was written only after they were synced.
    as_of_cut = replay(text[:cut], state, proven=True)
    moved = text[:cut]
    # guard: archive-chain-twice
    if not any(found.body.archive == state.archive for found in states_in(moved)):
        # The states that name the previous archive are damaged; keep the chain connected.
        moved = control_line("state", first, state.created, as_of_cut.head) + moved
    archive.write(folder, named.name, [moved])
    return PreparedArchive(state.uid, state.generation, cut, named, as_of_cut, count)


def finish(log: Log, prepared: PreparedArchive, at: str) -> Compacted:
    """Replace the live file by one without the archived lines. Raises OSError.

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


@contextmanager
def locked_archives(directory: Directory, uid: str, deadline: float) -> Iterator[int | None]:
    """Lock the folder of a session's archives; create the folder if it does not exist.

    Yields None if a purge has removed the folder. Raises OSError, StoreBusy.
    """
    folder = directory.subfolder(archive.FOLDER, uid, create=True)
    if folder is None:
        yield None
        return
    try:
        flock(folder, deadline, f"the archive folder of the session {uid}")
        # A purge removes the folder while it holds this lock.
        yield folder if os.fstat(folder).st_nlink else None
    finally:
        folder.release()
