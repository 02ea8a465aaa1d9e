"""Read snapshots of sessions from logs (stores/snapshots.py).

A snapshot is read through a separate descriptor, so that no writer waits for the reader.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from operator import attrgetter
from typing import Final

from stenolog.codec import parse_line
from stenolog.errors import (
    DamagedStore,
    ForeignLog,
    NoSuchSession,
    StenologError,
    StoreBusy,
    StoreUnavailable,
)
from stenolog.records import Message, State, Token, Undo, timestamp
from stenolog.stores import file_names, spans
from stenolog.stores import state as states
from stenolog.stores.disk import release_lock, sync_file
from stenolog.stores.jsonl import archive, trash
from stenolog.stores.jsonl.directory import Directory, system_errors
from stenolog.stores.jsonl.log import Log, chunk_starts
from stenolog.stores.jsonl.scan import has_void_control_record, read_records
from stenolog.stores.snapshots import SnapshotMark, SnapshotReading, snapshot_of

_MAX_ATTEMPTS: Final = 100
"""Maximum number of attempts to find a session that is repeatedly deleted and restored."""
_BLOCK_BYTES: Final = 4 * 1024 * 1024


# --- list of sessions ------------------------------------------------------------------------


def list_snapshots(directory: Directory) -> list[SnapshotMark]:
    """Return a mark for each session: deleted sessions by key, then live sessions by key.

    Files of other programs and unfinished first writes are skipped.
    """
    deleted_marks = _read_deleted_marks(directory, set())
    names = [name for name in directory.list_names() if name.endswith(file_names.LOG_SUFFIX)]
    live_marks = [mark for name in names if (mark := _read_live_mark(directory, name)) is not None]
    # A session that was deleted between the two lists may be in neither of them.
    listed_uids = {mark.uid for mark in (*deleted_marks, *live_marks)}
    deleted_marks += _read_deleted_marks(directory, listed_uids)
    sort_key = attrgetter("key", "uid")
    return sorted(deleted_marks, key=sort_key) + sorted(live_marks, key=sort_key)


def _read_deleted_marks(directory: Directory, listed_uids: Set[str]) -> list[SnapshotMark]:
    """Return a mark for each session in the trash, except sessions that are listed already."""
    marks = []
    for entry in trash.list_entries(directory):
        if entry.uid in listed_uids:
            continue
        problem = ""
        try:
            key = trash.read_key(directory, entry)
        except StoreUnavailable as error:
            key, problem = entry.path, str(error)  # only the unreadable file has the real key
        if key is not None and directory.file_status(entry.path) is not None:
            deletion_time = timestamp(entry.deleted)
            mark = SnapshotMark(key=key, uid=entry.uid, deleted=deletion_time, problem=problem)
            marks.append(mark)
    return marks


def _read_live_mark(directory: Directory, name: str) -> SnapshotMark | None:
    """Return the mark of the session in a live log; None if the file holds no session."""
    try:
        key = file_names.key_of_log(name) or _read_long_key(directory, name)
        descriptor = None if key is None else directory.open_log(name)
        if key is None or descriptor is None:
            return None
        log = Log(directory, name, key, descriptor)
        with log.mutex:
            log.load(log.file_size())
            uid = log.known_state().uid if log.exists else None
        return None if uid is None else SnapshotMark(key=key, uid=uid)
    except ForeignLog:
        return None
    except (DamagedStore, OSError, StoreUnavailable) as error:
        problem = str(error) if isinstance(error, StoreUnavailable) else ""
        key = file_names.key_of_log(name) or name
        return SnapshotMark(key=key, uid="", problem=problem)


def _read_long_key(directory: Directory, name: str) -> str | None:
    if not file_names.has_long_key(name):
        return None
    head = trash.read_head_state(directory, name)
    return head.key if head is not None and file_names.log_name(head.key) == name else None


def file_stamp(status: os.stat_result) -> str:
    """Return the change stamp of a file."""
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


# --- one session -----------------------------------------------------------------------------


@contextmanager
def read_session(
    directory: Directory,
    mark: SnapshotMark,
    synced_stamps: dict[str, str],
    *,
    after: int,
    until: float,
) -> Iterator[SnapshotReading]:
    """Read one session. Raises NoSuchSession, StoreBusy, DamagedStore, StoreUnavailable.

    `synced_stamps`: change stamps of logs that this process has synced, by file name.
    """
    with (
        _open_session_log(directory, mark, until) as log,
        system_errors(f"reading {mark.key!r}"),
    ):
        reading = _read_log(log, after)
        # A power cut must not remove messages that were copied.
        stamp = file_stamp(os.fstat(log.descriptor))
        if not directory.read_only and synced_stamps.get(log.name) != stamp:
            sync_file(log.descriptor)
            synced_stamps[log.name] = stamp
        yield reading


@contextmanager
def _open_session_log(directory: Directory, mark: SnapshotMark, until: float) -> Iterator[Log]:
    """Open and read the log of a session, which is under its key or in the trash.

    Raises NoSuchSession.
    """
    with ExitStack() as stack:
        for _ in range(_MAX_ATTEMPTS):
            log = _open_live_log(stack, directory, mark, until)
            entries = trash.list_entries(directory) if log is None else []
            entry = next((entry for entry in entries if entry.uid == mark.uid), None)
            if entry is not None:
                log = stack.enter_context(trash.open_deleted_log(directory, entry))
            if log is not None:
                break
        if log is None:
            raise NoSuchSession(mark.key, "it was purged, or restored under another key")
        yield log


def _open_live_log(
    stack: ExitStack, directory: Directory, mark: SnapshotMark, until: float
) -> Log | None:
    """Return the live log of the key if it holds this session, otherwise None.

    The `stack` closes the log.
    """
    name = file_names.log_name(mark.key)
    while True:
        descriptor = directory.open_log(name)
        if descriptor is None:
            return None
        log = Log(directory, name, mark.key, descriptor)
        stack.callback(log.release)
        with system_errors(f"reading {mark.key!r}"):
            if log.is_same_file(directory.file_status(name)):
                with log.mutex:
                    log.load(log.file_size())
                    if log.exists and log.known_state().uid == mark.uid:
                        return log
                log.release()
                return None
        log.release()
        if time.monotonic() > until:
            raise StoreBusy(f"other processes keep replacing the log of {mark.key!r}; try again")


def _read_log(log: Log, after: int) -> SnapshotReading:
    """Return the snapshot of an open log. Raises OSError, DamagedStore."""
    with log.mutex, _without_writer(log) as is_settled:
        log.ensure_loaded()
        if is_settled:
            state, last_seq = log.settled_state()
        else:
            # An incomplete record may be a write in progress, so it does not count yet.
            state, last_seq = states.copy_state(log.known_state()), log.next_seq - 1
        lost_tokens = [
            Token(token.token, token.first, token.count, "")
            for token in (log.tokens_upto(last_seq) if state.lost else ())
            if spans.contains(state.lost, token.first)
        ]
        updated = max(log.updated, state.created)
    state.key = log.key
    return SnapshotReading(
        snapshot=snapshot_of(
            state,
            last_seq=last_seq,
            updated=updated,
            undo=_readable_steps(log, state),
            deleted=_deletion_time(log),
            tokens=lost_tokens,
        ),
        messages=messages_after(log, state, last_seq, after),
        is_damaged=lambda: _is_damaged(log),
    )


@contextmanager
def _without_writer(log: Log) -> Iterator[bool]:
    """Yield whether no write is in progress. Writers wait until the `with` ends.

    A log without an incomplete last record is not locked; nor is a log of a read-only store, where
    an incomplete record counts as void. The caller holds the mutex of the log.
    """
    if log.tail is None or log.directory.read_only:
        yield True
        return
    try:
        fcntl.flock(log.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    try:
        log.load(log.file_size())
        yield True
    finally:
        release_lock(log.descriptor)


def _is_damaged(log: Log) -> bool:
    with log.mutex:
        live_part = log.all_messages(after=0)
        if live_part.archived_from:
            log.add_archived_messages(live_part, log.read_archives(live_part))
        info = log.info()  # counts the damage that the reads above found
    content = log.read_bytes(0, log.file_size())
    return bool(info.damaged or info.lost) or has_void_control_record(content)


def _deletion_time(log: Log) -> str | None:
    entry = trash.parse_entry(log.name.removeprefix(f"{trash.FOLDER}/"))
    return None if entry is None else timestamp(entry.deleted)


def _readable_steps(log: Log, state: State) -> list[Undo]:
    """Return the complete undo steps after the last damaged step, which blocks earlier steps."""
    change_numbers = {step.number for step in state.undo if step.elsewhere}
    if not change_numbers:
        return list(state.undo)
    with log.mutex:
        stored_steps = log.undo_steps(change_numbers)
    steps: list[Undo] = []
    for step in state.undo:
        if step.elsewhere and step.number not in stored_steps:
            steps = []
        else:
            steps.append(stored_steps.get(step.number, step) if step.elsewhere else step)
    return steps


# --- messages --------------------------------------------------------------------------------


def messages_after(log: Log, state: State, end: int, after: int) -> Iterator[Message]:
    """Yield the readable messages after seq `after` up to seq `end`, including archived ones."""
    missing_spans = states.missing_seqs(state)
    newest_seq = after
    for message in _read_messages(log, state, after):
        if newest_seq < message.seq <= end and not (
            missing_spans and spans.contains(missing_spans, message.seq)
        ):
            newest_seq = message.seq
            yield message


def _read_messages(log: Log, state: State, after: int) -> Iterator[Message]:
    if state.archive is not None and after < state.archive.last:
        yield from _read_archived_messages(log, state, after)
    for start, block in _read_live_blocks(log, after):
        records, _ = read_records(block, offset=start)
        for record in records:
            if type(record) is Message:
                yield record


def _read_archived_messages(log: Log, state: State, after: int) -> Iterator[Message]:
    """Yield the messages of the archives, oldest first, with one archive in memory at a time."""
    archives = archive.archive_chain(log.directory, state, after + 1)
    newest_content = next(archives)
    earlier_archives = []
    for content in archives:
        earlier_archives.append(content.reference)
        _check_not_replaced(log, content)
    _check_not_replaced(log, newest_content)
    for reference in reversed(earlier_archives):
        yield from archive.read_archive(log.directory, state.uid, reference).messages
    yield from newest_content.messages


def _check_not_replaced(log: Log, content: archive.ArchiveContent) -> None:
    """Raise StoreBusy if an archive is missing because the log was replaced."""
    if not content.damaged or log.name.startswith(f"{trash.FOLDER}/"):
        return
    with suppress(StenologError):
        if log.is_same_file(log.directory.file_status(log.name)):
            return
    raise StoreBusy(f"the log of {log.key!r} was replaced while it was read; try again")


def _read_live_blocks(log: Log, after: int) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of complete lines of the live log, each with its offset.

    Blocks that contain only messages up to the seq `after` may be left out.
    """
    with log.mutex:
        log.ensure_loaded()
        end_offset = log.end_offset
    start = _find_start_offset(log, after, end_offset) if after else 0
    while start < end_offset:
        length = _BLOCK_BYTES
        while True:
            block = log.read_bytes(start, min(start + length, end_offset))
            if start + len(block) >= end_offset:
                break
            block_end = block.rfind(b"\n") + 1
            if block_end:
                block = block[:block_end]
                break
            length *= 4
        if not block:
            return
        yield start, block
        start += len(block)


def _find_start_offset(log: Log, after: int, end: int) -> int:
    """Return the offset of a line before the first message with a seq greater than `after`.

    Seqs grow towards the end of a log, so the search reads backwards from the end.
    """
    for start in chunk_starts(end):
        if start == 0:
            break
        text = log.read_bytes(start, end)
        line_start = text.find(b"\n") + 1
        newline = text.find(b"\n", line_start)
        record = parse_line(text[line_start:newline]) if 0 < line_start < newline else None
        if record is not None and record.seq <= after:
            return start + line_start
    return 0
