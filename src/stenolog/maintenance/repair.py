"""Repairs of the doctor. No data is deleted: bytes are marked void, or files are moved.

Every step checks again under the lock of the log before it acts: another process may have repaired
the finding, or the finding may have been a write in progress.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from stenolog.codec import control_line, parse_line, plain_line, plain_message, re_sign
from stenolog.errors import StenologError
from stenolog.maintenance.log_damage import ASIDE, Kind, examine_log
from stenolog.maintenance.log_files import (
    BUSY_TIMEOUT,
    locked_archives,
    locked_log,
    opened_trash,
    read_whole,
    unreferenced_archives,
)
from stenolog.maintenance.workspace_check import LEFTOVER, examine, examine_folder, sqlite_checks
from stenolog.records import Message, Record, Span, StateRecord, VoidRecord, timestamp
from stenolog.sessions.folders import check_workspace, log_folders
from stenolog.stores import spans
from stenolog.stores.disk import sync_file, sync_folder, write_all
from stenolog.stores.findings import Finding, RepairResult
from stenolog.stores.jsonl import rewrite, scan, trash, writer
from stenolog.stores.jsonl.directory import Directory, store_error
from stenolog.stores.jsonl.log import Log
from stenolog.stores.jsonl.open_logs import OpenLogCache
from stenolog.stores.open_store import address, open_store
from stenolog.stores.state import copy

_ALREADY_FIXED = "nothing to do: it is already fixed"


def repair(workspace: str | os.PathLike[str]) -> list[RepairResult]:
    """Examine a workspace or database and repair the repairable findings.

    Raises the errors of `examine`.
    """
    parsed = address(workspace)
    if parsed.engine == "sqlite":
        file = Path(parsed.path)
        return _with_path(sqlite_checks().repair(file), path=file.name)
    if parsed.engine == "postgresql":
        return _repair_server(workspace)
    return _repair_findings(
        workspace,
        lambda findings: [finding for finding in findings if finding.repairable],
        _repair_finding,
    )


def _repair_server(where: str | os.PathLike[str]) -> list[RepairResult]:
    if not any(finding.repairable for finding in examine(where).findings):
        return []
    with open_store(where) as store:
        # The driver is optional, and installed if a store of this engine was opened.
        from stenolog.stores.postgres import PostgresStore, database

        assert isinstance(store, PostgresStore), "it is the engine of this place"
        return _with_path(database.repair(store.database), path=store.database.address)


def _with_path(results: Iterable[RepairResult], *, path: str) -> list[RepairResult]:
    return [replace(result, finding=replace(result.finding, path=path)) for result in results]


def accept(workspace: str | os.PathLike[str]) -> list[RepairResult]:
    """Accept the current hand edits; the previous log is kept in `aside`.

    Raises the errors of `examine`.

    All edits of a log are accepted together, with one result.
    """
    return _repair_findings(workspace, _hand_edits, _accept_edits)


def _hand_edits(findings: Iterable[Finding]) -> list[Finding]:
    live = [f for f in findings if f.kind is Kind.HAND_EDIT and f"/{trash.FOLDER}/" not in f.path]
    return list({f.key: f for f in live if f.key is not None}.values())


class _Folder(msgspec.Struct, frozen=True):
    """A folder of logs that is being repaired."""

    path: str
    """Path below the workspace, as in findings."""
    directory: Directory


def _repair_findings(
    workspace: str | os.PathLike[str],
    choose: Callable[[Iterable[Finding]], list[Finding]],
    repair_one: Callable[[_Folder, Finding], str],
) -> list[RepairResult]:
    parsed = address(workspace)
    if parsed.engine != "jsonl":
        return []  # other modules repair databases
    place = Path(parsed.path)
    check_workspace(place)
    results: list[RepairResult] = []
    for path in log_folders(place):
        findings = choose(examine_folder(place, path).findings)
        if findings:
            directory = Directory(place / path, read_only=False)
            try:
                folder = _Folder(path, directory)
                results += [_attempt(folder, finding, repair_one) for finding in findings]
            finally:
                directory.close()
    return results


def _attempt(
    folder: _Folder, finding: Finding, repair_one: Callable[[_Folder, Finding], str]
) -> RepairResult:
    try:
        return RepairResult(finding=finding, done=True, words=repair_one(folder, finding))
    except StenologError as error:
        return RepairResult(finding=finding, done=False, words=str(error))
    except OSError as error:
        error_text = str(store_error(error, f"settling {finding.path}"))
        return RepairResult(finding=finding, done=False, words=error_text)


# --- repairing -------------------------------------------------------------------------------


def _repair_finding(folder: _Folder, finding: Finding) -> str:
    directory = folder.directory
    *below, name = finding.path.removeprefix(f"{folder.path}/").split("/")
    if below == [trash.FOLDER]:
        return _move_trashed(folder, name)
    if below:
        return _move_archive(folder, below[-1], name, finding.key)
    leftover = LEFTOVER.fullmatch(name)
    if leftover is not None:
        with locked_log(directory, leftover[1]):
            return _move(folder, directory.descriptor, name)
    with locked_log(directory, name) as descriptor:
        if descriptor is None:
            return _ALREADY_FIXED
        log_report = examine_log(read_whole(descriptor), name)
        if log_report.state is None:
            if any(finding.repairable for finding in log_report.findings):
                return _move(folder, directory.descriptor, name)
            return _ALREADY_FIXED
    return _mark_void(directory, log_report.state.key)


def _move_trashed(folder: _Folder, name: str) -> str:
    """Move a file in the trash that is not a session."""
    leftover = LEFTOVER.fullmatch(name)
    with opened_trash(folder.directory) as deleted:
        if deleted is None:
            return _ALREADY_FIXED
        with locked_log(deleted, leftover[1] if leftover is not None else name) as descriptor:
            if leftover is None:
                if descriptor is None:
                    return _ALREADY_FIXED
                log_report = examine_log(read_whole(descriptor), name, deleted=True)
                if log_report.state is not None or not any(
                    f.repairable for f in log_report.findings
                ):
                    return _ALREADY_FIXED
            return _move(folder, deleted.descriptor, name)


def _mark_void(directory: Directory, key: str) -> str:
    """Let the store's writer mark the bad tail void, as before any append."""
    with _locked_log(directory, key) as log:
        if log is None:
            return _ALREADY_FIXED
        with log.mutex:
            has_bad_tail = log.tail is not None
        if not has_bad_tail:
            return _ALREADY_FIXED
        _, outcome = writer.append(log, [])
        if outcome.error is not None:
            raise outcome.failure(f"marking the tail of {key!r} as void")
    return "marked as void; its bytes are still in the file"


@contextmanager
def _locked_log(directory: Directory, key: str) -> Iterator[Log | None]:
    logs = OpenLogCache(directory, busy_timeout=BUSY_TIMEOUT, cache_bytes=0)
    try:
        yield logs.lock(key, create=False)
    finally:
        logs.unlock(key)
        logs.close()


def _move_archive(folder: _Folder, uid: str, name: str, key: str | None) -> str:
    with locked_archives(folder.directory, uid) as archives:
        if archives is None or name not in unreferenced_archives(
            folder.directory, archives, uid, key
        ):
            return _ALREADY_FIXED
        return _move(folder, archives, name, prefix=f"{uid}-")


def _move(folder: _Folder, source: int, name: str, *, prefix: str = "") -> str:
    """Move a file into the folder `aside`, durably."""
    with _opened_aside(folder.directory) as aside:
        target = f"{prefix}{name.lstrip('.')}.{_stamp()}"
        try:
            os.rename(name, target, src_dir_fd=source, dst_dir_fd=aside)
        except FileNotFoundError:
            return _ALREADY_FIXED
        sync_folder(aside)
        sync_folder(source)
    return f"moved to {folder.path}/{ASIDE}/{target}"


@contextmanager
def _opened_aside(directory: Directory) -> Iterator[int]:
    folder = directory.subfolder(ASIDE, create=True)
    if folder is None:
        raise FileNotFoundError(directory.path / ASIDE)
    try:
        yield folder
    finally:
        folder.close()


def _stamp() -> str:
    """Return the current time in microseconds, so that file names in `aside` are unique."""
    return writer.now().replace(":", "")


# --- accepting -------------------------------------------------------------------------------


def _accept_edits(folder: _Folder, finding: Finding) -> str:
    if finding.key is None:
        return _ALREADY_FIXED
    with _locked_log(folder.directory, finding.key) as log:
        if log is None:
            return _ALREADY_FIXED
        with log.mutex:
            size, known = log.size, copy(log.known_state())
        text = log.read(0, size)
        signed = sign_edits(text, last=0 if known.archive is None else known.archive.last)
        if signed is None:
            return _ALREADY_FIXED
        copy_name = _copy(folder.directory, log.name, text)
        replayed = rewrite.replay(signed, known)
        new_log = rewrite.compose_log(
            replayed.head,
            replayed.state,
            signed,
            writer.now(),
            first_seq=replayed.first_seq,
            next_seq=replayed.next_seq,
            tail=replayed.tail,
        )
        rewrite.replace_log(log, new_log)
    return f"accepted; the previous log is {folder.path}/{ASIDE}/{copy_name}"


def _copy(directory: Directory, name: str, text: bytes) -> str:
    """Write these bytes into the folder `aside`, durably, and return the file name."""
    target = f"{name}.{_stamp()}"
    with _opened_aside(directory) as aside:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(target, flags, 0o600, dir_fd=aside)
        try:
            write_all(descriptor, text)
            sync_file(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(aside)
    return target


def sign_edits(text: bytes, *, last: int = 0) -> bytes | None:
    """Return the log with each hand edit signed, and each plain message as a record.

    Records that list such a message as lost are changed. Returns None without a hand edit. `last`:
    the seq before the first message of the log.
    """
    lines = text.split(b"\n")
    records = [parse_line(line) if line else None for line in lines]
    next_seq = _next_seqs(records)
    at = ""
    restored: list[Span] = []
    for index, line in enumerate(lines):
        if line and records[index] is None:
            signed = re_sign(line) or _as_record(line, last + 1, next_seq[index], at)
            if signed is not None:
                lines[index] = signed
                records[index] = parse_line(signed)
                restored += _readable_seqs(records[index])
        record = records[index]
        at = at if record is None else _time_of(record)
        last = record.seq if isinstance(record, Message) else last
    if b"\n".join(lines) == text:
        return None
    if lines[-1] and records[-1] is not None:
        lines.append(b"")  # the line end was missing
    for index, line in enumerate(lines):
        record = parse_line(line)
        if isinstance(record, StateRecord | VoidRecord):
            lines[index] = _line_without_lost(record, spans.union(restored)) or line
    return b"\n".join(lines)


def _next_seqs(records: Sequence[Record | None]) -> list[int | None]:
    """Return, for each line, the seq of the first message after it; None after the last message."""
    next_seqs: list[int | None] = []
    next_seq: int | None = None
    for record in reversed(records):
        next_seqs.append(next_seq)
        next_seq = record.seq if isinstance(record, Message) else next_seq
    return next_seqs[::-1]


def _as_record(line: bytes, seq: int, next_seq: int | None, at: str) -> bytes | None:
    """Return the record of a message in plain JSON.

    Return None if the line is not a message, or if its seq is taken.
    """
    payload = plain_message(line)
    if payload is None or not at or (next_seq is not None and seq >= next_seq):
        return None
    return plain_line(seq, at, payload).removesuffix(b"\n")


def _time_of(record: Record) -> str:
    return timestamp(record.at) if isinstance(record, Message) else record.at


def _readable_seqs(record: Record | None) -> list[Span]:
    """Return the seqs that this record makes readable again: its seq and those of its batch."""
    if not isinstance(record, Message):
        return []
    index, count = scan.part_of(record) or (1, 1)
    return [(max(1, record.seq - index + 1), record.seq + count - index)]


def _line_without_lost(record: StateRecord | VoidRecord, restored: list[Span]) -> bytes | None:
    """Return the record's line without these seqs in its lost list; None if nothing changes."""
    body: msgspec.Struct
    if isinstance(record, StateRecord):
        lost = spans.minus(record.body.lost, restored)
        if lost == record.body.lost:
            return None
        body = replace(record.body, lost=lost)
    else:
        lost = spans.minus(record.body.lost, restored)
        if lost == record.body.lost:
            return None
        body = replace(record.body, lost=lost, changes=record.body.changes if lost else [])
    kind = "state" if isinstance(record, StateRecord) else "void"
    line = control_line(kind, record.seq, record.at, body, joined=record.joined, part=record.part)
    return line.removesuffix(b"\n")
