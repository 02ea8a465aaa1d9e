"""The SessionStore facade of an agent loop: a failed write returns None or False.

A loop must keep talking. Therefore failures are logged, counted and reported by `health()`, not
raised.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Final, Protocol, Self, TypeVar, runtime_checkable

from msgspec import Struct

from stenolog.errors import NoSuchSession, StenologError
from stenolog.records import Health, Message
from stenolog.sessions.aliases import Aliases
from stenolog.stores.base import Store
from stenolog.stores.locks import ThreadLock

__all__ = ["JSONLBackend", "SessionHealth", "SessionStore"]

MIN_COMPACT_BYTES: Final = 64 * 1024
"""Minimum size of the live log, in bytes, for `save` to compact it."""

_logger = logging.getLogger("stenolog")
_Result = TypeVar("_Result")


class SessionHealth(Struct, frozen=True, kw_only=True):
    """Whether the store works, and which failures occurred so far."""

    ok: bool
    """The store is healthy, and the newest write succeeded."""
    free_bytes: int | None
    """Free space of the store, in bytes; None if that does not apply or is unknown."""
    problems: tuple[str, ...]
    """Current or imminent problems, each with advice."""
    failed_writes: int
    """Number of writes that failed since the store was opened."""
    failed_reads: int
    """Number of reads that failed, and returned nothing, since the store was opened."""
    last_error: str | None
    """Text of the newest failure; None if there was none."""


@runtime_checkable
class SessionStore(Protocol):
    """Sessions as an agent loop uses them. A context manager. Only `save` and `close` raise.

    A write that appends returns the seq, or None if it failed. Any other write returns True, or
    False if it failed. So `if not sessions.add_message(…)` detects every failure.
    """

    @property
    def store(self) -> Store:
        """The underlying store, for calls that this facade lacks, such as undo and fork.

        Its calls raise when they fail.
        """
        ...

    def add_message(
        self, key: str, role: str, content: Any, *, once: str | None = None
    ) -> int | None:
        """Append `{"role": role, "content": content}` and return its seq.

        Returns None on failure: keep the unsaved message and retry with the same `once`.
        """
        ...

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int | None:
        """Append one message unchanged and return its seq.

        Returns None on failure: keep the unsaved message and retry with the same `once`.
        """
        ...

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the visible messages with seq greater than `after`, at most the `last` ones.

        `full`: hidden messages too. Returns an empty list on failure.
        """
        ...

    def get_summary(self, key: str) -> str:
        """Return the summary of the messages below the floor; an empty text on failure."""
        ...

    def set_summary(self, key: str, text: str) -> bool:
        """Replace only the summary. Returns False on failure: the old summary stays."""
        ...

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> bool:
        """Make exactly these messages visible. Returns False on failure: nothing changes.

        `expect_last`: fail if the last seq is not this one, as `Store.set_history` does.
        """
        ...

    def truncate_history(self, key: str, keep_last: int) -> bool:
        """Hide all but the last `keep_last` visible messages; 0 or less hides all.

        Returns False on failure: nothing is hidden.
        """
        ...

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> bool:
        """Replace the summary and hide all messages up to this seq, atomically.

        Returns False on failure, also if the floor is not `expect_floor`: then nothing changes.
        """
        ...

    def save(self, key: str) -> None:
        """Archive hidden messages if that is worth it; every message is on disk already.

        A failure is raised; the session stays complete and readable.
        """
        ...

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return a page of keys in byte order; an empty list on failure."""
        ...

    def health(self) -> SessionHealth:
        """Return the store's health and the failures so far; a failed check is a problem in it."""
        ...

    def close(self) -> SessionHealth:
        """Close the store and return its health before that. A second call only returns it again.

        Its `failed_writes` counts the writes that were not stored. If closing fails, the store's
        error is raised and the next call tries again; every acknowledged write is stored
        nevertheless.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...


def fallback_reason(store: Store) -> str | None:
    """Return why sessions are not in the requested store; None if they are."""
    reason = getattr(store, "because", None)
    return reason if isinstance(reason, str) else None


class JSONLBackend:
    """The SessionStore on any Store; it owns the store and closes it.

    A key that is not a session but an alias of an imported one opens that session
    (sessions/aliases.py).
    """

    def __init__(self, store: Store, *, session: str | None = None) -> None:
        """Create the facade. `session`: key of an existing session, which saves its lookup."""
        self._store = store
        self._closing = Lock()
        self._at_close: SessionHealth | None = None
        self._closed = False
        self._failures = _Failures()
        self._aliases = Aliases(store)
        if session is not None:
            self._aliases.note_session(session)

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
        return self._failures.write(
            "add_message",
            key,
            lambda: self._write_to(
                key,
                lambda resolve_key: self._store.add_message(resolve_key, role, content, once=once),
            ),
        )

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int | None:
        """Append a message and return its seq; None on failure. Logs and counts failures."""
        return self._failures.write(
            "add_full_message",
            key,
            lambda: self._write_to(
                key,
                lambda resolve_key: self._store.add_full_message(resolve_key, message, once=once),
            ),
        )

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """Return the messages by seq; an empty list on failure. Logs and counts failures."""
        return self._failures.read(
            "get_history",
            key,
            lambda: self._read_from(
                key,
                lambda resolve_key: self._store.get_history(
                    resolve_key, last=last, after=after, full=full
                ),
            ),
            default=[],
        )

    def get_summary(self, key: str) -> str:
        """Return the summary; an empty text on failure. Logs and counts failures."""
        return self._failures.read(
            "get_summary", key, lambda: self._read_from(key, self._store.get_summary), default=""
        )

    def _read_from(self, key: str, get: Callable[[str], _Result]) -> _Result:
        """Read the session that this key opens; resolve the key again if nothing is found."""
        found = get(self._aliases.key_to_read(key))
        if not found:
            self._aliases.forget_session(key)
            found = get(self._aliases.resolve_key(key))
        return found

    def _write_to(self, key: str, write: Callable[[str], _Result]) -> _Result:
        resolve_key = self._aliases.key_to_write(key)
        done = write(resolve_key)
        self._aliases.note_session(resolve_key)
        return done

    def set_summary(self, key: str, text: str) -> bool:
        """Replace the summary; return False on failure. Logs and counts failures."""
        return self._failures.change(
            "set_summary",
            key,
            lambda: self._store.set_summary(self._aliases.key_to_write(key), text),
        )

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> bool:
        """Replace the visible messages; return False on failure. Logs and counts failures."""
        return self._failures.change(
            "set_history",
            key,
            lambda: self._store.set_history(
                self._aliases.key_to_write(key), messages, expect_last=expect_last
            ),
        )

    def truncate_history(self, key: str, keep_last: int) -> bool:
        """Hide all but the last messages; return False on failure. Logs and counts failures."""
        return self._failures.change(
            "truncate_history",
            key,
            lambda: self._store.truncate_history(self._aliases.key_to_write(key), keep_last),
        )

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> bool:
        """Set summary and floor in one step; on failure log it, count it and return False."""
        return self._failures.change(
            "checkpoint",
            key,
            lambda: self._store.checkpoint(
                self._aliases.key_to_write(key),
                summary=summary,
                upto=upto,
                expect_floor=expect_floor,
            ),
        )

    def save(self, key: str) -> None:
        """Compact if more messages are below the floor than above and the log has 64 KiB or more.

        A failure of the store is raised; a missing session is no failure.
        """
        key = self._aliases.key_to_write(key)
        try:
            info = self._store.info(key)
        except NoSuchSession:
            return
        below = info.floor - info.archived
        above = info.last_seq - info.floor
        if below > above and info.bytes >= MIN_COMPACT_BYTES:
            self._store.compact(key)

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Return a page of keys; an empty list on failure. Logs and counts failures."""
        return self._failures.read(
            "list_sessions",
            None,
            lambda: self._store.list_sessions(prefix=prefix, limit=limit, after=after),
            default=[],
        )

    def health(self) -> SessionHealth:
        """Return the store's health and the failures here; a failed check is a problem in it."""
        return self._failures.health(self._store.health)

    def close(self) -> SessionHealth:
        """Close the store and return its health before that. A failure is raised.

        A second call does nothing, or tries again if the first one failed.
        """
        with self._closing:
            if self._at_close is None:
                self._at_close = self.health()
            if not self._closed:
                self._store.close()
                self._closed = True
            return self._at_close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Failures:
    """Wrapper that logs and counts failures of calls instead of raising them."""

    def __init__(self) -> None:
        self._mutex = ThreadLock()
        self._writes = 0
        self._reads = 0
        self._last_error: str | None = None
        self._write_error: str | None = None

    def write(self, call: str, key: str, write: Callable[[], _Result]) -> _Result | None:
        """Return the result of the write; None if it failed."""
        try:
            result = write()
        except StenologError as error:
            text = _describe(call, key, error)
            _logger.log(logging.ERROR, text)
        except Exception as error:
            text = _describe(call, key, error)
            _logger.exception(text)
        else:
            with self._mutex:
                self._write_error = None
            return result

        with self._mutex:
            self._writes += 1
            self._last_error = text
            self._write_error = f"the newest write failed: {text}"
        return None

    def change(self, call: str, key: str, change: Callable[[], object]) -> bool:
        """Return whether the change succeeded."""

        def changed() -> bool:
            change()
            return True

        return bool(self.write(call, key, changed))

    def read(
        self, call: str, key: str | None, read: Callable[[], _Result], *, default: _Result
    ) -> _Result:
        """Return the result of the read; `default` if it failed."""
        try:
            return read()
        except StenologError as error:
            text = _describe(call, key, error)
            _logger.log(logging.ERROR, "%s; taken as empty", text)
        except Exception as error:
            text = _describe(call, key, error)
            _logger.exception("%s; taken as empty", text)

        with self._mutex:
            self._reads += 1
            self._last_error = text
        return default

    def health(self, check: Callable[[], Health]) -> SessionHealth:
        """Return the store's health and the failures; a failed health check is a problem in it."""
        try:
            found = check()
        except StenologError as error:
            found = Health(ok=False, free_bytes=None, problems=(str(error),))
        except Exception as error:
            _logger.exception("health failed")
            found = Health(ok=False, free_bytes=None, problems=(repr(error),))

        with self._mutex:
            write_error = () if self._write_error is None else (self._write_error,)
            return SessionHealth(
                ok=found.ok and not write_error,
                free_bytes=found.free_bytes,
                problems=(*found.problems, *write_error),
                failed_writes=self._writes,
                failed_reads=self._reads,
                last_error=self._last_error,
            )


def _describe(call: str, key: str | None, error: Exception) -> str:
    suffix = "" if key is None else f" of {key!r}"
    return f"{call}{suffix} failed: {type(error).__name__}: {error}"
