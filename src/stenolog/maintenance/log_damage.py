"""Finds damage in the bytes of a log, and describes what it means and how to repair it.

All functions are pure.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

from stenolog.codec import correct_checksum, parse_line, plain_message, salvage
from stenolog.records import FORMAT, Message, Span, State, StateRecord, UnknownRecord
from stenolog.stores import file_names, spans
from stenolog.stores.admin import Finding
from stenolog.stores.jsonl import scan

ASIDE_FOLDER: Final = "aside"
"""Folder next to the logs, into which repairs move files instead of deleting them."""


class Kind(StrEnum):
    """Kinds of findings in a folder of logs, with the names that the doctor prints."""

    TORN_TAIL = "torn tail"
    DAMAGED_LINE = "damaged line"
    NUL_BYTES = "NUL bytes"
    INCOMPLETE_BATCH = "incomplete batch"
    HAND_EDIT = "hand edit"
    MISSING_LINE = "missing line"
    FOREIGN_LOG = "foreign log"
    NEWER_FORMAT = "newer format"
    EMPTY_FILE = "empty file"
    WRONG_FILE_NAME = "wrong name"
    NOT_A_FILE = "not a file"
    UNREADABLE = "unreadable"
    MISSING_ARCHIVE = "missing archive"
    DAMAGED_ARCHIVE = "damaged archive"
    LEFTOVER = "leftover"
    UNREFERENCED_ARCHIVE = "unreferenced archive"
    WIDE_PERMISSIONS = "wide permissions"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """Result of examining the bytes of one log."""

    state: State | None = None
    """The state of the session, from the newest intact state record.

    None if no state record is intact, or if a newer version of stenolog wrote the log.
    """
    findings: tuple[Finding, ...] = ()
    may_be_growing: bool = False
    """Whether the end of the log may be a write in progress."""
    has_no_record: bool = False
    """Whether the log has no intact record: the first write was interrupted, or all are damaged.

    If archives without a session exist, replace the findings by `unreadable_log_finding`.
    """


# --- one log ---------------------------------------------------------------------------------


def examine_log(
    content: bytes, name: str, *, folder: str = "sessions", deleted: bool = False
) -> LogReport:
    """Examine the bytes of a log with this file name.

    `folder` is the path of the log's folder, for the findings. `deleted` means that the log is in
    the trash, where file names do not contain the key and no process writes to a log.
    """
    path = f"{folder}/{name}"
    key = None if deleted else file_names.key_of_log(name)
    records, _ = scan.read_records(content, offset=0)
    if not records:
        return _examine_without_records(content, key, path, deleted=deleted)

    states = [record.body for record in records if isinstance(record, StateRecord)]
    newer_formats = [f"format {state.format}" for state in states if state.format > FORMAT]
    unknown_records = (r for r in records if isinstance(r, UnknownRecord) and not r.optional)
    newer_formats += [f"a record of kind {record.kind!r}" for record in unknown_records]
    if newer_formats:
        return LogReport(findings=(_newer_format_finding(key, path, newer_formats[0]),))

    state = states[-1] if states else None
    key = state.key if state is not None else key
    if state is not None and not deleted and file_names.log_name(state.key) != name:
        # Report only the name: until it is correct, no process or repair writes to the log.
        return LogReport(state=state, findings=(_wrong_name_finding(state.key, path),))
    findings: list[Finding] = []
    if deleted and state is None:
        findings.append(_unknown_key_finding(path))
    damage = _DamagedLog(content, key, path, state, deleted=deleted)
    is_writable = state is not None and not deleted
    findings += damage.damaged_line_findings()
    # Restoring a deleted session drops the invalid bytes at the end of its log.
    # So invalid bytes are reported only if messages that may have been acknowledged are lost.
    findings += [f for f in damage.tail_findings(may_write=is_writable) if f.lost or not deleted]
    findings += damage.missing_line_findings()
    may_be_growing = damage.scan.tail is not None
    return LogReport(state=state, findings=tuple(findings), may_be_growing=may_be_growing)


def _examine_without_records(
    content: bytes, key: str | None, path: str, *, deleted: bool
) -> LogReport:
    make_finding = partial(Finding, key=key, path=path)
    move_advice = f"--repair moves it into {ASIDE_FOLDER}/."
    if content and not scan.may_be_torn_log(content):
        finding = make_finding(
            kind=Kind.FOREIGN_LOG,
            meaning="Another program wrote this file; stenolog neither reads nor changes it.",
            advice="Move it elsewhere.",
        )
        return LogReport(findings=(finding,))
    if deleted:
        # Only a log with a session can be deleted, so its first write was acknowledged.
        return LogReport(findings=(unreadable_log_finding(key, path, deleted=True),))
    if not content:
        finding = make_finding(
            kind=Kind.EMPTY_FILE,
            meaning="Empty log: a session was created but nothing was stored. Safe to ignore.",
            advice=move_advice,
            repairable=True,
        )
    elif b"\n" in content.strip(b"\0\n"):
        finding = make_finding(
            kind=Kind.DAMAGED_LINE,
            where="every line",
            meaning="No line is an intact record, so no message can be read.",
            advice=f"Check the disk and restore the file from a backup. {move_advice}",
            repairable=True,
        )
    else:
        finding = make_finding(
            kind=Kind.NUL_BYTES if b"\0" in content else Kind.TORN_TAIL,
            where=f"bytes 0 to {len(content):,}",
            meaning="The first write was interrupted and never acknowledged, so no session exists. "
            "Safe to ignore.",
            advice=move_advice,
            repairable=True,
        )
    return LogReport(findings=(finding,), may_be_growing=True, has_no_record=True)


def unreadable_log_finding(key: str | None, path: str, *, deleted: bool = False) -> Finding:
    """Return the finding for a log without any intact record that contained a session.

    The finding is not repairable: the file stays until a person has seen it.
    """
    advice = "Check the disk, and restore the file from a backup."
    if deleted:
        uid = path.rpartition("/")[2].partition(".")[0]
        advice += f" `steno purge {uid}` deletes it permanently."
    return Finding(
        kind=Kind.DAMAGED_LINE,
        key=key,
        path=path,
        where="every line",
        meaning="No line is an intact record, so no message in this file can be read.",
        advice=advice,
    )


def _newer_format_finding(key: str | None, path: str, version: str) -> Finding:
    meaning = f"A newer version of stenolog wrote this log ({version}), so it was not checked."
    advice = "Upgrade stenolog."
    return Finding(kind=Kind.NEWER_FORMAT, key=key, path=path, meaning=meaning, advice=advice)


def _wrong_name_finding(key: str, path: str) -> Finding:
    return Finding(
        kind=Kind.WRONG_FILE_NAME,
        key=key,
        path=path,
        meaning="The file name does not match the key of the session in it: the file was renamed "
        "or copied by hand, and the session cannot be opened.",
        advice=f"Rename the file to {file_names.log_name(key)} if there is no such file; "
        "otherwise move it elsewhere.",
    )


def _unknown_key_finding(path: str) -> Finding:
    uid = path.rpartition("/")[2].partition(".")[0]
    return Finding(
        kind=Kind.DAMAGED_LINE,
        key=None,
        path=path,
        where="every state",
        meaning="The key of this deleted session cannot be read, so its uid is listed instead. "
        "The messages can be read.",
        advice=f"`steno restore {uid} --as KEY` restores it, `steno purge {uid}` deletes it "
        "permanently.",
    )


class _DamagedLog:
    """The damaged lines of one log, each with the messages that were lost in it."""

    def __init__(
        self, content: bytes, key: str | None, path: str, state: State | None, *, deleted: bool
    ) -> None:
        first_seq = 1 if state is None or state.archive is None else state.archive.last + 1
        self.scan = scan.scan_log(content, offset=0, next_seq=first_seq)
        self._content = content
        self._make_finding = partial(Finding, key=key, path=path)
        self._restore_advice = "Restore the session. " if deleted else ""
        known_missing = [] if state is None else [*state.void, *state.purged]
        self._lost_seqs = spans.minus(self.scan.lost, spans.union(known_missing))
        self._bad_lines_by_offset = (
            _find_bad_lines(content) if self.scan.damaged or self.scan.tail is not None else {}
        )

    def damaged_line_findings(self) -> Iterator[Finding]:
        """Yield a finding for each damaged line before the last record."""
        lines_without_end: list[_BadLine] = []
        for damaged_bytes in self.scan.damaged:
            if damaged_bytes.offset >= self.scan.consumed:
                continue
            bad_line = self._bad_lines_by_offset[damaged_bytes.offset]
            lost = self._take_lost_seqs(bad_line)
            if bad_line.is_edited:
                yield self._hand_edit_finding(bad_line, lost or bad_line.edited_seqs)
            elif plain_message(damaged_bytes.text.strip()) is not None:
                yield self._added_line_finding(bad_line)
            elif not damaged_bytes.is_void and not lost and salvage(damaged_bytes.text):
                lines_without_end.append(bad_line)
            elif not damaged_bytes.is_void:
                yield self._damaged_line_finding(bad_line, damaged_bytes.text, lost)
        if lines_without_end:
            yield self._line_end_finding(lines_without_end)

    def tail_findings(self, *, may_write: bool) -> Iterator[Finding]:
        """Yield findings for invalid bytes at the end, which the next writer marks as void.

        `may_write`: a repair may write to the log.
        """
        tail = self.scan.tail
        if tail is None:
            return
        start, end = self.scan.consumed, len(self._content)
        bad_lines = self._bad_lines_by_offset.values()
        edited_lines = [bad_line for bad_line in bad_lines if bad_line.is_edited]
        tail_lines = [bad_line for bad_line in bad_lines if bad_line.offset >= start]
        if start < end:
            edited_lines = [bad_line for bad_line in edited_lines if bad_line.offset >= start]
            for bad_line in edited_lines:
                lost = tail.lost if bad_line.is_in_batch else bad_line.edited_seqs
                yield self._hand_edit_finding(bad_line, lost)
            if edited_lines:
                return
        if tail_lines and all(self._is_plain_message(bad_line) for bad_line in tail_lines):
            yield from map(self._added_line_finding, tail_lines)
            return
        kind, meaning = _describe_tail(tail, self._content[start:])
        # If --repair made a batch void, --accept could no longer accept its edited line.
        repairable = may_write and not edited_lines
        advice_now = "The next write skips these bytes; --repair does so now."
        first_advice = self._restore_advice or "Fix the other findings of this log first. "
        advice_later = f"{first_advice}The next write then skips these bytes."
        yield self._make_finding(
            kind=kind,
            where=f"from byte {start:,} to the end, {end - start:,} bytes" if start < end else "",
            meaning=meaning,
            advice=f"{advice_now if repairable else advice_later} No byte is removed.",
            repairable=repairable,
            lost=tuple(tail.lost),
        )

    def missing_line_findings(self) -> Iterator[Finding]:
        """Yield a finding for missing messages that no damaged line explains."""
        if self._lost_seqs:
            yield self._make_finding(
                kind=Kind.MISSING_LINE,
                meaning="Lines were deleted by hand, or the file is an incomplete copy. "
                + describe_lost(self._lost_seqs),
                advice="Restore the file from a backup if you need these messages.",
                lost=tuple(self._lost_seqs),
            )

    def _hand_edit_finding(self, bad_line: "_BadLine", lost: Sequence[Span]) -> Finding:
        return self._make_finding(
            kind=Kind.HAND_EDIT,
            where=bad_line.describe_position(),
            meaning="Checksum mismatch: the line was edited or corrupted, so it is skipped. "
            f"{describe_lost(lost)}",
            advice=f"{self._restore_advice}Read the line. --accept makes the line valid.",
            lost=tuple(lost),
        )

    def _is_plain_message(self, bad_line: "_BadLine") -> bool:
        line = self._content[bad_line.offset : bad_line.offset + bad_line.length]
        return plain_message(line) is not None

    def _added_line_finding(self, bad_line: "_BadLine") -> Finding:
        return self._make_finding(
            kind=Kind.HAND_EDIT,
            where=bad_line.describe_position(),
            meaning="A message in plain JSON was added by hand. The line is not a record, so "
            "the session does not contain it. No message is missing.",
            advice=f"{self._restore_advice}Read the line. --accept stores the line as a message.",
        )

    def _line_end_finding(self, bad_lines: Sequence["_BadLine"]) -> Finding:
        more_text = f", and {len(bad_lines) - 1:,} more" if len(bad_lines) > 1 else ""
        return self._make_finding(
            kind=Kind.DAMAGED_LINE,
            where=bad_lines[0].describe_position() + more_text,
            meaning="A line end is missing or was changed (CRLF), but every record was found. "
            "No message is missing.",
            advice="Nothing to do. Do not open logs in editors that change line ends.",
        )

    def _damaged_line_finding(
        self, bad_line: "_BadLine", content: bytes, lost: Sequence[Span]
    ) -> Finding:
        kind, meaning = Kind.DAMAGED_LINE, "The line is not a record."
        if b"\0" in content:
            kind, meaning = Kind.NUL_BYTES, "The disk lost this part of the file (NUL bytes)."
        return self._make_finding(
            kind=kind,
            where=bad_line.describe_position(),
            meaning=f"{meaning} {describe_lost(lost)}",
            advice="The rest of the session is intact. Check the disk; restore the file from a "
            "backup if you need this line.",
            lost=tuple(lost),
        )

    def _take_lost_seqs(self, bad_line: "_BadLine") -> list[Span]:
        """Remove the lost seqs around this line from `_lost_seqs`, and return them."""
        lost_seqs = spans.clipped(
            self._lost_seqs, bad_line.low_seq, min(bad_line.high_seq, self.scan.next_seq)
        )
        self._lost_seqs = spans.minus(self._lost_seqs, lost_seqs)
        return lost_seqs


@dataclass(slots=True)
class _BadLine:
    """A line that is not a record."""

    line_number: int
    offset: int
    length: int
    is_edited: bool
    """Whether the line is a complete record except for its checksum."""
    edited_seqs: list[Span]
    """Seq of the message in an edited line."""
    is_in_batch: bool
    """Whether the line is an edited record of a batch, which is invalid without the line."""
    low_seq: int
    high_seq: int
    """The seqs from `low_seq` to `high_seq` may be missing between the records around the line."""

    def describe_position(self) -> str:
        return f"line {self.line_number:,}, bytes {self.offset:,} to {self.offset + self.length:,}"


def _find_bad_lines(content: bytes) -> dict[int, _BadLine]:
    """Return each line that is not a record, by its offset."""
    bad_lines: dict[int, _BadLine] = {}
    lines_since_record: list[_BadLine] = []
    offset, low_seq = 0, 1
    for line_number, line in enumerate(content.split(b"\n"), 1):
        record = parse_line(line) if line else None
        if record is not None:
            for bad_line in lines_since_record:
                bad_line.high_seq = record.seq - 1
            lines_since_record.clear()
            low_seq = record.seq + isinstance(record, Message)
        elif line:
            corrected_line = correct_checksum(line)
            edited = parse_line(corrected_line) if corrected_line is not None else None
            bad_line = _BadLine(
                line_number=line_number,
                offset=offset,
                length=len(line),
                is_edited=edited is not None,
                edited_seqs=[(edited.seq, edited.seq)] if isinstance(edited, Message) else [],
                is_in_batch=edited is not None and scan.batch_position(edited) is not None,
                low_seq=low_seq,
                high_seq=sys.maxsize,
            )
            bad_lines[offset] = bad_line
            lines_since_record.append(bad_line)
        offset += len(line) + 1
    return bad_lines


def _describe_tail(tail: scan.Tail, tail_bytes: bytes) -> tuple[Kind, str]:
    if b"\0" in tail_bytes:
        meaning = "The file ends with reserved but unwritten space, probably after a power cut."
        return Kind.NUL_BYTES, f"{meaning} {describe_lost(tail.lost)}"
    if tail.seqs or tail.changes or not tail_bytes:
        lost_text = describe_lost(tail.lost) if tail.lost else "The batch was never acknowledged."
        meaning = "A batch is incomplete, so none of its records counts."
        return Kind.INCOMPLETE_BATCH, f"{meaning} {lost_text}"
    if tail.lost or tail.has_damaged_lines:
        return Kind.DAMAGED_LINE, f"The last line is damaged. {describe_lost(tail.lost)}"
    return Kind.TORN_TAIL, "The last write was interrupted and never acknowledged."


def describe_lost(lost: Sequence[Span]) -> str:
    """Return a sentence that names the messages that cannot be read."""
    if not lost:
        return "No message is missing."
    seqs = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in lost)
    is_single = spans.size(lost) == 1
    return f"The {'message' if is_single else 'messages'} with seq {seqs} cannot be read."
