"""Damage in the bytes of one log: its kind, its meaning, and advice. Pure."""

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
class Judged:
    """Result of judging the bytes of one log."""

    key: str | None = None
    state: State | None = None
    """The newest intact state; None if there is none or a newer version wrote it."""
    findings: tuple[Finding, ...] = ()
    unsettled: bool = False
    """The end of the log may be a write in progress."""


# --- one log ---------------------------------------------------------------------------------


def judge(text: bytes, name: str, *, folder: str = "sessions", deleted: bool = False) -> Judged:
    """Return the findings for the bytes of a log with this file name.

    `deleted`: the log is in the trash, where the file name does not contain the key and no process
    writes to the log.
    """
    path = f"{folder}/{name}"
    key = None if deleted else file_names.key_of_log(name)
    records, _ = scan.read_records(text, offset=0)
    if not records:
        return _judge_without_records(text, key, path)

    states = [record.body for record in records if isinstance(record, StateRecord)]
    unknown = [r.kind for r in records if isinstance(r, UnknownRecord) and not r.optional]
    newer = [f"format {state.format}" for state in states if state.format > FORMAT]
    newer += [kind for kind in unknown if kind.startswith("state")]
    if newer:
        return Judged(key=key, findings=(_newer(key, path, newer[0]),))

    state = states[-1] if states else None
    key = state.key if state is not None else key
    if state is not None and not deleted and file_names.log_name(state.key) != name:
        # No process writes to the log, and no repair changes it, until it has its correct name.
        return Judged(key=key, state=state, findings=(_wrong_name(state.key, path),))
    found: list[Finding] = []
    if unknown:
        found.append(_unknown_kind(key, path, unknown[0]))
    if deleted and state is None:
        found.append(_nameless(path))
    damage = _Damage(text, key, path, state, deleted=deleted)
    may_write = state is not None and not found and not deleted
    found += damage.in_the_middle()
    # Restoring a deleted session moves its tail away; only messages that may have been acknowledged
    # are worth a finding.
    found += [end for end in damage.at_the_end(may_write=may_write) if end.lost or not deleted]
    found += damage.without_a_trace()
    return Judged(
        key=key, state=state, findings=tuple(found), unsettled=damage.scan.tail is not None
    )


def _judge_without_records(text: bytes, key: str | None, path: str) -> Judged:
    find = partial(Finding, key=key, path=path)
    if not text:
        finding = find(
            kind=Kind.EMPTY_FILE,
            meaning="A session was begun and nothing was ever written. It is no session.",
            advice=f"--repair moves it into {ASIDE}/.",
            repairable=True,
        )
    elif scan.looks_torn(text) and b"\n" in text.strip(b"\0\n"):
        finding = find(
            kind=Kind.DAMAGED_LINE,
            where="every line",
            meaning="Not one of its lines is an intact record; what it held cannot be read.",
            advice="Look at the disk, and put the file back from a backup. "
            f"--repair moves it into {ASIDE}/.",
            repairable=True,
        )
    elif scan.looks_torn(text):
        finding = find(
            kind=Kind.NUL_BYTES if b"\0" in text else Kind.TORN_TAIL,
            where=f"bytes 0 to {len(text):,}",
            meaning="The first write was cut off, and never acknowledged. It is no session.",
            advice=f"--repair moves it into {ASIDE}/.",
            repairable=True,
        )
    else:
        finding = find(
            kind=Kind.FOREIGN_LOG,
            meaning="Another program wrote this file; stenolog neither reads nor changes it.",
            advice="Move it elsewhere.",
        )
    return Judged(key=key, findings=(finding,), unsettled=finding.kind is not Kind.FOREIGN_LOG)


def _newer(key: str | None, path: str, what: str) -> Finding:
    return Finding(
        kind=Kind.NEWER_FORMAT,
        key=key,
        path=path,
        meaning=f"A newer stenolog wrote it ({what}); this one does not judge it.",
        advice="Upgrade stenolog.",
    )


def _wrong_name(key: str, path: str) -> Finding:
    return Finding(
        kind=Kind.WRONG_NAME,
        key=key,
        path=path,
        meaning="The file holds a session whose key has another file name: it was renamed or "
        "copied by hand, and neither name leads to it.",
        advice=f"Rename it to {file_names.log_name(key)}, if there is no such file; "
        "else move it elsewhere.",
    )


def _nameless(path: str) -> Finding:
    uid = path.rpartition("/")[2].partition(".")[0]
    return Finding(
        kind=Kind.DAMAGED_LINE,
        key=None,
        path=path,
        where="every state",
        meaning="The key of this deleted session cannot be read, so it is listed under its uid. "
        "Its messages can be read.",
        advice=f"`steno restore {uid} --as KEY` brings it back, `steno purge {uid}` deletes it.",
    )


def _unknown_kind(key: str | None, path: str, kind: str) -> Finding:
    return Finding(
        kind=Kind.UNKNOWN_KIND,
        key=key,
        path=path,
        meaning=f"It holds a record of the kind {kind!r}, which this version does not know; "
        "the session can be read, not written.",
        advice="Upgrade stenolog.",
    )


class _Damage:
    """The damaged places of one log, each reported with the messages that it lost."""

    def __init__(
        self, text: bytes, key: str | None, path: str, state: State | None, *, deleted: bool
    ) -> None:
        first = 1 if state is None or state.archive is None else state.archive.last + 1
        self.scan = scan.scan_log(text, offset=0, next_seq=first)
        self._text = text
        self._finding = partial(Finding, key=key, path=path)
        self._first = "Restore the session. " if deleted else ""
        known = [] if state is None else [*state.void, *state.purged]
        self._lost = spans.minus(self.scan.lost, spans.union(known))
        self._places = _places(text) if self.scan.bad or self.scan.tail is not None else {}

    def in_the_middle(self) -> Iterator[Finding]:
        """Yield a finding for each line before the last record that is not a record."""
        glued: list[_Place] = []
        for bad in self.scan.bad:
            if bad.offset >= self.scan.consumed:
                continue
            place = self._places[bad.offset]
            lost = self._take(place)
            if place.edited:
                yield self._hand_edit(place, lost or place.own)
            elif plain_message(bad.text.strip()) is not None:
                yield self._added_by_hand(place)
            elif not bad.known and not lost and salvage(bad.text):
                glued.append(place)
            elif not bad.known:
                yield self._damaged(place, bad.text, lost)
        if glued:
            yield self._glued(glued)

    def at_the_end(self, *, may_write: bool) -> Iterator[Finding]:
        """Yield findings for the tail that the next writer would move away."""
        tail = self.scan.tail
        if tail is None:
            return
        start, end = self.scan.consumed, len(self._text)
        edited = [place for place in self._places.values() if place.edited]
        if start < end:
            edited = [place for place in edited if place.offset >= start]
            yield from (
                self._hand_edit(place, tail.lost if place.batched else place.own)
                for place in edited
            )
        if start < end and edited:
            return
        added = [place for place in self._places.values() if place.offset >= start]
        if added and all(self._is_plain(place) for place in added):
            yield from map(self._added_by_hand, added)
            return
        kind, meaning = _kind_of_tail(tail, self._text[start:])
        # Moving away a batch that lacks only an edited line would make `--accept` impossible.
        repairable = may_write and not edited
        now = "The next message sets it aside by itself; --repair does it now."
        before = self._first or "See to what else is said of this log. "
        later = f"{before}The next message then sets it aside."
        yield self._finding(
            kind=kind,
            where=f"from byte {start:,} to the end, {end - start:,} bytes" if start < end else "",
            meaning=meaning,
            advice=f"{now if repairable else later} No byte is removed.",
            repairable=repairable,
            lost=tuple(tail.lost),
        )

    def without_a_trace(self) -> Iterator[Finding]:
        """Yield a finding for messages that are missing although no line is damaged."""
        if self._lost:
            yield self._finding(
                kind=Kind.MISSING_LINE,
                meaning="Lines were removed by hand, or the file is an incomplete copy. "
                + lost_in_words(self._lost),
                advice="Put the file back from a backup, if you need them.",
                lost=tuple(self._lost),
            )

    def _hand_edit(self, place: "_Place", lost: Sequence[Span]) -> Finding:
        return self._finding(
            kind=Kind.HAND_EDIT,
            where=place.words(),
            meaning="A whole record whose checksum does not fit: somebody edited it, or a bit "
            f"flipped. It is left out. {lost_in_words(lost)}",
            advice=f"{self._first}Read the line. --accept takes it in as it stands now.",
            lost=tuple(lost),
        )

    def _is_plain(self, place: "_Place") -> bool:
        line = self._text[place.offset : place.offset + place.length]
        return plain_message(line) is not None

    def _added_by_hand(self, place: "_Place") -> Finding:
        return self._finding(
            kind=Kind.HAND_EDIT,
            where=place.words(),
            meaning="A message in plain JSON that somebody added by hand. It is not a record of "
            "the log, so it was never stored. No message is missing.",
            advice=f"{self._first}Read the line. --accept stores it as a message.",
        )

    def _glued(self, places: Sequence["_Place"]) -> Finding:
        others = f", and {len(places) - 1:,} more" if len(places) > 1 else ""
        return self._finding(
            kind=Kind.DAMAGED_LINE,
            where=places[0].words() + others,
            meaning="A line end was lost or changed (CRLF). Every record was found all the same. "
            "No message is missing.",
            advice="Nothing needs to be done; keep editors that change line ends away from logs.",
        )

    def _damaged(self, place: "_Place", text: bytes, lost: Sequence[Span]) -> Finding:
        nul = b"\0" in text
        return self._finding(
            kind=Kind.NUL_BYTES if nul else Kind.DAMAGED_LINE,
            where=place.words(),
            meaning=("The disk lost this part of the file. " if nul else "It is not a record. ")
            + lost_in_words(lost),
            advice="The rest of the session is whole. Look at the disk; put the file back from a "
            "backup, if you need the line.",
            lost=tuple(lost),
        )

    def _take(self, place: "_Place") -> list[Span]:
        """Remove from the lost seqs those between the neighbours of this place, and return them."""
        found = spans.clipped(self._lost, place.low, min(place.high, self.scan.next_seq))
        self._lost = spans.minus(self._lost, found)
        return found


@dataclass(slots=True)
class _Place:
    """A line that is not a record."""

    line: int
    offset: int
    length: int
    edited: bool
    """The line is a complete record except for its checksum."""
    own: list[Span]
    """The seq of the message in an edited line."""
    batched: bool
    """The line is an edited record of a batch, which counts only when complete."""
    low: int
    high: int
    """`low` and `high` limit the seqs that may be missing between the neighbours."""

    def words(self) -> str:
        return f"line {self.line:,}, bytes {self.offset:,} to {self.offset + self.length:,}"


def _places(text: bytes) -> dict[int, _Place]:
    """Return each line that is not a record, by its offset."""
    found: dict[int, _Place] = {}
    waiting: list[_Place] = []
    offset, low = 0, 1
    for number, line in enumerate(text.split(b"\n"), 1):
        record = parse_line(line) if line else None
        if record is not None:
            for place in waiting:
                place.high = record.seq - 1
            waiting.clear()
            low = record.seq + isinstance(record, Message)
        elif line:
            signed = re_sign(line)
            edit = parse_line(signed) if signed is not None else None
            own = [(edit.seq, edit.seq)] if isinstance(edit, Message) else []
            place = _Place(
                line=number,
                offset=offset,
                length=len(line),
                edited=edit is not None,
                own=own,
                batched=edit is not None and scan.part_of(edit) is not None,
                low=low,
                high=sys.maxsize,
            )
            found[offset] = place
            waiting.append(place)
        offset += len(line) + 1
    return found


def _kind_of_tail(tail: scan.Tail, rest: bytes) -> tuple[Kind, str]:
    if b"\0" in rest:
        return (
            Kind.NUL_BYTES,
            "The file ends with room that was reserved and never written, as a power cut leaves "
            f"it. {lost_in_words(tail.lost)}",
        )
    if tail.seqs or tail.changes or not rest:
        told = lost_in_words(tail.lost) if tail.lost else "None of them was acknowledged."
        return (
            Kind.INCOMPLETE_BATCH,
            f"Records that belong together are not all there; so none of them counts. {told}",
        )
    if tail.lost or tail.damaged:
        return Kind.DAMAGED_LINE, f"The last line is damaged. {lost_in_words(tail.lost)}"
    return Kind.TORN_TAIL, "The last write was cut off, and never acknowledged."


def lost_in_words(lost: Sequence[Span]) -> str:
    """Return a sentence that names the messages which cannot be read."""
    if not lost:
        return "No message is missing."
    seqs = ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in lost)
    one = spans.size(lost) == 1
    return f"The {'message' if one else 'messages'} with seq {seqs} cannot be read."
