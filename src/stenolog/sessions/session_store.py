"""The SessionStore facade for agent loops: a failed write returns None or False.

An agent loop must continue after a failure. Therefore failures are logged, counted and reported by
`health()`, not raised. `undo_last` undoes the newest change of a session.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from threading import Lock
from typing import Any, Final, Protocol, Self, TypeVar, runtime_checkable

from msgspec import Struct

from stenolog.errors import StenologError, UsageError
from stenolog.records import Health, Message, Span, Undo, UndoResult
from stenolog.sessions.aliases import Aliases
from stenolog.stores.arguments import check_store
from stenolog.stores.base import Store, find_info
from stenolog.stores.locks import ThreadLock
from stenolog.stores.snapshots import SnapshotMark

MIN_COMPACT_BYTES: Final = 64 * 1024
"""Minimum size of a live log, in bytes, for `save` to archive its hidden messages."""

_logger = logging.getLogger("stenolog")
_Result = TypeVar("_Result")


class SessionHealth(Struct, frozen=True, kw_only=True):
    """Whether the store works, and which failures occurred so far."""

    ok: bool
    """Whether the store is healthy and the newest write succeeded."""
    free_bytes: int | None
    """Free space of the store, in bytes; None if unknown or not applicable."""
    problems: tuple[str, ...]
    """Current or imminent problems, each with advice."""
    failed_writes: int
    """Number of writes that failed since the store was opened."""
    failed_reads: int
    """Number of reads that failed, and returned nothing, since the store was opened."""
    last_error: str | None
    """Text of the newest failure; None if nothing has failed."""


@runtime_checkable
class SessionStore(Protocol):
    """The sessions of an agent loop, as a context manager. Only `save` and `close` raise.

    A write that appends returns the seq, or None if it failed. Any other write returns True, or
    False if it failed. For example, `if not sessions.add_message(…)` detects every failure.
    """

    @property
    def store(self) -> Store:
        """The underlying store, for calls that this facade lacks, such as undo and fork.

        Calls of the store raise when they fail.
        """

    def add_message(
        self, key: str, role: str, content: Any, *, once: str | None = None
    ) -> int | None:
        """Append `{"role": role, "content": content}` and return its seq.

        Returns None on failure: keep the unsaved message and retry with the same `once`.
        """

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int | None:
        """Append one message unchanged and return its seq.

        Returns None on failure: keep the unsaved message and retry with the same `once`.
        """

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages with seq greater than `after`, at most the newest `last`.

        `full`: hidden messages too. Returns an empty list on failure.
        """

    def get_summary(self, key: str) -> str:
        """Return the summary of the oldest messages, which are hidden; an empty text on failure."""

    def set_summary(self, key: str, text: str) -> bool:
        """Replace only the summary. Returns False on failure: the old summary stays."""

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> bool:
        """Make exactly these messages visible. Returns False on failure: nothing changes.

        `expect_last`: fail unless this is the last seq, as `Store.set_history` does.
        """

    def truncate_history(self, key: str, keep_last: int) -> bool:
        """Hide all but the last `keep_last` visible messages; 0 or less hides all.

        Returns False on failure: nothing is hidden.
        """

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> bool:
        """Replace the summary and hide all messages up to the seq `upto`, atomically.

        `expect_floor`: fail unless the floor, up to which all messages are hidden, is this seq.
        Returns False on failure: nothing changes.
        """

    def save(self, key: str) -> None:
        """Archive hidden messages if there are enough of them; every message is on disk already.

        A failure is raised; the session stays complete and readable.
        """

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return a page of keys in byte order; an empty list on failure."""

    def health(self) -> SessionHealth:
        """Return the store's health and the failures so far. A failed check becomes a problem."""

    def close(self) -> SessionHealth:
        """Close the store and return its health before closing. A second call returns the same.

        `failed_writes` of the result counts the writes that were not stored. If closing fails, the
        store's error is raised and the next call tries again; every acknowledged write is stored
        nevertheless.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def check_sessions(sessions: object) -> None:
    """Raise UsageError unless `sessions` is a SessionStore."""
    if not isinstance(sessions, SessionStore):
        name = type(sessions).__name__
        raise UsageError(f"sessions= needs a SessionStore, as JSONLBackend(store), not {name}")


def fallback_reason(store: Store) -> str | None:
    """Return why sessions are not in the requested store; None if they are in that store."""
    reason = getattr(store, "reason", None)
    return reason if isinstance(reason, str) else None


class JSONLBackend:
    """A SessionStore that uses any Store. Closing the SessionStore closes the Store.

    A key that is only an alias opens the imported session with that alias (sessions/aliases.py).
    """

    def __init__(self, store: Store, *, session: str | None = None) -> None:
        """Create the facade. `session`: key of a session that is known to exist.

        Raises UsageError if `store` is not a Store.
        """
        check_store(store, "JSONLBackend")
        self._store = store
        self._close_mutex = Lock()
        self._health_at_close: SessionHealth | None = None
        self._closed = False
        self._aliases = Aliases(store)
        if session is not None:
            self._aliases.remember_session(session)
        self._count_mutex = ThreadLock()
        self._failed_writes = 0
        self._failed_reads = 0
        self._last_error: str | None = None
        self._newest_write_error: str | None = None
        """Text of the failure if the newest write failed, otherwise None."""

    def __repr__(self) -> str:
        return f"JSONLBackend({self._store!r})"

    @property
    def store(self) -> Store:
        """The underlying store; its calls raise when they fail, and do not resolve aliases."""
        return self._store

    def add_message(
        self, key: str, role: str, content: Any, *, once: str | None = None
    ) -> int | None:
        """Append a message and return its seq; None on failure. Logs and counts failures."""
        append = partial(self._store.add_message, role=role, content=content, once=once)
        return self._write("add_message", key, append, creates_session=True)

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int | None:
        """Append a message and return its seq; None on failure. Logs and counts failures."""
        append = partial(self._store.add_full_message, message=message, once=once)
        return self._write("add_full_message", key, append, creates_session=True)

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the messages by seq; an empty list on failure. Logs and counts failures."""
        read = partial(self._store.get_history, last=last, after=after, full=full)
        return self._read("get_history", key, lambda: self._read_session(key, read), default=[])

    def get_summary(self, key: str) -> str:
        """Return the summary; an empty text on failure. Logs and counts failures."""
        read = self._store.get_summary
        return self._read("get_summary", key, lambda: self._read_session(key, read), default="")

    def set_summary(self, key: str, text: str) -> bool:
        """Replace the summary; return False on failure. Logs and counts failures."""
        return self._change("set_summary", key, partial(self._store.set_summary, text=text))

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> bool:
        """Replace the visible messages; return False on failure. Logs and counts failures."""
        change = partial(self._store.set_history, messages=messages, expect_last=expect_last)
        return self._change("set_history", key, change)

    def truncate_history(self, key: str, keep_last: int) -> bool:
        """Hide all but the last messages; return False on failure. Logs and counts failures."""
        change = partial(self._store.truncate_history, keep_last=keep_last)
        return self._change("truncate_history", key, change)

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> bool:
        """Set the summary and hide messages; return False on failure. Logs and counts failures."""
        change = partial(
            self._store.checkpoint, summary=summary, upto=upto, expect_floor=expect_floor
        )
        return self._change("checkpoint", key, change)

    def save(self, key: str) -> None:
        """Archive hidden messages if they outnumber later messages and the log has at least 64 KiB.

        A failure of the store is raised; a missing session is no failure.
        """
        key = self._aliases.resolve_known(key)
        info = find_info(self._store, key)
        if info is None:
            return
        messages_below_floor = info.floor - info.archived
        messages_above_floor = info.last_seq - info.floor
        if messages_below_floor > messages_above_floor and info.bytes >= MIN_COMPACT_BYTES:
            self._store.compact(key)

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return a page of keys; an empty list on failure. Logs and counts failures."""
        read = partial(self._store.list_sessions, prefix=prefix, limit=limit, after=after)
        return self._read("list_sessions", None, read, default=[])

    def health(self) -> SessionHealth:
        """Return the store's health and the failures so far. A failed check becomes a problem."""
        try:
            health = self._store.admin.health()
        except StenologError as error:
            health = Health(ok=False, free_bytes=None, problems=(str(error),))
        except Exception as error:
            _logger.exception("health failed")
            health = Health(ok=False, free_bytes=None, problems=(repr(error),))
        with self._count_mutex:
            error_text = self._newest_write_error
            write_problems = (
                () if error_text is None else (f"the newest write failed: {error_text}",)
            )
            return SessionHealth(
                ok=health.ok and not write_problems,
                free_bytes=health.free_bytes,
                problems=(*health.problems, *write_problems),
                failed_writes=self._failed_writes,
                failed_reads=self._failed_reads,
                last_error=self._last_error,
            )

    def close(self) -> SessionHealth:
        """Close the store, and return the health that it had before. A failure is raised.

        A second call does nothing, or tries again if the first call failed.
        """
        with self._close_mutex:
            if self._health_at_close is None:
                self._health_at_close = self.health()
            if not self._closed:
                self._store.close()
                self._closed = True
            return self._health_at_close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- calls that do not raise -------------------------------------------------------------

    def _write(
        self, call: str, key: str, write: Callable[[str], _Result], *, creates_session: bool = False
    ) -> _Result | None:
        """Return the result of `write` for the session that `key` opens; None after a failure."""
        try:
            session_key = self._aliases.resolve_known(key)
            result = write(session_key)
            if creates_session:
                self._aliases.remember_session(session_key)
        except Exception as error:  # noqa: BLE001 - logged and counted
            text = _log_failure(call, key, error)
            with self._count_mutex:
                self._failed_writes += 1
                self._last_error = self._newest_write_error = text
            return None
        with self._count_mutex:
            self._newest_write_error = None
        return result

    def _change(self, call: str, key: str, change: Callable[[str], object]) -> bool:
        """Call `change` for the session that `key` opens; return whether the call succeeded."""

        def change_and_confirm(session_key: str) -> bool:
            change(session_key)
            return True

        return self._write(call, key, change_and_confirm) is not None

    def _read(
        self, call: str, key: str | None, read: Callable[[], _Result], *, default: _Result
    ) -> _Result:
        """Return the result of `read`, or `default` after a failure."""
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - logged and counted
            text = _log_failure(call, key, error, "; taken as empty")
        with self._count_mutex:
            self._failed_reads += 1
            self._last_error = text
        return default

    def _read_session(self, key: str, read: Callable[[str], _Result]) -> _Result:
        """Read the session that `key` opens; resolve the key again if the result is empty."""
        session_key = self._aliases.resolve_known(key)
        result = read(session_key)
        if result:
            # Not remembered: if another process deletes this session, its key may be an alias, and
            # the next write must then go to the session with the alias.
            return result
        self._aliases.forget_session(key)
        resolved_key = self._aliases.resolve_key(key)
        return result if resolved_key == session_key else read(resolved_key)


def _log_failure(call: str, key: str | None, error: Exception, effect_text: str = "") -> str:
    """Log a failed call and return its description. Unexpected errors get a traceback."""
    session_text = "" if key is None else f" of {key!r}"
    text = f"{call}{session_text} failed: {type(error).__name__}: {error}"
    is_expected = isinstance(error, StenologError)
    _logger.log(logging.ERROR, "%s%s", text, effect_text, exc_info=None if is_expected else error)
    return text


# --- undo ------------------------------------------------------------------------------------


def undo_last(store: Store, key: str) -> UndoResult:
    """Undo the newest change of a session. Raises NothingToUndo.

    If the change replaced messages, the answer to the new messages is hidden too, so that it
    does not follow the restored messages.
    """
    last_step = _read_last_step(store, key)
    if last_step is None or last_step.op != "replace":
        return store.undo(key)
    return store.undo(key, answered=_find_answer_span(store.get_history(key), last_step))


def _read_last_step(store: Store, key: str) -> Undo | None:
    """Return the step that `Store.undo` would undo; None if it is unknown."""
    try:
        mark = SnapshotMark(key=key, uid=store.info(key).uid)
        with store.admin.read_snapshot(mark) as reading:
            return reading.snapshot.undo[-1] if reading.snapshot.undo else None
    except StenologError:
        return None  # `Store.undo` raises the error


def _find_answer_span(history: Sequence[Message], step: Undo) -> Span | None:
    """Return the span of the answer that follows the messages that `step` changed, or None."""
    added_spans = [step.appended] if step.appended is not None else []
    last_seq = max((last for _, last in (*step.newly_hidden, *added_spans)), default=0)
    later_messages = (message for message in history if message.seq > last_seq)
    answer = takewhile(lambda message: getattr(message, "role", None) != "user", later_messages)
    seqs = [message.seq for message in answer]
    return (seqs[0], seqs[-1]) if seqs else None
