"""The `StoreAdmin` interface, and the findings of `steno doctor`, which all engines share.

The calls of StoreAdmin administer all sessions of a store.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from stenolog.records import Health, PurgeResult, SessionInfo, Span, TrashedSession
from stenolog.stores.snapshots import SnapshotMark, SnapshotReading, SnapshotWriter

DeletedSession = tuple[str, datetime]
"""Uid and deletion time of a session in the trash."""


class Place(Struct, frozen=True, kw_only=True):
    """The place of a store's sessions and of their search index."""

    namespace: str
    busy_timeout: float = 5.0
    """Maximum time that a call waits for other writers, in seconds."""
    catalog_file: Path | None = None
    """Path of the search index next to the sessions; None if the store can have no such file."""
    writes_catalog: bool = True
    """Whether the search index may be written; not if the store was opened read-only."""


class StoreAdmin(Protocol):
    """Administration of a store: visibility, trash, purges, changes, copies, health.

    Every engine implements every call. On a read-only store, calls that write raise ReadOnly. If
    the store belongs to a lease, writes raise LeaseLost once the lease is lost.

    For an unknown key, `restore` and `purge` raise NoSuchSession. `hide` and `show` do nothing and
    create nothing.
    """

    def hide(self, key: str, first: int, last: int) -> None:
        """Hide the messages from seq `first` to seq `last`, both included."""

    def show(self, key: str, first: int, last: int) -> None:
        """Show the hidden messages from seq `first` to seq `last`, both included."""

    def list_trash(self, *, unfinished: bool = False) -> list[TrashedSession]:
        """Return the deleted sessions, the last deleted first.

        `unfinished`: instead, return the sessions that an interrupted purge hid permanently but did
        not yet delete. A key or uid that is unknown is returned as an empty text. `finish_purge`,
        or another purge of the key, finishes an interrupted purge.
        """

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Restore the last deleted session of this key, or the session with this uid.

        `as_key`: restore the session under this key. Raises NoSuchSession if the session is not in
        the trash, SessionExists if the key is in use.
        """

    def delete_unchanged(self, info: SessionInfo) -> TrashedSession | None:
        """Move a session into the trash, unless it changed since `info` was read.

        The check and the move are one step: no message that was added after `info` was read gets
        into the trash. Return None, and change nothing, if the session has another uid, newer
        messages or another change number. Raises NoSuchSession.
        """

    def purge(
        self,
        key: str,
        *,
        before: int | None = None,
        trash: Collection[DeletedSession] | None = None,
    ) -> PurgeResult:
        """Delete a session or its messages permanently. Raises NoSuchSession.

        No other call destroys messages.

        Without options: purge the session with its archives, and every deleted session of this key,
        so that no trace of the key remains.

        With `before`: purge the messages below this seq, in the live storage and in archives. The
        idempotency keys and void records of these messages are purged, too. Undo steps that would
        bring these messages back are also purged. The session stays. Of the purged messages, the
        session keeps only the seqs.

        With `trash`: purge exactly these deleted sessions of the key. Sessions that were restored,
        deleted again or created after the trash was listed are kept. Raises NoSuchSession, and
        changes nothing, if one of these sessions is not in the trash, or if `trash` is empty.
        `before` and `trash` together raise UsageError.

        If a purge is interrupted, call `purge` again. If the session itself is purged, a running
        turn loses its lease, and later writes of the lease holder do not create the session again.
        If the purge fails without effect, the running turn continues.
        """

    def finish_purge(self, uid: str) -> PurgeResult:
        """Finish the interrupted purge of the session with this uid, and change no other session.

        Raises NoSuchSession if no purge of that session is unfinished.
        """

    def stamps(self) -> dict[str, str]:
        """Return a stamp for each session: a text that differs after every change by any process.

        An index compares stamps to find the sessions that changed.
        """

    def leased(self, keys: Collection[str]) -> set[str]:
        """Return the subset of `keys` whose sessions are leased now, by any process."""

    def read_marker(self, name: str) -> str:
        """Return the value of the change marker `name`; empty for a marker without a value.

        Change markers show all processes that derived data is out of date.
        """

    def update_marker(self, name: str) -> None:
        """Give the change marker `name` a new value, durably. Raises StoreUnavailable, ReadOnly."""

    def list_snapshots(self) -> list[SnapshotMark]:
        """Return the mark of every session of this namespace: deleted sessions by key, then others.

        Purged sessions are not included.
        """

    def read_snapshot(
        self, mark: SnapshotMark, *, after: int = 0
    ) -> AbstractContextManager[SnapshotReading]:
        """Read a session and its messages after a seq, without blocking writers.

        The session may have been deleted or restored since it was listed: `Snapshot.deleted` has
        the current state. The content is durable: a power cut cannot remove copied messages.

        Raises NoSuchSession if the session no longer exists, StoreBusy if other processes keep
        replacing it, DamagedStore if its state cannot be read. A store that looks only where the
        session was listed may also raise NoSuchSession if the session was deleted, restored or
        renamed after the listing.
        """

    def snapshot_writer(self) -> AbstractContextManager[SnapshotWriter]:
        """Return a writer for several sessions.

        The sessions are durable when the `with` ends without an error.

        An error in `write` rolls back only that session; the caller may write more sessions. If the
        `with` ends with an error, some sessions may have been written, each completely. A store has
        at most one writer at a time. A read inside the `with` may or may not see the new sessions.
        """

    def health(self) -> Health:
        """Return whether writes are expected to work, and the problems if not."""

    @property
    def place(self) -> Place:
        """The place of the sessions and of their search index."""


# --- findings --------------------------------------------------------------------------------


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
