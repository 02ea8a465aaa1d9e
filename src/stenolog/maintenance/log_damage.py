"""Finds damage in the bytes of one log, with its meaning and advice. Pure functions."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final

from stenolog.codec import parse_line, plain_message, re_sign, salvage
from stenolog.records import FORMAT, Message, Span, State, StateRecord, UnknownRecord
from stenolog.stores import file_names, spans
from stenolog.stores.findings import Finding as Finding
from stenolog.stores.jsonl import scan

ASIDE: Final = "aside"
"""Folder next to the logs that receives the files which a repair moves away."""


class Kind(StrEnum):
    """Every kind of finding, with the name that the doctor prints."""

    TORN_TAIL = "torn tail"
    DAMAGED_LINE = "damaged line"
    NUL_BYTES = "NUL bytes"
    INCOMPLETE_BATCH = "incomplete batch"
    HAND_EDIT = "hand edit"
    MISSING_LINE = "missing line"
    FOREIGN_LOG = "foreign log"
    NEWER_FORMAT = "newer format"
    UNKNOWN_KIND = "unknown kind"
    EMPTY_FILE = "empty file"
    WRONG_NAME = "wrong name"
    NOT_A_FILE = "not a file"
    UNREADABLE = "unreadable"
    MISSING_ARCHIVE = "missing archive"
    DAMAGED_ARCHIVE = "damaged archive"
    LEFTOVER = "leftover"
    UNREFERENCED_ARCHIVE = "unreferenced archive"
    STALLED_LEASE = "stalled lease"
    WIDE_PERMISSIONS = "wide permissions"
    NOT_WRITABLE = "not writable"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """Result of examining the bytes of one log."""

    key: str | None = None
    state: State | None = None
    """The newest intact state; None without one, or if a newer version wrote the log."""
    findings: tuple[Finding, ...] = ()
    may_be_growing: bool = False
    """Whether the end of the log may be a write in progress."""


# --- one log ---------------------------------------------------------------------------------


def examine_log(
    text: bytes, name: str, *, folder: str = "sessions", deleted: bool = False
) -> LogReport:
    """Return the findings for the bytes of a log with this file name.

    `deleted`: the log is in the trash, where the file name does not contain the key and no process
    writes to the log.
    """
    path = f"{folder}/{name}"
    key = None if deleted else file_names.key_of_log(name)
    records, _ = scan.read_records(text, offset=0)
    if not records:
        return _examine_without_records(text, key, path)

    states = [record.body for record in records if isinstance(record, StateRecord)]
    unknown = [r.kind for r in records if isinstance(r, UnknownRecord) and not r.optional]
    newer = [f"format {state.format}" for state in states if state.format > FORMAT]
    newer += [kind for kind in unknown if kind.startswith("state")]
    if newer:
        return LogReport(key=key, findings=(_newer_format(key, path, newer[0]),))

    state = states[-1] if states else None
    key = state.key if state is not None else key
    if state is not None and not deleted and file_names.log_name(state.key) != name:
        # Until the log has its correct name, no process writes to the log and no repair changes it.
        return LogReport(key=key, state=state, findings=(_wrong_name(state.key, path),))
    findings: list[Finding] = []
    if unknown:
        findings.append(_unknown_kind(key, path, unknown[0]))
    if deleted and state is None:
        findings.append(_unknown_key(path))
    damage = _DamagedLog(text, key, path, state, deleted=deleted)
    may_write = state is not None and not findings and not deleted
    findings += damage.damaged_lines()
    # Restoring a deleted session drops its bad tail. Only messages that may have been acknowledged
    # are worth a finding.
    findings += [
        end for end in damage.tail_findings(may_write=may_write) if end.lost or not deleted
    ]
    findings += damage.missing_lines()
    return LogReport(
        key=key, state=state, findings=tuple(findings), may_be_growing=damage.scan.tail is not None
    )


def _examine_without_records(text: bytes, key: str | None, path: str) -> LogReport:
    finding_for = partial(Finding, key=key, path=path)
    if not text:
        finding = finding_for(
            kind=Kind.EMPTY_FILE,
            meaning="Empty log: a session was created but nothing was stored. Safe to ignore.",
            advice=f"--repair moves it into {ASIDE}/.",
            repairable=True,
        )
    elif scan.looks_torn(text) and b"\n" in text.strip(b"\0\n"):
        finding = finding_for(
            kind=Kind.DAMAGED_LINE,
            where="every line",
            meaning="No line is an intact record, so no message can be read.",
            advice="Check the disk and restore the file from a backup. "
            f"--repair moves it into {ASIDE}/.",
            repairable=True,
        )
    elif scan.looks_torn(text):
        finding = finding_for(
            kind=Kind.NUL_BYTES if b"\0" in text else Kind.TORN_TAIL,
            where=f"bytes 0 to {len(text):,}",
            meaning="The first write was interrupted and never acknowledged, so no session exists. "
            "Safe to ignore.",
            advice=f"--repair moves it into {ASIDE}/.",
            repairable=True,
        )
    else:
        finding = finding_for(
            kind=Kind.FOREIGN_LOG,
            meaning="Another program wrote this file; stenolog neither reads nor changes it.",
            advice="Move it elsewhere.",
        )
    return LogReport(
        key=key, findings=(finding,), may_be_growing=finding.kind is not Kind.FOREIGN_LOG
    )


def _newer_format(key: str | None, path: str, version: str) -> Finding:
    return Finding(
        kind=Kind.NEWER_FORMAT,
        key=key,
        path=path,
        meaning=f"A newer version of stenolog wrote this log ({version}), so it was not checked.",
        advice="Upgrade stenolog.",
    )


def _wrong_name(key: str, path: str) -> Finding:
    return Finding(
        kind=Kind.WRONG_NAME,
        key=key,
        path=path,
        meaning="The file name does not match the key of the session in it: the file was renamed "
        "or copied by hand, and the session cannot be opened.",
        advice=f"Rename it to {file_names.log_name(key)} if there is no such file; "
        "otherwise move it elsewhere.",
    )


def _unknown_key(path: str) -> Finding:
    uid = path.rpartition("/")[2].partition(".")[0]
    return Finding(
        kind=Kind.DAMAGED_LINE,
        key=None,
        path=path,
        where="every state",
        meaning="The key of this deleted session cannot be read, so its uid is listed instead. "
        "Its messages can be read.",
        advice=f"`steno restore {uid} --as KEY` restores it, `steno purge {uid}` deletes it "
        "permanently.",
    )


def _unknown_kind(key: str | None, path: str, kind: str) -> Finding:
    return Finding(
        kind=Kind.UNKNOWN_KIND,
        key=key,
        path=path,
        meaning=f"It contains a record of the unknown kind {kind!r}, so the session can be read "
        "but not written.",
        advice="Upgrade stenolog.",
    )


class _DamagedLog:
    """The damaged places of one log, each with the messages that were lost there."""

    def __init__(
        self, text: bytes, key: str | None, path: str, state: State | None, *, deleted: bool
    ) -> None:
        first = 1 if state is None or state.archive is None else state.archive.last + 1
        self.scan = scan.scan_log(text, offset=0, next_seq=first)
        self._text = text
        self._finding = partial(Finding, key=key, path=path)
        self._restore_first = "Restore the session. " if deleted else ""
        known = [] if state is None else [*state.void, *state.purged]
        self._lost = spans.minus(self.scan.lost, spans.union(known))
        self._bad_lines_by_offset = (
            _bad_lines(text) if self.scan.bad or self.scan.tail is not None else {}
        )

    def damaged_lines(self) -> Iterator[Finding]:
        """Yield a finding for each damaged line before the last record."""
        without_line_end: list[_BadLine] = []
        for bad in self.scan.bad:
            if bad.offset >= self.scan.consumed:
                continue
            bad_line = self._bad_lines_by_offset[bad.offset]
            lost = self._claim_lost(bad_line)
            if bad_line.edited:
                yield self._hand_edit_finding(bad_line, lost or bad_line.own)
            elif plain_message(bad.text.strip()) is not None:
                yield self._added_line_finding(bad_line)
            elif not bad.known and not lost and salvage(bad.text):
                without_line_end.append(bad_line)
            elif not bad.known:
                yield self._damaged_line_finding(bad_line, bad.text, lost)
        if without_line_end:
            yield self._line_end_finding(without_line_end)

    def tail_findings(self, *, may_write: bool) -> Iterator[Finding]:
        """Yield findings for the tail that the next writer would move away."""
        tail = self.scan.tail
        if tail is None:
            return
        start, end = self.scan.consumed, len(self._text)
        edited = [bad_line for bad_line in self._bad_lines_by_offset.values() if bad_line.edited]
        if start < end:
            edited = [bad_line for bad_line in edited if bad_line.offset >= start]
            yield from (
                self._hand_edit_finding(bad_line, tail.lost if bad_line.batched else bad_line.own)
                for bad_line in edited
            )
        if start < end and edited:
            return
        added = [
            bad_line for bad_line in self._bad_lines_by_offset.values() if bad_line.offset >= start
        ]
        if added and all(self._is_plain(bad_line) for bad_line in added):
            yield from map(self._added_line_finding, added)
            return
        kind, meaning = _describe_tail(tail, self._text[start:])
        # Moving away a batch that lacks only an edited line would make `--accept` impossible.
        repairable = may_write and not edited
        now = "The next write skips it; --repair does so now."
        before = self._restore_first or "Fix the other findings of this log first. "
        later = f"{before}The next write then skips it."
        yield self._finding(
            kind=kind,
            where=f"from byte {start:,} to the end, {end - start:,} bytes" if start < end else "",
            meaning=meaning,
            advice=f"{now if repairable else later} No byte is removed.",
            repairable=repairable,
            lost=tuple(tail.lost),
        )

    def missing_lines(self) -> Iterator[Finding]:
        """Yield a finding for messages that are missing although no line is damaged."""
        if self._lost:
            yield self._finding(
                kind=Kind.MISSING_LINE,
                meaning="Lines were deleted by hand, or the file is an incomplete copy. "
                + describe_lost(self._lost),
                advice="Restore the file from a backup if you need these messages.",
                lost=tuple(self._lost),
            )

    def _hand_edit_finding(self, bad_line: "_BadLine", lost: Sequence[Span]) -> Finding:
        return self._finding(
            kind=Kind.HAND_EDIT,
            where=bad_line.position(),
            meaning="Checksum mismatch: the line was edited or corrupted, so it is skipped. "
            f"{describe_lost(lost)}",
            advice=f"{self._restore_first}Read the line. --accept accepts it as it is.",
            lost=tuple(lost),
        )

    def _is_plain(self, bad_line: "_BadLine") -> bool:
        line = self._text[bad_line.offset : bad_line.offset + bad_line.length]
        return plain_message(line) is not None

    def _added_line_finding(self, bad_line: "_BadLine") -> Finding:
        return self._finding(
            kind=Kind.HAND_EDIT,
            where=bad_line.position(),
            meaning="A message in plain JSON was added by hand. It is not a record, so it is not "
            "part of the session. No message is missing.",
            advice=f"{self._restore_first}Read the line. --accept stores it as a message.",
        )

    def _line_end_finding(self, bad_lines: Sequence["_BadLine"]) -> Finding:
        more = f", and {len(bad_lines) - 1:,} more" if len(bad_lines) > 1 else ""
        return self._finding(
            kind=Kind.DAMAGED_LINE,
            where=bad_lines[0].position() + more,
            meaning="A line end is missing or was changed (CRLF), but every record was found. "
            "No message is missing.",
            advice="Nothing to do. Do not open logs in editors that change line ends.",
        )

    def _damaged_line_finding(
        self, bad_line: "_BadLine", text: bytes, lost: Sequence[Span]
    ) -> Finding:
        has_nul = b"\0" in text
        return self._finding(
            kind=Kind.NUL_BYTES if has_nul else Kind.DAMAGED_LINE,
            where=bad_line.position(),
            meaning=(
                "The disk lost this part of the file (NUL bytes). "
                if has_nul
                else "It is not a record. "
            )
            + describe_lost(lost),
            advice="The rest of the session is intact. Check the disk; restore the file from a "
            "backup if you need this line.",
            lost=tuple(lost),
        )

    def _claim_lost(self, bad_line: "_BadLine") -> list[Span]:
        """Remove the lost seqs between the neighbours of this line, and return the removed seqs."""
        claimed = spans.clipped(self._lost, bad_line.low, min(bad_line.high, self.scan.next_seq))
        self._lost = spans.minus(self._lost, claimed)
        return claimed


@dataclass(slots=True)
class _BadLine:
    """A line that is not a record."""

    line: int
    offset: int
    length: int
    edited: bool
    """Whether the line is a complete record except for its checksum."""
    own: list[Span]
    """Seq of the message in an edited line."""
    batched: bool
    """Whether the line is an edited record of a batch, which counts only when complete."""
    low: int
    high: int
    """`low` and `high` limit the seqs that may be missing between the neighbours."""

    def position(self) -> str:
        return f"line {self.line:,}, bytes {self.offset:,} to {self.offset + self.length:,}"


def _bad_lines(text: bytes) -> dict[int, _BadLine]:
    """Return each line that is not a record, by its offset."""
    bad_lines: dict[int, _BadLine] = {}
    waiting: list[_BadLine] = []
    offset, low = 0, 1
    for number, line in enumerate(text.split(b"\n"), 1):
        record = parse_line(line) if line else None
        if record is not None:
            for bad_line in waiting:
                bad_line.high = record.seq - 1
            waiting.clear()
            low = record.seq + isinstance(record, Message)
        elif line:
            signed = re_sign(line)
            edit = parse_line(signed) if signed is not None else None
            own_seqs = [(edit.seq, edit.seq)] if isinstance(edit, Message) else []
            bad_line = _BadLine(
                line=number,
                offset=offset,
                length=len(line),
                edited=edit is not None,
                own=own_seqs,
                batched=edit is not None and scan.part_of(edit) is not None,
                low=low,
                high=sys.maxsize,
            )
            bad_lines[offset] = bad_line
            waiting.append(bad_line)
        offset += len(line) + 1
    return bad_lines


def _describe_tail(tail: scan.Tail, rest: bytes) -> tuple[Kind, str]:
    if b"\0" in rest:
        return (
            Kind.NUL_BYTES,
            "The file ends with reserved but unwritten space, probably after a power cut. "
            f"{describe_lost(tail.lost)}",
        )
    if tail.seqs or tail.changes or not rest:
        lost_text = describe_lost(tail.lost) if tail.lost else "The batch was never acknowledged."
        return (
            Kind.INCOMPLETE_BATCH,
            f"A batch is incomplete, so none of its records counts. {lost_text}",
        )
    if tail.lost or tail.damaged:
        return Kind.DAMAGED_LINE, f"The last line is damaged. {describe_lost(tail.lost)}"
    return Kind.TORN_TAIL, "The last write was interrupted and never acknowledged."


def describe_lost(lost: Sequence[Span]) -> str:
    """Return a sentence that names the messages which cannot be read."""
    if not lost:
        return "No message is missing."
    seqs = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in lost)
    is_single = spans.size(lost) == 1
    return f"The {'message' if is_single else 'messages'} with seq {seqs} cannot be read."
