"""Findings and reports of `steno doctor`, shared by all engines."""

from msgspec import Struct

from stenolog.records import Span


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
