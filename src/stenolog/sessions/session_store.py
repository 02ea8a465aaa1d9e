"""The face that an agent loop holds: a failed write is an answer, not an exception.

A loop must go on talking; so what failed is logged, counted and shown in `health()`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from stenolog.errors import NoSuchSession
from stenolog.records import Message
from stenolog.sessions.aliases import Aliases
from stenolog.stores.base import Store
from stenolog.stores.failures import Failures, SessionHealth

__all__ = ["JSONLBackend", "SessionHealth", "SessionStore"]

WORTH_A_REWRITE: Final = 64 * 1024
"""Below this size of the live log, `save` leaves it alone."""

_Found = TypeVar("_Found")
_logger = logging.getLogger("stenolog")


@runtime_checkable
class SessionStore(Protocol):
    """Sessions as an agent loop uses them. Only `save` raises.

    A write that appends answers with the seq, or None where it failed. Any other write answers
    True, or False where it failed. So `if not sessions.add_message(…)` is the test for all.
    """

    @property
    def store(self) -> Store | None:
        """The store beneath, for what this face lacks: undo, fork, follow …; None without one.

        Calls made there raise when they fail.
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

    def set_history(self, key: str, messages: Sequence[Message | Mapping[str, Any]]) -> bool:
        """Make exactly these messages visible. A failure gives False: all is as it was."""
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

    def close(self) -> None:
        """Let go of the store; a second call does nothing.

        A failure is logged, not raised: every write was on disk when it was answered.
        """
        ...


class JSONLBackend:
    """The SessionStore over any Store; it owns the store and closes it.

    A key that is no session, but an alias of one that was taken in from another program, opens
    that one (sessions/aliases.py).
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._closing = Lock()
        self._closed = False
        self._failures = Failures()
        aliases = Aliases(store)
        self._own_key = aliases.own_key
        self._key_to_read = aliases.key_to_read

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
            lambda: self._store.add_message(self._own_key(key), role, content, once=once),
        )

    def add_full_message(
        self, key: str, message: Message | Mapping[str, Any], *, once: str | None = None
    ) -> int | None:
        """Append a message; its seq. A failure gives None and is logged and counted."""
        return self._failures.write(
            "add_full_message",
            key,
            lambda: self._store.add_full_message(self._own_key(key), message, once=once),
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
        """What is read where this name leads; asked anew where that is nothing."""
        return get(self._key_to_read(key)) or get(self._own_key(key))

    def set_summary(self, key: str, text: str) -> bool:
        """Replace the summary. A failure gives False and is logged and counted."""
        return self._failures.change(
            "set_summary", key, lambda: self._store.set_summary(self._own_key(key), text)
        )

    def set_history(self, key: str, messages: Sequence[Message | Mapping[str, Any]]) -> bool:
        """Replace what is visible. A failure gives False and is logged and counted."""
        return self._failures.change(
            "set_history", key, lambda: self._store.set_history(self._own_key(key), messages)
        )

    def truncate_history(self, key: str, keep_last: int) -> bool:
        """Hide all but the last ones. A failure gives False and is logged and counted."""
        return self._failures.change(
            "truncate_history",
            key,
            lambda: self._store.truncate_history(self._own_key(key), keep_last),
        )

    def checkpoint(
        self, key: str, *, summary: str, upto: int, expect_floor: int | None = None
    ) -> bool:
        """Summary and floor in one step. A failure gives False and is logged and counted."""
        return self._failures.change(
            "checkpoint",
            key,
            lambda: self._store.checkpoint(
                self._own_key(key), summary=summary, upto=upto, expect_floor=expect_floor
            ),
        )

    def save(self, key: str) -> None:
        """Compact where more lies below the floor than above it and the log is 64 KiB or more.

        A failure is raised as the store raised it; a session that is not there is none.
        """
        key = self._own_key(key)
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

    def close(self) -> None:
        """Close the store, once. A failure is logged, not raised."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        try:
            self._store.close()
        except Exception:
            _logger.exception("close failed; every write was on disk when it was answered")
