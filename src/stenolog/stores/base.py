"""The `Store` interface, its promises P1 to P13, and the types that its methods use."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import NoSuchSession
from stenolog.records import (
    CompactionResult,
    Message,
    SessionInfo,
    Span,
    TrashedSession,
    UndoResult,
)

if TYPE_CHECKING:
    from stenolog.stores.admin import StoreAdmin

FORKED_AT: Final = "forked_at"
"""Field of a fork's meta: the last seq that was copied from the source session."""
# These fields record deliveries, answered requests and resumes, and `continued_in` names the
# session in which a chat continues. A seq in such a field refers to a message of the source: in
# the fork, the same seq may belong to another message.
NOT_FORKED: Final = frozenset({"delivery", "continued_in", "last_response", "requests", "tries"})
"""Fields of a session's meta that `fork` does not copy, because they describe only the source."""


def forked_meta(meta: Mapping[str, Any], upto: int) -> dict[str, Any]:
    """Return the meta of a fork that ends at the seq `upto`."""
    copied_fields = {name: value for name, value in meta.items() if name not in NOT_FORKED}
    return {**copied_fields, FORKED_AT: upto}


def fork_seq_of(info: SessionInfo) -> int:
    """Return the seq up to which the messages of a fork were copied; 0 for any other session."""
    seq = info.meta.get(FORKED_AT) if info.forked_from is not None else None
    return seq if isinstance(seq, int) and not isinstance(seq, bool) else 0


class SessionView(Struct, frozen=True, kw_only=True):
    """Info, summary and visible messages of a session at one moment.

    If two views have the same `uid`, `generation` and `change`, the earlier view lacks only
    messages that were appended after it.

    `uid` differs if the session was deleted or purged and another session now has the key.

    `generation` grows with every step that moves or destroys messages. On all engines, `compact`
    and `purge(before=)` increase `generation`. On all engines except `memory:`, overwriting the
    session with a copy increases `generation`, too. On JSONL, every replacement of the log file
    increases `generation`, for example after a failed sync.

    `change` grows with `truncate_history`, `clear`, `hide`, `pop`, `set_history`, `checkpoint`,
    `set_summary`, `set_meta` and `undo`. Calls that change nothing do not increase `change`.

    Deleting a session and restoring it under the same key keeps its content, so `uid`, `generation`
    and `change` need not differ afterwards.
    """

    info: SessionInfo
    messages: tuple[Message, ...]
    """Visible messages by seq; a tail view has only the messages after the earlier view."""
    # On JSONL, `info` already counts the seqs of a write that another process has not finished.
    # The messages of an unfinished write cannot be read yet.
    upto: int
    """Seq up to which messages were read; below `info.last_seq` only during a write on JSONL."""
    last: int | None = None
    """Maximum number of messages that the caller requested; None for all."""
    after: int | None = None
    """`upto` of the earlier view that this tail view continues; None in a full view."""

    @property
    def key(self) -> str:
        """Key of the session."""
        return self.info.key

    @property
    def uid(self) -> str:
        """Uid of the session, as in `SessionInfo.uid`."""
        return self.info.uid

    @property
    def generation(self) -> int:
        """Generation of the session, as in `SessionInfo.generation`."""
        return self.info.generation

    @property
    def change(self) -> int:
        """Number of the newest change, as in `SessionInfo.change`."""
        return self.info.change

    @property
    def summary(self) -> str:
        """Summary of the hidden messages at the start of the session; may be empty."""
        return self.info.summary

    @property
    def is_tail(self) -> bool:
        """Whether the view holds only the messages after an earlier view."""
        return self.after is not None

    def matches(self, uid: str, generation: int, change: int) -> bool:
        """Return whether this view has the given uid, generation and change number."""
        return (uid, generation, change) == (self.uid, self.generation, self.change)

    def merged(self, newer: "SessionView") -> "SessionView":
        """Return the full view at the time of `newer`, which is `Store.view(key, since=self)`."""
        if newer.after is None:
            return newer
        messages = self.messages + newer.messages
        if self.last is not None:
            messages = messages[max(len(messages) - self.last, 0) :]
        return replace(newer, messages=messages, after=self.after)


@runtime_checkable
class Store(Protocol):
    """Storage for sessions. Every method behaves the same on every engine.

    P1 Durable: when an append returns, the message survives `kill -9` and power loss. P2 Atomic:
    after any crash, a message, a batch, a summary, a checkpoint or a replaced history is stored
    completely or not at all. P3 Damage is contained and reported: an incomplete last line is
    skipped and reported, and the next append starts on a new line. Damage in the middle of the data
    affects only the damaged records. P4 Nothing is destroyed: messages that were truncated,
    cleared, hidden, summarized, replaced or compacted stay readable with `full=True`, and `undo`
    makes them visible again. P5 Summaries do not race with appends: a checkpoint hides the messages
    up to the seq that it names, never a later message. P6 Keys are independent: any non-empty text
    of up to 1,024 bytes of UTF-8 is a key, and no two keys share data. P7 Many writers: threads,
    tasks and processes may append at the same time. Each acknowledged message is stored exactly
    once, each writer's order is kept, and readers never wait. P8 Errors are typed, and grouped by
    the party that must act (see errors.py). After `NotStored` the message is certainly not stored;
    after `MaybeStored` the message may or may not be stored. P9 Bounded cost: the cost of an append
    does not depend on the length of the session; the cost of a read depends on the number of
    visible messages. P10 Lossless: messages are returned exactly as they were given. A message that
    cannot be stored exactly is rejected, and nothing is written. P11 Private: files have mode 0600,
    directories 0700; symlinks below the workspace are not followed. P12 Idempotent: if the session
    already has the idempotency key (`once`) of an append, the append is not stored again. P13
    Readable in all later versions: every released format stays readable. A newer format is rejected
    with an error that names the format.

    For an unknown key, reads return `[]` or `""`, and `pop` returns None. `info`, `view`, `delete`,
    `fork` and `lease` raise NoSuchSession, `undo` raises NothingToUndo. `truncate_history`, `clear`
    and `compact` do nothing and create nothing. Appends, `set_summary`, `set_history` and
    `set_meta` create the session.
    """

    @property
    def admin(self) -> "StoreAdmin":
        """The calls that administer the store: trash, purges, copies, health and others."""

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        """Append `{"role": role, "content": content}` and return its seq.

        Raises the same errors as `add_full_message`.
        """

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append one message and return its seq.

        `once`: idempotency key. If the session already has this key, return the seq of the first
        append.

        Raises RefusedMessage, OnceConflict, UsageError (nothing was written); StoreBusy, NotStored
        (certainly not stored); MaybeStored (retry with the same `once`).
        """

    def add_messages(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        once: str | None = None,
        at: Sequence[datetime] | None = None,
    ) -> list[int]:
        """Append a batch completely or not at all, and return its seqs.

        `once`: one idempotency key for the whole batch. `at`: times of the messages, for messages
        that were first stored elsewhere [default: now]. Raises the same errors as
        `add_full_message`.
        """

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages by seq.

        `after`: return only messages with a greater seq. `last`: return only the last `last` of
        these messages. `full=True`: every message, including hidden, replaced and archived ones,
        each with its `hidden` flag.
        """

    def get_summary(self, key: str) -> str:
        """Return the summary of the hidden messages at the start; may be empty."""

    def set_summary(self, key: str, text: str) -> None:
        """Replace the summary and nothing else. Raises the same errors as `add_full_message`."""

    def truncate_history(self, key: str, keep_last: int) -> None:
        """Hide all visible messages except the last `keep_last`.

        A `keep_last` of 0 or less hides all messages. If at most `keep_last` messages are visible,
        nothing changes.
        """

    def clear(self, key: str, *, upto: int | None = None) -> None:
        """Hide all messages and empty the summary; one `undo` reverts both.

        `upto`: hide only messages up to this seq.
        """

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> None:
        """Make exactly these messages visible; the summary stays.

        The common prefix of the visible messages and `messages` is not touched. All other visible
        messages are hidden, and only the rest of `messages` is appended.
        `expect_last`: last seq that the caller has read. If the session has another last seq, raise
        Conflict and change nothing. `expect_last=0` expects a session without messages.
        """

    def pop(self, key: str) -> Message | None:
        """Hide the last visible message and return it, or None if no message is visible."""

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """Replace the summary and hide all messages up to the seq `upto`, in one step.

        The floor is the seq up to which every message is hidden. If `upto` is not above the floor,
        only the summary changes. `expect_floor`: raise Conflict if the session has another floor.
        Raises UsageError if `upto` is greater than the last seq.
        """

    def undo(self, key: str, *, answered: Span | None = None) -> UndoResult:
        """Undo the newest change of visibility or summary.

        These are truncate, clear, hide, show, pop, set_history, checkpoint and set_summary.

        Messages that were appended after the undone operation stay visible. `answered`: first and
        last seq of the answer to the messages that `set_history` appended. If the undone operation
        is a `set_history`, `undo` also hides the answer. The last eight operations can be undone;
        there is no redo. Raises NothingToUndo.

        The result has the undone operation (`op`), the numbers of messages that became visible
        (`shown`) and hidden (`hid`), and `summary_restored`.
        """

    def compact(self, key: str) -> CompactionResult:
        """Move the hidden messages at the start of the session into an archive.

        The result has the number of moved messages (`archived`), `bytes_before` and `bytes_after`.
        """

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Create a session `new_key` from the visible messages up to the seq `at`, inclusive.

        The fork has the same messages, byte for byte, with the same seqs and times. The summary and
        the meta of the fork are the same, too, except the meta fields in NOT_FORKED. `forked_from`
        names the source, and the field `forked_at` in the fork's meta is the last copied seq. A
        fork has no hidden messages, no undo steps and no idempotency keys. Raises NoSuchSession;
        SessionExists; UsageError if `at` is greater than the last seq or below the floor. Below the
        floor, the summary would describe messages that the fork should not have.
        """

    def delete(self, key: str) -> TrashedSession:
        """Move the session into the trash, in one step. Raises NoSuchSession.

        The result has `key`, `uid`, the number of messages (`count`) and the time (`deleted`).
        """

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> "Lease":
        """Acquire the lease for a turn in this session: one holder at a time, across all processes.

        The lease guards turns, not appends: calls on the store itself need no lease. Waits up to
        `wait` seconds for the current holder [default: the store's busy_timeout]. Raises StoreBusy;
        NoSuchSession, also if the session is deleted during the wait.
        """

    def info(self, key: str) -> SessionInfo:
        """Return the info of the session. Raises NoSuchSession."""

    def view(
        self, key: str, last: int | None = None, *, since: SessionView | None = None
    ) -> SessionView:
        """Return info, summary and visible messages as of one moment. Raises NoSuchSession.

        `last`: return at most this number of messages, the newest ones.

        `since`: an earlier view of the key, to read only what changed. If uid, generation and
        change number equal those of `since`, the result is a tail view: the current info, and the
        messages that were appended after `since`. If uid, generation or change number differs, the
        result is a full view, possibly of another session with this key. `since.merged(result)`
        returns the full view in both cases. The result has the same `last` as `since`.
        """

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return the session keys in byte order. `after`: the last key of the previous page."""

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields of the session's meta (title, tags …). None removes a field."""

    def follow(
        self, key: str, *, after: int = 0, uid: str | None = None, timeout: float | None = None
    ) -> Iterator[Message]:
        """Yield each message after seq `after` once, in order; wait for new ones from any process.

        Ends when no message arrives for `timeout` seconds, or when the store is closed. With `uid`,
        follows only the session with that `SessionInfo.uid`. Raises SessionDeleted if the key has
        no session or a session with another uid. Without `uid`, waits until the session exists,
        then follows the session until it is deleted. If `after` comes from an earlier read, pass
        `uid` too: a session that was created again counts its messages from 1.
        """

    def close(self) -> None:
        """Close the store and release its resources. Later calls raise StoreClosed.

        Closing a store twice does nothing.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class Lease(Protocol):
    """The right to run a turn in a session, until `release`, or until ttl passes without `renew`.

    Used as a context manager, a lease is released on exit. On the JSONL store, ttl does not end the
    lease: the operating system releases the lease when the holder's process ends.
    """

    @property
    def key(self) -> str:
        """Key of the session."""

    @property
    def epoch(self) -> int:
        """Fencing token: a number that grows with each lease of the key.

        The number grows even if the session was deleted or purged and another session has the key.
        After a purge on JSONL, the number comes from the clock.
        """

    @property
    def store(self) -> Store:
        """The store, with writes that are fenced by the lease.

        Writes raise LeaseLost after a release, after another holder took over, and after the
        session was purged. Writes still work if only the ttl has passed, and if the session is
        deleted or restored.
        """

    @property
    def lost(self) -> bool:
        """Whether the lease was released, expired or taken over, or the session was purged."""

    def renew(self) -> None:
        """Extend the lease to ttl seconds from now. Raises LeaseLost."""

    def release(self) -> None:
        """Release the lease; later writes through `store` fail. A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def find_info(store: Store, key: str) -> SessionInfo | None:
    """Return the info of a session; None if the session does not exist."""
    try:
        return store.info(key)
    except NoSuchSession:
        return None


def find_view(store: Store, key: str, last: int | None = None) -> SessionView | None:
    """Return a view of a session; None if the session does not exist."""
    try:
        return store.view(key, last)
    except NoSuchSession:
        return None


def conversation_times(
    created: datetime, updated: datetime, *, meta: Mapping[str, Any], last_seq: int
) -> tuple[datetime, datetime]:
    """Return the times at which a conversation started and was last continued.

    The meta of an imported session has a field `imported`: import receipts with the times of the
    conversation in the other program. The conversation started at the earliest time in the receipts
    or in this store. If no message was added after an import, the conversation was last continued
    at the last time in the receipt of that import.
    """
    if "imported" not in meta:
        return created, updated
    receipts = list(_imported_times(meta["imported"]))
    start_time = min([created, *(first for first, _, _ in receipts)])
    import_ends = [last for _, last, imported_upto in receipts if imported_upto == last_seq]
    return start_time, max([start_time, *import_ends]) if import_ends else max(start_time, updated)


def _imported_times(receipts: object) -> Iterator[tuple[datetime, datetime, object]]:
    """Yield start time, last time, and last seq of each import receipt.

    Any client may write meta, so values that are not receipts are skipped.
    """
    for receipt in receipts if isinstance(receipts, list) else ():
        try:
            first, last = (datetime.fromisoformat(receipt[name]) for name in ("created", "updated"))
            if first.tzinfo is not None and last.tzinfo is not None:
                yield first.astimezone(UTC), last.astimezone(UTC), receipt.get("last_seq")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            continue
