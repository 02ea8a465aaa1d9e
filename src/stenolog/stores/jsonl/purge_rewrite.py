"""Rewrite a log and its archives for a purge: keep only the messages from one seq on.

States and changes are not copied, because they quote older summaries and idempotency keys. Bytes
that a void record marks as invalid are not copied either. A damaged line after a kept message is
copied unchanged: it is newer than that message, so it is not part of what is purged.
"""

import os
from collections.abc import Callable, Sequence

from msgspec import Struct

from stenolog.codec import control_line, message_line, parse_line, salvage
from stenolog.errors import DamagedStore
from stenolog.records import (
    Archive,
    Message,
    Span,
    State,
    Undo,
    UnknownRecord,
)
from stenolog.stores import spans
from stenolog.stores.disk import sync_folder
from stenolog.stores.jsonl import archive
from stenolog.stores.jsonl.directory import Directory
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.rewrite import compose_log, replace_log, states_in
from stenolog.stores.jsonl.scan import lines_of, part_of, read_records
from stenolog.stores.state import blank, change_of_step, decide_purge, missing, present


class PreparedPurge(Struct, frozen=True):
    """New archives of a log, written but not yet named by any state."""

    instead_of: Archive | None
    """The newest of the archives that they replace."""
    newest: Archive | None
    names: frozenset[str]


def prepare(directory: Directory, folder: int, state: State, before: int) -> PreparedPurge:
    """Copy the archived messages from this seq on to new archives. Raises OSError, DamagedStore.

    The caller holds the lock of the archive folder, so no other process changes the archives.
    """
    made: list[Archive] = []
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
            made.append(new)
        named = below
    return PreparedPurge(
        state.archive, made[0] if made else None, frozenset(found.name for found in made)
    )


def _replacement(named: Archive | None, state: State, before: int) -> Archive | None:
    """Return the archive that replaces this one; None if none of its messages is kept."""
    if named is None or named.last < before:
        return None
    first = max(named.first, before)
    # An unused name: the old archive counts until the log names the new one.
    name = f"{first}-{named.last}.{state.generation + 1}.jsonl.gz"
    return Archive(name=name, first=first, last=named.last)


def _check_chain(
    directory: Directory, state: State, named: Archive, below: Archive | None, before: int
) -> None:
    """Raise DamagedStore if the previous archive holds messages to keep and cannot be found."""
    if below is not None or named.first <= before:
        return
    wanted = spans.minus([(before, named.first - 1)], missing(state))
    if wanted:
        path = directory.path / archive.FOLDER / state.uid / named.name
        raise DamagedStore(
            f"{path} does not name the previous archive, which contains messages to keep; "
            "restore it from a backup, or purge more messages"
        )


def finish(
    log: Log, prepared: PreparedPurge, before: int, look_up: Callable[[Undo], Undo], at: str
) -> list[Span] | None:
    """Replace the live log by its remaining part; return the seqs of the purged messages.

    None if the archives have changed since `prepare`. The caller holds the append lock and drops
    the log afterwards. Raises OSError.
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
    """Return the changes that undo steps refer to, because the state has no room for them."""
    lines = []
    for entry in state.undo:
        if entry.elsewhere:
            change = change_of_step(look_up(entry), floor=state.floor, hidden=state.hidden)
            lines.append(control_line("change", seq, at, change, joined=True))
    return b"".join(lines)


def remaining_lines(text: bytes, before: int, gone: Sequence[Span]) -> bytes:
    """Return the lines of the messages from this seq on, without those that are gone already."""
    _, bad = read_records(text, offset=0)
    damaged = {piece.offset for piece in bad if not piece.known}
    lines: list[bytes] = []
    batch = _Batch()
    newest = before - 1
    offset = 0
    for line in lines_of(text):
        record = parse_line(line.removesuffix(b"\n"))
        found = [record] if record is not None else salvage(line)
        for one in found:
            if isinstance(one, Message) and one.seq > newest and not spans.contains(gone, one.seq):
                newest = one.seq
                lines.append(batch.line(one))
            elif isinstance(one, UnknownRecord) and one is record and lines:
                lines.append(line)
        # guard: purge-drops-void-bytes
        if not found and lines and offset in damaged and line.endswith(b"\n"):
            lines.append(line)
        offset += len(line)
    return b"".join(lines)


class _Batch:
    """Current batch: decides whether a line may keep its mark as part of a batch."""

    def __init__(self) -> None:
        self._first = 0

    def line(self, message: Message) -> bytes:
        """Return the line of a message, as part of a batch only if the batch's first is kept."""
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


def delete_others(folder: int, keep: frozenset[str]) -> None:
    """Delete all files except `keep` in a folder of archives.

    The caller holds the lock of the folder. Raises OSError.
    """
    with os.scandir(folder) as found:
        others = [entry.name for entry in found if entry.name not in keep]
    for name in others:
        os.unlink(name, dir_fd=folder)
    if others:
        sync_folder(folder)


def remove_archives(directory: Directory, folder: int, uid: str) -> None:
    """Delete the archives of a purged session, and their folder. Raises OSError."""
    delete_others(folder, frozenset())
    above = directory.subfolder(archive.FOLDER, create=False)
    if above is not None:
        try:
            os.rmdir(uid, dir_fd=above)
            sync_folder(above)
        finally:
            above.close()
