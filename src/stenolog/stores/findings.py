"""Findings and reports of `steno doctor`, shared by all engines."""

import shlex
from collections.abc import Iterator, Sequence

from msgspec import Struct

from stenolog.records import Span
from stenolog.stores import spans


class Finding(Struct, frozen=True, kw_only=True):
    """One problem that `steno doctor` found."""

    kind: str
    """Kind of the problem: a value of `Kind` for logs, another text for databases."""
    key: str | None = None
    """Key of the session; None if the session is unknown or the problem belongs to no session."""
    path: str = ""
    """Path of the file, relative to the workspace, or the database."""
    where: str = ""
    """Position in the file; empty for the whole file."""
    meaning: str
    advice: str
    repairable: bool = False
    """Whether `steno doctor --repair` repairs the problem."""
    lost: tuple[Span, ...] = ()
    """Seqs of messages that cannot be read because of the problem."""


class RepairResult(Struct, frozen=True, kw_only=True):
    """Outcome of the repair of one finding."""

    finding: Finding
    done: bool
    message: str
    """Text that says what was repaired, or why nothing was repaired."""


class Report(Struct, frozen=True, kw_only=True):
    """Result of an examination."""

    workspace: str = ""
    sessions: int
    """Number of examined sessions, including deleted ones."""
    findings: tuple[Finding, ...]


def lost_messages_finding(key: str, place: str, lost: Sequence[Span]) -> Finding:
    """Return the finding for messages that were already lost when the session was copied."""
    return Finding(
        kind="lost message",
        key=key,
        where=place,
        meaning=f"{spans.size(lost):,} messages were already damaged when the session was copied.",
        advice="Run `steno doctor` on the store it was copied from, then copy it again.",
        lost=tuple(lost),
    )


def unreadable_findings(
    key: str, place: str, missing: Sequence[Span], damaged: Sequence[Span], *, advice: str
) -> Iterator[Finding]:
    """Yield the findings for missing messages and for damaged messages."""
    for kind, lost in (("missing message", missing), ("damaged message", damaged)):
        if lost:
            yield Finding(
                kind=kind,
                key=key,
                where=place,
                meaning=f"{spans.size(lost):,} messages cannot be read.",
                advice=advice,
                lost=tuple(lost),
            )


def damaged_state_finding(key: str, place: str) -> Finding:
    """Return the finding for a session whose state cannot be read."""
    return Finding(
        kind="damaged state",
        key=key,
        where=place,
        meaning="The state of the session (hidden messages, summary, meta) cannot be read. Its "
        "messages can be read. The state is rebuilt from the recorded changes.",
        advice="--repair stores the rebuilt state. To save the messages first: "
        f"`steno export {shlex.quote(key)}`.",
        repairable=True,
    )


def damaged_changes_finding(key: str, place: str, numbers: Sequence[int]) -> Finding:
    """Return the finding for unreadable changes that `undo` needs."""
    return Finding(
        kind="damaged change",
        key=key,
        where=place,
        meaning=f"Undo needs change {', '.join(map(str, numbers))}, which cannot be read. "
        "No message is missing.",
        advice="--repair removes the undo steps that cannot be undone any more.",
        repairable=True,
    )


def stray_rows_finding(key: str, place: str, count: int, last_seq: int, *, advice: str) -> Finding:
    """Return the finding for messages whose seqs were never assigned."""
    return Finding(
        kind="stray row",
        key=key,
        where=place,
        meaning=f"{count:,} messages have a seq above the last seq, {last_seq:,}.",
        advice=advice,
    )
