"""The SessionStore facade of an agent loop: a failed write returns None or False.

A loop must keep talking. So failures are logged, counted and shown in `health()`, not raised.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar, runtime_checkable

from msgspec import Struct

from stenolog.errors import NoSuchSession, StenologError
from stenolog.records import Health, Message
from stenolog.sessions.aliases import Aliases
from stenolog.stores.base import Store
from stenolog.stores.locks import ThreadLock

__all__ = ["JSONLBackend", "SessionHealth", "SessionStore"]

WORTH_A_REWRITE: Final = 64 * 1024
"""Below this size of the live log, `save` leaves it alone."""

_logger = logging.getLogger("stenolog")
_Found = TypeVar("_Found")


class SessionHealth(Struct, frozen=True, kw_only=True):
    """Whether writes can be expected to be kept, and what went wrong so far."""

    ok: bool
    """The store says so, and the newest write succeeded."""
    free_bytes: int | None
    """Room left where the store lives; None where that has no meaning, or could not be asked."""
    problems: tuple[str, ...]
    """What is wrong now or soon will be, each with what to do."""
    failed_writes: int
    """How many writes failed since the store was opened."""
    failed_reads: int
    """How many reads fell back to nothing since the store was opened."""
    last_error: str | None
    """The newest failure in words; None where there was none."""


@runtime_checkable
class SessionStore(Protocol):
    """Sessions as an agent loop uses them. A context manager. Only `save` and `close` raise.

    A write that appends returns the seq, or None if it failed. Any other write returns True, or
    False if it failed. So `if not sessions.add_message(…)` detects every failure.
    """

    @property
    def store(self) -> Store:
        """The store below, for calls that this facade lacks, such as undo and fork.

        Its calls raise when they fail.
        """
        ...

    def add_message(
        self, key: str, role: str, content: Any, *, once: str | None = None
    ) -> int | None:
        """Append `{"role": role, "content": content}`; its seq.

        A failure gives None: keep the message in hand, and try again with the same `once`.
        """
        ...

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int | None:
        """Append one message, kept exactly as it is; its seq.

        A failure gives None: keep the message in hand, and try again with the same `once`.
        """
        ...

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """The visible messages by seq: those past `after`, of these the `last`; `full`: all.

        A failure gives an empty list.
        """
        ...

    def get_summary(self, key: str) -> str:
        """What stands for the messages below the floor. A failure gives an empty text."""
        ...

    def set_summary(self, key: str, text: str) -> bool:
        """Replace the summary and nothing else. A failure gives False: the old one stays."""
        ...

    def set_history(
        self,
        key: str,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        expect_last: int | None = None,
    ) -> bool:
        """Make exactly these messages visible. A failure gives False: all is as it was.

        `expect_last`: fail if the last seq is not this one, as `Store.set_history` does.
        """
        ...

    def truncate_history(self, key: str, keep_last: int) -> bool:
        """Hide all but the last visible ones; 0 or less hides all.

        A failure gives False: nothing is hidden.
        """
        ...

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> bool:
        """Replace the summary and hide everything up to this seq, in one step.

        A failure gives False, a floor that is not the expected one included: neither is done.
        """
        ...

    def save(self, key: str) -> None:
        """Archive what is hidden where that is worth it; every message is on disk already.

        A failure is raised; the session is complete and readable all the same.
        """
        ...

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """Keys in the order of their bytes, a page at a time. A failure gives an empty list."""
        ...

    def health(self) -> SessionHealth:
        """What the store says of itself, and what failed. A failure to ask is a problem in it."""
        ...

    def close(self) -> SessionHealth:
        """Close the store; return its health before that. A second call only returns it again.

        `failed_writes` in it counts the writes that were not stored. A failure to close is raised
        as the store raised it, and the next call tries again; every write that was acknowledged is
        stored all the same.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def fallback_reason(store: Store) -> str | None:
    """Return why sessions are not in the store that was asked for; None if they are."""
    reason = getattr(store, "because", None)
    return reason if isinstance(reason, str) else None


class JSONLBackend:
    """The SessionStore over any Store; it owns the store and closes it.

    A key that is no session, but an alias of one that was taken in from another program, opens
    that one (sessions/aliases.py).
    """

    def __init__(self, store: Store, *, session: str | None = None) -> None:
        """`session`: key of a session that exists, so that it need not be looked up."""
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
        """The store beneath; calls made there raise when they fail, and know no aliases."""
        return self._store

    def add_message(
        self, key: str, role: str, content: Any, *, once: str | None = None
    ) -> int | None:
        """Append a message; its seq. A failure gives None and is logged and counted."""
        return self._failures.write(
            "add_message",
            key,
            lambda: self._written(
                key, lambda own: self._store.add_message(own, role, content, once=once)
            ),
        )

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int | None:
        """Append a message; its seq. A failure gives None and is logged and counted."""
        return self._failures.write(
            "add_full_message",
            key,
            lambda: self._written(
                key, lambda own: self._store.add_full_message(own, message, once=once)
            ),
        )

    def get_history(
        self, key: str, *, last: int | None = None, after: int | None = None, full: bool = False
    ) -> list[Message]:
        """The messages by seq. A failure gives an empty list and is logged and counted."""
        return self._failures.read(
            "get_history",
            key,
            lambda: self._read(
                key, lambda own: self._store.get_history(own, last=last, after=after, full=full)
            ),
            otherwise=[],
        )

    def get_summary(self, key: str) -> str:
        """The summary. A failure gives an empty text and is logged and counted."""
        return self._failures.read(
            "get_summary", key, lambda: self._read(key, self._store.get_summary), otherwise=""
        )

    def _read(self, key: str, get: Callable[[str], _Found]) -> _Found:
        """Read where this key leads; resolve it again if there is nothing."""
        found = get(self._aliases.key_to_read(key))
        if not found:
            self._aliases.forget_session(key)
            found = get(self._aliases.own_key(key))
        return found

    def _written(self, key: str, write: Callable[[str], _Found]) -> _Found:
        own = self._aliases.key_to_write(key)
        done = write(own)
        self._aliases.note_session(own)
        return done

    def set_summary(self, key: str, text: str) -> bool:
        """Replace the summary. A failure gives False and is logged and counted."""
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
        """Replace what is visible. A failure gives False and is logged and counted."""
        return self._failures.change(
            "set_history",
            key,
            lambda: self._store.set_history(
                self._aliases.key_to_write(key), messages, expect_last=expect_last
            ),
        )

    def truncate_history(self, key: str, keep_last: int) -> bool:
        """Hide all but the last ones. A failure gives False and is logged and counted."""
        return self._failures.change(
            "truncate_history",
            key,
            lambda: self._store.truncate_history(self._aliases.key_to_write(key), keep_last),
        )

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> bool:
        """Summary and floor in one step. A failure gives False and is logged and counted."""
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
        """Compact where more lies below the floor than above it and the log is 64 KiB or more.

        A failure is raised as the store raised it; a session that is not there is none.
        """
        key = self._aliases.key_to_write(key)
        try:
            info = self._store.info(key)
        except NoSuchSession:
            return
        below = info.floor - info.archived
        above = info.last_seq - info.floor
        if below > above and info.bytes >= WORTH_A_REWRITE:
            self._store.compact(key)

    def list_sessions(
        self, *, prefix: str = "", limit: int | None = None, after: str | None = None
    ) -> list[str]:
        """A page of keys. A failure gives an empty list and is logged and counted."""
        return self._failures.read(
            "list_sessions",
            None,
            lambda: self._store.list_sessions(prefix=prefix, limit=limit, after=after),
            otherwise=[],
        )

    def health(self) -> SessionHealth:
        """The store's health and the failures here. A failure to ask is a problem in it."""
        return self._failures.health(self._store.health)

    def close(self) -> SessionHealth:
        """Close the store; return its health before that. A failure is raised.

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
    """Makes calls that do not raise: failures are logged and counted."""

    def __init__(self) -> None:
        self._counting = ThreadLock()
        self._writes = 0
        self._reads = 0
        self._last_error: str | None = None
        self._write_trouble: str | None = None

    def write(self, call: str, key: str, write: Callable[[], _Found]) -> _Found | None:
        """What the write gave; None where it failed."""
        try:
            result = write()
        except StenologError as error:
            words = _in_words(call, key, error)
            _logger.log(logging.ERROR, words)
        except Exception as error:
            words = _in_words(call, key, error)
            _logger.exception(words)
        else:
            with self._counting:
                self._write_trouble = None
            return result

        with self._counting:
            self._writes += 1
            self._last_error = words
            self._write_trouble = f"the newest write failed: {words}"
        return None

    def change(self, call: str, key: str, change: Callable[[], object]) -> bool:
        """Whether the change was made."""

        def changed() -> bool:
            change()
            return True

        return bool(self.write(call, key, changed))

    def read(
        self, call: str, key: str | None, read: Callable[[], _Found], *, otherwise: _Found
    ) -> _Found:
        """What the read gave; `otherwise` where it failed."""
        try:
            return read()
        except StenologError as error:
            words = _in_words(call, key, error)
            _logger.log(logging.ERROR, "%s; taken as empty", words)
        except Exception as error:
            words = _in_words(call, key, error)
            _logger.exception("%s; taken as empty", words)

        with self._counting:
            self._reads += 1
            self._last_error = words
        return otherwise

    def health(self, ask: Callable[[], Health]) -> SessionHealth:
        """What the store says of itself, and what failed; a failure to ask is a problem in it."""
        try:
            found = ask()
        except StenologError as error:
            found = Health(ok=False, free_bytes=None, problems=(str(error),))
        except Exception as error:
            _logger.exception("health failed")
            found = Health(ok=False, free_bytes=None, problems=(repr(error),))

        with self._counting:
            trouble = () if self._write_trouble is None else (self._write_trouble,)
            return SessionHealth(
                ok=found.ok and not trouble,
                free_bytes=found.free_bytes,
                problems=(*found.problems, *trouble),
                failed_writes=self._writes,
                failed_reads=self._reads,
                last_error=self._last_error,
            )


def _in_words(call: str, key: str | None, error: Exception) -> str:
    of = "" if key is None else f" of {key!r}"
    return f"{call}{of} failed: {type(error).__name__}: {error}"
