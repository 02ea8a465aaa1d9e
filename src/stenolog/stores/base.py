"""What every store promises: the protocol, its promises by number, and the values it speaks in."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Protocol, Self, runtime_checkable

from msgspec import Struct
from msgspec.structs import replace

from stenolog.errors import StenologError
from stenolog.records import Compacted, Health, Message, Purged, SessionInfo, Span, Trashed, Undone

FORKED_AT: Final = "forked_at"
"""The field of a fork's meta: the seq up to which it was taken over from its source."""
NOT_FORKED: Final = frozenset({"delivery", "goes_on_in", "last_response", "requests", "tries"})
"""Fields of the meta that `fork` does not copy: which answers were sent or received, which requests
were answered, how often a turn was resumed, and where a chat continues. All of it was done for the
source, and the seqs in it mean other messages in the fork."""


def forked_meta(meta: Mapping[str, Any], upto: int) -> dict[str, Any]:
    """Return the meta of a fork that ends at the seq `upto`."""
    kept = {name: value for name, value in meta.items() if name not in NOT_FORKED}
    return {**kept, FORKED_AT: upto}


def forked_at(info: SessionInfo) -> int:
    """Return the seq up to which the messages of a fork were copied; 0 for any other session."""
    found = info.meta.get(FORKED_AT) if info.forked_from is not None else None
    return found if isinstance(found, int) and not isinstance(found, bool) else 0


class SessionView(Struct, frozen=True, kw_only=True):
    """Info, summary and visible messages of a session at one moment.

    Three numbers tell whether an earlier view still holds, apart from newly appended messages:

    - `uid`: another one if the key was deleted and created again, or purged.
    - `generation`: grows with every step that moves or destroys messages: `compact` and
      `purge(before=)` on all engines, a copy written over the session on the database and file
      engines, and on JSONL every replacement of the log file, for example after a failed sync.
    - `change`: grows with `truncate_history`, `clear`, `hide`, `pop`, `set_history`, `checkpoint`,
      `set_summary`, `set_meta` and `undo`. Calls that change nothing do not count.

    Deleting and restoring a session under the same key may leave all three as they were: the
    content is the same, too.
    """

    info: SessionInfo
    messages: tuple[Message, ...]
    """The visible messages by seq; of a tail, only the new ones."""
    upto: int
    """Seq up to which messages were read.

    It is `info.last_seq`, except on JSONL while another process is in the middle of a write:
    `info` counts the seqs of that write, but its messages cannot be read yet.
    """
    last: int | None = None
    """The limit that the view was taken with."""
    after: int | None = None
    """For a tail: `upto` of the view that it continues. None for a full view."""

    @property
    def key(self) -> str:
        """Key of the session."""
        return self.info.key

    @property
    def uid(self) -> str:
        """`SessionInfo.uid`."""
        return self.info.uid

    @property
    def generation(self) -> int:
        """`SessionInfo.generation`."""
        return self.info.generation

    @property
    def change(self) -> int:
        """`SessionInfo.change`."""
        return self.info.change

    @property
    def summary(self) -> str:
        """Summary of the messages below the floor; empty if there is none."""
        return self.info.summary

    @property
    def is_tail(self) -> bool:
        """Whether it holds only the messages after an earlier view."""
        return self.after is not None

    def holds(self, uid: str, generation: int, change: int) -> bool:
        """Return whether a session with these numbers only has appended messages since."""
        return (uid, generation, change) == (self.uid, self.generation, self.change)

    def merged(self, newer: "SessionView") -> "SessionView":
        """Return the full view at the moment of `newer`, which `Store.refresh(self)` returned."""
        if newer.after is None:
            return newer
        messages = self.messages + newer.messages
        if self.last is not None:
            messages = messages[max(len(messages) - self.last, 0) :]
        return replace(newer, messages=messages, after=self.after)


@runtime_checkable
class Store(Protocol):
    """Where sessions live. Every method means the same on every engine.

    P1   Durable: when an append returns, the message survives `kill -9` and power loss.
    P2   Whole or absent: after any crash a message, a batch, a summary, a checkpoint, a replaced
         history is there completely or not at all.
    P3   Never glued, never silent: a torn tail is set aside and reported, the next append starts
         on a clean line; damage in the middle hides only itself and is reported.
    P4   Nothing destroyed: what is truncated, cleared, hidden, summarised, replaced or compacted
         stays readable with `full=True`, and `undo` takes it back.
    P5   No race between summary and talk: a checkpoint hides the messages up to the seq it names,
         whatever arrived meanwhile.
    P6   No two keys share anything: any non-empty text up to 1,024 bytes of UTF-8 is a key.
    P7   Many writers: threads, tasks and processes append at once; each acknowledged message is
         there exactly once, each writer's own order is kept, readers never wait.
    P8   Errors surface: typed, sorted by who must act; `NotStored` is surely absent,
         `MaybeStored` is unknown.
    P9   Bounded cost: an append costs the same at any length; reading costs what is visible.
    P10  Lossless: what goes in comes out; what cannot be kept is refused and nothing is written.
    P11  Private: files 0600, directories 0700, no symlink below the workspace is followed.
    P12  Once: a token that the session already has is not stored again.
    P13  Readable for ever: every released format stays readable, a newer one is refused by name.

    Unknown key: reads give `[]` and `""`; `info`, `view` and `refresh` raise NoSuchSession, `undo`
    NothingToUndo;
    truncate, clear, hide, compact do nothing and create nothing; `pop` gives None; `delete`,
    fork, restore, purge and lease raise NoSuchSession; add, set_summary, set_history and set_meta
    create the session.
    """

    def add_message(self, key: str, role: str, content: Any, *, once: str | None = None) -> int:
        """Append `{"role": role, "content": content}`; its seq. Raises as add_full_message."""
        ...

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int:
        """Append one message; its seq. With a token the session has, the first one's seq.

        Raises RefusedMessage, OnceConflict, InvalidKey (nothing written); StoreBusy, NotStored
        (surely absent); MaybeStored (retry with the same token).
        """
        ...

    def add_messages(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        once: str | None = None,
        at: Sequence[datetime] | None = None,
    ) -> list[int]:
        """Append a batch, whole or not at all; its seqs. Raises as add_full_message.

        `at`: when each was said, for messages that were first kept elsewhere; else it is now.
        """
        ...

    def get_history(
        self,
        key: str,
        *,
        last: int | None = None,
        after: int | None = None,
        full: bool = False,
    ) -> list[Message]:
        """The visible messages by seq: those past `after`, of these the `last`.

        `full=True`: every message, hidden, replaced and archived ones included and marked.
        """
        ...

    def get_summary(self, key: str) -> str:
        """What stands for the messages below the floor; empty where there is none."""
        ...

    def set_summary(self, key: str, text: str) -> None:
        """Replace the summary and nothing else. Raises as add_full_message."""
        ...

    def truncate_history(self, key: str, keep_last: int) -> None:
        """Hide all but the last visible ones: none or less hides all, enough changes nothing."""
        ...

    def clear(self, key: str, *, upto: int | None = None) -> None:
        """Hide all messages and empty the summary, in one step that `undo` takes back.

        `upto`: hide only messages up to this seq.
        """
        ...

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> None:
        """Make exactly these messages visible; the summary stays.

        The common prefix stays as it is, the rest is hidden, only the new tail is appended.
        `expect_last`: raise StaleHistory and change nothing if the last seq of the session is not
        this one, because a message was appended since the caller looked. 0: no session.
        """
        ...

    def hide(self, key: str, first: int, last: int) -> None:
        """Hide the messages with these seqs, both included."""
        ...

    def pop(self, key: str) -> Message | None:
        """Hide the last visible message and return it; None where there is none."""
        ...

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> None:
        """Replace the summary and hide everything up to this seq, in one record.

        At or below the floor only the summary changes. Raises UsageError beyond the end,
        StaleCheckpoint where the floor is not the expected one.
        """
        ...

    def undo(self, key: str, *, answered: Span | None = None) -> Undone:
        """Take back the newest truncate, clear, hide, replace, checkpoint or set_summary.

        Messages that were appended since stay, but for those that are `answered`, first and last
        seq, to what a replace left in sight: they are hidden with it, in the same step. Eight
        deep, no redo. Raises NothingToUndo.
        """
        ...

    def compact(self, key: str) -> Compacted:
        """Move what lies below the floor out of the live storage, into an archive."""
        ...

    def fork(self, key: str, new_key: str, *, at: int | None = None) -> None:
        """Make a session of its own from what is in sight, up to the seq `at`, that included.

        The fork has the same messages byte for byte, seqs, times, summary and meta, without the
        fields in NOT_FORKED. `forked_from` names its source, the field `forked_at` of its meta the
        last seq. It has no hidden messages, no undo steps and no idempotency keys. Raises
        NoSuchSession; SessionExists; UsageError where `at` is beyond the end or below the floor,
        whose summary would tell of more.
        """
        ...

    def delete(self, key: str) -> Trashed:
        """Put the session into the trash, in one step. Raises NoSuchSession."""
        ...

    def restore(self, key: str, *, uid: str | None = None, as_key: str | None = None) -> None:
        """Bring back the last deleted session of this key, or the one of this uid.

        Raises NoSuchSession where the trash has none, SessionExists where the key (or `as_key`)
        is taken.
        """
        ...

    def list_trash(self) -> list[Trashed]:
        """The deleted sessions, the last deleted first."""
        ...

    def purge(self, key: str, *, before: int | None = None) -> Purged:
        """Delete for good: the only call that destroys. Raises NoSuchSession.

        Without `before`, the session with its archives and every deleted session of this key: no
        trace of the key stays. With `before`, the messages below this seq, in the live storage and
        in archives, with their tokens, voids, and the undo steps that reach them; the session
        stays, and keeps of them only which seqs they were. A call that was interrupted is made
        again. A turn in a session that is gone is over: its lease is lost, and what its holder
        still writes does not bring the session back. Where nothing could be done, it goes on.
        """
        ...

    def lease(self, key: str, *, ttl: float, wait: float | None = None) -> "Lease":
        """The turn in this session: one holder at a time, in all processes.

        It guards turns, not appends: plain calls always work. Waits for the holder before it for
        `wait` seconds, else the store's busy_timeout. Raises NoSuchSession, also where the
        session goes meanwhile, StoreBusy.
        """
        ...

    def stamps(self) -> dict[str, str]:
        """For each session a mark that is another one after every change, made anywhere.

        What an index needs to know which sessions to look at again.
        """
        ...

    def info(self, key: str) -> SessionInfo:
        """What is known of the session. Raises NoSuchSession."""
        ...

    def view(self, key: str, last: int | None = None) -> SessionView:
        """Return info, summary and visible messages of one moment. Raises NoSuchSession.

        `last`: only so many messages, the newest.
        """
        ...

    def refresh(self, view: SessionView) -> SessionView:
        """Return what is new since a view was taken. Raises NoSuchSession.

        If uid, generation and change number are those of `view`, the result is a tail: its info is
        current and its messages are those appended since. Otherwise it is a full view with the
        same `last`, maybe of another session with this key. `view.merged(result)` is the full
        view in both cases.
        """
        ...

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Keys in the order of their bytes; `after` is the last key of the page before."""
        ...

    def set_meta(self, key: str, /, **fields: Any) -> None:
        """Set fields of the session's own data (title, tags …); None removes one."""
        ...

    def follow(
        self,
        key: str,
        *,
        after: int = 0,
        uid: str | None = None,
        timeout: float | None = None,
    ) -> Iterator[Message]:
        """Yield each message past `after` once, by seq, as it arrives, from any process.

        Ends when nothing came for `timeout` seconds, or the store is closed. With `uid`, follows
        only that session (`SessionInfo.uid`): raises SessionDeleted if the key has no session, or
        another one. Without it, waits for a session that does not exist yet, then follows that one
        until it is deleted. Give `uid` together with an `after` that you read earlier: a session
        that was created again counts its messages from 1.
        """
        ...

    def health(self) -> Health:
        """Whether writes can be expected to work, and what is wrong where not."""
        ...

    def close(self) -> None:
        """Let go of everything; a second call does nothing. Later calls raise StoreClosed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class Lease(Protocol):
    """The turn in a session, until it is released, or ttl seconds passed without `renew`.

    A context manager that releases. On the JSONL store the lock is gone with its holder and ttl
    only tells doctor when to call the holder stalled.
    """

    @property
    def key(self) -> str:
        """The session."""
        ...

    @property
    def epoch(self) -> int:
        """Grows with each lease of the key: who writes elsewhere can fence by it.

        Also where the session was deleted or purged in between, and another one begun.
        """
        ...

    @property
    def store(self) -> Store:
        """The store, whose writes raise LeaseLost once the turn is over.

        That is when it was released, another holder took over, or the session was purged. To have
        run out alone is no harm, nor is it where the session is deleted, or brought back.
        """
        ...

    @property
    def lost(self) -> bool:
        """Whether it was released, has run out, was taken over, or the session was purged."""
        ...

    def renew(self) -> None:
        """Another ttl from now. Raises LeaseLost."""
        ...

    def release(self) -> None:
        """Let the next one in, and write no more; a second call does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Append(Struct, frozen=True, kw_only=True):
    """One caller's append, as a group of them is handed over."""

    messages: Sequence[Message | Mapping[str, Any]]
    once: str | None = None
    at: Sequence[datetime] | None = None


@runtime_checkable
class PatientStore(Protocol):
    """A store that tells how long its calls wait for others."""

    @property
    def busy_timeout(self) -> float:
        """In seconds."""
        ...


@runtime_checkable
class GroupStore(Protocol):
    """A store that takes the appends of several callers to one session in one go."""

    def add_group(self, key: str, appends: Sequence[Append]) -> list[list[int] | StenologError]:
        """For each append its seqs, or what went wrong with it; each is whole or absent."""
        ...


Deleted = tuple[str, datetime]
"""A session in the trash, by its uid and when it was deleted."""


@runtime_checkable
class PurgingStore(Protocol):
    """A store that purges exactly what somebody decided on, and ends what was interrupted."""

    def purge_trash(self, key: str, lives: Collection[Deleted]) -> Purged:
        """Delete these sessions of a key for good, and nothing else of it.

        What was brought back, deleted anew or begun since stays. Raises NoSuchSession where the
        trash has not all of them; then nothing was done.
        """
        ...

    def unfinished_purges(self) -> list[Trashed]:
        """What interrupted purges left: out of sight for good, and not yet deleted.

        The key and the uid are empty where nobody can tell any more. To purge the key again ends
        it, and so does `finish_purge`.
        """
        ...

    def finish_purge(self, uid: str) -> Purged:
        """End the interrupted purge of the session with this uid, and touch no other.

        Raises NoSuchSession where there is none.
        """
        ...


@runtime_checkable
class LeaseListStore(Protocol):
    """A store that can tell which sessions are leased."""

    def leased(self, keys: Collection[str]) -> set[str]:
        """Return those of the keys whose lease is held now, by any process."""
        ...


def leased_keys(store: Store, keys: Collection[str]) -> set[str]:
    """Return those of the keys whose lease is held now; none if the store cannot tell."""
    return store.leased(keys) if isinstance(store, LeaseListStore) else set()


@runtime_checkable
class MarkedStore(Protocol):
    """A store that tells all processes when something they keep beside it is out of date."""

    def mark(self, name: str) -> str:
        """The mark of this name, as it is now; empty where it was never changed."""
        ...

    def change_mark(self, name: str) -> None:
        """Make it another one than it ever was, durably. Raises StoreUnavailable, ReadOnly."""
        ...


def conversation_times(
    created: datetime, updated: datetime, *, meta: Mapping[str, Any], last_seq: int
) -> tuple[datetime, datetime]:
    """Return when a conversation began and was last continued, from the times of the session.

    An imported session has receipts in its meta, `imported`, with its times in the other program:
    it began then, and was last continued then until a message is added here.
    """
    if "imported" not in meta:
        return created, updated
    times = list(_imported_times(meta["imported"]))
    began = min([created, *(first for first, _, _ in times)])
    still = [last for _, last, end in times if end == last_seq]
    return began, max([began, *still]) if still else max(began, updated)


def _imported_times(receipts: object) -> Iterator[tuple[datetime, datetime, object]]:
    """Yield the two times of each receipt, and the last seq when it was made.

    Any client may write meta, so values that are no receipts are skipped.
    """
    for one in receipts if isinstance(receipts, list) else ():
        try:
            first, last = (datetime.fromisoformat(one[name]) for name in ("created", "updated"))
            if first.tzinfo is not None and last.tzinfo is not None:
                yield first.astimezone(UTC), last.astimezone(UTC), one.get("last_seq")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            continue
