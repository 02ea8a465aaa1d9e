"""The doctor's repairs. No data is deleted: bytes are marked as void, or files are moved.

Every repair checks its finding again under the lock of the log, because another process may have
repaired the log, or the finding may have been a write in progress.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from stenolog.codec import control_line, correct_checksum, parse_line, plain_line, plain_message
from stenolog.errors import StenologError
from stenolog.maintenance.log_damage import ASIDE_FOLDER, Kind, examine_log
from stenolog.maintenance.workspace_check import (
    BUSY_TIMEOUT_SECONDS,
    examine_folder,
    lock_archives,
    lock_log,
    read_file,
    unreferenced_archives,
)
from stenolog.records import Message, Record, Span, StateRecord, VoidRecord, timestamp
from stenolog.sessions.folders import check_workspace, log_folders
from stenolog.stores import spans
from stenolog.stores.admin import Finding, RepairResult
from stenolog.stores.disk import open_descriptor, sync_file, sync_folder, write_all
from stenolog.stores.jsonl import rewrite, scan, trash, writer
from stenolog.stores.jsonl.directory import Directory, system_errors
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.open_logs import OpenLogCache
from stenolog.stores.open_store import parse_address
from stenolog.stores.state import copy_state

_ALREADY_FIXED = "nothing to do: already fixed"


def repair(workspace: str | os.PathLike[str]) -> list[RepairResult]:
    """Examine a workspace and repair the repairable findings. A database has none.

    Raises the errors of `examine`.
    """
    return _repair_findings(
        workspace,
        lambda findings: [finding for finding in findings if finding.repairable],
        _repair_finding,
    )


def accept(workspace: str | os.PathLike[str]) -> list[RepairResult]:
    """Accept the lines that were edited by hand. A copy of the edited log is kept in `aside`.

    All edits of a log are accepted together, with one result. Raises the errors of `examine`.
    """
    return _repair_findings(workspace, _select_hand_edits, _accept_edits)


def _select_hand_edits(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for each session with hand edits, without sessions in the trash."""
    edits = [f for f in findings if f.kind is Kind.HAND_EDIT and f"/{trash.FOLDER}/" not in f.path]
    return list({f.key: f for f in edits if f.key is not None}.values())


class _LogFolder(msgspec.Struct, frozen=True):
    """A folder of logs that is being repaired."""

    path: str
    """Path below the workspace, as in findings."""
    directory: Directory


def _repair_findings(
    workspace: str | os.PathLike[str],
    choose_findings: Callable[[Iterable[Finding]], list[Finding]],
    repair_finding: Callable[[_LogFolder, Finding], str],
) -> list[RepairResult]:
    address = parse_address(workspace)
    if address.engine != "jsonl":
        return []
    workspace_path = Path(address.path)
    check_workspace(workspace_path)
    results: list[RepairResult] = []
    for path in log_folders(workspace_path):
        findings = choose_findings(examine_folder(workspace_path, path).findings)
        if findings:
            with closing(Directory(workspace_path / path, read_only=False)) as directory:
                folder = _LogFolder(path, directory)
                results += [_try_repair(folder, finding, repair_finding) for finding in findings]
    return results


def _try_repair(
    folder: _LogFolder, finding: Finding, repair_finding: Callable[[_LogFolder, Finding], str]
) -> RepairResult:
    try:
        with system_errors(f"repairing {finding.path}"):
            return RepairResult(finding=finding, done=True, message=repair_finding(folder, finding))
    except StenologError as error:
        return RepairResult(finding=finding, done=False, message=str(error))


# --- repairing -------------------------------------------------------------------------------


def _repair_finding(folder: _LogFolder, finding: Finding) -> str:
    directory = folder.directory
    *path_below, name = finding.path.removeprefix(f"{folder.path}/").split("/")
    if path_below:
        return _move_archive(folder, path_below[-1], name, finding.key)
    with lock_log(directory, name) as descriptor:
        if descriptor is None:
            return _ALREADY_FIXED
        log_report = examine_log(read_file(descriptor), name)
        if log_report.state is None:
            if any(finding.repairable for finding in log_report.findings):
                return _move_aside(folder, directory.descriptor, name)
            return _ALREADY_FIXED
    return _mark_tail_void(directory, log_report.state.key)


def _mark_tail_void(directory: Directory, key: str) -> str:
    """Mark invalid bytes at the end of the log as void.

    The store's writer does this before each append; here, it appends nothing.
    """
    with _lock_open_log(directory, key) as log:
        if log is None:
            return _ALREADY_FIXED
        with log.mutex:
            if log.tail is None:
                return _ALREADY_FIXED
        _, write_outcome = writer.append_batches(log, [])
        if write_outcome.error is not None:
            raise write_outcome.failure(f"marking the tail of {key!r} as void")
    return "marked as void; its bytes are still in the file"


@contextmanager
def _lock_open_log(directory: Directory, key: str) -> Iterator[Log | None]:
    log_cache = OpenLogCache(directory, busy_timeout=BUSY_TIMEOUT_SECONDS, cache_bytes=0)
    try:
        yield log_cache.lock(key, create=False)
    finally:
        log_cache.unlock(key)
        log_cache.close()


def _move_archive(folder: _LogFolder, uid: str, name: str, key: str | None) -> str:
    with lock_archives(folder.directory, uid) as archives:
        if archives is None:
            return _ALREADY_FIXED
        if name not in unreferenced_archives(folder.directory, archives, uid, key):
            return _ALREADY_FIXED
        return _move_aside(folder, archives, name, prefix=f"{uid}-")


def _move_aside(folder: _LogFolder, source: int, name: str, *, prefix: str = "") -> str:
    """Move a file from the folder `source` into the folder `aside`, durably."""
    with _open_aside(folder.directory) as aside:
        target = f"{prefix}{name}.{_unique_time_text()}"
        try:
            os.rename(name, target, src_dir_fd=source, dst_dir_fd=aside)
        except FileNotFoundError:
            return _ALREADY_FIXED
        sync_folder(aside)
        sync_folder(source)
    return f"moved to {folder.path}/{ASIDE_FOLDER}/{target}"


@contextmanager
def _open_aside(directory: Directory) -> Iterator[int]:
    folder = directory.subfolder(ASIDE_FOLDER, create=True)
    if folder is None:
        raise FileNotFoundError(directory.path / ASIDE_FOLDER)
    with closing(folder):
        yield folder


def _unique_time_text() -> str:
    """Return the current time with microseconds, so that file names in `aside` are unique."""
    return writer.now().replace(":", "")


# --- accepting -------------------------------------------------------------------------------


def _accept_edits(folder: _LogFolder, finding: Finding) -> str:
    if finding.key is None:
        return _ALREADY_FIXED
    with _lock_open_log(folder.directory, finding.key) as log:
        if log is None:
            return _ALREADY_FIXED
        with log.mutex:
            size, state = log.size, copy_state(log.known_state())
        content = log.read_bytes(0, size)
        fixed_log = fix_edits(content, last_seq=0 if state.archive is None else state.archive.last)
        if fixed_log is None:
            return _ALREADY_FIXED
        copy_name = _write_copy_aside(folder.directory, log.name, content)
        new_log = rewrite.compose_log(rewrite.replay(fixed_log, state), fixed_log, writer.now())
        rewrite.replace_log(log, new_log)
    return f"accepted; the previous log is {folder.path}/{ASIDE_FOLDER}/{copy_name}"


def _write_copy_aside(directory: Directory, name: str, content: bytes) -> str:
    """Write these bytes into the folder `aside`, durably, and return the file name."""
    target = f"{name}.{_unique_time_text()}"
    with _open_aside(directory) as aside:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with closing(open_descriptor(target, flags, dir_fd=aside)) as descriptor:
            write_all(descriptor, content)
            sync_file(descriptor)
        sync_folder(aside)
    return target


def fix_edits(content: bytes, *, last_seq: int) -> bytes | None:
    """Return the log with the hand edits accepted.

    Edited records get correct checksums, and messages in plain JSON become records. The restored
    messages are removed from the lists of lost messages in other records. Returns None if there is
    no hand edit. `last_seq` is the seq before the first message of the log.
    """
    lines = content.split(b"\n")
    records = [parse_line(line) if line else None for line in lines]
    next_seqs = _find_next_seqs(records)
    last_time = ""
    restored_seqs: list[Span] = []
    for index, line in enumerate(lines):
        if line and records[index] is None:
            record_line = correct_checksum(line)
            record_line = record_line or _to_record(line, last_seq + 1, next_seqs[index], last_time)
            if record_line is not None:
                lines[index] = record_line
                records[index] = parse_line(record_line)
                restored_seqs += _readable_seqs(records[index])
        record = records[index]
        if isinstance(record, Message):
            last_time, last_seq = timestamp(record.at), record.seq
        elif record is not None:
            last_time = record.at
    if b"\n".join(lines) == content:
        return None
    if lines[-1] and records[-1] is not None:
        lines.append(b"")  # the last record had no line end
    for index, line in enumerate(lines):
        record = parse_line(line)
        if isinstance(record, StateRecord | VoidRecord):
            lines[index] = _line_without_lost(record, spans.union(restored_seqs)) or line
    return b"\n".join(lines)


def _find_next_seqs(records: Sequence[Record | None]) -> list[int | None]:
    """Return, for each line, the seq of the next message; None after the last message."""
    next_seqs: list[int | None] = []
    next_seq: int | None = None
    for record in reversed(records):
        next_seqs.append(next_seq)
        next_seq = record.seq if isinstance(record, Message) else next_seq
    return next_seqs[::-1]


def _to_record(line: bytes, seq: int, next_seq: int | None, time_text: str) -> bytes | None:
    """Return the record of a message in plain JSON.

    Return None if the line is not a message, if its seq is taken, or if no record precedes it from
    which the time can be taken.
    """
    payload = plain_message(line)
    if payload is None or not time_text or (next_seq is not None and seq >= next_seq):
        return None
    return plain_line(seq, time_text, payload).removesuffix(b"\n")


def _readable_seqs(record: Record | None) -> list[Span]:
    """Return the seqs that become readable if this record is restored: those of its batch."""
    if not isinstance(record, Message):
        return []
    index, count = scan.batch_position(record) or (1, 1)
    return [(max(1, record.seq - index + 1), record.seq + count - index)]


def _line_without_lost(record: StateRecord | VoidRecord, restored_seqs: list[Span]) -> bytes | None:
    """Return the line of the record, with these seqs removed from its lost messages.

    Returns None if the line does not change.
    """
    lost = spans.minus(record.body.lost, restored_seqs)
    if lost == record.body.lost:
        return None
    body: msgspec.Struct = replace(record.body, lost=lost)
    kind = "state"
    if isinstance(record, VoidRecord):
        kind = "void"
        body = replace(record.body, lost=lost, changes=record.body.changes if lost else [])
    line = control_line(kind, record.seq, record.at, body, joined=record.joined, part=record.part)
    return line.removesuffix(b"\n")
